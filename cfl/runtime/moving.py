"""Copies from the CPU to an accelerator that Python does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the CPU on ``device``, without waiting until an accelerator has done what it was asked before.

    The tensor may be changed or freed afterwards: CUDA copies memory that is not pinned to a buffer of its own before
    it returns. If the copy is large, it may wait nevertheless. Copies to MPS, which does not do so, and to the CPU are
    always waited for, as Lightning does.
    """
    kind = torch.device(device).type
    return tensor.to(device, non_blocking=tensor.device.type == "cpu" and kind not in ("cpu", "mps"))
