"""Stratified splits and class-balanced subsets; neither depends on the run's seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cfl.data.sources.labels import common_names, renumbered
from cfl.data.types import ImageSet
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import DataFilesMissing

SHARES = "[0.01, 0.99]"
"""Valid shares of samples for the test set; with 0 or 1 a part would be empty."""
_NAMED = 5
"""Number of classes that a message names."""


def stratified_split(name: str, whole: ImageSet, test_share: float) -> tuple[ImageSet, ImageSet]:
    """Split into training and test set with equal class shares; the same split in every run.

    Both parts keep the order of ``whole``. They equal those of scikit-learn's ``train_test_split`` with
    ``stratify=labels`` and ``random_state=0``, whose import would add a second to every run.

    Args:
        name: of the data set, for messages.
        whole: ``[N, C, H, W]`` images with labels.
        test_share: share of the samples that goes to the test set, within :data:`SHARES`.

    Raises:
        DataFilesMissing: too few samples for both parts to have all classes.
    """
    rows = stratified_rows(name, whole.labels.numpy(), test_share)
    kept, held_out = map(torch.from_numpy, rows)
    return whole.subset(kept), whole.subset(held_out)


def stratified_rows(
    name: str, labels: NDArray[np.int64], test_share: float, class_names: Sequence[str] = (), remedy: str = ""
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of training and test samples, ascending, see :func:`stratified_split`.

    Args:
        name: as for :func:`stratified_split`.
        labels: ``[N]``.
        test_share: as for :func:`stratified_split`.
        class_names: for messages; classes without names are called by their labels.
        remedy: what to do if the samples cannot be split, a sentence for the message.

    Raises:
        DataFilesMissing: as for :func:`stratified_split`.
    """
    classes, counts = np.unique(labels, return_counts=True)
    by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    random = np.random.RandomState(0)
    tests = math.ceil(test_share * len(labels))
    problem = ""
    if len(counts) > 1 and min(counts) < 2:
        single = [repr(class_names[label] if class_names else label) for label in classes[counts < 2].tolist()]
        said = ", ".join(single[:_NAMED]) + f" and {len(single) - _NAMED} more" * (len(single) > _NAMED)
        problem = f"{said} {'has' if len(single) == 1 else 'have'} 1 sample"
    elif not len(counts) or len(counts) > min(tests, len(labels) - tests):
        part, size = min(("training", len(labels) - tests), ("test", tests), key=lambda of: of[1])
        problem = f"the {part} set would have {size}"
    if problem:
        problem += f". {remedy}" * bool(remedy)
        raise DataFilesMissing(
            f"{name}: {len(labels)} samples of {len(counts)} classes cannot be split into a training set and a test "
            f"set of a share of {test_share:g}: each class needs a sample in both, and {problem}"
        )
    for_training = _proportional(counts, len(labels) - tests, random)
    for_tests = _proportional(counts - for_training, tests, random)
    train, test = [], []
    for own, first, second in zip(by_class, for_training, for_tests, strict=True):
        shuffled = own[random.permutation(len(own))]
        train.append(shuffled[:first])
        test.append(shuffled[first : first + second])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def _proportional(counts: NDArray[np.int64], total: int, random: np.random.RandomState) -> NDArray[np.int64]:
    """``[classes]``: ``total`` samples in proportion to ``counts``; largest remainders are rounded up, ties by lot."""
    wanted = counts / counts.sum() * total
    whole = np.floor(wanted)
    remainders, missing = wanted - whole, int(total - whole.sum())
    for remainder in np.unique(remainders)[::-1]:
        if missing == 0:
            break
        (ties,) = np.where(remainders == remainder)
        rounded_up = random.choice(ties, size=min(len(ties), missing), replace=False)
        whole[rounded_up] += 1
        missing -= len(rounded_up)
    return whole.astype(np.int64)


def balanced_subset(labels: Tensor, size: int, purpose: str) -> Tensor:
    """Indices of ``size`` samples spread over the classes as evenly as their sizes allow.

    Samples are drawn class by class in turn, each class in a fixed random order, so a smaller subset is
    contained in every larger one, and where ``size`` is no multiple of the number of classes the lowest
    labels have one sample more.

    Args:
        labels: ``[N]`` int64.
        size: number of samples wanted; all N are returned where it is N or more.
        purpose: names the draw, see :mod:`cfl.randomness.generators`; the run's seed plays no part.

    Returns:
        ``[min(size, N)]`` int64, ascending.
    """
    order = numpy_generator(0, purpose).permutation(len(labels))
    shuffled = labels.numpy()[order]
    by_class = np.argsort(shuffled, kind="stable")
    sorted_labels = shuffled[by_class]
    class_start = np.searchsorted(sorted_labels, sorted_labels, side="left")
    turn = np.empty(len(labels), dtype=np.int64)  # a sample's place in its own class's random order
    turn[by_class] = np.arange(len(labels)) - class_start
    chosen = order[np.lexsort((shuffled, turn))[:size]]
    return torch.from_numpy(np.sort(chosen))


def joined(parts: Sequence[ImageSet]) -> ImageSet:
    """All samples of several sets in one, in their order, with one number for each client.

    Clients stay unknown where a set does not say them, and where only some sets name them.
    """
    named = {bool(part.client_names) for part in parts if part.clients is not None}
    names = common_names(parts)
    clients = [renumbered(part, names).clients for part in parts]
    told = [of for of in clients if of is not None]
    seconds = [part.seconds for part in parts if part.seconds is not None]
    tasks = [part.tasks for part in parts if part.tasks is not None]
    owned = len(told) == len(parts) and len(named) == 1
    return ImageSet(
        torch.cat([part.images for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat(told) if owned else None,
        torch.cat(seconds) if len(seconds) == len(parts) else None,
        torch.cat(tasks) if len(tasks) == len(parts) else None,
        client_names=names if owned else (),
    )


def merged_split(parts: Sequence[ImageSet], purpose: str) -> tuple[ImageSet, ImageSet]:
    """All samples of several sets cut anew: of each class 5/7 for training and 1/7 for tests, rounded down.

    The rest, which would be a validation set, is left out. Samples whose labels are numbers or boxes count as one
    class. Samples are drawn at random, the same in every run; both parts keep the order of the whole.

    Args:
        parts: sets of the same kind, in their order.
        purpose: names the draw, see :mod:`cfl.randomness.generators`; the run's seed plays no part.
    """
    whole = joined(parts)
    train, test = [], []
    for label in whole.groups.unique().tolist():
        own = (whole.groups == label).nonzero().squeeze(1).numpy()
        own = own[numpy_generator(0, purpose, label).permutation(len(own))]
        for_training, for_tests = len(own) * 5 // 7, len(own) // 7
        train.append(own[:for_training])
        test.append(own[len(own) - for_tests :])
    first, second = (torch.from_numpy(np.sort(np.concatenate(chosen))) for chosen in (train, test))
    return whole.subset(first), whole.subset(second)
