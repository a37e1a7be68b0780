"""Losses of methods that train nothing or that vmap cannot compute, and added samples that no engine could train on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.tiny import fit, mlp, sgd, tiny_client, tiny_data, weights
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cfl.data.cohorts import CohortBatch
from cfl.data.samples import ExtraSamples, Samples
from cfl.engines import EngineOptions
from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.methods import Method
from cfl.models import Network
from cfl.runtime.errors import ConfigError

ENGINES = [(EngineOptions("vmap"), 1), (EngineOptions("vmap"), 2), (EngineOptions("workers", 1), 2)]
every_engine = pytest.mark.parametrize(("engine", "width"), ENGINES, ids=["alone", "vmap", "workers"])


def run(members: dict[str, Any], engine: EngineOptions, width: int = 2, network: Any = mlp) -> Federation:
    data = tiny_data(schedule={"cohort_width": width, "rounds_per_task": 1})
    methods = {"mine": type("Mine", (Method,), members)()}
    return fit(tiny_client(data, network, sgd, methods, engine), data)


def mean(logits: Tensor, samples: Samples) -> Tensor:
    return (cross_entropy(logits, samples.y, reduction="none") * samples.weights.to(logits.dtype)).sum()


def without_gradient(network: nn.Module, x: Tensor, samples: Samples) -> Tensor:
    with torch.no_grad():
        return mean(network(x), samples)


@every_engine
@pytest.mark.parametrize(
    ("members", "hook"),
    [
        ({"local_loss": lambda self, network, x, samples: mean(network(x), samples).detach()}, "local_loss"),
        ({"local_loss": lambda self, network, x, samples: without_gradient(network, x, samples)}, "local_loss"),
        ({"local_loss": lambda self, network, x, samples: torch.zeros(())}, "local_loss"),
        ({"sample_loss": lambda self, logits, samples: logits.square().mean().detach()}, "sample_loss"),
        (
            {"forward_pass": lambda self, network, x, samples: (network(x).detach(), torch.zeros(()))},
            "forward_pass",
        ),
        (
            {"forward_pass": lambda self, network, x, samples: (z := network(x), z.detach().square().sum())},
            "forward_pass's term",
        ),
        (
            {"forward_pass": lambda self, network, x, samples: (network(x), without_gradient(network, x, samples))},
            "forward_pass's term",
        ),
    ],
)
def test_a_loss_without_gradient_is_refused(
    members: dict[str, Any], hook: str, engine: EngineOptions, width: int
) -> None:
    """Clients side by side would train nothing, without an error."""
    with pytest.raises(
        ConfigError, match=rf"methods\.mine = ['\"]Mine\.{hook} without gradient['\"] .*detach, item or no_grad"
    ):
        run(members, engine, width)


@every_engine
def test_a_loss_with_gradient_and_a_term_of_zero_are_not(engine: EngineOptions, width: int) -> None:
    """A method that has nothing to remember yet may return a zero."""
    plain = weights(run({}, engine, width))
    members = {
        "whole": {"local_loss": lambda self, network, x, samples: mean(network(x), samples)},
        "term": {"sample_loss": lambda self, logits, samples: logits.new_zeros(())},
        "passing": {"forward_pass": lambda self, network, x, samples: (network(x), x.new_zeros(()))},
    }
    for one in members.values():
        torch.testing.assert_close(weights(run(one, engine, width)), plain, rtol=0, atol=1e-6)


class Branching(Network):
    """Looks at the values of its features, which vmap cannot do."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.head = nn.Linear(16, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1) if x.sum() > 1e9 else 2 * x.flatten(1)


@pytest.mark.parametrize(
    ("members", "hook"),
    [
        (
            {"sample_loss": lambda self, logits, samples: logits.mean() if logits.max() > 0 else logits.sum()},
            "sample_loss",
        ),
        ({"sample_loss": lambda self, logits, samples: logits[samples.mask].mean()}, "sample_loss"),
        ({"sample_weights": lambda self, weights, logits, samples: weights * logits.max().item()}, "sample_weights"),
        ({"local_loss": lambda self, network, x, samples: network(x).mean() * x.max().item()}, "local_loss"),
    ],
)
def test_what_vmap_cannot_compute_is_blamed_on_whom_it_is_of(members: dict[str, Any], hook: str) -> None:
    with pytest.raises(ConfigError, match=rf"methods\.mine = 'Mine\.{hook}' .*workers .*operations for vmap \(vmap: "):
        run(members, EngineOptions("vmap"))
    with pytest.raises(ConfigError, match=r"model\.network = 'Branching' .*a network for vmap"):
        run(members, EngineOptions("vmap"), network=Branching)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (lambda logits: None, r"forward_pass gives NoneType, not \(logits, term\)"),
        (lambda logits: logits, r"forward_pass gives Tensor, not \(logits, term\)"),
        (lambda logits: (logits[:, :2], logits.sum()), r"forward_pass's logits has shape \[8, 2\], not \[8, 4\]"),
        (lambda logits: (logits, 0.0), r"forward_pass's term is 0\.0, not a tensor of shape \[\]"),
    ],
)
@every_engine
def test_logits_of_another_kind_are_refused(found: Any, said: str, engine: EngineOptions, width: int) -> None:
    members = {"forward_pass": lambda self, network, x, samples: found(network(x))}
    with pytest.raises(RuntimeError, match=rf"methods\.mine: {said}"):
        run(members, engine, width)


