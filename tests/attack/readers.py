"""Every kind of file that the program reads, with a command that reads it and that command's result."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from support import tiny_cli
from torchvision import datasets
from torchvision.models import VisionTransformer

from attack import children, data_files, points, sameness
from attack.children import Ended, Preparation
from cfl.papers.definition import papers
from cfl.papers.kept import read_kept
from cfl.reporting.csv_file import RunFolderError
from cfl.runtime.errors import ConfigError

_DATA = "data"
"""Folder in which data are looked for by default."""
RUN, HALF, OUT = "run", "half", "out"
"""Folders below a case's: a finished run, one that was stopped, and what a command writes."""


@dataclass(frozen=True)
class Reader:
    """A kind of file, and a command that reads it.

    Attributes:
        file: its place in a case's folder.
        command: the command that reads it.
        result: the command's result, given the case's folder and how it ended; equal for equal files.
        make: writes all needed files into a folder of the reader's own, from which cases are copied.
        names: words that may stand for the file's name in the error that refuses it.
        program: function that is called with the command; None is ``cfl``.
        prepare: makes a change of the process, given the folder of :attr:`make`.
        while_running: whether the file has no name, and is damaged while the command uses it.
    """

    file: str
    command: tuple[str, ...]
    result: Callable[[Path, Ended], Any]
    make: Callable[[Path], object]
    names: tuple[str, ...] = ()
    program: Callable[[list[str]], int] | None = None
    prepare: Callable[[Path], Preparation] | None = None
    while_running: bool = False


# Files.

_TINY = ("fit", "--config", str(tiny_cli.TINY))
_METHODS = ("--methods.own", "PersonalLayers", "--methods.own.layers", "['head.*']")


def _runs(folder: Path) -> None:
    """Make a finished run with clients' own figures, one with another seed, and one that was stopped."""
    for name, seed in ((RUN, "0"), ("other", "1")):
        _must(
            [*_TINY, *_METHODS, "--schedule.evaluate_every=1", "--run.dir", name, f"--seed_everything={seed}"], folder
        )
    stopped = points.strike_at("before a local step", 8, lambda: os.kill(os.getpid(), signal.SIGTERM))
    children.run([*_TINY, *_METHODS, "--run.dir", HALF], stopped, folder=folder)
    assert (folder / HALF / "last.ckpt").is_file()


def _must(command: list[str], folder: Path) -> None:
    ended = children.run(command, folder=folder)
    if ended.status != 0:
        raise RuntimeError(f"{command} fails: {ended.said[-2000:]}")


def _npz(folder: Path) -> None:
    (folder / _DATA).mkdir()
    np.savez(folder / _DATA / data_files.NPZ, **data_files.arrays())


def _npz_compressed(folder: Path) -> None:
    (folder / _DATA).mkdir()
    np.savez_compressed(folder / _DATA / data_files.NPZ, **data_files.arrays())


def _images(folder: Path) -> None:
    data_files.write_images(folder / _DATA / data_files.IMAGES)


def _mnist(folder: Path) -> None:
    data_files.write_mnist(folder / _DATA / data_files.MNIST / "raw")


_CIFAR = f"{_DATA}/cifar-100-python"


def _cifar(folder: Path) -> None:
    """CIFAR-100's files with 200 and 100 images."""
    (folder / _CIFAR).mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name, count in (("train", 200), ("test", 100)):
        images = draw.integers(0, 256, (count, 3072), dtype=np.uint8)
        held = {"data": images, "fine_labels": [number % 100 for number in range(count)]}
        (folder / _CIFAR / name).write_bytes(pickle.dumps(held))
    (folder / _CIFAR / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(number) for number in range(100)]}))


def _published(folder: Path) -> Preparation:
    """Have torchvision take the files of CIFAR-100 in a folder for the published ones."""

    def prepare(stack: ExitStack) -> None:
        sums = {
            name: hashlib.md5((folder / _CIFAR / name).read_bytes()).hexdigest() for name in ("train", "test", "meta")
        }
        of = datasets.CIFAR100
        stack.enter_context(mock.patch.object(of, "train_list", [["train", sums["train"]]]))
        stack.enter_context(mock.patch.object(of, "test_list", [["test", sums["test"]]]))
        stack.enter_context(mock.patch.object(of, "meta", {**of.meta, "md5": sums["meta"]}))

    return prepare


_VIT = {"image_size": 4, "patch_size": 2, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 8}


def _weights(folder: Path) -> None:
    torch.manual_seed(0)
    torch.save(VisionTransformer(**_VIT).state_dict(), folder / "vit.pt")
    network = {"pool_size": 4, "prompt_length": 2, "top_k": 2, **_VIT, "weights": "vit.pt"}
    config = {"model": {"network": {"class_path": "PromptedViT", "init_args": network}}, "methods": {"l2p": "L2P"}}
    source = {"num_classes": 4, "shape": [3, 4, 4], "train_size": 96, "test_size": 40, "noise": 60.0}
    config["data"] = {"stream": {"init_args": {"source": {"class_path": "Synthetic", "init_args": source}}}}
    (folder / "vit.yaml").write_text(yaml.safe_dump(config))


def _cache(folder: Path) -> None:
    with mock.patch.dict(os.environ, CFL_CACHE=str(folder / "cache")):
        _must([*_TINY, "--engine.kind=auto", "--run.dir", "first"], folder)


def _use_cache(_: Path) -> Preparation:
    return lambda stack: stack.enter_context(mock.patch.dict(os.environ, CFL_CACHE="cache"))


