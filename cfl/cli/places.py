"""Where loggers and profilers write."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
