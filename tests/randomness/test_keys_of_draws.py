"""Every random draw of a client has a key of its own, so that no two draws are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from support.naive_replay import replay_client
from support.tiny import fit, mlp, permuted, tiny_data

from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import AGEM, EWC, FOT, GPM, RGO, SCAFFOLD, DPFedAvg, FedAGEM, FedCurv, Method
from cfl.models import MLP
from cfl.randomness import generators

CLIENTS, TASKS, ROUNDS = range(3), range(3), range(3)  # a round per task
BATCHES, LAYERS = range(3), range(2)  # 24 samples in batches of 8
PER_BATCH: dict[str, Any] = {"gpse_dropout": True, "gpse_batch_size": 8}
Keys = Iterable[tuple[int, ...]]


class Case(NamedTuple):
    """Methods of a run, and the indices of the keys that it has to use, each once, for draws of one purpose."""

    methods: Callable[[], dict[str, Method]]
    keys: Keys
    options: Mapping[str, Any] = MappingProxyType({})


dropped_units = partial(MLP, hidden=[8], dropout=0.5)

CASES = {
    "scaffold dropout": Case(lambda: {"scaffold": SCAFFOLD("I")}, product(ROUNDS, CLIENTS, BATCHES)),
    "sketch": Case(lambda: {"fot": FOT()}, product(TASKS[:-1], CLIENTS, LAYERS)),
    "gpse dropout": Case(lambda: {"fot": FOT(**PER_BATCH)}, product(TASKS[:-1], CLIENTS, BATCHES)),
    "fisher labels": Case(lambda: {"ewc": EWC(fisher="sampled")}, product(TASKS[:-1], CLIENTS)),
    "fedcurv labels": Case(lambda: {"fedcurv": FedCurv(fisher="sampled")}, product(ROUNDS[:-1], CLIENTS)),
    "rgo labels": Case(lambda: {"rgo": RGO(1.0)}, product(TASKS[:-1], CLIENTS)),
    "rgo samples": Case(lambda: {"rgo": RGO(1.0, samples=12)}, product(TASKS[:-1], CLIENTS)),
    "gpm samples": Case(lambda: {"gpm": GPM(samples=12)}, product(TASKS[:-1], CLIENTS)),
    "update noise": Case(lambda: {"dp": DPFedAvg()}, product(ROUNDS)),
    "dropout of the reference": Case(lambda: {"agem": AGEM(4), "fed_agem": FedAGEM(4)}, product(ROUNDS[:-1], CLIENTS)),
    "clock": Case(dict, product(TASKS, CLIENTS), {"exposure": "asynchronous"}),
}


@pytest.mark.parametrize("purpose", CASES)
def test_each_key_is_used_once(purpose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def blake2b(name: bytes, **options: Any) -> Any:
        _, of, *indices = name.decode().split("/")
        if of == purpose:
            used.append(tuple(map(int, indices)))
        return hashlib.blake2b(name, **options)

    monkeypatch.setattr(generators, "hashlib", SimpleNamespace(blake2b=blake2b))
    case = CASES[purpose]
    data = tiny_data(permuted(3, train=72), num_clients=3, schedule={"rounds_per_task": 1}, **case.options)
    network = dropped_units if "dropout" in purpose else mlp
    fit(replay_client(data, case.methods(), network, ReplayBuffer(8)), data)
    assert sorted(used) == sorted(case.keys)
