"""The attributes that a method names in ``state`` are saved and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.tiny import fit, tiny_client, tiny_data

from cfl.methods import FedCurv, Method
from cfl.methods.components.previous_model import PreviousModel
from cfl.methods.context import Context
from cfl.runtime.errors import ConfigError


class Part:
    """An object with a ``state_dict`` of its own."""

    def __init__(self) -> None:
        self.number = 1

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Kept(Method):
    """A method with a state attribute of every kind."""

    state: ClassVar[Any] = ("tensors", "_rows", "pair", "clients", "fixed", "count", "nothing", "part")

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []
        self.pair = (0, [0])
        self.clients: set[int] = set()
        self.fixed: frozenset[str] = frozenset()
        self.count = 0
        self.nothing: float | None = None
        self.part = Part()
        self.other = "not in the state"


class Extended(Kept):
    """A method that adds to its base's state, under keys other than the attributes' names."""

    state: ClassVar[Any] = {"old": "_lent.tensors", "received": "_lent.holders"}

    def __init__(self) -> None:
        super().__init__()
        self._lent = PreviousModel()


def filled(kept: Kept) -> Kept:
    kept.tensors = {"w": torch.arange(3.0)}
    kept._rows = [{"task": 0, "share": 0.5}, {"task": 1, "share": None}]
    kept.pair = (1, [2, 3])
    kept.clients, kept.fixed = {11, 2, 5}, frozenset("ba")
    kept.count, kept.part.number, kept.other = 7, 8, "changed"
    return kept


def test_every_kind_is_saved_plainly_and_restored_as_it_was(tmp_path: Path) -> None:
    state = filled(Kept()).state_dict()
    assert state.pop("tensors")["w"].tolist() == [0.0, 1.0, 2.0]
    assert state == {
        "rows": [{"task": 0, "share": 0.5}, {"task": 1, "share": None}],
        "pair": (1, [2, 3]),
        "clients": [2, 5, 11],
        "fixed": ["a", "b"],
        "count": 7,
        "nothing": None,
        "part": {"number": 8},
    }
    torch.save(filled(Kept()).state_dict(), tmp_path / "state.pt")
    found = Kept()
    part = found.part
    found.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert found.tensors["w"].tolist() == [0.0, 1.0, 2.0]
    assert found._rows == [{"task": 0, "share": 0.5}, {"task": 1, "share": None}]
    assert (found.pair, found.clients, found.fixed) == ((1, [2, 3]), {2, 5, 11}, frozenset("ab"))
    assert (type(found.clients), type(found.fixed)) == (set, frozenset)
    assert (found.count, found.nothing, found.other) == (7, None, "not in the state")
    assert found.part is part
    assert part.number == 8


def test_what_is_saved_or_restored_does_not_change_with_the_method() -> None:
    kept, again = filled(Kept()), Kept()
    state = kept.state_dict()
    again.load_state_dict(state)
    for method in (kept, again):
        method._rows[0]["task"] = 9
        method._rows.append({})
        method.tensors["v"] = torch.zeros(1)
        method.pair[1].append(4)
        method.clients.add(99)
    assert state["rows"] == [{"task": 0, "share": 0.5}, {"task": 1, "share": None}]
    assert (list(state["tensors"]), state["pair"], state["clients"]) == (["w"], (1, [2, 3]), [2, 5, 11])


def test_a_subclass_adds_to_the_state_of_its_base() -> None:
    method = Extended()
    filled(method)
    method._lent.keep({"w": torch.ones(2)}, [4, 3])
    state = method.state_dict()
    assert list(state) == [*Kept().state_dict(), "old", "received"]
    assert state["received"] == [3, 4]
    again = Extended()
    again.load_state_dict(state)
    assert again._lent.tensors["w"].tolist() == [1.0, 1.0]
    assert (again._lent.holders, again.count) == ({3, 4}, 7)


def test_a_checkpoint_without_part_of_the_state_is_refused() -> None:
    state = filled(Kept()).state_dict()
    del state["clients"]
    with pytest.raises(ConfigError, match=r"ckpt_path = 'a checkpoint without clients, which Kept\.state names'"):
        Kept().load_state_dict(state)


def test_declarations_that_would_lose_something_are_refused() -> None:
    class Twice(Kept):
        state: ClassVar[Any] = ("rows",)

    class OneString(Method):
        state: ClassVar[Any] = "_rows"

    with pytest.raises(TypeError, match="Twice saves both _rows and rows under 'rows'"):
        Twice().state_dict()
    with pytest.raises(TypeError, match="a tuple of names"):
        OneString().state_dict()
    kept = Kept()
    kept._rows = [{"clients": {1, 2}}]
    with pytest.raises(TypeError, match="an attribute of its own"):
        kept.state_dict()


def test_a_method_without_a_declaration_has_no_state() -> None:
    assert Method().state_dict() == {}
    Method().load_state_dict({})


def test_sums_of_the_server_come_back() -> None:
    fedcurv, again = FedCurv(), FedCurv()
    fedcurv.u, fedcurv.v = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    again.load_state_dict(fedcurv.state_dict())
    assert again.u["w"].tolist() == [1.0, 1.0]
    assert again.v["w"].tolist() == [0.0, 0.0]


def test_a_declaration_of_what_is_not_there_is_refused_after_setup() -> None:
    class Forgets(Method):
        state = ("_sums",)

    data = tiny_data()
    said = r"methods\.mine = 'Forgets\.state with _sums' .*valid: .*attributes that Forgets has after setup"
    with pytest.raises(ConfigError, match=said):
        fit(tiny_client(data, methods={"mine": Forgets()}), data)


@pytest.mark.parametrize(
    "value", [np.float64(1.0), np.zeros(3), {"a": [np.int64(2)]}, object()], ids=lambda v: type(v).__name__
)
def test_a_state_that_could_not_be_read_again_is_refused_before_training(value: Any) -> None:
    class Keeps(Method):
        state = ("_kept",)

        def setup(self, context: Context) -> None:
            super().setup(context)
            self._kept = value

    data = tiny_data()
    said = r"methods\.m = 'Keeps\.state' .*valid: .*Keeps\.state names _kept, .* is no tensor and no plain"
    with pytest.raises(ConfigError, match=said):
        fit(tiny_client(data, methods={"m": Keeps()}), data)
