"""Values for options by their types: valid, at a bound, far too large, of other types, of other options."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from attack.schema import Leaf, Option, class_kind, class_names, class_options
from cfl.data.sources import Source

T = TypeVar("T")
LARGE = 10**15
"""Integers from here on are too large for any option that counts something."""
_WRONG = (math.nan, math.inf, -math.inf, True, None, [], [1], [None], {}, {"a": 1}, {"class_path": None}, 1.5, -1, 0)
_WRONG += (10**20, 1e308, 5e-324, "", "three", "1e20", "010", "1:30", "nan", "null", "x" * 300, "x" * 100_000, "a\nb")
_WRONG += ("\x1b[31m", "\0", "../..", "--data.seed", "FOT", "Dirichlet", "cfl.methods.FOT", "os.system", "sequential")
_WRONG += ({"class_path": "os.system", "init_args": {"command": "true"}}, {"init_args": {}}, {"class_path": "FOT"})
_TEXTS = ("", "*", "head.*", "layers.0", "all", "x" * 300, "none", ".", "nothing there", "ü\u202e", "a/b", "%s {0}")
TINY_SOURCE = {
    "class_path": "Synthetic",
    "init_args": {"num_classes": 4, "shape": [1, 4, 4], "train_size": 96, "test_size": 40, "noise": 60.0},
}
"""A source that needs no files."""
_TAME_TEXT = {"data.class_loss": "all", "path": "data.npz", "folder": "images", "layers": "head.*"}


def drawn(strategy: SearchStrategy[T], seed: object) -> T:
    """A value of a strategy, always the same for a seed."""
    found: list[T] = []

    # Two examples, because the first is the simplest one for every seed.
    @settings(max_examples=2, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @seeded(repr(seed))
    @given(strategy)
    def keep(value: T) -> None:
        found.append(value)

    keep()
    return found[-1]


def wild(option: Option) -> SearchStrategy[Any]:
    """Anything for an option: of its type or not."""
    return st.one_of(_of(option.kind, True), _of(option.kind, True), st.sampled_from(_WRONG))


def tame(option: Option) -> SearchStrategy[Any]:
    """A harmless value of an option's type."""
    if not option.required and option.default is not inspect.Parameter.empty and option.kind is not bool:
        fit = _of(option.kind, False)
        return st.one_of(st.just(option.default), fit) if _is_plain(option.default) else fit
    return _of(option.kind, False, option.name)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _of(kind: Any, wilder: bool, name: str = "") -> SearchStrategy[Any]:
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if class_kind(kind) is not None and origin not in (Union, UnionType):
        return _instances(kind, wilder)
    if origin in (Union, UnionType):
        kinds = [argument for argument in arguments if _is_known(argument)]
        return st.one_of(*(_of(argument, wilder, name) for argument in kinds)) if kinds else st.none()
    if origin is Literal:
        close = [f"{word}s" for word in arguments if isinstance(word, str)] if wilder else []
        return st.sampled_from([*arguments, *close])
    if origin in _SIMPLE:
        return _SIMPLE[origin](wilder, name)
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        keys, values = (_of(argument, wilder) for argument in arguments or (str, str))
        return st.dictionaries(keys, values, max_size=2)
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        inner = [argument for argument in arguments if argument is not ...] or [str]
        if origin is tuple and ... not in arguments and not wilder:
            return st.tuples(*(_of(argument, wilder) for argument in inner)).map(list)
        lists = st.lists(_of(inner[0], wilder, name), min_size=0 if wilder else 1, max_size=3)
        return st.one_of(lists, lists, st.just([1] * 300), st.just([100_000, 100_000])) if wilder else lists
    return st.sampled_from(_WRONG if wilder else (None,))


def _is_known(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if class_kind(kind) is not None:
        return bool(class_names(kind))
    return (
        origin in _SIMPLE or origin is Literal or (inspect.isclass(origin) and issubclass(origin, Sequence | Mapping))
    )


def _integers(wilder: bool, _: str) -> SearchStrategy[Any]:
    fit = st.integers(1, 4)
    borders, large = st.sampled_from((0, 1, -1, 2, 7, -(10**20))), st.sampled_from((LARGE, 2**63, 10**20))
    return st.one_of(fit, borders, large) if wilder else fit


def _floats(wilder: bool, _: str) -> SearchStrategy[Any]:
    fit = st.sampled_from((0.1, 0.5, 0.9, 1.0))
    borders = st.sampled_from((0.0, -0.0, 1.0, 1.0 + 1e-9, -1e-9, 2.0, -1.0, 1e-300, 1e20, 1e308, math.nan, math.inf))
    return st.one_of(fit, borders, st.floats()) if wilder else fit


def _texts(wilder: bool, name: str) -> SearchStrategy[Any]:
    return st.one_of(st.sampled_from(_TEXTS), st.text(max_size=5)) if wilder else st.just(_TAME_TEXT.get(name, "all"))


_SIMPLE: dict[Any, Callable[[bool, str], SearchStrategy[Any]]] = {
    int: _integers,
    float: _floats,
    str: _texts,
    bool: lambda wilder, _: st.booleans(),
    NoneType: lambda wilder, _: st.none(),
}


def _instances(kind: Any, wilder: bool) -> SearchStrategy[Any]:
    """Classes of a kind with options."""
    origin = get_origin(kind)
    if class_kind(kind) == (Source, 0) and not wilder:
        return st.just([TINY_SOURCE] if origin is list else TINY_SOURCE)
    names = class_names(kind)
    one = st.sampled_from(names).flatmap(lambda name: instance(kind, name)) if names else st.none()
    if origin is dict:
        keys = st.sampled_from(("a", "b", "fot", "rounds", "a b", "../x") if wilder else ("a", "b"))
        return st.dictionaries(keys, one, min_size=1, max_size=2)
    if origin is list:
        return st.lists(one, min_size=0 if wilder else 1, max_size=2)
    return one


def instance(kind: Any, name: str, put: tuple[Leaf, SearchStrategy[Any]] | None = None) -> SearchStrategy[Any]:
    """A class with its required options, and either some of the others or the given one.

    Args:
        kind: type of the option that takes the class.
        name: name of the class.
        put: the given option, as a leaf whose way begins within the class, and its values.
    """
    options = class_options(kind, name)
    inner = put[0].way[0].option.name if put and put[0].way else put[0].option.name if put else ""
    needed = {option.name: tame(option) for option in options if option.required and option.name != inner}
    others = {option.name: tame(option) for option in options if not option.required and option.name != inner}
    some = st.fixed_dictionaries(needed, optional=others) if put is None else st.fixed_dictionaries(needed)
    if put is not None:
        some = st.tuples(some, at(*put)).map(lambda both: both[0] | both[1])
    return some.map(lambda arguments: {"class_path": name, **({"init_args": arguments} if arguments else {})})


def at(leaf: Leaf, values: SearchStrategy[Any]) -> SearchStrategy[dict[str, Any]]:
    """A configuration in which a leaf's option has one of some values, with the classes on the way to it."""
    if not leaf.way:
        return values.map(lambda value: {leaf.option.name: value})
    step, *rest = leaf.way
    held = instance(step.option.kind, step.name, (Leaf(tuple(rest), leaf.option), values))
    origin = get_origin(step.option.kind)
    if origin is dict:
        held = held.map(lambda one: {"tried": one})
    elif origin is list or "list[" in str(step.option.kind):
        held = held.map(lambda one: [one])
    return held.map(lambda one: {step.option.name: one})
