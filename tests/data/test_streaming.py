"""``streaming`` exposure: each round has the next seconds of a client's samples, each met once and in order."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.tiny import double, fit, mlp, permuted, sgd, split, tiny_client, tiny_data
from torch import Tensor

from cfl.data.cohorts import CohortBatch
from cfl.data.datamodule import FederatedDataModule
from cfl.data.exposure import samples_by_round
from cfl.data.participation import AllClients, Joining, Participation, RandomShare
from cfl.data.partitions import IID, Natural
from cfl.data.samples_of_other_tasks import samples_of_other_tasks
from cfl.data.schedule import RoundPlan
from cfl.data.sources import Binarised, RecordedFrames, Synthetic
from cfl.data.streams import ClassSplit, Mixture, Permuted, Sequence
from cfl.data.types import ImageSet
from cfl.engines.cohort import Cohort
from cfl.methods import AGEM, DER, ER, EWC, SCAFFOLD, FedAGEM, Method
from cfl.runtime.errors import ConfigError


def naive(own: list[int], seconds: np.ndarray, rounds: int, length: float) -> list[list[int]]:
    """Return a client's samples of each round. A sample belongs to the round in which it begins."""
    found: list[list[int]] = [[] for _ in range(rounds)]
    clock = 0.0
    for sample in own:
        round = 0
        while clock >= (round + 1) * length - 1e-6:
            round += 1
        if round < rounds:
            found[round].append(sample)
        clock += seconds[sample]
    return found


@pytest.mark.parametrize("length", [None, 2.5, 4.0])
def test_rounds_have_the_next_seconds_of_every_client(length: float | None) -> None:
    generator = np.random.default_rng(0)
    seconds = generator.choice([1.0, 0.5, 2.0 / 3], 120)
    owner = generator.integers(0, 3, 120)
    held = [{client: np.flatnonzero(owner[:70] == client) for client in range(3)}]
    held.append({client: 70 + np.flatnonzero(owner[70:] == client) for client in (0, 2)})  # client 1 has no second task
    rounds = 6 if length is None else 3
    found = samples_by_round(held, seconds, rounds, length)
    for client in range(3):
        own = np.concatenate([of[client] for of in held if client in of]).tolist()
        each = length or seconds[own].sum() / rounds
        assert [of[client].tolist() for of in found] == naive(own, seconds, rounds, each)
        if length is None:
            assert [*chain(*(of[client].tolist() for of in found))] == own


def test_rounds_without_a_batch_are_refused_where_batches_have_to_be_whole() -> None:
    """A client meets 6, 5, 6 and 5 samples in four rounds. If it keeps them, only the first round may have too few."""

    def sizes(exposure: str, batch_size: int) -> list[int]:
        schedule = {"rounds_per_task": 2, "drop_last": True, "batch_size": batch_size}
        data = tiny_data(permuted(2, train=11), schedule=schedule, exposure=exposure, num_clients=1, partition=IID())
        data.setup("fit")
        return [len(data._met_in(round)[0]) for round in range(4)]

    assert sizes("streaming", 5) == [6, 5, 6, 5]
    assert sizes("streaming-cumulative", 6) == [6, 11, 17, 22]
    with pytest.raises(ConfigError, match=r"at most 5: client 0 has 5 samples of round 1, which is less than .* of 6"):
        sizes("streaming", 6)
    with pytest.raises(ConfigError, match="client 0 has 6 samples of round 0, which is less than one batch of 7"):
        sizes("streaming-cumulative", 7)


def test_only_the_samples_of_a_rounds_own_clients_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_data(permuted(2, train=200), exposure="streaming-cumulative", num_clients=50, partition=IID())
    data.setup("fit")
    concatenate, calls = np.concatenate, []
    monkeypatch.setattr("numpy.concatenate", lambda *given, **more: calls.append(1) or concatenate(*given, **more))
    held = data.trained_in(data.rounds.round(1))
    parts = [data._portions[round][7].tolist() for round in range(2)]
    assert held[7].tolist() == [*parts[0], *parts[1]]
    assert len(calls) < 5
    assert len(held) == 50


def test_rounds_that_cannot_be_filled_are_refused() -> None:
    held = [{0: np.arange(10), 1: np.arange(10, 16)}]
    with pytest.raises(ConfigError, match=r"data\.portion = 3\.0 .*at most 2: client 1 has 6 seconds in all for 3"):
        samples_by_round(held, np.ones(16), 3, 3.0)
    with pytest.raises(ConfigError, match=r"^schedule\.rounds_per_task = '7 .*no sample of client 1 begins in round 6"):
        samples_by_round(held, np.ones(16), 7, None)
    with pytest.raises(
        ConfigError, match=r"^data\.portion = '0\.5 seconds, .*no sample of client 0 begins in round 1'"
    ):
        samples_by_round(held, np.ones(16), 7, 0.5)
    with pytest.raises(ConfigError, match=r"data\.portion"):
        tiny_data(exposure="streaming", portion=0.0)
    with pytest.raises(ConfigError, match=r"data\.portion = 2\.5 .*whole number of samples"):
        tiny_data(exposure="asynchronous", portion=2.5)


