"""Passes in parts: the same outputs, unless these depend on the other samples of the batch."""

from __future__ import annotations

import pytest
import torch
from support.tiny import ConvNet, fit, split, tiny_client, tiny_data
from test_networks import CASES, IDS, build, images
from torch import Tensor, nn

from cfl.models.density import is_density
from cfl.models.in_parts import SAMPLES, gains_by_parts, in_parts
from cfl.training.evaluation import Scoring


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_networks_answer_alike(case) -> None:  # type: ignore[no-untyped-def]
    network = build(case).double().eval()
    if is_density(network):
        pytest.skip("estimates a density: it is not asked for answers")
    x = images(case, 5).double()
    modules = list(network.modules())
    alone = all(m.track_running_stats for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm))
    assert gains_by_parts(network, x) == (alone and any(isinstance(m, nn.Conv2d) for m in modules))
    if not alone:
        return
    x = x[torch.arange(SAMPLES + 3) % len(x)]
    with torch.no_grad():
        torch.testing.assert_close(in_parts(network, x), network(x), rtol=1e-11, atol=1e-12)


def sizes_in_tests(monkeypatch: pytest.MonkeyPatch, network: type[ConvNet]) -> tuple[set[int], Tensor]:
    """Sizes of the batches that the network was tested with, and the accuracies."""
    sizes: set[int] = set()
    real = Scoring.answers

    def watched(self: Scoring, batch, model, is_network, whose=(0,)) -> Tensor:  # type: ignore[no-untyped-def]
        handle = self.federation.network.conv.register_forward_pre_hook(lambda _, given: sizes.add(len(given[0])))
        try:
            return real(self, batch, model, is_network, whose)
        finally:
            handle.remove()

    monkeypatch.setattr(Scoring, "answers", watched)
    data = tiny_data(split(2, classes=4, train=40, test=4 * SAMPLES))
    federation = fit(tiny_client(data, network), data)
    return sizes, federation.measured.compute().clone()


def test_tests_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, accuracies = sizes_in_tests(monkeypatch, ConvNet)
    assert max(sizes) == SAMPLES
    monkeypatch.setattr("cfl.training.evaluation.gains_by_parts", lambda network, x: False)
    whole, same = sizes_in_tests(monkeypatch, ConvNet)
    assert max(whole) == 2 * SAMPLES
    assert torch.equal(accuracies, same)
