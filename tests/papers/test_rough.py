"""The quick look at a configuration never rules out what it resolves to, and rules out nearly all else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support import tiny_cli
from support.fabricated import every_table, resolver

from cfl.papers.cells import each_recipe
from cfl.papers.missing_data import needs_of
from cfl.papers.rough import rough


def spread_out() -> list[tuple[str, ...]]:
    """A run from every fourth table, each of another scale and place than the one before."""
    found = []
    for number, table in enumerate(list(every_table().values())[::4]):
        scale = list(table.paper.scales)[number % 3]
        recipes = [recipe.arguments for _, recipe in each_recipe(table, scale)]
        if recipes:
            found.append(recipes[number * 7 % len(recipes)])
    return found


def test_what_it_resolves_to_may_be_and_others_may_not() -> None:
    looks = [rough(arguments) for arguments in spread_out()]
    experiments = [resolver().experiment(arguments) for arguments in spread_out()]
    assert len(looks) > 10
    for look, experiment in zip(looks, experiments, strict=True):
        assert look.may_be(experiment)
        assert sum(look.may_be(other) for other in experiments) <= 2


@pytest.mark.parametrize(
    ("further", "said", "unsaid"),
    [
        (["--data.num_clients=7"], {"data.num_clients": 7}, []),
        (["--model.network.hidden=[3]", "--data.num_clients=7"], {"model.network.hidden": [3]}, []),
        # The options of a class that is not used any more say nothing.
        (["--data.partition.class_path=Dirichlet"], {"data.partition.class_path": "Dirichlet"}, ["per_client"]),
        (["--data.partition=Dirichlet"], {"data.partition": "Dirichlet"}, ["per_client", "class_path"]),
    ],
)
def test_the_last_word_counts(further: list[str], said: dict[str, Any], unsaid: list[str]) -> None:
    tiny = f"--config={tiny_cli.TINY}"
    base = [tiny, "--data.partition={class_path: Shards, init_args: {per_client: 2}}", "--data.num_clients=5"]
    look = rough([*base, *further])
    assert said.items() <= look.said.items()
    assert not any(key.startswith("data.partition") and key.endswith(name) for key in look.said for name in unsaid)
    assert rough(base).said["data.partition.per_client"] == 2
    assert look.may_be(resolver().experiment([*base, *further]))


@pytest.mark.parametrize(
    ("resolved", "may_be"),
    [
        ({"data": {"num_clients": 5}}, True),
        ({"data": {"num_clients": 5.0}}, True),
        ({"data": {"num_clients": 6}}, False),
        ({"data": {}}, True),  # a run made before there was the option
        ({"data": {"num_clients": 5, "partition": {"class_path": "cfl.data.partitions.Shards"}}}, True),
        ({"data": {"num_clients": 5, "partition": {"class_path": "cfl.data.partitions.Dirichlet"}}}, False),
        ({"data": {"num_clients": 5}, "model": {"optimizer": {"init_args": {"nesterov": True}}}}, False),
        ({"data": {"num_clients": 5}, "model": {"optimizer": {"init_args": {"lr": 0.001}}}}, True),  # "1e-3", a text
        ({"data": {"num_clients": 5}, "seed_everything": 9}, True),
    ],
)
def test_only_what_surely_differs_rules_out(resolved: dict[str, Any], may_be: bool) -> None:
    look = rough(
        [
            "--data.num_clients=5",
            "--data.partition={class_path: Shards}",
            "--model.optimizer.init_args={lr: 1e-3, nesterov: false}",
        ]
    )
    assert look.may_be({"methods": {}, **resolved}) == may_be


def test_methods_join_over_files_until_one_has_none(tmp_path: Path) -> None:
    def file(name: str, *methods: str) -> str:
        text = yaml.safe_dump({"methods": {method: {"class_path": "FOT"} for method in methods}})
        (tmp_path / name).write_text(text)
        return f"--config={tmp_path / name}"

    files = [file("a.yaml", "a"), file("none.yaml"), file("b.yaml", "b"), file("c.yaml", "c")]
    look = rough([*files, "--methods.d=FOT"])
    assert sorted(look.surely) == ["b", "c", "d"]
    for names, may_be in (("bcd", True), ("abcd", True), ("bc", False), ("bcde", False), ("", False)):
        assert look.may_be({"methods": {name: {"class_path": "cfl.methods.FOT"} for name in names}}) == may_be
    # An argument that says all methods takes the place of the files' ones.
    look = rough([*files, "--methods={e: {class_path: FOT}}"])
    assert sorted(look.surely) == ["e"]
    assert look.may_be({"methods": {"e": {"class_path": "cfl.methods.FOT"}}})
    assert sorted(rough([*files, "--methods={}"]).surely) == []


@pytest.mark.parametrize(
    ("argument", "resolved"),
    [
        ("--data.num_clients=012", 12),
        ("--data.num_clients=00010", 10),
        ("--model.optimizer.init_args.weight_decay=.nan", float("nan")),
    ],
)
def test_values_that_are_read_in_several_ways_rule_nothing_out(argument: str, resolved: float) -> None:
    experiment: dict[str, Any] = {"methods": {}}
    here = experiment
    *keys, last = argument.removeprefix("--").partition("=")[0].split(".")
    for key in keys:
        here = here.setdefault(key, {})
    here[last] = resolved
    assert rough([argument]).may_be(experiment)


def test_arguments_that_are_no_yaml_are_left_to_the_parser(tmp_path: Path) -> None:
    assert (
        rough(["--run.benchmark=a: b: c", "--run.benchmark=@x", "--config={data: {num_clients: 7}}"]).said[
            "data.num_clients"
        ]
        == 7
    )


def test_words_are_of_streams_and_of_methods_that_stay(tmp_path: Path) -> None:
    """A method may read a data set of its own; one that another class or file takes the place of is not read."""
    own = tmp_path / "own.yaml"
    source = {"class_path": "cfl.data.sources.CIFAR100"}
    own.write_text(yaml.safe_dump({"methods": {"a": {"class_path": "CFeD", "init_args": {"surrogate": source}}}}))
    none = tmp_path / "none.yaml"
    none.write_text("methods:\n")
    file = f"--config={own}"
    assert "CIFAR100" in rough([file]).words
    assert "CIFAR100" not in rough([file, "--methods={}"]).words
    assert "CIFAR100" not in rough([file, f"--config={none}"]).words
    other = rough([file, "--methods.a.init_args.surrogate.class_path=cfl.data.sources.Synthetic"]).words
    assert "Synthetic" in other
    assert "CIFAR100" not in other
    own.write_text(yaml.safe_dump({"methods": {"a": {"class_path": "CFeD", "init_args": {"surrogate": "CIFAR100"}}}}))
    other = rough([file, '--methods.a.surrogate={"class_path": "Arrays", "init_args": {"path": "part.npz"}}']).words
    assert "part.npz" in other
    assert "CIFAR100" not in other


def test_every_data_set_that_a_run_looks_for_is_seen() -> None:
    """Those of streams and of methods, such as CFeD's images without labels."""
    cfed = each_recipe(every_table()["fedagem-table1"], "paper")
    arguments = [next(r.arguments for p, r in cfed if (p["benchmark"], p["method"]) == ("cifar10", "cfed"))]
    seen = []
    for of_one in [*arguments, *spread_out()]:
        sources = set(needs_of(resolver().experiment(of_one)))
        assert sources <= rough(of_one).words
        seen.append(sources)
    assert seen[0] == {"CIFAR10", "CIFAR100"}


def test_files_of_sets_that_a_class_alone_does_not_tell_are_seen() -> None:
    tables = {"fedweit-figure6-left": {"gtsrb.npz", "facescrub100"}, "confedmade-table3-present": {"adult"}}
    for name, needed in tables.items():
        of_one = next(recipe.arguments for _, recipe in each_recipe(every_table()[name], "paper"))
        found = set(needs_of(resolver().experiment(of_one)))
        assert needed <= found <= rough(of_one).words


def test_weights_that_a_run_starts_from_are_seen() -> None:
    l2p = each_recipe(every_table()["fedagem-table1"], "paper")
    of_one = next(r.arguments for p, r in l2p if (p["benchmark"], p["method"]) == ("cifar10", "l2p"))
    needs = {"CIFAR10", "vit_b_16-c867db91.pth"}
    assert set(needs_of(resolver().experiment(of_one))) == needs <= rough(of_one).words
    without = [*of_one, "--model.network.init_args.weights=null"]
    assert "vit_b_16-c867db91.pth" not in rough(without).words
