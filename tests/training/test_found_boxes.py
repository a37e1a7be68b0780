"""The boxes that a detector finds, in the files of a run, in loggers and in comparisons."""

from __future__ import annotations

import base64
import copy
import csv
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from support import tiny_cli
from support.tiny import fit, tiny_client
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import cfl
from cfl.__main__ import main
from cfl.callbacks import RunRecord
from cfl.callbacks.run_pictures import save_samples
from cfl.data.sources import RecordedFrames
from cfl.data.streams import Sequence
from cfl.data.types import ImageSet
from cfl.methods import PersonalLayers
from cfl.models import TinyYOLO
from cfl.papers.kept import as_text
from cfl.papers.results import read_result
from cfl.reporting.compare.command import main as compare
from cfl.testing.tiny_data import _Squares, squares, tiny_data
from cfl.training.client import Client
from cfl.training.found_boxes import GREEN, ORANGE, draw_boxes, outline

pytest.importorskip("pycocotools")


def trained(**methods: PersonalLayers) -> Client:
    data = tiny_data(squares(2), num_clients=3, schedule={"rounds_per_task": 1})
    client = tiny_client(data, partial(TinyYOLO, width=2), partial(torch.optim.Adam, lr=0.01), methods or None)
    fit(client, data)
    return client


def test_a_run_without_a_defined_figure_finishes_without_a_curve(tmp_path: Path) -> None:
    """The first task's tests have no box, so that no mean over tasks is defined after any round."""

    class NoBoxes(_Squares):
        def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
            train, test = super().read(root)
            labels = test.labels.clone()
            labels[..., 0] = -1
            return train, replace(test, labels=labels)

    stream = Sequence([NoBoxes(), _Squares()])
    data = tiny_data(stream, num_clients=2, schedule={"rounds_per_task": 1, "evaluate_every": 1})
    client = tiny_client(data, partial(TinyYOLO, width=2), partial(torch.optim.Adam, lr=0.01))
    federation = fit(client, data, callbacks=[RunRecord(str(tmp_path))])
    assert federation.curve == [None, None]
    assert json.loads((tmp_path / "summary.json").read_text())["map"] is None
    cells = [cell for row in csv.DictReader((tmp_path / "rounds.csv").open()) for cell in row.values()]
    assert "" in cells
    assert all(math.isfinite(float(cell)) for cell in cells if cell)
    assert (tmp_path / "map_matrix.png").is_file()
    assert not (tmp_path / "map_rounds.png").exists()


def test_boxes_are_outlined_within_the_image() -> None:
    image = torch.zeros(3, 6, 8)
    outline(image, torch.tensor([1.2, 1.0, 4.0, 9.0]), GREEN)
    painted = image[1].gt(0).int().tolist()
    assert painted == [
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0, 0, 0],
        [0, 1, 0, 1, 0, 0, 0, 0],
        [0, 1, 0, 1, 0, 0, 0, 0],
        [0, 1, 0, 1, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0, 0, 0],
    ]
    outline(image, torch.tensor([9.0, 9.0, 12.0, 12.0]), ORANGE)
    assert image[1].gt(0).int().tolist() == painted


def test_test_images_have_their_boxes_and_those_found() -> None:
    client = trained()
    client.network.head.bias.data.view(3, -1)[:, 4] = 9.0  # sure of everything
    drawn = draw_boxes(client, 5)
    assert drawn is not None
    assert drawn.images.shape == (2, 2, 3, 32, 32)
    assert drawn.row_names == ["task 0", "task 1"]
    for colour in (GREEN, ORANGE):
        same = (drawn.images - torch.tensor(colour)[:, None, None]).abs().amax(2) < 1e-6
        assert bool(same.flatten(2).any(2).all())
    client.network.head.bias.data.view(3, -1)[:, 4] = -9.0  # sees nothing
    client.network.head.weight.data.zero_()
    drawn = draw_boxes(client, 64)
    assert drawn is not None
    assert drawn.images.shape[:2] == (2, 4)
    test = client.require_federation().data.tasks[0].test
    expected = test.images[0].float().expand(3, -1, -1) / 255
    for box in test.labels[0][test.labels[0][:, 0] >= 0]:
        outline(expected := expected.clone(), box[1:], GREEN)
    assert torch.allclose(drawn.images[0, 0], expected)


