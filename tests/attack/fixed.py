"""Configurations and data files that once went wrong, or are known to break programs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support import tiny_cli

from attack import children, data_files
from attack.meaningless import CUT, meaningless, told_into
from attack.outcomes import Outcome, failure, refusal, sentence

_TINY = ("fit", "--config", str(tiny_cli.TINY), "--run.dir", "run")


@dataclass(frozen=True)
class Case:
    """A fixed case.

    Attributes:
        make: writes its files into a folder, and returns commands to be run there, of which the last one is judged.
        names: one of these has to stand in the sentence that refuses it.
        valid: what has to happen: None, it is refused or warns; False, it is refused; True, it runs.
    """

    make: Callable[[Path], list[list[str]]]
    names: tuple[str, ...]
    valid: bool | None = None


def run(name: str, case: Case, folder: Path) -> Outcome:
    """Run a case in a folder, which is kept unless it ends well."""
    folder.mkdir(parents=True)
    data_files.link(folder)
    *before, last = case.make(folder)
    for command in before:
        children.run(command, folder=folder)
    ended = children.run(last, told_into(folder / "facts.json"), folder=folder)
    verdict, detail = failure(ended) or ("", "")
    if not verdict and ended.status in (0, CUT):
        warned = case.valid is None and any(word.lower() in ended.said.lower() for word in case.names)
        facts = json.loads((folder / "facts.json").read_text()) if (folder / "facts.json").is_file() else {"steps": 1}
        reason = "accepted" if not (case.valid or warned) else meaningless({}, facts, folder / "run", ended.said)
        verdict, detail = ("meaningless", reason) if reason else ("ran", "")
    elif not verdict:
        verdict, detail = refusal(ended, list(case.names))
        if case.valid:
            verdict, detail = "unclear", f"a valid command is refused: {sentence(ended)[:500]}"
    if verdict in ("ran", "refused"):
        shutil.rmtree(folder)
    return Outcome(name, verdict, detail, f"cfl {shlex.join(last)}"[:2000])


# Kinds of cases.


def _text(content: str | bytes, *names: str, valid: bool | None = None) -> Case:
    """A configuration file with some content."""

    def make(folder: Path) -> list[list[str]]:
        raw = content if isinstance(content, bytes) else content.encode()
        (folder / "case.yaml").write_bytes(raw)
        return [[*_TINY, "--config", "case.yaml"]]

    return Case(make, names or ("case.yaml",), valid)


def _options(*words: str, names: tuple[str, ...] = (), valid: bool | None = None) -> Case:
    """Some options on the command line; named has to be an option of them."""
    keys = tuple(word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--"))
    return Case(lambda folder: [[*_TINY, *words]], names or keys, valid)


def _at_path(make: Callable[[Path], object], *names: str) -> Case:
    """Something else than a file at the configuration's path."""

    def made(folder: Path) -> list[list[str]]:
        make(folder / "case.yaml")
        return [[*_TINY, "--config", "case.yaml"]]

    return Case(made, names or ("case.yaml",), False)


def _npz(change: Callable[[dict[str, np.ndarray]], object], valid: bool | None = None, *words: str) -> Case:
    """A changed ``.npz`` file of images, in a task-incremental run of two tasks."""

    def make(folder: Path) -> list[list[str]]:
        held = data_files.arrays()
        change(held)
        np.savez(folder / "own.npz", **held)
        return [_on_npz(folder, *words)]

    return Case(make, ("own.npz", "source", "label", "class"), valid)


def _on_npz(folder: Path, *words: str) -> list[str]:
    source = {"class_path": "Arrays", "init_args": {"path": str(folder / "own.npz")}}
    return [*_TINY, "--data.stream", "ClassSplit", "--data.stream.num_tasks", "2", *_only(source), *words]


def _only(source: Mapping[str, Any]) -> list[str]:
    """Options for a source that keeps nothing of tiny.yaml's."""
    return ["--data.stream.source", "Digits", f"--data.stream.source={json.dumps(source)}"]


