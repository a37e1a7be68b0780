"""The options of a configuration, with their types, read off the parsers that jsonargparse builds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from jsonargparse import ArgumentParser
from jsonargparse._util import import_object
from support import tiny_cli
from torch.optim import Optimizer

from cfl.runtime.class_paths import named_subclasses


@dataclass(frozen=True)
class Option:
    """One option of a section or of a class.

    Attributes:
        name: dotted, as in a configuration without ``init_args``.
        kind: its type.
        default: its default; None also if it has none.
        required: whether it has no default.
    """

    name: str
    kind: Any
    default: Any
    required: bool


class Step(NamedTuple):
    """An option that takes a class, and the name of such a class."""

    option: Option
    name: str


class Leaf(NamedTuple):
    """An option, and the classes on the way to it, from the outermost; no class for an option of a section."""

    way: tuple[Step, ...]
    option: Option

    def __str__(self) -> str:
        return ".".join([*(f"{step.option.name}.{step.name}" for step in self.way), self.option.name])


def _options_of(parser: ArgumentParser) -> list[Option]:
    found = []
    for action in parser._actions:
        kind = getattr(action, "_typehint", None)
        if kind is not None and type(action).__name__ == "ActionTypeHint":
            required = action.required or action.dest in getattr(parser, "_required_args", ())
            found.append(Option(action.dest, kind, action.default, required))
    return found


@cache
def sections() -> list[Option]:
    """The options of ``cfl fit``."""
    built = next(one for key, one in tiny_cli._BUILT.items() if "'fit'" in key[-1])
    return _options_of(built["_subcommand_parsers"]["fit"])


def class_kind(kind: Any) -> tuple[type, int] | None:
    """Base class of which an option takes a subclass, and the number of arguments that the program gives it itself."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return next((found for argument in arguments if (found := class_kind(argument))), None)
    if origin is dict and arguments[:1] == (str,):
        return class_kind(arguments[1])
    if origin is list and arguments:
        return class_kind(arguments[0])
    if origin is Callable:
        found = class_kind(arguments[-1]) if arguments else None
        return found and (found[0], len(arguments[0]))
    is_ours = inspect.isclass(origin) and origin.__module__.partition(".")[0] in ("cfl", "lightning")
    return (origin, 0) if is_ours or origin is Optimizer else None


def class_names(kind: Any) -> list[str]:
    """Names of the classes that an option takes, as in configurations; classes of Lightning by their paths."""
    found = class_kind(kind)
    if found is None:
        return []
    if found[0].__module__.startswith("cfl.") or found[0] is Optimizer:
        return sorted({one.__name__ for one in named_subclasses(found[0])})
    return sorted(path for path in _paths_below(found[0]) if path.startswith("lightning."))


def _paths_below(kind: type) -> Iterator[str]:
    for child in kind.__subclasses__():
        if not inspect.isabstract(child) and not child.__name__.startswith("_"):
            yield f"{child.__module__}.{child.__qualname__}"
        yield from _paths_below(child)


@cache
def _class_options(path: str, given: int) -> list[Option]:
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_class_arguments(import_object(path), skip={given} if given else None, sub_configs=True)
    except Exception:  # a class of Lightning's that jsonargparse cannot read
        return []
    return _options_of(parser)


def class_options(kind: Any, name: str) -> list[Option]:
    """The options of a class that an option takes."""
    found = class_kind(kind)
    if found is None:
        return []
    paths = {path.rpartition(".")[2]: path for path in _paths_below(found[0])}
    return _class_options(name if "." in name else paths[name], found[1])


@cache
def leaves() -> tuple[Leaf, ...]:
    """Every option of every section, and every option of every class that one of them takes, at any depth.

    A kind of class is visited only below the option that takes it first: sources below the first stream, for example.
    """
    seen: set[type] = set()

    def below(way: tuple[Step, ...], option: Option) -> Iterator[Leaf]:
        yield Leaf(way, option)
        kind = class_kind(option.kind)
        if kind is None or kind[0] in seen:
            return
        seen.add(kind[0])
        for name in class_names(option.kind):
            for inner in class_options(option.kind, name):
                yield from below((*way, Step(option, name)), inner)

    return tuple(leaf for option in sections() for leaf in below((), option))