class Normed(TinyYOLO):
    """A TinyYOLO behind a BatchNorm layer, which has running statistics."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs, width=2)
        self.norm = nn.BatchNorm2d(input_shape[0])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def test_a_picture_changes_no_model(tmp_path: Path) -> None:
    data = tiny_data(squares(2), num_clients=3, schedule={"rounds_per_task": 1})
    client = tiny_client(data, Normed, partial(torch.optim.Adam, lr=0.01))
    fit(client, data)
    client.network.train()  # as callbacks find it
    before = copy.deepcopy(client.network.state_dict())
    assert save_samples(tmp_path, client, "squares", 4) is not None
    for name, value in client.network.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(module.training for module in client.network.modules())


def test_nothing_is_drawn_of_others() -> None:
    assert draw_boxes(trained(), 0) is None
    assert draw_boxes(trained(personal=PersonalLayers(["head.*"])), 4) is None
    data = tiny_data()
    client = tiny_client(data)
    fit(client, data)
    assert draw_boxes(client, 4) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on frames of two towns, evaluated after every round."""
    path = tmp_path_factory.mktemp("drive")
    generator = np.random.default_rng(0)
    (path / "frames").mkdir()
    lines = ["frame,town,number,class,xmin,ymin,xmax,ymax"]
    for name in "AB":
        for k in range(20):
            pixels = generator.integers(0, 120, (32, 48, 3), dtype=np.uint8)
            pixels[8:24, k : k + 20] = 250
            Image.fromarray(pixels).save(path / "frames" / f"{name}{k}.jpg")
            lines.append(f"{name}{k},{name},{60 * k},car,{k},8,{k + 20},24")
    (path / "boxes.csv").write_text("\n".join(lines))
    source = {"path": str(path), "shape": [3, 32, 48], "classes": ["car"], "block": 2}
    config = yaml.safe_load(tiny_cli.TINY.read_text())
    config["data"] = {
        "stream": {
            "class_path": "Sequence",
            "init_args": {
                "sources": [
                    {"class_path": "RecordedFrames", "init_args": {**source, "towns": [name], "drivers": drivers}}
                    for name, drivers in (("A", [0, 1, 0]), ("B", [1]))
                ]
            },
        },
        "partition": "Natural",
        "num_clients": 2,
        "exposure": "streaming",
        "portion": 6.0,
    }
    config["schedule"] = {"rounds_per_task": [3, 2], "clients_per_round": 1.0, "batch_size": 4, "evaluate_every": 1}
    config["model"] = {"network": {"class_path": "TinyYOLO", "init_args": {"width": 2}}}
    (path / "own.yaml").write_text(yaml.safe_dump(config))
    board = Path(__file__).parents[2] / "configs" / "loggers" / "tensorboard.yaml"
    run = path / "runs" / "one"
    given = ("--config", str(path / "own.yaml"), "--config", str(board), "--run.dir", str(run))
    assert tiny_cli.run("fit", *given, pictures=True) == 0
    return run


