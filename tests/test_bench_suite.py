"""The benchmarks' own arithmetic and machinery. No test here measures speed."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.added_by_methods import METHODS, added, added_by_methods, needed, scenario_for
from benchmarks.arrays import MEAN, STD, data_file, task_tensors
from benchmarks.bench import Bench, Peak
from benchmarks.command import main
from benchmarks.config import config_of
from benchmarks.counted import counted_flops
from benchmarks.engines import ENGINES, Engine, chosen_engines
from benchmarks.extraction import Extraction, extraction, extraction_figures
from benchmarks.fisher import fisher, fisher_figures
from benchmarks.flops import round_flops, step_flops
from benchmarks.hand import Hand
from benchmarks.loop import Loop
from benchmarks.pace import Pace
from benchmarks.peak import matrix_product_flops
from benchmarks.personal import late_over_early, personal
from benchmarks.rounds import Measured, interleave
from benchmarks.rows import REQUIRED, add_floor, add_memory_beyond_data, add_rates, add_ratios_to_loop, row_of
from benchmarks.running import NotRun
from benchmarks.side_by_side import side_by_side
from benchmarks.store import check_rows, replace_rows, stored_rows
from benchmarks.suite import WORKS, chosen_works, run_suite
from benchmarks.table import show
from benchmarks.wire import Wire
from benchmarks.works import FEW, MANY, W1, W2, W3, W9, Work
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console
from support.forked import Forked
from support.tiny import fit, permuted, tiny_client, tiny_data
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from cfl.data.schedule import RoundPlan
from cfl.data.sources import Arrays
from cfl.engines.cohort import Cohort
from cfl.methods import Method
from cfl.runtime.errors import ConfigError

TINY = Work(
    name="W0",
    title="tiny",
    network="MLP",
    options={"hidden": [6], "dropout": 0.0},
    shape=(1, 8, 8),
    clients=6,
    sampled=4,
    samples=7,
    batch_size=3,
    lr=0.1,
    classes=2,
)
PARAMETERS = 64 * 6 + 6 + 6 * 2 + 2

# FLOPs, by hand.


def linear(inputs: int, outputs: int, first: bool = False) -> int:
    """FLOPs of a linear layer for one sample: output, weight's gradient, and input's gradient unless ``first``."""
    return 2 * inputs * outputs * (2 if first else 3)


def convolution(channels: int, maps: int, kernel: int, side: int, first: bool = False) -> int:
    """FLOPs of a convolution for one sample: each of an output map's ``side ** 2`` pixels is a small linear layer."""
    return side * side * linear(channels * kernel * kernel, maps, first)


MLP_FLOPS = linear(784, 400, first=True) + 2 * linear(400, 400) + linear(400, 10)
ALEXNET_FLOPS = (
    convolution(3, 64, 4, 29, first=True)
    + convolution(64, 128, 3, 12)
    + convolution(128, 256, 2, 5)
    + linear(1024, 2048)
    + linear(2048, 2048)
    + linear(2048, 10)
)
DROPOUT_CNN_FLOPS = (
    convolution(3, 32, 3, 30, first=True) + convolution(32, 64, 3, 28) + linear(12544, 128) + linear(128, 10)
)
SMALL_CNN_FLOPS = convolution(1, 10, 5, 24, first=True) + convolution(10, 20, 5, 8) + linear(320, 50) + linear(50, 10)
SMALL_FLOPS = linear(64, 64, first=True) + linear(64, 10)


@pytest.mark.parametrize(
    ("work", "per_sample", "gflop"),
    [
        (W1, MLP_FLOPS, 98.3),
        (W2, ALEXNET_FLOPS, 328.9),
        (W3, DROPOUT_CNN_FLOPS, 248.6),
        (MANY, SMALL_FLOPS, 0.2),
        (FEW, SMALL_FLOPS, 0.2),
        (W9, SMALL_CNN_FLOPS, 16.6),
    ],
    ids=lambda value: value.label if isinstance(value, Work) else None,
)
def test_counted_flops_are_those_by_hand(work: Work, per_sample: int, gflop: float) -> None:
    counted = round_flops(work)
    assert counted == per_sample * work.sampled * work.samples
    assert round(counted / 1e9, 1) == gflop


def test_a_partial_batch_counts_as_what_it_is() -> None:
    assert round_flops(TINY) == TINY.sampled * (2 * step_flops(TINY, 3) + step_flops(TINY, 1))
    assert round_flops(TINY) == TINY.sampled * 7 * (linear(64, 6, first=True) + linear(6, 2))


def test_flops_of_a_matrix_product() -> None:
    with FlopCounterMode(display=False) as counter:
        torch.zeros(3, 3) @ torch.zeros(3, 3)
    assert matrix_product_flops(3) == counter.get_total_flops()


# The works as they are described.


