"""iCaRL against a plain loop over clients, herding against brute force."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.naive import local_batches, plain_network
from support.naive_augmentation import augmented
from support.tiny import (
    Rounds,
    double,
    fit,
    mlp,
    norm_net,
    permuted,
    sgd,
    split,
    tiny_client,
    tiny_data,
    weights,
)
from torch import Tensor, nn

from cfl.data.augmentation import CropFlip
from cfl.data.cohorts import CohortBatch
from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import Joining, Participation, RandomShare
from cfl.data.partitions import ClassesPerClient, Dirichlet
from cfl.data.schedule import RoundPlan
from cfl.data.sources import Synthetic
from cfl.data.streams import ClassSplit
from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.methods import ICaRL, Method, PersonalLayers
from cfl.methods.components.herding import herd
from cfl.models import MLP
from cfl.runtime.errors import ConfigError


def data_of(width: int = 2, tasks: int = 3, **options: Any) -> FederatedDataModule:
    """Four unequal clients, three per round, three tasks of two classes and two rounds."""
    return tiny_data(
        split(tasks, classes=2 * tasks, train=40 * tasks),
        num_clients=4,
        scenario="class",
        partition=options.pop("partition", Dirichlet(1.0, 3)),
        schedule={"rounds_per_task": 2, "clients_per_round": 3, "cohort_width": width, **options.pop("schedule", {})},
        **options,
    )


def run(method: ICaRL, data: FederatedDataModule | None = None, network: Any = mlp, **options: Any) -> Federation:
    data = data_of() if data is None else data
    return fit(tiny_client(data, double(network), sgd, {"icarl": method, **options.pop("others", {})}), data, **options)


# Herding.


def naive_herd(features: list[list[float]], count: int) -> list[int]:
    size = len(features[0])
    mean = [sum(row[i] for row in features) / len(features) for i in range(size)]
    chosen: list[int] = []
    while len(chosen) < min(count, len(features)):
        best, least = -1, float("inf")
        for candidate in range(len(features)):
            if candidate in chosen:
                continue
            picked = [features[row] for row in (*chosen, candidate)]
            distance = sum((mean[i] - sum(row[i] for row in picked) / len(picked)) ** 2 for i in range(size))
            if distance < least - 1e-15:
                best, least = candidate, distance
        chosen.append(best)
    return chosen


@pytest.mark.parametrize("seed", range(5))
def test_herding_is_the_greedy_choice(seed: int) -> None:
    features = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = naive_herd(features.tolist(), 12)
    for count in (1, 4, 12, 20):
        assert herd(features, count).tolist() == expected[:count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_two_samples_that_are_equally_far_from_their_mean_the_first_is_chosen(dtype: torch.dtype) -> None:
    """Rounding, which differs between widths and engines, must not decide."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        features = torch.nn.functional.normalize(torch.randn(2, 8, generator=generator, dtype=dtype), dim=1)
        assert herd(features, 2).tolist() == [0, 1]
        assert herd(torch.cat([features] * 2), 1).tolist() == [0]


def test_herding_comes_closer_to_the_mean_than_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(200, 8, generator=generator)
    herded = (features[herd(features, 10)].mean(0) - features.mean(0)).norm()
    orders = [torch.randperm(200, generator=generator)[:10] for _ in range(100)]
    assert herded < min((features[order].mean(0) - features.mean(0)).norm() for order in orders)


# The whole method.


