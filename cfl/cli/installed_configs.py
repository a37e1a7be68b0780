"""``cfl configs [NAME]``: the configurations that come along, which ``--config`` finds from any folder."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile
from os.path import isfile
from pathlib import Path

from cfl.runtime.command_paths import given_path
from cfl.runtime.errors import ConfigError

CONFIGS = (Path(__file__).parents[1] / "configs").resolve()
DEFAULT_CONFIG = CONFIGS / "default.yaml"
_COLLAPSED = "papers"
"""A folder of many files, which the list of all shows as one line."""


def find_config(key: str, name: str) -> Path:
    """The file of a name: the user's file at this path, or otherwise the installed configuration.

    Args:
        key: key of the option, for the error.
        name: a path, or the name of an installed configuration: ``methods/fot.yaml`` or ``configs/methods/fot.yaml``.

    Raises:
        ConfigError: there is no such file. The error says where it was searched.
    """
    if "\0" in name:  # not allowed in paths
        raise ConfigError(key, name, "an existing file")
    path = Path(name)
    if isfile(path):  # unlike Path.is_file, it raises no error for names that are too long
        return path
    if not path.is_absolute():
        installed = _installed(path)
        if isfile(installed) and CONFIGS in installed.parents:
            return installed
    looked = path.parent.resolve() if path.is_absolute() else f"{Path.cwd()} and {CONFIGS}"
    near = get_close_matches(name.removeprefix("configs/"), _names(), 1, cutoff=0.8)
    meant = f"; did you mean {near[0]}?" if near else ""
    valid = f"an existing file (looked in {looked}; cfl configs lists those that come along){meant}"
    raise ConfigError(key, name, valid)


def is_config(name: str) -> bool:
    """Whether :func:`find_config` finds a file of this name."""
    try:
        find_config("config", name)
    except ConfigError:
        return False
    return True


def is_installed(name: str) -> bool:
    """Whether a file is an installed configuration."""
    return CONFIGS in Path(name).resolve().parents


def _installed(path: Path) -> Path:
    """The path of an installed configuration of this relative path, whether it exists or not."""
    return (CONFIGS / (path.relative_to("configs") if path.parts[:1] == ("configs",) else path)).resolve()


def _names() -> list[str]:
    """Names of all installed configurations, such as ``methods/fot.yaml``, sorted by their parts."""
    return [str(path) for path in sorted(path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml"))]


def main(arguments: Sequence[str]) -> int:
    """Run the command line.

    Args:
        arguments: the command line without the program's name and ``configs``.

    Returns:
        Exit status: 0, or 2 after one line on standard error.
    """
    parser = argparse.ArgumentParser(
        prog="cfl configs",
        description="List the configurations that come along, or print one. --config finds them by these names from "
        "any folder; a file of the same name in the current folder is taken before them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        type=given_path,
        help="a file, e.g. methods/fot.yaml, or a folder, e.g. papers",
    )
    name = parser.parse_args(arguments).name
    place = CONFIGS if name is None else _installed(name)
    if isfile(place) and CONFIGS in place.parents:
        print(place.read_text(encoding="utf-8"), end="")
        return 0
    files = [Path(name) for name in _names()]
    found = [path for path in files if name is None or place in (CONFIGS / path).parents]
    if not found:
        near = get_close_matches(str(name), _names())
        valid = ", ".join(near) or "one of those that cfl configs lists"
        print(f"error: {ConfigError('NAME', str(name), valid)}", file=sys.stderr)
        return 2
    collapsed = [path for path in found if name is None and path.parts[0] == _COLLAPSED]
    for path in found:
        if path not in collapsed:
            print(f"{path!s:<44} {_about(CONFIGS / path)}".rstrip())
    if collapsed:
        print(f"{_COLLAPSED + '/':<44} {len(collapsed)} files for the papers' tables: cfl configs {_COLLAPSED}")
    return 0


def _about(path: Path) -> str:
    """The first sentence of the comment that a file begins with."""
    with path.open(encoding="utf-8") as file:
        lines = [line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), file)]
    comment = " ".join(lines)
    return re.split(r"(?<=\.)\s", comment, maxsplit=1)[0]
