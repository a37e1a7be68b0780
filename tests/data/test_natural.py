"""The partition ``Natural``: the data say which client each sample belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import tiny_cli
from support.tiny import tiny_data

from cfl.data.participation import Holders
from cfl.data.partitions import Natural
from cfl.data.sources import Arrays, Binarised, ImageFolder
from cfl.data.streams import ClassSplit, Permuted, Sequence
from cfl.runtime.errors import ConfigError, DataFilesMissing

WRITERS = np.array(["zoe", "bob", "amy"])[np.random.default_rng(1).integers(0, 3, 60)]


def file(folder: Path, **other: Any) -> str:
    """Write sixty images whose first pixel is their number."""
    images = np.zeros((60, 4, 4), dtype=np.uint8)
    images[:, 0, 0] = np.arange(60)
    labels = np.arange(60) % 4
    np.savez(
        folder / "w.npz",
        **{
            "train_images": images,
            "train_labels": labels,
            "test_images": images[:8] + 100,
            "test_labels": labels[:8],
            "train_clients": WRITERS,
            **other,
        },
    )
    return str(folder / "w.npz")


def numbers(data: Any, task: int, client: int) -> set[int]:
    """The numbers of a client's samples in a task, read from their first pixels."""
    of_task = data.tasks[task].train.images
    return set(of_task[torch.from_numpy(data.indices[task][client])][:, 0, 0, 0].tolist())


def test_names_in_bytes_are_the_same_names_as_texts(tmp_path: Path) -> None:
    stored = np.char.encode(WRITERS, "utf-8")
    path = file(tmp_path, train_clients=stored, test_clients=np.array(["bob", "zoe"] * 4))
    task = tiny_data(Permuted(Arrays(path), 1), partition=Natural(), num_clients=3).tasks[0]
    assert task.train.client_names == ("amy", "bob", "zoe")
    assert task.test.clients is not None
    assert task.test.clients.tolist() == [1, 2] * 4
    with pytest.raises(DataFilesMissing, match="train_clients hold names that are no texts in UTF-8"):
        Arrays(file(tmp_path, train_clients=np.array([b"\xff", b"a"] * 30))).load(tmp_path)


def test_merged_sets_number_their_clients_alike(tmp_path: Path) -> None:
    """Training and test set of the file number their own clients; amy has no test sample. Pixels tell whose each is."""
    bits = {"amy": [0, 1], "bob": [1, 0], "zoe": [1, 1]}
    testers = np.array(["zoe", "bob"] * 14)
    images = [np.array([[bits[name], [0, 1]] for name in owners], np.uint8) * 255 for owners in (WRITERS, testers)]
    labels = [np.arange(len(owners)) % 2 for owners in (WRITERS, testers)]
    stored = {"train_images": images[0], "test_images": images[1], "train_labels": labels[0], "test_labels": labels[1]}
    np.savez(tmp_path / "b.npz", **stored, train_clients=WRITERS, test_clients=testers)
    source = Binarised(Arrays(str(tmp_path / "b.npz")), split="merged")
    data = tiny_data(Permuted(source, 1), partition=Natural(), num_clients=3, scenario="density")
    for client, name in enumerate(("amy", "bob", "zoe")):
        own = data.tasks[0].train.images[torch.from_numpy(data.indices[0][client])]
        assert len(own) > 0
        assert (own[:, 0, 0] == torch.tensor(bits[name])).all()
        tested = data.tasks[0].test.clients == client
        assert (data.tasks[0].test.images[tested][:, 0, 0] == torch.tensor(bits[name])).all()


@pytest.mark.parametrize("repartition", [True, False])
@pytest.mark.parametrize("kind", [Permuted, ClassSplit])
def test_every_client_has_its_own_samples_in_every_task(kind: Any, repartition: bool, tmp_path: Path) -> None:
    """Clients are numbered in the order of their names. Each has its own samples of a task's classes."""
    data = tiny_data(kind(Arrays(file(tmp_path)), 2), partition=Natural(), num_clients=3, repartition=repartition)
    for client, name in enumerate(("amy", "bob", "zoe")):
        own = set(np.flatnonzero(name == WRITERS).tolist())
        for task in range(2):
            classes = {0, 1, 2, 3} if kind is Permuted else {2 * task, 2 * task + 1}
            assert numbers(data, task, client) == {number for number in own if number % 4 in classes}


def test_clients_stay_with_their_samples_in_a_smaller_set_and_beside_another(tmp_path: Path) -> None:
    source = Arrays(file(tmp_path), max_train=20)
    data = tiny_data(Sequence([source, Arrays(file(tmp_path))]), partition=Natural(), num_clients=3)
    found = [numbers(data, 0, client) for client in range(3)]
    assert sum(map(len, found)) == 20
    for client, name in enumerate(("amy", "bob", "zoe")):
        assert {str(WRITERS[number]) for number in found[client]} == {name}


