"""L-BFGS for many functions at once: values and gradients are computed together, all else for each function alone."""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import nan, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

ITERATIONS, EVALUATIONS, HISTORY = 20, 25, 100
"""Most iterations of a step, most evaluations of a step, and most changes remembered: torch's defaults."""

FLAT, STILL, CURVED = 1e-7, 1e-9, 1e-10
"""Bounds on the gradient's largest entry, on changes of points and values, and on ``s^T y`` of a remembered change."""

DECREASE, CURVATURE = 1e-4, 0.9
"""Constants of the strong Wolfe conditions."""


def minimised(
    starts: Tensor, evaluate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], steps: int, keep: int = 1
) -> Tensor:
    """The last iterates of L-BFGS, as ``torch.optim.LBFGS`` with ``line_search_fn="strong_wolfe"`` finds them.

    Every point moves as it would alone, up to rounding: it has its own history, step sizes and end. Only evaluations
    are computed together. A step begins with the value and the gradient that the step before ended with. A point is no
    longer evaluated once a step has left it unchanged, as all later steps would, or has made it infinite.

    Args:
        starts: ``[B, n]`` on the CPU.
        evaluate: given positions ``[b]`` int64 among the B, and points ``[b, n]``, returns values ``[b]`` and gradients
            ``[b, n]``, on the CPU.
        steps: at least 1, each of up to 20 iterations and 25 evaluations.
        keep: number of last iterates to return, one for each step.

    Returns:
        ``[B, min(keep, steps), n]``, finite; the last one is the best.
    """
    searches = [_Search(start).run(steps, min(keep, steps)) for start in starts]
    points = {row: next(search) for row, search in enumerate(searches)}
    found: dict[int, Tensor] = {}
    while points:
        rows = list(points)
        values, gradients = evaluate(torch.tensor(rows), torch.stack([points[row] for row in rows]))
        for row, value, gradient in zip(rows, values.tolist(), gradients.unbind(), strict=True):
            try:
                points[row] = searches[row].send((value, gradient))
            except StopIteration as end:
                found[row] = end.value
                del points[row]
    return torch.stack([found[row] for row in range(len(starts))])


class _Trial(NamedTuple):
    """A point on a line: its place, value, slope along the line, and gradient ``[n]``."""

    t: float
    value: float
    slope: float
    gradient: Tensor


class _Search:
    """L-BFGS from one point ``[n]``. Its generators yield points and are sent values and gradients."""

    def __init__(self, start: Tensor) -> None:
        self.x, self.value, self.gradient = start, nan, start
        self.history = _History(start)
        self.change: tuple[Tensor, Tensor] | None = None  # the last step and the gradient before it

    def run(self, steps: int, count: int) -> Generator[Tensor, tuple[float, Tensor], Tensor]:
        """All steps; returns the last ``count`` iterates."""
        iterates = [self.x]
        self.value, self.gradient = yield self.x
        for number in range(steps):
            moves = yield from self._step()
            if not bool(self.x.isfinite().all()):
                break
            iterates = [*iterates, *[self.x] * (1 if moves else min(count, steps - number))][-count:]
            if not moves:
                break
        return torch.stack([*iterates, *iterates[-1:] * (count - len(iterates))])

    def _step(self) -> Generator[Tensor, tuple[float, Tensor], bool]:
        """Take one step as torch does; return whether a further step could change anything."""
        left = EVALUATIONS - 1  # torch evaluates a step's first point again
        for iteration in range(ITERATIONS):
            if float(self.gradient.abs().max()) <= FLAT:
                return iteration > 0
            first = self.change is None
            if self.change is not None:
                self.history.add(self.change[0], self.gradient - self.change[1])
            direction = self.history.direction(self.gradient)
            t = min(1.0, 1.0 / float(self.gradient.abs().sum())) if first else 1.0
            start = _Trial(0.0, self.value, float(self.gradient.dot(direction)), self.gradient)
            self.change = torch.zeros_like(direction), self.gradient
            if start.slope > -STILL:
                return iteration > 0
            end, evaluations = yield from _line_search(self.x, direction, t, start, left)
            left -= evaluations
            self.change = direction * end.t, self.gradient
            self.x, self.value, self.gradient = self.x + self.change[0], end.value, end.gradient
            if left <= 0 or float(self.change[0].abs().max()) <= STILL or abs(self.value - start.value) < STILL:
                return first or iteration > 0 or end.t != 0.0
        return True