def adding(change: Any) -> dict[str, Any]:
    """A method that adds its step's first three samples once more, the last one masked, with some fields changed."""

    def extend_batch(self: Method, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        mask = torch.tensor([True, True, False]).expand(len(cohort.clients), 3)
        fields: dict[str, Any] = {"x": batch.x[:, :3], "y": batch.y[:, :3], "tasks": batch.task_ids[:, :3]}
        fields |= {"mask": mask, "weights": mask.double() / 2, "source": self.source}
        return batch.with_added(ExtraSamples(**{**fields, **change(fields)}))

    return {"extend_batch": extend_batch}


def padded(values: Tensor, value: float) -> Tensor:
    """The values with another one in the last, masked place."""
    return torch.cat([values[:, :2], torch.full_like(values[:, 2:], value)], 1)


@every_engine
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda of: {"y": torch.full_like(of["y"], -100)}, "y = -100, not an output from 0 to 3"),
        (lambda of: {"y": torch.full_like(of["y"], 4)}, "y = 4, not an output from 0 to 3"),
        (lambda of: {"y": of["y"].float()}, "y of torch.float32 on cpu, not of torch.int64 on cpu"),
        (lambda of: {"x": padded(of["x"], math.nan)}, "NaN or infinity in x where mask is False"),
        (lambda of: {"x": of["x"].double()}, "x of torch.float64 on cpu, not of torch.float32"),
        (lambda of: {"x": of["x"].byte()}, "x of torch.uint8 on cpu, not of torch.float32"),
        (lambda of: {"x": of["x"].flatten(2)}, r"x of shape \[\d, 3, 16\], not \[\d, 3, 1, 4, 4\]"),
        (lambda of: {"source": 0}, "source 0, not self.source"),
        (lambda of: {"weights": of["weights"][:, :1]}, r"weights of shape \[\d, 1\], not \[\d, 3\]: y has \[\d, 3\]"),
        (lambda of: {"weights": of["mask"]}, "weights of torch.bool"),
        (lambda of: {"weights": 0.5}, "weights as float, not as a tensor"),
        (lambda of: {"mask": of["mask"].long()}, "mask of torch.int64"),
        (lambda of: {"tasks": of["tasks"][:, :2]}, r"tasks of shape \[\d, 2\], not \[\d, 3\]"),
        (lambda of: {"own_factor": of["weights"][:, :1]}, r"own_factor of shape \[\d, 1\], not \[\d\]"),
        (lambda of: {"extras": {"z": of["x"][:, :2]}}, r"extras\['z'\] of shape .*, not \[\d, 3, \.\.\.\]"),
    ],
)
def test_added_samples_that_do_not_fit_are_refused(change: Any, said: str, engine: EngineOptions, width: int) -> None:
    with pytest.raises(RuntimeError, match=rf"methods\.mine\.extend_batch adds samples with {said}"):
        run(adding(change), engine, width)


def giving(extra: Any) -> dict[str, Any]:
    """A method that gives an extra of its step's own samples."""

    def extend_batch(self: Method, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        return batch.with_extras({"z": extra(cohort, batch)})

    return {"extend_batch": extend_batch}


@every_engine
@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (lambda cohort, batch: 0.5, "as float, not as a tensor"),
        (lambda cohort, batch: batch.x.flatten(0, 1), r"of shape \[\d+, 1, 4, 4\], not \[\d, \d, \.\.\.\]"),
        (lambda cohort, batch: torch.zeros(len(batch.x), 99), r"of shape \[\d, 99\], not \[\d, \d, \.\.\.\]"),
        (lambda cohort, batch: torch.zeros(len(batch.x)), r"of shape \[\d\], not \[\d, \d, \.\.\.\]"),
        (
            lambda cohort, batch: batch.x.flatten(2) * cohort.parameters["head.bias"].sum(),
            r"with a gradient: extras are constants; use torch\.no_grad",
        ),
    ],
)
def test_extras_that_do_not_fit_are_refused(extra: Any, said: str, engine: EngineOptions, width: int) -> None:
    with pytest.raises(RuntimeError, match=rf"methods\.mine\.extend_batch gives extras\['z'\] {said}"):
        run(giving(extra), engine, width)


@every_engine
@pytest.mark.parametrize("y", [-1, -100, 4])
def test_padding_may_have_any_output(y: int, engine: EngineOptions, width: int) -> None:
    found, expected, without = (
        weights(run(members, engine, width))
        for members in (adding(lambda of: {"y": padded(of["y"], y)}), adding(lambda of: {}), {})
    )
    for name, value in found.items():
        assert torch.equal(value, expected[name])
        assert not torch.equal(value, without[name])
