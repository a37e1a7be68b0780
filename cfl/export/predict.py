"""``cfl predict --ckpt_path RUN/last.ckpt FILE... [--task T] [--top K] [--out FILE.csv]``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cfl.cli.main import restored
from cfl.export.answer import Choice
from cfl.export.arguments import model_parser, print_error
from cfl.export.box_prediction import Box, boxes_found
from cfl.export.prediction import ANSWERED, SampleScorer, first_without_answer, output_names
from cfl.export.reading import read_images
from cfl.reporting.csv_file import csv_text
from cfl.reporting.text_table import TextTable, print_table
from cfl.runtime.atomic_write import write_whole
from cfl.runtime.command_paths import given_path, require_file
from cfl.runtime.errors import ConfigError
from cfl.runtime.printable import printable

_AT_ONCE = 256


class Prediction(NamedTuple):
    """The best outputs of a model for one sample.

    Attributes:
        place: the file; for an array or a table, with the row.
        best: names and probabilities of the best outputs, best first.
    """

    place: str
    best: list[tuple[str, float]]


def _parser() -> argparse.ArgumentParser:
    parser = model_parser(
        "cfl predict",
        "Classify images or rows of numbers by a run's model, predict numbers of them, or find boxes in images, as the "
        "run was trained to. They are read as its data set reads its own: size, channels, normalisation.",
        "the task of what is classified (from 0; with --client, of the client's own), where the model, its outputs or "
        "the reading of files depend on it; a task's permutation or rotation of pixels is not applied",
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=given_path,
        metavar="FILE",
        help="image files, folders of them, .npy and .npz files with arrays like those of the data set, or .csv files "
        "with the columns of a table",
    )
    parser.add_argument(
        "--top",
        type=int,
        metavar="K",
        help="show the K best classes (1), or the K best boxes of a detector (those with a score of at least 0.3)",
    )
    parser.add_argument("--out", type=given_path, metavar="FILE", help="write the table as CSV, too")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name and ``predict``.

    Returns:
        Exit status: 0, or 2 after one line on standard error.
    """
    parser = _parser()
    own, others = _divided(arguments, parser)
    options, unknown = parser.parse_known_intermixed_args(own)
    try:
        _check(options)
        client, _, _ = restored([*others, *unknown, "--ckpt_path", options.ckpt_path])
        scorer = SampleScorer(client, Choice(options.client, options.task))
        if scorer.federation.measure.predicts == "boxes":
            table, text = _of_boxes(list(boxes_found(scorer, options.files, options.top)))
        elif scorer.federation.measure.targets == "numbers":
            if options.top is not None:
                raise ConfigError("--top", options.top, "unset: this run predicts numbers")
            table, text = _of_numbers(scorer, options.files)
        else:
            table, text = _of_classes(scorer, options.files, options.top or 1)
        if options.out is not None:
            write_whole(options.out, printable(text))
    except Exception as error:
        print_error(error)
        return 2
    print_table(table.terminal())
    if options.out is not None:
        print(options.out)
    return 0


def predictions(scorer: SampleScorer, places: Sequence[Path], top: int) -> Iterator[Prediction]:
    """Classify images or rows of numbers, a file at a time.

    Args:
        scorer: the model of the run.
        places: as for :func:`cfl.export.reading.read_images`.
        top: number of best classes to return; fewer if there are fewer to choose among.

    Raises:
        ConfigError: the client does not exist, or it or the task is missing.
        cfl.runtime.errors.DataFilesMissing: names a file that cannot be used.
    """
    scorer.prepared()  # refuses an unknown client before names are read
    names = output_names(scorer.federation, scorer.choice)
    for files, scores in _scores(scorer, places):
        values = scores.softmax(1) if scorer.gives_probabilities else scores
        best = scores.argsort(dim=1, descending=True, stable=True)[:, :top]
        for file, of_image, row, allowed in zip(files, best.tolist(), values, scores.isfinite(), strict=True):
            yield Prediction(file, [(names[k], float(row[k])) for k in of_image if allowed[k]])


