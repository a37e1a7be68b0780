"""Fed-A-GEM's tables: their published numbers, the protocol of their runs, and which tables share runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from matplotlib.figure import Figure
from support.paper_tables import resolver, tables_of, write_run

from cfl.data.participation import Joining
from cfl.data.partitions import Dirichlet
from cfl.methods.fed_agem import FedAGEM
from cfl.models import MLP, ResNet18, SmallCNN
from cfl.papers.cells import Cell, Experiments, each_recipe
from cfl.papers.definition import Table
from cfl.papers.orders import compare_orders
from cfl.papers.pictures import table_picture
from cfl.papers.recipes import CONFIGS, matches, setting
from cfl.papers.results import Results, read_results
from cfl.papers.sweeps import SweepState, read_sweep
from cfl.reporting.experiment import flatten, setting_hash
from cfl.reporting.matrix_file import write_matrix_csv
from cfl.running.missing_data import MissingData

MNIST, CIFAR = ("rmnist", "pmnist"), ("cifar10", "cifar100")
UNLIKE = ("path", "shape", "num_classes", "channels", "scale", "numbers")  # options that Arrays has and CIFAR10 lacks
IMPLEMENTED = ("fl", "agem", "gpm", "der", "fedcurv", "fedprox", "fot")


def fedagem() -> dict[str, Table]:
    return tables_of("fedagem")


def place(benchmark: str = "rmnist", method: str = "fl", projection: str = "without", **axes: str) -> dict[str, str]:
    return {"benchmark": benchmark, "method": method, "with": projection, "scale": "paper", **axes}


def config(table: str = "table1", **axes: str) -> dict[str, Any]:
    """Return the resolved configuration of a point, with the values that the table fixes."""
    (found,) = [p for p in fedagem()[table].points(axes.pop("scale", "paper")) if axes.items() <= p.items()]
    return resolver().config(fedagem()[table].recipe(found).arguments)


def of_table1(benchmark: str, method: str, projection: str, scale: str = "paper") -> dict[str, Any]:
    return config(**{"benchmark": benchmark, "method": method, "with": projection, "scale": scale})


def numbers(table: str, **axes: str) -> dict[str, tuple[float, float | None]]:
    return {p.figure: (p.mean, p.std) for p in fedagem()[table].published if axes.items() <= p.place.items()}


def test_some_numbers_typed_from_the_paper() -> None:
    without, projected = {"with": "without"}, {"with": "fedagem"}
    assert numbers("table1", benchmark="rmnist", method="fot", **projected) == {"Domain-IL": (84.14, 4.6)}
    assert numbers("table1", benchmark="cifar100", method="gpm", **projected) == {
        "Class-IL": (13.32, 1.0),
        "Task-IL": (65.51, 0.3),
    }
    assert numbers("table1", benchmark="cifar10", method="fot", **without) == {"Task-IL, own outputs": (73.73, 1.9)}
    assert numbers("table2", benchmark="pmnist", buffer="5120", method="agem", **projected)["Domain-IL"] == (40.07, 2.5)
    assert numbers("table3", benchmark="cifar100", communication="0.2x")["Class-IL"] == (13.59, 0.9)
    assert numbers("table4", variant="der-fedagem") == {"Class-IL": (36.29, 1.0), "Task-IL": (72.02, 0.7)}
    assert numbers("table5", split="cifar100-5", **projected)["Task-IL"] == (69.41, 0.8)
    assert numbers("table6", benchmark="cifar100", method="fedcurv", **projected)["Task-IL"] == (79.58, 0.6)
    assert numbers("table7", variant="agem-fedagem")["Task-IL"] == (50.27, None)
    assert numbers("table8", method="der", **without)["Class-IL"] == (43.64, 2.1)
    assert numbers("table9", refinement="project_and_scale-conflict")["Task-IL"] == (73.61, 0.75)
    assert numbers("table10", share="0.8")["Class-IL"] == (10.36, 0.42)
    assert numbers("table11", rule="sliding_window")["Task-IL"] == (46.16, 2.38)
    assert numbers("table12", benchmark="cifar100", method="fl", **projected)["Task-IL"] == (5.39, 0.8)
    assert numbers("table13", benchmark="pmnist", method="fedprox", **projected)["Domain-IL"] == (5.93, 5.1)
    assert numbers("table14", **without) == {"Class-IL": (7.46, 0.08), "Task-IL": (43.85, 1.33)}
    assert numbers("table15", method="agem", **projected)["Class-IL"] == (10.82, 0.7)
    assert numbers("table17", benchmark="cifar10", **projected)["BWT, Task-IL"] == (-0.60, None)
    assert numbers("table18", **projected)["Task-IL"] == (73.58, 0.87)


def published_of(table: Table, point: Mapping[str, str]) -> dict[str, tuple[float, float | None]]:
    here = table.place(point)
    return {p.figure: (p.mean, p.std) for p in table.published if p.place == here}


def test_tables_that_share_a_run_share_its_number() -> None:
    """Cells of the same experiment have the same published number, apart from four cells that contradict Table 1."""
    known: dict[str, dict[str, tuple[float, float | None]]] = {}
    for point, recipe in each_recipe(fedagem()["table1"], "paper"):
        if point["method"] in ("fl", "agem", "der"):  # the other tables have these methods only
            known[setting_hash(resolver().experiment(recipe.arguments))] = published_of(fedagem()["table1"], point)
    shared: dict[str, int] = {}
    others = set()
    for name in ("table2", "table3", "table5", "table9", "table10", "table11"):
        table = fedagem()[name]
        for point, recipe in {str(p): (p, r) for p, r in each_recipe(table, "paper")}.values():
            found = known.get(setting_hash(resolver().experiment(recipe.arguments)))
            if found is None:
                continue
            shared[name] = shared.get(name, 0) + 1
            if found != published_of(table, point):
                others.add((name, point["benchmark"], point["method"], point["with"]))
    assert shared == {"table2": 16, "table3": 8, "table5": 4, "table9": 2, "table10": 2, "table11": 2}
    assert others == {
        ("table2", "rmnist", "der", "fedagem"),
        ("table2", "pmnist", "der", "fedagem"),
        ("table3", "pmnist", "fl", "without"),
        ("table3", "pmnist", "fl", "fedagem"),
    }


@pytest.mark.parametrize(("forgetting", "accuracy"), [("table12", "table1"), ("table13", "table6")])
def test_forgetting_is_read_off_the_runs_of_the_accuracies(forgetting: str, accuracy: str) -> None:
    runs = [{r.arguments for _, r in each_recipe(fedagem()[name], "paper")} for name in (forgetting, accuracy)]
    assert runs[0] <= runs[1]
    assert all(f.value.startswith("fgt_max_last") for f in fedagem()[forgetting].figures.values())


@pytest.mark.parametrize("benchmark", [*MNIST, *CIFAR])
def test_the_protocol(benchmark: str) -> None:
    """FL has the paper's settings. Other methods differ in ``methods`` only, FOT on CIFAR in its scenario, too."""
    found = of_table1(benchmark, "fl", "without")
    data, schedule, model = found["data"], found["schedule"], found["model"]
    mnist = benchmark in MNIST
    tasks = {"cifar10": 5}.get(benchmark, 10)
    assert data["stream"]["init_args"]["num_tasks"] == tasks
    assert (schedule["rounds_per_task"], schedule["clients_per_round"], schedule["batch_size"]) == (20, 1.0, 32)
    assert (data["num_clients"], schedule["local_epochs"], schedule["drop_last"]) == (10, 1 if mnist else 5, False)
    optimizer = model["optimizer"]
    assert optimizer["class_path"] == "torch.optim.SGD"
    options = optimizer["init_args"]
    assert (options["lr"], options["momentum"], options["weight_decay"]) == (0.01 if mnist else 0.1, 0.0, 0.0)
    assert found["federated"]["client_weighting"] == "uniform"
    assert found["federated"]["batchnorm"] == "average"
    buffer = found["buffer"]
    assert (buffer["size"], buffer["rule"], buffer["offered"], buffer["keeps"]) == (
        200,
        "reservoir",
        "once",
        "augmented",
    )
    partition = data["partition"]
    source = data["stream"]["init_args"]["source"]["init_args"]
    if mnist:
        assert partition["class_path"].endswith(".Shards")
        assert partition["init_args"] == {"per_client": 2}
        assert not data["repartition"]
        assert data["stream"]["init_args"]["first_is_identity"] is False
        assert (source["mean"], source["std"]) == ([0.0], [1.0])
        assert data["scenario"] == "domain"
        network = SmallCNN((1, 28, 28), 10, **model["network"]["init_args"])
        assert network.dropout == [0.5, 0.5]
        parameters = 21_840
    else:
        assert partition["class_path"].endswith(".Dirichlet")
        assert partition["init_args"] == {"alpha": 0.3, "min_samples": 10, "max_retries": 100, "balance": True}
        assert data["repartition"]
        assert (data["scenario"], data["class_loss"]) == ("class", "all")
        assert data["stream"]["init_args"]["class_order"] == "natural"
        network = ResNet18((3, 32, 32), 10 if benchmark == "cifar10" else 100, **model["network"]["init_args"])
        parameters = 11_173_962 if benchmark == "cifar10" else 11_220_132
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert (data["augmentation"] is not None) == (benchmark == "cifar100")
    experiment = resolver().experiment(fedagem()["table1"].recipe(place(benchmark)).arguments)
    for method in IMPLEMENTED:
        other = resolver().experiment(fedagem()["table1"].recipe(place(benchmark, method)).arguments)
        other = {**other, "methods": {}, "data": dict(other["data"])}
        if method == "fot" and not mnist:
            assert other["data"].pop("scenario") == "task"
            other["data"]["scenario"] = "class"
        other.pop("buffer", None)
        assert other == experiment


