"""Gradient Projection Memory (Saha, Garg and Roy, ICLR 2021), with a memory at every client."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.engines.right_factors import RightFactor, projection_factor, zero_factor
from cfl.methods.base import Method, Report
from cfl.methods.components.client_model import client_model, run_model, some_samples
from cfl.methods.components.layer_inputs.after_task import figures_after_task
from cfl.methods.components.layer_inputs.hooks import seen_inputs
from cfl.methods.components.layer_inputs.residual import ResidualInputs
from cfl.methods.components.layer_inputs.rows import layer_dim
from cfl.methods.components.layer_inputs.weighted_layers import NORMALISING, choose_layers
from cfl.methods.components.subspace import choose_rank, grow_basis
from cfl.methods.context import Context
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices, check_integers, check_numbers

BLOCK = 32  # directions stored together, so that small memories take little space


class GPM(Method):
    """Projects clients' gradients to be orthogonal to the layer inputs of their own samples of earlier tasks.

    **Training**: the gradient ``G [o, d]`` of a protected layer becomes ``G - (G M) M^T`` (eq 6) between backward and
    the optimizer, with the client's memory ``M [d, r]``. The gradients of clients without a memory do not change.

    **Memory**, after every task but the last: a client runs up to ``samples`` of its own samples through the global
    model, takes ``R`` (the inputs ``[d, n]`` of a layer; patches for convolutions) and ``R* = R - M M^T R`` (eq 8),
    and adds the leading left singular vectors of ``R*`` to ``M``. It adds as few as are needed for
    ``(||R||^2 - ||R*||^2 + sum_j sigma_j^2) / ||R||^2 >= epsilon`` (eq 9; eq 5 for the first), possibly none.

    Differs from the paper, which has one learner. Here every client has its own memory, as in the comparisons of FOT
    (Bakman et al., 2024) and Fed-A-GEM (Dai et al., 2024), which give neither thresholds nor samples. FOT's "apply
    projection to their local updates in each round" is read as GPM's projection of every gradient. The mean of
    differently projected updates is not orthogonal to any client's memory. Weight decay and the server's momentum are
    not projected.

    Sends: the new global model down to all clients that compute a memory after a task; nothing up. Storage per client
    and layer: ``r``, rounded up to whole blocks of 32 directions, times ``d`` float32 numbers; at most about the size
    of ``sum d^2``. Extra compute per local step and layer: ``4 o d r`` operations per client while ``r`` is below about
    ``d / 2``, then ``2 o d^2``, where a plain step takes ``6 o d`` per sample; after a task one forward pass and the
    eigenvectors of a ``min(n, d)`` sized matrix. Scenarios: task-, class- and domain-incremental. Optimizers: SGD.

    Args:
        threshold: epsilon in (0, 1], the share of the inputs' energy that the memory has to cover: one number, or
            patterns over layer names with a number each, of which the first that matches counts. The authors: 0.95 for
            the first layer and 0.99 for the others (Permuted MNIST), 0.97 (Split CIFAR-100), 0.965 (5-Datasets).
        threshold_increment: added to the threshold after every task (up to 1); the authors: 0.003 for Split CIFAR-100.
        samples: most samples used per client and task; drawn at random if there are more.
        rank_rule: ``exact``: eq 5 and 9; ``code``: one direction fewer for a client's first task, as the authors' code.
        layers: patterns over module names; null protects all Linear and Conv2d layers, except the output layer in task-
            and class-incremental runs, as the authors leave the heads of their tasks free. Where the classes of all
            tasks compete, ``["*"]`` keeps old outputs as they are, too; on Split CIFAR-100 it learned far less.
        freeze_affine: clients with a memory do not train biases, which would change outputs for earlier tasks in spite
            of eq 6 (the authors' networks have none), nor, as in the authors' code, the scales and shifts of
            normalisation layers; biases of layers whose weights are not protected are trained.
        batch_size: samples per forward pass after a task. Changes memory and speed, and results where BatchNorm has no
            statistics.

    Raises:
        ConfigError: an option is out of range; or, before training, what :meth:`setup` refuses.
    """

    looks_back: ClassVar[bool] = True
    optimizers: ClassVar[frozenset[str] | None] = frozenset({"SGD"})
    state = ("_rows", "memory_seconds", "_most_bytes")  # the memories are in ``context.clients``

    def __init__(
        self,
        threshold: float | dict[str, float] = 0.97,
        threshold_increment: float = 0.0,
        samples: int = 300,
        rank_rule: Literal["exact", "code"] = "exact",
        layers: list[str] | None = None,
        freeze_affine: bool = True,
        batch_size: int = 500,
    ) -> None:
        numbers = threshold.values() if isinstance(threshold, dict) else [threshold]
        if not numbers or not all(0 < number <= 1 for number in numbers):
            raise ConfigError("methods.gpm.threshold", threshold, "a number in (0, 1], or {layer pattern: number}")
        check_numbers("methods.gpm", "[0, 1)", threshold_increment=threshold_increment)
        check_integers("methods.gpm", 1, samples=samples, batch_size=batch_size)
        check_choices("methods.gpm", ("exact", "code"), rank_rule=rank_rule)
        self.threshold = threshold
        self.threshold_increment = threshold_increment
        self.samples = samples
        self.rank_rule = rank_rule
        self.layers = layers
        self.freeze_affine = freeze_affine
        self.batch_size = batch_size
        self.memory_seconds = 0.0
        self._most_bytes = 0
        self._rows: list[dict[str, Any]] = []

    def setup(self, context: Context) -> None:
        """Find the protected layers and their thresholds.

        Raises:
            ConfigError: if a pattern matches no layer, or a protected layer has no threshold, or there are two of these
                methods, which would share their clients' state.
        """
        super().setup(context)
        self.refuse_twins(GPM, "one GPM; which layers, with which thresholds, are its options")
        free = context.network.head if context.scenario != "domain" else None
        self._protected = choose_layers(context.network, self.layers, f"{self.key}.layers", free, context.frozen)
        self._dims = {name: layer_dim(layer) for name, layer in self._protected.items()}
        self._thresholds = {name: self._threshold_of(name) for name in self._protected}
        if isinstance(self.threshold, dict):
            for pattern in self.threshold:
                if not any(fnmatchcase(name, pattern) for name in self._protected):
                    valid = f"patterns that match one of {list(self._protected)}"
                    raise ConfigError(f"{self.key}.threshold", pattern, valid)
        self._frozen = _affine_parameters(context.network, self._protected) if self.freeze_affine else []

    def _threshold_of(self, layer: str) -> float:
        if not isinstance(self.threshold, dict):
            return self.threshold
        for pattern, number in self.threshold.items():
            if fnmatchcase(layer, pattern):
                return number
        raise ConfigError(f"{self.key}.threshold", self.threshold, f"a pattern that matches {layer}; '*' matches all")

    # Training.

    def right_factors(self, cohort: Cohort) -> dict[str, RightFactor]:
        """``I - M M^T`` for clients with a memory; 0 for their biases and normalisation layers, if frozen."""
        held = self.context.clients.gather("gpm", cohort.clients, self._nothing())
        places = held["tasks"].nonzero().flatten().tolist()
        if not places:
            return {}
        context = self.context
        clients, ranks = [cohort.clients[place] for place in places], held["ranks"][places].max(0).values.tolist()
        holders = torch.tensor(places, device=context.device)
        memories = {
            name: self._directions(name, clients, rank)
            for name, rank in zip(self._dims, ranks, strict=True)
            if rank > 0
        }
        steps = context.local_epochs * math.ceil(max(cohort.sizes) / context.batch_size)
        everyone = len(places) == len(cohort.clients)
        frozen = {name: zero_factor(holders, cohort.parameters[name]) for name in self._frozen}
        return frozen | {
            f"{name}.weight": projection_factor(
                rows.mT, len(self._protected[name].weight), steps, None if everyone else holders
            )
            for name, rows in memories.items()
        }

    @property
    def computes_locally(self) -> bool:
        """Whether any layer is protected."""
        return bool(self._protected)

    # Clients' states: in "gpm" the number of directions of each layer, and the directions in blocks.

    def _nothing(self) -> dict[str, Tensor]:
        return {"tasks": torch.tensor(0), "ranks": torch.zeros(len(self._dims), dtype=torch.int64)}

    def _directions(self, layer: str, clients: Sequence[int], rank: int) -> Tensor:
        """``[k, rank, d]``, the clients' memories of a layer as rows, with zeros where they have fewer directions."""
        device, dtype = self.context.device, self._dtype(layer)
        empty = {"directions": torch.zeros(BLOCK, self._dims[layer], dtype=dtype, device=device)}
        blocks = [
            self.context.clients.gather(f"gpm {layer} {block}", clients, empty)["directions"]
            for block in range(math.ceil(rank / BLOCK))
        ]
        return torch.cat(blocks, 1)[:, :rank] if blocks else empty["directions"][None, :0].expand(len(clients), -1, -1)

    def _dtype(self, layer: str) -> torch.dtype:
        return torch.promote_types(self._protected[layer].weight.dtype, torch.float32)

    def _keep(self, layer: str, client: int, basis: Tensor, before: int) -> None:
        """Store the columns of ``basis [d, r]``; the first ``before`` of them are stored already."""
        if basis.shape[1] == before:
            return
        for block in range(before // BLOCK, math.ceil(basis.shape[1] / BLOCK)):
            rows = basis.T[block * BLOCK : (block + 1) * BLOCK]
            padded = torch.cat([rows, rows.new_zeros(BLOCK - len(rows), rows.shape[1])])
            self.context.clients.scatter(f"gpm {layer} {block}", [client], {"directions": padded[None]})

    # Growing memories.

    def end_task(self, plan: RoundPlan) -> None:
        """Let clients add directions for their samples of the task to their memories."""
        context = self.context
        if context.is_last(plan.task) or not self._protected:
            return
        grown, seconds = figures_after_task(context, plan, context.members(plan.task), self._grow)
        self._record(plan.task, grown)
        self.memory_seconds += seconds

    @torch.no_grad()
    def _grow(self, task: int, client: int) -> list[tuple[int, int, float]]:
        """Grow one client's memory. Returns per layer: directions before and after, residual share of its inputs."""
        context = self.context
        held = context.clients.gather("gpm", [client], self._nothing())
        before = dict(zip(self._dims, held["ranks"][0].tolist(), strict=True))
        memories = {name: self._directions(name, [client], rank)[0] for name, rank in before.items()}
        inputs = {n: ResidualInputs(rows.T) for n, rows in memories.items()}
        model = client_model(context, client)
        with seen_inputs(self._protected, lambda name, rows: inputs[name].add(rows)):
            for x in some_samples(context, task, client, self.samples, "gpm samples", self.batch_size):
                run_model(context, model, x)
        first = int(held["tasks"][0]) == 0
        ranks, found = [], []
        for name, seen in inputs.items():
            basis = grow_basis(memories[name].T, self._leading(seen, self._threshold_after(task, name), first))
            self._keep(name, client, basis, before[name])
            ranks.append(basis.shape[1])
            found.append((before[name], basis.shape[1], seen.share))
        state = {"tasks": held["tasks"] + 1, "ranks": torch.tensor([ranks])}
        context.clients.scatter("gpm", [client], state)
        return found

    def _threshold_after(self, task: int, layer: str) -> float:
        return min(1.0, self._thresholds[layer] + task * self.threshold_increment)

    def _leading(self, inputs: ResidualInputs, threshold: float, first: bool) -> Tensor:
        """``[d, r]``, the directions that a client adds for a layer."""
        directions, singular_values = inputs.principal()
        d, size = inputs.basis.shape
        rank = choose_rank(singular_values, inputs.share, threshold, "gpm", 0, d - size)
        if first and self.rank_rule == "code":
            rank = max(0, rank - 1)
        return directions[:, :rank]

    # Reports and checkpoints.

    def _bytes(self, layer: str, rank: int) -> int:
        return BLOCK * math.ceil(rank / BLOCK) * self._dims[layer] * self._dtype(layer).itemsize

    def _record(self, task: int, clients: list[list[tuple[int, int, float]]]) -> None:
        if not clients:
            return
        for found in clients:  # memories never shrink
            kept = sum(self._bytes(name, after) for name, (_, after, _) in zip(self._dims, found, strict=True))
            self._most_bytes = max(self._most_bytes, kept)
        for number, (name, d) in enumerate(self._dims.items()):
            before, after, shares = zip(*(found[number] for found in clients), strict=True)
            mean = sum(after) / len(after)
            self._rows.append(
                {
                    "task": task,
                    "layer": name,
                    "input_dim": d,
                    "clients": len(clients),
                    "basis_size": mean,
                    "smallest_basis": min(after),
                    "largest_basis": max(after),
                    "added": mean - sum(before) / len(before),
                    "used_space": 100 * mean / d,
                    "residual_share": sum(shares) / len(shares),
                    "threshold": self._threshold_after(task, name),
                    "memory_bytes": sum(self._bytes(name, rank) for rank in after) / len(after),
                }
            )

    def report(self) -> Report:
        """Used space (%) and bytes of a client's memory, means over clients at the end; seconds spent on memories.

        A row per task and layer, means over the clients that grew their memories: sizes, used space (%), shares, bytes.
        """
        last = [row for row in self._rows if row["task"] == self._rows[-1]["task"]]
        figures = {
            "used_space": sum(row["used_space"] for row in last) / max(len(last), 1),
            "memory_bytes": sum(row["memory_bytes"] for row in last),
            "memory_seconds": self.memory_seconds,
        }
        return Report(figures, self._rows)

    def client_storage(self) -> int:
        """Bytes of the largest memory of a client."""
        return self._most_bytes


def _affine_parameters(network: nn.Module, protected: Container[str]) -> list[str]:
    """Names of protected layers' biases, of scales and shifts, and of vectors in modules without a weight matrix."""
    found = set[str]()
    for path, module in network.named_modules():
        own = dict(module.named_parameters(prefix=path, recurse=False))
        if isinstance(module, NORMALISING):  # of any shape: a LayerNorm may have a scale [C, H, W]
            found |= own.keys()
        elif path in protected or all(parameter.ndim < 2 for parameter in own.values()):
            found |= {name for name, parameter in own.items() if parameter.ndim == 1}
    return [name for name, _ in network.named_parameters() if name in found]
