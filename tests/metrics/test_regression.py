"""RMSE and R2 equal numbers computed by hand and by scikit-learn, and whole runs predict a user's own numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from sklearn.metrics import mean_squared_error, r2_score
from support import tiny_cli
from support.tiny import fit, tiny_client
from torch.utils.data import Dataset, TensorDataset

from cfl.api import Run
from cfl.data.sources import Arrays, Features, FromDataset
from cfl.data.streams import ClassSplit, Mixture, Permuted, Sequence
from cfl.engines import EngineOptions
from cfl.federation.federation import Federation
from cfl.metrics.measure import measure_named
from cfl.metrics.regression import ErrorMatrix
from cfl.models import MADE
from cfl.reporting.compare.command import main as compare
from cfl.runtime.errors import BadUpdate, ConfigError, DataFilesMissing
from cfl.testing import check_source
from cfl.testing.tiny_data import brightness, split, tiny_data

OF_THE_SUMMARY = ("rmse", "rmse_fgt", "rmse_bwt", "rmse_fwt", "r2")


def held(seed: int = 0, outputs: int = 2) -> dict[str, np.ndarray]:
    """Return features, and numbers that are a linear function of them with noise."""
    generator = np.random.default_rng(seed)
    weights, found = generator.normal(size=(5, outputs)), {}
    for part, size in (("train", 96), ("test", 40)):
        x = generator.normal(size=(size, 5))
        y = x @ weights + 0.1 * generator.normal(size=(size, outputs))
        found |= {f"{part}_features": x, f"{part}_labels": y if outputs > 1 else y[:, 0]}
    return found


def stored(folder: Path, **arrays: np.ndarray) -> str:
    np.savez(folder / "n.npz", **{**held(), **arrays})
    return str(folder / "n.npz")


def test_errors_are_those_of_scikit_learn() -> None:
    generator = np.random.default_rng(1)
    true, predicted = generator.normal(size=(2, 30, 3)) * [1.0, 5.0, 0.2] + 2
    matrix = ErrorMatrix(2, None, 3)
    for rows in (slice(0, 7), slice(7, 30)):
        matrix.add(1, 0, torch.from_numpy(predicted[rows]), torch.from_numpy(true[rows]), None)
    assert float(matrix.compute()[1, 0]) == pytest.approx(math.sqrt(mean_squared_error(true, predicted)), rel=1e-12)
    assert float(matrix.determination()[1, 0]) == pytest.approx(r2_score(true, predicted), rel=1e-9)
    assert int(matrix.compute().isnan().sum()) == 3


@pytest.mark.parametrize(("deviation", "r2"), [(1e-4, math.nan), (1e-2, 0.99)])
def test_targets_that_hardly_deviate_have_no_r2(deviation: float, r2: float) -> None:
    """Targets of 1000 that deviate by less than a thousandth, a millionth of their size, count as constant."""
    true = torch.tensor([[1000 + deviation], [1000 - deviation]], dtype=torch.float64)
    matrix = ErrorMatrix(1)
    matrix.update(0, 0, true + 1e-3, true)
    assert float(matrix.determination()) == pytest.approx(r2, rel=1e-4, nan_ok=True)


def test_figures_by_hand_say_that_a_fall_of_errors_is_good() -> None:
    """A fall of errors counts as good.

    The truth is 0, so that errors are the predictions: a = [[1, 5], [3, 2]], b = [6, 4].
    """
    matrix = ErrorMatrix(2)
    for row, task, error in [(0, 0, 1.0), (0, 1, 5.0), (1, 0, 3.0), (1, 1, 2.0), (-1, 0, 6.0), (-1, 1, 4.0)]:
        matrix.update(row, task, torch.tensor([[error]]), torch.zeros(1, 1))
    assert matrix.summary() == {"rmse": 2.5, "rmse_fgt": 2.0, "rmse_bwt": -2.0, "rmse_fwt": -1.0, "r2": None}
    assert matrix.summary(after=0) == {"rmse": 1.0, **dict.fromkeys(OF_THE_SUMMARY[1:])}
    with pytest.raises(BadUpdate, match="1 test samples of task 0 have a squared error of nan: the model has diverged"):
        matrix.update(0, 0, torch.tensor([[math.nan]]), torch.zeros(1, 1))


def test_cleared_rows_and_states_of_other_sizes() -> None:
    """Clearing a row also clears its R2. A state is restored, but not into a matrix of another number of outputs."""
    one = ErrorMatrix(2, 2, 1)
    y = torch.tensor([[0.0], [1.0], [3.0]])
    for client in (0, 1):
        one.update(0, 1, y + 1 + client, y, client)
    other = ErrorMatrix(2, 2, 1)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.determination().nan_to_num(-9), one.determination().nan_to_num(-9))
    one.clear_row(0, [1])
    assert one.determination()[:, 0, 1].isnan().tolist() == [False, True]
    assert one.compute()[:, 0, 1].tolist()[0] == 1.0
    with pytest.raises(RuntimeError, match="other tasks or clients"):
        ErrorMatrix(2, 2, 3).load_state_dict(one.state_dict())


@pytest.mark.parametrize("engine", ["vmap", "workers"])
def test_clients_descend_the_mean_squared_error(engine: str) -> None:
    """A client descends the mean squared error: a step of SGD on all samples gives the weights of torch's gradient."""
    data = tiny_data(brightness(1), num_clients=1, schedule={"rounds_per_task": 1, "batch_size": 80})
    client = tiny_client(data, engine=EngineOptions(engine))
    network, (x, y) = client.network, data.gather(0, torch.arange(80))
    expected = {name: value.detach().clone().requires_grad_() for name, value in network.named_parameters()}
    outputs = torch.func.functional_call(network, expected, (x,))
    loss = torch.nn.functional.mse_loss(outputs, y)
    gradients = torch.autograd.grad(loss, list(expected.values()))
    lr = client.optimizer_for_its_options(None).param_groups[0]["lr"]
    federation = fit(client, data)
    for (name, before), gradient in zip(expected.items(), gradients, strict=True):
        after = federation.model.state_tensors()[name]
        torch.testing.assert_close(after, before.detach() - lr * gradient, rtol=1e-4, atol=1e-6)