def _relabelled(of: Mapping[int, int] | Callable[[np.ndarray], np.ndarray], *parts: str) -> Callable[[Any], None]:
    """A change of labels: of some classes, or of all together."""

    def change(held: dict[str, np.ndarray]) -> None:
        for part in parts or ("train", "test"):
            labels = held[f"{part}_labels"]
            if callable(of):
                held[f"{part}_labels"] = of(labels)
            else:
                held[f"{part}_labels"] = np.vectorize(lambda label: of.get(label, label))(labels)

    return change


def _without(part: str, label: int) -> Callable[[dict[str, np.ndarray]], None]:
    def change(held: dict[str, np.ndarray]) -> None:
        kept = held[f"{part}_labels"] != label
        for what in ("images", "labels"):
            held[f"{part}_{what}"] = held[f"{part}_{what}"][kept]

    return change


def _claiming(shape: tuple[int, ...]) -> Callable[[Path], list[list[str]]]:
    """An ``.npz`` whose array of training images claims a shape that it does not have."""

    def make(folder: Path) -> list[list[str]]:
        import zipfile

        header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
        member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
        np.savez(folder / "plain.npz", **data_files.arrays())
        with zipfile.ZipFile(folder / "plain.npz") as plain, zipfile.ZipFile(folder / "own.npz", "w") as own:
            for name in plain.namelist():
                own.writestr(name, member if name == "train_images.npy" else plain.read(name))
        return [_on_npz(folder)]

    return make


def _bombed(folder: Path) -> list[list[str]]:
    """A compressed ``.npz`` of a few KB that holds 4 GB."""
    import zipfile

    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (268435456, 4, 4), }".ljust(117) + b"\n"
    np.savez(folder / "plain.npz", **data_files.arrays())
    with (
        zipfile.ZipFile(folder / "plain.npz") as plain,
        zipfile.ZipFile(folder / "own.npz", "w", zipfile.ZIP_DEFLATED) as own,
    ):
        for name in plain.namelist():
            if name != "train_images.npy":
                own.writestr(name, plain.read(name))
        with own.open("train_images.npy", "w", force_zip64=True) as member:
            member.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
            for _ in range(16):
                member.write(bytes(1 << 24))  # a sixteenth of what it claims, which takes a second to write
    return [_on_npz(folder)]


def _images(change: Callable[[Path], object], valid: bool | None = None) -> Case:
    """A changed folder of images."""

    def make(folder: Path) -> list[list[str]]:
        data_files.write_images(folder / "own")
        change(folder / "own")
        source = {"class_path": "ImageFolder", "init_args": {"folder": str(folder / "own"), "shape": [1, 4, 4]}}
        return [[*_TINY, "--data.stream.num_tasks", "2", *_only(source)]]

    return Case(make, ("own", "source"), valid)


