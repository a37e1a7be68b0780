"""Task streams: the pixels and labels of tasks, compared with direct computations on the source's data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import tiny_data

import cfl  # noqa: F401  before torchvision
from cfl.data.partitions import IID
from cfl.data.sources.base import Source
from cfl.data.streams import ClassSplit, Mixture, Permuted, Rotated, Sequence, Stream
from cfl.data.types import ImageSet, PixelTransform, Task
from cfl.runtime.errors import ConfigError

ROOT = Path("unused")


class Noise(Source):
    """Uniform noise images with every class equally often, labels in shuffled order."""

    def __init__(
        self,
        name: str = "noise",
        channels: int = 1,
        height: int = 7,
        width: int = 5,
        num_classes: int = 10,
        scale: float = 255.0,
    ) -> None:
        self.name, self.num_classes, self.scale = name, num_classes, scale
        self.shape = (channels, height, width)
        self.mean = tuple(0.1 * (c + 1) for c in range(channels))
        self.std = tuple(0.3 + 0.1 * c for c in range(channels))

    def load(self, root: Path) -> tuple[ImageSet, ImageSet]:
        def make(per_class: int, seed: int) -> ImageSet:
            g = torch.Generator().manual_seed(seed)
            n = per_class * self.num_classes
            images = torch.randint(0, 256, (n, *self.shape), generator=g, dtype=torch.uint8)
            return ImageSet(images, torch.arange(n)[torch.randperm(n, generator=g)] % self.num_classes)

        return make(6, 1), make(2, 2)


class CountingNoise(Noise):
    loads = 0

    def load(self, root: Path) -> tuple[ImageSet, ImageSet]:
        self.loads += 1
        return super().load(root)


def normalised(images: torch.Tensor, source: Source) -> np.ndarray:
    """The transform's formula in float64."""
    mean = np.array(source.mean).reshape(-1, 1, 1)
    std = np.array(source.std).reshape(-1, 1, 1)
    return (images.numpy().astype(np.float64) / source.scale - mean) / std


def every_stream() -> list[Stream]:
    gray, colour = Noise("gray"), Noise("colour", channels=3, height=8, width=9, num_classes=4)
    return [
        Permuted(gray, 3),
        Rotated(colour, 3),
        ClassSplit(gray, 5),
        ClassSplit(gray, 3, 2, "seeded"),
        Sequence([colour, gray]),
    ]


@pytest.mark.parametrize("stream", every_stream(), ids=lambda s: s.name)
def test_tasks_agree_with_what_the_stream_announced(stream: Stream) -> None:
    tasks = stream.tasks(ROOT, seed=3)
    assert len(tasks) == len(stream.classes_per_task) == stream.num_tasks
    assert len({task.name for task in tasks}) == stream.num_tasks
    for task, num_classes in zip(tasks, stream.classes_per_task, strict=True):
        assert task.num_classes == num_classes
        for part in (task.train, task.test):
            assert part.labels.unique().tolist() == list(range(num_classes))
            assert task.transform(part.images[:2]).shape == (2, *stream.shape)


def test_names_and_shared_labels() -> None:
    names = {stream.name: stream.shared_labels for stream in every_stream()}
    assert names == {
        "permuted-gray": True,
        "rotated-colour": True,
        "split-gray": False,
        "sequence-colour-gray": False,
    }
    assert Sequence([Noise("cifar10"), Noise("mnist")]).name == "sequence-cifar10-mnist"


class Own(Stream):
    """A stream as a user may write it: two tasks, of three and of two classes."""

    num_tasks = 2
    classes_per_task = [3, 2]  # noqa: RUF012
    shape = (1, 4, 4)
    shared_labels = False

    def tasks(self, root: Path, seed: int) -> list[Task]:
        return [own_task(classes) for classes in (3, 2)]


def own_task(classes: int, first: int = 0, size: int = 4) -> Task:
    labels = torch.arange(24) % classes + first
    samples = ImageSet(torch.zeros(24, 1, size, size, dtype=torch.uint8), labels)
    return Task("own", samples, samples, classes, PixelTransform((0.5,), (0.5,)))


