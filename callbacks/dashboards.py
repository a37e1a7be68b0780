"""The same figures for Lightning's loggers: scalars after every round, matrix and pictures after every task."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from callbacks.checkpoint import record_of
from callbacks.federated import _federation, mean_matrix
from cfl.experiment import flatten, method_name
from cfl.federation import Federation
from cfl.figures import accuracy_heatmap
from cfl.metrics import average_accuracy


class DashboardLog(Callback):
    """Sends figures to every logger of the Trainer, under the same names.

    ``round`` and ``task`` are the axes. ``cl/acc``, ``cl/fgt``, ``cl/fgt_max``, ``cl/bwt``, ``cl/fwt`` (percent and
    points) and ``task_03/acc`` come with an evaluation, ``cl/rounds_to_90`` once, when that target is met;
    ``train/loss``, ``comm/uplink_bytes``, ``comm/downlink_bytes`` (so far) and ``time/seconds`` with every round, and a
    method's own table as ``<method>/<layer>/<column>`` with every task. Wandb also gets the matrix as a table; it and
    TensorBoard get it as a picture.

    Without a logger it does nothing: the CSV files of the run folder hold everything. Of several processes the first
    logs.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell wandb the axes, and every logger the configuration."""
        if not trainer.is_global_zero:
            return
        record = record_of(trainer)
        federation = _federation(pl_module)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                define_axes(logger, federation)
                logger.experiment.config.update(
                    {
                        **record.experiment,
                        "benchmark": record.name_of(federation.data),
                        "method": method_name(federation.methods),
                        "config_hash": record.config_hash,
                    },
                    allow_val_change=True,
                )
            elif record.experiment:
                logger.log_hyperparams({key: _plain(value) for key, value in flatten(record.experiment).items()})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the round that has just been recorded."""
        if not (trainer.loggers and trainer.is_global_zero):
            return
        federation = _federation(pl_module)
        plan = federation.schedule.round(federation.round - 1)
        row = record_of(trainer).last_row
        figures: dict[str, float] = {
            "round": plan.round,
            "task": plan.task,
            "train/loss": row["loss"],
            "comm/uplink_bytes": row["uplink_bytes"],
            "comm/downlink_bytes": row["downlink_bytes"],
            "time/seconds": federation.seconds,
        }
        evaluated = federation.schedule.evaluates_after(plan)
        if evaluated:
            figures |= evaluation_figures(federation, plan.task)
            rounds_to = record_of(trainer).targets.rounds(federation.curve)
            figures |= {f"cl/rounds_to_{name}": found for name, found in rounds_to.items() if found == federation.round}
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=plan.round)
        if plan.last_of_task or federation.finished:
            for logger in trainer.loggers:
                self._log_matrix(logger, federation, plan.round, plan.task)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End wandb's run: another fit in this process would go on writing into it."""
        to_wandb = any(isinstance(logger, WandbLogger) for logger in trainer.loggers)
        if stage == "fit" and to_wandb and trainer.is_global_zero:
            import wandb

            wandb.finish()

    @staticmethod
    def _log_matrix(logger: Logger, federation: Federation, round: int, task: int) -> None:
        matrix = mean_matrix(federation)
        picture = accuracy_heatmap(matrix, f"after task {task}")
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure("cl/accuracy_matrix", picture, global_step=round)
        elif isinstance(logger, WandbLogger):
            import wandb

            columns: list[str | int] = ["after_task", *(f"task_{i}" for i in range(len(matrix)))]
            rows = [[t, *row] for t, row in enumerate(matrix.tolist()) if t <= task]
            logger.experiment.log(
                {
                    "cl/accuracy_matrix": wandb.Table(columns=columns, data=rows),
                    "cl/accuracy_heatmap": wandb.Image(picture),
                    "round": round,
                    "task": task,
                }
            )


def evaluation_figures(federation: Federation, task: int) -> dict[str, float]:
    """ACC, FGT, BWT, FWT and every task's accuracy after ``task``; undefined ones are left out."""
    summary = federation.accuracy.summary(after=task)
    figures = {f"cl/{key}": value for key, value in summary.items() if value is not None}
    matrix = mean_matrix(federation)
    figures |= {f"task_{i:02d}/acc": value for i, value in enumerate(matrix[task].tolist()) if value == value}
    if federation.accuracy_task_il is not None:
        known = federation.accuracy_task_il.compute()
        figures["cl/acc_task_il"] = average_accuracy(known, task).nanmean().item()
    for name, method in federation.methods.items():
        for row in method.task_rows():
            if row.get("task") != task:
                continue
            place = "/".join([name, str(row["layer"])]) if "layer" in row else name
            figures |= {
                f"{place}/{key}": value
                for key, value in row.items()
                if isinstance(value, int | float) and key != "task"
            }
    return figures


def define_axes(logger: WandbLogger, federation: Federation) -> None:
    """Plot everything over ``round``; Lightning defines axes only for runs that it starts itself."""
    run = logger.experiment
    run.define_metric("round")
    run.define_metric("task")
    for pattern in ("cl/*", "train/*", "comm/*", "time/*", "task_*", *(f"{name}/*" for name in federation.methods)):
        run.define_metric(pattern, step_metric="round")


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool) else str(value)
