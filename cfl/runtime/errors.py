"""Errors that a user can act on."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

_LONGEST = 400


class ConfigError(ValueError):
    """A setting that cannot work, found before training.

    Args:
        key: the config key as typed in YAML or on the command line, e.g. ``schedule.clients_per_round``.
        value: the value that was given.
        valid: what would be valid, as a phrase, e.g. ``"an integer between 1 and 20"``.
    """

    def __init__(self, key: str, value: Any, valid: str) -> None:
        super().__init__(f"{key} = {shown(value)} cannot work; valid: {valid}")
        self.key, self.value, self.valid = key, value, valid


class NotUnderstood(RuntimeError):
    """A command line or a configuration that cannot be parsed; the message says what is wrong, and what is valid."""


def shown(value: Any) -> str:
    """A value as Python writes it; of a long text only the beginning."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def reason(error: BaseException) -> str:
    """The message of an error on one line; its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def with_line_of_class(error: BaseException, kind: type) -> str:
    """An error in a user's code, and the line of the class's file that led to it, as one phrase.

    Args:
        error: what was raised.
        kind: the class whose code was running.
    """
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f" ({Path(file).name}, line {lines[-1]})" if file and lines else ""
    return f"{type(error).__name__}: {error}{place}"


class EngineCannot(ConfigError):
    """This engine cannot compute the network; another engine may."""


class DataFilesMissing(FileNotFoundError):
    """Files of a data set are missing and could not be downloaded; the message says which file belongs where."""


class BadUpdate(RuntimeError):
    """The model or its error is NaN or infinity; the message says where: client, task, round."""


def diverged(count: int, task: int, what: str, value: float) -> str:
    """The message of a :class:`BadUpdate` that is found by evaluating test samples.

    Args:
        count: number of samples that are not finite.
        task: their task.
        what: the quantity that is not finite, with its article.
        value: NaN or infinity.
    """
    return (
        f"{count} test samples of task {task} have {what} of {value}: the model has diverged to NaN or infinity; in a "
        "new run, a smaller model.optimizer.lr usually helps"
    )


class SumRefused(RuntimeError):
    """A secure sum was not formed: too few clients were left, or a message was invalid."""


class DamagedFile(RuntimeError):
    """A file that this program wrote has changed since; the message names it."""


class NotWritten(OSError):
    """A file could not be written; the message names file and disk, and says how much is free and needed.

    Attributes:
        needed: bytes that the file needs; None if that is not known.
    """

    needed: int | None = None


FOR_USERS = (ConfigError, NotUnderstood, DataFilesMissing, BadUpdate, SumRefused, DamagedFile, NotWritten)
"""Errors of which only the message is shown."""
