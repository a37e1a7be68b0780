"""Runs the communication rounds; one Lightning epoch is one round."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torchmetrics import Metric

from cfl.callbacks.accuracy_targets import AccuracyTargets
from cfl.callbacks.local_evaluation import LocalModels
from cfl.callbacks.privacy_budget import PrivacyBudget
from cfl.callbacks.run_figures import figures_by_owner
from cfl.callbacks.sum_options import SumOptions
from cfl.callbacks.trainer_checks import NEVER, check_anomalies, check_evaluation, check_trainer
from cfl.data.cohorts import CohortBatch, CohortBlock
from cfl.data.datamodule import FederatedDataModule
from cfl.federation import matrix_rows
from cfl.federation.channel import Channel
from cfl.federation.client_states import ClientStates
from cfl.federation.federated_model import FederatedModel, state_buffers
from cfl.federation.federation import Federation
from cfl.federation.server import Server
from cfl.models.base import require_predictions
from cfl.reporting.files_of_run import check_measure_names
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices, check_numbers
from cfl.secure_sums.settings import Aggregation
from cfl.training.access import callback_of, client_of, data_of, federation_of
from cfl.training.client import Client
from cfl.training.local_work import LocalWork

_log = logging.getLogger(__name__)


class FederatedOrchestrator(Callback):
    """Sends the global model, collects the clients' updates, updates the global model and ends tasks.

    It translates Lightning's hooks; the work of a round is in :class:`cfl.training.local_work.LocalWork`. A round
    closes in ``on_train_batch_end`` of its last batch, because Lightning validates before ``on_train_epoch_end``, and
    the new global model is to be evaluated. The round is counted after its evaluation, before any callback's
    ``on_train_epoch_end``. From then on ``trainer.callback_metrics`` has the round's ``train/loss`` and, after an
    evaluation, ``cl/acc``, ``cl/fgt`` and so on; ``cl/acc_worst_client_by_owner`` and others where the data say whose
    test samples are.

    Args:
        client_weighting: weight of a client in the mean: ``uniform`` (1 each) or ``samples`` (its number of training
            samples).
        server_lr: server learning rate; 1 is federated averaging.
        server_momentum: server momentum in [0, 1).
        batchnorm: BatchNorm's running statistics: ``average`` them like weights, keep them ``local``, or ``drop`` them
            after local training. A global model without statistics is evaluated with those of the test batch.
        on_bad_update: if a client's model, or another message, holds NaN or infinity, ``stop`` the run, or ``skip``:
            leave the client out of the round, or the message out of its sum.
        client_state_memory_mb: memory in MB (10^6 bytes) for states that clients keep between rounds, such as personal
            layers; states beyond it are stored in a file in the run folder. null sets no limit. Changes memory and
            speed, never results.
        aggregation: how the server gets a sum of messages. ``plain``: as a sum of floats. ``secure``: as a sum of
            integers, by a protocol that shows the server nothing but the sum (docs/secure-sums.md); needs the extra
            ``secure``. ``modelled``: the same integers and bytes, computed without the protocol.
        neighbours: number of clients with which each client of a secure sum masks its message, even; null for all.
        share_threshold: more than this share of the clients that hold parts of a client's secrets must take part to
            recover these, in [0.5, 1).
        codecs: topic -> ``range``, ``bits``, ``modulus`` and ``weight`` of its integers, if they differ from the
            defaults (:mod:`cfl.secure_sums.codec`).
        measures: name -> metric that is computed of the same tests as the run's measure
            (:class:`cfl.metrics.own.OwnMatrix`); in YAML the top-level key ``measures``.
    """

    def __init__(
        self,
        client_weighting: Literal["uniform", "samples"] = "uniform",
        server_lr: float = 1.0,
        server_momentum: float = 0.0,
        batchnorm: Literal["average", "local", "drop"] = "average",
        on_bad_update: Literal["stop", "skip"] = "stop",
        client_state_memory_mb: float | None = 2048,
        aggregation: Aggregation = "plain",
        neighbours: int | None = None,
        share_threshold: float = 0.5,
        codecs: dict[str, dict[str, int | float | None]] | None = None,
        measures: dict[str, Metric] | None = None,
    ) -> None:
        check_choices("federated", ("uniform", "samples"), client_weighting=client_weighting)
        check_choices("federated", ("average", "local", "drop"), batchnorm=batchnorm)
        check_choices("federated", ("stop", "skip"), on_bad_update=on_bad_update)
        check_numbers("federated", "(0, inf)", server_lr=server_lr)
        check_numbers("federated", "[0, 1)", server_momentum=server_momentum)
        check_numbers("federated", "[0, inf)", or_null=True, client_state_memory_mb=client_state_memory_mb)
        self.client_weighting = client_weighting
        self.server_lr = server_lr
        self.server_momentum = server_momentum
        self.batchnorm: Literal["average", "local", "drop"] = batchnorm
        self.on_bad_update: Literal["stop", "skip"] = on_bad_update
        self.client_state_memory_mb = client_state_memory_mb
        self.sums = SumOptions(aggregation, neighbours, share_threshold, codecs)
        check_measure_names(measures or {})
        self.measures = measures or {}
        self._started = 0.0

    # Before the first round.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Build the federation if there is none, before a checkpoint is restored into it.

        Raises:
            ConfigError: the Trainer's settings do not allow rounds.
            RuntimeError: the Trainer has trained another Client. Lightning would train nothing, because it goes on
                counting that one's epochs.
        """
        client, data = client_of(pl_module), data_of(trainer)
        if stage == "fit":
            check_trainer(trainer, data)
            check_anomalies(trainer, client.engine_options.kind)
        else:
            check_evaluation(trainer)
        if client.federation is None:
            if stage == "fit" and trainer.current_epoch:
                found = f"this Trainer has trained another Client for {trainer.current_epoch} rounds"
                raise RuntimeError(f"{found}; a new Client needs a new Trainer")
            client.federation = self._build(trainer, client, data, trains=stage == "fit")
            client.note_modes()
            self._check_options_do_something(client.federation)
            self._check_weighting(client)
            if stage == "fit":
                self.sums.check(client.federation, trainer.world_size)
                client.methods.check_reports()
        elif stage == "fit":
            client.restore_modes()
        data.follow(client.federation)
        # With personal models, processes share the clients to evaluate instead of the test sets.
        data.all_batches_everywhere = client.federation.model.has_personal_models

    def _build(self, trainer: Trainer, client: Client, data: FederatedDataModule, trains: bool) -> Federation:
        data.forget_run()
        network, methods = client.network, client.methods
        if self.batchnorm != "average" and not state_buffers(network):
            valid = "average: the network keeps no statistics that could be treated otherwise"
            raise ConfigError("federated.batchnorm", self.batchnorm, valid)
        require_predictions(network, data.scenario)
        if trains:
            data.measure.start(network, lambda: data.tasks[0].train.labels)
        limit = None if self.client_state_memory_mb is None else int(1e6 * self.client_state_memory_mb)
        clipping = (trainer.gradient_clip_algorithm or "norm") if trainer.gradient_clip_val else None
        server = Server(
            dict(network.named_parameters()), dict(network.named_buffers()), self.server_lr, self.server_momentum
        )
        channel = Channel(
            self.on_bad_update,
            methods.individual_uplinks,
            diverges_with=("model.optimizer lr", *methods.strengths),
            integers=self.sums.integer_sums(data, self.client_weighting == "samples"),
            dropped_before_message=self.sums.lost(data.rounds),
            dropped_at_all=data.rounds.dropouts,
        )
        return Federation(
            FederatedModel(network, methods.keeps_local, self.batchnorm, ClientStates(limit), client.frozen),
            data,
            methods,
            server,
            channel,
            client.buffer,
            client.optimizer_for_its_options(clipping) if trains else None,
            self.measures,
            self.client_weighting,
        )

    def _check_options_do_something(self, federation: Federation) -> None:
        """Refuse options of the server's step if the server takes none."""
        if federation.model.shared_parameters or federation.model.shared_buffers:
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

    def _check_weighting(self, client: Client) -> None:
        """Refuse weighting by samples if a method bounds what each client adds to the sum."""
        if self.client_weighting != "uniform" and client.methods.protection is not None:
            valid = f"uniform with {client.methods.protection.key}, which bounds what each client adds to the sum"
            raise ConfigError("federated.client_weighting", self.client_weighting, valid)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the server the network's current tensors."""
        federation = federation_of(pl_module)
        # A device move replaces buffers, not parameters; the server must hold the network's current buffers.
        federation.server.parameters = dict(federation.network.named_parameters())
        federation.server.buffers = dict(federation.network.named_buffers())

    # One round.

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set what is done with clients that have taken their last step: they are scored and collected."""
        client = client_of(pl_module)
        client.require_work().finish = partial(self._finish, trainer, client)

    def _finish(self, trainer: Trainer, client: Client, positions: tuple[int, ...]) -> None:
        if (local := callback_of(trainer, LocalModels)) is not None:
            local.score(client, positions)  # collecting overwrites these models
        client.require_work().collect(positions)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the round and send the global model to its clients."""
        self._started = time.perf_counter()
        federation = federation_of(pl_module)
        if federation.round != trainer.current_epoch:
            found = f"round {federation.round} of the federation is epoch {trainer.current_epoch}"
            raise RuntimeError(f"{found}; give ckpt_path to go on with an earlier fit, or train a new Client")
        plan = federation.schedule.round(federation.round)
        client_of(pl_module).require_work().begin_round(plan)
        trainer.check_val_every_n_epoch = 1 if federation.schedule.evaluates_after(plan) else NEVER

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: CohortBatch | CohortBlock, batch_idx: int
    ) -> None:
        """Start a cohort: its clients get the global model and a new optimizer."""
        if batch.opens:
            (optimizer,) = trainer.optimizers
            client_of(pl_module).require_work().open(batch, optimizer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: CohortBatch | CohortBlock,
        batch_idx: int,
    ) -> None:
        """Collect from clients that have finished; with the last of them, close the round."""
        work = client_of(pl_module).require_work()
        if batch.closes and isinstance(batch, CohortBatch):  # a block has finished its own clients
            work.finish(batch.closes)
        if batch.last_of_round:
            work.close_round()
            if (budget := callback_of(trainer, PrivacyBudget)) is not None:
                budget.look_ahead(work.federation)
            evaluates = work.federation.schedule.evaluates_after(work.require_plan())
            trainer.check_val_every_n_epoch = 1 if evaluates else NEVER  # the round may have become the run's last
            if not evaluates:
                self._count(trainer, work)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count a round after its evaluation."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._count(trainer, client_of(pl_module).require_work())

    def _count(self, trainer: Trainer, work: LocalWork) -> None:
        """Add ACC and the round's time, evaluation included, to the record, and check whether targets end the run.

        This happens before any callback's ``on_train_epoch_end``, so that all callbacks see the finished round, in
        whatever order they are.
        """
        federation, plan = work.federation, work.require_plan()
        # As in the summary: if clients hold different tasks, the mean matrix would give another figure.
        evaluated = federation.schedule.row_is_whole(plan)
        figures = federation.measured.summary(after=plan.task) if evaluated else {}
        federation.curve.append(figures.get(federation.measure.figure))
        if evaluated:
            figures |= matrix_rows.own_figures(federation, plan.task) | figures_by_owner(federation)
        self._tell(trainer, work.mean_loss, figures)
        federation.seconds += time.perf_counter() - self._started
        targets, budget = callback_of(trainer, AccuracyTargets), callback_of(trainer, PrivacyBudget)
        met = targets is not None and targets.end_the_run(federation.curve)
        if met or (budget is not None and budget.end_the_run(federation)):
            federation.stopped = not federation.finished

    @staticmethod
    def _tell(trainer: Trainer, loss: float, figures: Mapping[str, float | None]) -> None:
        """Store the round's loss, and the figures of its evaluation, if any, in ``trainer.callback_metrics``."""
        metrics = trainer.callback_metrics
        for name in [name for name in metrics if name.startswith("cl/")]:
            del metrics[name]
        metrics["train/loss"] = torch.tensor(loss)
        metrics.update({f"cl/{key}": torch.tensor(value) for key, value in figures.items() if value is not None})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the round was closed, and stop the Trainer if the run ends with it.

        Raises:
            RuntimeError: the epoch ended before the round was closed. The round's results are dropped.
        """
        federation, plan = federation_of(pl_module), client_of(pl_module).require_work().require_plan()
        if federation.round != plan.round + 1:
            raise RuntimeError(f"the Trainer ended round {plan.round} before its clients had trained")
        if federation.stopped:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise if the run ended early for no known reason, and name options that had no effect.

        Raises:
            RuntimeError: for example, a StopIteration makes Lightning end a fit silently.
        """
        federation = federation_of(pl_module)
        if not federation.finished and not trainer.should_stop:
            raise RuntimeError(f"the fit ended after {federation.round} of {federation.schedule.num_rounds} rounds")
        integers = federation.channel.integers
        if integers is not None and (unused := integers.unused_codecs()):
            sent = ", ".join(sorted(integers.figures.topics))
            said = "federated.codecs had no effect on %s: the messages were %s"
            rank_zero_only(_log.warning)(said, ", ".join(unused), sent)

    # Evaluation.

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Clear the rows of the matrix that the new evaluation fills."""
        fits = trainer.state.fn == "fit"
        if not fits:
            _check_added_measures(federation_of(pl_module))
        client_of(pl_module).scoring.begin(trainer.sanity_checking, everyone=not fits)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add up the processes' shares of the row."""
        client_of(pl_module).scoring.finish()

    on_test_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end


def _check_added_measures(federation: Federation) -> None:
    """Refuse a measure that could only be computed for the clients that are still learning their tasks.

    Raises:
        ConfigError: clients have their own clocks, and the run has not computed the measure.
    """
    for own in federation.own_measures.values() if federation.schedule.client_clocks else ():
        if federation.round and not own.counts.any():
            valid = "a measure that the run has computed: with schedule.clock_spread clients are tested where their "
            raise ConfigError(own.key, own.definition, valid + "own tasks end, and the models of then are not kept")


def built_federation(trainer: Trainer, module: LightningModule, stage: str) -> Federation:
    """Return the federation, built if necessary, to callbacks whose ``setup`` may run before the orchestrator's.

    Raises:
        RuntimeError: the Trainer has no FederatedOrchestrator.
    """
    orchestrator = callback_of(trainer, FederatedOrchestrator)
    if client_of(module).federation is None and orchestrator is not None:
        orchestrator.setup(trainer, module, stage)
    return federation_of(module)
