"""Which parts of a local step an engine takes over from the optimizer and from methods."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from cfl.engines.base import Engine
from cfl.engines.updates import plain_sgd
from cfl.methods.composition import Composition, Factors, Pulls


def fused_sgd_of(
    optimizer: Optimizer, methods: Composition, engine: Engine | None, watched: Callable[[], bool]
) -> tuple[float, float] | None:
    """Learning rate and weight decay, if an engine may take the optimizer's step without storing gradients; else None.

    It may do so for plain SGD whose learning rate times weight decay is below 1, unless other code reads the gradients
    or a method changes them in a way that the engine does not take over.

    Args:
        optimizer: the clients' optimizer.
        methods: the methods of the run.
        engine: computes the steps; None while an engine is being chosen.
        watched: whether code other than methods reads gradients.
    """
    pulls, factors = left_to_engine(methods, engine)
    if (methods.changing_gradients() and not (pulls or factors)) or watched():
        return None
    plain = plain_sgd(optimizer)
    return None if plain is not None and plain[0] * plain[1] >= 1 else plain


def left_to_engine(methods: Composition, engine: Engine | None) -> tuple[Pulls, Factors]:
    """The pulls and right factors of methods that an engine applies itself; none while an engine is being chosen.

    See :meth:`cfl.methods.composition.Composition.left_to_engine`."""
    return methods.left_to_engine(engine is not None and engine.multiplies, engine is not None and engine.pulls)
