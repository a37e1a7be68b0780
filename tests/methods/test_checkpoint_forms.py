"""The form of every method's state in checkpoints, and what comes back from a file."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from test_registry import CASES, ENTRIES, METHODS, each_method

from cfl.testing.comparing import difference

MODEL = "dict[str, Tensor]"
RECORD = "{task: int, client: int, layer: str, adaptive_share: float, mean_gate: float"
APD_STATE = {
    "initial": ("_initial", MODEL),
    "rows": ("_rows", f"list[{RECORD}}}]"),
    "client_bytes": ("_client_bytes", "dict[int, int]"),
}
FEDWEIT_STATE = APD_STATE | {
    "rows": ("_rows", f"list[{RECORD}, sources: str, source_tasks: str, attention: str}}]"),
    "sent": ("_sent", MODEL),
    "knowledge": (
        "_knowledge",
        # Whole rows, because they are smaller here than rows, columns and values of entries.
        "list[{task: int, round: int, clients: list[int], bytes: list[int], "
        "layers: dict[str, {row: None, column: None, values: Tensor, size: int}]}]",
    ),
    "bytes": ("_bytes", "list[list[int]]"),
}
FOT_STATE = {
    "bases": ("bases", MODEL),
    "importance": ("importance", "dict"),
    "gpse_seconds": ("gpse_seconds", "list[float]"),
    "rows": (
        "_rows",
        "list[{task: int, layer: str, input_dim: int, basis_size: int, added: int, used_space: float, "
        "residual_share: float, threshold: float, sketch_bytes: int, basis_bytes: int, gpse_seconds: float}]",
    ),
}
STATES: dict[str, dict[str, tuple[str, str]]] = {
    "APD": APD_STATE,
    "AnalyticHead": {
        "gram": ("gram", "Tensor"),
        "class_sums": ("class_sums", "Tensor"),
        "weight": ("weight", "Tensor"),
        "statistics": ("_statistics", MODEL),
    },
    "CFeD": {
        "old": ("_old.tensors", MODEL),
        "received": ("_old.holders", "list[int]"),
        "seconds": ("server_seconds", "float"),
        "surrogate": ("_surrogate_digest", "str"),
    },
    "CONFEDMADE": FEDWEIT_STATE,
    "DPFedAvg": {"clips": ("clips", "Tensor"), "rows": ("_rows", "list[{round: int, clip: float, within: float}]")},
    "EWC": {
        "rows": (
            "_rows",
            "list[{task: int, clients: int, fisher_mean: float, fisher_max: float, fisher_seconds: float}]",
        ),
    },
    "FOT": FOT_STATE,
    "FedAGEM": {
        "reference": ("reference", MODEL),
        "have": ("_have", "list[int]"),
        "seconds": ("seconds", "float"),
        "steps": ("_steps", "int"),
        "refined": ("_refined", "int"),
    },
    "FedCIL": {
        "replay": ("_replay.tensors", MODEL),
        "receivers": ("_replay.holders", "list[int]"),
    },
    "FedCurv": {
        "u": ("u", MODEL),
        "v": ("v", MODEL),
        "of_round": ("_of_round", "int"),
        "penalty_bytes": ("_penalty_bytes", "int"),
        "rows": (
            "_rows",
            "list[{round: int, clients: int, u_mean: float, u_max: float, greatest_pull: float, "
            "fisher_seconds: float}]",
        ),
    },
    "FedWeIT": FEDWEIT_STATE,
    "GLFC": {
        "proxy": (
            "proxy",
            "{images: Tensor, labels: Tensor, classes: Tensor, version: int, "
            "slots: list[None | {tensors: dict[str, Tensor], classes: Tensor, accuracy: float, version: int}]}",
        ),
        "rows": ("_rows", "list[dict[str, int]]"),
        "seconds": ("seconds", "float"),
    },
    "GPM": {
        "rows": (
            "_rows",
            "list[{task: int, layer: str, input_dim: int, clients: int, basis_size: float, smallest_basis: int, "
            "largest_basis: int, added: float, used_space: float, residual_share: float, threshold: float, "
            "memory_bytes: float}]",
        ),
        "memory_seconds": ("memory_seconds", "float"),
        "most_bytes": ("_most_bytes", "int"),
    },
    "ICaRL": {
        "means": ("means", "Tensor"),
        "known": ("known", "Tensor"),
        "old": ("_old.tensors", MODEL),
        "received": ("_old.holders", "list[int]"),
    },
    "InferringFOT": FOT_STATE
    | {
        "task_bases": ("task_bases", MODEL),
        "identified.sums": ("identified.sums", "Tensor"),
        "identified.counts": ("identified.counts", "Tensor"),
    },
    "LearningRateDecay": {
        "rows": ("_rows", "list[{task: int, clients: int, stopped: int, mean_rate: float, validation_loss: float}]")
    },
    "RGO": {
        "rows": (
            "_rows",
            "list[{task: int, layer: str, input_dim: int, clients: int, curvature: float, free_space: float}]",
        ),
        "memory_seconds": ("memory_seconds", "float"),
    },
    "SCAFFOLD": {"variate": ("variate", MODEL)},
    "SingleTask": {"initial": ("_initial", MODEL)},
}
"""A method's state in checkpoints: key -> the attribute that it restores, and its form in the file.

Users keep checkpoints of these forms, so a changed form needs code that still reads the earlier one.
"""


def form(value: Any) -> str:
    """Types of a value and of its elements. A dict whose values have several types is given with its keys, in order."""
    if type(value) is dict and value:
        held = {form(element) for element in value.values()}
        if (len(held) > 1 and held != {"Tensor"}) or "row" in value:
            return "{" + ", ".join(f"{key}: {form(element)}" for key, element in value.items()) + "}"
        return f"dict[{' | '.join({type(key).__name__ for key in value})}, {held.pop()}]"
    if type(value) is list and value:
        return f"list[{' | '.join(sorted({form(element) for element in value}))}]"
    return "None" if value is None else type(value).__name__


def contents(value: Any) -> Any:
    """An attribute in a form that compares: objects of the package as what they hold, sets as lists."""
    if isinstance(value, Mapping):
        return {key: contents(element) for key, element in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value).__name__, [contents(x) for x in (sorted(value) if isinstance(value, set) else value)]
    if type(value).__module__.startswith("cfl."):
        return type(value).__name__, contents(vars(value))
    return value


@each_method
def test_checkpoints_have_the_form_they_had(name: str) -> None:
    method = CASES[name].run(tasks=3).method
    assert method is not None
    state = method.state_dict()
    assert [(key, form(value)) for key, value in state.items()] == [
        (key, of_file) for key, (_, of_file) in STATES.get(name, {}).items()
    ], f"describe the state of a new method in STATES in {__file__}"


@each_method
def test_its_attributes_come_back_from_a_file(name: str, tmp_path: Path) -> None:
    method = CASES[name].run(tasks=3).method
    assert method is not None
    torch.save(method.state_dict(), tmp_path / "state.pt")
    other = METHODS[name](**ENTRIES[name].active)
    other.setup(method.context)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for attribute, _ in STATES.get(name, {}).values():
        found, expected = attrgetter(attribute)(other), attrgetter(attribute)(method)
        assert type(found) is type(expected)
        assert difference(contents(found), contents(expected), place=attribute) is None
    if name == "ICaRL":
        assert other._complete  # type: ignore[attr-defined]  # computed anew from the restored state