class Naive:
    """iCaRL over clients one by one. Every local step takes all exemplars: client -> class -> images."""

    def __init__(
        self,
        data: FederatedDataModule,
        state: dict[str, Tensor],
        size: int,
        network: Any = mlp,
        mirrored: bool = False,
    ) -> None:
        self.data, self.size, self.mirrored = data, size, mirrored
        self.network = plain_network(data, double(network), state)
        self.exemplars: dict[int, dict[int, list[Tensor]]] = {c: {} for c in range(data.num_clients)}
        self.means: dict[int, Tensor] = {}
        self.after_task: list[dict[int, Tensor]] = []
        self.train()

    def train(self) -> None:
        old = None
        for number in range(self.data.rounds.num_rounds):
            plan = self.data.rounds.round(number)
            if plan.round_in_task == 0 and plan.task > 0:
                old = copy.deepcopy(self.network).eval()
            start = copy.deepcopy(self.network.state_dict())
            total = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in start.items()}
            for client in plan.clients:
                self.network.load_state_dict(start)
                self.network.train()
                optimizer = sgd(self.network.parameters())
                for x, y in local_batches(self.data, plan, client):
                    x, y = x.double(), y + 2 * plan.task
                    kept = [(e, c) for c, own in self.exemplars[client].items() for e in own]
                    if kept:
                        x = torch.cat([x, torch.stack([e for e, _ in kept])])
                        y = torch.cat([y, torch.tensor([c for _, c in kept])])
                    optimizer.zero_grad()
                    self.loss(x, y, plan.task, old).backward()
                    optimizer.step()
                for name, tensor in self.network.state_dict().items():
                    total[name] += tensor
            mean = {n: (t / len(plan.clients)).to(start[n].dtype) for n, t in total.items()}
            self.network.load_state_dict(mean)
            if plan.last_of_task:
                self.end_task(plan.task)
                self.after_task.append(dict(self.means))

    def loss(self, x: Tensor, y: Tensor, task: int, old: Any) -> Tensor:
        p = torch.sigmoid(self.network(x))
        before = None if old is None else torch.sigmoid(old(x)).detach()
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(x)):
            for output in range(2 * (task + 1)):
                target = float(y[row] == output)
                if before is not None and output < 2 * task:
                    target = float(before[row, output])
                total = total - target * p[row, output].log() - (1 - target) * (1 - p[row, output]).log()
        return total / len(x) / (2 * (task + 1))

    def features(self, x: Tensor) -> Tensor:
        self.network.eval()
        with torch.no_grad():
            found = self.network.features(x)  # type: ignore[operator]
            found = found / found.norm(dim=1, keepdim=True)
            if self.mirrored:
                other = self.network.features(x[..., [3, 2, 1, 0]])  # type: ignore[operator]
                found = found + other / other.norm(dim=1, keepdim=True)
        return found / found.norm(dim=1, keepdim=True)

    def end_task(self, task: int) -> None:
        each = self.size // (2 * (task + 1))
        sums: dict[int, list[Tensor]] = {}
        for client in range(self.data.num_clients):
            own = self.exemplars[client]
            if client in self.data.members[task].tolist():
                self.choose(own, task, client, each)
            for output, images in own.items():
                mean = self.features(torch.stack(images)).sum(0)
                sums.setdefault(output, []).append(mean / mean.norm())
        for output, of_clients in sums.items():
            mean = torch.stack(of_clients).mean(0)
            self.means[output] = mean / mean.norm()

    def choose(self, own: dict[int, list[Tensor]], task: int, client: int, each: int) -> None:
        for output in own:
            own[output] = own[output][:each]
        samples = self.data.tasks[task]
        index = self.data.indices[task][client]
        x = samples.transform(samples.train.images[index]).double()
        y = samples.train.labels[index] + 2 * task
        for output in sorted(set(y.tolist())):
            of_class = x[y == output]
            picked = naive_herd(self.features(of_class).tolist(), each)
            own[output] = [of_class[row] for row in picked]

    def accuracy(self, task: int) -> float:
        """Percent of a task's test images whose class has the nearest mean."""
        test = self.data.tasks[task]
        features = self.features(test.transform(test.test.images).double())
        outputs = sorted(self.means)
        distances = torch.stack([(features - self.means[o]).norm(dim=1) for o in outputs], 1)
        predicted = torch.tensor(outputs)[distances.argmin(1)]
        return 100 * float((predicted == test.test.labels + 2 * task).double().mean())


# Wide enough that no two samples have the same features, so that herding has no ties.
wide_mlp = partial(MLP, hidden=[24], dropout=0.0)


