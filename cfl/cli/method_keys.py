"""Lets errors about methods' options name methods as the user has named them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from cfl.cli.reasons import reason_for_user
from cfl.reporting.method_names import plain
from cfl.runtime.errors import ConfigError


def typed_key(key: str, methods: Mapping[str, str]) -> str:
    """The key of an error as it is in the configuration.

    A method that is being built does not know its name. Its errors name its class instead, as in
    ``methods.fed_agem.samples``.

    Args:
        key: the key in an error.
        methods: name -> class of the configured methods, with or without its module.
    """
    section, _, rest = key.partition(".")
    own, dot, option = rest.partition(".")
    if section != "methods" or own in methods:
        return key
    same = [name for name, of in methods.items() if plain(of.rpartition(".")[2]) == plain(own)]
    return f"methods.{same[0]}{dot}{option}" if len(same) == 1 else key


@contextmanager
def keys_as_typed(methods: Mapping[str, str]) -> Iterator[None]:
    """Within the context, errors about methods' options name them as the configuration does; see :func:`typed_key`."""
    try:
        yield
    except Exception as error:
        reason = reason_for_user(error)
        if isinstance(reason, ConfigError) and (key := typed_key(reason.key, methods)) != reason.key:
            raise ConfigError(key, reason.value, reason.valid) from error
        raise
