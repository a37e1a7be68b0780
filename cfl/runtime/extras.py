"""The command that installs packages which only some uses of the program need."""

from __future__ import annotations


def install(extra: str) -> str:
    """Return the command that installs the packages of an extra of ``pyproject.toml``, in releases that work."""
    return f"pip install 'continual-fl[{extra}]'"
