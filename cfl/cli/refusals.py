"""Describes a refused option in one sentence: its key, its value, and what would be valid.

jsonargparse builds a parser for the options of every class, and passes errors on as text. Our parsers of classes raise
a :class:`Refusal`. The outer parser recognises it in the text, and puts its own key in front.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser
from lightning.pytorch import loggers
from torch import Tensor
from torch.optim import Optimizer

from cfl.cli.given import Given, last_given
from cfl.cli.linked_defaults import BUILT_FROM, FOLLOWING, NAMED
from cfl.cli.plugins import offered
from cfl.engines.scaled_steps import ELEMENTWISE_OPTIMIZERS
from cfl.reporting.former_names import REMOVED
from cfl.runtime.class_paths import PACKAGE, named_subclasses
from cfl.runtime.command_line import ALLOW
from cfl.runtime.errors import shown

_KEY = re.compile(r'Parser key "([^"]+)"')
_UNKNOWN = re.compile(r"(?:Group '([\w.]+)')?.*?(?:[Oo]ption '|unrecognized arguments: --)([\w.-]+\+?)")
_LACKING = re.compile(r"the following arguments are required: (\w+)(.*)")
_DENIED = re.compile(r"Importing '\S+' is not allowed, denied by the '(\S+)' entry")
_OTHER_CLASS = re.compile(r"([\w.]+\.\w+)'? (?:to be|does not correspond to) a subclass of (?:<class ')?(\w+)")
_UNTYPED = re.compile(r"Parameter '(\w+)' from '[\w.]*?(\w+)\.__init__' does not specify a type")
_TWICE = re.compile(r"Multiple subclasses with name (\w+)\. .*?: ([\w., ]+\w)")
_READ_AGAIN = "Config file loop detected"
"""What the parser says where it has refused the content of an option's file and takes the file's name for a value."""
_OF_THE_PARSER = (ValueError, TypeError, KeyError, argparse.ArgumentError)  # others come from a module it imports
_WORDS = {NoneType: "null", int: "an integer", float: "a number", bool: "true or false", str: "text"}
_LOGGER = "--trainer.logger CSVLogger --trainer.logger.save_dir . (the run folder)"
_LOGGERS = ", ".join(sorted(set(loggers.__all__) - {"Logger", "LitLogger"}))  # the latter's options need its package
_BY_HAND = {
    **NAMED,
    "trainer.precision": "32-true or bf16-mixed",
    "seed_everything": "an integer from 0 to 4294967295",  # Lightning also accepts true, for an unknown seed
    "trainer.logger": f"false, or a logger's class, one of {_LOGGERS}, e.g. {_LOGGER}",
}
_WITH_ALLOW = (
    "a class of cfl, torch.optim or Lightning's loggers, as the command names a checkpoint and no configuration; "
    f"{ALLOW} PACKAGE, or allow=[...] in Python, adds another package, if you trust it"
)
_OF_A_RUN = "a class that builds a part of a run"
NO_CLASS = "options without a class"
"""Shown as the value of a method or a measure without a class."""
_BASES = ("Method", "Metric")
"""The owners of options of such a value."""


class Refusal(argparse.ArgumentError):
    """An option that a parser does not accept.

    Attributes:
        key: dotted key, relative to the parser's options.
        owner: short name of the class whose options the parser has.
        what: ``unknown`` or ``missing``, or ``wrong`` if the value is wrong.
        valid: description of valid values, or of what is missing.
        text: the message of the innermost parser that refused the option.
    """

    def __init__(
        self, key: str, owner: str, what: Literal["unknown", "missing", "wrong"], valid: str, text: str
    ) -> None:
        super().__init__(None, f"{key} of {owner} is {what}")
        self.key, self.owner, self.what, self.valid, self.text = key, owner, what, valid, text


def refusal(parser: ArgumentParser, text: str, ex: Exception | None, inner: Sequence[Refusal]) -> Refusal | None:
    """The option that a parser's error is about; None if it is not about an option.

    Args:
        parser: the parser that raised the error.
        text: the error's message.
        ex: the error's cause.
        inner: earlier refusals of parsers of classes, the latest one last.
    """
    owner = getattr(parser, "owner", "")
    if under := _KEY.match(text):
        key = under[1]
        again = _READ_AGAIN in text
        if mentioned := [one for one in reversed(inner) if again or str(one) in text]:
            # A base class without options, which the parser has tried as well, has nothing to tell.
            found = next((one for one in mentioned if one.valid), mentioned[0])
            of = found.owner or owner if found.what == "unknown" else owner or found.owner
            return Refusal(f"{key}.{found.key}", of, found.what, found.valid, found.text)
        owner = "Metric" if "torchmetrics.Metric is abstract" in text else owner
        return Refusal(key, owner, "wrong", _valid(parser, key, text, ex), text)
    if lacking := _LACKING.match(text):
        if not owner:  # of a command, such as fit.data.stream; they have defaults, which null removes
            command, _, key = "".join(lacking.groups()).partition(",")[0].partition(".")
            commands = parser._subcommands_action.choices if parser._subcommands_action else {}
            return Refusal(key, owner, "wrong", _valid(commands.get(command, parser), key, text, ex), text)
        return Refusal(lacking[1], owner, "missing", f"{owner} needs a value for {lacking[1]}{lacking[2]}", text)
    if unknown := _UNKNOWN.match(text):
        key = ".".join(filter(None, unknown.groups())).removesuffix(".class_path")
        like = _like(key.removesuffix("+"), [action.dest for action in parser._actions])
        return Refusal(key, owner, "unknown", ", ".join(like), text)
    return None


def sentence(refused: Refusal, given: Sequence[Given]) -> str:
    """The sentence about a refused option that the user reads.

    Args:
        refused: the refusal of the outermost parser.
        given: all options that were given to this parser.
    """
    key, what, valid = FOLLOWING.get(refused.key, refused.key), refused.what, refused.valid
    if (section := key.partition(".")[0]) in NAMED:
        key = _with_name(refused, section, given)
    said = last_given(key, given)
    if refused.owner in _BASES:
        file = next((one.file for one in reversed(given) if one.key.startswith(f"{key}.")), said.file)
        said, what, valid = Given(key, NO_CLASS, file), "wrong", _BY_HAND[section]
    file = f" (in {said.file})" if said.file else ""
    if what == "unknown":
        option = key.rpartition(".")[2]
        if option in (removed := REMOVED.get(refused.owner, {})):
            return f"{key} was removed; leave it out: {refused.owner} does what its value {removed[option]} meant{file}"
        of = f" of {refused.owner}" if refused.owner else ""
        return f"{key} is no option{of}; valid: {valid or 'no options'}{file}"
    if what == "missing":
        return f"{key} is missing; {valid}{f', e.g. {_LOGGER}' if key.startswith('trainer.logger.') else ''}"
    return f"{key} = {shown(said.value)} cannot work; valid: {valid}{file}"


def _with_name(refused: Refusal, section: str, given: Sequence[Given]) -> str:
    """A key below ``methods`` or ``measures`` with the name in it. The parser does not tell it, but options have it."""
    option = refused.key.removeprefix(section).removeprefix(".")
    said = {one.key.removeprefix(f"{section}."): str(one.value) for one in given if one.key.startswith(f"{section}.")}
    classes = {name: of.rpartition(".")[2] for name, of in said.items() if "." not in name}
    if not said:
        return refused.key
    if refused.owner in _BASES:  # options of a name for which no class was given
        names = [name for name in (key.partition(".")[0] for key in said) if name not in classes]
        names, option = names or [name for name in classes if f"{name}.{option}" in said], ""
    elif not option:
        names = [name for name in classes if said[name] in refused.text]
    elif refused.what == "missing":
        above, needing = option.rpartition(".")[0], refused.valid.partition(" ")[0]
        names = [name for name in classes if f"{name}.{option}" not in said]
        names = [name for name in names if said.get(f"{name}.{above}".strip("."), "").endswith(needing)]
    else:
        values = {name: last_given(f"{section}.{name}.{option}", given).value for name in classes}
        names = [name for name, of in classes.items() if of == refused.owner]
        names = [name for name in names if values[name] is not None] or names
        names = [name for name in names if str(values[name]) in refused.text] or names
    return ".".join(filter(None, (section, names[0] if names else "<name>", option)))


def _valid(parser: ArgumentParser, key: str, text: str, ex: Exception | None) -> str:
    """What would be a valid value of an option."""
    if denied := _DENIED.search(text):
        return _WITH_ALLOW if denied[1] == "*" else _OF_A_RUN
    if twice := _TWICE.search(text):
        return another_name(twice[1], twice[2].split(", "))
    if untyped := _UNTYPED.search(text):
        return without_type(untyped[2], untyped[1])
    if (key := FOLLOWING.get(key, key)) in _BY_HAND and not (key in NAMED and "class 'dict'" not in text):
        return _BY_HAND[key]
    kind = next((getattr(action, "_typehint", None) for action in parser._actions if action.dest == key), None)
    if kind is None:
        return f"its options, as those that begin with --{key}. in --help"
    while ex is not None and ex.__cause__ is not None:
        ex = ex.__cause__  # type: ignore[assignment]
    told = (ex is not None and not isinstance(ex, _OF_THE_PARSER)) or "is abstract" in str(ex)
    if isinstance(ex, ModuleNotFoundError):
        ex = ModuleNotFoundError(f"{ex}; its folder is found in PYTHONPATH, and by python -m cfl if current")
    if other := _OTHER_CLASS.search(text):
        ex, told = TypeError(f"{other[1]} is no subclass of {other[2]}"), True
    words = list(dict.fromkeys(_in_words(get_args(kind)[-1] if key in NAMED else kind)))
    return " or ".join(words or [" ".join(str(ex).split())]) + (f" ({ex})" if told and words else "")


def another_name(short: str, paths: Sequence[str]) -> str:
    """Describe what is valid instead of a user's class with the short name of another class."""
    return f"a class of yours with another name; {short} is the name of {' and '.join(paths)}"


