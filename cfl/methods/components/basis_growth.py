"""How FOT's server lets the bases of layer inputs grow after a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import get_args

from torch import Tensor

from cfl.methods.components.capacity import check_capacity, room_for
from cfl.methods.components.importance import accumulated_importance
from cfl.methods.components.layer_inputs.spectrum import Spectrum
from cfl.methods.components.subspace import RankRule, choose_rank, grow_basis
from cfl.runtime.option_checks import check_choices, check_numbers


@dataclass(frozen=True)
class BasisGrowth:
    """Decides how many directions a task adds to a layer's basis, and how strongly each is protected.

    Args:
        threshold: see :class:`cfl.methods.FOT`, as for the other options.
        key: of the method's options, for errors.

    Raises:
        ConfigError: for an option with a value that cannot work.
    """

    threshold: float
    threshold_increment: float
    rank_rule: RankRule
    minimum_rank: int
    capacity: Mapping[str, float] | None
    importance_scale: float | None
    key: InitVar[str]

    def __post_init__(self, key: str) -> None:
        check_numbers(key, "(0, 1]", threshold=self.threshold)
        check_numbers(key, "[0, 1)", threshold_increment=self.threshold_increment)
        check_choices(key, get_args(RankRule), rank_rule=self.rank_rule)
        check_choices(key, (0, 1), minimum_rank=self.minimum_rank)
        check_capacity(f"{key}.capacity", self.capacity)
        check_numbers(key, "[0, inf)", or_null=True, importance_scale=self.importance_scale)

    def threshold_of(self, task: int) -> float:
        """Share of a task's inputs that the basis has to cover."""
        return min(1.0, self.threshold + task * self.threshold_increment)

    def grown(
        self, basis: Tensor | None, importance: Tensor | None, seen: Spectrum, task: int, extractions_left: int
    ) -> tuple[Tensor, Tensor | None]:
        """A layer's basis with the directions that a task adds, and their importance with ``importance_scale``.

        Args:
            basis: ``[d, k]`` of earlier tasks, or None.
            importance: ``[k]`` of its directions, or None.
            seen: the principal directions of the task's inputs outside the basis.
            task: number of the extraction, from 0.
            extractions_left: number of extractions to come, this one included, at least 1.

        Returns:
            ``[d, k']`` with ``k' >= k``, and ``[k']`` or None.
        """
        d, size = len(seen.directions), 0 if basis is None else basis.shape[1]
        room = room_for(self.capacity, d, size, extractions_left)
        threshold = self.threshold_of(task)
        rank = choose_rank(seen.values, seen.rho, threshold, self.rank_rule, self.minimum_rank, room)
        grown = grow_basis(basis, seen.directions[:, :rank])
        if self.importance_scale is None or seen.moments is None:
            return grown, None
        scale = self.importance_scale
        return grown, accumulated_importance(importance, grown, size, seen.moments, seen.values, scale)
