"""The report on attacks: counts of verdicts, and the cases that went wrong."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from attack.outcomes import FAILURES, VERDICTS, Outcome

WORTH_A_LOOK = (*sorted(FAILURES), "meaningless", "unclear")
"""Verdicts of cases that the report lists."""


class Report:
    """Collects outcomes and writes them.

    Args:
        folder: where runs are made and the report is written; its earlier content is removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._outcomes: list[Outcome] = []
        self._started = time.monotonic()

    def add(self, outcome: Outcome) -> None:
        """Add an outcome; print it at once if it went wrong."""
        self._outcomes.append(outcome)
        if outcome.verdict in WORTH_A_LOOK:
            print(f"{outcome.name}: {outcome.verdict}: {outcome.detail[:300]}", file=sys.stderr, flush=True)

    @property
    def failed(self) -> bool:
        """Whether any verdict is a failure."""
        return any(outcome.verdict in FAILURES for outcome in self._outcomes)

    def counts(self) -> dict[str, dict[str, int]]:
        """Kind -> verdict -> how many cases, of the verdicts that there are."""
        found: dict[str, Counter[str]] = {}
        for outcome in self._outcomes:
            found.setdefault(outcome.kind, Counter()).update((outcome.verdict,))
        return {
            kind: {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}
            for kind, counts in found.items()
        }

    def table(self) -> str:
        """The counts as a table in Markdown: a row per kind."""
        counts = self.counts()
        columns = [verdict for verdict in VERDICTS if any(verdict in of for of in counts.values())]
        rows = [["", "cases", *columns]]
        rows += [[kind, sum(of.values()), *(of.get(verdict, 0) for verdict in columns)] for kind, of in counts.items()]
        lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
        return "\n".join([lines[0], f"|---{'|---:' * (len(columns) + 1)}|", *lines[1:]])

    def write(self) -> str:
        """Write ``report.json`` and ``cases.md``; return the table and the place of ``cases.md``."""
        content = {
            "seconds": round(time.monotonic() - self._started, 1),
            "counts": self.counts(),
            "cases": [asdict(outcome) for outcome in self._outcomes],
        }
        (self.folder / "report.json").write_text(json.dumps(content, indent=1))
        lines = [self.table()]
        for verdict in WORTH_A_LOOK:
            found = [outcome for outcome in self._outcomes if outcome.verdict == verdict]
            lines += [f"\n## {verdict}: {VERDICTS[verdict]}\n"] if found else []
            lines += [f"- **{one.name}** {one.detail}\n  `{one.command}`" for one in found]
        (self.folder / "cases.md").write_text("\n".join(lines) + "\n")
        return f"{self.table()}\n\n{content['seconds']} s; cases in {self.folder / 'cases.md'}"
