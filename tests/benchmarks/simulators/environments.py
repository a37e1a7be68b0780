"""An environment of its own for each simulator, made when it is first measured."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

from benchmarks.running import NotRun


def environment(folder: Path, requirement: str) -> Path:
    """Return the Python of an environment that has a package besides all that this one has; make it if it is missing.

    Packages of this environment, torch among them, are found there unless the package needs another version.

    Args:
        folder: of the environment.
        requirement: of the package, as pip reads it.

    Raises:
        NotRun: pip failed.
    """
    python, made = folder / "bin" / "python", folder / "made"
    if made.exists() and made.read_text() == requirement:
        return python
    venv.EnvBuilder(clear=True, symlinks=True).create(folder)
    purelib = sysconfig.get_path("purelib", vars={"base": str(folder)})
    # Read after the environment's own packages, because of its name.
    (Path(purelib) / "zz_beneath.pth").write_text(sysconfig.get_path("purelib") + os.linesep)
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", *requirement.split()], capture_output=True, text=True
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise NotRun(f"pip install {requirement}: {lines[-1].removeprefix('ERROR: ')}")
    made.write_text(requirement)
    return python
