"""Remembers which data sets and files of trained weights runs have found to be missing on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cfl.data.sources import Source
from cfl.data.sources.root import data_root, data_root_given
from cfl.reporting.experiment import class_of
from cfl.reporting.former_names import with_renamed_options
from cfl.runtime.atomic_write import write_whole
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.runtime.file_lock import lock

MISSING = "missing-data.json"
"""Name of the file in which missing data are remembered."""


def needs_of(experiment: Mapping[str, Any]) -> list[str]:
    """Short names of the data sets that an experiment reads, and of its file of trained weights, each once.

    A data set has the name of its class. If the class can read many data sets, its name is the value of the option that
    chooses one (``naming_option``).
    """
    sources = _sources([experiment["data"], experiment.get("methods", {})])
    weights = _weights(experiment)
    names = [_name(node, source) for node, source in sources]
    return list(dict.fromkeys([*names, *([weights.name] if weights else [])]))


def _weights(experiment: Mapping[str, Any]) -> Path | None:
    """The file from which the network's weights start, if any."""
    network = experiment.get("model", {}).get("network", {})
    found = network.get("init_args", {}).get("weights") if isinstance(network, Mapping) else None
    return Path(found).expanduser() if isinstance(found, str) else None


def _name(node: Mapping[str, Any], source: type[Source]) -> str:
    told = (node.get("init_args") or {}).get(source.naming_option) if source.naming_option else None
    return told if isinstance(told, str) and told else source.__name__


def _sources(tree: Any) -> Iterator[tuple[Mapping[str, Any], type[Source]]]:
    """Entry and class of the data sets in a configuration, without those that are made from another data set."""
    if isinstance(tree, list):
        for part in tree:
            yield from _sources(part)
    elif isinstance(tree, Mapping):
        found = class_of(tree)
        within = [inner for part in tree.values() for inner in _sources(part)]
        if found is not None and issubclass(found, Source) and not within:
            yield with_renamed_options(tree), found
        yield from within


def find_missing(experiment: Mapping[str, Any], root: str | None) -> dict[str, str]:
    """Try to read the data that an experiment needs, and return the missing ones: name -> first line of the error.

    Args:
        experiment: the settings that decide the results.
        root: the run's ``data.root``, which is not part of the experiment.
    """
    missing = {}
    weights = _weights(experiment)
    if weights is not None and not weights.is_file():
        missing[weights.name] = f"{weights}: no such file of trained weights"
    for node, source in _sources([experiment["data"], experiment.get("methods", {})]):
        try:
            with data_root_given(root):
                source(**(node.get("init_args") or {})).load(data_root())
        except DataFilesMissing as error:
            missing[_name(node, source)] = str(error).splitlines()[0]
        except Exception:  # the run itself has said what else is wrong
            continue
    return missing


class MissingData:
    """Remembers missing data in a file, so that a report can name them without running anything.

    Args:
        path: the JSON file, name -> error message. It need not exist.

    Raises:
        ConfigError: the file has another content.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known = self._read()

    def _read(self) -> dict[str, str]:
        if not self.path.is_file():
            return {}
        try:
            return dict(json.loads(self.path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            valid = "the names of missing data sets as JSON, or no such file: it is made anew"
            raise ConfigError("--runs", str(self.path), f"{valid} ({error})") from None

    def add(self, missing: Mapping[str, str]) -> None:
        """Add missing data: name -> error message."""
        if missing:
            self._change(lambda known: {**known, **missing})

    def remove(self, present: Iterable[str]) -> None:
        """Forget that data of these names were missing."""
        gone = set(present)
        if gone:
            self._change(lambda known: {name: text for name, text in known.items() if name not in gone})

    def _change(self, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
        """Read the file again, change its content and write it, under a lock, because other processes write it, too."""
        if not self.path.parent.exists() and not change({}):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)  # locked instead of a lock file, which would remain
        try:
            lock(folder, wait=True)
            before = self._read()
            self.known = change(dict(before))
            if self.known != before:
                write_whole(self.path, json.dumps(self.known, indent=1, sort_keys=True) + "\n")
        finally:
            os.close(folder)

    def reason(self, needs: Collection[str]) -> str | None:
        """The reason why an experiment cannot run here, e.g. ``needs SVHN``; None if nothing that it needs is missing.

        Args:
            needs: names of the data that the experiment needs (:func:`needs_of`).
        """
        names = sorted(set(needs) & set(self.known))
        return f"needs {', '.join(names)}" if names else None
