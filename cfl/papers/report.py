"""Write a table as text, CSV and picture: the paper's numbers, ours, and how the two compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cfl.papers.cells import Cell, Experiments
from cfl.papers.definition import SCALE, Note, Table
from cfl.papers.orders import OrderComparison, compare_orders
from cfl.papers.pictures import spreads, table_picture
from cfl.papers.recipes import matches
from cfl.reporting.csv_file import csv_text
from cfl.reporting.rounding import rounded
from cfl.reporting.text_table import TextTable
from cfl.runtime.atomic_write import write_whole

REPORTS = "reports"


@dataclass(frozen=True)
class Report:
    """A report of the chosen cells, and the files written.

    Attributes:
        text: the report of the chosen cells, as Markdown.
        files: paths of the files, which cover the whole table.
    """

    text: str
    files: Sequence[Path]


def write_report(
    experiments: Experiments,
    table: Table,
    scale: str,
    chosen: Mapping[str, Sequence[str]],
    runs: Path,
    seeds: Sequence[int] | None = None,
) -> Report:
    """Write ``<table>-<scale>.md``, ``.csv`` and ``.png`` into ``<runs>/<paper>/reports``.

    The files cover the whole table and all finished seeds, so that a report of one method or of fewer seeds does not
    remove the others. Each file replaces an earlier one atomically.

    Args:
        experiments: the finished runs.
        table: the table.
        scale: scale of the runs.
        chosen: axis -> values; the returned text has only cells with these.
        runs: folder of the runs.
        seeds: seeds of the returned text; None takes all finished ones.

    Raises:
        ConfigError: an axis, value or scale that the table does not have.
    """
    cells = experiments.cells(table, scale, chosen, seeds)
    whole = experiments.cells(table, scale)
    folder = runs / table.paper.name / REPORTS
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / f"{table.name}-{scale}"
    picture = table_picture(table, whole, base.with_suffix(".png"))
    name = picture.name if picture else None
    write_whole(base.with_suffix(".md"), markdown(table, scale, whole, name))
    write_whole(base.with_suffix(".csv"), as_csv(table, whole))
    files = [base.with_suffix(".md"), base.with_suffix(".csv"), *([picture] if picture else [])]
    return Report(markdown(table, scale, cells, name), files)


def _kind(status: str) -> str:
    """Return a status without its reasons; of a reduced scale with all values, only the name of the scale."""
    said = status.partition(" (")[0]
    scale, _, rest = said.rpartition(": ")
    if rest.startswith("value in "):
        return f"{scale}: some seeds only".removeprefix(": ")
    return scale if scale and rest in ("by order only", "not compared") else said


def counts(cells: Sequence[Cell]) -> str:
    """How many cells have which status, e.g. ``matched 3, off 1, not run 124``."""
    words = [_kind(cell.status) for cell in cells]
    found = Counter("off" if word.startswith("off by") else word for word in words)
    return ", ".join(f"{name} {number}" for name, number in found.most_common())


def markdown(table: Table, scale: str, cells: Sequence[Cell], picture: str | None = None) -> str:
    """The report as Markdown.

    Args:
        table: the table.
        scale: scale of the runs.
        cells: its cells, all at this scale.
        picture: file name of a picture in the same folder; None: no picture.
    """
    paper = table.paper
    lines = [f"# {table.full_name}: {table.title}", "", paper.title, "", f"Scale `{scale}`: {paper.scales[scale]}.", ""]
    if scale != paper.published_scale:
        lines += ["These runs are not the published protocol: their numbers are not held against the paper's.", ""]
    lines += [f"Cells: {counts(cells)}.", ""]
    notes: list[str] = []
    lines += cell_table(table, cells, notes)
    lines += tolerances(table, cells) if scale == paper.published_scale else []
    lines += order_table(table, compare_orders(table, cells))
    lines += note_list(notes)
    lines += remarks([*table.notes, *paper.notes], cells)
    if picture:
        lines += ["", f"![{table.title}]({picture})"]
    return "\n".join(lines) + "\n"


def cell_table(table: Table, cells: Sequence[Cell], notes: list[str]) -> list[str]:
    """Return the cells as lines of a Markdown table.

    Cells are marked with the numbers of their notes in ``notes``, to which missing notes are added.
    """
    axes = list(table.axes)
    heads = [*axes, "figure", "paper", "ours", "seeds", "difference", "status"]
    rows = []
    for cell in cells:
        notes += [note for note in cell.notes if note not in notes]
        marks = "".join(f" [{notes.index(note) + 1}]" for note in cell.notes)
        decimals, seeds = cell.definition.decimals, str(len(cell.seeds) or "-")
        row = [
            *(table.label(axis, cell.point[axis]) for axis in axes),
            cell.figure + marks,
            cell.published.spread.shown(decimals) if cell.published else "-",
            cell.ours.shown(decimals) if cell.ours else "-" if not cell.seeds else "heatmap" if cell.grid else "curve",
            f"{len(cell.seeds)} of {len(cell.seeds) + len(cell.without)}" if cell.without else seeds,
            "-" if cell.difference is None else rounded(cell.difference, decimals, "+"),
            cell.status,
        ]
        rows.append(row)
    return TextTable(heads, rows, "l" * (len(axes) + 1) + "rrrrl").markdown()


def note_list(notes: Sequence[str]) -> list[str]:
    """The notes that :func:`cell_table` has numbered, as lines of Markdown; empty without any."""
    if not notes:
        return []
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, start=1)]
    return ["", "Chosen by us, because the paper does not say, or says otherwise:", "", *numbered]


def remarks(notes: Sequence[Note], cells: Sequence[Cell]) -> list[str]:
    """Those notes that are about any of the cells, as lines of Markdown; empty without any."""
    found = [f"- {note.text}" for note in notes if any(matches(note.when, cell.point) for cell in cells)]
    return ["", *found] if found else []


def tolerances(table: Table, cells: Sequence[Cell]) -> list[str]:
    """Return the tolerances of the columns that are compared, as lines of Markdown; empty without tolerances."""
    compared = {cell.figure for cell in cells if cell.has_target}
    found = [f"{name} {f.tolerance:g}" for name, f in table.figures.items() if name in compared and f.tolerance]
    return ["", f"Tolerance: {', '.join(found)}."] if found else []


def order_table(table: Table, comparisons: Sequence[OrderComparison]) -> list[str]:
    """Return the comparison of orders as lines of Markdown; empty if there is nothing to compare.

    If the table ranks by several figures, there is a column for the figure.
    """
    if table.order is None or not comparisons:
        return []
    order, label = table.order, table.label
    leader, reference = (label(order.axis, value) for value in (order.leader, order.reference))
    places = list(comparisons[0].place)
    several = len(order.figures) > 1
    words = {True: "yes", False: "no", None: "-"}
    heads = [*places, *(["figure"] if several else []), "run", "seeds", "rank correlation"]
    align = "l" * (len(heads) - 2) + "rrllrr"
    heads += [f"{leader} leads, ours", "paper", f"{leader} - {reference}, ours", "paper"]
    rows = [
        [
            *(label(axis, value) for axis, value in part.place.items()),
            *([part.figure] if several else []),
            ", ".join(label(order.axis, value) for value in part.values),
            str(part.seeds or "differ"),
            *("-" if number is None else rounded(number, 2, "+") for number in [part.correlation]),
            words[part.leads],
            words[part.leads_in_paper],
            *("-" if gap is None else rounded(gap, 2, "+") for gap in part.gap or (None, None)),
        ]
        for part in comparisons
    ]
    by = "" if several else f", by {order.figures[0]}"
    lines = ["", f"Order along {order.axis}{by}:", "", *TextTable(heads, rows, align).markdown()]
    left_out = [label(order.axis, value) for value in order.bounds]
    lines += ["", f"Left out as bounds: {', '.join(left_out)}."] if left_out else []
    if order.against is not None:
        name, at = order.against
        where = ", ".join(label(axis, value) for axis, value in at.items())
        place = f"{name}, {where}" if where else name
        lines += ["", f"The paper's are those of its {place}: other data or settings than these."]
    return lines


def as_csv(table: Table, cells: Sequence[Cell]) -> str:
    """Return the cells as CSV, unrounded.

    A curve has a line per point, with the number of tasks learned or rounds as ``after``. A grid has a line per entry,
    with ``row / column`` as ``after``.
    """
    columns = ("scale", "figure", "after", "paper", "paper_std", "ours", "ours_std", "seeds", "difference", "status")
    rows = []
    for cell in cells:
        place = [*table.place(cell.point).values(), cell.point[SCALE], cell.figure]
        published = [cell.published.mean, cell.published.std] if cell.published else [None, None]
        for after, ours in spreads(cell):
            numbers = [ours.mean, ours.std, ours.count] if ours else [None, None, 0]
            rows.append([*place, after, *published, *numbers, cell.difference, cell.status])
    return csv_text([*table.axes, *columns], rows)
