"""``cfl`` without a subcommand's work: version, overview and errors, printed without importing torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cfl
from cfl.__main__ import main
from cfl.cli.commands import OTHERS, TRAINING, overview


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--version"], 0), (["--help"], 0), (["-h"], 0), ([], 2), (["fti"], 2)]
)
def test_nothing_heavy_is_imported(arguments: list[str], status: int) -> None:
    code = (
        "import sys; from cfl.__main__ import main; status = main(sys.argv[1:]); "
        "print(sorted({'torch', 'numpy', 'lightning', 'jsonargparse'} & set(sys.modules))); sys.exit(status)"
    )
    found = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert found.stdout.splitlines()[-1] == "[]", found.stderr
    assert found.returncode == status


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cfl {cfl.__version__}\n"


def test_every_command_is_in_the_overview() -> None:
    words = [line.split()[0] for line in overview().splitlines() if line.startswith("  ")]
    assert words == [*TRAINING, *OTHERS]


def test_a_mistyped_command_is_told_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comapre", "runs"]) == 2
    told = capsys.readouterr().err
    valid = ", ".join([*TRAINING, *OTHERS])
    assert told == f"error: command = 'comapre' cannot work; valid: one of {valid}; did you mean compare?\n"


def test_torchvision_can_be_imported_after_cfl() -> None:
    code = "import sys, cfl; assert 'torch' not in sys.modules; import torchvision; torchvision.ops.nms"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("loaded", [True, False])
def test_triton_finds_nothing_kept_from_collection_at_the_end(loaded: bool) -> None:
    """With triton loaded, objects are unfrozen at exit. Without triton they stay frozen, which ends the command sooner.

    If objects stayed frozen, triton's bindings would report them as leaks.
    """
    code = (
        "import atexit, gc, sys, types; atexit.register(lambda: print(gc.get_freeze_count() == 0)); "
        f"{'sys.modules.update(triton=types.ModuleType(str()));' if loaded else ''}"
        "from cfl.__main__ import main; main(['configs', '--help'])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == str(loaded)