def fitted(stream: Any, engine: str = "vmap", **options: Any) -> Federation:
    data = tiny_data(stream, **options)
    return fit(tiny_client(data, engine=EngineOptions(engine)), data)


def test_engines_agree() -> None:
    one, other = (fitted(brightness(2), engine).measured.compute() for engine in ("vmap", "workers"))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_run_from_arrays_has_its_tables_and_pages(tmp_path: Path) -> None:
    """A regression run on a user's arrays has tables, pictures and a comparison. Its matrix has the model's errors."""
    run = tmp_path / "runs" / "one"
    source = {"class_path": "Features", "init_args": {"path": stored(tmp_path), "numbers": True}}
    config = yaml.safe_load(tiny_cli.TINY.read_text())
    config["data"] = {
        "num_clients": 4,
        "stream": {"class_path": "Permuted", "init_args": {"num_tasks": 2, "source": source}},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    assert tiny_cli.run("fit", "--config", str(tmp_path / "own.yaml"), "--run.dir", str(run), pictures=True) == 0
    assert {path.name for path in run.glob("rmse_*.png")} == {"rmse_matrix.png", "rmse_curve.png"}
    summary = tiny_cli.summary(run)
    assert summary["scenario"] == "regression"
    assert {*OF_THE_SUMMARY} <= {*summary}
    assert "acc" not in summary
    assert sorted(path.name for path in run.glob("*_matrix*.csv")) == ["rmse_matrix.csv"]
    opened = Run(run)
    assert opened.figures.measure == "rmse"
    assert opened.figures.matrix[-1].mean().item() == pytest.approx(summary["rmse"], abs=1e-6)
    arrays, test = held(), Features(stored(tmp_path), numbers=True).load(tmp_path)[1]
    with torch.no_grad():
        outputs = opened.model(test.images)  # task 0 is not permuted
    expected = math.sqrt(mean_squared_error(arrays["test_labels"], outputs))
    assert opened.figures.matrix[1, 0].item() == pytest.approx(expected, rel=1e-4)
    assert compare([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--columns", "rmse,rmse_bwt,r2"]) == 0
    assert "RMSE" in (tmp_path / "out" / "comparison.md").read_text()
    assert r"RMSE" in (tmp_path / "out" / "comparison.tex").read_text()
    partition = tiny_cli.rows(run / "partition.csv")
    assert {row["classes"] for row in partition} == {"1"}
    assert sum(int(row["samples"]) for row in partition if row["task"] == "0") == 96


class Pairs(Dataset):
    """Images with one or several numbers each."""

    def __init__(self, labels: Any) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return torch.full((1, 2, 2), float(index)), self.labels[index]


def test_a_dataset_of_numbers() -> None:
    y = torch.randn(6, 3)
    source = FromDataset(TensorDataset(torch.rand(6, 1, 2, 2), y), Pairs(y.tolist()), numbers=True)
    assert (source.num_classes, source.targets) == (3, "numbers")
    train, test = source.load(Path())
    assert torch.equal(train.labels, y)
    torch.testing.assert_close(test.labels, y)
    check_source(source)
    single = FromDataset(Pairs([1, 2, 5]), Pairs([0.5, 2]), numbers=True)
    assert single.load(Path())[1].labels.tolist() == [[0.5], [2.0]]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([1.0, math.nan], r"Pairs\[1\] cannot be used: its label is nan, not a finite number"),
        ([1.0, "two"], r"its label is 'two', not a finite number or a vector"),
        ([1.0, [1.0, 2.0]], r"train\[1\] has 2 numbers to predict, the first training sample 1"),
    ],
)
def test_labels_that_are_no_numbers(labels: Any, said: str) -> None:
    with pytest.raises(DataFilesMissing, match=said):
        FromDataset(Pairs(labels), Pairs([1.0]), numbers=True).load(Path())


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"train_labels": np.zeros((96, 3))}, "a train sample has 3 numbers to predict, a test sample 2"),
        ({"train_labels": np.full((96, 2), np.inf)}, "train_labels hold NaN or infinity"),
        ({"train_labels": np.zeros((96, 0))}, "the train set is empty"),
        ({"train_labels": np.zeros((95, 2))}, r"train_labels \[95, 2\]"),
        ({"train_labels": np.array(["a"] * 96)}, "train_labels <U1"),
    ],
)
def test_files_of_numbers_that_cannot_be(tmp_path: Path, arrays: dict[str, np.ndarray], said: str) -> None:
    with pytest.raises(DataFilesMissing, match=said):
        Features(stored(tmp_path, **arrays), dimensions=5, numbers=True).load(tmp_path)


