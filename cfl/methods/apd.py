"""Additive parameter decomposition (Yoon et al., ICLR 2020), as in the experiments of FedWeIT's paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.federation.channel import payload_bytes
from cfl.federation.task_states import TaskStates
from cfl.methods.base import Method, Report
from cfl.methods.capabilities import crosses_tasks
from cfl.methods.context import Context
from cfl.models.decomposition import (
    DecomposedLayer,
    decompose,
    decomposed_layers,
    is_base,
    per_unit,
)
from cfl.models.initial_weights import variance_scaled
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices, check_numbers

Tensors = dict[str, Tensor]


class APD(Method):
    """Makes every weight the sum of a shared base times a task's mask, and task-adaptive weights::

        theta^(t) = B * sigmoid(m^(t)) + A^(t)                               (Yoon et al., 2020, eq 2)

    for all Linear and Conv2d layers except the head. m has one logit per output unit, A has the shape of B. To the mean
    cross-entropy of task t every client adds::

        sparsity (||A^(t)||_1 + sum_{i<t} ||A^(i)||_1) + mask_sparsity ||m^(t)||_1
        + weight_decay / 2 (||A^(t)||^2 + ||m^(t)||^2, and ||B||^2 in the first task)
        + consolidation / 2 sum_{i<t} ||B * sigmoid(m^(i)) + A^(i) - theta*^(i)||^2

    with ``theta*^(i) = B* sigmoid(m^(i)) + A*^(i)`` at the beginning of task t, before the client received the base of
    that round. All norms are sums over elements. Their gradients are added to those of the local step, before clipping
    and the optimizer. As for all methods, the reported training loss does not include them.

    B is an ordinary parameter, exchanged and averaged unless another method keeps it local (``PersonalLayers`` with
    ``["*"]``: the papers' Local-APD; ``FedProx`` beside this: FedProx-APD). The task's set, that is m, A, biases, head
    and normalisation, belongs to a client and a task and is never sent. A client begins a task in the first round of
    the task in which it is sampled. It then stores the set of its last task and starts a new one: m and biases from a
    normal distribution of variance 1 / O, cut at two deviations (FedWeIT's code), A from a third of B, and the rest,
    including the head, from its initial values. Images of an earlier task are tested with the task's stored set, the
    current B, and the entries of A above ``threshold`` in absolute value.

    Differs from the papers: losses and start values are those of FedWeIT's code, with its weight decay, which FedWeIT's
    paper does not have, and its half of lambda_2. Nothing is grouped by k-means (APD(2) is left out), gradients are not
    rescaled and no best epoch is selected. FedWeIT's code trains A of the current task only (``retroactive: false``).
    The consolidation term is then, up to rounding, ``1/2 sum_i sigmoid(m^(i))^2 (B - B*)^2``, whose cost does not grow
    with the number of tasks.

    Gradient steps along the consolidation term are stable where ``learning rate * consolidation * sum_i
    sigmoid(m^(i))^2`` stays below 2: a consolidation of 100 is meant for Adam.

    Sends nothing of its own. Extra memory per client: one set per learned task, of the size of the model; with
    consolidation also B* and, if retroactive, A and A* of all earlier tasks. Extra compute: about ten element-wise
    passes over the weights in every local step, and six more per earlier task if retroactive. Scenarios: task and
    domain, where the task of a test image is known; and density, where tests are computed both with the task unknown,
    using the client's current set, and with the task known. Optimizers: any.

    Args:
        sparsity: lambda_1, the factor of the L1 norm of adaptive weights, at least 0.
        mask_sparsity: factor of the L1 norm of masks, at least 0; in the papers ``sparsity``, in FedWeIT's code 0.
        consolidation: lambda_2 as in FedWeIT's code, at least 0: the loss has half of it. Equation 2 of FedWeIT's paper
            has no half; its lambda_2 is ``consolidation / 2``. Both code and paper say 100.
        weight_decay: at least 0; part of the loss, so that its effect does not depend on the optimizer.
        retroactive: whether A of earlier tasks are still trained (both papers).
        adaptive_from: A starts as a third of the ``initial`` base (FedWeIT's code), or of the ``current`` base with
            which the client begins the task.
        threshold: entries of A at or below it count as 0, in tests and in messages; ``sparsity`` if not given.
        draws: m, biases and attention start from numbers ``common`` to all clients, or each client draws its ``own``.

    Raises:
        ConfigError: for values other than these, two such methods, a network without a layer to decompose, a method
            that permutes weights, or clients that train on other samples than the task's.
    """

    scenarios = frozenset({"task", "domain", "density"})
    client_clocks = True
    asks_after_tasks = False
    pulls_with = "consolidation"
    adaptive_divisor = 3.0  # A starts from the base divided by this
    use_mask = use_adaptive = True  # options of FedWeIT
    borrows = False  # whether there is a knowledge base
    state = ("_initial", "_rows", "_client_bytes")  # clients' sets are in ``context.clients``

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
    ) -> None:
        check_numbers(self._key, "[0, inf)", sparsity=sparsity, mask_sparsity=mask_sparsity)
        check_numbers(self._key, "[0, inf)", consolidation=consolidation, weight_decay=weight_decay)
        check_numbers(self._key, "[0, inf)", or_null=True, threshold=threshold)
        check_choices(self._key, ("initial", "current"), adaptive_from=adaptive_from)
        check_choices(self._key, ("common", "own"), draws=draws)
        self.sparsity, self.mask_sparsity = sparsity, mask_sparsity
        self.consolidation, self.weight_decay = consolidation, weight_decay
        self.retroactive = retroactive
        self.adaptive_from = adaptive_from
        self.draws = draws
        self.threshold = sparsity if threshold is None else threshold
        self._initial: Tensors = {}
        self._rows: list[dict[str, Any]] = []
        self._client_bytes: dict[int, int] = {}
        self._stored_entries: dict[int, tuple[int, int]] = {}
        self._beginners: frozenset[int] = frozenset()
        self._anchor: Tensors = {}
        self._strength: Tensors = {}
        self._earlier_gradients: Tensors = {}

    @property
    def _key(self) -> str:
        return f"methods.{self._topic}"

    @property
    def _topic(self) -> str:
        return type(self).__name__.lower()

    # Before training.

    def extend_network(self, network: nn.Module) -> None:
        """Decompose the weights."""
        if decomposed_layers(network):
            raise ConfigError("methods", type(self).__name__, "one method that decomposes weights")
        decompose(network, self.use_mask, self.use_adaptive, self.borrows, self.retroactive)

    def setup(self, context: Context) -> None:
        """Give the network the first task's set, and store the initial values for later tasks."""
        super().setup(context)
        network = context.network
        # Methods that look back are refused: all tensors but the bases belong to a single task.
        backward = [
            name
            for name, method in context.methods.items()
            if method.looks_back or (crosses_tasks(method) and not method.shared_only)
        ]
        if backward:
            valid = f"no method that looks back at earlier tasks beside {type(self).__name__}"
            raise ConfigError("methods", backward, valid)
        if context.exposure != "sequential":
            valid = f"sequential while {type(self).__name__} has weights for every task"
            raise ConfigError("data.exposure", context.exposure, valid)
        self._layers = decomposed_layers(network)
        if not self._layers:
            valid = "a network with a Linear or Conv2d layer before its head"
            raise ConfigError("model.network", type(network).__name__, valid)
        for layer in self._layers:
            layer.parts.reserve(self._knowledge_entries(), context.num_tasks - 1)
        self._tasks = TaskStates(context.clients, self._topic)
        self._shares_base = self._layers[0].base in context.shared_parameters
        without = {name for layer in self._layers for name in (layer.base, layer.earlier, layer.others)}
        tensors = context.state_tensors()
        self._set = [name for name in tensors if name not in without]
        drawn = {name for layer in self._layers for name in self._drawn_parts(layer)}
        adaptive = {layer.adaptive for layer in self._layers}
        self._initial = {
            name: tensor.detach().clone()
            for name, tensor in tensors.items()
            if is_base(name) or name in set(self._set) - drawn - adaptive
        }
        with torch.no_grad():
            for name, value in self._fresh(0, 0).items():
                tensors[name].copy_(value)

    def _knowledge_entries(self) -> int:
        """Entries of the knowledge base; the method has none."""
        return 0

    def keeps_local(self, name: str) -> bool:
        """Keep all parameters and buffers local, except the base."""
        return not is_base(name)

    def _drawn_parts(self, layer: DecomposedLayer) -> list[str]:
        """Names of a layer's vectors that start from random values."""
        parts = [layer.mask if self.use_mask else None, layer.bias, layer.attention if self.borrows else None]
        return [name for name in parts if name is not None]

    def _fresh(self, task: int, client: int) -> Tensors:
        """The set with which a client begins a task, without A if that starts from the current base."""
        seed, tensors = self.context.seed, self.context.state_tensors()
        own = (client,) if self.draws == "own" else ()
        found = {name: value for name, value in self._initial.items() if not is_base(name)}
        for number, layer in enumerate(self._layers):
            for part, name in enumerate(self._drawn_parts(layer)):
                generator = torch_generator(seed, "parameters of a task", task, number, part, *own)
                found[name] = variance_scaled(tensors[name].detach(), generator)
            if self.use_adaptive:
                found[layer.adaptive] = self._initial[layer.base] / self.adaptive_divisor
        return found

    # Clients start.

    @torch.no_grad()
    def start_clients(self, cohort: Cohort) -> None:
        """Let clients begin the task if they have not trained in it yet, and store the set of their last task."""
        latest = self._tasks.latest(cohort.clients)
        beginners = [position for position, task in enumerate(latest) if task != cohort.task]
        self._beginners = frozenset(beginners)
        # Local steps write only the rows of earlier tasks. The other rows must be zero, but a cohort whose clock was
        # further ahead may have written them, and clipping may have multiplied them by NaN.
        for room in self._earlier_gradients.values():
            room[:, cohort.task :] = 0
        experienced = [position for position in beginners if latest[position] >= 0]
        if experienced:
            self._store_sets(cohort, experienced, [latest[position] for position in experienced])
        self._anchor = self._anchors(cohort, experienced, latest)
        self._strength = {}
        if self._anchor and not self.retroactive:
            self._strength = {x.name: self._anchor[f"gates {x.name}"].square().sum(1) for x in self._layers}
        self._receive(cohort)
        self._begin(cohort, beginners)

    def _receive(self, cohort: Cohort) -> None:
        """Receive messages beside the global model; APD has none."""

    def _store_sets(self, cohort: Cohort, positions: Sequence[int], tasks: Sequence[int]) -> None:
        """Store the sets of some clients as they were after their last training."""
        clients = [cohort.clients[position] for position in positions]
        present: Tensors = {**cohort.parameters, **cohort.buffers}
        stored = {name: present[name][positions] for name in self._set}
        above = torch.zeros(len(positions), dtype=torch.int64, device=next(iter(stored.values())).device)
        for layer in self._layers if self.use_adaptive else ():
            above += (stored[layer.adaptive].abs() > self.threshold).flatten(1).sum(1)
            if self.retroactive:
                values = stored.pop(layer.adaptive)
                for row, (position, task) in enumerate(zip(positions, tasks, strict=True)):
                    earlier = cohort.parameters[layer.earlier][position].clone()
                    earlier[task] = values[row]
                    cohort.begin_with(position, {layer.earlier: earlier})
        self._tasks.store(clients, tasks, {**stored, "entries above the threshold": above})

    def _anchors(self, cohort: Cohort, experienced: Sequence[int], latest: Sequence[int]) -> Tensors:
        """The anchors of the consolidation term: per layer the base ``[k, ...]`` and the gates sigmoid(m) of earlier
        tasks ``[k, T - 1, O]``, zeros for tasks that a client has not learned; if retroactive, their A as well."""
        if self.consolidation == 0 or cohort.task == 0:
            return {}
        clients, tasks = self.context.clients, self.context.num_tasks
        nothing: Tensors = {}
        bases = {layer.base: cohort.parameters[layer.base][0].detach() for layer in self._layers}
        for layer in self._layers:
            base = bases[layer.base]
            nothing[f"base {layer.name}"] = torch.zeros_like(base)
            nothing[f"gates {layer.name}"] = base.new_zeros(tasks - 1, len(base))
            if self.retroactive:
                nothing[f"earlier {layer.name}"] = base.new_zeros(tasks - 1, *base.shape)
        anchor = clients.gather(f"{self._topic} anchor", cohort.clients, nothing)
        if not experienced:
            return anchor
        if self._shares_base:
            ended = clients.gather(f"{self._topic} base", cohort.clients, bases)
        else:
            ended = {name: cohort.parameters[name].detach() for name in bases}
        for layer in self._layers:
            for position in experienced:
                mask = self._held_mask(cohort, layer, position)
                anchor[f"gates {layer.name}"][position, latest[position]] = 1.0 if mask is None else torch.sigmoid(mask)
                anchor[f"base {layer.name}"][position] = ended[layer.base][position]
                if self.retroactive:
                    anchor[f"earlier {layer.name}"][position] = cohort.parameters[layer.earlier][position]
        return anchor

    def _held_mask(self, cohort: Cohort, layer: DecomposedLayer, position: int) -> Tensor | None:
        """The mask m of a client's last task in the consolidation term; None if weights have no masks."""
        return cohort.parameters[layer.mask][position] if self.use_mask else None

    def _begin(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Give clients the set with which they begin the cohort's task."""
        for position in positions:
            fresh = self._fresh(cohort.task, cohort.clients[position])
            if self.use_adaptive and self.adaptive_from == "current":
                for layer in self._layers:
                    fresh[layer.adaptive] = cohort.parameters[layer.base][position] / self.adaptive_divisor
            cohort.begin_with(position, fresh)

    # Local steps.

    @property
    def changes_gradients(self) -> bool:
        """Whether any term is active. Consolidation is active only if there is an earlier task."""
        return bool(self.weight_decay or self.sparsity or self.mask_sparsity or self._anchor)

    @torch.no_grad()
    def adjust_gradients(self, cohort: Cohort) -> None:
        """Add the gradients of all terms."""
        gradients, counted = cohort.gradients, self._counted(cohort)
        for layer in self._layers:
            if layer.base not in gradients:  # the network does not use the layer, or it is frozen
                continue
            where = counted.get(layer.name)
            if layer.adaptive in gradients:
                values = cohort.parameters[layer.adaptive]
                self._add_decay(gradients[layer.adaptive], values, self.sparsity, self.weight_decay, where)
            if layer.mask in gradients:
                values = cohort.parameters[layer.mask]
                self._add_decay(gradients[layer.mask], values, self.mask_sparsity, self.weight_decay)
            if cohort.task == 0:
                self._add_decay(gradients[layer.base], cohort.parameters[layer.base], 0.0, self.weight_decay)
            elif self.retroactive:
                self._add_terms_of_earlier_tasks(cohort, layer, gradients[layer.base], where)
            elif self._anchor:
                moved = cohort.parameters[layer.base] - self._anchor[f"base {layer.name}"]
                strength = per_unit(self._strength[layer.name], moved)
                gradients[layer.base].addcmul_(strength, moved, value=self.consolidation)

    def _counted(self, cohort: Cohort) -> Tensors:
        """Layer -> ``[*shape]``, 1 for entries of adaptive weights that are in the L1 norm of this step, else 0.

        For layers that are not listed, all entries count."""
        return {}

    @staticmethod
    def _add_decay(gradient: Tensor, values: Tensor, l1: float, l2: float, where: Tensor | None = None) -> None:
        if l2:
            gradient.add_(values, alpha=l2)
        if l1 and where is not None:
            gradient.addcmul_(values.sign(), where, value=l1)
        elif l1:
            gradient.add_(values.sign(), alpha=l1)

    def _add_terms_of_earlier_tasks(
        self, cohort: Cohort, layer: DecomposedLayer, of_base: Tensor, where: Tensor | None
    ) -> None:
        """Add the gradients of earlier tasks' terms with respect to their adaptive weights and to the base."""
        parameter = cohort.parameters[layer.earlier]
        room = self._earlier_gradients.get(layer.name)
        if room is None or len(room) < len(parameter) or room.device != parameter.device:
            room = self._earlier_gradients[layer.name] = torch.zeros_like(parameter)
        gradient = room[: len(parameter)]
        moved = cohort.parameters[layer.base] - self._anchor[f"base {layer.name}"] if self._anchor else None
        l1 = self.sparsity if where is None else self.sparsity * where
        for task in range(cohort.task):
            torch.sign(parameter[:, task], out=gradient[:, task]).mul_(l1)
            if moved is None:
                continue
            gates = per_unit(self._anchor[f"gates {layer.name}"][:, task], moved)
            drift = torch.addcmul(parameter[:, task] - self._anchor[f"earlier {layer.name}"][:, task], gates, moved)
            gradient[:, task].add_(drift, alpha=self.consolidation)
            of_base.addcmul_(gates, drift, value=self.consolidation)
        parameter.grad = gradient  # autograd computes none for it

    # Clients finish.

    @torch.no_grad()
    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Store that clients have begun the task, and the anchors of their earlier tasks."""
        states = self.context.clients
        # A client that trained to NaN is not among ``positions`` and begins the task again.
        started = [position for position in positions if position in self._beginners]
        if started:
            clients = [cohort.clients[position] for position in started]
            self._tasks.begin(clients, cohort.task)
            if self._anchor:
                states.scatter(f"{self._topic} anchor", clients, cohort.rows(started, self._anchor))
        if self._shares_base and self.consolidation > 0 and not self.context.is_last(cohort.task):
            clients = [cohort.clients[position] for position in positions]
            bases = cohort.rows(positions, {layer.base: cohort.parameters[layer.base] for layer in self._layers})
            states.scatter(f"{self._topic} base", clients, bases)

    # Tests.

    @torch.no_grad()
    def recall(self, client: int, task: int | None, model: Tensors) -> Tensors:
        """The task's set with the current base; the current set if the task is unknown or not learned yet."""
        at = self._tasks.latest([client])[0]
        asked = at if task is None else task
        stored = None if asked == at else self._tasks.stored(client, asked)
        found = dict(model)
        if stored is not None:
            found |= {name: value.to(model[name].device) for name, value in stored.items() if name in model}
        for layer in self._layers if self.use_adaptive else ():
            values = found[layer.adaptive]
            if stored is not None and self.retroactive:
                values = model[layer.earlier][asked]
            found[layer.adaptive] = self._above_threshold(values)
        self._borrow(client, at if stored is None else asked, found)
        return found

    @torch.no_grad()
    def as_tested(self, model: Tensors) -> Tensors:
        """The model without the entries of A at or below the threshold."""
        adaptive = [layer.adaptive for layer in self._layers if self.use_adaptive]
        return model | {name: self._above_threshold(model[name]) for name in adaptive}

    def _borrow(self, client: int, task: int, model: Tensors) -> None:
        """Add to ``model``, in place, the knowledge that the set of ``task`` uses; APD has none."""

    def _above_threshold(self, values: Tensor) -> Tensor:
        return torch.where(values.abs() > self.threshold, values, torch.zeros_like(values))

    # Reports and checkpoints.

    @torch.no_grad()
    def end_round(self, plan: RoundPlan) -> None:
        """If clients have their own clocks, record the sparsity of the sets of all clients whose task is over."""
        if self.context.client_clocks:
            self._record(plan)

    @torch.no_grad()
    def end_task(self, plan: RoundPlan) -> None:
        """Record the sparsity of all clients' sets, also if no client has joined the round."""
        if not self.context.client_clocks:
            self._record(plan)

    def _record(self, plan: RoundPlan) -> None:
        context = self.context
        due = set(context.due(plan))
        if not due:  # the case in most rounds
            return
        ending = [client for client in context.clients.holders("model") if client in due]
        for client, at in zip(ending, self._tasks.latest(ending), strict=True):
            if at == context.task_at(plan.round, client):  # others were recorded when their own task ended
                model = context.clients.get("model", client) or {}
                self._client_bytes[client] = self._entries(client, at, {**context.state_tensors(), **model})
                self._rows += [self._row(at, client, layer, model) for layer in self._layers]

    def _row(self, task: int, client: int, layer: DecomposedLayer, model: Mapping[str, Tensor]) -> dict[str, Any]:
        adaptive, mask = model.get(layer.adaptive), model.get(layer.mask)
        above = None if adaptive is None else (adaptive.abs() > self.threshold).double().mean().item()
        gate = None if mask is None else torch.sigmoid(mask).double().mean().item()
        return {"task": task, "client": client, "layer": layer.name, "adaptive_share": above, "mean_gate": gate}

    def _entries(self, client: int, at: int, model: Mapping[str, Tensor]) -> int:
        """Bytes of a client's base and of the adaptive weights of all its tasks, without zeros."""
        total = 0
        for layer in self._layers:
            size = model[layer.base].element_size()
            total += size * int(torch.count_nonzero(model[layer.base]))
            for name in (layer.adaptive, layer.earlier):
                if name in model:
                    total += size * int((model[name].abs() > self.threshold).sum())
        if not self.retroactive:
            # Sets that were stored do not change: only those stored since the last time are read.
            counted, entries = self._stored_entries.get(client, (0, 0))
            for task in range(counted, at):
                stored = self._tasks.stored(client, task)
                entries += 0 if stored is None else int(stored["entries above the threshold"])
            self._stored_entries[client] = (at, entries)
            total += model[self._layers[0].base].element_size() * entries
        return total

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        super().load_state_dict(state)
        self._stored_entries = {}

    def report(self) -> Report:
        """The model's size, and a row per task, client that learned it and layer.

        ``model_bytes``: bytes of all clients' bases and of their adaptive weights above the threshold, without zeros,
        after the last finished task (the papers' model size). ``adaptive_share`` in a row is the share of A above the
        threshold, and ``mean_gate`` the mean of sigmoid(m), both at the task's end; None if the layer has none. In the
        summary ``adaptive_share`` is the mean over that task's sets.
        """
        sizes = {layer.name: layer.weight.numel() for layer in self._layers}
        last = [row for row in self._rows if row["task"] == self._rows[-1]["task"]]
        known = [(row["adaptive_share"], sizes[row["layer"]]) for row in last if row["adaptive_share"] is not None]
        share = sum(share * size for share, size in known) / sum(size for _, size in known) if known else None
        figures = {"model_bytes": sum(self._client_bytes.values()), "adaptive_share": share}
        return Report(figures, self._rows)

    def client_storage(self) -> int:
        """Bytes of the stored sets and of their anchors."""
        states, tensors = self.context.clients, self.context.state_tensors()
        adaptive = {layer.adaptive for layer in self._layers} if self.retroactive else set()
        one = payload_bytes({name: tensors[name] for name in self._set if name not in adaptive})
        bases = payload_bytes({layer.base: tensors[layer.base] for layer in self._layers})
        earlier = payload_bytes({x.earlier: tensors[x.earlier] for x in self._layers if self.retroactive})
        total = one * max(self._tasks.counts(self.context.num_tasks).values(), default=0)
        total += (bases + earlier) * bool(states.holders(f"{self._topic} anchor"))
        total += bases * bool(states.holders(f"{self._topic} base"))
        return total + 8 * bool(states.holders(f"{self._topic} task"))
