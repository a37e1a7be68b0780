"""MADE's degrees, and the masks that follow from them.

Degrees limit the variables that a unit depends on: variable d has position ``m_0(d)`` in the order, from 0, and hidden
unit k of layer l may depend on the variables at positions ``0 .. m_l(k)``. With D variables::

    M_l[k, j] = 1 if m_{l-1}(j) <= m_l(k)        into hidden layer l = 1 .. L
    M_V[d, j] = 1 if m_L(j) < m_0(d)             into the outputs
    M_D[d, e] = 1 if m_0(e) < m_0(d)             from variables to outputs directly

(Germain et al., ICML 2015, eq 8 to 13, there with positions from 1), so that output d depends on earlier variables
only. Masks are ``[to, from]``, as weights are. All masks of a step belong to one draw of degrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from cfl.randomness.generators import numpy_generator


@dataclass(frozen=True)
class Degrees:
    """Degrees of all units of a network.

    Attributes:
        order: ``[D]`` int64, a permutation: the position of each variable.
        hidden: per hidden layer ``[H]`` int64, in ``0 .. D - 2``.
        output_order: ``[D]`` int64, the positions used for the mask into the outputs. The same as ``order``; with any
            other, an output may depend on itself.
    """

    order: Tensor
    hidden: tuple[Tensor, ...]
    output_order: Tensor

    def flat(self) -> Tensor:
        """All degrees in one tensor, ``[D + sum H + D]``."""
        return torch.cat([self.order, *self.hidden, self.output_order])

    @classmethod
    def of_flat(cls, flat: Tensor, variables: int, widths: Sequence[int]) -> Degrees:
        """Undo :meth:`flat`.

        Args:
            flat: ``[D + sum H + D]``.
            variables: D.
            widths: H of every hidden layer.
        """
        order, *hidden, output_order = flat.split([variables, *widths, variables])
        return cls(order, tuple(hidden), output_order)

    def to(self, device: torch.device) -> Degrees:
        """Return the same degrees on a device."""
        return Degrees(self.order.to(device), tuple(h.to(device) for h in self.hidden), self.output_order.to(device))


def random_order(variables: int, seed: int, purpose: str, *indices: int) -> Tensor:
    """``[D]`` int64, a uniform permutation; arguments as for :func:`cfl.randomness.generators.seed_for`."""
    return torch.from_numpy(numpy_generator(seed, purpose, *indices).permutation(variables))


def random_hidden(widths: Sequence[int], variables: int, seed: int, purpose: str, *indices: int) -> tuple[Tensor, ...]:
    """Per hidden layer ``[H]`` int64, uniform between the smallest degree of the layer before and ``D - 2``.

    The smallest degree of the inputs is 0. A unit with degree ``D - 1`` could depend on all variables, and no output
    could use it.

    Args:
        widths: H of every hidden layer.
        variables: D.
        seed: see :func:`cfl.randomness.generators.seed_for`, also for ``purpose`` and ``indices``.
        purpose: names the kind of draw.
        indices: identify the draw.
    """
    generator = numpy_generator(seed, purpose, *indices)
    smallest, drawn = 0, []
    for width in widths:
        degrees = generator.integers(smallest, max(variables - 1, smallest + 1), size=width)
        smallest = int(degrees.min())
        drawn.append(torch.from_numpy(degrees))
    return tuple(drawn)


def inner_masks(degrees: Degrees) -> list[Tensor]:
    """Per hidden layer, the mask into it ``[H, H before]`` bool."""
    layers = [degrees.order, *degrees.hidden]
    return [before[None, :] <= after[:, None] for before, after in pairwise(layers)]


def output_mask(degrees: Degrees) -> Tensor:
    """The mask into the outputs ``[D, H]`` bool; without hidden layers ``[D, D]``, from the variables."""
    last = degrees.hidden[-1] if degrees.hidden else degrees.order
    return last[None, :] < degrees.output_order[:, None]


def direct_mask(degrees: Degrees) -> Tensor:
    """The mask of direct connections ``[D, D]`` bool."""
    return degrees.order[None, :] < degrees.order[:, None]
