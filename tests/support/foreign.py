"""Run folders of an attacker: configurations that try to run code, and the commands that open such a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""YAML that stands for ``9 ** 9`` texts in a few hundred characters; its last key is ``i``."""

TRAP = """
from pathlib import Path
HERE = Path(__file__).parent
(HERE / "IMPORTED").touch()
import torch
from lightning.pytorch import Callback as LightningCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from cfl.data.partitions import IID
from cfl.data.sources import Synthetic
from cfl.methods import EWC
from cfl.metrics.accuracy import AccuracyMatrix
from cfl.models import MLP
def called():
    (HERE / "CALLED").touch()
def make() -> EWC:
    called()
    return EWC()
def make_network(input_shape: tuple[int, int, int], num_outputs: int) -> MLP:
    called()
    return MLP(input_shape, num_outputs)
def make_optimizer(params) -> torch.optim.Optimizer:
    called()
    return torch.optim.SGD(params, 0.1)
instance = EWC()
def trapped(name, base):
    def __init__(self, *arguments, **named):
        called()
        base.__init__(self, *arguments, **named)
    return type(name, (base,), {"__init__": __init__, "__module__": __name__})
class TrapOptimizer(torch.optim.SGD):
    def __init__(self, params, lr: float = 0.1):
        called()
        super().__init__(params, lr)
TrapNetwork, TrapMethod = trapped("TrapNetwork", MLP), trapped("TrapMethod", EWC)
TrapSource, TrapPartition = trapped("TrapSource", Synthetic), trapped("TrapPartition", IID)
TrapCallback, TrapLogger = trapped("TrapCallback", LightningCallback), trapped("TrapLogger", CSVLogger)
TrapMeasure = trapped("TrapMeasure", AccuracyMatrix)
TrapStrategy = trapped("TrapStrategy", SingleDeviceStrategy)
"""
"""A module that leaves a file beside itself when it is imported, and another when its functions or classes are used."""


def set_trap(folder: Path) -> None:
    """Put the module ``trap`` into a folder."""
    (folder / "trap.py").write_text(TRAP)


def sprung(folder: Path) -> list[str]:
    """Return the names of the files that the trap and attacks' shell commands have left in a folder; remove them."""
    found = [name for name in ("IMPORTED", "CALLED", "EXECUTED") if (folder / name).exists()]
    for name in found:
        (folder / name).unlink()
    return found


def _set(key: str, value: Any) -> Callable[[dict[str, Any], Path], None]:
    """Set a dotted key of a configuration; FOLDER in a text is the trap's folder."""

    def filled(tree: Any, folder: Path) -> Any:
        if isinstance(tree, dict):
            return {name: filled(part, folder) for name, part in tree.items()}
        if isinstance(tree, list):
            return [filled(part, folder) for part in tree]
        return tree.replace("FOLDER", str(folder)) if isinstance(tree, str) else tree

    def edit(config: dict[str, Any], folder: Path) -> None:
        node, (*above, last) = config, key.split(".")
        for name in above:
            node = node[name]
        node[last] = filled(value, folder)

    return edit


def _of(path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": path, "init_args": arguments}


_SHELL = "touch FOLDER/EXECUTED"
ATTACKS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "os.system": _set("model.optimizer", _of("os.system", command=_SHELL)),
    "os.system as network": _set("model.network", _of("os.system", command=_SHELL)),
    "subprocess.getoutput": _set("model.optimizer", _of("subprocess.getoutput", cmd=_SHELL)),
    "pydoc.pipepager": _set("model.optimizer", _of("pydoc.pipepager", text="", cmd=_SHELL)),
    "os.system by a trusted module": _set("model.optimizer", _of("cfl.runtime.errors.os.system", command=_SHELL)),
    "os.system by torch.optim": _set("model.optimizer", _of("torch.optim.swa_utils.os.system", command=_SHELL)),
    "optimizer": _set("model.optimizer", _of("trap.TrapOptimizer")),
    "network": _set("model.network", _of("trap.TrapNetwork")),
    "logger": _set("trainer.logger", _of("trap.TrapLogger", save_dir=".")),
    "callback": _set("trainer.callbacks", [_of("trap.TrapCallback")]),
    "own callback": _set("trainer.callbacks", [_of("cfl.callbacks.RunRecord", dir="FOLDER", overwrite=True)]),
    "strategy": _set("trainer.strategy", _of("trap.TrapStrategy")),
    "source in stream": _set("data.stream.init_args.source", _of("trap.TrapSource")),
    "partition": _set("data.partition", _of("trap.TrapPartition")),
    "method": _set("methods", {"a": _of("trap.TrapMethod")}),
    "source in method": _set("methods", {"a": _of("cfl.methods.CFeD", surrogate=_of("trap.TrapSource"))}),
    "measure": _set("measures", {"a": _of("trap.TrapMeasure")}),
    "function": _set("methods", {"a": _of("trap.make")}),
    "function for a network": _set("model.network", "trap.make_network"),
    "function for an optimizer": _set("model.optimizer", "trap.make_optimizer"),
    "object": _set("methods", {"a": "trap.instance"}),
}
"""Name -> what the attacker changes in a run's configuration, given the trap's folder."""


def attacked(run: Path, attack: str, folder: Path) -> Path:
    """Put a copy of a run, changed by an attack, and the trap into ``folder``; return the path of the copy."""
    copy = folder / "run"
    shutil.copytree(run, copy, dirs_exist_ok=True)
    config = yaml.safe_load((run / "config.yaml").read_text())
    ATTACKS[attack](config, folder)
    (copy / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    set_trap(folder)
    return copy


def commands(run: Path) -> dict[str, list[str]]:
    """Name -> the command line that opens a run, or starts from its configuration."""
    checkpoint = ["--ckpt_path", str(run / "last.ckpt")]
    return {
        "validate": ["validate", *checkpoint],
        "test": ["test", *checkpoint],
        "export": ["export", *checkpoint, "--out", str(run / "model.safetensors")],
        "compare": ["compare", str(run)],
        "fit --ckpt_path": ["fit", *checkpoint],
        "fit --config": ["fit", "--config", str(run / "config.yaml"), "--run.dir", str(run / "again")],
    }
