"""Every measure has all that runs, tables and pages need, and figures of transfer have one sign for all measures."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from cfl.data.scenarios import Scenario
from cfl.metrics.measure import ACCURACY, MEASURES, NLL, Measure, measure_named, measure_of, measures_for
from cfl.metrics.transfer import average_accuracy, backward_transfer, forgetting, forward_transfer, transfers
from cfl.reporting.measures import CURVES, FIGURES, RUN_MATRICES
from cfl.runtime.errors import ConfigError

each = pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.name)


def test_every_scenario_has_one_measure() -> None:
    assert sorted(scenario for measure in MEASURES for scenario in measure.scenarios) == sorted(get_args(Scenario))
    for scenario in get_args(Scenario):
        assert scenario in measure_of(scenario).scenarios


def test_names_tell_measures_apart() -> None:
    for names in ([m.name for m in MEASURES], [m.figure for m in MEASURES], [f.key for f in FIGURES]):
        assert len({*names}) == len(names)
    assert [measure_named(measure.name) for measure in MEASURES] == list(MEASURES)
    assert MEASURES[0] is ACCURACY  # tables have it first
    assert {"accuracy": "acc", "nll": "nll"}.items() <= CURVES.items()
    assert [m.key for m in RUN_MATRICES][:2] == ["accuracy", "accuracy_task_il"]
    assert "fgt_max" not in {figure.key for figure in FIGURES if figure.printed}


@each
def test_a_measure_is_whole(measure: Measure) -> None:
    """A measure's figures have columns, its mean is the first and has a formula, and its new matrix is empty."""
    columns = {figure.key for figure in measure.columns}
    assert measure.figure == measure.of_papers[0]
    assert {measure.figure, *measure.of_papers} <= columns
    assert measure.figure in measure.formulas
    mean = next(figure for figure in measure.columns if figure.key == measure.figure)
    assert mean.better == measure.better == ("lower" if measure.lower_is_better else "higher")
    assert measure.unit in measure.label
    matrix = measure.matrix(3, 2, 4)
    assert matrix.higher_is_better is not measure.lower_is_better
    assert list(matrix.compute().shape) == [2, 3, 3]
    assert bool(matrix.compute().isnan().all())
    assert {key: value for key, value in matrix.summary().items() if value} == {}
    assert {*measure.formulas} <= {*matrix.summary()}
    assert measure in measures_for(measure.predicts)


@pytest.mark.parametrize("seed", range(3))
def test_transfer_of_lower_values_has_the_sign_of_accuracies(seed: int) -> None:
    """Errors that are 100 minus accuracies have the same FGT, BWT and FWT as the accuracies."""
    generator = torch.Generator().manual_seed(seed)
    a = 100 * torch.rand(4, 4, generator=generator, dtype=torch.float64)
    b = 100 * torch.rand(4, generator=generator, dtype=torch.float64)
    for after in range(4):
        found = transfers(100 - a, 100 - b, lower_is_better=True, after=after)
        expected = {
            "fgt": forgetting(a, after),
            "bwt": backward_transfer(a, after),
            "fwt": forward_transfer(a, b, after),
        }
        same = transfers(a, b, lower_is_better=False, after=after)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-9, equal_nan=True)
            torch.testing.assert_close(same[key], value, rtol=0, atol=0, equal_nan=True)
        assert average_accuracy(100 - a, after) == pytest.approx(100 - float(average_accuracy(a, after)))


def test_a_head_is_asked_for_where_outputs_are_a_vector() -> None:
    network = nn.Module()
    network.num_outputs, network.head = 3, nn.Linear(2, 3)  # type: ignore[assignment]
    ACCURACY.check_head(network)
    network.head = nn.Linear(2, 4)
    with pytest.raises(ConfigError, match=r"self\.head = nn\.Linear\(\.\.\., 3\)"):
        ACCURACY.check_head(network)
    NLL.check_head(nn.Module())
