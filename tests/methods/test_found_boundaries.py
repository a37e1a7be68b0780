"""FoundBoundaries finds unannounced task ends from clients' losses, and EWC and FOT use them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from support.naive_fisher import mean_squared_gradients
from support.naive_fot import Watch, layer_rows
from support.tiny import Poison, Rounds, SaveAfter, double, fit, mlp, permuted, split, tiny_client, tiny_data, weights
from torch import Tensor, nn
from torch.func import functional_call

from cfl.data.datamodule import FederatedDataModule
from cfl.federation.federation import Federation
from cfl.methods import EWC, FOT, GPM, FedCurv, FoundBoundaries, InferringFOT, Method, PersonalLayers
from cfl.methods.components.gaussian_mechanism import GaussianMechanism
from cfl.methods.components.layer_inputs.packed import unpack
from cfl.methods.components.page_hinkley import PageHinkley
from cfl.runtime.errors import ConfigError
from cfl.testing import PROPERTIES
from cfl.testing.method_case import MethodCase
from cfl.testing.processes import processes_do_not_matter
from cfl.training.client import Client

ROUNDS = 5
QUICK: dict[str, Any] = {"warm_up": 3, "threshold": 3.0, "keep_every": 3}
quickly = partial(torch.optim.SGD, lr=0.5)


def data_of(
    exposure: Any = "unannounced", tasks: int = 2, clients_per_round: Any = 1.0, **options: Any
) -> FederatedDataModule:
    schedule = {"rounds_per_task": ROUNDS, "clients_per_round": clients_per_round}
    return tiny_data(permuted(tasks, train=120), exposure=exposure, schedule=schedule, **options)


def run(methods: dict[str, Method], data: FederatedDataModule | None = None, **options: Any) -> Federation:
    data = data_of() if data is None else data
    return fit(tiny_client(data, double(mlp), quickly, methods), data, **options)


def rows_of(federation: Federation, name: str) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if "seconds" not in key}
        for row in federation.methods[name].report().rows
    ]


@pytest.mark.parametrize("methods", [{}, {"fedcurv": FedCurv(0.5)}], ids=["fedavg", "fedcurv"])
def test_unannounced_tasks_are_those_of_a_sequential_run(methods: dict[str, Method]) -> None:
    found, told = (run({n: FedCurv(0.5) for n in methods}, data_of(e)) for e in ("unannounced", "sequential"))
    for name, tensor in weights(found).items():
        assert torch.equal(tensor, weights(told)[name])


@pytest.mark.parametrize("method", [EWC(), FOT(), GPM()], ids=lambda method: type(method).__name__)
def test_methods_that_need_boundaries_are_refused_without_them(method: Method) -> None:
    with pytest.raises(ConfigError, match=r"data\.exposure = 'unannounced'.*methods\.some.*where tasks end") as caught:
        run({"some": method})
    assert ("FoundBoundaries" in str(caught.value)) != isinstance(method, GPM)


def test_methods_that_cannot_use_found_boundaries_are_refused_beside_the_finder() -> None:
    with pytest.raises(ConfigError, match=r"data\.exposure.*methods\.gpm"):
        run({"boundaries": FoundBoundaries(), "gpm": GPM()})
    classes = tiny_data(split(3, classes=6), exposure="unannounced", scenario="class")
    with pytest.raises(ConfigError, match=r"methods\.some \(InferringFOT\) needs to know where tasks end$"):
        run({"boundaries": FoundBoundaries(), "some": InferringFOT()}, classes)
    for exposure in ("cumulative", "joint", "streaming-cumulative"):
        with pytest.raises(ConfigError, match=rf"data\.exposure = '{exposure}'"):
            run({"boundaries": FoundBoundaries()}, data_of(exposure))
    with pytest.raises(ConfigError, match=r"one FoundBoundaries"):
        run({"one": FoundBoundaries(), "two": FoundBoundaries()})
    fots = {layers: FOT(message="covariance", layers=[layers]) for layers in ("layers.0", "head")}
    with pytest.raises(ConfigError, match=r"methods = \['a', 'b'\].*one FOT .*beside FoundBoundaries"):
        run({"boundaries": FoundBoundaries(), "a": fots["layers.0"], "b": fots["head"]})
    with pytest.raises(ConfigError, match=r"data\.class_loss.*unannounced"):
        tiny_data(split(3, classes=6), exposure="unannounced", scenario="class", class_loss="seen")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("message", "sketch"),
        ("gpse_model", "local"),
        ("capacity", {"total": 0.5}),
        ("last_extraction", True),
        ("mechanism", GaussianMechanism(1.0, 1e-5, 1.0)),
    ],
)
def test_options_of_fot_that_need_told_tasks_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"methods\.fot\.{option}.*FoundBoundaries"):
        run({"boundaries": FoundBoundaries(), "fot": FOT(**{"message": "covariance", option: value})})


def test_window_and_warm_up_are_those_of_the_test() -> None:
    data = tiny_data(permuted(2, train=120), exposure="unannounced", schedule={"rounds_per_task": 12})
    options = {"tolerance": 0.2, "threshold": 1e9, "window": 3, "warm_up": 8, "floor": 0.01}
    found = rows_of(run({"boundaries": FoundBoundaries(**options)}, data), "boundaries")
    test = PageHinkley(**options)
    wanted = [test.observe(row["loss"], row["round"])[0] for row in found]
    assert [row["statistic"] for row in found] == pytest.approx(wanted, rel=1e-9)
    assert not any(wanted[:8])
    assert wanted[12] > 0


class Personal(Rounds):
    """Also store the clients' own layers after every round."""

    def __init__(self) -> None:
        super().__init__()
        self.own: list[list[Mapping[str, Tensor]]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        assert isinstance(pl_module, Client)
        assert pl_module.federation is not None
        held = [pl_module.federation.clients.get("model", number) for number in range(4)]
        self.own.append([{name: tensor.clone() for name, tensor in (of or {}).items()} for of in held])


@pytest.mark.parametrize("own", [False, True], ids=["common", "personal"])
@pytest.mark.parametrize("scenario", ["domain", "task"])
def test_the_loss_is_that_of_the_clients_model_over_its_tasks_outputs(scenario: Any, own: bool) -> None:
    """In each task's first round, where the personal layers are those with which the client has left its last round."""
    stream = permuted(2, train=120) if scenario == "domain" else split(2, classes=4, train=160)
    data = tiny_data(stream, exposure="unannounced", scenario=scenario, schedule={"rounds_per_task": 1})
    methods: dict[str, Method] = {
        "boundaries": FoundBoundaries(),
        **({"own": PersonalLayers(["head.*"])} if own else {}),
    }
    watch = Personal()
    federation = run(methods, data, callbacks=[watch])
    assert all(bool(held) is own for held in watch.own[0])
    (row,) = [row for row in rows_of(federation, "boundaries") if row["round"] == 1]
    losses = []
    for number in range(4):
        model = {**watch.models[0], **watch.own[0][number]}
        x, y = samples(data, 1, number)
        logits = functional_call(federation.network, model, (x,))
        outputs = [2, 3] if scenario == "task" else [0, 1, 2, 3]
        assert set(y.tolist()) <= set(outputs)
        losses.append(float(F.cross_entropy(logits[:, outputs], y - outputs[0])))
    assert row["loss"] == pytest.approx(sum(losses) / 4, rel=1e-9)


def test_the_loss_is_that_of_the_received_model_before_training() -> None:
    data, watch = data_of(), Rounds()
    federation = run({"boundaries": FoundBoundaries(batch_size=7)}, data, callbacks=[watch])
    found = rows_of(federation, "boundaries")
    assert [row["round"] for row in found] == list(range(2 * ROUNDS))
    for row in found[1:]:
        model = watch.models[row["round"] - 1]
        task = row["round"] // ROUNDS
        losses = [float(cross_entropy(federation.network, model, *samples(data, task, c))) for c in range(4)]
        assert row["loss"] == pytest.approx(sum(losses) / 4, rel=1e-9)
        assert row["clients"] == 4


def samples(data: FederatedDataModule, task: int, client: int) -> tuple[Tensor, Tensor]:
    x, y = data.gather(task, torch.from_numpy(data.indices[task][client]))
    return x.double(), y


def cross_entropy(network: nn.Module, model: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(network, model, (x,)), y)


@pytest.mark.parametrize("scenario", ["domain", "class"])
def test_boundaries_are_found_in_the_first_round_of_a_task_and_nowhere_else(scenario: Any) -> None:
    stream = permuted(3, train=120) if scenario == "domain" else split(3, classes=6, train=240)
    data = tiny_data(stream, exposure="unannounced", scenario=scenario, schedule={"rounds_per_task": 7})
    federation = run({"boundaries": FoundBoundaries()}, data)
    found = rows_of(federation, "boundaries")
    assert [row["round"] for row in found if row["found"]] == [7, 14]
    assert [row["since"] for row in found if row["found"]] == [7, 14]
    assert federation.methods["boundaries"].report().figures == {"boundaries_found": 2}
    assert federation.channel.uplink_bytes["boundaries loss"] == 8 * 4 * 21


def test_it_changes_no_training() -> None:
    plain, found = run({}), run({"boundaries": FoundBoundaries()})
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, weights(found)[name])


