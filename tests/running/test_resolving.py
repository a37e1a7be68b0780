"""The resolver gives the configuration that ``cfl fit`` runs, and runs from before an option existed are recognised."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from support import tiny_cli
from support.paper_tables import fot, point, resolver, tables_of, write_run

from cfl.cli.checkpoints import SECTIONS
from cfl.papers.results import Results, read_result
from cfl.reporting.experiment import config_hash, with_defaults
from cfl.running.resolving import num_rounds, same_experiment
from cfl.runtime.errors import NotUnderstood


def test_hash_is_that_of_a_run(tmp_path: Path) -> None:
    """The resolved experiment, the run's summary and the result read from its folder have the same hash."""
    arguments = [f"--config={tiny_cli.TINY}", "--methods={fot: {class_path: FOT}}", "--schedule.rounds_per_task=1"]
    assert tiny_cli.run("fit", *arguments, "--seed_everything=3", f"--run.dir={tmp_path / 'run'}") == 0
    wanted = resolver().experiment(arguments, seed=3)
    summary = tiny_cli.summary(tmp_path / "run")
    assert summary["config_hash"] == config_hash(wanted)
    result = read_result(tmp_path / "run")
    assert (result.hash, result.seed) == (summary["config_hash"], 3)
    assert result.experiment == wanted
    # Tables read these figures.
    assert result.figure("acc") == summary["acc"]
    assert result.figure("mean(matrix[-1])") == pytest.approx(summary["acc"], abs=1e-9)
    assert list(result.space) == ["layers.0", "head"]
    assert result.figure('used("head")') == [pytest.approx(result.space["head"][0])]
    assert result.client_epochs == 2 * 2  # two rounds of two clients
    assert result.figure("used_space") == pytest.approx((result.space["head"][0] + result.space["layers.0"][0]) / 2)


def test_refused_arguments_are_named() -> None:
    with pytest.raises(NotUnderstood, match=r"schedule\.rounds_per_tsk"):
        resolver().config([f"--config={tiny_cli.TINY}", "--schedule.rounds_per_tsk=1"])
    with pytest.raises(NotUnderstood, match=r"one of .*FOT"):
        resolver().config([f"--config={tiny_cli.TINY}", "--methods={a: {class_path: NoSuchMethod}}"])


def test_rounds() -> None:
    table = fot()["table1"]
    recipes = {name: table.recipe(point(benchmark=name)) for name in table.axes["benchmark"]}
    rounds = {name: num_rounds(resolver().config(recipe.arguments)) for name, recipe in recipes.items()}
    assert rounds == {"pmnist": 1100, "cifar100": 10000, "five-datasets": 1500, "mini-imagenet": 5000}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), 6),
        (("--data.sequences={class_path: RandomTasks, init_args: {count: 1}}",), 3),
        (("--data.sequences={class_path: FixedTasks, init_args: {tasks: [[0], [1], [0], [1]]}}",), 3),
        (("--data.sequences={class_path: FixedTasks, init_args: {tasks: [[0, 1], [1, 0]], count: 1}}",), 3),
        (("--data.sequences={class_path: FixedTasks, init_args: {tasks: []}}",), None),  # the run refuses this
        (("--schedule.rounds_per_task=[2, 1]",), 3),
        (("--schedule.clock_spread=0.5",), None),
        (("--schedule.clock_spread=0.5", "--schedule.rounds_per_task=[2, 1]"), None),
        (("--data.stream={class_path: Sequence, init_args: {sources: [MNIST, KMNIST]}}",), 6),
        (("--data.stream={class_path: Mixture, init_args: {sources: [MNIST, KMNIST], tasks_per_source: [2, 1]}}",), 9),
        (("--data.stream={class_path: Mixture, init_args: {sources: [MNIST, KMNIST]}}",), None),
    ],
)
def test_rounds_where_it_is_not_the_stream_that_says(options: tuple[str, ...], expected: int | None) -> None:
    """The number of rounds follows from clients' task sequences. It is unknown with random clocks or mixtures."""
    assert num_rounds(resolver().config([f"--config={tiny_cli.TINY}", *options])) == expected


def test_rounds_of_clients_with_tasks_of_their_own() -> None:
    recipe = tables_of("fedweit")["table1"].recipe(point("smoke", benchmark="noniid", method="fedweit"))
    assert num_rounds(resolver().config(recipe.arguments)) == 4


def experiment() -> dict[str, Any]:
    return copy.deepcopy(resolver().experiment(fot()["table1"].recipe(point(method="fot")).arguments))


