"""Runs every method's case on the pretended device, and says what differs from the CPU and what was waited for.

``PYTHONPATH=.:tests:tests/methods python -m support.fake_runs`` prints a table; names of methods choose some of them,
``--json`` prints what the tests read.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import cfl  # noqa: F401  before lightning: see cfl/runtime/torchvision_ops.py

from lightning.pytorch import Callback, LightningModule, Trainer

from cfl.testing.comparing import difference
from cfl.testing.method_case import NAME, MethodCase, Run
from cfl.testing.method_numbers import require_equal
from cfl.testing.tiny_networks import double
from cfl.testing.tiny_runs import Rounds, SaveRounds
from support import fake_device
from support.fake_accelerator import on_it

EPOCHS = (2, 4)
"""Local epochs of the runs whose waiting is compared."""


@dataclass
class Found:
    """What runs of a method showed; everything is empty or the same number if all is well.

    Attributes:
        differs: from the CPU, in words.
        resumed: how runs that go on at the other device differ from those that stay, in words.
        waits: how often each round waited for the device, for each number of local epochs.
        grows: what is waited for more often with more local steps, operation and place.
        sent: as ``waits``, for copies to the device.
        sent_more: as ``grows``, for copies to the device.
    """

    differs: str | None = None
    resumed: str | None = None
    waits: list[list[int]] = field(default_factory=list)
    grows: list[str] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)
    sent_more: list[str] = field(default_factory=list)


class Traffics(Callback):
    """Notes at the end of every round what has passed since the last one."""

    def __init__(self, traffic: fake_device.Traffic) -> None:
        self.traffic, self.rounds = traffic, list[fake_device.Traffic]()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take what was counted."""
        self.rounds.append(fake_device.Traffic(self.traffic.waits.copy(), self.traffic.sent.copy()))
        self.traffic.waits.clear()
        self.traffic.sent.clear()


def run(case: MethodCase, trainer: dict[str, Any], epochs: int = 1, callbacks: Sequence[Callback] = ()) -> Run:
    """A run in float64 of unequal clients side by side."""
    data = case.data_of(shares="unequal", schedule={"local_epochs": epochs})
    methods, watch = case.methods("tried"), Rounds()
    made = case.start(data, methods, double(case.network), "vmap", [watch, *callbacks], **trainer)
    return Run(watch.models, made, methods[NAME])


def look(case: MethodCase) -> Found:
    """All that is compared."""
    found = Found()
    expected = run(case, {}, EPOCHS[0])
    rounds = []
    for epochs in EPOCHS:
        with fake_device.counted() as traffic:
            watch = Traffics(traffic)
            there = run(case, on_it(), epochs, [watch])
        rounds.append(watch.rounds)
        if epochs == EPOCHS[0]:
            found.differs = _words(
                lambda there=there: require_equal(
                    case, "devices", "on the device", there, expected, case.device_tolerance
                )
            )
    found.waits = [[t.waits.total() for t in each] for each in rounds]
    found.sent = [[t.sent.total() for t in each] for each in rounds]
    few, many = (sum((t.waits for t in each), Counter()) for each in rounds)
    found.grows = [f"{what} at {place}: {n} more" for (what, place), n in (many - few).items()]
    few_sent, many_sent = (sum((t.sent for t in each), Counter()) for each in rounds)
    found.sent_more = [f"{place}: {n} more" for place, n in (many_sent - few_sent).items()]
    found.resumed = _words(lambda: resuming(case))
    return found


def resuming(case: MethodCase) -> None:
    """A run that goes on at the other device ends like one that stays."""
    with tempfile.TemporaryDirectory() as folder:
        for name, first, then in (("to the CPU", on_it, dict), ("from the CPU", dict, on_it)):
            stops = sorted({1, case.rounds})
            stayed = run_on(case, then(), [])
            run_on(case, first(), [SaveRounds(stops, Path(folder))])
            for stop in stops:
                went = run_on(case, then(), [], Path(folder) / f"{stop}.ckpt")
                differs = difference(went, stayed, case.device_tolerance)
                assert not differs, f"moved {name} after round {stop}: {differs}"


def run_on(
    case: MethodCase, trainer: dict[str, Any], callbacks: Sequence[Callback], ckpt_path: Path | None = None
) -> dict[str, Any]:
    """The model and all else that a checkpoint holds, after a run that may go on from a file."""
    data, methods = case.data_of(shares="unequal"), case.methods("tried")
    made = case.start(data, methods, double(case.network), callbacks=callbacks, ckpt_path=ckpt_path, **trainer)
    return {"model": dict(made.state_tensors()), **made.state_dict()}


def _words(check: Callable[[], None]) -> str | None:
    try:
        check()
    except AssertionError as error:
        return str(error)
    return None


def main(arguments: Sequence[str]) -> None:
    """Print what was found."""
    from test_registry import CASES

    fake_device.register()
    names = [a for a in arguments if not a.startswith("-")] or list(CASES)
    for name in names:
        try:
            found = asdict(look(CASES[name]))
        except Exception:
            found = {"failed": traceback.format_exc()}
        if "--json" in arguments:
            print(json.dumps({"name": name, **found}), flush=True)
        else:
            print(name, json.dumps(found, indent=1).replace("\\n", "\n"), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
