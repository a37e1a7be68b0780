"""Flower (Beutel et al., 2020): a ClientApp and a ServerApp on its simulation engine, with one core for each client.

Clients keep samples and network in their worker process, which Flower's examples load anew for every message.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.arrays import task_tensors
from benchmarks.simulators.clients import loss_of, network_of, shares_of
from benchmarks.simulators.turns import Turns
from benchmarks.works import Work

ENDLESS = 1_000_000


@lru_cache(maxsize=1)
def _loaded(work_file: Path, data: Path) -> tuple[Work, Any, Any, torch.Tensor, torch.nn.Module]:
    work = Work.load(work_file)
    return work, *task_tensors(data, work), shares_of(work), network_of(work)


def train(message: Message, context: Context, work_file: Path, data: Path) -> Message:
    """One epoch of one client."""
    work, x, y, shares, network = _loaded(work_file, data)
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=work.lr)
    share = shares[int(context.node_config["partition-id"])]
    for batch in share[torch.randperm(len(share))].split(work.batch_size):
        optimizer.zero_grad()
        loss_of(work, network(x[batch]), y[batch]).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(network.state_dict()),
        "metrics": MetricRecord({"num-examples": len(share)}),
    }
    return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]


class Paced(FedAvg):
    """Federated averaging whose rounds begin when the coordinator says so."""

    def __init__(self, turns: Turns, **options: Any) -> None:
        super().__init__(**options)
        self._turns = turns

    def configure_train(self, *arguments: Any, **named: Any) -> Iterable[Message]:
        """Wait for the coordinator, then do as federated averaging does."""
        self._turns.begin()
        return super().configure_train(*arguments, **named)

    def aggregate_train(self, *arguments: Any, **named: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Do as federated averaging does, then report."""
        arrays, metrics = super().aggregate_train(*arguments, **named)
        assert arrays is not None
        self._turns.end(arrays.to_numpy_ndarrays)
        return arrays, metrics


def main(work_file: Path, data: Path, turns: Turns) -> None:
    """Run rounds as the coordinator asks for them."""
    work, cores = Work.load(work_file), os.cpu_count() or 1
    turns.say(processes=cores, threads=1)
    client, server = ClientApp(), ServerApp()
    client.train()(partial(train, work_file=work_file, data=data))

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        sampled = work.sampled / work.clients
        strategy = Paced(
            turns,
            fraction_train=sampled,
            fraction_evaluate=0.0,
            min_train_nodes=work.sampled,
            min_available_nodes=work.clients,
        )
        strategy.start(grid, ArrayRecord(network_of(work).state_dict()), num_rounds=ENDLESS)

    resources = {"init_args": {"num_cpus": cores}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=work.clients, backend_config=resources)  # type: ignore[arg-type]
