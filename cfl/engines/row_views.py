"""Gives a cohort's weights and gradients client by client, as views that are kept from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from cfl.engines.cohort import Cohort
from cfl.engines.quadratic_pull import PullSteps
from cfl.engines.updates import FusedSgd, KeepGradients, Update

Rows = TypeVar("Rows")


class Views(Generic[Rows]):
    """Keeps views of the rows of clients and stacks, because making them again costs more than a small step.

    Args:
        tensors: name -> a tensor or a tuple of tensors: ``[k, ...]`` of k clients, or ``[1, ...]`` or ``[]`` of all.
    """

    def __init__(self, tensors: Mapping[str, Rows] | None = None) -> None:
        self.tensors: Mapping[str, Rows] = {} if tensors is None else tensors
        self._views: dict[tuple[int, int], dict[str, Rows]] = {}

    def of(self, start: int, rows: int) -> dict[str, Rows]:
        """Name -> ``[...]`` of one client, or ``[rows, ...]`` of a stack of several from ``start`` on.

        What a stack's clients share stays ``[1, ...]`` or ``[]``.
        """
        key = (start, rows)
        if key not in self._views:
            self._views[key] = {name: _of_rows(values, start, rows) for name, values in self.tensors.items()}
        return self._views[key]


def _of_rows(values: Any, start: int, rows: int) -> Any:
    if isinstance(values, tuple):
        return tuple(_of_rows(value, start, rows) for value in values)
    if not values.ndim:
        return values
    if len(values) == 1:
        return values if rows > 1 else values[0]
    return values[start : start + rows] if rows > 1 else values[start]


class RowViews:
    """Weights, gradients and pulls of the clients of one cohort after another.

    Attributes:
        weights: of the cohort.
        gradients: of the clients' last step; no tensors until a step leaves gradients.
        pulls: on the clients.
        keeps: whether the present step leaves gradients, instead of taking the optimizer's step at once.
    """

    def __init__(self) -> None:
        self.weights, self.gradients, self._spare = Views[Tensor](), Views[Tensor](), Views[Tensor]()
        self.pulls, self.keeps = Views[tuple[Tensor, Tensor]](), False
        self._cohort: Cohort | None = None

    def use(self, cohort: Cohort, pulls: PullSteps, keeps: bool) -> None:
        """Prepare a step of a cohort. Views and gradients of an earlier, different cohort are dropped."""
        self._take(cohort)
        if self.pulls.tensors is not pulls:
            self.pulls = Views(pulls)
        self.keeps = keeps
        if keeps and not self.gradients.tensors:
            self.gradients = Views({name: torch.zeros_like(room) for name, room in cohort.data.items()})

    def update(self, start: int, rows: int, fused_sgd: tuple[float, float] | None) -> Update:
        """The update that receives the gradients of some clients."""
        if fused_sgd is None:
            return KeepGradients(self.gradients.of(start, rows))
        return FusedSgd(self.weights.of(start, rows), *fused_sgd, self.pulls.of(start, rows))

    def _take(self, cohort: Cohort) -> None:
        if self._cohort is not cohort:
            self._cohort = cohort
            self.weights, self.gradients, self._spare = Views(cohort.data), Views(), Views()

    @contextmanager
    def other_gradients(self, cohort: Cohort) -> Iterator[None]:
        """Within the context, write gradients to other memory; afterwards restore the former gradients."""
        self._take(cohort)
        own, keeps = self.gradients, self.keeps
        self.gradients = self._spare
        try:
            yield
        finally:
            self._spare, self.gradients, self.keeps = self.gradients, own, keeps
