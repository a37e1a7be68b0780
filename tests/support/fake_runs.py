"""Runs every method's case on the pretended device, and says what differs from the CPU and what was waited for.

``PYTHONPATH=.:tests:tests/methods python -m support.fake_runs`` prints a table; names of methods choose some of them,
``--json`` prints what the tests read.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cfl.testing.comparing import difference
from cfl.testing.method_case import NAME, MethodCase, Run
from cfl.testing.method_numbers import require_equal
from cfl.testing.tiny_networks import double
from cfl.testing.tiny_runs import Rounds, SaveRounds
from support import fake_device
from support.fake_accelerator import Traffics, on_it

EPOCHS = (2, 4)
"""Local epochs of the runs whose waiting is compared."""


@dataclass
class Found:
    """What runs of a method showed.

    Attributes:
        failed: the traceback of a run that failed, as it does where devices are mixed.
        differs: from the CPU, in words.
        resumed: how runs that go on at the other device differ from those that stay, in words.
        waits: how often each round waits for the device.
        grows: what is waited for more often with twice the local epochs, operation and place -> how often.
        per_step: of these waits, those of a local step.
    """

    failed: str | None = None
    differs: str | None = None
    resumed: str | None = None
    waits: list[int] = field(default_factory=list)
    grows: dict[str, int] = field(default_factory=dict)
    per_step: float = 0.0

    def row(self, name: str) -> str:
        """A row of the table."""
        rounds = f"{min(self.waits)} to {max(self.waits)}" if self.waits else "failed"
        return f"| `{name}` | {rounds} | {self.per_step:.2g} |"


HEAD = "| method | waits in a round | more for each local step |\n|---|---:|---:|"


def run(case: MethodCase, trainer: dict[str, Any], epochs: int = EPOCHS[0], callbacks: Sequence[Any] = ()) -> Run:
    """A run in float64 of unequal clients side by side."""
    data = case.data_of(shares="unequal", schedule={"local_epochs": epochs})
    methods, watch = case.methods("tried"), Rounds()
    made = case.start(data, methods, double(case.network), "vmap", [watch, *callbacks], **trainer)
    return Run(watch.models, made, methods[NAME])


def look(case: MethodCase) -> Found:
    """All that is compared."""
    expected, found = run(case, {}), Found()
    runs = [watched(case, epochs) for epochs in EPOCHS]
    there, few = runs[0]
    found.differs = _words(
        lambda: require_equal(case, "devices", "on the device", there, expected, case.device_tolerance)
    )
    found.waits = [counts.total() for counts in few.rounds]
    found.grows = {f"{what} at {place}": n for (what, place), n in (runs[1][1].total - few.total).items()}
    found.per_step = max(0, runs[1][1].total.total() - few.total.total()) / (runs[1][1].steps - few.steps)
    found.resumed = _words(lambda: resuming(case))
    return found


def watched(case: MethodCase, epochs: int) -> tuple[Run, Traffics]:
    """A run on the device, and what it waited for."""
    with fake_device.counted() as waits:
        watch = Traffics(waits)
        return run(case, on_it(), epochs, [watch]), watch


def resuming(case: MethodCase) -> None:
    """A run that goes on at the other device ends like one that stays."""
    with tempfile.TemporaryDirectory() as folder:
        for name, first, then in (("to the CPU", on_it, dict), ("from the CPU", dict, on_it)):
            stops = sorted({1, case.rounds})
            stayed = everything(case, then())
            everything(case, first(), [SaveRounds(stops, Path(folder))])
            for stop in stops:
                went = everything(case, then(), ckpt_path=Path(folder) / f"{stop}.ckpt")
                differs = difference(went, stayed, case.device_tolerance)
                assert not differs, f"moved {name} after round {stop}: {differs}"


def everything(
    case: MethodCase, trainer: dict[str, Any], callbacks: Sequence[Any] = (), ckpt_path: Path | None = None
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
    as_json = "--json" in arguments
    if not as_json:
        print(HEAD)
    for name in [a for a in arguments if not a.startswith("-")] or list(CASES):
        try:
            found = look(CASES[name])
        except Exception:
            found = Found(failed=traceback.format_exc())
        print(json.dumps({"name": name, **asdict(found)}) if as_json else found.row(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
