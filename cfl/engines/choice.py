"""Which engine, how many clients side by side: what is possible, and how it is built."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from cfl.engines.base import Engine, EngineKind, EngineOptions
from cfl.engines.batch_last import BatchLastChain
from cfl.engines.chain import Chain
from cfl.engines.products import Library, available, faster, products_of, worth_onednn
from cfl.engines.vmapped import VmapEngine
from cfl.engines.workers import WorkerEngine
from cfl.models.base import num_parameters
from cfl.models.dropout import DropoutMasks, dropout_masks
from cfl.runtime.errors import ConfigError
from cfl.runtime.memory import require_memory

MEMORY_ON_CPU = 128 * 2**20
"""Bytes that :data:`COPIES` of a cohort's weights may take when the width is chosen for the user."""

COPIES = {"vmap": 4, "workers": 1}
"""Copies of the weights alive in a step: ``vmap`` keeps gradients and what autograd makes of stacked weights,
``workers`` none. Where a method or the optimizer wants gradients they take one copy more, A-GEM's reference another."""

PATCHES_ON_CPU = 2**28
"""Bytes that the patches of a step's convolutions may take in all threads, for the batch to be last in memory."""

SMALL = 2**18
"""Parameters up to which computing clients together (``vmap``, or stacked by a worker) is tried although a hand-written
step for one is at hand: with more, products are too large for the number of calls to matter."""


