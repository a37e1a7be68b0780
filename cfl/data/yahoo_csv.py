"""Yahoo! Answers topics as the CSV files of Zhang, Zhao and LeCun (NeurIPS 2015)."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from cfl.data.sources.root import ENVIRONMENT_VARIABLE
from cfl.runtime.errors import DataFilesMissing

FOLDER = "yahoo_answers_csv"
FIELDS = ("title", "content", "answer")
TOPICS = 10
PUBLISHED = {"train": 1_400_000, "test": 60_000}
ADDRESS = "https://s3.amazonaws.com/fast-ai-nlp/yahoo_answers_csv.tgz"


def questions(file: Path, fields: Sequence[str] = FIELDS) -> Iterator[tuple[str, int]]:
    """Text and topic, from 0, of every line of ``train.csv`` or ``test.csv``.

    A line holds the topic from 1, the question's title and content, and the best answer. Line breaks are written as
    ``\\n`` there and become spaces here, as do those between fields; empty fields are left out.

    Args:
        file: to read.
        fields: of :data:`FIELDS`, those that make the text, in this order.

    Raises:
        DataFilesMissing: the file is absent, or a line is of another kind; says which.
    """
    if not file.is_file():
        raise DataFilesMissing(
            f"{file} is missing. Expected: train.csv and test.csv of yahoo_answers_csv.tgz ({ADDRESS}), or your own, a "
            f"line per question: its topic, 1 to {TOPICS}, {', '.join(FIELDS)}. Put them there, or name a folder that "
            f"has {FOLDER}/train.csv and test.csv with --root or the environment variable {ENVIRONMENT_VARIABLE}."
        )
    places = [1 + FIELDS.index(field) for field in fields]
    csv.field_size_limit(2**24)  # some answers are longer than the default, 2^17 characters
    with file.open(encoding="utf-8", newline="") as stream:
        rows = csv.reader(stream)
        for row in rows:
            if len(row) != 1 + len(FIELDS) or not row[0].isdigit() or not 1 <= int(row[0]) <= TOPICS:
                raise DataFilesMissing(
                    f"{file}, line {rows.line_num}: expected a topic from 1 to {TOPICS} and {', '.join(FIELDS)}, found "
                    f"{len(row)} fields, the first {(row or [''])[0][:40]!r}"
                )
            parts = (row[place].replace("\\n", " ").strip() for place in places)
            yield " ".join(part for part in parts if part), int(row[0]) - 1


def features_file(root: Path, part: str, encoder: str) -> Path:
    """The file with the features of ``train`` or ``test``, beside the CSV files and named by the encoder."""
    return root / FOLDER / f"{part}.{encoder}.npz"
