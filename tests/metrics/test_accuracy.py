from __future__ import annotations

import copy
import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cfl.metrics.accuracy import AccuracyMatrix
from cfl.metrics.measures.accuracy import ACCURACY
from cfl.metrics.transfer import (
    average_accuracy,
    backward_transfer,
    forgetting,
    forgetting_max,
    forward_transfer,
    last_evaluated,
)
from cfl.runtime.errors import ConfigError

NAN = math.nan
HAND = torch.tensor([[70, 20, 14], [90, 80, 30], [75, 60, 85]], dtype=torch.float64)
HAND_INITIAL = torch.tensor([10, 12, 8], dtype=torch.float64)


def random_matrix(tasks: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        100 * torch.rand(tasks, tasks, generator=generator, dtype=torch.float64),
        100 * torch.rand(tasks, generator=generator, dtype=torch.float64),
    )


def naive(a: list[list[float]], b: list[float], t: int) -> dict[str, float]:
    """The formulas as sums over Python floats, independent of the tensor code."""

    def mean(terms: list[float]) -> float:
        return sum(terms) / len(terms) if terms else NAN

    return {
        "acc": mean([a[t][i] for i in range(t + 1)]),
        "fgt": mean([a[i][i] - a[t][i] for i in range(t)]),
        "fgt_max": mean([max(a[j][i] for j in range(t)) - a[t][i] for i in range(t)]),
        "fgt_max_last": mean([max(a[j][i] for j in range(i, t + 1)) - a[t][i] for i in range(t)]),
        "bwt": mean([a[t][i] - a[i][i] for i in range(t)]),
        "fwt": mean([a[i - 1][i] - b[i] for i in range(1, t + 1)]),
    }


def figures(a: Tensor, b: Tensor, after: int | None = None) -> dict[str, Tensor]:
    return {
        "acc": average_accuracy(a, after),
        "fgt": forgetting(a, after),
        "fgt_max": forgetting_max(a, after),
        "fgt_max_last": forgetting_max(a, after, include_last=True),
        "bwt": backward_transfer(a, after),
        "fwt": forward_transfer(a, b, after),
    }


def test_example_worked_by_hand() -> None:
    found = {key: value.item() for key, value in figures(HAND, HAND_INITIAL).items()}
    expected = {"acc": 220 / 3, "fgt": 7.5, "fgt_max": 17.5, "fgt_max_last": 17.5, "bwt": -7.5, "fwt": 15.0}
    assert found == pytest.approx(expected, abs=1e-12)
    # after task 1 only the first two rows and columns count; task 0 is then at its best
    found = {key: value.item() for key, value in figures(HAND, HAND_INITIAL, after=1).items()}
    expected = {"acc": 85.0, "fgt": -20.0, "fgt_max": -20.0, "fgt_max_last": 0.0, "bwt": 20.0, "fwt": 8.0}
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("tasks", [1, 2, 3, 7, 20])
def test_every_row_agrees_with_sums_over_python_floats(tasks: int) -> None:
    a, b = random_matrix(tasks, seed=tasks)
    for t in range(tasks):
        expected = naive(a.tolist(), b.tolist(), t)
        found = {key: value.item() for key, value in figures(a, b, after=t).items()}
        assert found == pytest.approx(expected, abs=1e-10, nan_ok=True)


# Final accuracy per task, ACC and FGT of FOT on Split-CIFAR100, non-IID, by start threshold: FOT, Table 12.
FOT_TABLE_12 = [
    ([51.9, 57.0, 70.9, 66.2, 69.4, 70.2, 72.9, 70.0, 72.6, 76.2], 67.7),
    ([53.8, 59.2, 72.2, 66.2, 68.5, 67.9, 69.7, 67.8, 69.1, 74.2], 66.9),
    ([53.8, 60.5, 71.8, 65.0, 68.9, 65.9, 69.3, 68.0, 68.5, 71.5], 66.3),
    ([57.1, 61.5, 70.6, 64.1, 66.6, 64.7, 65.7, 65.1, 67.2, 69.2], 65.2),
    ([61.0, 62.7, 67.0, 59.3, 65.1, 61.4, 63.4, 62.5, 64.1, 66.4], 63.3),
    ([62.4, 61.6, 64.2, 57.9, 61.7, 59.3, 61.2, 61.0, 60.6, 64.5], 61.4),
]