@pytest.mark.parametrize(("width", "mirrored"), [(1, False), (3, False), (3, True)])
def test_it_is_the_plain_loop(width: int, mirrored: bool) -> None:
    data, method = data_of(width), ICaRL(12, batch_size=12, mirrored=mirrored)
    client = tiny_client(data, double(wide_mlp), sgd, {"icarl": method})
    state = copy.deepcopy(client.network.state_dict())
    federation = fit(client, data)
    naive = Naive(data_of(), state, 12, wide_mlp, mirrored)
    torch.testing.assert_close(weights(federation), naive.network.state_dict(), rtol=1e-9, atol=1e-10)
    assert method.known.all()
    assert method.means is not None
    for output, mean in naive.means.items():
        torch.testing.assert_close(method.means[output], mean, rtol=1e-8, atol=1e-9)
    matrix = federation.accuracy.compute()
    for task in range(3):
        assert matrix[2, task].item() == pytest.approx(naive.accuracy(task), abs=1e-4)
    x = data.tasks[1].transform(data.tasks[1].test.images).double()
    with torch.no_grad():
        scores = method.classify(1, dict(client.network.named_parameters()), x)
    assert scores is not None
    features = naive.features(x)
    for output, mean in naive.means.items():
        torch.testing.assert_close(-scores[:, output], (features - mean).norm(dim=1), rtol=0, atol=1e-7)


