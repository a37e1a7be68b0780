"""Digests of a run's samples. A checkpoint is resumed only on the same samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cfl.data.types import Task
from cfl.runtime.errors import ConfigError
from cfl.runtime.tensor_digest import tensors_digest


def data_digests(tasks: Sequence[Task], owners: bool = False, times: bool = False) -> dict[str, str]:
    """Digests of all tasks' ``train`` and ``test`` samples as returned by streams, labels included.

    ``owners`` adds a digest of the training samples' ``clients``, and of the test samples' if these are known;
    ``times`` adds one of the training samples' ``seconds``.

    Images are digested as decoded and scaled, which may differ between versions of the libraries. The order of samples
    matters, because partitions deal indices. Transforms of stored images are not included: they follow from the
    configuration, and a rotation's pixels may be rounded differently on other machines. Every byte is read once, also
    if tasks share images. This takes 0.9 s per GB.
    """
    found = {
        "train": tensors_digest(part for task in tasks for part in (task.train.images, task.train.labels)),
        "test": tensors_digest(part for task in tasks for part in (task.test.images, task.test.labels)),
    }
    if owners:
        found["clients"] = tensors_digest(task.train.clients for task in tasks if task.train.clients is not None)
        if tested := [task.test.clients for task in tasks if task.test.clients is not None]:
            found["test clients"] = tensors_digest(tested)
    if times:
        found["seconds"] = tensors_digest(task.train.seconds for task in tasks if task.train.seconds is not None)
    return found


def check_digests(held: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Refuse a checkpoint of a run on other samples.

    Args:
        held: the checkpoint's digests.
        here: those of the samples that have been read.

    Raises:
        ConfigError: naming the sets that differ.
    """
    changed = [name for name in here if held.get(name) != here[name]]
    if changed:
        value = f"a checkpoint of a run on other samples: those of {' and '.join(changed)} have changed since"
        valid = "data.root with the files of that run, decoded as there if they are pictures, or a new run on these"
        raise ConfigError("ckpt_path", value, valid)
