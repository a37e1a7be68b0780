"""Analytic heads: ridge regression on a frozen network's features, from sums over clients (AFCL, STSA)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.federation.channel import payload_bytes
from cfl.methods.base import Method, Report
from cfl.methods.components.client_model import client_model
from cfl.methods.components.common_model import network_with_common_features
from cfl.methods.components.layer_inputs.packed import pack, unpack
from cfl.methods.context import Context
from cfl.models.evaluation import evaluation_mode
from cfl.models.features import features_of
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import MOST_AT_ONCE, check_integers, check_numbers


class AnalyticHead(Method):
    """Freezes the network after the first task, and computes its output layer by ridge regression from summed features.

    The first task is federated averaging. Then all weights and running statistics stay as they are. After every task,
    the first included, client i sends what its samples' features ``X_i [n, d]`` and one-hot classes ``Y_i [n, O]`` add
    to two sums. The server solves::

        G = sum_i X_i^T X_i,   C = sum_i X_i^T Y_i   over all clients and all tasks so far
        W = (G + ridge I)^-1 C

    and tests take the class with the largest ``x^T W`` among the classes learned so far. W is the minimum of
    ``||X W - Y||^2 + ridge ||W||^2`` over the samples of all clients and tasks together. With the same features it does
    not depend on who has which samples, on the order of the tasks, or on the number of processes.

    This follows AFCL (Tang et al., 2025, arXiv 2505.12245) in its objective and its frozen network, and STSA (Guan et
    al., 2025, arXiv 2506.01327), whose code trains on the first task and has ``random_features``. We have read the
    abstracts and summaries of both, and the code of STSA. Differs from AFCL: the server adds up G and C and solves
    anew, in place of a recursion that has the same result. Differs from STSA's code: all clients that hold a task send,
    and G is exact; its variant STSA-E, which estimates G from class means, is not implemented.

    Sends: after every task an extra round of all clients that hold it: the global model down; up, the triangle of G and
    the columns of C of the task's own classes, in float64, as sums. Later tasks also have rounds. In these the model is
    sent, but no local step is computed, so one is enough: ``schedule.rounds_per_task: [20, 1, 1, 1, 1]``. Storage per
    client: none. Extra compute: a forward pass over a task's samples after it. Features of test samples are computed
    once after the network is frozen and kept for later tests, at most 256 MiB of them. Scenarios: task-, class- and
    domain-incremental. Optimizers: any.

    Args:
        ridge: strength of the regularisation, above 0. It is compared with the summed squares of features.
        random_features: M, a number of features ``relu(x^T R)`` in place of x, with R ``[d, M]`` of normal numbers that
            all clients draw alike from the run's seed (STSA). Clients then send ``M (M + 1) / 2`` numbers. null: x.
        train_backbone: whether the first task trains the network. Without, its rounds train nothing; for weights that
            are given (``model.network.weights``).

    Raises:
        ConfigError: an option is out of range; or, before training, clients' models differ, features depend on the
            samples that are computed together, another method changes the model at the server, or it looks back at
            earlier tasks, as GPM does, which would change nothing.
    """

    looks_back: ClassVar[bool] = True
    common_order: ClassVar[bool] = True
    state = ("gram", "class_sums", "weight", "_statistics")

    def __init__(self, ridge: float = 1.0, random_features: int | None = None, train_backbone: bool = True) -> None:
        check_numbers("methods.analytic_head", "(0, inf)", ridge=ridge)
        check_integers("methods.analytic_head", 1, at_most=MOST_AT_ONCE, or_null=True, random_features=random_features)
        self.ridge, self.random_features, self.train_backbone = ridge, random_features, train_backbone
        self.gram: Tensor | None = None
        self.class_sums: Tensor | None = None
        self.weight: Tensor | None = None
        self._statistics: dict[str, Tensor] = {}
        self._map: Tensor | None = None

    def setup(self, context: Context) -> None:
        """Draw the random features.

        Raises:
            ConfigError: clients have no common features, or features depend on the batch or would change later.
        """
        super().setup(context)
        key = self.key
        self._network = network = network_with_common_features(self)
        norms = [layer for layer in network.modules() if isinstance(layer, _BatchNorm)]
        if norms and context.batchnorm != "average":
            raise ConfigError("federated.batchnorm", context.batchnorm, f"average with {key}: features must be common")
        if any(layer.running_mean is None for layer in norms):
            raise ConfigError("model.network", type(network).__name__, f"BatchNorm with running statistics with {key}")
        if moving := [name for name, method in context.methods.items() if method.moves_model_after_round]:
            valid = f"methods without {', '.join(moving)}, which would change the model that {key} keeps as it is"
            raise ConfigError("methods", list(context.methods), valid)
        others = {name: method for name, method in context.methods.items() if not isinstance(method, AnalyticHead)}
        if moot := [name for name, method in others.items() if method.looks_back and not method.task_free]:
            valid = f"no method that looks back at earlier tasks beside {key}, which trains nothing after the first"
            raise ConfigError("methods", moot, valid)
        if self.random_features is not None:
            drawn = torch_generator(context.seed, "analytic features")
            self._map = torch.randn(network.head.in_features, self.random_features, generator=drawn).double()

    # The network stays as it is.

    def _frozen(self, task: int) -> bool:
        return task > 0 or not self.train_backbone

    def begin_task(self, plan: RoundPlan) -> None:
        """Keep the running statistics of a network that is not to be trained."""
        if plan.task == 0 and not self.train_backbone:
            self._keep_statistics()

    def _keep_statistics(self) -> None:
        """Store the global model's running statistics, because averaging them in later rounds may round them."""
        tensors = self.context.state_tensors()
        self._statistics = {name: tensors[name].detach().clone() for name in self.context.shared_buffers}

    def frozen_parameters(self, cohort: Cohort) -> Collection[str]:
        """All parameters from the second task on, or from the beginning without ``train_backbone``."""
        return self.context.shared_parameters if self._frozen(cohort.task) else ()

    def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        """A step of zeros once the network is frozen, so that the server's momentum does not move the model."""
        if not self._frozen(self.context.task_of(self.context.round)):
            return step
        return {name: torch.zeros_like(value) for name, value in step.items()}

    # After a task.

    @torch.no_grad()
    def end_task(self, plan: RoundPlan) -> None:
        """Let clients send what their samples add to G and C, and solve for W."""
        context = self.context
        if plan.task == 0 and self.train_backbone:
            self._keep_statistics()
        for client in context.extra_round(plan.task, context.members(plan.task)):
            context.channel.uplink(self.name, self._message(plan.task, client), [1.0], [client])
        sums, _ = context.channel.sum(self.name)
        self.gram, self.class_sums, self.weight = context.at_server(lambda: self._solved(plan.task, sums))

    def _message(self, task: int, client: int) -> dict[str, Tensor]:
        """Float64 ``X_i^T X_i`` ``[1, m (m + 1) / 2]`` and ``Y_i^T X_i`` ``[1, o, m]`` of the task's o outputs."""
        context = self.context
        device = context.device
        gram = torch.zeros(self._size, self._size, dtype=torch.float64, device=device)
        sums = gram.new_zeros(context.num_outputs, self._size)
        model = client_model(context, client)
        with evaluation_mode(context.network):
            for x, y in context.client_batches(task, client, context.eval_batch_size, device):
                features = self._mapped(self._features(model, x))
                gram.addmm_(features.T, features)
                sums.index_add_(0, y, features)
        own = context.outputs.own[task].to(device)
        return {"gram": pack(gram)[None], "class sums": sums[own][None]}

    def _solved(self, task: int, sums: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """G ``[m, m]``, C and W, both as ``[O, m]``, after the sums of a task are added."""
        gram = unpack(sums["gram"], self._size)
        class_sums = gram.new_zeros(self.context.num_outputs, self._size)
        class_sums[self.context.outputs.own[task].to(gram.device)] = sums["class sums"]
        if self.gram is not None and self.class_sums is not None:
            gram, class_sums = gram + self.gram.to(gram), class_sums + self.class_sums.to(gram)
        regularised = gram + self.ridge * torch.eye(self._size, dtype=gram.dtype, device=gram.device)
        return gram, class_sums, torch.linalg.solve(regularised, class_sums.T).T.contiguous()

    @property
    def _size(self) -> int:
        """Number m of features."""
        return self.random_features or self._network.head.in_features

    def _features(self, model: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Features ``[B, d]``, with the running statistics that the network had when it was frozen."""
        self._statistics = {name: tensor.to(x.device) for name, tensor in self._statistics.items()}
        return features_of(self._network, {**model, **self._statistics}, x)

    def _mapped(self, features: Tensor) -> Tensor:
        """Features ``[B, m]`` in float64, mapped by R with ``random_features``."""
        if self._map is None:
            return features.double()
        self._map = self._map.to(features.device)
        return torch.relu(features.double() @ self._map)

    # Evaluation and reports.

    def classify(self, task: int, model: dict[str, Tensor], x: Tensor) -> Tensor | None:
        """Scores ``x^T W``; classes of which no client had samples so far come last."""
        if self.weight is None or self.class_sums is None:
            return None
        self.weight, self.class_sums = self.weight.to(x.device), self.class_sums.to(x.device)
        features = self._mapped(self.context.once_per_test(self.name, lambda: self._features(model, x)))
        scores = features @ self.weight.T
        return torch.where(self.class_sums.any(1), scores, scores.amin(1, keepdim=True) - 1)

    def report(self) -> Report:
        """Number of features, and the bytes of G, C and W, which the server keeps."""
        held = {"gram": self.gram, "class sums": self.class_sums, "weight": self.weight}
        known = {name: tensor for name, tensor in held.items() if tensor is not None}
        return Report({"features": self._size, "server_bytes": payload_bytes(known)})
