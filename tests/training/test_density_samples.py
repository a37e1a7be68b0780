"""Pictures of samples of a trained density: the model that they are of, the random draws, and the files."""

from __future__ import annotations

import base64
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import tiny_cli
from support.tiny import fit, mlp, source, tiny_client, tiny_data
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cfl.data.partitions import IID
from cfl.data.sources import Binarised
from cfl.data.streams import Permuted
from cfl.methods import CONFEDMADE, Method, PersonalLayers
from cfl.models import MADE
from cfl.randomness.generators import torch_generator
from cfl.reporting.compare.command import main as compare
from cfl.reporting.compare.page_data import page_data
from cfl.reporting.compare.reading import read
from cfl.reporting.compare.rows import Comparison, Row
from cfl.reporting.figures import sample_grid
from cfl.training.client import Client
from cfl.training.density_samples import CLIENTS_AT_MOST, draw_images

DENSITY = (
    "--data.scenario=density",
    "--data.stream.source=Binarised",
    '--data.stream.source.source={"class_path": "Synthetic", "init_args": {"num_classes": 4, "shape": [1, 4, 4], '
    '"train_size": 96, "test_size": 40, "noise": 60.0}}',
    '--model.network={"class_path": "MADE", "init_args": {"hidden": [8]}}',
)


def trained(
    methods: dict[str, Method] | None = None, clients: int = 4, shape: Any = None, seed: int = 0, **network: Any
) -> Client:
    images = source() if shape is None else type(source())(4, shape, 80, 40, noise=60.0)
    data = tiny_data(
        Permuted(Binarised(images), 2), scenario="density", num_clients=clients, partition=IID(), seed=seed
    )
    client = tiny_client(data, partial(MADE, **{"hidden": [6], **network}), methods=methods)
    fit(client, data)
    return client


def drawn_by_hand(client: Client, count: int, *indices: int, whose: int = 0) -> torch.Tensor:
    network: Any = client.network
    return network.sample(count, torch_generator(client.require_federation().data.seed, "samples", *indices), whose)


def test_samples_of_a_global_model() -> None:
    """Pictures show the network's samples, drawn by a generator of (seed, task). Empty places fill the last row."""
    client = trained()
    found = draw_images(client, 10)
    assert found is not None
    assert found.images.shape == (3, 4, 1, 4, 4)
    assert torch.equal(found.images.flatten(0, 1)[:10], drawn_by_hand(client, 10, 1))
    assert bool(found.images.flatten(0, 1)[10:].isnan().all())
    assert found.whose == "the global model after task 1"
    again = draw_images(client, 10)
    assert again is not None
    assert torch.equal(again.images[:2], found.images[:2])


def test_distinct_masks_are_client_0s() -> None:
    client = trained(synchronised=False)
    found = draw_images(client, 9)
    assert found is not None
    assert torch.equal(found.images.flatten(0, 1), drawn_by_hand(client, 9, 1))
    assert "client 0's masks" in found.whose


@pytest.mark.parametrize("synchronised", [True, False])
def test_personal_models_have_a_row_each(synchronised: bool) -> None:
    client = trained({"own": PersonalLayers(["*"])}, synchronised=synchronised)
    found = draw_images(client, 22)
    assert found is not None
    assert found.images.shape == (4, 5, 1, 4, 4)
    assert found.row_names == [f"client {k}, task 1" for k in range(4)]
    for owner in range(4):
        own = {name: values[0] for name, values in client.require_federation().model.personal_state((owner,)).items()}
        client.network.load_state_dict(own)
        assert torch.equal(found.images[owner], drawn_by_hand(client, 5, 1, owner, whose=owner))


def test_no_more_clients_are_looked_up_than_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    client = trained({"own": PersonalLayers(["*"])}, clients=CLIENTS_AT_MOST + 4)
    federation, asked = client.require_federation(), []
    members = federation.members
    monkeypatch.setattr(federation, "members", lambda task: asked.append(task) or members(task))
    found = draw_images(client, 9)
    assert found is not None
    assert len(found.row_names) == len(asked) == CLIENTS_AT_MOST


def test_decomposed_weights_are_put_together() -> None:
    """Decomposed weights are put together to those that the client uses if no task is given."""
    client = trained({"it": CONFEDMADE()}, clients=CLIENTS_AT_MOST + 2)
    found = draw_images(client, 40)
    assert found is not None
    assert found.images.shape == (CLIENTS_AT_MOST, 5, 1, 4, 4)
    from cfl.export.answer import plain_network

    network: Any = plain_network(client.network, client.require_federation().model_of(2, None))
    expected = network.sample(5, torch_generator(client.require_federation().data.seed, "samples", 1, 2))
    assert torch.equal(found.images[2], expected)


@pytest.mark.parametrize(("shape", "options"), [([1, 1, 9], {}), ([2, 3, 3], {}), (None, {"stale_output_mask": True})])
def test_there_is_not_always_something_to_see(shape: Any, options: dict[str, Any]) -> None:
    client = trained(shape=shape, **options, **({"order_agnostic": True} if options else {}))
    assert draw_images(client, 10) is None


