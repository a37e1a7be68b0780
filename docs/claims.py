"""The table and the picture of the papers' claims: ``python docs/claims.py`` writes both from ``docs/claims.yaml``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure as Picture

from cfl.papers.cells import Cell, Experiments
from cfl.papers.definition import papers
from cfl.papers.kept import RESULTS, read_kept
from cfl.papers.results import Results
from cfl.reporting.compare.statistics import Spread
from cfl.reporting.figures import PAGE_WIDTH, save
from cfl.reporting.rounding import rounded
from cfl.reporting.text_table import TextTable
from cfl.running.missing_data import MISSING, MissingData
from cfl.running.resolving import Resolver

DOCS = Path(__file__).parent
PAGE, PICTURE = DOCS / "results" / "claims.md", DOCS / "images" / "claims.png"
BEGIN, END = "<!-- written by docs/claims.py -->\n", "<!-- end -->\n"
TITLES = {"fot": "FOT", "fedagem": "Fed-A-GEM", "fedcurv": "FedCurv", "fedweit": "FedWeIT", "confedmade": "CONFEDMADE"}
UNITS = {"fedcurv": "rounds", "confedmade": "nats (shares: points)"}
VERDICTS = ("confirmed", "contradicted", "open")
COLUMNS = ("claim", "place", "published", "ours", "evidence", "verdict", "section")
Row = Mapping[str, Any]


class Evidence:
    """The cells that claims name, filled from the kept runs."""

    def __init__(self) -> None:
        self.papers = {paper.name: paper for paper in papers()}
        self._resolver = Resolver()
        self._kept: dict[str, dict[str, Experiments]] = {}

    def cell(self, row: Row, table: str, at: Mapping[str, str]) -> Cell:
        """One cell of a table.

        Args:
            row: the claim's entry, which says the paper, the figure and the scale.
            table: name of the table.
            at: axis -> value, of all axes.
        """
        known = next(known for known in self.papers[row["paper"]].tables() if known.name == table)
        experiments = self._experiments(row["paper"])[row["scale"]]
        cells = experiments.cells(known, row["scale"], {axis: [value] for axis, value in at.items()})
        (cell,) = [cell for cell in cells if cell.figure == row["figure"]]
        return cell

    def _experiments(self, name: str) -> dict[str, Experiments]:
        if name not in self._kept:
            paper = self.papers[name]
            missing = MissingData(paper.folder / RESULTS / MISSING)
            of = read_kept(paper)
            self._kept[name] = {scale: Experiments(self._resolver, Results(of[scale]), missing) for scale in of}
        return self._kept[name]


@dataclass(frozen=True)
class Claim:
    """A claim with what is published and what was measured.

    Attributes:
        row: its entry in ``docs/claims.yaml``.
        published: published cells, one or the two of a difference; empty for a claim in words.
        ours: our cells, as many.
    """

    row: Row
    published: Sequence[Cell]
    ours: Sequence[Cell]

    @classmethod
    def of(cls, row: Row, evidence: Evidence) -> Claim:
        """Read the cells of an entry."""
        if "table" not in row:
            return cls(row, (), ())
        at, here, against = row.get("at", {}), row.get("here"), row.get("against")
        names = ("of", "minus") if "minus" in row else ("of",)
        ends = [row[name] for name in names]
        places = [(row["table"], {**at, **end}) for end in ends]
        if against:
            places[1] = (against["table"], against["at"])
        published = [evidence.cell(row, table, point) for table, point in places]
        if not here:
            return cls(row, published, published)
        ends = [here.get(name, row[name]) for name in names]
        return cls(row, published, [evidence.cell(row, here["table"], {**here.get("at", {}), **end}) for end in ends])

    @property
    def target(self) -> float | None:
        """The published number or difference."""
        numbers = [cell.published.mean for cell in self.published if cell.published]
        return None if not numbers else numbers[0] - sum(numbers[1:])

    @cached_property
    def measured(self) -> Spread | None:
        """Ours; of a difference, the spread of the differences of common seeds."""
        if not self.ours:
            return None
        seeds = sorted(set.intersection(*(set(cell.seeds) for cell in self.ours)))
        values = [[float(cell.seeds[seed]) for cell in self.ours] for seed in seeds]
        return Spread.of([first - sum(rest) for first, *rest in values])

    @property
    def margin(self) -> float:
        """What a difference must exceed to count.

        The deviation over our seeds; with one seed the sum of the published deviations, at least that of the
        tolerances of the table.
        """
        if self.measured and self.measured.std is not None:
            return self.measured.std
        stds = sum(cell.published.std or 0.0 for cell in self.published if cell.published)
        return max(stds, sum(cell.definition.tolerance for cell in self.published))

    @property
    def verdict(self) -> str:
        """``confirmed``, ``contradicted`` or ``open``."""
        ours, target = self.measured, self.target
        if "open" in self.row:
            return "open"
        if "verdict" in self.row:
            return str(self.row["verdict"])
        if ours is None or target is None:
            return "open"
        if len(self.ours) == 1:
            (cell,) = self.ours
            if cell.difference is None:
                return "open"
            return "confirmed" if cell.status == "matched" else "contradicted"
        if ours.mean == 0:  # the same number in both runs
            return "contradicted"
        if abs(ours.mean) <= self.margin:
            return "open"
        return "confirmed" if ours.mean * target > 0 else "contradicted"

    @property
    def evidence(self) -> str:
        """Scale, seeds and data."""
        if "evidence" in self.row:
            return str(self.row["evidence"])
        if self.measured is None:
            return "not run"
        count = self.measured.count
        scale = "full protocol" if self.row["scale"] == "paper" else "reduced"
        seeds = f"{count} seed{'s' if count > 1 else ''}"
        return ", ".join([scale, seeds, *([self.row["other"]] if "other" in self.row else [])])

    @property
    def full(self) -> bool:
        """Whether ours was measured at the published protocol."""
        return self.evidence.startswith("full protocol")

    def cells(self) -> list[str]:
        """The claim's row of the page."""
        sign = "+" if "minus" in self.row else ""
        if "table" in self.row:
            decimals = self.published[0].definition.decimals
            published = "-" if self.target is None else rounded(self.target, decimals, sign)
            ours = self.measured.shown(decimals, sign) if self.measured else "-"
        else:
            published, ours = self.row["published"], self.row["ours"]
        remark = self.row.get("open") or self.row.get("note")
        reduced = "" if self.full or self.verdict == "open" else ", reduced scale"
        return [
            self.row["claim"],
            self.row["place"],
            published,
            ours,
            self.evidence,
            f"**{self.verdict}**{reduced}" + (f": {remark}" if remark else ""),
            f"[details]({self.row['details']})",
        ]


