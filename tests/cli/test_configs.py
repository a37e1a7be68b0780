"""Every file under configs/ is valid, combines with the others, and describes an experiment that can be built."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import tiny_cli

from cfl.cli.federated_cli import FederatedCLI
from cfl.cli.trainer_settings import WITHOUT_CHOICE

CONFIGS = Path(__file__).parents[2] / "configs"


def names(folder: str) -> list[str]:
    """Paths below configs/, e.g. ``methods/fot.yaml``."""
    return sorted(str(path.relative_to(CONFIGS)) for path in (CONFIGS / folder).rglob("*.yaml"))


BENCHMARKS, METHODS, LOGGERS, OF_PAPERS = (names(folder) for folder in ("benchmarks", "methods", "loggers", "papers"))
SWEEPS = [name for name in OF_PAPERS if Path(name).parent.name == "sweeps"]  # tests/papers/test_sweeps.py reads them
PAPERS = [name for name in OF_PAPERS if name not in SWEEPS]


def benchmark_of(paper: str) -> str:
    """Return the benchmark's file that a paper's file is merged over.

    It is ``benchmarks/pmnist.yaml`` for ``papers/fot/pmnist/fot.yaml`` and ``papers/fot/smoke/pmnist.yaml``, or
    ``benchmarks/fot-pmnist.yaml`` if that file exists.
    """
    path = Path(paper)
    if path.parent.name == "methods":  # for all benchmarks of a paper
        return next(name for name in BENCHMARKS if Path(name).stem.startswith(f"{path.parts[1]}-"))
    name = path.stem if path.parent.name == "smoke" else path.parent.name
    own = f"benchmarks/{path.parts[1]}-{name}.yaml"
    return own if own in BENCHMARKS else f"benchmarks/{name}.yaml"


BEFORE = {
    "benchmarks/fedweit-overlapped20.yaml": ("benchmarks/fedweit-overlapped.yaml",),
    "benchmarks/fedagem-driving-town05.yaml": ("benchmarks/fedagem-driving.yaml",),
}
"""Benchmark -> the benchmarks that it changes, which have to be merged before it."""
COMBINATIONS = [
    *((*BEFORE.get(benchmark, ()), benchmark, "methods/fot.yaml") for benchmark in BENCHMARKS),
    *((BENCHMARKS[0], method) for method in METHODS),
    *((benchmark_of(paper), paper) for paper in PAPERS),
    *((METHODS[0], other) for other in LOGGERS),
]
NEED_FILES = [pair for pair in COMBINATIONS if Path(pair[1]).stem == "l2p" and pair[1] in PAPERS]
BUILT = [pair for pair in COMBINATIONS if pair[-1] in ("methods/fot.yaml", *PAPERS) and pair not in NEED_FILES]
"""Combinations whose objects are all built; the others are only parsed."""


def test_every_file_is_covered() -> None:
    """Every config file is in one of the combinations above, so that no new file stays untested."""
    found = {str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.y*ml")}
    assert found == {"default.yaml", *BENCHMARKS, *METHODS, *LOGGERS, *PAPERS, *SWEEPS}
    assert {"methods/fedavg.yaml", "methods/fot.yaml"} <= set(METHODS)
    assert {"loggers/wandb.yaml", "loggers/tensorboard.yaml"} == set(LOGGERS)
    assert {name for pair in COMBINATIONS for name in pair} == found - {"default.yaml", *SWEEPS}


SAID = {
    "data": ("stream", "partition", "num_clients"),
    "schedule": ("rounds_per_task", "clients_per_round", "local_epochs", "batch_size"),
    "model": ("network", "optimizer"),
}
"""Section -> keys that a benchmark has to set; otherwise it would silently have the values of default.yaml."""


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_take_nothing_that_matters_from_the_default_one(name: str) -> None:
    """A benchmark sets all keys of SAID, or its head says that it is merged after another benchmark."""
    text = (CONFIGS / name).read_text()
    head = " ".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    entry = yaml.safe_load(text)
    missing = [f"{part}.{key}" for part, keys in SAID.items() for key in keys if key not in entry.get(part, {})]
    change = re.search("(merge|give it) after", head, re.IGNORECASE)
    assert change or not missing, f"{name} says nothing of {', '.join(missing)}"


def given(combination: tuple[str, ...]) -> list[str]:
    """``--config`` for each of the files."""
    return [part for name in combination for part in ("--config", str(CONFIGS / name))]


def leaves(tree: Any, place: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return place -> value of nested mappings. Classes are without their modules, because files may omit these."""
    if isinstance(tree, list) and any(isinstance(part, dict) for part in tree):
        tree = {str(number): part for number, part in enumerate(tree)}
    if isinstance(tree, dict) and tree:
        return {key: value for name, part in tree.items() for key, value in leaves(part, (*place, name)).items()}
    return {place: tree.rpartition(".")[2] if place[-1:] == ("class_path",) else tree}


