"""Binary data sets for density estimation, in their common file formats."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch.nn.functional import pad

from cfl.data.sources.files import WHERE_ELSE
from cfl.data.sources.npz import opened_npz
from cfl.data.sources.split import merged_split
from cfl.data.sources.standard import KEY, StandardSource
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.runtime.option_checks import check_choices

VARIABLES = {
    "accidents": 111,
    "ad": 1556,
    "adult": 123,
    "baudio": 100,
    "bbc": 1058,
    "binarized_mnist": 784,
    "bnetflix": 100,
    "book": 500,
    "c20ng": 910,
    "connect4": 126,
    "cr52": 889,
    "cwebkb": 839,
    "dna": 180,
    "jester": 100,
    "kdd": 64,
    "kosarek": 190,
    "msnbc": 17,
    "msweb": 294,
    "mushrooms": 112,
    "nips": 500,
    "nltcs": 16,
    "ocr_letters": 128,
    "plants": 69,
    "pumsb_star": 163,
    "rcv1": 150,
    "tmovie": 500,
    "tretail": 135,
    "web": 300,
}
"""Number of variables of each set known by name."""

PARTS = ("train", "valid", "test")
_DIGITS, _BETWEEN = b"01", b", \t\r\n"


class BinarySet(StandardSource):
    """Binary rows without labels, as images ``[1, 1, D]`` of one class; ``binarized_mnist`` as ``[1, 28, 28]``.

    Files, in ``<root>/binary/`` or ``<root>/``, the first of these that is there:

    - ``<set>.npz`` with ``train``, ``valid`` and ``test``, or ``train_data`` and so on: ``[N, D]``, 0 and 1;
    - ``<set>.train.data``, ``<set>.valid.data``, ``<set>.test.data``, also within a folder ``<set>``: one row on each
      line, with commas between the values (as in the DEBD collection);
    - ``<set>_train.amat`` and so on, with blanks between the values (as the stochastically binarised MNIST).

    Args:
        set: its name, one of :data:`VARIABLES` or another with ``variables``.
        variables: number of variables D; null for a set known by name.
        pad_to: number of columns to which zeros are appended, so that sets of several sizes fit one network; null:
            none are appended.
        split: the ``published`` training and test set, or all three parts ``merged`` and cut anew, 5/7 for training and
            1/7 for tests, as CONFEDMADE does. The cut is the same in every run. The other rows are not used.
        max_rows: with ``merged`` only: number of rows to take, the first ones; null: all. CONFEDMADE takes 48,000 of
            rcv1.
        options: ``max_train`` and ``max_test`` of :class:`StandardSource`.

    Raises:
        ConfigError: an unknown set without ``variables``, or a number that cannot work.
    """

    naming_option: ClassVar[str | None] = "set"

    num_classes = 1
    mean = (0.0,)
    std = (1.0,)
    scale = 1.0

    def __init__(
        self,
        set: str,
        variables: int | None = None,
        pad_to: int | None = None,
        split: Literal["published", "merged"] = "published",
        max_rows: int | None = None,
        **options: Any,
    ) -> None:
        known = VARIABLES.get(set)
        if known is None and variables is None:
            raise ConfigError(f"{KEY}.set", set, f"one of {sorted(VARIABLES)}, or a number of variables with it")
        if variables is not None and (variables < 1 or known not in (None, variables)):
            valid = "an integer of at least 1" if known is None else f"{known}, or null"
            raise ConfigError(f"{KEY}.variables", variables, valid)
        self.variables = variables or known or 0
        check_choices(KEY, ("published", "merged"), split=split)
        if max_rows is not None and (max_rows < 7 or split != "merged"):
            raise ConfigError(f"{KEY}.max_rows", max_rows, "at least 7 with split: merged, else null")
        if pad_to is not None and pad_to < self.variables:
            raise ConfigError(f"{KEY}.pad_to", pad_to, f"at least {self.variables}, the variables of {set}")
        self.name, self.pad_to, self.split, self.max_rows = set, pad_to, split, max_rows
        is_image = set == "binarized_mnist" and pad_to is None
        self.shape = (1, 28, 28) if is_image else (1, 1, pad_to or self.variables)
        super().__init__(mean=None, std=None, **options)

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set, with values 0 and 1."""
        parts = read_binary_parts(root, self.name)
        wanted = PARTS if self.split == "merged" else ("train", "test")
        lacking = [part for part in wanted if part not in parts]
        if lacking:
            raise DataFilesMissing(
                f"{self.name}: the files under {root} lack {' and '.join(lacking)}; there is {', '.join(parts)}"
            )
        sets = [self._images(parts[part]) for part in wanted]
        if self.split == "published":
            return sets[0], sets[1]
        if self.max_rows is not None:
            kept = np.cumsum([0, *(len(images) for images in sets)]).clip(max=self.max_rows)
            sets = [images.subset(torch.arange(b - a)) for images, a, b in zip(sets, kept, kept[1:], strict=False)]
        return merged_split(sets, f"split {self.name}")

    def _images(self, rows: np.ndarray) -> ImageSet:
        if rows.shape[1] != self.variables:
            raise DataFilesMissing(f"{self.name}: the files have {rows.shape[1]} variables, not {self.variables}")
        padded = pad(torch.from_numpy(rows), (0, (self.pad_to or self.variables) - self.variables))
        return ImageSet(padded.view(-1, *self.shape), torch.zeros(len(rows), dtype=torch.int64))


