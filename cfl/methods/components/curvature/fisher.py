"""The diagonal of a network's Fisher information."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NoReturn, get_args

import torch
from torch import Tensor, nn

from cfl.methods.components.curvature.sample_gradients import squared_gradient_sums
from cfl.metrics.measure import ACCURACY, Measure
from cfl.models.density import densities_differ, is_density
from cfl.models.evaluation import evaluation_mode
from cfl.models.memory_format import channels_last, gains_by_channels_last
from cfl.runtime.errors import ConfigError

FisherKind = Literal["empirical", "expected", "sampled", "weighted"]
FISHER_KINDS: tuple[FisherKind, ...] = get_args(FisherKind)


def diagonal_fisher(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    kind: FisherKind = "empirical",
    outputs: Tensor | None = None,
    names: Sequence[str] | None = None,
    generator: torch.Generator | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    batch_statistics: bool = False,
    measure: Measure = ACCURACY,
) -> dict[str, Tensor]:
    """The diagonal ``F_i = mean_n E[(d log p(y | x_n, w) / d w_i)^2]``, with the network in evaluation mode.

    The expectation over labels y is one of

    - ``empirical``: y is the true label;
    - ``expected``: y follows the model's own distribution, exactly: one backward pass per output. The Fisher
      information proper, and the Gauss-Newton diagonal of the cross-entropy;
    - ``sampled``: one y per sample drawn from that distribution: an unbiased estimate of ``expected``;
    - ``weighted``: y is the true label, and its squared gradient is multiplied by ``p(y | x)``: the true label's term
      of ``expected``. The EWC of the mammoth library does the same.

    The first, third and fourth cost a forward and a backward pass over the samples and a product for every layer's
    squares: about one epoch of training; see :mod:`cfl.methods.components.curvature.sample_gradients`.

    For a network that estimates a density, the result is ``mean_n (d log p(x_n, w) / d w_i)^2`` of the samples
    themselves, which is ``empirical``; p is computed from the network's logits, for MADE those of its first order. With
    any other measure than accuracy, the result is the mean squared gradient of the measure's loss, which is
    ``empirical`` as well.

    Args:
        network: images ``[B, C, H, W]`` to logits ``[B, O]``, each row from its own sample alone.
        tensors: parameters and buffers to compute with, by name; missing ones are taken from the network.
        batches: ``[B, C, H, W]`` inputs and ``[B]`` int64 output indices.
        kind: the labels; ``empirical`` where clients do not classify (:func:`check_fisher`).
        outputs: ``[O]`` bool, the outputs over which the softmax is taken, or None for all. Parameters that affect only
            the other outputs get zero.
        names: the parameters w_i; all if not given.
        generator: for ``sampled``, on the CPU; numbers are drawn in the order of the samples.
        reduction: ``mean`` or ``sum`` over samples.
        batch_statistics: BatchNorm layers that are in training mode normalise by each batch's own statistics, taken as
            constants, instead of the running ones; the result then depends on how samples are cut into batches.
        measure: the run's.

    Returns:
        name -> tensor shaped and typed as the parameter, entries at least 0.

    Raises:
        ValueError: no samples, ``sampled`` without a generator, or a label that is not among ``outputs``.
    """
    if kind == "sampled" and generator is None:
        raise ValueError("kind = 'sampled' draws labels: give it a generator")
    density = is_density(network)
    wanted = [n for n, _ in network.named_parameters()] if names is None else list(names)
    total: dict[str, Tensor] = {}
    samples, turned = 0, False
    for x, y in batches:
        if not samples:
            weights = _turned(network, tensors)
            with evaluation_mode(network):
                turned = gains_by_channels_last(network, x, weights)
            tensors = weights if turned else tensors
        x = channels_last(x) if turned else x
        if density:
            scores = _scores_of_bits(x)
        elif measure.is_cross_entropy:
            scores = _scores(kind, y, outputs, generator)
        else:
            scores = _scores_of_loss(measure, y)
        sums = squared_gradient_sums(network, tensors, x, scores, wanted, batch_statistics)
        # In float32 at least: sums of half precision stop growing after some hundred batches.
        wide = {name: value.to(torch.promote_types(value.dtype, torch.float32)) for name, value in sums.items()}
        total = {name: total[name].add_(value) for name, value in wide.items()} if total else wide
        samples += len(x)
    if samples == 0:
        raise ValueError("a Fisher information of no samples")
    if reduction == "mean":
        total = {name: value.div_(samples) for name, value in total.items()}
    return {name: value.to(sums[name].dtype) for name, value in total.items()}


def _turned(network: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters and buffers, with channels last in the weights of convolutions.

    Pooling and convolutions of small maps, with images in the same format, then take two thirds of the time.
    """
    weights = {name: tensors.get(name, own) for name, own in network.named_parameters() if own.ndim == 4}
    return {**tensors, **{name: channels_last(weight.detach()) for name, weight in weights.items()}}


