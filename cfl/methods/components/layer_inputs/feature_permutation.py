"""Permutations of the features between layers, a different one for every task."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cfl.randomness.generators import numpy_generator


class FeaturePermutations:
    """Every task's permutation of the columns of some weights; the identity for task 0.

    Permuting the columns of a weight, ``W'_j = W_perm(j)``, has the same effect as permuting its inputs ``h``:
    ``W' h = W h'`` with ``h'_perm(j) = h_j``. So no layers have to be inserted.

    Args:
        weights: name -> a matrix ``[o, d]``, whose d columns are permuted, or the weight of a convolution ``[o, c, kh,
            kw]``, whose c channels are.
        seed: the run's seed.
    """

    def __init__(self, weights: Mapping[str, Tensor], seed: int) -> None:
        self.columns = {name: weight.shape[1] for name, weight in weights.items()}
        self.kernel_axes = {name: weight.ndim - 2 for name, weight in weights.items()}
        self.seed = seed
        self._known: dict[tuple[int, str, bool], Tensor] = {}

    def order(self, task: int, name: str) -> Tensor:
        """``perm``, ``[columns]`` int64, by a generator keyed by the task and the weight's index in ``columns``."""
        number = list(self.columns).index(name)
        generator = numpy_generator(self.seed, "feature permutation", task, number)
        return torch.from_numpy(generator.permutation(self.columns[name]))

    def apply(self, task: int, tensors: Mapping[str, Tensor], undo: bool = False) -> dict[str, Tensor]:
        """Tensors with the features of the known weights permuted, or put back; the others as they are.

        Args:
            task: from 0.
            tensors: weight name -> ``[..., features, *kernel]``.
            undo: the inverse permutation.
        """
        permuted = dict(tensors)
        if task > 0:
            for name, tensor in tensors.items():
                if name in self.columns:
                    index = self._index(task, name, undo).to(tensor.device)
                    permuted[name] = tensor.index_select(-1 - self.kernel_axes[name], index)
        return permuted

    def _index(self, task: int, name: str, undo: bool) -> Tensor:
        key = (task, name, undo)
        if key not in self._known:
            self._known = {known: index for known, index in self._known.items() if known[0] == task}
            order = self.order(task, name)
            self._known[key] = order.argsort() if undo else order
        return self._known[key]
