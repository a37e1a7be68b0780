"""``python -m attack``: attack the command line in every way, print a table of counts, write cases that went wrong."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

os.environ["CFL_CACHE"] = "off"  # set before it is read, so that no run depends on earlier measurements
os.environ.pop("CFL_DATA_ROOT", None)

import cfl  # noqa: F401  before any module imports lightning: see cfl/runtime/torchvision_ops.py
from attack import children, configurations, corruptions, faults, kills
from attack.report import Report

KINDS = {
    "kills": (kills.cases, 300),
    "configurations": (configurations.cases, 1000),
    "corruptions": (corruptions.cases, 200),
    "faults": (faults.cases, 300),
}
"""Kind -> function that makes its cases, and their default number."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attacks; return 1 if any verdict is a failure, else 0."""
    parser = ArgumentParser(prog="attack", description=__doc__)
    for kind, (_, count) in KINDS.items():
        parser.add_argument(f"--{kind}", type=int, default=count, help=f"number of cases, {count} unless given")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn; another one gives other cases")
    parser.add_argument("--only", default="*", help="cases by name, such as kills/17-FOT or 'configurations/npz*'")
    parser.add_argument("--out", type=Path, default=Path("runs/attack"), help="folder of report and bad cases")
    options = parser.parse_args(arguments)
    report = Report(options.out)
    children.warm()
    for kind, (cases, _) in KINDS.items():
        if not fnmatch(kind, options.only.partition("/")[0]):
            continue
        for name, run in cases(getattr(options, kind), options.seed, report.folder):
            if fnmatch(name, options.only):
                report.add(run())
    print(report.write())
    return report.failed


if __name__ == "__main__":
    sys.exit(main())