SCHEDULE = {"rounds_per_task": 20, "clients_per_round": 1.0, "local_epochs": 1, "batch_size": 32, "drop_last": False}
BUFFER = {"size": 200, "rule": "reservoir", "offered": "once", "keeps": "augmented"}
OF_MNIST: dict[str, Any] = {
    "source": ("MNIST", {"mean": [0.0], "std": [1.0], "max_train": None, "max_test": None}),
    "partition": ("Shards", {"per_client": 2}),
    "repartition": False,
    "num_clients": 10,
    "scenario": "domain",
    "class_loss": "all",
    "augmentation": None,
    "network": ("SmallCNN", {"dropout": [0.5, 0.5]}),
    "optimizer": ("SGD", {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.0}),
    "clipping": None,
    "schedule": SCHEDULE,
    "buffer": BUFFER,
}
OF_CIFAR = OF_MNIST | {
    "partition": ("Dirichlet", {"alpha": 0.3, "min_samples": 10, "max_retries": 100, "balance": True}),
    "repartition": True,
    "scenario": "class",
    "network": (
        "ResNet18",
        {"width": 64, "norm": "batch", "stem_stride": 1, "pool": 4, "head_bias": True, "weights": None},
    ),
    "optimizer": ("SGD", {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}),
    "schedule": SCHEDULE | {"local_epochs": 5},
}
SPLIT = {"classes_per_task": None, "class_order": "natural", "task_order": "given"}
OF_BENCHMARKS = {
    "rmnist": OF_MNIST
    | {"stream": ("Rotated", {"num_tasks": 10, "max_degrees": 180.0, "first_is_identity": False, "angles": None})},
    "pmnist": OF_MNIST | {"stream": ("Permuted", {"num_tasks": 10, "first_is_identity": False})},
    "cifar10": OF_CIFAR
    | {
        "source": ("CIFAR10", {"mean": [0.5] * 3, "std": [0.5] * 3, "max_train": None, "max_test": None}),
        "stream": ("ClassSplit", {"num_tasks": 5, **SPLIT}),
    },
    "cifar100": OF_CIFAR
    | {
        "source": (
            "CIFAR100",
            {
                "mean": [0.5071, 0.4865, 0.4409],
                "std": [0.2673, 0.2564, 0.2762],
                "max_train": None,
                "max_test": None,
            },
        ),
        "stream": ("ClassSplit", {"num_tasks": 10, **SPLIT}),
        "augmentation": ("CropFlip", {"padding": 4, "flip": True}),
    },
}
"""Benchmark -> settings that all methods of Table 1 share."""

