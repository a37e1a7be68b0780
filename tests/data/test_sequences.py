"""Task sequences: every client learns its own tasks in its own order, and is tested on them."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from support.tiny import SaveAfter, double, fit, mlp, permuted, sgd, split, tiny_client, tiny_data, weights
from torch.func import functional_call

from cfl.data.datamodule import FederatedDataModule
from cfl.data.learned_tasks import learners_of
from cfl.data.partitions import Dirichlet
from cfl.data.sequences import DisjointTasks, FixedTasks, Outputs, RandomTasks
from cfl.data.sources import Synthetic
from cfl.data.streams import Sequence
from cfl.federation.federation import Federation
from cfl.methods import AGEM, ER, EWC, SCAFFOLD, FedCurv
from cfl.methods.base import Method
from cfl.methods.personal import PersonalLayers
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError

OWN = [[2, 0], [1, 2], [0, 1]]
EVERY_OUTPUTS: tuple[Outputs, ...] = get_args(Outputs)


def stream() -> Any:
    """A stream of three tasks of two classes, with 30 training samples of each class."""
    return split(3, classes=6, train=180, test=60)


def data_of(sequences: Any = None, **options: Any) -> FederatedDataModule:
    settings = {"num_clients": 3, "schedule": {"rounds_per_task": 2}, **options}
    return tiny_data(stream(), sequences=FixedTasks(OWN) if sequences is None else sequences, **settings)


def test_random_tasks_are_distinct_and_keyed_by_client() -> None:
    few, many = (RandomTasks(4).of_clients(clients, 9, seed=3) for clients in (5, 50))
    assert many.shape == (50, 4)
    assert np.array_equal(few, many[:5]), "another number of clients changes nobody's tasks"
    assert all(len(set(own)) == 4 for own in many.tolist())
    counts = np.bincount(np.concatenate([RandomTasks(4).of_clients(500, 9, s).ravel() for s in range(4)]), minlength=9)
    expected = 4 * 500 * 4 / 9
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
    assert not np.array_equal(many, RandomTasks(4).of_clients(50, 9, seed=4))


def test_written_out_sequences_may_be_cut_off() -> None:
    cut = FixedTasks([[4, 2, 3], [0, 1, 2]], count=2)
    assert cut.length == 2
    assert cut.of_clients(2, 5, 0).tolist() == [[4, 2], [0, 1]]


def test_disjoint_tasks_leave_none_to_two_clients() -> None:
    found = DisjointTasks(3).of_clients(4, 13, seed=1)
    assert found.shape == (4, 3)
    assert len(set(found.ravel().tolist())) == 12
    assert not np.array_equal(found, DisjointTasks(3).of_clients(4, 13, seed=2))


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: DisjointTasks(0), "data.sequences.count"),
        (lambda: DisjointTasks(4).of_clients(4, 13, 0), "data.sequences.count"),
        (lambda: DisjointTasks(1).of_clients(14, 13, 0), "data.num_clients"),
        (lambda: RandomTasks(0), "data.sequences.count"),
        (lambda: RandomTasks(2, split="all"), "data.sequences.split"),  # type: ignore[arg-type]
        (lambda: DisjointTasks(2, outputs="own"), "data.sequences.outputs"),  # type: ignore[arg-type]
        (lambda: data_of(RandomTasks(2, outputs="place"), scenario="class"), "data.scenario"),
        (lambda: data_of(RandomTasks(4, outputs="place")), "data.sequences.count"),
        (lambda: RandomTasks(10).of_clients(2, 9, 0), "data.sequences.count"),
        (lambda: FixedTasks([[0, 1], [2]]), "data.sequences.tasks"),
        (lambda: FixedTasks([[0, 0]]), "data.sequences.tasks"),
        (lambda: FixedTasks([[0, 1]], count=3), "data.sequences.count"),
        (lambda: FixedTasks([[0, 1]], count=0), "data.sequences.count"),
        (lambda: FixedTasks([[0, 9]]).of_clients(1, 9, 0), "data.sequences.tasks"),
        (lambda: FixedTasks([[0, 1]]).of_clients(2, 9, 0), "data.num_clients"),
        (lambda: data_of(exposure="asynchronous"), "data.exposure"),
        (lambda: tiny_data(permuted(), sequences=RandomTasks(2), repartition=False), "data.repartition"),
        (lambda: data_of(FixedTasks(OWN, split="whole"), partition=Dirichlet(0.5)), "data.partition"),
        (lambda: data_of(FixedTasks(OWN, split="whole"), validation=0.1), "data.validation"),
    ],
)
def test_settings_that_cannot_work(make: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.key == key


def test_a_method_that_needs_the_common_order_is_refused() -> None:
    data = data_of()
    with pytest.raises(ConfigError, match="same tasks in step"):
        fit(tiny_client(data, methods={"er": ER()}), data)


@pytest.mark.parametrize(("split_over", "size"), [("holders", 30), ("clients", 20), ("whole", 60)])
def test_a_task_is_dealt_to_those_who_learn_it(split_over: Any, size: int) -> None:
    data = data_of(FixedTasks(OWN, split=split_over))
    assert data.num_tasks == 2
    for position in range(2):
        for client in range(3):
            places = torch.from_numpy(data.indices[position][client])
            tasks, index = data.global_index.split(places)
            assert tasks.unique().tolist() == [OWN[client][position]]
            assert len(index) == size, "60 samples a task over its two learners, over three clients, or all to each"
            assert len(index.unique()) == size
            x, y = data.gather(position, places)
            images = data.tasks[OWN[client][position]]
            assert torch.equal(x, images.transform(images.train.images[index]))
            assert torch.equal(y, images.train.labels[index] + 2 * OWN[client][position])
            assert np.array_equal(data.client_global_index(position, client), places.numpy())
    held = [place for p in range(2) for own in data.indices[p].values() for place in own.tolist()]
    assert (len(held) == len(set(held))) == (split_over != "whole"), "nobody shares a sample, unless each has them all"
    assert data.learners(0) == [(0, 1), (2, 0)]
    assert data.learners(2) == [(0, 0), (1, 1)]


@pytest.mark.parametrize("settings", [{}, {"validation": 0.25, "evaluate_on": "validation"}])
def test_a_task_that_nobody_learns_is_dealt_to_nobody(settings: dict[str, Any]) -> None:
    """Its 40 samples are too few for five clients, but each learned task has one holder."""
    partition, sequences = Dirichlet(0.3, min_samples=10), DisjointTasks(1)
    data = tiny_data(
        split(10, classes=20, train=400), num_clients=5, partition=partition, sequences=sequences, seed=4, **settings
    )
    learned = sequences.of_clients(5, 10, data.seed).flatten().tolist()
    for task, own in enumerate(data._whole_deal()):
        assert list(own) == ([learned.index(task)] if task in learned else [])
        if own:
            labels, generator = data.tasks[task].train.labels.numpy(), numpy_generator(data.seed, "partition", task)
            assert np.array_equal(own[learned.index(task)], partition.split(labels, 1, generator)[0])
    federation = fit(tiny_client(data), data)
    assert federation.finished
    assert federation.accuracy.compute().isfinite().all()


def test_learners_of_all_tasks_are_found_in_one_pass() -> None:
    """They are those of a search per task, and no client is searched in an array of members."""

    class NotSearched(np.ndarray):
        def __contains__(self, client: object) -> bool:
            raise AssertionError("searched an array")

    rng = np.random.default_rng(0)
    order = np.stack([rng.permutation(7)[:3] for _ in range(40)])
    members = [np.flatnonzero(rng.random(40) < 0.7) for _ in range(3)]
    expected = [
        [(c, t) for c, t in itertools.product(range(40), range(3)) if order[c, t] == task and (members[t] == c).any()]
        for task in range(8)
    ]
    assert learners_of(order, 8, [own.view(NotSearched) for own in members]) == expected


@pytest.mark.parametrize(
    ("split_over", "validation"), [("holders", 0.0), ("holders", 0.2), ("clients", 0.0), ("whole", 0.0)]
)
def test_outputs_by_place_change_labels_and_nothing_else_of_the_samples(split_over: Any, validation: float) -> None:
    by_task, by_place = (
        data_of(FixedTasks(OWN, split_over, outputs=of), validation=validation) for of in EVERY_OUTPUTS
    )
    assert (by_task.num_outputs, by_place.num_outputs) == (6, 4)
    for position, client in itertools.product(range(2), range(3)):
        every = [torch.from_numpy(data.indices[position][client]) for data in (by_task, by_place)]
        (x, y), (x_place, y_place) = by_task.gather(position, every[0]), by_place.gather(position, every[1])
        assert torch.equal(x, x_place) or bool(validation), "others are set aside, which is keyed by the task's number"
        assert len(x) == len(x_place)
        if not validation:
            assert torch.equal(y - 2 * OWN[client][position], y_place - 2 * position)
        assert y_place.unique().tolist() == [2 * position, 2 * position + 1]
        allowed = by_place.outputs_in_loss(position, client)
        assert allowed is not None
        assert allowed.nonzero().flatten().tolist() == [2 * position, 2 * position + 1]
        assert by_place.learners(2 * client + position) == [(client, position)]
        assert by_place.evaluated[2 * client + position] is by_place.tasks[2 * client + position]
    names = [data.stream.class_names(Path(), 0) for data in (by_task, by_place)]
    assert names[1] == [names[0][task] for own in OWN for task in own]


def test_a_place_has_outputs_for_the_largest_of_its_tasks() -> None:
    stream = Sequence([Synthetic(classes, [1, 4, 4], 80, 40) for classes in (2, 4, 3)])
    data = tiny_data(stream, num_clients=2, sequences=FixedTasks([[0, 1], [2, 0]], outputs="place"))
    assert data.outputs.offsets == (0, 3, 0, 3)
    assert data.outputs.own.long().tolist() == [
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 1, 1],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
    ]


def run(methods: dict[str, Method] | None = None, width: int = 10, **options: Any) -> Federation:
    data = data_of(**{**options, "schedule": {"rounds_per_task": 2, "cohort_width": width}})
    return fit(tiny_client(data, double(mlp), methods=methods), data)


@pytest.mark.parametrize("outputs", EVERY_OUTPUTS)
def test_federated_averaging_is_a_plain_loop_over_every_clients_own_tasks(outputs: Any) -> None:
    data, dealt = data_of(FixedTasks(OWN, outputs=outputs)), data_of()
    assert data.num_outputs == (6 if outputs == "task" else 4)
    client = tiny_client(data, double(mlp))
    network = double(mlp)(data.input_shape, data.num_outputs)
    network.load_state_dict(client.network.state_dict())
    model = {n: p.detach().clone() for n, p in network.named_parameters()}
    matrix = torch.full((3, 2, 2), torch.nan, dtype=torch.float64)

    federation = fit(client, data)

    from cfl.data.orders import RoundOrders  # the order of a client's samples is not what is tested

    for number in range(data.num_rounds):
        plan = data.rounds.round(number)
        total = {n: torch.zeros_like(v) for n, v in model.items()}
        for c in plan.clients:
            own, task = dealt.indices[plan.task][c], OWN[c][plan.task]
            first = 2 * (task if outputs == "task" else plan.task)
            steps = -(-len(own) // 8)
            index, mask = RoundOrders(0, number, [c], 1).cut([c], [own], [steps], 8)
            local = {n: v.clone().requires_grad_() for n, v in model.items()}
            for step in range(steps):
                places = torch.from_numpy(index[0, step][mask[0, step]])
                at = places - int(dealt.global_index.starts[task])
                x = dealt.tasks[task].transform(dealt.tasks[task].train.images[at]).double()
                y = dealt.tasks[task].train.labels[at]
                logits = functional_call(network, local, (x,))[:, first : first + 2]
                gradients = torch.autograd.grad(F.cross_entropy(logits, y), list(local.values()))
                local = {
                    n: (v - 0.1 * g).detach().requires_grad_()
                    for (n, v), g in zip(local.items(), gradients, strict=True)
                }
            for n, v in local.items():
                total[n] += v.detach() / len(plan.clients)
        model = total
        if plan.last_of_task:
            for c in range(3):
                for position, task in enumerate(OWN[c]):
                    test = dealt.tasks[task].test
                    x = dealt.tasks[task].transform(test.images)
                    first = 2 * (task if outputs == "task" else position)
                    logits = functional_call(network, model, (x,))[:, first : first + 2]
                    right = (logits.argmax(1) == test.labels).double().mean()
                    matrix[c, plan.task, position] = 100 * right
    torch.testing.assert_close(weights(federation), model, rtol=0, atol=1e-12)
    torch.testing.assert_close(federation.accuracy.compute(), matrix, rtol=0, atol=1e-9)
    figures = federation.accuracy.summary()
    assert figures["clients_evaluated"] == 3
    assert figures["acc"] == pytest.approx(matrix[:, 1].mean().item())
    assert figures["fgt"] == pytest.approx((matrix[:, 0, 0] - matrix[:, 1, 0]).mean().item())


def test_the_streams_order_as_everyones_sequence_is_no_sequence_at_all() -> None:
    common = tiny_data(stream(), num_clients=3)
    same = tiny_data(stream(), num_clients=3, sequences=FixedTasks([[0, 1, 2]] * 3))
    models = [weights(fit(tiny_client(data, double(mlp)), data)) for data in (common, same)]
    torch.testing.assert_close(models[1], models[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "methods",
    [
        {},
        {"ewc": EWC(10.0)},
        {"fedcurv": FedCurv(1.0)},
        {"scaffold": SCAFFOLD(variant="I")},
        {"agem": AGEM()},
        {"personal": PersonalLayers(["*"])},
    ],
    ids=lambda methods: "-".join(methods) or "fedavg",
)
def test_width_does_not_matter(methods: dict[str, Method]) -> None:
    import copy

    runs = [run(copy.deepcopy(methods), width, partition=Dirichlet(1.0, 4)) for width in (1, 3)]
    torch.testing.assert_close(weights(runs[1]), weights(runs[0]), rtol=0, atol=1e-9)
    assert torch.equal(runs[0].accuracy.compute(), runs[1].accuracy.compute())


@pytest.mark.parametrize("outputs", EVERY_OUTPUTS)
def test_a_run_goes_on_where_it_stopped(outputs: Outputs, tmp_path: Path) -> None:
    def fresh() -> tuple[Any, FederatedDataModule]:
        data = data_of(RandomTasks(2, outputs=outputs))
        return tiny_client(data, double(mlp), sgd, {"ewc": EWC(10.0)}), data

    client, data = fresh()
    straight = fit(client, data, callbacks=[SaveAfter(2, tmp_path / "a.ckpt")])
    client, data = fresh()
    resumed = fit(client, data, ckpt_path=tmp_path / "a.ckpt")
    for name, value in weights(straight).items():
        assert torch.equal(weights(resumed)[name], value)
    assert torch.equal(straight.accuracy.compute().nan_to_num(), resumed.accuracy.compute().nan_to_num())


def test_personal_models_are_tested_on_their_own_tasks() -> None:
    federation = run({"personal": PersonalLayers(["*"])})
    data = federation.data
    for client in range(3):
        own = federation.clients.get("model", client)
        assert own is not None
        for position, task in enumerate(OWN[client]):
            test = data.tasks[task].test
            x = data.tasks[task].transform(test.images)
            logits = functional_call(federation.network, own, (x,))[:, 2 * task : 2 * task + 2]
            right = 100 * (logits.argmax(1) == test.labels).double().mean().item()
            assert federation.accuracy.compute()[client, 1, position].item() == pytest.approx(right)


def test_cumulative_exposure_adds_a_clients_own_earlier_tasks() -> None:
    data = data_of(exposure="cumulative")
    places = torch.from_numpy(np.asarray(data.trained_on(1)[0]))
    assert set(data.global_index.tasks(places).tolist()) == {0, 2}
    assert len(data.trained_on(0)[0]) == 30
    assert len(places) == 60


def test_weight_decay_leaves_outputs_alone_that_a_client_does_not_train() -> None:
    data = data_of(schedule={"rounds_per_task": [2, 1]})
    decaying = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    client = tiny_client(data, mlp, decaying, {"personal": PersonalLayers(["*"])})
    initial = client.network.state_dict()["head.weight"].clone()
    after = AfterTask()
    fit(client, data, callbacks=[after])
    for c in range(3):
        moved = (after.heads[0][c] != initial).any(1).view(3, 2).any(1)
        assert moved.nonzero().squeeze(1).tolist() == OWN[c][:1]


class AfterTask(Callback):
    """Every client's head after each task."""

    def __init__(self) -> None:
        self.heads: list[list[torch.Tensor]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        federation = pl_module.federation
        if federation.schedule.round(federation.round - 1).last_of_task:
            self.heads.append([federation.clients.get("model", c)["head.weight"] for c in range(3)])
