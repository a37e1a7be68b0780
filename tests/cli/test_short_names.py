"""Classes that a configuration may name: found by their short names, and named on the page about data."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import cfl.data.partitions
import cfl.data.sources
import cfl.data.streams
import cfl.models
from cfl.runtime.class_paths import named_subclasses

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
PACKAGES = {
    cfl.data.sources: cfl.data.sources.Source,
    cfl.data.streams: cfl.data.streams.Stream,
    cfl.data.partitions: cfl.data.partitions.Partition,
    cfl.models: cfl.models.Network,
}
"""Package -> the base class of the classes that configurations name; each class has a module of the package."""


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_class_has_a_short_name_and_is_on_the_page_about_data(package: ModuleType) -> None:
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    found = {
        kind.__name__
        for kind in named_subclasses(PACKAGES[package])
        if kind.__module__.startswith(f"{package.__name__}.")
    }
    assert len(found) > 4
    hidden = sorted(found - set(package.__all__))
    assert not hidden, f"import {hidden} in {package.__file__} and add it to __all__"
    text = PAGE.read_text()
    unnamed = sorted(name for name in found if f"`{name}`" not in text)
    assert not unnamed, f"name {unnamed} in {PAGE}"
