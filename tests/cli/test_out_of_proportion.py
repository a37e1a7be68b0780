"""Values that are impossible for any option, such as NaN or 10**20: refused by name before anything is computed."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import Namespace
from support import tiny_cli
from support.class_options import options_of
from support.foreign import BOMB
from torch.utils.data import TensorDataset

from cfl.callbacks import OF_SECTIONS
from cfl.cli import parsing
from cfl.cli.federated_cli import FederatedCLI
from cfl.cli.given import Given
from cfl.cli.leaves import check_leaves
from cfl.cli.linked_defaults import FOLLOWING
from cfl.data.augmentation import Augmentation
from cfl.data.participation import Participation
from cfl.data.partitions import Partition
from cfl.data.schedule import Schedule
from cfl.data.sequences import TaskSequences
from cfl.data.sources import Synthetic
from cfl.data.sources.base import Source
from cfl.data.streams import Stream
from cfl.engines import EngineOptions
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import Method
from cfl.methods.components.gaussian_mechanism import GaussianMechanism
from cfl.models import Network
from cfl.runtime.class_paths import named_subclasses
from cfl.runtime.errors import ConfigError

NEEDED: dict[str, Any] = {
    "input_shape": (1, 32, 32),
    "num_outputs": 4,
    "source": Synthetic(4, [1, 32, 32]),
    "surrogate": Synthetic(4, [1, 32, 32]),
    "sources": [Synthetic(4, [1, 32, 32])],
    "layers": ["head.*"],
    "train": TensorDataset(torch.zeros(2, 1, 32, 32), torch.tensor([0, 1])),
    "test": TensorDataset(torch.zeros(2, 1, 32, 32), torch.tensor([0, 1])),
    "path": "nowhere.npz",
    "label": "class",
    "folder": "nowhere",
    "shape": [1, 32, 32],
    "set_name": "mushrooms",
    "classes": ["a"],
    "train_images": "images",
    "initial": 2,
    "per_task": 1,
    "count": 1,
    "tasks": [[0]],
    "classes_per_task": 2,
    "epsilon": 1.0,
    "delta": 1e-5,
    "clip": 1.0,
}
"""Option without a default -> a valid value."""
ENDLESS = {"RoundProgress.plain_seconds", "RoundProgress.live_seconds"}
"""Options that accept infinity, which means never."""
FAMILIES = (Method, Network, Stream, Source, Partition, Participation, TaskSequences, Augmentation, GaussianMechanism)
SECTIONS = (Schedule, EngineOptions, ReplayBuffer, *OF_SECTIONS.values())


def _classes() -> Iterator[type]:
    """The program's classes that a configuration can name."""
    known, found = [*FAMILIES], list(SECTIONS)
    while known:
        kind = known.pop()
        known += kind.__subclasses__()
        if kind.__module__.startswith("cfl.") and not inspect.isabstract(kind) and not kind.__name__.startswith("_"):
            found.append(kind)
    yield from sorted(set(found), key=lambda kind: kind.__qualname__)


def _numbers() -> Iterator[tuple[type, str, Any]]:
    """Yield every option of type float, with infinity and with NaN."""
    for kind in _classes():
        for name, option in options_of(kind).items():
            if re.search(r"\bfloat\b", str(option.annotation)):
                one_each = re.search("list|Sequence", str(option.annotation))
                for value in (math.inf, math.nan):
                    yield kind, name, [value] if one_each else value


NUMBERS = {f"{kind.__name__}.{name} = {value}": (kind, name, value) for kind, name, value in _numbers()}


def test_there_are_many() -> None:
    assert len(NUMBERS) > 100


@pytest.mark.parametrize("option", NUMBERS)
def test_every_class_refuses_numbers_without_end(option: str) -> None:
    """Every class refuses infinity and NaN by itself, also if it is built from Python without the command line.

    :mod:`cfl.runtime.option_checks` has functions for this.
    """
    kind, name, value = NUMBERS[option]
    needed = {other for other, one in options_of(kind).items() if one.default is inspect.Parameter.empty} - {name}
    assert needed <= set(NEEDED), "give NEEDED a valid value of each option without a default"
    given = {other: NEEDED[other] for other in needed}
    if value == math.inf and f"{kind.__name__}.{name}" in ENDLESS:
        kind(**given, **{name: value})
        return
    with pytest.raises(ConfigError, match=rf"\.{name} = "):
        kind(**given, **{name: value})


