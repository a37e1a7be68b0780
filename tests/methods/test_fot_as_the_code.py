"""What FOT's published code does differently in GPSE: active dropout, and numbers that several clients share."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny import fit, mlp, permuted, sgd, tiny_client, tiny_data
from torch import Tensor

from cfl.channel import Channel
from cfl.errors import ConfigError
from cfl.methods import FOT
from cfl.models import MLP
from cfl.randomness import torch_generator

dropping = partial(MLP, hidden=[24, 24], dropout=[0.5, 0.5])


def fot(options: dict[str, Any], network: Any = dropping, width: int = 4, threads: int = 1, **data_options: Any) -> FOT:
    data = tiny_data(permuted(2, train=160), num_clients=8, schedule={"cohort_width": width}, **data_options)
    method = FOT(**{"threshold": 0.9, "sketch_size": 1.0, **options})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fit(tiny_client(data, network, sgd, {"fot": method}), data)
    finally:
        torch.set_num_threads(before)
    return method


def sizes(method: FOT) -> list[int]:
    return [basis.shape[1] for basis in method.bases.values()]


def test_dropout_fills_the_hidden_layers_and_leaves_the_first_alone() -> None:
    off, on = fot({}), fot({"gpse_dropout": True})
    assert torch.equal(off.bases["layers.0"], on.bases["layers.0"])  # nothing is dropped before the first layer
    assert all(few < many for few, many in zip(sizes(off)[1:], sizes(on)[1:], strict=True))


def test_dropout_in_gpse_is_counted() -> None:
    """Neither threads nor the cohort width change it, and nothing is left switched on."""
    one, other = fot({"gpse_dropout": True}), fot({"gpse_dropout": True}, width=2, threads=2)
    assert sizes(one) == sizes(other)
    for name, basis in one.bases.items():
        torch.testing.assert_close(basis @ basis.T, other.bases[name] @ other.bases[name].T, atol=2e-4, rtol=0)


def test_without_dropout_layers_the_option_changes_nothing() -> None:
    off, on = fot({}, mlp), fot({"gpse_dropout": True}, mlp)
    assert all(torch.equal(off.bases[name], on.bases[name]) for name in off.bases)


@pytest.mark.parametrize("share", [2, 4])
def test_shared_numbers_are_those_of_the_clients_places(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 clients in 2 or 4 equal parts, those at the same place of their part multiply by the same numbers."""
    sums: list[dict[str, Tensor]] = []
    read = Channel.sum

    def watched(channel: Channel, topic: str) -> tuple[dict[str, Tensor], float]:
        found = read(channel, topic)
        if topic == "fot sketch":
            sums.append({name: value.clone() for name, value in found[0].items()})
        return found

    monkeypatch.setattr(Channel, "sum", watched)
    data = fot({"sketch_size": 3.0, "sketch_sharing": share}).federation.data
    expected = torch.zeros(16, 48, dtype=torch.float64)
    for client in range(8):
        generator = torch_generator(data.seed, "shared sketch", 0, client % (8 // share), 0)
        (x, _), *more = data.client_batches(0, client, 500, torch.device("cpu"))
        assert not more
        numbers = torch.randn(len(x), 48, generator=generator)
        expected += x.flatten(1).T.double() @ numbers.double()
    torch.testing.assert_close(sums[0]["layers.0"].double(), expected, rtol=0, atol=1e-4)


def test_the_more_clients_share_the_lower_the_ranks() -> None:
    """With 8 parts of one client all share: the sum is one of sums over clients, of low rank."""
    found = [sum(sizes(fot({"sketch_size": 3.0, "sketch_sharing": share}))) for share in (1, 2, 8)]
    assert found[0] >= found[1] >= found[2]
    assert found[0] > found[2]


def test_bad_sharing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"methods\.fot\.sketch_sharing"):
        FOT(sketch_sharing=0)
