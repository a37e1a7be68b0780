"""Names of methods as papers print them, in tables, pictures and pages."""

from __future__ import annotations

from collections.abc import Mapping

from cfl.runtime.class_paths import short_path

PRINTED = {
    "": "FedAvg",
    "FOT": "FOT",
    "FedProx": "FedProx",
    "EWC": "EWC",
    "ER": "ER",
    "GPM": "GPM",
    "FedAGEM": "Fed-A-GEM",
    "GLFC": "GLFC",
    "FedWeIT": "FedWeIT",
    "APD": "APD",
    "SCAFFOLD": "SCAFFOLD",
    "FedCurv": "FedCurv",
    "FedCIL": "FedCIL",
    "AGEM": "A-GEM",
    "DER": "DER",
    "ICaRL": "iCaRL",
    "CFeD": "CFeD",
    "RGO": "RGO",
    "L2P": "L2P",
    "CONFEDMADE": "CONFEDMADE",
    "PersonalLayers": "Local",
    "SingleTask": "Single task",
    "LearningRateDecay": "LR decay",
    "GradientCompensation": "Gradient compensation",
    "DPFedAvg": "DP-FedAvg",
    "AnalyticHead": "Analytic head",
    "InferringFOT": "Inferring FOT",
    "FoundBoundaries": "Found boundaries",
    "MaskedWeights": "Masked weights",
}
"""Class of a method, empty for federated averaging -> its printed name.

The place of a method also decides how it is drawn (:mod:`cfl.reporting.line_styles`). Add new methods at the end.
"""


def plain(name: str) -> str:
    """Return a name in lower case, letters and digits only: ``fed_agem`` and ``Fed-A-GEM`` become ``fedagem``."""
    return "".join(character for character in name.lower() if character.isalnum())


_KNOWN = {plain(name): name for name in PRINTED.values()}


def is_known(name: str) -> bool:
    """Whether a name is that of a method of the project, in any spelling."""
    return plain(name) in _KNOWN


def printed(method: str, classes: Mapping[str, str]) -> str:
    """A run's method or methods as they are printed: ``fot+fed_agem`` is ``FOT+Fed-A-GEM``.

    A method to which the configuration gives a name of its own, such as ``fot_tight``, is printed with that name. A
    user's class under a name that a method of the project has is printed with its path.

    Args:
        method: names from the configuration, joined by ``+``; ``fedavg`` without methods.
        classes: name -> the method's class as :func:`cfl.runtime.class_paths.short_path` shows it, as far as known.
    """
    return "+".join(_printed(name, classes.get(name)) for name in method.split("+"))


def printed_methods(methods: Mapping[str, object]) -> str:
    """Return :func:`printed` for method objects, given by their names in the configuration."""
    kinds = {name: type(method) for name, method in methods.items()}
    classes = {name: short_path(f"{kind.__module__}.{kind.__qualname__}") for name, kind in kinds.items()}
    return printed("+".join(methods) or "fedavg", classes)


def _printed(name: str, of_class: str | None) -> str:
    if of_class is None:
        return _KNOWN.get(plain(name), name)
    if "." in of_class:  # a user's
        kind = of_class.rpartition(".")[2]
        own = kind if plain(name) == plain(kind) else name
        return of_class if is_known(own) else own
    if of_class == "GradientCompensation" and plain(name) == "glfc":  # FOT's tables call it so
        return PRINTED["GLFC"]
    shown = PRINTED.get(of_class, of_class)
    return shown if plain(name) in (plain(of_class), plain(shown)) else name
