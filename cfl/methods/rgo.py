"""Recursive Gradient Optimization (Liu and Liu, ICLR 2022), with projections kept by some of the clients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.engines.right_factors import RightFactor
from cfl.federation.channel import payload_bytes
from cfl.methods.base import Method, Report
from cfl.methods.capabilities import crosses_tasks, keeps_state
from cfl.methods.components.client_model import client_model, run_model, some_samples
from cfl.methods.components.curvature.fisher import drawn_labels
from cfl.methods.components.layer_inputs.after_task import figures_after_task
from cfl.methods.components.layer_inputs.feature_permutation import FeaturePermutations
from cfl.methods.components.layer_inputs.hooks import probed_outputs, seen_inputs
from cfl.methods.components.layer_inputs.recursive_inverse import inverse_with, normalised
from cfl.methods.components.layer_inputs.rows import layer_dim
from cfl.methods.components.layer_inputs.weighted_layers import choose_layers, weighted_layers
from cfl.methods.context import Context
from cfl.randomness.generators import numpy_generator, torch_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices, check_integers, check_numbers


class RGO(Method):
    """Preconditions gradients by the inverse curvature of earlier tasks, and permutes features in every task.

    From the paper's abstract: an iteratively updated optimizer modifies the gradient so that a quadratic estimate of
    the old tasks' loss grows least, without replayed data, and a virtual feature encoding layer gives every task its
    own structure, from the task's number alone. The authors have published no code. The formulas below are our reading
    of that idea.

    **Optimizer**: the gradient ``G [o, d]`` of a layer becomes ``G P`` between backward and the optimizer. After tasks
    ``1 .. t``, ``P = d S^-1 / trace(S^-1)`` with ``S = sum_i (c_i A_i + damping trace(c_i A_i) / d I)``.
    ``A = E[x x^T]`` are the second moments of the layer's inputs (patches for convolutions, added up over positions),
    ``c`` is the mean square of the loss gradients by the layer's outputs, with labels drawn from the model's own
    predictions: the Kronecker approximation of the Gauss-Newton matrix, ``trace(D A D^T) c`` for a change ``D``, with
    the outputs' side reduced to its mean. ``S`` is ``t`` times the running mean; this factor cancels in ``P``, whose
    trace is always ``d``, so that the mean step is that of plain SGD. ``S^-1`` follows from the last task's ``P`` and a
    factor by Woodbury's identity; no ``S``, input or sample is stored.

    **Feature encoding**: before every layer except the network's first, the features are permuted (channels before a
    convolution). Every task has its own fixed permutation; for the first task it is the identity. It is applied as a
    permutation of the weights' columns when clients receive the model, and undone when they send updates
    (:meth:`start_clients`). ``P`` is in the server's order of features.

    Clients: as in FOT's comparison (Bakman et al., 2024, F.2, F.4) a random ``share`` of the clients keeps its own
    ``P``, computed from its own samples with the global model after a task. The others train by plain SGD. "Clients
    that store projection matrix per task: 40 %" may mean the same clients throughout, or other clients after every task
    (``drawn``). In the second case a ``P`` includes only the tasks after which its client was drawn, and in the end
    nearly all clients have one.

    Sends: the new global model down to the clients that compute curvatures after a task; nothing up. Storage per client
    of the share: ``sum d^2`` numbers and one more per layer. Extra compute: ``2 o d^2`` operations per local
    step, client of the share and layer, where a plain step takes ``6 o d`` per sample; after a task a forward and a
    backward pass and about ``6 d^3`` float64 operations per layer. Biases and normalisation layers are trained by
    plain SGD. Scenarios: task- and domain-incremental; without ``feature_encoding`` also class-incremental. Optimizers:
    SGD.

    Args:
        share: share of all clients, in [0, 1], that add a task to their ``P``.
        drawn: whether these clients are drawn ``once``, or anew for each task (``per_task``).
        damping: above 0; added to the curvature in all directions, as a share of its mean.
        curvature: ``gauss_newton``, or ``inputs`` for ``c = 1``.
        feature_encoding: whether features are permuted.
        samples: most samples used per client and task; drawn at random if there are more.
        layers: patterns over module names; null takes all Linear and Conv2d layers, except the output layer in task-
            and class-incremental runs; ``["*"]`` takes that, too.
        batch_size: samples per pass after a task. Changes memory and speed, and results where BatchNorm has no
            statistics.

    Raises:
        ConfigError: an option is out of range; or, before training, what :meth:`setup` refuses.
    """

    looks_back: ClassVar[bool] = True
    common_order: ClassVar[bool] = True
    optimizers: ClassVar[frozenset[str] | None] = frozenset({"SGD"})
    state = ("_rows", "memory_seconds")  # the matrices are in ``context.clients``

    def __init__(
        self,
        share: float = 0.4,
        damping: float = 1e-2,
        curvature: Literal["gauss_newton", "inputs"] = "gauss_newton",
        feature_encoding: bool = True,
        samples: int = 300,
        layers: list[str] | None = None,
        batch_size: int = 500,
        drawn: Literal["once", "per_task"] = "once",
    ) -> None:
        check_numbers("methods.rgo", "[0, 1]", share=share)
        check_numbers("methods.rgo", "(0, inf)", damping=damping)
        check_integers("methods.rgo", 1, samples=samples, batch_size=batch_size)
        check_choices("methods.rgo", ("gauss_newton", "inputs"), curvature=curvature)
        check_choices("methods.rgo", ("once", "per_task"), drawn=drawn)
        self.share = share
        self.damping = damping
        self.curvature = curvature
        self.feature_encoding = feature_encoding
        self.samples = samples
        self.layers = layers
        self.batch_size = batch_size
        self.drawn = drawn
        self.memory_seconds = 0.0
        self._rows: list[dict[str, Any]] = []
        self._permutations: FeaturePermutations | None = None

    def setup(self, context: Context) -> None:
        """Find the layers.

        Raises:
            ConfigError: if a pattern matches no layer, the share is less than half a client, there are two of these
                methods, which would share their clients' state, or feature encoding cannot work with the data or with
                another method.
        """
        super().setup(context)
        self.refuse_twins(RGO, "one RGO; which layers is its option")
        free = context.network.head if context.scenario != "domain" else None
        self._layers = choose_layers(context.network, self.layers, f"{self.key}.layers", free, context.frozen)
        self._dims = {name: layer_dim(layer) for name, layer in self._layers.items()}
        count = context.num_clients
        if self.share > 0 and round(self.share * count) == 0:
            valid = f"0, or more than {0.5 / count:g}, so that one of {count} clients keeps a matrix"
            raise ConfigError(f"{self.key}.share", self.share, valid)
        if self.feature_encoding:
            self._check_encoding()
            first = next(iter(weighted_layers(context.network)))
            inner = {f"{name}.weight": layer.weight for name, layer in self._layers.items() if name != first}
            self._permutations = FeaturePermutations(inner, context.seed)

    def _check_encoding(self) -> None:
        """Refuse feature encoding if samples of several tasks would pass through one permutation, if a test image's
        task is unknown, or if another method keeps something of the model, which would be in the server's order."""
        context = self.context
        others = {name: method for name, method in context.methods.items() if method is not self}
        crossing = [name for name, method in others.items() if crosses_tasks(method)]
        keeping = [name for name, method in others.items() if method.looks_back or keeps_state(method)]
        valid = ""
        if crossing:
            valid = f"false with {', '.join(crossing)}: samples of other tasks would pass through this task's order"
        elif keeping:
            valid = f"false with {', '.join(keeping)}: what it keeps of the model has the server's order of features"
        elif context.exposure != "sequential":
            valid = f"false with data.exposure: {context.exposure}: clients train on samples of several tasks at once"
        elif context.scenario == "class":
            valid = "false with data.scenario: class: which order a test image needs would tell its task"
        if valid:
            raise ConfigError(f"{self.key}.feature_encoding", True, valid)

    def keepers(self, task: int) -> frozenset[int]:
        """The clients that add a task to their ``P``."""
        context = self.context
        when = (task,) if self.drawn == "per_task" else ()
        order = numpy_generator(context.seed, "rgo share", *when).permutation(context.num_clients)
        return frozenset(order[: round(self.share * context.num_clients)].tolist())

    # Feature encoding.

    def start_clients(self, cohort: Cohort) -> None:
        """Permute the columns of the layers' weights, in the clients' models and in the received model."""
        if self._permutations is not None:
            apply = self._permutations.apply
            cohort.turn(partial(apply, cohort.task), partial(apply, cohort.task, undo=True))

    def model_for(self, task: int, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model with its columns permuted for the task."""
        return model if self._permutations is None else self._permutations.apply(task, model)

    def _both_sides(self, task: int, matrices: Mapping[str, Tensor], undo: bool = False) -> dict[str, Tensor]:
        """Layer -> symmetric ``[..., d, d]`` with rows and columns in a task's order of features, or put back."""
        columns = self._columns(task, matrices, undo)
        return self._columns(task, {name: matrix.mT for name, matrix in columns.items()}, undo)

    def _columns(self, task: int, rows: Mapping[str, Tensor], undo: bool) -> dict[str, Tensor]:
        """Layer -> ``[..., n, d]`` with the columns permuted as the layer's weight."""
        if self._permutations is None:
            return dict(rows)
        kernels = {name: self._layers[name].weight.shape[1:] for name in rows}
        as_weights = {f"{name}.weight": r.reshape(*r.shape[:-1], *kernels[name]) for name, r in rows.items()}
        turned = self._permutations.apply(task, as_weights, undo)
        return {name: turned[f"{name}.weight"].reshape(r.shape) for name, r in rows.items()}

    # Training.

    def right_factors(self, cohort: Cohort) -> dict[str, RightFactor]:
        """``P`` of the clients that have one, in the task's order of features."""
        holders = set(self.context.clients.holders("rgo"))
        places = [place for place, client in enumerate(cohort.clients) if client in holders]
        if not places:
            return {}
        device = self.context.device
        held = self._held([cohort.clients[place] for place in places])
        positions = None if len(places) == len(cohort.clients) else torch.tensor(places, device=device)
        both = self._both_sides(cohort.task, {n: held[n] for n in self._dims})
        return {f"{name}.weight": RightFactor(matrix, positions=positions) for name, matrix in both.items()}

    @property
    def computes_locally(self) -> bool:
        """Whether any client keeps a matrix; feature encoding adds nothing to local steps."""
        return self.share > 0 and bool(self._layers)

    def _held(self, clients: list[int]) -> dict[str, Tensor]:
        """Layer -> ``P [k, d, d]``, ``<layer> scale`` -> ``[k]`` with ``S^-1 = scale P``, 0 where there is no ``S``."""
        return self.context.clients.gather("rgo", clients, self._plain(self.context.device))

    def _plain(self, device: torch.device | str) -> dict[str, Tensor]:
        """What a client without ``S`` has: ``P = I``."""
        found: dict[str, Tensor] = {}
        for name, d in self._dims.items():
            dtype = torch.promote_types(self._layers[name].weight.dtype, torch.float32)
            found[name] = torch.eye(d, dtype=dtype, device=device)
            found[f"{name} scale"] = torch.zeros((), dtype=torch.float64, device=device)
        return found

    # The recursion.

    def end_task(self, plan: RoundPlan) -> None:
        """Let the clients of the share add the task's curvature to their ``P``."""
        context = self.context
        keepers = self.keepers(plan.task)
        if context.is_last(plan.task) or not self._dims or not keepers:
            return
        asked = [client for client in context.members(plan.task) if client in keepers]
        figures, seconds = figures_after_task(context, plan, asked, self._update)
        self._record(plan.task, figures)
        self.memory_seconds += seconds

    @torch.no_grad()
    def _update(self, task: int, client: int) -> list[tuple[float, float]]:
        """Update one client's ``P``. Returns per layer: mean curvature ``trace(c A) / d``, free share of ``P``."""
        held = self._held([client])
        figures = []
        for name, curvature in self._curvatures(task, client).items():
            mean = curvature.diagonal().mean()
            if bool(mean > 0):
                p, scale = held[name][0], held[f"{name} scale"][0]
                added = curvature + self.damping * mean * torch.eye(len(curvature)).to(curvature)
                new, scale = normalised(inverse_with(scale * p.double() if bool(scale > 0) else None, added))
                held[name][0].copy_(new)
                held[f"{name} scale"][0] = scale
            figures.append((float(mean), len(curvature) / float(held[name][0].double().square().sum())))
        self.context.clients.scatter("rgo", [client], held)
        return figures

    def _curvatures(self, task: int, client: int) -> dict[str, Tensor]:
        """Layer -> ``c A [d, d]`` float64 of a client's samples, in the server's order of features."""
        context = self.context
        model = self.model_for(task, client_model(context, client))
        device = context.device
        moments = {n: torch.zeros(d, d, dtype=torch.float64, device=device) for n, d in self._dims.items()}
        squares = dict.fromkeys(self._dims, 0.0)
        elements = dict.fromkeys(self._dims, 0)
        weigh = self.curvature == "gauss_newton"

        def see(name: str, rows: Tensor) -> None:
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            moments[name] += rows.T @ rows

        allowed = context.outputs_in_loss(task, client)
        generator = torch_generator(context.seed, "rgo labels", task, client)
        samples = 0
        with seen_inputs(self._layers, see), probed_outputs(self._layers if weigh else {}) as probes:
            for x in some_samples(context, task, client, self.samples, "rgo samples", self.batch_size):
                samples += len(x)
                with torch.set_grad_enabled(weigh):
                    logits = run_model(context, model, x)
                    if not weigh:
                        continue
                    loss = drawn_label_loss(logits, None if allowed is None else allowed.to(device), generator)
                used = [(name, probe) for name, ones in probes.items() for probe in ones]
                gradients = torch.autograd.grad(loss, [probe for _, probe in used], materialize_grads=True)
                for (name, _), gradient in zip(used, gradients, strict=True):
                    squares[name] += float(gradient.double().square().sum())
                    elements[name] += gradient.numel()
                for ones in probes.values():
                    ones.clear()
        weighted = {
            name: moment * ((squares[name] / max(elements[name], 1) if weigh else 1.0) / max(samples, 1))
            for name, moment in moments.items()
        }
        return self._both_sides(task, weighted, undo=True)

    # Reports and checkpoints.

    def _record(self, task: int, clients: list[list[tuple[float, float]]]) -> None:
        for number, (name, d) in enumerate(self._dims.items()):
            curvatures, shares = zip(*(found[number] for found in clients), strict=True) if clients else ((), ())
            self._rows.append(
                {
                    "task": task,
                    "layer": name,
                    "input_dim": d,
                    "clients": len(clients),
                    "curvature": sum(curvatures) / max(len(clients), 1),
                    "free_space": 100 * sum(shares) / max(len(clients), 1),
                }
            )

    def report(self) -> Report:
        """Clients that add a task to their ``P``, bytes that each stores, and seconds spent on curvatures.

        A row per task and layer, means over the clients that updated their ``P``. ``curvature`` is ``trace(c A) / d``
        of the task. ``free_space`` is ``trace(P)^2 / (d ||P||_F^2)`` in percent: 100 for plain SGD, ``100 r / d`` if
        only r directions were left.
        """
        figures = {
            "keepers": len(self.keepers(0)),
            "memory_bytes": self._matrix_bytes(),
            "memory_seconds": self.memory_seconds,
        }
        return Report(figures, self._rows)

    def _matrix_bytes(self) -> int:
        """Bytes of the matrices of a client, and of their scales."""
        return payload_bytes(self._plain("meta"))

    def client_storage(self) -> int:
        """Bytes of the matrices, at clients that keep them; 0 before the end of the first task."""
        return self._matrix_bytes() * bool(self.keepers(0) and self._rows)


def drawn_label_loss(logits: Tensor, allowed: Tensor | None, generator: torch.Generator) -> Tensor:
    """Sum over samples of the cross-entropy with a label drawn from the model's own prediction.

    The expected square of its gradient with respect to a tensor is the diagonal of the Gauss-Newton matrix there.

    Args:
        logits: ``[b, O]``.
        allowed: ``[O]`` bool, outputs of the task, or None for all.
        generator: on the CPU; one number is drawn per sample, so the draws do not depend on the batch size.
    """
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    labels = drawn_labels(logits.detach().double().softmax(1), generator)
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