@pytest.mark.parametrize(
    ("work", "steps"),
    [(W1, 64 * 8), (W2, 25 * 7), (W3, 50 * 5), (MANY, 2000), (FEW, 2000), (W9, 200)],
    ids=lambda v: str(v)[:12],
)
def test_client_steps(work: Work, steps: int) -> None:
    assert work.client_steps == steps


def test_the_populations_differ_in_nothing_else() -> None:
    assert replace(MANY, clients=1000, variant=FEW.variant, title=FEW.title) == FEW
    assert (MANY.clients, MANY.sampled, FEW.sampled) == (100_000, 1000, 1000)


def test_works_survive_a_file(tmp_path: Path) -> None:
    for work in (W1, W2, TINY):
        work.save(tmp_path / "work.json")
        assert Work.load(tmp_path / "work.json") == work


# Data.


def test_the_data_file_is_made_once_from_its_seed(tmp_path: Path) -> None:
    path = data_file(tmp_path / "a", TINY)
    assert path.read_bytes() == data_file(tmp_path / "b", TINY).read_bytes()
    path.write_bytes(b"kept")
    assert data_file(tmp_path / "a", replace(TINY, lr=7.0)).read_bytes() == b"kept"
    other = data_file(tmp_path / "a", TINY, seed=1)
    assert other.read_bytes() != data_file(tmp_path / "b", TINY).read_bytes()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted([path.name, other.name])  # nothing temporary


def test_the_loop_sees_the_pixels_that_the_program_sees(tmp_path: Path) -> None:
    work = replace(TINY, shape=(3, 9, 6))
    path = data_file(tmp_path, work)
    source = Arrays(str(path), channels="first", mean=[MEAN] * 3, std=[STD] * 3)
    train, _ = source.load(tmp_path)
    x, y = task_tensors(path, work)
    torch.testing.assert_close(x, source.transform()(train.images))
    assert torch.equal(y, train.labels)
    permuted, _ = task_tensors(path, replace(work, permuted=True))
    assert not torch.equal(permuted, x)
    # All channels and samples are permuted alike: each place has the column of values of another place.
    before, after = (pixels.flatten(2).flatten(0, 1).T.tolist() for pixels in (x, permuted))
    assert sorted(after) == sorted(before)
    assert len({tuple(column) for column in before}) == len(before)  # so that this tells places apart


def test_later_tasks_have_one_sample_per_client(tmp_path: Path) -> None:
    work = replace(TINY, tasks=3)
    path = data_file(tmp_path, work)
    with np.load(path) as stored:
        tasks = stored["train_labels"] // work.classes
        assert np.bincount(tasks).tolist() == [work.clients * work.samples, work.clients, work.clients]
        assert work.data_bytes(floats=False) == stored["train_images"].nbytes + stored["train_labels"].nbytes
    x, y = task_tensors(path, work)
    assert y.max() < work.classes
    assert work.data_bytes(floats=True) == sum(t.numel() * t.element_size() for t in (x, y))


# The bare loop.


def recorded_round(loop: Loop) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of a round, in order."""
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        rows = [int((loop.x == image).flatten(1).all(1).nonzero()[0]) for image in inputs[0]]
        batches.append((inputs[0].clone(), loop.y[rows]))

    handle = loop.model.register_forward_pre_hook(note)
    loop.round()
    handle.remove()
    return batches


@pytest.mark.parametrize(
    ("network", "options"), [("MLP", {"hidden": [7, 5], "dropout": 0.0}), ("AlexNet", {"dropout": 0.0})]
)
def test_the_hand_written_loop_is_the_loop(tmp_path: Path, network: str, options: dict[str, Any]) -> None:
    """The hand-written loop ends a round with the loop's weights; each client has one batch, so order has no effect."""
    shape, samples = ((3, 32, 32), 4) if network == "AlexNet" else (TINY.shape, TINY.samples)
    sizes: dict[str, Any] = {"shape": shape, "samples": samples, "batch_size": samples}
    work = replace(TINY, network=network, options={**options, "dropout": 0.0}, tasks=2, **sizes)
    tensors = task_tensors(data_file(tmp_path, work), work)
    loop, hand = Loop(work, *tensors), Hand(work, *tensors)
    for made in (loop, hand):
        torch.manual_seed(3)
        made.round()
    for weight, expected in zip(hand.weights, loop.weights, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-6)
    drops = Hand(replace(work, options={**options, "dropout": 0.5}), *tensors)
    drops.round()
    assert all(weight.isfinite().all() for weight in drops.weights)


