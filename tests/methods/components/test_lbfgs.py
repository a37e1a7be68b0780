"""L-BFGS of many points: each moves as torch's optimizer moves it alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from cfl.methods.components import lbfgs
from cfl.methods.components.lbfgs import minimised

SIZE = 12


def bent(x: Tensor, scale: Tensor) -> Tensor:
    """Rosenbrock's valley with waves: many iterations, and line searches that narrow brackets."""
    valley = (5 * (x[1:] - x[:-1].square()).square() + (1 - x[:-1]).square()).sum()
    return scale * (valley + torch.sin(3 * x).sum())


def bowl(x: Tensor, scale: Tensor) -> Tensor:
    """A bowl with its minimum at ``scale``, which very few iterations find."""
    return (x - scale).square().sum()


def cliff(x: Tensor, scale: Tensor) -> Tensor:
    """A function that falls without a bound and is NaN beyond a point."""
    return -(x.sum() * scale).exp() + 0 * (40 - x.sum()).sqrt()


Function = Callable[[Tensor, Tensor], Tensor]


class Together:
    """Evaluates functions that differ in their scale, and records the number of points of each call."""

    def __init__(self, function: Function, scales: Tensor) -> None:
        self.both, self.scales = vmap(grad_and_value(function)), scales
        self.asked: list[int] = []

    def __call__(self, rows: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        self.asked.append(len(rows))
        gradients, values = self.both(points, self.scales[rows])
        return values, gradients


def alone(function: Function, start: Tensor, scale: Tensor, steps: int, history: int) -> tuple[list[Tensor], int]:
    """All iterates of torch's optimizer up to the last finite one, the start among them, and its evaluations."""
    x, evaluations = start.clone().requires_grad_(), 0
    optimizer = torch.optim.LBFGS([x], line_search_fn="strong_wolfe", history_size=history)

    def evaluate() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        value = function(x, scale)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    iterates = [start]
    for _ in range(steps):
        optimizer.step(evaluate)  # type: ignore[no-untyped-call]
        if not bool(x.isfinite().all()):
            break
        iterates.append(x.detach().clone())
    return iterates, evaluations


def starts_of(count: int) -> Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("history", [3, 100])
def test_every_point_moves_as_it_would_alone(history: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared after every step, also with a history that is shorter than the run."""
    monkeypatch.setattr(lbfgs, "HISTORY", history)
    starts, scales = starts_of(5), torch.tensor([1.0, 0.5, 3.0, 0.01, 10.0], dtype=torch.float64)
    evaluate = Together(bent, scales)
    found = minimised(starts, evaluate, 9, 9)
    assert found.shape == (5, 9, SIZE)
    evaluations = 0
    for start, scale, iterates in zip(starts, scales, found, strict=True):
        expected, asked = alone(bent, start, scale, 9, history)
        evaluations += asked
        assert float((expected[-1] - start).abs().max()) > 0.1
        torch.testing.assert_close(iterates, torch.stack(expected[1:]), rtol=0, atol=1e-7)
    assert sum(evaluate.asked) < evaluations
    assert evaluate.asked[0] == 5


def test_last_iterates_are_kept() -> None:
    starts, scales = starts_of(2), torch.ones(2, dtype=torch.float64)
    every = minimised(starts, Together(bent, scales), 5, 99)
    assert every.shape == (2, 5, SIZE)
    assert torch.equal(minimised(starts, Together(bent, scales), 5, 2), every[:, 3:])
    assert torch.equal(minimised(starts, Together(bent, scales), 3), every[:, 2:3])


def test_a_point_that_no_step_would_move_is_evaluated_no_more() -> None:
    starts, scales = starts_of(3), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    starts[2] = 0.5
    evaluate = Together(bowl, scales)
    found = minimised(starts, evaluate, 1000, 4)
    assert len(evaluate.asked) < 20
    assert evaluate.asked[:2] == [3, 2]  # the third starts at its minimum
    torch.testing.assert_close(found, scales[:, None, None].expand(3, 4, SIZE), rtol=0, atol=1e-7)


def test_a_point_ends_before_it_is_infinite() -> None:
    """The other points go on."""
    starts = torch.full((2, SIZE), 0.1, dtype=torch.float64)
    scales = torch.tensor([3.0, 1e-9], dtype=torch.float64)
    found = minimised(starts, Together(cliff, scales), 6, 3)
    assert bool(found.isfinite().all())
    for start, scale, iterates in zip(starts, scales, found, strict=True):
        expected, _ = alone(cliff, start, scale, 6, 100)
        kept = expected[-3:]
        torch.testing.assert_close(iterates, torch.stack(kept + kept[-1:] * (3 - len(kept))), rtol=1e-9, atol=1e-9)


def test_remembered_changes_give_the_two_loops_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nocedal and Wright, algorithm 7.4, over the last three of nine changes; one of them has too little curvature."""
    monkeypatch.setattr(lbfgs, "HISTORY", 3)
    generator = torch.Generator().manual_seed(0)
    history, kept = lbfgs._History(torch.zeros(SIZE, dtype=torch.float64)), list[tuple[Tensor, Tensor]]()
    for number in range(9):
        s = torch.randn(SIZE, generator=generator, dtype=torch.float64)
        y = s * (0.5 + torch.rand(SIZE, generator=generator, dtype=torch.float64))
        if number == 7:
            y = -y
        else:
            kept = [*kept, (s, y)][-3:]
        history.add(s, y)
        gradient = torch.randn(SIZE, generator=generator, dtype=torch.float64)
        q, factors = gradient.clone(), []
        for s, y in reversed(kept):
            factors.append(float(s @ q) / float(s @ y))
            q = q - factors[-1] * y
        s, y = kept[-1]
        r = q * float(s @ y) / float(y @ y)
        for (s, y), factor in zip(kept, reversed(factors), strict=True):
            r = r + s * (factor - float(y @ r) / float(s @ y))
        torch.testing.assert_close(history.direction(gradient), -r, rtol=1e-12, atol=1e-12)
