"""Which classes a configuration may name, decided before anything is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

from jsonargparse import set_parsing_settings
from jsonargparse._common import parsing_settings

from cfl.cli.given import on_command_line
from cfl.cli.leaves import leaves
from cfl.runtime.class_paths import PACKAGE, named_class
from cfl.runtime.errors import ConfigError

TRUSTED = (
    PACKAGE,
    "torch.optim",
    "lightning.pytorch.loggers.CSVLogger",
    "lightning.pytorch.loggers.csv_logs.CSVLogger",
    "lightning.pytorch.loggers.TensorBoardLogger",
    "lightning.pytorch.loggers.tensorboard.TensorBoardLogger",
    "lightning.pytorch.loggers.WandbLogger",
    "lightning.pytorch.loggers.wandb.WandbLogger",
)
"""Packages and classes that the configuration beside a checkpoint may name. Loggers are listed by both their paths."""
_NO_CLASSES = ("run", "ckpt_path", "data.root")
"""Options, and a section of options, whose values are names and places."""
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_BUILT_BY_THE_PROGRAM = "cfl.callbacks"
"""The program adds these callbacks itself. One that a foreign configuration adds could write into any folder."""


def classes_beyond(config: Any) -> list[str]:
    """Paths of a configuration's classes that are not in :data:`TRUSTED`, each once.

    Args:
        config: a parsed configuration, or its plain values.
    """
    paths = dict.fromkeys(str(value) for key, value in leaves(config) if key.endswith(".class_path") and value)
    return [path for path in paths if not any(f"{path}.".startswith(f"{trusted}.") for trusted in TRUSTED)]


def typed_paths(words: Sequence[str]) -> list[str]:
    """Paths of the classes that a user has typed: dotted values of a command line's options that may name classes."""
    given = (one for one in on_command_line(words) if not {one.key, one.key.partition(".")[0]} & {*_NO_CLASSES})
    values = [one.value for one in given]
    return [value for value in values if isinstance(value, str) and _DOTTED.fullmatch(value)]


@contextmanager
def importing_only(packages: Sequence[str] | None) -> Iterator[None]:
    """Within the context, parsers import only these packages of those that a configuration names.

    Args:
        packages: dotted names of packages, modules or classes, each with everything below it. None for everything
            except functions and classes whose call executes commands, reads pickles or opens files (jsonargparse's own
            list).

    Raises:
        ConfigError: a name is not valid, or would let a configuration change these rules.
    """
    before = dict(parsing_settings)  # restored below: these global settings can be narrowed, but not widened again
    # A class inside a value of type Any is data and is not instantiated.
    set_parsing_settings(import_path_denylist=[], instantiate_subclass_spec_in_any=False)
    try:
        for name in packages or ():
            try:
                set_parsing_settings(import_path_allowlist=[name])
            except ValueError:
                raise ConfigError("--allow", name, "the dotted name of a package, a module or a class") from None
        if packages is not None:
            set_parsing_settings(import_path_denylist=["*", _BUILT_BY_THE_PROGRAM])
        yield
    finally:
        parsing_settings.update(before)


_PLAIN = ("builtins", "datetime", "pathlib", "torch")
"""Modules of the types that values of a configuration have."""


def require_classes(config: Any, copies: Collection[str] = (), sections: Collection[str] | None = None) -> None:
    """Refuse a parsed configuration if a class path names anything other than a class that can be instantiated.

    The parser also accepts functions that return the right type, and objects of this type. A function would be called
    in place of the class, so that naming it in a file would be enough to call it.

    Args:
        config: a parsed configuration, before anything of it is instantiated.
        copies: keys whose values are copies of other keys' values. They are not checked.
        sections: the sections to check; None checks all. The parser refuses sections that it does not have, and imports
            nothing that they name.

    Raises:
        ConfigError: a value is refused.
    """
    for key, value in leaves(config):
        if any(key.startswith(f"{copy}.") for copy in copies):
            continue
        if sections is not None and key.partition(".")[0] not in sections:
            continue
        of = type(value)
        if isinstance(value, str) and key.endswith(".class_path"):
            if (found := named_class(value)) is None:
                raise ConfigError(key.removesuffix(".class_path"), value, "a class; this is none")
            if lacking := sorted(getattr(found, "__abstractmethods__", ())):
                valid = f"a class with all it needs; this one lacks {', '.join(lacking)}"
                raise ConfigError(key.removesuffix(".class_path"), value, valid)
        elif isinstance(value, os.PathLike | Enum):  # the parser's paths can be called
            continue
        elif callable(value) or of.__module__ not in _PLAIN:
            name = getattr(value, "__qualname__", of.__qualname__)
            raise ConfigError(key, f"{getattr(value, '__module__', '')}.{name}", "a class; this is none")