def test_the_penalty_is_that_of_what_clients_computed_in_the_old_tasks_rounds() -> None:
    """With Fishers computed in rounds 0 and 3 and a boundary found after round 5, the penalty uses that of round 3."""
    data, watch = data_of(), Rounds()
    method = EWC(3.0)
    federation = run({"boundaries": FoundBoundaries(**QUICK), "ewc": method}, data, callbacks=[watch])
    assert [row["round"] for row in rows_of(federation, "boundaries") if row["found"]] == [ROUNDS]
    (row,) = rows_of(federation, "ewc")
    assert (row["round"], row["clients"]) == (ROUNDS, 4)
    model = watch.models[2]
    fishers = [
        mean_squared_gradients(federation.network, *samples(data, 0, client), tensors=model) for client in range(4)
    ]
    for name, anchor in model.items():
        each = torch.stack([fisher[name] for fisher in fishers])
        kept = [federation.clients.get("ewc", client) or {} for client in range(4)]
        torch.testing.assert_close(torch.stack([k[f"curvature {name}"] for k in kept]), each, rtol=1e-9, atol=1e-12)
        assert all(torch.equal(k[f"anchor {name}"], anchor) for k in kept)
    parameters = sum(tensor.numel() for tensor in model.values())
    assert method.report().figures["remembered_bytes"] == 4 * parameters * 8 + 16
    assert method.client_storage() == 2 * parameters * 8 + 4 * parameters * 8 + 16


