"""The command line: how configurations are merged, and that fit, validate and test agree."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from support import tiny_cli
from support.paper_tables import resolver
from support.tiny_cli import printed_config

import cfl.methods
from cfl.__main__ import main as command_line
from cfl.cli.federated_cli import FederatedCLI
from cfl.cli.installed_configs import DEFAULT_CONFIG
from cfl.reporting.matrix_file import read_matrix_csv
from cfl.running.finished import read_finished
from cfl.running.resolving import same_experiment
from cfl.runtime.checkpoint_file import write_checkpoint
from cfl.runtime.command_line import read_command_line

FOT = ("--methods.fot", "FOT", "--methods.fot.threshold", "0.9")


# Configuration.


def test_later_files_win_and_the_command_line_wins_over_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each overrides those before it: default.yaml, the first --config, the second --config, options after them."""
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("schedule: {batch_size: 5, local_epochs: 5, rounds_per_task: 5}\n")
    second.write_text("schedule: {local_epochs: 6, rounds_per_task: 6}\n")
    files = ("--config", str(first), "--config", str(second))
    schedule = printed_config(capsys, *files, "--schedule.rounds_per_task", "7")["schedule"]
    default = printed_config(capsys)["schedule"]
    expected = {**default, "batch_size": 5, "local_epochs": 6, "rounds_per_task": 7}
    assert schedule == expected
    assert default["clients_per_round"] == 10  # from default.yaml, which the command line does not name


def test_the_default_of_clients_per_round_is_lowered_to_the_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lowered value is in the kept configuration and used from then on. A value that the user sets is refused."""
    config = yaml.safe_load(tiny_cli.TINY.read_text())
    del config["schedule"]["clients_per_round"]
    file, folder = tmp_path / "tiny.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(config))
    given = ("fit", "--config", str(file), "--run.dir", str(folder), "--schedule.rounds_per_task", "1")
    assert tiny_cli.run(*given) == 0
    said = "schedule.clients_per_round is 4, as data.num_clients, instead of the default 10\n"
    assert said in capsys.readouterr().out
    assert yaml.safe_load((folder / "config.yaml").read_text())["schedule"]["clients_per_round"] == 4
    for named in ([], ["--config", str(DEFAULT_CONFIG)]):  # a sweep finds the run again, and names that file
        wanted = resolver().experiment([*named, *given[1:]])
        assert same_experiment(wanted, read_finished(folder).experiment)
    assert tiny_cli.run("validate", "--ckpt_path", str(folder / "last.ckpt")) == 0
    assert said not in capsys.readouterr().out
    assert tiny_cli.run(*given, "--run.overwrite", "true", "--schedule.clients_per_round", "10") == 2
    assert "schedule.clients_per_round = 10 cannot work; valid: at most 4" in capsys.readouterr().err


def test_benchmark_and_method_files_combine_in_either_order(capsys: pytest.CaptureFixture[str]) -> None:
    configs = Path(__file__).parents[2] / "configs"
    benchmark, method = (("--config", str(configs / name)) for name in ("benchmarks/cifar100.yaml", "methods/fot.yaml"))
    one = printed_config(capsys, *benchmark, *method, "--methods.fot.threshold", "0.8")
    assert one["data"]["stream"]["class_path"].endswith("ClassSplit")
    assert one["methods"]["fot"]["init_args"]["threshold"] == 0.8
    assert printed_config(capsys, *method, *benchmark, "--methods.fot.threshold", "0.8") == one


def test_methods_can_be_composed_and_taken_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Methods are a mapping: a second file adds one by name, {} removes all."""
    second = tmp_path / "second.yaml"
    fot = str(Path(__file__).parents[2] / "configs" / "methods" / "fot.yaml")
    both = printed_config(capsys, "--config", fot, "--methods.own", "PersonalLayers")["methods"]
    assert list(both) == ["fot", "own"]
    second.write_text("methods: {}\n")
    assert printed_config(capsys, "--config", fot, "--config", str(second))["methods"] == {}


