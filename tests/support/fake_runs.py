"""Runs methods' cases on the fake device, and reports differences from the CPU and what the program waits for.

``PYTHONPATH=.:tests:tests/methods python -m support.fake_runs`` prints a table of all methods; names of methods choose
some of them. ``--json`` prints what the tests read.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cfl.data.partitions import Dirichlet
from cfl.testing.comparing import difference
from cfl.testing.method_case import NAME, MethodCase, Run
from cfl.testing.method_numbers import require_equal
from cfl.testing.tiny_networks import double
from cfl.testing.tiny_runs import Rounds, SaveRounds, everything
from support import fake_device
from support.fake_accelerator import Watch, on_it

_LAST_CHANNELS = "a CPU adds up maps with the channels last in memory"
ROUNDED = {
    "EWC": _LAST_CHANNELS,
    "FedCurv": _LAST_CHANNELS,
    "L2P": "a CPU computes attention by one operation, other devices by several",
}
"""Methods whose results equal the CPU's only up to float64's rounding, and why; all others are equal bit for bit."""
ROUNDING = 1e-12

HEAD = (
    "| method | waits in a round | copies in a round | waits for each further step | copies for each further step |\n"
    "|---|---:|---:|---:|---:|"
)


@dataclass
class Found:
    """What runs of a method show.

    Attributes:
        failed: the traceback of a run that failed, for example because it mixed devices; None otherwise.
        differs: how the results differ from the CPU's, in words; None if they do not.
        resumed: how runs that are resumed on the other device differ from those that stayed; None if they do not.
        waits: how often each round waits for the device.
        copies: tensors that each round copies to or from the device.
        more_waits: additional waits of all rounds with twice the local steps: operation and place -> how often.
        more_copies: additional copies, in the same way.
        more_resumed: additional waits of runs that are resumed on the device, in the same way.
        steps: local steps that are added when their number is doubled.
    """

    failed: str | None = None
    differs: str | None = None
    resumed: str | None = None
    waits: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    more_waits: dict[str, int] = field(default_factory=dict)
    more_copies: dict[str, int] = field(default_factory=dict)
    more_resumed: dict[str, int] = field(default_factory=dict)
    steps: int = 1

    def row(self, name: str) -> str:
        """A row of the table."""
        if self.failed is not None:
            return f"| `{name}` | {self.failed.splitlines()[-1]} | | | |"
        rounds = " | ".join(f"{min(each)} to {max(each)}" for each in (self.waits, self.copies))
        more = " | ".join(f"{sum(m.values()) / self.steps:.2g}" for m in (self.more_waits, self.more_copies))
        return f"| `{name}` | {rounds} | {more} |"


def run(
    case: MethodCase,
    trainer: dict[str, Any],
    epochs: int = 1,
    callbacks: Sequence[Any] = (),
    ckpt_path: Path | None = None,
) -> Run:
    """A run in float64 of clients of unequal sizes, two side by side if their sizes are close."""
    dealt = {"partition": Dirichlet(30.0, min_samples=3, balance=False)}
    data = case.data_of(shares="unequal", schedule={"local_epochs": epochs, "batch_size": 5}, **dealt)
    methods, watch = case.methods("tried"), Rounds()
    made = case.start(data, methods, double(case.network), "vmap", [watch, *callbacks], ckpt_path, **trainer)
    return Run(watch.models, made, methods[NAME])


def look(case: MethodCase, tolerance: float = 0.0) -> Found:
    """Compare runs on the CPU, on the device, with twice the local steps, and resumed on the other device."""
    with tempfile.TemporaryDirectory() as folder:
        stop = case.rounds + 1
        of_here, of_there, of_many = (Path(folder, name) for name in ("here", "there", "many"))
        here = run(case, {}, callbacks=[SaveRounds([stop], of_here)])
        there, few = watched(case, 1, [SaveRounds([stop], of_there)])
        _, many = watched(case, 2)
        back = run(case, {}, ckpt_path=of_there / f"{stop}.ckpt")
        forth, few_resumed = watched(case, 1, ckpt_path=of_here / f"{stop}.ckpt")
        run(case, {}, 2, [SaveRounds([stop], of_many)])
        _, many_resumed = watched(case, 2, ckpt_path=of_many / f"{stop}.ckpt")
    assert many.cohorts == few.cohorts, "with twice the local steps other clients are trained side by side"
    return Found(
        differs=_words(lambda: require_equal(case, "devices", "on the device", there, here, tolerance)),
        resumed=difference(everything(back.federation), everything(here.federation), tolerance, "moved to the CPU")
        or difference(everything(forth.federation), everything(there.federation), tolerance, "moved to the device"),
        waits=[counts.total() for counts in few.waits],
        copies=[counts.total() for counts in few.copies],
        more_waits=more(few.waits, many.waits),
        more_copies=more(few.copies, many.copies),
        more_resumed=more(few_resumed.waits, many_resumed.waits),
        steps=many.steps - few.steps,
    )


def watched(
    case: MethodCase, epochs: int, callbacks: Sequence[Any] = (), ckpt_path: Path | None = None
) -> tuple[Run, Watch]:
    """Run a case on the device; return the run, and its waits and copies."""
    with fake_device.counted() as traffic:
        watch = Watch(traffic)
        return run(case, on_it(), epochs, [watch, *callbacks], ckpt_path), watch


def more(few: list[fake_device.Counts], many: list[fake_device.Counts]) -> dict[str, int]:
    """Return what ``many`` counts more often than ``few``: operation and place -> how often."""
    by = sum(many, Counter()) - sum(few, Counter())
    return {f"{what} at {place}": n for (what, place), n in by.items()}


def _words(check: Callable[[], None]) -> str | None:
    try:
        check()
    except AssertionError as error:
        return str(error)
    return None


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="methods; all if none are named")
    parser.add_argument("--cases", default="test_registry", help="module with CASES: name -> MethodCase")
    parser.add_argument("--json", action="store_true", help="a line for each method")
    given = parser.parse_args()
    cases = importlib.import_module(given.cases).CASES
    fake_device.register()
    if not given.json:
        print(HEAD)
    for name in given.names or sorted(cases):
        try:
            found = look(cases[name], ROUNDING if name in ROUNDED else 0.0)
        except Exception:
            found = Found(failed=traceback.format_exc())
        print(json.dumps({"name": name, **asdict(found)}) if given.json else found.row(name), flush=True)


if __name__ == "__main__":
    main()
