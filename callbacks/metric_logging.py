"""Sends figures to Lightning's loggers: scalars after every round, matrix and pictures after every task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from cfl.callbacks.checkpoint import record_of
from cfl.callbacks.run_figures import figures_by_owner
from cfl.federation import matrix_rows
from cfl.federation.federation import Federation
from cfl.methods.returned_values import check_report
from cfl.reporting.experiment import flatten, method_name, setting_hash
from cfl.runtime.run_files import PARTITION_PICTURE, SAMPLES
from cfl.training.access import client_of, federation_of
from cfl.training.evaluation import mean_matrix

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class DashboardLog(Callback):
    """Sends figures to every logger of the Trainer, under the same names.

    ``round`` and ``task`` are the axes. ``train/loss``, ``comm/uplink_bytes``, ``comm/downlink_bytes`` (so far) and
    ``time/seconds`` are logged after every round. ``cl/acc``, ``cl/fgt``, ``cl/fgt_max``, ``cl/bwt``, ``cl/fwt``
    (percent and points) and ``task_03/acc`` are logged after each evaluation, and so is a method's own table, as
    ``<method>/<layer>/<column>``; rows of several clients are averaged. ``cl/rounds_to_90`` is logged once, when that
    target is met, ``final/acc`` and the like after the run's last round only. A run that stops before its last task has
    no ``final/acc``.

    TensorBoard and wandb also get the pictures of the run folder: ``data/partition`` once, ``cl/accuracy_heatmap``
    (TensorBoard: ``cl/accuracy_matrix``) and ``cl/accuracy_curve`` at every task's end, ``cl/learning_curve`` at the
    run's end if it was evaluated between task ends, and ``cl/samples`` at the run's end if images were drawn from a
    density or tested by a detector. Wandb also gets the matrix as a table.

    Without a logger it does nothing; the CSV files of the run folder hold all figures. With several processes only the
    first logs.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Define the axes at wandb, and log the configuration to every logger."""
        if not trainer.is_global_zero:
            return
        record = record_of(trainer)
        record.begin(trainer, pl_module)
        federation = federation_of(pl_module)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and federation.round > 0:
                # Rounds after the checkpoint, which a killed run has logged, run again.
                logger.experiment.close()
                logger.experiment.purge_step = federation.round
            if isinstance(logger, WandbLogger):
                define_axes(logger, federation)
                logger.experiment.config.update(
                    {
                        **record.experiment,
                        "benchmark": record.name_of(federation.data),
                        "method": method_name(federation.methods),
                        "partition": federation.data.partition.name,
                        "setting": setting_hash(record.experiment),
                        "config_hash": record.config_hash,
                    },
                    allow_val_change=True,
                )
            elif record.experiment:
                logger.log_hyperparams({key: _plain(value) for key, value in flatten(record.experiment).items()})
            if federation.round == 0:  # a resumed run has logged it already
                record.draw_partition(federation.data)
                picture = record.folder / PARTITION_PICTURE
                if _is_written(picture):
                    _log_picture(logger, "data/partition", picture, {"round": 0, "task": 0})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the figures of the round."""
        if not (trainer.loggers and trainer.is_global_zero):
            return
        federation = federation_of(pl_module)
        plan = federation.schedule.round(federation.round - 1)
        record = record_of(trainer)
        row = record.record_round(client_of(pl_module))
        figures: dict[str, float] = {
            "round": plan.round,
            "task": plan.task,
            "train/loss": row["loss"],
            "comm/uplink_bytes": row["uplink_bytes"],
            "comm/downlink_bytes": row["downlink_bytes"],
            "time/seconds": federation.seconds,
        }
        if federation.schedule.row_is_whole(plan):
            figures |= evaluation_figures(federation, plan.task)
            rounds_to = record.targets.rounds(federation.curve)
            figures |= {f"cl/rounds_to_{name}": found for name, found in rounds_to.items() if found == federation.round}
        if federation.finished and not (federation.stopped and plan.task + 1 < federation.data.num_tasks):
            final = [key for key in federation.measure.of_papers if f"cl/{key}" in figures]
            figures |= {f"final/{key}": figures[f"cl/{key}"] for key in final}
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=plan.round)
        if plan.last_of_task or federation.finished:
            for logger in trainer.loggers:
                self._log_matrix(logger, federation, record.targets.accuracies, plan.round, plan.task)
        samples = record.folder / SAMPLES
        if federation.finished and _is_written(samples):
            for logger in trainer.loggers:
                _log_picture(logger, "cl/samples", samples, {"round": plan.round, "task": plan.task})

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End wandb's run, so that another fit in this process does not write into it."""
        _end_wandb_run(trainer, exit_code=0)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End wandb's run as failed. After an error in a ``setup`` Lightning calls no ``teardown``."""
        _end_wandb_run(trainer, exit_code=1)

    @staticmethod
    def _log_matrix(logger: Logger, federation: Federation, targets: Sequence[float], round: int, task: int) -> None:
        from cfl.callbacks.run_pictures import drawn_curves  # matplotlib is slow to import

        measure, place = federation.measure.name, {"round": round, "task": task}
        kind = "matrix" if isinstance(logger, TensorBoardLogger) else "heatmap"
        names = {"matrix": f"cl/{measure}_{kind}", "curve": f"cl/{measure}_curve", "rounds": "cl/learning_curve"}
        for name, picture in drawn_curves(federation, f"after task {task}", targets):
            _log_picture(logger, names[name], picture, place)
        if isinstance(logger, WandbLogger):
            import wandb

            matrix = mean_matrix(federation)
            columns: list[str | int] = ["after_task", *(f"task_{i}" for i in range(len(matrix)))]
            rows = [[t, *row] for t, row in enumerate(matrix.tolist()) if t <= task]
            logger.experiment.log({f"cl/{measure}_matrix": wandb.Table(columns=columns, data=rows), **place})


