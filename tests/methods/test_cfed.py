"""CFeD against a plain loop over clients, and which samples reach buffers and other methods."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.naive import local_batches, plain_network, statistics, task_loss, used_outputs
from support.naive_augmentation import augmented
from support.naive_replay import local_samples, replay_client
from support.tiny import Rounds, SaveAfter, double, fit, mlp, norm_net, sgd, split, tiny_client, tiny_data, weights
from torch import Tensor

from cfl.data.augmentation import CropFlip
from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Dirichlet
from cfl.data.schedule import RoundPlan
from cfl.data.sources import Digits, Source, Synthetic
from cfl.data.types import PixelTransform
from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import AGEM, DER, ER, CFeD, FedCIL, ICaRL, Method, PersonalLayers
from cfl.methods.components.surrogate_data import normalised_as, passes, read_surrogate, shards
from cfl.methods.context import Context
from cfl.randomness.generators import numpy_generator
from cfl.runtime.checkpoint_file import write_checkpoint
from cfl.runtime.errors import ConfigError


def surrogate(size: int = 30) -> Synthetic:
    """Another data set than the streams', with a normalisation of its own."""
    return Synthetic(3, [1, 4, 4], size, 3, seed=7, mean=[0.1], std=[0.9])


def data_of(width: int = 2, scenario: Any = "class", **options: Any) -> FederatedDataModule:
    """Five unequal clients, four per round, three tasks of two classes and two rounds of two epochs."""
    schedule = {"rounds_per_task": 2, "clients_per_round": 4, "cohort_width": width, "local_epochs": 2}
    return tiny_data(
        split(3, classes=6, train=120),
        num_clients=5,
        scenario=scenario,
        partition=Dirichlet(1.0, 3),
        schedule={**schedule, **options.pop("schedule", {})},
        **options,
    )


def run(method: CFeD, data: FederatedDataModule | None = None, network: Any = norm_net, **options: Any) -> Federation:
    data = data_of() if data is None else data
    others = options.pop("others", {})
    return fit(tiny_client(data, double(network), sgd, {"cfed": method, **others}), data, **options)


# Against a plain loop.