def _png(width: int, height: int) -> bytes:
    """A grey PNG that claims a size and holds one row."""
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(1 + width))),
    )
    chunks = (name + data for name, data in (*parts, (b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )


def _in_a_run(spoil: Callable[[Path], object], *command: str) -> Case:
    """A run folder of which a file is spoilt, and a command that reads it."""

    def make(folder: Path) -> list[list[str]]:
        children.run(_TINY, folder=folder)
        spoil(folder / "run")
        return [list(command)]

    return Case(make, ("run", "config.yaml"), False)


def _after_a_bad_update(folder: Path) -> list[list[str]]:
    """A run that a client's NaN stopped, resumed as it advised."""
    first = [*_TINY, "--model.optimizer.lr", "1e30", "--ckpt_path", "last"]
    return [first, [*first, "--federated.on_bad_update", "skip"]]


def _old_network(folder: Path) -> list[list[str]]:
    (folder / "old.yaml").write_text("model: {network: {class_path: MLP, init_args: {hidden: [8], dropout: 0.1}}}\n")
    return [[*_TINY, "--config", "old.yaml", "--model.network", "LeNet"]]


_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
_VAST = str(10**20)
_LONG = "x" * 300
_RESUME = ("fit", "--ckpt_path", "run/last.ckpt")
_SPLIT = ("--data.stream", "ClassSplit", "--data.stream.source", "Synthetic", "--data.stream.source.num_classes")
_ER = ("--methods.er", "ER")

CASES: dict[str, Case] = {
    # Files that are no configurations.
    "yaml bomb": _text(_BOMB),
    "yaml bomb in methods": _text(_BOMB + "methods: *i\n"),
    "yaml bomb as an option": _options(f"--methods={_BOMB}"),
    "yaml merge bomb": _text(
        "a: &a {x: 1}\n" + "".join(f"b{n}: &b{n} {{<<: [{', '.join(['*a'] * 50)}]}}\n" for n in range(50))
    ),
    "anchor within itself": _text("model: &a {network: *a}\n"),
    "list within itself": _text("model: &a [*a]\n"),
    "anchor within itself in methods": _text("methods: &a {a: *a}\n"),
    "merge of itself": _text("model: &a\n  <<: *a\n"),
    "UTF-16": _text("data: {num_clients: 4}\n".encode("utf-16"), valid=None),
    "UTF-32": _text("data: {num_clients: 4}\n".encode("utf-32"), valid=None),
    "Latin-1": _text("run: {benchmark: 'gr\xfcn'}\n".encode("latin-1")),
    "byte order mark": _text("\ufeffdata: {num_clients: 4}\n", valid=True),
    "NUL": _text(b"data: {num_clients: 4}\n\0"),
    "random bytes": _text(bytes(range(256)) * 16),
    "tab": _text("data:\n\tnum_clients: 4\n"),
    "deep list": _text("data: " + "[" * 20_000),
    "deep mapping": _text("".join(f"{' ' * n}a:\n" for n in range(3000))),
    "deep closed list": _text("data: " + "[" * 900 + "]" * 900 + "\n"),
    "empty": _text("", valid=None),
    "a list": _text("[1, 2]\n"),
    "a number": _text("3\n"),
    "two documents": _text("data: {num_clients: 4}\n---\ndata: {num_clients: 5}\n"),
    "a Python object": _text("data: !!python/object/apply:os.system ['true']\n"),
    "binary value": _text("data: {num_clients: !!binary aGVsbG8=}\n", "num_clients", "case.yaml"),
    "a date": _text("data: {num_clients: 2024-01-01}\n", "num_clients", "case.yaml"),
    "many digits": _text(f"data: {{num_clients: {'9' * 5000}}}\n", "num_clients", "case.yaml"),
    "many digits as an option": _options(f"--data.num_clients={'9' * 5000}"),
    "twelve megabytes": _text("a:\n" + "  - x\n" * 2_000_000),
    "a folder": _at_path(Path.mkdir),
    "a pipe": _at_path(os.mkfifo),
    "a device": _at_path(lambda path: path.symlink_to("/dev/zero")),
    "a link to itself": _at_path(lambda path: path.symlink_to(path)),
    "duplicate keys": _text("data:\n  num_clients: 4\n  num_clients: 5\n", "num_clients", "case.yaml"),
    "duplicate sections": _text("data: {num_clients: 4}\nschedule: {}\ndata: {num_clients: 5}\n", "data", "case.yaml"),
    "duplicate methods": _text("methods: {a: FedProx, a: EWC}\n", "methods", "case.yaml"),
    "a number in base 8": _text("data: {num_clients: 010}\n", "num_clients", "010"),
    "a number in base 60": _text("schedule: {batch_size: 1:30}\n", "batch_size", "1:30"),
    "a number in base 2": _text("data: {num_clients: 0b100}\n", "num_clients", "0b100"),
    "a number in base 16": _text("data: {num_clients: 0x4}\n", "num_clients", "0x4"),
    "a number with underscores": _text("data: {num_clients: 0_4}\n", "num_clients", "0_4"),
    "a number in base 60 as an option": _options("--schedule.batch_size=1:30"),
    "a number in base 8 as an option": _options("--data.num_clients=010"),
    "yes for a number": _text("data: {num_clients: yes}\n", "num_clients"),
    "true for a number": _text("schedule: {local_epochs: true}\n", "local_epochs"),
    "true for a seed": _text("seed_everything: true\n", "seed_everything"),
    "a null section": _text("data: null\n", "data", "case.yaml"),
    "a section that is a list": _text("schedule: []\n", "schedule", "case.yaml"),
    "methods that are a list": _text("methods: [FOT]\n", "methods", "case.yaml"),
    "keys that are numbers": _text("1: 2\n", "1", "case.yaml"),
    "keys that are lists": _text("? [1, 2]\n: 3\n"),
    # Numbers.
    "clients beyond all bounds": _options(f"--data.num_clients={_VAST}"),
    "a billion clients": _options("--data.num_clients=1000000000"),
    "rounds beyond all bounds": _options(f"--schedule.rounds_per_task={_VAST}"),
    "batches beyond all bounds": _options(f"--schedule.batch_size={_VAST}"),
    "epochs beyond all bounds": _options(f"--schedule.local_epochs={_VAST}"),
    "cohorts beyond all bounds": _options(f"--schedule.cohort_width={_VAST}"),
    "tasks beyond all bounds": _options(f"--data.stream.num_tasks={_VAST}"),
    "samples beyond all bounds": _options(f"--data.stream.source.train_size={_VAST}"),
    "pixels beyond all bounds": _options(f"--data.stream.source.shape=[1, {_VAST}, 4]"),
    "large images": _options("--data.stream.source.shape=[1, 100000, 100000]", names=("shape",)),
    "classes beyond all bounds": _options(f"--data.stream.source.num_classes={_VAST}"),
    "workers beyond all bounds": _options("--engine.kind=workers", f"--engine.workers={_VAST}"),
    "seed beyond all bounds": _options(f"--seed_everything={_VAST}"),
    "devices beyond all bounds": _options("--trainer.devices=100000"),
    "learning rate of 0": _options("--model.optimizer.lr=0", names=("lr",)),
    "learning rate of 1e308": _options("--model.optimizer.lr=1e308", names=("lr",)),
    "negative learning rate": _options("--model.optimizer.lr=-1", names=("lr",)),
    "learning rate nan": _options("--model.optimizer.lr=.nan", names=("lr",)),
    "learning rate inf": _options("--model.optimizer.lr=.inf", names=("lr",)),
    "wide layers": _options("--model.network.hidden=[100000, 100000]", names=("hidden",)),
    "many layers": _options(f"--model.network.hidden={[1] * 5000}", names=("hidden",)),
    "a buffer of 10^15": _options(*_ER, "--buffer.size=1000000000000000", names=("buffer",)),
    "replays of 10^15": _options(*_ER, "--methods.er.size=1000000000000000", names=("methods.er.size",)),
    "a memory of 10^15": _options(
        "--data.scenario=class",
        *_SPLIT,
        "4",
        "--methods.i=ICaRL",
        "--methods.i.size=1000000000000000",
        names=("methods.i.size",),
    ),
    "noise inf": _options("--data.stream.source.noise=.inf", names=("noise",)),
    # Names.
    "a long folder": _options(f"--run.dir={_LONG}", names=("run.dir",)),
    "a long path": _options(f"--run.dir={'/'.join(['x' * 200] * 30)}", names=("run.dir",)),
    "a long benchmark": _options(f"--run.benchmark={_LONG}", valid=None),
    "a long method's name": _options(f"--methods.{_LONG}=FedProx", names=("methods",)),
    "a long checkpoint": _options(f"--ckpt_path={_LONG}", names=("ckpt_path",)),
    "a long configuration": _options(f"--config={_LONG}.yaml", names=("config",)),
    "a long data root": _options(
        f"--data.root={_LONG}", "--data.stream.source=Digits", valid=None, names=("data.root",)
    ),
    "a long path of data": _options(
        "--data.stream.source=Arrays", f"--data.stream.source.path={_LONG}", names=("path",)
    ),
    "NUL in a folder": _options("--run.dir=a\0b", names=("run.dir",)),
    "NUL in a checkpoint": _options("--ckpt_path=a\0b", names=("ckpt_path",)),
    "NUL in a configuration": _options("--config=a\0b", names=("config",)),
    "NUL in a data root": _options("--data.root=a\0b", names=("data.root",)),
    "a folder that is a file": _options("--run.dir=/dev/null", names=("run.dir",)),
    "a folder that cannot be": _options("--run.dir=/proc/none/run", names=("run.dir",)),
    # Data files.
    "npz a label of 10^9": _npz(_relabelled({3: 10**9}, "train"), False),
    "npz labels above 2^63": _npz(_relabelled(lambda labels: labels.astype(np.uint64) + np.uint64(2**63)), False),
    "npz a negative label": _npz(_relabelled({0: -1}), False),
    "npz gaps between labels": _npz(_relabelled(lambda labels: labels * 10)),
    "npz labels from 1": _npz(_relabelled(lambda labels: labels + 1)),
    "npz labels that are numbers": _npz(_relabelled(lambda labels: labels + 0.5), False),
    "npz labels that are texts": _npz(_relabelled(lambda labels: labels.astype(str)), False),
    "npz labels that are objects": _npz(_relabelled(lambda labels: labels.astype(object)), False),
    "npz labels in two dimensions": _npz(_relabelled(lambda labels: labels[:, None]), False),
    "npz true and false": _npz(_relabelled(lambda labels: labels > 1)),
    "npz a class without training samples": _npz(_without("train", 2)),
    "npz a class without test samples": _npz(_without("test", 2)),
    "npz the last class without test samples": _npz(_without("test", 3)),
    "npz no training samples": _npz(
        lambda held: held.update(train_images=held["train_images"][:0], train_labels=held["train_labels"][:0]), False
    ),
    "npz no test samples": _npz(
        lambda held: held.update(test_images=held["test_images"][:0], test_labels=held["test_labels"][:0]), False
    ),
    "npz one class": _npz(_relabelled(lambda labels: labels * 0)),
    "npz images without pixels": _npz(
        lambda held: held.update(train_images=held["train_images"][:, :0], test_images=held["test_images"][:, :0]),
        False,
    ),
    "npz images of numbers": _npz(lambda held: held.update(train_images=held["train_images"] / 255), False),
    "npz images in five dimensions": _npz(
        lambda held: held.update(train_images=held["train_images"][..., None, None]), False
    ),
    "npz other test images": _npz(lambda held: held.update(test_images=held["test_images"][:, :2]), False),
    "npz fewer labels": _npz(lambda held: held.update(train_labels=held["train_labels"][:-1]), False),
    "npz without test images": _npz(lambda held: held.pop("test_images"), False),
    "npz that claims 58 TiB": Case(_claiming((4_000_000_000_000, 4, 4)), ("own.npz", "source"), False),
    "npz that claims a negative size": Case(_claiming((-1, 4, 4)), ("own.npz", "source"), False),
    "npz that claims large images": Case(_claiming((48, 100_000, 100_000)), ("own.npz", "source"), False),
    "npz that claims 10^20": Case(_claiming((10**20, 4, 4)), ("own.npz", "source"), False),
    "npz bomb": Case(_bombed, ("own.npz", "source"), False),
    "image of 14,000 x 14,000": _images(
        lambda folder: (folder / "train" / "a" / "0.png").write_bytes(_png(14_000, 14_000)), False
    ),
    "image of 60,000 x 60,000": _images(
        lambda folder: (folder / "train" / "a" / "0.png").write_bytes(_png(60_000, 60_000)), False
    ),
    "image without content": _images(lambda folder: (folder / "train" / "a" / "0.png").write_bytes(b""), False),
    "image that is text": _images(lambda folder: (folder / "train" / "a" / "0.png").write_text("no image"), False),
    "image that is a folder": _images(
        lambda folder: ((folder / "train/a/0.png").unlink(), (folder / "train/a/0.png").mkdir()), None
    ),
    "image that is a pipe": _images(
        lambda folder: ((folder / "train/a/0.png").unlink(), os.mkfifo(folder / "train/a/0.png")), False
    ),
    "class without images": _images(lambda folder: (folder / "train" / "c").mkdir(), None),
    "class without training images": _images(
        lambda folder: shutil.copytree(folder / "test/a", folder / "test/c"), None
    ),
    "class without test images": _images(lambda folder: shutil.rmtree(folder / "test" / "a"), None),
    "classes of other names in the test set": _images(
        lambda folder: (folder / "test/a").rename(folder / "test/z"), None
    ),
    # What can mean nothing.
    "one class per task": _options(*_SPLIT, "4", "--data.stream.num_tasks=4", names=("class", "num_tasks")),
    "one class": _options("--data.stream.source.num_classes=1", names=("class",)),
    "a share of 0 for validation that is scored": _options(
        "--data.evaluate_on=validation", names=("validation", "evaluate_on")
    ),
    "half precision weights": _options("--trainer.precision=16-true", names=("precision",)),
    "clipping at 0": _options("--trainer.gradient_clip_val=0", names=("gradient_clip_val",), valid=None),
    "no image drawn": _options("--run.samples=-1", names=("run.samples",)),
    "a share of 0 for checkpoints": _options("--checkpoint.share=0"),
    "a target of 0": _options("--targets.accuracies=[0]", names=("targets",)),
    "a target of 101": _options("--targets.accuracies=[101]", names=("targets",)),
    "targets that are none": _options("--targets.accuracies=[.nan]", names=("targets",)),
    "two same methods": _options("--methods.a=EWC", "--methods.b=EWC", names=("methods",), valid=None),
    "no clients": _options("--data.num_clients=0"),
    "no rounds": _options("--schedule.rounds_per_task=0"),
    "no clients in a round": _options("--schedule.clients_per_round=0"),
    "rounds of no task": _options("--schedule.rounds_per_task=[]", names=("rounds_per_task",)),
    "rounds of a third task": _options("--schedule.rounds_per_task=[1, 1, 1]", names=("rounds_per_task",)),
    # What is said.
    "an old network's options": Case(_old_network, ("old.yaml",), False),
    "advice after a bad update": Case(_after_a_bad_update, ("on_bad_update",), True),
    "run folder with a bomb": _in_a_run(lambda run: (run / "config.yaml").write_text(_BOMB), *_RESUME),
    "run folder with a list within itself": _in_a_run(
        lambda run: (run / "config.yaml").write_text("model: &a [*a]\n"), *_RESUME
    ),
    "run folder with a pipe": _in_a_run(
        lambda run: ((run / "config.yaml").unlink(), os.mkfifo(run / "config.yaml")), *_RESUME
    ),
    "compared run with a bomb": _in_a_run(lambda run: (run / "config.yaml").write_text(_BOMB), "compare", "run"),
    "compared run with a list within itself": _in_a_run(
        lambda run: (run / "config.yaml").write_text("methods: &a [*a]\n"), "compare", "run"
    ),
    "compared run with deep figures": _in_a_run(
        lambda run: (run / "summary.json").write_text("[" * 100_000), "compare", "run"
    ),
    "compared run with a pipe": _in_a_run(
        lambda run: ((run / "rounds.csv").unlink(), os.mkfifo(run / "rounds.csv")), "compare", "run"
    ),
}
"""Name -> case."""