def test_files_of_methods_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Methods of several files are used together, in the order of the files.

    Where two files name the same method, the later file's options win, or its class.
    """
    folder = Path(__file__).parents[2] / "configs" / "methods"
    fot, prox = (("--config", str(folder / f"{name}.yaml")) for name in ("fot", "fedprox"))
    alone = [printed_config(capsys, *one)["methods"] for one in (fot, prox)]
    for files, names in (((*fot, *prox), ["fot", "fedprox"]), ((*prox, *fot), ["fedprox", "fot"])):
        found = printed_config(capsys, *files)["methods"]
        assert list(found) == names
        assert found == alone[0] | alone[1]
    again = tmp_path / "again.yaml"
    for name in ("FOT", "cfl.methods.FOT"):
        again.write_text(f"methods: {{fot: {{class_path: {name}, init_args: {{threshold: 0.7}}}}}}")
        found = printed_config(capsys, *fot, "--methods.fot.sketch_size", "3", "--config", str(again))["methods"]["fot"]
        assert (found["init_args"]["threshold"], found["init_args"]["sketch_size"]) == (0.7, 3.0)
    again.write_text("methods: {fot: FedProx}")
    fresh = printed_config(capsys, "--methods.fot", "FedProx")["methods"]
    assert printed_config(capsys, *fot, "--config", str(again))["methods"] == fresh
    dropped = printed_config(capsys, *fot, "--methods", "{}", *prox)["methods"]
    assert list(dropped) == ["fedprox"]


def test_files_of_loggers_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loggers of several files are used together. An option that two logger classes share is set for each by itself."""
    folder = Path(__file__).parents[2] / "configs" / "loggers"
    board, wandb = (("--config", str(folder / f"{name}.yaml")) for name in ("tensorboard", "wandb"))

    def loggers(*arguments: str) -> Any:
        return printed_config(capsys, *arguments)["trainer"]["logger"]

    def file(text: str) -> tuple[str, str]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(f"trainer: {{logger: {text}}}")
        return "--config", str(path)

    def dotted(text: str) -> tuple[str, str]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(f"trainer.logger: {text}")
        return "--config", str(path)

    alone = [loggers(*board), loggers(*wandb)]
    assert alone[1]["init_args"]["name"] is None
    assert loggers(*board, *wandb) == alone
    assert loggers(*wandb, *board) == alone[::-1]
    online = loggers(*board, *wandb, *file("{class_path: WandbLogger, init_args: {offline: false}}"))
    assert online == [alone[0], {**alone[1], "init_args": {**alone[1]["init_args"], "offline": False}}]
    assert loggers(*board, *wandb, *dotted("{class_path: WandbLogger, init_args: {offline: false}}")) == online
    assert loggers(*board, *wandb, *file("false")) is False
    assert loggers(*board, *wandb, *dotted("false")) is False
    assert loggers(*file("false"), *wandb) == alone[1]
    several = [{"class_path": "CSVLogger", "init_args": {"save_dir": place}} for place in "abc"]
    two, other = file(json.dumps(several[:2])), file(json.dumps(several[2]))
    (tmp_path / "else.yaml").write_text("data: {num_clients: 4}")
    silent = ("--config", str(tmp_path / "else.yaml"))
    cases = ((two + board + silent, "ab."), (board + two, ".ab"), (other + two, "ab"), (two + other, "c"))
    for given, places in cases:
        found = loggers(*given)
        assert "".join(one["init_args"]["save_dir"] for one in (found if len(places) > 1 else [found])) == places


def test_null_is_null_for_an_option_of_a_class_within_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    """``null`` on the command line is no text, whatever the option's type, as in a file."""
    table = ("--data.stream", "ClassSplit", "--data.stream.source", "CsvTable", "--data.stream.source.path", "x.csv")
    given = {"label": "kind", "client": "site", "drop": "[id]", "max_train": "9"}
    words = [word for name, value in given.items() for word in (f"--data.stream.source.{name}", value)]
    for name in ("client", "drop", "max_train"):
        words += [f"--data.stream.source.{name}", "null"]
    assert tiny_cli.run("fit", *table, *words, "--print_config") == 0
    found = yaml.safe_load(capsys.readouterr().out)["data"]["stream"]["init_args"]["source"]["init_args"]
    assert {name: found[name] for name in given} == {"label": "kind", "client": None, "drop": None, "max_train": None}


