"""Fixed cases of configuration files that are invalid, or that mean something else than they seem to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from support.foreign import BOMB

from attack.fixed_case import TINY, Case, Wanted


def text(content: str | bytes, *names: str, wanted: Wanted = "warned") -> Case:
    """A configuration file with some content."""

    def make(folder: Path) -> list[list[str]]:
        raw = content if isinstance(content, bytes) else content.encode()
        (folder / "case.yaml").write_bytes(raw)
        return [[*TINY, "--config", "case.yaml"]]

    return Case(make, names or ("case.yaml",), wanted)


def _at_path(make: Callable[[Path], object], *names: str) -> Case:
    """A case that has no regular file at the configuration's path, but what ``make`` puts there."""

    def made(folder: Path) -> list[list[str]]:
        make(folder / "case.yaml")
        return [[*TINY, "--config", "case.yaml"]]

    return Case(made, names or ("case.yaml",), "refused")


CASES: dict[str, Case] = {
    "yaml bomb": text(BOMB),
    "yaml bomb in methods": text(BOMB + "methods: *i\n"),
    "yaml merge bomb": text(
        "a: &a {x: 1}\n" + "".join(f"b{n}: &b{n} {{<<: [{', '.join(['*a'] * 50)}]}}\n" for n in range(50))
    ),
    "anchor within itself": text("model: &a {network: *a}\n", "case.yaml", "model"),
    "list within itself": text("model: &a [*a]\n", "case.yaml", "model"),
    "anchor within itself in methods": text("methods: &a {a: *a}\n", "case.yaml", "methods"),
    "merge of itself": text("model: &a\n  <<: *a\n"),
    "UTF-16": text("data: {num_clients: 4}\n".encode("utf-16")),
    "UTF-32": text("data: {num_clients: 4}\n".encode("utf-32")),
    "Latin-1": text("run: {benchmark: 'gr\xfcn'}\n".encode("latin-1")),
    "byte order mark": text("\ufeffdata: {num_clients: 4}\n", wanted="runs"),
    "NUL": text(b"data: {num_clients: 4}\n\0"),
    "random bytes": text(bytes(range(256)) * 16),
    "tab": text("data:\n\tnum_clients: 4\n"),
    "deep list": text("data: " + "[" * 20_000),
    "deep mapping": text("".join(f"{' ' * n}a:\n" for n in range(3000))),
    "deep closed list": text("data: " + "[" * 900 + "]" * 900 + "\n"),
    "empty": text(""),
    "a list": text("[1, 2]\n"),
    "a number": text("3\n"),
    "two documents": text("data: {num_clients: 4}\n---\ndata: {num_clients: 5}\n"),
    "a Python object": text("data: !!python/object/apply:os.system ['true']\n"),
    "binary value": text("data: {num_clients: !!binary aGVsbG8=}\n", "num_clients", "case.yaml"),
    "a date": text("data: {num_clients: 2024-01-01}\n", "num_clients", "case.yaml"),
    "many digits": text(f"data: {{num_clients: {'9' * 5000}}}\n", "num_clients", "case.yaml"),
    "twelve megabytes": text("a:\n" + "  - x\n" * 2_000_000),
    "a folder": _at_path(Path.mkdir),
    "a pipe": _at_path(os.mkfifo),
    "a device": _at_path(lambda path: path.symlink_to("/dev/zero")),
    "a link to itself": _at_path(lambda path: path.symlink_to(path)),
    "duplicate keys": text("data:\n  num_clients: 4\n  num_clients: 5\n", "num_clients", "case.yaml"),
    "duplicate sections": text("data: {num_clients: 4}\nschedule: {}\ndata: {num_clients: 5}\n", "data", "case.yaml"),
    "duplicate methods": text("methods: {a: FedProx, a: EWC}\n", "methods", "case.yaml"),
    "a number in base 8": text("data: {num_clients: 010}\n", "num_clients", "010"),
    "a number in base 60": text("schedule: {batch_size: 1:30}\n", "batch_size", "1:30"),
    "a number in base 2": text("data: {num_clients: 0b100}\n", "num_clients", "0b100", wanted="runs"),
    "a number in base 16": text("data: {num_clients: 0x4}\n", "num_clients", "0x4", wanted="runs"),
    "a number with underscores": text("data: {num_clients: 0_4}\n", "num_clients", "0_4"),
    "yes for a number": text("data: {num_clients: yes}\n", "num_clients"),
    "true for a number": text("schedule: {local_epochs: true}\n", "local_epochs"),
    "true for a seed": text("seed_everything: true\n", "seed_everything"),
    "a null section": text("data: null\n", "data", "case.yaml"),
    "a section that is a list": text("schedule: []\n", "schedule", "case.yaml"),
    "methods that are a list": text("methods: [FOT]\n", "methods", "case.yaml"),
    "keys that are numbers": text("1: 2\n", "1", "case.yaml"),
    "keys that are lists": text("? [1, 2]\n: 3\n"),
}
"""Name -> case."""
