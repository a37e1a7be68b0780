"""``cfl`` and ``python -m cfl``: the command line."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

from cfl import __version__
from cfl.cli.commands import OTHERS, TRAINING, overview
from cfl.runtime import signals
from cfl.runtime.errors import NotWritten
from cfl.runtime.output import name_output


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, which SIGINT, SIGTERM and SIGHUP end with a line; return the exit status.

    Args:
        arguments: the command line without the program's name; None takes the process's own.
    """
    if arguments is None:
        name_output()
    try:
        given = sys.argv[1:] if arguments is None else arguments
        status = signals.ended_by_signals(lambda: _run(given))
        sys.stdout.flush()
        return status
    except NotWritten as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(given: Sequence[str]) -> int:
    first = given[0] if given else ""
    if first == "--version":
        print(f"cfl {__version__}")
        return 0
    if first in ("-h", "--help"):
        print(overview())
        return 0
    if not first.startswith("-") and first not in (*TRAINING, *OTHERS):
        return _unknown(first)
    # Imported only now: what trains takes seconds to import, and a comparison needs none of it.
    if first in OTHERS:
        command = _quickly_imported(OTHERS[first][0])
        signals.hold()
        status: int = command.main(given[1:])
    else:
        from cfl.cli.header import announce

        announced = announce(given)  # before the import
        status = _quickly_imported("cfl.cli.main").main(given, announced)
    return status


def _quickly_imported(module: str) -> ModuleType:
    """Import a module; what it brings is kept from garbage collection, which would take a third of a short command."""
    if module in sys.modules or not gc.isenabled():
        return import_module(module)
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(_unfreeze)


def _unfreeze() -> None:
    """Let what was kept be collected at the end, without which triton prints a screen of what it calls leaks."""
    if "triton" in sys.modules:
        gc.unfreeze()


def _unknown(command: str) -> int:
    """Say which commands there are; the exit status."""
    names = [*TRAINING, *OTHERS]
    if not command:
        print(overview(), file=sys.stderr)
        return 2
    from cfl.runtime.printable import printable

    close = get_close_matches(command, names, 1)
    meant = f"; did you mean {close[0]}?" if close else ""
    text = f"error: command = {command!r} cannot work; valid: one of {', '.join(names)}{meant}"
    print(printable(text), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
