"""State made or read before Lightning moves the network to an accelerator; no accelerator needed.

Fake tensors know their device and shape and nothing else, and refuse operations over two devices.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cfl.methods import FOT, PersonalLayers
from cfl.server import Server
from tiny import fit, mlp, sgd, tiny_client, tiny_data, weights


def test_fots_bases_follow_the_network() -> None:
    data, fot = tiny_data(), FOT(threshold=0.8, layers=["layers.0", "head"])
    federation = fit(tiny_client(data, mlp, sgd, {"fot": fot}), data)
    resumed = FOT(threshold=0.8, layers=["layers.0", "head"])
    resumed.setup(federation)
    with FakeTensorMode() as mode:
        state = fot.state_dict()
        resumed.load_state_dict({**state, "bases": {n: mode.from_tensor(b) for n, b in state["bases"].items()}})
        step = {name: mode.from_tensor(value).to("cuda") for name, value in weights(federation).items()}
        moved = resumed.transform_step(step)
        assert {value.device.type for value in moved.values()} == {"cuda"}
        assert 0 < resumed.bases["head"].shape[1] < 8


def test_the_servers_momentum_follows_the_update() -> None:
    with FakeTensorMode():
        server = Server({"w": torch.zeros(3)}, {}, momentum=0.5)
        server.load_state_dict({"velocity": {"w": torch.ones(3)}})
        server.parameters = {"w": torch.zeros(3, device="cuda")}
        server.apply({"w": torch.ones(3, device="cuda")}, {})
        assert server.velocity["w"].device.type == "cuda"


def test_what_clients_keep_follows_the_network() -> None:
    """Initial values are copied before the move; evaluation needs them next to the images."""
    data = tiny_data()
    client = tiny_client(data, mlp, sgd, {"personal": PersonalLayers(["head.*"])})
    federation = fit(client, data)
    client.network.to("meta")
    assert {value.device.type for value in federation.own_tensors((0, 3)).values()} == {"meta"}
