"""Fixed cases: the commands that are run, and the required outcome."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from support import tiny_cli

from attack import children, data_files
from attack.meaningless import CUT, meaningless, told_into
from attack.outcomes import Outcome, failure, refusal, sentence

Wanted = Literal["refused", "warned", "runs", "either"]
TINY = ("fit", "--config", str(tiny_cli.TINY), "--run.dir", "run")


@dataclass(frozen=True)
class Case:
    """A fixed case.

    Attributes:
        make: writes its files into a folder, and returns the commands to run there, of which the last one is judged.
        names: words of which one has to stand in the error or the warning.
        wanted: ``refused``: the last command must be refused; ``warned``: at least a warning is needed; ``runs``: it
            must run; ``either``: it may be refused or run.
    """

    make: Callable[[Path], list[list[str]]]
    names: tuple[str, ...]
    wanted: Wanted = "warned"


def run(name: str, case: Case, folder: Path) -> Outcome:
    """Run a case in a folder, which is kept unless it ends well."""
    folder.mkdir(parents=True)
    data_files.link(folder)
    *before, last = case.make(folder)
    for command in before:
        children.run(command, folder=folder)
    ended = children.run(last, told_into(folder / "facts.json"), folder=folder)
    verdict, detail = failure(ended) or ("", "")
    if not verdict and ended.status in (0, CUT):
        warned = case.wanted == "warned" and any(word.lower() in ended.said.lower() for word in case.names)
        facts = json.loads((folder / "facts.json").read_text()) if (folder / "facts.json").is_file() else {"steps": 1}
        reason = (
            "accepted"
            if not (case.wanted in ("runs", "either") or warned)
            else meaningless({}, facts, folder / "run", ended.said)
            if last[0] == "fit"
            else ""
        )
        verdict, detail = ("meaningless", reason) if reason else ("ran", "")
    elif not verdict:
        verdict, detail = refusal(ended, list(case.names))
        if case.wanted == "runs":
            verdict, detail = "unclear", f"a valid command is refused: {sentence(ended)[:500]}"
    if verdict in ("ran", "refused"):
        shutil.rmtree(folder)
    return Outcome(name, verdict, detail, f"cfl {shlex.join(last)}"[:2000])
