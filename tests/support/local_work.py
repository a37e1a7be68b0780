"""The amount of computation in local steps, measured as the number of elements that torch's operations write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cfl.training.client import Client


class Work(TorchDispatchMode):
    """Adds up the elements of the results of torch's operations, without views.

    Attributes:
        elements: the sum so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.elements += sum(leaf.numel() for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
        return given


@contextmanager
def counted_steps() -> Iterator[Work]:
    """Count the work of all local steps: fetching samples, losses, gradients, methods' changes, the optimizer.

    Only what engines compute in the calling thread is counted.
    """
    work, take = Work(), Client.optimizer_step

    def step(client: Client, *args: Any, **kwargs: Any) -> None:
        with work:
            take(client, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "optimizer_step", step)
        for module in ("client", "local_work"):  # single steps, because a longer block also collects from clients
            patch.setattr(f"cfl.training.{module}.steps_per_block", lambda seconds: 1)
        yield work
