"""``cfl predict``: classes of images, or numbers for rows of tables, by a run's model."""

from __future__ import annotations

import math
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import tiny_cli
from support.tiny import fit as fit_tiny
from support.tiny import split, tiny_client, tiny_data

import cfl
from cfl.__main__ import main
from cfl.callbacks.privacy_budget import PrivacyBudget
from cfl.data.sequences import FixedTasks
from cfl.data.sources import Features, Synthetic
from cfl.data.sources.standard import StandardSource
from cfl.data.streams import ClassSplit, Sequence
from cfl.data.types import ImageSet
from cfl.export.answer import Choice, answer_of
from cfl.export.predict import predictions
from cfl.export.prediction import SampleScorer, output_names
from cfl.methods import DPFedAvg, FedWeIT
from cfl.models import MLP
from cfl.privacy.accounting import Accountant, Spent
from cfl.runtime.errors import ConfigError, DataFilesMissing

CLASSES = ("ant", "bee", "cat", "dog")
COLOURS = ((200, 40, 40), (40, 200, 40), (40, 40, 200), (180, 180, 40))


def predict(*arguments: str) -> int:
    """Run ``cfl predict ...`` without building the options of other subcommands."""
    with tiny_cli.shortened(["validate"]):
        return main(["predict", *arguments])


