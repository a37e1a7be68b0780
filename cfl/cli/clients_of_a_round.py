"""The default of ``schedule.clients_per_round``, which follows a small federation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cfl.cli.given import Given
from cfl.cli.installed_configs import DEFAULT_CONFIG

KEY = "schedule.clients_per_round"


def fitting_clients_per_round(given: Iterable[Given], clients: Any, per_round: Any) -> Any:
    """The number of clients where ``per_round`` is greater and a default that nobody chose; else ``per_round``.

    Args:
        given: what the command line and its files say; ``default.yaml`` chooses nothing, also where it is named.
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