@pytest.mark.parametrize(("final_row", "published"), FOT_TABLE_12)
def test_average_accuracy_reproduces_the_published_column(final_row: list[float], published: float) -> None:
    a = torch.full((10, 10), NAN, dtype=torch.float64)
    a[9] = torch.tensor(final_row, dtype=torch.float64)
    assert average_accuracy(a).item() == pytest.approx(published, abs=0.1)  # both sides are rounded to 0.1


def authors_forgetting(rows: list[list[float]]) -> float:
    """Return the forgetting that Fed-A-GEM's program prints: maxima over all rows, which are padded with zeros."""
    padded = np.zeros((len(rows), len(rows)))
    for j, row in enumerate(rows):
        padded[j, : len(row)] = row
    return float((padded.max(0) - padded[-1])[:-1].mean())


@pytest.mark.parametrize("seed", range(5))
def test_include_last_is_what_the_authors_program_prints(seed: int) -> None:
    a, _ = random_matrix(6, seed)
    a[1, 4] = 100.0  # above the diagonal, so that the program does not read this entry
    for t in range(1, 6):
        rows = [a[j, : j + 1].tolist() for j in range(t + 1)]
        found = forgetting_max(a, after=t, include_last=True).item()
        assert found == pytest.approx(authors_forgetting(rows), abs=1e-10)
        assert found >= 0
    # The formula in the paper is a maximum over all earlier rows, with this entry.
    without = a.clone()
    without[:4, 4] = NAN
    assert forgetting_max(a).item() > forgetting_max(without).item()


def test_leading_dimensions_are_kept_and_never_averaged() -> None:
    pairs = [random_matrix(5, seed) for seed in range(6)]
    a = torch.stack([pair[0] for pair in pairs]).reshape(2, 3, 5, 5)
    b = torch.stack([pair[1] for pair in pairs]).reshape(2, 3, 5)
    for after in (None, 0, 3):
        for key, found in figures(a, b, after).items():
            assert found.shape == (2, 3)
            assert found.dtype == torch.float64
            alone = torch.stack([figures(*pair, after)[key] for pair in pairs]).reshape(2, 3)
            torch.testing.assert_close(found, alone, rtol=0, atol=0, equal_nan=True)


def test_one_task_has_an_accuracy_and_nothing_else() -> None:
    f = figures(torch.tensor([[62.5]], dtype=torch.float64), torch.tensor([10.0], dtype=torch.float64))
    assert f.pop("acc").item() == 62.5
    assert all(math.isnan(value.item()) for value in f.values())


def test_the_last_evaluated_row_is_the_default() -> None:
    a, b = random_matrix(6, seed=3)
    a[4:] = NAN
    assert last_evaluated(a) == 3
    assert figures(a, b) == figures(a, b, after=3)
    nothing = torch.full((2, 4, 4), NAN, dtype=torch.float64)
    assert last_evaluated(nothing) == 0
    assert all(torch.isnan(value).all() and value.shape == (2,) for value in figures(nothing, torch.zeros(4)).values())


def test_a_missing_term_makes_a_mean_undefined_rather_than_another_mean() -> None:
    a, b = random_matrix(4, seed=0)
    a[1, 1] = NAN  # needed by the diagonal form only
    f = figures(a, b)
    assert math.isnan(f["fgt"])
    assert math.isnan(f["bwt"])
    rest = [max(a[j, i].item() for j in range(3) if (j, i) != (1, 1)) - a[3, i].item() for i in range(3)]
    assert f["fgt_max"].item() == pytest.approx(sum(rest) / 3, abs=1e-10)
    a[3, 0] = NAN
    assert all(math.isnan(figures(a, b)[key]) for key in ("acc", "fgt", "fgt_max", "fgt_max_last", "bwt"))
    a[:3, 2] = NAN  # no earlier row knows task 2
    assert math.isnan(forgetting_max(a, after=3))
    assert math.isnan(forward_transfer(a, b, after=3))
    assert forward_transfer(a, b, after=1).item() == pytest.approx((a[0, 1] - b[1]).item())


