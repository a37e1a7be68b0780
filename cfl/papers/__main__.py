"""``python -m cfl.papers``."""

import sys

from cfl.runtime import signals


def main() -> int:
    """Run one command, which SIGINT, SIGTERM and SIGHUP end with a line; return the exit status."""
    from cfl.papers.command import main as run

    signals.hold()
    return run()


if __name__ == "__main__":
    sys.exit(signals.ended_by_signals(main))
