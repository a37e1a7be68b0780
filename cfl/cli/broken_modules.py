"""Reports errors of a user's modules that a configuration names and that fail while they are imported."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jsonargparse._util import import_object

from cfl.cli.given import Given
from cfl.cli.reasons import causes, debugging
from cfl.runtime.errors import ConfigError


@contextmanager
def naming_broken_modules(given: Callable[[], Sequence[Given]]) -> Iterator[None]:
    """Within the context, an error in a module that the parser imports names the class's key, and file and line.

    The parser itself raises some of these errors unchanged, and reports others as a wrong option.

    Args:
        given: returns all options that were given to the parser.

    Raises:
        ConfigError: a named class's module, or one that it imports, raises an error.
    """
    try:
        yield
    except Exception as error:
        found = next(filter(None, map(_broken, causes(error))), None)
        if found is None or debugging():
            raise
        path, what = found
        said = next((one for one in given() if one.value == path), Given("class_path", path))
        raise ConfigError(said.key, path, f"a class of a module that can be imported; {what}") from error


def _broken(error: BaseException) -> tuple[str, str] | None:
    """The class whose module raised an error, and the error's text and place; None for any other error."""
    frames = list(traceback.walk_tb(error.__traceback__))
    codes = [frame.f_code for frame, _ in frames]
    if import_object.__code__ not in codes:
        return None
    importing = codes.index(import_object.__code__)
    path = frames[importing][0].f_locals["name"]
    if isinstance(error, SyntaxError):  # its own text names file and line
        return path, f"{type(error).__name__}: {error}"
    modules = [(frame, line) for frame, line in frames[importing:] if frame.f_code.co_name == "<module>"]
    if not modules:
        return None
    frame, line = modules[-1]
    return path, f"{type(error).__name__}: {error} ({Path(frame.f_code.co_filename).name}, line {line})"