def soft_cross_entropy(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of the softened student against the teacher's probabilities, averaged over samples."""
    total = torch.zeros((), dtype=torch.float64)
    for s, p in zip(student, teacher, strict=True):
        exponentials = (s / temperature).exp()
        for output in range(len(s)):
            total = total - p[output] * (exponentials[output] / exponentials.sum()).log()
    return total / len(student)


def softened(logits: Tensor, temperature: float) -> Tensor:
    exponentials = (logits / temperature).exp()
    return exponentials / exponentials.sum(1, keepdim=True)


class Naive:
    """CFeD over clients one by one, each an ordinary network."""

    def __init__(
        self,
        data: FederatedDataModule,
        method: CFeD,
        network: torch.nn.Module,
        batchnorm: str = "average",
        optimizer: Any = sgd,
    ) -> None:
        self.optimizer = optimizer
        self.data, self.method, self.network, self.batchnorm = data, method, network, batchnorm
        self.kept: dict[int, dict[str, Tensor]] = {}
        # The stream's mean and deviation, not the surrogate's.
        self.images = PixelTransform((0.5,), (0.25,))(surrogate().load(Path())[0].images).double()
        parties = data.num_clients + (method.server_distillation > 0)
        order = numpy_generator(data.seed, "cfed shards").permutation(len(self.images))
        self.shards = np.array_split(order, parties)
        self.late = 0
        self.train()

    def reviewing(self, plan: RoundPlan) -> list[int]:
        if plan.task == 0:
            return []
        count = round(self.method.share * len(plan.clients))
        drawn = numpy_generator(self.data.seed, "cfed who reviews", plan.round).choice(plan.clients, count, False)
        return sorted(drawn.tolist())

    def compared(self, task: int) -> slice:
        """The outputs of the first ``task`` tasks."""
        return slice(0, 2 * task) if self.data.scenario == "task" else slice(None)

    def train(self) -> None:
        old, having = None, set[int]()
        for number in range(self.data.num_rounds):
            plan = self.data.rounds.round(number)
            if plan.round_in_task == 0 and plan.task > 0:
                old, having = copy.deepcopy(self.network).eval(), set(plan.clients)
            models = []
            for client in plan.clients:
                network = self.with_own_statistics(self.network, client)
                if client in self.reviewing(plan):
                    assert old is not None
                    self.late += client not in having
                    having.add(client)
                    self.review(network, self.with_own_statistics(old, client).eval(), plan, client)
                else:
                    self.learn(network, plan, client)
                if self.batchnorm == "local":
                    self.kept[client] = {n: v.clone() for n, v in network.state_dict().items() if statistics(n)}
                models.append(network)
            states = [m.state_dict() for m in models]
            mean = {n: torch.stack([s[n].double() for s in states]).mean(0) for n in states[0]}
            mean = {n: v if states[0][n].is_floating_point() else v.round().long() for n, v in mean.items()}
            if self.batchnorm != "average":
                mean |= {n: v for n, v in self.network.state_dict().items() if statistics(n)}
            self.network.load_state_dict(mean)
            self.imitate(models, plan)

    def with_own_statistics(self, network: torch.nn.Module, client: int) -> torch.nn.Module:
        own = copy.deepcopy(network).train()
        own.load_state_dict({**own.state_dict(), **self.kept.get(client, {})})
        return own

    def logits(self, network: torch.nn.Module, x: Tensor, by_batch: bool) -> Tensor:
        """Logits of a model in evaluation mode, normalised by its statistics or, with ``by_batch``, by the batch's."""
        layers: list[Any] = [m for m in network.modules() if hasattr(m, "running_mean")] if by_batch else []
        held = [(layer.running_mean, layer.running_var) for layer in layers]
        for layer in layers:
            layer.running_mean = layer.running_var = None
        found: Tensor = network.eval()(x)
        for layer, (mean, variance) in zip(layers, held, strict=True):
            layer.running_mean, layer.running_var = mean, variance
        network.train()
        return found

    def learn(self, network: torch.nn.Module, plan: RoundPlan, client: int) -> None:
        start = copy.deepcopy(network.state_dict())
        optimizer = self.optimizer(network.parameters())
        for x, y in self.batches(plan, client):
            optimizer.zero_grad()
            task_loss(self.data, plan.task, network(x), y).backward()
            optimizer.step()
        self.keep(network, start, used_outputs(self.data, plan.task))

    def batches(self, plan: RoundPlan, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of a client that trains on its own samples, augmented if the data module augments."""
        if self.data.augmentation is None:
            yield from local_batches(self.data, plan, client)
            return
        found = [samples for _, samples in local_samples(self.data, plan, client)]
        whole = [samples for samples in found if len(samples) == self.data.schedule.batch_size]
        for step, samples in enumerate(whole):
            seen = [augmented(self.data, sample.task, sample.index, plan.round, step) for sample in samples]
            labels = self.data.tasks[plan.task].train.labels
            yield torch.stack(seen), labels[[sample.index for sample in samples]]

    def review(self, network: torch.nn.Module, old: torch.nn.Module, plan: RoundPlan, client: int) -> None:
        start = copy.deepcopy(network.state_dict())
        optimizer, shard, order = self.optimizer(network.parameters()), self.shards[client], []
        outputs, temperature = self.compared(plan.task), self.method.temperature
        number = 0
        for _, y in local_batches(self.data, plan, client):
            while len(order) < len(y):
                key = (plan.round, client, number)
                order += numpy_generator(self.data.seed, "cfed order", *key).permutation(shard).tolist()
                number += 1
            chosen, order = order[: len(y)], order[len(y) :]
            x = self.images[chosen]
            with torch.no_grad():
                target = softened(self.logits(old, x, self.batchnorm == "drop")[:, outputs], temperature)
            optimizer.zero_grad()
            (self.method.weight * soft_cross_entropy(network(x)[:, outputs], target, temperature)).backward()
            optimizer.step()
        self.keep(network, start, outputs)

    def keep(self, network: torch.nn.Module, start: dict[str, Tensor], outputs: slice) -> None:
        """Restore the head's other rows: momentum and decay must not move outputs that are not in the loss."""
        for name, value in network.state_dict().items():
            if name.startswith("head."):
                rows = start[name].clone()
                rows[outputs] = value[outputs]
                value.copy_(rows)

    def imitate(self, models: list[torch.nn.Module], plan: RoundPlan) -> None:
        optimizer = torch.optim.SGD(self.network.parameters(), lr=self.method.server_lr)
        by_batch = self.batchnorm != "average"
        outputs, temperature = self.compared(plan.task + 1), self.method.temperature
        for epoch in range(self.method.server_distillation):
            key = (plan.round, epoch, 0)
            order = numpy_generator(self.data.seed, "cfed order of the server", *key).permutation(self.shards[-1])
            for start in range(0, len(order), self.data.schedule.batch_size):
                x = self.images[order[start : start + self.data.schedule.batch_size]]
                with torch.no_grad():
                    found = [softened(self.logits(m, x, by_batch)[:, outputs], temperature) for m in models]
                optimizer.zero_grad()
                target = torch.stack(found).mean(0)
                student = self.logits(self.network, x, by_batch)[:, outputs]
                soft_cross_entropy(student, target, temperature).backward()
                optimizer.step()


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("scenario", "epochs", "batchnorm", "optimizer"),
    [
        ("class", 0, "average", sgd),
        ("task", 0, "average", sgd),
        ("class", 2, "average", sgd),
        ("task", 1, "average", sgd),
        ("task", 1, "average", partial(torch.optim.SGD, lr=0.1, weight_decay=0.3)),
        ("class", 1, "local", sgd),
        ("class", 1, "drop", sgd),
    ],
)
def test_it_is_the_plain_loop(width: int, scenario: str, epochs: int, batchnorm: str, optimizer: Any) -> None:
    assert_is_the_loop(width, scenario, epochs, batchnorm, optimizer)


@pytest.mark.parametrize("width", [1, 3])
def test_clients_samples_are_augmented_and_surrogate_images_are_not(width: int) -> None:
    """Reviewing clients, the old model and the server see surrogate images as they are."""
    assert_is_the_loop(width, "class", 1, "average", sgd, augmentation=CropFlip(1))


def assert_is_the_loop(width: int, scenario: str, epochs: int, batchnorm: str, optimizer: Any, **options: Any) -> None:
    whole_batches = {"batch_size": 3, "drop_last": True}  # torch's BatchNorm refuses a last batch of one sample
    data = data_of(width, scenario, schedule=whole_batches, **options)
    method = CFeD(surrogate(), 0.5, 3.0, 0.7, server_distillation=epochs, server_lr=0.3)
    client = tiny_client(data, double(norm_net), optimizer, {"cfed": method})
    network = plain_network(data, double(norm_net), copy.deepcopy(client.network.state_dict()))
    federation = fit(client, data, {"batchnorm": batchnorm})
    naive = Naive(data_of(1, scenario, schedule=whole_batches, **options), method, network, batchnorm, optimizer)
    for name, value in weights(federation).items():
        expected = naive.network.state_dict()[name]
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-9, check_dtype=False)
    model = sum(t.numel() * t.element_size() for t in federation.model.shared_tensors().values())
    assert federation.channel.downlink_bytes["cfed old model"] == naive.late * model
    assert naive.late > 0