def without_type(kind: str, option: str) -> str:
    """Describe what is valid instead of a user's class that has an option without a type and a default."""
    return f"a class whose options have types, as in {option}: float; {option} of {kind} has neither type nor default"


def allows_null(kind: Any) -> bool:
    """Whether null is a value of a type hint."""
    return kind in (Any, None, NoneType) or any(
        allows_null(one) for one in get_args(kind) if get_origin(kind) in (Union, UnionType, Annotated)
    )


def _in_words(kind: Any) -> Iterator[str]:
    """The types that a type hint allows, each in words."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        for argument in arguments:
            yield from _in_words(argument)
    elif origin is Literal:
        yield ", ".join(map(repr, arguments))
    elif origin in _WORDS:
        yield _WORDS[origin]
    elif origin is Callable:
        yield from _in_words(arguments[-1])
    elif inspect.isclass(origin) and issubclass(origin, Sequence | Mapping):
        each = list(dict.fromkeys(_in_words(arguments[-1]))) if arguments else []
        yield ("a mapping" if issubclass(origin, Mapping) else "a list") + f" (each {' or '.join(each)})" * bool(each)
    elif origin is Optimizer:
        yield f"one of {', '.join(sorted(ELEMENTWISE_OPTIMIZERS))}"
    elif inspect.isclass(origin) and origin is not Tensor:  # a tensor cannot be written as text
        own = origin.__module__.startswith(f"{PACKAGE}.")
        names = {one.__name__ for one in named_subclasses(origin)}.union(offered(origin)) if own else ()
        yield f"one of {', '.join(sorted(names))}" if names else f"a subclass of {origin.__name__}"


def _like(name: str, options: Sequence[str]) -> list[str]:
    """The options that begin with a name; if there are none, similar ones, those of its group, or similar groups.

    If there is nothing similar, all groups."""
    group = name.rpartition(".")[0]
    following = {**FOLLOWING, **BUILT_FROM}
    options = [option for option in options if option not in following and not option.endswith("help")]
    options = [option for option in options if not any(other.startswith(f"{option}.") for other in options)]
    groups = sorted({option.partition(".")[0] for option in options} - {"print_config"})
    return (
        [option for option in options if option.startswith(name)]
        or get_close_matches(name, options)
        or [option for option in options if group and option.startswith(f"{group}.")]
        or get_close_matches(name.partition(".")[0], groups)
        or groups
    )
