"""Chooses the form of the messages in which FOT's clients describe their layer inputs to the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from cfl.methods.components.gaussian_mechanism import GaussianMechanism
from cfl.methods.components.layer_inputs.covariance_message import CovarianceMessage
from cfl.methods.components.layer_inputs.gpse_message import GpseMessage
from cfl.methods.components.layer_inputs.sketch_message import ResidualShare, SketchMessage
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices


def choose_message(
    key: str,
    message: Literal["sketch", "covariance"],
    sketch_size: float | Mapping[str, float] | None,
    sketch_sharing: int,
    residual_share: ResidualShare,
    mechanism: GaussianMechanism | None,
) -> GpseMessage:
    """The chosen form of message: sketches, or second moments, for which the options of sketches are refused.

    Args:
        key: of the method's options, for errors.
        message: name of the form.
        sketch_size: see :class:`SketchMessage`, also for the other options.

    Raises:
        ConfigError: for an option with a value that cannot work.
    """
    check_choices(key, ("sketch", "covariance"), message=message)
    if message == "sketch":
        return SketchMessage(key, sketch_size, sketch_sharing, residual_share, mechanism)
    for option, value, without in (
        ("sketch_size", sketch_size, None),
        ("sketch_sharing", sketch_sharing, 1),
        ("residual_share", residual_share, "energy"),
    ):
        if value != without:
            valid = f"{without} with message=covariance, where there are no sketches"
            raise ConfigError(f"{key}.{option}", value, valid)
    return CovarianceMessage(mechanism)
