"""Files and folders that are options of a command, checked before anything is computed."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from pathlib import Path
from tempfile import NamedTemporaryFile

from cfl.runtime.atomic_write import is_stream
from cfl.runtime.disk import why
from cfl.runtime.errors import ConfigError


def given_path(text: str) -> Path:
    """Read a path, as the ``type`` of an option.

    Raises:
        ArgumentTypeError: the text is empty, which would mean the current folder, or has the character NUL.
    """
    if not text or "\0" in text:
        raise ArgumentTypeError(f"{text!r} cannot work; valid: a path, e.g. . for the current folder")
    return Path(text)


def require_folder(option: str, folder: Path) -> None:
    """Make a folder that a command writes into, if it is missing.

    Args:
        option: the option's name, for the error.
        folder: the folder.

    Raises:
        ConfigError: the folder cannot be made, or no file can be written into it.
    """
    _require(option, folder, folder, "")


def require_file(option: str, file: Path) -> None:
    """Make the folder of a file that a command writes; arguments as for :func:`require_folder`.

    Nothing is checked of devices, such as ``/dev/null``.

    Raises:
        ConfigError: there is a folder or a pipe in the file's place, or the file cannot be written.
    """
    if os.path.isdir(file):
        raise ConfigError(option, str(file), "a file; this is a folder")
    if is_stream(file):
        return
    if os.path.exists(file) and not os.path.isfile(file):
        raise ConfigError(option, str(file), "a file; this is a pipe, which the file would replace")
    _require(option, file, file.parent, f"-{file.name}")


def _require(option: str, given: Path, folder: Path, suffix: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Its name is as long as that of the temporary file that the file is first written to.
        NamedTemporaryFile(dir=folder, prefix=".cfl-", suffix=suffix).close()
    except OSError as error:
        what = "a file" if suffix else "a folder"
        raise ConfigError(option, str(given), f"{what} that can be written ({why(given, error)})") from None