def test_who_stays_away_from_a_task_sends_means_of_what_it_has() -> None:
    """Classes of an absent client would otherwise keep means of outdated features."""

    class Means(Method):
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def end_task(self, plan: RoundPlan) -> None:
            assert method.means is not None
            self.seen.append(method.means.clone())

    options: dict[str, Any] = {"participation": RandomShare(0.5), "schedule": {"clients_per_round": 2}}
    data, method, means = data_of(**options), ICaRL(12, batch_size=12), Means()
    client = tiny_client(data, double(wide_mlp), sgd, {"icarl": method, "means": means})
    state = copy.deepcopy(client.network.state_dict())
    federation = fit(client, data)
    naive = Naive(data_of(**options), state, 12, wide_mlp)
    for found, expected in zip(means.seen, naive.after_task, strict=True):
        for output, mean in expected.items():
            torch.testing.assert_close(found[output], mean, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(weights(federation), naive.network.state_dict(), rtol=1e-9, atol=1e-10)
    members = [set(data.members[task].tolist()) for task in range(3)]
    called = [set.union(*members[: task + 1]) for task in range(3)]
    assert any(called[task] - members[task] for task in (1, 2))
    model, size = sum(t.numel() * 8 for t in federation.model.shared_tensors().values()), 6 * 24 * 8 + 6 * 8
    assert federation.channel.uplink_bytes["icarl means"] == sum(map(len, called)) * size
    late = 0
    for task in (1, 2):
        first, second = (set(data.rounds.round(2 * task + r).clients) for r in (0, 1))
        late += len(second - first - called[task - 1])
    assert federation.channel.downlink_bytes.get("old model", 0) == late * model


def test_classes_that_nobody_sends_keep_their_means() -> None:
    """Two clients hold each class, and two of four drop out of a round."""
    means: list[Tensor] = []

    class Means(Method):
        def end_task(self, plan: RoundPlan) -> None:
            assert method.means is not None
            means.append(method.means.clone())

    data = data_of(seed=1, partition=ClassesPerClient(1), schedule={"clients_per_round": 1.0, "client_dropout": 0.5})
    method, holders, kept = ICaRL(12), dict[int, set[int]](), set[int]()
    fit(tiny_client(data, double(wide_mlp), sgd, {"icarl": method, "means": Means()}), data)
    for task in range(3):
        lost = data.rounds.dropouts(2 * task + 1)
        assert len(lost) == 2
        for client, index in data.indices[task].items():
            if client not in lost:  # a client that drops out chooses no exemplars
                (label,) = data.tasks[task].train.labels[index].unique().tolist()
                holders.setdefault(2 * task + label, set()).add(client)
        for output in range(2 * task):
            same = torch.equal(means[task][output], means[task - 1][output])
            assert same == (holders.get(output, set()) <= lost), (task, output)
            kept |= {output} if same and output in holders else set()
    assert kept


@pytest.mark.parametrize("size", [12, 14])
def test_earlier_classes_share_what_is_left_of_the_memory(size: int) -> None:
    federation = run(ICaRL(size))
    for client in range(4):
        kept = federation.clients.get("icarl", client)
        assert kept is not None
        held = kept["place"] >= 0
        outputs, counts = kept["output"][held].unique(return_counts=True)
        assert len(outputs) >= 4
        assert (counts <= 2).all()
        tasks, index = federation.data.global_index.split(kept["place"][held])
        for task, at, output in zip(tasks.tolist(), index.tolist(), kept["output"][held].tolist(), strict=True):
            assert at in federation.data.indices[task][client]
            assert federation.data.tasks[task].train.labels[at] + 2 * task == output


def test_exemplars_come_in_proportion_to_the_clients_samples() -> None:
    """As if exemplars were merged into the training set."""
    seen: list[tuple[int, int, float]] = []

    class Count(Method):
        def extend_batch(self, cohort: Any, batch: Any) -> Any:
            for row, client in enumerate(cohort.clients):
                if batch.added and batch.mask[row].any():
                    held = int((self.context.clients.get("icarl", client)["place"] >= 0).sum())  # type: ignore[index]
                    own = cohort.sizes[row]
                    share = held / own * int(batch.mask[row].sum())
                    seen.append((client, int(batch.added[0].mask[row].sum()), share))
                    # Loss weights are those of the merged set and do not depend on the number of drawn exemplars.
                    assert batch.added[0].weights[row].sum().item() == pytest.approx(held / (own + held))
                    assert batch.added[0].own_factor[row].item() == pytest.approx(own / (own + held))
            return batch

    run(ICaRL(12), others={"count": Count()})
    assert len(seen) >= 20
    assert all(share <= found < share + 1 or found == 12 for _, found, share in seen)


def test_the_networks_own_outputs_can_classify_instead() -> None:
    by_mean, by_output = run(ICaRL(12)), run(ICaRL(12, classifier="network"))
    for name, value in weights(by_mean).items():
        assert torch.equal(weights(by_output)[name], value)
    assert not torch.equal(by_mean.accuracy.compute(), by_output.accuracy.compute())


def test_the_network_as_classifier_asks_nobody_but_who_holds_the_task() -> None:
    """No means are sent up. Clients with exemplars of earlier tasks only are called back for class means only."""
    down = {}
    for classifier in ("nearest_mean", "network"):
        data = data_of(participation=RandomShare(0.5), schedule={"clients_per_round": 2})
        federation = run(ICaRL(12, classifier=classifier), data)  # type: ignore[arg-type]
        assert ("icarl means" in federation.channel.uplink_bytes) == (classifier == "nearest_mean")
        down[classifier] = dict(federation.channel.downlink_bytes)
    members = [set(data.members[task].tolist()) for task in range(3)]
    called = {"network": members, "nearest_mean": [set.union(*members[: task + 1]) for task in range(3)]}
    assert sum(map(len, called["network"])) < sum(map(len, called["nearest_mean"]))
    model = sum(t.numel() * 8 for t in federation.model.shared_tensors().values())
    for classifier, asked in called.items():
        late = 0
        for task in (1, 2):
            first, second = (set(data.rounds.round(2 * task + r).clients) for r in (0, 1))
            late += len(second - first - asked[task - 1])
        assert down[classifier]["model"] == (6 * 2 + sum(map(len, asked))) * model
        assert down[classifier].get("old model", 0) == late * model


def test_all_means_known_make_the_output_layer_superfluous() -> None:
    method, data = ICaRL(12), data_of()
    client = tiny_client(data, double(mlp), sgd, {"icarl": method})
    fit(client, data)
    network, x = client.network, data.tasks[0].transform(data.tasks[0].test.images).double()
    used: list[nn.Module] = []
    network.head.register_forward_hook(lambda layer, *_: used.append(layer))
    model = dict(network.named_parameters())
    with torch.no_grad():
        unit = network.features(x)
        unit = unit / unit.norm(dim=1, keepdim=True)
        scores = method.classify(0, model, x)
        assert not used
        assert method.means is not None
        expected = torch.stack([-(unit - mean).norm(dim=1) for mean in method.means], 1)
        torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-7)
        known = torch.tensor([True, True, True, True, False, False])
        method.load_state_dict({**method.state_dict(), "known": known})
        scores = method.classify(0, model, x)
        logits = network(x)
    assert scores is not None
    torch.testing.assert_close(scores[:, :4], expected[:, :4], rtol=1e-6, atol=1e-7)
    assert float(scores[:, 4:].max()) < float(scores[:, :4].min())
    assert torch.equal(scores[:, 4:].argmax(1), logits[:, 4:].argmax(1))


