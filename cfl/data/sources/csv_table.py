"""Vectors of numbers from the columns of one CSV file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cfl.data.sources.array_files import Layout
from cfl.data.sources.csv_rows import header, number, read_rows
from cfl.data.sources.features import Features
from cfl.data.sources.labels import checked_numbers
from cfl.data.sources.root import data_root
from cfl.data.sources.split import SHARES, stratified_rows
from cfl.data.sources.standard import KEY, nothing_at
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.runtime.option_checks import check_numbers

_PARTS = ("train", "test")
_WHOLE_NUMBERS = 15
"""Digits of a label up to which classes are sorted as numbers."""


class _Part(NamedTuple):
    """Training or test rows: features float64 ``[N, D]``, the others as in :class:`ImageSet`."""

    features: NDArray[np.float64]
    labels: Tensor
    clients: Tensor | None = None
    client_names: tuple[str, ...] = ()
    tasks: Tensor | None = None


class _Names(NamedTuple):
    """Names of the features' columns, of the outputs, and of the tasks."""

    columns: tuple[str, ...]
    outputs: tuple[str, ...]
    tasks: tuple[str, ...]


class _Table(NamedTuple):
    """The content of a file."""

    names: _Names
    train: _Part
    test: _Part


class CsvTable(Features):
    """Vectors of numbers from the columns of one CSV file, whose first line names the columns.

    Every column that no option names is a feature, and holds finite numbers. Networks get ``[N, 1, 1, D]``, which
    ``MLP`` takes.

    Args:
        path: of the file, relative to the data root or absolute.
        label: the column with the class, any text; with ``numbers`` the number to predict. Classes are sorted as
            numbers where all are whole numbers, else as texts.
        client: the column with the client that owns a row, any text, for the partition ``Natural`` and accuracies per
            client; null: none.
        part: the column that tells ``train`` from ``test``; null: ``test_share`` of the rows are drawn for tests.
        task: the column with the task of a row, any text, for the stream ``NaturalTasks``; null: none. Tasks are sorted
            as classes are.
        test_share: share of the rows that is held out for tests, between 0.01 and 0.99, the same of every class, and
            the same rows in every run; not used with ``part``.
        drop: columns that are left out; null: none.
        options: the others of :class:`Features`, except ``dimensions`` and ``num_classes``.

    Raises:
        ConfigError: a number that cannot work.
    """

    layout = Layout(
        "features",
        "a CSV file in UTF-8 whose first line names its columns, with a finite number in every column of features",
        np.floating,
        (2,),
    )
    size_options = ()
    _tables = ".csv files with the columns of its features, "

    def __init__(
        self,
        path: str,
        label: str,
        client: str | None = None,
        part: str | None = None,
        test_share: float = 0.2,
        drop: list[str] | None = None,
        task: str | None = None,
        **options: Any,
    ) -> None:
        check_numbers(KEY, SHARES, test_share=test_share)
        named = {"label": label, "client": client, "part": part, "task": task}
        self._columns_of = {option: column for option, column in named.items() if column is not None}
        self.drop, self.test_share = tuple(drop or ()), test_share
        columns = [*self._columns_of.values(), *self.drop]
        for option, column in [*self._columns_of.items(), *(("drop", column) for column in self.drop)]:
            if columns.count(column) > 1:
                raise ConfigError(f"{KEY}.{option}", column, "each column once, in label, client, part, task and drop")
        self._held: tuple[Path, _Table] | None = None
        self._known_names: tuple[Path, _Names] | None = None
        super().__init__(path, dimensions=None, num_classes=None, **options)

    # The interface of a source.

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set, standardised by the training set if ``standardise`` is set."""
        try:
            found = super().read(root)
            self._names_in(self._file(root))
            return found
        finally:
            self._held = None

    def facts_for_checkpoint(self, root: Path) -> dict[str, dict[str, Any]]:
        """See :meth:`Source.facts_for_checkpoint`: also the names of columns and tasks."""
        names = {"columns": list(self.columns(root)), "tasks": list(self.task_names(root))}
        return {key: {**held, **names} for key, held in super().facts_for_checkpoint(root).items()}

    def columns(self, root: Path) -> tuple[str, ...]:
        """See :meth:`Source.columns`; those of the checkpoint's run, if there is one."""
        return tuple(self._facts["columns"] if self._facts else self._names_in(self._file(root)).columns)

    def task_names(self, root: Path) -> tuple[str, ...]:
        """See :meth:`Source.task_names`; those of the checkpoint's run, if there is one."""
        if "task" not in self._columns_of:
            return ()
        return tuple(self._facts["tasks"] if self._facts else self._names_in(self._file(root)).tasks)

    @property
    def reads(self) -> str:
        """See :attr:`Source.reads`."""
        return f"{super().reads} Their columns, in order: {', '.join(self.columns(data_root()))}."

    def images_of_table(self, path: Path, root: Path) -> Tensor:
        """See :meth:`Source.images_of_table`; other columns than those of the features are left out."""
        columns = self.columns(root)
        self.moments(root)
        try:
            return self._convert(read_rows(path, numbers=columns).numbers)
        except ValueError as error:
            raise self._unusable(path, error) from error

    @property
    def _key(self) -> str:
        return f"{super()._key} {self._columns_of} drop={self.drop} test_share={self.test_share}"

    def _names_in(self, file: Path) -> _Names:
        """Names in a file; they stay cached after the rows are released."""
        if self._known_names is None or self._known_names[0] != file:
            self._known_names = file, self._table(file).names
        return self._known_names[1]

    def _stored_shape(self, file: Path) -> tuple[int, ...]:
        return self._table(file).train.features.shape

    def _stored_num_classes(self, file: Path) -> int:
        return len(self._names_in(file).outputs)

    def _stored_names(self, file: Path) -> tuple[str, ...]:
        return self._names_in(file).outputs

    def _stored_sets(self, file: Path) -> tuple[ImageSet, ImageSet]:
        _, train, test = self._table(file)
        try:
            features = [self._convert(part.features) for part in (train, test)]  # the first one gives the moments
        except ValueError as error:
            raise self._unusable(file, error) from error
        first, second = (
            ImageSet(samples, part.labels, part.clients, tasks=part.tasks, client_names=part.client_names)
            for samples, part in zip(features, (train, test), strict=True)
        )
        return first, second

    # Reading the file.

    def _table(self, file: Path) -> _Table:
        """The file's content, cached until the samples are read."""
        if self._held is None or self._held[0] != file:
            try:
                self._held = file, self._read_table(file)
            except ConfigError:
                raise
            except ValueError as error:
                raise self._unusable(file, error) from error
        return self._held[1]

    def _read_table(self, file: Path) -> _Table:
        if not os.path.isfile(file):
            raise nothing_at(file, self.path, "a file")
        columns = header(file)
        for option, column in (*self._columns_of.items(), *(("drop", column) for column in self.drop)):
            if column not in columns:
                raise ConfigError(f"{KEY}.{option}", column, f"a column of {file}: {', '.join(columns)}")
        rows = read_rows(file, texts=[*self._columns_of.values()], without=self.drop)
        texts = {option: rows.texts[column] for option, column in self._columns_of.items()}
        labels, names = _numbers(texts["label"]) if self.layout.numbers else _classes(texts["label"])
        train, test = self._split(labels, names, texts.get("part"))
        if not self.layout.numbers and (lacking := set(range(len(names))) - set(labels[train].tolist())):
            raise ValueError(f"no training row has the class {names[min(lacking)]!r}")
        tasks, task_names = _classes(texts["task"]) if "task" in texts else (None, ())
        found = []
        for rows_of in (train, test):
            index = torch.from_numpy(rows_of)
            own = None if tasks is None else tasks[index]
            clients, names_of = _clients(texts["client"], rows_of) if "client" in texts else (None, ())
            found.append(_Part(rows.numbers[rows_of], labels[index], clients, names_of, own))
        outputs = (self._columns_of["label"],) if self.layout.numbers else names
        return _Table(_Names(rows.columns, outputs, task_names), *found)

    def _split(
        self, labels: Tensor, names: Sequence[str], parts: Sequence[str] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Training and test rows, ascending."""
        if parts is None:
            if self.layout.numbers:
                return stratified_rows(self.name, np.zeros(len(labels), dtype=np.int64), self.test_share)
            remedy = f"Remove the rows of small classes, or let {KEY}.part name a column that tells train from test"
            data = f"{self.name}, column {self._columns_of['label']}"
            return stratified_rows(data, labels.numpy(), self.test_share, names, remedy)
        column = self._columns_of["part"]
        if other := sorted(set(parts) - set(_PARTS)):
            raise ValueError(f"column {column} holds {other[0]!r}; valid: train and test")
        train, test = (np.flatnonzero(np.array(parts) == part) for part in _PARTS)
        if not len(train) or not len(test):
            raise ValueError(f"column {column} holds no {'test' if len(train) else 'train'}")
        return train, test

    def _unusable(self, file: Path, reason: object) -> DataFilesMissing:
        hint = f"{KEY}.drop leaves columns out"
        return DataFilesMissing(f"{file} cannot be used: {reason}. Expected: {self.layout.about}; {hint}.")


def _classes(texts: Sequence[str]) -> tuple[Tensor, tuple[str, ...]]:
    """Labels ``[N]`` int64 from 0, and the classes' names."""
    names = sorted(set(texts))
    if all(len(name) <= _WHOLE_NUMBERS and name.removeprefix("-").isdecimal() for name in names):
        names.sort(key=int)
    return _numbered(texts, names)


def _clients(texts: Sequence[str], rows: NDArray[np.int64]) -> tuple[Tensor, tuple[str, ...]]:
    """``[n]`` int64 the client of each of the ``rows``, from 0, and the names of these clients, in their order.

    No array of texts is made, because all its entries would take as much memory as the longest one.
    """
    own = [texts[row] for row in rows.tolist()]
    return _numbered(own, sorted(set(own)))


def _numbered(texts: Sequence[str], names: Sequence[str]) -> tuple[Tensor, tuple[str, ...]]:
    places = {name: place for place, name in enumerate(names)}
    return torch.tensor([places[text] for text in texts], dtype=torch.int64), tuple(names)


def _numbers(texts: Sequence[str]) -> tuple[Tensor, tuple[str, ...]]:
    """Labels ``[N, 1]`` float32, and no names."""
    try:
        found = np.array([number(text) for text in texts], dtype=np.float64)
    except ValueError as error:
        raise ValueError(f"labels that are numbers to predict: {error}") from error
    return torch.from_numpy(checked_numbers(found, "numbers to predict")), ()
