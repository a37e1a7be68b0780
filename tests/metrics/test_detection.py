"""Mean average precision in matrices and whole runs, by COCO's evaluation."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from support.tiny import fit, tiny_client
from torch import Tensor

from cfl.data.augmentation import Augmentation, CropFlip
from cfl.data.datamodule import FederatedDataModule
from cfl.data.streams import Permuted
from cfl.engines import EngineOptions
from cfl.federation.federation import Federation
from cfl.methods import DER, GPM, Method
from cfl.metrics.detection import DetectionMatrix, mean_average_precisions
from cfl.metrics.measure import measure_named
from cfl.models import TinyYOLO
from cfl.runtime.errors import BadUpdate, ConfigError
from cfl.testing import check_source
from cfl.testing.tiny_data import permuted, squares, tiny_data

pytest.importorskip("pycocotools")

ADAM = partial(torch.optim.Adam, lr=0.01)
DETECTOR = partial(TinyYOLO, width=2)
ONE = torch.tensor([[0.0, 10, 10, 50, 60], [1, 100, 100, 140, 150]])


def found(*scores: float, shift: float = 0.0) -> Tensor:
    """Return the boxes of ONE with scores, moved to the right by ``shift`` pixels."""
    moved = ONE[: len(scores)].clone()
    moved[:, [1, 3]] += shift
    return torch.cat([moved, torch.tensor(scores)[:, None]], 1)


def test_precisions_by_hand() -> None:
    """Precisions equal those computed by hand.

    A box 40 pixels wide that is 4 pixels off overlaps by 36 / 44 = 0.818, so that it counts at 7 of the 10 overlaps.
    """
    assert mean_average_precisions([(found(0.9, 0.8), ONE)]) == pytest.approx((1.0, 1.0))
    assert mean_average_precisions([(found(0.9, 0.8, shift=4), ONE)]) == pytest.approx((0.7, 1.0))
    assert mean_average_precisions([(found(0.9), ONE)]) == pytest.approx((0.5, 0.5))  # one of two classes is found
    assert mean_average_precisions([(found(), ONE)]) == (0.0, 0.0)
    assert all(math.isnan(value) for value in mean_average_precisions([(found(0.9), ONE[:0])]))


def test_thresholds_are_those_of_coco() -> None:
    """Recalls and overlaps that equal a threshold reach it: 0.6 is one of 101 recalls and one of ten overlaps."""
    box = torch.tensor([[0.0, 0, 0, 10, 10]])
    seen = torch.cat([box, torch.ones(1, 1)], 1)
    _, at_half = mean_average_precisions([(seen if number < 6 else seen[:0], box) for number in range(10)])
    assert at_half == pytest.approx(61 / 101, abs=1e-6)
    part = seen.clone()
    part[0, 4] = 6.0
    mean, _ = mean_average_precisions([(part, box)])
    assert mean == pytest.approx(3 / 10, abs=1e-6)


def test_detections_that_are_not_finite_end_the_run() -> None:
    """COCO's evaluation would count boxes of NaN as found."""
    matrix, box = DetectionMatrix(1), torch.tensor([[[0.0, 0, 0, 10, 10]]])
    for bad in (math.nan, math.inf):
        strange = torch.cat([box, torch.ones(1, 1, 1)], 2)
        strange[0, 0, 3] = bad
        with pytest.raises(BadUpdate, match="a box or score"):
            matrix.update(0, 0, strange, box)


def test_rows_are_computed_when_they_are_added_up() -> None:
    """A row has values once it is added up. Padding does not count, and a second evaluation replaces the first."""
    padding = torch.tensor([[-1.0, 0, 0, 0, 0]])
    true = torch.stack([torch.cat([ONE, padding]), torch.cat([padding, ONE])])
    good = torch.stack([torch.cat([found(0.9, 0.8), torch.full((1, 6), -1.0)])] * 2)
    bad = good.clone()
    bad[..., 1:5] += 60
    matrix = DetectionMatrix(2)
    for row, task, given in ((0, 0, good), (0, 1, bad), (1, 0, bad), (1, 1, good), (-1, 0, bad), (-1, 1, bad)):
        for half in (0, 1):
            matrix.add(row, task, given[half : half + 1], true[half : half + 1], None)
    assert bool(matrix.compute().isnan().all())
    for row in (0, 1, -1):
        matrix.add_up(row)
    assert matrix.compute().tolist() == [[100.0, 0.0], [0.0, 100.0]]
    expected = {"map": 50.0, "map50": 50.0, "map_fgt": 100.0, "map_bwt": -100.0, "map_fwt": 0.0}
    assert matrix.summary() == pytest.approx(expected)
    other = DetectionMatrix(2)
    other.load_state_dict(matrix.state_dict())
    assert other.summary() == matrix.summary()
    matrix.clear_row(1)
    matrix.add(1, 0, good, true, None)
    matrix.add_up(1)
    assert matrix.compute()[1].isnan().tolist() == [False, True]


