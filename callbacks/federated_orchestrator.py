"""Runs the rounds: one Lightning epoch is one communication round."""

from __future__ import annotations

import math
import time
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from cfl.callbacks.trainer_checks import NEVER, check_evaluation, check_trainer
from cfl.data.cohorts import CohortBatch
from cfl.data.schedule import RoundPlan
from cfl.federation.channel import UPDATE, Channel
from cfl.federation.client_states import ClientStates
from cfl.federation.federation import MODEL_TOPIC, Federation, state_buffers
from cfl.federation.server import Server
from cfl.randomness.generators import seed_device, seed_for
from cfl.runtime import distributed
from cfl.runtime.error_context import Located
from cfl.runtime.errors import ConfigError
from cfl.runtime.precision import full_precision
from cfl.training.access import client_of, data_of, federation_of
from cfl.training.client import Client


class FederatedOrchestrator(Callback):
    """Sends the global model out, collects the clients' updates, moves the global model, ends tasks.

    A round closes in ``on_train_batch_end`` of its last batch, because Lightning validates before
    ``on_train_epoch_end``: so what is evaluated is the new global model.

    Args:
        client_weighting: weight of a client in the mean: ``uniform`` (1 each) or ``samples`` (its number of training
            samples).
        server_lr: server learning rate; 1 is federated averaging.
        server_momentum: server momentum in [0, 1).
        batchnorm: what becomes of BatchNorm's running statistics: ``average`` them like weights, keep them ``local``,
            or ``drop`` them after local training. Where the global model has none, it is evaluated with the statistics
            of the test batch.
        on_bad_update: a client that has trained to NaN or infinity makes the run ``stop``, or is left out of the round
            (``skip``); so does, or is, any other message that holds such.
        client_state_memory_mb: memory in MB (10^6 bytes) for what clients keep between rounds, such as personal layers;
            what exceeds it is held in a file in the run folder. null sets no limit. Changes memory and speed, never
            results.
    """

    def __init__(
        self,
        client_weighting: Literal["uniform", "samples"] = "uniform",
        server_lr: float = 1.0,
        server_momentum: float = 0.0,
        batchnorm: Literal["average", "local", "drop"] = "average",
        on_bad_update: Literal["stop", "skip"] = "stop",
        client_state_memory_mb: float | None = 2048,
    ) -> None:
        for key, value, valid in (
            ("client_weighting", client_weighting, ("uniform", "samples")),
            ("batchnorm", batchnorm, ("average", "local", "drop")),
            ("on_bad_update", on_bad_update, ("stop", "skip")),
        ):
            if value not in valid:
                raise ConfigError(f"federated.{key}", value, f"one of {list(valid)}")
        if not 0 < server_lr < math.inf:
            raise ConfigError("federated.server_lr", server_lr, "a number above 0")
        if not 0 <= server_momentum < 1:
            raise ConfigError("federated.server_momentum", server_momentum, "a number in [0, 1)")
        if client_state_memory_mb is not None and not 0 <= client_state_memory_mb < math.inf:
            allowed = "a number of at least 0, or null for no limit"
            raise ConfigError("federated.client_state_memory_mb", client_state_memory_mb, allowed)
        self.client_weighting = client_weighting
        self.server_lr = server_lr
        self.server_momentum = server_momentum
        self.batchnorm: Literal["average", "local", "drop"] = batchnorm
        self.on_bad_update: Literal["stop", "skip"] = on_bad_update
        self.client_state_memory_mb = client_state_memory_mb
        self.plan: RoundPlan | None = None
        self._started = 0.0
        self._used_outputs: torch.Tensor | None = None

    # Before the first round.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Build the federation, before a checkpoint is restored into it.

        Raises:
            ConfigError: if the Trainer is set so that rounds could not run.
        """
        client, data = client_of(pl_module), data_of(trainer)
        if stage == "fit":
            check_trainer(trainer, data)
        else:
            check_evaluation(trainer)
        if client.federation is None:
            if self.batchnorm != "average" and not state_buffers(client.network):
                valid = "average: the network keeps no statistics that could be treated otherwise"
                raise ConfigError("federated.batchnorm", self.batchnorm, valid)
            limit = None if self.client_state_memory_mb is None else int(1e6 * self.client_state_memory_mb)
            client.federation = Federation(
                client.network,
                data,
                client.methods,
                Server(
                    dict(client.network.named_parameters()),
                    dict(client.network.named_buffers()),
                    self.server_lr,
                    self.server_momentum,
                ),
                Channel(
                    self.on_bad_update,
                    client.methods.individual_uplinks,
                    ("model.optimizer lr", *client.methods.strengths),
                ),
                self.batchnorm,
                ClientStates(limit),
                client.buffer,
                client.frozen,
            )
            self._check_options_do_something(client.federation)
        # Personal models: the processes share out whose model is evaluated, not the test sets.
        data.all_batches_everywhere = client.federation.has_personal_models

    def _check_options_do_something(self, federation: Federation) -> None:
        """Refuse options of the server's step where it has none to take."""
        if federation.shared_parameters or federation.shared_buffers:
            return
        for key, value, default in (
            ("client_weighting", self.client_weighting, "uniform"),
            ("server_lr", self.server_lr, 1.0),
            ("server_momentum", self.server_momentum, 0.0),
        ):
            if value != default:
                whose = ", ".join(federation.methods)
                raise ConfigError(
                    f"federated.{key}", value, f"{default}: with {whose} no tensor of the model is averaged"
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Point the data at the next round (the first, or the one after the checkpoint's)."""
        federation = federation_of(pl_module)
        # A device move replaces buffers, not parameters; the server must hold the network's current ones.
        federation.server.parameters = dict(federation.network.named_parameters())
        federation.server.buffers = dict(federation.network.named_buffers())
        federation.data.next_round = federation.round

    # One round.

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Announce the round and send the global model to its clients."""
        self._started = time.perf_counter()
        federation = federation_of(pl_module)
        if federation.round != trainer.current_epoch:
            raise RuntimeError(f"round {federation.round} of the federation is epoch {trainer.current_epoch}")
        self.plan = federation.schedule.round(federation.round)
        client_of(pl_module).reset_loss()
        federation.channel.enter_round(self.plan.task, self.plan.round)
        for part in self.plan.parts:
            if part.round_in_task == 0:
                with _located(f"beginning task {part.task}", self.plan):
                    client_of(pl_module).methods.begin_task(part)
        receivers = sum(len(federation.own_clients(part.task, part.clients)) for part in self.plan.parts)
        federation.channel.downlink("model", federation.shared_tensors(), receivers)
        trainer.check_val_every_n_epoch = 1 if federation.schedule.evaluates_after(self.plan) else NEVER

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: CohortBatch, batch_idx: int
    ) -> None:
        """Open a cohort: its clients start from the global model and with a fresh optimizer."""
        if batch.opens:
            with full_precision(), _located(f"opening clients {list(batch.clients)}", self._plan):
                self._open(trainer, pl_module, batch)

    def _open(self, trainer: Trainer, pl_module: LightningModule, batch: CohortBatch) -> None:
        client, federation, plan = client_of(pl_module), federation_of(pl_module), self._plan
        cohort = client.require_cohort()
        # Named by a client, because every process has a cohort number 0.
        seed_device(client.device, seed_for(federation.data.seed, "dropout", plan.round, batch.clients[0]))
        tensors = federation.encode(batch.task, federation.state_tensors())
        cohort.open(
            batch.clients,
            batch.sizes,
            batch.task,
            plan.round,
            shared={n: tensors[n] for n, _ in federation.network.named_parameters()},
            shared_buffers={n: tensors[n] for n, _ in federation.network.named_buffers()},
            own=federation.encode(batch.task, federation.own_tensors(batch.clients)),
            mixed=batch.tasks_of_own is not None,
        )
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
            cohort.lr = float(optimizer.param_groups[0]["lr"])
        if federation.buffer is not None:
            federation.buffer.open(cohort)
        client.methods.start_clients()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: CohortBatch, batch_idx: int
    ) -> None:
        """Collect from clients that have finished; with the last of them, close the round."""
        if batch.closes:
            closing = [batch.clients[position] for position in batch.closes]
            with full_precision(), _located(f"collecting from clients {closing}", self._plan):
                self._collect(client_of(pl_module), batch.closes)
        if batch.last_of_round:
            with full_precision(), _located("closing the round", self._plan):
                self._close_round(client_of(pl_module))

    @torch.no_grad()
    def _collect(self, client: Client, positions: tuple[int, ...]) -> None:
        cohort, federation = client.require_cohort(), federation_of(client)
        federation.channel.enter_round(cohort.task, cohort.round)  # of clients with clocks of their own, their task
        cohort.put_back_unused_outputs(positions)
        sound = positions
        if federation.buffer is not None or client.methods.collects:
            # Who is left out is left out with all that it has, whichever of its tensors is to blame.
            judged = federation.trained_tensors(cohort, positions)
            usable = federation.channel.usable(judged, [cohort.clients[p] for p in positions])
            sound = tuple(p for p, good in zip(positions, usable, strict=True) if good)
        if sound and federation.buffer is not None:
            federation.buffer.close(cohort, sound)
        if sound:
            client.methods.finish_clients(sound)
        clients = [cohort.clients[p] for p in positions]
        trained = cohort.rows(positions, {**cohort.parameters, **cohort.buffers})
        if cohort.used_outputs is not None:
            seen, used = self._used_outputs, cohort.used_outputs.any(0)
            self._used_outputs = used if seen is None else seen | used
        weights = [1.0 if self.client_weighting == "uniform" else float(cohort.sizes[p]) for p in positions]
        # In place: nobody needs these clients' weights any more, and new memory of this size costs as much as the rest.
        update = {n: trained[n].sub_(cohort.received[n]) for n in federation.shared_parameters}
        message = federation.decode(cohort.task, {**update, **{n: trained[n] for n in federation.shared_buffers}})
        if federation.personal:
            own = federation.decode(cohort.task, {n: rows for n, rows in trained.items() if n in federation.personal})
            usable = federation.channel.usable({**message, **own}, clients)  # left out is left out with all it has
            weights = [weight if good else 0.0 for weight, good in zip(weights, usable, strict=True)]
            federation.clients.scatter(MODEL_TOPIC, clients, own, usable)
        if message:
            federation.channel.uplink(UPDATE, message, weights, clients)

    def _close_round(self, client: Client) -> None:
        federation, plan = federation_of(client), self._plan
        federation.channel.enter_round(plan.task, plan.round)
        federation.clients.synchronise()  # what follows may need any client's
        self._hear_others(client)
        if federation.shared_parameters or federation.shared_buffers:
            mean = federation.channel.mean(UPDATE)
            federation.server.apply(
                {n: mean[n] for n in federation.shared_parameters},
                {n: mean[n] for n in federation.shared_buffers},
                [*client.methods.step_transforms, self._hold_unused_outputs],
            )
        self._used_outputs = None
        federation.round += 1
        federation.data.next_round = federation.round
        client.methods.end_round(plan)
        ended = [part for part in plan.parts if part.last_of_task]
        for part in ended:
            client.methods.end_task(part)
        if ended:
            check_same_model(federation)
        federation.synchronise()

    def _hear_others(self, client: Client) -> None:
        """Take in losses of other processes' clients, and the outputs that they trained."""
        if distributed.count() == 1:
            return
        used = self._used_outputs
        heard = distributed.gather((client.loss_sums.tolist(), None if used is None else used.cpu()))
        client.loss_sums.copy_(torch.tensor([loss for loss, _ in heard]).sum(0))
        masks = [mask for _, mask in heard if mask is not None]
        self._used_outputs = torch.stack(masks).any(0) if masks else None

    def _hold_unused_outputs(self, step: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Server momentum does not move outputs that no client of this round trained."""
        used = self._used_outputs
        if used is None:
            return step
        held = dict(step)
        for name, change in step.items():
            if name.startswith("head.") and change.ndim > 0 and len(change) == len(used):
                rows = used.to(change.device).view(-1, *[1] * (change.ndim - 1))
                held[name] = torch.where(rows, change, torch.zeros_like(change))
        return held

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add ACC to the learning curve; count the round's time, evaluation included.

        Raises:
            RuntimeError: the epoch ended before the round was closed; nothing of it is kept.
        """
        federation, plan = federation_of(pl_module), self._plan
        if federation.round != plan.round + 1:
            raise RuntimeError(f"the Trainer ended round {plan.round} before its clients had trained")
        # As the summary has it: where clients hold different tasks, the mean matrix would give another figure.
        evaluated = federation.schedule.row_is_whole(plan)
        figures = federation.measured.summary(after=plan.task) if evaluated else {}
        federation.curve.append(figures.get(federation.measure.figure))
        federation.seconds += time.perf_counter() - self._started

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse to call a run over that ended early without anybody asking for it.

        Raises:
            RuntimeError: a StopIteration somewhere makes Lightning end a fit without a word.
        """
        federation = federation_of(pl_module)
        if not federation.finished and not trainer.should_stop:
            raise RuntimeError(f"the fit ended after {federation.round} of {federation.schedule.num_rounds} rounds")

    # Evaluation.

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A new evaluation replaces what its row of the matrix held."""
        client_of(pl_module).scoring.begin(trainer.sanity_checking, everyone=trainer.state.fn != "fit")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The row is complete when the processes have added up their shares."""
        client_of(pl_module).scoring.finish()

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As for validation."""
        self.on_validation_epoch_start(trainer, pl_module)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As for validation."""
        self.on_validation_epoch_end(trainer, pl_module)

    @property
    def _plan(self) -> RoundPlan:
        if self.plan is None:
            raise RuntimeError("no round has started")
        return self.plan


def check_same_model(federation: Federation) -> None:
    """Refuse to go on with processes that have drifted apart: a method used what only one of them knows.

    Compared are two numbers per tensor: its norm, and its product with a fixed vector, which tells signs and orders of
    entries apart as well.

    Raises:
        RuntimeError: naming the first process whose global model is not that of process 0, rounding aside.
    """
    if distributed.count() == 1:
        return
    everyones = distributed.gather([_digest(t.detach()) for t in federation.shared_tensors().values()])
    for process, digests in enumerate(everyones):
        pairs = zip(digests, everyones[0], strict=True)
        if any(abs(a - b) > 1e-3 * first[0] for theirs, first in pairs for a, b in zip(theirs, first, strict=True)):
            raise RuntimeError(
                f"process {process} has another global model than process 0: a method changed it by what one process "
                "alone knows, other than the channel's sums"
            )


def _digest(tensor: torch.Tensor) -> tuple[float, float]:
    """Norm, and product with a vector of norm 1."""
    values = tensor.double().flatten()
    direction = torch.arange(1, len(values) + 1, dtype=values.dtype, device=values.device).sqrt().mul_(1e3).sin_()
    return values.norm().item(), (values @ direction / direction.norm().clamp(min=1e-300)).item()


def mean_matrix(federation: Federation) -> torch.Tensor:
    """What is measured, ``[T, T]``: accuracies in percent, or NLL in nats; the mean over clients where each has one."""
    matrix = federation.measured.compute()
    return matrix.nanmean(0) if federation.measures_clients else matrix


def _located(what: str, plan: RoundPlan) -> Located:
    return Located(lambda: f"{what} failed in round {plan.round} (task {plan.task})")
