"""Images with the channels last: the same values, outputs and accuracies."""

import pytest
import torch
from support.tiny import ConvNet, fit, tiny_client, tiny_data
from test_networks import CASES, IDS, build, images
from torch import Tensor

from cfl.models.density import is_density
from cfl.models.memory_format import channels_last, gains_by_channels_last
from cfl.training.evaluation import Scoring


@pytest.mark.parametrize("channels", [1, 3])
def test_the_same_numbers_in_another_order(channels: int) -> None:
    whole = torch.randn(4, channels, 5, 6)
    x = whole[1:]
    turned = channels_last(x)
    assert torch.equal(turned, x)
    assert turned.stride() == (channels * 30, 1, 6 * channels, channels)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_networks_answer_alike(case) -> None:  # type: ignore[no-untyped-def]
    network = build(case).double().eval()
    if is_density(network):
        pytest.skip("estimates a density: it is not asked for answers")
    x = images(case, 5).double()
    assert gains_by_channels_last(network, x) == any(isinstance(m, torch.nn.Conv2d) for m in network.modules())
    with torch.no_grad():
        torch.testing.assert_close(network(channels_last(x)), network(x), rtol=1e-11, atol=1e-12)


class ViewNet(ConvNet):
    """A network whose ``view`` fails on maps with the channels last."""

    def features(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        return torch.relu(self.fc(x.view(len(x), -1)))


def matrices_of(monkeypatch: pytest.MonkeyPatch, network: type[ConvNet], tried: bool) -> tuple[Tensor, set[bool]]:
    """Accuracies of a run, and for its images whether they had the channels last."""
    orders = set()
    real = Scoring.answers

    def watched(self: Scoring, batch, model, is_network, whose=(0,)) -> Tensor:  # type: ignore[no-untyped-def]
        convolution = self.federation.network.conv
        handle = convolution.register_forward_pre_hook(lambda _, given: orders.add(given[0].stride(1) == 1))
        try:
            return real(self, batch, model, is_network, whose)
        finally:
            handle.remove()

    with monkeypatch.context() as patch:
        patch.setattr(Scoring, "answers", watched)
        if not tried:
            patch.setattr("cfl.training.evaluation.gains_by_channels_last", lambda network, x: False)
        data = tiny_data()
        client = tiny_client(data, network)
        fit(client, data)
    return client.federation.accuracy.compute().clone(), orders


def test_evaluation_has_the_channels_last_where_the_network_can_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, orders = matrices_of(monkeypatch, ConvNet, True)
    plain, plain_orders = matrices_of(monkeypatch, ConvNet, False)
    assert (orders, plain_orders) == ({True}, {False})
    assert torch.equal(fast, plain)


def test_a_network_that_cannot_is_evaluated_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    values, orders = matrices_of(monkeypatch, ViewNet, True)
    assert False in orders  # the pass that tries channels last adds True
    assert torch.equal(values, matrices_of(monkeypatch, ConvNet, False)[0])
