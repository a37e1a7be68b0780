"""Refuses the state of a checkpoint if it holds values that no run has, before anything is restored from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cfl.federation.row_layout import RowLayout, dtype_name
from cfl.metrics.base import own_key
from cfl.privacy.release import Noise
from cfl.runtime.errors import shown


def check_state(state: Mapping[str, Any], rounds: int, tasks: int, clients: int) -> None:
    """Check the numbers of a federation's state: rounds, tasks, clients, bytes and counts of test samples.

    Of the tensors that clients keep, integers called ``task`` are checked. The state of methods is not.

    Args:
        state: what :meth:`cfl.federation.federation.Federation.state_dict` returns.
        rounds: number of rounds of the run.
        tasks: number of tasks T.
        clients: number of clients C.

    Raises:
        ValueError: names the key, its value and what would be valid.
        LookupError, TypeError: an entry is missing, or is of another kind.
    """
    done, channel, ledger = state["round"], state["channel"], state["channel"].get("ledger", {})
    _require(_is_index(done, rounds + 1), "round", done, f"an integer from 0 to {rounds}, the rounds of the run")
    _require(_is_number(state["seconds"]), "seconds", state["seconds"], "a number of at least 0")
    _require(type(state["stopped"]) is bool, "stopped", state["stopped"], "True or False")
    known = [value for value in state["curve"] if value is not None]
    valid = f"a list of {done} entries, one for each finished round: None or a number"
    _require(len(state["curve"]) == done and all(map(_is_float, known)), "curve", state["curve"], valid)
    _check_channel(channel, done, tasks, clients)
    _check_ledger(ledger, done, tasks, clients)
    for topic, held in state["clients"].items():
        ids = held["clients"].tolist()
        sound = len({*ids}) == len(ids) and all(_is_index(client, clients) for client in ids)
        _require(sound, f"clients.{topic}.clients", ids, f"different ones of {_below(clients)}")
        if held["fields"].get("task", [""])[0] == "int64":
            _check_tasks(topic, held, tasks)
    of_users = own_key("")
    for key, held in state.items():
        matrix = held[1] if key.startswith(of_users) else held  # beside the definition of a user's measure
        if isinstance(matrix, Mapping) and {"sums", "counts"} <= matrix.keys():
            _check_matrix(key, matrix["sums"], matrix["counts"])


def _check_channel(channel: Mapping[str, Any], done: int, tasks: int, clients: int) -> None:
    for direction in ("uplink_bytes", "downlink_bytes"):
        for topic, sent in channel[direction].items():
            _require(_is_index(sent), f"channel.{direction}.{topic}", sent, "an integer of at least 0")
    valid = f"round, task and client in {_below(done)}, {_below(tasks)} and {_below(clients)}"
    for round, task, client in channel["skipped"]:
        sound = _is_index(round, done) and _is_index(task, tasks) and _is_index(client, clients)
        _require(sound, "channel.skipped", [round, task, client], valid)
    for round, topic, client in channel.get("skipped_messages", ()):
        sound = _is_index(round, done) and _is_index(client, clients)
        valid = f"round, topic and client, with a round in {_below(done)} and a client in {_below(clients)}"
        _require(sound, "channel.skipped_messages", [round, topic, client], valid)


def _check_ledger(ledger: Mapping[str, Any], done: int, tasks: int, clients: int) -> None:
    groups = ledger.get("clients", ())
    for group in groups:
        sound = all(_is_index(client, clients) for client in group)
        _require(sound, "channel.ledger.clients", group, _below(clients))
    for round, task, topic, noise, group, rate in ledger.get("releases", ()):
        sound = _is_index(round, done) and _is_index(task, tasks) and _is_index(group, len(groups))
        valid = f"round, task and group of clients in {_below(done)}, {_below(tasks)} and {_below(len(groups))}"
        _require(sound, "channel.ledger.releases", [round, task, topic, noise, group, rate], valid)
        _require(rate is None or 0 < rate <= 1, "channel.ledger.releases, rate", rate, "None or above 0 and at most 1")
        try:
            Noise(*noise)
        except ValueError as error:
            raise ValueError(f"federation.channel.ledger.releases, {error}") from None


def _check_tasks(topic: str, held: Mapping[str, Any], tasks: int) -> None:
    layout = RowLayout.from_plain(held["fields"])
    kept = layout.unpack({dtype: held["rows"][dtype_name(dtype)] for dtype in layout.widths})["task"]
    wrong = kept[(kept < -1) | (kept >= tasks)].tolist()
    _require(not wrong, f"clients.{topic}.rows, task", wrong[:1], f"0 to {tasks - 1}, or -1 for none")


def _check_matrix(key: str, sums: Tensor, counts: Tensor) -> None:
    least = int(counts.min())
    _require(least >= 0, f"{key}.counts", least, "numbers of test samples, at least 0")
    right_answers = not sums.is_floating_point()
    if right_answers and sums.shape == counts.shape:  # another shape is refused where the matrix is restored
        wrong = (sums < 0) | (sums > counts)
        found = [of[wrong][0].item() for of in (sums, counts)] if bool(wrong.any()) else None
        _require(found is None, f"{key}.sums and counts", found, "at most as many right answers as answers")


def _below(size: int) -> str:
    return f"0 to {size - 1}"


def _require(sound: bool, key: str, value: Any, valid: str) -> None:
    if not sound:
        raise ValueError(f"federation.{key} = {shown(value)} cannot be; valid: {valid}")


def _is_index(value: Any, size: float = math.inf) -> bool:
    return type(value) is int and 0 <= value < size


def _is_float(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_number(value: Any) -> bool:
    return _is_float(value) and value >= 0
