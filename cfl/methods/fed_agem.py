"""Fed-A-GEM: buffer-based gradient projection (Dai et al., 2024), alone or on top of other methods."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from cfl.data.cohorts import CohortBatch
from cfl.data.scenarios import Scenario
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.federation.channel import payload_bytes
from cfl.federation.replay_buffer import Replayed
from cfl.methods.base import Method, Report
from cfl.methods.capabilities import PersonalParameters, RightMultiplication, adds_to_gradients, has
from cfl.methods.components.client_model import client_model, evaluating
from cfl.methods.components.gradient_projection import REFINEMENTS, Refinement, conflicts, inner, refine
from cfl.methods.components.mean_gradient import Labelled, mean_gradient
from cfl.methods.context import Context
from cfl.models.dropout import DropoutMasks
from cfl.randomness.counter_bits import random_words_at
from cfl.randomness.generators import seed_for
from cfl.runtime.errors import BadUpdate, ConfigError
from cfl.runtime.moving import moved
from cfl.runtime.option_checks import check_choices, check_integers, check_numbers


class FedAGEM(Method):
    """Projects local gradients so that no step increases the loss on the buffers of all clients, to first order.

    After every round the clients compute ``g_ref^k``, the gradient of the mean cross-entropy on samples of their
    buffers at the new global model. The server averages them: ``g_ref = mean_k g_ref^k`` (Algorithms 1 and 3). In the
    next round every local gradient g with ``g . g_ref < 0`` becomes ``g - (g . g_ref / g_ref . g_ref) g_ref`` (eq 5),
    the closest gradient without a conflict (eq 4). The inner product is over all parameters. Clients whose buffer is
    empty are left out of the average. If no client has a sample, or none has a finite gradient
    (``federated.on_bad_update: skip``), the last reference stays in use. The method uses neither task ids nor task
    boundaries, so it also acts within the first task, from the second round on.

    Its place among the methods: it changes the gradient that other methods have changed, so it must come after all
    methods that add to gradients, such as A-GEM (Algorithm 6), penalties and control variates. GPM, RGO and FOT with
    ``project_clients``, which multiply gradients, may come before it or behind it, where the paper says nothing: of two
    projections the last one holds exactly, and the other is undone in part. FOT projects the server's step in any case.
    The reference belongs to the model with which the next round begins, so it must also come after methods that change
    the global model after a round: CFeD's server distillation, FedCIL's consolidation.

    Differs from the paper in three points. ``samples`` is 32, as in the authors' code. By default a buffer stores each
    sample of a task at most once, with the augmentation of that moment, as in the authors' code
    (:class:`cfl.federation.replay_buffer.ReplayBuffer`). A gradient whose conflict with the reference is mere rounding,
    ``g . g_ref >= -64 eps g_ref . g_ref`` with eps the precision of the gradients, is not changed
    (:func:`cfl.methods.components.gradient_projection.conflicts`). The paper's variants are options: how a gradient is
    changed (section 5.3.1, Table 9), in which share of the conflicts (Table 10), how often the reference is renewed.
    Communicating less often (Table 3) is fewer rounds with more ``schedule.local_epochs``.

    Personal parameters are neither in the reference nor changed. The method adds a multiple of the reference. Behind a
    method that restricts the clients' directions, as GPM does, gradients may therefore leave the allowed directions
    where there is a conflict. A client without a sample of a task is refused before training, as in every run, or, with
    ``data.participation: Holders``, does not train in that task. Its buffer is then used for the reference only with
    ``clients: holders``. The authors' code, in which such a client does not train either, always uses its buffer.

    Sends: up, a gradient (a tensor per parameter) for every new reference, as a sum; down, the reference with the
    model, once to every client that trains while the reference is in use. The new global model goes down once more to
    clients that compute a gradient and do not take part in the next round. Storage per client: the buffer, and the
    reference if ``every`` is above 1. Extra compute: one forward and backward pass over ``samples`` per client and
    reference; per local step an inner product and an element-wise pass over the weights. Scenarios: task-, class- and
    domain-incremental; regression and detection, with their losses in place of the cross-entropy. Optimizers: any. The
    guarantee holds for plain SGD; momentum and Adam may change the direction of the step.

    Args:
        samples: samples drawn per client for its gradient, or all of the buffer if it holds fewer. The paper's
            Algorithm 3 draws m samples, and its section 5.1.5 reads m as the buffer's size; its code takes 32.
        every: rounds between two references. In between, clients keep and use the last one.
        refinement: how a gradient is changed (:func:`cfl.methods.components.gradient_projection.refine`).
        when: which gradients are changed: only those in ``conflict`` with the reference, at more than a right angle to
            it, or all (``always``).
        share: share of these gradients that are changed, drawn at random, in (0, 1].
        clients: clients whose buffers are used: those ``sampled`` in the round; ``all`` that hold its task (with clocks
            of their own, those that have not finished all their tasks); or all ``holders`` of a sample, whether or not
            they train now.
        mode: mode in which the network computes the reference: ``train``, as in the authors' code, with dropout, and
            with BatchNorm normalising by the drawn samples without storing their statistics; or ``eval``.

    Raises:
        ConfigError: a value other than these; or, before training: clients share no parameter; a later method adds to
            gradients, or changes the global model after a round; or gradients are clipped by value.
    """

    shared_only: ClassVar[bool] = True
    replays_logits: ClassVar[bool] = False
    scenarios: ClassVar[frozenset[Scenario]] = frozenset({"task", "class", "domain", "regression", "detection"})
    task_free = True
    client_clocks = True
    kind: ClassVar[Literal["add", "project", "look"]] = "project"
    state = ("reference", "_have", "seconds", "_steps", "_refined")

    def __init__(
        self,
        samples: int = 32,
        every: int = 1,
        refinement: Refinement = "project",
        when: Literal["conflict", "always"] = "conflict",
        share: float = 1.0,
        clients: Literal["sampled", "all", "holders"] = "sampled",
        mode: Literal["train", "eval"] = "train",
    ) -> None:
        check_integers("methods.fed_agem", 1, samples=samples, every=every)
        check_choices("methods.fed_agem", REFINEMENTS, refinement=refinement)
        check_choices("methods.fed_agem", ("conflict", "always"), when=when)
        check_choices("methods.fed_agem", ("sampled", "all", "holders"), clients=clients)
        check_choices("methods.fed_agem", ("train", "eval"), mode=mode)
        check_numbers("methods.fed_agem", "(0, 1]", share=share)
        self.samples, self.every = samples, every
        self.refinement: Refinement = refinement
        self.when, self.share, self.clients, self.mode = when, share, clients, mode
        self.reference: dict[str, Tensor] = {}
        self._have: set[int] = set()  # clients that have received the current reference
        self.seconds = 0.0
        self._steps = self._refined = 0
        self._seen = torch.zeros(2, dtype=torch.int64)
        self._received: dict[str, Tensor] = {}
        self._lengths: dict[frozenset[str], Tensor] = {}
        self._step, self._opened = 0, False
        self._training = torch.ones(0, dtype=torch.bool)

    def setup(self, context: Context) -> None:
        """Find the parameters of the reference.

        Raises:
            ConfigError: there are no such parameters, a later method adds to gradients or changes the global model, or
                ``every`` is above 1 and not below the number of rounds.
        """
        super().setup(context)
        later = {name: context.methods[name] for name in list(context.methods)[self.source :]}
        for behind, why in (
            (
                [name for name, method in later.items() if adds_to_gradients(method)],
                "what it leaves of a gradient is what clients step by",
            ),
            (
                [name for name, method in later.items() if method.moves_model_after_round],
                "its reference is of the model that the next round begins with",
            ),
        ):
            if behind:
                valid = f"{self.name} behind {', '.join(behind)}, so that {why}"
                raise ConfigError("methods", list(context.methods), valid)
        if projecting := [name for name, method in later.items() if has(method, RightMultiplication)]:
            rank_zero_warn(
                f"methods.{', methods.'.join(projecting)} changes gradients behind {self.key}: steps keep to what it "
                f"allows, and may conflict with the reference again. Put {self.name} last to have it the other way"
            )
        if not context.shared_parameters:
            keeping = [n for n, m in context.methods.items() if m is not self and has(m, PersonalParameters)]
            what = f"every parameter of the model stays on its client (methods.{', methods.'.join(keeping)})"
            raise ConfigError(self.key, what, "a run with at least one parameter that clients share")
        rounds = context.num_rounds
        if self.every > 1 and self.every >= rounds:
            valid = f"an integer below {rounds}, the number of rounds: there would be no reference in any"
            raise ConfigError(f"{self.key}.every", self.every, valid)
        self._masks = DropoutMasks(context.network, context.input_shape)

    # Local training.

    @property
    def changes_gradients(self) -> bool:
        """Whether there is a reference; True before the first cohort."""
        # Before the first cohort an engine is chosen for the later rounds, nearly all of which have a reference.
        return not self._opened or bool(self.reference)

    def start_clients(self, cohort: Cohort) -> None:
        """Send the reference to clients that do not have it."""
        self._opened = True
        if not self.reference:
            return
        self.reference = {name: value.to(self.context.device) for name, value in self.reference.items()}
        lacking = len(set(cohort.clients) - self._have)
        self.context.channel.downlink("reference gradient", self.reference, lacking)
        self._received = {name: value[None] for name, value in self.reference.items()}
        self._lengths = {}

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        """Record the number of the step and which clients have samples in it."""
        self._step, self._training = batch.step, batch.mask.any(1)
        return batch

    @torch.no_grad()
    def adjust_gradients(self, cohort: Cohort) -> None:
        """Change the clients' gradients that conflict with the reference."""
        if not self._received:
            return
        gradients = {name: gradient for name, gradient in cohort.gradients.items() if name in self._received}
        if not gradients:
            return
        # A client that has finished may still have a gradient, e.g. of a penalty.
        training = self._training
        product = inner(gradients, self._received)
        length = self._length_over(gradients)
        rows = training
        if self.when == "conflict":
            rows = rows & conflicts(product, length, next(iter(gradients.values())).dtype)
        rows = rows & moved(self._chosen(cohort), rows.device)
        refine(gradients, self._received, rows, product, length, self.refinement)
        self._use_outputs(cohort, rows)
        self._seen = self._seen.to(rows.device) + torch.stack([training.sum(), rows.sum()])

    def _length_over(self, gradients: dict[str, Tensor]) -> Tensor:
        """``[1]`` squared length of the reference over the parameters with gradients; frozen ones have none."""
        names = frozenset(gradients)
        if names not in self._lengths:
            reference = {name: self._received[name] for name in gradients}
            self._lengths[names] = inner(reference, reference)
        return self._lengths[names]

    def _chosen(self, cohort: Cohort) -> Tensor:
        """``[k]`` bool: clients whose gradient may be changed in this step."""
        if self.share == 1:
            return torch.ones(len(cohort.clients), dtype=torch.bool)
        seed = self.context.seed
        keys = [seed_for(seed, "Fed-A-GEM share", cohort.round, client) for client in cohort.clients]
        words = random_words_at(torch.tensor(keys, dtype=torch.int64), torch.full((len(keys),), self._step))
        return (words >> 11 & (2**53 - 1)).double() / 2**53 < self.share

    def _use_outputs(self, cohort: Cohort, rows: Tensor) -> None:
        """Mark outputs that the reference moves as used, including those of tasks that a client does not train now."""
        if cohort.used_outputs is None:
            return
        touched = torch.zeros_like(cohort.used_outputs[0])
        for name, value in self._received.items():
            if name.startswith("head.") and value.ndim > 1 and value.shape[1] == len(touched):
                touched |= value[0].reshape(len(touched), -1).any(1)
        cohort.used_outputs.logical_or_(rows.unsqueeze(1) & touched)  # a mask as an index would wait for the device

    # Between two rounds.

    def end_round(self, plan: RoundPlan) -> None:
        """Let clients compute the next reference at the new global model."""
        context = self.context
        self._received = {}
        counts = context.everyones(self._seen.tolist())
        self._steps += sum(steps for steps, _ in counts)
        self._refined += sum(refined for _, refined in counts)
        self._seen = torch.zeros(2, dtype=torch.int64)
        if self.reference:
            self._have |= set(plan.clients)
        if context.finished or (plan.round + 1) % self.every:
            return
        started = time.perf_counter()
        assert context.buffer is not None
        asked, holders = self._asked(plan), set(context.buffer.holders())
        following = set(context.plan(plan.round + 1).clients)
        waiting = [client for client in context.own_clients(plan.task, asked) if client not in following]
        # Asked last, so that a sum of integers does not take clients with empty buffers for dropouts.
        own = context.own_clients(plan.task, [client for client in asked if client in holders])
        context.channel.downlink("model", context.shared_tensors(), len(waiting))
        sent = sum(self._send(plan, client) for client in own)
        if sum(context.everyones(sent)):
            self._renew()
        self.seconds += time.perf_counter() - started

    def _asked(self, plan: RoundPlan) -> Sequence[int]:
        """The clients whose buffers are used for the reference, the same in all processes."""
        if self.clients == "sampled":
            return plan.clients
        if self.clients == "all":
            present: list[int] = self.context.present(plan.round).tolist()
            return present
        assert self.context.buffer is not None
        return self.context.buffer.holders()

    def _renew(self) -> None:
        """Average the gradients; if no client's gradient is finite, keep the last reference, if there is one."""
        try:
            reference = self.context.channel.mean("buffer gradient")
        except BadUpdate:  # all were skipped: with ``on_bad_update: stop`` sending one has raised already
            return
        self.reference, self._have = reference, set()

    def _send(self, plan: RoundPlan, client: int) -> bool:
        """Send one client's gradient, if it holds a sample; returns whether it does."""
        context, buffer = self.context, self.context.buffer
        assert buffer is not None
        drawn = buffer.draw_between_rounds([client], plan.round, self.samples, "reference", context.device)
        if drawn is None:
            return False
        key = seed_for(context.seed, "dropout of the reference", plan.round, client)
        task = context.task_at(plan.round, client)  # with clients' own clocks, it may not be the round's task
        model = client_model(context, client)
        outputs = context.outputs_in_loss_of(drawn.tasks, task)
        gradient = self._gradient(model, drawn, outputs, key)
        message = {name: value[None] for name, value in gradient.items()}
        context.channel.uplink("buffer gradient", message, [1.0], [client])
        return True

    def _gradient(
        self, model: dict[str, Tensor], drawn: Replayed, outputs: Tensor | None, key: int
    ) -> dict[str, Tensor]:
        """Gradient of the mean cross-entropy of one client's ``[1, m]`` samples, over ``outputs`` ``[1, m, O]``."""
        context = self.context
        network, used = context.network, drawn.mask[0]
        x, y = drawn.x[0][used], drawn.y[0][used]
        allowed = None if outputs is None else outputs[0][used]
        masks: dict[str, Tensor] = {}
        if self.mode == "train":
            masks = self._masks.draw_for_one(key, len(x), next(network.parameters()))
        with evaluating(context) if self.mode == "eval" else nullcontext():
            found = mean_gradient(network, model, [Labelled(x, y, allowed, masks)], context.measure)
        return {name: found[name] for name in context.shared_parameters}

    # Reports and checkpoints.

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, and forget the steps and the reference of a round that an error has ended."""
        super().load_state_dict(state)
        self._received, self._seen = {}, torch.zeros(2, dtype=torch.int64)

    def _reference_bytes(self) -> int:
        tensors = self.context.state_tensors()
        return payload_bytes({name: tensors[name] for name in self.context.shared_parameters})

    def client_storage(self) -> int:
        """Bytes of the reference, if it is used for several rounds; the buffer is counted separately."""
        return self._reference_bytes() if self.every > 1 else 0

    def report(self) -> Report:
        """Share of the local steps with a reference whose gradient was changed (%), seconds for references, bytes."""
        figures = {
            "refined_share": 100 * self._refined / self._steps if self._steps else 0.0,
            "reference_seconds": self.seconds,
            "reference_bytes": self._reference_bytes(),
        }
        return Report(figures)
