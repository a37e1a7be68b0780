"""Yahoo! Answers topics as features of a frozen sentence encoder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cfl.data.sources.features import feature_moments
from cfl.data.sources.files import WHERE_ELSE
from cfl.data.sources.labels import checked_labels
from cfl.data.sources.npz import NpzFile, opened_npz
from cfl.data.sources.standard import KEY, StandardSource
from cfl.data.types import ImageSet
from cfl.data.yahoo_csv import ADDRESS, FOLDER, TOPICS, features_file
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.runtime.option_checks import check_integers

_CENTRE, _PER_DEVIATION = 127, 127 / 4  # the stored integer that means 0, and integers per standard deviation
_CHUNK = 65_536  # rows converted at a time


class YahooAnswers(StandardSource):
    """Questions in 10 topics, 140,000 + 6,000 of each (Zhang, Zhao, LeCun, NeurIPS 2015), as encoded sentences.

    ``python -m cfl.data.embed`` writes ``<root>/yahoo_answers_csv/{train,test}.<encoder>.npz`` from the published CSV
    files. A sample is an "image" ``[1, 1, D]`` of bytes. Every number of the vector is standardised by its mean and
    standard deviation over the training set, clipped to -4 .. 4 and stored as one of 255 steps of 0.031. A linear head
    on the bytes (``MLP`` with ``hidden: []``) is then a linear head on the encoder.

    Fed-A-GEM (Dai et al., 2024) takes a frozen DistilBERT.

    Args:
        encoder: name of the files' encoder, as ``cfl.data.embed`` prints it.
        dimensions: D, numbers per vector.
        options: those of :class:`StandardSource`; ``mean`` is 0.5 and ``std`` 0.125 by default, those of a feature.

    Raises:
        ConfigError: a number that cannot work.
    """

    name = "yahoo-answers"
    title = "YahooAnswers"
    num_classes = TOPICS
    mean = (0.5,)
    std = (0.125,)
    scale = 254.0
    published = (1_400_000, 60_000)

    def __init__(
        self,
        encoder: str = "wordllama-256",
        dimensions: int = 256,
        **options: Any,
    ) -> None:
        if not encoder or "/" in encoder:
            raise ConfigError(f"{KEY}.encoder", encoder, "the name of an encoder, as in the names of its files")
        check_integers(KEY, 1, dimensions=dimensions)
        self.encoder, self.dimensions = encoder, dimensions
        self.shape = (1, 1, dimensions)
        super().__init__(**options)

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set, scaled by the training set."""
        files = [features_file(root, part, self.encoder) for part in ("train", "test")]
        absent = [file for file in files if not os.path.isfile(file)]
        if absent:
            names = "\n".join(f"  {file} ({'missing' if file in absent else 'present'})" for file in files)
            raise DataFilesMissing(
                f"{self.title}: files are missing. Expected:\n{names}\n`python -m cfl.data.embed --root {root}` writes "
                f"them from {FOLDER}/train.csv and test.csv, which {ADDRESS} holds.\n{WHERE_ELSE}"
            )
        (train, train_labels, note), (test, test_labels, other) = (self._stored(file) for file in files)
        for key in sorted(note.keys() | other.keys()):
            if note.get(key) != other.get(key):
                first, second = (
                    f"{held.get(key)} in {file.name}" for held, file in zip((note, other), files, strict=True)
                )
                said = f"{self.title}: {key} is {first} and {second}"
                how = f"`python -m cfl.data.embed --root {root}` with one --encoder and --fields writes both alike"
                raise DataFilesMissing(f"{said}. {how}")
        mean, deviation = feature_moments(train)
        return (
            ImageSet(_as_bytes(train, mean, deviation), torch.from_numpy(train_labels)),
            ImageSet(_as_bytes(test, mean, deviation), torch.from_numpy(test_labels)),
        )

    def _stored(self, file: Path) -> tuple[NDArray[Any], NDArray[np.int64], dict[str, Any]]:
        """Features, labels, and how the features were computed, without the digest of their texts."""
        try:
            with opened_npz(file) as stored:
                features, labels = stored.read("features"), checked_labels(stored.read("labels"), "labels")
                note = _note(stored)
        except ValueError as error:
            raise DataFilesMissing(f"{file} is damaged, or not written by cfl.data.embed: {error}") from error
        if features.dtype != np.float32 or features.ndim != 2 or labels.shape != features.shape[:1] or not len(labels):
            raise DataFilesMissing(
                f"{file} holds features {features.dtype} {list(features.shape)} and labels {list(labels.shape)}: "
                "expected float32 [N, D] and [N]"
            )
        if features.shape[1] != self.dimensions:
            valid = f"{features.shape[1]}, the numbers per vector in {file}"
            raise ConfigError(f"{KEY}.dimensions", self.dimensions, valid)
        if not np.isfinite(features).all():
            raise DataFilesMissing(f"{file} holds NaN or infinity")
        return features, labels, note


def _note(stored: NpzFile) -> dict[str, Any]:
    """What ``cfl.data.embed`` notes about features, without the digest of their texts; empty without a note."""
    try:
        found = json.loads(str(stored.read("note")))
    except ValueError:
        return {}
    return {key: value for key, value in found.items() if key != "csv_sha256"} if isinstance(found, dict) else {}


def _as_bytes(features: NDArray[Any], mean: NDArray[np.float64], deviation: NDArray[np.float64]) -> torch.Tensor:
    """``[N, D]`` floats to ``[N, 1, 1, D]`` bytes 0 .. 254."""
    stored = np.empty(features.shape, dtype=np.uint8)
    for start in range(0, len(features), _CHUNK):
        scaled = (features[start : start + _CHUNK] - mean) / deviation * _PER_DEVIATION
        stored[start : start + _CHUNK] = np.clip(np.rint(scaled) + _CENTRE, 0, 2 * _CENTRE)
    return torch.from_numpy(stored).view(len(features), 1, 1, -1)
