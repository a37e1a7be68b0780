"""The partition report, compared with counts taken one sample at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.partition_rows import partition_rows

from cfl.data import report
from cfl.data.partitions import IID, Dirichlet, client_indices
from cfl.data.report import partition_figure, save_partition_figure, write_partition_csv
from cfl.data.types import ImageSet, PixelTransform, Task

Indices = list[dict[int, np.ndarray]]


def make_task(num_samples: int, num_classes: int, name: str) -> Task:
    labels = torch.from_numpy(np.random.default_rng(num_samples).permutation(num_samples) % num_classes)
    stored = ImageSet(torch.zeros(num_samples, 1, 1, 1, dtype=torch.uint8), labels)
    return Task(name, stored, stored, num_classes, PixelTransform((0.0,), (1.0,)))


@pytest.fixture
def dealt() -> tuple[list[Task], Indices]:
    tasks = [make_task(400, 4, "first"), make_task(500, 3, "second")]
    members = [np.arange(6), np.array([1, 2, 5])]
    return tasks, client_indices(tasks, Dirichlet(0.5, min_samples=1), members, 6, seed=0, repartition=True)


def test_rows_recount_the_partition(dealt: tuple[list[Task], Indices]) -> None:
    tasks, indices = dealt
    rows = partition_rows(tasks, indices)
    assert [(row["task"], row["client"]) for row in rows] == [(0, c) for c in range(6)] + [(1, 1), (1, 2), (1, 5)]
    for row in rows:
        task, index = tasks[row["task"]], indices[row["task"]][row["client"]]
        labels = [int(task.train.labels[i]) for i in index]
        assert [row[f"class_{k:02d}"] for k in range(4)] == [labels.count(k) for k in range(4)]
        assert row["samples"] == len(index) == sum(row[f"class_{k:02d}"] for k in range(4))
        assert row["classes"] == len(set(labels))
    assert sum(row["samples"] for row in rows if row["task"] == 0) == 400
    assert sum(row["samples"] for row in rows if row["task"] == 1) == 500
    assert list(rows[0]) == ["task", "client", "samples", "classes", *(f"class_{k:02d}" for k in range(4)), "hash"]


def test_hash_identifies_the_set_of_samples() -> None:
    task = make_task(20, 2, "t")
    shares = [np.array([1, 5, 9]), np.array([9, 1, 5]), np.array([1, 5, 10]), np.array([1, 5], dtype=np.int32)]
    hashes = [row["hash"] for row in partition_rows([task], [dict(enumerate(shares))])]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
    assert hashes[3] == partition_rows([task], [{7: np.array([1, 5])}])[0]["hash"]
    assert all(len(h) == 16 and int(h, 16) >= 0 for h in hashes)


def test_a_client_without_samples_has_a_row_of_zeros() -> None:
    row = partition_rows([make_task(20, 2, "t")], [{3: np.array([], dtype=np.int64)}])[0]
    assert (row["client"], row["samples"], row["classes"], row["class_00"], row["class_01"]) == (3, 0, 0, 0, 0)


def test_the_folder_is_made(tmp_path: Path, dealt: tuple[list[Task], Indices]) -> None:
    path = tmp_path / "new folder" / "partition.csv"
    write_partition_csv(path, *dealt)
    assert path.read_bytes().count(b"\r\n") == 10


def test_dots_show_every_count_on_one_scale(dealt: tuple[list[Task], Indices]) -> None:
    tasks, indices = dealt
    figure = partition_figure(tasks, indices, title="a title")
    rows = partition_rows(tasks, indices)
    panels = figure.axes[:2]
    assert [ax.get_title(loc="left") for ax in panels] == ["task 0: first", "task 1: second"]
    assert figure.get_suptitle() == "a title"
    for t, ax in enumerate(panels):
        dots = ax.collections[-1]
        drawn = {(round(x), round(y)): n for (x, y), n in zip(dots.get_offsets(), dots.get_array(), strict=True)}
        counts = {
            (row["client"], k): row[f"class_{k:02d}"]
            for row in rows
            for k in range(4)
            if row["task"] == t and row[f"class_{k:02d}"]
        }
        assert drawn == counts
        area = dict(zip(drawn, dots.get_sizes(), strict=True))
        largest = max(row[f"class_{k:02d}"] for row in rows for k in range(4))
        full = max(panels[p].collections[-1].get_sizes().max() for p in range(2))
        for place, n in counts.items():
            assert area[place] == pytest.approx(max(full * n / largest, 2.0))
    assert len(panels[0].patches) == 0
    hatched = [(p.get_x() + 0.5, p.get_x() + p.get_width() - 0.5) for p in panels[1].patches]
    assert hatched == [(0, 0), (3, 4)]  # the absent clients, the first and the last of each stretch


def test_large_partitions_become_cells_and_say_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [make_task(2000, 10, f"t{t}") for t in range(20)]
    indices = client_indices(tasks, IID(), [np.arange(200)] * 20, 200, seed=0, repartition=True)
    monkeypatch.setattr(report, "MOST_TASKS", 4)
    figure = partition_figure(tasks, indices)
    assert figure.get_suptitle() == "4 of 20 tasks, first 150 of 200 clients"
    shown = [ax for ax in figure.axes if ax.get_title(loc="left")]
    assert [ax.get_title(loc="left").split(":")[0] for ax in shown] == ["task 0", "task 6", "task 13", "task 19"]
    cells = shown[1].images[0].get_array()
    assert cells.shape == (10, 150)
    rows = [row for row in partition_rows(tasks, indices) if row["task"] == 6 and row["client"] < 150]
    expected = np.array([[row[f"class_{k:02d}"] for row in rows] for k in range(10)])
    np.testing.assert_array_equal(cells.filled(0), expected)


def test_the_picture_is_written(tmp_path: Path, dealt: tuple[list[Task], Indices]) -> None:
    from PIL import Image

    save_partition_figure(tmp_path, *dealt, title="x")
    with Image.open(tmp_path / "partition.png") as image:
        assert image.format == "PNG"
        assert len(np.unique(np.asarray(image.convert("L")))) > 50


def test_pyplot_is_never_involved() -> None:
    code = (
        "import sys, numpy as np, torch, cfl\n"
        "from cfl.data.report import partition_figure\n"
        "assert 'matplotlib' not in sys.modules, 'matplotlib is slow to import'\n"
        "from cfl.data.types import *\n"
        "s = ImageSet(torch.zeros(4, 1, 1, 1, dtype=torch.uint8), torch.tensor([0, 1, 0, 1]))\n"
        "t = Task('t', s, s, 2, PixelTransform((0.,), (1.,)))\n"
        "partition_figure([t], [{0: np.arange(2), 1: np.arange(2, 4)}]).canvas.draw()\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
