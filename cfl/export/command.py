"""``cfl export --ckpt_path RUN/last.ckpt --out model.pt2 [--client C] [--task T]``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cfl.cli.main import restored
from cfl.export.answer import Choice, answer_of
from cfl.export.arguments import model_parser, print_error
from cfl.export.card import write_card
from cfl.export.formats import PACKAGES, check_format, write
from cfl.reporting.experiment import method_name
from cfl.runtime.command_paths import given_path


def _parser() -> argparse.ArgumentParser:
    parser = model_parser(
        "cfl export",
        "Write a run's model as a file for use outside, and beside it FILE.md, which says what the model takes and "
        "gives. The model expects network input, that is, normalised images.",
        "the model for this task (from 0; with --client, of the client's own), where the model depends on it",
    )
    parser.add_argument(
        "--out",
        required=True,
        type=given_path,
        metavar="FILE",
        help=f"{', '.join(f'*{suffix}' for suffix in PACKAGES)}: torch.export, the network's tensors, ONNX",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name and ``export``.

    Returns:
        Exit status: 0 if the file was written, else 2 after one line on standard error.
    """
    options, others = _parser().parse_known_args(arguments)
    try:
        check_format(options.out)
        client, config, checkpoint = restored([*others, "--ckpt_path", options.ckpt_path])
        choice = Choice(options.client, options.task)
        answer = answer_of(client, choice)
        federation = client.require_federation()
        metadata = {"method": method_name(federation.methods), "stream": federation.data.stream.name}
        difference = write(options.out, answer, federation.data.input_shape, metadata)
        card = options.out.with_name(f"{options.out.name}.md")
        write_card(card, options.out, answer, choice, federation, config, checkpoint.parent)
    except Exception as error:
        print_error(error)
        return 2
    print(f"{options.out}: answers differ from the network's by at most {difference:.1e}\n{card}")
    return 0