class Summing(FOT):
    """Records the summed moments that the server reads."""

    def __init__(self, **options: Any) -> None:
        super().__init__(0.9, message="covariance", **options)
        self.sums: list[dict[str, Tensor]] = []

    def _keep_own(self, sums: Mapping[str, Tensor]) -> None:
        self.sums.append({name: values.clone() for name, values in sums.items()})


@pytest.mark.parametrize("keep_every", [1, 2])
@pytest.mark.parametrize("whom", ["sampled", "all"])
@pytest.mark.parametrize("protect_bias", [False, True])
def test_the_moments_are_those_of_what_clients_were_given_in_the_old_tasks_rounds(
    keep_every: int, whom: Any, protect_bias: bool
) -> None:
    """With two of four clients in a round, clients' newest moments are of different rounds, some of the new task.

    The expected moments are sums over single samples, in float64, of networks with the weights of these rounds.
    """
    data = data_of(clients_per_round=2)
    watch, method = Watch(), Summing(gpse_clients=whom, protect_bias=protect_bias)
    finder = FoundBoundaries(**{**QUICK, "keep_every": keep_every})
    federation = run({"boundaries": finder, "fot": method}, data, callbacks=[watch])
    (row,) = (row for row in rows_of(federation, "boundaries") if row["found"])
    assert row["since"] == ROUNDS
    computed = {
        c: [r for r in range(0, row["round"] + 1, keep_every) if c in data.rounds.round(r).clients][-2:]
        for c in range(4)
    }
    chosen = {c: max((r for r in rounds if r < ROUNDS), default=None) for c, rounds in computed.items()}
    newest = max(r for r in chosen.values() if r is not None)
    chosen = {c: r for c, r in chosen.items() if r is not None and (whom == "all" or r == newest)}
    if keep_every == 1:
        assert len(set(chosen.values())) > (whom == "all")
        assert any(rounds[-1] >= ROUNDS for rounds in computed.values())
    (sums,) = method.sums
    network, numbers = copy.deepcopy(federation.network), 0
    for name, packed in sums.items():
        bias = protect_bias and network.get_submodule(name).bias is not None
        expected: Any = 0
        for client, round in chosen.items():
            network.load_state_dict(watch.models[round])  # before the round
            x, _ = samples(data, 0, client)
            for image in x:
                rows = layer_rows(network, name, image[None], bias)
                expected = expected + rows.T @ rows
        found = unpack(packed, len(expected))
        torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-5, atol=1e-5)
        rank = method.bases[name].shape[1]
        leading = torch.linalg.eigh(torch.from_numpy(expected))[1][:, -rank:]
        basis = method.bases[name].double()
        torch.testing.assert_close(basis @ basis.T, leading @ leading.T, rtol=1e-3, atol=1e-3)
        numbers += packed.numel()
    assert federation.channel.uplink_bytes["fot covariance"] == len(chosen) * numbers * 4
    assert method.report().figures["remembered_bytes"] == method.client_storage() == 2 * numbers * 4 + 16


