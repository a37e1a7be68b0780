"""Writes the run folder: every figure of a run as CSV, JSON and PNG, as soon as it is known."""

from __future__ import annotations

import json
import math
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from cfl import __version__
from cfl.callbacks.accuracy_targets import AccuracyTargets
from cfl.callbacks.claimed_folder import ClaimedFolder
from cfl.callbacks.local_evaluation import LocalModels
from cfl.callbacks.printed_figures import print_figures
from cfl.callbacks.privacy_budget import PrivacyBudget
from cfl.callbacks.rounds_table import RoundsTable
from cfl.callbacks.run_figures import (
    figures_by_default,
    known_tasks,
    methods_figures,
    round_figures,
    rows_by_owner,
    run_figures,
)
from cfl.data.datamodule import FederatedDataModule
from cfl.data.report import save_partition_figure, write_partition_csv
from cfl.federation import matrix_rows
from cfl.federation.federation import Federation
from cfl.methods.returned_values import check_report
from cfl.reporting.checksums import write_checksums
from cfl.reporting.csv_file import csv_of
from cfl.reporting.files_of_run import TABLES
from cfl.reporting.matrix_file import write_matrix_csv
from cfl.reporting.names import is_benchmark_name
from cfl.runtime.atomic_write import if_possible, write_whole
from cfl.runtime.disk import writing
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_integers
from cfl.runtime.run_files import (
    CHECKSUMS,
    CLIENTS,
    CONFIG,
    PARTITION,
    PRIVACY,
    ROUNDS,
    SUMMARY,
    TESTS_BY_OWNER,
    WANDB_ID,
    matrix_file,
)
from cfl.runtime.source_digest import source_digest
from cfl.training.access import callback_of, client_of, data_of, federation_of
from cfl.training.client import Client
from cfl.training.evaluation import over_clients

MOST_SAMPLES = 10_000


