"""The single values of a parsed configuration, and checks that no class has to make for its own options."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jsonargparse import Namespace

from cfl.cli.given import Given
from cfl.reporting.names import LONGEST
from cfl.runtime.errors import ConfigError, shown
from cfl.runtime.option_checks import check_magnitude
from cfl.runtime.yaml_file import ambiguous

_LONGEST_PATH = 4095


def leaves(node: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its key as typed on the command line; the key of a class ends with ``.class_path``."""
    if isinstance(node, Namespace):
        node = vars(node)
    if isinstance(node, Mapping):
        for key, value in node.items():
            name = str(key)  # options may be mappings by numbers
            if name.startswith("__"):  # the parser's own notes
                continue
            yield from leaves(value, above if name == "init_args" else f"{above}.{name}".lstrip("."))
    elif isinstance(node, list | tuple):
        for value in node:
            yield from leaves(value, above)
    else:
        yield above, node


def check_leaves(config: Any, given: Sequence[Given], copies: Collection[str] = ()) -> None:
    """Refuse numbers out of all proportion or not written as one reads them, and names that no file can have.

    Args:
        config: as a parser gives it.
        given: what was said to the parser: a text may have become a number.
        copies: keys whose values are copies of others'.

    Raises:
        ConfigError: naming the key.
    """
    said = {one.key: one.value for one in given}
    for key, value in leaves(config):
        if any(f"{key}.".startswith(f"{copy}.") for copy in copies):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            text = said.get(key)
            if isinstance(text, str) and (instead := ambiguous(text)):
                raise ConfigError(key, text, instead.partition(",")[0])
            check_magnitude(key, value)
        elif isinstance(value, str):
            check_path(key, value)


def dropped(config: Any, given: Sequence[Given]) -> Iterator[str]:
    """A sentence for each option in a file whose class has been replaced by another.

    Args:
        config: as a parser gives it.
        given: what the files say.
    """
    for one in given:
        node, place = config, ""
        for part in one.key.split("."):
            options = _mapping(node)
            if part not in options and "class_path" in options:
                name, options = options["class_path"], _mapping(options.get("init_args"))
                if part not in options:
                    yield f"{one.key} = {shown(one.value)} (in {one.file}) is dropped: {place} is {name} by now"
            if part not in options:
                break
            node, place = options[part], f"{place}.{part}".lstrip(".")


def _mapping(node: Any) -> Mapping[str, Any]:
    node = vars(node) if isinstance(node, Namespace) else node
    return node if isinstance(node, Mapping) else {}


def check_path(key: str, text: str) -> None:
    """Refuse a text that the operating system would, if it were a path. Texts of several words are none.

    Raises:
        ConfigError: naming the key.
    """
    sizes = [len(name.encode(errors="replace")) for name in text.split("/")]
    if len(text.split()) == 1 and (max(sizes) > LONGEST or sum(sizes) + len(sizes) > _LONGEST_PATH):
        valid = f"a text of at most {_LONGEST_PATH} bytes, and {LONGEST} between slashes: no file has a longer name"
        raise ConfigError(key, text, valid)
