"""The first lines of ``cfl fit``: printed from words and files before parsing, and equal to what the parser finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from support import tiny_cli

import cfl
from cfl.cli.header import announce
from cfl.cli.main import main
from cfl.reporting.experiment import benchmark_name, method_name

SPLIT = ("--data.stream", "ClassSplit", "--data.stream.num_tasks", "2")
SEQUENCE = "{class_path: Sequence, init_args: {sources: [Digits, {class_path: cfl.data.sources.MNIST}]}}"
COMMANDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "method": ("--config", "configs/methods/fot.yaml"),
    "two methods": ("--config", "methods/ewc.yaml", "--config=methods/fed-agem.yaml"),
    "benchmark with a name": ("--config", "benchmarks/mini-imagenet.yaml"),
    "method on the command line": ("--methods.mine", "FedProx", "--methods.mine.mu", "0.5"),
    "methods in one word": ("--config", "methods/fot.yaml", "--methods", "{mine: FedProx}"),
    "methods taken away": ("--config", "methods/fot.yaml", "--config", "{methods: {}}"),
    "file of the user": (*SPLIT, "--data.stream.source", "Arrays", "--data.stream.source.path", "mine.npz"),
    "data set by its path": ("--data.stream.source", "cfl.data.sources.MNIST", "--data.num_clients=7"),
    "several data sets": ("--data.stream", SEQUENCE),
    "share of the clients": ("--schedule.clients_per_round", "0.25"),
    "named": ("--run.benchmark", "mine", "--schedule.clients_per_round=3"),
    "later file": ("--data.num_clients", "9", "--config", "{data: {num_clients: 8}}"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_said_at_once_is_what_the_parser_finds(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    images, labels = np.zeros((4, 4, 4), dtype=np.uint8), np.arange(4)
    np.savez("mine.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    monkeypatch.setenv("CFL_DATA_ROOT", str(tmp_path))
    config = tiny_cli.printed_config(capsys, *COMMANDS[name])
    share = min(config["schedule"]["clients_per_round"], config["data"]["num_clients"])
    benchmark = config["run"]["benchmark"] or benchmark_name(config)
    expected = (
        f"cfl {cfl.__version__}: {method_name(config['methods'])} on {benchmark}, "
        f"{config['data']['num_clients']} clients, {'25 %' if share == 0.25 else share} per round"
    )
    assert announce(["fit", *COMMANDS[name]]) == expected
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "--print_config"],
        ["fit", "--print_config=skip_default"],
        ["fit", "--help"],
        ["fit", "--data.stream.help", "ClassSplit"],
        ["fit", "--progress.enabled", "false"],
        ["fit", "--config", "{progress: {enabled: false}}"],
        ["fit", "--config", "nowhere.yaml"],
        ["fit", "--config", "{broken"],
        ["fit", "--allow", "numpy"],
        ["fit", "--ckpt_path", "missing.ckpt"],
        ["fit", "--ckpt_path=missing.ckpt", "--config", "methods/fot.yaml"],
        ["fit", "--ckpt_path", __file__],  # there, but without the configuration of its run
        ["validate"],
        [],
    ],
)
def test_nothing_is_said_at_once(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert announce(words) == ""
    assert capsys.readouterr().out == ""


def test_a_run_that_goes_on_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "last.ckpt").touch()
    (tmp_path / "config.yaml").write_text("methods: {mine: {class_path: FedProx}}")
    for named in (tmp_path, tmp_path / "last.ckpt"):
        assert ": mine on " in announce(["fit", "--ckpt_path", str(named)])
    assert announce(["fit", "--ckpt_path", "last", "--run.dir", "nowhere"]) != ""  # begins where there is none


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"])
def test_only_the_first_of_several_processes_says_it(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert announce(["fit"]) == ""
    monkeypatch.setenv(name, "0")
    assert announce(["fit"]) != ""


def test_nothing_heavy_is_imported_for_it() -> None:
    code = (
        "import sys; from cfl.cli.header import announce; announce(['fit', '--config', 'methods/fot.yaml']); "
        "print(sorted({'torch', 'numpy', 'lightning', 'jsonargparse'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, imported = found.stdout.splitlines()
    assert said == f"cfl {cfl.__version__}: fot on permuted-digits, 20 clients, 10 per round"
    assert imported == "[]"


def test_strange_values_are_left_to_the_parser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong values in a file cause no traceback in the first line, and no control character is printed."""
    contents = [
        {"data": 3, "methods": [1, {"a": 2}], "schedule": None},
        {"data": {"stream": {"class_path": None, "init_args": {"sources": [None, 3, {"path": ["x"]}]}}}},
        {"data": {"num_clients": {"a": "\x1b[2J"}}, "run": {"benchmark": "\x1b[2J\n"}, 3: 4},
        {"methods": {"\x1b[2J": "FOT"}, "progress": {"enabled": "no"}},
    ]
    for content in contents:
        (tmp_path / "strange.yaml").write_text(yaml.safe_dump(content))
        announce(["fit", "--config", str(tmp_path / "strange.yaml")])
    assert "\x1b" not in capsys.readouterr().out


