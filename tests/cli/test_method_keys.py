"""Errors about a method's options carry the name that the user gave the method."""

from __future__ import annotations

import inspect
import re

import pytest

import cfl.methods
from cfl.cli.method_keys import keys_as_typed, typed_key
from cfl.methods import GradientCompensation, Method
from cfl.runtime.errors import ConfigError

KINDS = [kind for kind in vars(cfl.methods).values() if inspect.isclass(kind) and issubclass(kind, Method)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_methods_call_themselves_by_their_class(kind: type[Method]) -> None:
    """Every key ``methods.<word>`` in a method's source is translated to the name that the user gave the method."""
    if kind is Method:
        return
    for own in re.findall(r'f?"methods\.(\w+)[."]', inspect.getsource(kind)):
        assert typed_key(f"methods.{own}.option", {"mine": f"cfl.methods.x.{kind.__name__}"}) == "methods.mine.option"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Method], ids=lambda kind: kind.__name__)
def test_a_method_that_has_no_name_yet_is_found_by_its_class(kind: type[Method]) -> None:
    key = object.__new__(kind).key
    assert typed_key(f"{key}.option", {"mine": f"cfl.methods.x.{kind.__name__}"}) == "methods.mine.option"


def test_what_is_inherited_is_named_after_the_heir() -> None:
    with pytest.raises(ConfigError, match=r"methods\.gradient_compensation\.size = 0"):
        GradientCompensation(size=0)


def test_keys() -> None:
    methods = {"mine": "cfl.methods.FedProx", "a": "EWC", "b": "cfl.methods.ewc.EWC", "gpm": "my.Other"}
    assert typed_key("methods.fedprox.mu", methods) == "methods.mine.mu"
    assert typed_key("methods.fedprox", methods) == "methods.mine"
    for unchanged in ("methods.ewc.gamma", "methods.gpm.layers", "methods.mine.mu", "data.num_clients", "methods"):
        assert typed_key(unchanged, methods) == unchanged, "two candidates, a name in use, no method's"


def test_what_is_not_about_a_method_passes() -> None:
    with pytest.raises(KeyError, match="other"), keys_as_typed({"mine": "FedProx"}):
        raise KeyError("other")
    with pytest.raises(ConfigError, match=r"methods\.mine\.mu = -1 cannot work; valid: more"):  # noqa: SIM117
        with keys_as_typed({"mine": "FedProx"}):
            raise RuntimeError("around") from ConfigError("methods.fedprox.mu", -1, "more")
