"""Copies from the CPU to an accelerator that the program does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the CPU on ``device``; Python goes on while an accelerator has not finished what it did before.

    A copy from memory that is not pinned is staged at once, so the tensor may be changed or freed afterwards. Copies
    to the CPU and to MPS, where that does not hold, are waited for.
    """
    kind = torch.device(device).type
    return tensor.to(device, non_blocking=tensor.device.type == "cpu" and kind not in ("cpu", "mps"))
