"""What makes two runs the same experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.tiny_cli import fit

from cfl.reporting.experiment import benchmark_name, config_hash, differences, experiment_of


def config(*methods: str) -> dict[str, Any]:
    return {
        "seed_everything": 0,
        "model": {},
        "data": {},
        "schedule": {},
        "federated": {},
        "methods": {name: {"class_path": f"cfl.methods.{name}", "init_args": {}} for name in methods},
    }


def test_the_order_of_methods_makes_another_experiment() -> None:
    one, other = experiment_of(config("AGEM", "GPM")), experiment_of(config("GPM", "AGEM"))
    assert config_hash(one) != config_hash(other)
    assert differences(one, other) == ["methods_order: ['AGEM', 'GPM'], in the checkpoint ['GPM', 'AGEM']"]
    assert config_hash(one) == config_hash(experiment_of(config("AGEM", "GPM")))


@pytest.mark.parametrize("methods", [(), ("GPM",)])
def test_fewer_than_two_methods_have_none(methods: tuple[str, ...]) -> None:
    assert "methods_order" not in experiment_of(config(*methods))


def test_only_a_reduced_precision_of_products_makes_another_experiment() -> None:
    plain = config_hash(experiment_of(config()))
    assert plain == config_hash(experiment_of({**config(), "engine": {"matmul_precision": "highest", "kind": "vmap"}}))
    assert plain != config_hash(experiment_of({**config(), "engine": {"matmul_precision": "medium"}}))


def source(name: str, **options: Any) -> dict[str, Any]:
    return {"class_path": f"cfl.data.sources.{name}", "init_args": options}


@pytest.mark.parametrize(
    ("sources", "name"),
    [
        ([source("MNIST")], "permuted-mnist"),
        ([source("Arrays", path="~/my data/X rays.v2.npz")], "permuted-X-rays.v2"),
        ([source("ImageFolder", folder="birds.2021/")], "permuted-birds.2021"),
        ([source("BinarySet", set="dna"), source("Digits")], "permuted-dna-digits"),
        ([source("Arrays", path="???")], "permuted-arrays"),
        ([{"class_path": "elsewhere.Own", "init_args": {"path": "x"}}], "permuted-own"),
    ],
)
def test_a_benchmark_is_called_by_its_data_sets(sources: list[dict[str, Any]], name: str) -> None:
    """Else the runs on all files of one kind would stand in one table."""
    options = {"source": sources[0]} if len(sources) == 1 else {"sources": sources}
    stream = {"class_path": "cfl.data.streams.Permuted", "init_args": options}
    assert benchmark_name({"data": {"stream": stream}}) == name


def test_a_run_is_continued_in_its_order_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prox, ewc = ("--methods.prox", "FedProx"), ("--methods.ewc", "EWC")
    assert fit(tmp_path / "run", *prox, *ewc) == 0
    assert list(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["methods"]) == ["prox", "ewc"]
    last = ("--ckpt_path", str(tmp_path / "run" / "last.ckpt"))
    assert fit(tmp_path / "same", *prox, *ewc, *last) == 0
    capsys.readouterr()
    assert fit(tmp_path / "swapped", *ewc, *prox, *last) == 2
    assert "methods_order: ['ewc', 'prox'], in the checkpoint ['prox', 'ewc']" in capsys.readouterr().err