def read_claims() -> list[Claim]:
    """All claims of ``docs/claims.yaml``."""
    evidence = Evidence()
    rows = yaml.safe_load((DOCS / "claims.yaml").read_text(encoding="utf-8"))
    return [Claim.of(row, evidence) for row in rows]


def block(claims: Sequence[Claim]) -> str:
    """The page's tables: the counts, and for each paper its claims."""
    by_paper = {name: [claim for claim in claims if claim.row["paper"] == name] for name in TITLES}
    rows = [counts(title, by_paper[name]) for name, title in TITLES.items()]
    heads = ["paper", *(head for verdict in VERDICTS[:2] for head in (verdict, "of these, full protocol")), "open"]
    lines = ["## Counts", "", *TextTable(heads, [*rows, counts("all", claims)]).markdown()]
    for name, of in by_paper.items():
        table = TextTable(COLUMNS, [claim.cells() for claim in of], "llrrlll")
        lines += ["", f"## {TITLES[name]}", "", *(line.replace("]\\(", "](") for line in table.markdown())]
    return "\n".join(lines) + "\n"


def counts(title: str, claims: Sequence[Claim]) -> list[str]:
    """A row of the counts: claims of each verdict, and how many of them at the full protocol."""
    all_of = Counter(claim.verdict for claim in claims)
    full = Counter(claim.verdict for claim in claims if claim.full)
    return [title, *(str(n) for verdict in VERDICTS[:2] for n in (all_of[verdict], full[verdict])), str(all_of["open"])]


def draw(claims: Sequence[Claim], path: Path) -> Path:
    """Draw published against measured differences, a row each and a panel for each paper."""
    shown = [claim for claim in claims if "short" in claim.row and claim.measured]
    groups = {name: [claim for claim in shown if claim.row["paper"] == name] for name in TITLES}
    figure = Picture(figsize=(PAGE_WIDTH, 0.24 * len(shown) + 0.75 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 1, height_ratios=[len(of) + 1 for of in groups.values()])
    for panel, (name, of) in zip(panels, groups.items(), strict=True):
        panel.axvline(0, color="#999999", linewidth=0.8)
        for y, claim in enumerate(of):
            ours, target = claim.measured, claim.target
            if ours is None or target is None:
                continue
            panel.plot([target, ours.mean], [y, y], color="#bbbbbb", linewidth=1.5, zorder=1)
            panel.plot(target, y, "o", color="#333333", markerfacecolor="white", markersize=5)
            full = claim.row["scale"] == "paper"
            panel.plot(ours.mean, y, "o" if full else "D", color="#0072b2", markersize=5 if full else 4)
        panel.set_yticks(range(len(of)), [claim.row["short"] for claim in of], fontsize=7)
        panel.set_ylim(len(of) - 0.4, -0.6)
        panel.tick_params(axis="x", labelsize=7)
        panel.set_title(f"{TITLES[name]}: {UNITS.get(name, 'points')}", fontsize=8, loc="left")
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    marks = [
        panels[0].plot([], [], "o", color="#333333", markerfacecolor="white", markersize=5, label="published")[0],
        panels[0].plot([], [], "o", color="#0072b2", markersize=5, label="ours, full protocol")[0],
        panels[0].plot([], [], "D", color="#0072b2", markersize=4, label="ours, reduced")[0],
    ]
    figure.legend(handles=marks, loc="outside upper center", ncols=3, fontsize=7, frameon=False)
    return save(figure, path)


def written(page: str, tables: str) -> str:
    """The page with these tables between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + tables + rest[rest.index(END) :]


if __name__ == "__main__":
    everything = read_claims()
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), block(everything)), encoding="utf-8")
    draw(everything, PICTURE)
