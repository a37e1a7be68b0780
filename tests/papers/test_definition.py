"""Definition files of papers: those of the project are consistent, and wrong ones are refused."""

from __future__ import annotations

import contextlib
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from support.paper_tables import every_table, fot, point, resolver, tables_of

from cfl.papers.definition import PAPERS, Order, papers, read_table, table_named
from cfl.papers.recipes import CONFIGS, NotAvailable, Rule, matches, recipe
from cfl.runtime.errors import ConfigError

SCALES = ("paper", "short", "smoke")
ORDER = {"axis": "method", "figure": "ACC", "leader": "fot", "reference": "fedavg"}


@pytest.mark.parametrize("name", list(every_table()))
@pytest.mark.parametrize("scale", SCALES)
def test_every_point_has_a_recipe_or_a_reason(name: str, scale: str) -> None:
    """A point without a recipe says why: its method is not implemented, or the table says that it cannot be run."""
    table = every_table()[name]
    points = list(table.points(scale))
    assert points
    for part in [part for p in points for figure in table.figures_at(p).values() for part in figure.points(p)]:
        reasons = {f"method {part['method']} not available", *(why for _, why in table.cannot)}
        with contextlib.suppress(NotAvailable):
            assert table.recipe(part).arguments[0].startswith(f"--config={CONFIGS}/benchmarks/")
            continue
        with pytest.raises(NotAvailable) as caught:
            table.recipe(part)
        assert str(caught.value) in reasons


def test_fedavg_on_permuted_mnist_has_its_own_rounds() -> None:
    """Federated averaging has 1100 rounds and FOT 2000, with either partition (F.4)."""
    for partition in ("iid", "shards"):
        rounds = {}
        for method in ("fedavg", "fot"):
            config = resolver().config(fot()["table1"].recipe(point(partition=partition, method=method)).arguments)
            given = config["schedule"]["rounds_per_task"]
            rounds[method] = sum(given) if isinstance(given, list) else given * 10
        assert rounds == {"fedavg": 1100, "fot": 2000}


def test_tables_share_runs() -> None:
    """Table 3's run, and Table 12's with a threshold of 0.87, are Table 1's run."""
    table1 = resolver().experiment(fot()["table1"].recipe(point(benchmark="cifar100", method="fot")).arguments)
    axes = {"benchmark": "cifar100", "method": "fot"}
    assert resolver().experiment(fot()["table12"].recipe(point(threshold="0.87", **axes)).arguments) == table1
    assert resolver().experiment(fot()["table12"].recipe(point(threshold="0.80", **axes)).arguments) != table1
    assert resolver().experiment(fot()["table3"].recipe(point(**axes)).arguments) == table1


def test_an_extraction_after_every_task_is_all_that_differs_from_table_3() -> None:
    nine, ten = (
        resolver().config(fot()[table].recipe(point(method="fot")).arguments)
        for table in ("table3", "table3-every-task")
    )
    assert not nine["methods"]["fot"]["init_args"]["last_extraction"]
    nine = deepcopy(nine)
    nine["methods"]["fot"]["init_args"]["last_extraction"] = True
    assert ten == nine


def test_settings_of_a_participation_arrive() -> None:
    data = resolver().config(fot()["table10"].recipe(point(participation="share60")).arguments)["data"]
    assert data["num_clients"] == 208
    assert data["participation"]["init_args"]["share"] == 0.6


@pytest.mark.parametrize("scale", ["short", "smoke"])
def test_scales_change_what_they_say(scale: str) -> None:
    """A short run is the published one except rounds, clients per round, learning rate, and TF32 on GPUs."""
    changed = {
        "pmnist": ([64, 16], [0.01, 0.05], [None, None]),
        "cifar100": ([25, 5], [0.01, 0.05], ["high", None]),
    }
    for benchmark, (clients, rates, precisions) in changed.items():
        configs = [
            resolver().experiment(fot()["table1"].recipe(point(s, benchmark=benchmark, method="fot")).arguments)
            for s in ("paper", scale)
        ]
        published, here = (config["schedule"].pop("rounds_per_task") for config in configs)
        assert published > here
        if scale == "short":
            assert [config["schedule"].pop("clients_per_round") for config in configs] == clients
            assert [config["model"]["optimizer"]["init_args"].pop("lr") for config in configs] == rates
            assert [config.pop("matmul_precision", None) for config in configs] == precisions
            assert configs[0] == configs[1]


def test_notes_of_what_we_chose_come_with_the_recipe() -> None:
    assert not fot()["table1"].recipe(point(method="fedavg")).notes
    for method, word in (("fot", "residual_share"), ("gpm", "threshold")):
        (note,) = fot()["table1"].recipe(point(method=method)).notes
        assert word in note


