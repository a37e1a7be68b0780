"""Names of the files in a run folder, for all modules that write or read them.

A method adds ``<its name>.csv``. Pictures are named after what they show.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CONFIG = "config.yaml"
"""The whole configuration, resolved; the run can be repeated with it."""
CHECKPOINT = "last.ckpt"
"""The federation between two rounds, and the global model."""
PARTITION = "partition.csv"
"""Samples and classes of every client and task."""
PARTITION_PICTURE = "partition.png"
SAMPLES = "samples.png"
"""Images drawn from a density, or test images with the boxes that a detector finds."""
ROUNDS = "rounds.csv"
"""A row per round."""
PRIVACY = "privacy.csv"
"""A row per sum that was read under noise."""
SUMMARY = "summary.json"
"""Figures of a finished run, written last."""
CHECKSUMS = "SHA256SUMS"
"""SHA-256 of a finished run's files."""
WANDB_ID = "wandb-id.txt"
"""Id of the run at wandb."""
TESTS_BY_OWNER = "tests_by_owner.csv"
"""Accuracy of each client's model on its own test samples."""
CLIENTS = "clients"
"""Folder with a table per client."""


def matrix_file(measure: str, variant: str = "") -> str:
    """Name of the file with a measure's matrix over tasks.

    Args:
        measure: its name, such as ``accuracy``.
        variant: ``_task_il`` or ``_task_aware`` where the task of a test sample was known; ``_007`` for that of one
            client, in the folder :data:`CLIENTS`.
    """
    return f"{measure}_matrix{variant}.csv"


def folders_below(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Walk a folder and all folders below it, sorted by name; links are followed, and each folder is visited once.

    Yields:
        A folder, the names of the folders in it, and the names of the files. Folders whose names the caller removes
        from the list are not visited.
    """
    known = set()
    for place, inside, names in os.walk(root, followlinks=True):
        real = os.path.realpath(place)
        if real in known:
            inside.clear()
            continue
        known.add(real)
        inside.sort()
        yield Path(place), inside, names
