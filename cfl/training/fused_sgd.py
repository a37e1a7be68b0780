"""Whether an engine takes the optimizer's step itself."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from cfl.engines.base import Engine
from cfl.engines.updates import plain_sgd
from cfl.methods.composition import Composition


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
    pulls, factors = methods.left_to_engine(engine)
    if (methods.changing_gradients() and not (pulls or factors)) or watched():
        return None
    plain = plain_sgd(optimizer)
    return None if plain is not None and plain[0] * plain[1] >= 1 else plain