@dataclass(frozen=True)
class EngineChoice:
    """One way to compute local steps.

    Attributes:
        kind: engine.
        width: clients trained side by side, K.
        threads: clients computed at the same time by ``workers``, one math thread each; 0 computes one client after
            another with all math threads. 0 for ``vmap``.
        stack: clients that a thread computes together.
        batch_last: whether ``workers`` hold maps with the batch last in memory.
        products: what multiplies matrices in hand-written steps of ``workers``.
    """

    kind: EngineKind
    width: int
    threads: int = 0
    stack: int = 1
    batch_last: bool = False
    products: Library = "blas"

    @property
    def most_padding(self) -> float | None:
        """Share of computed samples that may be padding: 10 %, or None for an engine that computes none."""
        return 0.1 if self.kind == "vmap" or self.stack > 1 else None

    @property
    def at_once(self) -> int:
        """Clients that are computed at the same time, where others of the cohort wait for their turn."""
        return max(self.threads, 1) * self.stack if self.kind == "workers" else 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for records and checkpoints."""
        return asdict(self)

    def __str__(self) -> str:
        if self.kind == "vmap":
            return f"vmap, K = {self.width}"
        stacked = f", {self.stack} clients stacked" if self.stack > 1 else ""
        who = f"{self.threads} worker(s)" if self.threads else "1 worker with all math threads"
        layout = ", batch last" if self.batch_last else ""
        return f"{who}, K = {self.width}{stacked}{layout}{', oneDNN' if self.products == 'onednn' else ''}"


def build_engine(
    choice: EngineChoice,
    network: nn.Module,
    input_shape: tuple[int, int, int],
    options: EngineOptions,
    batch_size: int,
    eager: bool = False,
    by_hand: bool = True,
) -> Engine:
    """The engine of a choice, for steps of ``batch_size``; else see :class:`~cfl.engines.workers.WorkerEngine`."""
    if choice.kind == "workers":
        threads, stack, last = choice.threads, choice.stack, choice.batch_last
        products = products_of(choice.products, batch_size)
        return WorkerEngine(network, input_shape, threads, stack, last, eager, by_hand, products)
    return VmapEngine(network, input_shape, options.compile, eager)


def candidates(
    options: EngineOptions,
    width: int | None,
    most_clients: int,
    network: nn.Module,
    input_shape: tuple[int, int, int],
    precision: str,
    batch_size: int,
    by_hand: bool = True,
) -> list[EngineChoice]:
    """The choices that a user's settings leave open, the most promising first; one if nothing is open.

    Args:
        options: what the user asked for.
        width: cohort width K if fixed by the user, None for any.
        most_clients: greatest number of clients to be computed side by side: those of a round, or a process's share.
        network: on the device that it is trained on.
        input_shape: ``(C, H, W)``.
        precision: the Trainer's.
        batch_size: samples per local step.
        by_hand: whether the loss allows hand-written steps, see :class:`~cfl.engines.workers.WorkerEngine`.

    Raises:
        ConfigError: ``engine.kind`` is workers where they cannot work, or ``engine.stack``, ``engine.batch_last`` or
            ``engine.products`` is asked of another network; ``model.network`` cannot take the data's images; so many
            clients as ``schedule.cohort_width`` says do not fit into memory.
    """
    device = next(network.parameters()).device
    refused = _why_no_workers(network, input_shape, device, precision, options)
    if options.kind == "workers" and refused is not None:
        raise ConfigError("engine.kind", "workers", f"vmap or auto: {refused}")
    found: list[EngineChoice] = []
    slower: list[EngineChoice] = []
    chain = Chain.of(network) if by_hand else None
    if options.kind != "vmap" and refused is None:
        threads = options.workers or torch.get_num_threads()
        layouts = _layouts(options, chain, network, input_shape, threads * batch_size)
        found += _worker_choices(options, width, most_clients, network, chain, device, threads, layouts)
        found, slower = _with_products(found, options, chain, network, input_shape, batch_size)
    small = num_parameters(network) <= SMALL
    if options.kind == "vmap" or not found or (options.kind == "auto" and (small or chain is None)):
        widths = [16, 1, 4, 64, 256] if width is None else [width]
        found += [EngineChoice("vmap", k) for k in _sensible(widths, most_clients, network, device, width, "vmap")]
    return list(dict.fromkeys(found + slower))


def _worker_choices(
    options: EngineOptions,
    width: int | None,
    most_clients: int,
    network: nn.Module,
    chain: Chain | None,
    device: torch.device,
    threads: int,
    layouts: Sequence[bool],
) -> list[EngineChoice]:
    stackable = chain is not None and chain.stackable
    if options.stack is not None and options.stack > 1 and not stackable:
        raise ConfigError(
            "engine.stack", options.stack, "1 or null: no chain of linear layers with a loss of its logits"
        )
    found = []

    def threads_for(jobs: int) -> list[int]:
        """One client at a time may be faster with several math threads, unless the user said how many workers."""
        at_once = min(threads, jobs)
        with_all = options.workers is None and torch.get_num_threads() > 1
        return [1, 0] if at_once == 1 and with_all else [at_once]

    if options.stack in (None, 1):
        widths = [threads * n for n in (4, 8, 2, 1)] if width is None else [width]
        for k in _sensible(widths, most_clients, network, device, width):
            found += [EngineChoice("workers", k, t, batch_last=last) for t in threads_for(k) for last in layouts]
    if options.stack is not None and options.stack > 1:
        widths = [threads * options.stack] if width is None else [width]
        for k in _sensible(widths, most_clients, network, device, width):
            stack = min(options.stack, k)
            found += [EngineChoice("workers", k, t, stack) for t in threads_for(-(-k // stack))]
    elif options.stack is None and stackable and num_parameters(network) <= SMALL:
        widths = [threads * stack for stack in (16, 4, 64)] if width is None else [width]
        for k in _sensible(widths, most_clients, network, device, width):
            stack = -(-k // min(threads, k))
            if stack > 1:
                found += [EngineChoice("workers", k, t, stack) for t in threads_for(-(-k // stack))]
    return found


def _layouts(
    options: EngineOptions, chain: Chain | None, network: nn.Module, input_shape: tuple[int, int, int], samples: int
) -> list[bool]:
    """Whether the batch may be last in memory, the more promising first, with so many samples on all threads."""
    if chain is None or not chain.has_convolutions or BatchLastChain.of_chain(chain) is None:
        if options.batch_last:
            chains = "chain of layers, ungrouped convolutions among them, with a loss of its logits"
            raise ConfigError("engine.batch_last", True, f"false or null: no {chains}")
        return [False]
    if options.batch_last is not None:
        return [options.batch_last]
    return [True, False] if samples * patch_bytes(network, input_shape) <= PATCHES_ON_CPU else [False]


def _with_products(
    found: list[EngineChoice],
    options: EngineOptions,
    chain: Chain | None,
    network: nn.Module,
    input_shape: tuple[int, int, int],
    batch_size: int,
) -> tuple[list[EngineChoice], list[EngineChoice]]:
    """The choices with the library that is asked for, or with the one that is faster here, and those with the other.

    With oneDNN only where a product of a step is large enough for it.
    """
    asked = options.products == "onednn"
    if options.products == "blas" or not available():
        return found, []
    gaining = _gaining(found, chain, network, input_shape, batch_size)
    if asked and not gaining:
        large = f"a large product in batches of {batch_size}"
        what = f"float32 chain of layers, one client at a time (engine.stack: 1), with {large} and a loss of its logits"
        raise ConfigError("engine.products", "onednn", f"blas or null: no {what}")
    if asked or not gaining:
        return gaining or found, []
    if faster() == "blas":
        return found, gaining
    with_onednn = {choice: replace(choice, products="onednn") for choice in found}
    return [other if other in gaining else choice for choice, other in with_onednn.items()], found


def _gaining(
    found: list[EngineChoice],
    chain: Chain | None,
    network: nn.Module,
    input_shape: tuple[int, int, int],
    batch_size: int,
) -> list[EngineChoice]:
    """Those of the choices of which a product is worth oneDNN, with it."""
    if chain is None or next(network.parameters()).dtype is not torch.float32:
        return []
    large: dict[type[nn.Module], bool] = {nn.Linear: False, nn.Conv2d: False}
    for kind, weight, count in _weighted(network, input_shape):
        large[kind] |= worth_onednn(len(weight), weight[0].numel(), count * batch_size)
    return [
        replace(choice, products="onednn")
        for choice in found
        # Convolutions with the batch first are oneDNN's anyhow.
        if choice.stack == 1 and (large[nn.Linear] or (choice.batch_last and large[nn.Conv2d]))
    ]


def patch_bytes(network: nn.Module, input_shape: tuple[int, int, int]) -> int:
    """Bytes of the patches of one sample that a step with the batch last in memory holds at a time.

    Those of all convolutions, and once more the largest of those that have weights before them, for their gradient.
    """
    size = next(network.parameters()).element_size()
    found = [
        weight[0].numel() * places * size
        for kind, weight, places in _weighted(network, input_shape)
        if kind is nn.Conv2d
    ]
    return sum(found) + max(found[1:], default=0)


@torch.no_grad()
def _weighted(
    network: nn.Module, input_shape: tuple[int, int, int]
) -> list[tuple[type[nn.Linear | nn.Conv2d], Tensor, int]]:
    """Linear and convolutional layers in the order of their use: kind, weight, places of a sample that it works on."""
    found: list[tuple[type[nn.Linear | nn.Conv2d], Tensor, int]] = []

    def note(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kind = nn.Conv2d if isinstance(module, nn.Conv2d) else nn.Linear
        found.append((kind, module.weight, output[0].numel() // len(module.weight)))

    trial = copy.deepcopy(network).eval()
    for module in trial.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(note)
    some = next(trial.parameters())
    trial(torch.zeros(1, *input_shape, dtype=some.dtype, device=some.device))
    return found


def _sensible(
    widths: Sequence[int],
    most_clients: int,
    network: nn.Module,
    device: torch.device,
    fixed: int | None,
    kind: EngineKind = "workers",
) -> list[int]:
    """Widths no greater than a round; when nobody fixed one, those whose models fit the memory set aside.

    The smallest is kept in any case.
    """
    capped = list(dict.fromkeys(min(k, most_clients) for k in widths))
    size = sum(p.numel() * p.element_size() for p in network.parameters())
    if fixed is not None:
        if device.type == "cpu":
            needed = min(capped) * size * COPIES[kind]
            require_memory("schedule.cohort_width", fixed, needed, "fewer clients side by side, or auto")
        return capped
    room = MEMORY_ON_CPU if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] // 8
    smallest = min(capped)
    return [k for k in capped if k == smallest or k * size * COPIES[kind] <= room]


def _why_no_workers(
    network: nn.Module,
    input_shape: tuple[int, int, int],
    device: torch.device,
    precision: str,
    options: EngineOptions,
) -> str | None:
    if device.type != "cpu":
        return f"workers compute on the CPU, the model is on {device}"
    if precision != "32-true":
        return f"workers compute in trainer.precision 32-true, not {precision}"
    if options.compile is not None:
        return "engine.compile is for vmap"
    if draws_random_numbers(network, input_shape):
        return "the network draws random numbers other than by nn.Dropout layers, which threads would mix up"
    return None


@torch.no_grad()
def draws_random_numbers(network: nn.Module, input_shape: tuple[int, int, int]) -> bool:
    """Whether a training pass advances torch's random stream, counted dropout aside.

    Raises:
        ConfigError: if the network cannot take the data's images at all.
    """
    trial = copy.deepcopy(network)
    some = next(trial.parameters())
    try:
        masks = DropoutMasks(trial, input_shape).draw(
            torch.zeros(1, dtype=torch.int64, device=some.device), 2, some.dtype
        )
        with torch.random.fork_rng(devices=[]), dropout_masks(trial, {n: m[0] for n, m in masks.items()}):
            before = torch.get_rng_state()
            trial(torch.zeros(2, *input_shape, dtype=some.dtype, device=some.device))
            return not torch.equal(before, torch.get_rng_state())
    except Exception as error:  # whatever a user's forward pass may raise
        what = f"{type(network).__name__} on images {list(input_shape)}: {type(error).__name__}: {error}"
        raise ConfigError("model.network", what, "a network that takes the data's images") from error


def from_dict(saved: dict[str, Any] | None, allowed: Sequence[EngineChoice]) -> EngineChoice | None:
    """A choice as :meth:`EngineChoice.to_dict` gave it, if it is among the allowed ones."""
    if saved is None:
        return None
    choice = EngineChoice(**{**saved, "kind": cast(EngineKind, saved["kind"])})
    return choice if choice in allowed else None