@pytest.mark.parametrize("tasks", [1, 2])
def test_the_loop_is_federated_averaging(tmp_path: Path, tasks: int) -> None:
    """In two rounds, the loop's new weights are the mean of the clients' SGD runs, computed here by the formulas."""
    work = replace(TINY, tasks=tasks)
    loop = Loop(work, *task_tensors(data_file(tmp_path, work), work))
    owner = {tuple(image.flatten().tolist()): c for c, s in enumerate(loop.shares) for image in loop.x[s]}
    for _ in range(2):
        start = [w.clone().double() for w in loop.weights]
        batches = recorded_round(loop)
        assert [len(y) for _, y in batches] == [3, 3, 1] * work.sampled
        trained = []
        for first in range(0, len(batches), 3):
            own = batches[first : first + 3]
            images = {tuple(image.flatten().tolist()) for x, _ in own for image in x}
            assert len({owner[image] for image in images}) == 1
            assert len(images) == work.samples
            weights = [w.clone().requires_grad_() for w in start]
            for x, y in own:
                hidden = (x.double().flatten(1) @ weights[0].T + weights[1]).clamp(min=0)
                logits = hidden @ weights[2].T + weights[3]
                loss = cross_entropy(logits[:, : work.classes], y)
                gradients = torch.autograd.grad(loss, weights)
                weights = [(w - work.lr * g).detach().requires_grad_() for w, g in zip(weights, gradients, strict=True)]
            trained.append(weights)
        for position, weight in enumerate(loop.weights):
            expected = torch.stack([client[position].detach() for client in trained]).mean(0)
            torch.testing.assert_close(weight.double(), expected, rtol=1e-4, atol=1e-6)
            assert float((weight - start[position]).abs().max()) > 1e-4
        if tasks > 1:
            assert torch.equal(loop.weights[2][work.classes :].double(), start[2][work.classes :])
    assert len(loop.shares.unique()) == work.task_size


# Ratios.


def measured(*seconds: float, steps: float = 0.5, **more: Any) -> Measured:
    reports = [{"seconds": s, "step_seconds": s * steps, **more} for s in seconds]
    return Measured(info={"threads": 2}, rounds=reports, memory={"peak_rss_mb": 300.0, "rss_mb": 200.0})


def test_row_and_ratios() -> None:
    """Medians 4 (loop) and 3 (cfl), minima 2 and 1; 40 local steps of 8 clients; 60 FLOPs at 30 a second: 2 seconds."""
    loop = row_of("W0", "", "loop", measured(8, 2, 4))
    ours = row_of("W0", "", "cfl", measured(3, 1, 5, steps=0.75))
    dead = row_of("W0", "", "cfl-k1", Measured(rounds=measured(1).rounds, failure="it died"))
    elsewhere = row_of("W0", "many", "cfl", measured(3))
    rows = [loop, ours, dead, elsewhere]
    others_loop = row_of("W0", "few", "loop", measured(1))
    add_ratios_to_loop([*rows, others_loop])
    assert [row["ratio_to_loop"] for row in rows] == [1, 0.75, None, None]
    add_ratios_to_loop(rows)
    for row in rows:
        add_rates(row, client_steps=40, clients=8)
        add_floor(row, flops=60, flops_per_second=30)
        add_memory_beyond_data(row, data_bytes=50_000_000)
    assert [row["seconds_per_round_median"] for row in rows] == [4, 3, None, 3]
    assert [row["seconds_per_round_min"] for row in rows] == [2, 1, None, 3]
    assert [row["ratio_to_loop"] for row in rows] == [1, 0.75, None, None]
    assert [row["ratio_to_floor"] for row in rows] == [2, 1.5, None, 1.5]
    assert [row["client_steps_per_second"] for row in rows] == [10, 40 / 3, None, 40 / 3]
    assert [row["seconds_per_sampled_client"] for row in rows] == [0.5, 0.375, None, 0.375]
    assert [row.get("share_outside_steps") for row in rows] == [0.5, 0.25, None, 0.5]
    assert [row["rss_beyond_data_mb"] for row in rows] == [150, 150, None, 150]
    assert [row["peak_rss_beyond_data_mb"] for row in rows] == [250, 250, None, 250]
    assert [row["not_run"] for row in rows] == [None, None, "it died", None]
    # A round of one second beats a floor of two: the peak was measured on a busy machine.
    assert [bool(row["warning"]) for row in rows] == [False, True, False, False]
    add_floor(ours, flops=60, flops_per_second=60)
    assert (ours["ratio_to_floor"], ours["warning"]) == (3, None)
    assert ours["seconds_of_rounds"] == [3, 1, 5]
    check_rows(rows)


def test_what_a_method_adds() -> None:
    """Added seconds are the median of the turns' differences +2, +2, -5, not the difference of the medians 4 and 5."""
    base = measured(1, 5, 9, uplink_bytes=100, downlink_bytes=10)
    method = measured(3, 7, 4, uplink_bytes=150, downlink_bytes=10)
    base.warmup = [{"uplink_bytes": 100, "downlink_bytes": 10, "task_end_seconds": 0.0}]
    method.warmup = [{"uplink_bytes": 1100, "downlink_bytes": 60, "task_end_seconds": 7.0}, {}]
    method.memory["peak_rss_mb"] = 340.0
    assert added(method, base) == {
        "fedavg_seconds_per_round_median": 5,
        "added_seconds_per_round": 2,
        "added_uplink_bytes_per_round": 50,
        "added_downlink_bytes_per_round": 0,
        "added_task_end_seconds": 7.0,
        "added_task_end_uplink_bytes": 950,
        "added_task_end_downlink_bytes": 50,
        "added_peak_rss_mb": 40.0,
    }


