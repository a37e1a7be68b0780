"""Frames recorded while driving, with boxes in one table."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from cfl.data.sources.boxes import DetectionSource, Record, below, corners_of
from cfl.data.sources.files import where_else
from cfl.data.sources.standard import KEY
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.runtime.option_checks import check_integers, check_numbers

_COLUMNS = ("frame", "town", "number", "class", "xmin", "ymin", "xmax", "ymax")


class RecordedFrames(DetectionSource):
    """Consecutive frames of drives through towns.

    The folder holds ``frames/<frame>.jpg`` and ``boxes.csv`` with the columns ``frame``, ``town``, ``number`` (which
    orders a town's frames in time), ``class`` (empty where a frame has no box), ``xmin``, ``ymin``, ``xmax``, ``ymax``
    in pixels; other columns are not read. Of each town's frames in their order, every ``test_every``-th block of
    ``block`` frames is the test set, so that tests are not the neighbours of training frames.

    A frame lasts until the next frame of its town, but at most as long as the town's median frame, because a gap in the
    recording is no driving time. A stream in time (``data.exposure: streaming``) can therefore go by seconds, even if
    towns were recorded at different intervals.

    Args:
        path: of the folder, relative to the data root or absolute.
        towns: names of the towns to read; null: all.
        shape: ``[C, H, W]`` of the network's input.
        classes: names of the classes to find, in the order of their labels.
        most_boxes: most boxes of an image, at least 1; if an image has more, the largest are kept.
        block: frames of a block, at least 1.
        test_every: one of this many blocks is for tests, at least 2.
        rate: by how much ``number`` grows in a second, positive.
        drivers: clients that own the training frames, for ``data.partition: Natural``. Every town is cut into as many
            stretches of equal time as there are entries, and the k-th entry is the number of the client that drives the
            k-th stretch. null: frames have no owners.
        options: the others of :class:`DetectionSource`.

    Raises:
        ConfigError: an option that cannot work.
    """

    def __init__(
        self,
        path: str,
        shape: list[int],
        classes: list[str],
        towns: list[str] | None = None,
        most_boxes: int = 32,
        block: int = 10,
        test_every: int = 5,
        rate: float = 20.0,
        drivers: list[int] | None = None,
        **options: Any,
    ) -> None:
        check_integers(KEY, 1, block=block)
        check_integers(KEY, 2, test_every=test_every)
        if towns is not None and (not towns or len({*towns}) < len(towns)):
            raise ConfigError(f"{KEY}.towns", towns, "at least one, each once, or null for all")
        check_numbers(KEY, "(0, inf)", rate=rate)
        if drivers is not None and (not drivers or min(drivers) < 0):
            raise ConfigError(f"{KEY}.drivers", drivers, "numbers of clients, from 0, or null")
        self.path, self.towns, self.block, self.test_every = path, towns, block, test_every
        self.rate, self.drivers = rate, drivers
        self.name = "-".join([Path(path).name, *(towns or [])]).lower()
        super().__init__(shape, classes, most_boxes, **options)

    def records(self, root: Path) -> tuple[list[Record], list[Record]]:
        """See :meth:`DetectionSource.records`."""
        folder = root / Path(self.path).expanduser()
        frames = _read(folder / "boxes.csv", folder / "frames", self.path)
        if self.towns is not None and (absent := sorted({*self.towns} - {*frames})):
            raise ConfigError(f"{KEY}.towns", absent[0], f"some of {', '.join(sorted(frames))}")
        train: list[Record] = []
        test: list[Record] = []
        for town in self.towns or sorted(frames):
            numbers = sorted(frames[town])
            seconds = [lasting / self.rate for lasting in _lasting(numbers)]
            began, whole = 0.0, sum(seconds)
            for place, number in enumerate(numbers):
                record = frames[town][number]._replace(seconds=seconds[place])
                held_out = place // self.block % self.test_every == self.test_every - 1
                if self.drivers is not None and not held_out:
                    stretch = int(began / whole * len(self.drivers) + 1e-9)
                    record = record._replace(client=self.drivers[stretch])
                (test if held_out else train).append(record)
                began += seconds[place]
        return train, test


def _lasting(numbers: Sequence[int]) -> list[float]:
    """How long each of a town's frames lasts, from their ascending numbers: at most as long as the median."""
    gaps = [later - earlier for earlier, later in pairwise(numbers)]
    usual = median(gaps) if gaps else 1.0
    return [*(min(gap, usual) for gap in gaps), usual]


def _read(table: Path, images: Path, path: str) -> dict[str, dict[int, Record]]:
    """Town -> number of the frame -> its record."""
    found: dict[str, dict[int, Record]] = {}
    try:
        with table.open(newline="", encoding="utf-8") as file:
            lines = csv.DictReader(file)
            if lacking := [name for name in _COLUMNS if name not in (lines.fieldnames or ())]:
                raise DataFilesMissing(f"{table} cannot be used: it lacks the columns {', '.join(lacking)}")
            for row in lines:
                where = f"{table}, line {lines.line_num}"
                if any(row[name] is None for name in _COLUMNS) or not row["number"].isdecimal():
                    raise DataFilesMissing(f"{where}: a frame needs a number from 0 and all columns")
                frame = below(images, f"{row['frame']}.jpg", where)
                of_town = found.setdefault(row["town"], {})
                record = of_town.setdefault(int(row["number"]), Record(frame, []))
                if record.file != frame:
                    raise DataFilesMissing(f"{where}: {frame.name} has the number of {record.file.name}")
                if row["class"]:
                    corners = corners_of([row[name] for name in _COLUMNS[4:]], where)
                    record.boxes.append((row["class"], *corners))
    except DataFilesMissing:  # an OSError, too, but about the table's content
        raise
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataFilesMissing(f"{table} cannot be read ({error}). {where_else(path)}") from error
    return found
