"""The tables' configurations have FOT's settings, which are typed here from the paper.

The sources are Bakman et al. (2024), Appendices E and F, and the published code.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.paper_tables import fot, point, resolver

from cfl.papers.cells import each_recipe

PROTOCOL: dict[str, dict[str, Any]] = {
    "pmnist": {
        "data.num_clients": 125,
        "data.stream.init_args.num_tasks": 10,
        "schedule.rounds_per_task": 200,
        "schedule.clients_per_round": 64,
        "schedule.batch_size": 64,
        "model.network.init_args.hidden": [400, 400, 400],
        "model.network.init_args.dropout": [0.2, 0.5, 0.5],
        "methods.ewc.init_args.strength": 40,
        "methods.fot.init_args.sketch_size": 1.0,
        "methods.fot.init_args.threshold": 0.96,
        "methods.fot.init_args.threshold_increment": 0.0,
    },
    "cifar100": {
        "data.num_clients": 50,
        "data.scenario": "task",
        "data.augmentation": None,
        "data.stream.init_args.num_tasks": 10,
        "data.stream.init_args.class_order": "natural",
        "schedule.rounds_per_task": 1000,
        "schedule.clients_per_round": 25,
        "schedule.batch_size": 16,
        "model.network.init_args.dropout": [0.2, 0.2, 0.5, 0.5, 0.5],
        "methods.ewc.init_args.strength": 20,
        "methods.fot.init_args.sketch_size": {"conv": 1.0, "linear": 5.0},
        "methods.fot.init_args.threshold": 0.87,
        "methods.fot.init_args.threshold_increment": 0.001,
    },
    "five-datasets": {
        "data.num_clients": 150,
        "data.scenario": "task",
        "data.augmentation": None,
        "schedule.rounds_per_task": [1000, 100, 200, 100, 100],
        "schedule.clients_per_round": 64,
        "schedule.batch_size": 16,
        "model.network.init_args.width": 20,
        "model.network.init_args.norm": "none",
        "model.network.init_args.stem_stride": 1,
        "methods.ewc.init_args.strength": 1,
        "methods.fot.init_args.sketch_size": 5.0,
        "methods.fot.init_args.threshold": 0.95,
        "methods.fot.init_args.threshold_increment": 0.001,
    },
    "mini-imagenet": {
        "data.num_clients": 50,
        "data.scenario": "task",
        "data.augmentation.init_args.padding": 4,
        "data.augmentation.init_args.flip": True,
        "data.stream.init_args.num_tasks": 20,
        "data.stream.init_args.class_order": "natural",
        "data.eval_batch_size": 16,
        "data.eval_shuffle": True,
        "schedule.rounds_per_task": 250,
        "schedule.clients_per_round": 25,
        "schedule.batch_size": 16,
        "model.network.init_args.width": 32,
        "model.network.init_args.norm": "batch_no_stats",
        "model.network.init_args.stem_stride": 2,
        "methods.ewc.init_args.strength": 0.01,
        "methods.fot.init_args.sketch_size": 5.0,
        "methods.fot.init_args.threshold": 0.90,
        "methods.fot.init_args.threshold_increment": 0.001,
    },
}
COMMON = {
    "data.partition.init_args.per_client": 2,
    "schedule.local_epochs": 1,
    "schedule.drop_last": False,
    "model.optimizer.class_path": "torch.optim.SGD",
    "model.optimizer.init_args.lr": 0.01,
    "model.optimizer.init_args.momentum": 0.0,
    "model.optimizer.init_args.weight_decay": 1e-5,
    "methods.fot.init_args.rank_rule": "code",
    "methods.fot.init_args.minimum_rank": 1,
    "methods.er.init_args.size": 1,  # for each client: the paper's totals 125, 50, 150, 50 are the numbers of clients
    "methods.er.init_args.per_task": False,
    "methods.glfc.init_args.size": 1,
    "methods.glfc.init_args.per_task": False,
    "methods.rgo.init_args.share": 0.4,
}
FIVE = [  # order, mean, std (Table 8's sizes)
    ("CIFAR10", [125.3 / 255, 123.0 / 255, 113.9 / 255], [63.0 / 255, 62.1 / 255, 66.7 / 255]),
    ("MNIST", [0.1], [0.2752]),
    ("SVHN", [0.4377, 0.4438, 0.4728], [0.198, 0.201, 0.197]),
    ("FashionMNIST", [0.2190], [0.3318]),
    ("NotMNIST", [0.4254], [0.4501]),
]


def resolved(benchmark: str, method: str, partition: str = "shards") -> dict[str, Any]:
    recipe = fot()["table1"].recipe(point(benchmark=benchmark, method=method, partition=partition))
    return copy.deepcopy(resolver().config(recipe.arguments))  # the resolver keeps one configuration for all tests


def at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name]
    return config


@pytest.mark.parametrize("benchmark", PROTOCOL)
def test_runs_are_configured_as_the_paper_says(benchmark: str) -> None:
    configs = {method: resolved(benchmark, method) for method in ("ewc", "er", "rgo", "glfc", "fot")}
    for key, expected in (COMMON | PROTOCOL[benchmark]).items():
        part, _, rest = key.partition(".")
        method = rest.partition(".")[0]
        for config in [configs[method]] if part == "methods" else configs.values():
            assert at(config, key) == expected, key


@pytest.mark.parametrize("benchmark", PROTOCOL)
def test_iid_clients_differ_in_their_data_alone(benchmark: str) -> None:
    """IID and non-IID runs differ in the partition, and FOT's on Permuted MNIST in the threshold, too (Table 9)."""
    for method in ("fedavg", "fot"):
        shards, iid = resolved(benchmark, method), resolved(benchmark, method, "iid")
        assert iid["data"].pop("partition")["class_path"].endswith(".IID")
        assert shards["data"].pop("partition")["class_path"].endswith(".Shards")
        if (benchmark, method) == ("pmnist", "fot"):
            assert iid["methods"]["fot"]["init_args"].pop("threshold") == 0.94
            assert shards["methods"]["fot"]["init_args"].pop("threshold") == 0.96
        assert iid == shards