def streaming(exposure: str = "streaming", **options: Any) -> FederatedDataModule:
    return tiny_data(split(3, classes=6, train=120), exposure=exposure, **options)


@pytest.mark.parametrize("exposure", ["streaming", "streaming-cumulative"])
def test_clients_train_on_what_they_meet_or_have_met(exposure: str) -> None:
    """In runs with a buffer, a round's samples are those that a walk along each client's samples finds."""
    seen: dict[tuple[int, int], set[int]] = {}

    class Looks(Method):
        task_free = True

        def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
            for row, client in enumerate(batch.clients):
                own = batch.index[row][batch.mask[row]].tolist()
                seen.setdefault((cohort.round, client), set()).update(own)
                held = self.context.global_index_trained_on(cohort.task, client)
                assert set(own) <= set(held.tolist())
            return batch

    data = streaming(exposure, num_clients=3)
    federation = fit(tiny_client(data, mlp, sgd, {"der": DER(batch_size=4), "looks": Looks()}), data)
    assert federation.finished
    for client in range(3):
        own = [place for task in range(3) for place in data.client_global_index(task, client).tolist()]
        met = naive(own, np.ones(120), data.num_rounds, len(own) / data.num_rounds)
        for round in range(data.num_rounds):
            expected = met[round] if exposure == "streaming" else [*chain(*met[: round + 1])]
            assert seen[round, client] == set(data.handles.of(np.array(expected)).tolist())
            assert data.trained_in(data.rounds.round(round))[client].tolist() == expected
    most = max(len(data.trained_in(data.rounds.round(r))[c]) for r in range(data.num_rounds) for c in range(3))
    assert data.most_trained_on == most
    assert samples_of_other_tasks(data) == (0 if exposure == "streaming" else most)


@pytest.mark.parametrize("exposure", ["streaming", "streaming-cumulative"])
def test_methods_that_end_a_round_have_its_samples(exposure: str) -> None:
    """When a round ends, also the last, methods find the samples that clients have trained on in it."""
    seen: dict[tuple[int, int], set[int]] = {}

    class Looks(Method):
        task_free = True

        def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
            for row, client in enumerate(batch.clients):
                seen.setdefault((cohort.round, client), set()).update(batch.index[row][batch.mask[row]].tolist())
            return batch

        def end_round(self, plan: RoundPlan) -> None:
            assert self.context.round == plan.round + 1
            for client in plan.clients:
                found = self.context.global_index_trained_on(plan.task, client).tolist()
                batches = self.context.client_batches(plan.task, client, 4, self.context.device)
                assert set(found) == seen.pop((plan.round, client))
                assert sum(len(x) for x, _ in batches) == len(found)

    data = streaming(exposure, num_clients=3)
    federation = fit(tiny_client(data, mlp, sgd, {"looks": Looks()}), data)
    assert federation.finished
    assert not seen
    assert data.trained_on(0)[0].tolist() == data.trained_in(data.rounds.round(data.num_rounds - 1))[0].tolist()


@pytest.mark.parametrize("participation", [Joining(1, 1), RandomShare(0.6), AllClients()])
@pytest.mark.parametrize("exposure", ["streaming", "streaming-cumulative"])
def test_samples_that_pass_by_before_a_client_joins_are_counted(exposure: str, participation: Participation) -> None:
    """The count of the warning is that of samples which no round of the run has trained on, though all clients of its
    task take part in it."""
    trained: set[int] = set()

    class Looks(Method):
        task_free = True

        def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
            trained.update(batch.index[batch.mask].tolist())
            return batch

    schedule = {"rounds_per_task": 2, "clients_per_round": 1.0}
    data = streaming(exposure, num_clients=3, participation=participation, partition=IID(), schedule=schedule)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tiny_client(data, mlp, sgd, {"looks": Looks()}), data)
    held = sum(len(data.client_global_index(task, client)) for task in range(3) for client in range(3))
    told = [str(one.message).split() for one in caught if "are met only in rounds" in str(one.message)]
    missed = held - len(trained)
    assert [int(words[0]) for words in told] == [missed] * (missed > 0)
    keeps_all = isinstance(participation, Joining) and exposure == "streaming-cumulative"  # who has joined stays
    assert (missed > 0) is not (keeps_all or isinstance(participation, AllClients))


def test_a_client_without_a_task_goes_on_with_its_own(tmp_path: Path) -> None:
    """A client without samples of a task spreads those of its own task over all rounds."""
    drives = Sequence([town(tmp_path, "A", 24, [0, 1, 0]), town(tmp_path, "B", 10, [1])])
    data = tiny_data(
        drives, exposure="streaming", partition=Natural(), num_clients=2, schedule={"rounds_per_task": [3, 1]}
    )
    data.setup("fit")
    met = [data.trained_in(data.rounds.round(round)) for round in range(4)]
    tasks = [[data.global_index.tasks(torch.from_numpy(of[client])).tolist() for of in met] for client in (0, 1)]
    assert [sorted(set(of)) for of in tasks[0]] == [[0]] * 4
    of_other = [*chain(*tasks[1])]
    assert of_other == sorted(of_other)
    assert {*of_other} == {0, 1}


