"""Damaged files of every kind that the program reads."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from support import tiny_cli

from attack import children
from attack.damage import WAYS, damaged
from attack.outcomes import Outcome, failure, refusal
from attack.readers import READERS, RUN, Reader
from cfl.federation.row_store import FileRows


class Prepared:
    """Files of readers, and the results of their commands without damage, each made when it is first needed.

    Args:
        folder: where they are made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results: dict[str, Any] = {}

    def files(self, reader: Reader) -> Path:
        """The folder with a reader's files."""
        folder = self._folder / f"files-{getattr(reader.make, '__name__', '').strip('_<>')}"
        if not folder.exists():
            folder.mkdir(parents=True)
            reader.make(folder)
        return folder

    def result(self, name: str) -> Any:
        """Return the result of a reader's command without damage, and the run's digests of data."""
        if name not in self._results:
            reader, folder = READERS[name], self._folder / name.replace(" ", "-")
            shutil.copytree(self.files(reader), folder)
            ended = run(reader, folder, self.files(reader))
            if ended.status != 0:
                raise RuntimeError(f"{name}: what nobody has damaged is refused: {ended.said[-2000:]}")
            self._results[name] = reader.result(folder, ended), digests(folder)
        return self._results[name]


def run(reader: Reader, folder: Path, files: Path, spoil: children.Preparation | None = None) -> children.Ended:
    """Run a reader's command in a folder.

    Args:
        reader: the reader.
        folder: a copy of the folder with the reader's files.
        files: the folder that was copied.
        spoil: a further change of the process.
    """

    def prepare(stack: ExitStack) -> None:
        if reader.prepare is not None:
            reader.prepare(files)(stack)
        if spoil is not None:
            spoil(stack)

    program = {} if reader.program is None else {"program": reader.program}
    return children.run(reader.command, prepare, folder=folder, **program)


def digests(folder: Path) -> Any:
    """Digests of data in a run's summary; None without a run."""
    summary = folder / RUN / "summary.json"
    return json.loads(summary.read_text()).get("data_digests") if summary.is_file() else None


def _spoilt_rows(way: str, draw: random.Random) -> children.Preparation:
    """Return a preparation that damages the file of clients' rows before its first, second or third read."""
    left = [draw.randint(1, 3)]
    read = FileRows.read

    def spoilt(rows: FileRows, *arguments: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            file = rows._file.fileno()
            content = damaged(os.pread(file, os.fstat(file).st_size, 0), way, draw)
            os.ftruncate(file, len(content))
            os.pwrite(file, content, 0)
        return read(rows, *arguments)

    return lambda stack: stack.enter_context(mock.patch.object(FileRows, "read", spoilt))


def cases(count: int, seed: int, folder: Path) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    """Names of cases, each with the function that runs it; kinds of files and ways of damage take turns.

    Args:
        count: number of cases.
        seed: seed of the choice of places.
        folder: where files are copied to.
    """
    readers, ways, prepared = list(READERS), list(WAYS), Prepared(folder / "whole-files")
    random.Random(f"readers {seed}").shuffle(readers)
    for number in range(count):
        reader = readers[number % len(readers)]
        way = ways[(number + number // len(readers)) % len(ways)]
        name = f"corruptions/{number}-{reader.replace(' ', '-')}-{way}"
        yield name, partial(_run, name, reader, way, random.Random(f"damage {number} {seed}"), prepared, folder / name)


def _run(name: str, of: str, way: str, draw: random.Random, prepared: Prepared, folder: Path) -> Outcome:
    reader = READERS[of]
    files = prepared.files(reader)
    shutil.copytree(files, folder)
    spoil = None
    if reader.while_running:
        spoil = _spoilt_rows(way, draw)
    else:
        path = folder / reader.file
        path.write_bytes(damaged(path.read_bytes(), way, draw))
    whole, data = prepared.result(of)
    ended = run(reader, folder, files, spoil)
    told = f"{reader.file or of} damaged ({way}), then: cfl {shlex.join(reader.command)}"
    outcome = Outcome(name, *_judged(reader, folder, ended, whole, data), told)
    if outcome.verdict in ("refused", "harmless", "recorded"):
        shutil.rmtree(folder)
    return outcome


def _judged(reader: Reader, folder: Path, ended: children.Ended, whole: Any, data: Any) -> tuple[str, str]:
    file = Path(reader.file).name
    if found := failure(ended):
        return found
    names = [file, *reader.names] if file else list(reader.names)
    if ended.status != 0:
        return refusal(ended, names)
    try:
        tiny_cli.assert_same(reader.result(folder, ended), whole)
    except (AssertionError, OSError, ValueError, KeyError) as error:
        if any(name in ended.said for name in names):
            return "refused", ended.said.strip()[:500]
        if digests(folder) != data:
            return "recorded", ""
        return "used", f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}".strip()[:300]
    return "harmless", ""
