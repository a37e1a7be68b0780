"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates that reduce client drift."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from cfl.data.scenarios import EVERY_SCENARIO
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.engines.updates import plain_sgd
from cfl.federation.channel import payload_bytes
from cfl.methods.base import Method
from cfl.methods.capabilities import LearningRateFactors, has
from cfl.methods.components.mean_gradient import Labelled, mean_gradient
from cfl.methods.context import Context
from cfl.models.dropout import DropoutMasks
from cfl.randomness.generators import seed_for
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices

Tensors = dict[str, Tensor]

_TOPIC = "scaffold"


class SCAFFOLD(Method):
    """Corrects every local step by the difference between the mean gradients of the federation and of the client::

        y_i <- y_i - lr (g_i(y_i) - c_i + c)                           (Karimireddy et al., 2020, Algorithm 1)

    starting at ``y_i = w_t``, the global model. ``c_i`` is the client's control variate and ``c`` the server's. After K
    local steps (of the optimizer, so that clients of different sizes have different K)::

        c_i+ = c_i - c + (w_t - y_i) / (K lr)        option II: the mean gradient of its steps
        c_i+ = g_i(w_t)                              option I: the gradient of its loss at the global model
        c   <- c + 1/N sum_S (c_i+ - c_i)            N: all clients of the federation; S: the round's

    and the global model is updated as without the method. All variates start at zero, so the first round is federated
    averaging, and ``c`` is always the mean of all N clients' ``c_i``. Clients that have not trained yet, or do not hold
    the current task, count with their current ``c_i``. If only some clients ever train, ``c`` is therefore smaller,
    which acts like a smaller learning rate. The mean is uniform, as in the paper, also if
    ``federated.client_weighting`` weights updates by samples.

    There are variates for the parameters that clients and server exchange, not for running statistics and personal
    parameters. Outputs of other tasks that are not in a client's loss are not moved by ``c``, and the client's ``c_i``
    does not change there. A client that is left out of a round (``federated.on_bad_update=skip``) keeps its ``c_i``.
    The correction is added in the method's turn among the others, before clipping and the optimizer.

    Option II treats any step as a gradient step. Its result therefore includes weight decay (as part of the loss),
    changes by other methods and, if gradients are clipped, ``c_i - c`` plus the clipped gradients, which is then no
    mean gradient. It is exact for plain SGD only; other optimizers, and momentum, are refused unless ``any_optimizer``.
    Option I uses the client's unaugmented images in batches of ``schedule.batch_size`` with the network in training
    mode, because it has to cancel the gradients of local steps, with BatchNorm's batch statistics and dropout. It
    includes neither weight decay nor changes by other methods.

    A client's variate was computed in its last round, and its error is added in each of K steps. The method therefore
    needs shorter steps than federated averaging (in the paper's theorems lr falls as 1 / K), and diverges if steps are
    too long.

    Differs from the paper, which has no tasks: at the beginning of a task variates belong to the last task. The paper's
    server learning rate is ``federated.server_lr``.

    Sends: ``c`` down and ``c_i+ - c_i`` up, one tensor per exchanged parameter each, read as a sum: twice the
    communication of federated averaging in both directions. Memory per client: one tensor per exchanged parameter.
    Extra compute: an element-wise pass over the weights per local step; option I: a pass over the client's samples per
    round, about one local epoch. Scenarios: all. Optimizers: plain SGD.

    Args:
        variant: the option, ``II`` or ``I``.
        any_optimizer: allow optimizers other than plain SGD, for which ``(w_t - y_i) / (K lr)`` is no gradient.

    Raises:
        ConfigError: for values other than these, another optimizer, two of these methods, no parameters that clients
            and server exchange, option I where clients are exposed to more than one task's samples, or a density is
            estimated, or option II beside a method that gives clients learning rates of their own.
    """

    scenarios = EVERY_SCENARIO
    task_free = True
    client_clocks = True
    state = ("variate",)  # clients' own variates are in ``context.clients``

    def __init__(self, variant: Literal["II", "I"] = "II", *, any_optimizer: bool = False) -> None:
        check_choices("methods.scaffold", ("II", "I"), variant=variant)
        self.variant, self.any_optimizer = variant, any_optimizer
        self.variate: Tensors = {}
        # name -> [k, ...] c - c_i of the current cohort; None between cohorts.
        self._correction: Tensors | None = None
        # [k, O] local steps in which outputs were corrected: some outputs enter the loss after the first step.
        self._corrected: Tensor | None = None

    def setup(self, context: Context) -> None:
        """Refuse settings with which the method cannot work."""
        super().setup(context)
        if context.optimizer is not None:
            self._check_optimizer(context.optimizer)
        self.refuse_twins(SCAFFOLD, "one SCAFFOLD; two would correct the same drift twice")
        if not context.shared_parameters:
            raise ConfigError("methods", [self.name], "no SCAFFOLD where all parameters stay on their client")
        if self.variant == "I":
            if not context.measure.by_outputs:
                raise ConfigError(f"{self.key}.variant", "I", "II where a density is estimated: I looks at labels")
            if context.exposure != "sequential":
                valid = f"sequential while {self.key}.variant is I; II works with any"
                raise ConfigError("data.exposure", context.exposure, valid)
            self._masks = DropoutMasks(context.network, context.input_shape)
            return
        rated = [n for n, m in context.methods.items() if has(m, LearningRateFactors) and m.computes_locally]
        if rated:
            valid = f"none with {self.key}.variant = II, which divides updates by one learning rate of all clients"
            raise ConfigError("methods", rated, valid)

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse, or warn about, optimizers other than plain SGD.

        Raises:
            ConfigError: naming the optimizer.
        """
        name, lr = type(optimizer).__name__, float(optimizer.param_groups[0]["lr"])
        if not lr > 0:
            raise ConfigError("model.optimizer", f"{name} with lr={lr}", "a learning rate above 0 with SCAFFOLD")
        if plain_sgd(optimizer) is not None:
            return
        options = {key: optimizer.param_groups[0].get(key) for key in ("momentum", "maximize", "differentiable")}
        described = ", ".join([name, *(f"{key}={value}" for key, value in options.items() if value)])
        if not self.any_optimizer:
            raise ConfigError(
                "model.optimizer",
                described,
                f"SGD without momentum, for which SCAFFOLD is made, or {self.key}.any_optimizer=true",
            )
        rank_zero_warn(
            f"SCAFFOLD with {described}: its analysis holds for plain SGD"
            + ("; a client's step over K lr, its control variate, is no gradient" * (self.variant == "II"))
        )

    # A round.

    def start_clients(self, cohort: Cohort) -> None:
        """Send ``c`` to the clients, and compute their corrections ``c - c_i``."""
        context = self.context
        tensors = context.state_tensors()
        of_its_size = {n: tensors[n] for n in context.shared_parameters}
        context.channel.downlink(_TOPIC, of_its_size, len(cohort.clients))
        self._correction, self._corrected = {}, None
        if self.variate:
            own = self._own(cohort.clients)
            corrections = {n: v.neg_().add_(self.variate[n].to(v.device)) for n, v in own.items()}
            self._correction = corrections
            if cohort.used_outputs is not None:
                self._corrected = torch.zeros_like(cohort.used_outputs, dtype=torch.int64)

    @property
    def changes_gradients(self) -> bool:
        """Whether any variate is not zero; True between rounds."""
        # Between rounds an engine is chosen for the later rounds, nearly all of which have variates.
        return self._correction is None or bool(self._correction)

    @torch.no_grad()
    def adjust_gradients(self, cohort: Cohort) -> None:
        """Add ``c - c_i``."""
        gradients = cohort.gradients
        for name, correction in (self._correction or {}).items():
            if name in gradients:
                used = cohort.used_rows(name)
                gradients[name].add_(correction if used is None else correction * used)
        if self._corrected is not None and cohort.used_outputs is not None:
            self._corrected += cohort.used_outputs

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Let the clients update their ``c_i`` and send its change."""
        context = self.context
        clients = [cohort.clients[p] for p in positions]
        own = self._own(clients)
        new = self._mean_gradients(cohort, positions) if self.variant == "II" else self._gradients(cohort, positions)
        change = {}
        for name, value in own.items():
            moved, used = new[name] - value, cohort.used_rows(name, positions)
            change[name] = moved if used is None else torch.where(used, moved, torch.zeros_like(moved))
        kept = {n: value + change[n] for n, value in own.items()}
        usable = context.channel.usable(change, clients, _TOPIC)
        context.clients.scatter(_TOPIC, clients, kept, usable)
        context.channel.uplink(_TOPIC, change, [float(good) for good in usable], clients)

    def end_round(self, plan: RoundPlan) -> None:
        """Update ``c`` at the server."""
        total, _ = self.context.channel.sum(_TOPIC)
        for name, change in total.items():
            change /= self.context.num_clients
            self.variate[name] = self.variate[name].to(change.device) + change if name in self.variate else change
        self._correction = self._corrected = None

    def _own(self, clients: Sequence[int]) -> Tensors:
        """The clients' ``c_i``, ``[k, ...]``."""
        tensors = self.context.state_tensors()
        names = self.context.shared_parameters
        nothing = {n: tensors[n].detach().new_zeros(()).expand(tensors[n].shape) for n in names}
        return self.context.clients.gather(_TOPIC, clients, nothing)

    # The two options.

    def _mean_gradients(self, cohort: Cohort, positions: Sequence[int]) -> Tensors:
        """``[k, ...]`` mean over its local steps of each client's gradient without the correction."""
        names = self.context.shared_parameters
        means = {}
        for name, trained in cohort.rows(positions, {n: cohort.parameters[n] for n in names}).items():
            means[name] = (cohort.global_parameters[name] - trained).div_(cohort.steps * cohort.lr)
        for name, correction in cohort.rows(positions, self._correction or {}).items():
            used = cohort.used_rows(name, positions)
            if used is None or self._corrected is None:
                means[name] -= correction
            else:
                (steps,) = cohort.rows(positions, {"steps": self._corrected}).values()
                means[name] -= correction * steps.view(used.shape) / cohort.steps
        return means

    def _gradients(self, cohort: Cohort, positions: Sequence[int]) -> Tensors:
        """``[k, ...]`` gradient of each client's loss at the global model."""
        context = self.context
        start = {**context.state_tensors(), **cohort.global_parameters}
        some = next(context.network.parameters())
        stacks: dict[str, list[Tensor]] = {n: [] for n in context.shared_parameters}
        for row in positions:
            client = cohort.clients[row]
            batches = context.client_batches(cohort.task, client, context.batch_size, some.device)
            allowed = context.outputs_in_loss(cohort.task, client)
            # Of dropout masks; they differ from those of the local step of the same number.
            key = partial(seed_for, context.seed, "scaffold dropout", cohort.round, client)
            found = mean_gradient(
                context.network,
                {**start, **{n: values[row] for n, values in cohort.own.items()}},
                (
                    Labelled(x, y, allowed, self._masks.draw_for_one(key(number), len(y), some))
                    for number, (x, y) in enumerate(batches)
                ),
                context.measure,
            )
            for name, stack in stacks.items():
                stack.append(found[name])
        return {name: torch.stack(stack) for name, stack in stacks.items()}

    # Reports and checkpoints.

    def client_storage(self) -> int:
        """Bytes of ``c_i``."""
        tensors = self.context.state_tensors()
        return payload_bytes({n: tensors[n] for n in self.context.shared_parameters})