class Lasting(Synthetic):
    """A source whose samples last longer the more bright pixels they have."""

    def __init__(self) -> None:
        super().__init__(num_classes=4, shape=(1, 4, 4), train_size=40, test_size=20)

    def load(self, root: Path) -> tuple[ImageSet, ImageSet]:
        train, test = super().load(root)
        train, test = (replace(part, seconds=lasting(part.images > 127)) for part in (train, test))
        return train, test


def lasting(bright: Tensor) -> Tensor:
    return 0.5 + bright.flatten(1).double().mean(1)


@pytest.mark.parametrize(
    ("stream", "dark"),
    [
        (ClassSplit(Lasting(), 2), 127),
        (Mixture([Lasting(), Lasting()], [1, 1], 2), 127),
        (Permuted(Binarised(Lasting(), split="merged"), 1), 0),
    ],
    ids=["ClassSplit", "Mixture", "Binarised"],
)
def test_streams_keep_how_long_samples_last(stream: Any, dark: int) -> None:
    for task in stream.tasks(Path(), 0):
        assert task.train.seconds is not None
        assert torch.equal(task.train.seconds, lasting(task.train.images > dark))
        assert len(task.train.seconds.unique()) > 2


def town(folder: Path, name: str, count: int, drivers: list[int] | None, every: int = 60) -> RecordedFrames:
    """Write a town of ``count`` frames, ``every`` numbers apart, with a gap of 1000 numbers more after the third."""
    frames = folder / name / "frames"
    frames.mkdir(parents=True)
    lines = ["frame,town,number,class,xmin,ymin,xmax,ymax"]
    for k in range(count):
        Image.new("RGB", (4, 4)).save(frames / f"{name}{k}.jpg")
        lines.append(f"{name}{k},{name},{every * k + (1000 if k > 2 else 0)},x,0,0,4,4")
    (folder / name / "boxes.csv").write_text("\n".join(lines))
    return RecordedFrames(str(folder / name), [3, 4, 4], ["x"], block=2, drivers=drivers)


def test_a_driver_without_frames_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.partition = 'no samples' .*every client samples; client 1 has none"):
        tiny_data(
            Sequence([town(tmp_path, "A", 24, [0, 2])]),
            exposure="streaming",
            partition=Natural(),
            num_clients=3,
            schedule={"rounds_per_task": 2},
        ).setup("fit")


def test_frames_last_until_the_next_and_stretches_of_a_town_go_to_their_drivers(tmp_path: Path) -> None:
    train, test = town(tmp_path, "A", 20, [2, 0, 2, 1]).load(tmp_path)
    assert train.seconds is not None
    assert train.clients is not None
    assert train.seconds.tolist() == [3.0] * 16  # 60 numbers at 20 a second; the gap adds no time
    # Five frames for each driver. The fifth and tenth block of two (8 and 9, 18 and 19) are for tests.
    assert train.clients.tolist() == [2] * 5 + [0] * 3 + [2] * 5 + [1] * 3
    assert test.clients is None
    assert town(tmp_path, "B", 20, None, 20).load(tmp_path)[0].seconds.tolist() == [1.0] * 16  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"drivers"):
        RecordedFrames("x", [3, 4, 4], ["x"], drivers=[])
    with pytest.raises(ConfigError, match=r"rate"):
        RecordedFrames("x", [3, 4, 4], ["x"], rate=0.0)


@pytest.mark.parametrize(
    ("method", "works"), [(FedAGEM(8), True), (AGEM(8), True), (SCAFFOLD("II"), True), (EWC(), False), (ER(8), False)]
)
def test_methods_are_told_no_boundaries(method: Method, works: bool) -> None:
    data = streaming()
    if works:
        assert fit(tiny_client(data, double(mlp), sgd, {"some": method}), data).finished
        return
    with pytest.raises(ConfigError, match=r"data\.exposure.*methods\.some"):
        fit(tiny_client(data, mlp, sgd, {"some": method}), data)


def test_what_does_not_fit_a_stream_in_time_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.class_loss"):
        streaming(scenario="class", class_loss="seen")
    with pytest.warns(UserWarning, match=r"on tasks 1, 2 \(from 0\): 9 portions of data\.portion = 1\.0 end before"):
        streaming(portion=1.0, num_clients=4).setup("fit")
    same = tiny_data(permuted(3), exposure="streaming")
    same.setup("fit")  # tasks that share their samples are allowed
    assert same.digests["seconds"] == streaming().digests["seconds"]  # neither data set has durations
