"""Lets torchvision be imported when its compiled operators do not match the installed torch.

torchvision's wheels are built against one torch build. Next to another (a CPU torch beside a CUDA wheel, say)
its extension library does not load and ``import torchvision`` fails with "operator torchvision::nms does not
exist", although nothing here calls a compiled operator. Declaring the two schemas that it looks up is enough. This is
done just before torchvision is imported, so that ``import cfl`` does not import torch. If the operators load, nothing
is done.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_library: torch.library.Library | None = None  # the declarations live as long as this object


def _compiled_operators_load() -> bool:
    import torch

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
    import torch

    if _library is not None:
        return True
    if _compiled_operators_load():
        return False
    _library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS.values():
        _library.define(schema)
    return True


class _BeforeTorchvision(MetaPathFinder):
    """An import hook that finds no module, but declares the operators before torchvision is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            declare_missing_operators()


def declare_when_imported() -> None:
    """Call :func:`declare_missing_operators` when torchvision is about to be imported for the first time."""
    if "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _BeforeTorchvision())
