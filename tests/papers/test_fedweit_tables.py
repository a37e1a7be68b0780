"""FedWeIT's tables and figures: configurations of their runs, equal work where runs are compared, and the heatmap."""

from __future__ import annotations

import copy
import csv
import io
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from support.paper_tables import resolver, tables_of
from support.tiny import fit, mlp, split, tiny_client, tiny_data

from cfl.data.sequences import FixedTasks
from cfl.methods import FedWeIT
from cfl.models import ResNet18
from cfl.papers.definition import Table
from cfl.reporting.figures import attention_heatmap

PICTURES = [
    "figure5a",
    "figure5b",
    "figure6-left",
    "figure6-middle",
    "figure6-right",
    "figure7",
    "figure8",
    "figure9",
    "figure10",
]


def table(name: str) -> Table:
    return tables_of("fedweit")[name]


def config(name: str, point: Mapping[str, str]) -> dict[str, Any]:
    return copy.deepcopy(resolver().config(table(name).recipe(point).arguments))


def configs(name: str, scale: str = "paper") -> list[tuple[dict[str, str], dict[str, Any]]]:
    return [(point, config(name, point)) for point in table(name).points(scale)]


def weit(of: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = of["methods"]["fedweit"]["init_args"]
    return options


def test_pictures_have_no_numbers_and_table_7_those_of_the_paper() -> None:
    assert not any(table(name).published for name in PICTURES)
    found = {(p.place["mode"], p.figure): (p.mean, p.std) for p in table("table7").published}
    assert found == {("synchronous", "accuracy"): (84.11, 0.27), ("asynchronous", "accuracy"): (84.40, 0.41)}


@pytest.mark.parametrize("name", ["table2", "table2-present"])
def test_table_2_has_the_whole_resnet_18(name: str) -> None:
    """Table 2's network has as many weights as torchvision's ResNet-18, with a stem of 3 x 3 instead of 7 x 7 pixels.

    The published sizes are between five clients' networks and the same with dense A of ten tasks in addition.
    """
    (network,) = {str(of["model"]["network"]): of["model"]["network"] for _, of in configs(name)}.values()
    assert network["class_path"] == "cfl.models.ResNet18"
    body = {n: p.numel() for n, p in ResNet18((3, 32, 32), 50, **network["init_args"]).named_parameters()}
    weights = sum(count for n, count in body.items() if not n.startswith("head."))
    assert weights == 11_176_512 - 3 * 64 * (7 * 7 - 3 * 3)
    gigabytes = 5 * 4 * weights / 1e9
    sizes = [one.mean for one in table("table2").published if one.figure == "size"]
    assert all(gigabytes < size < 11 * gigabytes for size in sizes)


def test_what_can_be_had_of_noniid_50_is_tried_in_the_same_way() -> None:
    for number in (1, 2, 6, 7):
        there, here = table(f"table{number}"), table(f"table{number}-present")
        assert not here.published
        for point in here.points("paper"):
            assert point["benchmark"] == "noniid-present"
            of, alike = here.recipe(point), there.recipe({**point, "benchmark": "noniid"})
            named = [a.replace("fedweit-noniid-present", "fedweit-noniid") for a in of.arguments]
            assert named == list(alike.arguments) != list(of.arguments)


@pytest.mark.parametrize("name", ["table7", "table7-present", "figure10"])
@pytest.mark.parametrize("scale", ["paper", "short", "smoke"])
def test_asynchronous_training_differs_by_the_clients_clocks(name: str, scale: str) -> None:
    for point in table(name).points(scale):
        alike = {"benchmark": point["benchmark"], "method": "fedweit", "scale": scale}
        of, synchronous = config(name, point), copy.deepcopy(resolver().config(table("table1").recipe(alike).arguments))
        assert of["schedule"].pop("clock_spread") == (0.5 if point["mode"] == "asynchronous" else 0.0)
        assert synchronous["schedule"].pop("clock_spread") == 0.0
        assert of == synchronous


def test_the_short_scale_has_the_first_tasks_with_all_of_their_rounds() -> None:
    for point in table("table1").points("short"):
        of, whole = config("table1", point), config("table1", {**point, "scale": "paper"})
        sequences, all_of_them = of["data"].pop("sequences"), whole["data"].pop("sequences")
        assert sequences["init_args"].pop("count") == 4
        del all_of_them["init_args"]["count"]
        assert sequences == all_of_them
        if point["benchmark"] == "noniid":  # some of its data sets have twelve times the images of others
            assert of["data"]["stream"]["init_args"].pop("max_train") == 500
            assert whole["data"]["stream"]["init_args"].pop("max_train") is None
        assert of == whole


def test_all_but_scaffold_lower_their_rates_on_validation_loss() -> None:
    for scale in ("paper", "short"):
        for point, of in configs("table1", scale):
            assert of["data"]["validation"] == 0.125
            decay = of["methods"].get("decay")
            if point["method"] == "scaffold":
                assert decay is None
                continue
            assert decay["class_path"].endswith("LearningRateDecay")
            assert {key: decay["init_args"][key] for key in ("factor", "patience", "floor")} == {
                "factor": 3.0,
                "patience": 5,
                "floor": 1e-7,
            }
            assert list(of["methods"])[-1] == "decay"


@pytest.mark.parametrize("method", ["fedweit", "local-apd", "fedprox-apd"])
def test_notes_say_what_the_loss_has_beside_the_paper_s(method: str) -> None:
    point = {"benchmark": "overlapped", "method": method, "scale": "paper"}
    (options,) = (
        of["init_args"] for of in config("table1", point)["methods"].values() if "weight_decay" in of["init_args"]
    )
    assert (options["consolidation"], options["weight_decay"]) == (100.0, 1e-4)
    notes = " ".join(table("table1").recipe(point).notes)
    assert "its lambda_2 is 50 here" in notes
    assert "weight decay 0.0001" in notes


def test_figure_5a_varies_one_share_at_a_time() -> None:
    found = [(weit(of)["keep"], weit(of)["top_kappa"]) for _, of in configs("figure5a")]
    shares = [0.1, 0.2, 0.3, 0.5, 1.0]
    assert found == [*((share, 1.0) for share in shares), *((0.3, share) for share in shares)]


def test_figure_6_varies_the_coefficients_and_else_reads_runs_of_table_1() -> None:
    found = {(weit(of)["sparsity"], weit(of)["consolidation"]) for _, of in configs("figure6-left")}
    assert len(found) == 12
    assert (0.001, 100.0) in found
    for value in table("figure6-left").axes["consolidation"]:  # our loss has half of it, the paper's all of lambda_2
        assert table("figure6-left").label("consolidation", value) == f"{value} (lambda_2 {float(value) / 2:g})"
    for name in ("figure6-middle", "figure6-right", "figure9"):
        for point in table(name).points("paper"):
            assert table(name).recipe(point) == table("table1").recipe(point)
            assert point["method"] in table("table1").axes["method"]


@pytest.mark.parametrize("name", ["figure6-middle", "figure9"])
def test_curves_follow_tasks_that_there_are(name: str) -> None:
    """Curves follow tasks before the last, of 10 at scale paper, 4 at short, 2 at smoke, and 6 of noniid-present."""
    for scale, last in (("paper", 9), ("short", 3), ("smoke", 1)):
        for point in table(name).points(scale):
            values = [figure.value for figure in table(name).figures_at(point).values()]
            numbers = [int(value.removeprefix("task(").removesuffix(")")) for value in values]
            assert numbers
            assert max(numbers) < min(last, 5 if point["benchmark"] == "noniid-present" else 9)


@pytest.mark.parametrize("scale", ["paper", "short", "smoke"])
def test_figure_7_compares_equal_work(scale: str) -> None:
    seen = []
    for _, of in configs("figure7", scale):
        assert of["schedule"]["rounds_per_task"] * of["schedule"]["local_epochs"] == 20
        assert weit(of)["keep"] == 1.0
        seen.append(of["schedule"]["local_epochs"])
    assert seen == [1, 2, 5, 20]


def test_figure_8_evaluates_every_round_with_5_20_and_100_clients() -> None:
    found = {}
    for point, of in configs("figure8"):
        schedule, lr = of["schedule"], of["model"]["optimizer"]["init_args"]["lr"]
        assert (schedule["evaluate_every"], schedule["clients_per_round"]) == (1, 1.0)  # all clients train
        found[point["clients"]] = of["data"]["num_clients"], communicating(of), schedule["batch_size"], lr
    assert found == {"5": (5, 1.0, 100, 3.3333333e-4), "20": (20, 0.25, 10, 1e-4), "100": (100, 0.05, 10, 1e-4)}


def test_in_figure_4_all_clients_of_methods_with_personal_weights_train_and_five_communicate() -> None:
    found = {
        point["method"]: (of["schedule"]["clients_per_round"], communicating(of)) for point, of in configs("figure4")
    }
    common = dict.fromkeys(("fedprox", "fedcurv", "fedprox-ewc"), (0.05, None))
    assert found == {"stl": (1.0, None), "local-apd": (1.0, None), "fedweit": (1.0, 0.05), **common}


def communicating(config: dict[str, Any]) -> float | None:
    """Return FedWeIT's share of clients that communicate; None for another method."""
    return config["methods"].get("fedweit", {}).get("init_args", {}).get("communicating")


# The attention of a run.


def rows_of_a_run() -> list[dict[str, Any]]:
    """Return the rows of FedWeIT's table of a run with three clients and three tasks each."""
    sequences = FixedTasks([[2, 0, 1], [1, 2, 0], [0, 1, 2]])
    data = tiny_data(split(3, classes=6), num_clients=3, sequences=sequences, schedule={"rounds_per_task": 1})
    method = FedWeIT(consolidation=1.0)
    fit(tiny_client(data, mlp, partial(torch.optim.Adam, lr=0.01), {"weit": method}), data)
    return method.report().rows


def as_csv(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return rows written to CSV and read back, which have texts for numbers."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return list(csv.DictReader(io.StringIO(text.getvalue())))


def test_the_heatmap_shows_who_borrows_what() -> None:
    rows = rows_of_a_run()
    figure = attention_heatmap(as_csv(rows), "layers.0")
    limits = set()
    for task, axes in zip((1, 2), figure.axes, strict=False):
        assert axes.get_title() == f"task {task}"
        assert [label.get_text() for label in axes.get_yticklabels()] == [f"client {client}" for client in range(3)]
        lenders = [f"client {client}, task {task - 1}" for client in range(3)]
        assert [label.get_text() for label in axes.get_xticklabels()] == lenders
        shown = axes.images[0].get_array()
        assert shown is not None
        (of_task,) = [[row for row in rows if row["layer"] == "layers.0" and row["task"] == task]]
        assert len(of_task) == 3
        for row in of_task:
            line = row["client"]
            assert bool(shown.mask[line, line]), "nobody borrows of itself"  # type: ignore[attr-defined]
            for source, value in zip(row["sources"].split(), row["attention"].split(), strict=True):
                assert shown[line, int(source)] == pytest.approx(float(value), rel=1e-6)
        limits |= {axes.images[0].get_clim()}
    ((low, high),) = limits
    values = [abs(float(value)) for row in rows for value in row["attention"].split()]
    assert -low == high == max(values) > 0
    FigureCanvasAgg(figure).draw()


def test_a_layer_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'other': one of \['layers.0'\]"):
        attention_heatmap(rows_of_a_run(), "other")
