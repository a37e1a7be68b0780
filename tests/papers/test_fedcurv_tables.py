"""FedCurv's table: its published numbers, the protocol of its runs, and what reduced scales change."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
from support.paper_tables import fedcurv, resolver, write_run

from cfl.models import MnistCNN
from cfl.papers.cells import Experiments
from cfl.papers.orders import compare_orders
from cfl.papers.report import markdown
from cfl.papers.results import read_results
from cfl.running.missing_data import MissingData
from cfl.running.resolving import Resolver

# Rounds to 95, 90 and 85 %, typed anew from the paper's Table 1.
TYPED = {
    "50": {"fedcurv": (38, 9, 6), "fedprox": (140, 22, 16), "fedavg": (76, 30, 22)},
    "10": {"fedcurv": (99, 35, 27), "fedprox": (115, 46, 33), "fedavg": (106, 51, 43)},
}
TARGETS = ("95", "90", "85")
CELLS = [(epochs, method) for epochs in TYPED for method in TYPED[epochs]]


def config(epochs: str = "50", method: str = "fedavg", scale: str = "paper") -> dict[str, Any]:
    point = {"benchmark": "mnist", "epochs": epochs, "method": method, "scale": scale}
    return copy.deepcopy(resolver().config(fedcurv()["table1"].recipe(point).arguments))


def test_the_published_numbers() -> None:
    table = fedcurv()["table1"]
    found = {(p.place["epochs"], p.place["method"], p.figure): (p.mean, p.std) for p in table.published}
    assert found == {
        (epochs, method, f"rounds to {target} %"): (count, None)
        for epochs, methods in TYPED.items()
        for method, counts in methods.items()
        for target, count in zip(TARGETS, counts, strict=True)
    }
    assert {(p["epochs"], p["method"]) for p in table.points("paper")} == set(CELLS)
    # "three times as fast" to 90 % and "twice as fast" to 95 %, FedProx "two times slower" (section 4)
    fifty = TYPED["50"]
    assert fifty["fedavg"][1] / fifty["fedcurv"][1] == pytest.approx(3, abs=0.5)
    assert fifty["fedavg"][0] / fifty["fedcurv"][0] == fifty["fedavg"][0] / 38 == 2
    assert fifty["fedprox"][0] / fifty["fedavg"][0] == pytest.approx(2, abs=0.2)


def test_no_number_can_match_two_methods() -> None:
    """The tolerance is less than half the smallest difference between two methods, so that none matches two."""
    for epochs, (place, target) in itertools.product(TYPED, enumerate(TARGETS)):
        counts = sorted(methods[place] for methods in TYPED[epochs].values())
        smallest = min(b - a for a, b in itertools.pairwise(counts))
        assert 2 * fedcurv()["table1"].figures[f"rounds to {target} %"].tolerance < smallest


@pytest.mark.parametrize(("epochs", "method"), CELLS)
def test_the_protocol(epochs: str, method: str) -> None:
    """Every cell has the settings of section 4 and the caption of Table 1."""
    found = config(epochs, method)
    schedule, data, optimizer = found["schedule"], found["data"], found["model"]["optimizer"]["init_args"]
    assert (schedule["local_epochs"], schedule["batch_size"]) == (int(epochs), 256)
    assert (schedule["clients_per_round"], schedule["drop_last"], schedule["evaluate_every"]) == (1.0, False, 1)
    assert data["num_clients"] == 96
    assert data["partition"]["class_path"].endswith(".LabelBlocks")
    assert data["partition"]["init_args"] == {"blocks_per_client": 2, "block_size": None}
    (source,) = data["stream"]["init_args"]["sources"]
    assert source["class_path"].endswith(".MNIST")
    assert source["init_args"] == {"mean": [0.1307], "std": [0.3081], "max_train": None, "max_test": None}
    assert found["model"]["network"]["class_path"].endswith(".MnistCNN")
    assert found["model"]["optimizer"]["class_path"] == "torch.optim.SGD"
    assert (optimizer["lr"], optimizer["momentum"], optimizer["weight_decay"]) == (0.01, 0.0, 0.0)
    assert found["targets"] == {"accuracies": [85, 90, 95], "stop": True}
    assert schedule["rounds_per_task"] >= max(counts[0] for counts in TYPED[epochs].values())
    options = {name: entry["init_args"] for name, entry in found["methods"].items()}
    if method == "fedavg":
        assert options == {}
    elif method == "fedprox":
        assert options == {"fedprox": {"mu": {"50": 0.00025, "10": 0.00001}[epochs]}}
    else:
        chosen = {"strength": 1.0, "fisher": "empirical", "reduction": "mean", "keep": 1.0}
        assert list(options) == ["fedcurv"]
        assert {key: options["fedcurv"][key] for key in chosen} == chosen


def test_the_network_has_the_papers_size() -> None:
    assert sum(p.numel() for p in MnistCNN((1, 28, 28), 10).parameters()) == 431_080


@pytest.mark.parametrize(("epochs", "method"), CELLS)
def test_a_short_run_takes_as_many_local_steps(epochs: str, method: str) -> None:
    """A short run differs from the published one in clients, samples, batch size and rounds only."""
    paper, short = config(epochs, method), config(epochs, method, "short")

    def steps(found: dict[str, Any], share: int) -> int:
        batch = found["schedule"]["batch_size"]
        return found["schedule"]["local_epochs"] * -(-share // batch)

    blocks = short["data"]["partition"]["init_args"]
    assert steps(paper, 612) == steps(short, blocks["blocks_per_client"] * blocks["block_size"]) == 3 * int(epochs)
    for found in (paper, short):
        del found["data"]["num_clients"], found["data"]["partition"]
        del found["schedule"]["batch_size"], found["schedule"]["rounds_per_task"]
    assert paper == short


def test_figures_are_table_1s_runs() -> None:
    """Figures 1 and 2 show the runs of Table 1, so that a run fills three numbers and a curve."""
    for name, epochs in (("figure1", "50"), ("figure2", "10")):
        figure = fedcurv()[name]
        assert (figure.lines, figure.over, figure.published) == ("method", "rounds", [])
        for point in figure.points("paper"):
            assert resolver().config(figure.recipe(point).arguments) == config(epochs, point["method"])


def write_curve(folder: Path, epochs: str, method: str, scale: str, curve: list[float]) -> None:
    point = {"benchmark": "mnist", "epochs": epochs, "method": method, "scale": scale}
    write_run(
        folder, fedcurv()["table1"].recipe(point).arguments, acc=curve[-1], matrix=[[curve[-1]]], rounds=len(curve)
    )
    lines = ["round,clients,acc", *(f"{r},96,{acc}" for r, acc in enumerate(curve))]
    (folder / "rounds.csv").write_text("\n".join(lines) + "\n")


def cells_of(runs: Path, scale: str, name: str = "table1") -> dict[tuple[str, str, str], Any]:
    known = Experiments(Resolver(), read_results(runs), MissingData(runs / "missing.json"))
    return {(c.point["epochs"], c.point["method"], c.figure): c for c in known.cells(fedcurv()[name], scale)}


def test_rounds_are_read_off_a_runs_curve(tmp_path: Path) -> None:
    write_curve(tmp_path / "a", "50", "fedcurv", "paper", [50.0] * 4 + [84.9, 86.0, 85.0, 89.0, 90.0, 91.0])
    cells = cells_of(tmp_path, "paper")
    reached = [cells["50", "fedcurv", f"rounds to {target} %"] for target in TARGETS]
    assert [cell.status for cell in reached] == ["no value (never within 10 rounds)", "matched", "matched"]
    assert [cell.ours and cell.ours.mean for cell in reached] == [None, 9, 6]
    assert cells["10", "fedcurv", "rounds to 90 %"].status == "not run"
    (curve,) = cells_of(tmp_path, "paper", "figure1")["50", "fedcurv", "test accuracy"].seeds.values()
    assert curve == [50.0] * 4 + [84.9, 86.0, 85.0, 89.0, 90.0, 91.0]


def test_fewest_rounds_lead(tmp_path: Path) -> None:
    """The method with the fewest rounds leads. A run that never reaches the accuracy is left out of the order."""
    for method, rounds in (("fedavg", 5), ("fedprox", 4), ("fedcurv", 2)):
        write_curve(tmp_path / method, "50", method, "short", [50.0] * (rounds - 1) + [90.0])
    for method, rounds in (("fedavg", 3), ("fedcurv", 4)):
        write_curve(tmp_path / f"{method}-10", "10", method, "short", [50.0] * (rounds - 1) + [90.0])
    write_curve(tmp_path / "fedprox-10", "10", "fedprox", "short", [50.0] * 9)
    cells = list(cells_of(tmp_path, "short").values())
    fifty, ten = compare_orders(fedcurv()["table1"], cells)
    assert (fifty.leads, fifty.gap) == (True, (-3.0, -21.0))
    assert fifty.correlation == pytest.approx(1.0)
    assert (ten.leads, ten.values, ten.gap) == (False, ["fedavg", "fedcurv"], (1.0, -16.0))
    text = markdown(fedcurv()["table1"], "short", cells)
    assert "| E = 50 | FedAvg, FedProx, FedCurv | 1 | +1.00 | yes | yes | -3.00 | -21.00 |" in text
    assert (
        "| E = 10 | FedProx | rounds to 90 % [1] [2] | 46 | - | 0 of 1 | - | short: no value (never within 9 rounds) |"
        in text
    )