def test_a_method_without_config_is_not_available() -> None:
    with pytest.raises(NotAvailable, match=r"^method none not available$"):
        recipe([Rule(configs=("papers/fot/{benchmark}/{method}.yaml",))], point(method="none"))


def test_rules_are_laid_over_each_other_in_order() -> None:
    rules = [
        Rule(settings={"a": 1}),
        Rule(when={"method": ["fot", "er"]}, settings={"b": "{method}", "c": [1, 2]}, chosen="why"),
        Rule(when={"method": "gpm"}, settings={"a": 3}),
        Rule(when={"absent": "x"}, settings={"a": 4}),
    ]
    found = recipe(rules, {"method": "er"})
    assert found.arguments == ("--a=1", "--b=er", "--c=[1, 2]")
    assert found.notes == ("why",)
    with pytest.raises(ConfigError, match="no such axis"):
        recipe([Rule(settings={"a": "{benchmark}"})], {"method": "er"})


def test_matching() -> None:
    assert matches({}, {"a": "1"})
    assert matches({"a": [1, 2]}, {"a": "1"})
    assert not matches({"a": "1", "b": "1"}, {"a": "1"})


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"benchmark": ["mnist"]}, "--bench = 'mnist' cannot work; valid: for fot-table1: .* pmnist,cifar100"),
        ({"method": ["fot", "fto"]}, "--methods = 'fto'"),
        (
            {"threshold": ["0.87"]},
            "--only threshold = '0.87' cannot work; valid: nothing, as fot-table1 has no axis threshold; its axes are: "
            "benchmark, by --bench pmnist,.*; partition, by --partition iid,shards; method, by --methods fedavg,",
        ),
    ],
)
def test_what_a_table_does_not_have_is_named(chosen: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(fot()["table1"].points("paper", chosen))


FEDAGEM4 = "its axes are: variant, by --only variant=fl,agem,agem-fedagem,der,der-fedagem"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            {"method": ["agem"]},
            f"--methods = 'agem' cannot work; valid: nothing, as {{}} has no axis method; {FEDAGEM4}",
        ),
        ({"partition": ["a", "b"]}, f"--partition = 'a,b' cannot .* {{}} has no axis partition; {FEDAGEM4}"),
        ({"benchmark": ["cifar100"]}, f"--bench .* {{}} has no axis benchmark \\(it is cifar100\\); {FEDAGEM4}"),
    ],
)
def test_an_axis_that_a_table_does_not_have_is_no_value_of_another(chosen: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message.format('fedagem-table4')}$"):
        list(tables_of("fedagem")["table4"].points("paper", chosen))


def test_what_has_no_cell_is_named() -> None:
    """A choice without any cell is refused. A choice of which only a part has cells is accepted."""
    table = tables_of("fedagem")["table1"]
    chosen = {"method": ["icarl"], "benchmark": ["rmnist", "pmnist"], "with": ["fedagem"]}
    message = (
        "^--bench, --methods, --only with = 'rmnist,pmnist, icarl, fedagem' cannot work; valid: cells of "
        "fedagem-table1; it has no figure for benchmark rmnist,pmnist, method icarl, with fedagem$"
    )
    with pytest.raises(ConfigError, match=message):
        list(table.points("paper", chosen))
    for further in ({"method": ["icarl", "fl"]}, {"benchmark": ["rmnist", "cifar10"]}):
        assert len(list(table.points("paper", {**chosen, **further}))) == (4 if "method" in further else 2)


def test_unknown_scale_and_table() -> None:
    with pytest.raises(ConfigError, match="one of paper, short, smoke"):
        list(fot()["table1"].points("tiny"))
    with pytest.raises(ConfigError, match=r"fot-table1, fot-table2, .*fot-table12, .*fot-figure4"):
        table_named("fot-table8")
    assert table_named("fedcurv-table1").paper.name == "fedcurv"


def test_tables_come_in_the_papers_order() -> None:
    """Tables and figures are ordered by their numbers, as in the paper. Those on other data come last."""
    assert [name for name in tables_of("fot") if name.startswith("table")] == [
        *("table1", "table2", "table3", "table3-every-task"),
        *(f"table{number}" for number in (4, 5, 6, 7, 10, 11, 12)),
        *("table6-present", "table12-present"),
    ]
    assert [name for name in tables_of("fedweit") if name.startswith("figure")] == [
        *("figure4", "figure5a", "figure5b", "figure6-left", "figure6-middle", "figure6-right"),
        *("figure7", "figure8", "figure9", "figure10"),
    ]


