"""iCaRL (Rebuffi et al., CVPR 2017) at every client, with class means averaged over clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.data.cohorts import CohortBatch
from cfl.data.samples import Samples
from cfl.data.scenarios import Scenario
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.federation.channel import payload_bytes
from cfl.methods.base import Report
from cfl.methods.components.binary_cross_entropy import mean_bce
from cfl.methods.components.client_model import client_model, evaluating, run_model
from cfl.methods.components.common_model import network_with_common_features
from cfl.methods.components.exemplars import Table, features_and_labels, no_exemplars, with_classes, with_exemplars
from cfl.methods.components.old_outputs import old_sigmoids
from cfl.methods.components.own_loss import OwnLoss
from cfl.methods.components.previous_model import PreviousModel
from cfl.methods.components.weighted_sum import weighted_sum
from cfl.methods.context import Context
from cfl.models.features import unit_features
from cfl.runtime.errors import ConfigError
from cfl.runtime.moving import moved
from cfl.runtime.option_checks import MOST_AT_ONCE, check_choices, check_integers


class ICaRL(OwnLoss):
    """Trains on exemplars, distils the previous task's model, and classifies by the nearest class mean.

    **Loss** (eq 1): binary cross-entropy with logits, mean over the classes seen so far and over samples, own ones and
    exemplars alike. Targets are one-hot for the current task's classes. For earlier classes, from the second task on,
    they are the outputs ``sigmoid(h_old(x))`` of the global model at the start of the task.

    **Exemplars** (Algorithms 4, 5): after a task every client that holds it keeps, for each class it has seen,
    ``size / classes seen by the federation`` samples, at least one, chosen by herding on features of length 1. Of
    earlier classes the first exemplars are kept. They count as if they were in the client's training set: every
    local step gets exemplars in proportion to their share of it, rounded up, with a share of the loss that makes every
    sample of an epoch count the same. They are augmented anew like the client's samples.

    **Classifier** (Algorithm 1): the class whose mean feature is nearest. The original has one learner. Here every
    client sends the mean of its exemplars' features for each of its classes, and the server averages over the clients
    that have the class. Classes without a mean are ranked after all others, in the order of the network's outputs.
    These are the classes of the current task, so this matters only if ``schedule.evaluate_every`` evaluates during a
    task.

    Sends: after every task an extra round of the clients that hold it and, for class means, of all others that have
    exemplars: the new global model down; up, class means and the list of classes that have one, as sums. The previous
    task's model goes down once more to every client that was neither in that round nor in the task's first. If clients
    keep BatchNorm's running statistics local, that model uses theirs. Storage per client: exemplars and that model.
    Extra compute: a forward pass of the old model over every step's samples, training on exemplars, and a forward pass
    over the task's samples after the task. Scenarios: class-incremental; task-incremental figures are computed from the
    same run. Optimizers: any.

    Differs from the paper: the network starts every task from its current weights, with new outputs already there. The
    loss is a mean over classes seen, as in the mammoth library; the paper sums over them. Features of length 1 are the
    paper's: some versions of mammoth take features as they are, in herding and in classification.

    Args:
        size: exemplars per client, of all classes together.
        batch_size: exemplars per local step; null is their proportion, as if they were in the training set.
        classifier: ``nearest_mean``, or the ``network``'s outputs (iCaRL's hybrid 1).
        mirrored: whether features are means over an image and its mirror, for herding and classification.

    Raises:
        ConfigError: a value other than these; or, before training, clients' models differ, or a client holds more
            classes than ``size``, so that some would have no exemplar.
    """

    looks_back: ClassVar[bool] = True
    common_order: ClassVar[bool] = True
    scenarios: ClassVar[frozenset[Scenario]] = frozenset({"class"})
    # Exemplars are in ``context.clients``.
    state: ClassVar[Mapping[str, str]] = {
        "means": "means",
        "known": "known",
        "old": "_old.tensors",
        "received": "_old.holders",
    }

    def __init__(
        self,
        size: int = 200,
        batch_size: int | None = None,
        classifier: Literal["nearest_mean", "network"] = "nearest_mean",
        mirrored: bool = False,
    ) -> None:
        check_integers("methods.icarl", 1, at_most=MOST_AT_ONCE, size=size)
        check_integers("methods.icarl", 1, or_null=True, batch_size=batch_size)
        check_choices("methods.icarl", ("nearest_mean", "network"), classifier=classifier)
        self.size, self.batch_size = size, batch_size
        self.classifier, self.mirrored = classifier, mirrored
        self.means: Tensor | None = None
        self.known = torch.zeros(0, dtype=torch.bool)
        self._old = PreviousModel()
        self._table: Table = {}
        self._models: list[dict[str, Tensor]] = []
        self._complete = False

    def setup(self, context: Context) -> None:
        """Give every client an empty set of exemplars.

        Raises:
            ConfigError: if clients' models differ, so that there are no common features, or ``size`` is too small.
        """
        super().setup(context)
        self._network = network_with_common_features(self)
        if self.mirrored and context.input_shape[:2] == (1, 1):
            raise ConfigError(f"{self.key}.mirrored", True, "false: samples are rows of numbers, not images")
        if self.size < context.num_outputs:
            self._check_size()
        self._empty = no_exemplars(self.size)

    def _seen(self, task: int) -> Tensor:
        """``[O]`` bool: outputs of the tasks up to this one."""
        return self.context.outputs.own[: task + 1].any(0)

    def _check_size(self) -> None:
        """Refuse a memory with fewer slots than a client will have classes."""
        context = self.context
        held: dict[int, set[int]] = {}
        for task in range(context.num_tasks):
            for client in context.members(task):
                outputs = context.labels_at(torch.from_numpy(context.global_index_of(task, client)))
                held.setdefault(client, set()).update(outputs.unique().tolist())
        client = max(held, key=lambda client: len(held[client]))
        most = len(held[client])
        if self.size < most:
            valid = f"at least {most}, an exemplar for each class that client {client} comes to hold"
            raise ConfigError(f"{self.key}.size", self.size, valid)

    # Local training.

    def begin_task(self, plan: RoundPlan) -> None:
        """Store the global model as the old model of the task."""
        if plan.task > 0:
            # Clients of the extra round after the previous task have received that model.
            self._old.keep(self.context.shared_tensors(), {*self._called_back(plan.task - 1), *plan.clients})

    def start_clients(self, cohort: Cohort) -> None:
        """Load the clients' exemplars, and send the old model to clients that do not have it."""
        context = self.context
        self._table = context.clients.gather(self.name, cohort.clients, self._empty)
        self._models = []
        if cohort.used_outputs is not None:
            # The loss is over all classes seen so far.
            cohort.used_outputs |= moved(self._seen(cohort.task), cohort.used_outputs.device)
        if not self._old:
            return
        old = self._old.lend(context, "old model", cohort.clients)
        self._models = [{**client_model(context, client), **old} for client in cohort.clients]

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        """Add exemplars, and the old model's outputs for all samples."""
        if self._models:
            batch = batch.with_extras(self._outputs(batch.x, batch.y, batch.mask_on_cpu))
        return with_exemplars(self, self._table, cohort, batch, self.batch_size, self._outputs)

    def _outputs(self, x: Tensor, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """``sigmoid(h_old(x))`` ``[K, M, O]``, see :func:`cfl.methods.components.old_outputs.old_sigmoids`; empty
        without an old model."""
        return {f"{self.name} old": old_sigmoids(self.context, self._models, x, mask)} if self._models else {}

    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        """Binary cross-entropy over the classes seen, with the old model's outputs as targets for earlier ones."""
        task = self.context.task_of(self.context.round)
        target = F.one_hot(samples.y, logits.shape[-1]).to(logits.dtype)
        old = samples.extras.get(f"{self.name} old")
        if old is not None:
            target = torch.where(moved(self._seen(task - 1), logits.device), old.to(logits.dtype), target)
        losses = mean_bce(logits, target, self._seen(task))
        return weighted_sum(losses, samples.weights, samples.mask & self.ours(samples))

    def end_round(self, plan: RoundPlan) -> None:
        """Record which clients have the old model."""
        self._old.note(plan.clients)

    # After a task: exemplars and class means.

    @torch.no_grad()
    def end_task(self, plan: RoundPlan) -> None:
        """Let clients choose exemplars of the task, drop some of the earlier ones, and send class means."""
        context = self.context
        seen = self._seen(plan.task)
        each = max(1, self.size // int(seen.sum()))
        chooses = set(context.members(plan.task)).difference(context.channel.dropped_before_message(plan.round))
        for client in context.extra_round(plan.task, self._called_back(plan.task)):
            model, table = client_model(context, client), self._kept(client)
            with evaluating(context):
                if client in chooses:
                    table = self._chosen(table, plan.task, client, model, each)
                    context.clients.scatter(self.name, [client], {n: v[None] for n, v in table.items()})
                if self.classifier == "nearest_mean":
                    self._send_means(client, table, model)
        if self.classifier == "nearest_mean":
            sums, _ = context.channel.sum(f"{self.name} means")
            known = sums["clients"] > 0
            means = F.normalize(sums["means"] / sums["clients"].clamp(min=1).unsqueeze(1), dim=1)
            if self.means is not None:  # keep the former means of classes whose clients have all been left out
                before, means = self.means.to(means.device), means
                means = torch.where(known.unsqueeze(1), means, before)
                known = known | self.known.to(known.device)
            self.means, self.known = means, known
            self._complete = bool(known.all())

    def _called_back(self, task: int) -> list[int]:
        """Clients of the extra round after a task: those that hold it and, for means, all that have exemplars."""
        members = self.context.members(task)
        if self.classifier == "network":
            return members
        return sorted({*members, *self.context.clients.holders(self.name)})

    def _kept(self, client: int) -> Table:
        """A client's exemplars so far."""
        return {n: v[0] for n, v in self.context.clients.gather(self.name, [client], self._empty).items()}

    def _chosen(self, before: Table, task: int, client: int, model: Mapping[str, Tensor], each: int) -> Table:
        """A client's new exemplars: the first ones of earlier classes, and ``each`` of every class of the task."""
        context = self.context
        own = torch.from_numpy(context.global_index_of(task, client))
        batches = context.client_batches(task, client, context.eval_batch_size, context.device)
        return with_classes(before, each, *features_and_labels(self._network, model, batches, self.mirrored), own)

    def _send_means(self, client: int, table: Table, model: Mapping[str, Tensor]) -> None:
        """Send the mean feature of a client's exemplars for each of its classes."""
        held = table["place"] >= 0
        x, y, _ = self.context.samples_at(table["place"][held].to(self.context.device))
        features = unit_features(self._network, model, x, self.mirrored)
        total = features.new_zeros(self._network.num_outputs, features.shape[1]).index_add_(0, y, features)
        count = torch.bincount(y, minlength=len(total))
        means = F.normalize(total, dim=1)
        has = (count > 0).to(means.dtype)
        message = {"means": means[None], "clients": has[None]}
        self.context.channel.uplink(f"{self.name} means", message, [1.0], [client])

    # Evaluation.

    def classify(self, task: int, model: dict[str, Tensor], x: Tensor) -> Tensor | None:
        """Minus the distance to the class means; classes without a mean come last."""
        if self.means is None:
            return None
        self.means, self.known = self.means.to(x.device), self.known.to(x.device)
        features = unit_features(self._network, model, x, self.mirrored)
        near = -torch.cdist(features, self.means.to(features.dtype))
        if self._complete:
            return near
        return torch.where(self.known, near, run_model(self.context, model, x).to(near.dtype).sigmoid() - 1000)

    # Reports and checkpoints.

    def client_storage(self) -> int:
        """Bytes of the exemplars with label and rank, and of the old model."""
        context = self.context
        old = payload_bytes(context.shared_tensors()) if context.num_tasks > 1 else 0
        return self.size * (math.prod(context.input_shape) + 2) + old

    def report(self) -> Report:
        """Number of exemplars that a client can keep."""
        return Report({"exemplars": self.size})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, and check again whether all classes have a mean."""
        super().load_state_dict(state)
        self._complete = self.means is not None and bool(self.known.all())
