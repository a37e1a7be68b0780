"""Boxes in the format of COCO, to which BDD100K and SODA10M can be converted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cfl.data.sources.boxes import DetectionSource, Record, below, corners_of, entry
from cfl.data.sources.files import where_else
from cfl.runtime.errors import DataFilesMissing


class CocoBoxes(DetectionSource):
    """Images with boxes, which two JSON files in COCO's format describe.

    Each file holds ``images`` (``id``, ``file_name``), ``categories`` (``id``, ``name``) and ``annotations``
    (``image_id``, ``category_id``, ``bbox``: left, top, width and height in pixels). Crowds (``iscrowd`` 1) are left
    out. Images are in the order of the file.

    Args:
        path: folder of the data set, relative to the data root or absolute.
        train: JSON file of the training images, within ``path``.
        test: JSON file of the test images, within ``path``.
        train_images: folder of the training images, within ``path``.
        test_images: folder of the test images, within ``path``; null: as ``train_images``.
        shape: ``[C, H, W]`` of the network's input.
        classes: names of the categories to find, in the order of their labels.
        options: the others of :class:`DetectionSource`.

    Raises:
        ConfigError: an option that cannot work.
    """

    def __init__(
        self,
        path: str,
        train: str,
        test: str,
        train_images: str,
        shape: list[int],
        classes: list[str],
        test_images: str | None = None,
        **options: Any,
    ) -> None:
        self.path, self.train, self.test = path, train, test
        self.train_images, self.test_images = train_images, train_images if test_images is None else test_images
        self.name = Path(path).name.lower() or "coco"
        super().__init__(shape, classes, **options)

    def records(self, root: Path) -> tuple[list[Record], list[Record]]:
        """See :meth:`DetectionSource.records`."""
        folder = root / Path(self.path).expanduser()
        return (
            self._part(folder / self.train, folder / self.train_images),
            self._part(folder / self.test, folder / self.test_images),
        )

    def _part(self, file: Path, images: Path) -> list[Record]:
        try:
            held: Any = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise DataFilesMissing(f"{file} cannot be read ({error}). {where_else(self.path)}") from error
        named: dict[Any, str] = {}
        for category in _listed(held, "categories", file):
            named[_new(category, named, "category", file)] = str(entry(category, "name", str(file)))
        found: dict[Any, Record] = {}
        for image in _listed(held, "images", file):
            name = entry(image, "file_name", str(file))
            found[_new(image, found, "image", file)] = Record(below(images, name, str(file)), [])
        for number, annotation in enumerate(_listed(held, "annotations", file)):
            where = f"{file}, annotation {number}"
            image, category = _id(annotation, "image_id", file), _id(annotation, "category_id", file)
            if image not in found or category not in named:
                raise DataFilesMissing(f"{where}: there is no image {image!r:.40} with category {category!r:.40}")
            if annotation.get("iscrowd"):
                continue
            corners = corners_of(entry(annotation, "bbox", where), where, sized=True)
            found[image].boxes.append((named[category], *corners))
        return list(found.values())


def _listed(held: Any, key: str, file: Path) -> list[Any]:
    found = entry(held, key, str(file))
    if not isinstance(found, list):
        raise DataFilesMissing(f"{file}: {key} is a {type(found).__name__}, not a list")
    return found


def _new(of: Any, known: Mapping[Any, Any], what: str, file: Path) -> Any:
    """The id of an image or category, which no other one of the file has."""
    found = _id(of, "id", file)
    if found in known:
        raise DataFilesMissing(f"{file}: there are two of {what} {found!r:.40}")
    return found


def _id(of: Any, key: str, file: Path) -> Any:
    found = entry(of, key, str(file))
    if not isinstance(found, int | str):
        raise DataFilesMissing(f"{file}: {key} is {found!r:.40}, not a number or a text")
    return found
