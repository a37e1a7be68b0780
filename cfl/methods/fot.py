"""Federated Orthogonal Training (Bakman et al., ICLR 2024)."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.engines.right_factors import RightFactor, projection_factor
from cfl.federation.channel import payload_bytes
from cfl.methods.base import Method, Report
from cfl.methods.capabilities import BoundaryFinder, ServerTransform, has
from cfl.methods.components.basis_growth import BasisGrowth
from cfl.methods.components.gaussian_mechanism import GaussianMechanism
from cfl.methods.components.layer_inputs.choose_message import choose_message
from cfl.methods.components.layer_inputs.extraction import SubspaceExtraction
from cfl.methods.components.layer_inputs.weighted_layers import choose_layers, weighted_layers
from cfl.methods.components.newest_two import NewestTwo
from cfl.methods.components.subspace import RankRule, project, project_with_bias, used_share
from cfl.methods.context import Context
from cfl.privacy.release import Noise
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices, check_integers

_RANK = 1e-5
"""Singular values up to which a basis, without the row of the bias, has no direction."""


class FOT(Method):
    """Projects global updates to be orthogonal to the layer inputs of earlier tasks.

    **FedProject**, every round from the second task on: the server's step ``D [o, d]`` of a protected layer becomes
    ``D - (D O) O^T`` with the basis ``O [d, k]`` of earlier tasks' inputs (eq 6, written for a weight ``[o, d]``).

    **GPSE**, one extra communication round after every task but the last: client i sends ``A_i = X_i* G_i`` with
    ``X_i* = X_i - O O^T X_i`` (eq 8, 9) and Gaussian ``G_i``. The server adds these up (eq 10), takes as many leading
    left singular vectors as the rank rule says (eq 12) and adds them to the basis. It also receives, as sums, the
    two scalars from which it computes ``rho``, the share of the inputs outside the basis.

    Differs from the paper: eq 12 cannot be used as printed, see ``rank_rule``. GPSE asks the clients of the task's last
    round and leaves out the last task, as in the authors' code; the paper asks all clients (``gpse_clients: all``)
    after every task (Algorithm 1; ``last_extraction``). GPSE is an extra round as in the paper; the authors' code does
    it in the last training round (``gpse_model: local``). Five options are not in the paper:
    ``message: covariance``, ``project_clients``, ``capacity``, ``importance_scale`` and ``protect_bias``.

    A layer with many more inputs than dimensions is sketched from its covariance, which is several times cheaper and
    has the same distribution (:class:`cfl.methods.components.layer_inputs.sketch.LayerSketch`).

    With the method ``FoundBoundaries`` beside it, FOT is not told where tasks end. It needs ``message: covariance``.
    Every few rounds, each client computes the second moments of its layer inputs in the model that it has received, and
    keeps the two newest results. When a boundary is found, each client sends its newest result of the old task's
    rounds, and the server extracts the subspace from their sum. With ``gpse_clients: sampled`` only the clients of the
    newest of these rounds send, with ``all`` every client that keeps such a result.

    Sends: down, for GPSE, the new global model and, for sketches, the bases (float32); up the sketches (float32) and
    two float64 scalars per layer, or second moments (float32), all of them as sums. Extra memory per client: none
    between rounds; where boundaries are found, two triangles of moments per layer. Extra compute per client and task,
    or every few rounds where boundaries are found: a forward pass over its samples, and the products of the sketches or
    moments. Scenarios: task-, class- and domain-incremental; class-incremental it is of use with ``data.class_loss:
    own`` and inferred tasks (:class:`cfl.methods.InferringFOT`). A layer whose basis spans its whole input space is
    frozen.

    Args:
        threshold: epsilon, share of the inputs' energy that the basis has to cover, in (0, 1].
        threshold_increment: added to ``threshold`` after every task (up to 1).
        message: what a client sends of its layer inputs. ``sketch``: ``A_i``, as in the paper. ``covariance``: second
            moments ``X_i X_i^T``, which are what a sketch of infinitely many columns gives, in a tenth of the numbers
            of ``sketch_size: 5`` and without random draws
            (:class:`cfl.methods.components.layer_inputs.covariance_message.CovarianceMessage`).
        sketch_size: columns s of a sketch as a multiple of the layer's input dimension d, above 0; or one multiple per
            layer kind, ``{conv: 1, linear: 5}``; null: 5 with sketches. Small sketches under-estimate the rank, so
            thresholds from the literature belong to their sketch sizes: 1 for Permuted MNIST, 5 elsewhere (section
            F.4; the authors' code has 1 for convolutions).
        rank_rule: ``code``: smallest r whose share of the sketch's energy exceeds ``1 - (1 - epsilon) / rho``, as
            the authors' code does; ``gpm``: smallest r with ``rho^2 share + (1 - rho^2) >= epsilon`` (GPM, eq 9).
            ``code`` keeps more from the second task on.
        minimum_rank: fewest directions added per layer and task, 0 or 1. The authors' code has 1. The default is 0
            because one direction per task fills narrow layers without need: 20 tasks take 19 of 27 dimensions.
        project_clients: clients project their gradients, too (GPM, Saha et al., ICLR 2021, eq 6, with the server's
            basis). Without it they train along directions that the server then takes out of the update. The bases are
            sent down in every round from the second task on; clients store nothing. Extra compute per local step and
            layer: ``4 o d k`` operations, or ``2 o d^2``. With ``protect_bias`` a client's weight is kept out of the
            span of the basis's rows for the weight, and the server projects both together.
        capacity: most directions that a task may add to a layer, whatever the threshold is, so that later tasks find
            room. ``{total: share}``: all tasks together use at most this share of the layer's input space, divided
            evenly among the extractions to come. ``{per_task: share}``: a task uses at most this share of what is free.
            null: all that is free (:func:`cfl.methods.components.capacity.room_for`).
        importance_scale: alpha of scaled gradient projection (SGP, Saha and Roy, AAAI 2023), at least 0: a direction
            is protected in proportion to its importance, accumulated over tasks
            (:func:`cfl.methods.components.importance.accumulated_importance`). null: all directions of the basis are
            protected fully, as in the paper. Needs ``message: covariance``. With ``project_clients`` both the clients'
            gradients and the server's step are scaled: a direction of importance c keeps ``(1 - c)^2`` of its step.
        last_extraction: extract after the last task, too. Its basis protects nothing in this run, but is reported.
        residual_share: ``energy``: rho from summed energies, exact; ``client_mean``: mean over clients of their own
            rho, weighted by samples, as in the authors' code.
        layers: patterns over module names; null protects all Linear and Conv2d layers, except the output layer where
            every task trains outputs of its own.
        gpse_model: model whose layer inputs are sketched: the ``global`` model after the task, or each client's
            ``local`` one at the end of the task's last round.
        gpse_clients: ``sampled`` in the task's last round, or ``all`` that hold the task.
        gpse_batch_size: samples per forward pass in GPSE. Changes memory and speed, results where BatchNorm has no
            statistics, and what is drawn for sketches row by row and with ``gpse_dropout``.
        gpse_dropout: keep dropout active in GPSE, as the authors' code does on Permuted MNIST, but record a layer's
            inputs before the dropout directly in front of it: there the activations are taken at the ReLUs. A layer's
            inputs then have the noise of all other dropout layers; in their network those of the first two layers have
            none. ``shared``: clients that draw the same Gaussian numbers (``sketch_sharing``) also have the same masks.
        sketch_sharing: worker processes that draw the same Gaussian numbers; 1 as in the paper: every client has its
            own. The authors' code seeds its MPI workers alike (5 on Permuted MNIST by its README, elsewhere 8). As we
            read it, the p-th clients of all workers with equally many clients then draw the same numbers: four of 5
            workers if there are 64 clients. The sum of such sketches is a sketch of the clients' summed inputs, in
            which their common mean weighs more, so that ranks fall. Clients are dealt out as by
            ``numpy.array_split``, in ascending order.
        protect_bias: treat the bias as the weight of an input that is always 1, so that outputs for earlier tasks'
            inputs do not change at all; the paper does not protect biases.
        freeze_first_layer: freeze weight and bias of the first layer after the first task, and leave it out of GPSE
            (FRZ, Table 6). From the second task on neither clients nor the server's momentum move it. A normalisation
            layer behind it is still trained: the paper does not say, and behind every other layer scales and shifts are
            trained by plain averaging, too.
        mechanism: Gaussian mechanism on the sketches or second moments (Table 6), or null for none.

    Raises:
        ConfigError: an option is out of range, or does not go with another; or, before training, what :meth:`setup`
            refuses.
    """

    looks_back: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = ("bases", "importance", "gpse_seconds", "_rows")

    def __init__(
        self,
        threshold: float = 0.95,
        threshold_increment: float = 0.0,
        message: Literal["sketch", "covariance"] = "sketch",
        sketch_size: float | dict[str, float] | None = None,
        rank_rule: RankRule = "code",
        minimum_rank: int = 0,
        project_clients: bool = False,
        capacity: dict[str, float] | None = None,
        importance_scale: float | None = None,
        last_extraction: bool = False,
        residual_share: Literal["energy", "client_mean"] = "energy",
        layers: list[str] | None = None,
        gpse_model: Literal["global", "local"] = "global",
        gpse_clients: Literal["sampled", "all"] = "sampled",
        gpse_batch_size: int = 500,
        gpse_dropout: bool | Literal["shared"] = False,
        sketch_sharing: int = 1,
        protect_bias: bool = False,
        freeze_first_layer: bool = False,
        mechanism: GaussianMechanism | None = None,
    ) -> None:
        key = self.key
        self._growth = BasisGrowth(
            threshold, threshold_increment, rank_rule, minimum_rank, capacity, importance_scale, key
        )
        self._message = choose_message(key, message, sketch_size, sketch_sharing, residual_share, mechanism)
        if message == "sketch" and importance_scale is not None:
            valid = "null with message=sketch: the importance of old directions follows from message=covariance"
            raise ConfigError(f"{key}.importance_scale", importance_scale, valid)
        check_choices(key, ("global", "local"), gpse_model=gpse_model)
        check_choices(key, ("sampled", "all"), gpse_clients=gpse_clients)
        check_integers(key, 1, gpse_batch_size=gpse_batch_size)
        if gpse_model == "local" and gpse_clients == "all":
            valid = "sampled: with gpse_model=local only they have a local model"
            raise ConfigError(f"{key}.gpse_clients", gpse_clients, valid)
        if gpse_dropout == "shared" and sketch_sharing == 1:
            more = f", or {key}.sketch_sharing of at least 2: it says who shares masks" if message == "sketch" else ""
            valid = f"true or false{more}"
            raise ConfigError(f"{key}.gpse_dropout", gpse_dropout, valid)
        self.message, self.capacity, self.mechanism = message, capacity, mechanism
        self.gpse_model, self.gpse_batch_size, self.gpse_dropout = gpse_model, gpse_batch_size, gpse_dropout
        self.gpse_clients: Literal["sampled", "all"] = gpse_clients
        self._mask_sharing = sketch_sharing if gpse_dropout == "shared" else 1
        self.last_extraction, self.layers = last_extraction, layers
        self.protect_bias, self.freeze_first_layer = protect_bias, freeze_first_layer
        if project_clients:
            self.right_factors = self._right_factors
        self._frozen: set[str] = set()
        self.bases: dict[str, Tensor] = {}
        self.importance: dict[str, Tensor] = {}
        self.gpse_seconds: list[float] = []
        self._rows: list[dict[str, Any]] = []
        self._started = 0.0
        self._finder: BoundaryFinder | None = None

    def follow_found_tasks(self, finder: BoundaryFinder) -> None:
        """Let ``finder`` say where tasks end.

        Raises:
            ConfigError: for options that need to know where tasks end, or how many there are, and for sketches.
        """
        total = self.capacity is not None and "total" in self.capacity
        for option, refused, valid in (
            ("message", self.message == "sketch", "covariance: sketches leave out bases that grow while they are kept"),
            ("gpse_model", self.gpse_model == "local", "global: a task's last round is not known while it runs"),
            ("capacity", total, "{per_task: share} or null: nobody knows how many tasks come"),
            ("last_extraction", self.last_extraction, "false: the end of the last task is not found"),
            ("mechanism", self.mechanism is not None, "null: nobody knows before in which rounds moments are summed"),
        ):
            if refused:
                raise ConfigError(f"{self.key}.{option}", getattr(self, option), f"{valid}, with FoundBoundaries")
        self._finder, self.task_free = finder, True

    def setup(self, context: Context) -> None:
        """Find the protected layers.

        Raises:
            ConfigError: if a pattern matches no layer, a protected or frozen layer is personal, another method changes
                the model after the projection, or two of these methods would mix what clients send or keep.
        """
        super().setup(context)
        if self.gpse_model == "local" or self._finder is not None:
            self.refuse_twins(FOT, "one FOT with gpse_model=local, or beside FoundBoundaries")
        if self.mechanism is not None:
            self.refuse_twins(FOT, "one FOT with a mechanism: two would add the same noise to two sums")
        free = context.network.head if context.scenario == "task" or context.class_loss == "own" else None
        chosen = choose_layers(context.network, self.layers, f"{self.key}.layers", free, context.frozen)
        if self.freeze_first_layer:
            first = next(iter(weighted_layers(context.network)))
            chosen.pop(first, None)
            parameters = {f"{first}.weight", f"{first}.bias"}
            self._frozen = parameters & {name for name, _ in context.network.named_parameters()}
            if f"{first}.weight" not in self._frozen or not self._frozen <= set(context.shared_parameters):
                valid = f"false: {first} is frozen already, or another method decomposes it or keeps it local"
                raise ConfigError(f"{self.key}.freeze_first_layer", True, valid)
        for name, layer in chosen.items():
            projected = [f"{name}.weight"] + [f"{name}.bias"] * self._moving_bias(name, layer)
            if not set(projected) <= set(context.shared_parameters):
                raise ConfigError(f"{self.key}.layers", name, "layers whose weights are not kept local by a method")
        self._protected = chosen
        self._with_bias = {n: self._moving_bias(n, m) for n, m in chosen.items()}
        self._extraction = SubspaceExtraction(
            context,
            chosen,
            self._with_bias,
            self._message,
            self.gpse_batch_size,
            bool(self.gpse_dropout),
            self._mask_sharing,
        )
        self._dims = self._extraction.dims
        self._remembered = NewestTwo(context, "fot")
        undone = [name for name, method in context.methods.items() if method.moves_model_after_round]
        if undone:
            valid = f"methods without {', '.join(undone)}, which would move the model behind {self.name}'s projection"
            raise ConfigError("methods", list(context.methods), valid)
        later = {name: context.methods[name] for name in list(context.methods)[self.source :]}
        if changing := [
            n for n, method in later.items() if has(method, ServerTransform) and not isinstance(method, FOT)
        ]:
            rank_zero_warn(
                f"methods.{', methods.'.join(changing)} may change the server's step behind {self.key}. Unless it only "
                "scales the step, outputs for earlier tasks' inputs then change, which FOT is to prevent; put "
                f"{', '.join(changing)} before {self.name} in methods"
            )

    def _moving_bias(self, name: str, layer: nn.Module) -> bool:
        """Whether a layer has a bias that has to be protected; a frozen one does not move."""
        return self.protect_bias and layer.bias is not None and f"{name}.bias" not in self.context.frozen

    # FedProject.

    def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        """Project the step of every protected layer, so that its outputs for earlier tasks' inputs do not change."""
        projected = dict(step)
        for name in self.bases:
            weight, bias = f"{name}.weight", f"{name}.bias"
            basis, importance = self._protection(name, step[weight].device)
            if self._with_bias[name]:
                projected[weight], projected[bias] = project_with_bias(step[weight], step[bias], basis, importance)
            else:
                projected[weight] = project(step[weight], basis, importance)
        if self._frozen and self._past_first_task:
            for name in self._frozen:
                projected[name] = torch.zeros_like(step[name])
        return projected

    def _right_factors(self, cohort: Cohort) -> dict[str, RightFactor]:
        """With ``project_clients``: weight name -> ``I - O diag(importance) O^T``, the same for all clients."""
        device = next(iter(cohort.parameters.values())).device
        clients = len(cohort.clients)
        steps = clients * self.context.local_epochs * math.ceil(max(cohort.sizes) / self.context.batch_size)
        message, factors = {}, {}
        for name in self.bases:
            basis, importance = self._protection(name, device)
            if basis is None or not basis.shape[1]:
                continue
            message[name] = basis
            weight = self._protected[name].weight
            columns = basis[: weight[0].numel()]
            if importance is not None:
                message[f"{name} importance"] = importance
                scaled = columns * importance.to(columns)
                factor = RightFactor(torch.eye(len(columns), device=device) - (scaled @ columns.T)[None])
            else:
                if self._with_bias[name]:  # without the bias's row, columns may depend on each other, or vanish
                    left, size, _ = torch.linalg.svd(columns, full_matrices=False)
                    columns = left[:, size > _RANK]
                factor = projection_factor(columns[None], len(weight), steps)
            factors[f"{name}.weight"] = RightFactor(factor.matrix.expand(clients, -1, -1), factor.removes)
        if message:
            self.context.channel.downlink("fot bases", message, clients)
        return factors

    def frozen_parameters(self, cohort: Cohort) -> Collection[str]:
        """The first layer's parameters, from the second task on, with ``freeze_first_layer``."""
        return self._frozen if self._frozen and self._past_first_task else ()

    @property
    def _past_first_task(self) -> bool:
        if self._finder is not None:
            return self._found_tasks > 0
        return self.context.task_of(self.context.round) > 0

    def _protection(self, name: str, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """A layer's basis, and its directions' importance, on ``device``.

        They may be on another device, because a checkpoint is loaded before the network moves to an accelerator.
        """
        for held in (self.bases, self.importance):
            if name in held:
                held[name] = held[name].to(device)
        return self.bases.get(name), self.importance.get(name)

    # GPSE.

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """With ``gpse_model: local``, let clients sketch the layer inputs of their trained models.

        If boundaries are found, let them compute and keep, in some rounds, the moments of the layer inputs of the model
        that they have received.
        """
        if self._finder is not None:
            self._keep_moments(cohort, positions)
            return
        if self.gpse_model != "local" or not self._extracts_after(cohort.task):
            return
        plan = self.context.plan(cohort.round)
        if not plan.last_of_task:
            return
        started = time.perf_counter()
        clients = [cohort.clients[p] for p in positions]
        trained = cohort.rows(positions, {**cohort.parameters, **cohort.buffers})
        local = ({name: values[row] for name, values in trained.items()} for row in range(len(clients)))
        self._send_sketches(plan, clients, plan.clients, local)
        self._started = self._started or started

    def end_task(self, plan: RoundPlan) -> None:
        """Extract the principal subspace of the task's layer inputs and add it to the bases."""
        if not self._extracts_after(plan.task):
            return
        started = self._started or time.perf_counter()
        if self.gpse_model == "global":
            clients = list(plan.clients) if self.gpse_clients == "sampled" else self.context.members(plan.task)
            own = self.context.extra_round(plan.task, clients)
            self._send_sketches(plan, own, sorted(clients))
        self._grow(plan.task, started, {"task": plan.task})
        self._started = 0.0

    @property
    def _topic(self) -> str:
        return f"fot {self.message}"

    def _extracts_after(self, task: int) -> bool:
        return bool(self._protected) and (self.last_extraction or not self.context.is_last(task))

    def _send_sketches(
        self,
        plan: RoundPlan,
        clients: Sequence[int],
        senders: Sequence[int],
        local: Iterable[dict[str, Tensor]] | None = None,
    ) -> None:
        """Send the bases to ``clients``, if they need them, and send the clients' messages to the server."""
        device = self.context.device
        bases = {}
        if self._message.needs_bases:
            bases = {name: basis for name in self.bases if (basis := self._protection(name, device)[0]) is not None}
        channel = self.context.channel
        if bases:
            channel.downlink("fot bases", bases, len(clients))
        sizes = {client: len(self.context.indices(plan.task, client)) for client in clients}
        for client, message in self._extraction.messages(plan.task, plan.task, sizes, senders, bases, local):
            channel.uplink(self._topic, message, [1.0], [client])

    # GPSE where boundaries are found.

    @property
    def _found_tasks(self) -> int:
        """Number of tasks whose end has been found, whether or not any client had moments of them."""
        return len(self.gpse_seconds)

    def _keep_moments(self, cohort: Cohort, positions: Sequence[int]) -> None:
        if self._finder is None or not self._protected or not self._finder.keeps_in(cohort.round):
            return
        sizes = {cohort.clients[position]: cohort.sizes[position] for position in positions}
        for client, message in self._extraction.messages(cohort.task, cohort.round, sizes, cohort.clients, {}):
            self._remembered.keep(client, cohort.round, {name: values[0] for name, values in message.items()})

    def end_found_task(self, plan: RoundPlan, rounds: range) -> None:
        """Add the principal subspace of the newest moments that clients have kept in the task's rounds to the bases."""
        started = time.perf_counter()
        chosen = self._remembered.computed_in(rounds)
        if self.gpse_clients == "sampled":
            newest = max(chosen.values(), default=None)
            chosen = {client: round for client, round in chosen.items() if round == newest}
        if not chosen:
            self.gpse_seconds.append(0.0)
            return
        for client, kept in self._remembered.read(plan.task, rounds, chosen):
            self.context.channel.uplink(self._topic, {n: v[None] for n, v in kept.items()}, [1.0], [client])
        self._grow(self._found_tasks, started, {"round": plan.round})

    # The server's part.

    def _grow(self, task: int, started: float, when: Mapping[str, int]) -> None:
        """Apply the rank rule and grow the bases from the summed messages, at the server.

        Args:
            task: the task that has ended; where boundaries are found, the number of found tasks before it.
            started: when the extraction started, in seconds.
            when: the first column of the rows of the method's table.
        """
        sums, _ = self.context.channel.sum(self._topic)
        self._keep_own(sums)
        # In one process, because rounding, and with it the number of directions, may differ between processes.
        self.bases, self.importance, rows = self.context.at_server(lambda: self._grown(sums, task))
        seconds = time.perf_counter() - started
        self.gpse_seconds.append(seconds)
        self._rows += [{**when, **row, "gpse_seconds": seconds} for row in rows]

    def _keep_own(self, sums: Mapping[str, Tensor]) -> None:
        """Keep more of a task's summed messages than the directions outside the bases; does nothing here."""

    def _grown(
        self, sums: Mapping[str, Tensor], task: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Any]]]:
        """The grown bases, their directions' importance, and rows of the method's table without time and seconds."""
        # Extractions to come, this one included. Only capacity: {total} uses it, refused with found boundaries.
        left = 1 if self._finder else self.context.num_tasks - 1 - task + self.last_extraction
        rows, bases, importances = [], dict(self.bases), dict(self.importance)
        for name, d in self._dims.items():
            basis, importance = self._protection(name, sums[name].device)
            seen = self._message.spectrum(sums, name, d, basis)
            bases[name], weights = self._growth.grown(basis, importance, seen, task, left)
            size = bases[name].shape[1]
            row = {
                "layer": name,
                "input_dim": d,
                "basis_size": size,
                "added": size - (0 if basis is None else basis.shape[1]),
                "used_space": 100 * used_share(bases[name], d),
                "residual_share": seen.rho,
                "threshold": self._growth.threshold_of(task),
                "sketch_bytes": seen.message_bytes,
                "basis_bytes": payload_bytes({name: bases[name]}),
            }
            if weights is not None:
                importances[name] = weights
                row["importance"] = float(weights.sum()) / max(1, size)
            rows.append(row)
        return bases, importances, rows

    # Reports and checkpoints.

    def releases(self, plan: RoundPlan) -> dict[str, Noise]:
        """The noise in the sum of the sketches, or of second moments, after a task."""
        if self.mechanism is None or not plan.last_of_task or not self._extracts_after(plan.task):
            return {}
        return {self._topic: self.mechanism.noise(len(self._dims), self.gpse_clients, self._message.without_noise)}

    @property
    def used_space(self) -> float:
        """Share of the layers' input spaces taken by the bases, mean over protected layers, in percent (Table 3)."""
        shares = [used_share(self.bases.get(name), d) for name, d in self._dims.items()]
        return 100 * sum(shares) / len(shares) if shares else 0.0

    def report(self) -> Report:
        """Used space (%), seconds in GPSE, and bytes of model, one client's sketches, and bases (Tables 3 to 5).

        If boundaries are found, also ``remembered_bytes``: bytes of moments that a client keeps for the next boundary.

        A row per layer and task, or round of a found boundary: sizes, used space (%), residual share, bytes, seconds of
        the whole extraction.
        """
        when = "task" if self._finder is None else "round"
        last = [row for row in self._rows if row[when] == self._rows[-1][when]]
        figures = {
            "used_space": self.used_space,
            "gpse_seconds": sum(self.gpse_seconds),
            "model_bytes": payload_bytes(self.context.shared_tensors()),
            "sketch_bytes": sum(row["sketch_bytes"] for row in last),
            "basis_bytes": payload_bytes(self.bases),
        }
        if self._finder is not None:
            figures["remembered_bytes"] = self._remembered.bytes()
        return Report(figures, self._rows)

    def client_storage(self) -> int:
        """Bytes of the moments that a client keeps for the next boundary."""
        return self._remembered.bytes() if self._finder is not None else 0
