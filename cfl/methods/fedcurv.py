"""FedCurv (Shoham et al., 2019): a penalty towards the other clients' weights, weighted by their Fisher information."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import SGD

from cfl.data.exposure import ONE_AT_A_TIME
from cfl.data.scenarios import EVERY_SCENARIO
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.engines.quadratic_pull import Pull
from cfl.federation.channel import payload_bytes
from cfl.methods.base import Method, Report
from cfl.methods.components.curvature.fisher import FISHER_KINDS, FisherKind, check_fisher, diagonal_fisher
from cfl.methods.components.joined_tensors import joined, parted
from cfl.methods.components.sparse import kept_entries, largest, message_bytes
from cfl.methods.context import Context
from cfl.models.copies import networks_for_threads
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices, check_integers, check_numbers
from cfl.runtime.ordered_threads import in_order

Tensors = dict[str, Tensor]

_log = logging.getLogger(__name__)


class FedCurv(Method):
    """Adds a penalty towards the other clients' last weights, weighted by the other clients' Fisher information::

        L_s(w) + strength * sum_{j != s} (w - w_j)^T diag(F_j) (w - w_j)    (Shoham et al., 2019, eq 3, without a half)

    in client s's local training of round t, with ``w_j``, the weights at which client j ended its local training of
    round t - 1, and ``F_j``, the diagonal Fisher information of its own data at ``w_j``
    (:func:`cfl.methods.components.curvature.fisher.diagonal_fisher`, the network in evaluation mode). The server reads
    two sums

        u = sum_j F_j,    v = sum_j F_j w_j

    and sends them to all clients. A client that is in the sums subtracts its own share, ``u_s = u - F_s``,
    ``v_s = v - F_s w_s``. Every local step adds ``2 strength (u_s w - v_s)`` to the gradient, before clipping and the
    optimizer. As for all methods, the reported training loss does not include the penalty. There is no penalty in the
    run's first round.

    Nothing accumulates: u and v belong to the last round alone. At the beginning of a task, this is the last round of
    the previous task. If clients are sampled (not in the paper), u and v are sums over those that took part in the last
    round; a client that did not take part subtracts nothing. The sums are not weighted, whatever
    ``federated.client_weighting`` is.

    The penalty is on exchanged parameters only, not on personal ones nor on BatchNorm's running statistics. The Fisher
    uses the client's running statistics after local training (with ``federated.batchnorm: drop`` each batch's own).
    Outputs that are not in a client's loss have no Fisher and no penalty.

    Precision: sums and differences have the parameters' dtype. Rounding may make ``u - F_s`` negative; these entries,
    and those of ``v_s``, are set to 0. The error is at most some units in the last place of u, and the penalty never
    pushes away from the anchor. If only one client has a Fisher, the difference is exactly 0.

    Stability: the penalty's curvature grows with the number of clients. Gradient steps along it are stable where
    ``2 strength lr u_s < 2`` (SGD; momentum m allows 2 + 2 m, other optimizers are not checked). The greatest value of
    a round is ``greatest_pull`` in the method's table; see ``on_unstable``.

    The paper leaves open which Fisher it uses (labels, mean or sum over samples) and what sampled clients do. It
    proposes sparse messages (``keep``) in section 3.1 without trying them.

    Sends: up, in every round but the last, the client's shares of u and v with the update, read as sums; down, from the
    second round on, u and v with the model. This is three times the model each way. With ``keep`` q below 1, at most
    ``ceil(q n)`` of the n entries are sent up, as two values and an int32 index; down, all entries that any client
    sent, in the same form or whole, whichever is smaller. The server then learns which entries a client chose, but not
    their values. Memory per client: its last message. Extra compute: two element-wise passes over the weights per local
    step, and a Fisher after local training, less than two local epochs (``expected``: one backward pass per output).
    Scenarios: all. Optimizers: any.

    Args:
        strength: lambda, at least 0; 0 is federated averaging.
        fisher: which labels: ``empirical`` (true), ``expected`` (the model's own distribution, exactly), ``sampled``
            (one draw from it) or ``weighted`` (true, times its probability). Densities have no labels: ``empirical``.
        reduction: ``mean`` or ``sum`` over a client's samples.
        fisher_batch_size: samples per pass. Changes memory and speed, and results where BatchNorm has no statistics.
        keep: q in (0, 1], the share of entries that a client sends, those with the largest Fisher; the rest count as 0,
            also in the share that it subtracts.
        on_unstable: what happens when ``2 strength lr max(u)`` exceeds 2: ``warn`` (once) or ``stop``. ``clip`` limits
            the pull instead, in every step: where ``2 strength lr u_s`` exceeds 1, u_s and v_s are scaled down to 1, so
            that a step without momentum goes at most as far as the others' weights. ``stop`` and ``clip`` need SGD.

    Raises:
        ConfigError: for values other than these; two of these methods; with ``stop``, an unstable penalty.
    """

    scenarios = EVERY_SCENARIO
    pulls_with: ClassVar[str] = "strength"
    task_free = True
    client_clocks = True
    # Clients' own shares are in ``context.clients``.
    state = ("u", "v", "_of_round", "_penalty_bytes", "_rows")

    def __init__(
        self,
        strength: float = 1.0,
        fisher: FisherKind = "empirical",
        reduction: Literal["mean", "sum"] = "mean",
        fisher_batch_size: int = 256,
        keep: float = 1.0,
        on_unstable: Literal["warn", "stop", "clip"] = "warn",
    ) -> None:
        check_numbers("methods.fedcurv", "[0, inf)", strength=strength)
        check_numbers("methods.fedcurv", "(0, 1]", keep=keep)
        check_choices("methods.fedcurv", FISHER_KINDS, fisher=fisher)
        check_choices("methods.fedcurv", ("mean", "sum"), reduction=reduction)
        check_choices("methods.fedcurv", ("warn", "stop", "clip"), on_unstable=on_unstable)
        check_integers("methods.fedcurv", 1, fisher_batch_size=fisher_batch_size)
        self.strength = strength
        self.fisher: FisherKind = fisher
        self.reduction: Literal["mean", "sum"] = reduction
        self.fisher_batch_size = fisher_batch_size
        self.keep = keep
        self.on_unstable = on_unstable
        self.u: Tensors = {}
        self.v: Tensors = {}
        self._of_round = -1
        self._penalty_bytes = 0
        self._rows: list[dict[str, Any]] = []
        self._fisher_seconds = 0.0
        self._lr: float | None = None  # of an optimizer whose step along a quadratic is a gradient step
        self._warned = False

    def setup(self, context: Context) -> None:
        """Find the parameters that clients exchange.

        Raises:
            ConfigError: if ``on_unstable`` is not ``warn`` for an optimizer whose stability is not known, there are two
                of these methods, which would share their clients' state, clients train on samples of other tasks, or
                the network has no labels of this kind or cannot be differentiated.
        """
        super().setup(context)
        optimizer = context.optimizer
        self._lr = float(optimizer.param_groups[0]["lr"]) if isinstance(optimizer, SGD) else None
        if self._lr is None and optimizer is not None and self.on_unstable != "warn":
            valid = f"warn while the optimizer is {type(optimizer).__name__}"
            raise ConfigError(f"{self.key}.on_unstable", self.on_unstable, valid)
        self.refuse_twins(FedCurv, "one FedCurv; its strength is the sum of theirs")
        self._names = context.shared_parameters
        key = f"{self.key}.fisher"
        check_fisher(self.fisher, context.network, key, context.measure, context.input_shape, self._names)
        if self.strength > 0 and not self._names:
            valid = "0 where all parameters stay on their client: clients share no parameters"
            raise ConfigError(f"{self.key}.strength", self.strength, valid)
        exposure = context.exposure
        if exposure not in ONE_AT_A_TIME:
            valid = "sequential or unannounced while FedCurv takes the Fisher of a task's samples"
            raise ConfigError("data.exposure", exposure, valid)

    # Local steps.

    def pulls(self, cohort: Cohort) -> dict[str, Pull]:
        """Pulls towards ``v_s / u_s`` that add ``2 strength (u_s w - v_s)`` to gradients."""
        return {name: Pull(2 * self.strength * u, _anchor(u, v)) for name, (u, v) in self._held_to(cohort).items()}

    def _held_to(self, cohort: Cohort) -> dict[str, tuple[Tensor, Tensor]]:
        """u_s and v_s of these clients: the sums without the clients' own shares, on the cohort's device."""
        if not self.u:
            return {}
        context = self.context
        context.channel.downlink("fedcurv", joined(u=self.u, v=self.v), len(cohort.clients), self._penalty_bytes)
        tensors = context.state_tensors()
        nothing = {n: torch.zeros_like(tensors[n]) for n in self._names}
        default = {**joined(u=nothing, v=nothing), "round": torch.tensor(-1)}
        own = context.clients.gather("fedcurv", cohort.clients, default)
        own_u, own_v = parted(own, "u", "v")
        took_part = own["round"] == self._of_round
        found = {}
        for name in self._names:
            total_u, total_v = (sums[name].to(tensors[name].device) for sums in (self.u, self.v))
            mine = took_part.to(total_u.device, total_u.dtype).view(-1, *[1] * total_u.ndim)
            u = torch.sub(total_u, own_u[name].mul_(mine), out=own_u[name]).clamp_(min=0)
            v = torch.sub(total_v, own_v[name].mul_(mine), out=own_v[name]).mul_(u > 0)
            if self.on_unstable == "clip" and self._lr:
                share = (1 / (2 * self.strength * self._lr * u)).clamp_(max=1)
                u, v = u.mul_(share), v.mul_(share)
            found[name] = u, v
        return found

    @property
    def computes_locally(self) -> bool:
        """Whether there is a penalty."""
        return self.strength > 0

    # After local training.

    def _sends_after(self, round: int) -> bool:
        """Whether another round follows, in which there is a penalty."""
        return self.strength > 0 and bool(self._names) and round + 1 < self.context.num_rounds

    @torch.no_grad()
    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Let clients compute the Fisher of their data at their trained weights, send it and store it."""
        if not self._sends_after(cohort.round):
            return
        started = time.perf_counter()
        context = self.context
        clients = [cohort.clients[p] for p in positions]
        # Weight decay of outputs outside the loss does not matter, because they have no Fisher and so no share in v.
        trained = cohort.rows(positions, {**cohort.parameters, **cohort.buffers})
        u = self._fishers(cohort, clients, trained)
        ends = {n: trained[n] for n in self._names}
        message = joined(u=u, v={n: u[n] * ends[n] for n in self._names})
        usable = context.channel.usable(message, clients, "fedcurv")
        if self.keep < 1:
            message = self._sparse(message)
        weights = [1.0 if good else 0.0 for good in usable]
        context.channel.uplink("fedcurv", message, weights, clients, self._fisher_bytes())
        kept = {**message, "round": torch.full((len(clients),), cohort.round)}
        context.clients.scatter("fedcurv", clients, kept, usable)
        self._fisher_seconds += time.perf_counter() - started

    def _fishers(self, cohort: Cohort, clients: Sequence[int], trained: Mapping[str, Tensor]) -> Tensors:
        """Fishers by name, ``[k, ...]``, on a CPU one client per math thread."""
        context, task = self.context, cohort.task

        def compute(network: nn.Module, row: int) -> Tensors:
            return diagonal_fisher(
                network,
                {name: values[row] for name, values in trained.items()},
                context.client_batches(task, clients[row], self.fisher_batch_size, context.device),
                self.fisher,
                context.outputs_in_loss(task, clients[row]),
                self._names,
                torch_generator(context.seed, "fedcurv labels", cohort.round, clients[row]),
                self.reduction,
                context.batchnorm == "drop",
                context.measure,
            )

        stacked = {n: torch.empty_like(trained[n]) for n in self._names}
        networks = networks_for_threads(context.network, len(clients))
        for row, fisher in enumerate(in_order(compute, range(len(clients)), networks)):
            for name, values in fisher.items():
                stacked[name][row] = values
        return stacked

    def _sparse(self, message: Mapping[str, Tensor]) -> Tensors:
        """The message with zeros in all but each client's largest entries of the Fisher."""
        u, v = parted(message, "u", "v")
        flat = torch.cat([u[n].reshape(len(u[n]), -1) for n in self._names], dim=1)
        parts = largest(flat, self.keep).split([u[n][0].numel() for n in self._names], dim=1)
        chosen = {n: part.view(u[n].shape) for n, part in zip(self._names, parts, strict=True)}
        return joined(
            **{k: {n: torch.where(chosen[n], of[n], 0) for n in self._names} for k, of in (("u", u), ("v", v))}
        )

    def _sizes(self) -> tuple[int, int]:
        """Number of exchanged parameters, and bytes of one value of F and one of F w for all of them."""
        tensors = self.context.state_tensors()
        exchanged = {n: tensors[n] for n in self._names}
        return sum(t.numel() for t in exchanged.values()), 2 * payload_bytes(exchanged)

    def _fisher_bytes(self) -> int:
        """Bytes of a client's message with its shares of u and v."""
        size, dense = self._sizes()
        return dense if self.keep == 1 else message_bytes(kept_entries(self.keep, size), size, dense // size)

    def end_round(self, plan: RoundPlan) -> None:
        """Read the sums at the server, for the next round."""
        if not self._sends_after(plan.round):
            return
        sums, clients = self.context.channel.sum("fedcurv")
        self.u, self.v = parted(sums, "u", "v")
        self._of_round = plan.round
        size, dense = self._sizes()
        self._penalty_bytes = dense
        if self.keep < 1:
            sent = sum(int(((self.u[n] != 0) | (self.v[n] != 0)).sum()) for n in self._names)
            self._penalty_bytes = message_bytes(sent, size, dense // size)
        u_max = max(float(self.u[n].max()) for n in self._names if self.u[n].numel())
        seconds, self._fisher_seconds = max(self.context.everyones(self._fisher_seconds)), 0.0
        self._rows.append(
            {
                "round": plan.round,
                "clients": round(clients),
                "u_mean": sum(float(self.u[n].sum()) for n in self._names) / size,
                "u_max": u_max,
                "greatest_pull": None if self._lr is None else 2 * self.strength * self._lr * u_max,
                "fisher_seconds": seconds,
            }
        )
        self._check_stability(plan, u_max)

    def _check_stability(self, plan: RoundPlan, u_max: float) -> None:
        """Warn or stop if local steps along the penalty are unstable."""
        if self._lr is None or 2 * self.strength * self._lr * u_max <= 2 or self.on_unstable == "clip":
            return
        limit = 1 / (self._lr * u_max)
        found = f"2 strength lr max(u) = {2 * self.strength * self._lr * u_max:.3g} after round {plan.round}"
        if self.on_unstable == "stop":
            raise ConfigError(
                f"{self.key}.strength",
                self.strength,
                f"in a new run less than {limit:.3g}, or a smaller model.optimizer lr: {found}; steps diverge above 2",
            )
        if not self._warned:
            rank_zero_only(_log.warning)(
                "%s.strength = %g with lr = %g and max(u) = %.3g: %s, and steps diverge above 2; in a new run, "
                "strength below %.3g, a smaller lr or on_unstable = clip help",
                self.key,
                self.strength,
                self._lr,
                u_max,
                found,
                limit,
            )
        self._warned = True

    # Reports and checkpoints.

    def report(self) -> Report:
        """Seconds for Fishers, bytes that a client stores, and extra bytes that it sends and receives per round.

        A row per round except the last: clients in u, mean and greatest entry of u, ``2 strength lr max(u)``, seconds
        for Fishers.
        """
        figures = {
            "fisher_seconds": sum(row["fisher_seconds"] for row in self._rows),
            "client_bytes": self.client_storage(),
            "fisher_bytes": self.client_storage(),
            "penalty_bytes": self._penalty_bytes,
        }
        return Report(figures, self._rows)

    def client_storage(self) -> int:
        """Bytes of a client's shares of u and v, once it has sent them."""
        return self._fisher_bytes() if self._rows else 0


def _anchor(u: Tensor, v: Tensor) -> Tensor:
    """``v / u``; 0 where u is 0, or too small to divide by and to pull.

    Half precision is divided in float32: its own smallest normal numbers are usual Fisher entries.
    """
    wide = torch.promote_types(u.dtype, torch.float32)
    held = u.to(wide)
    return v.to(wide).div_(held).masked_fill_(held < torch.finfo(wide).tiny, 0.0).to(u.dtype)
