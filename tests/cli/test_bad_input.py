"""Settings that cannot work end a command before training, with status 2 and one line: key, value and valid values."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from support import tiny_cli
from support.tiny import fit, tiny_client, tiny_data, tiny_trainer

from cfl.callbacks import FederatedOrchestrator, RoundCheckpoint, RoundProgress
from cfl.callbacks.trainer_checks import _BREAKING, check_trainer
from cfl.cli.checkpoints import check_checkpoint
from cfl.cli.given import on_command_line
from cfl.cli.linked_defaults import check_given
from cfl.cli.main import main
from cfl.data.sources import Arrays, ImageFolder
from cfl.data.streams import ClassSplit
from cfl.engines import EngineOptions
from cfl.methods import Method
from cfl.runtime.errors import ConfigError, DataFilesMissing

SPLIT = ("--data.stream", "ClassSplit", "--data.stream.source", "Synthetic")
FOT = ("--methods.fot", "FOT")
SORTED = ("--trainer.profiler.sort_by_key", "size")
DIRICHLET = ("--data.partition", "Dirichlet")

# Name -> options given, and texts that the message must contain: the key with the value, then some valid values.
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # Names.
    "method": (("--methods.fot", "Fott"), ("methods.fot = 'Fott'", "FOT", "PersonalLayers")),
    "network": (("--model.network", "MPL"), ("model.network = 'MPL'", "LeNet", "MLP")),
    "network path": (("--model.network", "cfl.models.Nope"), ("model.network = 'cfl.models.Nope'", "LeNet", "MLP")),
    "partition": (("--data.partition", "Shrads"), ("data.partition = 'Shrads'", "Dirichlet", "IID", "Shards")),
    "stream": (("--data.stream", "Permute"), ("data.stream = 'Permute'", "ClassSplit", "Permuted", "Rotated")),
    "source": (("--data.stream.source", "MINST"), ("data.stream.source = 'MINST'", "Digits", "MNIST", "Synthetic")),
    "participation": (
        ("--data.participation", "Some"),
        ("data.participation = 'Some'", "AllClients", "RandomShare"),
    ),
    "optimizer": (("--model.optimizer", "SGDD"), ("model.optimizer = 'SGDD'", "Adam", "SGD")),
    "option": (("--data.num_client", "3"), ("data.num_client is no option", "data.num_clients")),
    "option that another one decides": (("--seed", "3"), ("seed is no option; valid: seed_everything\n",)),
    "seed of the data": (("--data.seed", "3"), ("data.seed = '3'", "unset: it follows from seed_everything")),
    "engine of the model": (("--model.engine.kind=vmap",), ("model.engine.kind = 'vmap'", "unset", "from engine\n")),
    "buffer of the model": (("--model", "{buffer: {size: 3}}"), ("model.buffer.size = 3", "from buffer\n")),
    "near the engine": (("--model.engin", "3"), ("model.engin is no option; valid: model.network, model.optimizer\n",)),
    "group": (("--buffer", "3"), ("buffer = '3'", "its options, as those that begin with --buffer. in --help")),
    "part of a mapping": (
        ("--federated.codecs.update.bits", "8"),
        ("federated.codecs.update.bits = '8'", "one mapping", "--federated.codecs '{update: {bits: 8}}'\n"),
    ),
    "class of another kind by its path": (
        ("--data.partition", "cfl.data.streams.Permuted"),
        ("data.partition = 'cfl.data.streams.Permuted'", "valid: one of ", "Dirichlet", "IID"),
    ),
    "network of another kind": (
        ("--model.network", "cfl.data.streams.Permuted"),
        ("model.network = 'cfl.data.streams.Permuted'", "(cfl.data.streams.Permuted is no subclass of Network)"),
    ),
    "methods without names": (("--methods", "fot"), ("methods = 'fot'", "--methods.fot FOT")),
    "option of no group": (("--unknown", "3"), ("unknown is no option", "data", "schedule", "trainer")),
    "option of a network": (("--model.network.hiden", "[3]"), ("model.network.hiden is no option", "hidden")),
    "option of a source": (
        ("--data.stream.source.num_clases", "3"),
        ("data.stream.source.num_clases is no option", "num_classes"),
    ),
    "option of a partition": (
        ("--data.partition.per_clients", "3"),
        ("data.partition.per_clients is no option", "per_client"),
    ),
    "option of a method": (
        (*FOT, "--methods.fot.treshold", "0.5"),
        ("methods.fot.treshold is no option", "valid: threshold"),
    ),
    "option of the second method": (
        (*FOT, "--methods.mine", "FedProx", "--methods.mine.mue=0.5"),
        ("methods.mine.mue is no option", "valid: mu"),
    ),
    "option of the first method": (
        ("--methods", "{mine: FedProx}", *FOT, "--methods.mine.mue", "0.5"),
        ("methods.mine.mue is no option", "valid: mu"),
    ),
    "option that another method has": (
        ("--methods.mine", "FedProx", "--methods.mine.mu", "1", *FOT, "--methods.fot.init_args.mu", "1"),
        ("methods.fot.mu is no option", "threshold_increment"),
    ),
    "text for a method's number": (
        ("--methods.mine", "FOT", "--methods.mine.threshold", "0.5", *FOT, "--methods.fot.threshold", "high"),
        ("methods.fot.threshold = 'high'", "a number"),
    ),
    "choice": (
        ("--federated.client_weighting", "size"),
        ("federated.client_weighting = 'size'", "'uniform', 'samples'"),
    ),
    "choice or null": (("--data.scenario", "klass"), ("data.scenario = 'klass'", "'task', 'class', 'domain'")),
    "logger": (
        ("--trainer.logger", "CVSLogger"),
        ("trainer.logger = 'CVSLogger'", "false", "--trainer.logger CSVLogger"),
    ),
    "logger without a folder": (
        ("--trainer.logger", "CSVLogger"),
        ("trainer.logger.save_dir is missing", "CSVLogger needs", "--trainer.logger.save_dir . (the run folder)\n"),
    ),
    # Options that have to be given.
    "option of an optional class": (
        ("--data.participation", "Joining"),
        ("error: data.participation.initial is missing; Joining needs a value for initial, per_task\n",),
    ),
    "one of two options of an optional class": (
        ("--data.participation", "Joining", "--data.participation.initial", "3"),
        ("error: data.participation.per_task is missing; Joining needs a value for per_task\n",),
    ),
    "option of an optional class in an optional class": (
        ("--data.participation", "Holders", "--data.participation.of", "Joining"),
        ("error: data.participation.of.initial is missing; Joining needs a value for initial, per_task\n",),
    ),
    "tasks of fixed sequences": (
        ("--data.sequences", "FixedTasks"),
        ("error: data.sequences.tasks is missing; FixedTasks needs a value for tasks\n",),
    ),
    "sources of a sequence": (
        ("--data.stream", "Sequence"),
        ("error: data.stream.sources is missing; Sequence needs a value for sources\n",),
    ),
    "path of arrays": (
        ("--data.stream.source", "Arrays"),
        ("error: data.stream.source.path is missing; Arrays needs a value for path\n",),
    ),
    "option of a callback": (
        ("--trainer.callbacks", "StochasticWeightAveraging"),
        ("error: trainer.callbacks.swa_lrs is missing; StochasticWeightAveraging needs",),
    ),
    "option that a method needs": (
        (*FOT, "--methods", "{other: {class_path: CFeD, init_args: {surrogate: MNIST}}}", "--methods.mine", "CFeD"),
        ("error: methods.mine.surrogate is missing; CFeD needs a value for surrogate\n",),
    ),
    "option of a class that a method has": (
        ("--methods.mine", "CFeD", "--methods.mine.surrogate", "Arrays"),
        ("error: methods.mine.surrogate.path is missing; Arrays needs a value for path\n",),
    ),
    # Types.
    "text for a number": (("--data.num_clients", "many"), ("data.num_clients = 'many'", "an integer")),
    "text for a list": (
        ("--model.network.hidden", "wide"),
        ("model.network.hidden = 'wide'", "a list (each an integer) or null"),
    ),
    "text for an optimizer's number": (
        ("--model.optimizer.lr", "abc"),
        ("model.optimizer.lr = 'abc'", "a number"),
    ),
    "number for a list": (("--targets.accuracies", "50"), ("targets.accuracies = '50'", "a list")),
    "random seed": (("--seed_everything", "true"), ("seed_everything = 'True'", "an integer from 0 to 4294967295")),
    # Values.
    "seed below zero": (("--seed_everything", "-1"), ("seed_everything = -1", "0 to 4294967295")),
    "seed too large": (("--seed_everything", "4294967296"), ("seed_everything = 4294967296", "at most 4294967295")),
    "no number of clients": (("--schedule.clients_per_round", ".nan"), ("clients_per_round = nan", "a number\n")),
    "endless steps of the server": (("--federated.server_lr", ".inf"), ("federated.server_lr = inf", "above 0")),
    "seconds below zero": (("--progress.plain_seconds", "-1"), ("progress.plain_seconds = -1.0", "at least 0")),
    "half precision": (("--trainer.precision", "16-mixed"), ("trainer.precision = '16-mixed'", "bf16-mixed")),
    "no such device": (("--trainer.accelerator", "tpu"), ("trainer = ", "Lightning's Trainer accepts")),
    "no GPU": (("--trainer.accelerator", "gpu"), ("trainer.accelerator = 'gpu'", "auto or cpu")),
    "zero rounds": (("--schedule.rounds_per_task", "0"), ("schedule.rounds_per_task = 0", "at least 1 round")),
    "a zero among the rounds": (
        ("--schedule.rounds_per_task", "[2, 0]"),
        ("schedule.rounds_per_task = [2, 0]", "at least 1 round"),
    ),
    "rounds of another stream": (
        ("--schedule.rounds_per_task", "[1, 2, 3]"),
        ("schedule.rounds_per_task = [1, 2, 3]", "a list of 2"),
    ),
    "more clients than there are": (
        ("--schedule.clients_per_round", "5"),
        ("schedule.clients_per_round = 5", "at most 4"),
    ),
    "no clients": (("--schedule.clients_per_round", "0"), ("schedule.clients_per_round = 0", "at least 1")),
    "more than all clients": (("--schedule.clients_per_round", "1.5"), ("clients_per_round = 1.5", "(0, 1]")),
    "more shards than samples": (
        ("--data.partition.per_client", "25"),
        ("data.partition.per_client = 25", "at most 24", "4 clients", "96 training samples"),
    ),
    "no shard": (("--data.partition.per_client", "0"), ("data.partition.per_client = 0", "at least 1")),
    "more samples than Dirichlet can give": (
        (*DIRICHLET, "--data.partition.min_samples", "25"),
        ("data.partition.min_samples = 25", "at most 24"),
    ),
    "Dirichlet that is never met": (
        # Each of four classes goes to one client as a whole, so that a fifth client stays empty.
        (*DIRICHLET, "--data.partition.alpha", "1e-6", "--data.partition.min_samples", "1", "--data.num_clients", "5"),
        ("data.partition.alpha = 1e-06", "100 draws", "lower min_samples to 0"),
    ),
    "classes that do not divide": (
        (*SPLIT, "--data.stream.num_tasks", "3"),
        ("data.stream.num_tasks = 3", "a divisor of the 4 classes", "1, 2, 4"),
    ),
    "no threshold": ((*FOT, "--methods.fot.threshold", "0"), ("methods.fot.threshold = 0.0", "(0, 1]")),
    "threshold above one": ((*FOT, "--methods.fot.threshold", "1.5"), ("methods.fot.threshold = 1.5", "(0, 1]")),
    "server momentum": (("--federated.server_momentum", "1.5"), ("federated.server_momentum = 1.5", "[0, 1)")),
    "no statistics": (("--federated.batchnorm", "drop"), ("federated.batchnorm = 'drop'", "no statistics")),
    "checkpoint share": (("--checkpoint.share", "0"), ("checkpoint.share = 0.0", "(0, 1]")),
    "dropout": (("--model.network.dropout", "1"), ("model.network.dropout = 1", "[0, 1)")),
    # Methods under names of the user's own.
    "option of a method with a name of its own": (
        ("--methods.mine", "FedProx", "--methods.mine.mu", "-1"),
        ("methods.mine.mu = -1.0", "at least 0"),
    ),
    "layers of a method with a name of its own": (
        ("--methods.mine", "FOT", "--methods.mine.layers", "[nothing]"),
        ("methods.mine.layers",),
    ),
    # Places.
    "benchmark that is a path": (("--run.benchmark", "../up"), ("run.benchmark = '../up'", "a folder's")),
    "benchmark without a name": (("--run.benchmark", ""), ("run.benchmark = ''", "a folder's")),
    "folder without a name": (("--run.dir", "", "--run.overwrite", "true"), ("run.dir = ''", "null")),
    # Names of methods, which are names of files.
    "method named like a table": (("--methods.rounds", "FOT"), ("methods.rounds = 'rounds'", "rounds.csv")),
    "method named like a matrix": (
        ("--methods.accuracy_matrix", "FOT"),
        ("methods.accuracy_matrix", "accuracy_matrix.csv"),
    ),
    "method named like the model": (("--methods.model", "GPM"), ("methods.model = 'model'", "another name")),
    "method named like the buffer": (("--methods.buffer", "ICaRL"), ("methods.buffer = 'buffer'", "another name")),
    "method named like a path": (("--methods", "{a/b: FOT}"), ("methods.a/b = 'a/b'", "letters, digits")),
    "method without class": (("--methods.fot.threshold", "0.9"), ("methods.fot = ", "--methods.fot FOT")),
    "misspelt name of a method": (
        (*FOT, "--methods.fot.threshold", "0.9", "--methods.fto.threshold", "0.8"),
        ("methods.fto = 'options without a class'", "names with classes"),
    ),
    "class that is not there": (
        ("--methods.fot", "cfl.methods.fot.Fott"),
        ("methods.fot = 'cfl.methods.fot.Fott'", "has no attribute 'Fott'"),
    ),
    "class of another kind": (
        ("--model.network", "torch.nn.Flatten"),
        ("model.network = 'torch.nn.Flatten'", "valid: one of ACGAN", "MLP"),
    ),
    # Contradictions.
    "seen classes of a domain": (("--data.class_loss", "seen"), ("data.class_loss = 'seen'", "data.scenario: domain")),
    "method and scenario": (
        (*SPLIT, "--data.stream.num_tasks", "2", "--data.scenario", "class", "--methods.apd", "APD"),
        ("data.scenario = 'class'", "methods.apd", "domain", "task"),
    ),
    "optimizer that mixes clients": (
        ("--model.optimizer", "LBFGS"),
        ("model.optimizer = 'LBFGS'", "'Adam'", "'SGD'"),
    ),
    "optimizer's option": (
        ("--model.optimizer.lr", "-1"),
        ("model.optimizer.lr = -1.0", "above 0"),
    ),
    # Trainer settings, beside those of test_trainer_settings.py.
    "evaluations by the clock": (
        ("--trainer.val_check_interval", "00:00:10:00"),
        ("trainer.val_check_interval", "schedule.evaluate_every"),
    ),
    "gradients up": (("--trainer.gradient_clip_val", "-1"), ("trainer.gradient_clip_val = -1", "at least 0")),
    "averaged weights": (
        ("--trainer.callbacks", "StochasticWeightAveraging", "--trainer.callbacks.swa_lrs", "0.1"),
        ("trainer.callbacks = 'StochasticWeightAveraging'", "server"),
    ),
    "files within a round": (
        ("--trainer.callbacks", "OnExceptionCheckpoint", "--trainer.callbacks.dirpath", "."),
        ("trainer.callbacks = 'OnExceptionCheckpoint'", "checkpoint.enabled"),
    ),
    "option that a logger hands on": (
        ("--trainer.logger", "{class_path: TensorBoardLogger, init_args: {save_dir: .}, dict_kwargs: {nope: 3}}"),
        ("trainer.logger.nope = 3 ", "TensorBoardLogger has the options", ", flush_secs, ", ", max_queue, "),
    ),
    "added callback": (
        ("--trainer.callbacks+=ModelSumary",),
        ("trainer.callbacks = 'ModelSumary'", "a list (each a s"),
    ),
    "option of an added callback": (
        ("--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks.logging_interval", "round"),
        ("trainer.callbacks.logging_interval = 'round'", "valid: 'step', 'epoch' or null"),
    ),
    "unknown option of an added callback": (
        ("--trainer.callbacks+=ModelSummary", "--trainer.callbacks.depth", "3"),
        ("trainer.callbacks.depth is no option of ModelSummary", "valid: max_depth\n"),
    ),
    "what a callback needs": (
        ("--trainer.callbacks", "DeviceStatsMonitor"),
        ("trainer.callbacks = 'DeviceStatsMonitor'", "settings that it accepts (cannot use `DeviceStatsMonitor` callb"),
    ),
    "order of a profiler's table": (
        (*("--trainer.profiler", "PyTorchProfiler", "--trainer.profiler.record_module_names", "false"), *SORTED),
        (
            "trainer.profiler = 'PyTorchProfiler'",
            "settings that it accepts (found sort_by_key: size. ",
            "'cpu_time_total'",
        ),
    ),
    "no such strategy": (("--trainer.strategy", "ddpp"), ("trainer.strategy = 'ddpp'", "choices: auto")),
    "no such accelerator": (("--trainer.accelerator", "gpuu"), ("trainer.accelerator = 'gpuu'", "names are: ", "auto")),
    "no devices": (("--trainer.devices", "0"), ("trainer.devices = '0'", "Lightning's Trainer accepts (")),
    "a precision of torch": (
        ("--trainer.precision", "fp16"),
        ("trainer.precision = 'fp16'", "32-true or bf16-mixed\n"),
    ),
    "Lightning's own logger": (("--trainer.logger", "true"), ("trainer.logger = True", "configs/loggers")),
    "list that is none": (("--data.stream+", "x"), ("data.stream+ is no option; valid: data.stream\n",)),
    "method named like a key": (
        ("--methods.class_path", "FOT"),
        ("methods.class_path = 'class_path'", "another name: in configurations class_path belongs to a class"),
    ),
    # Files.
    "no such config": (("--config", "nowhere.yaml"), ("nowhere.yaml", "an existing file")),
    "no such checkpoint": (("--ckpt_path", "nowhere.ckpt"), ("ckpt_path = 'nowhere.ckpt'", "existing")),
}


def all_subclasses(kind: type) -> set[type]:
    """Return direct and indirect subclasses."""
    children = kind.__subclasses__()
    return set(children).union(*map(all_subclasses, children))


@pytest.mark.parametrize("name", CASES)
def test_refused_before_training(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given, expected = CASES[name]
    status = tiny_cli.fit(tmp_path / "run", *given)
    message = capsys.readouterr().err
    assert (status, message.count("\n")) == (2, 1), message
    assert message.startswith("error: ")
    of_tests = {kind.__name__ for kind in all_subclasses(Method) if not kind.__module__.startswith("cfl.")}
    listed = [word for word in message.split(", ") if word not in of_tests]  # methods of other tests are listed, too
    assert len(", ".join(listed)) < 1000
    for words in expected:
        assert words.lower() in message.lower()
    assert not (tmp_path / "run" / "rounds.csv").exists()


@pytest.mark.parametrize("file_last", [True, False])
def test_the_value_that_counts_is_named_wherever_it_is(
    file_last: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file behind an option overrides it, an option behind a file overrides that."""
    in_file, in_words = ("abc", "0.1") if file_last else ("0.1", "abc")
    file = tmp_path / "momentum.yaml"
    options = f"{{lr: 0.3, momentum: {in_file}}}"
    file.write_text(f"model: {{optimizer: {{class_path: torch.optim.SGD, init_args: {options}}}}}")
    given = [("--model.optimizer.momentum", in_words), ("--config", str(file))][:: 1 if file_last else -1]
    assert tiny_cli.fit(tmp_path / "run", *given[0], *given[1]) == 2
    place = f" (in {file})" if file_last else ""
    said = f"error: model.optimizer.momentum = 'abc' cannot work; valid: a number{place}\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("option", "content", "said"),
    [
        (
            "--data.stream",
            "{class_path: Permuted, init_args: {num_tasks: zz}}",
            "data.stream.num_tasks = 'zz' cannot work; valid: an integer\n",
        ),
        (
            "--model.network",
            "{class_path: MLP, init_args: {hidden: zz}}",
            "model.network.hidden = 'zz' cannot work; valid: a list (each an integer) or null\n",
        ),
        ("--model.network", "{class_path: MLPP}", "model.network = 'MLPP' cannot work; valid: one of "),
    ],
    ids=["stream", "network", "class"],
)
def test_an_option_in_a_class_of_its_own_file_is_named(
    option: str, content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.yaml").write_text(content)
    assert tiny_cli.fit(tmp_path / "run", option, str(tmp_path / "own.yaml")) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


YAML = {
    "unknown key": ("data: {num_client: 3}", "data.num_client is no option; valid: data.num_clients"),
    "unknown section with a class": (
        "method: {moon: {class_path: my.moon.Moon}}",
        "method.moon is no option; valid: methods",
    ),
    "unknown section with a class of the package": (
        "modle: {network: {class_path: MLP}}",
        "modle.network is no option; valid: model.network",
    ),
    "unknown section with a long name": (
        "measure: {the_worst_of_all_classes: {class_path: my.measures.Worst}}",
        "measure.the_worst_of_all_classes is no option; valid: measures",
    ),
    "unknown section": ("shedule: {batch_size: 3}", "shedule.batch_size is no option; valid: schedule.batch_size"),
    "unknown class": ("data: {partition: {class_path: Shrads}}", "data.partition = 'Shrads' cannot work"),
    "class of another kind": ("methods: {fot: {class_path: Digits}}", "methods.fot = 'Digits' cannot work"),
    "option of a method": (
        "methods: {a: {class_path: FedProx}, fot: {class_path: FOT, init_args: {treshold: 1}}}",
        "methods.fot.treshold is no option of FOT; valid: threshold",
    ),
    "option that has to be given": (
        "data: {participation: {class_path: Joining, init_args: {initial: 3}}}",
        "error: data.participation.per_task is missing; Joining needs a value for per_task",
    ),
    "unknown init_args": (
        "data: {partition: {class_path: Shards, init_args: {per_clients: 2}}}",
        "data.partition.per_clients is no option of Shards; valid: per_client",
    ),
    "engine of the model": (
        "model: {engine: {kind: vmap}}",
        "model.engine.kind = 'vmap' cannot work; valid: unset",
    ),
    "seed of the model": ("model.seed: 3", "model.seed = 3 cannot work; valid: unset: it follows from seed_everything"),
    "methods of the model": (
        "model: {methods: {fot: {class_path: FOT}}}",
        "model.methods.fot = 'FOT' cannot work; valid: unset: it follows from methods",
    ),
    "schedule of the data": ("data: {schedule: {batch_size: 3}}", "data.schedule.batch_size = 3 cannot work"),
    "shape": ("model: {input_shape: [1, 2, 3]}", "model.input_shape = [1, 2, 3] cannot work; valid: unset"),
    "number for a group": (
        "buffer: 3",
        "buffer = 3 cannot work; valid: its options, as those that begin with --buffer.",
    ),
    "methods without names": ("methods: fot", "methods = 'fot' cannot work; valid: names with classes, e.g. --m"),
    "nothing for a group": ("buffer:", "buffer = None cannot work; valid: its options"),
    "class of another kind by its path": (
        "data: {partition: {class_path: cfl.data.streams.Permuted}}",
        "data.partition = 'cfl.data.streams.Permuted' cannot work; valid: one of ",
    ),
    "option beside its class": (
        "methods: {mine: {class_path: FedProx, mu: 0.1}}",
        "methods.mine.mu = 0.1 cannot work; valid: mu below init_args, as an option of FedProx",
    ),
    "options that are not there": (
        "methods: {mine: {class_path: FedProx, init_args: }}",
        "methods.mine.init_args = None cannot work; valid: options of FedProx below it, or no init_args",
    ),
    "broken file": ("schedule: [", "bad.yaml' cannot work; valid: a YAML file (line "),
    "empty file": ("", "bad.yaml' cannot work; valid: a YAML file that holds a mapping"),
    "list": ("- data", "bad.yaml' cannot work; valid: a YAML file that holds a mapping"),
    "key with its file": ("data: {num_client: 3}", "bad.yaml)"),
}


@pytest.mark.parametrize("name", YAML)
def test_refused_in_a_file_as_well(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong key or value in a YAML file is refused. Otherwise the default would be used unnoticed."""
    text, expected = YAML[name]
    (tmp_path / "bad.yaml").write_text(text)
    assert tiny_cli.fit(tmp_path / "run", "--config", str(tmp_path / "bad.yaml")) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert expected in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "text",
    [
        "methods: fot",
        "methods: [fot, ewc]",
        "methods: {fot: {threshold: 0.9}}",
        "measures: [top5]",
        "model: {seed: 3}",
        "data: {schedule: {batch_size: 3}}",
        "buffer: 3",
        "methods: {mine: {class_path: FedProx, mu: 0.1}}",
    ],
)
def test_what_cannot_be_set_is_told_with_its_file(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.yaml").write_text(text)
    assert tiny_cli.fit(tmp_path / "run", "--config", str(tmp_path / "b.yaml")) == 2
    said = capsys.readouterr().err
    assert said.count("(in ") == 1
    assert said.endswith(f" (in {tmp_path / 'b.yaml'})\n")
    section = text.partition(":")[0]
    assert (f"in YAML {section}: {{" in said) is ("valid: names with classes" in said)


@pytest.mark.parametrize("name", ["configs/methods/fot.yaml", "methods/fot.yaml", "mine.yaml", "none.yaml", "fot"])
def test_a_configuration_without_its_option_is_told_of_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("methods: {}")
    assert tiny_cli.fit(tmp_path / "run", name) == 2
    said = capsys.readouterr().err
    assert f"unrecognized arguments: {name}" in said
    assert said.endswith(f"; a configuration is given by --config, e.g. --config {name}\n") is (
        name not in ("none.yaml", "fot")
    )


def test_missing_data_files_are_named_with_their_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message lists every missing file with its path, and the options that set the data root."""
    (tmp_path / "MNIST").write_text("in the way of any download")
    options = ("--data.stream.source", "MNIST", "--data.root", str(tmp_path), "--data.partition.per_client", "1")
    assert tiny_cli.fit(tmp_path / "run", *options) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: MNIST: files are missing")
    for file in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"):
        assert f"{tmp_path}/MNIST/raw/{file} (missing)" in message
    assert "data.root" in message
    assert "CFL_DATA_ROOT" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("logger", ["false", "wandb"])
def test_run_folder_that_cannot_be_written(tmp_path: Path, logger: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A run folder below a file is refused in one line. Not even root can create such a folder."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    config = Path(__file__).parents[2] / "configs" / "loggers" / "wandb.yaml"
    options = ("--trainer.logger", "false") if logger == "false" else ("--config", str(config))
    assert tiny_cli.fit(folder, *options) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: run.dir = '{folder}' cannot work; valid: a folder that can be written")
    assert message.count("\n") == 1


def test_update_that_is_not_finite_names_client_and_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that diverges stops in round 0 with one line: client, round, task, and options that may help."""
    assert tiny_cli.fit(tmp_path, "--model.optimizer.lr", "1e30") == 2
    message = capsys.readouterr().err
    assert message.startswith("error: client ")
    for words in ("trained to NaN or infinity in round 0", "task 0", "lr", "federated.on_bad_update=skip"):
        assert words in message
    assert message.count("\n") == 1


def test_debug_variable_asks_for_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With JSONARGPARSE_DEBUG=true a refused setting raises its error with the trace, with false it is one line."""
    monkeypatch.setenv("JSONARGPARSE_DEBUG", "true")
    with pytest.raises(ValueError, match="server_momentum"):
        tiny_cli.fit(tmp_path, "--federated.server_momentum", "1.5")
    monkeypatch.setenv("JSONARGPARSE_DEBUG", "false")
    assert tiny_cli.fit(tmp_path, "--federated.server_momentum", "1.5") == 2


def test_errors_of_the_program_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of another kind, a bug, is raised with its trace instead of being put on one line."""
    monkeypatch.setattr("cfl.federation.federation.Federation.__init__", lambda *_: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        tiny_cli.fit(tmp_path)


@pytest.mark.parametrize(
    ("stage", "key", "value"),
    [
        ("validate", "limit_val_batches", 1),
        ("validate", "overfit_batches", 1),
        ("test", "limit_test_batches", 0.5),
        ("fit", "limit_test_batches", 1),
        ("fit", "overfit_batches", 2),
    ],
)
def test_a_part_of_the_test_set_is_no_test(stage: str, key: str, value: Any) -> None:
    data = tiny_data()
    client, trainer = tiny_client(data), tiny_trainer(data, **{key: value})
    with pytest.raises(ConfigError, match=rf"trainer\.{key} = {value} .*of the source instead"):
        getattr(trainer, stage)(client, datamodule=data)


@pytest.mark.parametrize("kind", list(_BREAKING))
def test_callbacks_that_break_rounds_are_refused(kind: type[Callback]) -> None:
    class Lookalike(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            pass

    data = tiny_data()
    trainer = tiny_trainer(data)
    trainer.callbacks.append(Lookalike())
    with pytest.raises(ConfigError, match=r"trainer\.callbacks = 'Lookalike'") as caught:
        check_trainer(trainer, data)
    assert _BREAKING[kind] in str(caught.value)


def test_callbacks_of_the_program_are_there_once() -> None:
    data = tiny_data()
    trainer = tiny_trainer(data, callbacks=[RoundProgress(), LambdaCallback(), LambdaCallback()])
    check_trainer(trainer, data)
    trainer.callbacks.append(RoundProgress())
    with pytest.raises(ConfigError, match=r"trainer\.callbacks = 'RoundProgress'.*callbacks of others"):
        check_trainer(trainer, data)


def test_checkpoints_that_are_written_later_are_refused() -> None:
    """A plugin that writes checkpoints in the background is refused: the new file is renamed before it is complete."""
    data = tiny_data()
    own = [RoundCheckpoint()]
    trainer = tiny_trainer(data, callbacks=own, enable_checkpointing=True, plugins=[AsyncCheckpointIO()])
    with pytest.raises(ConfigError, match=r"trainer\.plugins = 'AsyncCheckpointIO'"):
        check_trainer(trainer, data)


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ({}, "a smaller model.optimizer lr usually helps"),
        ({"held": "EWC", "near": "FedProx"}, "lr or methods.held.strength or methods.near.mu usually helps"),
        ({"apd": "APD"}, "lr or methods.apd.consolidation usually helps"),
    ],
)
def test_what_may_be_too_large_is_named(
    methods: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [word for name, kind in methods.items() for word in (f"--methods.{name}", kind)]
    assert tiny_cli.fit(tmp_path, "--model.optimizer.lr", "1e30", *options) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: FederatedOrchestrator(client_state_memory_mb=math.inf), "federated.client_state_memory_mb"),
        (lambda: FederatedOrchestrator(client_state_memory_mb=math.nan), "federated.client_state_memory_mb"),
        (lambda: EngineOptions(workers=2, compile="default"), "engine.workers"),
    ],
)
def test_options_that_could_do_nothing(make: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.key == key


def test_a_task_without_training_samples_is_refused(tmp_path: Path) -> None:
    images, labels = np.zeros((40, 4, 4), dtype=np.uint8), np.arange(40) % 4
    file = tmp_path / "half.npz"
    np.savez(file, train_images=images, train_labels=labels % 2, test_images=images, test_labels=labels)
    with pytest.raises(DataFilesMissing, match=r"half\.npz .*2 of its labels 0 to 3 have no training sample"):
        tiny_data(ClassSplit(Arrays(str(file)), 2))


@pytest.mark.parametrize(
    ("source", "path"),
    [("Arrays", "n.npz"), ("ImageFolder", "n"), ("Arrays", "/n.npz"), ("ImageFolder", "/n")],
)
def test_a_missing_file_is_looked_for_where_it_may_be(
    source: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message about a missing file advises `data.root` for a relative path only."""
    sizes = {"shape": [1, 4, 4], "num_classes": 4}
    of_stream = {"source": {"class_path": source, "init_args": {"path": path, **sizes}}, "num_tasks": 2}
    stream = {"class_path": "Permuted", "init_args": of_stream}
    assert tiny_cli.fit(tmp_path, "--data.stream", json.dumps(stream)) == 2
    message = capsys.readouterr().err
    assert path in message
    assert ("data.root" in message) is not path.startswith("/")


def test_a_folder_to_count_classes_in_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"source\.path = '/n' cannot work; valid: a folder: .*n/train does not exist"
    ):
        _ = ImageFolder("/n", [1, 4, 4]).num_classes


def test_a_checkpoint_whose_name_no_file_can_have_is_named() -> None:
    with pytest.raises(ConfigError, match=r"ckpt_path = 'nnn.*an existing checkpoint file"):
        check_checkpoint(Path("n" * 300), {})


def test_a_task_without_tests_is_refused(tmp_path: Path) -> None:
    images, labels = np.zeros((40, 4, 4), dtype=np.uint8), np.arange(40) % 4
    file = tmp_path / "half.npz"
    np.savez(file, train_images=images, train_labels=labels, test_images=images, test_labels=labels % 2)
    data = tiny_data(ClassSplit(Arrays(str(file)), 2))
    with pytest.raises(ConfigError, match=r"data\.stream = 'ClassSplit, whose task 1 has no test sample'"):
        fit(tiny_client(data), data)


def test_a_command_line_without_options_says_nothing_wrong() -> None:
    for words in ([], ["--methods"], ["--progress"]):
        check_given(on_command_line(words))


@pytest.mark.parametrize("words", [[], ["validate"], ["test"]])
def test_a_bare_command_is_told_what_is_missing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        assert main(words) != 0
    assert ("a checkpoint to score" if words else 'expected "subcommand"') in capsys.readouterr().err


@pytest.mark.parametrize("key", ["limit_train_batches", "limit_val_batches", "val_check_interval"])
def test_an_integer_1_is_one_batch_to_lightning(key: str) -> None:
    """The integer 1 is refused, which is one batch; the number 1.0 is accepted, which is all batches.

    The command line reads a 1 as one or the other, depending on the order of imports.
    """
    data = tiny_data()
    common: dict[str, Any] = {
        "max_epochs": data.num_rounds,
        "reload_dataloaders_every_n_epochs": 1,
        "num_sanity_val_steps": 0,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
    }
    check_trainer(Trainer(**common, **{key: 1.0}), data)
    with pytest.raises(ConfigError, match=key):
        check_trainer(Trainer(**common, **{key: 1}), data)