def test_five_datasets_come_in_the_papers_order_with_its_constants() -> None:
    sources = at(resolved("five-datasets", "fedavg"), "data.stream.init_args.sources")
    assert [source["class_path"].rpartition(".")[2] for source in sources] == [name for name, _, _ in FIVE]
    for source, (_, mean, std) in zip(sources, FIVE, strict=True):
        assert source["init_args"]["mean"] == pytest.approx(mean, abs=1e-7)
        assert source["init_args"]["std"] == pytest.approx(std, abs=1e-7)


@pytest.mark.parametrize(("table", "benchmark"), [("table6", "mini-imagenet"), ("table6-present", "pmnist")])
@pytest.mark.parametrize(("variant", "partition"), [("dp", "iid"), ("dp", "shards"), ("frozen", "iid")])
def test_private_variants_differ_from_fot_in_one_option(
    table: str, benchmark: str, variant: str, partition: str
) -> None:
    """A private variant of Table 6 changes one option of FOT.

    It adds a mechanism with epsilon 5, delta 1e-5 and norms clipped to 1, or freezes the first layer after the first
    task.
    """
    plain = resolved(benchmark, "fot", partition)["methods"]["fot"]["init_args"]
    at_point = point(benchmark=benchmark, method="fot", variant=variant, partition=partition)
    private = resolver().config(fot()[table].recipe(at_point).arguments)["methods"]["fot"]["init_args"]
    changed = {key: value for key, value in private.items() if value != plain[key]}
    if variant == "frozen":
        assert changed == {"freeze_first_layer": True}
    else:
        assert changed.keys() == {"mechanism"}
        assert changed["mechanism"]["init_args"] == {"epsilon": 5.0, "delta": 1e-5, "clip": 1.0, "sigma_rule": "paper"}


@pytest.mark.parametrize("partition", ["iid", "shards"])
def test_table_6_on_permuted_mnist_has_table_1s_run_for_comparison(partition: str) -> None:
    at_point = point(benchmark="pmnist", method="fot", variant="without", partition=partition)
    assert resolver().config(fot()["table6-present"].recipe(at_point).arguments) == resolved("pmnist", "fot", partition)


@pytest.mark.parametrize("partition", ["iid", "shards"])
@pytest.mark.parametrize("name", ["table12-present", "figure6-present", "figure7-present"])
def test_thresholds_on_permuted_mnist_are_table_1s_runs_but_for_the_threshold(name: str, partition: str) -> None:
    expected = resolved("pmnist", "fot", partition)
    for threshold in ("0.80", "0.96"):
        at_point = point(benchmark="pmnist", method="fot", partition=partition, threshold=threshold)
        expected["methods"]["fot"]["init_args"]["threshold"] = float(threshold)
        assert resolver().config(fot()[name].recipe(at_point).arguments) == expected


@pytest.mark.parametrize("name", ["figure4-present", "figure5-present"])
def test_curves_on_permuted_mnist_are_of_table_1s_runs(name: str) -> None:
    for scale in ("paper", "short"):
        runs = {recipe.arguments for _, recipe in each_recipe(fot()[name], scale)}
        of_table_1 = {
            recipe.arguments for at, recipe in each_recipe(fot()["table1"], scale) if at["benchmark"] == "pmnist"
        }
        assert runs == of_table_1
        assert len(runs) == 16
