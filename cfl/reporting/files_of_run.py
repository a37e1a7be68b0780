"""The files that a run leaves in its folder: names that methods may not have, and files that a new run removes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cfl.metrics.base import own_key
from cfl.metrics.measure import MEASURES
from cfl.reporting.names import is_method_name, table_names
from cfl.runtime.class_paths import KEYS_OF_A_CLASS
from cfl.runtime.errors import ConfigError
from cfl.runtime.run_files import (
    CHECKPOINT,
    CHECKSUMS,
    CLIENTS,
    CONFIG,
    PARTITION,
    PARTITION_PICTURE,
    PRIVACY,
    ROUNDS,
    SAMPLES,
    SUMMARY,
    TESTS_BY_OWNER,
    WANDB_ID,
    matrix_file,
)
from cfl.runtime.yaml_file import BadYAML, read_yaml

TABLES = {Path(file).stem for file in (ROUNDS, PARTITION, PRIVACY, TESTS_BY_OWNER)} | {
    Path(matrix_file(measure.name, variant)).stem for measure in MEASURES for variant in {"", measure.known}
}
"""Names of a run's tables, which no method may have, because its own table would overwrite them."""
_OTHERS = (
    *(PARTITION_PICTURE, SAMPLES, SUMMARY, CHECKSUMS, CHECKPOINT, WANDB_ID),
    *(f"{measure.name}_{kind}.png" for measure in MEASURES for kind in ("matrix", "curve", "rounds")),
)
"""Further files that are removed before another run in the same folder."""
_FILES_OF_LOGGERS = {
    "TensorBoardLogger": ("events.out.tfevents.*", "hparams.yaml"),
    "CSVLogger": ("metrics.csv", "hparams.yaml"),
}
"""Class of a logger -> patterns of the files in its folder of a run."""


def check_method_names(names: Iterable[str]) -> None:
    """Refuse names of methods that cannot be names of their tables.

    Raises:
        ConfigError: a character other than letters, digits, ``_`` and ``-``, the name of another table, or a key of a
            class's entry.
    """
    for name in names:
        _check_name("methods", name)
        if name in TABLES:
            raise ConfigError(f"methods.{name}", name, f"another name: the run folder has a table {name}.csv anyhow")


def check_measure_names(names: Iterable[str]) -> None:
    """Refuse names of a user's measures that cannot be part of a file's name.

    Raises:
        ConfigError: a character other than letters, digits, ``_`` and ``-``, or a key of a class's entry.
    """
    for name in names:
        _check_name("measures", name)


def _check_name(section: str, name: str) -> None:
    if not is_method_name(name):
        raise ConfigError(f"{section}.{name}", name, "a name of at most 100 letters, digits, _ and -")
    if name in KEYS_OF_A_CLASS:  # it would make the entries of all names one class's
        raise ConfigError(f"{section}.{name}", name, f"another name: in configurations {name} belongs to a class")


def files_of_earlier_run(folder: Path) -> list[Path]:
    """Files of an earlier run in a folder that a new run would not overwrite immediately, and folders of wandb.

    Methods' tables and loggers' files are identified by the methods and loggers in ``config.yaml``, folders of wandb by
    the run's id. Other files and folders do not belong to the run.
    """
    config = _config_in(folder)
    names = [*_OTHERS, *(f"{name}.csv" for name in (*TABLES, *table_names(config)))]
    found = [folder / name for name in names if (folder / name).is_file()]
    found += folder.glob(matrix_file(own_key("*")))
    for name in (*(measure.name for measure in MEASURES), own_key("*")):
        found += folder.glob(f"{CLIENTS}/{matrix_file(name, '_*')}")
    if found:  # otherwise the folder holds no run, though there may be runs below it
        found += _logged(folder, config)
        found += _offline_wandb_folders(folder)
    return found


def wandb_id_in(folder: Path) -> str | None:
    """The wandb id of the run in a folder; None if it has none, or a damaged file."""
    if not (folder / WANDB_ID).is_file():
        return None
    known = (folder / WANDB_ID).read_text(encoding="utf-8", errors="replace").strip()
    return known if is_method_name(known) else None


def _logged(folder: Path, config: Mapping[str, Any]) -> list[Path]:
    """Return the files that TensorBoardLogger and CSVLogger of a folder's run have written below the folder."""
    section = config.get("trainer")
    loggers = section.get("logger") if isinstance(section, Mapping) else None
    found: list[Path] = []
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        if not isinstance(logger, Mapping):
            continue
        kind, options = str(logger.get("class_path")).rpartition(".")[2], logger.get("init_args")
        if kind not in _FILES_OF_LOGGERS or not isinstance(options, Mapping):
            continue
        place = folder / str(options.get("save_dir") or ".") / str(options.get("name", "lightning_logs") or "")
        version = options.get("version")
        if version is None:
            versions = list(place.glob("version_*"))
        else:
            versions = [place / (version if isinstance(version, str) else f"version_{version}")]
        below = [own / str(options.get("sub_dir") or "") for own in versions]
        files = [path for own in below for pattern in _FILES_OF_LOGGERS[kind] for path in own.glob(pattern)]
        found += [path for path in files if path.is_file() and path.resolve().is_relative_to(folder.resolve())]
    return found


def _offline_wandb_folders(folder: Path) -> list[Path]:
    """Folders of wandb with offline logs of a folder's run, which ``wandb sync`` would send with the next run's."""
    known = wandb_id_in(folder)
    if known is None:
        return []
    # A number follows if two folders of one run were made in the same second.
    name = re.compile(rf"offline-run-\d+_\d+-{re.escape(known)}(-\d+)?")
    found = [path for path in folder.glob("**/wandb/offline-run-*") if name.fullmatch(path.name)]
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def _config_in(folder: Path) -> Mapping[str, Any]:
    """A run folder's configuration; empty if that cannot be read."""
    try:
        config = read_yaml(folder / CONFIG)
    except (OSError, BadYAML):
        return {}
    return config if isinstance(config, dict) else {}
