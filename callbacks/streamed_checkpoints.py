"""Reads and writes checkpoint files with little memory."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import Tensor

from cfl.runtime.checkpoint_file import read_checkpoint, write_checkpoint


class StreamedCheckpoints(TorchCheckpointIO):
    """Writes and reads checkpoint files without a copy in memory. Lightning's own way takes twice the file's size.

    It supports local files only. The caller makes the write atomic by a temporary name. When a checkpoint is loaded,
    clients' states (``federation`` / ``clients``) stay mapped from the file until they are copied into the federation;
    everything else is read at once.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` to ``path``; tensors mapped from another file are copied from there."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Read ``path`` to the CPU, with the checks of :func:`cfl.runtime.checkpoint_file.read_checkpoint`."""
        checkpoint = read_checkpoint(Path(path))
        loaded: dict[str, Any] = in_memory(checkpoint, checkpoint.get("federation", {}).get("clients"))
        return loaded


def in_memory(tree: Any, left: Any) -> Any:
    """Nested dictionaries, lists and tuples with every tensor copied, except in the part ``left``."""
    if tree is left:
        return tree
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        copied = copy(tree)  # keeps the metadata of a state dict
        for key, value in tree.items():
            copied[key] = in_memory(value, left)
        return copied
    return type(tree)(in_memory(value, left) for value in tree) if type(tree) in (list, tuple) else tree
