"""Configurations of all kinds, started on tiny data: drawn from the types of all options, and fixed ones."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from support import tiny_cli

from attack import children, data_files, fixed, schema, trials, values
from attack.meaningless import CUT, meaningless, told_into
from attack.outcomes import Outcome, failure, refusal
from attack.trees import flat, laid_over, nested

_FIXED_SHARE = 0.4
"""The greatest share of fixed cases."""
_SHAPES = {"LeNet": [1, 28, 28], "MnistCNN": [1, 28, 28], "AlexNet": [3, 32, 32]}
_SHAPES |= {name: [3, 16, 16] for name in ("DropoutCNN", "SmallCNN", "ResNet18")}
"""Network -> shape of its images, for networks that cannot take the small images of tiny.yaml."""
_LIGHTNINGS = "lightning."
_COMBINED = ("model.network", "model.optimizer", "data.stream", "data.partition", "data.participation", "data.scenario")
_COMBINED += ("data.exposure", "data.sequences", "data.validation", "data.num_clients", "methods", "engine.kind")
_COMBINED += ("schedule.clients_per_round", "schedule.local_epochs", "schedule.evaluate_every", "federated.batchnorm")
_PROCESSES = 60.0
"""Seconds for a command that may start further processes, each of which imports everything anew."""


@dataclass(frozen=True)
class Configuration:
    """Options that replace those of tiny.yaml.

    Attributes:
        about: the option that is tried.
        tree: the options, nested as in a file.
        on_command_line: whether they are given as options of the command line instead of a file.
    """

    about: str
    tree: Mapping[str, Any]
    on_command_line: bool

    @property
    def given(self) -> dict[str, Any]:
        """Dotted key, without ``init_args``, -> value."""
        return flat(self.tree)


def _surroundings(leaf: schema.Leaf) -> dict[str, Any]:
    """Configuration that the classes on the way to a leaf need, such as a fitting network or images."""
    tree: dict[str, Any] = {}
    for step in leaf.way:
        if step.name in trials.TRIALS:
            tree = laid_over(tree, trials.TRIALS[step.name])
        for network in trials.NETWORKS.values():
            if network["class_path"] == step.name:
                tree = laid_over(tree, {"model": {"network": network}})
        if step.name in _SHAPES:
            images = {"num_classes": 4, "shape": _SHAPES[step.name], "train_size": 96, "test_size": 40, "noise": 60.0}
            tree = laid_over(tree, {"data": {"stream": {"init_args": {"source": {"init_args": images}}}}})
    return tree


@cache
def _leaves(seed: int) -> tuple[list[schema.Leaf], list[schema.Leaf]]:
    """All leaves in an order drawn from the seed: those without, and those with a class of Lightning's on the way."""
    everyone = list(schema.leaves())
    random.Random(f"leaves {seed}").shuffle(everyone)
    theirs = [leaf for leaf in everyone if leaf.way and leaf.way[0].name.startswith(_LIGHTNINGS)]
    return [leaf for leaf in everyone if leaf not in theirs], theirs


def _drawn(number: int, seed: int) -> Configuration:
    """Draw a configuration. Of seven, five try an option, one an option of Lightning, one has many valid options."""
    ours, theirs = _leaves(seed)
    turn, of_kind = number % 7, number // 7
    draw = random.Random(f"configuration {number} {seed}")
    if turn == 6:
        combination = values.drawn(_combination(), (number, seed))
        return Configuration("a combination", nested(combination), False)
    leaf = theirs[of_kind % len(theirs)] if turn == 5 else ours[(5 * of_kind + turn) % len(ours)]
    tree = nested(values.drawn(values.at(leaf, values.wild(leaf.option)), (number, seed)))
    if draw.random() < 0.05:
        tree = _misspelt(tree, draw)
    return Configuration(str(leaf), laid_over(_surroundings(leaf), tree), draw.random() < 0.3)


