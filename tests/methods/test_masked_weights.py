"""MaskedWeights against the mean of weights times masks, written out entry by entry."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support.tiny import Rounds, double, fit, mlp, permuted, source, tiny_client, tiny_data
from torch import Tensor

from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Dirichlet
from cfl.data.sources import Binarised
from cfl.data.streams import Permuted
from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.methods import APD, MaskedWeights, Method, PersonalLayers
from cfl.models import MADE
from cfl.runtime.errors import ConfigError

ADAM = partial(torch.optim.Adam, lr=0.01)


class Trained(Method):
    """Records what every client has trained, before later methods change it."""

    scenarios = frozenset({"density"})
    task_free = True

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], dict[str, Tensor]] = {}

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        for position in positions:
            own = {name: values[position].detach().clone() for name, values in cohort.parameters.items()}
            self.found[cohort.round, cohort.clients[position]] = own


def data_of(**options: Any) -> FederatedDataModule:
    stream = Permuted(Binarised(source()), 1)
    settings: dict[str, Any] = {"num_clients": 4, "partition": Dirichlet(0.5, 3, balance=False), **options}
    schedule = {"rounds_per_task": 2, "clients_per_round": 3}
    return tiny_data(stream, scenario="density", schedule=schedule, **settings)


def trained(methods: dict[str, Method], **network: Any) -> tuple[MADE, Federation, list[dict[str, Tensor]]]:
    data, watch = data_of(), Rounds()
    made = double(partial(MADE, **{"hidden": [7], "synchronised": False, **network}))
    client = tiny_client(data, made, ADAM, methods)
    federation = fit(client, data, {"client_weighting": "samples"}, [watch])
    return client.network, federation, watch.models


def masks_by_entry(made: MADE, round: int, client: int) -> dict[str, Tensor]:
    """The masks of a MADE with one hidden layer, from the positions of variables and the degrees of hidden units."""
    degrees = made.degrees(round, client, 0)
    order, (hidden,), out = (
        degrees.order.tolist(),
        [h.tolist() for h in degrees.hidden],
        degrees.output_order.tolist(),
    )
    return {
        "layers.0.weight": torch.tensor([[float(j <= h) for j in order] for h in hidden]),
        "output.weight": torch.tensor([[float(h < d) for h in hidden] for d in out]),
        "shortcut.weight": torch.tensor([[float(e < d) for e in order] for d in order]),
    }


@pytest.mark.parametrize(
    "options",
    [{"direct": True}, {"order_agnostic": True, "synchronised": True}, {"num_masks": 2, "synchronised": "start"}],
    ids=str,
)
def test_the_server_has_the_mean_of_weights_times_masks(options: dict[str, Any]) -> None:
    watched = Trained()
    made, federation, models = trained({"watched": watched, "masked": MaskedWeights()}, **options)
    for round, model in enumerate(models):
        plan = federation.data.rounds.round(round)
        sizes = {client: len(federation.data.indices[0][client]) for client in plan.clients}
        for name, value in model.items():
            expected = torch.zeros_like(value)
            for client, size in sizes.items():
                own = watched.found[round, client][name]
                mask = masks_by_entry(made, round, client).get(name)
                expected += size / sum(sizes.values()) * (own if mask is None else own * mask)
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


def test_weights_that_no_client_can_use_become_zero() -> None:
    made, _, models = trained({"masked": MaskedWeights()}, synchronised=True, order_agnostic=True)
    unused = masks_by_entry(made, len(models) - 1, 0)["output.weight"] == 0
    assert unused.any()
    assert models[-1]["output.weight"][unused].abs().max() < 1e-15


@pytest.mark.parametrize(
    ("network", "methods", "message"),
    [
        ({"synchronised": True}, {}, r"model\.network\.synchronised = True .*false, order_agnostic"),
        ({}, {"apd": APD}, r"methods = 'layers\.0\.weight, output\.weight' .*no method decomposes"),
        ({}, {"own": partial(PersonalLayers, ["output*"])}, r"methods = 'output\.weight' .*keeps local"),
    ],
)
def test_refused(network: dict[str, Any], methods: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trained({"masked": MaskedWeights(), **{name: make() for name, make in methods.items()}}, **network)


def test_refused_with_another_network() -> None:
    data = data_of()
    with pytest.raises(ConfigError, match=r"model\.network"):
        fit(tiny_client(data, mlp, ADAM, {"masked": MaskedWeights()}), data)
    labelled = tiny_data(permuted(1))
    with pytest.raises(ConfigError, match="MaskedWeights"):
        fit(tiny_client(labelled, mlp, ADAM, {"masked": MaskedWeights()}), labelled)
