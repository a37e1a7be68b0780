"""Tables in LaTeX: their content, and that they fit articles with one and with two columns."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.made_up import make_density_run, make_run

from cfl.reporting.compare.command import main
from cfl.reporting.compare.groups import compare
from cfl.reporting.compare.latex import check_columns, latex_report, valid_columns
from cfl.reporting.compare.latex_layout import Column, layouts, width
from cfl.reporting.compare.reading import read
from cfl.reporting.compare.rows import Comparison
from cfl.runtime.errors import ConfigError
from cfl.runtime.printable import in_latex

LATEX = shutil.which("pdflatex")
NASTY = "a_b & 100% of $x^2 ~ {#1} \\input{x} <b> [c] * | é ů ± … 中 " + "long" * 12


def tables_of(folder: Path, *runs: dict[str, Any]) -> list[Comparison]:
    return compare([read(make_run(folder / f"run{k}", **options), []) for k, options in enumerate(runs)])


def report_of(folder: Path, *runs: dict[str, Any], columns: tuple[str, ...] = (), baseline: str | None = None) -> str:
    return latex_report([(table, table.baseline(baseline)) for table in tables_of(folder, *runs)], columns)


def rows_of(latex: str) -> list[list[str]]:
    """The cells of all tabulars, row by row."""
    return [line.removesuffix(r" \\").split(" & ") for line in latex.splitlines() if line.endswith(r"\\")]


TWO = [
    {"method": method, "seed": seed, "acc": acc, "fgt": fgt, "bwt": -fgt}
    for method, of_seeds in {"fedavg": ((70.0, 9.0), (72.0, 8.0)), "fed_agem": ((80.0, 4.0), (81.0, 3.0))}.items()
    for seed, (acc, fgt) in enumerate(of_seeds)
]


def test_a_paper_table_has_acc_fgt_and_bwt_with_the_best_in_bold(tmp_path: Path) -> None:
    latex = report_of(tmp_path, *TWO)
    assert rows_of(latex)[:3] == [
        ["method", r"ACC \% $\uparrow$", r"FGT $\downarrow$", r"BWT $\uparrow$"],
        ["FedAvg", r"$71.00 \pm 1.41$", r"$8.50 \pm 0.71$", r"$-8.50 \pm 0.71$"],
        [
            "Fed-A-GEM",
            r"$\mathbf{80.50} \pm 0.71$",
            r"$\mathbf{3.50} \pm 0.71$",
            r"$\mathbf{-3.50} \pm 0.71$",
        ],
    ]
    assert r"\usepackage{booktabs,array}" in latex.splitlines()[0]
    assert r"\label{tab:digits-shards-2-domain-incremental}" in latex
    assert r"\label{tab:digits-shards-2-domain-incremental-differences}" in latex
    caption = latex.replace(r"\penalty1000{}", "")
    assert "Benchmark digits, partition shards-2, domain-incremental, 3 tasks, 10 clients, seeds 0, 1." in caption
    assert "FGT: mean loss of accuracy since each task was learned" in caption
    assert latex.count(r"\begin{table}") == latex.count(r"\end{table}") == 2, "both fit a column"


def test_differences_have_their_interval_below(tmp_path: Path) -> None:
    head, mean, interval = rows_of(report_of(tmp_path, *TWO, columns=("acc",)).partition("-differences}")[2])
    assert head == ["method", r"ACC \% $\uparrow$"]
    assert mean == ["Fed-A-GEM", "$+9.50$"]
    half = 12.7062047 * 0.5  # t(0.975, 1); differences 10 and 9, deviation 1 / sqrt(2), over sqrt(2)
    low, high = 9.5 - half, 9.5 + half
    assert interval == ["", rf"\scriptsize [${low:.2f}$, ${high:.2f}$]"]


def test_differences_are_in_the_unit_of_their_column(tmp_path: Path) -> None:
    runs = [{"method": method, "seed": seed} for method in ("fedavg", "fot") for seed in (0, 1)]  # 12 and 24 MB
    latex = report_of(tmp_path, *runs, columns=("uplink_bytes",))
    assert [cells[1] for cells in rows_of(latex)[-2:]] == ["$+12.00$", r"\scriptsize [$12.00$, $12.00$]"]


def test_a_number_says_of_how_many_seeds_it_is_where_not_of_all(tmp_path: Path) -> None:
    aims = [{"50": 3}, {"50": 5}, {"50": None}]
    fot = [{"seed": s, "rounds_to_accuracy": aim, "fgt": 2.0 * s if s else None} for s, aim in enumerate(aims)]
    er = [{"method": "er", "seed": s, "fgt": 1.0} for s in range(3)]
    means, _, differences = report_of(tmp_path, *fot, *er, columns=("fgt", "rounds_to_50"), baseline="er").partition(
        "-differences}"
    )
    assert ["FOT", r"$3.00 \pm 1.41$ (2 of 3)", r"$4.0 \pm 1.4$ (2 of 3)"] in rows_of(means)
    assert ["FOT", "$+2.00$ (2 of 3)"] in rows_of(differences)


def test_means_that_read_the_same_are_best_together(tmp_path: Path) -> None:
    accs = {"fedavg": 80.0, "fot": 81.254, "er": 81.2502, "ewc": 81.24}
    rows = rows_of(report_of(tmp_path, *({"method": m, "acc": acc} for m, acc in accs.items()), columns=("acc",)))
    assert [cells[1] for cells in rows[1:]] == [
        "$80.00$", r"$\mathbf{81.25}$", r"$\mathbf{81.25}$", "$81.24$"
    ]  # fmt: skip
    equal = report_of(tmp_path / "equal", {"acc": 50.0}, {"method": "er", "acc": 50.001}, columns=("acc",))
    assert r"\mathbf" not in equal


def test_columns_are_those_asked_for_in_their_order(tmp_path: Path) -> None:
    runs = [{"rounds_to_accuracy": {"50": 3}, "evaluate_every": 1}, {"method": "er", "fwt": None, "acc": 1.0}]
    latex = report_of(tmp_path, *runs, columns=("rank", "rounds_to_50", "uplink_bytes", "seeds", "fwt"))
    head, fot, er = rows_of(latex)
    assert head == ["method", "rank", r"rounds to 50\,\%", r"uplink MB $\downarrow$", "seeds", r"FWT $\uparrow$"]
    assert fot[1:5] == ["$1$", "$3$", "$24.00$", "$1$"]
    assert er[-1] == "--"
    tables = tables_of(tmp_path / "more", *runs)
    with pytest.raises(ConfigError, match=r"--columns = 'acc %' cannot work; valid: some of acc, .*seeds, rank, with"):
        check_columns(["acc", "acc %"], tables)
    with pytest.raises(ConfigError, match="--columns = 'nll'"):
        check_columns(["nll"], tables)
    check_columns(valid_columns(tables), tables)


def test_densities_have_their_likelihoods(tmp_path: Path) -> None:
    (table,) = compare([read(make_density_run(tmp_path / str(s), seed=s), []) for s in (0, 1)])
    assert rows_of(latex_report([(table, None)]))[0] == [
        "method", r"NLL $\downarrow$", r"NLL (task known) $\downarrow$"
    ]  # fmt: skip


def test_rows_of_other_seeds_have_a_column_that_says_so(tmp_path: Path) -> None:
    latex = report_of(tmp_path, {}, {"method": "er"}, {"method": "er", "seed": 1}, columns=("acc",))
    assert [cells[1] for cells in rows_of(latex)] == ["seeds", "$1$", "$2$"]


def test_foreign_text_is_escaped_and_may_be_broken() -> None:
    text = in_latex(NASTY)
    bare = text.replace(r"\penalty1000{}", "")
    assert bare.startswith(
        r"a\_b \& 100\% of \$x\textasciicircum{}2 \textasciitilde{} \{\#1\} \textbackslash{}input\{x\} "
        r"\textless{}b\textgreater{} {[}c] {*} \textbar{} \'{e} \r{u} $\pm$ \dots{} U+4E2D longlong"
    )
    assert max(map(len, text.replace(r"\penalty1000{}", " ").split())) < 40
    assert in_latex("a--b") == "a-{}-b"  # no dash
    assert in_latex("a\nb\x1b") == "a b" + in_latex("\\x1b")


def structure(latex: str) -> None:
    """Require that every row has all columns, and that braces, dollars and environments are closed."""
    for table in re.findall(r"\\begin\{tabular\}.*?\\end\{tabular\}", latex, re.S):
        spec = re.search(r"@\{\}(.*?)(r*)@\{\}\}", table)
        assert spec is not None
        assert {len(cells) for cells in rows_of(table)} == {1 + len(spec[2])}
    bare = re.sub(r"\\.", "", "\n".join(line for line in latex.splitlines() if not line.startswith("%")))
    depth = 0
    for character in bare:
        depth += (character == "{") - (character == "}")
        assert depth >= 0
    assert depth == 0
    assert bare.count("$") % 2 == 0
    for name in set(re.findall(r"\\begin\{([a-z]+\*?)\}", latex)):
        assert latex.count(rf"\begin{{{name}}}") == latex.count(rf"\end{{{name}}}")
    labels = re.findall(r"\\label\{(.*?)\}", latex)
    assert len(set(labels)) == len(labels)


@pytest.fixture(scope="module")
def wide_report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tables of every size: long names, many rows, all columns, densities."""
    folder = tmp_path_factory.mktemp("wide")
    options = [{f"a_long_option_{k}": value} for k in range(3) for value in (0.12345678901, "some_rather_long_value")]
    many = [
        {"method": method, "seed": seed, "options": own, "level": 60.0 + k, "evaluate_every": 1}
        for k, own in enumerate(options)
        for method in ("fot", "er")
        for seed in (0, 1)
    ]
    for run in many:
        run["rounds_to_accuracy"] = {"50": 3, "90": None}
    hostile = [{"method": NASTY, "seed": s, "benchmark": NASTY, "partition": "p" * 90} for s in (0, 1)]
    long = [{"benchmark": "long", "method": f"m{k}", "seed": s} for k in range(60) for s in (0, 1)]
    tables = tables_of(folder, *many, *hostile, *({**run, "method": "fedavg"} for run in hostile), *long)
    density = compare([read(make_density_run(folder / f"density{s}", seed=s), []) for s in (0, 1)])
    compared = [(table, table.baseline(None)) for table in (*tables, *density)]
    return latex_report(compared) + latex_report(compared, valid_columns(tables)).replace(
        r"\label{tab:", r"\label{all:"
    )