def test_the_first_layer_is_frozen_once_a_task_is_found_to_have_ended() -> None:
    watch = Rounds()
    fot = FOT(0.9, message="covariance", freeze_first_layer=True, gpse_dropout=True)
    run({"boundaries": FoundBoundaries(**QUICK), "fot": fot}, callbacks=[watch])
    first = next(name for name in watch.models[0] if name.endswith("weight"))
    moved = [not torch.equal(a[first], b[first]) for a, b in pairwise(watch.models)]
    assert moved == [round <= ROUNDS for round in range(1, 2 * ROUNDS)]
    assert f"{first.removesuffix('.weight')}" not in fot.bases


def test_clients_without_a_fisher_of_the_task_have_no_part() -> None:
    """No client computes a Fisher in the second task before its end is found."""
    data = data_of(tasks=3)
    methods = {"boundaries": FoundBoundaries(**{**QUICK, "keep_every": 100}), "ewc": EWC(3.0)}
    federation = run(methods, data)
    found = rows_of(federation, "ewc")
    assert [row["clients"] for row in found] == [4, 0]
    assert found[1]["fisher_mean"] is None


def test_clients_that_are_skipped_neither_send_nor_keep_anything() -> None:
    methods = {
        "boundaries": FoundBoundaries(**QUICK),
        "ewc": EWC(3.0),
        "fot": FOT(0.9, message="covariance"),
        "poison": Poison(0, 3),
    }
    federation = run(methods, data_of(tasks=1), federated={"on_bad_update": "skip"})
    assert federation.channel.skipped == [(3, 0, 0)]
    assert [row["clients"] for row in rows_of(federation, "boundaries")] == [4, 4, 4, 3, 4]
    for name in ("ewc", "fot"):
        kept = [federation.clients.get(f"{name} rounds", client) or {} for client in range(4)]
        assert [int(rounds[f"{name} newest"]) for rounds in kept] == [0, 3, 3, 3]


@pytest.mark.parametrize("make", [partial(EWC, 30.0, limit=1.0), partial(FOT, 0.9, message="covariance")])
def test_found_boundaries_save_what_told_ones_do(make: Callable[[], Method]) -> None:
    """On permuted tasks the method reduces forgetting, whether boundaries are told or found."""
    forgotten = {}
    runs: tuple[tuple[str, dict[str, Method], str], ...] = (
        ("none", {}, "unannounced"),
        ("found", {"boundaries": FoundBoundaries(**QUICK), "some": make()}, "unannounced"),
        ("told", {"some": make()}, "sequential"),
    )
    for name, methods, exposure in runs:
        accuracy = run(methods, data_of(exposure)).accuracy.compute()
        forgotten[name] = float(accuracy[0, 0] - accuracy[1, 0])
    assert forgotten["found"] < forgotten["none"]
    assert forgotten["told"] < forgotten["none"]