FEDCURV = {"strength": 1.0, "fisher": "empirical", "reduction": "mean", "fisher_batch_size": 256, "keep": 1.0}
FOT = {
    "message": "sketch",
    "rank_rule": "code",
    "minimum_rank": 1,
    "project_clients": False,
    "capacity": None,
    "importance_scale": None,
    "last_extraction": False,
    "residual_share": "energy",
    "layers": None,
    "gpse_model": "global",
    "gpse_clients": "sampled",
    "gpse_batch_size": 500,
    "gpse_dropout": False,
    "sketch_sharing": 1,
    "protect_bias": False,
    "freeze_first_layer": False,
    "mechanism": None,
}
GPM = {"rank_rule": "exact", "layers": None, "freeze_affine": True, "batch_size": 500}
GLFC = {"size": 200, "batch_size": None, "perturbation_steps": 50, "inversion_steps": 250, "images": 20}
CFED = {"share": 0.4, "temperature": 2.0, "weight": 0.1, "server_distillation": 0, "server_lr": 0.01}
SURROGATE = {"mean": None, "std": None, "max_train": None, "max_test": None}
ON_MNIST: dict[str, dict[str, Any]] = {
    "fl": {},
    "agem": {"AGEM": {"batch_size": 32}},
    "der": {"DER": {"alpha": 1.0, "beta": 0.0, "batch_size": 32, "over_outputs": "mean"}},
    "gpm": {
        "GPM": {
            "threshold": 0.95,
            "threshold_increment": 0.0,
            "samples": 300,
            **GPM,
            "layers": ["conv1", "conv2", "fc"],
        },
    },
    "l2p": {"L2P": {"strength": 0.1, "mask_logits": True}},
    "fedcurv": {"FedCurv": {**FEDCURV, "on_unstable": "warn"}},
    "fedprox": {"FedProx": {"mu": 0.01}},
    "fot": {"FOT": {"threshold_increment": 0.0, "sketch_size": 1.0, **FOT}},
}
ON_CIFAR: dict[str, dict[str, Any]] = {
    "fl": {},
    "agem": {"AGEM": {"batch_size": 32}},
    "gpm": {"GPM": {"threshold": 0.965, "threshold_increment": 0.0, "samples": 100, **GPM}},
    "icarl": {"ICaRL": {"size": 200, "batch_size": None, "classifier": "nearest_mean", "mirrored": False}},
    "l2p": {"L2P": {"strength": 0.1, "mask_logits": False}},
    "fedcurv": {"FedCurv": {**FEDCURV, "on_unstable": "clip"}},
    "fedprox": {"FedProx": {"mu": 0.01}},
    "fot": {"FOT": {"threshold": 0.9, "threshold_increment": 0.001, "sketch_size": 5.0, **FOT}},
}
OF_METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "rmnist": ON_MNIST,
    "pmnist": ON_MNIST,
    "cifar10": ON_CIFAR
    | {
        "der": {"DER": {"alpha": 0.3, "beta": 0.0, "batch_size": 32, "over_outputs": "mean"}},
        "cfed": {
            "CFeD": {"surrogate": {"class_path": "cfl.data.sources.CIFAR100", "init_args": SURROGATE}, **CFED},
        },
        "glfc": {"GLFC": {"threshold": 0.3, **GLFC}},
    },
    "cifar100": ON_CIFAR
    | {
        "der": {"DER": {"alpha": 1.0, "beta": 0.0, "batch_size": 32, "over_outputs": "mean"}},
        "cfed": {
            "CFeD": {"surrogate": {"class_path": "cfl.data.sources.CIFAR10", "init_args": SURROGATE}, **CFED},
        },
        "glfc": {"GLFC": {"threshold": 1.2, **GLFC}},
    },
}
"""Benchmark -> method of Table 1 -> class -> options."""

OF_L2P = {
    "network": (
        "PromptedViT",
        {
            "weights": "vit_b_16-c867db91.pth",
            "image_size": 224,
            "patch_size": 16,
            "num_layers": 12,
            "num_heads": 12,
            "hidden_dim": 768,
            "mlp_dim": 3072,
            "pool_size": 10,
            "prompt_length": 5,
            "top_k": 5,
        },
    ),
    "optimizer": ("Adam", {"lr": 0.00375, "betas": [0.9, 0.999], "weight_decay": 0.0}),
    "clipping": 1.0,
}
GREY = ("MNIST", {"mean": [0.449], "std": [0.226], "max_train": None, "max_test": None})
PHOTOGRAPHS = {
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "max_train": None,
    "max_test": None,
}
BESIDES: dict[tuple[str, str], dict[str, Any]] = {
    ("rmnist", "l2p"): OF_L2P | {"source": GREY, "schedule": SCHEDULE | {"rounds_per_task": 5}},
    ("pmnist", "l2p"): OF_L2P | {"source": GREY, "schedule": SCHEDULE | {"rounds_per_task": 1}},
    ("cifar10", "l2p"): OF_L2P | {"source": ("CIFAR10", PHOTOGRAPHS)},
    ("cifar100", "l2p"): OF_L2P | {"source": ("CIFAR100", PHOTOGRAPHS)},
    ("cifar10", "fot"): {"scenario": "task"},
    ("cifar100", "fot"): {"scenario": "task"},
    ("cifar10", "glfc"): {"class_loss": "seen"},
    ("cifar100", "glfc"): {"class_loss": "seen"},
}
"""(benchmark, method) -> settings outside ``methods`` that differ from those of OF_BENCHMARKS."""


def shown(entry: Mapping[str, Any], *hidden: str) -> tuple[str, dict[str, Any]]:
    """Return a class's name without module, and its options without ``hidden``."""
    options = {key: value for key, value in entry["init_args"].items() if key not in hidden}
    return entry["class_path"].rpartition(".")[2], options


