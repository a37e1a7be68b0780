"""Refuses values of methods' functions that are of another kind, shape or type than the run needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from numbers import Real
from typing import Any, Literal

import numpy as np
from torch import Tensor

from cfl.data.added_samples import check_extras, check_samples
from cfl.data.cohorts import CohortBatch
from cfl.engines.cohort import Cohort
from cfl.engines.quadratic_pull import Pull
from cfl.engines.right_factors import RightFactor
from cfl.methods.base import Method, Report
from cfl.privacy.release import Noise
from cfl.runtime.errors import ConfigError


def check_tensors(
    who: str,
    found: Any,
    wanted: Mapping[str, Tensor],
    names: Literal["same", "more", "fewer"] = "same",
    rows: int | None = None,
    same_type: bool = False,
) -> dict[str, Tensor]:
    """Return tensors by name that are to replace others.

    Args:
        who: the method and its function, for messages.
        found: what the function returned.
        wanted: name -> a tensor of the same shape.
        names: whether there may be ``more`` or ``fewer`` names than in ``wanted``.
        rows: size of the first axis of all tensors; None if only those of ``wanted`` have a shape.
        same_type: whether types must be those of ``wanted``; otherwise floats must be floats.

    Raises:
        TypeError: it is no dict of tensors, or names or types differ.
        ValueError: a tensor has another shape.
    """
    if not isinstance(found, dict):
        raise TypeError(f"{who} gives {type(found).__name__}, not a dict of tensors by name")
    if names != "fewer" and (missing := sorted(set(wanted).difference(found))):
        raise TypeError(f"{who} gives no {missing[0]}: it must return all {len(wanted)} tensors that it is given")
    if names != "more" and (unknown := sorted(set(found).difference(wanted))):
        raise TypeError(f"{who} gives {unknown[0]}, which it was not given")
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{who} gives {name} as {type(value).__name__}, not as a tensor")
        shape = list(wanted[name].shape) if name in wanted else list(value.shape)
        shape = shape if rows is None else [rows, *shape[1:]]
        if list(value.shape) != shape:
            raise ValueError(f"{who} gives {name} of shape {list(value.shape)}, not {shape}")
        kind = wanted[name].dtype if name in wanted else value.dtype
        if value.dtype != kind and (same_type or (kind.is_floating_point and not value.is_floating_point())):
            raise TypeError(f"{who} gives {name} as {value.dtype}, not as {kind}")
    return found


def check_factors(who: str, factors: Mapping[str, RightFactor], cohort: Cohort) -> None:
    """Refuse factors of other things than parameters, which some engines would leave out without an error.

    Raises:
        TypeError: naming the method, if they are no factors.
        ValueError: naming the method and the parameter.
    """
    _check_mapping(f"{who}.right_factors", factors, "names", RightFactor)
    if unknown := sorted(set(factors).difference(cohort.parameters)):
        raise ValueError(f"{who}.right_factors names {unknown[0]}, no parameter of the network")


def check_pulls(who: str, pulls: Mapping[str, Pull], cohort: Cohort) -> None:
    """Refuse pulls that do not fit the weights, with which some engines would train wrongly or fail.

    Raises:
        TypeError: naming the method, if they are no pulls, or an anchor is of another type than the weights.
        ValueError: naming the method and the parameter.
    """
    _check_mapping(f"{who}.pulls", pulls, "names", Pull)
    if unknown := sorted(set(pulls).difference(cohort.parameters, cohort.buffers)):
        raise ValueError(f"{who}.pulls names {unknown[0]}, no parameter of the network")
    for name in set(pulls).intersection(cohort.parameters):
        weight, anchor, strength = cohort.parameters[name], pulls[name].anchor, pulls[name].strength
        given, wanted = f"{who}.pulls gives {name}", list(weight.shape)
        if not isinstance(anchor, Tensor) or anchor.dtype != weight.dtype:
            kind = anchor.dtype if isinstance(anchor, Tensor) else type(anchor).__name__
            raise TypeError(f"{given} an anchor of {kind}, not a tensor of {weight.dtype} like the weights")
        if not isinstance(strength, Tensor) and not (isinstance(strength, Real) and strength >= 0):
            raise ValueError(f"{given} the strength {strength!r:.60}, not a number of at least 0 or a tensor of them")
        by_weight = [("a strength", strength)] if isinstance(strength, Tensor) and strength.ndim else []
        for what, value in (("an anchor", anchor), *by_weight):
            if list(value.shape) not in (wanted, [1, *wanted[1:]]):
                shape = f"{given} {what} of shape {list(value.shape)}"
                raise ValueError(f"{shape}; the weights of these clients have {wanted}, the first axis may be 1")


def check_step_factors(who: str, factors: Any, cohort: Cohort) -> None:
    """Refuse factors of learning rates that are neither None nor one number for every client.

    Raises:
        ValueError: naming the method.
    """
    if factors is not None and (not isinstance(factors, Tensor) or factors.shape != (len(cohort.clients),)):
        raise ValueError(f"{who}.step_factors gives {factors!r:.60}, no tensor [{len(cohort.clients)}]")


def check_frozen(who: str, names: Any, cohort: Cohort) -> None:
    """Refuse names of frozen parameters that are no parameters of the network.

    Raises:
        ValueError: naming the method.
    """
    if names is None or isinstance(names, str) or not set(names) <= set(cohort.parameters):
        raise ValueError(f"{who}.frozen_parameters gives {names!r:.60}, no names of parameters")


def check_penalty(method: Method, penalty: Any, losses: Tensor, cohort: Cohort) -> None:
    """Refuse a penalty that cannot be added to the clients' losses ``[k]``, or that trains nothing.

    Raises:
        TypeError, ValueError: it is no tensor, or has another shape; names the method.
        ConfigError: it is not 0 and has no gradient.
    """
    if not isinstance(penalty, Tensor):
        raise TypeError(f"{method.key}.penalty gives {type(penalty).__name__}, no tensor of [k] numbers")
    if penalty.shape != losses.shape:
        what = f"{method.key}: penalty of shape {list(penalty.shape)}"
        raise ValueError(f"{what}, not {list(losses.shape)}: one number for every client")
    # On an accelerator a value is read in a cohort's first step only, because that waits for the device.
    readable = penalty.device.type == "cpu" or cohort.steps == 1
    if not penalty.requires_grad and readable and bool(penalty.any()):
        valid = "0, or what is computed from cohort.parameters without detach, item or no_grad"
        raise ConfigError(method.key, f"{type(method).__name__}.penalty without gradient", valid)


def check_scores(who: str, found: Any, wanted: list[int]) -> None:
    """Refuse scores of test samples that are not finite numbers of the shape ``wanted``.

    Raises:
        TypeError: naming the method, if they are no tensor.
        ValueError: naming the method.
    """
    if not isinstance(found, Tensor):
        raise TypeError(f"{who}.classify gives {type(found).__name__}, not scores {wanted}")
    if list(found.shape) != wanted:
        raise ValueError(f"{who}.classify gives scores of shape {list(found.shape)}, not {wanted}")
    if not bool(found.isfinite().all()):  # -inf would tie with outputs that tests leave out
        raise ValueError(f"{who}.classify gives scores that are NaN or infinite")


def check_releases(who: str, found: Any) -> None:
    """Refuse releases that are no mapping of topics to Noise.

    Raises:
        TypeError: naming the method.
    """
    _check_mapping(f"{who}.releases", found, "topics", Noise)


def check_report(name: str, report: Any) -> Report:
    """Return a method's report, with single numbers of torch and NumPy converted to Python numbers.

    Args:
        name: the method, for messages.
        report: what its ``report`` returned.

    Raises:
        TypeError: it is anything but a :class:`cfl.methods.base.Report`, a figure cannot be stored, or rows differ in
            their columns; names the method.
    """
    if not isinstance(report, Report):
        raise TypeError(f"methods.{name}: report gives {type(report).__name__}, not a cfl.methods.base.Report")
    figures, rows = _plain(report.figures), [_plain(row) for row in report.rows]
    for key, value in figures.items():
        try:
            json.dumps(value)
        except TypeError:
            what = f"{type(value).__name__}, which is no plain value"
            raise TypeError(f"methods.{name}: report's figure {key} is a {what}") from None
    if other := next((row for row in rows if set(row) != set(rows[0])), None):
        difference = ", ".join(sorted(set(other) ^ set(rows[0])))
        raise TypeError(f"methods.{name}: report's rows differ in the columns {difference}")
    return Report(figures, rows)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    single = (np.generic, Tensor)
    return {
        key: value.item() if isinstance(value, single) and np.ndim(value) == 0 else value
        for key, value in values.items()
    }


def _check_mapping(who: str, found: Any, of: str, kind: type) -> None:
    if not isinstance(found, Mapping) or not all(isinstance(value, kind) for value in found.values()):
        raise TypeError(f"{who} gives no mapping of {of} to {kind.__name__}, but {found!r:.60}")


def check_added(method: Method, found: CohortBatch, given: CohortBatch) -> None:
    """Refuse samples and extras added to a step that engines would train on wrongly, or fail with.

    Args:
        method: has returned ``found`` from ``extend_batch``.
        found: the step with added samples.
        given: the step as the method was given it.

    Raises:
        TypeError, ValueError: naming the method; see :func:`cfl.data.added_samples.check_samples` and
            :func:`cfl.data.added_samples.check_extras`.
    """
    new = {name: value for name, value in found.extras.items() if value is not given.extras.get(name)}
    check_extras(f"{method.key}.extend_batch gives", new, given.mask)
    who, context = f"{method.key}.extend_batch adds samples", method.context
    for part in found.added:
        if any(part is other for other in given.added):
            continue
        if part.source != method.source:
            raise ValueError(f"{who} with source {part.source!r}, not self.source, by which losses know whose they are")
        classes = context.num_outputs if context.measure.is_cross_entropy else None
        dtype = next(context.network.parameters()).dtype
        check_samples(who, part, given.mask, context.input_shape, classes, dtype)
