"""Refuses options of the clients' optimizer with which nothing would be learned. Torch accepts most of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
