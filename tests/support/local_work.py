"""How much clients compute in local steps, found out without asking anybody: numbers that torch's operations write."""

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
    """Adds up the elements of what operations give, but for views of what there is.

    Attributes:
        elements: so many in all.
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
    """Counts in all local steps: fetching samples, losses, gradients, what methods make of them, the optimizer.

    For engines that compute in the calling thread.
    """
    work, take = Work(), Client.optimizer_step

    def step(client: Client, *args: Any, **kwargs: Any) -> None:
        with work:
            take(client, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "optimizer_step", step)
        for module in ("client", "local_work"):  # a block of steps collects from clients, too
            patch.setattr(f"cfl.training.{module}.steps_per_block", lambda seconds: 1)
        yield work
