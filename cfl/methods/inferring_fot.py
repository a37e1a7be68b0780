"""FOT for class-incremental streams: tests infer a sample's task from its layer inputs (after FedProTIP)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cfl.data.scenarios import Scenario
from cfl.federation.channel import payload_bytes
from cfl.methods.base import Report
from cfl.methods.components.client_model import run_model
from cfl.methods.components.common_model import check_common_model
from cfl.methods.components.layer_inputs.hooks import inputs_watched
from cfl.methods.context import Context
from cfl.methods.fot import FOT
from cfl.metrics.accuracy import AccuracyMatrix
from cfl.metrics.transfer import average_accuracy
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_integers


class InferringFOT(FOT):
    """FOT for tests with unknown tasks: a test sample gets the task whose subspace holds most of its layer inputs.

    FOT's clients send second moments ``C_t`` of their layer inputs after every task, the last included
    (``message: covariance``). The server takes FOT's bases from them, and a second basis ``U_t [d, r]`` of each
    protected layer: the r leading eigenvectors of ``C_t`` itself. FOT's bases get only directions that earlier tasks
    lack, whereas the bases ``U_t`` of different tasks may overlap. A test sample with inputs ``x_l`` of layer l, all
    patches of a convolution together, belongs to the task::

        argmin_t  mean over l of  ||x_l - U_tl U_tl^T x_l||^2 / ||x_l||^2

    among the tasks so far, and the class is that of the largest logit among the task's own outputs. All tasks have
    equally many directions, so that no residual is smaller only because its basis is larger.

    This follows FedProTIP (Cha et al., 2025, arXiv 2509.21606), which also projects gradients and infers the task from
    subspaces of earlier tasks. We have read its abstract and its code. Differs from its code: there a batch of test
    samples of one task is given one task, here each sample by itself. There the norms of the features' projections on
    the directions that each task added are compared with clients' own norms, and clients vote. Here the inputs of all
    protected layers are compared with each task's own subspace, and clients send only sums. There clients project their
    gradients; here the server projects its step, or both project (``project_clients``). Residuals, equal ranks and the
    choice of layers are our own.

    Use ``data.class_loss: own``: the output layer is then left free, as each task trains outputs of its own. Otherwise
    it is protected like all layers.

    Sends: what FOT sends with second moments, and once more after the last task. Storage per client: none between
    rounds; for tests the U_t are needed beside the model (``task_bases_bytes``). Extra compute: in tests, r products
    per task for each input of a protected layer. Scenarios: class-incremental. Reports ``tasks_identified``: the share
    in percent of test samples whose class is one of their own task, mean over the tasks so far. ``acc_task_il`` has the
    accuracy with known tasks. Tests during a task (``schedule.evaluate_every``) do not infer it yet.

    Args:
        directions: r; of a layer with d inputs at most ``d / 2``.
        options: those of FOT, except ``message``, ``last_extraction`` and the options of sketches.

    Raises:
        ConfigError: ``directions`` is below 1; or what FOT or, before training, :meth:`setup` refuses.
    """

    common_order: ClassVar[bool] = True
    scenarios: ClassVar[frozenset[Scenario]] = frozenset({"class"})
    state: ClassVar[tuple[str, ...]] = ("task_bases", "identified.sums", "identified.counts")
    identified: AccuracyMatrix
    follow_found_tasks = None  # type: ignore[assignment]  # tests need the number of every task

    def __init__(self, directions: int = 20, **options: Any) -> None:
        super().__init__(message="covariance", last_extraction=True, **options)
        check_integers(self.key, 1, directions=directions)
        self.directions = directions
        self.task_bases: dict[str, Tensor] = {}
        self.identified = AccuracyMatrix(1)

    def setup(self, context: Context) -> None:
        """Find the protected layers, as FOT does.

        Raises:
            ConfigError: as for FOT; also if clients' models differ, so that there are no common inputs, or no layer is
                protected.
        """
        super().setup(context)
        check_common_model(self)
        if not self._protected:
            raise ConfigError(f"{self.key}.layers", self.layers, "at least one layer, whose inputs are compared")
        self.identified = AccuracyMatrix(context.num_tasks)

    def _keep_own(self, sums: Mapping[str, Tensor]) -> None:
        """Keep the leading directions of a task's own inputs: layer -> ``[tasks so far, d, r]``."""
        for name, found in self.context.at_server(lambda: self._own(sums)).items():
            before = self.task_bases.get(name, found[:0])
            self.task_bases[name] = torch.cat([before.to(found.device), found])

    def _own(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Layer -> ``[1, d, r]``, with zeros in place of directions in which the task has no inputs."""
        found = {}
        for name, d in self._dims.items():
            seen = self._message.spectrum(sums, name, d, None)
            r = min(self.directions, max(1, d // 2))
            found[name] = (seen.directions * (seen.values > 0))[None, :, :r].to(sums[name].dtype).contiguous()
        return found

    # Tests.

    def classify(self, task: int, model: dict[str, Tensor], x: Tensor) -> Tensor | None:
        """The logits, with those of all other tasks lowered below those of the inferred task."""
        if not self.task_bases:
            return None
        logits, residuals = self._passed(model, x)
        own = self.context.outputs.own.to(x.device)[residuals.argmin(1)]
        span = logits.amax(1, keepdim=True) - logits.amin(1, keepdim=True) + 1
        return torch.where(own, logits, logits - span)

    def _passed(self, model: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, O]``, and ``[B, tasks so far]`` sums over layers of the shares outside each task's subspace."""
        self.task_bases = {name: bases.to(x.device) for name, bases in self.task_bases.items()}
        seen: dict[str, Tensor] = {}

        def watch(name: str) -> Any:
            def see(layer: nn.Module, inputs: Tensor) -> None:
                found = energies(layer, inputs, self.task_bases[name], self._with_bias[name])
                seen[name] = seen[name] + found if name in seen else found  # a network may call a layer several times

            return see

        network = self.context.network
        with inputs_watched({network.get_submodule(name): watch(name) for name in self.task_bases}):
            logits = run_model(self.context, model, x)
        return logits, torch.stack([residual_shares(found) for found in seen.values()]).sum(0)

    def report(self) -> Report:
        """FOT's report, the share of tasks identified, and the bytes of the tasks' own bases."""
        report = super().report()
        share = average_accuracy(self.identified.compute()).item()
        own = {
            "tasks_identified": None if math.isnan(share) else share,
            "task_bases_bytes": payload_bytes(self.task_bases),
        }
        return Report({**report.figures, **own}, report.rows)


def residual_shares(energies: Tensor) -> Tensor:
    """``[B, T]``: for each sample, the share of its inputs' energy outside each of T subspaces.

    Args:
        energies: ``[B, 1 + T]``, of :func:`energies`.
    """
    whole = energies[:, :1].clamp(min=torch.finfo(energies.dtype).tiny)
    return 1 - energies[:, 1:] / whole


def energies(layer: nn.Module, x: Tensor, bases: Tensor, with_bias: bool) -> Tensor:
    """``[B, 1 + T]``: for each sample, the energy of its inputs, and the part of it inside each of T subspaces.

    Args:
        layer: a Linear or Conv2d layer.
        x: its input, ``[B, ...]``; a convolution's patches count together.
        bases: ``[T, d, r]``, each orthonormal, of the vectors that the layer multiplies its weight with.
        with_bias: whether a 1 is appended to these.
    """
    d = bases.shape[1] - with_bias

    def energy(vectors: Tensor, x: Tensor) -> Tensor:
        """``[B, r, positions]`` products of the inputs with ``vectors [d, r]``."""
        weight, bias = vectors[:d].T, vectors[d] if with_bias else None
        if isinstance(layer, nn.Conv2d):
            kernel = weight.reshape(-1, *layer.weight.shape[1:])
            return layer._conv_forward(x, kernel, bias)
        return nn.functional.linear(x, weight, bias)

    x = x.to(bases.dtype)
    whole = energy(torch.ones_like(bases[0, :, :1]), x.square()).flatten(1).sum(1)
    inside = [energy(basis, x).square().flatten(1).sum(1) for basis in bases]
    return torch.stack([whole, *inside], 1)
