"""The LightningModule: local training of one cohort of clients, evaluation of the model(s) they end up with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from cfl.data.cohorts import CohortBatch
from cfl.data.evaluation import EvaluationBatch
from cfl.engines.base import Engine, EngineOptions, StepContext
from cfl.engines.choice import EngineChoice, build_engine, candidates, from_dict
from cfl.engines.cohort import Cohort
from cfl.engines.objective import Objective
from cfl.engines.probe import Measured, probe
from cfl.engines.scaled_steps import ScaledSteps
from cfl.engines.trials import Trials
from cfl.engines.updates import plain_sgd
from cfl.federation.federation import Federation
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods.base import Method
from cfl.methods.composition import Composition, Factors, Pulls
from cfl.models.base import Network, require_head, require_one_name_each
from cfl.models.batchnorm import convert_batchnorm, unmaskable_layers
from cfl.models.density import is_density
from cfl.models.dropout import convert_dropout
from cfl.randomness.generators import seed_for
from cfl.runtime import distributed
from cfl.runtime.error_context import Located
from cfl.runtime.errors import ConfigError
from cfl.runtime.precision import full_precision, matmul_precision
from cfl.training.evaluation import Scoring

ELEMENTWISE_OPTIMIZERS = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"}
)
"""Optimizers that treat every weight by itself, so that stacked clients do not mix."""


class Client(LightningModule):
    """Clients' local training, K side by side, and the global model they start from.

    ``network`` holds the global model; the clients being trained are the rows of :attr:`cohort`. One training step is
    one local step of every client of the cohort. The rounds themselves are run by the FederatedOrchestrator callback.

    Args:
        network: class and options of the network, called with input shape and number of outputs.
        optimizer: the clients' optimizer, fresh for every client and round; one that treats weights elementwise.
        methods: name -> method; their hooks run in this order. Empty is federated averaging.
        input_shape: ``(C, H, W)``; follows from the data.
        num_outputs: follows from the data.
        seed: the run's seed (in YAML ``seed_everything``).
        engine: how local steps are computed (in YAML the top-level key ``engine``).
        buffer: the clients' buffers, for methods that replay (in YAML the top-level key ``buffer``).

    Attributes:
        loss_sums: ``[2]``, sum of the finite losses of local steps since :meth:`reset_loss`, and how many they are.
        frozen: names of the network's parameters that require no gradient: nobody trains or sends them.
        engine_choice: what computes local steps, and how many clients side by side; known once training has started.
        engine_trials: what was measured to find that out, if anything.
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
        self.seed = seed
        self.input_shape = input_shape
        self.engine_options = EngineOptions() if engine is None else engine
        self.buffer = ReplayBuffer() if buffer is None else buffer
        self.methods = Composition(methods or {})
        self._make_optimizer = optimizer
        with torch.random.fork_rng():
            torch.manual_seed(seed_for(seed, "initialise network"))
            self.network = convert_dropout(convert_batchnorm(network(input_shape, num_outputs)))
            require_one_name_each(self.network)
            if not is_density(self.network):
                require_head(self.network)
            before = _frozen_parameters(self.network)
            self.methods.extend(self.network, seed)
        mixing = unmaskable_layers(self.network)
        if mixing:
            raise ConfigError("model.network", mixing, "a network whose batch statistics can leave out padded samples")
        self.frozen = _frozen_parameters(self.network)
        if thawed := before - self.frozen:
            valid = "a network without frozen parameters in layers that the methods replace"
            raise ConfigError("model.network", sorted(thawed), valid)
        # The global model moves by the server's hand alone.
        self.network.requires_grad_(False)
        self.federation: Federation | None = None
        self.cohort: Cohort | None = None
        self.engine: Engine | None = None
        self.engine_choice: EngineChoice | None = None
        self.engine_trials: list[Measured] = []
        self._resumed_choice: dict[str, Any] | None = None
        self._objective = Objective(self.methods.loss_parts(), is_density(self.network))
        self._plain_objective = Objective(density=self._objective.density)
        self._step_context = StepContext(seed, objective=self._objective)
        self._scaled_steps: ScaledSteps | None = None
        self._frozen_in_cohort: frozenset[str] = frozenset()
        self.local_step = 0
        self._located = Located(self._step_that_failed)
        self.loss_sums = torch.zeros(2)
        self._scoring: Scoring | None = None

    # Training: one cohort's local steps.

    def configure_optimizers(self) -> Optimizer:
        """Allocate the stacked clients and give them one elementwise optimizer.

        Raises:
            ConfigError: if the optimizer would mix clients, or a method does not allow it or how gradients are clipped.
        """
        data = self.require_federation().data
        self._check_optimizer(self._optimizer_of([torch.nn.Parameter(torch.zeros(1))]))
        choice = self.engine_choice = self._choose_engine()
        data.schedule.settle_width(choice.width, choice.most_padding)
        trials = {str(trial.choice): trial.seconds_per_client_step for trial in self.engine_trials}
        self.require_federation().engine = {**choice.to_dict(), "seconds_per_client_step_in_trials": trials}
        self.engine = build_engine(
            choice,
            self.network,
            self.input_shape,
            self.engine_options,
            data.schedule.batch_size,
            by_hand=self._objective.of_logits,
        )
        self.cohort = Cohort(self.network, choice.width, data.outputs, self.engine.channels_last)
        self.cohort.gradients_on = self._gradients_on
        self.methods.attend(self.cohort)
        self.loss_sums = torch.zeros(2, device=self.device)
        return self._optimizer_of(self.cohort.parameters.values())

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if name not in ELEMENTWISE_OPTIMIZERS:
            raise ConfigError("model.optimizer", name, f"one of {sorted(ELEMENTWISE_OPTIMIZERS)}")
        trainer: Any = self.trainer
        clipping = (trainer.gradient_clip_algorithm or "norm") if trainer.gradient_clip_val else None
        self.methods.check_optimizer(optimizer, clipping)

    def _optimizer_of(self, parameters: Iterable[torch.nn.Parameter]) -> Optimizer:
        try:
            return self._make_optimizer(parameters)
        except ValueError as error:  # torch names the option and its value
            raise ConfigError("model.optimizer", str(error), "options that the optimizer accepts") from error

    def _choose_engine(self) -> EngineChoice:
        """What the settings say, the checkpoint's choice, or the fastest in a short trial on the next round's data."""
        data = self.require_federation().data
        width, most = data.schedule.cohort_width, data.rounds.most_clients
        if not isinstance(width, int):
            most = -(-most // distributed.count())  # of clients with alike samples: who has fewer may have more of them
        open_choices = candidates(
            self.engine_options,
            width if isinstance(width, int) else None,
            most,
            self.network,
            self.input_shape,
            str(self.trainer.precision),
            data.schedule.batch_size,
            self._objective.of_logits,
        )
        settled = open_choices[0] if len(open_choices) == 1 else from_dict(self._resumed_choice, open_choices)
        # What is open depends on a process's math threads: if one needs a trial, the others must be in it.
        everyones = distributed.gather(settled)
        if everyones[0] is not None and None not in everyones:
            return everyones[0]
        next_round = min(self.require_federation().round, data.num_rounds - 1)
        trials = Trials(
            data,
            next_round,
            self.network,
            self.input_shape,
            self.engine_options,
            self._optimizer_of,
            self._at_once,
            self._objective.of_logits,
        )
        self.engine_trials = probe(open_choices, trials.of, trials.client_steps_of_run)
        return distributed.from_first(self.engine_trials[0].choice)

    def _at_once(self, optimizer: Optimizer) -> tuple[float, float] | None:
        """Learning rate and weight decay, if an engine may take the optimizer's step without leaving gradients.

        That is so for plain SGD whose weight decay leaves something of the weights, unless a method, clipping or a
        callback wants to see the gradients.
        """
        pulls, factors = self._left_to_engine()
        if self.methods.changing_gradients() and not (pulls or factors):
            return None
        trainer: Any = self.trainer
        looks = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
        if trainer.gradient_clip_val or any(is_overridden(hook, c) for c in trainer.callbacks for hook in looks):
            return None
        plain = plain_sgd(optimizer)
        return None if plain is not None and plain[0] * plain[1] >= 1 else plain

    def _left_to_engine(self) -> tuple[Pulls, Factors]:
        if self.engine is None:  # one is being chosen
            return self.methods.left_to_engine(False, False)
        return self.methods.left_to_engine(self.engine.multiplies, self.engine.pulls)

    def require_federation(self) -> Federation:
        """:attr:`federation`, which must be there.

        Raises:
            RuntimeError: it is not.
        """
        if self.federation is None:
            raise RuntimeError("no federation: add cfl.callbacks.FederatedOrchestrator to the Trainer")
        return self.federation

    def require_cohort(self) -> Cohort:
        """:attr:`cohort`, which must be there.

        Raises:
            RuntimeError: it is not.
        """
        if self.cohort is None:
            raise RuntimeError("no cohort: configure_optimizers has not run")
        return self.cohort

    def training_step(self, batch: CohortBatch, batch_idx: int) -> Tensor:
        """Sum over the cohort of each client's loss on its own batch.

        Raises:
            RuntimeError: naming round, task, clients and step, with the failure as its cause.
        """
        cohort, buffer = self.require_cohort(), self.require_federation().buffer
        self.local_step, cohort.steps = batch.step, batch.step + 1
        if batch.opens:
            self._begin_cohort()
        with self._located:
            with matmul_precision(self.engine_options.matmul_precision):
                batch = self._extended(batch)
                losses = self._engine.losses(cohort, batch, self._step_context)
            self._record(losses.detach(), batch)
            if buffer is not None:
                logits = self._engine.logits if self._step_context.keeps_logits else None
                buffer.offer(cohort, batch, None if logits is None else logits[:, : batch.mask.shape[1]].detach())
            losses = self.methods.penalties(losses)
        return losses.sum()

    def _begin_cohort(self) -> None:
        """What holds for all steps of the clients that have just been opened."""
        methods, buffer = self.methods, self.require_federation().buffer
        optimizer = cast(Optimizer, self.optimizers(use_pl_optimizer=False))
        self._scaled_steps = ScaledSteps.of(methods.step_factors(), self.require_cohort().buffers)
        self._frozen_in_cohort = self.frozen | methods.frozen_parameters()
        steps_at_once = self._engine.steps_at_once and self._scaled_steps is None and not self._frozen_in_cohort
        at_once = self._at_once(optimizer) if steps_at_once else None
        wanted, factors = self._left_to_engine()
        pulls = {} if at_once is None else {name: pull.step(*at_once) for name, pull in wanted.items()}
        keeps_logits = buffer is not None and buffer.wants_logits
        self._step_context = StepContext(self.seed, at_once, self._objective, factors, pulls, keeps_logits)

    def _extended(self, batch: CohortBatch) -> CohortBatch:
        """The step with what methods add to it; the cohort knows which outputs have a part in it."""
        cohort = self.require_cohort()
        batch = self.methods.extend_batch(batch)
        if batch.tasks_of_own is not None:
            cohort.use_outputs(batch.task_ids, batch.mask)
        for added in batch.added:
            cohort.use_outputs(added.tasks, added.mask)
        return batch

    def _gradients_on(self, batch: CohortBatch, purpose: str) -> dict[str, Tensor]:
        context = StepContext(self.seed, objective=self._plain_objective, purpose=purpose)
        found = self._engine.gradients(self.require_cohort(), batch.opened(), context)
        return {name: gradient for name, gradient in found.items() if name not in self._frozen_in_cohort}

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Gradients of the last :meth:`training_step`, by the engine; none of parameters that are frozen."""
        with self._located, matmul_precision(self.engine_options.matmul_precision):
            self._engine.backward(loss, self.require_cohort())
        for name in self._frozen_in_cohort:
            # Not zero: optimizers leave alone what has no gradient, and apply weight decay to what has one.
            self.require_cohort().parameters[name].grad = None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """As any module's; then clients that learn at another rate take back, or add, what that makes of their step."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self._scaled_steps is not None:
            self._scaled_steps.rescale()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Nothing where the engine leaves no gradients."""
        if self._step_context.at_once is None:
            optimizer.zero_grad()

    def __setattr__(self, name: str, value: Any) -> None:
        """As any module; but Lightning notes the hook it is in some forty times a step, which is no parameter."""
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def on_fit_end(self) -> None:
        """Give the engine's threads back."""
        self._engine.close()

    @property
    def _engine(self) -> Engine:
        if self.engine is None:
            raise RuntimeError("no engine: configure_optimizers has not run")
        return self.engine

    def _step_that_failed(self) -> str:
        cohort = self.require_cohort()
        who = f"local step {self.local_step} of clients {list(cohort.clients)}"
        return f"{who} failed in round {cohort.round} (task {cohort.task})"

    def _record(self, losses: Tensor, batch: CohortBatch) -> None:
        """Add up losses and how many they are, on the device: nobody waits for them before the round is over."""
        counted = losses.isfinite()  # who trains to NaN is left out, or the run stops
        if batch.padded:
            counted &= torch.any(batch.mask, dim=1)
        self.loss_sums += torch.stack([torch.where(counted, losses, 0.0).sum(), counted.sum().to(losses.dtype)])

    def reset_loss(self) -> None:
        """Start a new mean for :attr:`mean_loss`."""
        self.loss_sums.zero_()

    @property
    def mean_loss(self) -> float:
        """Mean of the finite losses of the round's local steps so far, every client's step counting once; else NaN."""
        total, count = self.loss_sums.tolist()
        return total / count if count else math.nan

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Let methods change the clients' gradients.

        Raises:
            RuntimeError: as :meth:`training_step`.
        """
        with self._located:
            self.methods.adjust_gradients()
            if self._scaled_steps is not None:
                self._scaled_steps.remember(self.require_cohort().parameters)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip every client's gradient by itself: by its own norm, or by value."""
        if not gradient_clip_val:
            return
        gradients = list(self.require_cohort().gradients.values())
        if gradient_clip_algorithm == "value":
            for gradient in gradients:
                gradient.clamp_(-gradient_clip_val, gradient_clip_val)
            return
        norms = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in gradients]).sum(0).sqrt()
        factors = (gradient_clip_val / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))

    # Evaluation: the global model, or every client's own.

    def validation_step(self, batch: EvaluationBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count correct predictions of one task's test batch into the accuracy matrix, or add up its likelihoods."""
        federation = self.require_federation()
        where = Located(lambda: f"testing on task {batch.task} failed after {federation.round} rounds")
        with where, full_precision():
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

    # Checkpoints: the network's state dict is the global model; the rest lies under one key.

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the federation; drop the optimizer's state, which no client keeps between rounds."""
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


def _frozen_parameters(network: Network) -> frozenset[str]:
    """Names of the parameters that do not ask for a gradient.

    Raises:
        ConfigError: none of them does.
    """
    frozen = frozenset(name for name, parameter in network.named_parameters() if not parameter.requires_grad)
    if frozen and all(name in frozen for name, _ in network.named_parameters()):
        raise ConfigError("model.network", f"{type(network).__name__} with all parameters frozen", "one that trains")
    return frozen