def test_print_config_shows_every_option_resolved(capsys: pytest.CaptureFixture[str]) -> None:
    """Options that no file mentions are printed, too, so that the text alone describes the run."""
    config = printed_config(capsys, "--config", str(tiny_cli.TINY), *FOT)
    assert config["methods"]["fot"] == {
        "class_path": "cfl.methods.FOT",
        "init_args": {**config["methods"]["fot"]["init_args"], "threshold": 0.9, "rank_rule": "code"},
    }
    assert config["federated"]["server_momentum"] == 0.0
    assert config["data"]["stream"]["init_args"]["source"]["init_args"]["noise"] == 60.0
    assert config["data"]["eval_batch_size"] == 1000
    sections = {"data", "model", "schedule", "methods", "federated", "run", "progress", "checkpoint", "trainer"}
    assert sections < set(config)


def test_a_printed_configuration_has_the_clients_per_round_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed text has the lowered default, and used as a file it gives the same configuration again."""
    given, file = ("--data.num_clients", "3"), tmp_path / "printed.yaml"
    config = printed_config(capsys, *given)
    assert config["schedule"]["clients_per_round"] == 3
    file.write_text(yaml.safe_dump(config))
    assert printed_config(capsys, "--config", str(file)) == config
    assert printed_config(capsys, *given, "--schedule.clients_per_round", "10")["schedule"]["clients_per_round"] == 10
    assert tiny_cli.run("fit", *given, "--print_config=skip_default") == 0
    assert yaml.safe_load(capsys.readouterr().out)["schedule"]["clients_per_round"] == 3


def test_there_is_no_predict() -> None:
    """The subcommands are Lightning's without `predict`, which does nothing for a federation."""
    assert list(FederatedCLI.subcommands()) == ["fit", "validate", "test"]
    assert set(LightningCLI.subcommands()) - set(FederatedCLI.subcommands()) == {"predict"}


