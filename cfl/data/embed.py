"""``python -m cfl.data.embed``: computes features of texts once, so that clients train a head on a frozen encoder.

Each of ``train.csv`` and ``test.csv`` gets a file ``<part>.<encoder>.npz`` beside it with ``features`` (float32
``[N, D]``), ``labels`` (int64 ``[N]``, from 0) and ``note`` (JSON: the encoder's name, its version, which for a folder
holds the SHA-256 of its files, fields, the CSV's SHA-256). A file with the same note is not written again. If two
encoders have one name, the later one's features replace the earlier one's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from cfl.data.sentence_encoders import SentenceEncoder, sentence_encoder
from cfl.data.sources.npz import opened_npz
from cfl.data.sources.root import data_root
from cfl.data.yahoo_csv import FIELDS, FOLDER, TOPICS, features_file, questions
from cfl.runtime import signals
from cfl.runtime.atomic_write import replacing
from cfl.runtime.errors import ConfigError

PARTS = ("train", "test")
_AT_A_TIME = 8192  # texts in memory


def embed_part(root: Path, part: str, encoder: SentenceEncoder, fields: Sequence[str] = FIELDS) -> tuple[Path, bool]:
    """Compute the features of one part and write its file, unless the file is up to date.

    Args:
        root: folder of all data sets.
        part: ``train`` or ``test``.
        encoder: computes the features.
        fields: fields of a question that make up its text.

    Returns:
        The file, and whether it was written by this call.

    Raises:
        DataFilesMissing: the CSV file is absent or of another kind.
    """
    texts, target = root / FOLDER / f"{part}.csv", features_file(root, part, encoder.name)
    lines = questions(texts, fields)
    first = next(lines)  # raises for a missing or empty file before anything is computed
    with texts.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    note = {"encoder": encoder.name, "version": encoder.version, "fields": list(fields), "csv_sha256": digest}
    if _note_of(target) == note:
        return target, False
    features, labels, lines = [], [], chain([first], lines)
    while batch := list(islice(lines, _AT_A_TIME)):
        features.append(encoder([text for text, _ in batch]))
        labels += [label for _, label in batch]
    with replacing(target) as file:
        np.savez(
            file,
            features=np.concatenate(features),
            labels=np.array(labels, dtype=np.int64),
            note=np.array(json.dumps(note)),
        )
    return target, True


def _note_of(file: Path) -> dict[str, Any] | None:
    """The note of a features file; None if there is no file, or it cannot be read."""
    try:
        with opened_npz(file) as stored:
            found: dict[str, Any] = json.loads(str(stored.read("note")))
    except ValueError:  # a damaged file is written anew
        return None
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Embed both parts; return the exit status.

    Args:
        arguments: the command line without the program's name; None takes the process's own.
    """
    description = (
        f"Embed the questions of ROOT/{FOLDER}/train.csv and test.csv with a sentence encoder, for the data set "
        f"YahooAnswers. A line of these files is a question: topic, 1 to {TOPICS}, {', '.join(FIELDS)}."
    )
    parser = argparse.ArgumentParser(prog="python -m cfl.data.embed", description=description, allow_abbrev=False)
    parser.add_argument("--root", help="folder of all data sets (default: CFL_DATA_ROOT, else ./data)")
    encoders = "wordllama-256 (default), -128, -64, or a folder in the layout of sentence-transformers"
    parser.add_argument("--encoder", default="wordllama-256", help=encoders)
    parser.add_argument("--fields", nargs="+", choices=FIELDS, default=list(FIELDS), help="what makes a text")
    options = parser.parse_args(arguments)
    signals.hold()
    try:
        root, encoder = data_root(options.root), sentence_encoder(options.encoder)
        for part in PARTS:
            file, written = embed_part(root, part, encoder, options.fields)
            print(f"{file} {'written' if written else 'is up to date'}")
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(signals.ended_by_signals(main))
