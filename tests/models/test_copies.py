"""Copies of a network for threads: their modules are separate, their tensors shared."""

from __future__ import annotations

import pytest
import torch
from support.tiny import norm_net
from torch.func import functional_call

from cfl.models.copies import networks_for_threads


@pytest.mark.parametrize(("threads", "jobs", "networks"), [(1, 5, 1), (3, 5, 3), (3, 2, 2), (3, 1, 1), (3, 0, 1)])
def test_one_for_each_thread_that_has_work(threads: int, jobs: int, networks: int) -> None:
    network = norm_net((1, 4, 4), 3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = networks_for_threads(network, jobs)
        on_meta = networks_for_threads(norm_net((1, 4, 4), 3).to("meta"), jobs)
    finally:
        torch.set_num_threads(before)
    assert len(found) == networks
    assert len(on_meta) == 1
    assert networks > 1 or found == [network]


def test_they_share_tensors_and_nothing_else() -> None:
    network = norm_net((1, 4, 4), 3)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        one, two = networks_for_threads(network, 2)
    finally:
        torch.set_num_threads(before)
    for copy in (one, two):
        theirs = {**dict(copy.named_parameters()), **dict(copy.named_buffers())}
        own = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        assert theirs.keys() == own.keys()
        assert all(theirs[name] is own[name] for name in own)
        assert set(copy.modules()).isdisjoint(network.modules())
    one.eval()
    x = torch.randn(2, 1, 4, 4)
    changed = functional_call(one, {"head.bias": torch.ones(3)}, (x,))
    assert network.training
    assert two.training
    assert not torch.equal(changed, one(x))
