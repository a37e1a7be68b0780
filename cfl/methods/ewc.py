"""Elastic weight consolidation (Kirkpatrick et al., PNAS 2017), at every client."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import SGD

from cfl.data.scenarios import EVERY_SCENARIO
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.engines.quadratic_pull import Pull
from cfl.federation.channel import payload_bytes
from cfl.methods.base import Method, Report
from cfl.methods.capabilities import BoundaryFinder
from cfl.methods.components.client_model import client_model
from cfl.methods.components.curvature.fisher import FISHER_KINDS, FisherKind, check_fisher, diagonal_fisher
from cfl.methods.components.joined_tensors import joined, parted
from cfl.methods.components.newest_two import NewestTwo
from cfl.methods.context import Context
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices, check_integers, check_numbers

Tensors = dict[str, Tensor]


class EWC(Method):
    """Adds a quadratic penalty on weights that are important for earlier tasks to every client's loss::

        strength / 2 * sum_t sum_i F_t,i (w_i - w*_t,i)^2                    (Kirkpatrick et al., 2017, eq 3)

    with ``w*_t``, the global model after the last round of task t, and ``F_t``, the diagonal Fisher information of the
    client's own data of the task at ``w*_t`` (:func:`cfl.methods.components.curvature.fisher.diagonal_fisher`; mean
    over samples). A sum of quadratics is a quadratic, so only ``S = sum_t F_t`` and its centre ``A = sum_t F_t w*_t /
    S`` are stored. Every local step adds ``strength S (w - A)`` to the gradient, before clipping and the optimizer. As
    for all methods, the reported training loss does not include the penalty.

    This is the adaptation of FOT (Bakman et al., 2024): every client computes and keeps its own Fisher and never sends
    it. A client without a Fisher has no penalty. Parameters that stay on their client (``PersonalLayers``) are pulled
    to that client's own values. Outputs that are not in the loss have no Fisher and no penalty, nor have BatchNorm's
    running statistics; with ``federated.batchnorm: drop`` the Fisher is that of the network normalised by its batches.

    Differs from the papers: FOT gives its strengths (40 for Permuted MNIST) without saying whether the penalty has the
    half, which Fisher it takes, whether that is a sum or a mean over samples, and at which weights. Gradient steps
    along the quadratic are stable where ``learning rate * strength * S`` stays below 2; compare ``fisher_max`` in the
    method's table. For clients with two classes the published strength exceeds that. ``limit`` bounds the product, so
    that a step moves a weight to its anchor at most, and not beyond it.

    With the method ``FoundBoundaries`` beside it, EWC is not told where tasks end. Every few rounds, each client
    computes its Fisher at the model that it has received, and keeps the two newest Fishers with their models. When a
    boundary is found, each client's newest Fisher of the old task's rounds counts. Its anchor is the model of its
    round. A client that has computed no Fisher in these rounds is left out.

    Sends: after every task but the last, an extra round: the new global model down, nothing up. Extra memory per
    client: two tensors per parameter; where boundaries are found, four per parameter besides. Extra compute: two
    element-wise passes over the weights per local step, and a Fisher per client and task, about one local epoch
    (``expected``: one backward pass per output); where boundaries are found, one every few rounds. Scenarios: all.
    Optimizers: any; with ``limit`` SGD.

    Args:
        strength: lambda, at least 0; 0 is federated averaging.
        half: use the factor 1/2 of eq 3. Without it, as in the mammoth library, the penalty is twice as strong.
        consolidation: ``separate``: every task keeps its anchor, as above. ``online``: ``S <- gamma S + F`` and the
            latest model is the anchor of the whole penalty (Schwarz et al., 2018, with a plain Fisher).
        gamma: factor of earlier tasks with ``online``, in [0, 1].
        fisher: labels: ``empirical`` (true), ``expected`` (the model's own distribution, exactly), ``sampled``
            (one draw from it) or ``weighted`` (true, times its probability). Densities have no labels: ``empirical``.
        limit: the greatest ``learning rate * strength * S``, or of twice that without ``half``, above 0 and below 2;
            null for no limit. Needs SGD. With 1 and without momentum the penalty alone moves a weight no further than
            to its anchor.
        fisher_batch_size: samples per pass. Changes memory and speed, and results where BatchNorm has no statistics.

    Raises:
        ConfigError: for values other than these, ``gamma`` without ``online``, or ``limit`` without SGD.
    """

    looks_back: ClassVar[bool] = True
    pulls_with: ClassVar[str] = "strength"
    scenarios = EVERY_SCENARIO
    state = ("_rows",)  # the quadratics are in ``context.clients``

    def __init__(
        self,
        strength: float = 40.0,
        half: bool = True,
        consolidation: Literal["separate", "online"] = "separate",
        gamma: float = 1.0,
        fisher: FisherKind = "empirical",
        fisher_batch_size: int = 250,
        limit: float | None = None,
    ) -> None:
        check_numbers("methods.ewc", "[0, inf)", strength=strength)
        check_numbers("methods.ewc", "[0, 1]", gamma=gamma)
        check_choices("methods.ewc", ("separate", "online"), consolidation=consolidation)
        check_choices("methods.ewc", FISHER_KINDS, fisher=fisher)
        if consolidation == "separate" and gamma != 1:
            raise ConfigError("methods.ewc.gamma", gamma, "1, or consolidation=online, which alone forgets")
        check_numbers("methods.ewc", "(0, 2)", or_null=True, limit=limit)
        check_integers("methods.ewc", 1, fisher_batch_size=fisher_batch_size)
        self.strength, self.half = strength, half
        self.consolidation, self.gamma = consolidation, gamma
        self.fisher: FisherKind = fisher
        self.fisher_batch_size, self.limit = fisher_batch_size, limit
        self._rows: list[dict[str, Any]] = []
        self._finder: BoundaryFinder | None = None

    def follow_found_tasks(self, finder: BoundaryFinder) -> None:
        """Let ``finder`` say where tasks end."""
        self._finder, self.task_free = finder, True

    def setup(self, context: Context) -> None:
        """Find the parameters that are held.

        Raises:
            ConfigError: for ``limit`` without SGD; if there are two of these methods, which would share their clients'
                state, or if the network has no labels of this kind or cannot be differentiated.
        """
        super().setup(context)
        optimizer = context.optimizer
        if self.limit is not None and optimizer is not None and not isinstance(optimizer, SGD):
            valid = f"null while the optimizer is {type(optimizer).__name__}, whose steps it does not bound"
            raise ConfigError(f"{self.key}.limit", self.limit, valid)
        self.refuse_twins(EWC, "one EWC; its strength is the sum of theirs")
        parameters = [name for name, _ in context.network.named_parameters()]
        self._names = [name for name in parameters if name not in context.frozen]
        key = f"{self.key}.fisher"
        check_fisher(self.fisher, context.network, key, context.measure, context.input_shape, self._names)
        self._remembered = NewestTwo(context, "ewc")

    # Local steps.

    def pulls(self, cohort: Cohort) -> dict[str, Pull]:
        """The gradients of these clients' penalties, as pulls."""
        if self.strength == 0 or not self.context.clients.any_holds("ewc", cohort.clients):
            return {}
        nothing = {n: torch.zeros_like(self.context.network.get_parameter(n)) for n in self._names}
        own = self.context.clients.gather("ewc", cohort.clients, joined(curvature=nothing, anchor=nothing))
        curvature, anchor = parted(own, "curvature", "anchor")
        if self.limit is not None and cohort.lr > 0:
            most = self.limit / (cohort.lr * self._factor)
            curvature = {n: value.clamp(max=most) for n, value in curvature.items()}
        return {n: Pull(self._factor * value, anchor[n]) for n, value in curvature.items()}

    @property
    def _factor(self) -> float:
        return self.strength if self.half else 2 * self.strength

    @property
    def computes_locally(self) -> bool:
        """Whether there is a penalty."""
        return self.strength > 0

    # After a task.

    def end_task(self, plan: RoundPlan) -> None:
        """Let clients compute the Fisher of the task's data at the new global model, and make this model an anchor."""
        context = self.context
        if self.strength == 0 or context.is_last(plan.task):
            return
        started = time.perf_counter()
        clients, lost = context.members(plan.task), context.channel.dropped_before_message(plan.round)
        counted = (0, 0.0, 0.0)
        for client in context.extra_round(plan.task, clients):
            if client in lost:  # it receives the model but computes nothing
                continue
            fisher, model = self._fisher(plan.task, client, plan.task)
            if self._keep(client, fisher, model):
                counted = _counted(counted, fisher)
        self._note({"task": plan.task}, len(set(clients).difference(lost)), (*counted, time.perf_counter() - started))

    def _note(self, when: Mapping[str, int], clients: int, figures: tuple[int, float, float, float]) -> None:
        """Add a row to the method's table.

        ``when`` is its first column, the task or the round of a found boundary. ``figures`` are number, sum and
        greatest of the Fisher entries of this process's clients, and seconds.
        """
        of_all = self.context.everyones(figures)
        entries = sum(row[0] for row in of_all)
        self._rows.append(
            {
                **when,
                "clients": clients,
                "fisher_mean": sum(row[1] for row in of_all) / entries if entries else None,
                "fisher_max": max(row[2] for row in of_all) if entries else None,
                "fisher_seconds": max(row[3] for row in of_all),
            }
        )

    def _fisher(self, task: int, client: int, moment: int) -> tuple[Tensors, Tensors]:
        """One client's Fisher and the model at which it was computed.

        Args:
            task: the task whose samples are used.
            client: the client.
            moment: keys the labels that are drawn.
        """
        context = self.context
        model = client_model(context, client)
        fisher = diagonal_fisher(
            context.network,
            model,
            context.client_batches(task, client, self.fisher_batch_size, context.device),
            self.fisher,
            outputs=context.outputs_in_loss(task, client),
            names=self._names,
            generator=torch_generator(context.seed, "fisher labels", moment, client),
            batch_statistics=context.batchnorm == "drop",
            measure=context.measure,
        )
        return fisher, model

    def _keep(self, client: int, fisher: Tensors, model: Tensors) -> bool:
        """Add a task to a client's stored quadratic, and return whether it was finite."""
        context = self.context
        old = context.clients.get("ewc", client) or {}
        curvature, anchor = parted({n: v.to(context.device) for n, v in old.items()}, "curvature", "anchor")
        curvature, anchor = self._consolidated(curvature, anchor, fisher, {n: model[n] for n in fisher})
        kept = joined(curvature=curvature, anchor=anchor)
        stacked = {n: values[None] for n, values in kept.items()}
        usable = context.channel.usable(stacked, [client], "ewc")
        context.clients.scatter("ewc", [client], stacked, usable)
        return all(usable)

    # Where boundaries are found.

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """If boundaries are found, let clients compute the Fisher at the model that they have received, in some rounds,
        and keep it with this model."""
        if self._finder is None or self.strength == 0 or not self._finder.keeps_in(cohort.round):
            return
        for client in (cohort.clients[position] for position in positions):
            fisher, model = self._fisher(cohort.task, client, cohort.round)
            self._remembered.keep(client, cohort.round, joined(curvature=fisher, anchor={n: model[n] for n in fisher}))

    def end_found_task(self, plan: RoundPlan, rounds: range) -> None:
        """Add the newest Fisher that each client has computed in the task's rounds to the penalty."""
        if self.strength == 0:
            return
        started = time.perf_counter()
        chosen = self._remembered.computed_in(rounds)
        counted = (0, 0.0, 0.0)
        for client, kept in self._remembered.read(plan.task, rounds, chosen):
            fisher, model = parted(kept, "curvature", "anchor")
            if self._keep(client, fisher, model):
                counted = _counted(counted, fisher)
        self._note({"round": plan.round}, len(chosen), (*counted, time.perf_counter() - started))

    def _consolidated(
        self, curvature: Mapping[str, Tensor], anchor: Mapping[str, Tensor], fisher: Tensors, latest: Tensors
    ) -> tuple[Tensors, Tensors]:
        """The sum of the quadratic with centre ``anchor`` and a task's quadratic with centre ``latest``, as one."""
        if not curvature:
            return fisher, latest
        if self.consolidation == "online":
            return {n: self.gamma * curvature[n] + value for n, value in fisher.items()}, latest
        total = {n: curvature[n] + value for n, value in fisher.items()}
        # S (w - A) with the weighted mean A loses less to rounding than S w - sum F w*, and is 0 at a sole anchor.
        share = {n: _share(value, total[n]) for n, value in fisher.items()}
        return total, {n: anchor[n].lerp(latest[n], share[n]) for n in fisher}

    # Reports and checkpoints.

    def report(self) -> Report:
        """Seconds for Fishers, and bytes of the quadratic that a client keeps.

        If boundaries are found, also ``remembered_bytes``: bytes of Fishers that a client keeps for the next boundary.

        A row per task: clients that computed a Fisher, mean and greatest of its entries, seconds of the extra round.
        """
        size = payload_bytes({n: self.context.network.get_parameter(n) for n in self._names})
        figures = {
            "fisher_seconds": sum(row["fisher_seconds"] for row in self._rows),
            "client_bytes": 2 * size * any(row["clients"] for row in self._rows),
        }
        if self._finder is not None:
            figures["remembered_bytes"] = self._remembered.bytes()
        return Report(figures, self._rows)

    def client_storage(self) -> int:
        """Bytes of two numbers per parameter, once there is a Fisher, and of the Fishers kept for the next boundary."""
        figures = self.report().figures
        return int(figures["client_bytes"] + figures.get("remembered_bytes", 0))


def _share(value: Tensor, total: Tensor) -> Tensor:
    """``value / total``, 0 where both are 0.

    Half precision is divided in float32: its own smallest normal numbers are usual Fisher entries.
    """
    wide = torch.promote_types(value.dtype, torch.float32)
    return (value.to(wide) / total.to(wide).clamp(min=torch.finfo(wide).tiny)).to(value.dtype)


def _counted(before: tuple[int, float, float], fisher: Tensors) -> tuple[int, float, float]:
    """Add a Fisher's entries to the number, sum and greatest of the entries ``before``."""
    entries, total, most = before
    return (
        entries + sum(values.numel() for values in fisher.values()),
        total + sum(float(values.sum()) for values in fisher.values()),
        max([most, *(float(values.max()) for values in fisher.values() if values.numel())]),
    )