def test_selection_keeps_the_tables_order() -> None:
    points = list(fot()["table1"].points("paper", {"method": ["fot", "fedavg"], "benchmark": ["pmnist"]}))
    assert [(p["partition"], p["method"]) for p in points] == [
        ("iid", "fedavg"),
        ("iid", "fot"),
        ("shards", "fedavg"),
        ("shards", "fot"),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"figure": {}}, "one of title, axes"),
        ({"figures": {"ACC": "import os"}}, "an expression"),
        ({"figures": {"ACC": {"value": "acc", "tolerence": 1}}}, "one of value, less"),
        ({"lines": "methods"}, "one of the axes"),
        ({"rules": [{"set": {}, "wen": {}}]}, "one of when, configs, set, chosen"),
        ({"no_targets": [{"when": {"method": "fot"}}]}, "no_targets.why = None .* a text"),
        ({"no_targets": [{"why": "so", "figures": ["FTG"]}]}, "no_targets.figures = 'FTG' .* one of ACC, FGT"),
        ({"no_targets": [{"why": "so", "figure": "ACC"}]}, "no_targets, figure = .* one of why, when, figures"),
        ({"notes": [{"text": "so", "wen": {}}]}, "notes, wen = .* one of text, when"),
        ({"notes": [{"when": {"method": "fot"}}]}, "notes.text = None .* a sentence"),
        ({"order": {**ORDER, "figure": "FTG"}}, r"order.figure = 'FTG' cannot work; valid: .* figures ACC, FGT"),
        ({"order": {**ORDER, "figure": ["ACC", "FTG"]}}, r"order.figure = \['ACC', 'FTG'\] cannot work"),
        ({"order": {**ORDER, "figure": ["ACC", "ACC"]}}, "each once"),
        ({"order": {**ORDER, "figure": []}}, "one or more of the figures"),
        ({"order": {**ORDER, "figure": [["ACC"]]}}, "one or more of the figures"),
        ({"order": {**ORDER, "axis": "methods"}}, "order.axis = 'methods' .* one of the axes benchmark"),
        ({"order": {**ORDER, "best": "least"}}, "highest or lowest"),
        ({"order": {**ORDER, "best": {"ACC": "least"}}}, "highest or lowest"),
        ({"order": {**ORDER, "best": {"FTG": "lowest"}}}, "one of them for each of"),
        ({"order": {**ORDER, "best": {}}}, "one of them for each of"),
        ({"order": {**ORDER, "figures": ["ACC"]}}, "one of axis, figure, leader, reference, best"),
        ({"order": {"axis": "method", "leader": "fot", "reference": "fedavg"}}, "order.figure = None cannot work"),
    ],
)
def test_bad_table_files_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    entry = yaml.safe_load((PAPERS / "fot" / "table1.yaml").read_text())
    path = tmp_path / "table1.yaml"
    path.write_text(yaml.safe_dump({**entry, **change}))
    with pytest.raises(ConfigError, match=message):
        read_table(fot()["table1"].paper, path)


@pytest.mark.parametrize(("given", "figures"), [("FGT", ("FGT",)), (["FGT", "ACC"], ("FGT", "ACC"))])
def test_an_order_is_by_one_figure_or_by_several(given: object, figures: tuple[str, ...], tmp_path: Path) -> None:
    entry = yaml.safe_load((PAPERS / "fot" / "table1.yaml").read_text())
    path = tmp_path / "table1.yaml"
    path.write_text(yaml.safe_dump({**entry, "order": {**ORDER, "figure": given, "best": "lowest"}}))
    order = read_table(fot()["table1"].paper, path).order
    assert order == Order("method", figures, "fot", "fedavg", lowest=figures)


def test_which_end_leads_may_differ_by_figure() -> None:
    order = fot()["table1"].order
    assert order is not None
    assert order.figures == ("ACC", "FGT")
    assert order.lowest == order.figures[1:]


@pytest.mark.parametrize("name", [name for name, table in every_table().items() if table.order and table.published])
def test_every_published_run_has_a_figure_by_which_it_is_ordered(name: str) -> None:
    """Every published point has a figure by which the table orders runs, as reduced scales compare nothing else."""
    table = every_table()[name]
    assert table.order
    figures: dict[tuple[str, ...], set[str]] = {}
    for published in table.published:
        figures.setdefault(tuple(published.place[axis] for axis in table.axes), set()).add(published.figure)
    assert all(found & set(table.order.figures) for found in figures.values())


def test_a_paper_is_a_folder(tmp_path: Path) -> None:
    """The code has nothing that is specific to FOT: its files under another name make another paper."""
    shutil.copytree(PAPERS / "fot", tmp_path / "other", ignore=shutil.ignore_patterns("results"))
    for path in (tmp_path / "other" / "published").iterdir():
        path.write_text(path.read_text().replace("fot,table", "other,table"))
    (paper,) = papers(tmp_path)
    assert paper.tables()[0].full_name == "other-table1"
    assert len(paper.tables()[0].published) == 128
