"""Federated averaging by hand: two threads, each with one client from its first to its last step, without autograd.

What a careful engineer writes for one network: forward, backward and update written out, preallocated weights, cheap
dropout masks. It does the work of :mod:`benchmarks.loop`, for networks that are a chain of layers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks.arrays import task_tensors
from benchmarks.loop import Loop
from benchmarks.wire import Wire, serve
from benchmarks.works import Work

THREADS = 2
KEPT_BITS = 8

aten = torch.ops.aten
Op = tuple[Any, ...]


def ops_of(network: Any) -> list[Op]:
    """The layers of an MLP or of an AlexNet, with the numbers of their parameters."""
    numbers = {id(p): k for k, p in enumerate(network.parameters())}

    def weights(layer: nn.Linear | nn.Conv2d) -> tuple[int, int | None]:
        return numbers[id(layer.weight)], None if layer.bias is None else numbers[id(layer.bias)]

    ops: list[Op] = []
    rates = iter(network.dropout)
    if hasattr(network, "conv1"):
        for conv in (network.conv1, network.conv2, network.conv3):
            ops += [("conv", *weights(conv)), ("relu",), ("drop", next(rates)), ("pool",)]
        hidden = [network.fc1, network.fc2]
    else:
        hidden = list(network.layers)
    ops.append(("flat",))
    for layer in hidden:
        ops += [("linear", *weights(layer)), ("relu",), ("drop", next(rates))]
    ops.append(("linear", *weights(network.head)))
    return [op for op in ops if op[0] != "drop" or op[1] > 0]


class Worker:
    """Trains one client at a time.

    Args:
        loop: the federation.
        ops: the network's layers.
        seed: of dropout.
    """

    def __init__(self, loop: Hand, ops: list[Op], seed: int) -> None:
        self.loop, self.ops = loop, ops
        self.weights = [w.clone() for w in loop.weights]
        self.sums = [torch.zeros_like(w) for w in loop.weights]
        self.generator = torch.Generator().manual_seed(seed)
        self.saved: list[Any] = []

    def train(self, share: Tensor) -> None:
        """One epoch of one client, from the global weights."""
        for own, weight in zip(self.weights, self.loop.weights, strict=True):
            own.copy_(weight)
        order = share[torch.randperm(len(share), generator=self.generator)]
        for batch in order.split(self.loop.work.batch_size):
            self.step(self.loop.x[batch], self.loop.y[batch])
        for total, own, weight in zip(self.sums, self.weights, self.loop.weights, strict=True):
            total.add_(own).sub_(weight)

    def step(self, h: Tensor, y: Tensor) -> None:
        """One step of SGD."""
        if h.ndim == 4 and self.ops[0][0] == "conv":
            h = h.contiguous(memory_format=torch.channels_last)
        for op in self.ops:
            h = getattr(self, op[0])(h, *op[1:])
        classes = self.loop.work.classes
        p = torch.softmax(h[:, :classes], 1)
        p[torch.arange(len(y)), y] -= 1
        g = torch.zeros_like(h)
        g[:, :classes] = p.div_(len(y))
        for position in range(len(self.ops) - 1, -1, -1):
            op = self.ops[position]
            first = all(o[0] not in ("conv", "linear") for o in self.ops[:position])
            g = getattr(self, f"{op[0]}_back")(g, first, *op[1:])
            if first:
                break
        self.saved.clear()

    def linear(self, h: Tensor, w: int, b: int | None) -> Tensor:
        self.saved.append(h)
        return linear(h, self.weights[w], None if b is None else self.weights[b])

    def linear_back(self, g: Tensor, first: bool, w: int, b: int | None) -> Tensor | None:
        h, lr = self.saved.pop(), self.loop.work.lr
        inner = None if first else g @ self.weights[w]
        self.weights[w].addmm_(g.T, h, alpha=-lr)
        if b is not None:
            self.weights[b].add_(g.sum(0), alpha=-lr)
        return inner

    def conv(self, h: Tensor, w: int, b: int | None) -> Tensor:
        self.saved.append(h)
        return torch.conv2d(h, self.weights[w])

    def conv_back(self, g: Tensor, first: bool, w: int, b: int | None) -> Tensor | None:
        h, weight = self.saved.pop(), self.weights[w]
        wanted = [not first, True, False]
        inner, gradient, _ = aten.convolution_backward(
            g, h, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted
        )
        weight.add_(gradient, alpha=-self.loop.work.lr)
        return inner

    def relu(self, h: Tensor) -> Tensor:
        self.saved.append(h.relu_())
        return h

    def relu_back(self, g: Tensor, first: bool) -> Tensor:
        return aten.threshold_backward.grad_input(g, self.saved.pop(), 0, grad_input=g)

    def drop(self, h: Tensor, rate: float) -> Tensor:
        kept = round((1 - rate) * 2**KEPT_BITS)
        words = torch.empty(-(-h.numel() // 8), dtype=torch.int64).random_(generator=self.generator)
        flat = h.permute(0, 2, 3, 1).shape if h.ndim == 4 else h.shape
        mask = (words.view(torch.uint8)[: h.numel()].view(flat) < kept).to(h.dtype).mul_(2**KEPT_BITS / kept)
        mask = mask.permute(0, 3, 1, 2) if h.ndim == 4 else mask
        self.saved.append(mask)
        return h.mul_(mask)

    def drop_back(self, g: Tensor, first: bool, rate: float) -> Tensor:
        return g.mul_(self.saved.pop())

    def pool(self, h: Tensor) -> Tensor:
        pooled, index = aten.max_pool2d_with_indices(h, [2, 2], [2, 2])
        self.saved.append((h, index))
        return pooled

    def pool_back(self, g: Tensor, first: bool) -> Tensor:
        h, index = self.saved.pop()
        return aten.max_pool2d_with_indices_backward(g, h, [2, 2], [2, 2], [0, 0], [1, 1], False, index)

    def flat(self, h: Tensor) -> Tensor:
        self.saved.append(h.shape)
        return h.flatten(1)

    def flat_back(self, g: Tensor, first: bool) -> Tensor:
        g = g.view(self.saved.pop())
        return g.contiguous(memory_format=torch.channels_last)


class Hand(Loop):
    """The federation of one work; arguments as for :class:`benchmarks.loop.Loop`."""

    def __init__(self, work: Work, x: Tensor, y: Tensor, seed: int = 0) -> None:
        super().__init__(work, x, y, seed)
        for weight in self.weights:
            if weight.ndim == 4:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        ops = ops_of(self.model)
        self.workers = [Worker(self, ops, seed + 1 + number) for number in range(THREADS)]
        self.jobs: list[SimpleQueue[Any]] = [SimpleQueue() for _ in self.workers]
        self.done: SimpleQueue[BaseException | None] = SimpleQueue()
        for worker, jobs in zip(self.workers, self.jobs, strict=True):
            threading.Thread(target=self._serve, args=(worker, jobs), daemon=True).start()

    @torch.no_grad()
    def round(self) -> None:
        """Train the sampled clients, two at a time, and move the global weights by their mean update."""
        sampled = torch.randperm(self.work.clients)[: self.work.sampled].tolist()
        feed = iter(sampled)
        for jobs in self.jobs:
            jobs.put(feed)
        for error in [self.done.get() for _ in self.jobs]:
            if error is not None:
                raise error
        for worker in self.workers:
            for weight, total in zip(self.weights, worker.sums, strict=True):
                weight.add_(total, alpha=1 / len(sampled))
                total.zero_()

    def _serve(self, worker: Worker, jobs: SimpleQueue[Any]) -> None:
        torch.set_num_threads(1)
        run: Callable[[Tensor], None] = torch.no_grad()(worker.train)
        while True:
            feed = jobs.get()
            try:
                for client in feed:
                    run(self.shares[client])
            except BaseException as error:
                self.done.put(error)
            else:
                self.done.put(None)


def main(work_file: str, data: str, device: str, descriptor: str) -> None:
    """Run rounds as the coordinator asks for them."""
    work = Work.load(Path(work_file))
    loop = Hand(work, *task_tensors(Path(data), work))
    serve(Wire.from_descriptor(int(descriptor)), {"threads": THREADS}, loop.timed_round)


if __name__ == "__main__":
    main(*sys.argv[1:])