def float_task(value: float) -> Task:
    samples = ImageSet(torch.full((24, 1, 4, 4), value), torch.arange(24) % 2)
    return Task("own", samples, samples, 2, PixelTransform((0.5,), (0.5,)))


def own_but(**changes: Any) -> dict[str, Any]:
    """The stream ``Own`` with another second task."""
    return {"tasks": lambda *_: [own_task(3), replace(own_task(2), **changes)]}


def test_a_stream_of_ones_own_needs_no_name() -> None:
    data = tiny_data(Own(), num_clients=2, partition=IID())
    data.setup("fit")
    assert data.stream.name == "own"
    assert data.num_outputs == 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_tasks": None}, "Own, whose num_tasks is None' cannot work; valid: an integer of at least 1"),
        ({"num_tasks": 0}, "Own, whose num_tasks is 0'"),
        ({"shape": (4, 4)}, "Own, whose shape is (4, 4)' cannot work; valid: (C, H, W)"),
        ({"classes_per_task": 3}, "Own, whose classes_per_task is 3'"),
        ({"classes_per_task": [3]}, "Own, with 1 classes_per_task and 2 tasks' cannot work; valid: one for each task"),
        ({"shared_labels": None}, "Own, without shared_labels'"),
        ({"tasks": lambda *_: None}, "Own, whose tasks are no list of cfl.data.types.Task'"),
        ({"tasks": lambda *_: [own_task(3)]}, "Own, which gives 1 tasks' cannot work; valid: 2, as num_tasks says"),
        (
            {"tasks": lambda *_: [own_task(3), own_task(2, first=3)]},
            "Own, whose training labels run from 3 to 4 in task 1' cannot work; valid: 0 to 1, the announced 2",
        ),
        (
            {"tasks": lambda *_: [own_task(3, size=5), own_task(2)]},
            "Own, whose training images have the shape [1, 5, 5] in task 0' cannot work; valid: the announced [1, 4",
        ),
        ({"tasks": lambda *_: 1 / 0}, "Own, whose tasks fail (ZeroDivisionError: division by zero (test_streams.py, l"),
        (own_but(test=None), "Own, whose test is NoneType in task 1' cannot work; valid: a cfl.data.types.ImageSet"),
        (own_but(num_classes=5), "Own, whose num_classes is 5 in task 1' cannot work; valid: 2, as classes_per_task"),
        (own_but(test=float_task(math.inf).test), "Own, whose test images hold NaN or infinity in task 1'"),
        (own_but(test=float_task(0.5).test), "Own, whose training images are uint8 [24, 1, 4, 4] and test images f"),
        (
            own_but(train=replace(own_task(2).train, labels=torch.zeros(24, 1))),
            "Own, whose training labels are float32 [24, 1] in task 1' cannot work; valid: the announced classes, int",
        ),
        (own_but(transform=None), "Own, whose transform is NoneType in task 1' cannot work; valid: a cfl.data.types."),
        (
            own_but(transform=PixelTransform((0.5, 0.5), (0.5, 0.5))),
            "Own, whose transform fails (RuntimeError: output with shape [8, 1, 4, 4]",
        ),
        (
            own_but(transform=PixelTransform((0.5,), (0.0,))),
            "Own, whose transform makes NaN or infinity in task 1' cannot work; valid: finite numbers",
        ),
        (
            own_but(transform=PixelTransform((0.5,), (0.5,), pixel_map=torch.arange(4))),
            "Own, whose pixel_map is int64 [4] in task 1' cannot work; valid: int64 [16]",
        ),
        (
            own_but(transform=PixelTransform((0.5,), (0.5,), pixel_map=torch.arange(1, 17))),
            "Own, whose pixel_map runs from 1 to 16 in task 1' cannot work; valid: -1 for black, else 0 to 15",
        ),
    ],
)
def test_a_stream_that_is_not_what_it_announces_is_refused(changes: dict[str, Any], said: str) -> None:
    stream = Own()
    for name, value in changes.items():
        setattr(stream, name, value)
    with pytest.raises(ConfigError, match=f"^data.stream = [\"']{re.escape(said)}"):
        tiny_data(stream, num_clients=2, partition=IID()).setup("fit")