def test_added_seconds_are_held_against_added_arithmetic() -> None:
    row = {"fedavg_seconds_per_round_median": 4.0, "added_seconds_per_round": 3.0}
    assert needed(row, 150, 100) == {
        "added_flops_share": 0.5,
        "needed_seconds_per_round": 2.0,
        "added_over_needed": 1.5,
    }
    assert needed(row, 100, 100)["added_over_needed"] is None
    for given in ((None, 100), (100, None)):
        assert set(needed(row, *given).values()) == {None}


@pytest.mark.slow
def test_flops_of_a_round_are_counted_while_it_runs(tmp_path: Path) -> None:
    """Federated averaging has the FLOPs of the work and of the updates' mean; FedProx adds none, A-GEM over half."""
    work = replace(TINY, name="W5", permuted=True)
    config = config_of(work, data_file(tmp_path, work), "second task")
    plain = counted_flops(tmp_path / "plain", config)
    assert plain == round_flops(work) + 2 * work.sampled * (64 * 6 + 6 + 6 * 2 + 2)  # the mean of the updates
    assert counted_flops(tmp_path / "fedprox", config, [METHODS / "fedprox.yaml"]) == plain
    assert counted_flops(tmp_path / "agem", config, [METHODS / "agem.yaml"]) > 1.5 * plain  # type: ignore[operator]
    config["schedule"]["batch_size"] = 0
    assert counted_flops(tmp_path / "wrong", config) is None


def test_extraction_figures() -> None:
    reports = [
        {"seconds": whole + epoch, "task_end_seconds": whole, "task_end_clients_seconds": clients}
        for whole, clients, epoch in [(2.0, 1.0, 4.0), (6.0, 1.5, 3.0), (4.0, 3.0, 1.0)]
    ]
    assert extraction_figures(reports) == {
        "seconds_per_extraction_median": 4,
        "seconds_per_extraction_min": 2,
        "clients_seconds_per_extraction_median": 1.5,
        "seconds_per_local_epoch_median": 3,
        "ratio_to_local_epoch": 2,
        "clients_ratio_to_local_epoch": 0.5,
    }


def test_fisher_figures() -> None:
    reports = [{"close_clients_seconds": own, "seconds": whole} for own, whole in [(3.0, 8.0), (2.0, 4.0), (1.0, 9.0)]]
    assert fisher_figures(reports, [{"seconds": 4.0}, {"seconds": 2.0}, {"seconds": 1.0}]) == {
        "fisher_seconds_per_round_median": 2,
        "fisher_seconds_per_round_min": 1,
        "fedavg_seconds_per_round_median": 2,
        "fisher_ratio_to_local_epoch": 1,
        "round_ratio_to_local_epoch": 2,
    }


def test_late_tasks_are_held_against_early_ones() -> None:
    assert late_over_early([1.0, 1.0, 9.0, 2.0, 4.0]) == 3.0, "the middle one belongs to neither half"
    assert late_over_early([2.0, 3.0]) == 1.5
    assert late_over_early([7.0]) == 1.0


# Selection.


def test_works_are_chosen_by_name_and_kept_in_order() -> None:
    assert list(chosen_works("")) == list(WORKS) == ["W1", "W2", "W3", "W4", "W5", "W6", "W7", "W8", "W9"]
    assert list(chosen_works(" W3, W1,W3 ")) == ["W1", "W3"]
    with pytest.raises(ConfigError, match="W1, W2, W3, W4, W5, W6, W7, W8, W9") as caught:
        chosen_works("W1,W10")
    assert (caught.value.key, caught.value.value) == ("WORKS", "W10")


def test_engines_are_chosen_by_name_or_given_as_options() -> None:
    assert chosen_engines("") == list(ENGINES.values())
    chosen = chosen_engines("cfl --schedule.cohort_width 4 --engine.kind vmap, loop,loop")
    assert chosen == [
        Engine(
            "cfl --schedule.cohort_width 4 --engine.kind vmap",
            options=("--schedule.cohort_width", "4", "--engine.kind", "vmap"),
        ),
        ENGINES["loop"],
    ]
    for unknown in ("lop", "loop --schedule.batch_size 2"):
        with pytest.raises(ConfigError, match=r"loop, hand, cfl, cfl-k1.*cfl --some.option value") as caught:
            chosen_engines(f"cfl,{unknown}")
        assert (caught.value.key, caught.value.value) == ("ENGINES", unknown)


def test_bad_settings_are_one_line_and_measure_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    for arguments, key in (
        (["--works", "W0"], "WORKS = 'W0'"),
        (["--engines", "lop"], "ENGINES = 'lop'"),
        (["--works", "W1", "--rounds", "0"], "ROUNDS = 0"),
        (["--works", "W1", "--warmup", "0"], "WARMUP = 0"),
    ):
        assert main([*arguments, "--out", str(out)]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"error: {key} cannot work; valid: ")
        assert message.count("\n") == 1
    assert not out.exists()
    out.mkdir()
    (out / "bench.json").write_text("[{}]")
    assert main(["--works", "W1", "--out", str(out)]) == 2
    assert "row 0 lacks work" in capsys.readouterr().err
    assert list(out.iterdir()) == [out / "bench.json"]


