"""Copies tensors from the CPU to an accelerator without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor from the CPU to ``device`` without waiting for earlier work of an accelerator.

    The tensor may be changed or freed afterwards: CUDA copies memory that is not pinned to a buffer of its own before
    the call returns. A large copy may wait nevertheless. Copies to MPS, which has no such buffer, and to the CPU always
    wait, as in Lightning.
    """
    kind = torch.device(device).type
    return tensor.to(device, non_blocking=tensor.device.type == "cpu" and kind not in ("cpu", "mps"))
