"""The published numbers: how many there are, their ranges, and some that are typed here again from the paper."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.paper_tables import every_table, fot

from cfl.papers.published import Published, read_published
from cfl.runtime.errors import ConfigError

COUNTS = {"table1": 128, "table2": 16, "table3": 8, "table4": 6, "table5": 6, "table6": 8, "table7": 2}
COUNTS |= {"table10": 96, "table11": 8, "table12": 72}
OF_ALL = {**{f"fot-{name}": count for name, count in COUNTS.items()}, "fot-table3-every-task": 2, "fedcurv-table1": 18}
OF_FEDAGEM = {1: 116, 2: 72, 3: 30, 4: 10, 5: 16, 6: 60, 7: 10, 8: 12, 9: 18, 10: 10, 11: 8, 12: 60, 13: 60, 14: 4}
OF_FEDAGEM |= {15: 8, 17: 16, 18: 4}
OF_ALL |= {f"fedagem-table{number}": count for number, count in OF_FEDAGEM.items()}
OF_ALL |= {"fedweit-table7": 2}
OF_ALL |= {"fedweit-table1": 60, "fedweit-table2": 6, "fedweit-table5": 16, "fedweit-table6": 20, "fedweit-figure4": 20}
OF_ALL |= {"confedmade-table1": 12, "confedmade-table2": 14, "confedmade-table3": 72, "confedmade-table4": 10}

OURS_ALONE = {"fot-table2": {"MB kept"}}
"""Table -> columns that the paper does not have."""

NOT_PUBLISHED = {
    "confedmade-table1": {(clients, "distinct-whole") for clients in ("1", "2", "5", "10", "20", "40")},
    "confedmade-table2": {("oa",), ("dc-oa",)},
}
"""Table -> cells that the paper does not have. It has ``distinct`` and rows that end in ``-published`` instead."""


def number(table: str, figure: str, **place: str) -> Published:
    (found,) = [p for p in fot()[table].published if p.figure == figure and dict(p.place) == place]
    return found


def test_the_numbers_of_every_table_are_counted() -> None:
    published = {name for name, table in every_table().items() if table.published}
    assert not published ^ set(OF_ALL), "give OF_ALL how many numbers the paper prints in each table"


@pytest.mark.parametrize("name", OF_ALL)
def test_every_cell_has_its_number_and_every_number_its_cell(name: str) -> None:
    table = every_table()[name]
    published = {(tuple(p.place[axis] for axis in table.axes), p.figure) for p in table.published}
    cells = {
        (tuple(point[axis] for axis in table.axes), figure)
        for point in table.points("paper")
        for figure in table.figures_at(point)
    }
    assert len(published) == OF_ALL[name]
    printed = {figure for _, figure in published}
    without = NOT_PUBLISHED.get(name, set())
    assert published == {(place, figure) for place, figure in cells if figure in printed and place not in without}
    assert {figure for _, figure in cells} - printed == OURS_ALONE.get(name, set())


def test_pictures_have_no_numbers() -> None:
    without = {name for name, table in every_table().items() if not table.published}
    assert without >= {*(f"fot-figure{i}" for i in range(4, 8)), "fedcurv-figure1", "fedcurv-figure2"}
    ours = ("-present", "-published-mask", "-angles", "-orders")
    assert not any("-table" in name and not name.endswith(ours) for name in without)


@pytest.mark.parametrize("name", COUNTS)
def test_figures_are_in_their_range(name: str) -> None:
    """ACC and used space are percentages, FGT may be slightly negative; times and sizes are positive."""
    for p in fot()[name].published:
        if p.figure == "FGT":
            assert -1 < p.mean < 50, p
        elif name == "table2":
            assert p.mean in (0, 1), p
        elif name in ("table4", "table5") or name == "table7":
            assert 0 < p.mean < 3, p
        else:
            assert 25 < p.mean < 95, p
        assert (p.std is not None and p.std < 10) if name == "table1" else p.std is None, p


def test_some_numbers_typed_from_the_paper() -> None:
    def of_table1(figure: str, partition: str, method: str, benchmark: str) -> tuple[float, float | None]:
        found = number("table1", figure, partition=partition, method=method, benchmark=benchmark)
        return found.mean, found.std

    assert of_table1("ACC", "iid", "fedavg", "pmnist") == (85.68, 0.57)
    assert of_table1("FGT", "iid", "glfc", "cifar100") == (11.74, 0.59)
    assert of_table1("FGT", "iid", "fedcil", "mini-imagenet") == (28.90, 1.84)
    assert of_table1("ACC", "shards", "fedavg", "five-datasets") == (67.71, 7.75)
    assert of_table1("FGT", "shards", "gpm", "mini-imagenet") == (40.73, 4.20)
    assert of_table1("ACC", "shards", "fot", "pmnist") == (85.21, 0.13)
    assert number("table3", "used space", benchmark="cifar100", partition="shards").mean == 32.96
    assert number("table4", "GPSE", benchmark="mini-imagenet").mean == 0.215
    assert number("table5", "bases", network="alexnet").mean == 0.048
    assert number("table6", "ACC", variant="frozen", partition="shards").mean == 62.72
    assert number("table7", "improvement", setting="federated").mean == 0.48
    assert number("table10", "ACC", partition="shards", method="rgo", benchmark="cifar100").mean == 45.54
    assert number("table10", "FGT", partition="shards", method="fot", benchmark="mini-imagenet").mean == 0.19
    assert number("table11", "ACC", partition="iid", benchmark="five-datasets").mean == 87.74
    assert number("table12", "T4", threshold="0.93").mean == 59.3
    assert number("table12", "FGT", threshold="0.96").mean == -0.1


@pytest.mark.parametrize("name", ["table1", "table10"])
@pytest.mark.parametrize("benchmark", ["pmnist", "cifar100", "five-datasets", "mini-imagenet"])
@pytest.mark.parametrize("partition", ["iid", "shards"])
def test_fot_leads_where_the_paper_says_so(name: str, benchmark: str, partition: str) -> None:
    """FOT has the lowest published FGT everywhere, and the highest ACC except on 5-Datasets in Table 10."""
    here = [p for p in fot()[name].published if (p.place["benchmark"], p.place["partition"]) == (benchmark, partition)]
    acc = {p.place["method"]: p.mean for p in here if p.figure == "ACC"}
    fgt = {p.place["method"]: p.mean for p in here if p.figure == "FGT"}
    others = max(value for method, value in acc.items() if method != "fot")
    exceptions = [("table10", "five-datasets", "iid"), ("table10", "five-datasets", "shards")]  # RGO
    assert (acc["fot"] > others) == ((name, benchmark, partition) not in exceptions)
    assert fgt["fot"] == min(fgt.values())


def test_the_mean_of_table_12_is_its_acc() -> None:
    """In every row of Table 12, ACC is the mean over tasks up to the paper's rounding."""
    published = fot()["table12"].published
    for threshold in fot()["table12"].axes["threshold"]:
        row = {p.figure: p.mean for p in published if p.place["threshold"] == threshold}
        assert sum(row[f"T{i}"] for i in range(1, 11)) / 10 == pytest.approx(row["ACC"], abs=0.11)


HEADER = "paper,table,method,figure,mean,std,note\n"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("paper,table,benchmark,figure,mean,std,note\n", "the columns paper,table,method,figure"),
        (HEADER + "other,t,a,ACC,1,,\n", "rows of p, t"),
        (HEADER + "p,t,a,ACC,1,,\np,t,a,ACC,2,,\n", "every cell once"),
        (HEADER + "p,t,a,ACC,nan,,\n", "a finite number"),
        (HEADER + "p,t,a,ACC,much,,\n", "a finite number"),
        (HEADER + "p,t,a,ACC,1,-1,\n", "at least 0"),
    ],
)
def test_bad_files_are_refused(text: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        read_published(path, "p", "t", ["method"])
