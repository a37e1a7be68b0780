"""Readers of images with boxes: three formats give the same boxes, and damaged files are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.tiny import tiny_data

from cfl.data.sources import Binarised, CocoBoxes, RecordedFrames, VocBoxes
from cfl.data.sources.boxes import DetectionSource
from cfl.data.streams import Sequence
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.testing import check_source

SHAPE = [3, 20, 40]
CLASSES = ["vehicle", "bike"]
SIZE = (80, 60)  # width and height of the image files: twice and three times those of SHAPE
# For each of four images: class, left, top, right, bottom in the files' pixels.
BOXES: list[list[tuple[str, float, float, float, float]]] = [
    [("vehicle", 10, 6, 30, 36), ("bike", 40, 30, 90, 66)],  # the second reaches beyond the image
    [("lamp", 1, 1, 20, 20), ("vehicle", 20, 20, 21, 40)],  # not in CLASSES; half a pixel wide after scaling
    [],
    [("bike", 0, 0, 80, 60)],
]
EXPECTED = [
    [[1, 20, 10, 40, 20], [0, 5, 2, 15, 12]],  # the largest first
    [],
    [],
    [[1, 0, 0, 40, 20]],
]


def images(folder: Path, ending: str = "jpg") -> None:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(4):
        pixels = generator.integers(0, 255, (*SIZE[::-1], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"T_{number}.{ending}")


def recorded(folder: Path) -> RecordedFrames:
    images(folder / "frames")
    lines = ["frame,town,number,split,class,xmin,ymin,xmax,ymax"]
    for number, boxes in enumerate(BOXES):
        for box in boxes or [("", "", "", "", "")]:
            lines.append(f"T_{number},T,{number},train,{','.join(map(str, box))}")
    (folder / "boxes.csv").write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    return RecordedFrames(str(folder), SHAPE, CLASSES, most_boxes=3, block=1, test_every=4)


def coco(folder: Path) -> CocoBoxes:
    images(folder / "images")
    named = {"vehicle": 7, "bike": 3, "lamp": 9}
    annotations = [
        {"image_id": k, "category_id": named[name], "bbox": [left, top, right - left, bottom - top]}
        for k, boxes in enumerate(BOXES)
        for name, left, top, right, bottom in boxes
    ]
    annotations.append({"image_id": 0, "category_id": 7, "bbox": [0, 0, 9, 9], "iscrowd": 1})
    for part, chosen in (("train", (0, 1, 2)), ("val", (3,))):
        held = {
            "images": [{"id": k, "file_name": f"T_{k}.jpg"} for k in chosen],
            "categories": [{"id": number, "name": name} for name, number in named.items()],
            "annotations": [one for one in annotations if one["image_id"] in chosen],
        }
        (folder / f"{part}.json").write_text(json.dumps(held))
    return CocoBoxes(str(folder), "train.json", "val.json", "images", SHAPE, CLASSES, most_boxes=3)


def voc(folder: Path) -> VocBoxes:
    images(folder / "JPEGImages")
    for kind in ("Annotations", "ImageSets/Main"):
        (folder / kind).mkdir(parents=True)
    for k, boxes in enumerate(BOXES):
        objects = "".join(
            f"<object><name>{name}</name><bndbox>"  # pixels count from 1, and the last one belongs to the box
            f"<xmin>{left + 1}</xmin><ymin>{top + 1}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
            for name, left, top, right, bottom in boxes
        )
        text = f"<annotation><filename>T_{k}.jpg</filename>{objects}</annotation>"
        (folder / "Annotations" / f"T_{k}.xml").write_text(text)
    (folder / "ImageSets/Main/train.txt").write_text("T_0\nT_1\nT_2 1\n")
    (folder / "ImageSets/Main/val.txt").write_text("T_3\n")
    return VocBoxes(str(folder), SHAPE, CLASSES, most_boxes=3)


MAKERS = (recorded, coco, voc)


@pytest.mark.parametrize("make", MAKERS)
def test_every_format_gives_the_same_boxes(make: Callable[[Path], DetectionSource], tmp_path: Path) -> None:
    source = make(tmp_path / "set")
    train, test = source.load(tmp_path)
    found = [
        [[round(value, 4) for value in box] for box in image.tolist() if box[0] >= 0]
        for image in torch.cat([train.labels, test.labels])
    ]
    assert found == EXPECTED
    assert train.images.dtype == torch.uint8
    assert list(train.images.shape) == [3, *SHAPE]
    assert (source.num_classes, source.targets, list(train.labels.shape)) == (2, "boxes", [3, 3, 5])
    check_source(source, tmp_path)


def test_every_fifth_block_of_a_town_is_for_tests(tmp_path: Path) -> None:
    frames = tmp_path / "drive" / "frames"
    frames.mkdir(parents=True)
    lines = ["frame,town,number,class,xmin,ymin,xmax,ymax"]
    for town, count in (("A", 23), ("B", 11)):
        for k in range(count):
            Image.new("RGB", (4, 4)).save(frames / f"{town}{k}.jpg")
            lines.append(f"{town}{k},{town},{60 * k},,,,,")
    (tmp_path / "drive" / "boxes.csv").write_text("\n".join(lines))
    train, test = RecordedFrames("drive", [3, 4, 4], ["x"], block=2).records(tmp_path)
    assert [record.file.stem for record in test] == ["A8", "A9", "A18", "A19", "B8", "B9"]
    assert len(train) == 34 - 6
    only, _ = RecordedFrames("drive", [3, 4, 4], ["x"], towns=["B"], block=2).records(tmp_path)
    assert {record.file.stem[0] for record in only} == {"B"}
    with pytest.raises(ConfigError, match="some of A, B"):
        RecordedFrames("drive", [3, 4, 4], ["x"], towns=["C"]).records(tmp_path)


@pytest.mark.parametrize("make", [coco, voc])
def test_images_are_for_training_or_for_tests(make: Any, tmp_path: Path) -> None:
    """Two images are in both sets, with VOC one of them by another path."""
    source, folder = make(tmp_path / "set"), tmp_path / "set"
    if make is voc:
        source.test = "both"
        (folder / "ImageSets/Main/both.txt").write_text("T_1\nT_3\nT_9\n")
        text = (folder / "Annotations/T_1.xml").read_text()
        (folder / "Annotations/T_9.xml").write_text(text.replace("T_1.jpg", "T_9.jpg"))
        (folder / "JPEGImages/T_9.jpg").symlink_to("T_2.jpg")
        first = "T_1.jpg"
    else:
        held = json.loads((folder / "val.json").read_text())
        held["images"] += [{"id": 8, "file_name": "T_0.jpg"}, {"id": 9, "file_name": "T_2.jpg"}]
        (folder / "val.json").write_text(json.dumps(held))
        first = "T_0.jpg"
    with pytest.raises(DataFilesMissing, match=rf"^set: 2 images are for training and for tests, such as .*/{first};"):
        source.load(tmp_path)


def test_images_with_many_boxes_keep_the_largest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = recorded(tmp_path / "set")
    source.most_boxes = 1
    train, _ = source.load(tmp_path)
    assert train.labels[0].tolist() == [[1, 20, 10, 40, 20]]
    assert "1 training images have more than 1 boxes" in caplog.text
    limited = RecordedFrames(source.path, SHAPE, CLASSES, block=1, test_every=4, max_train=2)
    assert len(limited.load(tmp_path)[0]) == 2


def changed(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("make", "file", "old", "new", "said"),
    [
        (recorded, "boxes.csv", ",xmin", ",left", "it lacks the columns xmin"),
        (recorded, "boxes.csv", "T_0,T,0,", "T_0,T,1,", "has the number of"),
        (recorded, "boxes.csv", "T_0,T,0,", "../T_0,T,0,", "is no name of a file below"),
        (recorded, "boxes.csv", ",10,6,30,36", ",10,6,nan,36", "is no box"),
        (recorded, "boxes.csv", ",10,6,30,36", ",10,6,x,36", "are no four numbers"),
        (coco, "train.json", '"bbox": [10, 6, 20, 30]', '"bbox": [10, 6, 20]', "are no four numbers"),
        (coco, "train.json", '"bbox": [10, 6, 20, 30]', '"bbox": [10, 6, -20, 30]', "is no box"),
        (coco, "train.json", '"image_id": 0', '"image_id": 77', "there is no image 77"),
        (coco, "train.json", '"images": [', '"pictures": [', "there is no images"),
        (coco, "train.json", '"id": 1,', '"id": 0,', "there are two of image 0"),
        (coco, "train.json", '"id": 3,', '"id": 7,', "there are two of category 7"),
        (coco, "train.json", '"bbox": [10,', f'"bbox": [1{"0" * 400},', "are no four numbers"),
        (coco, "train.json", '"bbox": [10, 6, 20, 30]', '"bbox": "1234"', "are no four numbers"),
        (coco, "train.json", "{", "", "cannot be read"),
        (coco, "train.json", "T_0.jpg", "/etc/passwd", "is no name of a file below"),
        (voc, "Annotations/T_0.xml", "<annotation>", "<!DOCTYPE a><annotation>", "declares entities"),
        (voc, "Annotations/T_0.xml", "</annotation>", "", "is no XML"),
        (voc, "Annotations/T_0.xml", "<xmax>30", "<xmax>3", "is no box"),
        (voc, "ImageSets/Main/train.txt", "T_0", "T_9", "cannot be read"),
    ],
)
def test_damaged_files_are_named(make: Any, file: str, old: str, new: str, said: str, tmp_path: Path) -> None:
    source = make(tmp_path / "set")
    changed(tmp_path / "set" / file, old, new)
    with pytest.raises(DataFilesMissing, match=said):
        source.load(tmp_path)


def test_content_that_is_wrong_is_not_said_to_be_missing(tmp_path: Path) -> None:
    source = recorded(tmp_path / "set")
    changed(tmp_path / "set" / "boxes.csv", ",10,6,30,36", ",10,6,x,36")
    with pytest.raises(DataFilesMissing, match=r"^[^(]*boxes\.csv, line \d+: .* are no four numbers$"):
        source.load(tmp_path)


@pytest.mark.parametrize("make", MAKERS)
def test_classes_without_a_box_are_named(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are refused if no training image has a box, e.g. because a name is mistyped."""
    source = make(tmp_path / "set")
    source.load(tmp_path)
    assert "set: no training image has a box of vehicle" not in caplog.text
    assert "set: no test image has a box of vehicle of at least a pixel" in caplog.text
    source.class_names = ("bike", "tram")
    caplog.clear()
    source.load(tmp_path)
    assert (
        "no training image has a box of tram of at least a pixel at [3, 20, 40]; there are boxes of bike" in caplog.text
    )
    source.class_names = ("Bike", "tram")
    with pytest.raises(ConfigError, match=r"source\.classes = \['Bike', 'tram'\] .* boxes of bike, lamp, vehicle$"):
        source.load(tmp_path)


