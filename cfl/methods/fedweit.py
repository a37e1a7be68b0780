"""FedWeIT: federated weighted inter-client transfer (Yoon et al., ICML 2021)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.methods.apd import APD, Tensors
from cfl.methods.base import Report
from cfl.methods.components.sparse import SparseRows, largest, message_bytes
from cfl.methods.context import Context
from cfl.models.decomposition import DecomposedLayer, per_unit
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.moving import moved
from cfl.runtime.option_checks import check_choices, check_numbers


class FedWeIT(APD):
    """Decomposes clients' weights, exchanges parts of the base, and lets clients use others' adaptive weights::

        theta_c^(t) = B_c * sigmoid(m_c^(t)) + A_c^(t) + sum_{j != c} alpha_{c,j}^(t) A_j^(t-1)        (eq 1)

    trained by the loss of :class:`APD` (eq 2), whose options it has. alpha is one factor per layer and entry of the
    knowledge base. Other clients' adaptive weights are constants in the loss and take no part in consolidation.

    Each client has its own base. After local training client c sends the rows of ``B_c`` of the output units whose mask
    logits are the largest in absolute value, a share ``keep`` of each layer, with their indices. The server's G is the
    mean of every unit over the clients that sent it (see ``base_mean``). In the next round clients replace their units
    by those of G and keep their own values of units that no client sent. In the first round they all receive the
    network's initial base. At the end of a task the clients of its last round (see ``lenders``) send A, without entries
    at or below ``threshold`` and, with ``top_kappa``, only its largest entries. These form the knowledge base of the
    next task, which a client receives when it begins that task; its own entry has no effect. Earlier tasks are tested
    as in APD, with the knowledge and the attention with which they were learned.

    Differs from the paper: the loss has weight decay and half of lambda_2 (as in the authors' code; see
    ``consolidation`` of :class:`APD`). By default B is not multiplied with the mask before it is sent, and means are
    over the senders of a unit (both as in the code; the paper's form, ``base_mean: clients``, shrinks B), and A comes
    from the clients of a task's last round (the code), not from those of the next one's first (``lenders: next_round``,
    Algorithm 2). Differs from the code: entries of the knowledge base are in the order of the clients' ids and without
    the client's own (there: in that of threads, and with it), m is trained by the loss (there it gets no gradient), and
    ``keep`` is the paper's 30 %, with which its costs are reported (there 70 %). Of O units ``ceil(keep O)`` are sent,
    there one fewer. Masks, biases and attention start every task from new numbers; there all tasks of all clients start
    from the same, because the seed of the initialiser is fixed. Clients that are not sampled in a round do not train in
    it; see ``communicating``.

    With clocks of their own (``schedule.clock_spread``; the paper's Algorithm 3), a client sends A of a finished task
    at the beginning of the first round of a later task in which it is sampled. A client that begins a task receives the
    newest known A of every other client, whatever task it belongs to. If all clocks agree and all clients take part,
    that is the same as above.

    Sends, in place of the model: up, the values of the kept units and a bit per unit; down, the values of the averaged
    units and a bit per unit, in the first round of all units. Between tasks, A up, read client by client, and down all
    A except the client's own: values with their indices, or all values if that is smaller. Extra memory per client: as
    for APD, and the knowledge base of every task, sparse. Extra compute: as for APD, and one product of attention and
    knowledge base per step. Scenarios and optimizers: those of APD.

    Args:
        keep: share of each layer's output units that a client sends, in (0, 1].
        send_base: whether bases are exchanged at all ("w/o B communication" in the paper's Table 6).
        send_adaptive: whether there is a knowledge base ("w/o A communication").
        use_adaptive: whether there are adaptive weights ("w/o A"); without, there is no knowledge base either.
        use_mask: whether there are masks ("w/o m"); without, all units are sent.
        communicating: share of a round's clients that receive the base and send, drawn in every round, in (0, 1], at
            least one client. The others train as well, with their own base. With ``schedule.clients_per_round: 1.0``
            all clients then train in every round, as in the code. All clients know the network's
            initial base, and receive the knowledge base when they begin a task (the code; in Algorithm 2 when they
            first communicate in the task).
        top_kappa: share of the entries of A that may be sent, the largest of all layers, in (0, 1] (Figure 5a).
        attention: initial attention: ``random``, drawn as masks are, of variance 1 / J for J entries (the code),
            ``uniform``, one over the number of entries that the client may use (the paper), or ``zeros``.
        base_mean: the server's G is, for every unit that was sent, the mean of B over its ``senders`` (the code), or
            the sum of ``B sigmoid(m)`` over its senders divided by the number of all ``clients`` of the round (the
            paper, Algorithm 2, line 11).
        lenders: A comes from the clients of a task's ``last_round`` (the code), or from those clients of the
            ``next_round`` that have trained in the task (the paper, Algorithm 2, line 6). The same if all clients take
            part in every round, and without effect if clients have clocks of their own.
        options: those of :class:`APD`.

    Raises:
        ConfigError: for values other than these; if not all clients of a round communicate although they have clocks
            of their own or drop out; otherwise as :class:`APD`.
    """

    asks_after_tasks = True
    moves_model_after_round = True
    state = ("_sent", "_knowledge", "_bytes")

    def __init__(
        self,
        *,
        keep: float = 0.3,
        send_base: bool = True,
        send_adaptive: bool = True,
        use_adaptive: bool = True,
        use_mask: bool = True,
        communicating: float = 1.0,
        top_kappa: float = 1.0,
        attention: Literal["random", "uniform", "zeros"] = "random",
        base_mean: Literal["senders", "clients"] = "senders",
        lenders: Literal["last_round", "next_round"] = "last_round",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_numbers(self._key, "(0, 1]", keep=keep, top_kappa=top_kappa, communicating=communicating)
        check_choices(self._key, ("random", "uniform", "zeros"), attention=attention)
        check_choices(self._key, ("senders", "clients"), base_mean=base_mean)
        check_choices(self._key, ("last_round", "next_round"), lenders=lenders)
        self.base_mean, self.lenders = base_mean, lenders
        self.keep, self.top_kappa = keep if use_mask else 1.0, top_kappa
        self.communicating = communicating
        self.send_base = send_base
        self.borrows = self.individual_uplinks = send_adaptive and use_adaptive
        self.use_adaptive, self.use_mask = use_adaptive, use_mask
        self.retroactive = self.retroactive and use_adaptive
        self.attention = attention
        self._sent: Tensors = {}
        self._knowledge: list[dict[str, Any]] = []
        self._loaded: tuple[int, int] | None = None
        self._own_bytes = [0, 0]
        self._bytes: list[list[int]] = []

    # Before training.

    def keeps_local(self, name: str) -> bool:
        """Keep all tensors local; units of bases are sent in the method's own messages."""
        return True

    def setup(self, context: Context) -> None:
        """Set up as for APD; the first round's base is sent whole."""
        super().setup(context)
        if self.communicating < 1 and (context.client_clocks or context.channel.loses_messages):
            valid = "1 with schedule.clock_spread or schedule.client_dropout"
            raise ConfigError(f"{self.key}.communicating", self.communicating, valid)
        self._sent = {x.name: torch.ones(len(x.weight), dtype=torch.bool) for x in self._layers}
        if self.borrows and context.num_tasks > 1:
            # Zeros for the trial of engines, because reading the knowledge base takes most of the time in all tasks but
            # the first. The first cohort removes them. They are written explicitly, because memory that was never
            # written is read faster.
            for layer in self._layers:
                room = layer.weight.new_empty(self._knowledge_entries(), *layer.weight.shape)
                layer.parts.knowledge.entries = room.zero_()

    def _knowledge_entries(self) -> int:
        """Number of entries: the most clients that send in a round, or all clients if they have clocks of their own."""
        context = self.context
        return context.num_clients if context.client_clocks else self._number_of_senders(context.most_clients)

    def _number_of_senders(self, clients: int) -> int:
        return max(1, round(self.communicating * clients))

    def _senders(self, plan: RoundPlan) -> tuple[int, ...]:
        """The clients of a round that receive the base and send, ascending."""
        if self.communicating == 1 or not plan.clients:
            return plan.clients
        generator = numpy_generator(self.context.seed, "clients that communicate", plan.round)
        chosen = generator.choice(plan.clients, self._number_of_senders(len(plan.clients)), replace=False)
        return tuple(np.sort(chosen).tolist())

    def _communicate(self, cohort: Cohort) -> list[bool]:
        """For each of the cohort's clients, whether it receives the base and sends in its round."""
        if self.communicating == 1:
            return [True] * len(cohort.clients)
        senders = self._senders(self.context.plan(cohort.round))
        return [client in senders for client in cohort.clients]

    # Clients start.

    @torch.no_grad()
    def start_clients(self, cohort: Cohort) -> None:
        """Start clients as for APD, with the task's knowledge base."""
        super().start_clients(cohort)
        if not self.borrows:
            return
        began = self.context.began(cohort.task, cohort.clients[0])  # the same round for all clients of the cohort
        if self._loaded != (cohort.task, began):
            self._load_knowledge(cohort.clients[0], cohort.task)
            self._loaded = cohort.task, began
        usable = torch.stack([self._usable(client, cohort.task) for client in cohort.clients])
        for layer in self._layers:
            cohort.buffers[layer.others][: len(usable)].copy_(usable)

    def _load_knowledge(self, client: int, task: int) -> None:
        """Load the knowledge base of a client's task into the network."""
        held = self._borrowed(client, task)
        for layer in self._layers:
            base = layer.weight
            rows = [part["layers"][layer.name].dense(len(part["clients"])).to(base) for part in held]
            layer.parts.knowledge.entries = torch.cat(rows).view(-1, *base.shape) if rows else None

    def _borrowed(self, client: int, task: int) -> list[dict[str, Any]]:
        """The knowledge base of a client's task, in the order of its attention: adaptive weights at the ends of earlier
        tasks."""
        if not self.context.client_clocks:
            return [part for part in self._knowledge if part["task"] == task]
        began = self.context.began(task, client)
        newest = {part["clients"][0]: part for part in self._knowledge if part["round"] <= began}
        return [newest[owner] for owner in sorted(newest)]

    def _usable(self, client: int, task: int) -> Tensor:
        """``[J]``, 1 for the entries of a task's knowledge base that the client uses."""
        factors = [float(owner != client) for part in self._borrowed(client, task) for owner in part["clients"]]
        factors += [0.0] * (self._knowledge_entries() - len(factors))
        return torch.tensor(factors, dtype=self._layers[0].weight.dtype)

    def _receive(self, cohort: Cohort) -> None:
        """Replace units of clients' bases by those that the server sends."""
        if not self.send_base:
            return
        receives = self._communicate(cohort)
        receivers = moved(torch.tensor(receives), self._layers[0].weight.device)
        for layer in self._layers:
            base = cohort.parameters[layer.base]
            sent = per_unit(self._sent[layer.name].to(base.device), layer.weight)
            base.copy_(torch.where(sent & receivers.view(-1, *[1] * layer.weight.ndim), layer.weight, base))
        self._down("base", self._base_bytes(self._sent), sum(receives))

    def _begin(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Begin the task as for APD, and send clients its knowledge base."""
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
                if part["round"] > since:  # the client already has earlier entries
                    sizes = zip(part["clients"], part["bytes"], strict=True)
                    self._down("knowledge", sum(size for owner, size in sizes if owner != client), 1)

    def _base_bytes(self, sent: Mapping[str, Tensor]) -> int:
        """Bytes of a message with units or entries of each layer's base, and a bit per unit to say which.

        Args:
            sent: layer -> ``[O]`` bool for whole units, or ``[O, ...]`` for entries; both sides know the entries once
                they know the units.
        """
        total = 0
        for layer in self._layers:
            weight, chosen = layer.weight, sent[layer.name]
            total += int(chosen.sum()) * (weight.numel() // chosen.numel()) * weight.element_size()
            total += -(-len(weight) // 8) if self.use_mask else 0
        return total

    def _down(self, topic: str, size: int, receivers: int) -> None:
        with self._counting():
            self.context.channel.downlink(topic, {}, receivers, size)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the bytes that this process's clients send and receive within the context."""
        channel = self.context.channel
        before = channel.total_uplink_bytes, channel.total_downlink_bytes
        yield
        self._own_bytes[0] += channel.total_uplink_bytes - before[0]
        self._own_bytes[1] += channel.total_downlink_bytes - before[1]

    # After local training.

    @torch.no_grad()
    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Let clients send units of their bases."""
        super().finish_clients(cohort, positions)
        sends, plan = self._communicate(cohort), self.context.plan(cohort.round)
        positions = [position for position in positions if sends[position]]
        if not self.send_base or not positions:
            return
        channel = self.context.channel
        clients = [cohort.clients[position] for position in positions]
        trained = cohort.rows(positions, cohort.parameters)
        message: Tensors = {}
        chosen = {}
        for layer in self._layers:
            base = trained[layer.base]
            sent = chosen[layer.name] = self._chosen(cohort, layer, trained)
            if self.base_mean == "clients" and self.use_mask:
                base = base * per_unit(torch.sigmoid(trained[layer.mask]), base)
            message[layer.base] = torch.where(per_unit(sent, base), base, torch.zeros_like(base))
            message[f"units of {layer.name}"] = sent.to(base.dtype)
        channel.ask(self._senders(plan))
        for row, client in enumerate(clients):  # one by one: their messages may differ in size
            own = {name: values[row : row + 1] for name, values in message.items()}
            size = self._base_bytes({name: sent[row] for name, sent in chosen.items()})
            with self._counting():
                channel.uplink("base", own, [1.0], [client], size)
        channel.ask(plan.clients)

    def _chosen(self, cohort: Cohort, layer: DecomposedLayer, trained: Tensors) -> Tensor:
        """``[k, O]`` bool, the units of a layer's base that k clients send; or ``[k, O, ...]``, entries of these."""
        if not self.use_mask:
            return trained[layer.base].new_ones(trained[layer.base].shape[:2], dtype=torch.bool)
        return largest(trained[layer.mask].abs(), self.keep)

    @torch.no_grad()
    def end_round(self, plan: RoundPlan) -> None:
        """Average every unit that some client sent."""
        if self.send_base:
            with self._counting():  # sums of integers count their bytes when they are read
                sums, clients = self.context.channel.sum("base")
            for layer in self._layers:
                senders = sums[f"units of {layer.name}"]
                sent = senders > 0
                weight = layer.weight
                count = senders.clamp(min=1) if self.base_mean == "senders" else torch.full_like(senders, clients)
                mean = sums[layer.base] / per_unit(count, weight)
                weight.copy_(torch.where(per_unit(sent, weight), mean, weight))
                self._sent[layer.name] = sent.cpu()
        self._count_bytes(plan.task)
        context = self.context
        if self.borrows and context.client_clocks and plan.round + 1 < context.num_rounds:
            self._collect_from_beginners(plan)
        super().end_round(plan)

    def _count_bytes(self, task: int) -> None:
        """Add the bytes sent and received by all processes' clients since the last call to the task's figures."""
        of_all = self.context.everyones(list(self._own_bytes))
        self._own_bytes = [0, 0]
        while len(self._bytes) <= task:
            self._bytes.append([0, 0])
        for direction in (0, 1):
            self._bytes[task][direction] += sum(theirs[direction] for theirs in of_all)

    @torch.no_grad()
    def end_task(self, plan: RoundPlan) -> None:
        """Let the clients of the last round, or of the next one, send their adaptive weights, for the next task."""
        super().end_task(plan)
        context = self.context
        if self.borrows and not context.client_clocks and not context.is_last(plan.task):
            round = plan
            if self.lenders == "next_round":  # with Poisson sampling a round may have no client
                following = map(context.plan, range(plan.round + 1, context.num_rounds))
                round = next((later for later in following if later.clients), plan)
            lenders = self._senders(round)
            self._collect_adaptive(dict.fromkeys(context.own_clients(plan.task, lenders), plan.task), plan)

    def _collect_from_beginners(self, plan: RoundPlan) -> None:
        """Let clients that begin a task in the next round send the adaptive weights of their last task."""
        context = self.context
        learned: dict[int, int] = {}
        for part in context.plan(plan.round + 1).parts:
            clients = context.own_clients(part.task, part.clients)
            latest = zip(clients, self._tasks.latest(clients), strict=True)
            learned |= {client: task for client, task in latest if 0 <= task < part.task}
        self._collect_adaptive(learned, plan)

    def _collect_adaptive(self, learned: Mapping[int, int], plan: RoundPlan) -> None:
        """Add adaptive weights of this process's clients, and of those of other processes, to the knowledge base.

        Args:
            learned: client -> the task of its adaptive weights.
            plan: the round that is over.
        """
        context = self.context
        for client, task in learned.items():
            model = context.clients.get("model", client)
            if model is None or self._tasks.latest([client])[0] != task:
                continue  # its trained weights were not finite
            message = self._message_of(model)
            size = _adaptive_bytes(message)
            stacked = {name: values[None] for name, values in message.items()}
            with self._counting():
                context.channel.uplink_individually("adaptive", stacked, [client], size)
        collected = context.channel.collect_individually("adaptive")
        self._count_bytes(plan.task)
        if not collected:
            return
        apart = context.client_clocks  # with own clocks, a client may later replace its entry
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

    def _message_of(self, model: Mapping[str, Tensor]) -> Tensors:
        """The adaptive weights that a client sends, with zeros in all other entries."""
        values = [self._above_threshold(model[layer.adaptive]) for layer in self._layers]
        if self.top_kappa < 1:
            flat = torch.cat([part.flatten() for part in values])
            chosen = largest(flat.abs(), self.top_kappa).split([part.numel() for part in values])
            values = [torch.where(c.view(part.shape), part, 0) for part, c in zip(values, chosen, strict=True)]
        return {layer.adaptive: part for layer, part in zip(self._layers, values, strict=True)}

    # Tests.

    def _borrow(self, client: int, task: int, model: Tensors) -> None:
        """Add the knowledge used in the task to the client's adaptive weights, since the network may hold the knowledge
        base of another task."""
        if not self.borrows:
            return
        held = self._borrowed(client, task)
        usable, sizes = self._usable(client, task), [len(part["clients"]) for part in held]
        for layer in self._layers:
            attention, adaptive = model[layer.attention], model[layer.adaptive]
            weights = attention * usable.to(attention)
            for part, of_part in zip(held, weights[: sum(sizes)].split(sizes), strict=True):
                adaptive = adaptive + part["layers"][layer.name].combined(of_part).view(adaptive.shape)
            model[layer.adaptive] = adaptive
            model[layer.attention] = torch.zeros_like(attention)

    # Reports and checkpoints.

    def _row(self, task: int, client: int, layer: DecomposedLayer, model: Mapping[str, Tensor]) -> dict[str, Any]:
        """As for APD, with the clients in the knowledge base, the tasks in which they learned their entries, and the
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
        """As for APD, and bytes of all knowledge bases."""
        return super().client_storage() + sum(sum(held["bytes"]) for held in self._knowledge)

    def report(self) -> Report:
        """As for APD, and bytes per task: sent (C2S) and received (S2C) by all clients over all of its rounds, for each
        task and as the mean over tasks."""
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
        """Restore the state, and the sparse rows of knowledge bases as objects."""
        super().load_state_dict(state)
        self._own_bytes = [0, 0]  # they may be of a round that an error has ended
        for held in self._knowledge:
            held["layers"] = {name: SparseRows(**rows) for name, rows in held["layers"].items()}
        for layer in self._layers:
            layer.parts.knowledge.entries = None  # the next cohort loads that of its task
        self._loaded = None


def _adaptive_bytes(message: Mapping[str, Tensor]) -> int:
    """Bytes of the message with a client's adaptive weights."""
    entries = sum(int(torch.count_nonzero(values)) for values in message.values())
    some = next(iter(message.values()))
    return message_bytes(entries, sum(values.numel() for values in message.values()), some.element_size())