def test_options_are_not_abbreviated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An abbreviated option is refused: once another option began in the same way, it would set another value."""
    assert tiny_cli.fit(tmp_path, "--data.num_client", "2") == 2
    assert capsys.readouterr().err == "error: data.num_client is no option; valid: data.num_clients\n"


def test_saved_config_reproduces_the_run(tmp_path: Path) -> None:
    """``config.yaml`` of the run folder is the whole experiment: same hash, same matrix and weights bit for bit."""
    options = (*FOT, "--seed_everything", "3", "--schedule.evaluate_every", "2", "--run.overwrite", "true")
    assert tiny_cli.fit(tmp_path / "one", *options) == 0
    saved = str(tmp_path / "one" / "config.yaml")
    assert tiny_cli.run("fit", "--config", saved, "--run.dir", str(tmp_path / "two")) == 0
    one, two = (tiny_cli.results(tmp_path / name) for name in ("one", "two"))
    assert one["summary"]["seed"] == 3
    assert re.fullmatch("[0-9a-f]{12}", one["summary"]["config_hash"])
    tiny_cli.assert_same(two, one)
    # Without --run.dir it would write into the first run's folder, which is refused.
    assert tiny_cli.run("fit", "--config", saved) == 2


def test_saved_config_of_a_resumed_run_starts_from_the_beginning(tmp_path: Path) -> None:
    """The saved configuration has no ``ckpt_path``, which is of one command and not of the experiment."""
    with tiny_cli.die_at("training", 1, signal.SIGTERM):
        assert tiny_cli.fit(tmp_path) == 128 + signal.SIGTERM
    assert tiny_cli.fit(tmp_path, "--ckpt_path", "last") == 0
    assert "ckpt_path" not in yaml.safe_load((tmp_path / "config.yaml").read_text())


def test_another_seed_is_another_experiment(tmp_path: Path) -> None:
    """Another seed gives another hash, matrix and weights.

    Without this, ``test_saved_config_reproduces_the_run`` could pass with constants.
    """
    for seed in ("0", "1"):
        assert tiny_cli.fit(tmp_path / seed, "--seed_everything", seed) == 0
    zero, one = (tiny_cli.results(tmp_path / seed) for seed in ("0", "1"))
    assert zero["summary"]["config_hash"] != one["summary"]["config_hash"]
    assert zero["matrix"] != one["matrix"]
    assert not torch.equal(zero["weights"]["network.head.weight"], one["weights"]["network.head.weight"])


def test_cohort_width_is_no_part_of_the_experiment(tmp_path: Path) -> None:
    """The cohort width changes speed only: hash and weights are the same, so that a run may be resumed with another."""
    for width in ("1", "4"):
        assert tiny_cli.fit(tmp_path / width, "--schedule.cohort_width", width) == 0
    narrow, wide = (tiny_cli.results(tmp_path / width) for width in ("1", "4"))
    assert narrow["summary"]["config_hash"] == wide["summary"]["config_hash"]
    torch.testing.assert_close(narrow["weights"], wide["weights"], rtol=1e-4, atol=1e-6)


def test_default_run_folder_is_named_after_benchmark_method_seed_and_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tiny_cli.run("fit", "--config", str(tiny_cli.TINY), *FOT, "--seed_everything", "5") == 0
    (folder,) = (tmp_path / "runs" / "permuted-synthetic").iterdir()
    assert folder.name == f"fot-seed5-{tiny_cli.summary(folder)['config_hash'][:8]}"


@pytest.mark.parametrize(("command", "said"), [("fit", "RUN/last.ckpt continues that run"), ("validate", "to score")])
def test_help_says_what_a_checkpoint_is_here(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help of ``--ckpt_path`` is the program's: Lightning's describes keywords that do not work here."""
    assert tiny_cli.run(command, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert said in text.rpartition("--ckpt_path CKPT_PATH ")[2][:200]
    assert "hpc" not in text


def test_help_on_a_class_is_the_programs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/__main__.py"])
    assert tiny_cli.run("fit", "--data.stream.help", "ClassSplit") == 0
    assert capsys.readouterr().out.startswith("usage: cfl --data.stream.source SOURCE ")


def test_help_on_a_method_names_options_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_cli.run("fit", "--methods.help", "FedProx") == 0
    text = capsys.readouterr().out
    assert "--methods.NAME.mu MU" in text
    assert "--methods.mu" not in text
    assert ":::" not in text


@pytest.mark.parametrize(
    ("key", "some"),
    [
        ("data.stream", {"ClassSplit", "Permuted", "Rotated"}),
        ("data.stream.source", {"Digits", "Arrays"}),
        ("data.stream.source.source", {"Digits", "Arrays"}),
        ("data.stream.sources", {"Digits", "Arrays"}),
        ("methods.mine.surrogate", {"Digits", "Arrays"}),
        ("trainer.logger", {"CSVLogger", "TensorBoardLogger"}),
        ("data.partition", {"Shards", "Dirichlet"}),
        ("model.network", {"MLP", "ResNet18"}),
        ("model.optimizer", {"SGD", "Adam"}),
        ("methods", set(cfl.methods.__all__) - {"Method"}),
    ],
)
def test_help_without_a_class_lists_the_classes(key: str, some: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_cli.run("fit", f"--{key}.help") == 0
    listed = capsys.readouterr().out.partition(f"classes (--{key}.help CLASS shows the options of one):\n")[2]
    names = re.findall(r"^  (\w+)\n {6}\S", listed, re.M)
    assert names == sorted(names)
    assert set(names) >= some
    assert not any(name.startswith("_") for name in names)


@pytest.mark.parametrize(
    "words",
    [["--data.stream", "ClassSplit", "--data.stream.source.help", "Arrays"], ["--methods.a.surrogate.help=Arrays"]],
)
def test_help_on_a_class_below_a_class_names_options_as_they_are_typed(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    key = words[-1 if "=" in words[-1] else -2].partition(".help")[0]
    assert tiny_cli.run("fit", *words) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: cfl {key}.path PATH ")
    assert f"\n  {key}.num_classes NUM_CLASSES\n" in text


def test_help_on_no_class_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_cli.run("fit", "--data.partition.help", "Sharsd") == 2
    said = capsys.readouterr().err
    assert "data.partition.help = 'Sharsd' cannot work; valid: one of " in said
    assert " Shards" in said


def test_help_reads_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_cli.run("fit", "--help") == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: cfl fit ")
    assert "--schedule.clock_spread" in said
    assert not re.search(r":[a-z]+:`", said)
    assert "the run's seed" in said
    assert "random seed" not in said  # Lightning's help: true for one that nobody chose, which is refused here


# Scoring a checkpoint.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished FOT run."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert tiny_cli.fit(folder, *FOT) == 0
    return folder


def figures(text: str) -> dict[str, float]:
    """Return name -> value of the printed figures ACC, FGT, ..."""
    return {key: float(value) for key, value in re.findall(r"^([A-Z_]+) +(-?\d+\.\d+)   ", text, re.M)}


def table(text: str) -> list[list[float]]:
    """Return the rows of the printed matrix: one value for each task, then ACC."""
    lines = re.findall(r"^│ *\d+ │(.*)│$", text, re.M)
    return [[float(cell) for cell in line.split("│") if cell.strip()] for line in lines]


@pytest.mark.parametrize("command", ["validate", "test"])
def test_scoring_needs_only_the_checkpoint_and_repeats_the_fit(
    run: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The config.yaml beside the checkpoint is used. Figures equal summary.json, the matrix equals the CSV file."""
    before = {path: path.read_bytes() for path in run.iterdir()}
    capsys.readouterr()
    assert tiny_cli.run(command, "--ckpt_path", str(run / "last.ckpt")) == 0
    printed, known = capsys.readouterr().out, tiny_cli.summary(run)
    assert figures(printed) == {
        key.upper(): pytest.approx(known[key], abs=5e-4)
        for key in ("acc", "fgt", "fgt_max", "fgt_max_last", "bwt", "fwt")
    }
    matrix = read_matrix_csv(run / "accuracy_matrix.csv")[0].tolist()
    expected = [[*row, sum(row[: t + 1]) / (t + 1)] for t, row in enumerate(matrix)]
    assert table(printed) == [[pytest.approx(cell, abs=0.05) for cell in row] for row in expected]
    assert {path: path.read_bytes() for path in run.iterdir()} == before  # scoring leaves the run as it is


@pytest.mark.parametrize("command", ["validate", "test"])
def test_the_model_is_measured_again(
    command: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scoring measures the checkpoint's weights: with changed weights the printed figures change."""
    (tmp_path / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    saved = tiny_cli.checkpoint(run)
    saved["state_dict"]["network.head.weight"].zero_()
    # Class 0 is always predicted, which is right for one sample in four.
    saved["state_dict"]["network.head.bias"].copy_(torch.tensor([1.0, 0, 0, 0]))
    write_checkpoint(saved, tmp_path / "last.ckpt")
    capsys.readouterr()
    assert tiny_cli.run(command, "--ckpt_path", str(tmp_path / "last.ckpt")) == 0
    assert table(capsys.readouterr().out)[1] == [25.0, 25.0, 25.0]


@pytest.mark.parametrize(
    "words",
    [("validate",), ("fit",), ("export", "--out", "m.safetensors"), ("predict", "images.npy")],
    ids=lambda w: w[0],
)
def test_a_checkpoint_that_was_moved_needs_its_configuration(
    words: tuple[str, ...],
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message names the missing file and the option; only where a run goes on it lists what may change."""
    moved = shutil.copy(run / "last.ckpt", tmp_path / "moved.ckpt")
    monkeypatch.chdir(tmp_path)
    np.save("images.npy", np.zeros((2, 4, 4), dtype=np.uint8))
    capsys.readouterr()
    with tiny_cli.shortened(("fit" if words[0] == "fit" else "validate",)):  # the others restore it as validate does
        assert command_line([*words, "--ckpt_path", str(moved)]) == 2
    said = capsys.readouterr().err
    assert "there is no config.yaml beside it: give that of its run, --config RUN/config.yaml; they differ in " in said
    assert ("what may change" in said) is (words[0] == "fit")


def test_a_moved_checkpoint_with_its_configuration_is_scored(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = str(shutil.copy(run / "last.ckpt", tmp_path / "moved.ckpt"))
    given = ("--ckpt_path", moved, "--config", str(run / "config.yaml"), "--run.dir", str(tmp_path))
    assert tiny_cli.run("validate", *given) == 0
    capsys.readouterr()
    assert tiny_cli.run("validate", *given, "--federated.server_lr", "0.5") == 2
    said = capsys.readouterr().err
    assert "beside it" not in said
    assert said.endswith("they differ in federated.server_lr: 0.5, in the checkpoint 1.0\n")


def test_run_folder_and_last_name_the_checkpoint_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_cli.run("validate", "--run.dir", str(run), "--ckpt_path", "last") == 0
    assert figures(capsys.readouterr().out)["ACC"] == pytest.approx(tiny_cli.summary(run)["acc"], abs=5e-4)


@pytest.mark.parametrize("command", ["validate", "test"])
def test_scoring_nothing_is_refused(command: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scoring without a checkpoint is refused: the figures would be those of an untrained network."""
    assert tiny_cli.run(command, "--config", str(run / "config.yaml")) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ckpt_path = None cannot work; valid: a checkpoint to score")


def test_a_checkpoint_in_front_of_the_saved_configuration_is_used(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--ckpt_path`` before ``--config`` still resumes the run: the configuration file has no ``ckpt_path``."""
    given = ("--ckpt_path", str(run / "last.ckpt"), "--config", str(run / "config.yaml"))
    assert tiny_cli.run("validate", *given) == 0
    capsys.readouterr()
    assert tiny_cli.run("fit", *given, "--run.dir", str(tmp_path)) == 0
    assert "is of a finished run: nothing is left to train" in capsys.readouterr().out


def test_unfinished_task_is_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scoring a checkpoint within a task says how many of its rounds are done."""
    with tiny_cli.die_at("training", 3, 15):
        assert tiny_cli.fit(tmp_path) == 143
    capsys.readouterr()
    assert tiny_cli.run("validate", "--ckpt_path", str(tmp_path / "last.ckpt")) == 0
    printed = capsys.readouterr().out
    assert "task 1 is not finished: 4 of 6 rounds" in printed
    assert len(table(printed)) == 2  # the current model's row is shown all the same


@pytest.mark.parametrize(
    ("given", "added"),
    [
        (["validate", "--ckpt_path", "RUN/last.ckpt"], True),
        (["validate", "--ckpt_path=RUN/last.ckpt"], True),
        (["fit", "--run.dir", "RUN", "--ckpt_path", "last"], True),
        (["fit", "--ckpt_path", "last"], False),  # no run folder is named
        (["fit", "--config", "x.yaml", "--ckpt_path", "RUN/last.ckpt"], False),
        (["fit", "-c", "x.yaml", "--ckpt_path", "RUN/last.ckpt"], False),
        (["validate", "--ckpt_path", "elsewhere/last.ckpt"], False),  # no config.yaml there
        (["fit", "--run.dir", "RUN"], False),  # a new run takes nothing from an old one
        (["--help"], False),
        ([], False),
    ],
)
def test_configuration_of_the_checkpoints_run_is_used(
    given: list[str], added: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("RUN").mkdir()
    Path("RUN/config.yaml").touch()
    inserted = ["--config", "RUN/config.yaml", "--run.dir", "RUN"] if added else []
    assert read_command_line(given) == ([*given[:1], *inserted, *given[1:]], added, (), tuple(given))