class RunRecord(Callback):
    """Writes a run's figures into one folder.

    It writes ``config.yaml`` (resolved), ``partition.csv`` and ``.png``, ``rounds.csv`` (a row per round),
    ``accuracy_matrix.csv`` (row = after task, column = task), ``<method>.csv``, ``privacy.csv`` if a method adds noise
    (:class:`cfl.callbacks.privacy_budget.PrivacyBudget`), ``tests_by_owner.csv`` if the data say whose test samples are
    (:func:`cfl.callbacks.run_figures.rows_by_owner`), and after the last round ``accuracy_matrix.png``,
    ``accuracy_curve.png`` and, if there were evaluations between task ends, the learning curve ``accuracy_rounds.png``.
    ``SHA256SUMS``, checksums of tables, configuration and summary, and then ``summary.json`` are written last, after
    the last checkpoint. Accuracies and forgetting are in percent. Density runs have ``nll_matrix.csv`` and so on
    instead, in nats. Matrices with the task of test samples known are in ``accuracy_matrix_task_il.csv`` or
    ``nll_matrix_task_aware.csv``. For densities of images, ``samples.png`` shows images drawn from the density
    (:func:`cfl.training.density_samples.draw_images`), also after ``cfl validate``; for detectors, test images with the
    boxes that they find (:func:`cfl.training.found_boxes.draw_boxes`). With several processes the first writes and
    prints.

    Args:
        dir: the run folder; null makes ``runs/<benchmark>/<method>-seed<seed>-<hash>``.
        benchmark: name of the benchmark in tables; null takes stream and data set, e.g. ``permuted-digits``.
        overwrite: start over in a folder that already holds a run. Otherwise such a folder is refused.
        samples: number of images drawn from a density, or tested by a detector, for ``samples.png``, at most 10,000; 0
            for none. Detectors test at most four images of each of the first four tasks.

    Raises:
        ConfigError: ``samples`` is out of range, ``dir`` is empty, or ``benchmark`` cannot be the name of a folder.
    """

    def __init__(
        self, dir: str | None = None, benchmark: str | None = None, overwrite: bool = False, samples: int = 64
    ) -> None:
        check_integers("run", 0, at_most=MOST_SAMPLES, samples=samples)
        if dir is not None and not dir.strip():
            raise ConfigError("run.dir", dir, "a folder, or null for one of the run's own under runs/")
        if benchmark is not None and not is_benchmark_name(benchmark):
            raise ConfigError("run.benchmark", benchmark, "a name that can be a folder's, or null")
        self.dir, self.benchmark, self.overwrite, self.samples = dir, benchmark, overwrite, samples
        self.config_yaml: str | None = None
        self.wandb_id: str | None = None
        self.experiment: dict[str, Any] = {}
        self.config_hash = ""
        self._folder = ClaimedFolder(Path(dir or "runs/unnamed"))
        self._begun = self._partition_drawn = self._drawn = self._clients_written = False
        self._began_with = 0  # rounds that were finished when the fit began
        self._rounds_table = RoundsTable(self.folder / ROUNDS)
        self._last_row: dict[str, Any] = {}
        self.targets = AccuracyTargets()
        self.privacy = PrivacyBudget()
        self.local_models = LocalModels()
        self.versions = {
            "cfl": __version__,
            "source": source_digest(),  # read now, because files may change during a long run
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._folder.path

    def prepare(self, resuming: bool | None, write: bool = True) -> None:
        """Create and lock the run folder, and check that it can be used. Files in it do not change before the fit.

        A folder that is created here is removed again if the fit does not begin, e.g. because data are missing.

        Args:
            resuming: whether the run of this folder is resumed, so that its files are kept; None if that is to be found
                out when the fit begins, by the Trainer's checkpoint.
            write: whether this process writes into the folder; other processes only make the same checks.

        Raises:
            ConfigError: the folder cannot be written, another process uses it, or it holds a run and ``overwrite`` is
                false.
        """
        self._folder.claim(resuming, self.overwrite, write)

    # During a fit.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the other callbacks whose figures are recorded, and prepare the folder."""
        self.targets = callback_of(trainer, AccuracyTargets) or AccuracyTargets()
        self.privacy = callback_of(trainer, PrivacyBudget) or PrivacyBudget()
        self.local_models = callback_of(trainer, LocalModels) or LocalModels()
        self._begun = False
        self.prepare_once(trainer, stage)

    def prepare_once(self, trainer: Trainer, stage: str) -> None:
        """Call :meth:`prepare` for a fit, unless that has been done."""
        if stage == "fit" and trainer.is_global_zero and not self._folder.claimed:
            self.prepare(resuming=None)

    def name_of(self, data: FederatedDataModule) -> str:
        """The benchmark's name."""
        return self.benchmark or data.stream.name

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call :meth:`begin` in the first process."""
        if trainer.is_global_zero:
            self.begin(trainer, pl_module)

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the files that are known before the first round, unless that has been done for this fit.

        When resuming, drop the rows of rounds after the checkpoint, which will run again. Callbacks that display these
        files call this first.

        Raises:
            ConfigError: the folder holds another run than that of the Trainer's checkpoint, and ``overwrite`` is false.
        """
        if self._begun:
            return
        # If a run is resumed in another folder, its earlier rows are beside the checkpoint.
        before = Path(trainer.ckpt_path).parent if trainer.ckpt_path else self.folder
        self._folder.decide(trainer.ckpt_path, self.overwrite)
        self._begun = True
        self._drawn = self._partition_drawn = self._clients_written = False
        data, federation = data_of(trainer), federation_of(pl_module)
        self._began_with = federation.round
        if not federation.finished:  # the folder of a finished run may hold an earlier checkpoint
            for name in (SUMMARY, CHECKSUMS):
                (self.folder / name).unlink(missing_ok=True)
        self._folder.clear(keeps_config=self.config_yaml is not None)
        if self.wandb_id is not None:
            write_whole(self.folder / WANDB_ID, self.wandb_id + "\n")
        if self.config_yaml is not None and not (self.folder / SUMMARY).exists():
            # Atomically: other processes of the run may be reading it to resume.
            write_whole(self.folder / CONFIG, self.config_yaml)
        write_partition_csv(self.folder / PARTITION, data.tasks, _dealt(data))
        self._rounds_table.begin(federation.round, before / ROUNDS)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the partition after the first round of the fit, so that this round starts without delay."""
        if trainer.is_global_zero and federation_of(pl_module).round > self._began_with:
            self.draw_partition(data_of(trainer))

    def draw_partition(self, data: FederatedDataModule) -> None:
        """Draw the samples of each client, unless that has been done for this fit.

        If the picture cannot be written, there is a warning."""
        if not self._partition_drawn:
            self._partition_drawn = True
            save_partition_figure(self.folder, data.tasks, _dealt(data), f"{self.name_of(data)}, {data.partition.name}")

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`cfl.callbacks.rounds_table.RoundsTable.state_dict`."""
        return self._rounds_table.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._rounds_table.load_state_dict(state_dict)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call :meth:`record_round` in the first process."""
        if trainer.is_global_zero:
            self.record_round(client_of(pl_module))

    def record_round(self, client: Client) -> dict[str, Any]:
        """Add the row of the finished round, unless that has been done.

        After an evaluation, and after the run's last round, also write the matrices and other tables.
        Callbacks that display these files call this first.

        Returns:
            The row: column -> value.
        """
        federation = client.require_federation()
        if self._rounds_table.rounds == federation.round:
            return self._last_row
        plan = federation.schedule.round(federation.round - 1)
        self._last_row = round_figures(client, plan, federation.schedule.row_is_whole(plan))
        self._rounds_table.append(self._last_row)
        if federation.schedule.evaluates_after(plan) or federation.finished:  # a run may stop between evaluations
            self._write_tables(federation)
        if federation.finished:
            self._draw(client)  # before loggers, which show these pictures
        return self._last_row

    def _write_tables(self, federation: Federation) -> None:
        """Write the matrices, the methods' tables, ``privacy.csv`` and ``tests_by_owner.csv``."""
        measure, own = federation.measure.name, {matrix.key: matrix for matrix in federation.own_measures.values()}
        of_tests = {measure: federation.measured, **own}
        files = {matrix_file(name): matrix for name, matrix in of_tests.items()}
        files |= {matrix_file(measure, suffix): matrix for suffix, matrix in known_tasks(federation).items()}
        for file, matrix in files.items():
            means = [over_clients(federation, values) for values in (matrix.compute(), matrix.initial())]
            write_matrix_csv(self.folder / file, *means)
        if federation.measures_clients:
            with writing(self.folder / CLIENTS):
                (self.folder / CLIENTS).mkdir(exist_ok=True)
            everybody = range(federation.data.num_clients)
            evaluated = matrix_rows.due(federation, everyone=False) if self._clients_written else everybody
            for name, matrix in of_tests.items():
                of_clients = zip(matrix.compute(), matrix.initial(), strict=True)
                for client, (values, initial) in enumerate(of_clients):
                    if client in evaluated:
                        file = matrix_file(name, f"_{client:03d}")
                        write_matrix_csv(self.folder / CLIENTS / file, values, initial)
            self._clients_written = True
        tables = {
            f"{name}.csv": check_report(name, method.report()).rows for name, method in federation.methods.items()
        }
        tables |= {PRIVACY: self.privacy.rows(federation), TESTS_BY_OWNER: rows_by_owner(federation)}
        for file, rows in tables.items():
            if rows:
                write_whole(self.folder / file, csv_of(rows))

    def _summary(self, federation: Federation, device: torch.device) -> dict[str, Any]:
        """All figures of the run by their names in ``summary.json``."""
        figures = run_figures(federation, self.name_of(federation.data), self.config_hash, self.versions, device)
        if self.targets.accuracies:
            figures["rounds_to_accuracy"] = self.targets.rounds(federation.curve)
        if self.targets.accuracies or self.privacy.budget is not None:
            figures["stopped_early"] = federation.stopped
        figures |= self.privacy.summary(federation) | self.local_models.summary()
        figures |= methods_figures(federation.methods, of_run=figures)
        return figures_by_default(federation) | figures

    def _draw(self, client: Client) -> None:
        """Draw a finished run's pictures. If one cannot be written, warn and leave out it and the following ones."""
        from cfl.callbacks.run_pictures import save_curves  # matplotlib is slow to import

        federation = client.require_federation()
        with if_possible():
            self.draw_partition(federation.data)
            save_curves(self.folder, federation, self.name_of(federation.data), self.targets.accuracies)
            self._save_samples(client)
        self._drawn = True

    def _save_samples(self, client: Client) -> Path | None:
        from cfl.callbacks.run_pictures import save_samples

        benchmark = self.name_of(client.require_federation().data)
        return save_samples(self.folder, client, benchmark, self.samples)

    def _finish(self, client: Client, device: torch.device) -> None:
        """Write the summary of a finished run, after everything else, including the last checkpoint.

        A run killed between its last checkpoint and its summary is finished by resuming it.
        """
        federation, path = client.require_federation(), self.folder / SUMMARY
        if path.exists():
            return
        if not self._drawn:
            self._write_tables(federation)
            self._draw(client)
        text = json.dumps(_finite(self._summary(federation, device)), indent=2, allow_nan=False) + "\n"
        tables = [self.folder / f"{name}.csv" for name in (*TABLES, *federation.methods)]
        for name in (federation.measure.name, *(matrix.key for matrix in federation.own_measures.values())):
            tables += [self.folder / matrix_file(name), *(self.folder / CLIENTS).glob(matrix_file(name, "_*"))]
        tables.append(self.folder / CONFIG)
        names = [str(table.relative_to(self.folder)) for table in tables if table.is_file()]
        write_checksums(self.folder, names, {SUMMARY: text})
        write_whole(path, text)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the folder for other processes."""
        if stage == "fit" and trainer.is_global_zero:
            self._folder.release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Release the folder after an error, too."""
        if trainer.is_global_zero:
            self._folder.release()

    # Showing the result.

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write and print the figures of a finished run."""
        federation = federation_of(pl_module)
        if federation.finished and trainer.is_global_zero:
            self._finish(client_of(pl_module), trainer.strategy.root_device)
            print_figures(federation, self.targets, self.privacy)
            print(f"run folder: {self.folder}")
            print(f"to compare all runs there: cfl compare {shlex.quote(str(self.folder.parent))}", flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After ``cfl validate``, print the same figures as after a fit."""
        if trainer.state.fn == "validate" and trainer.is_global_zero:
            print_figures(federation_of(pl_module), self.targets, self.privacy)
            try:
                picture = self._save_samples(client_of(pl_module))
            except OSError as error:  # a read-only folder; the figures are printed already
                print(f"samples: not written ({error})", flush=True)
                return
            if picture is not None:
                print(f"samples: {picture}", flush=True)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After ``cfl test``, print the same figures as after a fit."""
        if trainer.is_global_zero:
            print_figures(federation_of(pl_module), self.targets, self.privacy)


def _dealt(data: FederatedDataModule) -> Sequence[Mapping[int, np.ndarray]]:
    """Per task of the stream, client that learns it -> indices of the client's samples among its training samples."""
    return data.indices if data.order is None else data.dealt_to_learners


def _finite(tree: Any) -> Any:
    """Nested dictionaries and lists with None in place of NaN and infinity, which JSON cannot represent."""
    if isinstance(tree, Mapping):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
