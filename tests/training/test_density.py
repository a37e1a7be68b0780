"""Density estimation: local training compared with plain loops, likelihoods after tasks, and refused settings."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support import tiny_cli
from support.naive import local_batches
from support.tiny import (
    Rounds,
    SaveAfter,
    double,
    fit,
    mlp,
    sgd,
    source,
    tiny_client,
    tiny_data,
    weights,
)
from torch import Tensor
from torch.func import functional_call

from cfl.callbacks import AccuracyTargets
from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Dirichlet
from cfl.data.sequences import FixedTasks
from cfl.data.sources import Binarised
from cfl.data.streams import ClassSplit, Permuted
from cfl.engines import EngineOptions
from cfl.federation.federation import Federation
from cfl.methods import AGEM, DER, EWC, SCAFFOLD, FedAGEM, FedCurv, FedProx, Method, PersonalLayers
from cfl.methods.components.curvature.fisher import diagonal_fisher
from cfl.metrics.likelihood import NLLMatrix, nll_forgetting
from cfl.metrics.measure import NLL
from cfl.metrics.measures.likelihood import negative_log_likelihoods
from cfl.models import MADE
from cfl.reporting.figures import (
    accuracy_curve,
    accuracy_heatmap,
    cell_colours,
    colour_scale,
    learning_curves,
)
from cfl.reporting.matrix_file import read_matrix_csv
from cfl.runtime.errors import BadUpdate, ConfigError

ADAM = partial(torch.optim.Adam, lr=0.01)
ENGINES = {"vmap": EngineOptions("vmap"), "workers": EngineOptions("workers", workers=2)}
FULL: dict[str, Any] = {
    "hidden": [7, 6],
    "direct": True,
    "conditioning": True,
    "order_agnostic": True,
    "num_masks": 2,
    "eval_orders": 2,
}


def data_of(width: int = 3, tasks: int = 2, **options: Any) -> FederatedDataModule:
    """A data module of unequal clients, with batches that are not full."""
    settings: dict[str, Any] = {
        "scenario": "density",
        "num_clients": 5,
        "partition": Dirichlet(alpha=0.5, min_samples=3, balance=False),
        **options,
    }
    schedule = {"rounds_per_task": 2, "clients_per_round": 4, "cohort_width": width, **settings.pop("schedule", {})}
    stream = settings.pop("stream", None) or Permuted(Binarised(source()), tasks)
    return tiny_data(stream, schedule=schedule, **settings)


def trained(
    data: FederatedDataModule,
    methods: dict[str, Method] | None = None,
    engine: str = "vmap",
    optimizer: Any = ADAM,
    callbacks: list[Callback] | None = None,
    ckpt_path: Path | None = None,
    **network: Any,
) -> Federation:
    """A run of MADE in float64."""
    make = double(partial(MADE, **{**FULL, **network}))
    client = tiny_client(data, make, optimizer, methods, ENGINES[engine])
    return fit(client, data, None, callbacks or [], ckpt_path)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


# Local training


def naive_rounds(data: FederatedDataModule, start: dict[str, Tensor], network: MADE) -> dict[str, Tensor]:
    """Federated averaging by plain loops, with the degrees of each step and ``-log p`` written out."""
    model = start
    for number in range(data.num_rounds):
        plan, ended = data.rounds.round(number), []
        for client in plan.clients:
            own = copy.deepcopy(network)
            own.load_state_dict(model)
            own.requires_grad_(True)
            optimizer = ADAM(own.parameters())
            for step, (x, _) in enumerate(local_batches(data, plan, client)):
                x = x.double()
                p = own.logits(x, own.degrees(number, client, step)).sigmoid()
                bits = x.flatten(1)
                loss = -torch.where(bits == 1, p.log(), (1 - p).log()).sum() / len(x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            ended.append(own.state_dict())
        model = {name: torch.stack([state[name] for state in ended]).mean(0) for name in model}
    return model


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("synchronised", [True, False, "start"])
def test_it_is_the_plain_loop(engine: str, width: int, synchronised: bool | str) -> None:
    """A run is the plain loop for each width and engine, also if clients have their own masks."""
    data = data_of(width, schedule={"local_epochs": 2})
    rounds = Rounds()
    federation = trained(data, engine=engine, callbacks=[rounds], synchronised=synchronised)
    network: Any = copy.deepcopy(federation.network)
    client = tiny_client(data, double(partial(MADE, **{**FULL, "synchronised": synchronised})), ADAM)
    start = {name: tensor.detach().clone() for name, tensor in client.network.named_parameters()}
    assert network.mask_seed == client.network.mask_seed
    assert_same(rounds.models[-1], naive_rounds(data, start, network))


def test_masks_matter() -> None:
    """Clients with their own masks train to another model, and so does another seed of the masks."""
    found = [weights(trained(data_of(), **options)) for options in ({}, {"synchronised": False}, {"mask_seed": 1})]
    for other in found[1:]:
        assert max(float((other[n] - found[0][n]).abs().max()) for n in other) > 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_run_goes_on_bit_for_bit(engine: str, tmp_path: Path) -> None:
    """A run resumed within a task or at a task's end has the results of a straight run, bit for bit."""
    saved = [SaveAfter(number, tmp_path / f"{number}.ckpt") for number in (0, 1, 2)]
    whole = trained(data_of(), {"ewc": EWC(5.0)}, engine, callbacks=[*saved])
    for number in (0, 1, 2):
        resumed = trained(data_of(), {"ewc": EWC(5.0)}, engine, ckpt_path=tmp_path / f"{number}.ckpt")
        assert all(torch.equal(t, weights(whole)[n]) for n, t in weights(resumed).items())
        assert torch.equal(resumed.measured.compute().nan_to_num(), whole.measured.compute().nan_to_num())
        assert torch.equal(resumed.measured.initial(), whole.measured.initial())
        assert resumed.curve == whole.curve


