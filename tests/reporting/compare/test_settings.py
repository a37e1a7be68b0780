"""A run's settings with the keys of the command line, and which of them differ between runs."""

from __future__ import annotations

from pathlib import Path

import yaml
from support import tiny_cli

from cfl.reporting.compare.settings import differing, settings_of, short_names
from cfl.reporting.experiment import experiment_of, flatten

CONFIG = {
    "seed_everything": 3,
    "trainer": {"precision": "32", "devices": 2},
    "model": {"network": {"class_path": "cfl.models.MLP", "init_args": {"hidden": [400]}}, "engine": {"kind": "auto"}},
    "data": {"partition": {"class_path": "cfl.data.partitions.Shards", "init_args": {"per_client": 2}}, "root": "/x"},
    "methods": {"fot": {"class_path": "cfl.methods.FOT", "init_args": {"threshold": 0.96, "layers": None}}},
    "schedule": {"batch_size": 16, "cohort_width": 4},
    "federated": {"server_lr": 1.0, "client_state_memory_mb": 1},
}


def test_keys_are_those_of_the_command_line() -> None:
    assert settings_of(CONFIG) == {
        "trainer.precision": None,
        "trainer.gradient_clip_val": None,
        "trainer.gradient_clip_algorithm": None,
        "model.network": "MLP",
        "model.network.hidden": [400],
        "data.partition": "Shards",
        "data.partition.per_client": 2,
        "methods.fot": "FOT",
        "methods.fot.threshold": 0.96,
        "methods.fot.layers": None,
        "schedule.batch_size": 16,
        "federated.server_lr": 1.0,
        "engine.matmul_precision": "highest",
    }
    exact = {"engine.matmul_precision": "highest"}
    assert settings_of({"methods": {}}) == {"methods": {}, **exact}
    assert settings_of({"targets": {"accuracies": [90], "stop": False}}) == exact
    assert settings_of({"targets": {"accuracies": [90], "stop": True}}) == {
        "targets.accuracies": [90],
        "targets.stop": True,
        **exact,
    }
    reduced = settings_of({"engine": {"kind": "vmap", "matmul_precision": "high"}})
    assert differing([exact, reduced]) == {"engine.matmul_precision": ["highest", "high"]}


def test_classes_of_the_package_have_short_names_and_others_their_paths() -> None:
    """Two modules of a user's may each have a class of one name, which may also be that of a class of the package."""
    paths = {"cfl.models.MLP": "MLP", "MLP": "MLP", "torch.optim.SGD": "SGD"}
    paths |= {path: path for path in ("lab.a.MLP", "lab.b.MLP", "cfl_mine.MLP", "torch.optimal.SGD")}
    for path, short in paths.items():
        assert settings_of({"model": {"network": {"class_path": path}}})["model.network"] == short


def test_they_are_what_decides_an_experiment_the_seed_apart(tmp_path: Path) -> None:
    """A run's settings have the keys of the hashed experiment without the seed, here of a run with a buffer."""
    assert tiny_cli.fit(tmp_path / "run", "--methods.der", "DER") == 0
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    experiment = flatten(experiment_of(config))
    expected = {key.replace(".init_args", "").replace(".class_path", "") for key in experiment} - {"seed_everything"}
    # The highest precision is not part of an experiment's hash.
    assert set(settings_of(config)) == expected | {"engine.matmul_precision"}


def test_only_what_both_have_can_differ() -> None:
    one = {"data.partition": "Shards", "data.partition.per_client": 2, "schedule.batch_size": 16, "a": None}
    two = {"data.partition": "IID", "schedule.batch_size": 16, "data.new_option": 1, "a": False}
    assert differing([one, two]) == {"data.partition": ["Shards", "IID"], "a": ["null", "false"]}
    assert differing([one, dict(one)]) == differing([one]) == differing([]) == {}


def test_short_names_stay_apart() -> None:
    assert short_names(["methods.fot.threshold", "data.num_clients"]) == {
        "methods.fot.threshold": "threshold",
        "data.num_clients": "num_clients",
    }
    both = ["methods.fot.share", "methods.rgo.share"]
    assert short_names(both) == {key: key for key in both}
