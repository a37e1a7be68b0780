"""Methods that pull weights towards anchors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

import torch

from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.engines.quadratic_pull import Pull
from cfl.methods.base import Method


class Pulling(Method, ABC):
    """A quadratic penalty: every local step adds ``s (w - a)`` to the gradient, with s and a fixed during a round.

    Attributes:
        pulls: parameter name -> s and a of the clients being trained; empty where nothing is pulled. Whoever takes
            plain SGD's step at once may do it instead, see :class:`cfl.engines.quadratic_pull.Pull`.
    """

    pulls: Mapping[str, Pull] = MappingProxyType({})

    @abstractmethod
    def pulls_of(self, cohort: Cohort) -> dict[str, Pull]:
        """The pulls on a cohort that has just been opened, in the coordinates it computes in."""

    def open_cohort(self, cohort: Cohort) -> None:
        """Look them up."""
        self.pulls = {}
        self.pulls = self.pulls_of(cohort)

    @property
    def changes_gradients(self) -> bool:
        """Not before there is a penalty."""
        return bool(self.pulls)

    @torch.no_grad()
    def adjust_gradients(self, cohort: Cohort) -> None:
        """Add them."""
        gradients = cohort.gradients
        for name, pull in self.pulls.items():
            if name in gradients:
                pull.add_to(gradients[name], cohort.parameters[name])

    def end_round(self, plan: RoundPlan) -> None:
        """Let go of the last cohort's."""
        self.pulls = {}
