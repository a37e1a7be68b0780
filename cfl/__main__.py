"""``cfl`` and ``python -m cfl``: the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status.

    Args:
        arguments: the command line without the program's name; None takes the process's own.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Imported only now: what trains takes seconds to import, and a comparison needs none of it.
    if given[:1] == ["compare"]:
        from cfl.reporting.compare.command import main as compare

        return compare(given[1:])
    if given[:1] == ["dashboard"]:
        from cfl.reporting.dashboard.command import main as dashboard

        return dashboard(given[1:])
    if given[:1] == ["export"]:
        from cfl.export.command import main as export

        return export(given[1:])
    if given[:1] == ["configs"]:
        from cfl.cli.installed_configs import main as configs

        return configs(given[1:])
    from cfl.cli.main import main as train

    return train(given)


if __name__ == "__main__":
    sys.exit(main())
