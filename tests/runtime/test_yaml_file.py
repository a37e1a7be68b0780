"""YAML files, also foreign ones, are read as by PyYAML, or refused with the line within seconds."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.foreign import BOMB

from cfl.runtime import yaml_file
from cfl.runtime.yaml_file import MOST_BYTES, BadYAML, ambiguous, parse_yaml, read_yaml

ROOT = Path(__file__).parents[2]


REFUSED: dict[str, tuple[str | bytes, str]] = {
    "bomb": (BOMB, "line 5: aliases that repeat more than 100000"),
    "alias within its own list": ("a: &a [*a]", "line 1: *a within what it stands for"),
    "alias within its own mapping": ("a: &a\n  b: {c: *a}", "line 2: *a within"),
    "merged into itself": ("a: &a {<<: *a}", "line 1: *a within"),
    "brackets": ("[" * 500, "line 1: nested more than 100 levels deep"),
    "very many brackets": ("[" * 10_000, "nest"),  # libyaml may refuse them itself, in its own words
    "mappings": ("{a: " * 10_000, "line 1: nested more than 100 levels deep"),
    "dashes": ("- " * 10_000, "line 1: nested more than 100 levels deep"),
    "key again": ("a: 1\nb: 2\na: 3", "a is in line 1 and again in line 3"),
    "key again below": ("x:\n  - {b: 1, c: 2,\n     b: 1}", "b is in line 2 and again in line 3"),
    "key again in quotes": ("a: 1\n'a': 3", "a is in line 1 and again in line 2"),
    "octal": ("a:\n- 010", "line 2: 010; write 10, or '010' in quotes for text"),
    "negative octal": ("-017", "write -17"),
    "sexagesimal": ("a: 1:30", "line 1: 1:30; write a number without colons, or '1:30' in quotes for text"),
    "sexagesimal with a point": ("a: 1:30.5", "1:30.5; write a number without colons"),
    "true as a key": ("on: 1", "line 1: the key on, which as text is written 'on'"),
    "null as a key": ("a: {null: 1}", "line 1: the key null"),
    "list as a key": ("[1]: 1", "line 1: a key that is neither text nor a number"),
    "alias as a key": ("a: &a b\n*a : 1", "line 2: a key that is neither text nor a number"),
    "tag": ("a: !!python/name:os.system x", "line 1: the tag tag:yaml.org,2002:python/name:os.system"),
    "tag of a number": ("a: !!int x", "line 1: the tag"),
    "tag of a list": ("a: !!set {b}", "line 1: the tag"),
    "tabs": ("a:\n\tb: 1", "line 2: found character"),
    "two documents": ("a: 1\n---\nb: 1", "line 2: "),
    "not closed": ("a: [1,", "did not find"),
    "NUL": ("a: \0", "control characters are not allowed at byte 3"),
    "unknown alias": ("a: *b", "line 1: found undefined alias"),
    "UTF-16": ("a: 1".encode("utf-16"), "not in UTF-8: invalid start byte at byte 0"),
    "Latin-1": ("a: é\n".encode("latin-1"), "not in UTF-8: invalid continuation byte at byte 3"),
    "surrogate": ("a: \udc80", "not in UTF-8"),
    "5000 digits": ("a: " + "1" * 5000, "4300 digits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_line(name: str) -> None:
    text, said = REFUSED[name]
    started = time.process_time()
    with pytest.raises(BadYAML) as caught:
        parse_yaml(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.process_time() - started < 5


def test_very_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_file, "_MOST_VALUES", 100)
    assert parse_yaml("[" + "0," * 90 + "]") == [0] * 90
    with pytest.raises(BadYAML, match="line 2: more than 100 values"):
        parse_yaml("[" + "0," * 50 + "\n" + "0," * 60 + "]")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-1E+3", -1000.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("0", 0),
        ("0.10", 0.1),
        ("0x10", 16),
        (".inf", math.inf),
        ("yes", True),
        ("off", False),
        ("~", None),
        ("", None),
        ("'010'", "010"),
        ("'1:30'", "1:30"),
        ("00:10:00", "00:10:00"),
        ("2024-01-01", "2024-01-01"),
        ("=", "="),
        ("\ufeffa: 1", {"a": 1}),
        ("x: &x {a: 1}\ny: {<<: *x, b: 2}", {"x": {"a": 1}, "y": {"a": 1, "b": 2}}),
        ("x: &x [1, 2]\ny: [*x, *x]", {"x": [1, 2], "y": [[1, 2], [1, 2]]}),
        ("{1: a, 0.5: b, 'on': c}", {1: "a", 0.5: "b", "on": "c"}),
        ("[a, [], {}, '']", ["a", [], {}, ""]),
    ],
)
def test_read_as_it_is_written(text: str, value: Any) -> None:
    assert parse_yaml(text) == value
    assert parse_yaml(text.encode()) == value
    assert type(parse_yaml(text)) is type(value)


def test_what_is_written_can_be_read() -> None:
    """What PyYAML writes is read back unchanged, also texts that look like numbers."""
    held = {
        "a": ["010", "08", "1:30", "00:10:00", "1_0", "on", "", "1.5", "~", "2024-01-01"],
        "b": [1e-5, 1, True, None],
    }
    assert parse_yaml(yaml.safe_dump(held)) == held


def test_every_file_that_comes_along_is_read_as_pyyaml_reads_it() -> None:
    files = [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "cfl" / "papers").glob("*/*.yaml")]
    assert len(files) > 100
    for file in files:
        expected = yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        assert _numbers(read_yaml(file)) == _numbers(expected), file


def _numbers(tree: Any) -> Any:
    """Return a tree with every number, and every text that is one, as float: PyYAML reads 1e-3 as text."""
    if isinstance(tree, dict):
        return {key: _numbers(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_numbers(value) for value in tree]
    try:
        return float(tree)
    except (TypeError, ValueError):
        return tree


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(BadYAML, match="a pipe or a device"):
            read_yaml(path)
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(OSError, match="directory"):
            read_yaml(path)
    (tmp_path / "large").write_bytes(b"#" * (MOST_BYTES + 1))
    with pytest.raises(BadYAML, match=f"{MOST_BYTES + 1} bytes"):
        read_yaml(tmp_path / "large")


@pytest.mark.parametrize(
    ("text", "instead"),
    [("010", "10"), ("-08", "-8"), ("+007", "7"), ("00", "0"), ("1:30", "a number"), ("0:30.5", "a number")],
)
def test_ambiguous_numbers(text: str, instead: str) -> None:
    assert str(ambiguous(text)).startswith(instead)


@pytest.mark.parametrize("text", ["0", "10", "0.5", "1e-3", "-0", "0x10", "a:30", "10:", "", "010a"])
def test_numbers_that_are_clear(text: str) -> None:
    assert ambiguous(text) is None