def test_categories_may_be_named_by_numbers(tmp_path: Path) -> None:
    known = coco(tmp_path / "set")
    named = known.load(tmp_path)
    for part in ("train", "val"):
        file = tmp_path / "set" / f"{part}.json"
        file.write_text(file.read_text().replace('"vehicle"', "1").replace('"bike"', "2").replace('"lamp"', "3"))
    numbered = CocoBoxes(known.path, "train.json", "val.json", "images", SHAPE, ["1", "2"], most_boxes=3).load(tmp_path)
    for one, other in zip(named, numbered, strict=True):
        assert torch.equal(one.labels, other.labels)


def test_samples_of_tasks_with_unlike_numbers_of_boxes_are_put_together(tmp_path: Path) -> None:
    few = recorded(tmp_path / "set")
    more = RecordedFrames(few.path, SHAPE, CLASSES, most_boxes=5, block=1, test_every=4)
    data = tiny_data(Sequence([few, more]), exposure="cumulative", num_clients=1)
    _, y, _ = data.samples_at(torch.arange(6))
    expected = torch.cat([source.load(tmp_path)[0].labels[:, :3] for source in (few, more)])
    assert torch.equal(y[:, :3], expected)
    assert (y[:, 3:] == torch.tensor([-1.0, 0, 0, 0, 0])).all()


