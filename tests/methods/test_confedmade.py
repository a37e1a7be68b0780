"""CONFEDMADE against a run written out, equation by equation, and what it sends."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_cli
from support.naive import local_batches
from support.naive_decomposed import Naive, Owner, Tensors, clones, leaf, leaves, renamed
from support.tiny import Poison, double, fit, kept_by, mlp, permuted, sgd, source, tiny_client, tiny_data
from torch import Tensor

from cfl.data.datamodule import FederatedDataModule
from cfl.data.schedule import RoundPlan
from cfl.data.sequences import FixedTasks
from cfl.data.sources import Binarised
from cfl.data.streams import Permuted
from cfl.engines import EngineOptions
from cfl.engines.cohort import Cohort
from cfl.methods import CONFEDMADE, FedWeIT, Method
from cfl.models import MADE
from cfl.models.decomposition import decompose, decomposed_layers
from cfl.models.made_masks import Degrees
from cfl.reporting.matrix_file import read_matrix_csv
from cfl.runtime.errors import ConfigError

ADAM = partial(torch.optim.Adam, lr=0.02)
OPTIONS: dict[str, Any] = {"sparsity": 0.02, "consolidation": 2.0, "lambda_3": 4.0, "cut_off": 0.4}
OTHERS: dict[str, Any] = {
    "mask_sparsity": 0.05,
    "weight_decay": 0.03,
    "cut_off": 0.3,
    "cut_off_by": "value",
    "send_masked": True,
    "threshold": 0.06,
    "attention": "uniform",
}
"""Values of options that are neither the paper's nor the defaults."""
ALL: dict[str, Any] = {
    "hidden": [5],
    "direct": True,
    "conditioning": True,
    "order_agnostic": True,
    "num_masks": 2,
    "eval_orders": 2,
    "mask_seed": 3,
}
DEEP: dict[str, Any] = {"hidden": [6, 5], "mask_seed": 4}
STALE: dict[str, Any] = {**ALL, "num_masks": 1, "eval_orders": 1, "stale_output_mask": True}
VARIABLES = 16


def data_of(
    width: int = 2, tasks: int = 3, num_clients: int = 3, sequences: Any = None, **schedule: Any
) -> FederatedDataModule:
    """Three clients, two of them in each of six rounds, so that a client may miss a round or a whole task."""
    settings = {"rounds_per_task": 2, "clients_per_round": 2, "cohort_width": width, **schedule}
    stream = Permuted(Binarised(source()), tasks)
    return tiny_data(stream, num_clients=num_clients, schedule=settings, scenario="density", sequences=sequences)


def network_of(options: dict[str, Any]) -> MADE:
    torch.manual_seed(0)
    return MADE((1, 4, 4), VARIABLES, **options).double()


# The equations, by loops and autograd.


