"""Vectors of numbers from the columns of a CSV file."""

from __future__ import annotations

import csv
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import tiny_data

from cfl.data.participation import Holders
from cfl.data.partitions import Natural
from cfl.data.sources import Binarised, CsvTable, Features
from cfl.data.sources.csv_rows import read_rows
from cfl.data.streams import Mixture, NaturalTasks, Sequence
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.testing import check_source

COLUMNS = ["id", "age", "clinic", "kind", "dose", "part"]


def rows() -> list[list[Any]]:
    """Sixty rows of three kinds in four clinics; every fifth is for tests."""
    draw = np.random.default_rng(0)
    kinds, clinics = ["10", "9", "2"], ["north", "Süd", "east, upper", "west"]
    return [
        [
            f"p{k}",
            40 + 10 * draw.normal(),
            clinics[k % 4],
            kinds[k % 3],
            1e-3 * draw.normal(),
            "train" if k % 5 else "test",
        ]
        for k in range(60)
    ]


def written(folder: Path, lines: list[list[Any]] | None = None, separator: str = ",", encoding: str = "utf-8") -> str:
    with (folder / "visits.csv").open("w", encoding=encoding, newline="") as file:
        csv.writer(file, delimiter=separator).writerows([COLUMNS, *(lines or rows())])
    return str(folder / "visits.csv")


def source(path: str, **options: Any) -> CsvTable:
    return CsvTable(path, **{"label": "kind", "client": "clinic", "part": "part", "drop": ["id"], **options})


@pytest.mark.parametrize(("separator", "encoding"), [(",", "utf-8"), (";", "utf-8-sig"), ("\t", "utf-8")])
def test_a_table_holds_what_the_same_arrays_do(separator: str, encoding: str, tmp_path: Path) -> None:
    """A CSV table gives the samples of the same arrays in an ``.npz`` file, also with separators of spreadsheets.

    Classes that are whole numbers are sorted by value, clients by name.
    """
    found = source(written(tmp_path, None, separator, encoding))
    lines = rows()
    of_part = {part: [line for line in lines if line[5] == part] for part in ("train", "test")}
    arrays: dict[str, Any] = {"class_names": np.array(["2", "9", "10"])}
    for part, kept in of_part.items():
        arrays[f"{part}_features"] = np.array([[line[1], line[4]] for line in kept])
        arrays[f"{part}_labels"] = np.array([["2", "9", "10"].index(line[3]) for line in kept])
        arrays[f"{part}_clients"] = np.array([line[2] for line in kept])
    np.savez(tmp_path / "same.npz", **arrays)
    same = Features(str(tmp_path / "same.npz"))
    assert (found.shape, found.num_classes, found.name) == ((1, 1, 2), 3, "visits")
    assert found.names(tmp_path) == same.names(tmp_path) == ("2", "9", "10")
    for ours, theirs in zip(found.load(tmp_path), same.load(tmp_path), strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)
        assert ours.clients is not None
        assert theirs.clients is not None
        assert torch.equal(ours.clients, theirs.clients)
    assert found.moments(tmp_path) == same.moments(tmp_path)
    (tmp_path / "visits.csv").write_text("what was read is known\n")
    assert "age, dose" in found.reads
    assert found.names(tmp_path) == ("2", "9", "10")
    written(tmp_path, None, separator, encoding)
    check_source(found, tmp_path)


def test_a_share_of_every_class_is_held_out_without_a_column_for_it(tmp_path: Path) -> None:
    kept = source(written(tmp_path), part=None, drop=["id", "part"], test_share=0.25)
    train, test = kept.load(tmp_path)
    assert (len(train), len(test)) == (45, 15)
    assert torch.bincount(test.labels).tolist() == [5, 5, 5]
    again = source(kept.path, part=None, drop=["id", "part"], test_share=0.25).load(tmp_path)
    assert torch.equal(train.images, again[0].images)
    owners = train.clients
    assert owners is not None
    shares = Natural().deal(train.labels.numpy(), owners.numpy(), np.arange(4), np.random.default_rng(0))
    assert len(shares) == 4


