"""The base class of networks, and checks of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain, count
from typing import ClassVar

from torch import Tensor, nn

from cfl.metrics.measure import measure_of, measures_for
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_integers


class Network(nn.Module, ABC):
    """A network whose single output layer holds the outputs of all tasks: logits of classes, or numbers.

    The heads of several tasks are slices of :attr:`head`. Class masks decide which slice a sample may use, so the same
    network works in task-, class- and domain-incremental streams. Weights are in ``nn.Linear`` and ``nn.Conv2d`` layers
    only (beside normalisation), because methods that protect input spaces observe only these.
    Networks run under ``torch.func.functional_call`` and ``torch.func.vmap(..., randomness="different")`` with
    parameters and buffers stacked over clients, ``[K, ...]``.

    Args:
        input_shape: ``(C, H, W)`` of one image.
        num_outputs: outputs of all tasks together.

    Raises:
        ConfigError: a size is not positive.

    Attributes:
        predicts: kind of output for a sample: ``vector``, unless a subclass has another. It has to be the kind that the
            run's measure needs (:attr:`cfl.metrics.base.Measure.predicts`).
        fixed_digest: digest of weights that the network reads from a file and that checkpoints do not hold
            (:class:`cfl.models.frozen_vit.FrozenViT`). A checkpoint is resumed only with the same weights. None if the
            network has none.
    """

    predicts: ClassVar[str] = "vector"
    head: nn.Linear
    fixed_digest: str | None = None

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__()
        if len(input_shape) != 3 or min(input_shape) < 1:
            raise ConfigError("model.network.input_shape", input_shape, "three positive integers (C, H, W)")
        check_integers("model.network", 1, num_outputs=num_outputs)
        channels, height, width = input_shape
        self.input_shape = (channels, height, width)
        self.num_outputs = num_outputs

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` to the input ``[B, d]`` of the head."""

    def forward(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` to logits ``[B, num_outputs]``."""
        logits: Tensor = self.head(self.features(x))
        return logits

    def answers(self, x: Tensor, clients: Sequence[int] = (0,)) -> Tensor:
        """Return what tests score: the outputs, unless the network predicts something else than a ``vector``.

        Args:
            x: ``[B, C, H, W]``.
            clients: the clients over whose scores the mean is taken, if the same weights give other scores at every
                client.
        """
        outputs: Tensor = self(x)
        return outputs


def require_head(network: Network) -> None:
    """Refuse a network without the output layer that the measures of its kind of output need.

    Raises:
        ConfigError: ``model.network``, as for :meth:`cfl.metrics.base.Measure.check_head`.
    """
    for measure in measures_for(network.predicts):
        measure.check_head(network)


def require_predictions(network: nn.Module, scenario: str) -> None:
    """Refuse a network whose kind of output is not the one that the scenario's measure needs.

    Raises:
        ConfigError: the kinds differ, such as a classifier in a density run, or a density network in a classification
            run.
    """
    name, wanted, found = type(network).__name__, measure_of(scenario), getattr(network, "predicts", "vector")
    if found == wanted.predicts:
        return
    others = [other for measure in measures_for(found) for other in measure.scenarios]
    if wanted.predicts != "vector" or not others:
        raise ConfigError("model.network", name, wanted.network)
    raise ConfigError("data.scenario", scenario, f"{' or '.join(others)} with model.network {name}")


def require_one_name_each(network: nn.Module) -> None:
    """Refuse a network in which a module with weights has two names.

    ``torch.func.functional_call`` does not restore the weights of such a module, so that the global model would keep
    those of a client. Different modules that share a weight are allowed.

    Raises:
        ConfigError: a module has two names; the error says which.
    """
    first: dict[nn.Module, str] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        other = first.setdefault(module, name)
        if other != name and next(chain(module.parameters(), module.buffers()), None) is not None:
            found = f"{type(network).__name__}, whose module {other} is {name} as well"
            raise ConfigError("model.network", found, "modules under one name each; they may share weights")


def require_real(network: Network) -> None:
    """Refuse complex parameters, and complex buffers that are part of the model.

    Norms, products, noise and sums of integers would leave out their imaginary parts.

    Raises:
        ConfigError: ``model.network``; the error names the tensor.
    """
    for name, tensor in chain(network.named_parameters(), network.state_dict().items()):
        if tensor.is_complex():
            found = f"{type(network).__name__}, whose {name} is {str(tensor.dtype).removeprefix('torch.')}"
            valid = "real tensors [..., 2], which torch.view_as_complex turns into complex ones in the forward pass"
            raise ConfigError("model.network", found, valid)


def num_parameters(network: nn.Module) -> int:
    """Number of scalars in the parameters (what clients train); buffers are not counted."""
    return sum(parameter.numel() for parameter in network.parameters())


def final_map(network: Network, final_size: Callable[[int], int]) -> tuple[int, int]:
    """Height and width of the last feature map, for images of the network's ``input_shape``.

    Args:
        network: its ``Network.__init__`` has run; the error names its class.
        final_size: computes the side of the last map from the side of the image, both in pixels; non-decreasing, below
            1 if the map vanishes.

    Raises:
        ConfigError: the images are so small that a map vanishes; the error says the smallest side that works.
    """
    _, height, width = network.input_shape
    if min(final_size(height), final_size(width)) < 1:
        smallest, enough = 0, next(2**power for power in count() if final_size(2**power) >= 1)
        while smallest < enough:  # bisect knows no numbers above 2^63
            middle = (smallest + enough) // 2
            smallest, enough = (smallest, middle) if final_size(middle) >= 1 else (middle + 1, enough)
        given = f"{type(network).__name__} on {height} x {width} images"
        raise ConfigError("model.network", given, f"images of at least {smallest} x {smallest} pixels")
    return final_size(height), final_size(width)


def dropout_rates(dropout: list[float] | float | None, default: list[float]) -> list[float]:
    """One dropout probability per dropout layer of a network.

    Args:
        dropout: a list with one probability per layer, one number for all of them, or None for the default.
        default: the paper's probabilities, one per layer.

    Raises:
        ConfigError: the list has another length, or a probability lies outside [0, 1).
    """
    if dropout is None:
        return list(default)
    rates = [float(dropout)] * len(default) if isinstance(dropout, (int, float)) else [float(rate) for rate in dropout]
    if len(rates) != len(default) or not all(0 <= rate < 1 for rate in rates):
        raise ConfigError("model.network.dropout", dropout, f"one number, or a list of {len(default)}, each in [0, 1)")
    return rates