def _line_search(
    x: Tensor, direction: Tensor, t: float, start: _Trial, most: int
) -> Generator[Tensor, tuple[float, Tensor], tuple[_Trial, int]]:
    """A point that meets the strong Wolfe conditions, or the best found, and the number of evaluations.

    The same as torch's, which follows Nocedal and Wright, Numerical Optimization, algorithms 3.5 and 3.6.
    """

    def tried(t: float) -> Generator[Tensor, tuple[float, Tensor], _Trial]:
        value, gradient = yield x + t * direction
        return _Trial(t, value, float(gradient.dot(direction)), gradient)

    def is_high(trial: _Trial) -> bool:
        return trial.value > start.value + DECREASE * trial.t * start.slope

    def is_flat(trial: _Trial) -> bool:
        return abs(trial.slope) <= -CURVATURE * start.slope

    # Move the interval outwards until it holds such a point.
    before, now, evaluations = start, (yield from tried(t)), 1
    bracket = [start, now]
    while evaluations <= most:
        bracket = [before, now]
        if is_high(now) or (evaluations > 2 and now.value >= before.value):
            break
        if is_flat(now):
            return now, evaluations
        if now.slope >= 0:
            break
        t = _lowest(before, now, now.t + 0.01 * (now.t - before.t), 10 * now.t)
        before, now = now, (yield from tried(t))
        evaluations += 1
        bracket = [start, now]
    # Narrow the interval.
    low, close = _lower(bracket), False
    while evaluations <= most:
        left, right = sorted(trial.t for trial in bracket)
        if (right - left) * float(direction.abs().max()) < STILL:
            break
        t, margin = _lowest(bracket[0], bracket[1], left, right), 0.1 * (right - left)
        near = min(right - t, t - left) < margin
        if near and (close or t >= right or t <= left):
            t, near = (right - margin if right - t < t - left else left + margin), False
        close = near
        now = yield from tried(t)
        evaluations += 1
        if is_high(now) or now.value >= bracket[low].value:
            bracket[1 - low] = now
            low = _lower(bracket)
            continue
        if not is_flat(now) and now.slope * (bracket[1 - low].t - bracket[low].t) >= 0:
            bracket[1 - low] = bracket[low]
        bracket[low] = now
        if is_flat(now):
            break
    return bracket[low], evaluations


def _lower(bracket: list[_Trial]) -> int:
    """Index of the trial with the lower value, of two."""
    return 0 if bracket[0].value <= bracket[1].value else 1


def _lowest(one: _Trial, other: _Trial, least: float, most: float) -> float:
    """Place of the minimum of the cubic through two trials, within bounds; the bounds' middle if there is none."""
    left, right = (one, other) if one.t <= other.t else (other, one)
    width = right.t - left.t
    bend = left.slope + right.slope + 3 * (left.value - right.value) / width if width else nan
    root = bend * bend - left.slope * right.slope
    if not root >= 0:
        return (least + most) / 2
    across = right.slope - left.slope + 2 * sqrt(root)
    t = right.t - width * (right.slope + sqrt(root) - bend) / across if across else nan
    return min(max(t, least), most)


class _History:
    """The last changes s of a point and y of its gradient, and the direction that they imply.

    The two loops of L-BFGS solve triangular systems with ``s_i^T y_j``: products with all changes at once.
    """

    def __init__(self, like: Tensor) -> None:
        self.steps, self.changes = like.new_zeros(2, 2 * HISTORY, len(like))
        self.products = like.new_zeros(2 * HISTORY, 2 * HISTORY)
        self.start = self.end = 0
        self.scale = 1.0

    def add(self, s: Tensor, y: Tensor) -> None:
        """Remember a change, unless its curvature is too small."""
        curvature = float(s.dot(y))
        if not curvature > CURVED:
            return
        self.start = max(self.start, self.end + 1 - HISTORY)
        if self.end == 2 * HISTORY:
            held = slice(self.start, self.end)
            for tensor in (self.steps, self.changes):
                tensor[: HISTORY - 1] = tensor[held].clone()
            self.products[: HISTORY - 1, : HISTORY - 1] = self.products[held, held].clone()
            self.start, self.end = 0, HISTORY - 1
        self.steps[self.end], self.changes[self.end] = s, y
        self.end += 1
        self.products[self.start : self.end, self.end - 1] = self.steps[self.start : self.end] @ y
        self.scale = curvature / float(y.dot(y))

    def direction(self, gradient: Tensor) -> Tensor:
        """``-H gradient`` with the inverse Hessian H that the changes imply."""
        if self.start == self.end:
            return -gradient
        held = slice(self.start, self.end)
        s, y, products = self.steps[held], self.changes[held], self.products[held, held]
        a = torch.linalg.solve_triangular(products, -(s @ gradient)[:, None], upper=True)[:, 0]
        r = self.scale * (-gradient - y.T @ a)
        rest = products.diagonal() * a - y @ r
        return r + s.T @ torch.linalg.solve_triangular(products.mT, rest[:, None], upper=False)[:, 0]