@pytest.mark.parametrize("others", [("zoe", "carl"), (20, 3)])
def test_a_client_is_the_same_one_in_several_data_sets(others: tuple[Any, Any], tmp_path: Path) -> None:
    """Clients are numbered by their names in all data sets together, also if one of them is missing in a data set."""
    folders = [tmp_path / "first", tmp_path / "second"]
    owners = [WRITERS, np.array(others)[np.arange(60) % 2]]
    for folder in folders:
        folder.mkdir()
    sources = [Arrays(file(at, train_clients=owner)) for at, owner in zip(folders, owners, strict=True)]
    names = sorted({*map(str, WRITERS), *map(str, others)})
    data = tiny_data(Sequence(sources), partition=Natural(), num_clients=len(names), participation=Holders())
    for task, owner in enumerate(owners):
        held = [client for client, name in enumerate(names) if name in owner.astype(str)]
        assert data.members[task].tolist() == held
        for client in held:
            assert numbers(data, task, client) == set(np.flatnonzero(owner.astype(str) == names[client]).tolist())


def test_numbers_of_clients_in_several_data_sets_keep_their_order(tmp_path: Path) -> None:
    """Client 20 comes behind client 3, and is not the second client of a data set that has only 3 and 20."""
    (tmp_path / "first").mkdir()
    sources = [
        Arrays(file(tmp_path / "first", train_clients=np.arange(60) % 4)),
        Arrays(file(tmp_path, train_clients=np.where(np.arange(60) % 2, 20, 3))),
    ]
    data = tiny_data(Sequence(sources), partition=Natural(), num_clients=5, participation=Holders())
    assert [members.tolist() for members in data.members] == [[0, 1, 2, 3], [3, 4]]


def test_only_holders_of_a_task_take_part(tmp_path: Path) -> None:
    """A client without samples of a task (zoe) does not take part in it."""
    writers = np.where(np.arange(60) % 4 < 2, np.array(["zoe", "amy"])[np.arange(60) // 4 % 2], "amy")
    stream = ClassSplit(Arrays(file(tmp_path, train_clients=writers)), 2)
    data = tiny_data(stream, partition=Natural(), num_clients=2, participation=Holders())
    assert [members.tolist() for members in data.members] == [[0, 1], [0]]
    with pytest.raises(ConfigError, match=r"client 1 has no sample of task 1.*Holders"):
        _ = tiny_data(stream, partition=Natural(), num_clients=2).indices


def test_samples_of_clients_that_stay_away_are_nobodys() -> None:
    shares = Natural().deal(np.zeros(6), np.array([3, 0, 2, 1, 2, 3]), np.array([0, 2]), np.random.default_rng(0))
    assert [share.tolist() for share in shares] == [[1], [2, 4]]


def test_folders_within_those_of_classes_are_clients(tmp_path: Path) -> None:
    for number in range(24):
        for part in ("train", "test"):
            name, client = "ab"[number % 2], ("u7", "u12", "u3")[number // 2 % 3]
            place = tmp_path / part / name / client / f"{number:02d}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4), number + (100 if part == "test" else 0)).save(place)
    data = tiny_data(Permuted(ImageFolder(str(tmp_path), [1, 4, 4]), 2), partition=Natural(), num_clients=3)
    for client, place in enumerate((1, 2, 0)):  # u12, u3, u7
        assert numbers(data, 0, client) == {number for number in range(24) if number // 2 % 3 == place}
        test = data.tasks[1].test
        assert test.clients is not None
        assert {*(test.images[test.clients == client, 0, 0, 0] - 100).tolist()} == numbers(data, 0, client)
    stray = Image.new("L", (4, 4), 50)
    stray.save(tmp_path / "train" / "a" / "of-nobody.png")
    with pytest.raises(ConfigError, match=r"data\.partition = 'Natural' .*do not tell whose"):
        _ = tiny_data(Permuted(ImageFolder(str(tmp_path), [1, 4, 4]), 2), partition=Natural(), num_clients=3).indices


def test_the_number_of_clients_is_that_of_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``data.num_clients`` must be the number of clients in the data. A run whose data changed owners is refused."""
    stream = ("--data.stream.source", "Arrays", "--data.stream.source.path", file(tmp_path))
    given = (*stream, "--data.partition", "Natural", "--schedule.rounds_per_task", "1")
    assert tiny_cli.fit(tmp_path / "run", *given) == 2
    said = capsys.readouterr().err
    assert "data.num_clients = 4 cannot work; valid: 3, the clients whose samples the data hold" in said
    assert tiny_cli.fit(tmp_path / "run", *given, "--data.num_clients", "3") == 0
    counts = {int(row["client"]): int(row["samples"]) for row in tiny_cli.rows(tmp_path / "run" / "partition.csv")}
    assert counts == {k: int((name == WRITERS).sum()) for k, name in enumerate(("amy", "bob", "zoe"))}
    file(tmp_path, train_clients=np.roll(WRITERS, 1))
    assert tiny_cli.run("validate", "--ckpt_path", str(tmp_path / "run" / "last.ckpt")) == 2
    assert "those of clients have changed since" in capsys.readouterr().err