def test_a_split_that_cannot_be_names_the_classes_or_the_part_that_is_too_small(tmp_path: Path) -> None:
    """A class with one row cannot be in both parts; more classes than test rows cannot all have one."""

    def refused(kinds: list[str], **options: Any) -> str:
        file = tmp_path / "mine.csv"
        file.write_text("\n".join(["age,kind", *(f"{row},{kind}" for row, kind in enumerate(kinds))]))
        with pytest.raises(DataFilesMissing) as error:
            CsvTable(str(file), label="kind", **options).load(tmp_path)
        assert "data.stream.source.part" in str(error.value)
        return str(error.value)

    usual = ["often"] * 30 + ["also"] * 30
    said = refused([*usual, "selten"])
    assert "column kind: 61 samples of 3 classes cannot be split" in said
    assert "'selten' has 1 sample" in said
    assert "often" not in said
    said = refused([*usual, *(f"once{n}" for n in range(9))])
    assert "'once0', 'once1', 'once2', 'once3', 'once4' and 4 more have 1 sample" in said
    said = refused([kind for kind in "abcdef" for _ in range(4)], test_share=0.1)  # 3 of 24 rows for 6 classes
    assert "test set of a share of 0.1: each class needs a sample in both, and the test set would have 3" in said
    said = refused([kind for kind in "abcdef" for _ in range(4)], test_share=0.9)  # 22 of 24 rows for tests
    assert "each class needs a sample in both, and the training set would have 2" in said


def test_numbers_to_predict(tmp_path: Path) -> None:
    found = source(written(tmp_path), label="dose", drop=["id", "kind"], numbers=True)
    train, _ = found.load(tmp_path)
    expected = [line[4] for line in rows() if line[5] == "train"]
    assert (found.shape, found.num_classes, found.names(tmp_path)) == ((1, 1, 1), 1, ("dose",))
    torch.testing.assert_close(train.labels[:, 0], torch.tensor(expected))


def test_rows_of_another_file_are_found_by_their_columns(tmp_path: Path) -> None:
    """Rows of another file may have their columns in any order and no labels. The training set's moments scale them."""
    found = source(written(tmp_path))
    _, test = found.load(tmp_path)
    lines = [line for line in rows() if line[5] == "test"]
    new = tmp_path / "new.csv"
    new.write_text("dose,note,age\n" + "".join(f"{line[4]},x,{line[1]}\n" for line in lines))
    assert torch.equal(source(found.path).images_of_table(new, tmp_path), test.images)
    new.write_text("dose\n1\n")
    with pytest.raises(DataFilesMissing, match=r"new\.csv cannot be used: it lacks the column age; it has dose"):
        found.images_of_table(new, tmp_path)
    with pytest.raises(DataFilesMissing, match="only runs on CsvTable read tables"):
        Features("x.npz").images_of_table(new, tmp_path)


@pytest.mark.parametrize("split", ["source", "merged"])
def test_a_binarised_table_has_its_tasks_and_reads_its_rows(split: Any, tmp_path: Path) -> None:
    lines = rows()
    for number, line in enumerate(lines):
        line[0] = str(2020 + number % 2)
    table = source(written(tmp_path, lines), drop=None, task="id")
    binary = Binarised(table, threshold=0.25, split=split)
    stream = NaturalTasks(binary)
    assert [task.name for task in stream.tasks(tmp_path, 0)] == [f"{binary.name} 2020", f"{binary.name} 2021"]
    if split == "source":
        for task, own in zip(stream.tasks(tmp_path, 0), NaturalTasks(table).tasks(tmp_path, 0), strict=True):
            assert torch.equal(task.train.images, (own.train.images > 0.25).to(torch.uint8))
    new = tmp_path / "new.csv"
    new.write_text("dose,age\n" + "".join(f"{line[4]},{line[1]}\n" for line in lines if line[5] == "test"))
    assert torch.equal(binary.images_of_table(new, tmp_path), (table.load(tmp_path)[1].images > 0.25).to(torch.uint8))
    assert binary.reads.startswith(table.reads)
    assert binary.reads.endswith("is 1 above 0.25, else 0.")
    assert Binarised(table, drawn=True).reads.endswith("is 1 with the probability value / white, else 0.")