@pytest.mark.parametrize(
    ("benchmark", "method"), [(benchmark, method) for benchmark, of in OF_METHODS.items() for method in of]
)
def test_every_setting_of_table_1(benchmark: str, method: str) -> None:
    """Every run of Table 1 has the settings of the paper's section 5, appendix and code, or documented choices."""
    found = of_table1(benchmark, method, "without")
    data, model = found["data"], found["model"]
    expected = OF_BENCHMARKS[benchmark] | BESIDES.get((benchmark, method), {})
    methods = dict(shown(entry) for entry in found["methods"].values())
    if method == "fot" and benchmark in MNIST:  # chosen by sweeps
        assert methods["FOT"].pop("threshold") == {"rmnist": 0.8, "pmnist": 0.7}[benchmark]
    assert methods == OF_METHODS[benchmark][method]
    name, options = shown(model["optimizer"])
    assert {
        "source": shown(data["stream"]["init_args"]["source"]),
        "stream": shown(data["stream"], "source"),
        "partition": shown(data["partition"]),
        **{key: data[key] for key in ("repartition", "num_clients", "scenario", "class_loss")},
        "augmentation": shown(data["augmentation"]) if data["augmentation"] else None,
        "network": shown(model["network"]),
        "optimizer": (name, {key: options[key] for key in expected["optimizer"][1]}),
        "clipping": found["trainer"]["gradient_clip_val"],
        "schedule": {key: found["schedule"][key] for key in expected["schedule"]},
        "buffer": found["buffer"],
    } == expected


def test_the_settings_are_of_all_cells_of_table_1() -> None:
    points = [p for p in fedagem()["table1"].points("paper") if fedagem()["table1"].figures_at(p)]
    cells = {(p["benchmark"], p["method"]) for p in points}
    assert cells == {(benchmark, method) for benchmark, of in OF_METHODS.items() for method in of}


LARGER = ("table7", "table8")
"""Tables of S-TinyImageNet and S-YahooQA."""


def at_larger(table: str, method: str, projection: str, scale: str = "paper") -> dict[str, Any]:
    if table == "table8":
        return config(table, method=method, scale=scale, **{"with": projection})
    return config(table, variant=method if projection == "without" else f"{method}-fedagem", scale=scale)


@pytest.mark.parametrize("table", LARGER)
def test_the_protocol_of_the_larger_data_sets(table: str) -> None:
    """Settings that the paper omits are those of S-CIFAR100, except one local epoch on texts.

    Methods differ in ``methods`` only.
    """
    found = at_larger(table, "fl", "without")
    data, schedule, stream = found["data"], found["schedule"], found["data"]["stream"]["init_args"]
    tiny = table == "table7"
    source = stream["source"]["class_path"].rpartition(".")[2]
    assert (source, stream["num_tasks"]) == (("TinyImageNet", 10) if tiny else ("YahooAnswers", 5))
    assert (stream["class_order"], stream["classes_per_task"]) == ("natural", None)
    assert (schedule["rounds_per_task"], schedule["clients_per_round"], schedule["batch_size"]) == (20, 1.0, 32)
    assert (data["num_clients"], schedule["local_epochs"], schedule["drop_last"]) == (10, 20 if tiny else 1, False)
    assert data["partition"]["class_path"].endswith(".Dirichlet")
    assert data["partition"]["init_args"] == {"alpha": 0.3, "min_samples": 10, "max_retries": 100, "balance": True}
    assert (data["repartition"], data["scenario"], data["class_loss"]) == (True, "class", "all")
    optimizer = found["model"]["optimizer"]
    assert optimizer["class_path"] == "torch.optim.SGD"
    options = optimizer["init_args"]
    assert (options["lr"], options["momentum"], options["weight_decay"]) == (0.1, 0.0, 0.0)
    assert (found["federated"]["client_weighting"], found["federated"]["batchnorm"]) == ("uniform", "average")
    buffer = {"size": 200, "rule": "reservoir", "offered": "once", "keeps": "augmented"}
    augmentation = {"class_path": "cfl.data.augmentation.CropFlip", "init_args": {"padding": 4, "flip": True}}
    assert data["augmentation"] == (augmentation if tiny else None)
    for method in ("fl", "agem", "der"):
        for projection in ("without", "fedagem"):
            if (table, method, projection) == ("table7", "der", "fedagem"):  # not in the paper
                continue
            other = at_larger(table, method, projection)
            assert other["buffer"] == buffer
            assert list(other["methods"]) == [method] * (method != "fl") + ["fed_agem"] * (projection == "fedagem")
            assert {**other, "methods": {}, "buffer": found["buffer"]} == {**found, "methods": {}}
    replay = [at_larger(table, method, "without")["methods"][method]["init_args"] for method in ("agem", "der")]
    assert replay == [{"batch_size": 32}, {"alpha": 1.0, "beta": 0.0, "batch_size": 32, "over_outputs": "mean"}]


def test_networks_of_the_larger_data_sets() -> None:
    """Images have a ResNet-18, pretrained at the published width only. Texts have a linear layer on fixed features."""
    of_images, of_texts = (at_larger(table, "fl", "without")["model"]["network"] for table in LARGER)
    options = dict(of_images["init_args"])
    assert options.pop("weights") == "resnet18-f37072fd.pth"
    assert sum(p.numel() for p in ResNet18((3, 64, 64), 200, **options).parameters()) == 11_271_432
    for scale in ("short", "smoke"):
        assert at_larger("table7", "agem", "fedagem", scale)["model"]["network"]["init_args"]["weights"] is None
    assert of_texts["class_path"] == "cfl.models.MLP"
    linear = MLP((1, 1, 256), 10, **of_texts["init_args"])
    assert [tuple(p.shape) for p in linear.parameters()] == [(10, 256), (10,)]
    assert at_larger("table8", "fl", "without", "short")["model"] == at_larger("table8", "fl", "without")["model"]