@pytest.mark.usefixtures("unhurried_probe")
def test_the_engine_may_be_found_by_trial() -> None:
    """``auto`` tries both engines for a density, and the one it chooses trains to nearly the same model."""
    data = data_of(schedule={"cohort_width": "auto"})
    client = tiny_client(data, double(partial(MADE, **FULL)), ADAM, None, EngineOptions("auto"))
    found = fit(client, data)
    assert found.engine is not None
    trials = found.engine["seconds_per_client_step_in_trials"]
    assert {"vmap" if "vmap" in choice else "workers" for choice in trials} == {"vmap", "workers"}
    assert_same(weights(found), weights(trained(data_of())))


def test_loss_is_the_negative_log_likelihood() -> None:
    """The training loss is in nats for each sample. Here the learning rate is too small to move the weights."""
    data = data_of(tasks=1, num_clients=1, partition=None, schedule={"clients_per_round": 1.0, "rounds_per_task": 1})
    lr0 = partial(torch.optim.SGD, lr=1e-30)
    client = tiny_client(data, double(partial(MADE, hidden=[5])), lr0)
    federation = fit(client, data)
    images = data.tasks[0].transform(data.tasks[0].train.images).double()
    batches = list(local_batches(data, data.rounds.round(0), 0))
    assert sum(len(x) for x, _ in batches) == len(images)
    expected = [float(negative_log_likelihoods(federation.network(x), x).mean()) for x, _ in batches]
    assert client.mean_loss == pytest.approx(sum(expected) / len(expected), abs=1e-5)  # it is kept in float32
    assert client.mean_loss == pytest.approx(16 * math.log(2), rel=0.1)


# Evaluation after tasks


def nll_of(federation: Federation, images: Tensor) -> float:
    """The mean NLL over samples of the ensemble of orders, written out."""
    network: Any = federation.network
    p = torch.zeros(len(images), dtype=torch.float64)
    for number in range(network.eval_orders):
        logits = network.logits(images, network.evaluation_degrees(number, images.device))
        p += (-negative_log_likelihoods(logits, images)).exp()
    return float(-(p / network.eval_orders).log().mean())


def test_the_last_row_is_that_of_the_model_at_the_end() -> None:
    data = data_of(eval_batch_size=7)
    federation = trained(data)
    found = federation.measured.compute()
    for task in range(2):
        images = data.tasks[task].transform(data.tasks[task].test.images).double()
        assert float(found[1, task]) == pytest.approx(nll_of(federation, images), abs=1e-9)
    assert float(found[1].mean()) < float(federation.measured.initial().mean())  # something has been learned
    assert federation.curve == [None, pytest.approx(float(found[0, 0])), None, pytest.approx(float(found[1].mean()))]
    with pytest.raises(RuntimeError, match="no accuracies"):
        _ = federation.accuracy