# Permuted


def test_a_source_that_announces_what_cannot_be_is_refused_behind_a_stream_of_ones_own() -> None:
    stream = Own()
    stream.source = Noise(num_classes=0)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"^data\.stream\.source = 'Noise, whose num_classes is 0' cannot work"):
        tiny_data(stream, num_clients=2, partition=IID())


def test_permutations_are_bijections_that_move_all_channels_together() -> None:
    source = Noise(channels=3)
    stream = Permuted(source, num_tasks=3)
    tasks = stream.tasks(ROOT, seed=0)
    original = normalised(tasks[0].train.images, source)
    np.testing.assert_allclose(tasks[0].transform(tasks[0].train.images).numpy(), original, atol=1e-5)
    for t in (1, 2):
        pixel_map = tasks[t].transform.pixel_map
        assert pixel_map is not None
        assert sorted(pixel_map.tolist()) == list(range(35))
        out = tasks[t].transform(tasks[t].train.images).numpy()
        for c in range(3):
            expected = original[:, c].reshape(-1, 35)[:, pixel_map.numpy()].reshape(-1, 7, 5)
            np.testing.assert_allclose(out[:, c], expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 2, 7, 5), (3, 2, 7, 5), (700, 2, 7, 5), (5, 300, 1, 7, 5)])
