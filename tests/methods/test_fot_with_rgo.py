"""FOT's bases beside RGO without feature encoding: old outputs stay in either order of the methods."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.tiny import Rounds, fit, mlp, permuted, sgd, tiny_client, tiny_data
from torch.func import functional_call

from cfl.methods import FOT, RGO, Method


@pytest.mark.parametrize("order", [("fot", "rgo"), ("rgo", "fot")])
def test_old_outputs_do_not_change(order: tuple[str, str]) -> None:
    made: dict[str, Method] = {
        "fot": FOT(threshold=1.0, protect_bias=True, rank_rule="gpm"),
        "rgo": RGO(share=0.0, feature_encoding=False),
    }
    data = tiny_data(permuted(3, train=12), num_clients=3, schedule={"rounds_per_task": 2})
    watch = Rounds()
    network = partial(mlp, hidden=[40, 30])
    federation = fit(tiny_client(data, network, sgd, {n: made[n] for n in order}), data, None, [watch])
    for task, (start, stop) in ((0, (1, 5)), (1, (3, 5))):
        index = torch.arange(12)
        x, _ = data.gather(task, index)
        before, after = (functional_call(federation.network, watch.models[round], (x,)) for round in (start, stop))
        assert not torch.equal(watch.models[start]["layers.1.weight"], watch.models[stop]["layers.1.weight"])
        torch.testing.assert_close(after, before, rtol=0, atol=1e-4)
