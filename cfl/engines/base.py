"""An engine carries out local steps: it turns a cohort's batch into losses and gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cfl.data.cohorts import CohortBatch, CohortBlock
from cfl.engines.cohort import Cohort
from cfl.engines.objective import Objective
from cfl.engines.products import Library, available
from cfl.engines.quadratic_pull import PullSteps
from cfl.engines.right_factors import RightFactor
from cfl.models.dropout import DropoutMasks
from cfl.randomness.generators import seed_for
from cfl.runtime.errors import ConfigError
from cfl.runtime.moving import moved
from cfl.runtime.option_checks import check_choices, check_integers

EngineKind = Literal["vmap", "workers"]
Compile = Literal["default", "reduce-overhead"]


class EngineOptions:
    """Settings for the computation of local steps. They change speed and memory, and results only by rounding.

    Args:
        kind: ``vmap`` computes the clients of a cohort together as stacked tensors, ``workers`` one by one on threads
            with one math thread each (CPU only); ``auto`` takes the fastest in a short trial.
        workers: number of threads of ``workers``; null takes torch's number of math threads (OMP_NUM_THREADS).
        stack: number of clients that a thread of ``workers`` computes together, for chains of linear layers; null takes
            the fastest number in a short trial.
        batch_last: whether ``workers`` hold images and feature maps with the batch last in memory, for chains of
            convolutions, pooling and linear layers. It is faster for small maps and slower for many wide ones. Every
            step holds the patches of all convolutions in memory. null takes the faster layout in a short trial, or
            false if the patches of all threads take more than 256 MiB.
        compile: torch.compile mode for ``vmap``; ``reduce-overhead`` replays CUDA graphs. null does not compile.
            Steps of cohorts of one client, and steps whose loss is not the plain mean cross-entropy of a client's own
            samples (replayed ones, weights or terms of methods, densities), are not compiled.
        matmul_precision: torch's float32 matmul precision in local steps; ``high`` allows TF32 on GPUs that have it.
            Other computations (tests, bases, sketches, aggregation) always use float32 products.
        products: library that multiplies matrices in hand-written steps of ``workers``. ``blas`` is torch's default.
            ``onednn`` is used for large products of whole batches if clients are not stacked. It is up to twice as fast
            if torch's BLAS is MKL and the processor is not from Intel. null takes the faster in a short trial.

    Raises:
        ConfigError: a value other than these, or one that does not go with ``kind``.
    """

    def __init__(
        self,
        kind: Literal["auto", "vmap", "workers"] = "auto",
        workers: int | None = None,
        stack: int | None = None,
        batch_last: bool | None = None,
        compile: Compile | None = None,
        matmul_precision: Literal["highest", "high", "medium"] = "highest",
        products: Library | None = None,
    ) -> None:
        check_choices("engine", ("auto", "vmap", "workers"), kind=kind)
        check_choices("engine", ("blas", "onednn"), or_null=True, products=products)
        check_choices("engine", ("default", "reduce-overhead"), or_null=True, compile=compile)
        check_choices("engine", ("highest", "high", "medium"), matmul_precision=matmul_precision)
        check_integers("engine", 1, or_null=True, workers=workers, stack=stack)
        if workers is not None and kind == "vmap":
            raise ConfigError("engine.workers", workers, "null with engine.kind vmap")
        if stack is not None and kind != "workers":
            raise ConfigError("engine.stack", stack, f"null with engine.kind {kind}")
        if batch_last is not None and kind != "workers":
            raise ConfigError("engine.batch_last", batch_last, f"null with engine.kind {kind}")
        if products == "onednn" and kind != "workers":
            raise ConfigError("engine.products", products, f"blas or null with engine.kind {kind}")
        if products == "onednn" and not available():
            raise ConfigError("engine.products", products, "blas or null: this build of torch has no oneDNN")
        if workers is not None and compile is not None:
            raise ConfigError("engine.workers", workers, "null with engine.compile, which is for vmap")
        if compile is not None and kind == "workers":
            raise ConfigError("engine.compile", compile, "null with engine.kind workers")
        self.kind, self.workers, self.stack, self.batch_last = kind, workers, stack, batch_last
        self.products, self.compile, self.matmul_precision = products, compile, matmul_precision


@dataclass(frozen=True)
class StepContext:
    """Arguments of a local step other than the cohort and the batch.

    Attributes:
        seed: the run's seed.
        fused_sgd: learning rate and weight decay of plain SGD if only the optimizer uses the gradients. The engine then
            takes the optimizer's step itself. None means that it leaves gradients on the parameters.
        objective: what a client minimises, given its logits.
        right_factors: weight name -> factors by which clients' gradients are multiplied from the right; only if
            :attr:`Engine.multiplies` is true.
        pulls: parameter name -> pull on the clients' weights, which the engine applies in its SGD step; only with
            ``fused_sgd``, and only if :attr:`Engine.pulls` is true.
        keeps_logits: whether to leave the step's logits at :attr:`Engine.logits`.
        purpose: key of the step's dropout masks; another pass over samples within the same step uses another one.
    """

    seed: int
    fused_sgd: tuple[float, float] | None = None
    objective: Objective = field(default_factory=Objective)
    right_factors: Mapping[str, RightFactor] = field(default_factory=dict)
    pulls: PullSteps = field(default_factory=dict)
    keeps_logits: bool = False
    purpose: str = "dropout"


class Engine(ABC):
    """Losses and gradients of a cohort's local step."""

    channels_last = False
    """Whether the cohort should hold convolution weights with the channels last in memory."""

    fuses_sgd = False
    """Whether the engine gains from taking the steps of plain SGD itself (:attr:`StepContext.fused_sgd`)."""

    multiplies = False
    """Whether the engine applies :attr:`StepContext.right_factors`, which is cheaper for it than for methods."""

    pulls = False
    """Whether the engine applies :attr:`StepContext.pulls` when it takes the optimizer's step itself."""

    logits: Tensor | None = None
    """Logits ``[k, B + M, O]`` of the last step's own and added samples, if :attr:`StepContext.keeps_logits` was set,
    until another pass. Those of padded samples are arbitrary."""

    @abstractmethod
    def losses(self, cohort: Cohort, batch: CohortBatch, context: StepContext) -> Tensor:
        """Each client's loss, ``[k]``; 0 for a client that has finished.

        Unless methods or the measure change the loss, it is the mean cross-entropy of the client's unmasked samples.
        """

    leaves_finished_clients = False
    """Whether :meth:`train` leaves a client as it is after its last step, while others of its cohort go on."""

    failed_step: int | None = None
    """The local step in which the last :meth:`train` failed, if it is not the cohort's present one; else None."""

    def train(self, cohort: Cohort, block: CohortBlock, context: StepContext) -> Tensor:
        """Take all local steps of a block, the optimizer's included; only with :attr:`StepContext.fused_sgd`.

        Returns:
            ``[k, S]``, each client's loss in each step as :meth:`losses` has it.
        """
        losses = []
        for number in range(len(block)):
            cohort.steps = block.first + number + 1  # an error names it
            losses.append(self.losses(cohort, block.step(number), context))
        return torch.stack(losses, 1)

    @abstractmethod
    def backward(self, total: Tensor, cohort: Cohort) -> None:
        """Leave the gradients of ``total``, the sum of :meth:`losses` and of terms of methods, on the parameters.

        If :meth:`losses` has already taken the optimizer's step, parameters get no gradient.
        """

    def gradients(self, cohort: Cohort, batch: CohortBatch, context: StepContext) -> dict[str, Tensor]:
        """Gradients of :meth:`losses` at the clients' present weights: name -> ``[k, ...]``, valid until the next call.

        Parameters, their own gradients and buffers do not change. Methods may therefore call this at any time, also
        under ``torch.no_grad``.
        """
        held = {name: parameter.grad for name, parameter in cohort.parameters.items()}
        buffers = {name: buffer.clone() for name, buffer in cohort.buffers.items()}
        try:
            with torch.enable_grad():
                total = self.losses(cohort, batch, replace(context, fused_sgd=None)).sum()
                for parameter in cohort.parameters.values():
                    parameter.grad = None
                self.backward(total, cohort)
            return {name: p.grad for name, p in cohort.parameters.items() if p.grad is not None}
        finally:
            for name, parameter in cohort.parameters.items():
                parameter.grad = held[name]
            for name, buffer in buffers.items():
                cohort.buffers[name].copy_(buffer)

    def close(self) -> None:  # noqa: B027  most engines have nothing to give back
        """End the engine's threads, if it has any."""


