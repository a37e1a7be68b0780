"""CFeD (Ma et al., IJCAI 2022, "Continual Federated Learning Based on Knowledge Distillation")."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfl.data.cohorts import CohortBatch
from cfl.data.samples import ExtraSamples, Samples
from cfl.data.schedule import RoundPlan
from cfl.data.sources.base import Source
from cfl.data.types import PixelTransform
from cfl.engines.cohort import Cohort
from cfl.federation.channel import payload_bytes
from cfl.methods.base import Method, Report
from cfl.methods.capabilities import LocalObjective, has
from cfl.methods.components.client_model import client_model, evaluating, evaluating_global, run_model
from cfl.methods.components.common_model import check_common_model
from cfl.methods.components.previous_model import PreviousModel
from cfl.methods.components.surrogate_data import normalised_as, passes, read_surrogate, shards
from cfl.methods.components.weighted_sum import weighted_sum
from cfl.methods.context import Context
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.moving import moved
from cfl.runtime.option_checks import MOST_AT_ONCE, check_integers, check_numbers
from cfl.runtime.tensor_digest import tensors_digest

Gather = Callable[[Tensor], tuple[Tensor, Tensor]]


class CFeD(Method):
    """Lets some clients of a round distil the old model on surrogate images, from the second task on.

    Clients that *learn* minimise the cross-entropy of their own samples, as in federated averaging. The others
    *review*. On unlabelled images x of a surrogate data set they minimise::

        weight * mean_x - sum_o p_o(x) log q_o(x),   p = softmax(h_old(x) / T),   q = softmax(h(x) / T)

    where ``h_old`` is the global model at the beginning of the task, in evaluation mode, and o runs over the outputs
    that earlier tasks have trained (all outputs if classes compete from the start). There is no factor T^2. The server
    averages over both groups alike. In every round, ``round(share * clients)`` clients are drawn to review; a half is
    rounded to the even number.

    The surrogate set is dealt to the clients once, at random and in equal shards. A reviewing client takes as many
    local steps, on as many images, as it would with its own samples. It goes through its shard in a new random order
    each time. Its own samples do not enter the network. In local steps they do not enter the buffers and memories of
    replay methods either; a memory that is filled at a task's end may choose all of them. Surrogate images are brought
    to the network's input size (:func:`cfl.methods.components.surrogate_data.read_surrogate`) and normalised as those
    of the task being trained, without its permutation or rotation of pixels. They are not augmented.

    **Server distillation** (``server_distillation`` epochs after every round, from the first task on): the server has
    its own shard and trains the averaged model to imitate the round's clients on it. The loss is the same without
    ``weight``, with the mean of the clients' ``softmax(h_k(x) / T)`` as p, over all outputs trained so far, by plain
    SGD.

    Differs from the paper, which trains with Adam at 5e-5, and CIFAR's ResNet-18 from ImageNet's weights. The authors'
    code computes ``h_old`` once per shard and stores it; here it is computed when needed, which gives the same result.
    The mean of softmax outputs, and the server's optimizer, are our choice. BatchNorm: reviewing clients normalise by
    surrogate images, and their running statistics are averaged with the others'; the server does not change them. If
    the server receives no statistics, clients' models and its own normalise by its batch of surrogate images.

    Sends: the task's first model down once more to a reviewing client that has not received it yet. With
    ``server_distillation`` the server must see single clients' models, which rules out secure aggregation. These are
    the updates themselves and are not counted twice. Storage per client: that model and a shard. Extra compute: the old
    model's forward pass at reviewing clients; at the server, all clients' forward passes and training over its shard.
    Scenarios: task-, class- and domain-incremental. Optimizers: any.

    Args:
        surrogate: the data set whose training images, without labels, all clients and the server have.
        share: share of a round's clients that review, in [0, 1); 0 is federated averaging. The paper's code takes 0.4.
        temperature: T, above 0.
        weight: of the reviewing clients' loss, at least 0.
        server_distillation: epochs per round; 0 is averaging alone.
        server_lr: learning rate of server distillation, above 0.

    Raises:
        ConfigError: an option is out of range; or, before training, the surrogate images do not fit the network or are
            too few, no client would ever review, clients' models differ, another method replaces the local loss, or
            there are two of these methods.
    """

    looks_back: ClassVar[bool] = True
    common_order: ClassVar[bool] = True
    reweighs_added_only = True
    state: ClassVar[Mapping[str, str]] = {
        "old": "_old.tensors",
        "received": "_old.holders",
        "seconds": "server_seconds",
        "surrogate": "_surrogate_digest",
    }

    def __init__(
        self,
        surrogate: Source,
        share: float = 0.4,
        temperature: float = 2.0,
        weight: float = 0.1,
        server_distillation: int = 0,
        server_lr: float = 0.01,
    ) -> None:
        check_numbers("methods.cfed", "[0, 1)", share=share)
        check_numbers("methods.cfed", "(0, inf)", temperature=temperature, server_lr=server_lr)
        check_numbers("methods.cfed", "[0, inf)", weight=weight)
        check_integers("methods.cfed", 0, at_most=MOST_AT_ONCE, server_distillation=server_distillation)
        self.surrogate, self.share, self.temperature, self.weight = surrogate, share, temperature, weight
        self.server_distillation, self.server_lr = server_distillation, server_lr
        self.individual_uplinks = self.moves_model_after_round = server_distillation > 0
        self.server_seconds = 0.0
        self._old = PreviousModel()
        self._orders: dict[int, Tensor] = {}
        self._taken: dict[int, int] = {}
        self._models: dict[int, dict[str, Tensor]] = {}
        self._compared = torch.zeros(0, dtype=torch.bool)
        self._surrogate_digest = ""
        self._transforms: dict[int, PixelTransform] = {}

    def setup(self, context: Context) -> None:
        """Read the surrogate set and deal it to the clients."""
        super().setup(context)
        self.refuse_twins(CFeD, "one CFeD: a client that reviews for two would train on the images of one alone")
        check_common_model(self)
        replaced = [n for n, m in context.methods.items() if has(m, LocalObjective)]
        if replaced:
            raise ConfigError(
                "methods", [self.name, *replaced], f"{self.name} without one that replaces the local loss"
            )
        plans = [context.plan(number) for number in range(context.num_rounds)]
        later = [len(self._reviewing(plan)) for plan in plans if plan.task > 0]
        if self.share > 0 and later and not max(later):
            valid = f"a greater one, or more clients per round: that share of {len(plans[-1].clients)} clients is none"
            raise ConfigError(f"{self.key}.share", self.share, valid)
        parties = context.num_clients + (self.server_distillation > 0)
        images = read_surrogate(self.surrogate, context.root, context.input_shape, f"{self.key}.surrogate")
        if len(images) < parties:
            valid = f"at least {parties}, one for everybody who has a shard"
            raise ConfigError(f"{self.key}.surrogate", f"{self.surrogate.name}, {len(images)} images", valid)
        self._images, self._surrogate_digest = images, tensors_digest([images])
        self._shards = shards(len(images), parties, context.seed, f"{self.name} shards")

    def _reviewing(self, plan: RoundPlan) -> frozenset[int]:
        """The clients that review in a round; none in the first task."""
        count = round(self.share * len(plan.clients))
        if plan.task == 0 or not count:
            return frozenset()
        generator = numpy_generator(self.context.seed, f"{self.name} who reviews", plan.round)
        return frozenset(generator.choice(plan.clients, min(count, len(plan.clients) - 1), replace=False).tolist())

    def _pixels(self, task: int, index: Tensor) -> Tensor:
        """``[n, C, H, W]`` network input: surrogate images ``[n]``, normalised as the task's."""
        if self._images.device != index.device:
            self._images = self._images.to(index.device)
        if task not in self._transforms:
            transform = self.context.transform_of(task)
            self._transforms[task] = normalised_as(transform, self.surrogate.scale)
        return self._transforms[task](self._images[index])

    def _outputs(self, tasks: int) -> Tensor:
        """``[O]`` bool, outputs that have been in the loss of one of the first ``tasks`` tasks."""
        outputs = self.context.outputs
        if outputs.train is None:
            return torch.ones(outputs.num_outputs, dtype=torch.bool)
        return outputs.train[:tasks].any(0)

    # Local training.

    def begin_task(self, plan: RoundPlan) -> None:
        """Store the global model as the old model of the task."""
        if plan.task > 0 and self.share > 0:
            self._old.keep(self.context.shared_tensors(), plan.clients)

    def start_clients(self, cohort: Cohort) -> None:
        """Prepare the shards of reviewing clients, and send the old model to those that do not have it."""
        context = self.context
        reviewing = self._reviewing(context.plan(cohort.round))
        rows = [row for row, client in enumerate(cohort.clients) if client in reviewing]
        self._orders, self._models = {}, {}
        self._taken = dict.fromkeys(rows, 0)
        if not rows:
            return
        old = self._old.lend(context, f"{self.name} old model", [cohort.clients[row] for row in rows])
        for row in rows:
            client = cohort.clients[row]
            count = cohort.sizes[row] * context.local_epochs
            purpose = f"{self.name} order"
            self._orders[row] = passes(self._shards[client], count, context.seed, purpose, cohort.round, client)
            self._models[row] = {**client_model(context, client), **old}
        self._compared = self._outputs(cohort.task).to(context.device)
        if cohort.used_outputs is not None:  # reviewing clients do not train the outputs of the task
            cohort.used_outputs[rows] = self._compared
        cohort.withhold(rows)

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        """Replace the samples of reviewing clients by surrogate images."""
        counts = batch.mask_on_cpu.sum(1).tolist() if self._orders else []
        rows = [row for row in self._orders if counts[row]]
        if not rows:
            return batch
        device, (k, count) = batch.index.device, batch.mask.shape
        target = torch.zeros(k, count, len(self._compared), device=device)
        weights = torch.zeros(k, count, dtype=torch.float64, device=device)
        factor = torch.ones(k, dtype=torch.float64, device=device)
        own, images = [], []
        for row in rows:
            start, stop = self._taken[row], self._taken[row] + counts[row]
            self._taken[row] = stop
            own.append(batch.index[row, : counts[row]])
            images.append(moved(self._orders[row][start:stop], device))
            with evaluating(self.context):
                found = self._soft(self._models[row], self._pixels(batch.task, images[-1]))
            target = target.to(found.dtype)
            target[row, : counts[row]] = found
            weights[row, : counts[row]] = self.weight / counts[row]
            factor[row] = 0.0
        order = torch.cat(own).argsort()
        places, stand_ins = torch.cat(own)[order], torch.cat(images)[order]
        assert batch.gather is not None
        gather = partial(self._gather, batch.gather, batch.task, places, stand_ins)
        extras = {f"{self.name} target": target, f"{self.name} weight": weights}
        return replace(batch, gather=gather).with_extras(extras).with_added(self._own_loss_factors(factor))

    def _gather(self, fetch: Gather, task: int, places: Tensor, images: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """As ``fetch``, with surrogate images for some samples. Each sample belongs to one client.

        Args:
            fetch: indices ``[...]`` to inputs and outputs.
            task: the task of the samples.
            places: ``[n]`` int64, ascending: the samples that are replaced.
            images: ``[n]`` int64: the surrogate images that replace them.
            index: ``[...]`` int64.
        """
        x, y = fetch(index)
        at = torch.searchsorted(places, index.contiguous()).clamp(max=len(places) - 1)
        replaced = places[at] == index
        if index.device.type == "cpu":  # on an accelerator, indexing by a mask would wait for the device
            x[replaced] = self._pixels(task, images[at[replaced]])
            return x, y
        surrogate = self._pixels(task, images[at].reshape(-1)).view_as(x)
        return torch.where(replaced.view(*index.shape, *[1] * (x.ndim - index.ndim)), surrogate, x), y

    def _own_loss_factors(self, factor: Tensor) -> ExtraSamples:
        """Empty extra samples that carry the factors ``[K]`` of the step's own cross-entropies."""
        k, device = len(factor), factor.device
        none = torch.zeros((k, 0), dtype=torch.int64, device=device)
        x = torch.zeros((k, 0, *self.context.input_shape), device=device)
        return ExtraSamples(x, none, none, none.bool(), none.double(), self.source, own_factor=factor)

    @torch.no_grad()
    def _soft(self, model: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """``softmax(h(x) / T)`` ``[B, O]`` over the outputs compared, 0 elsewhere."""
        logits = run_model(self.context, model, x)
        return (logits.masked_fill(~self._compared, -torch.inf) / self.temperature).softmax(-1)

    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        """The distillation loss of reviewing clients."""
        weights = samples.extras.get(f"{self.name} weight")
        if weights is None:
            return logits.new_zeros(())
        losses = self._soft_cross_entropy(logits, samples.extras[f"{self.name} target"])
        return weighted_sum(losses, weights, samples.mask & (weights > 0))

    def _soft_cross_entropy(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropies ``[...]`` of target probabilities and logits, both ``[..., O]``."""
        student = (logits.masked_fill(~self._compared, -torch.inf) / self.temperature).log_softmax(-1)
        return -(target.to(logits.dtype) * student.masked_fill(~self._compared, 0.0)).sum(-1)

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """With server distillation, send single clients' models to the server."""
        if not self.server_distillation:
            return
        context = self.context
        tensors = {**cohort.parameters, **cohort.buffers}
        shared = {name: tensors[name] for name in context.shared_tensors()}
        message = cohort.rows(positions, shared)
        clients = [cohort.clients[position] for position in positions]
        context.channel.uplink_individually(f"{self.name} models", message, clients, wire_bytes=0)

    # After a round.

    def end_round(self, plan: RoundPlan) -> None:
        """Record which clients have the old model, and let the server distil."""
        if self._old:
            self._old.note(self._reviewing(plan))
        self._orders, self._models = {}, {}
        if self.server_distillation:
            started = time.perf_counter()
            with evaluating_global(self.context):
                self._distil(plan)
            self.server_seconds += time.perf_counter() - started

    @torch.no_grad()
    def _distil(self, plan: RoundPlan) -> None:
        """Train the new global model to imitate the round's clients on the server's shard, all in evaluation mode."""
        context = self.context
        models = context.channel.collect_individually(f"{self.name} models").values()
        state = {n: t.detach() for n, t in context.state_tensors().items()}
        received = [{**state, **model} for model in models]
        self._compared = self._outputs(plan.task + 1).to(context.device)
        # In one process, because rounding differences between processes would grow with every step.
        trained = context.at_server(lambda: self._distilled(plan, state, received))
        server = context.state_tensors()
        for name, tensor in trained.items():
            server[name].copy_(tensor)

    def _distilled(
        self, plan: RoundPlan, state: Mapping[str, Tensor], received: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The global model's shared parameters after the server's training.

        Args:
            plan: the round.
            state: parameters and buffers of the average.
            received: those of the round's clients.
        """
        context = self.context
        leaves = {n: state[n].clone().requires_grad_() for n in context.shared_parameters}
        optimizer = torch.optim.SGD(leaves.values(), lr=self.server_lr)
        for epoch in range(self.server_distillation):
            shard = self._shards[-1]
            order = passes(shard, len(shard), context.seed, f"{self.name} order of the server", plan.round, epoch)
            for part in order.to(context.device).split(context.batch_size):
                x = self._pixels(plan.task, part)
                target = torch.stack([self._soft(model, x) for model in received]).mean(0)
                with torch.enable_grad():
                    loss = self._soft_cross_entropy(run_model(context, {**state, **leaves}, x), target).mean()
                    optimizer.zero_grad()
                    loss.backward()
                optimizer.step()
        return {name: leaf.detach() for name, leaf in leaves.items()}

    # Reports and checkpoints.

    @property
    def computes_locally(self) -> bool:
        """Whether any client distils."""
        return self.share > 0

    def client_storage(self) -> int:
        """The old model and a shard of images, a byte per pixel."""
        if self.share == 0 or self.context.num_tasks == 1:
            return 0
        shard = math.prod(self._images.shape[1:]) * max(map(len, self._shards))
        return payload_bytes(self.context.shared_tensors()) + shard

    def report(self) -> Report:
        """Number of surrogate images in the largest shard, and seconds of server distillation."""
        return Report({"surrogate_samples": max(map(len, self._shards)), "server_seconds": self.server_seconds})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`.

        Raises:
            ConfigError: the surrogate images differ from those of the checkpoint's run.
        """
        # Older checkpoints hold no digest.
        if state.get("surrogate", self._surrogate_digest) != self._surrogate_digest:
            value = f"a checkpoint of a run with other images of {self.key}.surrogate: they have changed since"
            raise ConfigError("ckpt_path", value, "data.root with the files of that run, or a new run on these")
        super().load_state_dict({"surrogate": self._surrogate_digest, **state})
