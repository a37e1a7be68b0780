"""L2P: its loss, its trained parameters, its messages, and what it refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiny import (
    Rounds,
    SaveAfter,
    double,
    fit,
    mlp,
    permuted,
    prompted_net,
    sgd,
    split,
    tiny_client,
    tiny_data,
    weights,
)
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Dirichlet
from cfl.data.samples import ExtraSamples, Samples, join_samples
from cfl.engines.objective import Objective
from cfl.federation.federation import Federation
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import L2P, Method
from cfl.methods.composition import Composition
from cfl.models import PromptedViT
from cfl.runtime.checkpoint_file import write_checkpoint
from cfl.runtime.errors import ConfigError

ADAM = partial(torch.optim.Adam, lr=0.01)
DECAY = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)


def unequal(stream: Any = None, **options: Any) -> FederatedDataModule:
    schedule = {"rounds_per_task": 2, "batch_size": 6, "cohort_width": 2}
    settings = {"num_clients": 5, "partition": Dirichlet(0.5, 3, balance=False), "schedule": schedule, **options}
    return tiny_data(stream or permuted(), **settings)


def joined() -> tuple[Tensor, Samples]:
    """Images and samples of one client: four own ones, one of them padded, and three added ones, one of them padded."""
    generator = torch.Generator().manual_seed(0)
    added = ExtraSamples(
        x=torch.zeros(1, 3, 1, 4, 4),
        y=torch.tensor([[0, 1, 0]]),
        tasks=torch.zeros(1, 3, dtype=torch.int64),
        mask=torch.tensor([[True, True, False]]),
        weights=torch.tensor([[0.3, 0.7, 0.9]], dtype=torch.float64),
        source=1,
    )
    mask = torch.tensor([[True, True, True, False]])
    samples = join_samples(torch.tensor([[2, 3, 2, 3]]), mask, torch.ones(1, 4, dtype=torch.int64), {}, (added,), None)
    return torch.randn(7, 1, 4, 4, generator=generator, dtype=torch.float64), samples.row(0)


def test_the_loss_is_the_one_written_out() -> None:
    torch.manual_seed(0)
    network = prompted_net((1, 4, 4), 4).double()
    x, samples = joined()
    strength = 0.4
    loss, logits = Objective(Composition({"l2p": L2P(strength)}).loss_parts()).with_logits(network, x, samples)
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(7):
        if samples.mask[i]:
            tokens = network.backbone.tokens(x[i : i + 1])
            query = network.backbone.encode(tokens)[0, 0]
            cosines = F.cosine_similarity(query[None], network.pool.keys, dim=1)
            chosen = cosines.topk(2).indices
            prompts = network.pool.prompts[chosen].flatten(0, 1)
            encoded = network.backbone.encode(torch.cat([prompts[None], tokens], 1))[0, : len(prompts)]
            logit = network.head(encoded.mean(0))
            torch.testing.assert_close(logits[i], logit.detach())
            expected = expected + samples.weights[i] * (
                F.cross_entropy(logit, samples.y[i]) - strength * cosines[chosen].sum()
            )
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    names = ["pool.prompts", "pool.keys", "head.weight"]
    parameters = [network.get_parameter(name) for name in names]
    for found, wanted in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert torch.isfinite(Objective(Composition({"l2p": L2P(strength)}).loss_parts()).of_network(network, x, samples))


def run(
    data: FederatedDataModule,
    methods: dict[str, Method],
    optimizer: Any = sgd,
    as_double: bool = True,
    callbacks: Any = (),
    **options: Any,
) -> Federation:
    client = tiny_client(data, double(prompted_net) if as_double else prompted_net, optimizer, methods)
    client.buffer = ReplayBuffer(size=6)
    return fit(client, data, None, callbacks, **options)


def test_keys_come_closer_to_the_queries_that_choose_them() -> None:
    def closeness(federation: Federation) -> float:
        network = federation.network
        assert isinstance(network, PromptedViT)
        x, _ = federation.data.gather(0, torch.arange(len(federation.data.tasks[0].train)))
        with torch.no_grad():
            return float(network.prompted(x)[1].mean())

    data = [tiny_data(permuted(1)) for _ in range(2)]
    without, pulled = (run(d, {"l2p": L2P(strength)}) for d, strength in zip(data, (0.0, 2.0), strict=True))
    assert closeness(pulled) > closeness(without) + 0.1


def test_messages_and_checkpoints_hold_prompts_keys_and_head_alone(tmp_path: Path) -> None:
    data, saving = unequal(), SaveAfter(3, tmp_path / "run.ckpt")
    client = tiny_client(data, prompted_net, sgd, {"l2p": L2P()})
    before = {name: value.clone() for name, value in client.network.backbone.vit.state_dict().items()}  # type: ignore
    federation = fit(client, data, None, [saving])
    numbers = 4 * 2 * 8 + 4 * 8 + 4 * 8 + 4
    assert federation.channel.uplink_bytes == {"update": 4 * numbers * 5 * 4}
    assert federation.channel.downlink_bytes == {"model": 4 * numbers * 5 * 4}
    assert federation.client_storage() == 0
    after = client.network.backbone.vit.state_dict()  # type: ignore[union-attr]
    assert all(torch.equal(after[name], value) for name, value in before.items())
    checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert {name: list(value.shape) for name, value in checkpoint["state_dict"].items()} == {
        "network.pool.prompts": [4, 2, 8],
        "network.pool.keys": [4, 8],
        "network.head.weight": [4, 8],
        "network.head.bias": [4],
    }


def test_a_checkpoint_finds_its_transformer_again_by_the_seed(tmp_path: Path) -> None:
    """A resumed run builds the transformer anew from the seed."""
    watch = Rounds()
    whole = run(unequal(), {"l2p": L2P()}, as_double=False, callbacks=[SaveAfter(1, tmp_path / "1.ckpt"), watch])
    resumed = run(unequal(), {"l2p": L2P()}, as_double=False, ckpt_path=tmp_path / "1.ckpt")
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(resumed).items())
    assert torch.equal(whole.accuracy.sums, resumed.accuracy.sums)
    other = tiny_client(unequal(seed=1), prompted_net).network.backbone.vit.state_dict()  # type: ignore[union-attr]
    ours = whole.network.backbone.vit.state_dict()  # type: ignore[union-attr]
    assert not torch.equal(other["encoder.pos_embedding"], ours["encoder.pos_embedding"])


def test_a_checkpoint_goes_on_with_its_transformer_or_not_at_all(tmp_path: Path) -> None:
    """A file of weights may be moved, but its content must not change."""

    def with_file(name: str, **options: Any) -> Federation:
        network = partial(prompted_net, weights=str(tmp_path / name))
        client = tiny_client(unequal(), network, sgd, {"l2p": L2P()})
        client.buffer = ReplayBuffer(size=6)
        return fit(client, unequal(), **options)

    for name, seed in (("vit.pth", 5), ("other.pth", 6)):
        torch.manual_seed(seed)
        torch.save(prompted_net((1, 4, 4), 4).backbone.vit.state_dict(), tmp_path / name)
    whole = with_file("vit.pth", callbacks=[SaveAfter(1, tmp_path / "1.ckpt")])
    (tmp_path / "moved.pth").write_bytes((tmp_path / "vit.pth").read_bytes())
    resumed = with_file("moved.pth", ckpt_path=str(tmp_path / "1.ckpt"))
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(resumed).items())
    with pytest.raises(ConfigError, match=r"other fixed weights: the file model\.network\.weights has changed"):
        with_file("other.pth", ckpt_path=str(tmp_path / "1.ckpt"))
    checkpoint = torch.load(tmp_path / "1.ckpt", weights_only=True)
    del checkpoint["federation"]["fixed_weights"]  # as in a checkpoint of a version that did not save it
    write_checkpoint(checkpoint, tmp_path / "1.ckpt")
    with_file("other.pth", ckpt_path=str(tmp_path / "1.ckpt"))


def test_masked_logits_train_as_if_tasks_were_known() -> None:
    """A class-incremental run then has the model of a task-incremental run, bit for bit, but other test results."""
    streams = [split(train=120) for _ in range(3)]
    known, masked, competing = (
        run(unequal(stream=stream, scenario=scenario), {"l2p": L2P(0.1, mask)}, DECAY)
        for stream, scenario, mask in zip(streams, ("task", "class", "class"), (True, True, False), strict=True)
    )
    assert all(torch.equal(value, weights(known)[name]) for name, value in weights(masked).items())
    assert not torch.allclose(weights(masked)["head.weight"], weights(competing)["head.weight"])
    assert torch.equal(masked.known.sums, known.accuracy.sums)  # type: ignore[union-attr]
    assert (masked.accuracy.sums <= known.accuracy.sums).all()


def test_masked_outputs_stay_where_they_are() -> None:
    data, watch = unequal(stream=split(train=120), scenario="class"), Rounds()
    initial = tiny_client(data, prompted_net).network.head.weight.clone()
    run(data, {"l2p": L2P()}, DECAY, as_double=False, callbacks=[watch])
    first_task = watch.models[1]["head.weight"]
    assert torch.equal(first_task[2:], initial[2:])
    assert not torch.equal(first_task[:2], initial[:2])
    assert torch.equal(watch.models[-1]["head.weight"][:2], first_task[:2])


class Passes(Method):
    """Another method with a forward pass of its own."""

    passes_forward = True

    def forward_pass(self, network: nn.Module, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        return network(x), torch.zeros(())


class Whole(Method):
    """Replaces the loss."""

    def local_loss(self, network: nn.Module, x: Tensor, samples: Samples) -> Tensor:
        return network(x).sum()


def test_contradictions_are_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="MLP"):
        fit(tiny_client(unequal(), mlp, sgd, {"l2p": L2P()}), unequal())
    for other in (Passes(), Whole()):
        with pytest.raises(ConfigError, match=rf"(L2P.*{type(other).__name__}|{type(other).__name__}.*L2P)"):
            Composition({"l2p": L2P(), "other": other}).loss_parts()
    Composition({"l2p": L2P(0.0), "whole": Whole()}).loss_parts()
    stream = split(train=120)
    data = unequal(stream=stream, scenario="class", class_loss="seen")
    with pytest.raises(ConfigError, match=r"data\.class_loss = 'seen'.*all while .*prompts\.mask_logits is true"):
        fit(tiny_client(data, prompted_net, sgd, {"prompts": L2P()}), data)
    assert fit(tiny_client(data, prompted_net, sgd, {"prompts": L2P(mask_logits=False)}), data).finished
    data = unequal(stream=stream, scenario="class", exposure="asynchronous")
    with pytest.raises(ConfigError, match=r"data\.exposure = 'asynchronous'.*methods\.prompts"):
        fit(tiny_client(data, prompted_net, sgd, {"prompts": L2P()}), data)
    data = unequal(stream=stream, scenario="class", exposure="asynchronous")
    assert fit(tiny_client(data, prompted_net, sgd, {"prompts": L2P(mask_logits=False)}), data).finished
