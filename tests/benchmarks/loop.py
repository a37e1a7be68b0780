"""Federated averaging in plain PyTorch: the least code that does the work, and what a framework is measured against.

All clients are trained in one model with one optimizer, on normalised float images in memory. Their updates are summed
up as they come.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch  # before cfl, whose import sets OMP_WAIT_POLICY, which torch reads when it is imported
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import cfl.models
from benchmarks.accelerator import NOTED_ROUND, busy, wait
from benchmarks.arrays import task_tensors
from benchmarks.fingerprint import fingerprint
from benchmarks.wire import Report, Wire, serve
from benchmarks.works import Work


class Loop:
    """The federation of one work.

    Args:
        work: what a round is.
        x: ``[N, C, H, W]`` float32 images of the task.
        y: ``[N]`` int64 classes.
        seed: of initial weights, partition, sampling, shuffling and dropout.
        device: where everything lies and is computed.
    """

    def __init__(self, work: Work, x: Tensor, y: Tensor, seed: int = 0, device: str = "cpu") -> None:
        torch.manual_seed(seed)
        self.work, self.x, self.y, self.device = work, x.to(device), y.to(device), device
        self._rounds = 0
        network = getattr(cfl.models, work.network)
        self.model: nn.Module = network(work.shape, work.outputs, **work.options).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=work.lr)
        self.weights = [p.detach().clone() for p in self.model.parameters()]
        self.sums = [torch.zeros_like(w) for w in self.weights]
        self.shares = torch.randperm(len(y)).view(work.clients, work.samples)
        self.step_seconds = 0.0  # stays 0 where steps are not measured

    def round(self) -> None:
        """Train the sampled clients one after another and move the global weights by their mean update."""
        self.step_seconds = 0.0
        for total in self.sums:
            total.zero_()
        sampled = torch.randperm(self.work.clients)[: self.work.sampled].tolist()
        for client in sampled:
            self._train(self.shares[client])
        with torch.no_grad():
            for weight, total in zip(self.weights, self.sums, strict=True):
                weight.add_(total, alpha=1 / len(sampled))

    def _train(self, share: Tensor) -> None:
        """One epoch of one client, from the global weights; its update is added to the sums."""
        parameters = list(self.model.parameters())
        with torch.no_grad():
            for parameter, weight in zip(parameters, self.weights, strict=True):
                parameter.copy_(weight)
        for batch in share[torch.randperm(len(share))].split(self.work.batch_size):
            x, y = self.x[batch], self.y[batch]
            started = time.perf_counter()
            self.optimizer.zero_grad()
            logits = self.model(x)
            if self.work.tasks > 1:
                logits = logits[:, : self.work.classes]
            cross_entropy(logits, y).backward()
            self.optimizer.step()
            self.step_seconds += time.perf_counter() - started
        with torch.no_grad():
            for parameter, weight, total in zip(parameters, self.weights, self.sums, strict=True):
                total.add_(parameter).sub_(weight)

    def timed_round(self) -> Report:
        """:meth:`round`, measured."""
        self._rounds += 1
        report: Report = {}
        started = time.perf_counter()
        with busy(self.device, report) if self._rounds == NOTED_ROUND else nullcontext():
            self.round()
            wait(self.device)
        seconds = time.perf_counter() - started
        return report | {
            "started": started,
            "seconds": seconds,
            **({"step_seconds": self.step_seconds} if self.step_seconds else {}),
            "fingerprint": fingerprint(weight.cpu() for weight in self.weights),
        }


def main(work_file: str, data: str, device: str, descriptor: str) -> None:
    """Run rounds as the coordinator asks for them."""
    work = Work.load(Path(work_file))
    loop = Loop(work, *task_tensors(Path(data), work), device=device)
    serve(Wire.from_descriptor(int(descriptor)), {"threads": torch.get_num_threads()}, loop.timed_round)


if __name__ == "__main__":
    main(*sys.argv[1:])