def test_methods_are_measured_in_a_scenario_they_are_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tasks:
        scenarios = frozenset({"class", "task"})

    class Classes:
        scenarios = frozenset({"class"})

    monkeypatch.setattr("cfl.methods.Tasks", Tasks, raising=False)
    monkeypatch.setattr("cfl.methods.Classes", Classes, raising=False)
    fot, tasks, classes = ({"class_path": path} for path in ("cfl.methods.FOT", "Tasks", "Classes"))
    assert scenario_for({}) == "domain"
    assert scenario_for({"fot": fot}) == "domain"
    assert scenario_for({"fot": fot, "other": tasks}) == "task"
    assert scenario_for({"a": tasks, "b": classes}) == "class"


class Named(Bench):
    """A bench that starts nothing, and notes the engines that it was told to start."""

    def __init__(self, folder: Path, device: str) -> None:
        peak: Any = SimpleNamespace(flops_per_second=1e9)
        super().__init__(folder, 2, 1, [], peak, lambda line: None, device)
        self.started: list[Engine] = []

    def data(self, work: Work) -> Path:
        return self.folder / "images.npz"

    def fit(self, work: Work, engine: Engine, *rest: Any, **more: Any) -> Callable[[], Any]:
        self.started.append(engine)
        return lambda: None

    def interleave(self, start: Mapping[str, Callable[[], Any]]) -> dict[str, Measured]:
        return {name: Measured(failure="not here") for name in start}


@pytest.mark.parametrize("measure", [added_by_methods, extraction, fisher, personal])
def test_works_that_compare_no_engines_are_measured_on_the_device(
    measure: Callable[[Bench], list[dict[str, Any]]], tmp_path: Path
) -> None:
    for device, options in (("cpu", ()), ("gpu", ("--trainer.accelerator", "gpu"))):
        bench = Named(tmp_path, device)
        rows = measure(bench)
        assert {engine.options for engine in bench.started} == {options}
        assert {row["engine"] for row in rows} == {bench.cfl.name}


# Results.


def plain_row(work: str, engine: str, median: float | None = 1.0) -> dict[str, Any]:
    return {**dict.fromkeys(REQUIRED), "work": work, "engine": engine, "seconds_per_round_median": median}


def test_a_work_replaces_its_own_rows_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bench.json"
    assert stored_rows(path) == []
    replace_rows(path, [plain_row("W2", "loop"), plain_row("W2", "cfl")])
    replace_rows(path, [plain_row("W1", "cfl")])
    replace_rows(path, [plain_row("W2", "cfl", 5.0)])
    found = json.loads(path.read_text())
    assert found == [plain_row("W1", "cfl"), plain_row("W2", "cfl", 5.0)] == stored_rows(path)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("rows", "mistake"),
    [
        ({}, "not a list"),
        ([1], "row 0 is no object"),
        ([plain_row("W1", "cfl"), {"work": "W1"}], "row 1 lacks engine, seconds_per_round_median"),
        ([{**plain_row("W1", "cfl"), "ratio_to_loop": "1.0"}], "row 0 has ratio_to_loop = '1.0'"),
        ([{**plain_row("W1", "cfl"), "engine": None}], "row 0 has engine = None"),
        ([{**plain_row("W1", "cfl"), "peak_rss_mb": True}], "row 0 has peak_rss_mb = True"),
    ],
)
def test_what_is_no_list_of_rows_is_refused(rows: Any, mistake: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=mistake):
        check_rows(rows)
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match=mistake):
        replace_rows(path, [plain_row("W1", "cfl")])
    assert json.loads(path.read_text()) == rows
    path.write_text("[")
    with pytest.raises(ConfigError, match="BENCH"):
        stored_rows(path)


def test_a_figure_that_is_no_number_leaves_the_old_results(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    replace_rows(path, [plain_row("W1", "cfl")])
    with pytest.raises(ValueError, match="JSON"):
        replace_rows(path, [plain_row("W1", "cfl", math.nan)])
    assert stored_rows(path) == [plain_row("W1", "cfl")]


class RisingPeak:
    """Stands in for the process that multiplies matrices."""

    def __init__(self, log: Path, device: str) -> None:
        self.flops_per_second = 0.0

    def __enter__(self) -> RisingPeak:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self) -> None:
        self.flops_per_second += 10.0