def assert_merged(config: dict[str, Any], combination: tuple[str, ...]) -> None:
    """Require every value of the last file in ``config``, and every earlier value that no later file replaces.

    Settings that have one valid value are left out of ``config``.
    """
    printed = leaves(config)
    expected: dict[tuple[str, ...], Any] = {}
    for name in ("default.yaml", *combination):
        layer = leaves(yaml.safe_load((CONFIGS / name).read_text()) or {})
        for place in [place for place in layer if place[-1] == "class_path"]:
            if expected.get(place) != layer[place]:  # another class: options of the former class are dropped
                above = (*place[:-1], "init_args")
                expected = {key: value for key, value in expected.items() if key[: len(above)] != above}
        for whole in {place[:at] for place in layer for at, part in enumerate(place) if part.isdigit()}:
            expected = {place: value for place, value in expected.items() if place[: len(whole)] != whole}  # a new list
        above = {place[:length] for place in layer for length in range(len(place))}
        expected = {place: value for place, value in expected.items() if place not in above} | layer
    for place, value in expected.items():
        if place == ("weights_only",) or (place[0] == "trainer" and place[-1] in WITHOUT_CHOICE):
            assert place not in printed
        elif (*place, "class_path") in printed:
            assert printed[(*place, "class_path")] == value  # a class given by its name alone
        else:
            assert printed[place] == value, place


@pytest.mark.parametrize(
    "combination",
    [(), *(pair for pair in COMBINATIONS if pair not in BUILT)],
    ids=lambda names: "+".join(names) or "default",
)
def test_printed_config_is_the_files_merged_over_the_default(
    combination: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny_cli.run("fit", *given(combination), "--print_config") == 0
    assert_merged(yaml.safe_load(capsys.readouterr().out), combination)


@pytest.mark.parametrize("method", METHODS)
def test_the_buffer_is_the_benchmarks_affair(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of methods set no buffer: they come last and would silently override the benchmark's."""
    assert "buffer" not in yaml.safe_load((CONFIGS / method).read_text())
    if method == "methods/fed-agem.yaml":
        benchmark = ("benchmarks/fedagem-cifar100.yaml", "benchmarks/fedagem-joining.yaml")
        for files, size in (((method,), 200), ((*benchmark, method), 2000)):
            assert tiny_cli.run("fit", *given(files), "--print_config") == 0
            assert yaml.safe_load(capsys.readouterr().out)["buffer"]["size"] == size


@pytest.mark.parametrize("combination", [(), *BUILT], ids=lambda names: "+".join(names) or "default")
def test_described_experiment_is_consistent(
    combination: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stream, schedule, network, optimizer and methods can be built from the files merged over the default.

    A number of epochs that is refused stops the command before it reads data.
    """
    monkeypatch.chdir(tmp_path)
    plain, configs = FederatedCLI._plain_config, []

    def seen(cli: FederatedCLI) -> dict[str, Any]:
        configs.append(plain(cli))
        return configs[-1]

    monkeypatch.setattr(FederatedCLI, "_plain_config", seen)
    assert tiny_cli.run("fit", *given(combination), "--trainer.max_epochs", "1") == 2
    message = capsys.readouterr().err
    assert (
        message
        == "error: trainer.max_epochs = 1 cannot work; valid: unset: the number of rounds follows from schedule\n"
    )
    assert list(tmp_path.iterdir()) == []
    (config,) = configs
    assert_merged(config, combination)


@pytest.mark.parametrize("combination", NEED_FILES, ids="+".join)
def test_a_network_that_needs_a_file_says_which(
    combination: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tiny_cli.run("fit", *given(combination), "--trainer.max_epochs", "1") == 2
    message = capsys.readouterr().err
    assert message.startswith("error: model.network.weights = 'vit_b_16-c867db91.pth (no such file: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("methods.fot.init_args.threshold", 0.8),
        ("data.stream.init_args.num_tasks", 3),
        ("data.partition.init_args.per_client", 4),
        ("model.network.init_args.hidden", [7]),
        ("model.optimizer.init_args.lr", 0.5),
        ("schedule.batch_size", 9),
        ("federated.server_lr", 0.25),
        ("run.benchmark", "mine"),
        ("seed_everything", 12),
        ("trainer.gradient_clip_val", 0.5),
    ],
)
def test_keys_are_overridden_on_the_command_line(option: str, value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """An option without ``init_args`` in its name sets the option of a class, and nothing else changes."""
    printed = []
    for options in ([], [f"--{option.replace('.init_args', '')}={value}"]):
        assert tiny_cli.run("fit", *given(("methods/fot.yaml",)), *options, "--print_config") == 0
        printed.append(leaves(yaml.safe_load(capsys.readouterr().out)))
    changed = {place for place in printed[1] if printed[0].get(place) != printed[1][place]}
    assert changed == {tuple(option.split("."))}
    assert printed[1][tuple(option.split("."))] == value