# Which clients review, and where their samples go.


@pytest.mark.parametrize(("share", "count"), [(0.4, 2), (0.25, 1), (0.5, 2), (0.99, 3), (0.0, 0)])
def test_a_share_of_every_rounds_clients_reviews_but_never_all(share: float, count: int) -> None:
    method = CFeD(surrogate(), share)
    federation = run(method, data_of(schedule={"rounds_per_task": 6}))
    drawn = [method._reviewing(federation.schedule.round(r)) for r in range(18)]
    assert [len(who) for who in drawn] == [0] * 6 + [count] * 12
    assert all(who <= set(federation.schedule.round(r).clients) for r, who in enumerate(drawn))
    assert count == 0 or len(set(drawn[6:])) > 2


@pytest.mark.parametrize("offered", ["every_step", "once"])
@pytest.mark.parametrize("first", ["cfed", "der"])
def test_the_samples_of_who_reviews_stay_out_of_the_buffers(first: str, offered: Any) -> None:
    """A reviewing client offers no samples: their logits would be those of surrogate images.

    With ``offered`` once, a client offers its samples in its first training on the task.
    """
    data, method = data_of(), CFeD(surrogate(), 0.5)
    both: dict[str, Method] = {"cfed": method, "der": DER(1.0, 0.0, 4)}
    methods = {name: both[name] for name in sorted(both, reverse=first == "der")}
    federation = fit(replay_client(data, methods, double(norm_net), ReplayBuffer(10, offered=offered)), data)
    seen, trained, late = [0] * 5, set[tuple[int, int]](), False
    for number in range(data.num_rounds):
        plan = data.rounds.round(number)
        reviewing = method._reviewing(plan)
        late |= any((client, plan.task) not in trained and not plan.last_of_task for client in reviewing)
        for client in set(plan.clients) - reviewing:
            passes = 2 if offered == "every_step" else int((client, plan.task) not in trained)
            seen[client] += passes * len(data.indices[plan.task][client])
            trained.add((client, plan.task))
    assert late, "somebody reviews before it has trained on the task"
    for client in range(5):
        table = federation.clients.get("buffer", client)
        assert (0 if table is None else int(table["seen"])) == seen[client]