@pytest.mark.parametrize("method", IMPLEMENTED)
def test_fed_a_gem_comes_behind_the_methods_own(method: str) -> None:
    """Fed-A-GEM is the last method, with the options of its own file, and the other method's options are unchanged."""
    alone, both = (list(of_table1("rmnist", method, w)["methods"].items()) for w in ("without", "fedagem"))
    assert both[:-1] == alone
    name, entry = both[-1]
    of_file = yaml.safe_load((CONFIGS / "methods" / "fed-agem.yaml").read_text())
    assert name == "fed_agem"
    assert of_file["methods"][name]["init_args"].items() <= entry["init_args"].items()


def test_no_option_of_fed_a_gem_is_left_to_its_default() -> None:
    """Tables set every option of Fed-A-GEM, so that a later change of a default does not change them."""
    arguments = fedagem()["table1"].recipe(place("rmnist", "der", "fedagem")).arguments
    (given,) = [a.partition("=")[2] for a in arguments if a.startswith("--methods.fed_agem=")]
    assert yaml.safe_load(given)["init_args"].keys() == inspect.signature(FedAGEM).parameters.keys()


@pytest.mark.parametrize("name", [f"{method}-{benchmark}" for method in ("fedcurv", "fot") for benchmark in MNIST])
def test_a_search_tries_what_table_1_runs_with(name: str) -> None:
    """Exactly one candidate of a search is Table 1's run with seed 0, apart from settings that all candidates share."""
    path = CONFIGS / "papers" / "fedagem" / "sweeps" / f"{name}.yaml"
    jobs = SweepState(read_sweep(path), resolver(), Results([])).jobs(Path("runs"))
    common = [setting(key, value) for key, value in yaml.safe_load(path.read_text()).get("set", {}).items()]
    method, _, benchmark = name.partition("-")
    run = resolver().experiment([*fedagem()["table1"].recipe(place(benchmark, method)).arguments, *common])
    assert [job.experiment == {**run, "seed_everything": 0} for job in jobs].count(True) == 1


@pytest.mark.parametrize("benchmark", CIFAR)
def test_fedcurv_is_kept_stable_at_the_learning_rate_of_cifar(benchmark: str) -> None:
    options = of_table1(benchmark, "fedcurv", "without")["methods"]["fedcurv"]["init_args"]
    assert (options["strength"], options["on_unstable"]) == (1.0, "clip")


def test_coefficients_of_der() -> None:
    """DER's alpha is that of Table 19."""
    found = {b: of_table1(b, "der", "fedagem")["methods"]["der"]["init_args"]["alpha"] for b in (*MNIST, *CIFAR)}
    assert found == {"rmnist": 1.0, "pmnist": 1.0, "cifar10": 0.3, "cifar100": 1.0}


@pytest.mark.parametrize("benchmark", ["rmnist", "cifar10"])
def test_less_communication_is_as_much_training(benchmark: str) -> None:
    """A variant "0.5x" sends 0.5 times the bytes of FL with as many local epochs in all.

    One round with Fed-A-GEM sends twice the bytes of a round of FL.
    """
    base = config("table3", benchmark=benchmark, communication="fl")["schedule"]
    sent = {}
    for variant in ("2x", "1x", "0.5x", "0.2x"):
        found = config("table3", benchmark=benchmark, communication=variant)
        schedule = found["schedule"]
        assert list(found["methods"]) == ["fed_agem"]
        assert schedule["rounds_per_task"] * schedule["local_epochs"] == base["rounds_per_task"] * base["local_epochs"]
        sent[variant] = 2 * schedule["rounds_per_task"] / base["rounds_per_task"]
    assert sent == {"2x": 2.0, "1x": 1.0, "0.5x": 0.5, "0.2x": 0.2}


def test_settings_of_the_further_tables_arrive() -> None:
    assert (
        config("table2", benchmark="pmnist", buffer="500", method="der", **{"with": "fedagem"})["buffer"]["size"] == 500
    )
    assert config("table5", split="cifar100-5", **{"with": "fedagem"})["data"]["stream"]["init_args"]["num_tasks"] == 5
    clocks = config("table4", variant="der-fedagem")["data"]
    assert (clocks["exposure"], clocks["repartition"]) == ("asynchronous", False)
    assert list(config("table4", variant="der-fedagem")["methods"]) == ["der", "fed_agem"]
    assert config("table6", benchmark="cifar100", method="der", **{"with": "without"})["data"]["num_clients"] == 20
    refined = config("table9", refinement="project_and_scale-always")["methods"]["fed_agem"]["init_args"]
    assert (refined["refinement"], refined["when"]) == ("project_and_scale", "always")
    assert config("table10", share="0.1")["methods"]["fed_agem"]["init_args"]["share"] == 0.1
    assert config("table11", rule="sliding_window")["buffer"]["rule"] == "sliding_window"
    sampled = config("table14", **{"with": "fedagem"})
    assert (sampled["data"]["num_clients"], sampled["schedule"]["clients_per_round"]) == (50, 0.5)
    assert config("table18", **{"with": "fedagem"})["data"]["stream"]["init_args"]["task_order"] == "seeded"


def test_joining_clients_have_the_settings_of_table_16() -> None:
    found = config("table15", method="agem", **{"with": "fedagem"})
    assert found["methods"]["agem"]["init_args"]["batch_size"] == found["schedule"]["batch_size"] == 128  # Algorithm 6
    schedule, optimizer = found["schedule"], found["model"]["optimizer"]["init_args"]
    assert (schedule["rounds_per_task"], schedule["local_epochs"], schedule["batch_size"]) == (200, 20, 128)
    assert schedule["clients_per_round"] == 10
    assert (optimizer["lr"], optimizer["weight_decay"], found["buffer"]["size"]) == (2.0, 1e-5, 2000)
    members = Joining(**found["data"]["participation"]["init_args"]).members(found["data"]["num_clients"], 10, 0)
    assert [len(clients) for clients in members] == [30 + 10 * t for t in range(10)]


