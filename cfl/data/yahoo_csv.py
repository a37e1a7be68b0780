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
ADDRESS = "https://s3.amazonaws.com/fast-ai-nlp/yahoo_answers_csv.tgz"


def questions(file: Path, fields: Sequence[str] = FIELDS) -> Iterator[tuple[str, int]]:
    """Text and topic, from 0, of every line of ``train.csv`` or ``test.csv``.

    A line holds the topic from 1, the question's title and content, and the best answer. Line breaks, which the file
    has as ``\\n``, become spaces. Fields are joined by spaces; empty fields are left out.

    Args:
        file: to read.
        fields: of :data:`FIELDS`, those that make the text, in this order.

    Raises:
        DataFilesMissing: the file is absent or empty, or a line has another format; the message says which line.
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
        try:
            for row in rows:
                if len(row) != 1 + len(FIELDS) or not _is_topic(row[0]):
                    raise DataFilesMissing(
                        f"{file}, line {rows.line_num}: expected a topic from 1 to {TOPICS} and {', '.join(FIELDS)}, "
                        f"found {len(row)} fields, the first {(row or [''])[0][:40]!r}"
                    )
                parts = (row[place].replace("\\n", " ").strip() for place in places)
                yield " ".join(part for part in parts if part), int(row[0]) - 1
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataFilesMissing(f"{file}, after line {rows.line_num}: no CSV file in UTF-8 ({error})") from error
        if not rows.line_num:
            raise DataFilesMissing(f"{file} is empty. Expected: a line for each question")


def _is_topic(text: str) -> bool:
    return text.isdecimal() and len(text) < 10 and 1 <= int(text) <= TOPICS


def features_file(root: Path, part: str, encoder: str) -> Path:
    """The file with the features of ``train`` or ``test``, beside the CSV files and named by the encoder."""
    return root / FOLDER / f"{part}.{encoder}.npz"
