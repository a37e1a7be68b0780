"""Sets the folders to which loggers and profilers write."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def classes_in(settings: Any) -> list[Any]:
    """The entries of an option that name a class. The option may have one entry, a list of them, or none."""
    return [one for one in (settings if isinstance(settings, list) else [settings]) if hasattr(one, "class_path")]


def put_into(folder: str, settings: Any) -> None:
    """Move the folders of a Trainer's loggers and profiler below the run folder, unless their paths are absolute.

    Args:
        folder: the run folder.
        settings: the section ``trainer`` of a configuration. It is changed in place.
    """
    for key, option in (("logger", "save_dir"), ("profiler", "dirpath")):
        for one in classes_in(settings.get(key)):
            own = one.get("init_args", {})
            if option in own:
                own[option] = _place(folder, own[option] or ".")


def _place(folder: str, given: Any) -> str:
    """A path below a folder; absolute ones and addresses of other machines stay."""
    return str(given) if "://" in str(given) else str(Path(folder, Path(given).expanduser()))