def test_a_fit_begins_with_what_and_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fit prints the experiment, then device and run folder. A first line that is printed already is not repeated."""
    first = f"cfl {cfl.__version__}: fedavg on permuted-synthetic, 4 clients, 2 per round"
    second = f"device cpu, run folder {tmp_path / 'run'}"
    assert tiny_cli.fit(tmp_path / "run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [first, second]
    assert lines[-2:] == [f"run folder: {tmp_path / 'run'}", f"to compare all runs there: cfl compare {tmp_path}"]
    words = ["fit", "--config", str(tiny_cli.TINY), "--run.dir", str(tmp_path / "run"), "--run.overwrite", "true"]
    for said, expected in ((first, [second]), ("another", [first, second])):
        with tiny_cli.shortened(words):
            assert main(words, said) == 0
        assert capsys.readouterr().out.splitlines()[: len(expected)] == expected
    assert tiny_cli.fit(tmp_path / "run", "--run.overwrite", "true", "--progress.enabled", "false") == 0
    assert "device cpu" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model.optimizer", "Adam"), "is 0.2 instead of 0.001, as configs/default.yaml sets it for SGD; set"),
        (
            ("--config", "sgd.yaml", "--model.optimizer", "Adam"),
            "is 0.05 instead of 0.001, as sgd.yaml sets",
        ),
        (("--model.optimizer", "Adam", "--model.optimizer.lr", "0.2"), None),
        (("--model.optimizer.lr", "0.2", "--model.optimizer", "Adam"), None),
        (("--config", "adam.yaml"), None),
        (("--config", "sgd.yaml", "--config", "adam.yaml"), None),
        (("--config", "sgd.yaml", "--model.optimizer", "SGD"), None),
        (
            ("--config", "sgd.yaml", "--model.optimizer", "RMSprop", "--model.optimizer.lr", "0.01"),
            "momentum is 0.5 instead of 0, as sgd.yaml sets it for SGD; set model.optimizer.momentum behind",
        ),
    ],
)
def test_an_option_meant_for_another_optimizer_is_named(
    words: tuple[str, ...],
    said: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rate for SGD is far too large for Adam, which would learn nothing with it."""
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "sgd.yaml": "model: {optimizer: {class_path: SGD, init_args: {lr: 0.05, momentum: 0.5}}}",
        "adam.yaml": "model: {optimizer: {init_args: {lr: 0.05}, class_path: torch.optim.Adam}}",
    }.items():
        Path(name).write_text(content)
    short = ("--data.stream.num_tasks", "1", "--schedule.rounds_per_task", "1", "--run.dir", "run")
    assert tiny_cli.run("fit", *words, *short) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("model.optimizer.")]
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--model.network", "my_kept.Net"),
            ["hidden is [200, 200] instead of [7], as configs/default.yaml sets it for MLP"],
        ),
        (("--config", "mlp.yaml", "--model.network", "my_kept.Net"), ["hidden is [5] instead of [7], as mlp.yaml"]),
        (("--model.network", "my_kept.Net", "--model.network.hidden", "[5]"), []),
        (("--config", "own.yaml"), []),
        (("--config", "mlp.yaml"), []),
        (("--config", "default.yaml"), ["as configs/default.yaml sets it for MLP"]),
        (("--model.network", "my_kept.Tuple"), []),
        (("--config", "mlp.yaml", "--model.network", "my_kept.Tuple"), ["hidden is [5] instead of [200, 200], as mlp"]),
        (
            ("--model.network", "my_kept.Above"),
            ["hidden is [200, 200] instead of [7], as configs/default.yaml sets it for MLP"],
        ),
    ],
)
def test_options_meant_for_another_class_are_named(
    words: tuple[str, ...],
    said: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A network of a user's own has an option of the default network's name, which keeps the latter's value."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_kept", raising=False)
    for name, content in {
        "my_kept.py": (
            "from cfl.models import MLP\n\n\nclass Net(MLP):\n"
            "    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int, hidden: list[int] = [7]):\n"
            "        super().__init__(input_shape, num_outputs, hidden)\n\n\n"
            "class Tuple(MLP):\n"
            "    def __init__(self, input_shape, num_outputs, hidden: tuple[int, ...] = (200, 200)):\n"
            "        super().__init__(input_shape, num_outputs, list(hidden))\n\n\n"
            "class Above(Net):\n"
            "    def __init__(self, input_shape, num_outputs, **options):\n"
            "        super().__init__(input_shape, num_outputs, **options)\n"
        ),
        "mlp.yaml": "model: {network: {class_path: MLP, init_args: {hidden: [5], dropout: 0.0}}}",
        "default.yaml": "model: {network: {class_path: my_kept.Net}}",
        "own.yaml": "model: {network: {init_args: {hidden: [5]}, class_path: my_kept.Net}}",
    }.items():
        Path(name).write_text(content)
    short = ("--data.stream.num_tasks", "1", "--schedule.rounds_per_task", "1", "--run.dir", "run")
    assert tiny_cli.run("fit", *words, *short) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("model.network.")]
    assert len(lines) == len(said)
    assert all(sentence in line for sentence, line in zip(said, lines, strict=True))
