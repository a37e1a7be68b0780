"""Reads YAML that may come from anywhere: what is ambiguous, or would take much time or memory, is refused."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

MOST_BYTES = 2**24
"""Size of the largest file that is read."""
_DEEPEST = 100
_MOST_VALUES, _MOST_REPEATED = 300_000, 100_000
_TAG = "tag:yaml.org,2002:"
_REPLACED = {f"{_TAG}{name}" for name in ("float", "timestamp", "value")}
_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
    |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.X,
)
_LEADING_ZERO = re.compile(r"([-+]?)0[0_]*([0-9][0-9_]*)")
_COLONS = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
_NUMBER_IN_1_1 = re.compile(r"[-+]?0[0-7_]+|[-+]?[1-9][0-9_:.]*")
_NO_KEYS = ("true", "false", "yes", "no", "on", "off", "null", "~", "")


class BadYAML(yaml.YAMLError):
    """A text that is not read as YAML. The message says why, and in which line."""


class BrokenYAML(BadYAML):
    """A text that is not valid YAML."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader, for which 1e-3 is a number and a date is text."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, form) for tag, form in forms if tag not in _REPLACED]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+0123456789."))


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds.

    Raises:
        OSError: the file cannot be read.
        BadYAML: it is a pipe or a device, is too large, or is refused by :func:`parse_yaml`.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # a pipe would have to be waited for
        raise BadYAML("this is a pipe or a device")
    if found.st_size > MOST_BYTES:
        raise BadYAML(f"this one has {found.st_size} bytes, more than {MOST_BYTES}")
    return parse_yaml(path.read_bytes())


def parse_yaml(text: str | bytes) -> Any:
    """Return what a YAML text holds: mappings, lists, texts, numbers, true, false and null.

    Anchors, aliases and merge keys are allowed as long as aliases repeat at most 100,000 characters and values.

    Raises:
        BadYAML: the text is no YAML in UTF-8; a mapping has a key twice, or one that is neither text nor a number; a
            number has another value in YAML 1.1 than in other versions (``010``, ``1:30``); a value has a tag; or there
            are too many values, levels of nesting or repetitions by aliases.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        _check(text)
        return yaml.load(text, _Loader)
    except BadYAML:
        raise
    except UnicodeError as error:
        at = f" at byte {error.start}" if isinstance(error, UnicodeDecodeError) else ""
        raise BadYAML(f"not in UTF-8: {getattr(error, 'reason', error)}{at}") from None
    except yaml.YAMLError as error:
        raise BrokenYAML(_reason(error)) from None
    except ValueError as error:  # a number of thousands of digits
        raise BadYAML(str(error).partition(":")[0]) from None


def ambiguous(text: str) -> str | None:
    """What to write instead of a number that has another value in YAML 1.1; None for any other text."""
    if zero := _LEADING_ZERO.fullmatch(text):
        return f"{zero[1].removeprefix('+')}{zero[2]}, or '{text}' in quotes for text"
    if _COLONS.fullmatch(text):
        return f"a number without colons, or '{text}' in quotes for text"
    return None


@dataclass
class _Collection:
    """A mapping or list that is being read.

    Attributes:
        anchor: its name for aliases, or None.
        keys: of a mapping: key -> line; None for a list.
        size: characters and values in it so far, with aliases filled in.
        at_key: whether a mapping's next part is a key.
    """

    anchor: str | None
    keys: dict[str, int] | None
    size: int = 1
    at_key: bool = True

    def begin(self, event: yaml.NodeEvent, line: int) -> None:
        """Note the start of its next part; refuse a key that it already has, or that is neither text nor a number."""
        if self.keys is None:
            return
        self.at_key = not self.at_key
        if self.at_key:  # this is the value
            return
        if not isinstance(event, yaml.ScalarEvent):
            raise BadYAML(f"line {line}: a key that is neither text nor a number")
        if event.implicit[0] and event.value.lower() in _NO_KEYS:
            raise BadYAML(f"line {line}: the key {event.value}, which as text is written '{event.value}'")
        if event.value in self.keys:
            raise BadYAML(f"{event.value} is in line {self.keys[event.value]} and again in line {line}")
        self.keys[event.value] = line


def _check(text: str) -> None:
    """Refuse what :func:`parse_yaml` refuses, before any value is built."""
    open_ones: list[_Collection] = []
    sizes: dict[str | None, int] = {}
    repeated = 0
    events: Iterable[Any] = yaml.parse(text, _Loader)
    for number, event in enumerate(events):
        line = event.start_mark.line + 1
        if number > _MOST_VALUES:
            raise BadYAML(f"line {line}: more than {_MOST_VALUES} values")
        if isinstance(event, yaml.NodeEvent):
            if (tag := getattr(event, "tag", None)) is not None:
                raise BadYAML(f"line {line}: the tag {tag}; values are written without tags")
            if open_ones:
                open_ones[-1].begin(event, line)
        if isinstance(event, yaml.CollectionStartEvent):
            open_ones.append(_Collection(event.anchor, {} if isinstance(event, yaml.MappingStartEvent) else None))
            if len(open_ones) > _DEEPEST:
                raise BadYAML(f"line {line}: nested more than {_DEEPEST} levels deep")
            continue
        if isinstance(event, yaml.AliasEvent):
            if any(one.anchor == event.anchor for one in open_ones):
                raise BadYAML(f"line {line}: *{event.anchor} within what it stands for")
            size = sizes.get(event.anchor, 0)
            repeated += size
            if repeated > _MOST_REPEATED:
                raise BadYAML(f"line {line}: aliases that repeat more than {_MOST_REPEATED} characters and values")
        elif isinstance(event, yaml.ScalarEvent):
            plain = event.implicit[0] and _NUMBER_IN_1_1.fullmatch(event.value)
            if plain and (instead := ambiguous(event.value)):
                raise BadYAML(f"line {line}: {event.value}; write {instead}")
            size = sizes[event.anchor] = len(event.value) + 1
        elif isinstance(event, yaml.CollectionEndEvent):
            closed = open_ones.pop()
            size = sizes[closed.anchor] = closed.size
        else:
            continue
        if open_ones:
            open_ones[-1].size += size


def _reason(error: yaml.YAMLError) -> str:
    """PyYAML's reason for an error, with the line."""
    if isinstance(error, yaml.reader.ReaderError):
        return f"{error.reason} at byte {error.position}"
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    return problem if mark is None else f"line {mark.line + 1}: {problem}"
