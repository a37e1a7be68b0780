"""The ways to compute local steps that a user's settings leave open for a network on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from cfl.engines.against_autograd import MOST_PARAMETERS, AgainstAutograd
from cfl.engines.base import EngineKind, EngineOptions
from cfl.engines.batch_last import BatchLastChain
from cfl.engines.chain import Chain
from cfl.engines.choice import EngineChoice
from cfl.engines.hidden_state import check_hidden_state
from cfl.engines.products import available, faster, worth_onednn
from cfl.engines.trial_pass import draws_random_numbers, patch_bytes, weighted_layers
from cfl.models.base import num_parameters
from cfl.runtime.errors import ConfigError, EngineCannot
from cfl.runtime.memory import require_memory

_log = logging.getLogger(__name__)

MEMORY_ON_CPU = 128 * 2**20
"""Bytes that :data:`COPIES` of a cohort's weights may take when the user has not set the width."""

COPIES = {"vmap": 4, "workers": 1}
"""Copies of the weights in memory during a step. ``vmap`` also keeps gradients and the tensors that autograd makes of
stacked weights; ``workers`` keep the weights only. If a method or the optimizer uses gradients, ``workers`` keep one
copy more, and one more for A-GEM's reference gradient."""

PATCHES_ON_CPU = 2**28
"""Bytes that the patches of a step's convolutions may take in all threads if ``batch_last`` is tried unasked."""

SMALL = 2**18
"""Number of parameters up to which computing clients together (``vmap``, or stacked by a worker) is tried even if one
client has a hand-written step. In larger networks, products take so long that saving calls does not matter."""