@pytest.mark.parametrize("make", [partial(EWC, 3.0), partial(FOT, 0.9, message="covariance")])
@pytest.mark.parametrize("after", [ROUNDS, ROUNDS + 1], ids=["before the alarm", "after it"])
def test_a_resumed_run_finds_and_learns_the_same(make: Callable[[], Method], after: int, tmp_path: Path) -> None:
    def methods() -> dict[str, Method]:
        return {"boundaries": FoundBoundaries(**QUICK), "some": make()}

    path = tmp_path / "after.ckpt"
    whole = run(methods(), callbacks=[SaveAfter(after, path)])
    resumed = run(methods(), ckpt_path=path)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name])
    for name in ("boundaries", "some"):
        assert rows_of(whole, name) == rows_of(resumed, name)
    assert [*dict.fromkeys(row["round"] for row in rows_of(whole, "some"))] == [ROUNDS]


# The properties of every method, for the finder beside EWC and FOT.


def ewc() -> dict[str, Method]:
    return {"ewc": EWC(10.0)}


def fot() -> dict[str, Method]:
    return {"fot": FOT(0.9, message="covariance")}


EVERYWHERE = partial(FoundBoundaries, tolerance=0.0, threshold=0.1, warm_up=2, floor=0.001, keep_every=1)
CASES = {
    "ewc": MethodCase(EVERYWHERE, network=mlp, optimizer=quickly, beside=ewc, rounds=4),
    "fot": MethodCase(EVERYWHERE, network=mlp, optimizer=quickly, beside=fot, rounds=4, tolerance=1e-4),  # float32
}
each_case = pytest.mark.parametrize("beside", CASES)


@each_case
def test_the_cases_runs_find_boundaries(beside: str) -> None:
    method = CASES[beside].run(tasks=3).method
    assert method is not None
    assert method.report().figures["boundaries_found"] > 0


@each_case
@pytest.mark.parametrize("prop", ["width", "resuming", "state", "missing tasks", "sums", "task_free", "reports"])
def test_what_holds_for_every_method(prop: str, beside: str) -> None:
    PROPERTIES[prop](CASES[beside])


def test_it_works_in_all_scenarios() -> None:
    PROPERTIES["scenarios"](CASES["ewc"])


@each_case
def test_processes_do_not_matter(beside: str) -> None:
    processes_do_not_matter(CASES[beside], 2)


@pytest.mark.parametrize("seed", range(2))  # both seeds have such a found task
@pytest.mark.parametrize(
    "make",
    [
        partial(FOT, message="covariance", gpse_clients="sampled"),
        partial(FOT, message="covariance", gpse_clients="all"),
        partial(EWC, 1.0),
    ],
    ids=["fot-sampled", "fot-all", "ewc"],
)
def test_a_found_task_of_which_nobody_is_left_ends_no_run(make: Callable[[], Method], seed: int) -> None:
    schedule = {"rounds_per_task": 6, "clients_per_round": 2, "client_dropout": 0.5}
    data = tiny_data(permuted(2), exposure="unannounced", schedule=schedule, seed=seed)
    eager = FoundBoundaries(tolerance=0.0, threshold=0.5, window=2, warm_up=2)
    federation = run({"boundaries": eager, "learns": make()}, data)
    assert federation.finished
    assert any(row["found"] for row in rows_of(federation, "boundaries"))


@pytest.mark.parametrize("exposure", ["asynchronous", "streaming", "streaming-cumulative"])
def test_samples_of_several_tasks_with_outputs_of_their_own_are_refused(exposure: Any) -> None:
    data = tiny_data(split(2), exposure=exposure, scenario="task", schedule={"rounds_per_task": ROUNDS})
    with pytest.raises(ConfigError, match=rf"^data\.scenario = 'task' .*domain or class with .* {exposure} and"):
        run({"boundaries": FoundBoundaries()}, data)


def test_clients_at_their_own_pace_are_measured_as_well() -> None:
    """The finder only has to run and to report every round."""
    for options in ({"exposure": "asynchronous"}, {"exposure": "unannounced", "clock_spread": 0.5}):
        spread = options.pop("clock_spread", 0.0)
        data = tiny_data(permuted(2), **options, schedule={"rounds_per_task": ROUNDS, "clock_spread": spread})
        assert len(rows_of(run({"boundaries": FoundBoundaries()}, data), "boundaries")) == data.num_rounds
