"""Lowers the default of ``schedule.clients_per_round`` if there are fewer clients."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cfl.cli.given import Given
from cfl.cli.installed_configs import DEFAULT_CONFIG

KEY = "schedule.clients_per_round"


def fitting_clients_per_round(given: Iterable[Given], clients: Any, per_round: Any) -> Any:
    """Return the number of clients if ``per_round`` is a default and greater; otherwise ``per_round``.

    Args:
        given: the options of the command line and its files. Those of ``default.yaml`` are defaults, even if the
            command line names this file.
        clients: ``data.num_clients``.
        per_round: ``schedule.clients_per_round``.
    """
    if any(one.key == KEY and not _is_default(one.file) for one in given):
        return per_round
    return (
        clients if isinstance(per_round, int) and isinstance(clients, int) and 1 <= clients < per_round else per_round
    )


def _is_default(file: str | None) -> bool:
    return file is not None and Path(file).resolve() == DEFAULT_CONFIG