def test_results_are_kept_after_every_work_and_held_against_one_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.suite.Peak", RisingPeak)
    path = tmp_path / "bench.json"

    def measure(bench: Bench, work: str, fails: bool = False) -> list[dict[str, Any]]:
        bench.peak.measure()
        if fails:
            raise KeyboardInterrupt
        row = row_of(work, "", "cfl", measured(30))
        add_floor(row, flops=100, flops_per_second=bench.peak.flops_per_second)
        return [row]

    first, second, broken = (
        partial(measure, work="W1"),
        partial(measure, work="W2"),
        partial(measure, work="W3", fails=True),
    )
    with pytest.raises(KeyboardInterrupt):
        run_suite({"W1": first, "W3": broken}, [], 1, 1, tmp_path, lambda line: None)
    assert [(row["work"], row["ratio_to_floor"]) for row in stored_rows(path)] == [("W1", 3)]
    run_suite({"W1": first, "W2": second}, [], 1, 1, tmp_path, lambda line: None)
    assert [(row["work"], row["ratio_to_floor"]) for row in stored_rows(path)] == [("W1", 6), ("W2", 6)]


# Turns.


class Scripted:
    """Stands in for a process: counts its rounds, and dies in one of them if told so."""

    def __init__(self, name: str, log: list[str], dies_in: int | None = None) -> None:
        self.name, self.log, self.dies_in, self.played = name, log, dies_in, -1
        log.append(f"start {name}")

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self.log.append(f"end {self.name}")

    def _note(self, what: str) -> dict[str, Any]:
        if self.dies_in == self.played:
            raise NotRun("scripted")
        self.log.append(f"{what} {self.name}")
        return {"seconds": float(self.played), "peak_rss_mb": 1.0}

    def ready(self) -> dict[str, Any]:
        return self._note("ready")

    def round(self) -> dict[str, Any]:
        self.played += 1
        return self._note("round")

    def finish(self) -> dict[str, Any]:
        return self._note("finish")


def play(*processes: tuple[str, int | None]) -> tuple[dict[str, Measured], list[str]]:
    log: list[str] = []
    start: dict[str, Callable[[], Any]] = {name: partial(Scripted, name, log, dies) for name, dies in processes}
    found = interleave(start, 2, 1, lambda line: None, lambda turn: log.append(f"turn {turn}"))
    return found, log


def test_processes_take_turns() -> None:
    found, log = play(("a", None), ("b", None))
    starting = ["start a", "ready a", "start b", "ready b"]
    turns = ["turn 0", "round a", "round b", "turn 1", "round b", "round a", "turn 2", "round a", "round b", "turn 3"]
    assert log == [*starting, *turns, "finish a", "finish b", "end b", "end a"]
    for name in ("a", "b"):
        assert [report["seconds"] for report in found[name].warmup] == [0]
        assert [report["seconds"] for report in found[name].rounds] == [1, 2]
        assert found[name].memory["peak_rss_mb"] == 1
        assert found[name].failure is None


@pytest.mark.parametrize("dies_in", [-1, 0, 1, 2])
def test_a_dead_process_stops_nobody_else(dies_in: int) -> None:
    """A process may die while starting, in the warm-up, in a round or in the last one; the others finish all rounds."""
    found, log = play(("a", None), ("b", dies_in), ("c", None))
    assert found["b"].failure == "scripted"
    assert len(found["b"].warmup) + len(found["b"].rounds) == dies_in if dies_in >= 0 else not found["b"].warmup
    assert "finish b" not in log
    assert log.index("end b") < log.index("finish a")
    for name in ("a", "c"):
        assert (len(found[name].rounds), found[name].failure) == (2, None)
        assert f"finish {name}" in log


# The whole, in miniature.


