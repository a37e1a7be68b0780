"""State created or loaded before Lightning moves the network to an accelerator. The meta device stands for it."""

from __future__ import annotations

import torch
from support.tiny import fit, mlp, sgd, tiny_client, tiny_data, weights

from cfl.federation.server import Server
from cfl.methods import FOT, PersonalLayers
from cfl.methods.context import Context


def test_fots_bases_follow_the_network() -> None:
    """FOT's bases follow the network's device, although a resumed run reads its checkpoint before the network moves."""
    data, fot = tiny_data(), FOT(threshold=0.8)
    federation = fit(tiny_client(data, mlp, sgd, {"fot": fot}), data)
    resumed = FOT(threshold=0.8)
    resumed.setup(Context(federation))
    resumed.load_state_dict(fot.state_dict())
    moved = resumed.transform_step({name: value.to("meta") for name, value in weights(federation).items()})
    assert {value.device.type for value in (*moved.values(), *resumed.bases.values())} == {"meta"}


def test_the_servers_momentum_follows_the_update() -> None:
    server = Server({"w": torch.zeros(3)}, {}, momentum=0.5)
    server.load_state_dict({"velocity": {"w": torch.ones(3)}})
    server.parameters = {"w": torch.zeros(3, device="meta")}
    server.apply({"w": torch.ones(3, device="meta")}, {})
    assert server.velocity["w"].device.type == "meta"


def test_what_clients_keep_follows_the_network() -> None:
    """Clients' initial values, copied before the network moves, are then on its device, where evaluation needs them."""
    data = tiny_data()
    client = tiny_client(data, mlp, sgd, {"personal": PersonalLayers(["head.*"])})
    federation = fit(client, data)
    client.network.to("meta")
    assert {value.device.type for value in federation.model.personal_state((0, 3)).values()} == {"meta"}