def test_clients_with_models_of_their_own_are_measured_each() -> None:
    data = data_of()
    federation = trained(data, {"own": PersonalLayers(["*"])})
    found = federation.measured.compute()
    assert found.shape == (5, 2, 2)
    client = max(data.members[1].tolist())
    own = {name: values[0] for name, values in federation.model.personal_state((client,)).items()}
    federation.network.load_state_dict(own)
    images = data.tasks[1].transform(data.tasks[1].test.images).double()
    assert float(found[client, 1, 1]) == pytest.approx(nll_of(federation, images), abs=1e-9)
    summary = federation.measured.summary()
    assert summary["nll"] == pytest.approx(float(found[:, 1].mean()))
    assert summary["clients_evaluated"] == 5


def test_clients_with_tasks_of_their_own() -> None:
    """Clients with tasks in their own order: one model, measured by each client in the client's order."""
    stream = ClassSplit(Binarised(source()), 4)
    square = FixedTasks([[0, 1, 2], [1, 2, 3], [2, 3, 0]])
    data = data_of(stream=stream, num_clients=3, sequences=square, partition=None, schedule={"clients_per_round": 1.0})
    found = trained(data).measured.compute()
    assert found.shape == (3, 3, 3)
    assert torch.equal(found[0, 2, 1:], found[1, 2, :2])  # the same tasks of the stream, after the same round
    assert not bool(torch.isnan(found).any())


def test_cumulative_exposure_forgets_less() -> None:
    forgotten = []
    for exposure in ("sequential", "cumulative"):
        data = data_of(exposure=exposure, schedule={"rounds_per_task": 6}, partition=None)
        forgotten.append(trained(data, engine="workers").measured.summary()["nll_forgetting"])
    assert forgotten[1] is not None
    assert forgotten[0] is not None
    assert forgotten[1] < forgotten[0] - 0.1


# The NLL matrix


WORKED = torch.tensor([[70.0, 90, 95], [85, 60, 88], [80, 75, 50]], dtype=torch.float64)


def filled(values: Tensor, clients: int | None = None) -> NLLMatrix:
    matrix = NLLMatrix(3, clients)
    for client in range(clients) if clients else (None,):
        for row, task in torch.cartesian_prod(torch.arange(3), torch.arange(3)).tolist():
            value = float(values[row, task] if client is None else values[client, row, task])
            if not math.isnan(value):
                matrix.update(row, task, 4 * value - 1, 3, client)  # in two parts of unequal size
                matrix.update(row, task, torch.tensor(value + 1), 2, client)
    return matrix


def test_figures_worked_by_hand() -> None:
    matrix = filled(WORKED)
    torch.testing.assert_close(matrix.compute(), WORKED)
    assert matrix.summary() == {
        "nll": pytest.approx(205 / 3),
        "base_nll": pytest.approx(80),
        "new_nll": pytest.approx(50),
        "nll_forgetting": pytest.approx(12.5),
    }
    assert matrix.summary(after=1) == {
        "nll": pytest.approx(72.5),
        "base_nll": pytest.approx(85),
        "new_nll": pytest.approx(60),
        "nll_forgetting": pytest.approx(15),
    }
    first = matrix.summary(after=0)
    assert first["nll_forgetting"] is None
    assert first["nll"] == first["base_nll"] == first["new_nll"] == pytest.approx(70)
    assert set(NLLMatrix(3).summary().values()) == {None}
    assert set(NLL.formulas) == set(matrix.summary())


def test_forgetting_of_what_has_improved_is_none() -> None:
    """Forgetting of a task that has improved is 0. A task's best value may be from before the task was learned."""
    improved = torch.tensor([[70.0, 55, 95], [85, 60, 88], [60, 58, 50]])
    assert float(nll_forgetting(improved)) == pytest.approx((0 + 3) / 2)
    partly = improved.clone()
    partly[0, 1] = math.nan
    assert float(nll_forgetting(partly)) == pytest.approx(0)
    partly[:2, 1] = math.nan
    assert math.isnan(float(nll_forgetting(partly)))
    assert nll_forgetting(torch.stack([improved, WORKED])).tolist() == [pytest.approx(1.5), pytest.approx(12.5)]


