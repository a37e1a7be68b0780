"""Names options that a file set for another class, such as the former optimizer, and that the chosen class now gets."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cfl.cli.given import Given
from cfl.runtime.class_paths import named_class, own_parameter
from cfl.runtime.errors import shown

KEYS = ("data.stream", "data.partition", "data.participation", "model.network", "model.optimizer")
"""Keys of classes whose options are looked at."""


def inherited_options(every: Sequence[Given], key: str, path: str, options: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each option that keeps the value that a file sets for another class, in place of its default.

    Options without a default are left out: something has to set them.

    Args:
        every: the options of the default configuration and those that were given, in order.
        key: the key of the class.
        path: dotted path of the class that is used.
        options: its options.
    """
    found, used = named_class(path), _last_part(path)
    kinds = () if found is None else found.__mro__  # a class may pass options on to its base class
    named = {one.file: _last_part(one.value) for one in every if one.key == key}  # within a file, in any order
    current, setters = "", dict[str, tuple[str, str | None]]()
    for one in every:
        name = one.key.removeprefix(f"{key}.")
        if one.key == key:
            current = _last_part(one.value)
        elif name != one.key and "." not in name:
            setters[name] = (named.get(one.file, current), one.file)
    for name, (whose, file) in setters.items():
        parameters = (own_parameter(kind, name) for kind in kinds)
        own = next((one.default for one in parameters if one is not None), inspect.Parameter.empty)
        if file is None or whose == used or own is inspect.Parameter.empty:
            continue
        value, own = (list(one) if isinstance(one, tuple) else one for one in (options.get(name), own))
        if value == own:
            continue
        kept = f"{key}.{name} is {shown(value)} instead of {shown(own)}"
        yield f"{kept}, as {file} sets it for {whose}; set {key}.{name} behind {key}={used}"


def _last_part(path: Any) -> str:
    return str(path).rpartition(".")[2]
