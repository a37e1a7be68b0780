"""Augmentation: uniform draws by (seed, round, step, task, sample), and the pixels of torchvision's transforms."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny, tiny_cli
from support.tiny import ConvNet, at_round, double, fit, mlp, tiny_client, weights
from torch import Tensor

from cfl.data.augmentation import Augmentation, CropFlip, augmentation_words
from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Dirichlet
from cfl.data.round_loader import RoundLoader
from cfl.data.sources import Features
from cfl.data.streams import Permuted
from cfl.engines import EngineOptions
from cfl.runtime.errors import ConfigError

VMAP = EngineOptions("vmap")


def words(count: int, seed: int = 0, round: int = 3, step: int = 1, task: int = 0) -> Tensor:
    return augmentation_words(seed, round, step, task, torch.arange(count))


def images(*shape: int) -> Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


# One image.


@pytest.mark.parametrize("padding", [1, 2, 4])
@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 5, 7), (3, 84, 84)])
def test_pixels_are_torchvisions(shape: tuple[int, ...], padding: int) -> None:
    """For given draws the pixels are those of ``RandomCrop(size, padding)``, then ``RandomHorizontalFlip``."""
    from torchvision.transforms import functional

    before = images(40, *shape)
    kept, given = before.clone(), words(40)
    augmentation = CropFlip(padding)
    top, left, mirrored = augmentation.draws(given)
    assert {*mirrored.tolist()} == {True, False}
    for image, found, row, column, mirror in zip(
        before, augmentation(before, given), top.tolist(), left.tolist(), mirrored.tolist(), strict=True
    ):
        expected = functional.crop(functional.pad(image, [padding] * 4), row, column, *shape[1:])
        assert torch.equal(found, functional.hflip(expected) if mirror else expected)
    assert torch.equal(before, kept)


def test_draws_are_uniform_and_independent() -> None:
    """Chi-square over the 9 x 9 x 2 outcomes; 161 degrees of freedom, mean 161, standard deviation 18."""
    n = 200_000
    top, left, mirrored = CropFlip(4).draws(words(n))
    counts = torch.bincount((top * 9 + left) * 2 + mirrored, minlength=162).double()
    assert len(counts) == 162
    assert float(((counts - n / 162) ** 2 / (n / 162)).sum()) < 161 + 5 * 18


def test_draws_of_a_sample_are_independent_over_steps_and_rounds() -> None:
    """Chi-square over 18 x 18 pairs of outcomes: of successive steps, of successive rounds, of neighbouring samples."""
    moments = torch.stack(
        [augmentation_words(5, round, step, 0, torch.tensor([17, 18])) for round in range(2_000) for step in range(10)]
    )
    top, left, mirrored = CropFlip(1).draws(moments[:, 0])
    outcome = (top * 3 + left) * 2 + mirrored
    top, left, mirrored = CropFlip(1).draws(moments[:, 1])
    neighbour = (top * 3 + left) * 2 + mirrored
    for joint in (outcome[:-1] * 18 + outcome[1:], outcome[:-10] * 18 + outcome[10:], outcome * 18 + neighbour):
        expected = len(joint) / 324
        counts = torch.bincount(joint, minlength=324).double()
        assert float(((counts - expected) ** 2 / expected).sum()) < 323 + 5 * (2 * 323) ** 0.5


def test_words_depend_on_everything_they_are_keyed_by() -> None:
    reference = words(50)
    assert torch.equal(words(20), reference[:20])
    for other in (words(50, seed=1), words(50, round=4), words(50, step=2), words(50, task=1)):
        assert not bool((other == reference).any())
    assert len(reference.unique()) == 50


def test_without_flip_or_without_crop() -> None:
    before, given = images(30, 3, 6, 6), words(30)
    assert not bool(CropFlip(2, flip=False).draws(given)[2].any())
    mirrored = given < 0
    found = CropFlip(0)(before, given)
    assert torch.equal(found[mirrored], before[mirrored].flip(-1))
    assert torch.equal(found[~mirrored], before[~mirrored])


@pytest.mark.parametrize(("options", "value"), [({"padding": -1}, "-1"), ({"padding": 0, "flip": False}, "0")])
def test_bad_options(options: dict[str, Any], value: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.augmentation\.padding = {value} cannot work"):
        CropFlip(**options)


# A round's batches.


def data(width: int = 3, augmentation: Augmentation | None = None, **options: Any) -> FederatedDataModule:
    """Seven clients of 3 to some 24 samples in batches of 4, two epochs: partial batches, clients that finish early."""
    schedule = {"rounds_per_task": 2, "batch_size": 4, "local_epochs": 2, "cohort_width": width}
    partition = Dirichlet(alpha=0.5, min_samples=3, balance=False)
    return tiny.tiny_data(
        options.pop("stream", None),
        num_clients=7,
        partition=partition,
        schedule=schedule,
        augmentation=augmentation,
        **options,
    )


def batches(module: FederatedDataModule, round: int, width: int) -> list[Any]:
    """The batches of a round, as a Trainer would pass them to the engine."""
    at_round(module, round)
    plan = module.rounds.round(round)
    loader = RoundLoader(plan, module.indices[plan.task], module.schedule.with_width(width), module.seed)
    return [module.on_after_batch_transfer(batch, 0) for batch in loader]


def seen(module: FederatedDataModule, round: int, width: int) -> dict[tuple[int, int], Tensor]:
    """(client, step) -> inputs without padding, fetched for the whole cohort at once."""
    found = {}
    for batch in batches(module, round, width):
        for row, client in enumerate(batch.clients):
            if bool(batch.mask[row].any()):
                found[client, batch.step] = batch.x[row][batch.mask[row]]
    return found


def test_inputs_are_the_same_in_every_cohort_and_every_way_of_fetching() -> None:
    module = data(augmentation=CropFlip(2))
    alone = seen(module, 1, 1)
    assert len(alone) > 30
    for width in (2, 7):
        together = seen(module, 1, width)
        assert set(together) == set(alone)
        assert all(torch.equal(together[key], x) for key, x in alone.items())
    for batch in batches(module, 1, 7):
        x, y = batch.stacked_samples(2, 5)
        assert torch.equal(x, batch.x[2:5])
        assert torch.equal(y, batch.y[2:5])
        for row in range(7):
            one, label = batch.samples(row, 2)
            assert torch.equal(one, batch.x[row, :2])
            assert torch.equal(label, batch.y[row, :2])


@pytest.mark.parametrize("stream", [tiny.permuted(), tiny.split()], ids=["permuted", "split"])
def test_inputs_are_augmented_images_by_hand(stream: Any) -> None:
    """The stored image is augmented first, then permuted, then normalised. Its label stays."""
    module = data(augmentation=CropFlip(1), stream=stream)
    round = 3
    task = module.tasks[1]
    for batch in batches(module, round, 3):
        assert batch.task == 1
        for row, samples in enumerate(batch.index.tolist()):
            for column, sample in enumerate(samples):
                word = augmentation_words(module.seed, round, batch.step, 1, torch.tensor([sample]))
                expected = task.transform(CropFlip(1)(task.train.images[sample][None], word))[0]
                assert torch.equal(batch.x[row, column], expected)
                assert batch.y[row, column] == task.train.labels[sample] + module.outputs.offsets[1]


def test_a_sample_changes_from_epoch_to_epoch_and_round_to_round() -> None:
    module = data(augmentation=CropFlip(2))
    found: dict[int, list[Tensor]] = {}
    for round in (0, 1):
        for batch in batches(module, round, 7):
            for row in range(7):
                for sample, x in zip(batch.index[row][batch.mask[row]].tolist(), batch.x[row], strict=False):
                    found.setdefault(sample, []).append(x)
    assert {len(several) for several in found.values()} == {4}  # two rounds of two epochs
    different = [len({x.numpy().tobytes() for x in several}) for several in found.values()]
    assert sum(different) / len(different) > 3.7  # of 4, with 50 outcomes


def test_samples_of_several_tasks_together() -> None:
    """Samples fetched across tasks equal those fetched task by task. Without (round, step) they are not augmented."""
    module, plain = data(augmentation=CropFlip(2)), data()
    tasks, index = torch.tensor([[0, 1, 1], [0, 0, 1]]), torch.tensor([[5, 5, 3], [3, 79, 3]])
    for moment in (None, (4, 2)):
        x, y = module.inputs.of_tasks(tasks, index, moment)
        for place in [(i, j) for i in range(2) for j in range(3)]:
            one, label = module.gather(int(tasks[place]), index[place], moment)
            assert torch.equal(x[place], one)
            assert torch.equal(y[place], label)
        assert torch.equal(x, plain.inputs.of_tasks(tasks, index, moment)[0]) == (moment is None)


def test_a_batch_that_is_kept_does_not_change() -> None:
    module = data(augmentation=CropFlip(2))
    first = batches(module, 0, 3)[0]
    x = first.samples(0, 2)[0]
    at_round(module, 1)
    assert torch.equal(first.samples(0, 2)[0], x)


def test_tests_and_extra_rounds_see_stored_images() -> None:
    plain, changed = data(), data(augmentation=CropFlip(2))
    for task in (0, 1):
        for client in range(7):
            pairs = zip(
                plain.client_batches(task, client, 5, torch.device("cpu")),
                changed.client_batches(task, client, 5, torch.device("cpu")),
                strict=True,
            )
            assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)
    for one, other in zip(plain.val_dataloader(), changed.val_dataloader(), strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(
                plain.evaluation_batch(a, torch.device("cpu")).x, changed.evaluation_batch(b, torch.device("cpu")).x
            )


# Whole runs.


def trained(width: int, engine: EngineOptions, network: Any, augmentation: Augmentation | None) -> dict[str, Tensor]:
    module = data(width, augmentation)
    return weights(fit(tiny_client(module, network, engine=engine), module))


@pytest.mark.parametrize("network", [mlp, ConvNet], ids=["mlp", "conv"])
def test_width_and_engine_change_nothing(network: Any) -> None:
    network = double(network)
    expected = trained(1, VMAP, network, CropFlip(1))
    runs = [trained(7, VMAP, network, CropFlip(1))]
    runs += [trained(width, EngineOptions("workers", 2), network, CropFlip(1)) for width in (1, 7)]
    for run in runs:
        torch.testing.assert_close(run, expected, rtol=0, atol=1e-12)
    plain = trained(7, VMAP, network, None)
    assert any(float((plain[name] - value).abs().max()) > 1e-4 for name, value in expected.items())


def test_stacked_workers_agree() -> None:
    expected = trained(7, VMAP, mlp, CropFlip(1))
    found = trained(7, EngineOptions("workers", 2, stack=4), mlp, CropFlip(1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


class Nothing(Augmentation):
    """An augmentation that returns the images unchanged."""

    def __call__(self, images: Tensor, words: Tensor) -> Tensor:
        return images


@pytest.mark.parametrize("engine", [VMAP, EngineOptions("workers", 2, 1)], ids=["vmap", "workers"])
def test_an_augmentation_that_changes_nothing_is_none(engine: EngineOptions) -> None:
    plain, found = trained(3, engine, mlp, None), trained(3, engine, mlp, Nothing())
    assert all(torch.equal(found[name], value) for name, value in plain.items())


def test_resumed_equals_straight(tmp_path: Path) -> None:
    make = partial(data, 7, CropFlip(1))
    straight = make()
    expected = weights(fit(tiny_client(straight), straight, callbacks=[tiny.SaveAfter(0, tmp_path / "a.ckpt")]))
    resumed = make()
    found = weights(fit(tiny_client(resumed), resumed, ckpt_path=tmp_path / "a.ckpt"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# The command line.


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    option = ("--data.augmentation", "CropFlip", "--data.augmentation.padding", "1")
    assert tiny_cli.fit(tmp_path / "a", *option) == 0
    assert tiny_cli.fit(tmp_path / "plain") == 0
    a, plain = (tiny_cli.checkpoint(tmp_path / name)["state_dict"] for name in ("a", "plain"))
    assert any(not torch.equal(a[name], value) for name, value in plain.items())
    capsys.readouterr()
    assert tiny_cli.fit(tmp_path / "b", "--data.augmentation", "CropFlop") == 2
    message = "error: data.augmentation = 'CropFlop' cannot work; valid: one of CropFlip"
    assert message in capsys.readouterr().err
    assert tiny_cli.fit(tmp_path / "b", "--data.augmentation", "CropFlip", "--data.augmentation.padding", "-2") == 2
    assert "data.augmentation.padding = -2 cannot work" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_rows_of_numbers_are_not_augmented(tmp_path: Path) -> None:
    rows = {f"{part}_features": torch.rand(40, 6).numpy() for part in ("train", "test")}
    labels = {f"{part}_labels": (torch.arange(40) % 2).numpy() for part in ("train", "test")}
    np.savez(tmp_path / "rows.npz", **rows, **labels)
    with pytest.raises(ConfigError, match=r"data\.augmentation = 'CropFlip' .*null: samples are rows of numbers"):
        tiny.tiny_data(Permuted(Features(str(tmp_path / "rows.npz")), 2), augmentation=CropFlip())
