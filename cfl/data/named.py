"""Names of data sets, streams, partitions and participation rules in reports."""

from __future__ import annotations


class Named:
    """A base class whose subclasses have their class's name, in lower case, as ``name`` if they give none."""

    name: str

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Named not in cls.__bases__ and not hasattr(cls, "name"):
            cls.name = cls.__name__.lower()
