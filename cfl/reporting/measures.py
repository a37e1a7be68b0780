"""What is compared: measures with a matrix over tasks, and figures of a whole run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cfl.runtime.run_files import matrix_file

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Measure:
    """Something that is measured on every task after every task.

    Attributes:
        key: identifies it.
        name: for readers.
        unit: of its values.
        better: which values are.
        file: of the run folder, with the matrix as :func:`cfl.reporting.matrix_file.write_matrix_csv` writes it.
    """

    key: str
    name: str
    unit: str
    better: Better
    file: str


MEASURES = (
    Measure("accuracy", "accuracy", "%", "higher", matrix_file("accuracy")),
    Measure("accuracy_task_il", "accuracy, task known", "%", "higher", matrix_file("accuracy", "_task_il")),
    Measure("nll", "negative log-likelihood", "nats", "lower", matrix_file("nll")),
    Measure("nll_task_aware", "negative log-likelihood, task known", "nats", "lower", "nll_matrix_task_aware.csv"),
)
"""Those a run may have; it always has the first, or where it estimates a density the third."""

CURVES = {"accuracy": "acc", "nll": "nll"}
"""A run's own measure -> the figure of its learning curve, a column of ``rounds.csv``."""


@dataclass(frozen=True)
class Figure:
    """A figure of a whole run, averaged over seeds and ranked.

    Attributes:
        key: an entry of ``summary.json``.
        heading: of its column.
        meaning: one sentence for captions.
        better: which values are; None where neither is.
        decimals: shown.
        signed: whether a plus sign is shown.
        divisor: of the value before it is shown, 1e6 for bytes in MB.
    """

    key: str
    heading: str
    meaning: str
    better: Better | None
    decimals: int = 2
    signed: bool = False
    divisor: float = 1.0


FIGURES = (
    Figure("acc", "ACC %", "mean accuracy over all tasks at the end", "higher"),
    Figure("acc_task_il", "ACC % (task known)", "the same where the task is known at test time", "higher"),
    Figure("nll", "NLL", "mean negative log-likelihood over all tasks at the end", "lower", 4),
    Figure("nll_task_aware", "NLL (task known)", "the same where the task is known at test time", "lower", 4),
    Figure("base_nll", "NLL of task 0", "negative log-likelihood on the first task at the end", "lower", 4),
    Figure("new_nll", "NLL of last task", "negative log-likelihood on the last task at the end", "lower", 4),
    Figure("nll_forgetting", "NLL forgetting", "mean rise above the lowest value that a task had before", "lower", 4),
    Figure("fgt", "FGT", "mean loss of accuracy since each task was learned, in points", "lower"),
    Figure("fgt_max", "FGT max", "the same against the best accuracy before the last task", "lower"),
    Figure("bwt", "BWT", "backward transfer in points, the negative of FGT", "higher", signed=True),
    Figure("fwt", "FWT", "forward transfer: points known of a task before it is learned", "higher", signed=True),
    Figure("acc_worst_client", "worst client %", "the lowest ACC of any client", "higher"),
    Figure("uplink_bytes", "uplink MB", "sent by all clients over all rounds; MB = 1e6 bytes", "lower", divisor=1e6),
    Figure("downlink_bytes", "downlink MB", "received by all clients over all rounds", "lower", divisor=1e6),
    Figure("epsilon_all_tasks", "epsilon", "of one client over all tasks, for the run's delta (privacy.csv)", "lower"),
    Figure("seconds", "seconds", "duration of the run on its machine", "lower", 1),
    Figure("used_space", "used space %", "share of the input space that a subspace method uses up", None),
)
"""In the order of the columns; a figure that no run has is left out."""

PRINTED = tuple(figure for figure in FIGURES if figure.key not in ("fgt_max", "acc_worst_client"))
"""The columns of the printed tables; pages and CSV files have all."""
