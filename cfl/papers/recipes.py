"""How an experiment is run: config files and settings, laid over each other by rules that hold for some points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from cfl.cli.installed_configs import CONFIGS
from cfl.papers.entries import refuse_unknown
from cfl.running.grid import setting
from cfl.runtime.errors import ConfigError

Point = Mapping[str, str]
"""A combination of axis values."""

CHOSEN = "# chosen: "
"""How a line of a config file begins that says why a value is ours and not the paper's."""


class NotAvailable(ValueError):
    """A cell whose experiment does not exist here; the message says what is absent."""


def matches(when: Mapping[str, Any], point: Point) -> bool:
    """Whether a point has every axis of ``when`` at the value given there, or at one of those in the list."""
    return all(point.get(axis) in (texts(wanted)) for axis, wanted in when.items())


def texts(value: Any) -> list[str]:
    """A value, or every one of a list, as axes have it."""
    return [str(entry) for entry in (value if isinstance(value, list) else [value])]


@dataclass(frozen=True)
class Rule:
    """What some points have in common: config files, settings over them, and why they are as they are.

    Attributes:
        when: axis -> value or values for which the rule holds; empty: always.
        configs: files below ``configs/``; ``{axis}`` stands for the point's value.
        settings: config key -> value, laid over everything so far; texts may hold ``{axis}``.
        chosen: why these settings were chosen by us; None where they are the paper's.
    """

    when: Mapping[str, Any] = field(default_factory=dict)
    configs: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    chosen: str | None = None

    @property
    def axes(self) -> set[str]:
        """The axes on which the rule depends, or that its texts hold."""
        texts = [*self.configs, *(value for value in self.settings.values() if isinstance(value, str))]
        return {*self.when, *(field for text in texts for _, field, _, _ in Formatter().parse(text) if field)}

    @classmethod
    def read(cls, entry: Mapping[str, Any], where: str) -> Rule:
        """From a data file's entry with ``when``, ``configs``, ``set``, ``chosen``, each optional."""
        known: dict[str, Any] = {"when": {}, "configs": [], "set": {}, "chosen": None}
        refuse_unknown(entry, known, where)
        found = {**known, **entry}
        return cls(found["when"], tuple(found["configs"]), found["set"], found["chosen"])


@dataclass(frozen=True)
class Recipe:
    """How an experiment is run.

    Attributes:
        arguments: of ``cfl fit``, without seed and run folder.
        notes: why some of its settings were chosen by us.
    """

    arguments: tuple[str, ...]
    notes: tuple[str, ...] = ()


def recipe(rules: Sequence[Rule], point: Point) -> Recipe:
    """Lay the rules that hold for a point over each other, in their order.

    Raises:
        NotAvailable: a config file is not there, e.g. because a method is not implemented.
        ConfigError: a rule needs an axis that the point does not have.
    """
    arguments: list[str] = []
    notes: list[str] = []
    for rule in rules:
        if not matches(rule.when, point):
            continue
        for name in rule.configs:
            path = CONFIGS / _filled(name, point)
            if not path.is_file():
                axis = max(point, key=lambda axis: name.rfind(f"{{{axis}}}"))
                what = f"{axis} {point[axis]}" if f"{{{axis}}}" in name else path.name
                raise NotAvailable(f"{what} not available")
            arguments.append(f"--config={path}")
            notes += _chosen_in(path)
        arguments += [setting(key, _filled(value, point)) for key, value in rule.settings.items()]
        notes += [rule.chosen] if rule.chosen else []
    return Recipe(tuple(arguments), tuple(dict.fromkeys(notes)))


@cache
def _chosen_in(path: Path) -> tuple[str, ...]:
    """What a config file says of values that are ours."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(line.removeprefix(CHOSEN) for line in lines if line.startswith(CHOSEN))


def _filled(value: Any, point: Point) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return value.format_map(point)
    except KeyError as missing:
        raise ConfigError("rules", value, f"a text without {missing}: the table has no such axis") from None