def _kept(folder: Path) -> None:
    paper = next(paper for paper in papers() if paper.name == "fedcurv")
    file = sorted((paper.folder / "results").glob("*.json"))[0]
    shutil.copy(file, folder / "kept.json")


def _print_kept(arguments: list[str]) -> int:
    """Print what a paper's tables take from kept runs in the current folder."""
    paper = next(paper for paper in papers() if paper.name == arguments[0])
    try:
        for scale, results in read_kept(paper, Path()).items():
            for one in results:
                print(
                    scale, one.hash, *(f"{name}={one.figure(name)}" for name in ("acc", "matrix", "averages", "rounds"))
                )
                print(one.rounds, one.client_epochs, one.summary)
    except (ConfigError, RunFolderError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


# Results of commands.


def _results_of(name: str) -> Callable[[Path, Ended], Any]:
    return lambda folder, _: sameness.results(folder / name)


def _printed(folder: Path, ended: Ended) -> Any:
    return ended.printed


def _compared(folder: Path, ended: Ended) -> Any:
    """The output and the files of a comparison."""
    return ended.printed, {path.name: path.read_bytes() for path in sorted((folder / OUT).iterdir())}


def _exported(folder: Path, ended: Ended) -> Any:
    """Tensors and card of an exported model. The file's bytes are not compared, because they always differ."""
    card = (folder / "model.safetensors.md").read_text().splitlines()
    return load_file(folder / "model.safetensors"), [line for line in card if not line.startswith("SHA-256")]


def _finished(folder: Path, ended: Ended) -> Any:
    return (folder / RUN / "summary.json").is_file()


_RESUME = ("fit", "--ckpt_path", f"{HALF}/last.ckpt")
_COMPARE = ("compare", RUN, "other", "--out", OUT)
_FIT = (*_TINY, "--run.dir", RUN)


def _of_source(name: str, **options: Any) -> tuple[str, ...]:
    source = {"class_path": name, "init_args": options}
    # Digits comes first, so that no option of tiny.yaml's source is kept.
    return (*_FIT, "--data.stream.source=Digits", f"--data.stream.source={json.dumps(source)}")


_ARRAYS = _of_source("Arrays", path=data_files.NPZ)
_FOLDER = _of_source("ImageFolder", path=data_files.IMAGES, shape=[1, 4, 4])
_EXPORT = ("export", "--ckpt_path", f"{RUN}/last.ckpt", "--out", "model.safetensors", "--client", "0")
_ON_DISK = (*_FIT, *_METHODS, "--federated.client_state_memory_mb=0")
_RAW = f"{_DATA}/{data_files.MNIST}/raw"


def _of_run(file: str) -> Reader:
    """Reader of a file in a run folder that is compared with another run."""
    return Reader(f"{RUN}/{file}", _COMPARE, _compared, _runs)


READERS: dict[str, Reader] = {
    "checkpoint resumed": Reader(f"{HALF}/last.ckpt", _RESUME, _results_of(HALF), _runs, ("ckpt_path",)),
    "checkpoint validated": Reader(
        f"{RUN}/last.ckpt", ("validate", "--ckpt_path", f"{RUN}/last.ckpt"), _printed, _runs, ("ckpt_path",)
    ),
    "checkpoint exported": Reader(f"{RUN}/last.ckpt", _EXPORT, _exported, _runs, ("ckpt_path",)),
    "clients' rows": Reader(
        "", _ON_DISK, _results_of(RUN), lambda folder: None, ("what clients keep",), while_running=True
    ),
    "configuration resumed": Reader(f"{HALF}/config.yaml", _RESUME, _results_of(HALF), _runs, ("config", "ckpt_path")),
    "rounds resumed": Reader(f"{HALF}/rounds.csv", _RESUME, _results_of(HALF), _runs),
    "summary exported": Reader(f"{RUN}/summary.json", _EXPORT, _exported, _runs),
    "configuration compared": _of_run("config.yaml"),
    "summary compared": _of_run("summary.json"),
    "matrix compared": _of_run("accuracy_matrix.csv"),
    "rounds compared": _of_run("rounds.csv"),
    "partition compared": _of_run("partition.csv"),
    "client's matrix compared": _of_run("clients/accuracy_matrix_000.csv"),
    "npz": Reader(f"{_DATA}/{data_files.NPZ}", _ARRAYS, _results_of(RUN), _npz),
    "npz compressed": Reader(f"{_DATA}/{data_files.NPZ}", _ARRAYS, _results_of(RUN), _npz_compressed),
    "idx images": Reader(f"{_RAW}/train-images-idx3-ubyte", _of_source("MNIST"), _results_of(RUN), _mnist, ("MNIST",)),
    "idx labels": Reader(f"{_RAW}/t10k-labels-idx1-ubyte", _of_source("MNIST"), _results_of(RUN), _mnist, ("MNIST",)),
    "cifar": Reader(
        f"{_CIFAR}/train", _of_source("CIFAR100"), _results_of(RUN), _cifar, ("CIFAR100",), prepare=_published
    ),
    "image": Reader(f"{_DATA}/{data_files.IMAGES}/train/a/0.png", _FOLDER, _results_of(RUN), _images),
    "weights": Reader(
        "vit.pt", (*_FIT, "--config", "vit.yaml"), _results_of(RUN), _weights, ("model.network.weights",)
    ),
    "engine cache": Reader("cache/engines.json", (*_FIT, "--engine.kind=auto"), _finished, _cache, prepare=_use_cache),
    "kept run": Reader("kept.json", ("fedcurv",), _printed, _kept, program=_print_kept),
}
"""Name -> reader."""
