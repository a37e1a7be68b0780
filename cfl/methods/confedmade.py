"""CONFEDMADE: continual federated masked autoencoders for density estimation (Paul et al., 2023)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from cfl.engines.cohort import Cohort
from cfl.methods.apd import Tensors
from cfl.methods.base import Report
from cfl.methods.components.sparse import largest
from cfl.methods.context import Context
from cfl.methods.fedweit import FedWeIT
from cfl.models import MADE
from cfl.models.decomposition import DecomposedLayer
from cfl.runtime.errors import ConfigError
from cfl.runtime.moving import moved
from cfl.runtime.option_checks import check_choices, check_numbers


class CONFEDMADE(FedWeIT):
    """FedWeIT for density estimation, with the autoencoder's masks M in weights, loss and messages::

        W_c * M = (B_c sigmoid(m_c^(t)) + A_c^(t) + sum_{i != c} sum_{j < t} alpha_{i,j}^(t) A_i^(j)) * M       (eq 5)

    for all weights of MADE: into hidden layers and outputs, direct connections and conditioning weights; m has a logit
    per output unit, alpha a factor per layer and entry of the knowledge base. To the mean of ``-log p(x)`` every client
    adds, with ``lambda_1`` = ``sparsity`` and ``lambda_2`` = ``consolidation`` / 2::

        lambda_1 (||m^(t)||_1 + sum_{i <= t} ||A^(i) * M||_1)
        + lambda_2 sum_{i < t} ||(B - B*) sigmoid(m^(i)) + A^(i) - A*^(i)||^2                                   (eq 6)

    M is the mask of the local step: if masks are drawn anew, entries that are currently masked are not regularised.
    B* and A*^(i) are those at the beginning of task t; there is no M in that term. A begins a task as B / ``lambda_3``,
    where B is the base that the client has just received. alpha begins as 0, biases and m as in FedWeIT.

    The knowledge base grows: a task uses what all other clients had learned at the ends of all earlier tasks.
    After local training a client sends the entries of B that belong to output units with a large ``|m|``, see
    ``cut_off``, and that M does not mask. This M is that of the round's first step, which server and clients derive
    from the common seed. The server takes the mean of every entry over the clients that sent it. Clients keep their own
    values of entries that no client sent.

    If the task of a sample is unknown, a client uses its current B, A, m, alpha and biases, as in the authors' code
    (the paper does not say); this is ``nll`` in summaries. With the set of the sample's own task, as in FedWeIT, it is
    ``nll_task_aware``.

    Differs from the paper: by default B is not multiplied with the mask before it is sent, and means are over the
    senders (as in the authors' code; see ``base_mean``). Differs from the code: no entries of a client's own in the
    knowledge base (there: with them); sigmoid(m^(i)) in the drift (there: m^(i)); the current M in the loss, and that
    of the round in messages (there: M of the start, none for direct connections, and none at all on binary sets);
    entries that no client sent stay unchanged (there: they become 0); L1 of m (there: none); and biases and m that
    start every task from new numbers (there: from the same, see :class:`FedWeIT`). Two more differences go with the
    network's ``stale_output_mask``, which imitates the code: the drift of U and D is then scaled by the m with which
    task i + 1 began, which that code stores for m^(i), and L1 of D has no M.

    Weights without an autoencoder mask have M = 1, so classifiers work as well.

    Sends, in place of the model: up, values of the chosen entries and a bit per unit; down, values of the averaged
    entries and a bit per unit, in the first round of all of B. Between tasks as FedWeIT, but a client receives only
    entries of the knowledge base that it has not received before. Extra memory and compute as for FedWeIT, with
    attention to all entries so far, and the masks of every local step computed once more. Scenarios: those of FedWeIT.

    Args:
        sparsity: lambda_1, at least 0; paper: 1e-4.
        mask_sparsity: of m; lambda_1 if not given.
        consolidation: twice lambda_2, at least 0. The paper's lambda_2 is 100, its code's 50, hence 100 here.
        lambda_3: divisor of B, above 0; 3 in the authors' code, the paper (Algorithm 1) gives no number.
        cut_off: units whose ``|m|`` is at or below it are not sent; in [0, 1) for ranks, at least 0 for values.
        cut_off_by: ``rank``: the cut-off is a quantile of each layer's ``|m|`` (the code; shares of B in the paper's
            Table 4 are those of quantiles); ``value``: it is of ``|m|`` itself (the paper's words).
        send_masked: also send entries that M masks (Table 4, "without M").
        weight_decay: see :class:`cfl.methods.APD`; not in eq 6. The weight decay in the paper's appendix is part of the
            optimizer.
        retroactive: whether A^(i) of earlier tasks are still trained (eq 6); see :class:`cfl.methods.APD`.
        threshold: entries of A at or below it count as 0; see :class:`cfl.methods.APD`.
        top_kappa: see :class:`FedWeIT`.
        attention: see :class:`FedWeIT`.
        base_mean: see :class:`FedWeIT`; ``clients`` is line 12 of this paper's Algorithm 1.

    Raises:
        ConfigError: for values other than these, or clients whose masks differ; otherwise as :class:`FedWeIT`.
    """

    client_clocks = False

    def __init__(
        self,
        sparsity: float = 1e-4,
        mask_sparsity: float | None = None,
        consolidation: float = 100.0,
        lambda_3: float = 3.0,
        cut_off: float = 0.1,
        cut_off_by: Literal["rank", "value"] = "rank",
        send_masked: bool = False,
        weight_decay: float = 0.0,
        retroactive: bool = True,
        threshold: float | None = None,
        top_kappa: float = 1.0,
        attention: Literal["random", "uniform", "zeros"] = "zeros",
        base_mean: Literal["senders", "clients"] = "senders",
    ) -> None:
        super().__init__(
            top_kappa=top_kappa,
            attention=attention,
            base_mean=base_mean,
            sparsity=sparsity,
            mask_sparsity=sparsity if mask_sparsity is None else mask_sparsity,
            consolidation=consolidation,
            weight_decay=weight_decay,
            retroactive=retroactive,
            adaptive_from="current",
            threshold=threshold,
        )
        check_numbers(self._key, "(0, inf)", lambda_3=lambda_3)
        check_choices(self._key, ("rank", "value"), cut_off_by=cut_off_by)
        check_numbers(self._key, "[0, 1)" if cut_off_by == "rank" else "[0, inf)", cut_off=cut_off)
        self.adaptive_divisor = lambda_3
        self.cut_off, self.cut_off_by, self.send_masked = cut_off, cut_off_by, send_masked
        if cut_off_by == "rank":
            self.keep = float(1 - Fraction(str(cut_off)))
        self._masks: tuple[tuple[int, int], Tensors] = ((-1, -1), {})

    # Before training.

    def setup(self, context: Context) -> None:
        """Set up as for FedWeIT, and refuse clients that do not share their masks."""
        super().setup(context)
        network = context.network
        if isinstance(network, MADE) and network.synchronised in (False, "start"):
            raise ConfigError("model.network.synchronised", network.synchronised, f"true with {type(self).__name__}")
        self._sent = {x.name: torch.ones(x.weight.shape, dtype=torch.bool) for x in self._layers}

    def _knowledge_entries(self) -> int:
        """Number of entries for all tasks except the last."""
        return super()._knowledge_entries() * (self.context.num_tasks - 1)

    def _borrowed(self, client: int, task: int) -> list[dict[str, Any]]:
        """The adaptive weights that clients had learned at the ends of all tasks before this one."""
        return [held for held in self._knowledge if held["task"] <= task]

    # The autoencoder's masks.

    def _masks_of(self, round: int, step: int) -> Tensors:
        """Layer -> ``[O, I]`` bool, M of a local step, the same for all clients; 1 for layers that are not listed."""
        network = self.context.network
        if not isinstance(network, MADE):
            return {}
        at = (round, step) if network.draws else (0, 0)
        if self._masks[0] != at:
            masks = network.masks(network.degrees(round, 0, step))
            device = self._layers[0].weight.device
            self._masks = at, {name: moved(mask, device) for name, mask in masks.items()}
        return self._masks[1]

    def _counted(self, cohort: Cohort) -> Tensors:
        """The entries that M does not mask."""
        found = self._masks_of(cohort.round, cohort.steps - 1)
        dtype = self._layers[0].weight.dtype
        return {name: mask.to(dtype) for name, mask in found.items() if not (self._as_published and name == "shortcut")}

    def _held_mask(self, cohort: Cohort, layer: DecomposedLayer, position: int) -> Tensor | None:
        """As for FedWeIT. If the network imitates the authors' code, U and D have the mask that begins the new task."""
        mask = super()._held_mask(cohort, layer, position)
        if mask is None or not self._as_published or not layer.name.startswith(("conditions.", "shortcut")):
            return mask
        return self._fresh(cohort.task, cohort.clients[position])[layer.mask].to(mask)

    @property
    def _as_published(self) -> bool:
        """Whether the network imitates the authors' code."""
        network = self.context.network
        return isinstance(network, MADE) and network.stale_output_mask

    def _chosen(self, cohort: Cohort, layer: DecomposedLayer, trained: Tensors) -> Tensor:
        """``[k, O, ...]`` bool: entries of units above the cut-off that M does not mask."""
        sizes = trained[layer.mask].abs()
        units = largest(sizes, self.keep) if self.cut_off_by == "rank" else sizes > self.cut_off
        weight = layer.weight
        let_through = self._masks_of(cohort.round, 0).get(layer.name)
        if self.send_masked or let_through is None:
            let_through = torch.ones_like(weight, dtype=torch.bool)
        return units.view(*units.shape, *[1] * (weight.ndim - 1)) & let_through

    # Reports.

    def report(self) -> Report:
        """As for FedWeIT, and ``base_share``: mean share of the entries of B that a client sends after a round. It is
        None if clients drop out, because it cannot be computed from the bytes then."""
        context, report = self.context, super().report()
        if context.channel.loses_messages:
            return Report({**report.figures, "base_share": None}, report.rows)
        messages = sum(len(context.plan(number).clients) for number in range(context.round))
        messages -= len(context.channel.skipped)
        which = self._base_bytes({x.name: torch.zeros(x.weight.shape, dtype=torch.bool) for x in self._layers})
        whole = sum(x.weight.numel() * x.weight.element_size() for x in self._layers)
        sent = context.channel.uplink_bytes.get("base", 0) - messages * which
        share = sent / (messages * whole) if messages else None
        return Report({**report.figures, "base_share": share}, report.rows)
