"""Processes whose models differ are found, even if the norms of the models agree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cfl.training import same_model


@pytest.mark.parametrize("change", [torch.neg, torch.flipud, lambda tensor: tensor + 1.0])
def test_another_model_is_found(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(20, generator=torch.Generator().manual_seed(0))

    def check(other: Tensor) -> None:
        monkeypatch.setattr(same_model.distributed, "count", lambda: 2)
        monkeypatch.setattr(same_model.distributed, "gather", lambda mine: [mine, [same_model._digest(other)]])
        same_model.check_same_model(SimpleNamespace(model=SimpleNamespace(shared_tensors=lambda: {"w": tensor})))  # type: ignore[arg-type]

    check(tensor.clone())
    with pytest.raises(RuntimeError, match="process 1"):
        check(change(tensor))
