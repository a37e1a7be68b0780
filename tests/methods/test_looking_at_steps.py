"""Logits of a local step, and gradients on other samples, as methods see them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiny import (
    DECAY,
    ConvNet,
    PoolNet,
    StridedNet,
    double,
    dropping,
    fit,
    mlp,
    norm_net,
    sgd,
    split,
    tiny_client,
    unequal,
    weights,
)
from test_method_hooks import MOMENTUM
from torch import Tensor, nn
from torch.func import functional_call

from cfl.data.cohorts import CohortBatch
from cfl.data.samples import ExtraSamples, Samples
from cfl.engines import EngineOptions, recorded
from cfl.engines.cohort import Cohort
from cfl.methods import FedProx
from cfl.methods.base import Method
from cfl.methods.context import Context
from cfl.models import Network
from cfl.runtime.errors import ConfigError

# A float64 network has a hook, so that workers compute it by autograd. Hand-written steps are tested in float32.
NETWORKS: dict[str, Any] = {"mlp": mlp, "conv": ConvNet, "mlp64": double(mlp), "norm64": double(norm_net)}
VMAP, STACKS = EngineOptions("vmap"), EngineOptions("workers", 2, 3)
WORKERS, BATCH_LAST = (EngineOptions("workers", 2, stack=1, batch_last=last) for last in (False, True))
every_engine = pytest.mark.parametrize(
    ("engine", "network"),
    [*((e, n) for e in (VMAP, WORKERS) for n in NETWORKS), (STACKS, "mlp"), (BATCH_LAST, "conv")],
    ids=[*(f"{e}, {n}" for e in ("vmap", "workers") for n in NETWORKS), "stacks, mlp", "batch last, conv"],
)


def run(methods: dict[str, Method], engine: EngineOptions, network: Any, width: int = 4, optimizer: Any = sgd) -> Any:
    data = unequal(width, split())
    return weights(fit(tiny_client(data, network, optimizer, methods, engine), data))


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    exact = found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-9 if exact else 1e-4, atol=1e-11 if exact else 2e-6)


def model_of(cohort: Cohort, row: int) -> dict[str, Tensor]:
    return {n: t[row].detach().clone() for n, t in {**cohort.parameters, **cohort.buffers}.items()}


class Observing(Method):
    """Passes the logits that buffers are offered to ``observe``."""

    replays_logits = True

    def setup(self, context: Context) -> None:
        super().setup(context)
        buffer = context.buffer
        assert buffer is not None
        buffer.offered, offer = "every_step", buffer.offer

        def observed(cohort: Cohort, batch: CohortBatch, logits: Tensor | None) -> None:
            if logits is not None:
                self.observe(cohort, batch, logits)
            offer(cohort, batch, logits)

        buffer.offer = observed  # type: ignore[method-assign]

    def observe(self, cohort: Cohort, batch: CohortBatch, logits: Tensor) -> None:
        """Called after a step with its batch and logits."""
        raise NotImplementedError


class Watch(Observing):
    """Compares logits with those of the network as it was before the step."""

    def __init__(self) -> None:
        self.models: list[dict[str, Tensor]] = []
        self.checked = self.padded = 0

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        self.models = [model_of(cohort, row) for row in range(len(cohort.clients))]
        return batch

    def observe(self, cohort: Cohort, batch: CohortBatch, logits: Tensor) -> None:
        assert logits.shape[:2] == batch.mask.shape
        assert not logits.requires_grad
        for row, model in enumerate(self.models):
            used = batch.mask[row]
            self.padded += int((~used).sum())
            if used.any():
                expected = functional_call(self.context.network.train(), model, (batch.x[row][used],))
                assert_close(logits[row][used], expected)
                self.checked += 1


class Replay(Method):
    """Adds two samples of the first task to every step, and a padded one between them."""

    used = (True, False, True)

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        tasks = torch.zeros(len(cohort.clients), 3, dtype=torch.int64)
        x, y = self.context.samples_of(tasks, torch.arange(3).expand_as(tasks), None)
        mask = torch.tensor(self.used).expand_as(tasks)
        return batch.with_added(ExtraSamples(x, y, tasks, mask, mask.double(), self.source))


class FullReplay(Replay):
    """Adds three samples of the first task to every step."""

    used = (True, True, True)


@pytest.mark.parametrize("width", [1, 4])
@every_engine
def test_logits_are_those_of_the_step(engine: EngineOptions, network: str, width: int) -> None:
    watch = Watch()
    run({"watch": watch}, engine, NETWORKS[network], width)
    assert watch.checked > 30
    assert watch.padded > 0 or width == 1


@pytest.mark.parametrize(("engine", "network"), [(VMAP, "mlp"), (WORKERS, "mlp"), (WORKERS, "conv"), (STACKS, "mlp")])
def test_logits_of_added_samples_are_left_out(engine: EngineOptions, network: str) -> None:
    watch = Watch()
    run({"replay": Replay(), "watch": watch}, engine, NETWORKS[network])
    assert watch.checked > 30


@every_engine
def test_watching_changes_nothing(engine: EngineOptions, network: str) -> None:
    found, expected = (run(m, engine, NETWORKS[network]) for m in ({"watch": Watch()}, {}))
    for name, value in expected.items():
        assert_close(found[name], value)


class Whole(Method):
    def local_loss(self, network: Any, x: Tensor, samples: Samples) -> Tensor:
        own = samples.mask.to(x.dtype)  # padding does not count
        loss: Tensor = (own * (network(x) - 1).square().mean(1)).sum() / own.sum().clamp(min=1)
        return loss


class Passing(Method):
    """Adds a term that does not depend on the logits."""

    passes_forward = True

    def forward_pass(self, network: Any, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        logits: Tensor = network(x)
        return logits, 0.1 * network.head.weight.square().sum()


@pytest.mark.parametrize("method", [Whole, Passing], ids=["loss", "forward pass"])
@pytest.mark.parametrize(
    ("engine", "network"),
    [*((e, n) for e in (VMAP, WORKERS) for n in NETWORKS), (EngineOptions("auto"), "mlp")],
)
def test_who_replaces_loss_or_pass_is_obeyed_by_every_engine(
    engine: EngineOptions, network: str, method: type[Method]
) -> None:
    """Also with networks that otherwise have hand-written steps."""
    kind = NETWORKS[network]
    plain, reference = run({}, VMAP, kind), run({"whole": method()}, VMAP, kind)
    assert all(not torch.allclose(plain[name], reference[name]) for name in plain if "weight" in name)
    for name, value in run({"whole": method()}, engine, kind).items():
        assert_close(value, reference[name])


@pytest.mark.parametrize("engine", [STACKS, BATCH_LAST], ids=["stacks", "batch last"])
def test_engines_that_cannot_obey_are_refused(engine: EngineOptions) -> None:
    with pytest.raises(ConfigError, match=r"engine\.(stack|batch_last) = .*logits"):
        run({"whole": Whole()}, engine, mlp if engine is STACKS else ConvNet)


def test_logits_of_a_replaced_loss_are_refused() -> None:
    with pytest.raises(ConfigError, match="Whole and Watch"):
        run({"watch": Watch(), "whole": Whole()}, VMAP, mlp)


# Gradients on other samples.


class Look(Method):
    """Asks for gradients on the step's own samples but one, in reverse order, whenever it can."""

    def __init__(self, purpose: str = "look", compares: bool = True) -> None:
        self.purpose, self.compares = purpose, compares
        self.seen: list[dict[str, Tensor]] = []
        self.at_start: dict[str, Tensor] = {}
        self.batch: Any = None
        self.checked = 0

    def other(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        places = torch.arange(batch.mask.shape[1])
        count = batch.mask.sum(1, keepdim=True)
        index = batch.index.gather(1, (count - 1 - places).clamp(min=0))
        mask = places < torch.where(count > 1, count - 1, count)
        return CohortBatch(
            batch.clients, batch.sizes, index, mask, True, batch.task, 0, batch.step, (), False, batch.gather
        )

    def look(self, cohort: Cohort, batch: CohortBatch) -> None:
        other = self.other(cohort, batch)
        found = cohort.gradients_on(other, self.purpose)
        self.seen.append({name: gradient.clone() for name, gradient in found.items()})
        if self.compares:
            for row in range(len(cohort.clients)):
                self.compare({name: gradient[row] for name, gradient in found.items()}, cohort, other, row)

    def compare(self, found: dict[str, Tensor], cohort: Cohort, other: CohortBatch, row: int) -> None:
        used = other.mask[row]
        model = model_of(cohort, row)
        leaves = {n: model[n].requires_grad_() for n in cohort.parameters}
        outputs = cohort.outputs_in_loss(other.task)
        assert outputs is not None
        if not used.any():
            assert all(not gradient.any() for gradient in found.values())
            return
        with torch.enable_grad():
            logits = functional_call(self.context.network.train(), {**model, **leaves}, (other.x[row][used],))
            loss = F.cross_entropy(logits.masked_fill(~outputs, -torch.inf), other.y[row][used])
        expected = torch.autograd.grad(loss, list(leaves.values()))
        for name, value in zip(leaves, expected, strict=True):
            assert_close(found[name], value)
        self.checked += 1

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        self.batch = batch
        self.look(cohort, batch)
        return batch

    def adjust_gradients(self, cohort: Cohort) -> None:
        before = {name: gradient.clone() for name, gradient in cohort.gradients.items()}
        self.look(cohort, self.batch)
        for name, gradient in cohort.gradients.items():
            assert torch.equal(gradient, before[name])


class Idle(Method):
    def adjust_gradients(self, cohort: Cohort) -> None:
        pass


@pytest.mark.parametrize("width", [1, 4])
@every_engine
def test_gradients_on_other_samples_are_autograds(engine: EngineOptions, network: str, width: int) -> None:
    look = Look()
    run({"look": look}, engine, NETWORKS[network], width, MOMENTUM)
    assert look.checked > 60


@every_engine
def test_asking_for_them_changes_nothing(engine: EngineOptions, network: str) -> None:
    found, expected = (
        run(m, engine, NETWORKS[network], 4, MOMENTUM) for m in ({"look": Look(compares=False)}, {"idle": Idle()})
    )
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("engine", [VMAP, WORKERS, STACKS])
def test_their_dropout_masks_have_a_name(engine: EngineOptions) -> None:
    looks = [Look(purpose, compares=False) for purpose in ("one", "one", "other")]
    ends = [run({"look": look}, engine, dropping) for look in looks]
    first, again, other = (look.seen[0]["layers.0.weight"] for look in looks)
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert all(torch.equal(ends[0][name], ends[2][name]) for name in ends[0])


def test_a_cohort_without_engine_says_so() -> None:
    cohort = Cohort(mlp((1, 4, 4), 4), 1)
    with pytest.raises(RuntimeError, match="no engine"):
        cohort.gradients_on(None, "look")  # type: ignore[arg-type]


class Focal(Observing):
    """A loss other than cross-entropy: weights and a term that depend on the logits. It records the logits."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def sample_weights(self, weights: Tensor, logits: Tensor, samples: Samples) -> Tensor:
        chance = logits.softmax(-1).gather(-1, samples.y[:, None]).squeeze(-1)
        return weights * (1 - chance).square()

    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        squares = torch.where(samples.mask, logits.square().mean(-1), torch.zeros_like(logits[..., 0]))
        return 0.1 * squares.sum()

    def observe(self, cohort: Cohort, batch: CohortBatch, logits: Tensor) -> None:
        self.seen.append(logits[batch.mask].clone())


class InputDropout(Network):
    """A chain that begins with a dropout, which works in place on its inputs."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.drop = nn.Dropout(0.5)
        self.hidden = nn.Linear(math.prod(input_shape), 6)
        self.head = nn.Linear(6, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.hidden(self.drop(torch.flatten(x, 1))))


@pytest.mark.parametrize("kept", [False, True], ids=["at once", "kept"])
@pytest.mark.parametrize(
    "kinds",
    [[Focal], [Focal, Replay], [Replay], [FullReplay]],
    ids=["loss", "loss of all", "added samples", "samples without padding"],
)
@pytest.mark.parametrize("network", [dropping, InputDropout, partial(StridedNet, dropout=0.4), PoolNet])
def test_steps_recorded_with_methods_are_the_steps(
    monkeypatch: pytest.MonkeyPatch, network: Any, kinds: list[Any], kept: bool
) -> None:
    """Weights and logits agree bit for bit, with dropout, decay and a pull. A loss of methods is recorded in halves."""
    runs = []
    for worth in (1, 10**9):
        made: list[str] = []

        def note(kind: str, record: Any, *given: Any, made: list[str] = made) -> Any:
            made.append(kind)
            return record(*given)

        whole = partial(note, "whole", recorded.RecordedSteps._record)
        with monkeypatch.context() as patched:
            patched.setattr(recorded, "WORTH_RECORDING", worth)
            patched.setattr(recorded, "record_halves", partial(note, "halves", recorded.record_halves))
            patched.setattr(recorded.RecordedSteps, "_record", lambda *a, whole=whole: whole(*a))
            own = [kind() for kind in kinds]
            methods = {"prox": FedProx(0.3), **{str(number): method for number, method in enumerate(own)}}
            data = unequal(7, split())
            layout = None if network in (dropping, InputDropout) else True
            engine = EngineOptions("workers", 2, stack=1, batch_last=layout)
            client = tiny_client(data, network, DECAY, methods, engine)
            federation = fit(client, data, gradient_clip_val=100.0 if kept else None)
        runs.append((weights(federation), own[0].seen if Focal in kinds else []))
        assert set(made) == ({"halves" if Focal in kinds else "whole"} if worth == 1 else set())
    (first, seen), (second, expected) = runs
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(seen) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


@pytest.mark.parametrize("engine", [VMAP, WORKERS, STACKS], ids=["vmap", "workers", "stacks"])
@pytest.mark.parametrize(
    ("hook", "returned", "told"),
    [
        ("sample_loss", lambda logits: logits.mean(-1), r"sample_loss has shape \[\d+\], not \[\]"),
        ("sample_loss", lambda logits: logits.mean().view(1), r"sample_loss has shape \[1\], not \[\]"),
        ("sample_loss", lambda logits: None, r"sample_loss is None, not a tensor of shape \[\]"),
        ("sample_weights", lambda logits: logits.mean(), r"sample_weights has shape \[\], not \[\d+\]"),
    ],
)
def test_a_loss_of_another_shape_is_refused_by_its_methods_name(
    engine: EngineOptions, hook: str, returned: Any, told: str
) -> None:
    """A loss with one number per sample would otherwise count each sample several times."""

    def give(self: Method, *given: Any) -> Any:
        return returned(given[1] if hook == "sample_weights" else given[0])

    method = type("Odd", (Method,), {hook: give})()
    with pytest.raises(RuntimeError, match=r"methods\.odd: " + told):
        run({"odd": method}, engine, mlp)
