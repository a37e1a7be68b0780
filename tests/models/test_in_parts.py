"""Passes in parts: the same outputs, unless these depend on the other samples of the batch."""

from __future__ import annotations

import pytest
import torch
from support.tiny import ConvNet, fit, norm_net, split, tiny_client, tiny_data
from test_networks import CASES, IDS, build, images
from torch import Tensor, nn

from cfl.data.evaluation import EvaluationBatch
from cfl.methods import Method, PersonalLayers
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


def sizes_in_tests(
    monkeypatch: pytest.MonkeyPatch,
    network: type[ConvNet],
    batchnorm: str = "average",
    own_head: bool = False,
) -> tuple[set[int], Tensor]:
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
    methods: dict[str, Method] = {"own": PersonalLayers(["head.*"])} if own_head else {}
    federation = fit(tiny_client(data, network, methods=methods), data, {"batchnorm": batchnorm})
    return sizes, federation.measured.compute().clone()


def test_tests_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, accuracies = sizes_in_tests(monkeypatch, ConvNet)
    assert max(sizes) == SAMPLES
    monkeypatch.setattr("cfl.training.evaluation.gains_by_parts", lambda network, x: False)
    whole, same = sizes_in_tests(monkeypatch, ConvNet)
    assert max(whole) == 2 * SAMPLES
    assert torch.equal(accuracies, same)


class ZeroHead(ConvNet):
    """Answers every sample with zeros until it is trained."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs, norm=True)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


@pytest.mark.parametrize("personal", [False, True])
def test_what_an_untrained_network_answers_does_not_decide(personal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If heads are personal, the global model's is never trained."""
    sizes, accuracies = sizes_in_tests(monkeypatch, ZeroHead, "drop", personal)
    assert {size for size in sizes if size > 20} == {2 * SAMPLES}  # smaller ones are of training
    monkeypatch.setattr("cfl.training.evaluation.gains_by_parts", lambda network, x: False)
    assert torch.equal(accuracies, sizes_in_tests(monkeypatch, ZeroHead, "drop", personal)[1])


def test_a_small_batch_does_not_decide_larger_ones() -> None:
    data = tiny_data(split(2, classes=4, train=40, test=4 * SAMPLES))
    federation = fit(tiny_client(data, norm_net), data, {"batchnorm": "drop"})
    network, scoring = federation.network.eval(), Scoring(federation)
    with torch.no_grad(), federation.model.evaluation_statistics():
        for stop in (2, 2 * SAMPLES):
            batch = data.evaluation_batch(EvaluationBatch(0, 0, stop), torch.device("cpu"))
            assert batch.x is not None
            found = scoring.answers(batch, federation.model.state_tensors(), is_network=True)
            torch.testing.assert_close(found, network(batch.x))


class Reshaping(ConvNet):
    """Cannot be called without samples."""

    def features(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return torch.relu(self.fc(x.reshape(len(x), -1)))


class Squeezing(ConvNet):
    """Cannot be called with a single sample."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x).squeeze()


def test_no_part_is_a_single_sample() -> None:
    data = tiny_data(split(2, classes=4, train=40, test=4 * SAMPLES), eval_batch_size=SAMPLES + 1)
    data.setup("fit")
    assert {len(task.test) % (SAMPLES + 1) for task in data.evaluated} == {SAMPLES - 1}
    assert fit(tiny_client(data, Squeezing), data).measured.compute().isfinite().all()


def test_single_samples_are_tested() -> None:
    data = tiny_data(split(2, classes=4, train=40, test=8), eval_batch_size=1)
    assert fit(tiny_client(data, Reshaping), data).measured.compute().isfinite().all()