def check_fisher(
    kind: FisherKind,
    network: nn.Module,
    key: str,
    measure: Measure,
    input_shape: Sequence[int],
    names: Sequence[str],
) -> None:
    """Refuse, before training, a Fisher information that :func:`diagonal_fisher` cannot compute, by a trial.

    Args:
        kind: the labels.
        network: the run's network.
        key: key of the option, for the error.
        measure: the run's.
        input_shape: ``(C, H, W)``.
        names: the parameters whose Fisher information will be needed.

    Raises:
        ConfigError: naming ``key``; for masks that differ by client, because the network uses client 0's masks outside
            of local training; or if the network cannot be differentiated in evaluation mode.
    """
    if densities_differ(network):
        value = getattr(network, "synchronised", False)
        raise ConfigError("model.network.synchronised", value, "true where Fisher information is measured")
    if is_density(network) and kind != "empirical":
        raise ConfigError(key, kind, "empirical where a density is estimated: there are no labels")
    if not measure.is_cross_entropy and kind != "empirical":
        raise ConfigError(key, kind, f"empirical where runs measure {measure.words}: there are no classes to draw")
    if names:
        try:
            depends = _differentiated(network, input_shape, names)
        except Exception as error:  # whatever a user's forward pass may raise
            first_line = str(error).partition("\n")[0]
            _refuse(network, key, f"{type(error).__name__}: {first_line}", error)
        if not depends:
            _refuse(network, key, "outputs without gradients")


def _refuse(network: nn.Module, key: str, why: str, error: Exception | None = None) -> NoReturn:
    valid = f"a network that can be differentiated in evaluation mode, for {key}"
    raise ConfigError("model.network", f"{type(network).__name__}: {why}", valid) from error


def _differentiated(network: nn.Module, input_shape: Sequence[int], names: Sequence[str]) -> bool:
    """Differentiate a copy of the network at two samples; returns whether its outputs depend on the parameters."""
    trial = copy.deepcopy(network)
    some = next(trial.parameters())
    x = torch.zeros(2, *input_shape, dtype=some.dtype, device=some.device)
    with torch.random.fork_rng(devices=[some.device] if some.device.type == "cuda" else []):
        squared_gradient_sums(trial, {}, x, lambda logits: [torch.ones_like(logits)], names)
        trial.requires_grad_(False)
        for name in names:
            trial.get_parameter(name).requires_grad_()
        with torch.enable_grad(), evaluation_mode(trial):
            depends: bool = trial(x).requires_grad
    return depends


def _scores_of_bits(x: Tensor) -> Callable[[Tensor], Iterator[Tensor]]:
    """A function of logits that yields ``d log p(x) / d logits = x - sigmoid(logits)``."""

    def scores(logits: Tensor) -> Iterator[Tensor]:
        yield x.flatten(1).to(logits.dtype) - logits.sigmoid()

    return scores


def _scores_of_loss(measure: Measure, y: Tensor) -> Callable[[Tensor], Iterator[Tensor]]:
    """A function of outputs that yields minus the gradient of each sample's loss with respect to them."""

    def scores(outputs: Tensor) -> Iterator[Tensor]:
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(measure.losses(leaf, y, None, None).sum(), leaf)
        yield -gradient

    return scores


def _scores(
    kind: FisherKind, y: Tensor, outputs: Tensor | None, generator: torch.Generator | None
) -> Callable[[Tensor], Iterator[Tensor]]:
    """A function of logits that yields ``sqrt(weight) d log p(y) / d logits = sqrt(weight) (e_y - p)`` for each y."""

    def scores(logits: Tensor) -> Iterator[Tensor]:
        allowed = None if outputs is None else outputs.to(logits.device)
        if allowed is not None:
            if not bool(allowed[y].all()):
                raise ValueError(f"label {int(y[~allowed[y]][0])} is not among the outputs in the loss")
            logits = logits.masked_fill(~allowed, -torch.inf)
        p = logits.softmax(1)
        if kind == "expected":
            classes = range(p.shape[1]) if allowed is None else allowed.nonzero().flatten().tolist()
            for label in classes:
                yield _score(p, torch.full_like(y, label)) * p[:, label, None].sqrt()
        elif kind == "sampled":
            yield _score(p, drawn_labels(p, generator))
        elif kind == "weighted":
            yield _score(p, y) * p.gather(1, y[:, None]).sqrt()
        else:
            yield _score(p, y)

    return scores


def _score(p: Tensor, y: Tensor) -> Tensor:
    """``e_y - p``, ``[B, O]``."""
    return -p.scatter_add(1, y[:, None], p.new_full((1, 1), -1.0).expand(len(y), 1))


def drawn_labels(p: Tensor, generator: torch.Generator | None) -> Tensor:
    """One label per row of the probabilities ``p [B, O]``, from one uniform number each, drawn on the CPU."""
    uniform = torch.rand(len(p), 1, generator=generator, dtype=torch.float64)
    # On the CPU, because torch has no deterministic cumulative sum on a GPU (trainer.deterministic).
    share = p.double().cpu().cumsum(1)
    # Scaled by the last cumulative sum, so that rounding never draws an output without probability.
    return (share <= uniform * share[:, -1:]).sum(1).to(p.device)
