"""Several processes that share the clients end with the numbers of a single process."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from support import tiny_cli
from support.tiny import (
    MOMENTUM,
    UNBALANCED,
    ConvNet,
    Owned,
    double,
    dropping,
    fit,
    mlp,
    norm_net,
    permuted,
    source,
    split,
    tiny_client,
    tiny_data,
    weights,
)

from cfl.data.augmentation import CropFlip
from cfl.data.cohorts import CohortBatch
from cfl.data.evaluation import EvaluationBatch
from cfl.data.participation import Holders, Joining
from cfl.data.partitions import IID, Dirichlet, Natural
from cfl.data.schedule import RoundPlan
from cfl.data.sources import Binarised, Synthetic
from cfl.data.streams import Permuted
from cfl.engines import EngineOptions
from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import (
    AGEM,
    CONFEDMADE,
    DER,
    ER,
    EWC,
    FOT,
    GLFC,
    GPM,
    RGO,
    SCAFFOLD,
    CFeD,
    FedAGEM,
    FedCIL,
    FedCurv,
    FedProx,
    FedWeIT,
    GradientCompensation,
    LearningRateDecay,
    Method,
    PersonalLayers,
    SingleTask,
)
from cfl.models import ACGAN, MADE, TinyYOLO
from cfl.runtime.distributed import gather, rank
from cfl.runtime.errors import DataFilesMissing
from cfl.testing.processes import Crew, arrays, several
from cfl.testing.tiny_data import squares
from cfl.training.client import Client


class Scales(Method):
    """Sends individual messages, and keeps on every client the distance that it has moved so far."""

    individual_uplinks = True

    def __init__(self) -> None:
        self.heard: list[dict[int, float]] = []

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        clients = [cohort.clients[p] for p in positions]
        trained = cohort.rows(positions, cohort.parameters)["head.bias"]
        moved = (trained - cohort.global_parameters["head.bias"]).abs().sum(1)
        before = self.context.clients.gather("moved", clients, {"by": torch.zeros((), dtype=moved.dtype)})
        self.context.clients.scatter("moved", clients, {"by": before["by"] + moved})
        self.context.channel.uplink_individually("scale", {"norm": moved}, clients)

    def end_round(self, plan: RoundPlan) -> None:
        scales = self.context.channel.collect_individually("scale")
        assert list(scales) == list(plan.clients)
        for client in scales:  # every process has the state of all clients, whichever process trained them
            assert self.context.clients.get("moved", client) is not None
        self.heard.append({client: message["norm"].item() for client, message in scales.items()})

    def state_dict(self) -> dict[str, Any]:
        return {"heard": self.heard}


class Counts(Method):
    """Counts local steps, and asserts that each has gradients, that is, clients."""

    def __init__(self) -> None:
        self.steps = 0

    def adjust_gradients(self, cohort: Cohort) -> None:
        assert cohort.gradients
        self.steps += 1

    def end_task(self, plan: RoundPlan) -> None:
        if plan.task == 1:
            self.steps = sum(gather(self.steps))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}


SKEWED = Dirichlet(0.05, min_samples=0, balance=False)
OWN_OUTPUTS = {"scenario": "class", "class_loss": "own"}

# name -> network, methods, options of the data, options of the orchestrator
VARIANTS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "detection": (
        partial(TinyYOLO, width=2),
        lambda: {"der": DER(batch_size=4), "fed_agem": FedAGEM(8)},
        {"stream": squares(2), "partition": IID(), "exposure": "streaming", "eval_batch_size": 5},
        {},
    ),
    "unequal clients": (mlp, dict, {}, {"client_weighting": "samples", "server_momentum": 0.5}),
    "one client per round": (mlp, dict, {"schedule": {"clients_per_round": 1, "evaluate_every": 1}}, {}),
    "fot": (ConvNet, lambda: {"fot": FOT(0.9)}, {"schedule": {"clients_per_round": 3}}, {}),
    "fot where clients hold some tasks": (
        ConvNet,
        lambda: {"fot": FOT(0.9, gpse_clients="all")},
        {"stream": permuted(3), "participation": Holders(), "partition": SKEWED, "schedule": {"clients_per_round": 4}},
        {},
    ),
    "fot local": (ConvNet, lambda: {"fot": FOT(0.9, gpse_model="local", residual_share="client_mean")}, {}, {}),
    "fot all": (
        norm_net,
        lambda: {"fot": FOT(0.8, layers=["conv", "fc"], gpse_clients="all"), "own": PersonalLayers(["head.*"])},
        {"schedule": {"clients_per_round": 2}, "stream": permuted(3)},
        {},
    ),
    "personal": (
        norm_net,
        lambda: {"own": PersonalLayers(["fc*"])},
        {"participation": Joining(3, 2), "schedule": {"clients_per_round": 2}, "eval_batch_size": 7},
        {"batchnorm": "local"},
    ),
    "ewc": (norm_net, lambda: {"ewc": EWC(5.0)}, {"schedule": {"clients_per_round": 3}}, {}),
    "fedcurv": (
        norm_net,
        lambda: {"fedcurv": FedCurv(2.0, fisher="sampled", keep=0.5), "own": PersonalLayers(["head.*"])},
        {"schedule": {"clients_per_round": 3}},
        {},
    ),
    "fedweit as printed": (
        mlp,
        lambda: {
            "fedweit": FedWeIT(
                consolidation=1.0, keep=0.4, communicating=0.4, base_mean="clients", lenders="next_round"
            )
        },
        {"stream": permuted(3), "schedule": {"clients_per_round": 3}},
        {},
    ),
    "own clocks": (
        norm_net,
        lambda: {"fedweit": FedWeIT(consolidation=1.0, keep=0.4), "decay": LearningRateDecay(5.0, 1, 0.001, 0.3)},
        {"stream": permuted(3), "validation": 0.3, "schedule": {"clients_per_round": 3, "clock_spread": 0.67}},
        {},
    ),
    "own clocks of one model": (
        mlp,
        lambda: {"prox": FedProx(0.5)},
        {"stream": split(3, classes=6), "schedule": {"clock_spread": 0.67}, "eval_batch_size": 7, **OWN_OUTPUTS},
        {"server_momentum": 0.5},
    ),
    "own clocks with buffers": (
        mlp,
        lambda: {"agem": AGEM(3), "fed_agem": FedAGEM(3, clients="all")},
        {"stream": permuted(3), "schedule": {"clients_per_round": 3, "clock_spread": 0.67}, "buffer": {"size": 4}},
        {},
    ),
    "learning rates": (
        norm_net,
        lambda: {"decay": LearningRateDecay(5.0, 1, 0.001, 0.3), "own": PersonalLayers(["head.*"])},
        {"validation": 0.3, "schedule": {"clients_per_round": 3, "rounds_per_task": 4}},
        {},
    ),
    "confedmade": (
        partial(MADE, hidden=[6], direct=True, order_agnostic=True),
        lambda: {"confedmade": CONFEDMADE(consolidation=1.0, cut_off=0.4)},
        {
            "stream": Permuted(Binarised(source()), 3),
            "scenario": "density",
            "schedule": {"clients_per_round": 3, "rounds_per_task": 2},
        },
        {},
    ),
    "fedcurv of one": (mlp, lambda: {"fedcurv": FedCurv(2.0)}, {"schedule": {"clients_per_round": 1}}, {}),
    "ewc with drawn labels": (mlp, lambda: {"ewc": EWC(5.0, fisher="sampled")}, {}, {}),
    "scaffold, fedprox": (
        mlp,
        lambda: {"prox": FedProx(0.5), "scaffold": SCAFFOLD(any_optimizer=True)},
        {"schedule": {"clients_per_round": 3}},
        {},
    ),
    "scaffold of gradients": (
        norm_net,
        lambda: {"scaffold": SCAFFOLD("I", any_optimizer=True), "own": PersonalLayers(["head.*"])},
        {"schedule": {"clients_per_round": 1}},
        {},
    ),
    "gpm, rgo": (
        ConvNet,
        lambda: {"gpm": GPM(0.9), "rgo": RGO(0.5, feature_encoding=False)},
        {"schedule": {"clients_per_round": 3}},
        {},
    ),
    "replay": (
        mlp,
        lambda: {"er": ER(3, per_task=False, update="step", batch_size=2), "glfc": GradientCompensation(size=2)},
        {"schedule": {"clients_per_round": 3}},
        {},
    ),
    "der, fed-a-gem": (
        mlp,
        lambda: {"der": DER(0.5, 0.5, 3), "fed_agem": FedAGEM(3, clients="all", share=0.8)},
        {"schedule": {"clients_per_round": 3}, "buffer": {"size": 4, "keeps": "raw"}, "augmentation": CropFlip(1)},
        {},
    ),
    "fed-a-gem where clients hold some tasks": (
        mlp,
        lambda: {"own": PersonalLayers(["head.*"]), "fed_agem": FedAGEM(3, clients="holders")},
        {
            "stream": permuted(3),
            "participation": Holders(),
            "partition": SKEWED,
            "schedule": {"clients_per_round": 2},
            "buffer": {"size": 4},
        },
        {},
    ),
    "fedcil with dropout": (
        partial(ACGAN, classifier=dropping, widths=[6], noise_dim=4),
        lambda: {"fedcil": FedCIL(consistency=0.3, consolidation_steps=2, consolidation_batch_size=6)},
        {"schedule": {"clients_per_round": 3}},
        {},
    ),
    "cfed": (
        norm_net,
        lambda: {"cfed": CFeD(Synthetic(3, [1, 4, 4], 30, 3), server_distillation=1), "der": DER(0.5, 0.0, 3)},
        {"schedule": {"clients_per_round": 3}, "buffer": {"size": 4, "offered": "every_step"}},
        {},
    ),
    "glfc with its proxy server": (
        mlp,
        lambda: {"glfc": GLFC(8, threshold=0.0, perturbation_steps=2, inversion_steps=2, images=2)},
        {"stream": split(train=120), "scenario": "class", "schedule": {"clients_per_round": 3}},
        {},
    ),
    "cumulative": (mlp, lambda: {"single": SingleTask()}, {"exposure": "cumulative"}, {"server_momentum": 0.5}),
    "all personal": (mlp, lambda: {"own": PersonalLayers(["*"])}, {"schedule": {"clients_per_round": 3}}, {}),
    "batchnorm": (norm_net, dict, {"eval_batch_size": 7}, {"batchnorm": "average"}),
    "batch statistics": (norm_net, dict, {"eval_batch_size": 7, "eval_shuffle": True}, {"batchnorm": "drop"}),
    "augmentation": (ConvNet, dict, {"augmentation": CropFlip(1), "schedule": {"local_epochs": 2}}, {}),
    "class-incremental": (
        mlp,
        dict,
        {"stream": split(train=120), "scenario": "class", "class_loss": "seen", "schedule": {"clients_per_round": 1}},
        {},
    ),
    "task-incremental": (
        mlp,
        dict,
        {"stream": split(train=120), "scenario": "task", "schedule": {"clients_per_round": 1}},
        {"server_momentum": 0.9},
    ),
    "density": (
        partial(MADE, hidden=[6], order_agnostic=True, num_masks=2, eval_orders=2),
        lambda: {"ewc": EWC(5.0), "own": PersonalLayers(["layers.*"])},
        {
            "stream": Permuted(Binarised(source()), 2),
            "scenario": "density",
            "schedule": {"clients_per_round": 3},
        },
        {},
    ),
    "tests by owner": (
        mlp,
        dict,
        {"stream": Permuted(Owned(), 2), "partition": Natural(), "eval_batch_size": 7, "eval_shuffle": True},
        {},
    ),
    "tests by owner of personal models": (
        mlp,
        lambda: {"own": PersonalLayers(["head.*"])},
        {"stream": Permuted(Owned(), 2), "partition": Natural(), "eval_batch_size": 7},
        {},
    ),
    "clipped": (mlp, lambda: {"counts": Counts()}, {"schedule": {"clients_per_round": 1}}, {}),
    "workers": (mlp, dict, {"schedule": {"clients_per_round": 1}}, {}),
    "single messages": (mlp, lambda: {"scales": Scales()}, {"schedule": {"clients_per_round": 3}}, {}),
}


class Witness(Callback):
    """Records what this process trains and evaluates, and its loss and model after every round."""

    def __init__(self) -> None:
        self.trained: list[tuple[int, int]] = []
        self.evaluated: list[tuple[int, int, int]] = []
        self.steps: list[int] = []
        self.busy_steps = self.backward_passes = 0
        self.losses: list[float] = []
        self.models: list[dict[str, np.ndarray]] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.steps.append(0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: CohortBatch, batch_idx: int) -> None:
        self.steps[-1] += 1
        self.busy_steps += len(batch.clients) > 0
        self.trained += [(pl_module.federation.round, client) for client in batch.clients if batch.opens]

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        self.backward_passes += 1

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: EvaluationBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not trainer.sanity_checking:
            self.evaluated.append((batch.task, batch.start, batch.stop))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        assert self.backward_passes == self.busy_steps
        self.losses.append(pl_module.mean_loss)
        self.models.append(arrays(weights(pl_module.federation)))


def train(
    variant: str,
    size: int,
    as_double: bool = True,
    parallel: dict[str, Any] | None = None,
    engine: EngineOptions | None = None,
    in_blocks: bool = False,
) -> dict[str, Any]:
    """Run a variant as one of ``size`` processes. Returns this process's results.

    A ``Witness`` watches the run, which makes steps single ones, unless ``in_blocks``.
    """
    network, methods, of_data, federated = VARIANTS[variant]
    options: dict[str, Any] = copy.deepcopy(of_data)
    stream, buffer = options.pop("stream", None), ReplayBuffer(**options.pop("buffer", {}))
    schedule = {"rounds_per_task": 2, "batch_size": 4, "cohort_width": 2, **options.pop("schedule", {})}
    data = tiny_data(stream, **{"num_clients": 5, "partition": UNBALANCED, "schedule": schedule, **options})
    if engine is not None:
        schedule["cohort_width"] = "auto"
    engine = engine or (EngineOptions("workers") if variant == "workers" else None)
    client: Client = tiny_client(data, double(network) if as_double else network, MOMENTUM, methods(), engine)
    client.buffer = buffer
    witness = Witness()
    trainer = parallel or (several(size) if size > 1 else {})
    if variant == "clipped":
        trainer["gradient_clip_val"] = 0.3
    federation: Federation = fit(client, data, federated, callbacks=[] if in_blocks else [witness], **trainer)
    return {
        "rank": rank(),
        "state": arrays(federation.state_dict()),
        "weights": arrays(weights(federation)),
        "matrix": federation.measured.compute().numpy(),
        "witness": {name: value for name, value in vars(witness).items() if isinstance(value, list)},
        "plans": [federation.schedule.round(r).clients for r in range(federation.round)],
    }


@pytest.fixture(scope="module")
def three() -> Iterator[Crew]:
    crew = Crew(3)
    yield crew
    crew.close()


_alone: dict[tuple[str, bool], dict[str, Any]] = {}


def alone(variant: str, as_double: bool = True) -> dict[str, Any]:
    if (variant, as_double) not in _alone:
        # With one math thread, as each process of the crew: rounding of float32 convolutions depends on their number.
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            _alone[variant, as_double] = train(variant, 1, as_double)
        finally:
            torch.set_num_threads(before)
    return _alone[variant, as_double]


def assert_the_same_as_one_process(crew: Crew, variant: str) -> None:
    one, results = alone(variant), crew.run(train, variant, len(crew.pipes))
    tolerance = 1e-6 if "fot" in variant or "gpm" in variant else 1e-10  # sketches and bases are float32
    for result in results:
        # States of clients, methods and server, byte counts, skipped clients, accuracy counts.
        tiny_cli.assert_same(result["state"], one["state"], tolerance)
        np.testing.assert_allclose(
            result["matrix"], one["matrix"], rtol=1e-10 if variant in ("density", "confedmade") else 0
        )
        tiny_cli.assert_same(result["witness"]["losses"], one["witness"]["losses"], 1e-5)
        tiny_cli.assert_same(result["witness"]["models"], one["witness"]["models"], tolerance)
    assert [result["rank"] for result in results] == list(range(len(results)))
    initial = one["witness"]["models"][0]
    assert variant == "all personal" or any(not np.array_equal(one["weights"][n], initial[n]) for n in initial)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_are_the_same_as_one(crew: Crew, variant: str) -> None:
    assert_the_same_as_one_process(crew, variant)


@pytest.mark.parametrize("engine", [None, EngineOptions("auto")], ids=["fixed", "auto"])
@pytest.mark.parametrize("variant", ["unequal clients", "ewc", "workers"])
def test_processes_have_as_many_blocks_and_the_same_numbers(three: Crew, variant: str, engine: Any) -> None:
    """All processes have the same numbers and as many blocks, even if their trials measured different times."""
    one = alone(variant)
    for result in three.run(train, variant, len(three.pipes), True, None, engine, True):
        tiny_cli.assert_same(result["weights"], one["weights"], 1e-8)
        tiny_cli.assert_same(result["state"]["clients"], one["state"]["clients"], 1e-8)


@pytest.mark.parametrize("variant", ["unequal clients", "fot", "personal", "task-incremental"])
def test_three_processes_are_the_same_as_one(three: Crew, variant: str) -> None:
    assert_the_same_as_one_process(three, variant)


def test_one_process_may_have_the_strategy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in ``alone``; else the strategy uses all cores
    crew = Crew(1)
    (result,) = crew.run(train, "fot all", 1, True, several(1))
    tiny_cli.assert_same(result["state"], alone("fot all")["state"], 0.0)
    crew.close()


@pytest.mark.parametrize("variant", ["unequal clients", "personal", "one client per round"])
def test_the_work_is_shared_out(three: Crew, variant: str) -> None:
    """Every client of a round is trained by exactly one process, and every test sample is evaluated by one."""
    one, results = alone(variant), three.run(train, variant, len(three.pipes))
    trained = sorted(entry for result in results for entry in result["witness"]["trained"])
    assert trained == [(r, client) for r, clients in enumerate(one["plans"]) for client in clients]
    assert trained == sorted(one["witness"]["trained"])
    for r, clients in enumerate(one["plans"]):
        busy = {result["rank"] for result in results if any(e[0] == r for e in result["witness"]["trained"])}
        assert len(busy) == min(len(clients), len(results))
    steps = [result["witness"]["steps"] for result in results]
    assert all(own == steps[0] for own in steps), "every process takes part in every step of Lightning's"
    if variant == "personal":  # its evaluation shares out clients: the totals in the matrices' state test that
        return
    evaluated = [set(result["witness"]["evaluated"]) for result in results]
    samples = sorted(batch for own in evaluated for batch in own if batch[1] < batch[2])
    assert samples == sorted(set(one["witness"]["evaluated"]))
    busy = [len([batch for batch in own if batch[1] < batch[2]]) for own in evaluated]
    assert max(busy) - min(busy) <= 1


def test_in_float32_all_processes_hold_the_same_bits(crew: Crew) -> None:
    one, results = alone("unequal clients", False), crew.run(train, "unequal clients", len(crew.pipes), False)
    for result in results:
        tiny_cli.assert_same(result["weights"], one["weights"], 1e-6)
        for after, first in zip(result["witness"]["models"], results[0]["witness"]["models"], strict=True):
            for name, value in first.items():
                assert value.dtype == np.float32
                np.testing.assert_array_equal(after[name], value)


def messages(batch_size: int, size: int) -> int:
    """The number of messages between processes in a run."""
    calls = []
    with ExitStack() as stack:
        for name in ("all_reduce", "broadcast", "all_gather", "all_gather_object", "broadcast_object_list", "barrier"):
            original = getattr(dist, name)
            counted = partial(lambda call, *a, **k: (calls.append(1), call(*a, **k))[1], original)
            stack.enter_context(mock.patch.object(dist, name, counted))
        data = tiny_data(schedule={"batch_size": batch_size})
        fit(tiny_client(data), data, **several(size))
    return len(calls)


def unequal_processes(threads: Sequence[int]) -> str:
    """Return the engine chosen in processes of which one has a choice of math threads and the other has none."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads[int(os.environ["LOCAL_RANK"])])
    try:
        data = tiny_data(permuted(2), schedule={"cohort_width": 1, "rounds_per_task": 2})
        client = tiny_client(data, engine=EngineOptions("workers", stack=1))
        federation = fit(client, data, **several())
        assert federation.finished
        return str(client.engine_choice)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [(1, 2), (2, 1)], ids=str)
