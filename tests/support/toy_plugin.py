"""A third-party package with a class of every kind that packages can offer."""

from __future__ import annotations

from pathlib import Path

_MODULE = '''
import numpy as np

from cfl.data.partitions import IID
from cfl.data.sources import Synthetic
from cfl.methods import Method
from cfl.models import MLP


class ToyMethod(Method):
    """Counts the rounds that end.

    Args:
        step: added for each round.
    """

    def __init__(self, step: int = 1) -> None:
        self.step, self.count = step, 0

    def end_round(self, plan) -> None:
        self.count += self.step
        print(f"toy counts {self.count}", flush=True)


class ToyNetwork(MLP):
    """An MLP by another name."""


class ToySource(Synthetic):
    """Made-up images by another name."""


class ToyPartition(IID):
    """Equal shares by another name."""
'''

NAMES = {
    "cfl.methods": "ToyMethod",
    "cfl.networks": "ToyNetwork",
    "cfl.sources": "ToySource",
    "cfl.partitions": "ToyPartition",
}
"""Group -> name of the class that is offered."""


def install(folder: Path, names: dict[str, str] | None = None) -> None:
    """Put the package into a folder, as an installation would.

    Args:
        folder: must be on Python's path.
        names: group -> name of the entry point, where it is not the name of its class.
    """
    package = folder / "toy_plugin"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "classes.py").write_text(_MODULE)
    info = folder / "toy_plugin-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-plugin\nVersion: 0.1\n")
    lines = [
        f"[{group}]\n{(names or {}).get(group, name)} = toy_plugin.classes:{name}\n" for group, name in NAMES.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