class WrittenOut(Naive):
    """The written-out run of FedWeIT, with what the paper's equations 5 and 6 change."""

    step_masks: Tensors
    plan: RoundPlan

    def __post_init__(self) -> None:
        super().__post_init__()
        self.instead: dict[tuple[int, int], Tensors] = {}

    def held(self, owner: Owner, task: int, their: Tensors) -> Tensors:
        """A filed set. With ``stale_output_mask`` its masks of U and D are the next task's, as in the authors' code."""
        return {**their, **self.instead.get((id(owner), task), {})}

    def weight(self, layer: str, base: Tensor, own: Any, client: int, task: int) -> Tensor:
        """Equation 5 without M, which MADE multiplies its weights by."""
        total = base * torch.sigmoid(own[f"mask {layer}"])[:, None] + own[f"adaptive {layer}"]
        number = 0
        for at in range(1, task + 1):
            for lender, lent in sorted(self.owners[client].lent.get(at, {}).items()):
                if lender != client:
                    total = total + own[f"attention {layer}"][number] * lent[layer]
                number += 1
        return total

    def penalty(self, owner: Owner, base: Tensors, own: Tensors, earlier: dict[int, Tensors], first: bool) -> Tensor:
        """Equation 6 without the likelihood. Weight decay is FedWeIT's, as is another factor for masks."""
        o, (l1, of_masks, decay, drift) = self.options, torch.zeros(4, dtype=torch.float64)
        for x in self.layers:
            m = self.step_masks[x]
            if self.made.stale_output_mask and x == "shortcut":
                m = torch.ones_like(m)
            l1 = l1 + (own[f"adaptive {x}"] * m).abs().sum()
            of_masks = of_masks + own[f"mask {x}"].abs().sum()
            decay = decay + own[f"mask {x}"].square().sum() + own[f"adaptive {x}"].square().sum()
            if first:
                decay = decay + base[x].square().sum()
            for task, their in earlier.items():
                l1 = l1 + (their[f"adaptive {x}"] * m).abs().sum()
                drift = (
                    drift + (self.part(x, base[x], self.held(owner, task, their)) - owner.held[task][x]).square().sum()
                )
        l1 = o["sparsity"] * l1 + o.get("mask_sparsity", o["sparsity"]) * of_masks
        return l1 + o.get("weight_decay", 0.0) / 2 * decay + o["consolidation"] / 2 * drift

    def nats(self, tensors: Tensors, x: Tensor, degrees: Degrees) -> Tensor:
        """``-log p`` of samples, ``[B]``: equation 3 under the masks of equation 4."""
        m, inner, x = masks_by_definition(self.made, degrees), len(self.made.hidden), x.flatten(1)

        def sums(number: int, name: str, h: Tensor) -> Tensor:
            z = h @ (tensors[f"{name}.weight"] * m[name]).T + tensors[f"{name}.bias"]
            condition = f"conditions.{number}"
            return z + (tensors[f"{condition}.weight"] * m[condition]).sum(1) if condition in m else z

        h = x
        for number in range(inner):
            z = sums(number, f"layers.{number}", h)
            h = z * (z > 0)
        z = sums(inner, "output", h)
        if "shortcut" in m:
            z = z + x @ (tensors["shortcut.weight"] * m["shortcut"]).T
        p = 1 / (1 + (-z).exp())
        return -torch.where(x == 1, p.log(), (1 - p).log()).sum(1)

    @property
    def made(self) -> MADE:
        assert isinstance(self.network, MADE)
        return self.network

    def train(self, client: int, plan: RoundPlan) -> None:
        self.plan, owner, task = plan, self.owners[client], plan.task
        begins = owner.at != task
        if begins:
            fresh = clones(self.fresh(task, client))
            if owner.at >= 0:
                owner.filed[owner.at] = owner.set
                wrong = [x for x in self.layers if x[0] in "cs" and self.made.stale_output_mask]  # conditions, shortcut
                self.instead[id(owner), owner.at] = {f"mask {x}": fresh[f"mask {x}"] for x in wrong}
            owner.held = {
                i: {x: self.part(x, owner.base[x], self.held(owner, i, their)) for x in self.layers}
                for i, their in owner.filed.items()
            }
            owner.set, owner.at = fresh, task
        for x, sent in self.sent.items():
            owner.base[x] = torch.where(sent, self.server[x], owner.base[x])
            if begins:
                owner.set[f"adaptive {x}"] = owner.base[x] / self.options["lambda_3"]
                owner.set[f"attention {x}"] = self.first_attention(client, owner.set[f"attention {x}"])
        base, own = leaves(owner.base), leaves(owner.set)
        trained = [f"adaptive {x}" for x in self.layers] if self.options.get("retroactive", True) else []
        earlier = {
            i: {name: leaf(value) if name in trained else value for name, value in their.items()}
            for i, their in owner.filed.items()
        }
        everything = [*base.values(), *own.values(), *(their[n] for their in earlier.values() for n in trained)]
        optimizer = self.make_optimizer(everything)
        for step, (x, _) in enumerate(local_batches(self.data, plan, client)):
            degrees = self.made.degrees(plan.round, client, step)
            self.step_masks = masks_by_definition(self.made, degrees)
            nats = self.nats(self.tensors(base, own, client, task), x.double(), degrees).mean()
            loss = nats + self.penalty(owner, base, own, earlier, task == 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        owner.base, owner.set = clones(base), clones(own)
        owner.filed = {i: clones(their) for i, their in earlier.items()}

    def first_attention(self, client: int, room: Tensor) -> Tensor:
        """Zeros, or one over the number of entries that are not the client's own."""
        owner, first = self.owners[client], torch.zeros_like(room)
        lenders = [lender for at in range(1, owner.at + 1) for lender in sorted(owner.lent.get(at, {}))]
        if self.options.get("attention") == "uniform":
            for number, lender in enumerate(lenders):
                first[number] = 0.0 if lender == client else 1 / (len(lenders) - lenders.count(client))
        return first

    def exchange_units(self, layer: str, bases: Tensor, owners: list[Owner]) -> None:
        """Average each entry over its senders: clients whose unit has a large logit, if M lets the entry through."""
        o, m = self.options, masks_by_definition(self.made, self.made.degrees(self.plan.round, 0, 0))[layer]
        if o.get("send_masked"):
            m = torch.ones_like(m)
        sends = []
        for owner in owners:
            sizes = owner.set[f"mask {layer}"].abs().tolist()
            kept = -(-len(sizes) * round(100 * (1 - o["cut_off"])) // 100)
            units = sorted(range(len(sizes)), key=lambda unit: -sizes[unit])[:kept]
            if o.get("cut_off_by") == "value":
                units = [unit for unit, size in enumerate(sizes) if size > o["cut_off"]]
            sends.append([[unit in units and bool(entry) for entry in row] for unit, row in enumerate(m)])
        for unit, entry in torch.cartesian_prod(*(torch.arange(n) for n in m.shape)).tolist():
            senders = [
                self.message(layer, bases[row, unit, entry], owners[row], unit)
                for row, sent in enumerate(sends)
                if sent[unit][entry]
            ]
            self.sent[layer][unit, entry] = bool(senders)
            if senders:
                self.server[layer][unit, entry] = self.mean(senders, len(owners))

    def accuracies(self, client: int) -> Any:
        """By client and task: nats without and with the task known."""
        found, owner = {}, self.owners[client]
        for i, task in enumerate(self.data.tasks):
            x = task.transform(task.test.images).double()
            sets = [(owner.set, owner.at), (owner.filed[i], i) if i in owner.filed else (owner.set, owner.at)]
            nats = []
            for own, at in sets:
                rounded = {n: self.sparse(v) if n.startswith("adaptive") else v for n, v in own.items()}
                tensors = self.tensors(owner.base, rounded, client, at)
                every = [
                    (-self.nats(tensors, x, self.made.evaluation_degrees(e, x.device))).exp()
                    for e in range(self.made.eval_orders)
                ]
                nats.append(float(-torch.stack(every).mean(0).log().mean()))
            found[client, i] = nats
        return found


def masks_by_definition(network: MADE, degrees: Degrees) -> Tensors:
    """Masks M by layer, entry by entry: hidden units see degrees up to their own, outputs only lower ones."""
    sizes = [degrees.order.tolist(), *(h.tolist() for h in degrees.hidden), degrees.output_order.tolist()]
    last = len(sizes) - 2
    found = {}
    for number in range(last + 1):
        rows = [
            [float(before < after if number == last else before <= after) for before in sizes[number]]
            for after in sizes[number + 1]
        ]
        name = "output" if number == last else f"layers.{number}"
        found[name] = found[f"conditions.{number}"] = torch.tensor(rows, dtype=torch.float64)
    found["shortcut"] = torch.tensor([[float(e < d) for e in sizes[0]] for d in sizes[0]], dtype=torch.float64)
    return {name: found[name] for name, _ in network.named_modules() if name in found}


@pytest.mark.parametrize("options", [ALL, DEEP], ids=["all", "deep"])
def test_a_network_names_the_masks_of_its_layers(options: dict[str, Any]) -> None:
    network = network_of(options)
    for step in range(3):
        degrees = network.degrees(1, 0, step)
        found, expected = network.masks(degrees), masks_by_definition(network, degrees)
        assert set(found) == set(expected)
        assert all(torch.equal(mask.double(), expected[name]) for name, mask in found.items())


@pytest.mark.parametrize(
    ("network", "width", "engine", "sampled", "optimizer", "more"),
    [
        (ALL, 2, "vmap", 2, ADAM, {}),
        (ALL, 1, "workers", 2, ADAM, {}),
        (ALL, 1, "vmap", 1, sgd, {}),
        (DEEP, 2, "workers", 2, ADAM, {}),
        (DEEP, 1, "vmap", 2, sgd, {"base_mean": "clients"}),
        (STALE, 2, "vmap", 2, ADAM, {}),
        (ALL, 2, "vmap", 2, ADAM, OTHERS),
        (DEEP, 1, "workers", 1, sgd, {**OTHERS, "retroactive": False}),
    ],
)
def test_a_whole_run_is_the_one_written_out(
    network: dict[str, Any], width: int, engine: Any, sampled: int, optimizer: Any, more: dict[str, Any]
) -> None:
    """Clients' parameters, the server's bases, and likelihoods of all tasks with and without the task known."""
    options = {**OPTIONS, **more}
    data, method = data_of(width, clients_per_round=sampled), CONFEDMADE(**options)
    make = double(partial(MADE, **network))
    federation = fit(tiny_client(data, make, optimizer, {"it": method}, EngineOptions(engine)), data)
    fresh = tiny_client(data, make, optimizer, {"it": CONFEDMADE(**options)})
    bases = {layer.name: layer.weight.detach().clone() for layer in decomposed_layers(fresh.network)}
    naive = WrittenOut(
        data,
        network_of(network),
        list(bases),
        bases,
        lambda task, client: renamed(method._fresh(task, client)),
        optimizer,
        "units",
        True,
        options,
    )
    naive.sent = {x: torch.ones(base.shape, dtype=torch.bool) for x, base in bases.items()}
    naive.run()

    assert len(bases) == (5 if "direct" in network else 3), (
        "outputs, direct and conditioning weights are decomposed too"
    )
    tensors = federation.model.state_tensors()
    layers = decomposed_layers(federation.network)
    expected = {f"server {x}": value for x, value in naive.server.items()}
    found = {f"server {x.name}": tensors[x.base] for x in layers}
    for client in federation.clients.holders("model"):
        owner, model = naive.owners[client], federation.clients.get("model", client) or {}
        expected |= {f"{client} {name}": value for name, value in owner.set.items()}
        found |= {f"{client} {name}": renamed(model)[name] for name in owner.set}
        expected |= {f"{client} base {x}": value for x, value in owner.base.items()}
        found |= {f"{client} base {x.name}": model[x.base] for x in layers}
        for task, theirs in owner.filed.items():
            filed = renamed(method._tasks.stored(client, task) or {})
            if method.retroactive:
                filed |= {f"adaptive {x.name}": model[x.earlier][task] for x in layers}
            expected |= {f"{client} {name} of {task}": value for name, value in theirs.items()}
            found |= {f"{client} {name} of {task}": filed[name] for name in theirs}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert any(bool((v.abs() > 0).any()) for n, v in expected.items() if "attention" in n and " of " not in n)

    assert federation.known is not None
    agnostic, aware = federation.measured.compute(), federation.known.compute()
    for row, nats in enumerate(naive.matrices):
        for (client, i), (without, known) in nats.items():
            assert float(agnostic[client, row, i]) == pytest.approx(without, abs=1e-7)
            assert float(aware[client, row, i]) == pytest.approx(known, abs=1e-7)
    assert float((agnostic[:, 2, :2] - aware[:, 2, :2]).abs().max()) > 1e-3
    if sampled == 1:
        assert any(len(owner.filed) + 1 < 3 for owner in naive.owners.values()), "somebody misses a task"


def test_outputs_depend_on_earlier_variables_only() -> None:
    """In every order, the Jacobian of a decomposed network that borrows is strictly triangular."""
    network = network_of({**ALL, "hidden": [9]})
    decompose(network, attends=True)
    for layer in decomposed_layers(network):
        layer.parts.reserve(2)
        layer.parts.knowledge.entries = torch.randn(2, *layer.weight.shape, dtype=torch.float64)
        for part in (layer.parts.mask, layer.parts.attention, layer.parts.others, layer.parts.adaptive):
            assert part is not None
            part.data.copy_(torch.randn(part.shape))
    x = torch.rand(1, 1, 4, 4, dtype=torch.float64)
    for step in range(4):
        degrees = network.degrees(0, 0, step)
        jacobian: Any = torch.autograd.functional.jacobian(partial(network.logits, degrees=degrees), x)
        by_order = jacobian.view(VARIABLES, VARIABLES)[degrees.order.argsort()][:, degrees.order.argsort()]
        assert int(by_order.triu().count_nonzero()) == 0
        assert int(by_order.count_nonzero()) > VARIABLES


# What is sent.


class Fixed(Method):
    """Set the mask logits of all layers after local training, as many as a layer has units."""

    scenarios = frozenset({"density"})

    def __init__(self, masks: Tensor) -> None:
        self.masks = masks

    @torch.no_grad()
    def finish_clients(self, cohort: Cohort, positions: Any) -> None:
        for layer in decomposed_layers(self.context.network):
            for position in positions:
                cohort.parameters[layer.mask][position] = self.masks[: len(layer.weight)]


@pytest.mark.parametrize(
    ("options", "entries"),
    [
        # Hidden unit k has m(k) + 1 inputs and 15 - m(k) outputs, together D = 16 whatever masks are drawn.
        ({"cut_off": 0.0}, 7 * 16 + 15 * 16 // 2),
        ({"cut_off": 0.0, "send_masked": True}, 2 * 7 * 16 + 16 * 16),
        ({"cut_off": 0.5, "send_masked": True}, 4 * 16 + 8 * 7 + 8 * 16),
        ({"cut_off": 2.9, "cut_off_by": "value", "send_masked": True}, 4 * 16 + 13 * 7 + 13 * 16),
        ({"cut_off": 99.0, "cut_off_by": "value"}, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("order_agnostic", [False, True])
def test_bytes_by_hand(options: dict[str, Any], entries: int, order_agnostic: bool) -> None:
    made = partial(MADE, hidden=[7], direct=True, order_agnostic=order_agnostic)
    masks = torch.arange(16.0, dtype=torch.float64) * torch.tensor([1.0, -1.0]).repeat(8)  # size decides, not sign
    data = data_of(tasks=1, num_clients=2)
    method = CONFEDMADE(**options)
    federation = fit(tiny_client(data, double(made), sgd, {"fixed": Fixed(masks), "it": method}), data)
    bits = 1 + 2 + 2
    whole = 2 * 7 * 16 + 16 * 16
    assert federation.channel.uplink_bytes == {"base": 2 * 2 * (8 * entries + bits)}
    assert method.report().figures["base_share"] == pytest.approx(entries / whole)
    down = federation.channel.downlink_bytes
    assert down == {"model": 0, "base": 2 * (8 * whole + bits) + 2 * (8 * entries + bits)}


def test_clients_that_are_skipped_are_not_in_the_share_of_entries_sent() -> None:
    method, data = CONFEDMADE(cut_off=0.5), tiny_data(permuted(1))
    client = tiny_client(data, mlp, sgd, {"it": method, "poison": Poison(0)})
    federation = fit(client, data, {"on_bad_update": "skip"})
    assert {who for _, _, who in federation.channel.skipped} == {0}
    assert method.report().figures["base_share"] == pytest.approx(0.5)


def test_masks_of_units_and_of_the_autoencoder_work_together() -> None:
    """The last eight variables are sent: in natural order they have 8 + 9 + ... + 15 direct connections."""
    made = partial(MADE, hidden=[], order="natural", mask_seed=0)
    data = data_of(tasks=1, num_clients=2)
    masks = torch.arange(16.0, dtype=torch.float64)
    methods = {"fixed": Fixed(masks), "it": CONFEDMADE(cut_off=0.5)}
    federation = fit(tiny_client(data, double(made), sgd, methods), data)
    assert federation.channel.uplink_bytes == {"base": 2 * 2 * (8 * 92 + 2)}


class Looks(Method):
    """Record gradients of attention, lent knowledge and each client's adaptive weights at the end of a task."""

    scenarios = frozenset({"density"})

    def __init__(self) -> None:
        self.lent: dict[int, Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self.ended: dict[tuple[int, int], Tensor] = {}

    def adjust_gradients(self, cohort: Cohort) -> None:
        layer = decomposed_layers(self.context.network)[0]
        gradient, entries = cohort.gradients.get(layer.attention), layer.parts.knowledge.entries
        if gradient is not None and entries is not None:
            self.lent[cohort.task] = entries.clone()
            self.gradients |= {(cohort.task, c): gradient[row].clone() for row, c in enumerate(cohort.clients)}

    def end_task(self, plan: RoundPlan) -> None:
        layer = decomposed_layers(self.context.network)[0]
        for client in plan.clients:
            self.ended[plan.task, client] = (self.context.clients.get("model", client) or {})[layer.adaptive]


def test_the_knowledge_base_grows_by_what_others_have_learned() -> None:
    looks, method = Looks(), CONFEDMADE(**OPTIONS)
    data = data_of(clients_per_round=3)
    network = double(partial(MADE, hidden=[], mask_seed=0))
    federation = fit(tiny_client(data, network, ADAM, {"it": method, "looks": looks}), data)
    sizes = {}
    for task in (1, 2):
        entries = [(t, c) for t in range(task) for c in range(3)]
        assert looks.lent[task].shape[0] == len(entries)  # though attention has room for 6
        for number, (t, c) in enumerate(entries):
            own = looks.ended[t, c]
            sparse = torch.where(own.abs() > 0.02, own, 0.0)
            assert torch.equal(looks.lent[task][number], sparse)
            sizes[t, c] = min(12 * int(sparse.count_nonzero()), 8 * 256)
        for client in range(3):
            borrowed = [gradient != 0 for gradient in looks.gradients[task, client].tolist()]
            assert borrowed == [c != client for _, c in entries] + [False] * (6 - len(entries))
    # An entry goes to each of the two others once, though it is lent in two tasks.
    assert federation.channel.uplink_bytes["adaptive"] == sum(sizes.values())
    assert federation.channel.downlink_bytes["knowledge"] == 2 * sum(sizes.values())
    rows = [row for row in method.report().rows if row["task"] == 2]
    assert {row["sources"] for row in rows} == {"1 2 1 2", "0 2 0 2", "0 1 0 1"}
    assert {row["source_tasks"] for row in rows} == {"0 0 1 1"}


# Old tasks.


class Freeze(Method):
    """Bases do not move."""

    scenarios = frozenset({"density"})

    def adjust_gradients(self, cohort: Cohort) -> None:
        for layer in decomposed_layers(self.context.network):
            cohort.gradients[layer.base].zero_()


@pytest.mark.parametrize("sequences", [None, FixedTasks([[0, 1, 2], [2, 0, 1]])], ids=["common", "own"])
def test_old_tasks_have_their_weights_while_bases_do_not_move(sequences: FixedTasks | None) -> None:
    """With the task known, old tasks keep their weights. Without it, all tasks use those of the present one."""
    weights: dict[tuple[int, int, int | None], Tensors] = {}
    method = CONFEDMADE(**{**OPTIONS, "retroactive": False})

    class Asks(Method):
        scenarios = frozenset({"density"})

        def end_task(self, plan: RoundPlan) -> None:
            for client in range(2):
                own = {n: v[0] for n, v in self.context.personal_state((client,)).items()}
                for task in (*range(plan.task + 1), None):
                    model = method.recall(client, task, {**self.context.state_tensors(), **own})
                    weights[plan.task, client, task] = {
                        x.name: model[x.base] * torch.sigmoid(model[x.mask])[:, None] + model[x.adaptive]
                        for x in decomposed_layers(self.context.network)
                    }

    data = data_of(num_clients=2, sequences=sequences)
    methods = {"it": method, "freeze": Freeze(), "asks": Asks()}
    federation = fit(tiny_client(data, double(partial(MADE, **ALL)), ADAM, methods), data)
    for (row, client, task), found in weights.items():
        learned = weights[row if task is None else task, client, row if task is None else task]
        assert all(torch.equal(value, learned[name]) for name, value in found.items())
        if task is not None and task < row:
            present = weights[row, client, None]
            assert any(not torch.allclose(value, present[name], atol=1e-3) for name, value in found.items())
    agnostic, aware = federation.measured, federation.known
    assert aware is not None
    first = 0 if sequences is None else slice(None)
    known = aware.compute()[:, :, 0][first]
    torch.testing.assert_close(known, known[..., :1].expand_as(known), rtol=0, atol=0)
    assert torch.equal(agnostic.compute().diagonal(dim1=1, dim2=2), aware.compute().diagonal(dim1=1, dim2=2))
    assert float((agnostic.compute()[:, 2, 0] - aware.compute()[:, 2, 0]).abs().max()) > 1e-3


def test_there_is_one_matrix_where_nobody_tells_tasks_apart() -> None:
    data = data_of(tasks=1, num_clients=2)
    federation = fit(tiny_client(data, partial(MADE, hidden=[5]), sgd), data)
    assert federation.known is None
    assert federation.matrices == [federation.measured]


def test_a_run_leaves_both_matrices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "made.yaml"
    config.write_text(
        "data: {scenario: density, stream: {class_path: Permuted, init_args: {num_tasks: 2, source: "
        "{class_path: Binarised, init_args: {source: Digits}}}}}\n"
        "model: {network: {class_path: MADE, init_args: {hidden: [9], order_agnostic: true}}}\n"
        "methods: {it: {class_path: CONFEDMADE}}\n"
    )
    folder = tmp_path / "run"
    assert tiny_cli.fit(folder, "--config", str(config), "--model.optimizer.lr", "0.005") == 0
    agnostic, aware = (read_matrix_csv(folder / f"nll_matrix{suffix}.csv")[0] for suffix in ("", "_task_aware"))
    summary = tiny_cli.summary(folder)
    for matrix, suffix in ((agnostic, ""), (aware, "_task_aware")):
        assert summary[f"nll{suffix}"] == pytest.approx(float(matrix[1].mean()))
        assert summary[f"base_nll{suffix}"] == pytest.approx(float(matrix[1, 0]))
    assert torch.equal(agnostic.diagonal(), aware.diagonal())
    assert float(agnostic[1, 0]) != float(aware[1, 0])
    assert "NLL (task known)" in capsys.readouterr().out


# Runs.


def test_classifiers_have_no_masks() -> None:
    """M is 1, so CONFEDMADE equals FedWeIT with matching options, in two tasks that borrow from one task at most."""

    def trained(method: Method) -> dict[int, dict[str, Tensor]]:
        data = tiny_data(permuted(2), num_clients=3, schedule={"rounds_per_task": 2, "cohort_width": 3})
        return kept_by(fit(tiny_client(data, double(mlp), ADAM, {"it": method}), data))

    same = {"sparsity": 0.02, "mask_sparsity": 0.02, "weight_decay": 0.0, "adaptive_from": "current"}
    found = trained(CONFEDMADE(sparsity=0.02, cut_off=0.4))
    expected = trained(FedWeIT(**same, keep=0.6, attention="zeros"))
    for client, own in expected.items():
        torch.testing.assert_close(found[client], own, rtol=0, atol=1e-12)


@pytest.mark.parametrize("synchronised", [False, "start"])
def test_clients_share_their_masks(synchronised: bool | str) -> None:
    data, network = data_of(), {"hidden": [5], "order_agnostic": True, "synchronised": synchronised}
    with pytest.raises(ConfigError) as caught:
        fit(tiny_client(data, partial(MADE, **network), sgd, {"it": CONFEDMADE()}), data)
    assert (caught.value.key, caught.value.value) == ("model.network.synchronised", synchronised)