def test_boxes_of_one_run_have_one_shape_and_one_order_of_classes(tmp_path: Path) -> None:
    """Boxes would not move with the images that ``Sequence`` pads."""
    known = recorded(tmp_path / "set")
    for shape, classes, said in (
        ([3, 20, 44], CLASSES, "boxes with the same shape"),
        (SHAPE, CLASSES[::-1], "boxes with the same classes in the same order"),
    ):
        other = RecordedFrames(known.path, shape, classes)
        for sources in ([known, other], [Binarised(known), Binarised(other)]):
            with pytest.raises(ConfigError, match=rf"data\.stream\.sources = .*{said}"):
                Sequence(sources)
    assert Sequence([known, RecordedFrames(known.path, SHAPE, CLASSES)]).num_tasks == 2


def test_options_that_cannot_work() -> None:
    for options, key in (
        ({"shape": [2, 8, 8]}, "shape"),
        ({"classes": []}, "classes"),
        ({"classes": ["a", "a"]}, "classes"),
        ({"most_boxes": 0}, "most_boxes"),
        ({"block": 0}, "block"),
        ({"test_every": 1}, "test_every"),
        ({"towns": []}, "towns"),
        ({"towns": ["A", "A"]}, "towns"),
    ):
        with pytest.raises(ConfigError, match=f"data.stream.source.{key}"):
            RecordedFrames(**{"path": "x", "shape": [3, 8, 8], "classes": ["a"], **options})