def draw(folder: Path, per_class: int, seed: int) -> None:
    """Write pictures of random sizes into a folder for each class, in the class's colour with noise."""
    generator = np.random.default_rng(seed)
    for name, colour in zip(CLASSES, COLOURS, strict=True):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            height, width = generator.integers(4, 9, 2)
            pixels = np.clip(generator.normal(colour, 30, (height, width, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:02d}.png")


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pets")
    draw(folder / "train", 12, 0)
    draw(folder / "test", 5, 1)
    return folder


@pytest.fixture(scope="module")
def run(pets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class-incremental run of two tasks with two classes each."""
    folder = tmp_path_factory.mktemp("predict") / "run"
    source = {"class_path": "ImageFolder", "init_args": {"path": str(pets), "shape": [3, 4, 4], "resize": "crop"}}
    stream = {"class_path": "ClassSplit", "init_args": {"source": source, "num_tasks": 2, "class_order": "seeded"}}
    cfl.fit(
        tiny_cli.TINY,
        {"data.stream": stream, "data.partition": "IID", "data.scenario": "class", "run.dir": folder},
    )
    return folder


def test_classes_have_names_and_the_accuracy_of_the_runs_tests(
    run: Path, pets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "classes.csv"
    assert predict("--ckpt_path", str(run / "last.ckpt"), str(pets / "test"), "--out", str(out)) == 0
    rows = tiny_cli.rows(out)
    assert [row["image"] for row in rows] == sorted(map(str, (pets / "test").rglob("*.png")))
    found = {name: [row["class"] for row in rows if Path(row["image"]).parent.name == name] for name in CLASSES}
    right = {name: 100 * sum(one == name for one in found[name]) / len(found[name]) for name in CLASSES}
    matrix = [list(row.values()) for row in tiny_cli.rows(run / "accuracy_matrix.csv")]
    assert sum(right.values()) / 4 == pytest.approx(sum(map(float, matrix[-1][-2:])) / 2)
    assert max(right.values()) > 0
    shown = capsys.readouterr().out
    assert all(row["image"] in shown for row in rows)
    assert str(out) in shown


def test_probabilities_by_hand(run: Path, pets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The probabilities of a wide picture are those of its middle, scaled, not normalised, by the trained weights."""
    file = tmp_path / "wide.png"
    pixels = np.random.default_rng(5).integers(0, 256, (8, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    assert predict(str(file), "--ckpt_path", str(run), "--top", "9", "--out", str(tmp_path / "p.csv")) == 0
    (row,) = tiny_cli.rows(tmp_path / "p.csv")
    middle = Image.fromarray(pixels).resize((4, 4), Image.Resampling.BILINEAR, box=(6, 0, 14, 8))
    network = MLP((3, 4, 4), 4, hidden=[8])
    held = tiny_cli.checkpoint(run)["state_dict"]
    network.load_state_dict({name.removeprefix("network."): tensor for name, tensor in held.items()})
    x = torch.from_numpy(np.array(middle)).permute(2, 0, 1)[None].float() / 255
    expected = network.eval()(x).double().softmax(1)[0]
    names = ["class", *(f"class_{number}" for number in range(2, 5))]
    values = ["probability", *(f"probability_{number}" for number in range(2, 5))]
    assert [float(row[value]) for value in values] == pytest.approx(
        expected.sort(descending=True).values.tolist(), 1e-4
    )
    order = cfl.load(run)._client.require_federation().data.stream.class_groups(0)
    outputs = [CLASSES[label] for group in order for label in group]
    assert [row[name] for name in names] == [outputs[k] for k in expected.argsort(descending=True).tolist()]
    assert set(outputs) == set(CLASSES)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("cut.png", b"\x89PNG\r\n\x1a\n", "cut.png cannot be read as an image"),
        ("no.jpg", None, "no.jpg cannot be read as an image: there is no such file"),
        ("empty", "folder", "empty cannot be used: it holds no image"),
        ("flat.npy", np.zeros((2, 5, 4, 3), np.uint8), "flat.npy cannot be used: it is uint8 [2, 5, 4, 3], not uint8"),
        ("none.npy", np.zeros((0, 4, 4, 3), np.uint8), "none.npy cannot be used: it holds no image"),
        ("float.npy", np.zeros((2, 4, 4, 3), np.float32), "float.npy cannot be used: it is float32"),
        ("no.npy", None, "no.npy: there is no such file"),
        ("no.csv", None, "no.csv: there is no such file"),
        (
            "objects.npy",
            np.array([None]),
            "objects.npy cannot be used: it is damaged or another kind of file, or holds Python objects, "
            "which are not read",
        ),
        ("cut.npz", b"PK", "cut.npz cannot be used: it is no .npz archive"),
    ],
)
def test_what_is_no_image_is_named_in_one_sentence(
    run: Path, name: str, content: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, np.ndarray):
        np.save(path, content)
    elif content is not None:
        path.mkdir()
    out = tmp_path / "p.csv"
    assert predict("--ckpt_path", str(run / "last.ckpt"), str(path), "--out", str(out)) == 2
    error = capsys.readouterr().err
    assert f"error: {tmp_path}/{said}" in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_options_that_cannot_work_are_refused_by_name(run: Path, tmp_path: Path, capsys: Any) -> None:
    last = ("--ckpt_path", str(run / "last.ckpt"))
    for options, said in (
        ((*last, "x.png", "--top", "0"), "--top = 0 cannot work; valid: an integer of at least 1"),
        ((*last, "x.png", "--task", "2"), "--task = 2 cannot work; valid: an integer between 0 and 1"),
        ((*last, "x.png", "--out", str(tmp_path)), "a file; this is a folder"),
        (("--ckpt_path", str(tmp_path / "no.ckpt"), "x.png"), "ckpt_path = "),
        ((*last, "--schedule.batch_size", "9", "x.png"), "schedule.batch_size"),
    ):
        assert predict(*options) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_values_with_blanks_are_no_files(run: Path, pets: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my runs" / "a b"
    shutil.copytree(run, folder)
    file = str(pets / "test" / "ant" / "00.png")
    for options in (["--run.dir", str(folder)], [f"--run.dir={folder}"]):
        out = tmp_path / "p.csv"
        assert predict("--ckpt_path", "last", *options, file, "--out", str(out)) == 0
        assert [row["image"] for row in tiny_cli.rows(out)] == [file]
        out.unlink()


def test_a_configuration_file_by_its_short_option_is_no_image(run: Path, pets: Path, tmp_path: Path) -> None:
    file, out = str(pets / "test" / "ant" / "00.png"), tmp_path / "p.csv"
    given = ("--ckpt_path", str(run / "last.ckpt"), "-c", str(run / "config.yaml"), file, "--out", str(out))
    assert predict(*given) == 0
    assert [row["image"] for row in tiny_cli.rows(out)] == [file]


@pytest.fixture(scope="module")
def task_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task-incremental run of two tasks on grey images of 4 x 4 pixels."""
    folder = tmp_path_factory.mktemp("predict") / "tasks"
    source = {"class_path": "Synthetic", "init_args": {"num_classes": 4, "shape": [1, 4, 4], "train_size": 96}}
    stream = {"class_path": "ClassSplit", "init_args": {"source": source, "num_tasks": 2}}
    cfl.fit(
        tiny_cli.TINY,
        {"data.stream": stream, "data.partition": "IID", "data.scenario": "task", "run.dir": folder},
    )
    return folder


def test_a_task_incremental_run_needs_the_task(task_run: Path, tmp_path: Path, capsys: Any) -> None:
    """A task-incremental run is refused without ``--task``. With it, classes of that task are predicted."""
    _, test = Synthetic(4, [1, 4, 4], 96, 40, noise=60.0).load(Path())
    own = test.labels >= 2
    np.savez(tmp_path / "mine.npz", test_images=test.images[own, 0].numpy(), test_labels=test.labels[own].numpy())
    given = ("--ckpt_path", str(task_run / "last.ckpt"), str(tmp_path / "mine.npz"), "--out", str(tmp_path / "p.csv"))
    assert predict(*given) == 2
    assert "error: --task = None cannot work; valid: an integer between 0 and 1" in capsys.readouterr().err
    assert predict(*given, "--task", "1", "--top", "3") == 0
    rows = tiny_cli.rows(tmp_path / "p.csv")
    assert [row["image"] for row in rows] == [f"{tmp_path / 'mine.npz'}[{row}]" for row in range(int(own.sum()))]
    assert {row["class"] for row in rows} == {"2", "3"}
    assert "class_3" not in rows[0]
    right = [int(row["class"]) == label for row, label in zip(rows, test.labels[own].tolist(), strict=True)]
    expected = float(tiny_cli.rows(task_run / "accuracy_matrix.csv")[-1]["task_1"])
    assert 100 * sum(right) / len(right) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("picture", "said"),
    [
        (Image.new("RGB", (4, 4)), "x.png cannot be read as an image: it has 3 channels (RGB), not 1"),
        (Image.new("L", (5, 4)), "x.png has 5 x 4 pixels, not 4 x 4"),
    ],
)
def test_images_unlike_the_data_sets_are_refused(
    task_run: Path, picture: Image.Image, said: str, tmp_path: Path, capsys: Any
) -> None:
    picture.save(tmp_path / "x.png")
    assert predict("--ckpt_path", str(task_run / "last.ckpt"), str(tmp_path / "x.png"), "--task", "0") == 2
    assert f"error: {tmp_path}/{said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (Choice(None, 2), "task = 2 cannot work; valid: an integer between 0 and 1"),
        (Choice(None, -1), "task = -1 cannot work; valid: an integer between 0 and 1"),
        (
            Choice(9, 0),
            "client = 9 cannot work; valid: unset: the clients of this run have nothing but the global model",
        ),
    ],
)
def test_a_task_or_client_that_there_is_none_of_is_refused_with_one_set_of_outputs(choice: Choice, said: str) -> None:
    module = tiny_data(split(), scenario="domain")
    client = tiny_client(module)
    fit_tiny(client, module)
    with pytest.raises(ConfigError, match=said):
        next(predictions(SampleScorer(client, choice), [Path("none.npy")], 1))


class Names(Synthetic):
    """A source of made-up images whose classes have names."""

    class_names = ("ant", "bee", "cat", "dog", "eel", "fox")


def test_clients_whose_tasks_share_outputs_have_classes_of_their_own() -> None:
    """An output that clients use for different classes has the name of the chosen task's, and a number without one."""
    stream = ClassSplit(Names(6, [1, 4, 4], 96, 48), 3)
    tasks = FixedTasks([[0, 1], [2, 1]], outputs="place")
    data = tiny_data(stream, num_clients=2, scenario="task", sequences=tasks)
    pairs = (("ant", "bee"), ("cat", "dog"), ("eel", "fox"))
    federation = fit_tiny(tiny_client(data), data)
    assert data.num_outputs == 4
    for task, pair in enumerate((0, 1, 2, 1)):
        names = output_names(federation, Choice(None, task))
        assert [names[k] for k in data.outputs.own[task].nonzero().flatten()] == list(pairs[pair])
    assert output_names(federation, Choice()) == ["0", "1", *pairs[1]]


def test_a_missing_task_is_one_of_the_stream_unless_a_client_is_named() -> None:
    """Without a client a task has the stream's number, also where each client learns few of the tasks."""
    sources = [Synthetic(2, [1, 4, 4], 32, 16, mean=[0.1 * number]) for number in range(5)]
    tasks = FixedTasks([[0, 1], [4, 2]])
    data = tiny_data(Sequence(sources), num_clients=2, scenario="task", sequences=tasks)
    client = tiny_client(data)
    fit_tiny(client, data)
    stored = data.stream.source_of(0).load(Path())[1].images  # type: ignore[union-attr]
    for named, last in ((None, 4), (1, 1)):
        scorer = SampleScorer(client, Choice(named))
        for ask in (scorer.prepared, scorer.source, partial(scorer.network_input, stored)):
            with pytest.raises(ConfigError, match=f"task = None .* an integer between 0 and {last}(,|:|$)"):
                ask()


def test_a_run_that_its_budget_stopped_answers_among_the_classes_that_its_tests_chose_from(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    from cfl.export.card import write_card

    data = tiny_data(split(), scenario="class", class_loss="seen", schedule={"evaluate_every": 1})
    budget = PrivacyBudget(1.001 * Accountant(1e-5, "rdp").epsilon(Spent(2 / 4)), accountant="rdp")
    client = tiny_client(data, methods={"dp": DPFedAvg(0.5, 2.0)})
    federation = fit_tiny(client, data, callbacks=[budget])
    assert federation.stopped
    assert federation.round == 2
    test = data.tasks[0].test
    scores = SampleScorer(client, Choice()).scores(data.tasks[0].transform(test.images))
    assert scores.isfinite().tolist() == [[True, True, False, False]] * len(test.labels)
    right = 100 * scores.argmax(1).eq(test.labels).double().mean()
    assert float(right) == pytest.approx(float(federation.accuracy.compute()[0, 0]))
    (tmp_path / "m.onnx").write_bytes(b"a model")
    choice = Choice()
    answer = answer_of(client, choice)
    write_card(tmp_path / "card.md", tmp_path / "m.onnx", answer, choice, federation, "", tmp_path)
    card = (tmp_path / "card.md").read_text()
    assert "Only outputs below 2 have been trained" in card
    assert "first, end = 0, 2" in card


def test_a_client_with_a_model_for_each_task_answers_by_that_of_the_task() -> None:
    module = tiny_data(split(), scenario="task")
    client = tiny_client(module, methods={"m": FedWeIT(consolidation=1.0)})
    fit_tiny(client, module)
    client.eval()
    federation = client.require_federation()
    x = torch.randn(5, *client.input_shape, generator=torch.Generator().manual_seed(0))
    for task in (0, 1):
        model = federation.model_of(1, task)
        with torch.no_grad():
            expected = torch.func.functional_call(client.network, model, (x,))
        found = SampleScorer(client, Choice(1, task)).scores(x)
        own = slice(2 * task, 2 * task + 2)
        torch.testing.assert_close(found[:, own], expected[:, own], rtol=0, atol=1e-6)
        assert found.isinf().sum() == 10


@pytest.mark.parametrize(("row", "value"), [(0, math.nan), (1, math.inf), (1, -math.inf)])
def test_a_sample_whose_scores_overflow_is_named(
    row: int,
    value: float,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sample whose scores are NaN or all infinite is named.

    Scores of other samples are -inf only for outputs that are not allowed.
    """
    scores = torch.tensor([[1.0, 2.0, -math.inf, -math.inf]] * 2)
    scores[row] = value
    monkeypatch.setattr(SampleScorer, "scores", lambda *_: scores)
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 4, 4), np.uint8))
    given = ("--ckpt_path", str(run / "last.ckpt"), str(tmp_path / "x.npy"), "--out", str(tmp_path / "p.csv"))
    assert predict(*given) == 2
    said = capsys.readouterr().err
    assert re.search(
        rf"^error: FILE = '.*x.npy\[{row}\]' cannot work; valid: inputs of a size as in training", said, re.M
    )
    assert not (tmp_path / "p.csv").exists()


def test_features_are_standardised_as_in_training(tmp_path: Path) -> None:
    file = features(tmp_path)
    source = {"class_path": "Features", "init_args": {"path": str(file)}}
    stream = {"class_path": "ClassSplit", "init_args": {"source": source, "num_tasks": 2}}
    folder = tmp_path / "run"
    run = cfl.fit(
        tiny_cli.TINY,
        {"data.stream": stream, "data.partition": "IID", "data.scenario": "class", "run.dir": folder},
    )
    assert predict("--ckpt_path", str(folder), str(file), "--out", str(tmp_path / "p.csv")) == 0
    rows = tiny_cli.rows(tmp_path / "p.csv")
    assert [row["row"] for row in rows[:2]] == [f"{file}[0]", f"{file}[1]"]
    _, test = Features(str(file)).load(Path())
    assert [row["class"] for row in rows] == [f"kind {k}" for k in run.predict(test.images).tolist()]
    assert run.acc is not None
    assert run.acc >= 50

    held = np.load(file)
    assert torch.equal(run.predict(held["test_features"]), run.predict(test.images))  # rows as stored, standardised
    with pytest.raises(ConfigError, match=r"images = \[2, 5\] .* rows as in the run's data set .*\[N, 6\]"):
        run.predict(np.zeros((2, 5), np.float32))
    np.save(tmp_path / "new.npy", held["test_features"])

    # Predictions stay the same if another file replaces the data, and if a run on that file is loaded, too.
    before = run.predict(held["test_features"])
    changed = {f"{part}_features": 3 - 2 * held[f"{part}_features"] for part in ("train", "test")}
    np.savez(file, **{**held, **changed, "class_names": np.array(["a", "b", "c", "d"])})
    settings = {"data.stream": stream, "data.partition": "IID", "data.scenario": "class", "run.dir": tmp_path / "other"}
    other = cfl.fit(tiny_cli.TINY, settings)
    again = cfl.load(folder)
    _ = again.model, other.model
    assert torch.equal(again.predict(held["test_features"]), before)
    assert predict("--ckpt_path", str(folder), str(tmp_path / "new.npy"), "--out", str(tmp_path / "o.csv")) == 0
    assert [row["class"] for row in tiny_cli.rows(tmp_path / "o.csv")] == [row["class"] for row in rows]

    file.unlink()
    without = tmp_path / "w.csv"
    assert predict("--ckpt_path", str(folder), str(tmp_path / "new.npy"), "--out", str(without)) == 0
    found = tiny_cli.rows(without)
    assert [(row["class"], row["probability"]) for row in found] == [(row["class"], row["probability"]) for row in rows]


class FloatImages(StandardSource):
    """Images of numbers in the hundreds, each class around a point of its own."""

    name, shape, num_classes = "float-images", (1, 4, 4), 4
    mean, std, scale, is_float = (500.0,), (300.0,), 1.0, True

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        generator = torch.Generator().manual_seed(0)
        points = 500 + 300 * torch.randn(4, 1, 4, 4, generator=generator)
        labels = torch.arange(64) % 4
        images = points[labels] + 60 * torch.randn(64, 1, 4, 4, generator=generator)
        return ImageSet(images[:48], labels[:48]), ImageSet(images[48:], labels[48:])


@pytest.fixture(scope="module")
def float_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float") / "run"
    stream = {"class_path": "Permuted", "init_args": {"source": f"{__name__}.FloatImages", "num_tasks": 1}}
    cfl.fit(tiny_cli.TINY, {"data.stream": stream, "data.partition": "IID", "run.dir": folder})
    return folder


def test_floating_point_images_are_normalised_as_in_training(float_run: Path, tmp_path: Path) -> None:
    """Arrays in a file, and in Python, hold the data set's own values; network input is computed by hand."""
    images = FloatImages().load(Path())[1].images
    network = MLP((1, 4, 4), 4, hidden=[8])
    held = tiny_cli.checkpoint(float_run)["state_dict"]
    network.load_state_dict({name.removeprefix("network."): tensor for name, tensor in held.items()})
    expected = network.eval()((images - 500) / 300).argmax(1)
    assert not torch.equal(network(images).argmax(1), expected), "normalisation matters"
    loaded = cfl.load(float_run, allow=__name__)
    for array in (images, images.double(), images.numpy()):
        assert torch.equal(loaded.predict(array), expected)
    np.save(tmp_path / "new.npy", images.numpy())
    given = ("--ckpt_path", str(float_run), "--allow", __name__, str(tmp_path / "new.npy"))
    assert predict(*given, "--out", str(tmp_path / "p.csv")) == 0
    assert [int(row["class"]) for row in tiny_cli.rows(tmp_path / "p.csv")] == expected.tolist()
    for array in (images.double().numpy(), images[:, 0].numpy(), images.permute(0, 2, 3, 1).numpy()):
        assert torch.equal(FloatImages().images_of_array(array, Path()), images)


def test_bytes_are_no_images_of_a_data_set_with_floating_point_numbers(
    float_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"images = 'torch\.uint8' .*floating-point images as the data set stores"):
        cfl.load(float_run, allow=__name__).predict(torch.zeros(3, 1, 4, 4, dtype=torch.uint8))
    np.save(tmp_path / "bytes.npy", np.zeros((3, 4, 4), np.uint8))
    assert predict("--ckpt_path", str(float_run), "--allow", __name__, str(tmp_path / "bytes.npy")) == 2
    said = "it is uint8 [3, 4, 4], not floating-point [N, 4, 4], [N, 4, 4, 1] or [N, 1, 4, 4]"
    assert said in capsys.readouterr().err
    for value, said in ((np.nan, "it holds NaN or infinity"), (1e300, "it holds numbers that float32 cannot")):
        with pytest.raises(ValueError, match=said):
            FloatImages().images_of_array(np.full((3, 4, 4), value), Path())
    Image.new("L", (4, 4), 9).save(tmp_path / "x.png")
    with pytest.raises(DataFilesMissing, match=r"floating-point arrays \[N, \.\.\.\] like \[1, 4, 4\]"):
        FloatImages().image_of_file(tmp_path / "x.png", Path())


class ScaledFloatImages(FloatImages):
    """The same images with the scale of bytes."""

    scale = 255.0


def test_tasks_whose_data_sets_hold_bytes_and_floating_point_numbers_need_the_task(tmp_path: Path) -> None:
    """Both are normalised alike here, yet floating-point images are stored ones of one, network input of the other."""
    alike: dict[str, Any] = {"mean": [2.0], "std": [1.25]}
    in_bytes = {"class_path": "Synthetic", "init_args": {"num_classes": 4, "shape": [1, 4, 4], **alike}}
    floats = {"class_path": f"{__name__}.ScaledFloatImages", "init_args": alike}
    stream = {"class_path": "Sequence", "init_args": {"sources": [in_bytes, floats]}}
    settings = {"data.stream": stream, "data.partition": "IID", "schedule.rounds_per_task": 1}
    run = cfl.fit(tiny_cli.TINY, settings, {"data.scenario": "domain", "run.dir": tmp_path / "run"})
    stored = 255 * torch.rand(20, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    for images in (stored, stored.to(torch.uint8)):
        with pytest.raises(ConfigError, match=r"task = None .* an integer between 0 and 1"):
            run.predict(images)
    x = (stored / 255 - 2) / 1.25
    assert torch.equal(run.predict(x, task=0), run.model(x).argmax(1))
    assert torch.equal(run.predict(stored, task=1), run.model(x).argmax(1))
    with pytest.raises(ConfigError, match=r"torch\.uint8"):
        run.predict(stored.to(torch.uint8), task=1)


def test_numbers_are_predicted_for_the_rows_of_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A regression run predicts numbers for rows that are standardised by the training rows' mean and deviation."""
    x = np.random.default_rng(0).normal(5.0, 3.0, (80, 2)).astype(np.float32)
    lines = [f"{a},{b},{(a - b) / 3},{'train' if row < 60 else 'test'}" for row, (a, b) in enumerate(x)]
    (tmp_path / "doses.csv").write_text("\n".join(["age,weight,dose,part", *lines]))
    options = {"path": str(tmp_path / "doses.csv"), "label": "dose", "part": "part", "numbers": True}
    source = {"class_path": "CsvTable", "init_args": options}
    run = cfl.fit(
        tiny_cli.TINY,
        {"data.stream": {"class_path": "Permuted", "init_args": {"source": source, "num_tasks": 1}}},
        {"data.partition": "IID", "data.scenario": "regression", "run.dir": tmp_path / "run"},
    )
    new = np.array([[2.0, 1.0], [5.5, 3.0]], dtype=np.float32)
    (tmp_path / "new.csv").write_text("weight,age\n1,2\n3,5.5\n")
    given = ("--ckpt_path", str(tmp_path / "run"), str(tmp_path / "new.csv"))
    assert predict(*given, "--out", str(tmp_path / "p.csv")) == 0
    rows = tiny_cli.rows(tmp_path / "p.csv")
    assert [row["row"] for row in rows] == [f"{tmp_path}/new.csv[0]", f"{tmp_path}/new.csv[1]"]
    standardised = torch.from_numpy((new - x[:60].mean(0)) / x[:60].std(0))[:, None, None]
    expected = run.model(standardised).flatten().tolist()
    assert [float(row["dose"]) for row in rows] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert run.predict(new).flatten().tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert predict(*given, "--top", "2") == 2
    assert "--top = 2 cannot work; valid: unset: this run predicts numbers" in capsys.readouterr().err


def test_a_model_is_used_where_its_training_data_are_not(run: Path, pets: Path, tmp_path: Path) -> None:
    """Predictions do not need the training data: names and number of classes are kept with the run."""
    given = ("--ckpt_path", str(run / "last.ckpt"), str(pets / "test"), "--out")
    assert predict(*given, str(tmp_path / "with.csv")) == 0
    (pets / "train").rename(pets / "away")
    try:
        assert predict(*given, str(tmp_path / "without.csv")) == 0
    finally:
        (pets / "away").rename(pets / "train")
    assert (tmp_path / "with.csv").read_text() == (tmp_path / "without.csv").read_text()


def features(folder: Path) -> Path:
    """Write a file with vectors around four points, with a different scale for each feature."""
    generator = np.random.default_rng(0)
    points, scale = generator.normal(size=(4, 6)), 10.0 ** np.arange(-2, 4)
    arrays: dict[str, Any] = {"class_names": np.array([f"kind {number}" for number in range(4)])}
    for part, size in (("train", 96), ("test", 20)):
        labels = np.arange(size) % 4
        arrays[f"{part}_features"] = (points[labels] + generator.normal(scale=0.2, size=(size, 6))) * scale + 7
        arrays[f"{part}_labels"] = labels
    path = folder / "measured.npz"
    np.savez(path, **arrays)
    return path
