"""Entry point of ``python -m cfl.papers``."""

import sys

from cfl.runtime import signals


def main() -> int:
    """Run one command and return the exit status; SIGINT, SIGTERM and SIGHUP end it with one line of output."""
    from cfl.papers.command import main as run

    signals.hold()
    return run()


if __name__ == "__main__":
    sys.exit(signals.ended_by_signals(main))