class Watch(Method):
    """Records clients' tensors and exemplars, and every step's batch as the methods before have left it."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.exemplars: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.steps: list[tuple[int, tuple[int, ...], CohortBatch]] = []

    def start_clients(self, cohort: Cohort) -> None:
        for client in cohort.clients:
            kept = self.context.clients.get("model", client) or {}
            self.kept[cohort.round, client] = {name: tensor.clone() for name, tensor in kept.items()}
            table = self.context.clients.get("icarl", client)
            places = torch.zeros(0, dtype=torch.int64) if table is None else table["place"][table["place"] >= 0]
            tasks, index = self.context._federation.data.global_index.split(places)
            self.exemplars[cohort.round, client] = list(zip(tasks.tolist(), index.tolist(), strict=True))

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        self.steps.append((cohort.round, cohort.clients, batch))
        return batch


@pytest.mark.parametrize("batchnorm", ["average", "local", "drop"])
def test_targets_are_what_each_client_makes_of_the_old_model(batchnorm: str) -> None:
    """BatchNorm uses the old model's statistics, the client's own, or those of the client's batch."""
    watch, rounds, data = Watch(), Rounds(), data_of(3)
    others, federated = {"watch": watch}, {"batchnorm": batchnorm}
    run(ICaRL(12), data, norm_net, others=others, callbacks=[rounds], federated=federated)
    compared = with_own = 0
    for number, clients, batch in watch.steps:
        task = data.rounds.task_of(number)
        for row, client in enumerate(clients if task else ()):
            parts = [(batch.x[row][batch.mask[row]], batch.extras["icarl old"][row][batch.mask[row]])]
            for added in batch.added:
                parts.append((added.x[row][added.mask[row]], added.extras["icarl old"][row][added.mask[row]]))
            own = watch.kept[number, client]
            old: Any = plain_network(data, double(norm_net), {**rounds.models[2 * task - 1], **own})
            old.train(batchnorm == "drop")
            for x, found in parts:
                if len(x) < 1 + (batchnorm == "drop"):
                    continue  # torch's BatchNorm refuses a batch of one
                compared += 1
                with_own += bool(own)
                with torch.no_grad():
                    expected = 1 / (1 + (-old(x)).exp())
                torch.testing.assert_close(found.double(), expected, rtol=1e-9, atol=1e-10)
    assert compared > 20
    assert (with_own > 20) == (batchnorm == "local")


def test_exemplars_are_augmented_where_they_are_trained_on() -> None:
    """Augmented by (round, step, sample) like own samples. Class means use the images as they are stored."""
    method, watch, data = ICaRL(12), Watch(), data_of(3, augmentation=CropFlip(1))
    federation = run(method, data, wide_mlp, others={"watch": watch})
    replayed = unchanged = 0
    for number, clients, batch in watch.steps:
        for added in batch.added:
            for row, client in enumerate(clients):
                held = watch.exemplars[number, client]
                seen = torch.stack([augmented(data, *sample, number, batch.step) for sample in held])
                stored = torch.stack([data.gather(task, torch.tensor(at))[0] for task, at in held])
                for x in added.x[row][added.mask[row]]:
                    assert bool((seen == x).flatten(1).all(1).any())
                    replayed += 1
                    unchanged += bool((stored == x).flatten(1).all(1).any())
    assert replayed > 100
    assert unchanged < replayed / 2
    network: Any = plain_network(data, double(wide_mlp), weights(federation)).eval()
    sums: dict[int, list[Tensor]] = {}
    for client in range(4):
        table = federation.clients.get("icarl", client)
        assert table is not None
        for output in table["output"][table["place"] >= 0].unique().tolist():
            tasks, index = data.global_index.split(table["place"][table["output"] == output])
            with torch.no_grad():
                features = network.features(data.inputs.of_tasks(tasks, index)[0].double())
            sums.setdefault(output, []).append((features / features.norm(dim=1, keepdim=True)).mean(0))
    assert method.means is not None
    for output, of_clients in sums.items():
        mean = torch.stack([one / one.norm() for one in of_clients]).mean(0)
        torch.testing.assert_close(method.means[output], mean / mean.norm(), rtol=1e-8, atol=1e-9)