def test_the_separator_is_looked_for_outside_of_quotes(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('"weight, kg";age\n1.5;2\n')
    found = read_rows(tmp_path / "t.csv")
    assert found.columns == ("weight, kg", "age")
    assert found.numbers.tolist() == [[1.5, 2.0]]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_empty_lines_before_the_names_are_left_out(separator: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"\n\nweight{separator}age\n1.5{separator}2\n")
    found = read_rows(tmp_path / "t.csv")
    assert found.columns == ("weight", "age")
    assert found.numbers.tolist() == [[1.5, 2.0]]


def test_a_long_name_of_one_client_takes_no_more_memory_than_itself(tmp_path: Path) -> None:
    """An array of 3,000 texts would take 1.2 GB, because each entry has room for the longest. ``a`` is not ``a\\0``."""
    names = ["a", "a\0", "z" * 100_000]
    lines = [f"{k},{k % 2},{names[2] if k < 4 else names[k % 2]}" for k in range(3000)]
    (tmp_path / "long.csv").write_text("\n".join(["x,y,who", *lines]), encoding="utf-8")
    tracemalloc.start()
    try:
        train, _ = CsvTable(str(tmp_path / "long.csv"), "y", client="who").load(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2e7
    finally:
        tracemalloc.stop()
    assert train.client_names == tuple(names)
    assert train.clients is not None
    assert [train.client_names[client] for client in train.clients.tolist()][-2:] == ["a", "a\0"]


def changed(row: int, column: str, value: Any) -> list[list[Any]]:
    lines = rows()
    lines[row][COLUMNS.index(column)] = value
    return lines


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            [["p", "" if k in (3, 7) else line[1], *line[2:4], "low", line[5]] for k, line in enumerate(rows())],
            "line 2, column dose: 'low' is no number; rows without a number, by column: age (2), dose (60)",
        ),
        (changed(3, "age", "old"), "line 5, column age: 'old' is no number"),
        (changed(3, "age", ""), "line 5, column age: '' is no number"),
        (changed(3, "age", "2020_11"), "line 5, column age: '2020_11' is no number"),
        (changed(3, "age", "４５"), "line 5, column age: '４５' is no number"),
        (changed(3, "age", "nan"), "row 4 below the first line, column age: nan"),
        (changed(2, "kind", " "), "line 4, column kind is empty"),
        (changed(0, "part", "valid"), "column part holds 'valid'; valid: train and test"),
        (changed(0, "kind", "7"), "no training row has the class '7'"),
        ([*rows(), ["p", 1]], "line 62 has 2 fields, the first line 6"),
    ],
)
def test_damaged_files_are_refused(lines: list[list[Any]], said: str, tmp_path: Path) -> None:
    with pytest.raises(DataFilesMissing) as refused:
        source(written(tmp_path, lines)).load(tmp_path)
    assert said in str(refused.value)
    assert "visits.csv cannot be used" in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b"a,b\n", "it has no rows"),
        (b"a,a\n1,2\n", "every column once; found 'a'"),
        (b"a,\xff\n1,2\n", "no CSV file in UTF-8"),
        (b'a,b\n1,"2\n', "no CSV file"),
    ],
)
def test_what_is_no_table_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_rows(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"label": "sort"}, "label"),
        ({"client": "house"}, "client"),
        ({"drop": ["name"]}, "drop"),
        ({"drop": ["kind"]}, "label"),
        ({"test_share": 1.0}, "test_share"),
    ],
)
def test_options_that_cannot_work_are_named(options: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"data\.stream\.source\.{key} = "):
        source(written(tmp_path), **options).load(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.csv does not exist"):
        _ = source(str(tmp_path / "nowhere.csv")).shape
    with pytest.raises(DataFilesMissing, match=r"nowhere\.csv is missing"):
        source(str(tmp_path / "nowhere.csv")).load(tmp_path)


@pytest.mark.parametrize(
    ("columns", "kinds", "said", "refused"),
    [
        (COLUMNS, ["2", "9", "11"], r"class 2 is '10' in first and '11' in second", ["domain"]),
        (
            ["id", "weight", "clinic", "kind", "age", "part"],
            ["2", "9", "10"],
            r"'age' is column 0 in first and 1 in second",
            ["domain"],
        ),
        (
            ["id", "dose", "clinic", "kind", "age", "part"],
            ["2", "9", "10"],
            r"'age' is column 0 in first and 1 in second",
            ["domain", "task"],
        ),
    ],
)
def test_tables_that_number_classes_or_features_differently_share_no_outputs(
    columns: list[str], kinds: list[str], said: str, refused: list[str], tmp_path: Path
) -> None:
    """A number of a class, or of a feature, would mean one thing in one task and another in the next."""
    first = Path(written(tmp_path)).rename(tmp_path / "first.csv")
    lines = [[*line[:3], kinds[number % 3], *line[4:]] for number, line in enumerate(rows())]
    with (tmp_path / "second.csv").open("w", newline="") as file:
        csv.writer(file).writerows([columns, *lines])
    stream = Sequence([source(str(first)), source(str(tmp_path / "second.csv"))])
    for scenario in ("domain", "task"):
        with pytest.raises(ConfigError, match=said) if scenario in refused else nullcontext():
            tiny_data(stream, scenario=scenario).setup("fit")
    same = Sequence([source(str(first)), source(str(first))])
    tiny_data(same, scenario="domain").setup("fit")


def test_a_column_of_tables_of_unlike_widths_stays_one_input_where_outputs_are_shared(tmp_path: Path) -> None:
    """Zeros on both sides of narrower rows would move a column that both tables have to another input."""

    def table(name: str, columns: str) -> CsvTable:
        lines = [[*columns, "kind"], *([*(k + place for place in range(len(columns))), k % 2] for k in range(20))]
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(lines)
        return CsvTable(str(tmp_path / f"{name}.csv"), "kind")

    first, same_inputs = table("first", "abc"), table("with d", "abcd")
    moved, others = table("with d and e", "abcde"), table("of others", "vwxyz")
    for stream, scenario in (([first, same_inputs], "domain"), ([first, others], "domain"), ([first, moved], "task")):
        tiny_data(Sequence(stream), scenario=scenario).setup("fit")
    for stream in ([first, moved], [Binarised(first), Binarised(moved)]):
        with pytest.raises(ConfigError, match=r"'a' is column 1 in .*first and 0 in .*with d and e"):
            tiny_data(Sequence(stream), scenario="domain").setup("fit")


def test_a_mixture_of_tables_has_the_same_inputs_and_outputs_in_each(tmp_path: Path) -> None:
    """Shuffles number the classes of each table; where tasks share outputs, a class must have one number."""

    def table(name: str, columns: str) -> CsvTable:
        lines = [[*columns, "kind"], *([k, 2 * k, "xy"[k % 2]] for k in range(20))]
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(lines)
        return CsvTable(str(tmp_path / f"{name}.csv"), "kind")

    first, turned, same = table("first", "ab"), table("turned", "ba"), table("same", "ab")
    for scenario in ("task", "domain"):
        with pytest.raises(ConfigError, match=r"data\.stream\.sources = .*is (column|class) \d in .* and \d in "):
            tiny_data(Mixture([first, turned], classes_per_task=2), scenario=scenario).setup("fit")
    tiny_data(Mixture([first, same], classes_per_task=2), scenario="task").setup("fit")
    outcomes = set()
    for seed in range(8):
        stream = Mixture([first, same], classes_per_task=2, class_seed=seed)
        orders = [[name[-1] for name in names] for names in stream.class_names(tmp_path, 0)]
        try:
            stream.check_numbers(tmp_path, shared_outputs=True)
            accepted = True
        except ConfigError:
            accepted = False
        assert accepted == (orders[0] == orders[1])
        outcomes.add(accepted)
    assert outcomes == {True, False}


def test_a_column_says_of_which_task_a_row_is(tmp_path: Path) -> None:
    """Tasks are in the order of the column's values. Clients, classes and features mean the same in each.

    A client that joins with the second task keeps its number. A class that a task lacks keeps its output. The split
    into training and test rows and the standardisation are those of the whole table.
    """
    lines = rows()
    for number, line in enumerate(lines):
        line[0] = "11" if number >= 40 or line[2] == "east, upper" or line[3] == "2" else "9"
    path = written(tmp_path, lines)
    whole = source(path).load(tmp_path)
    stream = NaturalTasks(source(path, drop=None, task="id"))
    data = tiny_data(stream, scenario=None, partition=Natural(), num_clients=4, participation=Holders())
    assert (data.scenario, data.num_outputs, stream.classes_per_task) == ("domain", 3, [3, 3])
    assert stream.class_names(tmp_path, 0) == [("2", "9", "10")] * 2
    clinics = sorted({line[2] for line in lines})  # clients are numbered in this order
    assert [members.tolist() for members in data.members] == [[0, 2, 3], [0, 1, 2, 3]]
    for part in ("train", "test"):
        of_part = [line for line in lines if line[5] == part]
        for task, name in enumerate(("9", "11")):
            held = [number for number, line in enumerate(of_part) if line[0] == name]
            found = getattr(data.tasks[task], part)
            assert found.images.equal(whole[part == "test"].images[held])
            assert found.labels.tolist() == [["2", "9", "10"].index(of_part[number][3]) for number in held]
            for client in data.members[task].tolist() if part == "train" else ():
                own = [place for place, number in enumerate(held) if of_part[number][2] == clinics[client]]
                assert data.indices[task][client].tolist() == own
    assert 0 not in data.tasks[0].train.labels  # the kind 2


def test_tasks_of_a_table_need_a_column_and_rows_of_both_parts(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.stream\.source = 'visits' .*CsvTable with its option task"):
        NaturalTasks(source(path))
    lines = [["a" if line[5] == "train" else "b", *line[1:]] for line in rows()]
    stream = NaturalTasks(source(written(tmp_path, lines), drop=None, task="id"))
    with pytest.raises(DataFilesMissing, match="task 'a' has no test sample"):
        stream.tasks(tmp_path, 0)
    with pytest.raises(ConfigError, match=r"source\.task = 'wing' .*a column of"):
        NaturalTasks(source(path, task="wing"))
