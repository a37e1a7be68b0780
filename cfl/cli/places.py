"""Where loggers and profilers write, and which packages loggers need."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

from cfl.cli.parsing import causes
from cfl.runtime.class_paths import named_class
from cfl.runtime.errors import ConfigError
from cfl.runtime.printable import on_one_line


def classes_in(settings: Any) -> list[Any]:
    """The entries with a class of an option that has one, several in a list, or none."""
    return [one for one in (settings if isinstance(settings, list) else [settings]) if hasattr(one, "class_path")]


def put_into(folder: str, settings: Any) -> None:
    """Make the places of a Trainer's loggers and profiler those below the run folder, unless they are absolute.

    Args:
        folder: the run folder.
        settings: the section ``trainer`` of a configuration, which is changed.
    """
    for key, option in (("logger", "save_dir"), ("profiler", "dirpath")):
        for one in classes_in(settings.get(key)):
            own = one.get("init_args", {})
            if option in own:
                own[option] = _place(folder, own[option] or ".")


def _place(folder: str, given: Any) -> str:
    """A path below a folder; absolute ones and addresses of other machines stay."""
    return str(given) if "://" in str(given) else str(Path(folder, Path(given).expanduser()))


@contextmanager
def naming_what_lacks(loggers: Any) -> Iterator[None]:
    """Within the context, a logger whose package is not installed is refused by name.

    Args:
        loggers: the option ``trainer.logger``.

    Raises:
        ConfigError: with the package, and how to install it.
    """
    try:
        yield
    except Exception as error:
        lacking = next((one for one in causes(error) if isinstance(one, ModuleNotFoundError)), None)
        raised_in = {frame.filename for frame in extract_tb(None if lacking is None else lacking.__traceback__)}
        for logger in classes_in(loggers):
            found = named_class(logger.class_path)
            if found is not None and inspect.getfile(found) in raised_in:
                valid = f"a logger whose package is installed ({on_one_line(str(lacking))})"
                raise ConfigError("trainer.logger", found.__name__, valid) from error
        raise