def read_binary_parts(root: Path, name: str) -> dict[str, np.ndarray]:
    """Read the parts of a set that have files: part -> ``[N, D]`` uint8 of 0 and 1.

    Args:
        root: of the data sets.
        name: of the set; see :class:`BinarySet` for the files.

    Raises:
        DataFilesMissing: none of the files is there, or one holds something else.
    """
    for folder in (root / "binary", root):
        if os.path.isfile(folder / f"{name}.npz"):
            return _read_npz(folder / f"{name}.npz")
        for pattern in (f"{name}.{{}}.data", f"{name}/{name}.{{}}.data", f"{name}_{{}}.amat"):
            files = {part: folder / pattern.format(part) for part in PARTS}
            if any(os.path.isfile(file) for file in files.values()):
                return {part: read_binary_text(file) for part, file in files.items() if os.path.isfile(file)}
    raise DataFilesMissing(
        f"{name}: expected {root / 'binary' / name}.npz with train, valid and test, or {name}.train.data, "
        f"{name}.valid.data and {name}.test.data there. {WHERE_ELSE}"
    )


def read_binary_text(file: Path) -> np.ndarray:
    """Read a file with one row of 0 and 1 on each line, separated by commas or blanks, as ``[N, D]`` uint8.

    Raises:
        DataFilesMissing: the file holds anything else, or its lines differ in length.
    """
    text = np.frombuffer(file.read_bytes(), dtype=np.uint8)
    digits = np.isin(text, np.frombuffer(_DIGITS, dtype=np.uint8))
    if not np.isin(text[~digits], np.frombuffer(_BETWEEN, dtype=np.uint8)).all():
        raise DataFilesMissing(f"{file} holds something else than 0 and 1, separated by commas or blanks")
    # Two digits side by side, as in 10, would be a number, not two variables.
    if (digits[1:] & digits[:-1]).any():
        raise DataFilesMissing(f"{file} holds numbers other than 0 and 1")
    ends = np.flatnonzero(text == ord("\n"))
    per_line = np.diff(np.concatenate([[0], digits.cumsum()[ends], [digits.sum()]]))
    per_line = per_line[per_line > 0]
    if not len(per_line) or (per_line != per_line[0]).any():
        raise DataFilesMissing(f"{file} is empty, or its lines differ in length")
    return (text[digits] - ord("0")).reshape(len(per_line), int(per_line[0]))


def _read_npz(file: Path) -> dict[str, np.ndarray]:
    try:
        with opened_npz(file) as stored:
            names = {part: n for part in PARTS for n in (part, f"{part}_data") if n in stored.keys}
            found = {part: stored.read(n) for part, n in names.items()}
    except ValueError as error:
        raise DataFilesMissing(f"{file} cannot be read: {error}") from error
    for part, rows in found.items():
        if rows.ndim != 2 or rows.dtype.kind not in "biuf" or not ((rows == 0) | (rows == 1)).all():
            raise DataFilesMissing(f"{file}: {part} is not [N, D] of 0 and 1")
    return {part: rows.astype(np.uint8) for part, rows in found.items()}