def _parsed(*words: str) -> Any:
    """Return the parsed configuration of tiny.yaml with further options."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "check_leaves", lambda config, *_, **__: found.append(config))
        patch.setattr(FederatedCLI, "before_instantiate_classes", _stop)
        tiny_cli.fit(Path("nowhere"), *words)
    return found[0]


def _stop(*_: Any) -> None:
    raise ConfigError("here", None, "to stop")


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the place of every number in a parsed configuration: its container, and its key or index in it."""
    inner = vars(node) if isinstance(node, Namespace) else node
    for key, value in list(enumerate(inner) if isinstance(inner, list) else inner.items()):
        if isinstance(value, Namespace | dict | list):
            yield from _places(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield inner, key


def test_every_number_of_a_configuration_is_looked_at() -> None:
    every = {
        kind.__name__: {"class_path": kind.__name__, "init_args": _needed(kind)}
        for kind in _classes()
        if issubclass(kind, Method) and kind.__name__ != "CFeD"
    }
    config = _parsed("--methods", json.dumps(every), "--model.network.hidden", "[8, 8]")
    places = list(_places(config))
    assert len(places) > 150
    check_leaves(config, [], FOLLOWING)
    for holder, key in places:
        before = holder[key]
        for value in (10**20, -(10**20), math.nan, 1e308, 1e-320):
            holder[key] = value
            with pytest.raises(ConfigError) as caught:
                check_leaves(config, [])
            assert caught.value.value is value
            assert isinstance(key, int) or caught.value.key.endswith(key)
        holder[key] = before


def _needed(kind: type) -> dict[str, Any]:
    return {name: NEEDED[name] for name, of in options_of(kind).items() if of.default is inspect.Parameter.empty}


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("a" * 256, "255 between slashes"),
        ("runs/" + "é" * 200, "255 between slashes"),
        ("/".join(["a" * 200] * 30), "at most 4095 bytes"),
    ],
)
def test_texts_that_no_file_can_be_called(text: str, valid: str) -> None:
    with pytest.raises(ConfigError, match=valid) as caught:
        check_leaves(Namespace(run=Namespace(dir=text)), [])
    assert caught.value.key == "run.dir"
    check_leaves(Namespace(notes=f"{text} or so", short="a" * 255), [])


