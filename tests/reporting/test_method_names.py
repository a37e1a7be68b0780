"""Names of methods as papers print them."""

from __future__ import annotations

import pytest

import cfl.methods
from cfl.reporting.method_names import PRINTED, plain, printed, printed_methods

CHOSEN = {"PersonalLayers", "LearningRateDecay"}
"""Classes that are printed under another name than their own."""


def test_every_method_is_printed_by_its_own_name() -> None:
    classes = {name for name in cfl.methods.__all__ if name != "Method"}
    assert {name for name in PRINTED if name} == classes, "add a new method at the end of PRINTED"
    assert {name for name in classes if plain(PRINTED[name]) != plain(name)} == CHOSEN
    assert next(iter(PRINTED)) == ""


@pytest.mark.parametrize(
    ("method", "classes", "text"),
    [
        ("fedavg", {}, "FedAvg"),
        ("fot", {"fot": "FOT"}, "FOT"),
        ("fot+fed_agem", {"fot": "FOT", "fed_agem": "FedAGEM"}, "FOT+Fed-A-GEM"),
        ("fed-agem", {}, "Fed-A-GEM"),  # without classes, as of a run whose configuration could not be read
        ("glfc", {"glfc": "GradientCompensation"}, "GLFC"),
        ("glfc", {"glfc": "GLFC"}, "GLFC"),
        ("gradient_compensation", {"gradient_compensation": "GradientCompensation"}, "Gradient compensation"),
        ("local", {"local": "PersonalLayers"}, "Local"),
        ("fot_tight", {"fot_tight": "FOT"}, "fot_tight"),  # the user's own name
        ("er", {"er": "Mine"}, "er"),  # the class is not ER
        ("my_mas", {"my_mas": "MyMAS"}, "MyMAS"),
        ("my_mas", {"my_mas": "lab.mas.MyMAS"}, "MyMAS"),
        ("er", {"er": "lab.bad.ER"}, "lab.bad.ER"),  # a class of the user's with a name of the package
        ("agem", {"agem": "lab.bad.AGEM"}, "lab.bad.AGEM"),
        ("er+mine", {"er": "ER", "mine": "lab.bad.ER"}, "ER+mine"),
        ("er", {"er": "lab.bad.Mine"}, "lab.bad.Mine"),  # a name of the package for a class of the user's
        ("x", {}, "x"),
    ],
)
def test_names_as_papers_print_them(method: str, classes: dict[str, str], text: str) -> None:
    assert printed(method, classes) == text


def test_a_running_method_of_the_users_is_not_called_as_one_of_the_package() -> None:
    own = type("ER", (cfl.methods.Method,), {"__module__": "lab.bad"})
    assert printed_methods({"er": own()}) == "lab.bad.ER"
    assert printed_methods({"mine": own(), "er": cfl.methods.ER()}) == "mine+ER"
    assert printed_methods({}) == "FedAvg"
