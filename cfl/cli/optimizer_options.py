"""Refuses options of the clients' optimizer with which nothing would be learned. Torch accepts most of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cfl.cli.given import Given
from cfl.runtime.class_paths import named_class
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_numbers

KEY = "model.optimizer"
_INTERVALS = {
    "lr": "(0, inf)",
    "momentum": "[0, 1)",
    "dampening": "[0, 1]",
    "betas": "[0, 1)",
    "alpha": "[0, 1]",
    "rho": "[0, 1)",
    "eps": "(0, 1]",
}
"""Option -> the interval that its numbers must be in."""
_ANY = "[0, 1e10]"
"""The interval of the numbers of any other option. The largest default in torch is 10^6."""
_OFF = {
    "maximize": "clients minimise their loss",
    "differentiable": "nothing is derived from a step",
    "capturable": "engines capture steps in ways of their own, and torch has it on some devices only",
}


def kept_rate(given: Sequence[Given], defaults: Iterable[Given], path: str, lr: Any) -> str | None:
    """Return a sentence if a file set the learning rate for another optimizer than the one that is used; else None.

    Args:
        given: the options that were given, in order.
        defaults: the options of the default configuration.
        path: dotted path of the optimizer's class.
        lr: its learning rate.
    """
    every = [*defaults, *given]
    named = {one.file: _last_part(one.value) for one in every if one.key == KEY}  # within a file, in any order
    used, optimizer, whose, file = _last_part(path), "", "", None
    for one in every:
        if one.key == KEY:
            optimizer = _last_part(one.value)
        elif one.key == f"{KEY}.lr":
            whose, file = named.get(one.file, optimizer), one.file
    if file is None or whose == used:
        return None
    found = named_class(path)
    own = inspect.signature(found).parameters.get("lr") if found is not None else None
    if own is None or own.default == lr or not isinstance(lr, int | float):
        return None
    usual = f" instead of {own.default:g}" if isinstance(own.default, int | float) else ""
    return f"{KEY}.lr is {lr:g}{usual}, as {file} sets it for {whose}; set {KEY}.lr behind {KEY}={used}"


def _last_part(path: Any) -> str:
    return str(path).rpartition(".")[2]


def check_optimizer_options(options: Mapping[str, Any]) -> None:
    """Refuse a learning rate of 0, infinity, a weight decay that leaves nothing of a weight, and the like.

    Args:
        options: name -> value.

    Raises:
        ConfigError: an option is refused. The error names the first one.
    """
    for name, value in options.items():
        if name in _OFF and value:
            raise ConfigError(f"{KEY}.{name}", value, f"false: {_OFF[name]}")
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float) and not isinstance(number, bool):
                one: dict[str, Any] = {name: number}
                check_numbers(KEY, _INTERVALS.get(name, _ANY), **one)
    lr, decay = options.get("lr"), options.get("weight_decay")
    if isinstance(lr, int | float) and isinstance(decay, int | float) and lr * decay >= 1:
        valid = f"below 1 / lr, {1 / lr:g}: a step would leave nothing of a weight"
        raise ConfigError(f"{KEY}.weight_decay", decay, valid)