def _scores(scorer: SampleScorer, places: Sequence[Path]) -> Iterator[tuple[list[str], Tensor]]:
    """Yield names of samples and their scores ``[n, O]``, float64, in batches; -inf for outputs that are not allowed.

    Raises:
        ConfigError: the network's scores of a sample are not finite.
    """
    scorer.prepared()  # raises its errors before files are read
    source = scorer.source()
    for files, stored in _batches(read_images(places, source, scorer.federation.data.root)):
        scores = scorer.scores(scorer.network_input(stored)).double()
        if (row := first_without_answer(scores)) is not None:
            raise ConfigError("FILE", files[row], ANSWERED)
        yield files, scores


def _sample(scorer: SampleScorer) -> str:
    return "row" if scorer.source().holds_rows else "image"


def _batches(read: Iterator[tuple[list[str], Tensor]]) -> Iterator[tuple[list[str], Tensor]]:
    """Yield the same images in batches of at least :data:`_AT_ONCE`; the last one may be smaller."""
    names: list[str] = []
    images: list[Tensor] = []
    for some, stored in read:
        names += some
        images.append(stored)
        if len(names) >= _AT_ONCE:
            yield names, torch.cat(images)
            names, images = [], []
    if names:
        yield names, torch.cat(images)


def _check(options: argparse.Namespace) -> None:
    if options.top is not None and options.top < 1:
        raise ConfigError("--top", options.top, "an integer of at least 1")
    if options.out is not None:
        require_file("--out", options.out)


def _divided(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Return the words for the parser, and ``--key=value`` for each option that the parser does not know.

    The parser would take the values of unknown options for files, and also any unknown option that contains a blank.
    """
    own: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*own, word, *rest], others
        if word == "-c":
            word = "--config"
        option, equals, _ = word.partition("=")
        if not option.startswith("--") or option in parser._option_string_actions:
            own.append(word)
        else:
            value = None if equals else next(rest, None)
            others.append(word if value is None else f"{word}={value}")
    return own, others


def _of_classes(scorer: SampleScorer, places: Sequence[Path], top: int) -> tuple[TextTable, str]:
    found = list(predictions(scorer, places, top))
    what = "probability" if scorer.gives_probabilities else "score"
    shown, header = ["class", what], ["class", what]
    for number in range(2, max(len(one.best) for one in found) + 1):
        shown += [f"class {number}", what]
        header += [f"class_{number}", f"{what}_{number}"]
    rows = [[one.place, *(text for name, value in one.best for text in (name, f"{value:.4f}"))] for one in found]
    exact = [[one.place, *(part for pair in one.best for part in pair)] for one in found]
    sample = _sample(scorer)
    table = TextTable([sample, *shown], rows, "l" + "lr" * (len(shown) // 2))
    return table, csv_text([sample, *header], exact)


def _of_numbers(scorer: SampleScorer, places: Sequence[Path]) -> tuple[TextTable, str]:
    found = [
        (file, row)
        for files, scores in _scores(scorer, places)
        for file, row in zip(files, scores.tolist(), strict=True)
    ]
    names = scorer.source().names(scorer.federation.data.root)
    headings = [_sample(scorer), *names]
    rows = [[file, *(f"{number:.6g}" for number in row)] for file, row in found]
    return TextTable(headings, rows, "l" + "r" * len(names)), csv_text(headings, [[file, *row] for file, row in found])


def _of_boxes(found: Sequence[Box]) -> tuple[TextTable, str]:
    headings = ["image", "class", "score", "left", "top", "right", "bottom"]
    rows = [
        [one.image, one.label, f"{one.score:.4f}", *(f"{value:.1f}" for value in one.corners)]
        if one.score is not None
        else [one.image, "nothing", *[""] * 5]
        for one in found
    ]
    exact = [
        [one.image, one.label, one.score, *one.corners] if one.score is not None else [one.image, *[""] * 6]
        for one in found
    ]
    return TextTable(headings, rows, "llrrrrr"), csv_text(headings, exact)
