"""Lets torchvision be imported when its compiled operators do not match the installed torch.

torchvision's wheels are built against one torch build. Next to another (a CPU torch beside a CUDA wheel, say)
its extension library does not load and ``import torchvision`` fails with "operator torchvision::nms does not
exist", although nothing here calls a compiled operator. Declaring the two schemas it looks up is enough. This
module is imported before anything that may import torchvision, and does nothing where the operators load.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_library: torch.library.Library | None = None  # the declarations live as long as this object


def _compiled_operators_load() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    found = sorted(Path(spec.origin).parent.glob("_C*.so")) + sorted(Path(spec.origin).parent.glob("_C*.pyd"))
    if not found:
        return False
    try:
        torch.ops.load_library(str(found[0]))
    except OSError:
        return False
    return True


def declare_missing_operators() -> bool:
    """Declare the schemas if the compiled operators cannot be loaded; return whether that was necessary."""
    global _library
    if _library is not None:
        return True
    if _compiled_operators_load():
        return False
    _library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS.values():
        _library.define(schema)
    return True


declare_missing_operators()