@pytest.mark.parametrize(("classes", "size", "clients"), [(10, 500, 120), (10, 500, 50), (2, 5000, 20), (5, 5000, 10)])
def test_every_client_can_get_its_samples(classes: int, size: int, clients: int) -> None:
    """The partitions of Tables 5, 6, 14 and 15 give every client 10 samples within the allowed number of redraws."""
    labels = np.repeat(np.arange(classes), size)
    for seed in range(3):
        shares = Dirichlet(alpha=0.3, min_samples=10).split(labels, clients, np.random.default_rng(seed))
        assert min(len(share) for share in shares) >= 10


@pytest.mark.parametrize("benchmark", ["pmnist", "cifar100"])
def test_scale_short_changes_what_it_says(benchmark: str) -> None:
    paper, short = (
        resolver().experiment(fedagem()["table1"].recipe(place(benchmark, "agem", scale=scale)).arguments)
        for scale in ("paper", "short")
    )
    rounds, epochs = short["schedule"]["rounds_per_task"], short["schedule"]["local_epochs"]
    assert (rounds, epochs) == ((5, 1) if benchmark == "pmnist" else (10, 1))
    short["schedule"] = paper["schedule"]
    if benchmark == "cifar100":
        options, published = (data["data"]["stream"]["init_args"] for data in (short, paper))
        assert (options.pop("num_tasks"), options.pop("classes_per_task")) == (3, 10)
        assert (published.pop("num_tasks"), published.pop("classes_per_task")) == (10, None)
        assert short["model"]["network"]["init_args"]["width"] == 16
        short["model"]["network"] = paper["model"]["network"]
    if benchmark == "pmnist":
        rates = [model["optimizer"]["init_args"].pop("lr") for model in (paper["model"], short["model"])]
        assert rates[1] * rounds == rates[0] * 20
    assert short == paper


def test_cifar100_at_scale_short_has_three_tasks_in_every_table() -> None:
    for split, classes in (("cifar100-5", 20), ("cifar100-10", 10)):
        options = config("table5", scale="short", split=split, **{"with": "fedagem"})["data"]["stream"]["init_args"]
        assert (options["num_tasks"], options["classes_per_task"]) == (3, classes)
    joining = config("table15", scale="short", method="agem", **{"with": "fedagem"})["data"]
    members = Joining(**joining["participation"]["init_args"]).members(joining["num_clients"], 3, 0)
    assert [len(clients) for clients in members] == [30, 40, 50]
    passes = []
    for communication in ("2x", "1x", "0.5x", "0.2x"):
        schedule = config("table3", scale="short", benchmark="cifar100", communication=communication)["schedule"]
        rounds = schedule["rounds_per_task"]
        passes.append((sum(rounds) if isinstance(rounds, list) else 3 * rounds) * schedule["local_epochs"])
    assert passes == [30, 30, 32, 30]


@pytest.mark.parametrize(("benchmark", "rounds"), [("rmnist", 2), ("pmnist", 1), ("cifar10", 4), ("cifar100", 4)])
def test_l2p_at_scale_short_keeps_its_network(benchmark: str, rounds: int) -> None:
    paper, short = (of_table1(benchmark, "l2p", "without", scale) for scale in ("paper", "short"))
    assert short["model"] == paper["model"]
    assert short["schedule"]["rounds_per_task"] == rounds


@pytest.mark.parametrize(("benchmark", "other"), [("cifar10", "CIFAR100"), ("cifar100", "CIFAR10")])
def test_cfed_distils_on_the_other_cifar_and_not_at_the_server(benchmark: str, other: str) -> None:
    """CFeD distils on the other CIFAR set with the options of Table 19, and not at the server."""
    alone, both = (of_table1(benchmark, "cfed", w)["methods"] for w in ("without", "fedagem"))
    assert list(both) == ["cfed", "fed_agem"]
    assert both["cfed"] == alone["cfed"]
    options = alone["cfed"]["init_args"]
    assert options["surrogate"]["class_path"].endswith(f".{other}")
    assert options["server_distillation"] == 0
    assert (options["share"], options["temperature"], options["weight"]) == (0.4, 2.0, 0.1)


@pytest.mark.parametrize("benchmark", CIFAR)
def test_glfc_remembers_as_much_as_the_others(benchmark: str) -> None:
    alone, both = (of_table1(benchmark, "glfc", w) for w in ("without", "fedagem"))
    assert list(both["methods"]) == ["glfc", "fed_agem"]
    assert both["methods"]["glfc"] == alone["methods"]["glfc"]
    options = alone["methods"]["glfc"]["init_args"]
    assert options["size"] == both["buffer"]["size"]
    # The entropy of predictions rises by log 4 = 1.39 from one certain class to four equally likely ones.
    # From two equally likely classes to four it rises by log 2.
    threshold = 0.3 if benchmark == "cifar10" else 1.2
    assert (options["threshold"], options["inversion_steps"], options["perturbation_steps"]) == (threshold, 250, 50)


@pytest.mark.parametrize("benchmark", [*MNIST, *CIFAR])
def test_orders_of_gpm_and_fed_a_gem_differ_in_the_order_alone(benchmark: str) -> None:
    kinds = {kind: config("table1-orders", benchmark=benchmark, last=kind) for kind in ("alone", "fedagem", "gpm")}
    orders = {kind: list(found["methods"]) for kind, found in kinds.items()}
    assert orders == {"alone": ["gpm"], "fedagem": ["gpm", "fed_agem"], "gpm": ["fed_agem", "gpm"]}
    assert kinds["fedagem"] == kinds["gpm"] == of_table1(benchmark, "gpm", "fedagem")
    assert kinds["alone"] == of_table1(benchmark, "gpm", "without")


def test_every_cell_of_table_1_can_be_run() -> None:
    table = fedagem()["table1"]
    cells = [p for p in table.points("paper") if any(matches(figure.when, p) for figure in table.figures.values())]
    assert len(cells) == 76  # 8 methods on R- and P-MNIST, 11 on CIFAR, without and with
    arguments = {(p["benchmark"], p["method"], p["with"]): table.recipe(p).arguments for p in cells}
    for (benchmark, method, projection), found in arguments.items():
        if projection == "fedagem":
            without = arguments[benchmark, method, "without"]
            assert found[: len(without)] == without
            assert [argument.partition("=")[0] for argument in found[len(without) :]] == ["--methods.fed_agem"]