def test_numbers_that_float32_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    numbers = 1.7e9 + np.arange(96.0)
    many = {"train_labels": np.stack([numbers, numbers], 1)}
    with pytest.raises(
        DataFilesMissing, match=r"train_labels differ too little for their size .*Expected: .*numbers, \[N"
    ):
        Features(stored(tmp_path, **many), dimensions=5, numbers=True).load(tmp_path)
    for fine in (numbers - 1.7e9, np.full(96, 0.1), 1e6 + np.arange(96.0)):
        many = {"train_labels": np.stack([fine, fine], 1)}
        Features(stored(tmp_path, **many), dimensions=5, numbers=True).load(tmp_path)


def test_images_with_numbers_are_read_as_well(tmp_path: Path) -> None:
    images = {f"{part}_images": np.zeros((4, 3, 3), np.uint8) for part in ("train", "test")}
    labels = {f"{part}_labels": np.arange(4) / 2 for part in ("train", "test")}
    np.savez(tmp_path / "i.npz", **images, **labels)
    source = Arrays(str(tmp_path / "i.npz"), numbers=True, max_train=2)
    train, test = source.load(tmp_path)
    assert (len(train), source.num_classes) == (2, 1)
    assert test.labels.flatten().tolist() == [0.0, 0.5, 1.0, 1.5]


def test_what_does_not_fit_is_refused_before_training(tmp_path: Path) -> None:
    numbers = Features(stored(tmp_path), numbers=True)
    for make, key in (
        (lambda: Features(stored(tmp_path), num_classes=2, numbers=True), "data.stream.source.num_classes"),
        (lambda: ClassSplit(numbers, 2), "data.stream"),
        (lambda: Mixture([numbers], classes_per_task=1), "data.stream"),
        (lambda: tiny_data(Permuted(numbers, 2), scenario="domain"), "data.scenario"),
        (lambda: tiny_data(split(2), scenario="regression"), "data.scenario"),
        (lambda: tiny_data(Sequence([numbers, Arrays("x.npz", [1, 1, 5], 2)])).scenario, "data.stream"),
    ):
        with pytest.raises(ConfigError) as refused:
            make()
        assert refused.value.key == key
    data = tiny_data(brightness(2), scenario="regression")
    with pytest.raises(ConfigError, match=r"scenario = 'regression'.*density with model\.network MADE"):
        fit(tiny_client(tiny_data(brightness(2)), lambda shape, outputs: MADE(shape, 16, hidden=[5])), data)


def test_numbers_of_other_widths_are_no_tasks_of_one_run(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", **held(outputs=1))
    sources = [Features(stored(tmp_path), numbers=True), Features(str(tmp_path / "one.npz"), numbers=True)]
    with pytest.raises(ConfigError, match="as many numbers to predict in every task"):
        _ = tiny_data(Sequence(sources)).num_outputs


def test_its_losses_are_those_of_torch() -> None:
    outputs, y = torch.randn(3, 4, 2), torch.randn(3, 4, 2)
    found = measure_named("rmse").losses(outputs, y, None, None)
    torch.testing.assert_close(found, torch.nn.functional.mse_loss(outputs, y, reduction="none").mean(-1))


def test_the_page_trains_on_arrays_of_the_readers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of docs/data.md runs as printed. Its errors are those of its model, and the first task's error rises."""
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (code,) = [block.split("```")[0] for block in page.split("```python\n")[1:] if "numbers(name)" in block]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    matrix = names["run"].figures.matrix
    for task, name in enumerate(("first", "second")):
        train, test = Features(f"{name}.npz", numbers=True).load(tmp_path)
        with torch.no_grad():
            outputs = names["run"].model(test.images)
        error = math.sqrt(mean_squared_error(test.labels, outputs))
        assert matrix[1, task].item() == pytest.approx(error, rel=1e-4)
        assert matrix[task, task] < 0.9 * train.labels.std()
    assert matrix[1, 0] > matrix[0, 0]