def test_tables_of_every_size_are_well_formed_and_estimated_to_fit(wide_report: str) -> None:
    structure(wide_report)
    assert r"\begin{table*}" in wide_report
    assert "(continued, 2 of 2)" in wide_report
    for environment, limit in (("table", 221.0), ("table*", 345.0)):
        name = re.escape(f"{{{environment}}}")
        for part in re.findall(rf"\\begin{name}.*?\\end{name}", wide_report, re.S):
            for tabular in re.findall(r"\\begin\{tabular\}.*?\\end\{tabular\}", part, re.S):
                rows = rows_of(tabular.replace(r"\scriptsize ", ""))
                broken = re.search(r"p\{(\d+)pt\}", tabular)
                names = float(broken[1]) if broken else max(width(cells[0]) for cells in rows)
                columns = [max(map(width, cells)) for cells in list(zip(*rows, strict=True))[1:]]
                assert names + sum(6 + of for of in columns) <= limit


def test_what_is_too_wide_for_a_page_is_divided() -> None:
    columns = [Column(f"heading {k}", [r"$123{,}456.78 \pm 1{,}234.56$"]) for k in range(9)]
    found = layouts(["FOT", "FedAvg"], columns[:1])
    assert [(layout.wide, layout.name_column) for layout in found] == [(False, "l")]
    found = layouts(["FOT"], columns)
    assert len(found) > 1
    assert [place for layout in found for place in layout.columns] == list(range(9))
    (broken,) = layouts(["a name of many words that goes on " * 3], columns[:1])
    assert broken.name_column.startswith(r">{\raggedright\arraybackslash}p{")
    assert not broken.wide