@pytest.mark.parametrize("benchmark", CIFAR)
@pytest.mark.parametrize(("method", "differs"), [("icarl", {}), ("cfed", {}), ("glfc", {"data.class_loss": "seen"})])
def test_further_methods_differ_in_their_methods_alone(method: str, differs: dict[str, str], benchmark: str) -> None:
    base, other = (flatten(of_table1(benchmark, name, "without")) for name in ("fl", method))
    changed = {key for key in {*base, *other} if base.get(key) != other.get(key)}
    assert {key: other.get(key) for key in changed if not key.startswith("methods")} == differs


@pytest.mark.parametrize("benchmark", [*MNIST, *CIFAR])
def test_l2p_at_scale_smoke_needs_no_weights(benchmark: str) -> None:
    assert of_table1(benchmark, "l2p", "without", "smoke")["model"]["network"]["init_args"]["weights"] is None


@pytest.mark.parametrize("benchmark", [*MNIST, *CIFAR])
def test_l2p_sees_pixels_as_its_weights_do(benchmark: str) -> None:
    source = of_table1(benchmark, "l2p", "without")["data"]["stream"]["init_args"]["source"]["init_args"]
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    if benchmark in MNIST:  # grey: the channels' mean
        mean, std = [round(sum(mean) / 3, 3)], [round(sum(std) / 3, 3)]
    assert (source["mean"], source["std"]) == (mean, std)


def test_columns_are_the_readings_of_a_run(tmp_path: Path) -> None:
    """One run fills Class-IL and Task-IL, and the tables of forgetting and transfer. FOT's run fills one column."""
    figures = {
        "acc_task_il": 47.0,
        "fgt_max_last": 70.0,
        "fgt_max_last_task_il": 30.0,
        "bwt": -60.0,
        "bwt_task_il": -20.0,
    }
    figures |= {"fwt": 1.0, "fwt_task_il": 17.0}
    table = fedagem()["table1"]
    write_run(tmp_path / "fl", table.recipe(place("cifar100")).arguments, 0, 8.8, **figures)
    write_run(tmp_path / "fot", table.recipe(place("cifar100", "fot")).arguments, 0, 68.0)
    known = Experiments(resolver(), read_results(tmp_path), MissingData(tmp_path / "missing.json"))

    def values(name: str) -> dict[tuple[str, str], Any]:
        cells = known.cells(fedagem()[name], "paper", {"benchmark": ["cifar100"]})
        return {(c.point["method"], c.figure): c.seeds[0] for c in cells if c.seeds}

    assert values("table1") == {
        ("fl", "Class-IL"): 8.8,
        ("fl", "Task-IL"): 47.0,
        ("fot", "Task-IL, own outputs"): 68.0,
    }
    assert values("table12") == {("fl", "Class-IL"): 70.0, ("fl", "Task-IL"): 30.0}
    assert values("table17") == {
        ("fl", "BWT, Class-IL"): -60.0,
        ("fl", "BWT, Task-IL"): -20.0,
        ("fl", "FWT, Class-IL"): 1.0,
        ("fl", "FWT, Task-IL"): 17.0,
    }


def test_figures_ask_for_what_their_axes_say() -> None:
    """Figure 3 shows task 1 for buffer sizes, Figure 4 ACC and forgetting, Figure 5 the current task."""
    figures = {name: fedagem()[name] for name in ("figure3", "figure4", "figure5")}
    assert {n: {f: c.value for f, c in table.figures.items()} for n, table in figures.items()} == {
        "figure3": {"task 1": "curves_task_il[0]"},
        "figure4": {
            "ACC": "averages",
            "ACC, Task-IL": "averages_task_il",
            "FGT": "forgettings",
            "FGT, Task-IL": "forgettings_task_il",
        },
        "figure5": {"current task": "diagonal"},
    }
    assert {n: (dict(t.axes), t.lines, t.over) for n, t in figures.items()} == {
        "figure3": ({"buffer": ["none", "50", "100", "200", "500", "5120"]}, "buffer", "tasks"),
        "figure4": (
            {
                "benchmark": ["rmnist", "pmnist", "cifar10", "cifar100"],
                "with": ["without", "fedagem"],
                "method": ["fl", "fedcurv", "fedprox", "agem", "der"],
            },
            "method",
            "tasks",
        ),
        "figure5": ({"with": ["without", "fedagem"]}, "with", "tasks"),
    }
    of_clients = {"benchmark": "cifar100", "method": "fl"}
    assert [dict(figures[name].fixed) for name in figures] == [of_clients, {}, of_clients]
    for size in ("50", "100", "200", "500", "5120"):
        found = config("figure3", buffer=size)
        assert (found["buffer"]["size"], list(found["methods"])) == (int(size), ["fed_agem"])
    assert config("figure3", buffer="none")["methods"] == {}


def test_figure_6_compares_memories_on_one_stream_in_time() -> None:
    found = {variant: config("figure6", variant=variant) for variant in fedagem()["figure6"].axes["variant"]}
    settings = {v: (c["data"]["exposure"], c["schedule"]["local_epochs"], list(c["methods"])) for v, c in found.items()}
    assert settings == {
        "ideal": ("streaming-cumulative", 3, []),
        "fl": ("streaming", 10, []),
        "der": ("streaming", 10, ["der"]),
        "der-fedagem": ("streaming", 10, ["der", "fed_agem"]),
    }
    assert {c["buffer"]["size"] for c in found.values()} == {200}
    assert {sum(c["schedule"]["rounds_per_task"]) for c in found.values()} == {70}
    of_ends = {variant: config("figure6-end", variant=variant) for variant in found}
    assert of_ends == found