def test_a_client_is_judged_by_the_tasks_that_are_its_own() -> None:
    """A client's figures are means over its own tasks. A missing value of one of these makes a mean undefined."""
    generator = torch.Generator().manual_seed(5)
    a = 100 * torch.rand(3, 4, 4, generator=generator, dtype=torch.float64)
    b = 100 * torch.rand(3, 4, generator=generator, dtype=torch.float64)
    a[1, :, 1] = b[1, 1] = NAN
    a[2, 3, 0] = NAN
    own = [0, 2, 3]
    f = {key: value[1].item() for key, value in figures(a, b).items()}
    assert f["acc"] == pytest.approx(a[1, 3, own].mean().item())
    drops = [(a[1, i, i] - a[1, 3, i]).item() for i in (0, 2)]
    assert f["fgt"] == pytest.approx(sum(drops) / 2)
    assert f["bwt"] == pytest.approx(-sum(drops) / 2)
    assert f["fgt_max"] == pytest.approx(sum((a[1, :3, i].max() - a[1, 3, i]).item() for i in (0, 2)) / 2)
    assert f["fwt"] == pytest.approx(sum((a[1, i - 1, i] - b[1, i]).item() for i in (2, 3)) / 2)
    for client in (0, 2):
        alone = {key: value.item() for key, value in figures(a[client], b[client]).items()}
        assert {key: value[client].item() for key, value in figures(a, b).items()} == pytest.approx(alone, nan_ok=True)
    assert math.isnan(figures(a, b)["acc"][2].item())