@pytest.mark.parametrize("first", ["cfed", "er"])
def test_the_samples_of_who_reviews_stay_out_of_a_memory_that_is_filled_in_steps(first: str) -> None:
    data, method = data_of(), CFeD(surrogate(), 0.5)
    both: dict[str, Method] = {"cfed": method, "er": ER(400, per_task=False, update="step")}
    methods = {name: both[name] for name in sorted(both, reverse=first == "er")}
    federation = fit(tiny_client(data, double(mlp), sgd, methods), data)
    offered, trained = [0] * 5, set[tuple[int, int]]()
    for number in range(data.num_rounds):
        plan = data.rounds.round(number)
        for client in set(plan.clients) - method._reviewing(plan):
            offered[client] += 2 * len(data.indices[plan.task][client])
            trained.add((client, plan.task))
    for client in range(5):
        table = federation.clients.get("er memory", client)
        assert table is not None
        assert int(table["seen"]) == offered[client]
        held = set(table["task"][table["index"] >= 0].tolist())
        assert held == {task for of, task in trained if of == client}


class Watch(Method):
    """Record each step's own samples as methods behind CFeD see them."""

    def __init__(self, free: bool) -> None:
        self.task_free = free
        self.seen: list[tuple[int, int, Tensor]] = []

    def extend_batch(self, cohort: Any, batch: Any) -> Any:
        for row, client in enumerate(cohort.clients):
            count = int(batch.mask[row].sum())
            self.seen.append((cohort.round, client, batch.samples(row, count)[0]))
        return batch


@pytest.mark.parametrize("free", [False, True])
def test_who_reviews_sees_its_shard_and_nothing_else(free: bool) -> None:
    """A reviewing client sees none of its own samples. Counts of its shard's images differ by at most one."""
    watch, method, data = Watch(free), CFeD(surrogate(), 0.5), data_of(3)
    run(method, data, others={"watch": watch})
    images = ((surrogate().load(Path())[0].images.double() / 255 - 0.5) / 0.25).flatten(1)
    dealt = shards(30, 5, data.seed, "cfed shards")
    reviewed = 0
    for number in range(data.num_rounds):
        plan = data.rounds.round(number)
        for client in plan.clients:
            seen = torch.cat([x for r, c, x in watch.seen if (r, c) == (number, client)]).double().flatten(1)
            assert len(seen) == 2 * len(data.indices[plan.task][client])
            near = torch.cdist(seen, images)
            if client not in method._reviewing(plan):
                assert float(near.min()) > 0.5
                continue
            reviewed += 1
            assert float(near.min(1).values.max()) < 1e-4
            counts = torch.bincount(near.argmin(1), minlength=30)
            assert set(counts.nonzero().flatten().tolist()) <= set(dealt[client].tolist())
            of_shard = counts[dealt[client]]
            assert int(of_shard.max() - of_shard.min()) <= 1
    assert reviewed == 8