def test_a_pixel_map_is_the_definition_for_few_images_and_for_many(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    pixel_map = torch.randint(-1, 35, (35,), generator=generator)
    found = PixelTransform((0.1, 0.2), (0.3, 0.4), pixel_map=pixel_map).mapped(images)
    flat, expected = images.flatten(-2).numpy(), np.zeros((*shape[:-2], 35), dtype=np.uint8)
    for p, place in enumerate(pixel_map.tolist()):
        if place >= 0:
            expected[..., p] = flat[..., place]
    assert found.shape == images.shape
    np.testing.assert_array_equal(found.flatten(-2).numpy(), expected)


def test_permutation_depends_on_seed_and_task_only() -> None:
    long, short = Permuted(Noise(), num_tasks=6), Permuted(Noise(), num_tasks=2)
    later_first = {t: long.pixel_map(t, seed=5) for t in (5, 3, 1)}
    maps = [task.transform.pixel_map for task in long.tasks(ROOT, seed=5)]
    for t, pixel_map in later_first.items():
        assert torch.equal(pixel_map, maps[t])
    assert torch.equal(short.pixel_map(1, 5), maps[1])
    assert len({tuple(m.tolist()) for m in maps[1:]}) == 5
    assert not torch.equal(long.pixel_map(1, seed=6), maps[1])


@pytest.mark.parametrize("first_is_identity", [True, False])
def test_first_permutation(first_is_identity: bool) -> None:
    maps = [t.transform.pixel_map for t in Permuted(Noise(), 2, first_is_identity).tasks(ROOT, seed=0)]
    assert (maps[0] is None) == first_is_identity
    if not first_is_identity:
        assert maps[0].tolist() != list(range(35))
    assert torch.equal(maps[1], Permuted(Noise(), 2).pixel_map(1, 0))


@pytest.mark.parametrize("kind", [Permuted, Rotated])
def test_tasks_share_one_copy_of_the_data(kind: type[Permuted] | type[Rotated]) -> None:
    source = CountingNoise()
    tasks = kind(source, num_tasks=4).tasks(ROOT, seed=0)
    assert source.loads == 1
    assert all(task.train is tasks[0].train and task.test is tasks[0].test for task in tasks)


# Rotated


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(28, 28), (8, 8), (7, 12)])
def test_rotation_equals_torchvision_pixel_for_pixel(channels: int, height: int, width: int) -> None:
    from PIL import Image
    from torchvision.transforms.functional import rotate

    source = Noise(channels=channels, height=height, width=width, scale=1.0)
    source.mean, source.std = (0.0,) * channels, (1.0,) * channels
    stream = Rotated(source, num_tasks=12, max_degrees=360)
    for t, task in enumerate(stream.tasks(ROOT, seed=1)):
        image = task.train.images[t]
        rotated = rotate(Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()), stream.angle(t, 1))
        expected = np.asarray(rotated).reshape(height, width, channels).transpose(2, 0, 1)
        np.testing.assert_array_equal(task.transform(image).numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("degrees", [0.0, 0.001, 33.3, 90.0, 179.999, 180.0, 270.0])
def test_rotation_map_equals_torchvision_on_a_drawn_digit(degrees: float) -> None:
    from PIL import Image
    from sklearn.datasets import load_digits
    from torchvision.transforms.functional import rotate

    from cfl.data.streams.rotated import rotation_map

    digit = np.kron(load_digits().images[7], np.ones((3, 3))).astype(np.uint8)
    expected = np.asarray(rotate(Image.fromarray(digit), degrees))
    pixel_map = rotation_map(24, 24, degrees).numpy()
    ours = np.where(pixel_map >= 0, digit.ravel()[pixel_map], 0).reshape(24, 24)
    np.testing.assert_array_equal(ours, expected)


def test_angles_are_keyed_and_uniform() -> None:
    stream = Rotated(Noise(), num_tasks=3, max_degrees=120)
    angles = np.array([stream.angle(t, seed) for seed in range(200) for t in range(3)])
    assert len(np.unique(angles)) == 600
    assert angles.min() >= 0
    assert angles.max() < 120
    np.testing.assert_allclose(np.quantile(angles, [0.25, 0.5, 0.75]), [30, 60, 90], atol=8)  # four standard errors
    assert Rotated(Noise(), 9, 120).angle(2, 7) == stream.angle(2, 7)
    assert stream.angle(0, 0) > 0
    assert Rotated(Noise(), 3, first_is_identity=True).angle(0, 0) == 0
    assert Rotated(Noise(), 3, first_is_identity=True).tasks(ROOT, 0)[0].transform.pixel_map is None


@pytest.mark.parametrize("degrees", [0.0, -5.0, 361.0, float("nan")])
def test_bad_angles_are_refused(degrees: float) -> None:
    with pytest.raises(ConfigError, match=r"data\.stream\.max_degrees = .*in \(0, 360\]"):
        Rotated(Noise(), 2, degrees)


def test_given_angles_are_used_with_every_seed() -> None:
    given, drawn = Rotated(Noise(), 3, angles=[10.0, 0.0, -200.5]), Rotated(Noise(), 3)
    assert [given.angle(t, seed) for seed in (0, 7) for t in range(3)] == [10.0, 0.0, -200.5] * 2
    assert given.tasks(ROOT, 0)[1].transform.pixel_map is None
    again = Rotated(Noise(), 3, angles=[drawn.angle(t, 5) for t in range(3)])
    for task, other in zip(again.tasks(ROOT, 0), drawn.tasks(ROOT, 5), strict=True):
        assert torch.equal(task.transform.pixel_map, other.transform.pixel_map)


@pytest.mark.parametrize("angles", [[1.0], [1.0, 2.0, 3.0], [1.0, float("nan")]])
def test_angles_that_do_not_fit_the_tasks_are_refused(angles: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"data\.stream\.angles = .*num_tasks = 2 finite numbers"):
        Rotated(Noise(), 2, angles=angles)


# ClassSplit


@pytest.mark.parametrize("order", ["natural", "seeded"])
@pytest.mark.parametrize(
    ("num_tasks", "classes_per_task"), [(5, None), (3, 3), (10, 1), (4, [4, 1, 3, 2]), (2, [5, 1])]
)
def test_local_labels_map_back_to_the_source(order: str, num_tasks: int, classes_per_task: Any) -> None:
    source = Noise()
    stream = ClassSplit(source, num_tasks, classes_per_task, order)
    groups, tasks = stream.class_groups(seed=4), stream.tasks(ROOT, seed=4)
    used = [k for group in groups for k in group]
    assert len(used) == len(set(used)) == sum(stream.classes_per_task)
    for part, whole in zip(("train", "test"), source.load(ROOT), strict=True):
        label_of = {image.numpy().tobytes(): int(k) for image, k in zip(whole.images, whole.labels, strict=True)}
        seen = 0
        for group, task in zip(groups, tasks, strict=True):
            images = getattr(task, part)
            for image, local in zip(images.images, images.labels, strict=True):
                assert label_of[image.numpy().tobytes()] == group[int(local)]
            seen += len(images)
        assert seen == len(whole) * len(used) // 10


def test_natural_order_is_consecutive_and_seeded_order_is_keyed() -> None:
    natural = ClassSplit(Noise(), 5)
    assert natural.class_groups(0) == natural.class_groups(1) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert [task.name for task in natural.tasks(ROOT, 0)][:2] == ["noise classes 0-1", "noise classes 2-3"]
    seeded = ClassSplit(Noise(num_classes=100), 10, class_order="seeded")
    assert seeded.class_groups(0) == seeded.class_groups(0) != seeded.class_groups(1)
    assert sorted(k for group in seeded.class_groups(0) for k in group) == list(range(100))
    few = ClassSplit(Noise(num_classes=100), 3, 10, class_order="seeded")
    assert few.class_groups(0) == seeded.class_groups(0)[:3]


def test_tasks_may_have_different_numbers_of_classes() -> None:
    stream = ClassSplit(Noise(num_classes=100), 6, [50, 10, 10, 10, 10, 10])
    assert stream.class_groups(0) == [list(range(50)), *(list(range(k, k + 10)) for k in range(50, 100, 10))]
    assert [task.num_classes for task in stream.tasks(ROOT, 0)] == stream.classes_per_task
    other = ClassSplit(Noise(), 3, [3, 1, 2], task_order=[2, 0, 1])
    assert other.class_groups(0) == [[4, 5], [0, 1, 2], [3]]
    assert other.classes_per_task == [2, 3, 1]


@pytest.mark.parametrize("scenario", ["class", "task"])
def test_tasks_with_different_numbers_of_classes_have_outputs_of_their_own(scenario: Any) -> None:
    data = tiny_data(ClassSplit(Noise(num_classes=8), 3, [4, 2, 2]), scenario=scenario, num_clients=2)
    assert data.num_outputs == 8
    for task, own in enumerate([[0, 1, 2, 3], [4, 5], [6, 7]]):
        _, y = data.gather(task, torch.from_numpy(np.concatenate([*data.indices[task].values()])))
        assert sorted(set(y.tolist())) == own
        allowed = data.outputs_in_loss(task, 0)
        assert allowed is None if scenario == "class" else allowed.nonzero().flatten().tolist() == own


def test_impossible_class_splits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.stream\.num_tasks = 3 .*valid: 2, as many as .*classes_per_task"):
        ClassSplit(Noise(), 3, [5, 5])
    impossible: Any
    for impossible in ([6, 5], [10, 0], [-1, 3], [], [2.5, 3], ["2", 3], [True, 3]):
        with pytest.raises(ConfigError, match=r"data\.stream\.classes_per_task = \[.*from 1 with a sum of at most 10"):
            ClassSplit(Noise(), 2, impossible)
    with pytest.raises(ConfigError, match=r"data\.stream\.task_order = 'seeded' .*different sizes"):
        ClassSplit(Noise(), 2, [6, 4], task_order="seeded")
    with pytest.raises(ConfigError, match=r"data\.stream\.num_tasks = 3 .*10 classes of noise \(1, 2, 5, 10\)"):
        ClassSplit(Noise(), 3)
    with pytest.raises(ConfigError, match=r"data\.stream\.num_tasks = 4 .*at most 3 tasks of 3 classes"):
        ClassSplit(Noise(), 4, 3)
    with pytest.raises(ConfigError, match=r"data\.stream\.classes_per_task = 11 .*between 1 and 10"):
        ClassSplit(Noise(), 1, 11)
    for impossible in (0, 2.5, (5, 5)):
        with pytest.raises(ConfigError, match=r"data\.stream\.classes_per_task = .*an integer between 1 and 10"):
            ClassSplit(Noise(), 2, impossible)
    with pytest.raises(ConfigError, match=r"data\.stream\.class_order = 'random' .*natural, seeded or superclass"):
        ClassSplit(Noise(), 2, class_order="random")


def test_tasks_come_in_another_order_as_they_are():
    given = ClassSplit(Noise(num_classes=12), 4)
    groups = given.class_groups(0)
    listed = ClassSplit(Noise(num_classes=12), 4, task_order=[2, 0, 3, 1])
    assert listed.class_groups(0) == listed.class_groups(5) == [groups[2], groups[0], groups[3], groups[1]]
    tasks = listed.tasks(Path(), 0)
    assert [task.name for task in tasks] == [given.tasks(Path(), 0)[old].name for old in (2, 0, 3, 1)]
    assert torch.equal(tasks[1].train.images, given.tasks(Path(), 0)[0].train.images)
    seeded = [ClassSplit(Noise(num_classes=12), 4, task_order="seeded").class_groups(seed) for seed in range(40)]
    assert all(sorted(order) == groups for order in seeded)
    assert seeded[3] == ClassSplit(Noise(num_classes=12), 4, task_order="seeded").class_groups(3)
    assert {groups.index(order[0]) for order in seeded} == {0, 1, 2, 3}


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 2, 2], [1, 2, 3, 4], "random"])
def test_a_list_that_is_no_order_of_the_tasks_is_refused(order):
    with pytest.raises(ConfigError, match=r"data\.stream\.task_order .*0 to 3, each once"):
        ClassSplit(Noise(num_classes=12), 4, task_order=order)