def _end_wandb_run(trainer: Trainer, exit_code: int) -> None:
    """End wandb's run, if the Trainer logs to wandb."""
    if trainer.is_global_zero and any(isinstance(logger, WandbLogger) for logger in trainer.loggers):
        import wandb

        wandb.finish(exit_code=exit_code)


def _log_picture(logger: Logger, name: str, picture: Figure | Path, place: Mapping[str, int]) -> None:
    """Log a figure, or an image's file, if the logger supports it.

    Args:
        logger: the logger of TensorBoard or wandb; nothing is done for others.
        name: name of the picture.
        picture: the figure, or the file of an image.
        place: the values of ``round`` and ``task``.
    """
    from matplotlib.image import imread

    if isinstance(logger, TensorBoardLogger):
        if isinstance(picture, Path):
            logger.experiment.add_image(name, imread(picture), global_step=place["round"], dataformats="HWC")
        else:
            logger.experiment.add_figure(name, picture, global_step=place["round"])
    elif isinstance(logger, WandbLogger):
        import matplotlib.pyplot  # noqa: F401 - wandb uses it without importing it
        import wandb

        image = wandb.Image((255 * imread(picture)).astype(np.uint8) if isinstance(picture, Path) else picture)
        logger.experiment.log({name: image, **place})


def _is_written(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def evaluation_figures(federation: Federation, task: int) -> dict[str, float]:
    """Name -> value of the measure's, the owners' and the methods' figures, and of each task's value, after ``task``.

    Undefined values are left out."""
    summary = federation.measured.summary(after=task)
    figures = {f"cl/{key}": value for key, value in summary.items() if value is not None}
    own = matrix_rows.own_figures(federation, task) | figures_by_owner(federation)
    figures |= {f"cl/{key}": value for key, value in own.items() if value is not None}
    matrix = mean_matrix(federation)
    figure = federation.measure.figure
    figures |= {f"task_{i:02d}/{figure}": value for i, value in enumerate(matrix[task].tolist()) if value == value}
    if federation.known is not None and (known := federation.known.summary(task)[figure]) is not None:
        figures[f"cl/{figure}{federation.measure.known}"] = known
    for name, method in federation.methods.items():
        rows = [row for row in check_report(name, method.report()).rows if _task_of(row, federation) == task]
        figures |= {f"{name}/{key}": value for key, value in _method_figures(rows).items()}
    return figures


def _task_of(row: Mapping[str, Any], federation: Federation) -> int | None:
    """The task of a row in a method's table; None if it names neither a task nor a round."""
    if "task" in row:
        return int(row["task"])
    return federation.schedule.task_of(row["round"]) if "round" in row else None


def _method_figures(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """A task's figures in a method's table: means over rows of clients, otherwise the values of the last row.

    Args:
        rows: the rows of one task.

    Returns:
        Column, or ``<layer>/<column>``, -> value; columns without numbers are left out.
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        place = f"{row['layer']}/" if "layer" in row else ""
        for key, value in row.items():
            if not isinstance(value, int | float) or key in ("task", "client"):
                continue
            if "client" in row:
                found.setdefault(place + key, []).append(value)
            else:
                found[place + key] = [value]
    return {key: sum(values) / len(values) for key, values in found.items()}


def define_axes(logger: WandbLogger, federation: Federation) -> None:
    """Plot everything over ``round``; Lightning defines axes only for runs that it starts itself."""
    run = logger.experiment
    run.define_metric("round")
    run.define_metric("task")
    for pattern in (
        "cl/*",
        "train/*",
        "comm/*",
        "time/*",
        "data/*",
        "task_*",
        *(f"{name}/*" for name in federation.methods),
    ):
        run.define_metric(pattern, step_metric="round")


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool) else str(value)
