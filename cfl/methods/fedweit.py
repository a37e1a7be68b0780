"""FedWeIT: federated weighted inter-client transfer (Yoon et al., ICML 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.methods.apd import APD, Tensors
from cfl.methods.base import Report
from cfl.methods.components.sparse import SparseRows, largest, message_bytes
from cfl.methods.context import Context
from cfl.models.decomposition import DecomposedLayer, per_unit
from cfl.runtime.option_checks import check_choices, check_numbers


class FedWeIT(APD):
    """Clients decompose their weights, exchange parts of the base, and borrow what others have learned::

        theta_c^(t) = B_c * sigmoid(m_c^(t)) + A_c^(t) + sum_{j != c} alpha_{c,j}^(t) A_j^(t-1)        (eq 1)

    trained by the loss of :class:`APD` (eq 2), whose options it has. alpha is one factor per layer and entry of the
    knowledge base; what others have learned does not change while it is borrowed, and has no part in consolidation.

    The base is each client's own. After local training client c sends its rows ``B_c`` of the output units whose mask
    logits are the largest in absolute value, ``keep`` of each layer's, and says which. The server's G is the mean of
    every unit over those that sent it; in the next round clients replace the units of G, and keep their own of units
    that nobody sent. So in the first round they all get the network's initial base. When a task is over, the clients of
    its last round send A, without entries at or below ``threshold`` and, with ``top_kappa``, but its largest ones. All
    of these are the knowledge base of the next task, which a client is sent when it begins it; its own entry counts
    nothing. Earlier tasks are answered as by APD, with the knowledge and the attention that they were learned with.

    Differs from the paper: B is not multiplied with the mask before it is sent, and means are over the senders of a
    unit (both as in the authors' code; the paper's would shrink B); A comes from the clients of a task's last round
    (the code), not from those of the next one's first (Algorithm 2). Differs from the code: entries of the knowledge
    base are in the order of the clients' ids and without the client's own (there: in that of threads, and with it), m
    is trained with the loss (there it is outside of the gradient), and ``keep`` is the paper's 30 %, with which its
    costs are reported (there 70 %). Whoever is not sampled in a round does not train in it.

    Asynchronously (``schedule.clock_spread``; the paper's Algorithm 3), a client sends A of the task that it is through
    with at the beginning of the first round of a later one that it is sampled in. A client that begins one is sent, of
    every other client, the newest A that is known when the task begins, of whichever task. Where all clocks agree and
    all clients take part, that is the same.

    Sends, in the place of the model: up, the values of the kept units and a bit per unit; down, likewise, all units in
    the first round. Between tasks, A up, read client by client, and down all but a client's own: values with their
    indices, or all values where that is less. Extra memory per client: as for APD, and the knowledge base of every
    task, sparse. Extra compute: as for APD, and one product of attention and knowledge base per step.

    Args:
        keep: share of each layer's output units that a client sends, in (0, 1].
        send_base: whether bases are exchanged at all ("w/o B communication" in the paper's Table 6).
        send_adaptive: whether there is a knowledge base ("w/o A communication").
        use_adaptive: whether there are adaptive weights ("w/o A"); without, there is no knowledge base either.
        use_mask: whether there are masks ("w/o m"); without, all units are sent.
        top_kappa: share of the entries of A that may be sent, the largest of all layers, in (0, 1] (Figure 5a).
        attention: how attention starts: ``random``, drawn as masks are, of variance 1 / J for J entries (the code),
            ``uniform``, one over the number of entries that the client may use (the paper), or ``zeros``.
        sparsity: see :class:`APD`, as for the rest.

    Raises:
        ConfigError: for values other than these; otherwise as :class:`APD`.
    """

    state = ("_sent", "_knowledge", "_bytes")

    def __init__(
        self,
        sparsity: float = 1e-3,
        mask_sparsity: float = 0.0,
        consolidation: float = 100.0,
        weight_decay: float = 1e-4,
        retroactive: bool = True,
        adaptive_from: Literal["initial", "current"] = "initial",
        threshold: float | None = None,
        draws: Literal["common", "own"] = "common",
        keep: float = 0.3,
        send_base: bool = True,
        send_adaptive: bool = True,
        use_adaptive: bool = True,
        use_mask: bool = True,
        top_kappa: float = 1.0,
        attention: Literal["random", "uniform", "zeros"] = "random",
    ) -> None:
        super().__init__(
            sparsity,
            mask_sparsity,
            consolidation,
            weight_decay,
            retroactive and use_adaptive,
            adaptive_from,
            threshold,
            draws,
        )
        check_numbers(self._key, "(0, 1]", keep=keep, top_kappa=top_kappa)
        check_choices(self._key, ("random", "uniform", "zeros"), attention=attention)
        self.keep, self.top_kappa = keep if use_mask else 1.0, top_kappa
        self.send_base = send_base
        self.borrows = self.individual_uplinks = send_adaptive and use_adaptive
        self.use_adaptive, self.use_mask = use_adaptive, use_mask
        self.attention = attention
        self._sent: Tensors = {}
        self._knowledge: list[dict[str, Any]] = []
        self._lends: tuple[int, int] | None = None
        self._own_bytes = [0, 0]
        self._bytes: list[list[int]] = []

    # Before training.

    def _parts(self) -> dict[str, bool]:
        """As the options say."""
        return {
            "masked": self.use_mask,
            "adaptive": self.use_adaptive,
            "attends": self.borrows,
            "remembers": self.retroactive,
        }

    def keeps_local(self, name: str) -> bool:
        """Everything: what is sent of bases is not the model."""
        return True

    def setup(self, context: Context) -> None:
        """As for APD; every client is about to be sent all of the initial base."""
        super().setup(context)
        self._sent = {x.name: torch.ones(len(x.weight), dtype=torch.bool) for x in self._layers}

    def _knowledge_entries(self) -> int:
        """As many as clients take part in a round; all clients where they have clocks of their own."""
        context = self.context
        return context.num_clients if context.client_clocks else context.most_clients

    # A cohort opens.

    @torch.no_grad()
    def start_clients(self, cohort: Cohort) -> None:
        """As for APD, with the task's knowledge base."""
        super().start_clients(cohort)
        if not self.borrows:
            return
        began = self.context.began(cohort.task, cohort.clients[0])  # in the same round for all of them
        if self._lends != (cohort.task, began):
            self._lend(cohort.task, began)
        usable = torch.stack([self._usable(client, cohort.task) for client in cohort.clients])
        for layer in self._layers:
            cohort.buffers[layer.others][: len(usable)].copy_(usable)

    def _lend(self, task: int, began: int) -> None:
        """Let the network compute with the knowledge base of a task that was begun in some round."""
        held, room = self._held(task, began), self._knowledge_entries()
        for layer in self._layers:
            entries = None
            if held:
                base = layer.weight
                entries = base.new_zeros(room, *base.shape)
                for part, first in zip(held, _starts(held), strict=True):
                    rows = part["layers"][layer.name].dense(len(part["clients"])).to(base)
                    entries[first : first + len(rows)] = rows.view(-1, *base.shape)
            layer.parts.knowledge.entries = entries
        self._lends = task, began

    def _held(self, task: int, began: int) -> list[dict[str, Any]]:
        """What a task borrows from, in the order of its attention: what clients had learned at the ends of tasks.

        Args:
            task: that borrows.
            began: the first round of the task.
        """
        if not self.context.client_clocks:
            return [part for part in self._knowledge if part["task"] == task]
        newest = {part["clients"][0]: part for part in self._knowledge if part["round"] <= began}
        return [newest[owner] for owner in sorted(newest)]

    def _borrowed(self, client: int, task: int) -> list[dict[str, Any]]:
        """:meth:`_held` of a client's task."""
        return self._held(task, self.context.began(task, client))

    def _owners(self, client: int, task: int) -> list[int]:
        """Whose the entries of the knowledge base of a client's task are."""
        return [owner for part in self._borrowed(client, task) for owner in part["clients"]]

    def _usable(self, client: int, task: int) -> Tensor:
        """``[J]``, 1 for the entries of a task's knowledge base that a client borrows from."""
        factors = [float(owner != client) for owner in self._owners(client, task)]
        return torch.tensor(factors + [0.0] * (self._knowledge_entries() - len(factors)))

    def _receive(self, cohort: Cohort) -> None:
        """Clients replace the units of the base that the server has."""
        if not self.send_base:
            return
        for layer in self._layers:
            base = cohort.parameters[layer.base]
            sent = per_unit(self._sent[layer.name].to(base.device), layer.weight)
            base.copy_(torch.where(sent, layer.weight, base))
        self._down("base", self._base_bytes(self._sent), len(cohort.clients))

    def _begin(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """As for APD; clients that begin a task are sent its knowledge base."""
        latest, context = self._tasks.latest(cohort.clients), self.context
        super()._begin(cohort, positions)
        for position in positions:
            client = cohort.clients[position]
            if self.borrows and self.attention != "random":
                usable = self._usable(client, cohort.task)
                start = usable / usable.sum().clamp(min=1) if self.attention == "uniform" else torch.zeros_like(usable)
                for layer in self._layers:
                    cohort.parameters[layer.attention][position] = start
            since = context.began(latest[position], client) if latest[position] >= 0 else -1
            for part in self._borrowed(client, cohort.task):
                if part["round"] > since:  # what was lent in an earlier one it keeps
                    sizes = zip(part["clients"], part["bytes"], strict=True)
                    self._down("knowledge", sum(size for owner, size in sizes if owner != client), 1)

    def _base_bytes(self, sent: Mapping[str, Tensor]) -> int:
        """Bytes of a message with some of each layer's base, and a bit per unit that says of which units.

        Args:
            sent: layer -> ``[O]`` bool for whole units, or ``[O, ...]`` for entries, of which it is known to both sides
                which they are once the units are.
        """
        total = 0
        for layer in self._layers:
            weight, chosen = layer.weight, sent[layer.name]
            total += int(chosen.sum()) * (weight.numel() // chosen.numel()) * weight.element_size()
            total += -(-len(weight) // 8) if self.use_mask else 0
        return total

    def _down(self, topic: str, size: int, receivers: int) -> None:
        self.context.channel.downlink(topic, {}, receivers, size)
        self._own_bytes[1] += size * receivers

    # After local training.

    @torch.no_grad()
    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Clients send units of their bases."""
        super().finish_clients(cohort, positions)
        if not self.send_base:
            return
        clients = [cohort.clients[position] for position in positions]
        trained = cohort.rows(positions, cohort.parameters)
        message: Tensors = {}
        chosen = {}
        for layer in self._layers:
            base = trained[layer.base]
            sent = chosen[layer.name] = self._chosen(cohort, layer, trained)
            message[layer.base] = torch.where(per_unit(sent, base), base, torch.zeros_like(base))
            message[f"units of {layer.name}"] = sent.to(base.dtype)
        for row, client in enumerate(clients):  # one by one: their messages need not be of one size
            own = {name: values[row : row + 1] for name, values in message.items()}
            size = self._base_bytes({name: sent[row] for name, sent in chosen.items()})
            self.context.channel.uplink("base", own, [1.0], [client], size)
            self._own_bytes[0] += size

    def _chosen(self, cohort: Cohort, layer: DecomposedLayer, trained: Tensors) -> Tensor:
        """``[k, O]`` bool, the units of a layer's base that k clients send; or ``[k, O, ...]``, entries of these."""
        if not self.use_mask:
            return trained[layer.base].new_ones(trained[layer.base].shape[:2], dtype=torch.bool)
        return largest(trained[layer.mask].abs(), self.keep)

    @property
    def moves_model_after_round(self) -> bool:
        """The bases are averaged over those who sent them."""
        return True

    @torch.no_grad()
    def end_round(self, plan: RoundPlan) -> None:
        """The server takes the mean of every unit over the clients that sent it."""
        if self.send_base:
            sums, _ = self.context.channel.sum("base")
            for layer in self._layers:
                senders = sums[f"units of {layer.name}"]
                sent = senders > 0
                weight = layer.weight
                mean = sums[layer.base] / per_unit(senders.clamp(min=1), weight)
                weight.copy_(torch.where(per_unit(sent, weight), mean, weight))
                self._sent[layer.name] = sent.cpu()
        self._count_bytes(plan.task)
        context = self.context
        if self.borrows and context.client_clocks and plan.round + 1 < context.num_rounds:
            self._hear_beginners(plan)
        super().end_round(plan)

    def _count_bytes(self, task: int) -> None:
        """Add what all processes' clients have sent and received since the last time to the task's figures."""
        everyones = self.context.everyones(list(self._own_bytes))
        self._own_bytes = [0, 0]
        while len(self._bytes) <= task:
            self._bytes.append([0, 0])
        for direction in (0, 1):
            self._bytes[task][direction] += sum(theirs[direction] for theirs in everyones)

    @torch.no_grad()
    def end_task(self, plan: RoundPlan) -> None:
        """The clients of the last round send what they have learned, for the next task."""
        context = self.context
        if self.borrows and not context.client_clocks and not context.is_last(plan.task):
            self._hear(dict.fromkeys(context.own_clients(plan.task, plan.clients), plan.task), plan)

    def _hear_beginners(self, plan: RoundPlan) -> None:
        """Before they begin tasks in the next round, clients send what they learned in their last."""
        context = self.context
        learned: dict[int, int] = {}
        for part in context.plan(plan.round + 1).parts:
            clients = context.own_clients(part.task, part.clients)
            latest = zip(clients, self._tasks.latest(clients), strict=True)
            learned |= {client: task for client, task in latest if 0 <= task < part.task}
        self._hear(learned, plan)

    def _hear(self, learned: Mapping[int, int], plan: RoundPlan) -> None:
        """Put the adaptive weights of some of this process's clients, and of the others', into the knowledge base.

        Args:
            learned: client -> the task in which it learned them.
            plan: the round that is over.
        """
        context = self.context
        for client, task in learned.items():
            model = context.clients.get("model", client)
            if model is None or self._tasks.latest([client])[0] != task:
                continue  # it has not come out of local training with usable weights
            message = self._lent(model)
            size = _adaptive_bytes(message)
            stacked = {name: values[None] for name, values in message.items()}
            context.channel.uplink_individually("adaptive", stacked, [client], size)
            self._own_bytes[0] += size
        collected = context.channel.collect_individually("adaptive")
        self._count_bytes(plan.task)
        if not collected:
            return
        apart = context.client_clocks  # then each may be followed by a newer one of its owner's
        for owners in [[owner] for owner in collected] if apart else [list(collected)]:
            messages = [collected[owner] for owner in owners]
            self._knowledge.append(
                {
                    "task": self._tasks.latest(owners)[0] + 1,
                    "round": plan.round + 1,
                    "clients": owners,
                    "bytes": [_adaptive_bytes(message) for message in messages],
                    "layers": {
                        layer.name: SparseRows.of([message[layer.adaptive].flatten() for message in messages])
                        for layer in self._layers
                    },
                }
            )

    def _lent(self, model: Mapping[str, Tensor]) -> Tensors:
        """The adaptive weights that a client sends, zeros where it does not."""
        values = [self._above_threshold(model[layer.adaptive]) for layer in self._layers]
        if self.top_kappa < 1:
            flat = torch.cat([part.flatten() for part in values])
            chosen = largest(flat.abs(), self.top_kappa).split([part.numel() for part in values])
            values = [torch.where(c.view(part.shape), part, 0) for part, c in zip(values, chosen, strict=True)]
        return {layer.adaptive: part for layer, part in zip(self._layers, values, strict=True)}

    # Tests.

    def _borrow(self, client: int, task: int, model: Tensors) -> None:
        """Put what the client borrowed in the task into its adaptive weights: the network may be about to lend it the
        knowledge of another one."""
        if not self.borrows:
            return
        held = self._borrowed(client, task)
        usable = self._usable(client, task)
        for layer in self._layers:
            attention, adaptive = model[layer.attention], model[layer.adaptive]
            weights = attention * usable.to(attention)
            for part, first in zip(held, _starts(held), strict=True):
                borrowed = part["layers"][layer.name].combined(weights[first : first + len(part["clients"])])
                adaptive = adaptive + borrowed.view(adaptive.shape)
            model[layer.adaptive] = adaptive
            model[layer.attention] = torch.zeros_like(attention)

    # Reports and checkpoints.

    def _row(self, task: int, client: int, layer: DecomposedLayer, model: Mapping[str, Tensor]) -> dict[str, Any]:
        """As for APD, with the clients whose knowledge could be borrowed, the tasks in which they learned it, and the
        attention to each (Figure 5b)."""
        row = super()._row(task, client, layer, model)
        held = self._borrowed(client, task) if self.borrows else []
        entries = [(owner, part["task"] - 1) for part in held for owner in part["clients"]]
        others = [number for number, (owner, _) in enumerate(entries) if owner != client]
        attention = model[layer.attention].tolist() if others else []
        return {
            **row,
            "sources": " ".join(str(entries[number][0]) for number in others),
            "source_tasks": " ".join(str(entries[number][1]) for number in others),
            "attention": " ".join(f"{attention[number]:.6g}" for number in others),
        }

    def client_storage(self) -> int:
        """As for APD, and every knowledge base."""
        return super().client_storage() + sum(sum(held["bytes"]) for held in self._knowledge)

    def report(self) -> Report:
        """As for APD, and bytes per task: what all clients sent (C2S) and received (S2C) over all of its rounds, the
        mean over tasks and one by one."""
        report = super().report()
        sent, received = ([of_task[direction] for of_task in self._bytes] for direction in (0, 1))
        of_bytes = {
            "c2s_bytes_per_task": sum(sent) / max(len(sent), 1),
            "s2c_bytes_per_task": sum(received) / max(len(received), 1),
            "c2s_bytes_of_tasks": sent,
            "s2c_bytes_of_tasks": received,
        }
        return Report({**report.figures, **of_bytes}, report.rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, with the rows of knowledge bases as objects again."""
        super().load_state_dict(state)
        for held in self._knowledge:
            held["layers"] = {name: SparseRows(**rows) for name, rows in held["layers"].items()}
        self._lends = None


def _starts(parts: Sequence[Mapping[str, Any]]) -> list[int]:
    """Number of the first entry of each part of a knowledge base."""
    sizes = [len(part["clients"]) for part in parts]
    return [sum(sizes[:number]) for number in range(len(parts))]


def _adaptive_bytes(message: Mapping[str, Tensor]) -> int:
    """Bytes of a client's adaptive weights as they are sent."""
    entries = sum(int(torch.count_nonzero(values)) for values in message.values())
    some = next(iter(message.values()))
    return message_bytes(entries, sum(values.numel() for values in message.values()), some.element_size())