@pytest.mark.parametrize("kind", [Permuted, Rotated, ClassSplit])
def test_a_stream_needs_a_task(kind: type[Permuted]) -> None:
    with pytest.raises(ConfigError, match=r"data\.stream\.num_tasks = 0 .*at least 1"):
        kind(Noise(), 0)


# Sequence


def test_sequence_pads_before_normalising_and_repeats_grey_channels() -> None:
    colour = Noise("colour", channels=3, height=32, width=32, num_classes=4)
    gray = Noise("gray", channels=1, height=28, width=27, num_classes=2, scale=16.0)
    stream = Sequence([colour, gray])
    assert stream.shape == (3, 32, 32)
    assert stream.classes_per_task == [4, 2]
    first, second = stream.tasks(ROOT, seed=0)
    np.testing.assert_allclose(
        first.transform(first.test.images).numpy(), normalised(colour.load(ROOT)[1].images, colour), atol=1e-5
    )
    stored = gray.load(ROOT)[1].images.numpy()
    framed = np.zeros((len(stored), 1, 32, 32), dtype=np.uint8)
    framed[:, :, 2:30, 2:29] = stored  # 2 | 28 | 2 rows and 2 | 27 | 3 columns
    expected = np.repeat(normalised(torch.from_numpy(framed), gray), 3, axis=1)
    np.testing.assert_allclose(second.transform(second.test.images).numpy(), expected, atol=1e-5)
    batch = second.train.images[torch.tensor([3, 0])]
    assert batch.shape == (2, 3, 32, 32)


