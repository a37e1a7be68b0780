"""Facts about a run, and rules that tell from them when its result is meaningless."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from torch import Tensor

from attack.children import Preparation
from attack.trees import flat
from attack.values import LARGE
from cfl.runtime.run_files import CONFIG, ROUNDS, SUMMARY
from cfl.training.client import Client

CUT = 77
"""Exit status of a run that was ended after enough steps."""
_STEPS = 60
_SECONDS = 5.0
"""CPU seconds after which a run is ended, once it has reached its second step."""
_LARGEST = 1e30


def told_into(file: Path) -> Preparation:
    """Return a preparation that lets a run write its facts into a file, and ends the run after some steps.

    Args:
        file: JSON, written when the run ends without an error.
    """
    started = time.process_time()

    def prepare(stack: ExitStack) -> None:
        step, seen = Client.training_step, _Seen()

        def watched(client: Client, *arguments: Any) -> Any:
            seen.step(client)
            late = seen.steps > 1 and time.process_time() - started > _SECONDS
            if seen.steps > _STEPS or late:
                seen.write(file)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(CUT)
            return step(client, *arguments)

        stack.enter_context(mock.patch.object(Client, "training_step", watched))
        stack.callback(seen.write, file)

    return prepare


class _Seen:
    """Collects the facts about a run."""

    def __init__(self) -> None:
        self.steps = 0
        self._client: Client | None = None
        self._before: dict[str, Tensor] = {}

    def step(self, client: Client) -> None:
        """Count a local step; keep the parameters before the first one."""
        self.steps += 1
        if self._client is None:
            self._client = client
            self._before = {name: tensor.detach().clone() for name, tensor in client.network.named_parameters()}

    def write(self, file: Path) -> None:
        """Write the facts that are known now."""
        facts: dict[str, Any] = {"steps": self.steps}
        if self._client is not None:
            federation = self._client.require_federation()
            parameters = dict(self._client.network.named_parameters())
            data = federation.data
            facts |= {
                "rounds": federation.round,
                "moved": any(bool((parameters[name] != tensor).any()) for name, tensor in self._before.items()),
                "methods": list(federation.methods),
                "lr": [
                    group["lr"] for optimizer in self._client.trainer.optimizers for group in optimizer.param_groups
                ],
                "scenario": data.scenario,
                "classes_per_task": list(data.stream.classes_per_task),
                "absent": _absent_classes(data) if data.scenario != "density" else [],
            }
        with suppress(OSError):
            file.write_text(json.dumps(facts, default=str))


def _absent_classes(data: Any) -> list[str]:
    """Sentences about classes of tasks without training or test samples."""
    found = []
    for number, (task, classes) in enumerate(zip(data.tasks, data.stream.classes_per_task, strict=True)):
        for part in ("train", "test"):
            there = set(getattr(task, part).labels.tolist())
            lacking = sorted(set(range(classes)) - there)
            if lacking:
                found.append(f"task {number} has no {part} sample of classes {lacking[:5]}")
    return found


Given = Mapping[str, Any]
"""Dotted key -> value of what a configuration sets in addition to tiny.yaml."""
_RULES: list[Callable[[Given, dict[str, Any], Path], Iterator[tuple[str, str]]]] = []


def _rule(find: Callable[[Given, dict[str, Any], Path], Iterator[tuple[str, str]]]) -> Any:
    _RULES.append(find)
    return find


def meaningless(given: Given, facts: dict[str, Any], folder: Path, said: str) -> str:
    """Return the reason why an accepted run is meaningless; empty if no rule objects.

    Args:
        given: what its configuration sets in addition to tiny.yaml.
        facts: as :func:`told_into` writes them.
        folder: the run folder.
        said: the run's standard error. Rules do not object to anything that the run has warned of.
    """
    lines = [line.lower() for line in said.splitlines()]
    for rule in _RULES:
        for reason, word in rule(given, facts, folder):
            if not any(word.lower() in line for line in lines):
                return reason
    return ""


@_rule
def _numbers_that_are_none(given: Given, _: dict[str, Any], __: Path) -> Iterator[tuple[str, str]]:
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{key} = {value} is accepted", key.rpartition(".")[2]


@_rule
def _numbers_beyond_all_bounds(given: Given, _: dict[str, Any], __: Path) -> Iterator[tuple[str, str]]:
    for key, value in given.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            most = LARGE if isinstance(value, int) else _LARGEST
            if abs(value) >= most:
                yield f"{key} = {value} is accepted", key.rpartition(".")[2]


@_rule
def _numbers_below_none(given: Given, _: dict[str, Any], __: Path) -> Iterator[tuple[str, str]]:
    for key, value in given.items():
        if isinstance(value, int) and value < 0 and not key.startswith("trainer."):  # -1 means something to Lightning
            yield f"{key} = {value} is accepted", key.rpartition(".")[2]


@_rule
def _values_read_otherwise(given: Given, _: dict[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    if (folder / CONFIG).is_file():
        read = flat(yaml.safe_load((folder / CONFIG).read_text()))
        for key, value in given.items():
            if isinstance(value, bool | str) and type(read.get(key)) in (int, float) and _number(value) != read[key]:
                yield f"{key} = {value!r} is read as {read[key]!r}", key.rpartition(".")[2]


def _number(value: bool | str) -> float | None:
    """The number that a plain decimal text stands for; None for any other text and for truth values."""
    if isinstance(value, bool) or not re.fullmatch(r"[+-]?(0|[1-9]\d*)(\.\d*)?(e[+-]?\d+)?", value):
        return None
    return float(value)


@_rule
def _nothing_learnt(given: Given, facts: dict[str, Any], _: Path) -> Iterator[tuple[str, str]]:
    if any(float(rate) == 0 for rate in facts.get("lr", [])):
        yield "the learning rate is 0", "lr"
    if not facts["steps"]:
        yield "no client took a step", "client"
    if facts.get("rounds") and not facts["moved"] and not facts["methods"]:
        yield "the model has not changed", "model"


@_rule
def _nothing_to_tell_apart(_: Given, facts: dict[str, Any], __: Path) -> Iterator[tuple[str, str]]:
    classes = facts.get("classes_per_task", [])
    if facts.get("scenario") == "task" and 1 in classes:
        yield "tasks of one class, with the task known", "class"
    if facts.get("scenario") in ("class", "domain") and sum(classes) == 1:
        yield "a single class", "class"
    yield from ((absent, "class") for absent in facts.get("absent", []))


@_rule
def _figures_that_are_none(_: Given, facts: dict[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    if (folder / ROUNDS).is_file():
        with (folder / ROUNDS).open(newline="") as file:
            losses = [row.get("loss", "") for row in csv.DictReader(file)]
        if any(loss and not math.isfinite(float(loss)) for loss in losses):
            yield "a loss is not finite", "loss"
    if (folder / SUMMARY).is_file():
        summary = json.loads((folder / SUMMARY).read_text())
        if summary.get("acc", summary.get("nll")) is None:
            yield "the summary has no figure", "acc"
        for name in ("rounds", "tasks", "clients", "parameters"):
            if not summary[name]:
                yield f"{name} = 0 in the summary", name
