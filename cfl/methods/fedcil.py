"""FedCIL (Qi, Zhao and Li, ICLR 2023, "Better Generative Replay for Continual Federated Learning")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from cfl.data.cohorts import CohortBatch
from cfl.data.samples import ExtraSamples, Samples
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.federation.channel import payload_bytes
from cfl.methods.base import Method, Report
from cfl.methods.capabilities import crosses_tasks
from cfl.methods.components.gan.consolidation import MadeBatch, consolidated
from cfl.methods.components.gan.losses import acgan_loss, class_losses, divergences, generated_images
from cfl.methods.components.previous_model import PreviousModel
from cfl.methods.context import Context
from cfl.models.acgan import ACGAN
from cfl.models.batchnorm import batch_mask
from cfl.models.dropout import DropoutMasks
from cfl.randomness.counter_normals import choices, normals
from cfl.randomness.generators import seed_for, torch_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.moving import moved
from cfl.runtime.option_checks import MOST_AT_ONCE, check_choices, check_integers, check_numbers


class FedCIL(Method):
    """Trains an AC-GAN at the clients and replays earlier tasks by images of its generator.

    **Client.** The network consists of a critic, which tells real images from generated ones and predicts their class,
    and a generator (:class:`cfl.models.ACGAN`). The critic's class outputs are the classifier that is tested. From the
    second task on every local step adds images of the replay generator, which is the global generator at the end of the
    last task, with classes drawn uniformly from the outputs of all earlier tasks. The loss combines the AC-GAN losses
    of real and replayed images (:func:`cfl.methods.components.gan.losses.acgan_loss`; class probabilities are over the
    outputs of the sample's own task)::

        L = (1 - replay_share) L(real batch) + replay_share L(replayed batch)

    **Server.** *Model consolidation* after averaging: ``consolidation_steps`` AC-GAN steps of Adam on class-balanced
    images of the current task from the generators of all clients of the round and, from the second task on, of earlier
    tasks from the replay generator, weighted in the same way.

    *Consistency enforcement* adds ``consistency`` times three terms to the critic's loss, from a task's second round
    on, with images ``u_i`` of the received global generator: ``KL(p(u_i) || p(x_i))`` for images of the class of sample
    ``x_i``; and ``KL(p(u_i) || p(G(z_i, c_i)))`` and ``-log p_c(u_i)`` for classes ``c_i`` drawn uniformly from all
    outputs seen. The default is 0, because the authors' published code multiplies all three by 0.

    If tasks share outputs (domain-incremental), the generator cannot know from the class to which task an image
    belongs. It then generates images of one or two early tasks. The critic, which sees these again by replay, takes
    them for real, and the later tasks are not replayed.

    Differs from the paper's code: critic and generator take their steps together, from the same weights, with the
    client's optimizer. There the critic steps first, and each has its own Adam, whose state is kept between rounds.
    Generated images have the classes of the real images they are compared with; there classes are drawn uniformly from
    the client's classes so far. The replay generator is the global one and replays the outputs of all earlier tasks;
    there every client replays its own classes with its own copy. The optimizer of consolidation is reset in every
    round. For the networks see :class:`cfl.models.ACGAN`. Samples that other methods add count as real images.

    Sends: the generator as a part of the model; the replay generator down, once per client and task, when the client is
    first sampled. Both include the statistics by which the generator normalises. If it has such statistics,
    ``federated.batchnorm`` must be ``average``. With ``consolidation_source: clients`` the server must see single
    clients' generators and their classes of the task, which rules out secure aggregation. They are sent, and counted,
    beside the update. Storage per client: the replay generator (``replay_generator_bytes`` of the summary). Extra
    compute: three passes of the critic and one of the generator instead of one of the critic, over twice the samples
    from the second task on, and the replay generator's forward pass. At the server: ``consolidation_steps`` such steps
    per round. Scenarios: task-, class- and domain-incremental. Optimizers: any; the authors' is Adam with betas 0.5 and
    0.999.

    Args:
        replay_share: weight of the replayed images' loss, in [0, 1); 0 for no replay.
        replay_batch_size: replayed images per local step; null takes ``schedule.batch_size``.
        consistency: factor of the consistency terms, at least 0.
        consolidation_steps: steps per round; 0 is averaging alone. The authors take 100 where clients take 400 local
            steps. As many after few local steps make the model forget more than they consolidate.
        consolidation_source: generator of the images of the current task: those of the ``clients``, or the ``average``,
            for which sums are enough.
        consolidation_batch_size: images of the current task per step, and as many of earlier tasks.
        consolidation_lr: Adam's learning rate at the server.

    Raises:
        ConfigError: an option is out of range; or, before training, what :meth:`setup` refuses.
    """

    looks_back: ClassVar[bool] = True
    asks_after_tasks = False
    common_order: ClassVar[bool] = True
    state: ClassVar[Mapping[str, str]] = {"replay": "_replay.tensors", "receivers": "_replay.holders"}

    def __init__(
        self,
        replay_share: float = 0.5,
        replay_batch_size: int | None = None,
        consistency: float = 0.0,
        consolidation_steps: int = 100,
        consolidation_source: Literal["clients", "average"] = "clients",
        consolidation_batch_size: int = 32,
        consolidation_lr: float = 1e-4,
    ) -> None:
        check_numbers("methods.fedcil", "[0, 1)", replay_share=replay_share)
        most = MOST_AT_ONCE
        check_integers("methods.fedcil", 1, at_most=most, or_null=True, replay_batch_size=replay_batch_size)
        check_numbers("methods.fedcil", "[0, inf)", consistency=consistency)
        check_integers("methods.fedcil", 0, at_most=most, consolidation_steps=consolidation_steps)
        check_choices("methods.fedcil", ("clients", "average"), consolidation_source=consolidation_source)
        check_integers("methods.fedcil", 1, at_most=most, consolidation_batch_size=consolidation_batch_size)
        check_numbers("methods.fedcil", "(0, inf)", consolidation_lr=consolidation_lr)
        self.replay_share, self.replay_batch_size = replay_share, replay_batch_size
        self.consistency = consistency
        self.consolidation_steps, self.consolidation_source = consolidation_steps, consolidation_source
        self.consolidation_batch_size, self.consolidation_lr = consolidation_batch_size, consolidation_lr
        self.moves_model_after_round = consolidation_steps > 0
        self.individual_uplinks = consolidation_steps > 0 and consolidation_source == "clients"
        self._replay = PreviousModel()
        self._blanks = False  # whether a step has samples for which no image is generated, or none to compare

    def setup(self, context: Context) -> None:
        """Check the network.

        Raises:
            ConfigError: it has no generator, clients keep parts of it local that the method needs, or its generator
                normalises by statistics that are not averaged.
        """
        super().setup(context)
        network = context.network
        if not isinstance(network, ACGAN):
            valid = f"ACGAN, with {type(network).__name__} as its classifier, while {self.key} is used"
            raise ConfigError("model.network", type(network).__name__, valid)
        statistics = {name for name, _ in network.generator.named_buffers(prefix="generator")}
        if statistics and context.batchnorm != "average":
            valid = "average, or model.network.generator_norm: none"
            raise ConfigError("federated.batchnorm", context.batchnorm, valid)
        kept = ({name for name, _ in network.named_parameters()} | statistics) & context.personal
        if not self.consolidation_steps:
            kept &= set(network.generator_names)
        if kept:
            valid = "no parameters that clients keep" if self.consolidation_steps else "a generator that clients share"
            raise ConfigError(self.key, f"with {sorted(kept)} kept local", valid)
        self._noise = f"{self.name} noise"
        self._masks = DropoutMasks(network, context.input_shape)
        others = [method for method in context.methods.values() if method is not self]
        self._blanks = any(map(crosses_tasks, others)) or (self.consistency > 0 and self.replay_share > 0)

    @property
    def _network(self) -> ACGAN:
        network = self.context.network
        assert isinstance(network, ACGAN)
        return network

    # Outputs of tasks.

    def _outputs_before(self, task: int) -> Tensor:
        """``[n]`` int64, the outputs of the tasks before ``task``."""
        return self.context.outputs.own[:task].any(0).nonzero().squeeze(1)

    def _task_of(self, y: Tensor, task: int) -> Tensor:
        """The task whose outputs compete with each ``y``: ``task`` if it has ``y``, else the first task with ``y``."""
        outputs = self.context.outputs
        first = outputs.own[: task + 1].int().argmax(0)
        if outputs.train is None:
            return torch.full_like(y, task)
        return moved(torch.where(outputs.train[task], torch.full_like(first, task), first), y.device)[y]

    def _allowed(self, y: Tensor, task: int) -> Tensor | None:
        """``[..., O]`` bool, the outputs that compete with ``y``, or None for all."""
        train = self.context.outputs.train
        return None if train is None else moved(train, y.device)[self._task_of(y, task)]

    # Local training.

    def start_clients(self, cohort: Cohort) -> None:
        """Send the replay generator to clients that are sampled for the first time in a task."""
        if self._replays:
            self._replay.lend(self.context, f"{self.name} replay generator", cohort.clients)

    @property
    def _replays(self) -> bool:
        return bool(self._replay) and self.replay_share > 0

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        """Add replayed images, and the noise of the images that this step generates."""
        k, count = batch.mask.shape
        extended = batch.with_extras({self._noise: self._drawn_noise("noise", cohort, batch, count)})
        if self.consistency > 0 and self.context.plan(cohort.round).round_in_task > 0:
            extended = extended.with_extras(self._consistency_images(cohort, batch, count))
        if not self._replays:
            return extended
        device, task = batch.index.device, cohort.task
        size = self.replay_batch_size or self.context.batch_size
        y = choices(self._keys("replayed outputs", cohort, batch), moved(self._outputs_before(task), device), size)
        x = self._replayed(self._drawn_noise("replay", cohort, batch, size), y)
        x = x.to(self._network.head.weight.dtype)  # in mixed precision generated images are in half precision
        share = self.replay_share
        return extended.with_added(
            ExtraSamples(
                x,
                y,
                self._task_of(y, task),
                mask=torch.ones_like(y, dtype=torch.bool),
                weights=torch.full(y.shape, share / size, dtype=torch.float64, device=device),
                source=self.source,
                extras={self._noise: self._drawn_noise("noise against replay", cohort, batch, size)},
                own_factor=torch.full((k,), 1.0 - share, dtype=torch.float64, device=device),
            )
        )

    def local_loss(self, network: nn.Module, x: Tensor, samples: Samples) -> Tensor:
        """Critic's and generator's losses of one client's step."""
        assert isinstance(network, ACGAN)
        # Torch's BatchNorm and the masked one cannot take turns in one graph.
        with batch_mask(network, samples.mask) if self._blanks else nullcontext():
            return self._local_loss(network, x, samples)

    def _local_loss(self, network: ACGAN, x: Tensor, samples: Samples) -> Tensor:
        dtype = network.head.weight.dtype
        x, noise = x.to(dtype), samples.extras[self._noise].to(dtype)
        weights = torch.where(samples.mask, samples.weights, torch.zeros_like(samples.weights)).to(dtype)
        # One image is generated for every real or replayed one. If other methods have added samples too, the weights
        # of the generated images are scaled to balance all samples.
        ours = torch.where(self.ours(samples), weights, torch.zeros_like(weights))
        against = ours * (weights.sum() / ours.sum().clamp(min=torch.finfo(dtype).tiny))
        drawn = samples.mask & self.ours(samples) if self._blanks else None
        loss = acgan_loss(network, x, samples.y, weights, noise, against, samples.allowed, drawn)
        if self._of_own in samples.extras:
            loss = loss + self.consistency * self._consistency_loss(network, x, noise, samples)
        return loss

    def _drawn_noise(self, purpose: str, cohort: Cohort, batch: CohortBatch, count: int) -> Tensor:
        """``[K, count, Z]`` standard normal; a sample's noise does not depend on the padding of its batch."""
        size = self._network.noise_dim
        return normals(self._keys(purpose, cohort, batch), count * size).unflatten(1, (count, size))

    def _keys(self, purpose: str, cohort: Cohort, batch: CohortBatch) -> Tensor:
        """``[K]`` int64, a key for each client's step."""
        seed, purpose = self.context.seed, f"fedcil {purpose}"
        keys = [seed_for(seed, purpose, cohort.round, client, batch.step) for client in cohort.clients]
        return moved(torch.tensor(keys, dtype=torch.int64), batch.index.device)

    def _replayed(self, noise: Tensor, y: Tensor) -> Tensor:
        """Images of the replay generator in evaluation mode, for given noise and outputs."""
        parameters = {name: tensor.to(noise.device) for name, tensor in self._replay.tensors.items()}
        return generated_images(self._network, parameters, noise, y)

    # Consistency enforcement.

    @property
    def _of_own(self) -> str:
        return f"{self.name} images of own classes"

    @property
    def _of_any(self) -> str:
        return f"{self.name} images of any class"

    def _consistency_images(self, cohort: Cohort, batch: CohortBatch, count: int) -> dict[str, Tensor]:
        """Images of the received generator: of the samples' own classes, and of classes drawn from all outputs seen."""
        sent = {**cohort.global_parameters, **dict(self._network.named_buffers())}
        received = {name: sent[name] for name in self._network.generator_names}
        seen = moved(self._outputs_before(cohort.task + 1), batch.index.device)
        y = choices(self._keys("outputs", cohort, batch), seen, count)
        noises = [self._drawn_noise(purpose, cohort, batch, count) for purpose in ("own classes", "any class")]
        found = {
            self._of_own: generated_images(self._network, received, noises[0], batch.y),
            self._of_any: generated_images(self._network, received, noises[1], y),
            f"{self._of_any}: outputs": y,
        }
        # The outputs of these classes are trained, too, with or without replay.
        cohort.use_outputs(self._task_of(y, cohort.task), batch.mask)
        allowed = self._allowed(y, cohort.task)
        return found if allowed is None else {**found, f"{self._of_any}: allowed": allowed}

    def _consistency_loss(self, network: ACGAN, x: Tensor, noise: Tensor, samples: Samples) -> Tensor:
        """The mean of the three terms over the step's own samples, for which alone there are images."""
        extras, own = samples.extras, samples.mask & (samples.source == 0)
        any_y, any_allowed = extras[f"{self._of_any}: outputs"], extras.get(f"{self._of_any}: allowed")
        with batch_mask(network, own) if self._blanks else nullcontext():
            _, of_real = network.judge(x)
            _, of_own = network.judge(extras[self._of_own].to(x.dtype))
            _, of_any = network.judge(extras[self._of_any].to(x.dtype))
            with torch.no_grad(), network.generating():
                generated = network.generate(noise, any_y)
            _, of_generated = network.judge(generated)
        terms = (
            divergences(of_own, of_real, samples.allowed)
            + divergences(of_any, of_generated, any_allowed)
            + class_losses(of_any, any_y, any_allowed)
        )
        return torch.where(own, terms, torch.zeros_like(terms)).sum() / own.sum().clamp(min=1)

    # The server.

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Let clients send their generators and the classes that they have of the task."""
        if not self.individual_uplinks:
            return
        clients = [cohort.clients[position] for position in positions]
        tensors = {**cohort.parameters, **cohort.buffers}
        message = cohort.rows(positions, {name: tensors[name] for name in self._network.generator_names})
        held = torch.stack([self._outputs_held(cohort.task, client) for client in clients])
        message["outputs held"] = held.to(next(iter(message.values())).device)
        self.context.channel.uplink_individually(f"{self.name} generators", message, clients)

    def _outputs_held(self, task: int, client: int) -> Tensor:
        """``[O]`` bool, outputs of which a client has samples in a task."""
        own = torch.from_numpy(self.context.global_index_of(task, client))
        return self.context.labels_at(own).bincount(minlength=self.context.num_outputs) > 0

    def end_round(self, plan: RoundPlan) -> None:
        """Consolidate the model."""
        self._replay.note(plan.clients)
        if self.consolidation_steps > 0:
            self._consolidate(plan)

    @torch.no_grad()
    def _consolidate(self, plan: RoundPlan) -> None:
        context = self.context
        tensors = context.state_tensors()
        if self.consolidation_source == "clients":
            messages = list(context.channel.collect_individually(f"{self.name} generators").values())
            held = torch.stack([message.pop("outputs held") for message in messages]).cpu()
            generators = messages
        else:
            generators = [{name: tensors[name].clone() for name in self._network.generator_names}]
            held = context.outputs.own[plan.task].unsqueeze(0)
        batches = self._made_batches(plan, generators, held, next(iter(tensors.values())).device)
        names = context.shared_parameters
        # In one process, because rounding differences between processes would grow with every step.
        trained = context.at_server(lambda: consolidated(self._network, tensors, names, batches, self.consolidation_lr))
        server = context.state_tensors()
        trained = {name: tensor.to(server[name].device) for name, tensor in trained.items()}
        for name, tensor in trained.items():
            server[name].copy_(tensor)

    def _made_batches(
        self, plan: RoundPlan, generators: list[dict[str, Tensor]], held: Tensor, device: torch.device
    ) -> Iterator[MadeBatch]:
        """The batches on which consolidation trains.

        Args:
            plan: the round.
            generators: name -> tensor, the generators of images of the current task.
            held: ``[len(generators), O]`` bool, the outputs of which each generator's client has samples.
            device: device of the batches.
        """
        steps, size, network = self.consolidation_steps, self.consolidation_batch_size, self._network
        generator = torch_generator(self.context.seed, "fedcil consolidation", plan.round)
        dtype = network.head.weight.dtype

        def noise() -> Tensor:
            return torch.randn(steps, size, network.noise_dim, generator=generator).to(device)

        def drawn(options: Tensor) -> Tensor:
            return options[torch.randint(len(options), (steps, size), generator=generator)]

        # Draw classes first, then, for each class, one of the generators whose clients have samples of it.
        y = drawn(held.any(0).nonzero().squeeze(1))
        who = torch.multinomial(held.T[y.flatten()].float(), 1, generator=generator).view(steps, size)
        given = noise()
        x = torch.empty(steps, size, *network.input_shape, dtype=dtype, device=device)
        y_there, who_there = y.to(device), who.to(device)
        for number, tensors in enumerate(generators):
            rows = who_there == number
            if rows.any():
                x[rows] = generated_images(network, tensors, given[rows], y_there[rows]).to(dtype)
        xs, ys, share = [x], [y_there], 0.0
        if self._replays:
            share = self.replay_share
            old = drawn(self._outputs_before(plan.task)).to(device)
            xs.append(self._replayed(noise(), old).to(dtype))
            ys.append(old)
        x, y = torch.cat(xs, 1), torch.cat(ys, 1)
        against = torch.cat([noise() for _ in xs], 1).to(dtype)
        weights = torch.cat([torch.full((size,), w / size, dtype=dtype) for w in (1.0 - share, share)][: len(xs)])
        weights = weights.to(device)
        for step in range(steps):
            key = seed_for(self.context.seed, "fedcil consolidation dropout", plan.round, step)
            dropped = self._masks.draw_for_one(key, len(weights), x)
            yield MadeBatch(x[step], y[step], weights, against[step], self._allowed(y[step], plan.task), dropped)

    def end_task(self, plan: RoundPlan) -> None:
        """Store the global generator as the next task's replay generator."""
        if not self.context.is_last(plan.task):
            tensors = self.context.state_tensors()
            self._replay.keep({name: tensors[name] for name in self._network.generator_names}, ())

    def client_storage(self) -> int:
        """Bytes of the replay generator."""
        return payload_bytes(self._replay.tensors) if self._replays else 0

    def report(self) -> Report:
        """Size of the replay generator that a client stores."""
        return Report({"replay_generator_bytes": self.client_storage(), "replay_share": self.replay_share})