def test_grey_sequences_stay_grey_and_repeated_channels_take_no_memory() -> None:
    assert Sequence([Noise(), Noise(height=9)]).shape == (1, 9, 5)
    repeated = Sequence([Noise(channels=3), Noise()]).tasks(ROOT, 0)[1].train.images
    assert repeated.untyped_storage().nbytes() == len(repeated) * 7 * 5


def test_impossible_sequences_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.stream\.sources = \[\] .*at least one source"):
        Sequence([])
    with pytest.raises(ConfigError, match=r"data\.stream\.sources .*b: 3 channels.*same number of channels"):
        Sequence([Noise("a", channels=2), Noise("b", channels=3), Noise("c")])


class Grouped(Noise):
    superclasses = ((7, 2), (0, 9), (4, 5))


class Overlapping(Noise):
    superclasses = ((7, 2), (2, 9))


def test_superclasses_become_tasks() -> None:
    stream = ClassSplit(Grouped(), 3, class_order="superclass")
    assert stream.class_groups(5) == [[7, 2], [0, 9], [4, 5]]
    assert stream.classes_per_task == [2, 2, 2]
    train, _ = stream.source.load(ROOT)
    task = stream.tasks(ROOT, 0)[1]
    expected = train.images[(train.labels == 0) | (train.labels == 9)]
    assert torch.equal(task.train.images, expected)
    assert torch.equal(task.train.labels, (train.labels[(train.labels == 0) | (train.labels == 9)] == 9).long())


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: ClassSplit(Noise(), 2, class_order="superclass"), "data.stream.class_order"),
        (lambda: ClassSplit(Overlapping(), 2, class_order="superclass"), "data.stream.source"),
        (lambda: ClassSplit(Grouped(), 4, class_order="superclass"), "data.stream.num_tasks"),
        (lambda: ClassSplit(Grouped(), 3, 3, class_order="superclass"), "data.stream.classes_per_task"),
        (lambda: Mixture([]), "data.stream.sources"),
        (lambda: Mixture([Noise()], classes_per_task=0), "data.stream.classes_per_task"),
        (lambda: Mixture([Noise()], [3]), "data.stream.tasks_per_source"),
        (lambda: Mixture([Noise()], max_train=4), "data.stream.max_train"),
        (lambda: Mixture([Noise()], [1, 1]), "data.stream.tasks_per_source"),
        (lambda: Mixture([Noise()], classes_per_task=11), "data.stream.classes_per_task"),
    ],
)
def test_groups_that_cannot_be(make: Callable[[], Stream], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.key == key


def test_mixture_cuts_every_source_into_tasks_of_a_few_classes() -> None:
    sources = [Noise("a", channels=3, num_classes=9), Noise("b", height=9)]
    stream = Mixture(list(sources), [1, 3], classes_per_task=3)
    assert stream.shape == (3, 9, 5)
    tasks = stream.tasks(ROOT, 0)
    assert [task.name for task in tasks] == ["a_0", "b_0", "b_1", "b_2"]
    assert [task.num_classes for task in tasks] == [3] * 4 == stream.classes_per_task
    again = Mixture(list(sources), [1, 3], classes_per_task=3).tasks(ROOT, 99)
    assert all(torch.equal(a.train.images, b.train.images) for a, b in zip(tasks, again, strict=True))
    other = Mixture(list(sources), [1, 3], classes_per_task=3, class_seed=1).tasks(ROOT, 0)
    assert any(not torch.equal(a.train.images, b.train.images) for a, b in zip(tasks, other, strict=True))
    few = Mixture(list(sources), [1, 3], classes_per_task=3, max_train=7).tasks(ROOT, 0)
    for whole, part in zip(tasks, few, strict=True):
        assert part.train.labels.bincount().tolist() == [3, 2, 2]
        everything = {image.numpy().tobytes() for image in whole.train.images}
        assert {image.numpy().tobytes() for image in part.train.images} <= everything
        assert torch.equal(part.test.images, whole.test.images)
    images, _ = sources[1].load(ROOT)
    flat = {image.numpy().tobytes(): int(label) for image, label in zip(images.images, images.labels, strict=True)}
    seen: list[int] = []
    for task in tasks[1:]:
        assert torch.equal(task.train.images[:, 0], task.train.images[:, 2])
        own = [flat[image[:1].contiguous().numpy().tobytes()] for image in task.train.images]
        classes = {
            label: {o for o, y in zip(own, task.train.labels.tolist(), strict=True) if y == label} for label in range(3)
        }
        assert all(len(group) == 1 for group in classes.values())
        assert len(own) == 18
        seen += [next(iter(group)) for group in classes.values()]
    assert len(seen) == len(set(seen)) == 9
    assert tasks[1].transform.mean == (0.1, 0.1, 0.1)


def test_rows_of_numbers_are_not_rotated() -> None:
    with pytest.raises(ConfigError, match=r"Rotated of rows, whose samples are rows of numbers' cannot.*Permuted"):
        Rotated(Noise("rows", height=1, width=6))
    assert Rotated(Noise("column", height=6, width=1)).shape == (1, 6, 1)