def test_pace_hides_no_fast_path() -> None:
    """The callback has no hooks of gradients or single steps, because runs with such hooks are slower."""
    hooks = (
        *("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
        *("on_train_batch_start", "on_train_batch_end", "on_before_backward"),
    )
    assert not [hook for hook in hooks if is_overridden(hook, Pace(0), Callback)]


NAP = 0.02


class Naps(Method):
    """Sleeps in every hook: in local steps, around them, and at a task's end on both sides of a message."""

    def start_clients(self, cohort: Cohort) -> None:
        time.sleep(NAP)

    def penalty(self, cohort: Cohort) -> None:
        time.sleep(NAP)

    def adjust_gradients(self, cohort: Cohort) -> None:
        time.sleep(NAP)

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        time.sleep(NAP)

    def transform_step(self, step: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        time.sleep(NAP)
        return step

    def end_task(self, plan: RoundPlan) -> None:
        time.sleep(NAP)
        self.context.channel.uplink("nap", {"bytes": torch.zeros(1, 25)}, [1.0], [0])
        time.sleep(2 * NAP)
        self.context.channel.sum("nap")


class NapBetween(Callback):
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        time.sleep(NAP)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        time.sleep(NAP)


def test_pace_tells_apart_where_the_time_goes() -> None:
    """Two tasks of two rounds, three local steps a round. Every nap is found where it was taken, and nowhere else."""
    ours, theirs = socket.socketpair()
    ours.sendall(b'{"do": "round"}\n' * 4)
    data = tiny_data(permuted(2), schedule={"rounds_per_task": 2})
    fit(tiny_client(data, methods={"naps": Naps()}), data, callbacks=[Pace(theirs.detach()), NapBetween()])
    wire = Wire(ours, timeout=10)
    assert wire.receive()["processes"] == 1
    reports = [wire.receive() for _ in range(3)]  # the report of a round is sent before the next round
    wire.close()
    model = data.num_clients * 4 * (16 * 8 + 8 + 8 * 4 + 4)
    for report, last_of_task in zip(reports, (False, True, False), strict=True):
        assert report["step_seconds"] >= 3 * 2 * NAP
        around = report["seconds"] - report["step_seconds"] - report["task_end_seconds"]
        assert report["close_clients_seconds"] >= NAP
        assert around - report["close_clients_seconds"] >= 2 * NAP
        assert report["between_seconds"] >= (2 if last_of_task else 1) * NAP  # an evaluation follows a task's end
        assert report["downlink_bytes"] == model
        assert report["uplink_bytes"] == model + 100 * last_of_task
        if last_of_task:
            assert report["task_end_clients_seconds"] >= NAP
            assert report["task_end_seconds"] - report["task_end_clients_seconds"] >= 2 * NAP
        else:
            assert report["task_end_seconds"] == report["task_end_clients_seconds"] == 0
    for before, after in pairwise(reports):
        assert before["started"] + before["seconds"] + before["between_seconds"] <= after["started"]


@dataclass
class Miniature:
    """The results of an invocation on a tiny work."""

    folder: Path
    rows: list[dict[str, Any]]
    measured: dict[str, Measured]
    stored: list[dict[str, Any]]


def run_in_miniature(folder: Path) -> Miniature:
    """Measure the bare loop, the program, and the program with an invalid setting, in a folder with older rows."""
    kept: dict[str, Measured] = {}

    def measure(bench: Bench) -> list[dict[str, Any]]:
        take_turns = bench.interleave

        def noted(start: Mapping[str, Any]) -> dict[str, Measured]:
            kept.update(take_turns(start))
            return kept

        bench.interleave = noted  # type: ignore[method-assign]
        return side_by_side(bench, [TINY])

    replace_rows(folder / "bench.json", [plain_row("W0", "old"), plain_row("W8", "old")])
    engines = chosen_engines("loop,cfl,cfl --schedule.batch_size 0")
    rows = run_suite({"W0": measure}, engines, 3, 2, folder, lambda line: None)
    return Miniature(folder, rows, kept, json.loads((folder / "bench.json").read_text()))


@pytest.mark.slow
def test_a_work_in_miniature(tmp_path: Path) -> None:
    found = run_in_miniature(tmp_path)
    check_results(found)
    check_that_one_process_computes_at_a_time(found)
    check_that_the_measured_run_is_the_work(found)
    check_tables(found)


def check_results(found: Miniature) -> None:
    loop, ours, broken = found.rows
    assert [row["engine"] for row in found.rows] == ["loop", "cfl", "cfl --schedule.batch_size 0"]
    assert found.stored == [*found.rows, plain_row("W8", "old")]
    check_rows(found.stored)
    assert broken["not_run"] == (
        "exit status 2: error: schedule.batch_size = 0 cannot work; valid: an integer of at least 1"
    )
    assert all(broken[key] is None for key in REQUIRED if key not in ("work", "engine"))
    for row in (loop, ours):
        assert row["not_run"] is None
        assert len(row["seconds_of_rounds"]) == row["rounds"] == 3
        assert 0 < row["seconds_per_round_min"] <= row["seconds_per_round_median"]
        assert 0 < row["share_outside_steps"] < 1
        assert 0 < row["rss_mb"] <= row["peak_rss_mb"] < 20_000
        assert row["ratio_to_loop"] == row["seconds_per_round_median"] / loop["seconds_per_round_median"]
        flops_per_second = row["peak_gflops_per_second"] * 1e9
        expected = row["seconds_per_round_median"] / (row["flops_per_round"] / flops_per_second)
        assert row["ratio_to_floor"] == pytest.approx(expected)
        assert row["flops_per_round"] == round_flops(TINY)
        assert row["client_steps_per_second"] == 12 / row["seconds_per_round_median"]
        assert {"processor", "cores", "load_average"} <= set(row["machine"])
        assert row["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert (loop["data_mb"], ours["data_mb"]) == (42 * (4 * 64 + 8) / 1e6, 42 * (64 + 8) / 1e6)


def check_that_one_process_computes_at_a_time(found: Miniature) -> None:
    """Rounds of all processes, which share a clock, do not overlap, and are as many as were asked for."""
    spans = []
    for name in ("loop", "cfl"):
        own = found.measured[name]
        assert (len(own.warmup), len(own.rounds)) == (2, 3)
        for report in [*own.warmup, *own.rounds]:
            assert 0 < report["step_seconds"] < report["seconds"]
            rest = report.get("between_seconds", 0.0)
            spans.append((report["started"], report["started"] + report["seconds"] + rest, name))
    spans.sort()
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert [span[2] for span in spans] == ["loop", "cfl", "cfl", "loop"] * 2 + ["loop", "cfl"]


def check_that_the_measured_run_is_the_work(found: Miniature) -> None:
    """Bytes of a round are the sampled clients' models; every client holds as many samples as the work says."""
    for report in found.measured["cfl"].rounds:
        assert report["uplink_bytes"] == report["downlink_bytes"] == TINY.sampled * PARAMETERS * 4
        assert report["task_end_seconds"] == 0
    held = (found.folder / "W0" / "cfl" / "partition.csv").read_text().splitlines()
    column = held[0].split(",").index("samples")
    assert [int(line.split(",")[column]) for line in held[1:]] == [TINY.samples] * TINY.clients
    assert not (found.folder / "W0" / "cfl" / "last.ckpt").exists()


def check_tables(found: Miniature) -> None:
    console = Console(width=220)
    with console.capture() as capture:
        show(found.rows, {"W0": "tiny"}, console)
    text = capture.get()
    for words in ("W0 tiny", "not run: exit status 2", "arithmetic peak", "torch", "x floor"):
        assert words in text


class NoPeak(Peak):
    """A given peak, without a process that measures it."""

    def __init__(self, log: Path, device: str) -> None:
        self.flops_per_second = 1e9

    def measure(self) -> None:
        """Nothing to do."""

    def __exit__(self, *reason: object) -> None:
        """Nothing to end."""


@pytest.mark.slow
def test_methods_and_extractions_in_miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works W5 to W8 run on a tiny work; FOT adds bytes only at a task's end, those of its second moments.

    Processes are forked and the peak is given here. In :func:`test_a_work_in_miniature` both are as in the suite.
    """
    monkeypatch.setattr("benchmarks.running.subprocess.Popen", Forked)
    monkeypatch.setattr("benchmarks.suite.Peak", NoPeak)
    monkeypatch.setattr("benchmarks.added_by_methods.counted_flops", lambda place, config, methods=(): 100)
    fot = next(path for path in METHODS.glob("*.yaml") if path.stem == "fot")
    case = Extraction(replace(TINY, name="W6", variant="MLP"), 1.0, "domain", 0.5)
    works = {
        "W5": partial(added_by_methods, work=replace(TINY, name="W5"), files=[fot]),
        "W6": partial(extraction, cases=[case]),
        "W7": partial(fisher, work=replace(TINY, name="W7")),
        "W8": partial(personal, work=replace(TINY, name="W8"), populations=(TINY.clients, 2 * TINY.clients)),
    }
    added_row, extraction_row, fisher_row, *personal_rows = run_suite(works, [], 2, 1, tmp_path, lambda line: None)
    assert added_row["not_run"] is None
    assert (added_row["work"], added_row["engine"], added_row["variant"]) == ("W5", "cfl", "fot")
    assert added_row["added_uplink_bytes_per_round"] == added_row["added_downlink_bytes_per_round"] == 0
    # Two layers of 64 and 6 inputs, a triangle of second moments each.
    assert added_row["added_task_end_uplink_bytes"] == TINY.sampled * 4 * (64 * 65 // 2 + 6 * 7 // 2)
    assert added_row["added_task_end_downlink_bytes"] == TINY.sampled * PARAMETERS * 4
    assert added_row["added_task_end_seconds"] > 0
    assert added_row["added_flops_share"] == 0
    assert extraction_row["not_run"] is None
    assert extraction_row["rounds"] == 2
    assert (
        0
        < extraction_row["clients_seconds_per_extraction_median"]
        < extraction_row["seconds_per_extraction_median"]
        < extraction_row["seconds_per_round_median"]
    )
    assert extraction_row["seconds_per_local_epoch_median"] > 0
    tasks = (tmp_path / "W6-MLP" / "cfl" / "fot.csv").read_text().splitlines()[1:]
    assert {line.split(",")[0] for line in tasks} == {"0", "1", "2"}  # every round, warm-up included, was a task
    assert fisher_row["not_run"] is None
    assert fisher_row["rounds"] == 2
    assert 0 < fisher_row["fisher_seconds_per_round_median"] < fisher_row["seconds_per_round_median"]
    assert fisher_row["fisher_ratio_to_local_epoch"] < fisher_row["round_ratio_to_local_epoch"]
    assert [row["not_run"] for row in personal_rows] == [None] * 4
    assert [row["variant"] for row in personal_rows[:2]] == [f"{TINY.clients} clients", f"{2 * TINY.clients} clients"]
    assert all("ratio_of_last_to_first_tasks" in row for row in personal_rows[2:])
    for folder in ("W8-a-task-per-round", "W8-a-task-per-round-frozen"):
        tasks = (tmp_path / folder / "cfl" / "fedweit.csv").read_text().splitlines()[1:]
        assert {line.split(",")[0] for line in tasks} >= {"0", "1"}
