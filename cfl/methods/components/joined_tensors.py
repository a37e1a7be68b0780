"""Tensors of several kinds under the same names, in one message or one state of a client."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def joined(**kinds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``<kind> <name>`` -> tensor, from each kind's name -> tensor."""
    return {f"{kind} {name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}


def parted(tensors: Mapping[str, Tensor], *kinds: str) -> list[dict[str, Tensor]]:
    """Undo :func:`joined`: for each of these kinds name -> tensor; other tensors are left out."""
    return [
        {name.removeprefix(f"{kind} "): tensor for name, tensor in tensors.items() if name.startswith(f"{kind} ")}
        for kind in kinds
    ]
