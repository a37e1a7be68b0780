"""Writes the run folder: every figure of a run as CSV, JSON and PNG, as soon as it is known."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import math
import os
import platform
import re
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from cfl import __version__
from cfl.callbacks.accuracy_targets import AccuracyTargets, rounds_in_words
from cfl.callbacks.local_evaluation import LocalModels
from cfl.callbacks.privacy_budget import UNITS, PrivacyBudget
from cfl.data.datamodule import FederatedDataModule
from cfl.data.report import save_partition_figure, write_partition_csv
from cfl.data.schedule import RoundPlan
from cfl.federation.channel import payload_bytes
from cfl.federation.federation import Federation
from cfl.metrics.measure import MEASURES
from cfl.metrics.task_matrix import TaskMatrix
from cfl.reporting import folder_lock
from cfl.reporting.checksums import write_checksums
from cfl.reporting.compare.matrix_table import matrix_table
from cfl.reporting.experiment import method_name
from cfl.reporting.figures import accuracy_curve, accuracy_heatmap, learning_curves, sample_grid
from cfl.reporting.figures import save as save_figure
from cfl.reporting.matrix_file import write_matrix_csv
from cfl.reporting.method_names import printed_methods
from cfl.reporting.names import is_benchmark_name, is_method_name
from cfl.reporting.rounding import rounded
from cfl.reporting.text_table import print_table
from cfl.runtime import distributed
from cfl.runtime.atomic_write import append, if_possible, write_whole
from cfl.runtime.disk import why, writing
from cfl.runtime.errors import ConfigError, DamagedFile
from cfl.runtime.option_checks import check_integers
from cfl.runtime.run_files import (
    CHECKPOINT,
    CHECKSUMS,
    CLIENTS,
    CONFIG,
    PARTITION,
    PARTITION_PICTURE,
    PRIVACY,
    ROUNDS,
    SUMMARY,
    client_matrix_file,
    matrix_file,
)
from cfl.runtime.source_digest import source_digest
from cfl.runtime.yaml_file import BadYAML, read_yaml
from cfl.training.access import client_of, data_of, federation_of
from cfl.training.client import Client
from cfl.training.density_samples import draw_images
from cfl.training.evaluation import mean_matrix
from cfl.training.found_boxes import draw_boxes

_log = logging.getLogger(__name__)

WANDB_ID = "wandb-id.txt"


TABLES = {Path(file).stem for file in (ROUNDS, PARTITION, PRIVACY)} | {
    Path(matrix_file(measure.name, variant)).stem for measure in MEASURES for variant in {"", measure.known}
}
"""Names of a run's tables, which no method may have, because its own table would overwrite them."""
PICTURES = (
    *(PARTITION_PICTURE, "samples.png"),
    *(f"{measure.name}_{kind}.png" for measure in MEASURES for kind in ("matrix", "curve", "rounds")),
)
"""A run's pictures."""
MOST_SAMPLES = 10_000
OTHER_FILES = (SUMMARY, CHECKSUMS, CHECKPOINT, WANDB_ID)
"""Further files that are removed before another run in the same folder."""


def check_method_names(names: Iterable[str]) -> None:
    """Refuse names of methods that cannot be names of their tables.

    Raises:
        ConfigError: a character other than letters, digits, ``_`` and ``-``, or the name of another table.
    """
    for name in names:
        if not is_method_name(name):
            raise ConfigError(f"methods.{name}", name, "a name of at most 100 letters, digits, _ and -")
        if name in TABLES:
            raise ConfigError(f"methods.{name}", name, f"another name: the run folder has a table {name}.csv anyhow")


