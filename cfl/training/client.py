"""The LightningModule: hands Lightning's steps on to local work and scoring, and fills checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import Optimizer

from cfl.data.cohorts import CohortBatch, CohortBlock
from cfl.data.evaluation import EvaluationBatch
from cfl.engines.base import EngineOptions
from cfl.engines.choice import EngineChoice
from cfl.engines.cohort import Cohort
from cfl.engines.objective import Objective
from cfl.engines.one_pass import step_in_one_pass
from cfl.engines.scaled_steps import ELEMENTWISE_OPTIMIZERS
from cfl.federation.federation import Federation
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods.base import Method
from cfl.methods.combinations import check_optimizer
from cfl.methods.composition import Composition
from cfl.models.base import Network
from cfl.runtime import distributed
from cfl.runtime.errors import ConfigError
from cfl.training.blocks import steps_per_block
from cfl.training.engine_of_run import choose_engine
from cfl.training.evaluation import Scoring
from cfl.training.global_network import global_network
from cfl.training.gradient_clipping import clip_clients
from cfl.training.local_work import LocalWork
from cfl.training.step_watchers import StepWatchers


class Client(LightningModule):
    """Clients' local training, K side by side, and the global model they start from.

    ``network`` holds the global model; the clients being trained are the rows of :attr:`work`'s cohort. One training
    step is one local step of every client of the cohort, or a block of several. The FederatedOrchestrator callback runs
    the rounds.

    Args:
        network: class and options of the network, called with input shape and number of outputs.
        optimizer: the clients' optimizer, fresh for every client and round. It must treat weights elementwise.
        methods: name -> method; their hooks run in this order. Without methods, training is federated averaging.
        input_shape: ``(C, H, W)``; follows from the data.
        num_outputs: number of the network's outputs; follows from the data.
        seed: seed of the network's initial weights, which is the run's (in YAML ``seed_everything``).
        engine: how local steps are computed (in YAML the top-level key ``engine``).
        buffer: the clients' buffers, for methods that replay (in YAML the top-level key ``buffer``).

    Attributes:
        federation: the state of the experiment, which owns methods and buffers; None until the FederatedOrchestrator
            has built it.
        frozen: names of the network's parameters that require no gradient. They are neither trained nor sent.
        work: the clients' local work; None until training has started.
        engine_choice: the engine of local steps and the cohort's width; None until training has started.
    """

    def __init__(
        self,
        network: Callable[[tuple[int, int, int], int], Network],
        optimizer: OptimizerCallable,
        methods: dict[str, Method] | None = None,
        input_shape: tuple[int, int, int] = (1, 1, 1),
        num_outputs: int = 1,
        seed: int = 0,
        engine: EngineOptions | None = None,
        buffer: ReplayBuffer | None = None,
    ) -> None:
        super().__init__()
        self.input_shape = input_shape
        self.engine_options = EngineOptions() if engine is None else engine
        self.federation: Federation | None = None
        self.buffer = ReplayBuffer() if buffer is None else buffer
        self.methods = Composition(methods or {})
        self._make_optimizer = optimizer
        self.network, self.frozen = global_network(network, input_shape, num_outputs, self.methods, seed)
        self.work: LocalWork | None = None
        self.engine_choice: EngineChoice | None = None
        self._resumed_choice: dict[str, Any] | None = None
        self._loss_parts = self.methods.loss_parts()
        self._scoring: Scoring | None = None
        self._modes: dict[str, bool] = {}

    # Methods and buffer belong to the federation once it is built. Until then they are those given to the constructor.

    @property
    def methods(self) -> Composition:
        """The methods of the run. They can be exchanged until the federation is built."""
        return self._methods if self.federation is None else cast(Composition, self.federation.methods)

    @methods.setter
    def methods(self, methods: Composition) -> None:
        self._before_the_federation("methods")
        self._methods = methods

    @property
    def buffer(self) -> ReplayBuffer | None:
        """The clients' buffers, or their settings until the federation is built; None if no method replays."""
        return self._buffer if self.federation is None else self.federation.buffer

    @buffer.setter
    def buffer(self, buffer: ReplayBuffer) -> None:
        self._before_the_federation("buffer")
        self._buffer = buffer

    def _before_the_federation(self, what: str) -> None:
        if self.federation is not None:
            raise RuntimeError(f"{what}: the federation has its own, which nobody exchanges")

    def note_modes(self) -> None:
        """Note which modules are in training mode; some may be in evaluation mode on purpose."""
        self._modes = {name: module.training for name, module in self.named_modules()}

    def restore_modes(self) -> None:
        """Give every module the mode that was noted. Lightning does not if an error ends an evaluation."""
        for name, module in self.named_modules():
            module.training = self._modes.get(name, module.training)

    def require_federation(self) -> Federation:
        """:attr:`federation`, or a RuntimeError."""
        if self.federation is None:
            raise RuntimeError("no federation: add cfl.callbacks.FederatedOrchestrator to the Trainer")
        return self.federation

    def require_work(self) -> LocalWork:
        """:attr:`work`, or a RuntimeError."""
        if self.work is None:
            raise RuntimeError("no local work: configure_optimizers has not run")
        return self.work

    def require_cohort(self) -> Cohort:
        """The clients being trained, or a RuntimeError."""
        return self.require_work().cohort

    @property
    def mean_loss(self) -> float:
        """See :attr:`cfl.training.local_work.LocalWork.mean_loss`; NaN until training has started."""
        return math.nan if self.work is None else self.work.mean_loss

    # Training: Lightning's hooks, passed to local work. Hooks of every step only cast, because a check costs time.

    def configure_optimizers(self) -> Optimizer:
        """Allocate the stacked clients and give them one elementwise optimizer."""
        federation = self.require_federation()
        watchers = StepWatchers(self.trainer, self, Client)
        watched, blocks = watchers.of_gradients, not watchers.of_steps()
        objective = Objective(self._loss_parts, federation.measure)
        chosen = choose_engine(
            self.engine_options,
            federation,
            self.input_shape,
            str(self.trainer.precision),
            objective,
            self._optimizer_of,
            watched,
            self._resumed_choice,
            blocks,
        )
        self.engine_choice = chosen.choice
        precision, width = self.engine_options.matmul_precision, chosen.choice.width
        self.work = LocalWork(federation, chosen.engine, width, objective, precision, watched, blocks)
        of_all = distributed.gather(chosen.seconds_per_step if blocks else math.inf)
        # All processes must have equally many batches, so they use the slowest measurement.
        slowest = max((seconds for seconds in of_all if seconds < math.inf), default=math.inf)
        federation.data.steps_per_block = steps_per_block(slowest)
        return self._optimizer_of(self.work.cohort.parameters.values())

    def optimizer_for_its_options(self, clipping: str | None) -> Optimizer:
        """Return an optimizer with the options of the clients' optimizers, after checking them.

        Args:
            clipping: how gradients are clipped, ``norm`` or ``value``; None if they are not.

        Raises:
            ConfigError: the optimizer would mix clients, or a method does not allow it or this kind of clipping.
        """
        optimizer = self._optimizer_of([torch.nn.Parameter(torch.zeros(1))])
        name = type(optimizer).__name__
        if name not in ELEMENTWISE_OPTIMIZERS:
            raise ConfigError("model.optimizer", name, f"one of {sorted(ELEMENTWISE_OPTIMIZERS)}")
        check_optimizer(self.methods, optimizer, clipping)
        return optimizer

    def _optimizer_of(self, parameters: Iterable[torch.nn.Parameter]) -> Optimizer:
        try:
            optimizer = self._make_optimizer(parameters)
        except ValueError as error:  # torch names the option and its value
            raise ConfigError("model.optimizer", str(error), "options that the optimizer accepts") from error
        step_in_one_pass(optimizer)
        return optimizer

    def training_step(self, batch: CohortBatch | CohortBlock, batch_idx: int) -> Tensor:
        """Return the losses of a local step of the cohort, summed. For a block, take all its steps as well."""
        work = cast(LocalWork, self.work)
        if not batch.clients:  # Lightning needs a loss from every step
            return torch.zeros((), device=self.device, requires_grad=True)
        return work.train(batch) if isinstance(batch, CohortBlock) else work.losses(batch)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """See :meth:`cfl.training.local_work.LocalWork.backward`. A block's gradients were computed in its steps."""
        if not self._is_no_step:
            cast(LocalWork, self.work).backward(loss)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Let methods change the clients' gradients."""
        cast(LocalWork, self.work).adjust_gradients(optimizer)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip every client's gradient by itself: by its own norm, or by value."""
        if gradient_clip_val:
            gradients = self.require_cohort().gradients.values()
            clip_clients(gradients, gradient_clip_val, by_value=gradient_clip_algorithm == "value")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Take the optimizer's step, and rescale it for clients with learning rates of their own.

        For a block of steps only the closure is called, which takes all its steps.
        """
        if self._is_no_step:
            optimizer_closure()
            return
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        cast(LocalWork, self.work).rescale()

    @property
    def _is_no_step(self) -> bool:
        """Whether the optimizer has nothing to do: the round comes in blocks of steps, or has no clients."""
        plan = cast(LocalWork, self.work).plan
        return cast(Federation, self.federation).data.steps_per_block > 1 or (plan is not None and not plan.clients)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Delete the gradients, if the engine leaves any."""
        if cast(LocalWork, self.work).context.fused_sgd is None:
            optimizer.zero_grad()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as any module does, but ``_current_fx_name`` without torch's checks, to save time.

        Lightning sets this attribute to the name of the current hook about forty times a step."""
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def on_fit_end(self) -> None:
        """Close the engine, and let the data's loaders yield single steps again."""
        self.require_work().engine.close()
        self.require_federation().data.steps_per_block = 1

    # Evaluation: the global model, or every client's own.

    def validation_step(self, batch: EvaluationBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Score one task's test batch into the run's matrices."""
        self.scoring.score(batch)

    def test_step(self, batch: EvaluationBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """As :meth:`validation_step`."""
        self.validation_step(batch, batch_idx, dataloader_idx)

    @property
    def scoring(self) -> Scoring:
        """What evaluates the federation's models."""
        if self._scoring is None or self._scoring.federation is not self.require_federation():
            self._scoring = Scoring(self.require_federation())
        return self._scoring

    # Checkpoints: the network's state dict is the global model. The key "federation" has the rest of the federation.

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the federation and the engine, and drop the optimizer's state, which no client keeps between rounds."""
        checkpoint["federation"] = self.require_federation().state_dict()
        checkpoint["engine"] = None if self.engine_choice is None else self.engine_choice.to_dict()
        checkpoint["optimizer_states"] = []

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the federation.

        Raises:
            ConfigError: if the file is no checkpoint of a federation.
        """
        if "federation" not in checkpoint:
            raise ConfigError("ckpt_path", "a checkpoint without a federation", "a last.ckpt written by cfl fit")
        self.require_federation().load_state_dict(checkpoint["federation"])
        self._resumed_choice = checkpoint.get("engine")
