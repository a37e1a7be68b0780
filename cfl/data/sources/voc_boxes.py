"""Boxes in the format of Pascal VOC."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from cfl.data.sources.boxes import DetectionSource, Record, below, corners_of
from cfl.data.sources.files import where_else
from cfl.runtime.errors import DataFilesMissing


class VocBoxes(DetectionSource):
    """Images in the folders of Pascal VOC, with an XML file of boxes for each image.

    The folder holds ``JPEGImages``, ``Annotations/<name>.xml`` and ``ImageSets/Main/<set>.txt`` with a name in every
    line. An annotation names its image (``filename``) and has an ``object`` with ``name`` and ``bndbox`` for every box.
    The ``xmin``, ``ymin``, ``xmax`` and ``ymax`` of a box are its first and last pixels, which count from 1.

    Args:
        path: of the folder, relative to the data root or absolute.
        shape: ``[C, H, W]`` of the network's input.
        classes: names of the classes to find, in the order of their labels.
        train: name of the set of training images.
        test: name of the set of test images.
        options: the others of :class:`DetectionSource`.

    Raises:
        ConfigError: an option that cannot work.
    """

    def __init__(
        self,
        path: str,
        shape: list[int],
        classes: list[str],
        train: str = "train",
        test: str = "val",
        **options: Any,
    ) -> None:
        self.path, self.train, self.test = path, train, test
        self.name = Path(path).name.lower() or "voc"
        super().__init__(shape, classes, **options)

    def records(self, root: Path) -> tuple[list[Record], list[Record]]:
        """See :meth:`DetectionSource.records`."""
        folder = root / Path(self.path).expanduser()
        return self._set(folder, self.train), self._set(folder, self.test)

    def _set(self, folder: Path, name: str) -> list[Record]:
        lines = self._text(folder / "ImageSets" / "Main" / f"{name}.txt").split("\n")
        return [self._record(folder, line.split()[0]) for line in lines if line.strip()]

    def _record(self, folder: Path, name: str) -> Record:
        file = below(folder / "Annotations", f"{name}.xml", str(folder / "ImageSets"))
        text = self._text(file)
        if "<!DOCTYPE" in text or "<!ENTITY" in text:
            raise DataFilesMissing(f"{file}: it declares entities, which no annotation needs")
        try:
            tree = ElementTree.fromstring(text)
        except ElementTree.ParseError as error:
            raise DataFilesMissing(f"{file} is no XML: {error}") from error
        record = Record(below(folder / "JPEGImages", tree.findtext("filename"), str(file)), [])
        for number, found in enumerate(tree.findall("object")):
            corners = [found.findtext(f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")]
            left, top, right, bottom = corners_of(corners, f"{file}, object {number}")
            record.boxes.append((found.findtext("name") or "", left - 1, top - 1, right, bottom))
        return record

    def _text(self, file: Path) -> str:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataFilesMissing(f"{file} cannot be read ({error}). {where_else(self.path)}") from error
