"""Decomposed weights written plainly: one client after another, every term of the loss by autograd.

The network stays plain; its weights are computed from their parts before every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cfl.data.datamodule import FederatedDataModule
from cfl.data.schedule import RoundPlan
from cfl.data.streams import Stream
from cfl.federation.federation import Federation
from cfl.methods import APD
from cfl.models.decomposition import decomposed_layers
from cfl.training.client import Client
from support.naive import accuracy, local_batches, task_loss, used_outputs
from support.tiny import UNBALANCED, NetworkFactory, permuted, tiny_data

Tensors = dict[str, Tensor]


@dataclass
class Owner:
    """State of one client.

    Attributes:
        base: layer -> its base.
        set: the present task's set: ``mask``, ``adaptive``, ``attention`` of ``<layer>``, and plain tensors by name.
        filed: earlier task -> its set.
        at: the present task; -1 before the client's first.
        held: earlier task -> layer -> base under the mask plus adaptive weights, at the present task's beginning.
        lent: task -> the knowledge base at its beginning: lender -> layer -> adaptive weights.
    """

    base: Tensors
    set: Tensors
    filed: dict[int, Tensors] = field(default_factory=dict)
    at: int = -1
    held: dict[int, Tensors] = field(default_factory=dict)
    lent: dict[int, dict[int, Tensors]] = field(default_factory=dict)


@dataclass
class Naive:
    """A run with decomposed weights.

    Args:
        data: tasks, clients, schedule.
        network: the plain network.
        layers: layers whose weights are decomposed.
        base: layer -> initial base.
        fresh: task, client -> the set with which the client begins the task.
        make_optimizer: makes a client's optimizer.
        exchange: how the server averages bases: as a whole (``mean``), by ``units``, or not at all (``none``).
        lends: whether there is a knowledge base.
        options: of the method: sparsity, mask_sparsity, consolidation, weight_decay, retroactive, keep; base_mean,
            lenders and threshold where they are not the default.
        mu: weight of a proximal term on the base.
        clocks: ``[C][T]`` rounds of each client's tasks; None if all clients change tasks together.
        senders: round -> the clients that exchange bases and lend in it; None if all of its clients do.
    """

    data: FederatedDataModule
    network: nn.Module
    layers: list[str]
    base: Tensors
    fresh: Callable[[int, int], Tensors]
    make_optimizer: Any
    exchange: str
    lends: bool
    options: dict[str, Any]
    mu: float = 0.0
    clocks: list[list[int]] | None = None
    senders: dict[int, list[int]] | None = None

    def __post_init__(self) -> None:
        self.knowledge: dict[int, Tensors] = {}
        self.owners = {c: Owner(clones(self.base), clones(self.fresh(0, c))) for c in range(self.data.num_clients)}
        self.server = clones(self.base)
        self.sent = {layer: torch.ones(len(b), dtype=torch.bool) for layer, b in self.base.items()}
        self.matrices: list[dict[tuple[int, int], float]] = [{} for _ in self.data.tasks]

    def weight(self, layer: str, base: Tensor, own: Mapping[str, Tensor], client: int, task: int) -> Tensor:
        """Equation 1."""
        total = self.part(layer, base, own)
        for number, (lender, lent) in enumerate(sorted(self.owners[client].lent.get(task, {}).items())):
            if lender != client:
                total = total + own[f"attention {layer}"][number] * lent[layer]
        return total

    def part(self, layer: str, base: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """Base under the mask plus adaptive weights, which consolidation keeps near their earlier values.

        A set that lacks the mask or the adaptive weights is one of the paper's Table 6.
        """
        if f"mask {layer}" in own:
            base = base * torch.sigmoid(own[f"mask {layer}"]).view(-1, *[1] * (base.ndim - 1))
        return base + own[f"adaptive {layer}"] if f"adaptive {layer}" in own else base

    def tensors(self, base: Tensors, own: Mapping[str, Tensor], client: int, task: int) -> Tensors:
        """Return the tensors with which the plain network computes."""
        plain = {name: value for name, value in own.items() if " " not in name}
        return {**plain, **{f"{x}.weight": self.weight(x, base[x], own, client, task) for x in self.layers}}

    def penalty(self, owner: Owner, base: Tensors, own: Tensors, earlier: dict[int, Tensors], first: bool) -> Tensor:
        """Return the sum of all terms that are added to the loss."""
        o = self.options
        total = torch.zeros((), dtype=torch.float64)
        for x in self.layers:
            for name, l1 in ((f"adaptive {x}", o["sparsity"]), (f"mask {x}", o["mask_sparsity"])):
                if name in own:
                    total = total + l1 * own[name].abs().sum() + o["weight_decay"] / 2 * own[name].square().sum()
            if first:
                total = total + o["weight_decay"] / 2 * base[x].square().sum()
            for task, their in earlier.items():
                drift = self.part(x, base[x], their) - owner.held[task][x]
                total = total + o["consolidation"] / 2 * drift.square().sum()
                if f"adaptive {x}" in their:
                    total = total + o["sparsity"] * their[f"adaptive {x}"].abs().sum()
            total = total + self.mu / 2 * (base[x] - self.server[x]).square().sum()
        return total

    def train(self, client: int, plan: RoundPlan) -> None:
        """Train one client for a round."""
        owner, task = self.owners[client], plan.task
        if owner.at != task:
            if owner.at >= 0:
                owner.filed[owner.at] = owner.set
            owner.held = {
                i: {x: self.part(x, owner.base[x], their) for x in self.layers} for i, their in owner.filed.items()
            }
            owner.set, owner.at = clones(self.fresh(task, client)), task
        before = owner.set
        if self.exchange == "mean":
            owner.base = clones(self.server)
        elif self.exchange == "units" and client in self.sending(plan.round):
            for x, units in self.sent.items():
                owner.base[x][units] = self.server[x][units]

        base, own = leaves(owner.base), leaves(owner.set)
        trained = [name for name in own if name.startswith("adaptive ") and self.options["retroactive"]]
        earlier = {
            i: {name: leaf(value) if name in trained else value for name, value in their.items()}
            for i, their in owner.filed.items()
        }
        everything = [*base.values(), *own.values(), *(their[n] for their in earlier.values() for n in trained)]
        optimizer = self.make_optimizer(everything)
        for x, y in local_batches(self.data, plan, client):
            logits = functional_call(self.network, self.tensors(base, own, client, task), (x.double(),))
            loss = task_loss(self.data, task, logits, y) + self.penalty(owner, base, own, earlier, task == 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        outputs = used_outputs(self.data, task)
        owner.base, owner.set = clones(base), clones(own)
        owner.filed = {i: clones(their) for i, their in earlier.items()}
        for name in ("head.weight", "head.bias"):
            rows = before[name].clone()
            rows[outputs] = owner.set[name][outputs]
            owner.set[name] = rows

    def run(self) -> Naive:
        """Run all rounds; return this object."""
        for number in range(self.data.num_rounds):
            plan = self.data.rounds.round(number)
            at = {client: self.task_of(client, number) for client in range(self.data.num_clients)}
            if self.lends and self.clocks is not None:  # Algorithm 3, lines 9 and 10
                for client in plan.clients:
                    if 0 <= self.owners[client].at < at[client]:
                        self.share(client)
            for client, task in at.items():
                if number == 0 or self.task_of(client, number - 1) != task:
                    self.owners[client].lent[task] = dict(self.knowledge)
            for client in plan.clients:
                self.train(client, replace(plan, task=at[client]))
            sending = self.sending(number)
            owners = [self.owners[client] for client in sending]
            for x in self.layers:
                bases = torch.stack([owner.base[x] for owner in owners])
                if self.exchange == "mean":
                    self.server[x] = bases.mean(0)
                elif self.exchange == "units":
                    self.exchange_units(x, bases, owners)
            ending = [client for client, task in at.items() if self.task_of(client, number + 1) != task]
            if self.lends and self.clocks is None and ending:
                self.knowledge = {}  # what clients send now replaces all that was sent before
                if number + 1 < self.data.num_rounds:
                    late = self.options.get("lenders") == "next_round"
                    for client in self.sending(number + 1) if late else sending:
                        if self.owners[client].at == at[client]:
                            self.share(client)
            for client in ending:
                self.matrices[at[client]].update(self.accuracies(client))
        return self

    def sending(self, number: int) -> Sequence[int]:
        """Return the clients that exchange bases in a round, and lend at its end."""
        return self.data.rounds.round(number).clients if self.senders is None else self.senders[number]

    def share(self, client: int) -> None:
        """Put a client's present adaptive weights into the knowledge base."""
        adaptive = {x: self.owners[client].set[f"adaptive {x}"] for x in self.layers}
        self.knowledge[client] = {x: self.sparse(values) for x, values in adaptive.items()}

    def task_of(self, client: int, number: int) -> int:
        """Return a client's task in a round; T after its last task."""
        clocks = self.data.schedule.rounds(len(self.data.tasks)) if self.clocks is None else self.clocks[client]
        task = 0
        while task < len(clocks) and number >= clocks[task]:
            number, task = number - clocks[task], task + 1
        return task

    def exchange_units(self, layer: str, bases: Tensor, owners: list[Owner]) -> None:
        """Set each unit of the server's base to its mean over the clients that sent it.

        With ``base_mean`` of ``clients``, it is the sum of the masked units, divided by the number of sampled clients.
        """
        for unit in range(bases.shape[1]):
            senders = []
            for row, owner in enumerate(owners):
                if f"mask {layer}" not in owner.set:
                    senders.append(bases[row, unit])
                    continue
                sizes = owner.set[f"mask {layer}"].abs()
                kept = -(-len(sizes) * round(100 * self.options["keep"]) // 100)
                if unit in sizes.argsort(descending=True)[:kept].tolist():
                    senders.append(self.message(layer, bases[row, unit], owner, unit))
            self.sent[layer][unit] = bool(senders)
            if senders:
                self.server[layer][unit] = self.mean(senders, len(owners))

    def message(self, layer: str, values: Tensor, owner: Owner, unit: int) -> Tensor:
        """Return what a client sends of a unit of its base."""
        literal = self.options.get("base_mean") == "clients"
        return values * torch.sigmoid(owner.set[f"mask {layer}"][unit]) if literal else values

    def mean(self, sent: list[Tensor], clients: int) -> Tensor:
        """Mean of what was sent, over its senders or over all sampled clients."""
        total = torch.stack(sent).sum(0)
        return total / (clients if self.options.get("base_mean") == "clients" else len(sent))

    def sparse(self, values: Tensor) -> Tensor:
        """Return ``values`` with entries at or below the threshold set to 0."""
        return torch.where(values.abs() > self.options.get("threshold", self.options["sparsity"]), values, 0.0)

    def answers(self, client: int, task: int) -> Tensors:
        """Return the weights with which a client is tested on a task."""
        owner = self.owners[client]
        own, at = (owner.filed[task], task) if task in owner.filed else (owner.set, owner.at)
        own = {n: self.sparse(v) if n.startswith("adaptive") else v for n, v in own.items()}
        base = owner.base if self.exchange != "mean" else self.server
        return self.tensors(base, own, client, at)

    def accuracies(self, client: int) -> dict[tuple[int, int], float]:
        """Accuracies of a client in percent, by client and task."""
        found = {}
        for i, task in enumerate(self.data.tasks):
            x = task.transform(task.test.images).double()
            logits = functional_call(self.network, self.answers(client, i), (x,))
            first = 0
            if self.data.scenario == "task":
                first = sum(self.data.stream.classes_per_task[:i])
                logits = logits[:, first : first + task.num_classes]
            found[client, i] = accuracy(logits, task.test.labels)
        return found


def leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_()


def leaves(values: Mapping[str, Tensor]) -> Tensors:
    return {name: leaf(value) for name, value in values.items()}


def clones(values: Mapping[str, Tensor]) -> Tensors:
    return {name: value.detach().clone() for name, value in values.items()}


# Compared with a run of the method.


def data_of(stream: Stream | None = None, width: int = 2, **schedule: Any) -> FederatedDataModule:
    """Three clients of unlike sizes, two of them in each of six rounds, so that a client may miss a round or a task."""
    settings = {"rounds_per_task": 2, "clients_per_round": 2, "cohort_width": width, **schedule}
    stream = permuted(3) if stream is None else stream
    return tiny_data(stream, num_clients=3, partition=UNBALANCED, schedule=settings)


def renamed(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors of a set under the names that this module uses, without bases and other tensors."""
    found = {}
    for name, value in tensors.items():
        layer, _, part = name.partition(".parametrizations.weight.")
        if not part:
            found[name] = value
        elif part.removeprefix("0.") in ("mask", "adaptive", "attention"):
            found[f"{part.removeprefix('0.')} {layer}"] = value
    return found


def written_out(
    client: Client, data: FederatedDataModule, make: NetworkFactory, method: APD, options: dict[str, Any], **run: Any
) -> Naive:
    """Run a method's written-out computation from the initial values of ``client``, which has not been trained.

    Args:
        client: the client of the run to compare with.
        data: of that run.
        make: makes the plain network.
        method: the method, which has been set up.
        options: options of the method.
        run: further arguments of :class:`Naive`.
    """
    bases = {layer.name: layer.weight.detach().clone() for layer in decomposed_layers(client.network)}

    def fresh(task: int, client: int) -> Tensors:
        return renamed(method._fresh(task, client))

    network = make(data.input_shape, data.num_outputs).double()
    return Naive(data, network, list(bases), bases, fresh, options=options, **run).run()


def assert_the_same(federation: Federation, method: APD, naive: Naive) -> None:
    """Compare what clients keep, the server's base and every accuracy, of all clients that have been trained."""
    tensors = federation.model.state_tensors()
    trained = [client for client, owner in naive.owners.items() if owner.at >= 0]
    assert federation.clients.holders("model") == trained
    expected: Tensors = {}
    found: Tensors = {}

    def compare(what: str, here: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> None:
        expected.update({f"{name} of {what}": value for name, value in there.items()})
        found.update({f"{name} of {what}": here[name] for name in there})

    layers = decomposed_layers(federation.network)
    if naive.exchange != "none":
        compare("the server", {x.name: tensors[x.base] for x in layers}, naive.server)
    for client in trained:
        owner, model = naive.owners[client], federation.clients.get("model", client) or {}
        compare(f"client {client}", renamed(model), owner.set)
        if naive.exchange != "mean":
            compare(f"the base of client {client}", {x.name: model[x.base] for x in layers}, owner.base)
        for task, theirs in owner.filed.items():
            filed = renamed(method._tasks.stored(client, task) or {})
            if method.retroactive:
                filed |= {f"adaptive {x.name}": model[x.earlier][task] for x in layers}
            compare(f"client {client}, task {task}", filed, theirs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    matrix = federation.accuracy.compute()
    assert all(naive.matrices), "every row is compared"
    for row, accuracies in enumerate(naive.matrices):
        for (client, i), accuracy_there in accuracies.items():
            assert abs(matrix[client, row, i] - accuracy_there) < 1e-3, (client, row, i)