def test_of_clients_each_has_its_own() -> None:
    matrix = DetectionMatrix(1, 2)
    matrix.add(0, 0, found(0.9, 0.8)[None], ONE[None], None, 0)
    matrix.add(0, 0, found(0.9)[None], ONE[None], None, 1)
    matrix.add_up(0, [1])
    assert matrix.compute().flatten().isnan().tolist() == [True, False]
    matrix.add_up(0, [0])
    assert matrix.compute().flatten().tolist() == [100.0, 50.0]
    assert matrix.summary()["clients_evaluated"] == 2


def run(
    engine: str = "vmap", methods: dict[str, Method] | None = None, rounds: int = 2, width: int = 10, **options: Any
) -> Federation:
    schedule = {"rounds_per_task": rounds, "cohort_width": width}
    data = tiny_data(squares(2), num_clients=3, schedule=schedule, **options)
    return fit(tiny_client(data, DETECTOR, ADAM, methods, EngineOptions(engine)), data)


def test_engines_agree_and_widths_as_well() -> None:
    expected = run("vmap").model.state_tensors()
    for other in (run("workers"), run("vmap", width=1)):
        torch.testing.assert_close(other.model.state_tensors(), expected, rtol=1e-3, atol=1e-4)


def test_a_detector_learns() -> None:
    """A detector finds the rectangles of its training images after training, and not before."""
    data = tiny_data(squares(1), schedule={"rounds_per_task": 1})
    torch.manual_seed(0)
    network, measure = TinyYOLO(data.input_shape, data.num_outputs, width=4), data.measure
    x, y = data.gather(0, torch.arange(6))
    network.start_from(y)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)

    def score() -> float:
        with torch.no_grad():
            answers = network.answers(x)
        return mean_average_precisions([(a[a[:, 0] >= 0], b[b[:, 0] >= 0]) for a, b in zip(answers, y, strict=True)])[1]

    before = score()
    for _ in range(150):
        optimizer.zero_grad()
        measure.losses(network(x), y, None, None).mean().backward()
        optimizer.step()
    assert before < 0.1
    assert score() > 0.5


def test_boxes_are_augmented_with_their_images() -> None:
    federation = run(augmentation=CropFlip(2))
    data = federation.data
    index = torch.arange(32)
    x, y = data.gather(0, index, (0, 0))
    still_x, still_y = data.gather(0, index)
    assert not torch.equal(x, still_x)
    assert not torch.equal(y, still_y)
    assert torch.equal(data.gather(0, index, (0, 0))[1], y)


def test_der_keeps_the_grid() -> None:
    federation = run(methods={"der": DER(batch_size=4)})
    kept = federation.clients.get("buffer", 0)
    assert kept is not None
    assert kept["logits"].shape[-1] == federation.data.num_outputs == 3 * 7 * 4


class Shifted(Augmentation):
    """An augmentation that moves images without their boxes."""

    def __call__(self, images: Tensor, words: Tensor) -> Tensor:
        return images.roll(1, -1)


def test_what_does_not_fit_is_refused_by_name() -> None:
    def data(**options: Any) -> FederatedDataModule:
        return tiny_data(squares(2), schedule={"rounds_per_task": 1}, **options)

    for make, key in (
        (lambda: data(augmentation=Shifted()), "data.augmentation"),
        (lambda: data(scenario="domain"), "data.scenario"),
        (lambda: tiny_data(permuted(2), scenario="detection"), "data.scenario"),
        (lambda: Permuted(squares(1).sources[0], 2), "data.stream"),
        (lambda: fit(tiny_client(data()), data()), "model.network"),
        (lambda: fit(tiny_client(data(), DETECTOR, methods={"gpm": GPM()}), data()), "data.scenario"),
    ):
        with pytest.raises(ConfigError) as refused:
            make()
        assert refused.value.key == key


def test_the_source_of_the_kit_is_one() -> None:
    check_source(squares(1).sources[0])


def test_without_the_library_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pycocotools.cocoeval", None)
    with pytest.raises(ConfigError, match=r"continual-fl\[detection\]"):
        measure_named("map").require()
