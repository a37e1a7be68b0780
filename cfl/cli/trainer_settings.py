"""Refuses settings of the Trainer before it is built.

Lightning would refuse them without naming their key, or silently change them.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from cfl.callbacks.trainer_checks import FIXED_IN_TESTS, FIXED_IN_TRAINING, Accepted
from cfl.runtime.errors import ConfigError
from cfl.runtime.printable import on_one_line

_MOST_PROCESSES = 4096
_LEFT_ALONE: dict[str, Accepted] = {
    "barebones": FIXED_IN_TESTS["barebones"],
    "default_root_dir": ((), "unset: what a run writes is in its folder, run.dir"),
    "enable_checkpointing": ((True,), "true; checkpoint.enabled=false writes no checkpoints"),
    "max_time": ((), "unset; a signal ends a run after a round: timeout -s TERM 8h cfl fit ..."),
}
"""Setting -> the values besides null that are accepted, and a description of valid values."""
WITHOUT_CHOICE = frozenset(
    {*_LEFT_ALONE, *FIXED_IN_TESTS, *FIXED_IN_TRAINING, "fast_dev_run", "max_epochs", "model_registry"}
)
"""Settings of which one value works. The help leaves them out; any other value is refused."""
_NAMED = re.compile(r"`(?:Trainer\()?(\w+)[`=]")
"""A setting or its value in a message of Lightning's Trainer, such as `devices`, `accelerator='gpuu'` or `fsdp`."""


def check_profiler(profiler: Any) -> None:
    """Refuse a profiler that would fail during training or in its teardown.

    Args:
        profiler: the parsed option ``trainer.profiler``, not built.

    Raises:
        ConfigError: the profiler is refused.
    """
    kind = profiler if isinstance(profiler, str) else str(getattr(profiler, "class_path", "")).rpartition(".")[2]
    names_modules = kind == "pytorch" or (kind == "PyTorchProfiler" and profiler.init_args.record_module_names)
    if names_modules or (isinstance(profiler, str) and profiler not in ("simple", "advanced")):
        without_names = "PyTorchProfiler with --trainer.profiler.record_module_names false"
        valid = f"null, simple, advanced, or {without_names}: engines copy the network, but not such hooks"
        raise ConfigError("trainer.profiler", kind, valid)


def check_settings(settings: Any, rounds: int) -> None:
    """Refuse settings that do not work for any experiment.

    Args:
        settings: the section ``trainer`` of a parsed configuration.
        rounds: number of rounds.

    Raises:
        ConfigError: a setting is refused. The error names it.
    """
    for key, (usual, valid) in _LEFT_ALONE.items():
        if settings[key] not in (None, *usual):
            raise ConfigError(f"trainer.{key}", settings[key], valid)
    if settings.logger is True:  # Lightning's own would write beside the run folder
        valid = "false, or loggers by class_path, e.g. --config configs/loggers/tensorboard.yaml"
        raise ConfigError("trainer.logger", True, valid)
    for key in ("devices", "num_nodes"):
        count = settings[key]
        if str(count).isdecimal() and int(count) > _MOST_PROCESSES:
            raise ConfigError(f"trainer.{key}", count, f"at most {_MOST_PROCESSES}")
    if str(settings.precision) in ("16", "16-mixed"):  # on a CPU Lightning would take bf16-mixed instead
        raise ConfigError("trainer.precision", settings.precision, "32-true or bf16-mixed")
    if settings.max_epochs not in (None, rounds):
        raise ConfigError(
            "trainer.max_epochs", settings.max_epochs, "unset: the number of rounds follows from schedule"
        )


def accelerator_for(given: Any, key: str = "trainer.accelerator") -> Any:
    """The accelerator that a Trainer is given: for ``auto`` a CUDA GPU or else the CPU.

    Lightning would also take Apple's GPU, which has no float64.

    Args:
        given: the setting ``accelerator``.
        key: its key.

    Raises:
        ConfigError: a GPU is asked for, and there is no CUDA GPU.
    """
    if torch.cuda.is_available():
        return given
    if given in ("gpu", "cuda", "mps"):
        raise ConfigError(key, given, "auto or cpu: torch finds no CUDA GPU here, and cfl computes on no other")
    return "cpu" if given == "auto" else given


def refused_by_lightning(settings: Any, reason: str) -> ConfigError:
    """The error for settings that Lightning's Trainer refuses. It names the setting if Lightning's message does.

    Args:
        settings: the section ``trainer`` of a parsed configuration.
        reason: Lightning's message.
    """
    by_value = {value: key for key, value in vars(settings).items() if isinstance(value, str)}
    named = (name if name in settings else by_value.get(name) for name in _NAMED.findall(reason))
    key = next(filter(None, named), None)
    valid = "settings that Lightning's Trainer accepts"
    if key is None:
        return ConfigError("trainer", reason, valid)
    return ConfigError(f"trainer.{key}", settings[key], f"{valid} ({on_one_line(reason)})")