def test_wrong_shapes_and_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        average_accuracy(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="int64"):
        forgetting(torch.zeros(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"after = 3 .* 0 \.\. 2"):
        backward_transfer(HAND, after=3)
    with pytest.raises(ValueError, match="after = -1"):
        forgetting_max(HAND, after=-1)
    with pytest.raises(ValueError, match="initial must be"):
        forward_transfer(HAND, torch.zeros(2))


def test_formulas_are_named_like_the_summary() -> None:
    assert set(AccuracyMatrix(2).summary()) == set(ACCURACY.formulas)
    assert not any("%" in text for text in ACCURACY.formulas.values())  # argparse would expand it


Counts = list[tuple[int, int, int, int, int | None]]


def random_counts(tasks: int, clients: int | None, seed: int) -> Counts:
    """Return (row, task, correct, total, client) of three batches for each row, task and client."""
    draw = random.Random(seed)
    everyone = range(clients) if clients is not None else [None]
    counts: Counts = []
    for row, task, client, _ in itertools.product(range(-1, tasks), range(tasks), everyone, range(3)):
        total = draw.randint(1, 40)
        counts.append((row, task, draw.randint(0, total), total, client))
    return counts


def fill(metric: AccuracyMatrix, counts: Counts) -> AccuracyMatrix:
    for row, task, correct, total, client in counts:
        metric.update(row, task, correct, total, client)
    return metric


def naive_percent(counts: Counts, row: int, task: int, client: int | None) -> float:
    matching = [c for c in counts if (c[0], c[1], c[4]) == (row, task, client)]
    total = sum(c[3] for c in matching)
    return 100.0 * sum(c[2] for c in matching) / total if total else NAN


@pytest.mark.parametrize("clients", [None, 3])
def test_counts_give_the_matrix_of_a_naive_tally(clients: int | None) -> None:
    counts = [c for c in random_counts(4, clients, seed=1) if (c[0], c[1]) != (2, 3)]
    metric = fill(AccuracyMatrix(4, clients), counts)
    everyone = range(clients) if clients is not None else [None]
    matrix = torch.tensor(
        [[[naive_percent(counts, row, task, c) for task in range(4)] for row in range(4)] for c in everyone],
        dtype=torch.float64,
    )
    initial = torch.tensor(
        [[naive_percent(counts, -1, task, c) for task in range(4)] for c in everyone], dtype=torch.float64
    )
    if clients is None:
        matrix, initial = matrix[0], initial[0]
    assert torch.isnan(matrix[..., 2, 3]).all()
    torch.testing.assert_close(metric.compute(), matrix, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(metric.initial(), initial, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("clients", [None, 3])
def test_order_and_split_over_processes_do_not_matter(clients: int | None) -> None:
    counts = random_counts(4, clients, seed=2)
    whole = fill(AccuracyMatrix(4, clients), counts)
    shuffled = random.Random(0).sample(counts, len(counts))
    assert torch.equal(fill(AccuracyMatrix(4, clients), shuffled).compute(), whole.compute())

    first, second = (fill(AccuracyMatrix(4, clients), shuffled[k::2]) for k in (0, 1))
    assert not torch.equal(first.compute(), whole.compute())  # also caches a result, which merging has to replace
    first.merge_state(second)
    assert torch.equal(first.compute(), whole.compute())
    assert torch.equal(first.initial(), whole.initial())
    assert first.summary() == whole.summary()


def test_counting_waits_for_no_device() -> None:
    """Counting reads no value from a device: tensors on the meta device, which have no values, can be counted."""
    metric = AccuracyMatrix(3)
    metric.update(0, 1, torch.zeros((), dtype=torch.int64, device="meta"), 4)
    metric.update(-1, 1, torch.zeros((), dtype=torch.bool, device="meta"), 4)
    assert {state.device.type for state in metric.metric_state.values()} == {"meta"}


@pytest.mark.parametrize("row", [-2, 3])
def test_rows_that_cannot_be_are_not_added_up(row: int) -> None:
    with pytest.raises(ValueError, match=f"row = {row}"):
        AccuracyMatrix(3).add_up(row)


@pytest.mark.parametrize("clients", [None, 2])
def test_a_checkpoint_restores_the_counts_exactly(clients: int | None) -> None:
    counts = random_counts(3, clients, seed=5)
    half = len(counts) // 2
    saved = fill(AccuracyMatrix(3, clients), counts[:half])
    module = nn.ModuleDict({"accuracy": AccuracyMatrix(3, clients)})
    restored = module["accuracy"]
    assert isinstance(restored, AccuracyMatrix)
    restored.update(0, 0, 1, 1, None if clients is None else 0)  # replaced, not added to
    restored.compute()
    checkpoint = nn.ModuleDict({"accuracy": saved}).state_dict()
    kept = copy.deepcopy(checkpoint)
    module.load_state_dict(checkpoint)
    torch.testing.assert_close(restored.compute(), saved.compute(), rtol=0, atol=0, equal_nan=True)
    fill(restored, counts[half:])
    assert torch.equal(restored.compute(), fill(AccuracyMatrix(3, clients), counts).compute())
    assert all(torch.equal(checkpoint[key], kept[key]) for key in kept)  # counting on left the checkpoint alone


@pytest.mark.filterwarnings("error")
def test_a_restored_metric_does_not_claim_to_be_empty() -> None:
    restored = AccuracyMatrix(2)
    assert restored.compute().isnan().all()
    restored.load_state_dict(fill(AccuracyMatrix(2), [(0, 0, 1, 2, None)]).state_dict())
    assert restored.compute()[0, 0] == 50.0


def test_a_checkpoint_of_other_tasks_or_clients_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"sums is \[5, 4\] in the checkpoint, \[4, 3\] here"):
        AccuracyMatrix(3).load_state_dict(AccuracyMatrix(4).state_dict())
    with pytest.raises(RuntimeError, match="other tasks or clients"):
        AccuracyMatrix(3).load_state_dict(AccuracyMatrix(3, num_clients=2).state_dict())
    state = AccuracyMatrix(3).state_dict()
    del state["counts"]
    with pytest.raises(RuntimeError, match="counts"):
        AccuracyMatrix(3).load_state_dict(state)


def test_a_cleared_row_is_replaced_and_the_others_stay() -> None:
    counts = random_counts(3, None, seed=6)
    metric = fill(AccuracyMatrix(3), counts)
    before, initial = metric.compute(), metric.initial()
    metric.clear_row(1)
    assert torch.isnan(metric.compute()[1]).all()
    metric.update(1, 2, 3, 4)
    after = metric.compute()
    assert after[1, 2] == 75.0
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert torch.equal(metric.initial(), initial)
    metric.clear_row(-1)
    assert torch.isnan(metric.initial()).all()
    assert torch.equal(metric.compute()[[0, 2]], before[[0, 2]])  # -1 is not the last row


def test_summary_agrees_with_the_functions_and_is_null_where_undefined() -> None:
    counts = random_counts(4, None, seed=7)
    metric = fill(AccuracyMatrix(4), counts)
    a, b = metric.compute(), metric.initial()
    for t in range(1, 4):
        expected = naive(a.tolist(), b.tolist(), t)
        assert metric.summary(after=t) == pytest.approx(expected, abs=1e-10)
    first = metric.summary(after=0)
    assert first["acc"] == pytest.approx(a[0, 0].item())
    assert [first[key] for key in ("fgt", "fgt_max", "fgt_max_last", "bwt", "fwt")] == [None] * 5
    metric.clear_row(-1)
    assert metric.summary()["fwt"] is None
    assert metric.summary()["fgt"] is not None


def test_summary_of_personal_models_averages_figures_over_clients() -> None:
    counts = [c for c in random_counts(3, 4, seed=8) if not (c[4] == 3 and c[0] == 2)]  # client 3 missed the last row
    metric = fill(AccuracyMatrix(3, num_clients=4), counts)
    a, b = metric.compute(), metric.initial()
    per_client = [naive(a[c].tolist(), b[c].tolist(), 2) for c in range(3)]
    summary = metric.summary()
    for key in ("acc", "fgt", "fgt_max", "bwt"):
        assert summary[key] == pytest.approx(sum(f[key] for f in per_client) / 3, abs=1e-10)
    # forward transfer reads earlier rows only, so there client 3 takes part
    fwt = [naive(a[c].tolist(), b[c].tolist(), 2)["fwt"] for c in range(4)]
    assert summary["fwt"] == pytest.approx(sum(fwt) / 4, abs=1e-10)
    accuracies = [f["acc"] for f in per_client]
    assert summary["acc_worst_client"] == pytest.approx(min(accuracies), abs=1e-10)
    assert summary["acc_std_clients"] == pytest.approx(float(np.std(accuracies)), abs=1e-10)
    assert summary["clients_evaluated"] == 3
    assert AccuracyMatrix(3, num_clients=2).summary() == dict.fromkeys(summary, None) | {"clients_evaluated": 0}


def test_counts_may_come_as_integer_tensors_only() -> None:
    metric = AccuracyMatrix(2)
    metric.update(0, 0, torch.tensor([True, False, True]).sum(), 3)
    metric.update(0, 1, torch.tensor([1], dtype=torch.int32), 4)
    assert metric.compute()[0].tolist() == [100.0 * 2 / 3, 25.0]
    with pytest.raises(TypeError, match="float32"):
        metric.update(0, 0, torch.tensor(0.5), 1)
    with pytest.raises(TypeError, match=r"\[2\]"):
        metric.update(0, 0, torch.tensor([1, 0]), 2)
    metric.update(1, 1, torch.tensor(5), 4)
    with pytest.raises(ValueError, match="more correct answers"):
        metric.compute()


@pytest.mark.parametrize(
    ("clients", "arguments", "message"),
    [
        (None, (3, 0, 1, 1), "row = 3"),
        (None, (-2, 0, 1, 1), "row = -2"),
        (None, (0, 3, 1, 1), "task = 3"),
        (None, (0, -1, 1, 1), "task = -1"),
        (None, (0, 0, 2, 1), "2 correct answers out of 1"),
        (None, (0, 0, -1, 1), "-1 correct answers"),
        (None, (0, 0, torch.tensor(0), -1), "total = -1"),
        (None, (0, 0, 1, 1, 0), "client = 0 .* None"),
        (2, (0, 0, 1, 1), r"client = None .* 0 \.\. 1"),
        (2, (0, 0, 1, 1, 2), "client = 2"),
        (2, (0, 0, 1, 1, -1), "client = -1"),
    ],
)
def test_impossible_counts_are_refused_and_leave_no_trace(
    clients: int | None, arguments: tuple[int, ...], message: str
) -> None:
    metric = AccuracyMatrix(3, clients)
    with pytest.raises(ValueError, match=message):
        metric.update(*arguments)
    assert all(not state.any() for state in metric.metric_state.values())


def test_impossible_sizes_and_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_tasks = 0"):
        AccuracyMatrix(0)
    with pytest.raises(ConfigError, match="num_clients = 0"):
        AccuracyMatrix(2, num_clients=0)
    with pytest.raises(ValueError, match="row = 2"):
        AccuracyMatrix(2).clear_row(2)