def test_classifiers_and_no_samples_draw_nothing() -> None:
    assert draw_images(trained(), 0) is None
    data = tiny_data()
    client = tiny_client(data, mlp)
    fit(client, data)
    assert draw_images(client, 10) is None


def test_the_picture_shows_the_pixels() -> None:
    """The picture has every pixel of every image at its place, white for 1, and grey where there is no sample."""
    torch.manual_seed(0)
    images = (torch.rand(2, 3, 1, 14, 14) > 0.5).float()
    images[1, 2] = torch.nan
    figure = sample_grid(images, "title", ["a", "b"])
    raster = np.asarray(figure.axes[0].get_images()[0].get_array())
    assert raster.shape == (2 * 15 + 1, 3 * 15 + 1, 3)
    for row in range(2):
        for column in range(3):
            part = raster[1 + 15 * row : 15 + 15 * row, 1 + 15 * column : 15 + 15 * column]
            shown = images[row, column, 0].nan_to_num(nan=0.6)
            assert np.array_equal(part, shown[..., None].expand(-1, -1, 3).numpy())
    assert raster[0].max() == raster[0].min() == np.float32(0.6)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", "b"]
    with pytest.raises(ValueError, match="1 or 3 channels"):
        sample_grid(torch.zeros(1, 1, 2, 4, 4), "t")
    with pytest.raises(ValueError, match="1 row names for 2 rows"):
        sample_grid(images, "t", ["a"])


# The run folder, comparisons and loggers.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished density run with its pictures."""
    path = tmp_path_factory.mktemp("samples") / "run"
    assert tiny_cli.fit(path, *DENSITY, "--run.samples=9", "--local_models.evaluate=true", pictures=True) == 0
    return path


def test_a_run_leaves_the_picture(folder: Path) -> None:
    with Image.open(folder / "samples.png") as picture:
        assert min(picture.size) > 100
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) >= 3
    assert tiny_cli.summary(folder)["nll_of_clients"] == pytest.approx(tiny_cli.summary(folder)["new_nll"], abs=1)


def test_validate_draws_the_same_picture(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "samples.png").read_bytes()
    (folder / "samples.png").unlink()
    assert tiny_cli.run("validate", "--ckpt_path", str(folder / "last.ckpt"), pictures=True) == 0
    assert f"samples: {folder / 'samples.png'}" in capsys.readouterr().out
    with monkeypatch.context() as patch:  # a folder that may only be read

        def refused(*_: object) -> Path:
            raise PermissionError(13, "Permission denied", str(folder / "samples.png"))

        patch.setattr("cfl.callbacks.run_pictures.save", refused)
        assert tiny_cli.run("validate", "--ckpt_path", str(folder / "last.ckpt"), pictures=True) == 0
    assert "samples: not written ([Errno 13] Permission denied" in capsys.readouterr().out
    assert (folder / "samples.png").read_bytes() == before


def test_none_are_drawn_if_none_are_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_cli.fit(tmp_path / "none", *DENSITY, "--run.samples=0") == 0
    assert (tmp_path / "none" / "nll_matrix.png").exists()
    assert not (tmp_path / "none" / "samples.png").exists()
    assert tiny_cli.fit(tmp_path / "bad", *DENSITY, "--run.samples=-1") == 2
    assert "run.samples" in capsys.readouterr().err


def test_the_page_of_a_comparison_shows_it(folder: Path, tmp_path: Path) -> None:
    (reading,) = [read(folder, [])]
    png = (folder / "samples.png").read_bytes()
    assert reading.samples == png
    assert compare([str(folder), "--out", str(tmp_path)]) == 0
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    text = html.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    (table,) = json.loads(text)["tables"]
    (shown,) = table["samples"]["shown"]
    assert (shown["row"], shown["seed"]) == (0, 0)
    assert base64.b64decode(shown["png"]) == png
    assert "data:image/png;base64," in html


def test_a_page_has_room_for_some(folder: Path) -> None:
    reading = read(folder, [])
    rows = [Row(f"method {k}", "fedavg", [reading]) for k in range(200)]
    data = page_data([(Comparison("t", rows, []), rows[0])])
    (table,) = data["tables"]
    shown = table["samples"]["shown"]
    assert 0 < len(shown) < 200
    assert len(shown) + table["samples"]["left_out"] == 200
    assert sum(len(one["png"]) for one in shown) <= 1_500_000
    assert [one["row"] for one in shown] == list(range(len(shown)))


def test_tensorboard_shows_it(tmp_path: Path) -> None:
    """TensorBoard gets the picture at the run's end, in the size of the file."""
    board = Path(__file__).parents[2] / "configs" / "loggers" / "tensorboard.yaml"
    folder = tmp_path / "run"
    assert tiny_cli.fit(folder, *DENSITY, "--run.samples=4", "--config", str(board), pictures=True) == 0
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0}).Reload()
    (shown,) = events.Images("cl/samples")
    assert shown.step == 5
    with Image.open(folder / "samples.png") as written:
        assert (shown.width, shown.height) == written.size
