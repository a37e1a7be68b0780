"""Refuses added samples and extras that engines would train on wrongly, or fail with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cfl.data.samples import ExtraSamples
from cfl.data.task_handles import unwrap_tasks

_FLOATS = (torch.float32, torch.float64)


def check_samples(
    who: str,
    part: ExtraSamples,
    own: Tensor,
    input_shape: tuple[int, int, int],
    num_outputs: int | None,
    dtype: torch.dtype,
) -> None:
    """Refuse tensors that do not go together with each other or with the step.

    Values are read on the CPU only, because the program would have to wait for an accelerator.

    Args:
        who: who adds the samples, for messages.
        part: the samples.
        own: ``[K, B]``, mask of the step's own samples.
        input_shape: ``(C, H, W)``.
        num_outputs: number of outputs if ``y`` are outputs; None if they are other targets.
        dtype: type of the network's parameters.

    Raises:
        TypeError: a field is no tensor, or of another type or device.
        ValueError: a field has another shape, ``y`` is no output, padding is not finite, or an extra has a gradient.
    """
    each = (len(own), *part.y.shape[1:2]) if isinstance(part.y, Tensor) else (len(own),)
    classes = num_outputs is not None
    factor = [] if part.own_factor is None else [("own_factor", part.own_factor, _FLOATS, each[:1])]
    expected: list[tuple[str, Any, tuple[torch.dtype, ...], tuple[Any, ...]]] = [
        ("y", part.y, (torch.int64,) if classes else (), each if classes else (*each, ...)),
        ("x", part.x, (torch.float32, dtype), (*each, *input_shape)),
        ("tasks", unwrap_tasks(part.tasks), (torch.int64,), each),
        ("mask", part.mask, (torch.bool,), each),
        ("weights", part.weights, _FLOATS, each),
        *factor,
    ]
    for name, value, types, shape in expected:
        if not isinstance(value, Tensor):
            raise TypeError(f"{who} with {name} as {type(value).__name__}, not as a tensor")
        if value.device != own.device or (types and value.dtype not in types):
            kinds = " or ".join(dict.fromkeys(map(str, types))) or "any type"
            raise TypeError(f"{who} with {name} of {value.dtype} on {value.device}, not of {kinds} on {own.device}")
        found = (*value.shape,)
        if found != shape and (shape[-1] is not ... or found[: len(each)] != each):
            wanted = str(list(shape)).replace("Ellipsis", "...")
            raise ValueError(f"{who} with {name} of shape {list(found)}, not {wanted}: y has {list(part.y.shape)}")
    check_extras(f"{who} with", part.extras, part.mask)
    if own.device.type != "cpu" or not part.mask.numel():
        return
    if num_outputs is not None:
        low, high = map(int, part.y.masked_fill(~part.mask, 0).aminmax())
        if low < 0 or high >= num_outputs:
            raise ValueError(f"{who} with y = {low if low < 0 else high}, not an output from 0 to {num_outputs - 1}")
    if not bool(part.mask.all()) and not bool(part.x[~part.mask].isfinite().all()):
        raise ValueError(f"{who} with NaN or infinity in x where mask is False: padding must be finite")


def check_extras(who: str, extras: Mapping[str, Any], mask: Tensor) -> None:
    """Refuse extras that do not go together with their samples, or through which only some engines would differentiate.

    Args:
        who: who gives them, for messages.
        extras: name -> tensor.
        mask: ``[K, B]``, mask of their samples.

    Raises:
        TypeError: an extra is no tensor, or on another device.
        ValueError: an extra has another shape than ``[K, B, ...]``, or a gradient.
    """
    for name, value in extras.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{who} extras[{name!r}] as {type(value).__name__}, not as a tensor")
        if value.device != mask.device:
            raise TypeError(f"{who} extras[{name!r}] on {value.device}, not on {mask.device}")
        if value.shape[:2] != mask.shape:
            wanted = f"[{len(mask)}, {mask.shape[1]}, ...], as of every client and sample"
            raise ValueError(f"{who} extras[{name!r}] of shape {list(value.shape)}, not {wanted}")
        if value.requires_grad:
            raise ValueError(f"{who} extras[{name!r}] with a gradient: extras are constants; use torch.no_grad")
