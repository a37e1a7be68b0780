"""Comparison of the run folder of an attacked run with that of a run that was left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import tiny_cli

from cfl.federation.client_states import ClientStates


def results(folder: Path) -> dict[str, Any]:
    """As :func:`support.tiny_cli.results`, with what clients keep sorted by client, since the file has any order."""
    found = tiny_cli.results(folder)
    found["tables"] = {name: rows for name, rows in found["tables"].items() if not name.startswith(".")}
    kept = found["federation"].pop("clients")
    states = ClientStates()
    states.load_state_dict(kept)
    found["kept"] = {
        topic: {str(client): states.get(topic, client) for client in sorted(states.holders(topic))} for topic in kept
    }
    return found


def files(folder: Path) -> list[str]:
    """Names of all files below a folder, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def verdict(folder: Path, whole: Path) -> tuple[str, str]:
    """Return ``equal``, ``different`` or ``littered``, and the first difference.

    Args:
        folder: run folder of the attacked run.
        whole: run folder of the run that was left alone.
    """
    try:
        tiny_cli.assert_same(results(folder), results(whole))
    except (AssertionError, OSError, RuntimeError, KeyError, ValueError) as error:
        return "different", f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}".strip()[:300]
    left = sorted(set(files(folder)) - set(files(whole)))
    return ("littered", f"left {', '.join(left)}") if left else ("equal", "")
