"""Prints the header of ``cfl fit``: what is about to be trained, and where.

Its first line is made from the command line and its files only, because torch and Lightning take seconds to import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os.path import isfile
from pathlib import Path
from typing import Any

from cfl import __version__
from cfl.cli.clients_of_a_round import fitting_clients_per_round
from cfl.cli.given import Given, in_content, is_written_out, last_given, on_command_line
from cfl.cli.installed_configs import DEFAULT_CONFIG, find_config
from cfl.reporting.experiment import class_name, data_set_name, method_name
from cfl.runtime.command_line import (
    CHECKPOINT_OPTION,
    CommandLine,
    is_configured,
    option_value,
    read_command_line,
    words_with_values,
)
from cfl.runtime.errors import ConfigError
from cfl.runtime.printable import on_one_line
from cfl.runtime.signals import is_first_process
from cfl.runtime.yaml_file import BadYAML, parse_yaml, read_yaml

_MOST_BYTES = 50_000
_NAMING_OPTIONS = ("path", "folder", "set")
"""Options that name the data set of a source which reads any of many (``Source.naming_option``)."""


def first_line(methods: str, benchmark: str, clients: Any, per_round: Any) -> str:
    """The header's first line, which says what is about to be trained.

    Args:
        methods: names of the methods, see :func:`cfl.reporting.experiment.method_name`.
        benchmark: name of the benchmark.
        clients: number of clients.
        per_round: clients of a round: a number, or a share in (0, 1].
    """
    share = f"{100 * per_round:g} %" if isinstance(per_round, float) else per_round
    return on_one_line(f"cfl {__version__}: {methods} on {benchmark}, {clients} clients, {share} per round")


def announce(words: Sequence[str]) -> str:
    """Print the header's first line within milliseconds, from the command line and its files.

    Nothing is printed if the command is not a fit, in processes other than the first, with
    ``progress.enabled: false``, or if the files or the run of a checkpoint cannot be read. In the last case the reason
    is reported later.

    Args:
        words: the command line without the program's name.

    Returns:
        The line, which is empty if nothing was printed. The line made from the parsed configuration may differ.
    """
    if not _begins_a_fit(words) or not is_first_process():
        return ""
    try:
        read = read_command_line(words)
        if _lacks_its_run(read):
            return ""
        given = list(_given(read.arguments))
        if _read(given, "progress.enabled", True) is False:
            return ""
        clients, per_round = (_read(given, key) for key in ("data.num_clients", "schedule.clients_per_round"))
        per_round = fitting_clients_per_round(given, clients, per_round)
        line = first_line(method_name(_methods(given)), _benchmark(given), clients, per_round)
    except (ConfigError, BadYAML, OSError):
        return ""
    print(line, flush=True)
    return line


def _begins_a_fit(words: Sequence[str]) -> bool:
    names = [word.partition("=")[0] for word in words]
    return names[:1] == ["fit"] and not any(
        name in ("-h", "--help", "--print_config") or name.endswith(".help") for name in names
    )


def _lacks_its_run(line: CommandLine) -> bool:
    """Whether a named checkpoint does not exist, or its configuration is neither named nor beside it."""
    checkpoint = option_value(line.arguments, CHECKPOINT_OPTION)
    return checkpoint not in (None, "last") and not (isfile(checkpoint) and is_configured(line.arguments))


def _given(words: Sequence[str]) -> Iterator[Given]:
    """The values that files and words give, in their order. ``methods`` with the value None removes all before it."""
    yield from in_content(read_yaml(DEFAULT_CONFIG), str(DEFAULT_CONFIG))
    for option, value in words_with_values(words):
        if option in ("--config", "-c"):
            file = None if is_written_out(value) else find_config("--config", value)
            content = parse_yaml(value) if file is None else _in_file(file)
            if isinstance(content, Mapping):
                if "methods" in content and not content["methods"]:
                    yield Given("methods", None)
                yield from in_content(content, None if file is None else str(file))
        elif option.startswith("--"):
            if option == "--methods":
                yield Given("methods", None)
            yield from on_command_line([f"{option}={value}"])


def _in_file(path: Path) -> Any:
    if path.stat().st_size > _MOST_BYTES:
        raise BadYAML("more than can be read at once")
    return read_yaml(path)


def _read(given: Sequence[Given], key: str, default: Any = None) -> Any:
    value = last_given(key, given).value
    return default if value is None else parse_yaml(value) if isinstance(value, str) else value


def _methods(given: Sequence[Given]) -> dict[str, Any]:
    """Name -> class of the methods."""
    found: dict[str, Any] = {}
    for key, value, _ in given:
        section, _, name = key.partition(".")
        if key == "methods":
            found = {}
        elif section == "methods" and "." not in name:
            found[name] = value
    return found


def _benchmark(given: Sequence[Given]) -> str:
    """The result of :func:`cfl.reporting.experiment.benchmark_name`, without importing classes."""
    if (name := last_given("run.benchmark", given).value) is not None:
        return str(name)
    stream, inside = last_given("data.stream", given).value, "data.stream."
    sources = [one for one in given if one.key == f"{inside}source" or _lists_sources(one)][-1]
    if _lists_sources(sources):
        named = [_data_set(list(in_content({"source": source}))) for source in sources.value]
    else:
        named = [_data_set([one._replace(key=one.key.removeprefix(inside)) for one in given])]
    return "-".join([class_name(stream), *named])


def _lists_sources(given: Given) -> bool:
    return given.key == "data.stream.sources" and isinstance(given.value, list)


def _data_set(given: Sequence[Given]) -> str:
    told = [last_given(f"source.{option}", given).value for option in _NAMING_OPTIONS]
    return data_set_name(class_name(last_given("source", given).value), next(filter(None, told), None))