@pytest.mark.parametrize(
    "place",
    [
        "methods.fot.init_args.gpse_batch_size",
        "methods.fot.init_args.mechanism",
        "schedule.drop_last",
        "data.eval_batch_size",
        "data.stream.init_args.source.init_args.max_train",
        "federated.server_lr",
        "trainer.gradient_clip_val",
        "model.optimizer.init_args.momentum",
    ],
)
def test_a_run_from_before_an_option_existed_counts(place: str) -> None:
    """A run from before an option existed is of the wanted experiment exactly if that has the option's default."""
    wanted, older = experiment(), experiment()
    *above, name = place.split(".")
    node = older
    for part in above:
        node = node[part]
    default = node.pop(name)
    older["seed_everything"] = 7
    assert same_experiment(wanted, older)
    node = wanted
    for part in above:
        node = node[part]
    node[name] = "something else"
    assert default != "something else"
    assert not same_experiment(wanted, older)


def test_an_option_whose_default_is_not_what_was_before_says_what_was() -> None:
    """A run from before an option existed counts with the former behaviour where this is not the default.

    FedCIL's generators did not normalise before the option existed. By default they do.
    """
    wanted = resolver().experiment(fot()["table1"].recipe(point(method="fedcil")).arguments)
    older = copy.deepcopy(wanted)
    assert older["model"]["network"]["init_args"].pop("generator_norm") == "batch"
    assert not same_experiment(wanted, older)
    without = copy.deepcopy(wanted)
    without["model"]["network"]["init_args"]["generator_norm"] = "none"
    assert same_experiment(without, older)


def test_a_class_that_had_no_options_counts_too() -> None:
    wanted, older = experiment(), experiment()
    del older["data"]["stream"]["init_args"]["source"]["init_args"]
    assert same_experiment(wanted, older)


def test_what_is_really_different_does_not_count() -> None:
    for change in ("removed option", "value", "class", "option without default"):
        wanted, other = experiment(), experiment()
        if change == "removed option":
            other["schedule"]["gone"] = 1
        elif change == "value":
            other["schedule"]["batch_size"] = 63
        elif change == "class":
            other["data"]["partition"] = {"class_path": "cfl.data.partitions.IID", "init_args": {"per_client": 2}}
        else:
            del other["data"]["stream"]["init_args"]["source"]
        assert not same_experiment(wanted, other), change


def test_defaults_come_from_base_classes_as_well() -> None:
    class Base:
        def __init__(self, of_base: int = 3) -> None: ...

    class Derived(Base):
        def __init__(self, own: int = 4, **others: int) -> None: ...

    newer = {"part": {"of_base": 3, "own": 4, "unknown": 5}}
    assert with_defaults({"part": {}}, newer, {"part": Derived}) == {"part": {"of_base": 3, "own": 4}}
    assert with_defaults({"part": {}}, newer, {}) == {"part": {}}


def test_found_runs_are_those_of_the_experiment(tmp_path: Path) -> None:
    """One run is found for each seed: the first with an equal hash, else one from before an option existed."""
    arguments = fot()["table1"].recipe(point(method="fot")).arguments
    other = fot()["table1"].recipe(point(method="fedavg")).arguments
    old = copy.deepcopy(resolver().config(arguments))
    del old["methods"]["fot"]["init_args"]["gpse_batch_size"]
    folders = [
        write_run(tmp_path / "a", arguments, seed=1, acc=1.0),
        write_run(tmp_path / "b", arguments, seed=0, acc=2.0),
        write_run(tmp_path / "c", other, seed=0, acc=3.0),
        write_run(tmp_path / "d", arguments, seed=1, acc=4.0),
        write_run(tmp_path / "e", arguments, seed=0, acc=5.0, config=old),
        write_run(tmp_path / "f", arguments, seed=2, acc=6.0, config=old),
    ]
    found = Results(read_result(folder) for folder in folders).of(resolver().experiment(arguments))
    assert {seed: result.summary["acc"] for seed, result in found.items()} == {0: 2.0, 1: 1.0, 2: 6.0}
    assert list(found) == [0, 1, 2]


def test_sections_have_the_options_of_the_configuration() -> None:
    """Every option of a section is completed from the section's class."""
    config = resolver().config([f"--config={tiny_cli.TINY}"])
    for section, owner in SECTIONS.items():
        # Some sections belong to an experiment only where they matter.
        wanted = {section: config[section], **experiment()}
        for option in wanted[section]:
            stripped = copy.deepcopy(wanted)
            del stripped[section][option]
            filled = with_defaults(stripped, wanted, SECTIONS)
            if option not in ("network", "optimizer", "stream"):  # these have no default
                assert option in filled[section], (owner, option)
