"""pfl-research (Granqvist et al., 2024): its FederatedAveraging on a SimulatedBackend, with a process per core."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.arrays import task_tensors
from benchmarks.simulators.clients import loss_of, network_of, shares_of
from benchmarks.simulators.turns import Turns
from benchmarks.works import Work

ENDLESS = 1_000_000
RANK, ADDRESSES = "PFL_WORKER_RANK", "PFL_WORKER_ADDRESSES"


class Trained(nn.Module):
    """The work's network with the functions that pfl-research calls."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work, self.network = work, network_of(work)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch."""
        self.train()
        return loss_of(self.work, self.network(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """No metric: there is no evaluation."""
        return {}


def main(work_file: Path, data: Path, turns: Turns) -> None:
    """Run rounds as the coordinator asks for them; start the other processes first."""
    cores = os.cpu_count() or 1
    with socket.socket() as free:
        free.bind(("localhost", 0))
        addresses = ",".join([f"localhost:{free.getsockname()[1]}"] * cores)
    turns.say(processes=cores, threads=1)
    for rank in range(1, cores):
        command = [sys.executable, "-m", "benchmarks.simulators.pfl_research", str(work_file), str(data)]
        subprocess.Popen(command, env={**os.environ, RANK: str(rank), ADDRESSES: addresses})
    os.environ |= {RANK: "0", ADDRESSES: addresses}
    _train(Work.load(work_file), data, turns)


def _train(work: Work, data: Path, turns: Turns | None) -> None:
    # pfl-research reads rank and addresses when it is imported.
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    x, y = task_tensors(data, work)
    shares, network = shares_of(work), Trained(work)

    def samples_of(client: int) -> PyTorchTensorDataset:
        share = shares[client][torch.randperm(work.samples)]
        return PyTorchTensorDataset((x[share], y[share]), user_id=str(client))

    class Paced(TrainingProcessCallback):
        """Begins a round when the coordinator says so."""

        def on_train_begin(self, *, model: Any) -> Metrics:
            self._begin()
            return Metrics()

        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            if turns is not None:
                turns.end(lambda: [p.detach() for p in network.parameters()])
            self._begin()
            return False, Metrics()

        @staticmethod
        def _begin() -> None:
            if turns is not None:
                turns.begin()
            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # the others wait here for the first process

    clients = FederatedDataset(samples_of, MinimizeReuseUserSampler(list(range(work.clients))))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    settings = NNAlgorithmParams(
        central_num_iterations=ENDLESS,
        evaluation_frequency=ENDLESS,
        train_cohort_size=work.sampled,
        val_cohort_size=0,
    )
    local = NNTrainHyperParams(
        local_learning_rate=work.lr, local_num_epochs=1, local_batch_size=work.batch_size, local_max_grad_norm=None
    )
    FederatedAveraging().run(
        settings,
        SimulatedBackend(training_data=clients, val_data=clients),
        model,
        local,
        callbacks=[Paced()],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    _train(Work.load(Path(sys.argv[1])), Path(sys.argv[2]), None)
