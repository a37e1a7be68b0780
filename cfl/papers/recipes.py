"""How experiments are run: config files and settings, combined by rules that hold for some points."""

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
"""Beginning of a line in a config file that says why a value was chosen by us."""


class NotAvailable(ValueError):
    """The experiment of a cell cannot be run here; the message says what is missing."""


def matches(when: Mapping[str, Any], point: Point) -> bool:
    """Return whether a point has, for every axis in ``when``, the given value or one of the list of values."""
    return all(point.get(axis) in (texts(wanted)) for axis, wanted in when.items())


def texts(value: Any) -> list[str]:
    """Return a value, or all values of a list, as texts, as axes have them."""
    return [str(entry) for entry in (value if isinstance(value, list) else [value])]


@dataclass(frozen=True)
class Rule:
    """Config files and settings that some points have in common.

    Attributes:
        when: axis -> value or values for which the rule holds; empty: always.
        configs: files below ``configs/``; ``{axis}`` stands for the point's value.
        settings: config key -> value, which overrides earlier files and settings; texts may hold ``{axis}``.
        chosen: why these settings were chosen by us; None where they are the paper's.
    """

    when: Mapping[str, Any] = field(default_factory=dict)
    configs: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    chosen: str | None = None

    @property
    def axes(self) -> set[str]:
        """The axes in ``when``, and those that its texts hold."""
        texts = [*self.configs, *(value for value in self.settings.values() if isinstance(value, str))]
        return {*self.when, *(field for text in texts for _, field, _, _ in Formatter().parse(text) if field)}

    @classmethod
    def read(cls, entry: Mapping[str, Any], where: str) -> Rule:
        """Read a data file's entry with ``when``, ``configs``, ``set``, ``chosen``, each optional."""
        known: dict[str, Any] = {"when": {}, "configs": [], "set": {}, "chosen": None}
        refuse_unknown(entry, known, where)
        found = {**known, **entry}
        return cls(found["when"], tuple(found["configs"]), found["set"], found["chosen"])


@dataclass(frozen=True)
class Recipe:
    """How an experiment is run.

    Attributes:
        arguments: arguments of ``cfl fit``, without seed and run folder.
        notes: why some of its settings were chosen by us.
    """

    arguments: tuple[str, ...]
    notes: tuple[str, ...] = ()


def recipe(rules: Sequence[Rule], point: Point) -> Recipe:
    """Combine the rules that hold for a point; later ones override earlier ones.

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
    """Return the lines of a config file that say why values were chosen by us."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(line.removeprefix(CHOSEN) for line in lines if line.startswith(CHOSEN))


def _filled(value: Any, point: Point) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return value.format_map(point)
    except KeyError as missing:
        raise ConfigError("rules", value, f"a text without {missing}: the table has no such axis") from None
