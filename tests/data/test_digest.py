"""Digests of samples: every change of the samples changes them, and checkpoints resume on the same samples only."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_cli
from support.tiny import permuted, split, tiny_data

from cfl.data.digest import data_digests
from cfl.data.types import ImageSet, Task
from cfl.runtime.checkpoint_file import write_checkpoint


def tasks() -> list[Task]:
    return split().tasks(Path(), 0)


def with_train(change: Any) -> dict[str, str]:
    """Digests of two tasks after ``change`` was applied to the second task's training set."""
    first, second = tasks()
    return data_digests([first, replace(second, train=change(second.train))])


def test_digests_repeat_and_say_which_set() -> None:
    digests = data_digests(tasks())
    assert digests == data_digests(tasks())
    assert digests["train"] != digests["test"]
    first, second = tasks()
    changed = data_digests([first, replace(second, test=second.train)])
    assert changed["train"] == digests["train"]
    assert changed["test"] != digests["test"]


def one_pixel(samples: ImageSet) -> ImageSet:
    images = samples.images.clone()
    images[-1, -1, -1, -1] += 1
    return ImageSet(images, samples.labels)


def one_label(samples: ImageSet) -> ImageSet:
    labels = samples.labels.clone()
    labels[-1] = 1 - labels[-1]
    return ImageSet(samples.images, labels)


def reordered(samples: ImageSet) -> ImageSet:
    return samples.subset(torch.arange(len(samples)).flip(0))


def one_less(samples: ImageSet) -> ImageSet:
    return samples.subset(torch.arange(len(samples) - 1))


def reshaped(samples: ImageSet) -> ImageSet:
    return ImageSet(samples.images.reshape(-1, 1, 2, 8), samples.labels)


@pytest.mark.parametrize("change", [one_pixel, one_label, reordered, one_less, reshaped])
def test_any_change_is_told(change: Any) -> None:
    changed, before = with_train(change), data_digests(tasks())
    assert changed["train"] != before["train"]
    assert changed["test"] == before["test"]


def test_how_images_lie_in_memory_is_no_difference() -> None:
    def transposed(samples: ImageSet) -> ImageSet:
        images = samples.images.mT.contiguous().mT
        assert not images.is_contiguous()
        return ImageSet(images, samples.labels)

    assert with_train(transposed) == data_digests(tasks())


def test_the_order_of_tasks_counts() -> None:
    first, second = tasks()
    assert data_digests([second, first])["train"] != data_digests([first, second])["train"]


def test_tasks_that_share_images_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = permuted(tasks=7).tasks(Path(), 0)
    read: list[int] = []
    monkeypatch.setattr(torch.Tensor, "numpy", lambda self, call=torch.Tensor.numpy: read.append(1) or call(self))
    data_digests(shared)
    assert len(read) == 4  # images and labels of both sets


def test_a_data_module_knows_its_tasks_by_them() -> None:
    data = tiny_data()
    assert data.state_dict() == {"digests": data_digests(data.tasks), "files": {}}
    assert data.digests == tiny_data(num_clients=2).digests
    data.load_state_dict(data.state_dict())


# A run whose files change.


def packed(path: Path, seed: int = 0, test_seed: int = 1) -> None:
    def part(seed: int, size: int) -> tuple[Any, Any]:
        random = np.random.default_rng(seed)
        return random.integers(0, 256, (size, 4, 4), dtype=np.uint8), np.arange(size) % 4

    (images, labels), (test_images, test_labels) = part(seed, 96), part(test_seed, 40)
    np.savez(path, train_images=images, train_labels=labels, test_images=test_images, test_labels=test_labels)


def options(path: Path) -> list[str]:
    source = {"class_path": "Arrays", "init_args": {"path": str(path), "shape": [1, 4, 4], "num_classes": 4}}
    stream = {"class_path": "Permuted", "init_args": {"num_tasks": 2, "source": source}}
    return ["--data.stream", json.dumps(stream)]


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """The folder of an interrupted run, with the run's data file beside it."""
    packed(tmp_path / "data.npz")
    with tiny_cli.die_at("training", 1, signal.SIGTERM):
        assert tiny_cli.fit(tmp_path / "run", *options(tmp_path / "data.npz")) == 143
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"seed": 2}, "those of train have"), ({"test_seed": 2}, "test have"), ({"seed": 2, "test_seed": 3}, "train and")],
)
@pytest.mark.parametrize("command", ["fit", "validate"])
def test_a_run_does_not_go_on_with_other_samples(
    interrupted: Path, changed: dict[str, int], said: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = interrupted.with_name("data.npz")
    packed(data, **changed)
    before = {path: path.read_bytes() for path in interrupted.iterdir() if path.is_file()}
    capsys.readouterr()
    assert tiny_cli.run(command, "--ckpt_path", str(interrupted / "last.ckpt")) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ckpt_path = 'a checkpoint of a run on other samples")
    assert said in message
    assert {path: path.read_bytes() for path in interrupted.iterdir() if path.is_file()} == before


def test_a_run_goes_on_with_the_same_samples(interrupted: Path) -> None:
    """A run is resumed on unchanged samples, and its summary holds the digests of the checkpoint."""
    assert tiny_cli.run("fit", "--ckpt_path", str(interrupted / "last.ckpt")) == 0
    held = tiny_cli.checkpoint(interrupted)["FederatedDataModule"]["digests"]
    assert tiny_cli.summary(interrupted)["data_digests"] == held


def test_a_checkpoint_older_than_digests_goes_on(interrupted: Path) -> None:
    checkpoint = tiny_cli.checkpoint(interrupted)
    del checkpoint["FederatedDataModule"]
    write_checkpoint(checkpoint, interrupted / "last.ckpt")
    packed(interrupted.with_name("data.npz"), seed=2)
    assert tiny_cli.run("fit", "--ckpt_path", str(interrupted / "last.ckpt")) == 0