def candidates(
    options: EngineOptions,
    width: int | None,
    most_clients: int,
    network: nn.Module,
    input_shape: tuple[int, int, int],
    precision: str,
    batch_size: int,
    by_hand: bool = True,
    samples: Callable[[], Tensor] | None = None,
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
        samples: returns ``[3, C, H, W]`` samples, on which a network of a user's own is compared with plain autograd.
            Without it, or if two of them are equal, nothing is compared.

    Raises:
        ConfigError: ``engine.kind`` is workers but they cannot work; ``engine.stack``, ``engine.batch_last`` or
            ``engine.products`` does not suit the network; ``model.network`` cannot take the data's images, or keeps
            state of its own; or ``schedule.cohort_width`` clients do not fit into memory.
        EngineCannot: only ``vmap`` is left, and cannot compute ``schedule.cohort_width`` clients of this network.
    """
    device = next(network.parameters()).device
    draws = draws_random_numbers(network, input_shape)  # refuses a network that cannot be trained, whatever the engine
    own = samples is not None and not _is_shipped(network)
    chain = Chain.of(network) if by_hand or own else None
    open_choices = _Open(options, width, most_clients, network, input_shape, batch_size, chain if by_hand else None)
    compared = None
    if samples is not None and own and chain is None:
        x = samples()
        check_hidden_state(network, x)
        # Equal samples have batch statistics without spread, whose gradients are rounding alone.
        distinct = len(x.flatten(1).unique(dim=0)) == len(x)
        if distinct and not draws and num_parameters(network) <= MOST_PARAMETERS:
            compared = AgainstAutograd(network, x)
    refused = _why_no_workers(draws, device, precision, options)
    if refused is None and options.kind != "vmap" and compared is not None:
        refused = compared.on_a_copy()
        if refused is not None and options.kind == "auto":
            _log.warning("workers do not compute %s: %s", type(network).__name__, refused)
    if options.kind == "workers" and refused is not None:
        raise ConfigError("engine.kind", "workers", f"vmap or auto: {refused}")
    found, slower = open_choices.workers() if options.kind != "vmap" and refused is None else ([], [])
    small = num_parameters(network) <= SMALL
    if options.kind == "vmap" or not found or (options.kind == "auto" and (small or open_choices.chain is None)):
        widths = open_choices.widths("vmap", 16, 1, 4, 64, 256)
        if compared is not None and max(widths) > 1 and (reason := compared.under_vmap()) is not None:
            widths = _one_at_a_time(network, widths, reason, refused, others=bool(found))
        found = [*found, *(EngineChoice("vmap", k) for k in widths)]
    return list(dict.fromkeys(found + slower))


def _is_shipped(network: nn.Module) -> bool:
    """Whether the network is one of this package, whose tests compare it with plain autograd."""
    return type(network).__module__.startswith("cfl.models.")


def _one_at_a_time(
    network: nn.Module, widths: list[int], reason: str, no_workers: str | None, others: bool
) -> list[int]:
    """The widths for ``vmap`` if it cannot compute several clients of a network together.

    Raises:
        EngineCannot: there are none, and no ``others`` than ``vmap`` are open.
    """
    name = type(network).__name__
    if 1 not in widths and not others:
        workers = "engine.kind: workers, " if no_workers is None else ""
        valid = f"schedule.cohort_width: 1, {workers}or a network for vmap ({reason})"
        raise EngineCannot("model.network", name, valid)
    _log.warning("vmap does not compute several clients of %s together: %s", name, reason)
    return [k for k in widths if k == 1]


class _Open:
    """Finds the open choices of each kind.

    Arguments are those of :func:`candidates`. ``chain`` is the network if hand-written steps can train it, or None.
    """

    def __init__(
        self,
        options: EngineOptions,
        width: int | None,
        most_clients: int,
        network: nn.Module,
        input_shape: tuple[int, int, int],
        batch_size: int,
        chain: Chain | None,
    ) -> None:
        self.options, self.width, self.most_clients = options, width, most_clients
        self.network, self.input_shape, self.batch_size = network, input_shape, batch_size
        self.chain = chain
        self.threads = options.workers or torch.get_num_threads()

    def widths(self, kind: EngineKind, *suggested: int) -> list[int]:
        """Cohort widths to try: the user's, or the suggested ones whose models fit the memory set aside.

        The smallest suggested width is always among them. All are limited to ``most_clients``.
        """
        widths = suggested if self.width is None else (self.width,)
        capped = list(dict.fromkeys(min(k, self.most_clients) for k in widths))
        device = next(self.network.parameters()).device
        size = COPIES[kind] * sum(p.numel() * p.element_size() for p in self.network.parameters())
        smallest = min(capped)
        if self.width is not None:
            if device.type == "cpu":
                other = "fewer clients side by side, or auto"
                require_memory("schedule.cohort_width", self.width, smallest * size, other)
            return capped
        room = MEMORY_ON_CPU if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] // 8
        return [k for k in capped if k == smallest or k * size <= room]

    def workers(self) -> tuple[list[EngineChoice], list[EngineChoice]]:
        """The choices of ``workers`` with the library that the user asked for or that is faster here, and a second list
        with the other library."""
        layouts = self._layouts()
        return self._with_products([*self._one_by_one(layouts), *self._stacked()])

    def _one_by_one(self, layouts: list[bool]) -> list[EngineChoice]:
        if self.options.stack not in (None, 1):
            return []
        return [
            EngineChoice("workers", k, threads, batch_last=last)
            for k in self.widths("workers", *(self.threads * n for n in (4, 8, 2, 1)))
            for threads in self._threads_for(k)
            for last in layouts
        ]

    def _stacked(self) -> list[EngineChoice]:
        asked, stackable = self.options.stack, self.chain is not None and self.chain.stackable
        if asked is not None and asked > 1:
            if not stackable:
                valid = "1 or null: no chain of linear layers with a loss of its logits"
                raise ConfigError("engine.stack", asked, valid)
            stacks = {k: min(asked, k) for k in self.widths("workers", self.threads * asked)}
        elif asked is None and stackable and num_parameters(self.network) <= SMALL:
            widths = self.widths("workers", *(self.threads * n for n in (16, 4, 64)))
            stacks = {k: stack for k in widths if (stack := -(-k // min(self.threads, k))) > 1}
        else:
            return []
        return [
            EngineChoice("workers", k, threads, stack)
            for k, stack in stacks.items()
            for threads in self._threads_for(-(-k // stack))
        ]

    def _threads_for(self, jobs: int) -> list[int]:
        """Numbers of threads to try; also 0, all math threads, if one client is computed at a time and may use them."""
        at_once = min(self.threads, jobs)
        with_all = self.options.workers is None and torch.get_num_threads() > 1
        return [1, 0] if at_once == 1 and with_all else [at_once]

    def _layouts(self) -> list[bool]:
        """Values of ``batch_last`` to try, the more promising first."""
        chain, asked = self.chain, self.options.batch_last
        if chain is None or not chain.has_convolutions or BatchLastChain.of_chain(chain) is None:
            if asked:
                chains = "chain of layers, ungrouped convolutions among them, with a loss of its logits"
                raise ConfigError("engine.batch_last", True, f"false or null: no {chains}")
            return [False]
        if asked is not None:
            return [asked]
        of_all_threads = self.threads * self.batch_size * patch_bytes(self.network, self.input_shape)
        return [True, False] if of_all_threads <= PATCHES_ON_CPU else [False]

    def _with_products(self, found: list[EngineChoice]) -> tuple[list[EngineChoice], list[EngineChoice]]:
        """See :meth:`workers`; oneDNN is used only if a product of a step is large enough to gain from it."""
        asked = self.options.products == "onednn"
        if self.options.products == "blas" or not available():
            return found, []
        gaining = self._gaining(found)
        if asked and not gaining:
            what = f"with a large product in batches of {self.batch_size} and a loss of its logits"
            valid = f"blas or null: no float32 chain of layers, one client at a time (engine.stack: 1), {what}"
            raise ConfigError("engine.products", "onednn", valid)
        if asked or not gaining:
            return gaining or found, []
        if faster() == "blas":
            return found, gaining
        with_onednn = {choice: replace(choice, products="onednn") for choice in found}
        return [other if other in gaining else choice for choice, other in with_onednn.items()], found

    def _gaining(self, found: list[EngineChoice]) -> list[EngineChoice]:
        """The choices that gain from oneDNN, changed to use it."""
        if self.chain is None or next(self.network.parameters()).dtype is not torch.float32:
            return []
        large: dict[type[nn.Module], bool] = {nn.Linear: False, nn.Conv2d: False}
        for kind, weight, count in weighted_layers(self.network, self.input_shape):
            large[kind] |= worth_onednn(len(weight), weight[0].numel(), count * self.batch_size)
        return [
            replace(choice, products="onednn")
            for choice in found
            # Torch computes convolutions with the batch first by oneDNN in any case.
            if choice.stack == 1 and (large[nn.Linear] or (choice.batch_last and large[nn.Conv2d]))
        ]


def _why_no_workers(draws: bool, device: torch.device, precision: str, options: EngineOptions) -> str | None:
    if device.type != "cpu":
        return f"workers compute on the CPU, the model is on {device}"
    if precision != "32-true":
        return f"workers compute in trainer.precision 32-true, not {precision}"
    if options.compile is not None:
        return "engine.compile is for vmap"
    if draws:
        return "the network draws random numbers other than by nn.Dropout layers, which threads would mix up"
    return None