@pytest.mark.parametrize(("text", "number", "instead"), [("010", 10, "10"), ("1:30", 90, "a number"), ("08", 8, "8")])
def test_numbers_that_were_written_otherwise(text: str, number: int, instead: str) -> None:
    config = Namespace(schedule=Namespace(batch_size=number, other=text))
    given = [Given("schedule.batch_size", "3"), Given("schedule.batch_size", text), Given("schedule.other", text)]
    with pytest.raises(ConfigError) as caught:
        check_leaves(config, given)
    assert str(caught.value).startswith(f"schedule.batch_size = '{text}' cannot work; valid: {instead}")
    check_leaves(config, given[:1])


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "a count": (("--schedule.batch_size", "1" + "0" * 20), "schedule.batch_size = 100000000000000000000"),
    "octal": (("--schedule.batch_size", "010"), "schedule.batch_size = '010' cannot work; valid: 10\n"),
    "octal in a list": (("--model.network.hidden", "[010]"), "write 10, or '010' in quotes"),
    "learning rate that float32 cannot hold": (("--model.optimizer.lr", "1e308"), "model.optimizer.lr = 1e+308"),
    "no learning rate": (
        ("--model.optimizer.lr", "0"),
        "model.optimizer.lr = 0.0 cannot work; valid: a number above 0",
    ),
    "endless learning rate": (
        ("--model.optimizer.lr", ".inf"),
        "model.optimizer.lr = inf cannot work; valid: a number",
    ),
    "momentum": (("--model.optimizer.momentum", "1"), "model.optimizer.momentum = 1.0 cannot work; valid: a number in"),
    "weight decay": (("--model.optimizer.weight_decay", "-1"), "model.optimizer.weight_decay = -1.0 cannot work"),
    "nothing left of a weight": (
        ("--model.optimizer.weight_decay", "5"),
        "weight_decay = 5.0 cannot work; valid: below 1",
    ),
    "eps": (
        ("--model.optimizer", "Adam", "--model.optimizer.eps", "0"),
        "model.optimizer.eps = 0.0 cannot work; valid: ",
    ),
    "betas": (
        ("--model.optimizer", "Adam", "--model.optimizer.betas", "[0.9, 1]"),
        "model.optimizer.betas = 1.0 cannot",
    ),
    "ascent": (("--model.optimizer.maximize", "true"), "model.optimizer.maximize = True cannot work; valid: false"),
    "captured steps": (
        ("--model.optimizer", "Adam", "--model.optimizer.capturable", "true"),
        "model.optimizer.capturable = True cannot work; valid: false",
    ),
    "steps with a graph": (("--model.optimizer.differentiable", "true"), "differentiable = True cannot work"),
    "null": (
        ("--schedule.clients_per_round", "null"),
        "schedule.clients_per_round = 'null' cannot work; valid: an int",
    ),
    "null of a method": (
        ("--methods.m", "FOT", "--methods.m.threshold", "null"),
        "methods.m.threshold = 'null' cannot",
    ),
    "network": (
        ("--model.network.hidden", "[100000, 100000]"),
        "100000 x 100000 numbers' cannot work; valid: a smaller",
    ),
    "width": (
        ("--model.network.hidden", "[4294967295]"),
        "hidden = 4294967295 cannot work; valid: an integer from 1 to 1000000",
    ),
    "clients": (
        ("--data.num_clients", "4000000000"),
        "data.num_clients = 4000000000 cannot work; valid: fewer clients: ",
    ),
    "tasks": (
        ("--data.stream.num_tasks", "4000000000"),
        "data.stream.num_tasks = 4000000000 cannot work; valid: fewer",
    ),
    "samples": (("--data.stream.source.train_size", "4000000000"), "data.stream.source.train_size = 4000000000 cannot"),
    "pixels": (("--data.stream.source.shape", "[3, 1000000, 1000000]"), "data.stream.source.shape = [3, 1000000, 1000"),
    "local epochs": (("--schedule.local_epochs", "4000000000"), "schedule.local_epochs = 4000000000 cannot work"),
    "buffer": (
        ("--methods.m", "DER", "--buffer.size", "4000000000"),
        "buffer.size = 4000000000 cannot work; valid: an integer from 1 to 1000000",
    ),
    "long list": (("--model.network.hidden", f"[{'1, ' * 2000}]"), "at most 1000 values in one list or mapping"),
    "long name": (("--run.dir", "a" * 300), "at most 4095 bytes, and 255 between slashes"),
    "long name of a method": ((f"--methods.{'a' * 300}", "FOT"), "a name of at most 100 letters, digits, _ and -"),
    "long name of a benchmark": (("--run.benchmark", "a" * 300), "255"),
    "names of many methods": (
        ("--methods", "{" + ", ".join(f"{letter * 90}: FedProx" for letter in "abc") + "}", "--run.dir", "null"),
        "255 between slashes",
    ),
    "processes": (("--trainer.devices", "100000"), "trainer.devices = '100000' cannot work; valid: at most 4096"),
    "long name of a configuration": (("--config", "a" * 300), "an existing file"),
    "long name of a checkpoint": (("--ckpt_path", "a" * 300), "255 between slashes"),
    "alone in its task": (
        (*("--data.stream", "ClassSplit", "--data.stream.source", "Synthetic"), "--data.stream.num_tasks", "4"),
        "data.scenario = 'task' cannot work; valid: class, or streams with at least 2 classes in every task: task 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words, said = REFUSED[name]
    started = time.process_time()
    assert tiny_cli.fit(tmp_path / "run", *words) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert said in message
    assert message.count("\n") == 1
    assert len(message) < 1000
    assert time.process_time() - started < 5
    assert not list(tmp_path.iterdir())


FILES: dict[str, tuple[str, str]] = {
    "bomb": (BOMB, "valid: a YAML file (line 5: aliases that repeat"),
    "recursion": ("data: &a {stream: *a}", "valid: a YAML file (line 1: *a within what it stands for)"),
    "brackets": ("data: " + "[" * 500, "nested more than 100 levels deep"),
    "very many brackets": ("data: " + "[" * 10_000, "nest"),
    "key again": ("data: {num_clients: 3}\nrun:\ndata: {num_clients: 4}", "data is in line 1 and again in line 3"),
    "key again in one word": (
        "data: {num_clients: 3}\ndata.num_clients: 4",
        "valid: a YAML file (data.num_clients is set in its section",
    ),
    "key in one word beside its section": (
        "data: {num_clients: 3}\ndata.partition.per_client: 3",
        "(data.partition.per_client is set beside the section data; set partition.per_client in that section)",
    ),
    "key in one word before its section": (
        "model.optimizer.lr: 0.7\nmodel: {network: {class_path: MLP}}",
        "(model.optimizer.lr is set beside the section model; set optimizer.lr in that section)",
    ),
    "method in one word": (
        "methods.fot: FOT\nmethods: {ewc: EWC}",
        "(methods.fot is set beside the section methods; set fot in that section)",
    ),
    "section of a section in one word": (
        "data: {partition: {class_path: IID}, partition.per_client: 3}",
        "(data.partition.per_client is set beside the section data.partition; set per_client in that section)",
    ),
    "colon without a blank": (
        "data: {num_clients:5}",
        "(the key 'num_clients:5' is no name; a key ends with a colon and a blank, as in num_clients: 5)",
    ),
    "equals sign": ("data: {num_clients = 5}", "(the key 'num_clients = 5' is no name; "),
    "blank without a break": ("data:\u00a0{num_clients: 5}", "(the key 'data:\\xa0{num_clients' is no name; "),
    "key of the parser's": ("__path__: x", "(the key '__path__' is no name; "),
    "hyphen in a key": ("data: {num-clients: 5}", "data.num-clients is no option; valid: data.num_clients"),
    "no stream": ("data: {stream: null}", "data.stream = None cannot work; valid: one of ClassSplit, "),
    "no network": ("model: {network: , optimizer: }", "model.network = None cannot work; valid: one of ACGAN, "),
    "method without anything": ("methods: {fot: {}}", "methods.fot = 'Method' cannot work; valid: names with classes"),
    "base class as a method": ("methods: {m: {class_path: Method}}", "methods.m = 'Method' cannot work; valid: names"),
    "list of options": (
        "methods: {fot: {class_path: FOT, init_args: []}}",
        "methods.fot.init_args = [] cannot work; valid: options of FOT below it, or no init_args",
    ),
    "number as a class": ("methods: {fot: {class_path: 3}}", "methods.fot = 3 cannot work; valid: the name of a class"),
    "list as a class": (
        "data: {stream: {class_path: [Permuted]}}",
        "data.stream = ['Permuted'] cannot work; valid: the name of a class",
    ),
    "unknown option in dict_kwargs": (
        "methods: {fot: {class_path: FOT, dict_kwargs: {foo: 0.5}}}",
        "methods.fot.foo = 0.5 cannot work; valid: unset: it is no option of FOT (in",
    ),
    "unknown option in dict_kwargs of a source": (
        "data: {stream: {init_args: {source: {class_path: Digits, dict_kwargs: {foo: 3}}}}}",
        "data.stream.source.foo = 3 cannot work; valid: unset: it is no option of Digits (in",
    ),
    "unknown option in dict_kwargs of an optimizer": (
        "model: {optimizer: {dict_kwargs: {foo: 3}}}",
        "model.optimizer.foo = 3 cannot work; valid: unset: it is no option of SGD (in",
    ),
    "number as a key of a class": (
        "model: {network: {class_path: MLP, init_args: {5: 3}}}",
        "valid: a YAML file (the key 5 in model.network.init_args is no text)",
    ),
    "number as a key of a class in a list": (
        "trainer: {logger: [{class_path: CSVLogger, init_args: {5: 3}}]}",
        "valid: a YAML file (the key 5 in trainer.logger.init_args is no text)",
    ),
    "number as a key": ("data: {1: 3}", "valid: a YAML file (the key 1 in data is no text)"),
    "octal": ("schedule: {batch_size: 010}", "line 1: 010; write 10"),
    "octal in quotes": ("schedule: {batch_size: '010'}", "schedule.batch_size = '010' cannot work; valid: 10 (in"),
    "NUL": ('run: {dir: "a\\0b"}', "run.dir = 'a\\x00b' cannot work; valid: a text without the character NUL"),
    "null": ("schedule: {batch_size: null}", "schedule.batch_size = None cannot work; valid: an integer"),
    "long list": (f"targets: {{accuracies: [{'1, ' * 2000}]}}", "targets.accuracies = [1, 1"),
    "network of another file": (
        "model: {network: {class_path: SmallCNN, init_args: {dropout: [0.1]}}}",
        "model.network.dropout = [0.1] cannot work; valid: one number, or a list of 2, each in [0, 1) (in ",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_refused_in_a_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = FILES[name]
    (tmp_path / "bad.yaml").write_text(text)
    shape = ("--data.stream.source.shape", "[1, 16, 16]") if "network" in name else ()
    assert tiny_cli.fit(tmp_path / "run", "--config", str(tmp_path / "bad.yaml"), *shape) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for one in named_subclasses(Network):
        if not one.__module__.startswith("cfl."):  # of another test; the parser lists every class that it knows
            message = re.sub(rf"\b{one.__name__}, |, {one.__name__}\b", "", message)
    assert said in message
    assert len(message) < 1000
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("then", ["{class_path: SmallCNN}", "SmallCNN"])
def test_options_of_another_class_are_dropped_by_name(
    then: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "old.yaml").write_text("model: {network: {class_path: MLP, init_args: {hidden: [8]}}}\n")
    (tmp_path / "new.yaml").write_text(f"model: {{network: {then}}}\nschedule: {{rounds_per_task: 1}}\n")
    files = [word for name in ("old", "new") for word in ("--config", str(tmp_path / f"{name}.yaml"))]
    assert tiny_cli.fit(tmp_path / "run", *files, "--data.stream.source.shape", "[1, 16, 16]") == 0
    said = [record.getMessage() for record in caplog.records if record.name == "cfl.cli.parsing"]
    of = tmp_path / "old.yaml"
    assert said == [f"model.network.hidden = [8] (in {of}) is dropped: model.network is cfl.models.SmallCNN by now"]
    caplog.clear()
    assert tiny_cli.fit(tmp_path / "second", "--config", str(tmp_path / "old.yaml")) == 0
    assert not [record for record in caplog.records if record.name == "cfl.cli.parsing"]


class TakesMore(Method):
    """A method with options that only its ``**more`` takes."""

    def __init__(self, mu: float = 0.0, **more: Any) -> None:
        self.mu, self.more = mu, more


def test_options_in_dict_kwargs_join_as_others_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = f"{__name__}.TakesMore"
    words = []
    for number, options in enumerate(("init_args: {mu: 0.5}, dict_kwargs: {depth: 7, a: 1}", "dict_kwargs: {a: 2}")):
        (tmp_path / f"{number}.yaml").write_text(f"methods: {{mine: {{class_path: {path}, {options}}}}}\n")
        words += ["--config", str(tmp_path / f"{number}.yaml")]
    assert tiny_cli.fit(tmp_path / "run", *words, "--schedule.rounds_per_task", "1") == 0
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["methods"]["mine"]
    assert kept == {"class_path": path, "init_args": {"mu": 0.5}, "dict_kwargs": {"depth": 7, "a": 2}}
    assert not [record for record in caplog.records if record.name == "cfl.cli.parsing"]


def test_an_option_in_dict_kwargs_is_used_and_not_called_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "m.yaml").write_text("methods: {prox: {class_path: FedProx, dict_kwargs: {mu: 0.5}}}\n")
    assert tiny_cli.fit(tmp_path / "run", "--config", str(tmp_path / "m.yaml")) == 0
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["methods"]["prox"]
    assert kept["init_args"]["mu"] == 0.5
    assert not [record for record in caplog.records if record.name == "cfl.cli.parsing"]


def test_a_pipe_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("pipe", "pipe.yaml"):
        os.mkfifo(tmp_path / name)
        for option in ("--config", "--data", "--model.network", "--ckpt_path"):
            assert tiny_cli.fit(tmp_path / "run", option, str(tmp_path / name)) == 2
            assert "pipe" in capsys.readouterr().err
