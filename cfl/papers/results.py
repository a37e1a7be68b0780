"""Finished runs and the figures that tables take from them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cfl.metrics.transfer import forgetting_max
from cfl.papers.expressions import Undefined, evaluate
from cfl.papers.grids import Grid, attention_grid
from cfl.reporting.attention import Attention, read_attention
from cfl.reporting.checksums import check_unchanged
from cfl.reporting.compare.reading import read_space
from cfl.reporting.csv_file import RunFolderError, read_csv
from cfl.reporting.experiment import config_hash
from cfl.reporting.matrix_file import read_matrix_csv
from cfl.reporting.names import is_method_name
from cfl.reporting.rounds_file import read_rounds, rounds_to
from cfl.reporting.summary_file import read_summary
from cfl.running import finished
from cfl.running.finished import Finished, Results, run_and_experiment
from cfl.runtime.run_files import CONFIG, ROUNDS, matrix_file

_OF_TASK = re.compile(r"_task_\d+$")


@dataclass(frozen=True, eq=False)
class Result(Finished):
    """One finished run with its figures.

    Attributes:
        summary: the content of ``summary.json``.
        matrix: ``[T][T]`` in percent, row = after task, column = task; None where not evaluated.
        space: layer -> percent of its input space used after each task but the last, or with FOT's ``last_extraction``
            after each; empty if no method records it.
        client_epochs: local epochs of all clients over all rounds together.
        rounds: ACC in percent after each round, None after rounds without an evaluation; empty for a run that was
            evaluated at task ends only.
        matrix_task_il: as ``matrix``, with the task known at test time, of a class-incremental run; else empty.
        attention: layer -> task -> attention between clients; empty without attention.
        columns: further columns of single tasks, such as ``map50_task_0`` -> value after each round, None after rounds
            without an evaluation; empty for a run that was evaluated at task ends only.
    """

    summary: Mapping[str, Any]
    matrix: list[list[float | None]]
    space: Mapping[str, list[float]] = field(default_factory=dict)
    client_epochs: int | None = None
    rounds: Sequence[float | None] = ()
    matrix_task_il: Sequence[list[float | None]] = ()
    attention: Mapping[str, Mapping[int, Attention]] = field(default_factory=dict)
    columns: Mapping[str, Sequence[float | None]] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        """Hash of the experiment, seed included."""
        return config_hash(self.experiment)

    def figure(self, expression: str) -> Any:
        """Return a figure of the run: a number, a list with an entry per task or round, or a grid.

        Names are all entries of ``summary.json``; ``matrix[t, i]``; ``diagonal``; ``averages``, ACC after each task;
        ``task(i)``, the accuracy on task i after each task, null before it; ``forgettings``, ``fgt_max_last`` after
        each task, null after the first; of a class-incremental run also ``averages_task_il``, ``forgettings_task_il``
        and ``curves_task_il[i]``, as ``task(i)``; ``used(layer)`` in percent after each task but the last; ``layers``;
        ``client_epochs``; ``setting("data.num_clients")``; ``mean(list)``; ``yes(value)``, 1 above 0 and else 0. Of a
        run that was evaluated between task ends also ``curve``, ACC after each round, null where not evaluated; and
        ``rounds_to("90")``, the rounds until ACC first was at least 90 %, and ``column("map50_task_0")``, one of
        :attr:`columns`. If clients borrow from each other, also ``attention("fc1")``, a grid of the attention between
        clients in that layer in the last task.

        Raises:
            Undefined: the expression has no value for this run.
        """
        return evaluate(expression, self._names())

    def _names(self) -> dict[str, Any]:
        tasks = range(len(self.matrix))
        averages = [_mean(self.matrix[t][: t + 1]) for t in tasks]
        return {
            **self.summary,
            "matrix": self.matrix,
            "diagonal": [self.matrix[t][t] for t in tasks],
            "averages": averages,
            "forgettings": _forgettings(self.matrix) or None,
            "averages_task_il": [_mean(row[: t + 1]) for t, row in enumerate(self.matrix_task_il)] or None,
            "forgettings_task_il": _forgettings(self.matrix_task_il) or None,
            "curves_task_il": _curves(self.matrix_task_il) or None,
            "task": lambda i: [self.matrix[t][i] if t >= i else None for t in tasks] if i < len(tasks) else None,
            "used": lambda layer: self.space.get(layer),
            "layers": list(self.space),
            "client_epochs": self.client_epochs,
            "setting": self._setting,
            "mean": _mean,
            "yes": lambda value: float(value > 0),
            "curve": list(self.rounds) or None,
            "rounds_to": self._rounds_to,
            "column": lambda name: list(self.columns[name]) if name in self.columns else None,
            "attention": self._attention,
        }

    def _attention(self, layer: str) -> Grid:
        if layer not in self.attention:
            there = ", ".join(sorted(self.attention)) or "no layer"
            raise Undefined(f"attention is kept of {there}, not of {layer!r}")
        tasks = self.attention[layer]
        return attention_grid(tasks[max(tasks)], max(tasks), self.experiment["data"].get("sequences"))

    def _rounds_to(self, accuracy: str | float) -> int:
        if not self.rounds:
            raise Undefined("the run was evaluated at task ends only")
        try:
            found = rounds_to(self.rounds, float(accuracy))
        except ValueError:
            raise Undefined(f"{accuracy!r} is no accuracy in percent") from None
        if found is None:
            raise Undefined(f"never within {len(self.rounds)} rounds")
        return found

    def _setting(self, key: str) -> Any:
        found: Any = self.experiment
        for name in key.split("."):
            if not isinstance(found, Mapping) or name not in found:
                raise Undefined(f"the run has no setting {key}")
            found = found[name]
        return found


def _curves(matrix: Sequence[list[float | None]]) -> list[list[float | None]]:
    return [[row[i] if t >= i else None for t, row in enumerate(matrix)] for i in range(len(matrix))]


def _forgettings(matrix: Sequence[list[float | None]]) -> list[float | None]:
    if not matrix or any(None in row for row in matrix):
        return []
    a = torch.tensor(matrix, dtype=torch.float64)
    return [None, *(forgetting_max(a, t, include_last=True).item() for t in range(1, len(matrix)))]


def _mean(values: Iterable[float | None] | None) -> float | None:
    found = list(values or [])
    return None if not found or None in found else math.fsum(v for v in found if v is not None) / len(found)


def read_result(folder: Path) -> Result:
    """Read a finished run's folder.

    Raises:
        RunFolderError: the folder holds no finished run, or a file of the run is missing or damaged.
    """
    run, experiment = run_and_experiment(folder)
    reading = CONFIG
    space: dict[tuple[str, str], list[float]] = {}
    attention: dict[str, dict[int, Attention]] = {}
    try:
        schedule = experiment["schedule"]
        for name in experiment["methods"]:
            if not is_method_name(name):
                raise ValueError(f"no method can be called {name!r}")
            reading = f"{name}.csv"
            check_unchanged(folder, reading)
            if (folder / reading).is_file():
                attention |= read_attention(_rows(folder / reading))
                for layer, used in read_space(folder / reading, None if run.stopped_early else run.tasks).items():
                    space[layer, name] = [*used.values()]
        reading = ROUNDS
        has_rounds = (folder / reading).is_file()
        rounds = _rows(folder / reading) if has_rounds else []
        if has_rounds and len(rounds) != run.rounds:
            raise ValueError(f"{len(rounds)} rounds, summary.json says {run.rounds}")
        epochs = sum(int(row["clients"]) for row in rounds) * schedule["local_epochs"] if rounds else None
        between = bool(schedule.get("evaluate_every"))
        curve = read_rounds(folder / reading).get("acc", []) if between else []
        columns = _beside(rounds) if between else {}
        reading = matrix_file("accuracy", "_task_il")
        check_unchanged(folder, reading)
        task_il = _matrix(read_matrix_csv(folder / reading)[0]) if (folder / reading).is_file() else []
    except RunFolderError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise RunFolderError(f"{folder / reading}: not what a finished run leaves ({error})") from None
    methods_of = Counter(layer for layer, _ in space)
    return Result(
        experiment,
        folder,
        summary=read_summary(folder),
        matrix=_matrix(run.matrix),
        space={layer if methods_of[layer] == 1 else f"{name}.{layer}": used for (layer, name), used in space.items()},
        client_epochs=epochs,
        rounds=curve,
        matrix_task_il=task_il,
        attention=attention,
        columns=columns,
    )


def _beside(rounds: Sequence[Mapping[str, str]]) -> dict[str, list[float | None]]:
    """Return the columns of single tasks without those of the measure itself, which come first."""
    names = [name for name in rounds[0] if _OF_TASK.search(name)] if rounds else []
    own = _OF_TASK.sub("", names[0]) if names else ""
    others = [name for name in names if _OF_TASK.sub("", name) != own]
    return {name: [float(row[name]) if row[name] else None for row in rounds] for name in others}


def _matrix(matrix: torch.Tensor) -> list[list[float | None]]:
    return [[None if math.isnan(value) else value for value in row] for row in matrix.tolist()]


def _rows(path: Path) -> list[dict[str, str]]:
    header, lines = read_csv(path)
    return [dict(zip(header, row, strict=True)) for _, row in lines]


def read_results(root: Path) -> Results[Result]:
    """Read all finished runs below a folder; unreadable ones are left out, with the reason."""
    return finished.read_results(root, read_result)