def _combination() -> SearchStrategy[dict[str, Any]]:
    options = {option.name: option for option in schema.sections()}
    some = {name: values.tame(options[name]) for name in _COMBINED}
    return st.fixed_dictionaries({}, optional=some)


def _misspelt(tree: Any, draw: random.Random) -> Any:
    """Return a tree with an additional letter in one key, most often an inner one."""
    if not isinstance(tree, Mapping) or not tree:
        return tree
    *others, last = tree
    inner = tree[last]
    if isinstance(inner, Mapping) and inner and draw.random() < 0.8:
        return {**tree, last: _misspelt(inner, draw)}
    place = draw.randrange(len(str(last)) + 1)
    return {**{key: tree[key] for key in others}, f"{str(last)[:place]}e{str(last)[place:]}": inner}


def cases(count: int, seed: int, folder: Path) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    """Names of cases, each with the function that runs it.

    Args:
        count: number of cases; up to two of five are fixed ones.
        seed: seed of all draws.
        folder: where runs are made.
    """
    names = sorted(fixed.CASES)
    random.Random(f"fixed {seed}").shuffle(names)
    names = names[: int(_FIXED_SHARE * count)]
    for key in names:
        name = f"configurations/{key.replace(' ', '-')}"
        yield name, partial(fixed.run, name, fixed.CASES[key], folder / name)
    for number in range(count - len(names)):
        name = f"configurations/{number}"
        yield name, partial(_run, name, number, seed, folder / name)


def _run(name: str, number: int, seed: int, folder: Path) -> Outcome:
    configuration = _drawn(number, seed)
    folder.mkdir(parents=True)
    data_files.link(folder)
    words = _words(configuration, folder)
    several = any(key in configuration.given for key in ("trainer.devices", "trainer.num_nodes", "trainer.strategy"))
    seconds = _PROCESSES if several else children.SECONDS
    ended = children.run(words, told_into(folder / "facts.json"), seconds, folder)
    outcome = Outcome(
        name, *_judged(configuration, ended, folder), f"{configuration.about}: cfl {shlex.join(words)}"[:4000]
    )
    if outcome.verdict in ("ran", "refused"):
        shutil.rmtree(folder)
    return outcome


def _words(configuration: Configuration, folder: Path) -> list[str]:
    """Return the command line, and write the configuration file that it names."""
    words = ["fit", "--config", str(tiny_cli.TINY), "--run.dir", "run"]
    if not configuration.on_command_line or "\0" in repr(configuration.tree):
        text = yaml.safe_dump(dict(configuration.tree), sort_keys=False, allow_unicode=True)
        (folder / "case.yaml").write_text(text, encoding="utf-8")
        return [*words[:3], "--config", "case.yaml", *([] if "run.dir" in configuration.given else words[3:])]
    for section, options in configuration.tree.items():
        if not isinstance(options, Mapping) or section == "methods":
            options = {"": options}
        for name, value in options.items():
            words.append(f"--{section}{'.' * bool(name)}{name}={_as_word(value)}")
    return words


def _as_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _judged(configuration: Configuration, ended: children.Ended, folder: Path) -> tuple[str, str]:
    if ended.status not in (0, CUT):
        return failure(ended) or refusal(ended, _names(configuration.given))
    facts = json.loads((folder / "facts.json").read_text())
    reason = meaningless(configuration.given, facts, folder / "run", ended.said)
    return ("meaningless", reason) if reason else ("ran", "")


def _names(given: Mapping[str, Any]) -> list[str]:
    """Words of which an error about a configuration must contain one: its keys, parts of them, and its values."""
    found: list[str] = []
    for key, value in given.items():
        parts = key.split(".")
        found += [".".join(parts[:end]) for end in range(2, len(parts) + 1)]
        found += [part for part in parts if len(part) > 3]
        found += [shown[:200] for shown in (str(value), repr(value)) if len(shown) > 2]
    return found