def test_processes_with_unequal_threads_agree_on_an_engine(crew: Crew, threads: tuple[int, int]) -> None:
    assert len(set(crew.run(unequal_processes, threads))) == 1


def chosen_width(size: int) -> int:
    """The cohort width chosen for a round of eight clients, if the width is open."""
    data = tiny_data(permuted(2), num_clients=8, schedule={"cohort_width": "auto", "rounds_per_task": 1})
    client = tiny_client(data, engine=EngineOptions("workers", 1, stack=8))
    fit(client, data, **(several(size) if size > 1 else {}))  # the test's own process must not join a group
    assert client.engine_choice is not None
    return client.engine_choice.width


def test_no_process_makes_room_for_the_clients_of_others(crew: Crew) -> None:
    assert chosen_width(1) == 8
    size = len(crew.pipes)
    assert crew.run(chosen_width, size) == [8 // size] * size


def test_nothing_is_exchanged_during_local_training(crew: Crew) -> None:
    """The number of messages does not depend on the number of steps. Lightning alone would broadcast in every step."""
    few, many = (set(crew.run(messages, batch_size, len(crew.pipes))) for batch_size in (20, 2))
    assert few == many
    assert min(few) > 6


class SlowSource(Synthetic):
    """A source whose files process 0 writes after a while. The others fail if they read before."""

    def __init__(self, file: Path) -> None:
        super().__init__(4, [1, 4, 4], 80, 40)
        self.file = file

    def read(self, root: Path) -> Any:
        if rank() == 0:
            time.sleep(0.3)
            self.file.write_text("brought")
        elif not self.file.exists():
            raise DataFilesMissing("read before it was there")
        return super().read(root)


class MissingSource(Synthetic):
    def read(self, root: Path) -> Any:
        raise DataFilesMissing("no network")


def read(source: Any, size: int) -> bool:
    data = tiny_data(Permuted(source, 2), schedule={"rounds_per_task": 1})
    return fit(tiny_client(data), data, **several(size)).finished


def test_one_process_brings_the_data_for_all(crew: Crew, tmp_path: Path) -> None:
    assert all(crew.run(read, SlowSource(tmp_path / "file"), len(crew.pipes)))


def test_data_that_cannot_be_had_are_an_error_in_all() -> None:
    crew = Crew(2)
    crew.start(read, MissingSource(4, [1, 4, 4], 80, 40), 2)
    assert [(o.kind, o.message) for o in crew.outcomes()] == [("DataFilesMissing", "no network")] * 2
    crew.close()


class Lonely(Method):
    """Moves the global model by the process's rank, so that processes differ."""

    moves_model_after_round = True

    def end_round(self, plan: RoundPlan) -> None:
        with torch.no_grad():
            self.context.state_tensors()["head.bias"] += rank()


class Mirrored(Method):
    """Changes the sign of a tensor in process 1, which keeps its norm."""

    moves_model_after_round = True

    def end_round(self, plan: RoundPlan) -> None:
        with torch.no_grad():
            self.context.state_tensors()["layers.0.weight"] *= 1 - 2 * rank()


class Loud(Method):
    """An extra round in which every process sends for all clients."""

    def end_task(self, plan: RoundPlan) -> None:
        for client in plan.clients:
            self.context.channel.uplink("extra", {"one": torch.ones(1, 1)}, [1.0], [client])
        self.context.channel.sum("extra")


def misuse(method: type[Method], size: int) -> None:
    data = tiny_data()
    fit(tiny_client(data, methods={"misuse": method()}), data, **several(size))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Lonely, "process 1 has another global model than process 0"),
        (Mirrored, "process 1 has another global model than process 0"),
        (Loud, "client 0 sent from two processes"),
    ],
)
def test_methods_that_ignore_the_other_processes_are_found_out(method: type[Method], message: str) -> None:
    crew = Crew(2)
    crew.start(misuse, method, 2)
    assert all(message in outcome.message for outcome in crew.outcomes())
    crew.close()