DOCUMENT = r"""\documentclass[%s]{article}
\usepackage{booktabs,array}
\begin{document}
Text. \input{comparison.tex}
\end{document}
"""


@pytest.mark.skipif(LATEX is None, reason="there is no pdflatex on this machine")
@pytest.mark.parametrize("form", ["10pt", "12pt,a4paper", "10pt,twocolumn", "11pt,twocolumn,a4paper"])
def test_it_compiles_without_overfull_boxes(form: str, wide_report: str, tmp_path: Path) -> None:
    (tmp_path / "comparison.tex").write_text(wide_report)
    (tmp_path / "article.tex").write_text(DOCUMENT % form)
    command = [str(LATEX), "-interaction=nonstopmode", "-halt-on-error", "article.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=120)
    log = (tmp_path / "article.log").read_text(errors="replace")
    assert done.returncode == 0, log[-3000:]
    assert not re.findall(r"Overfull.*", log)
    assert "Float too large" not in log
    assert "multiply defined" not in log


def test_a_table_without_any_of_the_columns_is_left_out(tmp_path: Path) -> None:
    """Of runs with accuracies and runs with densities, ``acc`` is a column of the former only."""
    runs = [make_run(tmp_path / "acc"), make_density_run(tmp_path / "nll")]
    tables = compare([read(run, []) for run in runs])
    assert len(tables) == 2
    latex = latex_report([(table, None) for table in tables], ["acc"])
    assert rows_of(latex) == [["method", r"ACC \% $\uparrow$"], ["FOT", "$82.45$"]]
    assert latex.count(r"\begin{table}") == 1
    assert "% digits, shards-2, density: no such columns" in latex


def test_a_caption_without_figures_ends_with_the_seeds(tmp_path: Path) -> None:
    latex = report_of(tmp_path, *TWO, columns=("seeds", "rank"))
    (caption,) = [line for line in latex.splitlines() if line.startswith(r"\caption{Means")]
    assert caption.endswith("seeds 0, 1.}")


def test_the_columns_can_be_chosen_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run")
    out = tmp_path / "out"
    assert main([str(tmp_path / "run"), "--out", str(out), "--columns", "acc, seconds, acc"]) == 0
    assert [len(row) for row in rows_of((out / "comparison.tex").read_text())] == [3, 3]
    capsys.readouterr()
    assert main([str(tmp_path / "run"), "--columns", "acc"]) == 2
    assert capsys.readouterr().err == "error: --columns = 'acc' cannot work; valid: --out FOLDER beside it\n"
    assert main([str(tmp_path / "run"), "--out", str(out), "--columns", "acc,speed"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: --columns = 'speed' cannot work; valid: some of acc, fgt, ")
    assert captured.out == ""
