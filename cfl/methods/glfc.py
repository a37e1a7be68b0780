"""GLFC (Dong et al., CVPR 2022, "Federated Class-Incremental Learning"): global-local forgetting compensation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.data.cohorts import CohortBatch
from cfl.data.samples import Samples
from cfl.data.scenarios import Scenario
from cfl.data.schedule import RoundPlan
from cfl.data.task_handles import TaskRef
from cfl.engines.cohort import Cohort
from cfl.federation.channel import payload_bytes
from cfl.methods.base import Report
from cfl.methods.components.binary_cross_entropy import mean_bce
from cfl.methods.components.client_model import client_model, evaluating, evaluating_global, run_model
from cfl.methods.components.common_model import network_with_common_features
from cfl.methods.components.exemplars import Table, features_and_labels, no_exemplars, with_classes, with_exemplars
from cfl.methods.components.glfc_proxy import KeptModel, ProxyServer
from cfl.methods.components.gradient_inversion import (
    GradientEncoder,
    encoder_gradient,
    invert_gradients,
    recovered_label,
)
from cfl.methods.components.herding import herd
from cfl.methods.components.old_outputs import old_sigmoids
from cfl.methods.components.own_loss import OwnLoss
from cfl.methods.components.weighted_sum import weighted_sum
from cfl.methods.context import Context
from cfl.methods.gradient_compensation import over_group_means
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.moving import moved
from cfl.runtime.option_checks import MOST_AT_ONCE, check_integers, check_numbers


class GLFC(OwnLoss):
    """Detects new data at the clients, replays with compensated gradients, and distils a model chosen by the server.

    **Task detection.** When a round begins, a client computes the mean entropy of the received model's predictions on
    its current data. A rise by more than ``threshold`` since its last round is its *signal* that the data are new; its
    first round is a signal, too. After a signal it fills its memory from the data that it trained on before its current
    ones: ``size / classes learned`` samples of each class, by herding on features of length 1 under the received model.
    Of earlier classes the first samples are kept. If it has learned more classes than ``size``, it keeps one sample of
    each of the latest. Clients are not told when tasks begin. A signal may come rounds after the data have changed, or
    never. A client therefore keeps its former samples when its data change, which it sees by comparing its current
    samples with those of its last round.

    **Loss** of the step's own samples and a proportional number of memory samples, which are augmented anew in every
    step like own samples. Its means count every sample of the client's training set and memory the same, and BCE is
    over the outputs in the sample's loss::

        1/2 mean_i w_i BCE(sigmoid(h(x_i)), onehot(y_i)) + 1/2 mean_i BCE(sigmoid(h(x_i)), t_i)

    The first term is gradient compensation: ``w_i = g_i / (mean of g over i's group)`` with
    ``g_i = |sigmoid(h(x_i))_y - 1|``. One group is the samples of classes that the client has learned before, the other
    group all others. Before it has learned any class, ``w_i = 1``. The second term is relation distillation: ``t_i`` is
    ``onehot(y_i)`` with the entries of the old model's classes replaced by that model's sigmoids. Without an old model
    the loss is the first term without the factor 1/2.

    **Proxy server.** A client with a signal takes, after local training, the image nearest to the mean feature of each
    of its current classes. It perturbs the image by ``perturbation_steps`` steps of SGD towards the trained model's
    prediction of the class (learning rate a tenth of the client's, weight decay 1e-5), and sends its gradient in a
    small fixed encoder (:class:`cfl.methods.components.gradient_inversion.GradientEncoder`). The server reconstructs
    labels and images (:func:`cfl.methods.components.gradient_inversion.invert_gradients`), keeps the last ``images``
    iterates of each, and evaluates every round's global model on them. Clients distil the best models of the task and
    of the previous task (:class:`cfl.methods.components.glfc_proxy.ProxyServer`, which also lists differences from the
    authors' code).

    Differs from the authors' code: entropies are exact. That code has ``log(p + 1e-5)``, which lowers the entropy of O
    outputs by at most O times 1e-5. Differs from the paper, whose network grows, and which distils all old outputs.
    Here outputs exist from the start. Clients distil the outputs of classes of which the server had images when it
    chose the model, and models are evaluated among the classes of which it has images. Prototypes are perturbed as
    standardised pixels, in the authors' code as plain ones. In the paper the entropy rises because the network grows:
    new outputs, not yet trained, are as probable as others. ``data.class_loss: seen`` has the same effect (an output is
    in loss and entropy only from its task on). ``all`` has no such effect, and gives few signals. New outputs alone
    raise the entropy of a flat prediction, from log 2 to log 4 by 0.69; with a lower ``threshold`` signals follow the
    growth, whatever the data. In the paper clients check their data in every round; here, in rounds in which they are
    sampled. A client's first round counts as a signal even if the entropy, from 0, rises by less. Inversion has a line
    search, without which it may diverge, and an image that has converged takes no further iterations. No entropy
    exceeds log O, so with fewer than four outputs in the loss it cannot rise by the paper's 1.2.

    Sends: up, with a signal, a gradient of the encoder per class. The server sees them one by one, which rules out
    secure aggregation, and is meant to reconstruct images from them. Down, the old model whenever the client has
    another one. Storage per client: the memory, that model and the samples before the current ones. Extra compute: a
    forward pass over all of a client's data per round, one of the old model in every step, training on the memory, and
    prototypes; at the server, per client and class of a new task, up to ``inversion_steps`` of up to 20 iterations,
    each a gradient of the encoder's gradient, and a forward pass over the pool per round. Scenarios: class-incremental.
    Optimizers: any.

    Args:
        size: samples in a client's memory, of all classes together.
        batch_size: memory samples per local step; null is their proportion, as if they were in the training set.
        threshold: rise of the mean entropy, in nats.
        perturbation_steps: steps of SGD that perturb a prototype, at least 0.
        inversion_steps: steps of L-BFGS per image, at least 1.
        images: last iterates kept of each inversion, at least 1.

    Raises:
        ConfigError: a value other than these; or, before training, clients' models differ.
    """

    individual_uplinks = True
    scenarios: ClassVar[frozenset[Scenario]] = frozenset({"class"})
    task_free = True
    # Not with clients' own clocks: the server's two slots, the best models of this task and of the previous one, assume
    # that nearly all clients send images of new classes at about the same time.
    client_clocks = False
    state = ("proxy", "_rows", "seconds")  # clients' memories are in ``context.clients``

    def __init__(
        self,
        size: int = 2000,
        batch_size: int | None = None,
        threshold: float = 1.2,
        perturbation_steps: int = 50,
        inversion_steps: int = 250,
        images: int = 20,
    ) -> None:
        most = MOST_AT_ONCE
        check_integers("methods.glfc", 1, at_most=most, size=size, inversion_steps=inversion_steps, images=images)
        check_integers("methods.glfc", 1, or_null=True, batch_size=batch_size)
        check_integers("methods.glfc", 0, at_most=most, perturbation_steps=perturbation_steps)
        check_numbers("methods.glfc", "[0, inf)", threshold=threshold)
        self.size, self.batch_size, self.threshold = size, batch_size, threshold
        self.perturbation_steps, self.inversion_steps, self.images = perturbation_steps, inversion_steps, images
        self.seconds = 0.0
        self._rows: list[dict[str, Any]] = []
        self._table: Table = {}
        self._signals: list[bool] = []
        self._old: list[KeptModel | None] = []

    def setup(self, context: Context) -> None:
        """Give every client an empty memory, and create the encoder.

        Raises:
            ConfigError: clients' models differ, or a later method changes the model that the proxy server judges.
        """
        super().setup(context)
        later = {name: context.methods[name] for name in list(context.methods)[self.source :]}
        if behind := [name for name, method in later.items() if method.moves_model_after_round]:
            valid = f"{self.name} behind {', '.join(behind)}, so that its proxy server judges the round's final model"
            raise ConfigError("methods", list(context.methods), valid)
        self._network = network_with_common_features(self)
        self.proxy = ProxyServer(context.num_outputs)
        generator = torch_generator(context.seed, f"{self.name} encoder")
        self._encoder = GradientEncoder(context.input_shape, context.num_outputs, generator)
        self._empty = {
            **no_exemplars(self.size),
            "learned": torch.zeros(context.num_outputs, dtype=torch.bool),
            "entropy": torch.zeros((), dtype=torch.float64),
            "last": torch.full((context.most_trained_on,), -1, dtype=torch.int64),
            "before": torch.full((context.most_trained_on,), -1, dtype=torch.int64),
            "version": torch.tensor(0),
        }

    # A client's data and memory.

    def _places(self, task: TaskRef, client: int) -> Tensor:
        """Handles ``[n]`` of a client's current data."""
        return torch.from_numpy(self.context.global_index_trained_on(task, client))

    def _with_current_data(self, before: Table, places: Tensor) -> Table:
        """A client's table after comparing its current data with those of its last round."""
        if torch.equal(_held(before["last"]).sort().values, places):  # in another order in earlier checkpoints
            return before
        padded = F.pad(places, (0, len(before["last"]) - len(places)), value=-1)
        return before | {"before": before["last"].clone(), "last": padded}

    def _batches(self, places: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for part in places.to(self.context.device).split(self.context.eval_batch_size):
            x, y, _ = self.context.samples_at(part)
            yield x, y

    @torch.no_grad()
    def _entropy(self, model: Mapping[str, Tensor], places: Tensor, allowed: Tensor | None) -> float:
        """Mean entropy in nats of a model's predictions, over the allowed outputs."""
        total = 0.0
        with evaluating(self.context):
            for x, _ in self._batches(places):
                logits = run_model(self.context, model, x)
                if allowed is not None:
                    logits = logits.masked_fill(~allowed.to(logits.device), -torch.inf)
                total += float(torch.special.entr(logits.double().softmax(1)).sum())
        return total / len(places)

    @torch.no_grad()
    def _features(self, model: Mapping[str, Tensor], places: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, d]`` features of length 1 and ``[n]`` outputs."""
        with evaluating(self.context):
            return features_and_labels(self._network, model, self._batches(places))

    def _remember(self, before: Table, model: Mapping[str, Tensor], places: Tensor) -> Table:
        """A client's new memory.

        Args:
            before: its table.
            model: the model whose features are used for herding.
            places: handles of the data that it trained on before.
        """
        features, labels = self._features(model, places)
        learned = before["learned"].clone()
        learned[labels.unique().cpu()] = True
        each = max(1, self.size // int(learned.sum()))
        exemplars = with_classes(before, each, features, labels, places)
        return {name: values.clone() for name, values in self._empty.items()} | exemplars | {"learned": learned}

    # Local training.

    @torch.no_grad()
    def start_clients(self, cohort: Cohort) -> None:
        """Detect new data with the received model, and send clients the old model that they distil."""
        context = self.context
        stacked = context.clients.gather(self.name, cohort.clients, self._empty)
        self._signals, self._old, late = [], [], []
        for row, client in enumerate(cohort.clients):
            table = {name: values[row] for name, values in stacked.items()}
            first, places = not len(_held(table["last"])), self._places(cohort.task, client)
            table = self._with_current_data(table, places)
            kept = {name: table[name] for name in ("before", "last", "version")}
            before = _held(table["before"])
            model = client_model(context, client)
            entropy = self._entropy(model, places, context.outputs_in_loss(cohort.task, client))
            signals = first or entropy - float(table["entropy"]) > self.threshold
            if signals and len(before):
                table = self._remember(table, model, before) | kept
            old = self.proxy.old_model(signals, self._classes(places))
            if old is not None and old.version != int(table["version"]):
                late.append(old)
                table["version"] = torch.tensor(old.version)
            table["entropy"] = torch.tensor(entropy, dtype=torch.float64)
            self._signals.append(signals)
            self._old.append(None if old is None else self._received(model, old))
            for name, values in table.items():
                stacked[name][row] = values
        self._table = stacked
        for model_sent in late:
            context.channel.downlink(f"{self.name} old model", model_sent.tensors, 1)

    def _classes(self, places: Tensor) -> Tensor:
        """``[O]`` bool, the outputs among the labels of these samples."""
        return self.context.labels_at(places).bincount(minlength=self.context.num_outputs) > 0

    def _received(self, model: dict[str, Tensor], old: KeptModel) -> KeptModel:
        """An old model at a client, with the running statistics of its ``model`` if it keeps its own."""
        device = self.context.device
        tensors = {name: tensor.to(device) for name, tensor in old.tensors.items()}
        return replace(old, tensors={**model, **tensors}, classes=old.classes.to(device))

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        """Add memory samples, and the extras that the losses need."""
        batch = batch.with_extras(self._extras(batch.x, batch.y, batch.mask_on_cpu))
        return with_exemplars(self, self._table, cohort, batch, self.batch_size, self._extras)

    def _extras(self, x: Tensor, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """The clients' samples' compensation groups, and the old models' outputs for them.

        Args:
            x: ``[K, M, C, H, W]`` inputs.
            y: ``[K, M]`` output indices.
            mask: ``[K, M]`` bool on the CPU, False where there is no sample.

        Returns:
            ``group`` ``[K, M]`` int64, see :func:`compensation`; ``old`` ``[K, M, O]``, the old model's sigmoids, -1
            for classes that it does not know, and for all without an old model.
        """
        learned = moved(self._table["learned"], y.device)
        group = torch.where(learned.gather(1, y), 2, 1) * learned.any(1, keepdim=True)
        none = torch.zeros_like(learned[0])
        known = torch.stack([none if old is None else old.classes for old in self._old])
        models = [None if old is None else old.tensors for old in self._old]
        target = torch.where(known.unsqueeze(1), old_sigmoids(self.context, models, x, mask), -1.0)
        return {f"{self.name} group": group, f"{self.name} old": target}

    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        """Gradient compensation and relation distillation."""
        ours = samples.mask & self.ours(samples)
        extras = samples.extras
        truth = F.one_hot(samples.y, logits.shape[-1]).to(logits.dtype)
        factors = compensation(logits.detach(), samples.y, ours, extras[f"{self.name} group"])
        old = extras[f"{self.name} old"].to(logits.dtype)
        compensated = factors * mean_bce(logits, truth, samples.allowed)
        related = mean_bce(logits, torch.where(old >= 0, old, truth), samples.allowed)
        distils = (old >= 0).any(-1)
        losses = torch.where(distils, 0.5 * compensated + 0.5 * related, compensated)
        return weighted_sum(losses, samples.weights, ours)

    # Prototypes of new classes.

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Store the clients' tables; clients with a signal send a gradient of a prototype of each class."""
        # Stored only now, so that a client that trains to NaN keeps its former table and checks its data again.
        clients, rows = [cohort.clients[p] for p in positions], list(positions)
        self.context.clients.scatter(self.name, clients, {name: v[rows] for name, v in self._table.items()})
        tensors = {**cohort.parameters, **cohort.buffers}
        for position in positions:
            if not self._signals[position]:
                continue
            client = cohort.clients[position]
            model = {name: values[position].detach().clone() for name, values in tensors.items()}
            images, labels = self._prototypes(model, cohort, client)
            encoder = self._encoder.to(images.device)
            gradients = [encoder_gradient(encoder, x, y) for x, y in zip(images, labels, strict=True)]
            message = {name: torch.stack([g[name] for g in gradients])[None] for name in gradients[0]}
            self.context.channel.uplink_individually(f"{self.name} prototypes", message, [client])

    def _prototypes(self, model: Mapping[str, Tensor], cohort: Cohort, client: int) -> tuple[Tensor, Tensor]:
        """``[n, C, H, W]`` perturbed images, one for each class of a client's current data, and ``[n]`` classes."""
        context = self.context
        places = self._places(cohort.task, client)
        features, labels = self._features(model, places)
        classes = labels.unique()
        nearest = []
        for output in classes.tolist():
            rows = (labels == output).nonzero().squeeze(1)
            nearest.append(rows[herd(features[rows], 1)[0]])
        x, y, _ = context.samples_at(places[torch.stack(nearest).cpu()].to(context.device))
        allowed = context.outputs_in_loss(cohort.task, client)
        image = x.clone().requires_grad_()
        optimizer = torch.optim.SGD([image], lr=cohort.lr / 10, weight_decay=1e-5)
        with torch.enable_grad(), evaluating(context):
            for _ in range(self.perturbation_steps):
                logits = run_model(context, model, image)
                truth = F.one_hot(y, logits.shape[1]).to(logits.dtype)
                loss = mean_bce(logits, truth, allowed).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return image.detach(), y

    # The proxy server.

    @torch.no_grad()
    def end_round(self, plan: RoundPlan) -> None:
        """Invert the received gradients, and evaluate the new global model on the images."""
        started = time.perf_counter()
        context = self.context
        self._old = []
        messages = context.channel.collect_individually(f"{self.name} prototypes")
        new_task = False
        if messages:
            # In one process, because rounding differences between processes would grow with every iteration.
            given = context.at_server(lambda: self._inverted(plan, messages))
            new_task = self.proxy.receive(*given)
            self._rows.append(
                {"round": plan.round, "clients": len(messages), "images": len(given[1]), "new_task": int(new_task)}
            )
        shared = context.shared_tensors()
        self.proxy.judge(shared, self._accuracy, bool(messages) and not new_task)
        self.seconds += time.perf_counter() - started

    def _inverted(self, plan: RoundPlan, messages: Mapping[int, dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """``[m, C, H, W]`` images and ``[m]`` labels reconstructed from clients' gradients, on the CPU."""
        context = self.context
        names = next(iter(messages.values()))
        gradients = {name: torch.cat([message[name] for message in messages.values()]) for name in names}
        some = next(iter(gradients.values()))
        labels = torch.tensor([recovered_label({n: g[row] for n, g in gradients.items()}) for row in range(len(some))])
        generators = [
            torch_generator(context.seed, f"{self.name} inversion", plan.round, client, number)
            for client, message in messages.items()
            for number in range(len(next(iter(message.values()))))
        ]
        encoder, shape, steps = self._encoder.to(some.device), context.input_shape, self.inversion_steps
        images = invert_gradients(encoder, gradients, labels, shape, steps, generators, self.images)
        return images.flatten(0, 1), labels.repeat_interleave(images.shape[1])

    def _accuracy(self, tensors: Mapping[str, Tensor]) -> float:
        """A model's accuracy on the pool's images, among the classes of which the server has images."""
        context, pool, labels = self.context, self.proxy.images, self.proxy.labels
        assert pool is not None
        shared = {name: tensor.to(context.device) for name, tensor in tensors.items()}
        correct = 0
        with evaluating_global(context):
            state = {n: t.detach() for n, t in context.state_tensors().items()}
            model = {**state, **shared}
            for rows in torch.arange(len(labels)).split(context.eval_batch_size):
                logits = run_model(context, model, pool[rows].to(context.device)).cpu()
                known = logits.masked_fill(~self.proxy.classes, -torch.inf)
                correct += int((known.argmax(1) == labels[rows]).sum())
        return context.at_server(lambda: correct / len(labels))

    # Reports and checkpoints.

    def client_storage(self) -> int:
        """Bytes of memory with label and rank, samples before the current ones, old model, entropy and flags."""
        context = self.context
        pixels, old = math.prod(context.input_shape), payload_bytes(context.shared_tensors())
        return self.size * (pixels + 2) + context.most_trained_on * (pixels + 1) + old + 8 + context.num_outputs

    def report(self) -> Report:
        """Samples in a client's memory, clients' signals (first rounds included), seconds of the proxy server.

        A row per round in which clients sent gradients: number of clients and images, and whether these images began a
        new task.
        """
        signals = sum(row["clients"] for row in self._rows)
        figures = {"memory_samples": self.size, "signals": signals, "proxy_seconds": self.seconds}
        return Report(figures, self._rows)


def compensation(logits: Tensor, y: Tensor, ours: Tensor, group: Tensor) -> Tensor:
    """``[N]`` factors ``g_i / mean of g over i's group`` with ``g_i = |sigmoid(z_i)_y - 1|``; 1 outside the groups.

    Args:
        logits: ``[N, O]``, detached.
        y: ``[N]`` int64.
        ours: ``[N]`` bool, which samples count.
        group: ``[N]`` int64: 2 for classes learned before, 1 for others, 0 where the client has learned none before.
    """
    g = 1.0 - logits.sigmoid().gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return over_group_means(g, (ours & (group == number) for number in (1, 2)))


def _held(places: Tensor) -> Tensor:
    """Handles without the padding behind them."""
    return places[places >= 0]
