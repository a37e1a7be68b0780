"""Options that cannot work are refused before training by key, value and what is valid, for every method."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, nan
from typing import Any

import pytest
from support.tiny import fit, mlp, sgd, tiny_client, tiny_data

from cfl.data.sources import Synthetic
from cfl.methods import (
    AGEM,
    CONFEDMADE,
    DER,
    ER,
    EWC,
    FOT,
    GLFC,
    GPM,
    L2P,
    RGO,
    SCAFFOLD,
    AnalyticHead,
    CFeD,
    DPFedAvg,
    FedAGEM,
    FedCIL,
    FedCurv,
    FedProx,
    FedWeIT,
    FoundBoundaries,
    GradientCompensation,
    ICaRL,
    InferringFOT,
    LearningRateDecay,
    Method,
)
from cfl.runtime.errors import ConfigError

SURROGATE = Synthetic(4, [1, 4, 4], 40, 4)

REFUSED: dict[str, tuple[Callable[..., Method], list[dict[str, Any]]]] = {
    "agem": (AGEM, [{"batch_size": 0}]),
    "analytic_head": (AnalyticHead, [{"ridge": 0.0}, {"random_features": 0}]),
    "cfed": (
        partial(CFeD, SURROGATE),
        [
            {"share": 1.0},
            {"share": -0.1},
            {"temperature": 0.0},
            {"weight": -1.0},
            {"server_distillation": -1},
            {"server_lr": 0.0},
        ],
    ),
    "confedmade": (
        CONFEDMADE,
        [
            {"lambda_3": 0.0},
            {"lambda_3": inf},
            {"cut_off": 1.0},
            {"cut_off": -0.1, "cut_off_by": "value"},
            {"cut_off_by": "size"},
            {"attention": "ones"},
            {"sparsity": -1.0},
            {"mask_sparsity": -1.0},
        ],
    ),
    "der": (
        DER,
        [
            {"alpha": -1.0},
            {"alpha": inf},
            {"beta": nan},
            {"batch_size": 0},
            {"over_outputs": "norm"},
        ],
    ),
    "dp_fedavg": (
        DPFedAvg,
        [
            {"clip": 0.0},
            {"noise_multiplier": -1.0},
            {"quantile": 1.5},
            {"clip_lr": 0.5},
            {"count_noise": 1.0},
            {"count_noise": 1.0, "quantile": 0.5, "noise_multiplier": 0.0},
        ],
    ),
    "er": (
        ER,
        [
            {"size": 0},
            {"batch_size": 0},
            {"update": "round"},
            {"per_task": True, "update": "step"},
            {"weight": -1.0},
            {"weighting": "sum"},
        ],
    ),
    "ewc": (
        EWC,
        [
            {"strength": -1.0},
            {"strength": nan},
            {"strength": inf},
            {"limit": 2.0},
            {"limit": 0.0},
            {"gamma": 1.5, "consolidation": "online"},
            {"gamma": 0.9},
            {"consolidation": "both"},
            {"fisher": "exact"},
            {"fisher_batch_size": 0},
        ],
    ),
    "fed_agem": (
        FedAGEM,
        [
            {"samples": 0},
            {"every": 0},
            {"refinement": "turn"},
            {"when": "never"},
            {"clients": "some"},
            {"mode": "test"},
            {"share": 0.0},
            {"share": 1.5},
        ],
    ),
    "fedcil": (
        FedCIL,
        [
            {"replay_share": 1.0},
            {"replay_share": -0.1},
            {"replay_batch_size": 0},
            {"consistency": -1.0},
            {"consistency": nan},
            {"consolidation_steps": -1},
            {"consolidation_source": "server"},
            {"consolidation_batch_size": 0},
            {"consolidation_lr": 0.0},
        ],
    ),
    "fedcurv": (
        FedCurv,
        [
            {"strength": -1.0},
            {"strength": nan},
            {"strength": inf},
            {"keep": 0.0},
            {"keep": 1.1},
            {"keep": nan},
            {"fisher": "exact"},
            {"reduction": "median"},
            {"fisher_batch_size": 0},
            {"on_unstable": "ignore"},
        ],
    ),
    "fedprox": (FedProx, [{"mu": -1.0}, {"mu": nan}, {"mu": inf}]),
    "fedweit": (
        FedWeIT,
        [
            {"keep": 0.0},
            {"keep": 1.1},
            {"top_kappa": 0},
            {"communicating": 0.0},
            {"communicating": 1.1},
            {"attention": "even"},
            {"sparsity": -1.0},
            {"consolidation": inf},
            {"threshold": nan},
            {"adaptive_from": "last"},
            {"draws": "mine"},
            {"base_mean": "all"},
            {"lenders": "first_round"},
        ],
    ),
    "fot": (
        FOT,
        [
            {"threshold": 0.0},
            {"threshold": 1.01},
            {"threshold": -0.5},
            {"threshold": nan},
            {"threshold_increment": -0.1},
            {"threshold_increment": 1.0},
            {"sketch_size": 0.0},
            {"sketch_size": -1.0},
            {"sketch_size": nan},
            {"sketch_size": inf},
            {"sketch_size": {"conv": 1.0}},
            {"sketch_size": {"conv": 1.0, "linear": 0.0}},
            {"sketch_size": {"conv": 1.0, "linear": 1.0, "head": 1.0}},
            {"sketch_size": 5.0, "message": "covariance"},
            {"sketch_sharing": 0},
            {"sketch_sharing": 8, "message": "covariance"},
            {"rank_rule": "paper"},
            {"minimum_rank": -1},
            {"minimum_rank": 2},
            {"residual_share": "mean"},
            {"residual_share": "client_mean", "message": "covariance"},
            {"gpse_model": "both"},
            {"gpse_clients": "none"},
            {"gpse_batch_size": 0},
            {"importance_scale": 1.0},
            {"importance_scale": -1.0, "message": "covariance"},
            {"importance_scale": inf, "message": "covariance"},
            {"message": "moments"},
            {"capacity": {}},
            {"capacity": 0.5},
            {"capacity": {"total": 0.5, "per_task": 0.1}},
            {"capacity": {"task": 0.5}},
            {"capacity": {"total": 0.0}},
            {"capacity": {"per_task": 1.5}},
            {"capacity": {"total": nan}},
        ],
    ),
    "found_boundaries": (
        FoundBoundaries,
        [
            {"tolerance": -1},
            {"threshold": 0},
            {"window": 1},
            {"warm_up": 1},
            {"floor": 0},
            {"keep_every": 0},
        ],
    ),
    "glfc": (
        GLFC,
        [
            {"size": 0},
            {"batch_size": 0},
            {"threshold": -0.1},
            {"perturbation_steps": -1},
            {"inversion_steps": 0},
            {"images": 0},
        ],
    ),
    "gpm": (
        GPM,
        [
            {"threshold": 0.0},
            {"threshold": 1.1},
            {"threshold": {}},
            {"threshold": {"*": 2}},
            {"threshold": {"head": 0.9}},
            {"threshold": {"*": 0.9, "conv*": 0.8}},
            {"threshold_increment": 1.0},
            {"samples": 0},
            {"batch_size": 0},
            {"rank_rule": "fot"},
            {"layers": ["fc"]},
        ],
    ),
    "gradient_compensation": (GradientCompensation, [{"loss": "mse"}]),
    "icarl": (ICaRL, [{"size": 0}, {"batch_size": 0}, {"classifier": "nearest"}]),
    "inferring_fot": (InferringFOT, [{"directions": 0}, {"threshold": 2.0}]),
    "l2p": (L2P, [{"strength": -0.1}, {"strength": inf}, {"strength": nan}]),
    "learning_rate_decay": (
        LearningRateDecay,
        [
            {"factor": 0.5},
            {"factor": inf},
            {"patience": 0},
            {"floor": -1e-3},
            {"threshold": 1.0},
            {"batch_size": 0},
        ],
    ),
    "rgo": (
        RGO,
        [
            {"share": -0.1},
            {"share": 1.1},
            {"share": 0.05},
            {"damping": 0.0},
            {"damping": inf},
            {"samples": 0},
            {"batch_size": 0},
            {"curvature": "fisher"},
            {"layers": ["fc"]},
        ],
    ),
    "scaffold": (SCAFFOLD, [{"variant": "III"}]),
}
"""Name in errors -> the method, and options that it refuses: each time the first one."""

EACH = [(name, options) for name, (_, refused) in REFUSED.items() for options in refused]


@pytest.mark.parametrize(("name", "options"), EACH, ids=[f"{name} {options}" for name, options in EACH])
def test_they_are_refused_by_key_and_value(name: str, options: dict[str, Any]) -> None:
    """By the constructor or, where they depend on the network and the clients, before training."""
    data = tiny_data(schedule={"rounds_per_task": 1})
    with pytest.raises(ConfigError) as caught:
        fit(tiny_client(data, mlp, sgd, {name: REFUSED[name][0](**options)}), data)
    key, value = next(iter(options.items()))
    assert caught.value.key == f"methods.{name}.{key}"
    parts = [value, *value] if isinstance(value, list | dict) else [value]
    assert repr(caught.value.value) in map(repr, parts)
    assert caught.value.valid