def test_a_run_tells_each_town_after_every_round(folder: Path) -> None:
    """``rounds.csv``, the source of papers' figures, has each town's mAP after each round. The summary has the last."""
    with (folder / "rounds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    result, summary = read_result(folder), tiny_cli.summary(folder)
    for task in (0, 1):
        column = [float(row[f"map50_task_{task}"]) for row in rows]
        assert len(column) == 5
        assert result.figure(f'column("map50_task_{task}")') == column
        assert summary["map50_by_task"][task] == column[-1]
    assert set(result.columns) == {"map50_task_0", "map50_task_1"}
    assert json.loads(as_text(result, "paper"))["columns"]["map50_task_1"] == pytest.approx(column, abs=1e-6)
    assert all(0 <= value < 100 for value in summary["map50_bootstrap"])
    assert np.mean(summary["map50_by_task"]) == pytest.approx(summary["map50"])


def test_frames_with_boxes_are_in_the_folder_the_logger_and_the_page(folder: Path, tmp_path: Path) -> None:
    png = (folder / "samples.png").read_bytes()
    (shown,) = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0}).Reload().Images("cl/samples")
    with Image.open(folder / "samples.png") as written:
        assert (shown.width, shown.height) == written.size
    assert compare([str(folder.parent), "--out", str(tmp_path)]) == 0
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    data = html.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert base64.b64decode(json.loads(data)["tables"][0]["samples"]["shown"][0]["png"]) == png


def test_predict_finds_boxes_in_files(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``cfl predict`` writes the boxes of the model's outputs for files scaled like the run's images.

    Without ``--top``, it finds nothing in these images, because five rounds do not make the model sure of a box.
    """
    frames = [folder.parents[1] / "frames" / f"A{k}.jpg" for k in (0, 1)]
    ask = ["predict", "--ckpt_path", str(folder), *map(str, frames), "--task", "0"]
    with tiny_cli.shortened(["validate"]):
        assert main([*ask, "--top", "3", "--out", str(tmp_path / "boxes.csv")]) == 0
    assert "bottom" in capsys.readouterr().out
    found = tiny_cli.rows(tmp_path / "boxes.csv")
    run = cfl.load(folder)
    source = RecordedFrames(str(folder.parents[1]), [3, 32, 48], ["car"])
    stored = torch.stack([source.image_of_file(frame, tmp_path) for frame in frames])
    with torch.no_grad():
        answers = run.model(source.transform()(stored))
    expected = [row for answer in answers for row in answer[answer[:, 0] >= 0][:3].tolist()]
    assert [row["image"] for row in found] == [str(frame) for frame in frames for _ in range(3)]
    assert {row["class"] for row in found} == {"car"}
    for row, (_, *corners, score) in zip(found, expected, strict=True):
        told = [float(row[name]) for name in ("left", "top", "right", "bottom", "score")]
        assert told == pytest.approx([*corners, score], abs=1e-4)
    with tiny_cli.shortened(["validate"]):
        assert main(ask) == 0  # after five rounds no box has a high score
        assert main([word for word in ask if word not in ("--task", "0")]) == 2
    said = capsys.readouterr()
    assert said.out.count("nothing") == 2
    assert "--task" in said.err


def test_predict_refuses_outputs_that_are_not_finite(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finite = TinyYOLO.forward
    monkeypatch.setattr(TinyYOLO, "forward", lambda self, x: finite(self, x) * torch.nan)
    frame = str(folder.parents[1] / "frames" / "A0.jpg")
    with tiny_cli.shortened(["validate"]):
        assert main(["predict", "--ckpt_path", str(folder), frame, "--task", "0", "--top", "3"]) == 2
    assert f"FILE = '{frame}' cannot work; valid: images as in training" in capsys.readouterr().err


def test_no_image_is_drawn_twice() -> None:
    data = tiny_data(squares(2), num_clients=3, schedule={"rounds_per_task": 1})
    client = tiny_client(data, partial(TinyYOLO, width=2), partial(torch.optim.Adam, lr=0.01), None)
    fit(client, data)
    for task in data.evaluated:
        task.test.labels[2:, :, 0] = -1  # two images with boxes are left
    drawn = draw_boxes(client, 6)
    assert drawn is not None
    assert drawn.images.shape[:2] == (2, 3)
    assert drawn.images.isnan().all(-1).all(-1).all(-1).tolist() == [[False, False, True]] * 2
