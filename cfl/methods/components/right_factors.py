"""Methods that multiply layer gradients from the right."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.engines.right_factors import RightFactor, multiply_gradients
from cfl.methods.base import Method


class RightMultiplication(Method, ABC):
    """Every client's gradient ``G [o, d]`` of some weights becomes ``G F``, with the same ``F [d, d]`` in all steps.

    Attributes:
        right_factors: weight name -> the factors of the clients being trained; empty where nothing is multiplied.
            Whoever computes the gradients may apply them to the layers' inputs instead, see
            :mod:`cfl.engines.right_factors`.
    """

    clipping_by_value: ClassVar[bool] = False

    right_factors: Mapping[str, RightFactor] = MappingProxyType({})

    @abstractmethod
    def factors_of(self, cohort: Cohort) -> dict[str, RightFactor]:
        """The factors of a cohort that has just been opened: weight name -> factors."""

    def open_cohort(self, cohort: Cohort) -> None:
        """Look the clients' factors up."""
        self.right_factors = self.factors_of(cohort)

    @property
    def changes_gradients(self) -> bool:
        """Not before there are factors."""
        return bool(self.right_factors)

    def adjust_gradients(self, cohort: Cohort) -> None:
        """Multiply."""
        multiply_gradients(cohort.gradients, self.right_factors)

    def end_round(self, plan: RoundPlan) -> None:
        """Give the last cohort's factors free."""
        self.right_factors = {}