def test_the_order_of_methods_does_not_matter() -> None:
    found = []
    for names in (["cfed", "er"], ["er", "cfed"]):
        methods: dict[str, Method] = {"cfed": CFeD(surrogate(), 0.5), "er": ER(2)}
        data = data_of()
        found.append(weights(fit(tiny_client(data, double(mlp), sgd, {n: methods[n] for n in names}), data)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


def test_it_composes_with_icarl() -> None:
    """A run with both methods differs from the runs with either one."""
    after = []
    for names in (["cfed", "icarl"], ["cfed"], ["icarl"]):
        both, data = {"cfed": CFeD(surrogate(), 0.5), "icarl": ICaRL(12)}, data_of()
        after.append(weights(fit(tiny_client(data, double(mlp), sgd, {n: both[n] for n in names}), data)))
    for plain in after[1:]:
        assert max(float((after[0][n] - v).abs().max()) for n, v in plain.items()) > 1e-3


def test_buffers_of_clients_that_review_before_they_have_trained() -> None:
    """With two of five clients a round, some review in their first round. Their buffers are offered nothing."""
    late = 0

    class Newcomers(Method):
        """Count reviewing clients whose buffer has never been offered a sample."""

        def finish_clients(self, cohort: Any, positions: Any) -> None:
            nonlocal late
            buffer = self.context.buffer
            assert buffer is not None
            late += sum(int(buffer._table["seen"][p]) == 0 for p in positions if p in cohort.withheld)

    data = data_of(schedule={"clients_per_round": 2, "rounds_per_task": 1})
    federation = run(CFeD(surrogate(), 0.5), data, others={"agem": AGEM(4), "newcomers": Newcomers()})
    assert late > 0
    assert federation.finished


class Weights(Method):
    """The greatest weight of a client's own samples in its loss, and how far it has moved."""

    def __init__(self) -> None:
        self.weight: dict[tuple[int, int], float] = {}
        self.moved: dict[tuple[int, int], float] = {}

    def extend_batch(self, cohort: Any, batch: Any) -> Any:
        _, samples = batch.joined_samples(cohort.train_outputs)
        for row, client in enumerate(cohort.clients):
            if batch.mask[row].any():
                own = samples.weights[row][samples.source[row] == 0]
                self.weight[cohort.round, client] = float(own.max())
        return batch

    def finish_clients(self, cohort: Any, positions: Any) -> None:
        for p in positions:
            moved = max(float((v[p] - cohort.global_parameters[n]).abs().max()) for n, v in cohort.parameters.items())
            self.moved[cohort.round, cohort.clients[p]] = moved


@pytest.mark.parametrize("others", [{}, {"icarl": ICaRL(12)}])
def test_labels_of_who_reviews_have_no_part(others: dict[str, Method]) -> None:
    """A reviewing client's own samples have weight 0. Alone, with ``weight`` 0, its model stays as it was sent."""
    method, watch = CFeD(surrogate(), 0.5, weight=0.0), Weights()
    federation = run(method, network=mlp, others={**others, "watch": watch})
    for (number, client), moved in watch.moved.items():
        reviews = client in method._reviewing(federation.schedule.round(number))
        assert (watch.weight[number, client] == 0) == reviews
        assert others or (moved == 0) == reviews


def test_server_distillation_goes_on_after_an_interruption(tmp_path: Path) -> None:
    def of(**options: Any) -> Federation:
        return run(CFeD(surrogate(), 0.5, server_distillation=1), **options)

    whole = of(callbacks=[SaveAfter(2, tmp_path / "a.ckpt")])
    resumed = of(ckpt_path=str(tmp_path / "a.ckpt"))
    for name, value in weights(whole).items():
        assert torch.equal(weights(resumed)[name], value)


@pytest.mark.parametrize("exposure", ["sequential", "cumulative"])
def test_who_reviews_leaves_the_new_tasks_outputs_alone(exposure: Any) -> None:
    """Weight decay moves no output that had no part in a client's loss."""

    class Watch(Method):
        def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
            if cohort.task == 1:
                for row in sorted(cohort.withheld):
                    start = cohort.global_parameters["head.weight"]
                    moved.append((cohort.parameters["head.weight"][row] - start).abs().sum(1).tolist())

    moved: list[list[float]] = []
    data = data_of(scenario="task", exposure=exposure)
    decayed = partial(torch.optim.SGD, lr=0.1, weight_decay=0.05)
    client = tiny_client(data, double(mlp), decayed, {"cfed": CFeD(surrogate(), 0.5), "watch": Watch()})
    fit(client, data)
    assert len(moved) == 4
    for of_outputs in moved:
        assert min(of_outputs[:2]) > 0
        assert of_outputs[2:] == [0.0] * 4


def test_server_distillation_is_computed_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process's own rounding would otherwise grow with the steps."""
    computed: list[Any] = []

    def at_server(context: Context, compute: Any) -> Any:
        computed.append(compute())
        return {name: torch.full_like(value, 7) for name, value in computed[-1].items()}

    monkeypatch.setattr(Context, "at_server", at_server)
    federation = run(CFeD(surrogate(), 0.5, server_distillation=1), network=mlp)
    assert len(computed) == 6
    assert all(bool((weight == 7).all()) for weight in federation.network.parameters())


def test_a_checkpoint_goes_on_with_its_surrogate_images_or_not_at_all(tmp_path: Path) -> None:
    run(CFeD(surrogate(), 0.5), callbacks=[SaveAfter(2, tmp_path / "a.ckpt")])
    run(CFeD(surrogate(), 0.5), ckpt_path=str(tmp_path / "a.ckpt"))
    with pytest.raises(ConfigError, match=r"other images of methods\.cfed\.surrogate: they have changed"):
        run(CFeD(surrogate(31), 0.5), ckpt_path=str(tmp_path / "a.ckpt"))
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    del checkpoint["federation"]["methods"]["cfed"]["surrogate"]  # as in a checkpoint of a version that did not save it
    write_checkpoint(checkpoint, tmp_path / "a.ckpt")
    run(CFeD(surrogate(31), 0.5), ckpt_path=str(tmp_path / "a.ckpt"))


def test_server_distillation_acts_within_the_first_task() -> None:
    watch, plain = Rounds(), Rounds()
    run(CFeD(surrogate(), server_distillation=1), callbacks=[watch])
    run(CFeD(surrogate()), callbacks=[plain])
    assert any(not torch.equal(watch.models[0][n], v) for n, v in plain.models[0].items())


@pytest.mark.parametrize(("epochs", "largest"), [(0, 7), (1, 6)])
def test_clients_keep_the_old_model_and_a_shard(epochs: int, largest: int) -> None:
    """31 images of 16 bytes for five clients, or for six parties with the server, and 8 bytes per weight."""
    model = 8 * (16 * 8 + 8 + 8 * 6 + 6)
    method = CFeD(surrogate(31), 0.5, server_distillation=epochs)
    federation = run(method, network=mlp)
    assert federation.client_storage() == method.client_storage() == model + largest * 16
    assert run(CFeD(surrogate(31), 0.0, server_distillation=epochs), network=mlp).client_storage() == 0


# The surrogate set.


def test_shards_are_a_deal() -> None:
    dealt = shards(31, 4, 5, "deal")
    assert sorted(np.concatenate(dealt).tolist()) == list(range(31))
    assert sorted(map(len, dealt)) == [7, 8, 8, 8]
    assert [s.tolist() for s in shards(31, 4, 6, "deal")] != [s.tolist() for s in dealt]


def test_passes_are_permutations_one_after_another() -> None:
    shard = np.array([4, 7, 9])
    found = passes(shard, 8, 0, "order", 1, 2).tolist()
    assert [sorted(found[i : i + 3]) for i in (0, 3)] == [[4, 7, 9]] * 2
    assert passes(shard, 4, 0, "order", 1, 2).tolist() == found[:4]
    assert passes(shard, 40, 0, "order", 1, 3).tolist() != passes(shard, 40, 0, "order", 1, 2).tolist()
    assert passes(shard, 0, 0, "order").tolist() == []


def test_surrogate_images_are_centred_on_black_and_normalised_as_the_stream() -> None:
    stored = Digits().load(Path())[0].images
    images = read_surrogate(Digits(), Path(), (3, 11, 8), "surrogate")
    assert images.shape == (len(stored), 3, 11, 8)
    for channel in range(3):
        assert torch.equal(images[:, channel, 1:9], stored[:, 0])
    assert not images[:, :, [0, 9, 10]].any()
    stream = PixelTransform((0.25,), (0.5,), 255.0, torch.arange(64).flip(0))
    found = normalised_as(stream, Digits.scale)(stored[:5]).double()
    torch.testing.assert_close(found, (stored[:5].double() / 16 - 0.25) / 0.5)


def refused(source: Source, stream: Any = None, share: float = 0.4, **schedule: Any) -> ConfigError:
    data = tiny_data(stream, num_clients=5, schedule={"clients_per_round": 5, **schedule})
    with pytest.raises(ConfigError) as caught:
        fit(tiny_client(data, methods={"mine": CFeD(source, share)}), data)
    return caught.value


def test_a_surrogate_that_does_not_fit_is_refused() -> None:
    large = refused(Digits())
    assert large.key == "methods.mine.surrogate"
    assert "[1, 8, 8]" in str(large)
    assert "[1, 4, 4]" in str(large)
    coloured = refused(Synthetic(2, [3, 4, 4], 20, 2))
    assert "[3, 4, 4]" in str(coloured)
    few = refused(Synthetic(2, [1, 4, 4], 4, 2))
    assert "at least 5" in str(few)


def test_a_share_that_is_nobody_is_refused() -> None:
    assert refused(surrogate(), share=0.4, clients_per_round=1).key == "methods.mine.share"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (PersonalLayers(["head.*"]), "^methods.cfed = 'with parameters kept local' .*one model for all clients"),
        (FedCIL(), "^methods = .*cfed without one that replaces the local loss"),
    ],
)
def test_methods_that_it_cannot_work_with_are_refused(other: Method, message: str) -> None:
    data = tiny_data()
    with pytest.raises(ConfigError, match=message):
        fit(tiny_client(data, methods={"cfed": CFeD(surrogate()), "other": other}), data)