def _left_by_a_run(folder: Path) -> list[Path]:
    """Files of an earlier run in a folder that a new run would not overwrite immediately.

    Methods' tables are identified by the methods in ``config.yaml``, folders of wandb by the run's id. Other files and
    folders do not belong to the run.
    """
    names = [*PICTURES, *(f"{name}.csv" for name in (*TABLES, *_methods_in(folder))), *OTHER_FILES]
    found = [folder / name for name in names if (folder / name).is_file()]
    for measure in MEASURES:
        found += folder.glob(f"{CLIENTS}/{matrix_file(measure.name, '_*')}")
    if found:  # otherwise the folder holds no run, though there may be runs below it
        found += [file for file in folder.glob("**/events.out.tfevents.*") if not _is_of_another(file, folder)]
        tables = folder.glob("**/lightning_logs/version_*/metrics.csv")  # CSVLogger's
        found += [table.parent for table in tables if not _is_of_another(table, folder)]
        found += _offline_wandb_folders(folder)
    return found


def _is_of_another(file: Path, folder: Path) -> bool:
    """Whether a file belongs to another run in a folder below the run's."""
    between = file.parents[: file.parents.index(folder)]
    return any((parent / name).is_file() for parent in between for name in (CONFIG, SUMMARY))


def _offline_wandb_folders(folder: Path) -> list[Path]:
    """Folders of wandb with offline logs of a folder's run, which ``wandb sync`` would send with the next run's."""
    known = wandb_id_in(folder)
    if known is None:
        return []
    # A number follows if two folders of one run were made in the same second.
    name = re.compile(rf"offline-run-\d+_\d+-{re.escape(known)}(-\d+)?")
    found = [path for path in folder.glob("**/wandb/offline-run-*") if name.fullmatch(path.name)]
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def wandb_id_in(folder: Path) -> str | None:
    """The wandb id of the run in a folder; None if it has none, or a damaged file."""
    if not (folder / WANDB_ID).is_file():
        return None
    known = (folder / WANDB_ID).read_text(encoding="utf-8", errors="replace").strip()
    return known if is_method_name(known) else None


def _methods_in(folder: Path) -> list[str]:
    """Names of the methods in a run folder's configuration; empty if that cannot be read."""
    try:
        config = read_yaml(folder / CONFIG)
    except (OSError, BadYAML):
        return []
    methods = config.get("methods") if isinstance(config, dict) else None
    return [name for name in methods or () if is_method_name(name)]


