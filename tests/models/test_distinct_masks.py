"""MADEs with masks of each client's own: the densities that are scored, and the loss by averaging the models."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.tiny import double, fit, source, tiny_client, tiny_data
from torch import Tensor

from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import Joining
from cfl.data.partitions import Dirichlet
from cfl.data.sequences import FixedTasks
from cfl.data.sources import Binarised
from cfl.data.streams import ClassSplit, Permuted, Stream
from cfl.export.answer import Choice, answer_of
from cfl.federation.federation import Federation
from cfl.methods import EWC, FedCurv, Method, PersonalLayers
from cfl.models import MADE
from cfl.models.made_masks import inner_masks, output_mask
from cfl.runtime.errors import ConfigError
from cfl.training.client import Client

ADAM = partial(torch.optim.Adam, lr=0.01)


def data_of(stream: Stream | None = None, **options: Any) -> FederatedDataModule:
    settings: dict[str, Any] = {
        "num_clients": 4,
        "partition": Dirichlet(0.5, 3, balance=False),
        "eval_batch_size": 7,
        **options,
    }
    return tiny_data(
        stream or Permuted(Binarised(source()), 2), scenario="density", schedule={"rounds_per_task": 2}, **settings
    )


def trained(
    data: FederatedDataModule, methods: dict[str, Method] | None = None, **network: Any
) -> tuple[Client, Federation]:
    make = double(partial(MADE, **{"hidden": [7], "synchronised": False, **network}))
    client = tiny_client(data, make, ADAM, methods)
    return client, fit(client, data)


def naive_nll(network: MADE, model: dict[str, Tensor], client: int, images: Tensor) -> float:
    """Mean ``-log p`` over images under one client's density, image by image and variable by variable."""
    degrees = network.degrees(0, client, 0)  # one order, one draw of hidden degrees: those of every step
    (into_hidden,), into_outputs = inner_masks(degrees), output_mask(degrees)
    total = 0.0
    for image in images.flatten(1):
        h = torch.relu((model["layers.0.weight"] * into_hidden) @ image + model["layers.0.bias"])
        p = ((model["output.weight"] * into_outputs) @ h + model["output.bias"]).sigmoid()
        for bit, chance in zip(image.tolist(), p.tolist(), strict=True):
            total -= float(torch.tensor(chance if bit else 1 - chance, dtype=torch.float64).log())
    return total / len(images)


def images_of(data: FederatedDataModule, task: int) -> Tensor:
    return data.tasks[task].transform(data.tasks[task].test.images).double()


def model_of(federation: Federation) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in federation.model.state_tensors().items()}


def test_the_global_model_is_scored_under_every_members_masks() -> None:
    """A global model's NLL is the mean over clients that hold the task. The last client joins at the second task."""
    data = data_of(participation=Joining(3, 1))
    client, federation = trained(data)
    network: Any = client.network
    for task, members in ((0, [0, 1, 2]), (1, [0, 1, 2, 3])):
        assert federation.members(task) == members
        own = [naive_nll(network, model_of(federation), member, images_of(data, task)) for member in members]
        found = federation.measured.compute()
        assert float(found[1, task]) == pytest.approx(sum(own) / len(own), abs=1e-9)
        assert max(own) - min(own) > 0.01  # so that the test can fail


def test_a_matrix_per_client_takes_that_clients_masks() -> None:
    square = FixedTasks([[0, 1], [1, 2], [2, 0]])
    data = data_of(ClassSplit(Binarised(source()), 4), num_clients=3, sequences=square, partition=None)
    client, federation = trained(data)
    network: Any = client.network
    found = federation.measured.compute()
    for owner in range(3):
        for task in range(2):
            images = images_of(data, data.stream_task(task, owner))
            expected = naive_nll(network, model_of(federation), owner, images)
            assert float(found[owner, 1, task]) == pytest.approx(expected, abs=1e-9)


def test_personal_models_answer_under_their_own_masks() -> None:
    data = data_of()
    client, federation = trained(data, {"own": PersonalLayers(["*"])})
    network: Any = client.network
    found = federation.measured.compute()
    for owner in range(4):
        own = {name: values[0] for name, values in federation.model.personal_state((owner,)).items()}
        assert float(found[owner, 1, 1]) == pytest.approx(naive_nll(network, own, owner, images_of(data, 1)), abs=1e-9)


def test_exported_densities_are_a_clients() -> None:
    """Only a client's density can be exported: the mean of the clients' log-densities is no density."""
    client, _ = trained(data_of())
    network: Any = client.network
    x = images_of(data_of(), 0)
    with pytest.raises(ConfigError, match="masks differ"):
        answer_of(client, Choice())
    for owner in (0, 3):
        torch.testing.assert_close(answer_of(client, Choice(client=owner))(x), network.log_likelihood(x, (owner,)))
    alike, _ = trained(data_of(), synchronised=True)
    with pytest.raises(ConfigError, match="nothing but the global model"):
        answer_of(alike, Choice(client=0))


@pytest.mark.parametrize("method", [EWC(1.0), FedCurv(1.0)])
def test_fisher_information_is_refused(method: Method) -> None:
    """Methods with Fisher information are refused, because it would be measured under the masks of client 0."""
    with pytest.raises(ConfigError) as caught:
        trained(data_of(), {"it": method})
    assert caught.value.key == "model.network.synchronised"


def test_it_does_not_matter_how_test_sets_are_cut_into_batches() -> None:
    found = [trained(data_of(eval_batch_size=size))[1].measured.compute() for size in (7, 1000)]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-9, equal_nan=True)


def nll_of(clients: int, rounds: int, synchronised: bool, seed: int) -> float:
    data = tiny_data(
        ClassSplit(Binarised(source(2, 240, 100)), 1),
        scenario="density",
        num_clients=clients,
        schedule={"rounds_per_task": rounds, "evaluate_every": 0},
        seed=seed,
    )
    make = partial(MADE, hidden=[32], synchronised=synchronised)
    found = fit(tiny_client(data, make, ADAM), data, num_sanity_val_steps=0).measured.summary()["nll"]
    assert found is not None
    return found


def test_averaging_over_distinct_masks_degrades() -> None:
    """Averaging over distinct masks has a higher NLL, as in CONFEDMADE's Table 1, here on 16 pixels and two classes."""
    assert nll_of(1, 2, True, 0) == nll_of(1, 2, False, 0)  # with one client both are the same
    for seed in range(2):
        assert nll_of(8, 12, False, seed) - nll_of(8, 12, True, seed) > 0.1
