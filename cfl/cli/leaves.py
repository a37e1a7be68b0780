"""The single values of a parsed configuration, and checks of these that do not depend on the class of an option."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jsonargparse import Namespace

from cfl.cli.given import Given
from cfl.reporting.names import LONGEST
from cfl.runtime.class_paths import OPTIONS_OF_A_CLASS
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
            name = str(key)  # values of options may be mappings with numbers as keys
            if name.startswith("__"):  # added by the parser
                continue
            yield from leaves(value, above if name in OPTIONS_OF_A_CLASS else f"{above}.{name}".lstrip("."))
    elif isinstance(node, list | tuple):
        for value in node:
            yield from leaves(value, above)
    else:
        yield above, node


def check_leaves(config: Any, given: Sequence[Given], copies: Collection[str] = ()) -> None:
    """Refuse numbers that are NaN, too large or written ambiguously, and texts that are too long for a file's name.

    Args:
        config: a parsed configuration.
        given: the options that were given to the parser, with numbers as they were written.
        copies: keys whose values are copies of other keys' values. They are not checked.

    Raises:
        ConfigError: a value is refused.
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
        config: a parsed configuration.
        given: the options in files.
    """
    for one in given:
        node, place = config, ""
        for part in one.key.split("."):
            options = _mapping(node)
            if part not in options and "class_path" in options:
                name, groups = options["class_path"], [_mapping(options.get(group)) for group in OPTIONS_OF_A_CLASS]
                options = {key: value for group in groups for key, value in group.items()}
                if part not in options:
                    yield f"{one.key} = {shown(one.value)} (in {one.file}) is dropped: {place} is {name} by now"
            if part not in options:
                break
            node, place = options[part], f"{place}.{part}".lstrip(".")


def _mapping(node: Any) -> Mapping[str, Any]:
    node = vars(node) if isinstance(node, Namespace) else node
    return node if isinstance(node, Mapping) else {}


def check_path(key: str, text: str) -> None:
    """Refuse a text without spaces that is too long for a path.

    Raises:
        ConfigError: the text is too long.
    """
    sizes = [len(name.encode(errors="replace")) for name in text.split("/")]
    if len(text.split()) == 1 and (max(sizes) > LONGEST or sum(sizes) + len(sizes) > _LONGEST_PATH):
        valid = f"a text of at most {_LONGEST_PATH} bytes, and {LONGEST} between slashes: no file has a longer name"
        raise ConfigError(key, text, valid)