def test_clients_are_averaged_last() -> None:
    """Figures are means over clients. A client that was never evaluated does not count."""
    other = WORKED + 10
    nobody = torch.full((3, 3), math.nan, dtype=torch.float64)
    summary = filled(torch.stack([WORKED, nobody, other]), 3).summary()
    assert summary["nll"] == pytest.approx(205 / 3 + 5)
    assert summary["nll_forgetting"] == pytest.approx(12.5)
    assert summary["clients_evaluated"] == 2


def test_rows_are_cleared_and_kept() -> None:
    matrix = filled(WORKED)
    matrix.update(-1, 2, 400, 4)
    assert matrix.initial().tolist() == [pytest.approx(math.nan, nan_ok=True)] * 2 + [100]
    other = NLLMatrix(3)
    other.load_state_dict(matrix.state_dict())
    matrix.clear_row(1)
    assert bool(torch.isnan(matrix.compute()[1]).all())
    torch.testing.assert_close(matrix.compute()[[0, 2]], WORKED[[0, 2]])
    matrix.clear_row(-1)
    assert bool(torch.isnan(matrix.initial()).all())
    torch.testing.assert_close(other.compute(), WORKED)
    assert float(other.initial()[2]) == 100
    with pytest.raises(RuntimeError, match="other tasks or clients"):
        NLLMatrix(2).load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 0, 1.0, 1), "row = 3"),
        ((-2, 0, 1.0, 1), "row = -2"),
        ((0, 3, 1.0, 1), "task = 3"),
        ((0, 0, 1.0, 1, 0), "client = 0"),
        ((0, 0, 1.0, -1), "-1 samples"),
    ],
)
def test_what_cannot_be_counted(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NLLMatrix(3).update(*arguments)


@pytest.mark.parametrize("value", [math.inf, torch.tensor(math.nan)], ids=["inf", "nan"])
def test_a_model_that_has_diverged_is_named(value: Any) -> None:
    with pytest.raises(BadUpdate, match=r"^4 test samples of task 2 have a negative log-likelihood of (inf|nan): the"):
        NLLMatrix(3).update(0, 2, value, 4)


def test_a_client_belongs_to_clients() -> None:
    for client in (None, 2):
        with pytest.raises(ValueError, match=f"client = {client}"):
            NLLMatrix(3, 2).update(0, 0, 1.0, 1, client)
    for arguments in ((0,), (3, 0)):
        with pytest.raises(ConfigError):
            NLLMatrix(*arguments)


# Fisher information


@pytest.mark.parametrize(
    "options", [{}, {"conditioning": True, "direct": True, "hidden": [7, 6]}], ids=["plain", "all"]
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fisher_against_a_loop(options: dict[str, Any], reduction: Any) -> None:
    """The Fisher information is that of a loop over samples: squared gradients of each sample's ``-log p``."""
    torch.manual_seed(0)
    network = MADE((1, 2, 5), 10, **{"hidden": [8], **options}).double()
    x = torch.randint(2, (9, 1, 2, 5)).double()
    y = torch.zeros(9, dtype=torch.int64)
    found = diagonal_fisher(network, {}, [(x[:4], y[:4]), (x[4:], y[4:])], reduction=reduction)
    expected = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    network.eval()
    for sample in x:
        network.zero_grad()
        loss = -network.log_likelihood(sample[None]).sum()
        loss.backward()
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None
            expected[name] += parameter.grad.square() / (9 if reduction == "mean" else 1)
    assert_same(found, expected, 1e-12)
    assert all(float(value.max()) > 0 for value in found.values())


def test_fisher_of_decomposed_weights_goes_sample_by_sample() -> None:
    from cfl.models.decomposition import decompose

    torch.manual_seed(0)
    network = MADE((1, 2, 5), 10, hidden=[8]).double()
    decompose(network)
    x, y = torch.randint(2, (5, 1, 2, 5)).double(), torch.zeros(5, dtype=torch.int64)
    found = diagonal_fisher(network, {}, [(x, y)], reduction="sum")
    expected = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    for sample in x:
        loss = -network.eval().log_likelihood(sample[None]).sum()
        for name, gradient in zip(expected, torch.autograd.grad(loss, list(network.parameters())), strict=True):
            expected[name] += gradient.square()
    assert_same(found, expected, 1e-12)


# Methods


METHODS: dict[str, tuple[Any, Any]] = {
    "ewc": (lambda: EWC(50.0), lambda: EWC(0.0)),
    "fedcurv": (lambda: FedCurv(5.0), lambda: FedCurv(0.0)),
    "fedprox": (lambda: FedProx(1.0), lambda: FedProx(0.0)),
    "scaffold": (lambda: SCAFFOLD(), None),
    "personal": (lambda: PersonalLayers(["layers.*"]), lambda: PersonalLayers([])),
    "agem": (lambda: AGEM(4), None),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_change_something_and_nothing_where_they_are_neutral(name: str) -> None:
    active, neutral = METHODS[name]
    plain = weights(trained(data_of(), optimizer=sgd))
    found = [weights(trained(data_of(), {"it": active()}, engine, sgd)) for engine in ENGINES]
    assert_same(found[0], found[1])
    assert max(float((found[0][n] - plain[n]).abs().max()) for n in plain) > 1e-4
    if neutral is not None:
        unchanged = weights(trained(data_of(), {"it": neutral()}, "vmap", sgd))
        assert all(torch.equal(tensor, plain[name]) for name, tensor in unchanged.items())


def test_ewc_pulls_by_the_density_s_fisher() -> None:
    """EWC's curvature is the Fisher information of the first task's model on the first task's samples."""
    data = data_of(num_clients=2, schedule={"clients_per_round": 1.0})
    rounds, method = Rounds(), EWC(50.0)
    federation = trained(data, {"ewc": method}, callbacks=[rounds])
    kept = federation.clients.get("ewc", 1)
    assert kept is not None
    network = copy.deepcopy(federation.network).eval()
    expected = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    model = {name: value.requires_grad_() for name, value in rounds.models[1].items()}
    own = data.indices[0][1]
    for image in data.tasks[0].transform(data.tasks[0].train.images[own]).double():
        loss = negative_log_likelihoods(functional_call(network, model, (image[None],)), image[None]).sum()
        for name, gradient in zip(model, torch.autograd.grad(loss, list(model.values())), strict=True):
            expected[name] += gradient.square() / len(own)
    assert_same({n: kept[f"curvature {n}"] for n in expected}, expected, 1e-12)


def test_agem_replays_by_likelihood() -> None:
    """``Cohort.gradients_on`` gives the gradient of the likelihood, with the masks of the step."""
    seen: list[tuple[dict[str, Tensor], dict[str, Tensor], Tensor, int]] = []

    class Looks(Method):
        scenarios = frozenset({"density"})

        def extend_batch(self, cohort: Any, batch: Any) -> Any:
            found = {n: g[0].clone() for n, g in cohort.gradients_on(batch, "looking").items()}
            model = {n: p[0].detach().clone() for n, p in cohort.parameters.items()}
            seen.append((found, model, batch.x[0][batch.mask[0]].double(), batch.step))
            return batch

    data = data_of(1, num_clients=1, partition=None, schedule={"clients_per_round": 1.0, "rounds_per_task": 1}, tasks=1)
    federation = trained(data, {"looks": Looks()})
    network: Any = federation.network
    assert len(seen) > 3
    for found, model, x, step in seen:
        leaves = {name: tensor.requires_grad_() for name, tensor in model.items()}
        network.load_state_dict(leaves)
        network.requires_grad_(True)
        loss = negative_log_likelihoods(network.logits(x, network.degrees(0, 0, step)), x).mean()
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        assert_same(found, dict(zip(leaves, gradients, strict=True)))


# Refusals


def refused(data: FederatedDataModule, network: Any = None, methods: dict[str, Method] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        fit(tiny_client(data, network or partial(MADE, hidden=[5]), sgd, methods), data)
    return caught.value


def test_a_classifier_estimates_no_density() -> None:
    error = refused(data_of(), mlp)
    assert (error.key, error.value) == ("model.network", "MLP")


def test_made_does_not_classify() -> None:
    """MADE is refused as a classifier, even if there are as many classes as variables."""
    with pytest.raises(ConfigError) as caught:
        tiny_client(data_of(scenario="domain"), partial(MADE, hidden=[5]))
    assert caught.value.key == "model.network"
    assert "data.scenario density" in str(caught.value)
    sixteen = Permuted(Binarised(source(classes=16, train=160)), 2)
    error = refused(data_of(scenario="domain", stream=sixteen, partition=None))
    assert (error.key, error.value) == ("data.scenario", "domain")


def test_samples_have_to_be_binary() -> None:
    error = refused(data_of(stream=Permuted(source(), 2)))
    assert error.key == "data.stream.source"
    assert "permutation 0, whose network input lies between" in str(error)


@pytest.mark.parametrize("method", [DER(0.5, 0.5, 3), FedAGEM(4)], ids=lambda method: type(method).__name__)
def test_methods_that_look_at_labels_or_classes(method: Method) -> None:
    error = refused(data_of(), None, {"it": method})
    assert (error.key, error.value) == ("data.scenario", "density")
    assert f"methods.it ({type(method).__name__})" in str(error)


@pytest.mark.parametrize(
    ("method", "option"),
    [
        (EWC(1.0, fisher="sampled"), "fisher"),
        (FedCurv(1.0, fisher="expected"), "fisher"),
        (SCAFFOLD("I"), "variant"),
    ],
    ids=["EWC", "FedCurv", "SCAFFOLD"],
)
def test_options_that_look_at_labels(method: Method, option: str) -> None:
    """The error's key has the method's own name."""
    assert refused(data_of(), None, {"it": method}).key == f"methods.it.{option}"


def test_there_is_no_accuracy_to_reach() -> None:
    data = data_of(tasks=1, schedule={"evaluate_every": 1})
    with pytest.raises(ConfigError) as caught:
        fit(tiny_client(data, partial(MADE, hidden=[5])), data, None, [AccuracyTargets([90.0])])
    assert caught.value.key == "targets.accuracies"


# The files of a run


def test_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "density.yaml"
    config.write_text(
        "data: {scenario: density, stream: {class_path: Permuted, init_args: {num_tasks: 2, source: "
        "{class_path: Binarised, init_args: {source: Digits}}}}}\n"
        "model: {network: {class_path: MADE, init_args: {hidden: [20], order_agnostic: true}}}\n"
    )
    folder = tmp_path / "run"
    options = ["--schedule.evaluate_every", "1", "--model.optimizer.lr", "0.05"]
    assert tiny_cli.fit(folder, "--config", str(config), *options, pictures=True) == 0
    shown = capsys.readouterr().out
    assert re.search(r"last NLL \d+\.\d{4}  ", shown)  # as many decimals as in tables
    assert "NLL_FORGETTING" in shown
    matrix, initial = read_matrix_csv(folder / "nll_matrix.csv")
    assert initial is not None
    assert float(initial.mean()) == pytest.approx(64 * math.log(2), rel=0.1)
    assert float(matrix.diagonal().max()) < float(initial.min()) - 5
    assert {"nll_matrix.png", "nll_curve.png", "nll_rounds.png"} <= {path.name for path in folder.iterdir()}
    assert not list(folder.glob("accuracy*"))
    summary, rows = tiny_cli.summary(folder), tiny_cli.rows(folder / "rounds.csv")
    assert summary["nll"] == pytest.approx(float(matrix[1].mean()))
    assert summary["scenario"] == "density"
    assert {"base_nll", "new_nll", "nll_forgetting"} <= set(summary)
    assert "acc" not in summary
    assert float(rows[-1]["nll"]) == pytest.approx(summary["nll"])
    assert float(rows[-1]["nll_task_1"]) == pytest.approx(float(matrix[1, 1]))
    assert "acc" not in rows[0]
    assert tiny_cli.run("validate", "--ckpt_path", str(folder / "last.ckpt")) == 0
    assert f"{summary['nll']:.3f}" in capsys.readouterr().out


def test_pictures_of_likelihoods() -> None:
    """The colour scale follows the values, and low values are bright."""

    def brightness(value: float) -> int:
        background = cell_colours(value, True, colour_scale(NLL, [WORKED]))[0]
        return sum(int(background[k : k + 2], 16) for k in (1, 3, 5))

    assert brightness(50) > brightness(70) > brightness(95)
    picture = accuracy_heatmap(WORKED, "likelihoods", measure=NLL)
    assert any(axes.get_ylabel() == "NLL (nats)" for axes in picture.axes)
    assert picture.axes[-1].get_ylim() == (50, 95)
    axes = accuracy_curve({"run": WORKED + 100}, NLL).axes[0]
    assert axes.get_ylim()[1] > 185
    assert axes.get_ylabel() == "NLL (nats)"
    assert learning_curves({"run": [120.0, None, 110.0]}, (), NLL).axes[0].get_ylabel() == "NLL (nats)"
