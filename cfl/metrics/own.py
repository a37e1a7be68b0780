"""Measures of a user's own: metrics of torchmetrics that are computed of the same tests as the run's measure."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

import torch
from torch import Tensor
from torchmetrics import Metric

from cfl.metrics.base import Better, own_key
from cfl.metrics.collected import CollectedMatrix, Place
from cfl.metrics.transfer import average_accuracy, transfers
from cfl.runtime.error_context import ErrorContext
from cfl.runtime.errors import ConfigError, with_line_of_class

_TRIED = (41, 26)  # samples in two batches; without a common divisor, as shares of both would often be equal
_SIMPLE = (bool, int, float, str, type(None))


class OwnMatrix(CollectedMatrix):
    """The matrix over tasks of a metric of torchmetrics, and its mean, FGT, BWT and FWT.

    ``update`` of the metric gets test batches on the CPU. If the run classifies, these are the logarithms of the
    probabilities of all outputs, ``[B, O]`` float32, and the classes, ``[B]`` int64; the probabilities are the softmax
    of the scores of those outputs that are to be chosen among, the others have ``-inf``. If it predicts numbers, they
    are the predictions and the targets, ``[B, D]`` float32. Each value is computed by a copy of the metric, from all
    test samples of one task. Values that are not finite are undefined.

    Attributes:
        better: which values are better, ``higher`` or ``lower``.
        definition: class of the metric and its simple attributes, to recognise the same metric in a checkpoint.

    Other arguments and errors as for :class:`cfl.metrics.task_matrix.TaskMatrix`.

    Args:
        name: name of the measure.
        metric: the metric, which is not changed.
        of_classes: whether the run classifies; otherwise it predicts numbers.

    Raises:
        ConfigError: it is no metric, or does not say whether higher values are better.
    """

    def __init__(
        self, name: str, metric: Metric, of_classes: bool, num_tasks: int, num_clients: int | None = None
    ) -> None:
        super().__init__(num_tasks, num_clients)
        self.key, self._of_classes = own_key(name), of_classes
        self._path = f"{type(metric).__module__}.{type(metric).__qualname__}"
        if not isinstance(metric, Metric) or metric.higher_is_better is None:
            raise ConfigError(self.key, self._path, "a torchmetrics.Metric with higher_is_better = True, or False")
        own = vars(metric).keys() - _of_every_metric()
        options = {key: value for key, value in vars(metric).items() if key in own and _is_option(metric, key, value)}
        self.definition = f"{self._path}({', '.join(f'{key}={options[key]!r}' for key in sorted(options))})"
        self.better: Better = "higher" if metric.higher_is_better else "lower"
        self._template = [metric]  # in a list, so that its states are no part of this module's

    def add(
        self, row: int, task: int, outputs: Tensor, y: Tensor, allowed: Tensor | None, client: int | None = None
    ) -> None:
        """See :meth:`cfl.metrics.task_matrix.TaskMatrix.add`."""
        self.update(row, task, *self._inputs(outputs, y, allowed), client)

    def update(self, row: int, task: int, scores: Tensor, y: Tensor, client: int | None = None) -> None:
        """Hand a batch to the metric of an element; arguments as for ``add``, with what the metric gets."""
        place = self._place(row, task, client)
        if place not in self._seen:
            self._seen[place] = [self._copy()]
        with self._named():
            self._seen[place][0].update(scores, y)

    def try_out(self, num_outputs: int, allowed: Tensor | None) -> None:
        """Refuse a metric that fails, gives no single number, or depends on how samples are divided into batches.

        Args:
            num_outputs: number of the network's outputs O.
            allowed: ``[O]`` bool, the outputs to choose among in tests of the first task; None for all.

        Raises:
            ConfigError: says what the metric lacks.
        """
        generator, count = torch.Generator().manual_seed(0), sum(_TRIED)
        outputs, y = torch.randn(2, count, num_outputs, generator=generator)
        if self._of_classes:
            classes = torch.arange(num_outputs) if allowed is None else allowed.cpu().nonzero().flatten()
            y = classes[torch.arange(count) % len(classes)]
            outputs[torch.arange(count), y] += 3  # many answers are right
        scores, y = self._inputs(outputs, y, allowed)
        try:
            whole, *parts = [self._copy() for _ in range(3)]
            whole.update(scores, y)
            for part, *batch in zip(parts, scores.split(_TRIED), y.split(_TRIED), strict=True):
                part.update(*batch)
            at_once, merged = merged_value([whole]), merged_value(parts)
        except Exception as error:
            gets = "log-probabilities [B, O] and classes [B]" if self._of_classes else "predictions and targets [B, D]"
            valid = f"a metric that computes one number of {gets}; {with_line_of_class(error, type(self._template[0]))}"
            raise ConfigError(self.key, self._path, valid) from error
        if not (math.isclose(at_once, merged, rel_tol=1e-4, abs_tol=1e-6) or math.isnan(at_once + merged)):
            found = f"{at_once:g} of all samples at once, {merged:g} of the same samples in two batches"
            valid = f"a metric whose states (add_state, with dist_reduce_fx) add up over batches; {found}"
            raise ConfigError(self.key, self._path, valid)

    def _named(self) -> ErrorContext:
        """Names the metric in its errors, which may be of test sets that :meth:`try_out` could not know."""
        return ErrorContext(lambda: f"{self.key} ({self._path}) failed")

    def _copy(self) -> Metric:
        copy: Metric = self._template[0].clone()
        copy.distributed_available_fn = _never  # add_up has collected from all processes already
        return copy

    def _inputs(self, outputs: Tensor, y: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        outputs, y = outputs.detach().cpu().float(), y.cpu()
        if not self._of_classes:
            return outputs, y.float()
        if allowed is not None:
            outputs = outputs.masked_fill(~allowed.cpu(), -torch.inf)
        return outputs.log_softmax(1), y

    def _set(self, place: Place, found: Sequence[Metric]) -> None:
        with self._named():
            value = merged_value(found)
        if math.isfinite(value):
            self.sums[place], self.counts[place] = value, 1

    def _figures(self, a: Tensor, t: int) -> dict[str, Tensor]:
        moved = transfers(a, self.initial(), self.better == "lower", t)
        return {self.key: average_accuracy(a, t), **{f"{self.key}.{key}": figure for key, figure in moved.items()}}

    def _of_clients(self, defined: Tensor) -> dict[str, float | None]:
        return {}


def merged_value(parts: Sequence[Metric]) -> float:
    """The value of all samples that several copies of a metric have seen. The first copy is changed.

    States are merged as torchmetrics merges those of several processes.
    """
    first = parts[0]
    for name, reduce in first._reductions.items() if len(parts) > 1 else ():
        states = [getattr(part, name) for part in parts]
        if isinstance(states[0], list):
            setattr(first, name, [entry for state in states for entry in state])
        else:
            stacked = torch.stack(states)
            setattr(first, name, reduce(stacked) if callable(reduce) else stacked)
    return float(first.compute())


def _is_option(metric: Metric, name: str, value: object) -> bool:
    """Whether an attribute is no state and has a value that is written alike in every process."""
    values = value if isinstance(value, list | tuple) else [value]
    return name[0] != "_" and name not in metric._defaults and all(isinstance(one, _SIMPLE) for one in values)


def _of_every_metric() -> Set[str]:
    """Names of the attributes that torchmetrics gives every metric."""
    bare = object.__new__(OwnMatrix)  # Metric itself is abstract, and this class's __init__ adds attributes
    Metric.__init__(bare)
    return vars(bare).keys()


def _never() -> bool:
    return False
