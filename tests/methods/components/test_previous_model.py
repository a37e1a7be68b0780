"""A model that clients are sent once."""

from __future__ import annotations

from typing import ClassVar

import torch
from support.tiny import tiny_client, tiny_data, tiny_trainer

from cfl.methods import Method
from cfl.methods.components.previous_model import PreviousModel
from cfl.methods.context import Context


class Lends(Method):
    state: ClassVar[dict[str, str]] = {"old": "lent.tensors", "received": "lent.holders"}

    def __init__(self, lent: PreviousModel) -> None:
        self.lent = lent


def context() -> Context:
    data = tiny_data()
    client, trainer = tiny_client(data), tiny_trainer(data)
    trainer.datamodule = data  # type: ignore[attr-defined]
    trainer.callbacks[0].setup(trainer, client, "fit")  # type: ignore[attr-defined]
    return Context(client.require_federation())


def test_every_client_is_sent_it_once() -> None:
    ours, lent = context(), PreviousModel()
    assert not lent
    model = {"w": torch.ones(10)}
    lent.keep(model, [0, 3])
    model["w"].zero_()
    sent = []
    for clients in ([0, 1], [1, 2], [0, 1, 2, 3]):
        assert lent.lend(ours, "old", clients)["w"].tolist() == [1.0] * 10
        lent.note(clients)
        sent.append(ours.channel.downlink_bytes["old"])
    assert sent == [40, 80, 80], "client 1, then 2, then nobody; 40 bytes each"
    method, resumed = Lends(lent), Lends(PreviousModel())
    resumed.load_state_dict(method.state_dict())
    resumed.lent.lend(ours, "old", [0, 1, 2, 3])
    assert ours.channel.downlink_bytes["old"] == 80
    lent.keep({"w": torch.zeros(10)}, [])
    lent.lend(ours, "old", [0, 1])
    assert ours.channel.downlink_bytes["old"] == 160, "another model, to be sent anew"