def test_every_class_of_a_client_needs_a_slot() -> None:
    """Classes of other clients need no slot."""
    federation = run(ICaRL(3), data_of(partition=ClassesPerClient(1)))
    for client in range(4):
        table = federation.clients.get("icarl", client)
        assert table is not None
        assert table["output"].tolist() == [
            2 * task + int(federation.data.tasks[task].train.labels[federation.data.indices[task][client][0]])
            for task in range(3)
        ]
    with pytest.raises(ConfigError, match=r"methods\.icarl\.size = 2 .*at least 3"):
        run(ICaRL(2), data_of(partition=ClassesPerClient(1)))


@pytest.mark.parametrize("batchnorm", ["average", "local", "drop"])
def test_bytes_are_counted(batchnorm: str) -> None:
    """The old model is counted once per client, without statistics that are never exchanged."""
    method = ICaRL(12)
    joining = data_of(participation=Joining(2, 1), schedule={"clients_per_round": 2}, seed=2)
    federation = run(method, joining, norm_net, federated={"batchnorm": batchnorm})
    channel, data = federation.channel, federation.data
    means = 6 * 5 * 8 + 6 * 8  # six means of five numbers and six flags in float64
    assert channel.uplink_bytes["icarl means"] == (2 + 3 + 4) * means
    model = sum(p.numel() * 8 for p in federation.network.parameters())
    if batchnorm == "average":
        model += sum(b.numel() * 8 for b in federation.network.buffers())
    late = 0
    for task in (1, 2):
        first, second = (set(data.rounds.round(2 * task + r).clients) for r in (0, 1))
        late += len(second - first - set(data.members[task - 1].tolist()))
    assert late
    assert channel.downlink_bytes["old model"] == late * model
    assert method.client_storage() == 12 * (16 + 2) + model


def test_it_wants_classes_that_compete_and_one_model() -> None:
    data = tiny_data(permuted())
    with pytest.raises(ConfigError, match=r"data\.scenario = 'domain'.*class"):
        fit(tiny_client(data, mlp, sgd, {"icarl": ICaRL()}), data)
    with pytest.raises(ConfigError, match="one model"):
        run(ICaRL(), others={"personal": PersonalLayers(["head.*"])})


class Newcomers(Participation):
    """Clients 0 and 1 in the first task, clients 2 and 3 in the second."""

    name = "newcomers"

    def members(self, num_clients: int, num_tasks: int, seed: int) -> list[np.ndarray]:
        return [np.array([0, 1]), np.array([2, 3])]


@pytest.mark.parametrize("class_loss", ["own", "seen"])
def test_clients_without_exemplars_distil_outputs_of_earlier_tasks(class_loss: Any) -> None:
    """The loss is over all classes seen, even if a client has no samples of earlier tasks."""
    schedule = {"clients_per_round": 1.0}
    stream, who = split(2, classes=4), Newcomers()
    data = tiny_data(stream, scenario="class", class_loss=class_loss, participation=who, schedule=schedule)
    seen = Rounds()
    fit(tiny_client(data, mlp, sgd, {"icarl": ICaRL(8)}), data, callbacks=[seen])
    before, after = seen.models[data.schedule.rounds_per_task - 1], seen.models[-1]
    assert not torch.equal(after["head.weight"][:2], before["head.weight"][:2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_networks_in_half_precision_have_means_too(dtype: torch.dtype) -> None:
    """Classes that a client lacks leave no NaN, and distances to the means exist in every type."""

    class Half(MLP):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self.to(dtype)

        def features(self, x: Tensor) -> Tensor:
            return super().features(x.to(dtype))

    method, data = ICaRL(size=8), data_of(tasks=2)
    make = partial(Half, hidden=[8], dropout=0.0)
    federation = fit(tiny_client(data, make, sgd, {"icarl": method}), data)
    assert method.means is not None
    torch.testing.assert_close(method.means.double().norm(dim=1), torch.ones(4, dtype=torch.float64), atol=1e-6, rtol=0)
    assert federation.accuracy.compute().isfinite().all()


def test_rows_of_numbers_have_no_mirror() -> None:
    rows = tiny_data(ClassSplit(Synthetic(6, [1, 1, 9], 120, 60), 3), num_clients=4, scenario="class")
    with pytest.raises(ConfigError, match=r"methods\.icarl\.mirrored = True .*rows of numbers"):
        run(ICaRL(12, mirrored=True), rows)
    assert run(ICaRL(12), rows).finished