def test_figures_show_the_readings_of_a_run(tmp_path: Path) -> None:
    """Every curve of Figures 3 to 5 follows from the run's matrices, whose row t is the accuracy after task t."""
    class_il = [[80.0, 1.0, 2.0], [50.0, 90.0, 3.0], [20.0, 60.0, 70.0]]
    task_il = [[82.0, 40.0, 41.0], [88.0, 92.0, 42.0], [76.0, 84.0, 95.0]]
    folder = write_run(tmp_path / "fl", fedagem()["table1"].recipe(place("cifar100")).arguments, matrix=class_il)
    write_matrix_csv(folder / "accuracy_matrix_task_il.csv", torch.tensor(task_il, dtype=torch.float64))
    known = Experiments(resolver(), read_results(tmp_path), MissingData(tmp_path / "missing.json"))
    found = {
        (name, c.figure): c.seeds[0]
        for name in ("figure3", "figure4", "figure5")
        for c in known.cells(fedagem()[name], "paper", {"benchmark": ["cifar100"]} if name == "figure4" else None)
        if c.seeds
    }
    assert found == {
        ("figure3", "task 1"): [82.0, 88.0, 76.0],
        ("figure4", "ACC"): [80.0, 70.0, 50.0],
        ("figure4", "ACC, Task-IL"): [82.0, 90.0, 85.0],
        ("figure4", "FGT"): [None, 30.0, 45.0],
        ("figure4", "FGT, Task-IL"): [None, 0.0, 10.0],  # 0 for a task whose last accuracy is its best
        ("figure5", "current task"): [80.0, 90.0, 70.0],
    }


def test_figure_4_has_what_it_compares_in_one_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figure 4 draws a method with Fed-A-GEM as a solid line and without as a dotted line, in one panel and colour."""
    drawn: list[Figure] = []
    monkeypatch.setattr("cfl.papers.pictures.save", lambda figure, path: drawn.append(figure) or path)
    curves = {"without": [[80.0, 1.0], [50.0, 90.0]], "fedagem": [[81.0, 1.0], [75.0, 85.0]]}
    for projection, matrix in curves.items():
        arguments = fedagem()["table1"].recipe(place(method="der", projection=projection)).arguments
        write_run(tmp_path / projection, arguments, matrix=matrix)
    known = Experiments(resolver(), read_results(tmp_path), MissingData(tmp_path / "missing.json"))
    table = fedagem()["figure4"]
    assert table_picture(table, known.cells(table, "paper"), tmp_path / "p.png")
    (figure,) = drawn
    panels = [axes for axes in figure.axes if axes.lines]
    assert [(axes.get_title(), axes.get_ylabel()) for axes in panels] == [("R-MNIST", "ACC"), ("R-MNIST", "FGT")]
    lines = {line.get_linestyle(): list(line.get_ydata()) for line in panels[0].lines}  # type: ignore[arg-type]
    assert lines == {":": [80.0, 70.0], "-": [81.0, 80.0]}
    assert len({line.get_color() for line in panels[0].lines}) == 1
    (legend,) = figure.legends
    looks = {text.get_text(): line.get_linestyle() for text, line in zip(legend.texts, legend.get_lines(), strict=True)}
    assert looks.items() >= {"FL+DER": "-", "without": ":", "with Fed-A-GEM": "-"}.items()
    figure5 = fedagem()["figure5"]
    assert [figure5.label("with", value) for value in figure5.axes["with"]] == ["FL", "FL+Fed-A-GEM"]


def test_a_part_of_cifar_10_is_tried_as_the_whole() -> None:
    """Every run of table1-present is Table 1's, except the images of CIFAR-10, and rounds and epochs at scale short."""
    here, there = fedagem()["table1-present"], fedagem()["table1"]
    assert not here.published
    cells = [point for point in here.points("paper") if here.figures_at(point)]
    assert {(p["benchmark"], p["method"]) for p in cells} == {
        *(("cifar10", method) for method in here.axes["method"]),
        ("cifar100", "cfed"),
    }
    assert set(there.axes["method"]) - set(here.axes["method"]) == {"l2p"}
    part = {"path": "cifar10_subset.npz", "shape": [3, 32, 32], "num_classes": 10}
    for point in cells:
        found = flatten(resolver().config(here.recipe(point).arguments))
        published = {axis: value for axis, value in point.items() if axis != "images"}
        whole = flatten(resolver().config(there.recipe(published).arguments))
        changed = {key for key in {*found, *whole} if found.get(key) != whole.get(key)}
        if point["benchmark"] == "cifar10":
            source = "data.stream.init_args.source"
            assert found["run.benchmark"] == "fedagem-cifar10-present"
            assert changed == {
                "run.benchmark",
                f"{source}.class_path",
                *(f"{source}.init_args.{key}" for key in UNLIKE),
            }
        else:
            source = "methods.cfed.init_args.surrogate"
            assert {key for key in changed if not key.startswith(source)} == set()
        assert {key: found[f"{source}.init_args.{key}"] for key in part} == part
    short = resolver().config(here.recipe({**cells[0], "scale": "short"}).arguments)["schedule"]
    assert (short["rounds_per_task"], short["local_epochs"]) == (10, 2)


def test_a_part_of_cifar_10_is_held_against_table_1_by_order() -> None:
    """Every method with Fed-A-GEM is compared with itself without, beside the published numbers of both."""
    table = fedagem()["table1-present"]
    made = [
        Cell(table, point, figure, None, {0: 60.0 if point["with"] == "fedagem" else 50.0})
        for point in table.points("short", {"method": ["der", "fot"]})
        for figure in table.figures_at(point)
    ]
    found = {(part.place["benchmark"], part.place["method"], part.figure): part for part in compare_orders(table, made)}
    assert set(found) == {
        ("cifar10", "der", "Class-IL"),
        ("cifar10", "der", "Task-IL"),
        ("cifar10", "fot", "Task-IL, own outputs"),
    }
    assert found["cifar10", "der", "Task-IL"].paper == {"without": 69.34, "fedagem": 77.99}
    assert found["cifar10", "fot", "Task-IL, own outputs"].paper == {"without": 73.73, "fedagem": 76.94}
    assert found["cifar10", "der", "Class-IL"].gap == (10.0, pytest.approx(12.5))