class RunRecord(Callback):
    """Writes a run's figures into one folder.

    It writes ``config.yaml`` (resolved), ``partition.csv`` and ``.png``, ``rounds.csv`` (a row per round),
    ``accuracy_matrix.csv`` (row = after task, column = task), ``<method>.csv``, ``privacy.csv`` if a method adds noise
    (:class:`cfl.callbacks.privacy_budget.PrivacyBudget`), and after the last round
    ``accuracy_matrix.png``, ``accuracy_curve.png`` and, if there were evaluations between task ends, the learning curve
    ``accuracy_rounds.png``. ``SHA256SUMS``, checksums of these files, and then ``summary.json`` are written last, after
    the last checkpoint. Accuracies and forgetting are in percent. Density runs have ``nll_matrix.csv`` and so on
    instead, in nats. Matrices with the task of test samples known are in ``accuracy_matrix_task_il.csv`` or
    ``nll_matrix_task_aware.csv``. For densities of images, ``samples.png`` shows images drawn from the density
    (:func:`cfl.training.density_samples.draw_images`), also after ``cfl validate``; for detectors, test images with the
    boxes that they find (:func:`cfl.training.found_boxes.draw_boxes`). With several processes the first
    writes and prints.

    Args:
        dir: the run folder; null makes ``runs/<benchmark>/<method>-seed<seed>-<hash>``.
        benchmark: name of the benchmark in tables; null takes stream and data set, e.g. ``permuted-digits``.
        overwrite: start over in a folder that already holds a run, which is otherwise refused.
        samples: number of images drawn from a density, or tested by a detector, for ``samples.png``, at most 10,000; 0
            for none. Detectors have at most four of each of the first four tasks.

    Raises:
        ConfigError: a number of samples out of range, an empty folder, or a benchmark's name that cannot be a folder's.
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
        self._prepared = self._begun = self._partition_drawn = False
        self._recorded = self._began_with = 0  # rounds
        self._written: dict[str, Any] = {}
        self._stale: list[Path] = []
        self._drawn = False
        self.last_row: dict[str, Any] = {}
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
        return Path(self.dir or "runs/unnamed")

    def prepare(self, resuming: bool, write: bool = True) -> None:
        """Check that the folder can be used; nothing in it changes before the fit begins.

        A folder that is made here is removed again if the fit does not begin, e.g. because data are missing.

        Args:
            resuming: whether the run of this folder is resumed, so that its files are kept.
            write: whether this process writes into the folder; other processes only make the same checks.

        Raises:
            ConfigError: the folder cannot be written, another process uses it, or it holds a run and ``overwrite`` is
                false.
        """
        made = write and not self.folder.exists()
        try:
            if write:
                self.folder.mkdir(parents=True, exist_ok=True)
                TemporaryFile(dir=self.folder).close()
            alone = not write or folder_lock.take(self.folder, made)
        except OSError as error:
            valid = f"a folder that can be written ({why(self.folder, error)})"
            raise ConfigError("run.dir", str(self.folder), valid) from None
        if not alone:
            raise ConfigError("run.dir", str(self.folder), "a folder in which no other process is at work")
        held = [name for name in (SUMMARY, CHECKPOINT) if (self.folder / name).exists()]
        if held and not resuming and not self.overwrite:
            state = "a finished run" if SUMMARY in held else "an interrupted run (--ckpt_path last resumes it)"
            raise ConfigError(
                "run.dir",
                str(self.folder),
                f"a folder without a run; this one holds {state}; or run.overwrite=true",
            )
        # Also without `held`: a run that died before its first checkpoint left tables, which would mix with new ones.
        # Listed now: when the fit begins, loggers have already opened files of the new run.
        self._prepared, self._stale = True, [] if resuming else _left_by_a_run(self.folder)

    def _begin(self) -> None:
        """Clear the folder and write the configuration, after all checks that may refuse the run."""
        for path in self._stale:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if self.wandb_id is not None:
            write_whole(self.folder / WANDB_ID, self.wandb_id + "\n")
        if self.config_yaml is not None and not (self.folder / SUMMARY).exists():
            # Atomically: other processes of the run may be reading it to resume.
            write_whole(self.folder / CONFIG, self.config_yaml)

    # During a fit.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Store the run's targets and budget."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self.targets = next((c for c in callbacks if isinstance(c, AccuracyTargets)), AccuracyTargets())
        self.privacy = next((c for c in callbacks if isinstance(c, PrivacyBudget)), PrivacyBudget())
        self.local_models = next((c for c in callbacks if isinstance(c, LocalModels)), LocalModels())
        self._begun = False
        self.settle(trainer, stage)

    def settle(self, trainer: Trainer, stage: str) -> None:
        """Call :meth:`prepare` for a fit, unless that has been done."""
        if stage == "fit" and trainer.is_global_zero and not self._prepared:
            self.prepare(resuming=False)

    def name_of(self, data: Any) -> str:
        """The benchmark's name."""
        return self.benchmark or data.stream.name

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As :meth:`begin`."""
        if trainer.is_global_zero:
            self.begin(trainer, pl_module)

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the files that are known before the first round, unless that has been done for this fit.

        When resuming, drop the rows of rounds after the checkpoint, which will run again. Callbacks that display these
        files call this first.
        """
        if self._begun:
            return
        self._begun = True
        self._recorded = self._began_with = federation_of(pl_module).round
        if not federation_of(pl_module).finished:  # the folder of a finished run may hold an earlier checkpoint
            for name in (SUMMARY, CHECKSUMS):
                (self.folder / name).unlink(missing_ok=True)
        self._begin()
        self._drawn = self._partition_drawn = False
        data, done = data_of(trainer), federation_of(pl_module).round
        write_partition_csv(self.folder / PARTITION, data.tasks, _dealt(data))
        # If a run is resumed in another folder, its earlier rows are beside the checkpoint.
        before = Path(trainer.ckpt_path).parent if trainer.ckpt_path else self.folder
        if done and (before / ROUNDS).exists():
            write_whole(self.folder / ROUNDS, self._table_before(before / ROUNDS, done))
        elif done:
            _log.warning("%s begins with round %d: %s has no rows of those before", ROUNDS, done, before)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the partition after the first round, which need not wait for the picture."""
        if trainer.is_global_zero and federation_of(pl_module).round > self._began_with:
            self.draw_partition(data_of(trainer))

    def draw_partition(self, data: FederatedDataModule) -> None:
        """Draw who holds what, unless that has been done for this fit; with a warning if it cannot be written."""
        if not self._partition_drawn:
            self._partition_drawn = True
            save_partition_figure(self.folder, data.tasks, _dealt(data), f"{self.name_of(data)}, {data.partition.name}")

    def _table_before(self, path: Path, done: int) -> str:
        """The table of the first ``done`` rounds, as it was when the checkpoint was written.

        Raises:
            DamagedFile: it has changed since.
        """
        content = path.read_bytes()
        if self._written.get("rounds") == done:
            content = content[: self._written["bytes"]]
            if hashlib.sha256(content).hexdigest() != self._written["sha256"]:
                changed = f"its rows of rounds 0 to {done - 1} have changed since the checkpoint was written"
                raise DamagedFile(f"{path}: {changed}; put it back, or remove it to go on without these rows")
            return content.decode()
        # A checkpoint of an earlier version, or of the middle of a round, has no digest.
        return _csv(_rows_before(path, done), header=True)

    def state_dict(self) -> dict[str, Any]:
        """How many rounds the table has, its bytes and SHA-256, so that a resumed run knows its own rows."""
        path = self.folder / ROUNDS
        if not path.exists():
            return {}
        content = path.read_bytes()
        return {
            "rounds": self._recorded,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember what the table was when the checkpoint was written."""
        self._written = state_dict

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As :meth:`record_round`."""
        if trainer.is_global_zero:
            self.record_round(client_of(pl_module))

    def record_round(self, client: Client) -> dict[str, Any]:
        """Add the row of the finished round, unless that has been done; after an evaluation, also write the matrix.

        Callbacks that display these files call this first.

        Returns:
            The row: column -> value.
        """
        federation = client.require_federation()
        if self._recorded == federation.round:
            return self.last_row
        self._recorded = federation.round
        plan = federation.schedule.round(federation.round - 1)
        evaluated = federation.schedule.evaluates_after(plan)
        self.last_row = self._row(client, plan, federation.schedule.row_is_whole(plan))
        self._append_round(self.last_row)
        if evaluated:
            self._write_tables(federation)
        if federation.finished:
            self._draw(client)  # before loggers, which show these pictures
        return self.last_row

    def _row(self, client: Client, plan: RoundPlan, evaluated: bool) -> dict[str, Any]:
        federation = client.require_federation()
        channel = federation.channel
        row: dict[str, Any] = {
            "round": plan.round,
            "task": plan.task,
            "round_in_task": plan.round_in_task,
            "clients": len(plan.clients),
            "loss": client.mean_loss,
            "uplink_bytes": channel.total_uplink_bytes,
            "downlink_bytes": channel.total_downlink_bytes,
            "skipped_clients": sum(1 for entry in channel.skipped if entry[0] == plan.round),
            "seconds": federation.seconds,
            federation.measure.figure: federation.curve[plan.round] if evaluated else "",
        }
        matrix = mean_matrix(federation) if evaluated else None
        for task in range(federation.data.num_tasks):
            row[f"{federation.measure.figure}_task_{task}"] = "" if matrix is None else matrix[plan.task, task].item()
        for name, beside in federation.measured.beside().items():
            values = (beside.nanmean(0) if federation.measures_clients else beside)[plan.task].tolist()
            row |= {f"{name}_task_{task}": value if evaluated else "" for task, value in enumerate(values)}
        return row

    def _append_round(self, row: dict[str, Any]) -> None:
        path = self.folder / ROUNDS
        new = not path.exists() or path.stat().st_size == 0
        append(path, _csv([row], header=new))

    def write_matrices(self, federation: Federation) -> None:
        """Write the measure's matrix, and the one with known tasks if there is one."""
        name = federation.measure.name
        write_matrix_csv(self.folder / matrix_file(name), mean_matrix(federation), mean_initial(federation))
        for suffix, known in known_tasks(federation).items():
            write_matrix_csv(self.folder / matrix_file(name, suffix), *_means(federation, known))
        if federation.measures_clients:
            folder = self.folder / CLIENTS
            with writing(folder):
                folder.mkdir(exist_ok=True)
            for client, (matrix, initial) in enumerate(
                zip(federation.measured.compute(), federation.measured.initial(), strict=True)
            ):
                write_matrix_csv(folder / client_matrix_file(name, client), matrix, initial)

    def summary(self, federation: Federation) -> dict[str, Any]:
        """All figures of the run by their names in ``summary.json``."""
        data, channel = federation.data, federation.channel
        figures: dict[str, Any] = {
            "method": method_name(federation.methods),
            "benchmark": self.name_of(data),
            "partition": data.partition.name,
            "participation": data.participation.name,
            "scenario": data.scenario,
            "seed": data.seed,
            **federation.figures(federation.measured),
            **({} if (after := federation.last_whole_row()) is None else federation.measured.details(after)),
            "uplink_bytes": channel.total_uplink_bytes,
            "downlink_bytes": channel.total_downlink_bytes,
            "uplink_bytes_by_topic": dict(channel.uplink_bytes),
            "downlink_bytes_by_topic": dict(channel.downlink_bytes),
            "seconds": federation.seconds,
            "rounds": federation.round,
            "tasks": data.num_tasks,
            "clients": data.num_clients,
            "config_hash": self.config_hash,
            "parameters": sum(p.numel() for p in federation.network.parameters()),
            "server_sees": "single clients' messages" if channel.individual_allowed else "sums only",
            "skipped_clients": len(channel.skipped),
            "skipped_messages": Counter(topic for _, topic, _ in channel.skipped_messages),
            "data_unlike_published": data.stream.unlike_published,
            "data_digests": data.digests,
            "processes": distributed.count(),
            "engine": federation.engine,
            "client_storage_bytes": federation.client_storage(),
            "model_bytes": data.num_clients * payload_bytes(dict(federation.network.named_parameters())),
            "extra_local_computation": federation.computes_more_locally,
            "used_space": None,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
            "device": str(next(federation.network.parameters()).device),
            "versions": self.versions,
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%S"),
        }
        for suffix, matrix in known_tasks(federation).items():
            figures |= {f"{key}{suffix}": value for key, value in federation.figures(matrix).items()}
        if self.targets.accuracies:
            figures["rounds_to_accuracy"] = self.targets.rounds(federation.curve)
        if self.targets.accuracies or self.privacy.budget is not None:
            figures["stopped_early"] = federation.stopped
        if channel.integers is not None:
            figures["integer_sums"] = channel.integers.summary()
        figures |= self.privacy.summary(federation)
        figures |= self.local_models.summary()
        return figures | methods_figures(federation.methods)

    def _write_tables(self, federation: Federation) -> None:
        """Write the matrices and the methods' tables."""
        self.write_matrices(federation)
        for name, method in federation.methods.items():
            _write_csv(self.folder / f"{name}.csv", method.report().rows)
        _write_csv(self.folder / PRIVACY, self.privacy.rows(federation))

    def _draw(self, client: Client) -> None:
        """Draw a finished run's pictures. Those that cannot be written are left out, with a warning."""
        with if_possible():
            self._draw_each(client)
        self._drawn = True

    def _draw_each(self, client: Client) -> None:
        federation = client.require_federation()
        matrix, method = mean_matrix(federation), printed_methods(federation.methods)
        title = f"{method} on {self.name_of(federation.data)}"
        self.draw_partition(federation.data)
        measure, name = federation.measure, federation.measure.name
        save_figure(accuracy_heatmap(matrix, title, measure=measure), self.folder / matrix_file(name, ending="png"))
        curve = accuracy_curve({method: matrix}, measure, {method: federation.means()})
        save_figure(curve, self.folder / f"{name}_curve.png")
        if federation.schedule.settings.evaluate_every:
            curves = learning_curves({method: federation.curve}, self.targets.accuracies, measure)
            save_figure(curves, self.folder / f"{name}_rounds.png")
        self._draw_samples(client)

    def _finish(self, client: Client) -> None:
        """Write the summary of a finished run, after everything else, including the last checkpoint.

        A run killed between its last checkpoint and its summary is finished by resuming it.
        """
        federation, path = client.require_federation(), self.folder / SUMMARY
        if path.exists():
            return
        if not self._drawn:
            self._write_tables(federation)
            self._draw(client)
        text = json.dumps(_finite(self.summary(federation)), indent=2, allow_nan=False) + "\n"
        tables = [self.folder / f"{name}.csv" for name in (*TABLES, *federation.methods)]
        tables += [*(self.folder / CLIENTS).glob(f"{matrix_file(federation.measure.name, '_*')}"), self.folder / CONFIG]
        names = [str(table.relative_to(self.folder)) for table in tables if table.is_file()]
        write_checksums(self.folder, names, {SUMMARY: text})
        write_whole(path, text)

    def _draw_samples(self, client: Client) -> Path | None:
        """Write ``samples.png`` if the run has a density of images, or detects objects."""
        drawn = draw_images(client, self.samples) or draw_boxes(client, self.samples)
        if drawn is None:
            return None
        federation = client.require_federation()
        on = f"{printed_methods(federation.methods)} on {self.name_of(federation.data)}"
        picture = sample_grid(drawn.images, f"{on}: {drawn.what} {drawn.whose}", drawn.row_names, drawn.inches)
        return save_figure(picture, self.folder / "samples.png")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the folder for other processes."""
        if stage == "fit" and trainer.is_global_zero:
            folder_lock.release(self.folder)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Release the folder after an error, too."""
        if trainer.is_global_zero:
            folder_lock.release(self.folder)

    # Showing the result.

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write and print the figures of a finished run."""
        federation = federation_of(pl_module)
        if federation.finished and trainer.is_global_zero:
            self._finish(client_of(pl_module))
            self.show(federation)
            print(f"run folder: {self.folder}")
            print(f"to compare all runs there: cfl compare {shlex.quote(str(self.folder.parent))}", flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After ``cfl validate``, print the same figures as after a fit."""
        if trainer.state.fn == "validate" and trainer.is_global_zero:
            self.show(federation_of(pl_module))
            try:
                picture = self._draw_samples(client_of(pl_module))
            except OSError as error:  # a read-only folder; the figures are printed already
                print(f"samples: not written ({error})", flush=True)
                return
            if picture is not None:
                print(f"samples: {picture}", flush=True)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After ``cfl test``, print the same figures as after a fit."""
        if trainer.is_global_zero:
            self.show(federation_of(pl_module))

    def show(self, federation: Federation) -> None:
        """Print accuracy matrix, ACC, FGT, BWT and FWT, the bytes of all clients together and the time."""
        print_table(matrix_table(mean_matrix(federation), federation.measure, federation.means()))
        after, plan_of, whole = federation.last_task, federation.schedule, federation.last_whole_row()
        if plan_of.client_clocks and not federation.finished:
            at = federation.rows_due(everyone=True).values()
            of_all = f"figures are after task {whole}, the last after which all have been evaluated"
            print(
                f"clients are at tasks {min(at)} to {max(at)}: "
                + ("not all have been evaluated yet" if whole is None else of_all)
            )
        if federation.stopped:
            met = self.targets.end_the_run(federation.curve)
            why = "all targets are met" if met else self.privacy.why_stopped
            print(f"stopped after {federation.round} of {plan_of.num_rounds} rounds: {why}")
        elif federation.round and not plan_of.round(federation.round - 1).last_of_task:
            print(f"task {after} is not finished: {federation.round} of {plan_of.num_rounds} rounds")
        formulas = federation.measure.formulas
        known = [(" (task known)", federation.figures(matrix)) for matrix in known_tasks(federation).values()]
        shown = [
            (key.upper() + ending, values[key], formula)
            for ending, values in [("", federation.figures(federation.measured)), *known]
            for key, formula in formulas.items()
        ]
        width = max(len(name) for name, _, _ in shown)
        for name, value, formula in shown:
            print(f"{name:<{width}} {'undefined' if value is None else rounded(value, 3).rjust(9)}   {formula}")
        for line in rounds_in_words(self.targets.rounds(federation.curve), federation.round):
            print(line)
        for figure, epsilon in self.privacy.summary(federation).items():
            if figure in UNITS and epsilon is not None:
                delta = self.privacy.accountant.delta
                print(f"epsilon {rounded(epsilon, 3)} (delta {delta:g}): {UNITS[figure]}")
        sent = (federation.channel.total_uplink_bytes, federation.channel.total_downlink_bytes)
        up, down = (rounded(number / 1e6, 2, ",") for number in sent)
        seconds = rounded(federation.seconds, 1, ",")
        print(f"{federation.round:,} rounds, uplink {up} MB, downlink {down} MB, {seconds} s")


def methods_figures(methods: Mapping[str, Any]) -> dict[str, Any]:
    """The methods' figures for the summary; a figure that several have gets the method's name as prefix."""
    found = {name: method.report().figures for name, method in methods.items()}
    several = Counter(key for figures in found.values() for key in figures)
    return {
        key if several[key] == 1 else f"{name}_{key}": value
        for name, figures in found.items()
        for key, value in figures.items()
    }


def mean_initial(federation: Federation) -> torch.Tensor:
    """The measure before training, ``[T]``; the mean over clients if each has its own model."""
    return _means(federation, federation.measured)[1]


def known_tasks(federation: Federation) -> dict[str, TaskMatrix]:
    """Suffix of file names -> the matrix with the tasks of test samples known, if there is one."""
    return {} if federation.known is None else {federation.measure.known: federation.known}


def _dealt(data: FederatedDataModule) -> Sequence[Mapping[int, np.ndarray]]:
    """Per task of the stream, client id to indices into its training samples."""
    return data.indices if data.order is None else data.dealt


def _means(federation: Federation, matrix: TaskMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix ``[T, T]`` and its row before training ``[T]``; means over clients if each has its own."""
    values = matrix.compute(), matrix.initial()
    return (values[0].nanmean(0), values[1].nanmean(0)) if federation.measures_clients else values


def _finite(tree: Any) -> Any:
    """Nested dictionaries and lists with None in place of NaN and infinity, which JSON cannot represent."""
    if isinstance(tree, Mapping):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a table atomically, because rows of earlier rounds are stored nowhere else."""
    if rows:
        write_whole(path, _csv(rows, header=True))


def _csv(rows: list[dict[str, Any]], header: bool) -> str:
    """Rows as lines of a table, which has the columns of the first."""
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _rows_before(path: Path, round: int) -> list[dict[str, Any]]:
    """The rows of the rounds before one; what a killed process left of a line is none of them.

    Raises:
        DamagedFile: there are others, or values that are no numbers.
    """
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    try:
        rows = list(csv.DictReader(io.StringIO(whole.decode("ascii")), strict=True))
        for row in rows:
            for value in row.values():
                float(value or "nan")
        before = [row for row in rows if int(row["round"]) < round]
    except (ValueError, TypeError, KeyError, csv.Error):
        before = []
    if [int(row["round"]) for row in before] != list(range(round)):
        needed = f"a row of numbers for each round from 0 to {round - 1}"
        raise DamagedFile(f"{path} is damaged: it lacks {needed}; without the file the run goes on without these rows")
    return before