class Step(NamedTuple):
    """A local step of a cohort."""

    cohort: Cohort
    batch: CohortBatch
    context: StepContext

    def dropout_keys(self, clients: Iterable[int], whose: str = "") -> Tensor:
        """``[k]`` int64 keys of some clients' dropout masks; ``whose`` names samples that are not their own."""
        cohort, batch, context = self
        keys = [seed_for(context.seed, context.purpose + whose, cohort.round, c, batch.step) for c in clients]
        return moved(torch.tensor(keys, dtype=torch.int64), batch.index.device)

    def dropout_masks(self, masks: DropoutMasks, rows: range, count: int, whose: str = "") -> dict[str, Tensor]:
        """Dropout masks of some clients' samples: layer name -> ``[len(rows), count, ...]``.

        Args:
            masks: draws the masks.
            rows: the clients' rows in the cohort.
            count: number of samples of each client.
            whose: name of the samples, a part of the masks' keys; empty for the clients' own samples.
        """
        if not masks or not count:
            return {}
        keys = self.dropout_keys([self.cohort.clients[row] for row in rows], whose)
        return masks.draw(keys, count, next(iter(self.cohort.data.values())).dtype)

    def dropout_masks_of(self, masks: DropoutMasks, row: int, count: int) -> dict[str, Tensor]:
        """As :meth:`dropout_masks`, of one client's own samples: layer name -> ``[count, ...]``."""
        return {name: mask[0] for name, mask in self.dropout_masks(masks, range(row, row + 1), count).items()}

    def added_masks(self, masks: DropoutMasks, rows: range) -> dict[str, Tensor]:
        """As :meth:`dropout_masks`, for all samples that methods have added, in the order of ``batch.added``.

        Each lot of added samples has its own masks, keyed by its method and its number among the method's lots. The
        lot's place in the batch is no key, because it depends on padding and so on the other clients of the cohort.
        """
        lots: dict[int, int] = {}
        found: list[dict[str, Tensor]] = []
        for part in self.batch.added:
            lot = lots[part.source] = lots.get(part.source, -1) + 1
            whose = " of added samples" if (part.source, lot) == (1, 0) else f" of added samples, {part.source}.{lot}"
            drawn = self.dropout_masks(masks, rows, part.y.shape[1], whose)
            found += [drawn] if drawn else []
        return {name: torch.cat([drawn[name] for drawn in found], 1) for name in found[0]} if found else {}
