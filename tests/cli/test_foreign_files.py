"""Opening another person's run executes none of its code, shows its texts as plain text, and uses no damaged file."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support import foreign, tiny_cli

from cfl.__main__ import main
from cfl.cli.import_policy import classes_beyond, require_classes
from cfl.federation.row_store import FileRows
from cfl.running.finished import read_experiment
from cfl.runtime.checkpoint_file import read_checkpoint, write_checkpoint
from cfl.runtime.class_paths import named_class, named_subclasses
from cfl.runtime.command_line import place_of_current_folder, read_command_line
from cfl.runtime.errors import ConfigError, DamagedFile
from cfl.runtime.printable import fenced, in_markdown, printable

OPENING = ["validate", "test", "export", "fit --ckpt_path"]
"""Commands that read the configuration beside a checkpoint."""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, made once."""
    folder = tmp_path_factory.mktemp("mine") / "run"
    assert tiny_cli.fit(folder, "--methods.ewc", "EWC") == 0
    return folder


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on Python's path for the module ``trap``, which is not imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trap", raising=False)
    return tmp_path


# Which classes are built.


@pytest.mark.parametrize("command", [*OPENING, "compare"])
@pytest.mark.parametrize("attack", foreign.ATTACKS)
def test_opening_a_run_runs_nothing_of_its_authors(
    attack: str, command: str, run_folder: Path, trap: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = foreign.attacked(run_folder, attack, trap)
    status = main(foreign.commands(run)[command]) if command == "compare" else _run(foreign.commands(run)[command])
    assert foreign.sprung(trap) == []
    assert "trap" not in sys.modules
    said = capsys.readouterr().err
    if command == "compare":  # which reads figures and builds nothing
        assert status == 0
    elif command == "fit --ckpt_path" or attack != "logger":  # nothing is logged where nothing is trained
        assert status == 2
        assert "cannot work; valid: " in said


def _run(arguments: list[str]) -> int:
    try:
        return main(arguments) if arguments[0] == "export" else tiny_cli.run(*arguments)
    except SystemExit as exit:
        return int(exit.code or 0)


@pytest.mark.parametrize("attack", ["optimizer", "method", "source in stream"])
def test_a_package_that_is_allowed_by_name_is_used(attack: str, run_folder: Path, trap: Path) -> None:
    """With ``--allow`` the package is imported. The checkpoint is then refused: its configuration is another one."""
    run = foreign.attacked(run_folder, attack, trap)
    assert tiny_cli.run("validate", "--ckpt_path", str(run / "last.ckpt"), "--allow", "trap") == 2
    assert foreign.sprung(trap) == ["IMPORTED"]  # nothing is built for a checkpoint of another configuration


def test_a_run_with_an_own_method_is_scored_where_its_package_is_allowed(
    trap: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign.set_trap(trap)
    run = trap / "run"
    assert tiny_cli.fit(run, "--methods.a", "trap.TrapMethod") == 0
    checkpoint = str(run / "last.ckpt")
    assert tiny_cli.run("validate", "--ckpt_path", checkpoint) == 2
    assert "methods.a = 'trap.TrapMethod' cannot work" in (said := capsys.readouterr().err)
    assert "--allow PACKAGE" in said
    assert tiny_cli.run("validate", "--ckpt_path", checkpoint, "--allow", "other", "--allow=trap") == 0
    assert tiny_cli.run("validate", "--config", str(run / "config.yaml"), "--ckpt_path", checkpoint) == 0


def test_what_the_command_line_names_is_used_again(trap: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A class on the command line is allowed when the same command continues a run. A folder's name allows nothing."""
    foreign.set_trap(trap)
    run = trap / "trap.TrapMethod"
    for _ in range(2):
        assert tiny_cli.run("fit", "--ckpt_path", "last", "--run.dir", str(run), "--methods.a", "trap.TrapMethod") == 0
    assert "nothing is left to train" in capsys.readouterr().out
    with contextlib.chdir(trap):
        assert tiny_cli.run("validate", "--ckpt_path", "last", "--run.dir", run.name) == 2
    assert "methods.a = 'trap.TrapMethod' cannot work" in capsys.readouterr().err


def test_the_command_that_continues_a_run_allows_its_classes() -> None:
    config = {
        "methods": {"a": {"class_path": "cfl.methods.EWC"}, "b": {"class_path": "mine.Own", "init_args": {"x": 1}}}
    }
    network = {"class_path": "cflx.Net", "init_args": {"activation": {"class_path": "mine.Own"}}}
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    assert classes_beyond({**config, "model": {"network": network, "optimizer": optimizer}}) == ["mine.Own", "cflx.Net"]


@pytest.mark.parametrize("allowed", ["jsonargparse", "a b", "*", ""])
def test_what_cannot_be_allowed_is_refused(allowed: str, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = str(run_folder / "last.ckpt")
    assert tiny_cli.run("validate", "--ckpt_path", checkpoint, f"--allow={allowed}") == 2
    assert f"--allow = {allowed!r} cannot work; valid: the dotted name" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["fit"], ["fit", "--config", "x.yaml", "--ckpt_path", "r/last.ckpt"]])
def test_allowing_where_all_is_allowed_is_refused(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="--allow = 'mine' cannot work"):
        read_command_line([*given, "--allow", "mine"])


def test_allowed_packages_are_no_part_of_a_configuration(run_folder: Path, trap: Path) -> None:
    """A key ``allow`` in config.yaml is refused: otherwise a foreign file could allow its own packages."""
    run = foreign.attacked(run_folder, "method", trap)
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "allow": ["trap"]}))
    assert tiny_cli.run("validate", "--ckpt_path", str(run / "last.ckpt")) == 2
    assert foreign.sprung(trap) == []


@pytest.mark.parametrize(
    "attack",
    [
        *("os.system", "subprocess.getoutput", "pydoc.pipepager"),
        *("function", "function for a network", "function for an optimizer", "object"),
    ],
)
def test_a_configuration_of_ones_own_names_classes_only(
    attack: str, run_folder: Path, trap: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A configuration that names a function or an object is refused, also if its file is given twice."""
    run = foreign.attacked(run_folder, attack, trap)
    command = foreign.commands(run)["fit --config"]
    for given in (command, [*command, "--config", str(run / "config.yaml")]):
        assert tiny_cli.run(*given) == 2
        said = capsys.readouterr().err
        assert "cannot work; valid: a class" in said
        keys = {"function": "methods.a", "object": "methods.a", "function for a network": "model.network"}
        assert f"{keys.get(attack, 'model.optimizer')} = " in said
        assert "CALLED" not in (traces := foreign.sprung(trap))
        assert "EXECUTED" not in traces


@pytest.mark.parametrize("attack", ["network", "method", "partition", "callback"])
def test_a_configuration_of_ones_own_may_name_any_class(attack: str, run_folder: Path, trap: Path) -> None:
    run = foreign.attacked(run_folder, attack, trap)
    assert tiny_cli.run(*foreign.commands(run)["fit --config"]) == 0
    assert foreign.sprung(trap) == ["IMPORTED", "CALLED"]


def test_plain_values_of_every_kind_are_let_through() -> None:
    plain = {"a": {1: [2.0, "x", None, True]}, "b": ({"class_path": "cfl.methods.EWC", "init_args": {"strength": 1}},)}
    require_classes(plain)
    for value in (print, Path.touch, FileRows, lambda: 0):
        with pytest.raises(ConfigError, match=r"a\.1 = .* cannot work; valid: a class"):
            require_classes({"a": {1: [value]}})


def test_a_class_is_found_without_importing_its_module(trap: Path) -> None:
    foreign.set_trap(trap)
    assert named_class("trap.TrapMethod") is None
    assert foreign.sprung(trap) == []
    assert named_class("cfl.runtime.errors.ConfigError") is ConfigError
    assert [
        named_class(path) for path in ("cfl.runtime.errors", "cfl.nothing.Here", "cfl.__main__.main", "", "Method")
    ] == [None] * 5
    assert named_class("collections.OrderedDict.fromkeys") is None
    assert named_class("cfl.papers.__main__.X") is None, "a program, which its import would start"
    assert "cfl.papers.__main__" not in sys.modules


def test_classes_that_a_configuration_can_name() -> None:
    """Public ones that are not abstract, of a notebook or script (``__main__``) as well."""

    def made(name: str, module: str, **attributes: Any) -> type:
        return type(name, (Base,), {"__module__": module, **attributes})

    class Base(ABC):  # noqa: B024
        """The base class of those below."""

    mine, other = made("Mine", "__main__"), made("Other", "package.module")
    hidden = [
        made("_Hidden", "__main__"),
        made("Deep", "package._module"),
        made("Nested", "m", __qualname__="Outer.Nested"),
    ]
    abstract = made("Abstract", "__main__", act=abstractmethod(lambda self: None))
    below = type("Below", (abstract,), {"__module__": "__main__", "act": lambda self: None})
    assert set(named_subclasses(Base)) == {mine, other, below}
    assert len({mine, other, below, abstract, *hidden}) == 7  # keeps those alive that are not found


def test_reading_the_experiment_of_a_kept_run_imports_nothing(run_folder: Path, trap: Path) -> None:
    run = foreign.attacked(run_folder, "method", trap)
    found = read_experiment(run)
    assert found is not None
    assert found["methods"]["a"]["class_path"] == "trap.TrapMethod"
    assert foreign.sprung(trap) == []


# Modules beside a run.


@pytest.mark.parametrize(
    ("given", "place"),
    [
        (["fit", "--config", "mine.yaml"], 0),
        (["fit"], 0),
        (["--help"], 0),
        ([], 0),
        (["fit", "--config", "mine.yaml", "--ckpt_path", "r/last.ckpt"], 0),
        (["fit", "--ckpt_path", "r/last.ckpt"], None),
        (["validate", "--ckpt_path=r/last.ckpt"], None),
        (["export", "--ckpt_path", "r/last.ckpt", "--out", "m.pt2"], None),
        (["compare", "r", "--config"], None),
        (["validate", "--ckpt_path", "r/last.ckpt", "--allow", "mine"], "last"),
    ],
)
def test_where_python_looks_for_modules_beside_a_run(given: list[str], place: int | str | None) -> None:
    assert place_of_current_folder(given) == (len(sys.path) if place == "last" else place)


def test_python_m_cfl_imports_nothing_of_the_current_folder(run_folder: Path, tmp_path: Path) -> None:
    """Files in the current folder with names of packages that the program imports are not imported."""
    for name in ("torch", "yaml", "typing", "torchvision", "lightning", "jsonargparse", "callbacks", "optree"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'HIT')!r}, 'a').write({name!r})\n")
    shutil.copytree(run_folder, tmp_path / "run")
    for command in (["compare", "run"], ["validate", "--ckpt_path", "run/last.ckpt"]):
        python = [sys.executable, "-m", "cfl", *command]
        done = subprocess.run(python, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert not (tmp_path / "HIT").exists()


# Damaged files.


def _damaged(whole: bytes, random: random.Random) -> bytes:
    """The content of a file with one random damage.

    One bit or some bytes are changed, bytes are zero, the end or the beginning is missing, or a block is there twice.
    """
    place, length = random.randrange(len(whole)), random.randrange(1, 4096)
    kind = random.choice(["bit", "bytes", "zeros", "cut", "beheaded", "twice"])
    if kind == "bit":
        return whole[:place] + bytes([whole[place] ^ 1 << random.randrange(8)]) + whole[place + 1 :]
    if kind == "cut":
        return whole[:place]
    if kind == "beheaded":
        return whole[place + 1 :]
    if kind == "twice":
        return whole[: place + length] + whole[place:]
    part = bytes(length) if kind == "zeros" else random.randbytes(length)
    return whole[:place] + part + whole[place + length :]


def test_a_checkpoint_that_was_damaged_anywhere_is_refused(run_folder: Path, tmp_path: Path) -> None:
    whole, path = (run_folder / "last.ckpt").read_bytes(), tmp_path / "last.ckpt"
    chance = random.Random(0)
    for _ in range(300):
        damaged = _damaged(whole, chance)
        if damaged == whole:  # zeros upon zeros
            continue
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"valid: a whole checkpoint written by cfl fit"):
            read_checkpoint(path)


@pytest.mark.parametrize("lost", range(1, 80))
def test_a_checkpoint_without_its_last_bytes_is_refused(lost: int, run_folder: Path, tmp_path: Path) -> None:
    """A checkpoint is refused without its last 1 to 79 bytes, also if only its digest is missing."""
    path = tmp_path / "last.ckpt"
    path.write_bytes((run_folder / "last.ckpt").read_bytes()[:-lost])
    with pytest.raises(ConfigError, match="a whole checkpoint written by cfl fit"):
        read_checkpoint(path)


@pytest.mark.parametrize("command", OPENING)
def test_every_command_refuses_a_damaged_checkpoint(
    command: str, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    content = bytearray((run / "last.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (run / "last.ckpt").write_bytes(content)
    assert _run(foreign.commands(run)[command]) == 2
    assert "its content has changed since it was written" in capsys.readouterr().err


def test_a_checkpoint_from_before_there_were_digests_is_read_with_a_warning(
    run_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = torch.load(run_folder / "last.ckpt", weights_only=True)
    del content["ends_with_digest"]
    torch.save(content, tmp_path / "last.ckpt")
    with caplog.at_level(logging.WARNING):
        tiny_cli.assert_same(read_checkpoint(tmp_path / "last.ckpt"), content)
    assert "carries no digest" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        read_checkpoint(run_folder / "last.ckpt")
    assert caplog.text == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, run_folder: Path, tmp_path: Path) -> None:
    content = torch.load(run_folder / "last.ckpt", weights_only=True)
    content["state_dict"]["network.head.weight"][0, 0] = value
    write_checkpoint(content, tmp_path / "last.ckpt")
    with pytest.raises(ConfigError, match=r"network\.head\.weight holds NaN or infinity"):
        read_checkpoint(tmp_path / "last.ckpt")


_NOT_PLAIN = {
    "without values": torch.empty(3, device="meta"),
    "a few bytes that claim 16 TB": torch.zeros(1, 1).expand(2**21, 2**21),
    "sparse": torch.eye(3).to_sparse(),
    "a number": 3,
}


@pytest.mark.parametrize("place", ["state_dict", "federation"])
@pytest.mark.parametrize("name", _NOT_PLAIN)
def test_tensors_that_no_run_writes_are_refused_before_they_take_time_or_memory(
    name: str, place: str, tmp_path: Path
) -> None:
    held = (
        {"w": _NOT_PLAIN[name]} if place == "state_dict" else {"clients": {"model": {"rows": {"w": _NOT_PLAIN[name]}}}}
    )
    torch.save({"state_dict": {}, "federation": {}, place: held}, tmp_path / "last.ckpt")
    with pytest.raises(ConfigError, match=r"ckpt_path .* valid: a .*checkpoint .*cfl fit"):
        read_checkpoint(tmp_path / "last.ckpt")


def test_a_checkpoint_may_hold_a_list_that_holds_itself(tmp_path: Path) -> None:
    held: list[Any] = [torch.ones(2)]
    held.append(held)
    torch.save({"state_dict": {}, "federation": {"held": held}}, tmp_path / "last.ckpt")
    assert torch.equal(read_checkpoint(tmp_path / "last.ckpt")["federation"]["held"][1][0], torch.ones(2))


@pytest.mark.parametrize("command", OPENING)
@pytest.mark.parametrize("place", ["federation server", "federation round", "state_dict network.head.bias"])
def test_a_checkpoint_whose_parts_are_of_another_kind_is_refused(
    place: str, command: str, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    content = torch.load(run / "last.ckpt", weights_only=True)
    section, key = place.split()
    content[section][key] = torch.ones(7) if section == "state_dict" else None
    write_checkpoint(content, run / "last.ckpt")
    assert _run(foreign.commands(run)[command]) == 2
    assert "valid: a checkpoint as cfl fit writes it (" in capsys.readouterr().err


@pytest.mark.parametrize("command", OPENING)
def test_a_checkpoint_that_does_not_say_what_it_is_of_is_refused(
    command: str, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    content = torch.load(run / "last.ckpt", weights_only=True)
    write_checkpoint({**content, "experiment": {}}, run / "last.ckpt")
    assert _run(foreign.commands(run)[command]) == 2
    assert "a checkpoint that says which configuration it is of" in capsys.readouterr().err


@pytest.mark.parametrize("read", [lambda rows: rows.read(np.array([3])), lambda rows: rows.first(5)])
def test_what_clients_keep_on_disk_is_not_used_once_the_disk_has_changed_it(read: Any, tmp_path: Path) -> None:
    rows = FileRows(7, torch.float32, tmp_path)
    values = torch.arange(35.0).view(5, 7)
    rows.write(np.arange(5), values)
    assert torch.equal(rows.read(np.array([4, 0])), values[[4, 0]])
    assert torch.equal(rows.first(5), values)
    os.pwrite(rows._file.fileno(), b"\x01", 3 * 28 + 5)
    assert torch.equal(rows.read(np.array([0, 1, 2, 4])), values[[0, 1, 2, 4]])
    with pytest.raises(DamagedFile, match="row 3 is not what was written"):
        read(rows)
    os.ftruncate(rows._file.fileno(), 3 * 28 + 5)
    with pytest.raises(DamagedFile, match="it ends before row"):
        read(rows)


# A run that dies between its last checkpoint and its summary.


@pytest.mark.parametrize("elsewhere", [False, True])
def test_killed_between_last_checkpoint_and_summary(elsewhere: bool, tmp_path: Path) -> None:
    """A run killed after its last checkpoint has no summary.json. Resumed in any folder, it ends as a whole run."""
    run, other = tmp_path / "killed", tmp_path / "other"
    options = ("--methods.fot", "FOT", "--schedule.evaluate_every", "1")
    arguments = ("fit", "--config", str(tiny_cli.TINY), "--run.dir", str(run), *options)
    assert tiny_cli.killed("ended", 5, *arguments) == -signal.SIGKILL
    assert int(tiny_cli.checkpoint(run)["federation"]["round"]) == 6
    assert not (run / "summary.json").exists()
    place = ("--run.dir", str(other)) if elsewhere else ()
    assert tiny_cli.run("fit", "--ckpt_path", str(run / "last.ckpt"), *place) == 0
    assert tiny_cli.fit(tmp_path / "whole", *options) == 0
    if elsewhere:
        shutil.copy(run / "last.ckpt", other / "last.ckpt")
    ours, theirs = (tiny_cli.results(folder) for folder in (other if elsewhere else run, tmp_path / "whole"))
    tiny_cli.assert_same(ours, theirs)
    files = [{path.name for path in folder.iterdir()} for folder in (other if elsewhere else run, tmp_path / "whole")]
    assert files[0] == files[1]


def test_a_run_that_goes_on_from_before_its_end_is_not_finished(run_folder: Path, tmp_path: Path) -> None:
    """Resuming removes a summary.json that is in the folder, so that the unfinished run does not pass for finished."""
    run = tmp_path / "run"
    arguments = ("fit", "--config", str(tiny_cli.TINY), "--run.dir", str(run), "--methods.ewc", "EWC")
    assert tiny_cli.killed("training", 4, *arguments) == -signal.SIGKILL
    shutil.copy(run_folder / "summary.json", run / "summary.json")
    assert tiny_cli.killed("training", 5, "fit", "--ckpt_path", str(run / "last.ckpt")) == -signal.SIGKILL
    assert not (run / "summary.json").exists()


# What a run shows.

HOSTILE = "\x1b]0;owned\x07\x1b[31m<script>alert(1)</script> ![x](http://x) | \u202e$\\input{x}$\n# heading"


def test_control_characters_are_spelled_out() -> None:
    assert printable("a\x1b[31mb\u202ec\x07\x9bd\r") == r"a\x1b[31mb\u202ec\x07\x9bd\r"
    assert printable("é ± 中\n\tα") == "é ± 中\n\tα"


def test_markdown_shows_a_text_and_nothing_comes_of_it() -> None:
    assert in_markdown(HOSTILE) == (
        r"\x1b]0;owned\x07\x1b[31m&lt;script>alert(1)&lt;/script> ![x]\(http://x) \| \u202e$\input{x}$ # heading"
    )


@pytest.mark.parametrize("text", ["plain", "```\n<script>\n```", "a ````` b"])
def test_a_block_of_code_is_closed_by_its_own_fence_alone(text: str) -> None:
    first, *lines, last = fenced(text, "yaml").splitlines()
    assert first == f"{last}yaml"
    assert last not in "\n".join(lines)
    assert "\n".join(lines) == text


def test_nothing_of_a_runs_texts_is_obeyed(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters, HTML, Markdown and LaTeX in a run's texts have no effect in any output."""
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(run_folder, run)
    (run / "SHA256SUMS").unlink()  # an attacker can remove it, too
    summary = json.loads((run / "summary.json").read_text())
    texts = {key: f"{key} {HOSTILE}" for key in ("method", "benchmark", "partition", "scenario")}
    (run / "summary.json").write_text(json.dumps({**summary, **texts, "note": HOSTILE}))
    config = yaml.safe_load((run / "config.yaml").read_text())
    broken = tmp_path / "broken\x1b[31m"
    broken.mkdir()
    (broken / "summary.json").write_text(json.dumps({**summary, "seed": HOSTILE}))
    assert main(["compare", str(run), str(broken), "--out", str(out)]) == 0
    said = capsys.readouterr()
    config["run"]["benchmark"] = "``` <script>"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["export", "--ckpt_path", str(run / "last.ckpt"), "--out", str(tmp_path / "m.safetensors")]) == 0
    card = (tmp_path / "m.safetensors.md").read_text()
    markdown, latex = (out / "comparison.md").read_text(), (out / "comparison.tex").read_text()
    for text in (said.out, said.err, markdown, latex, card):
        assert "owned" in text or text in (said.err,)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "\u202e" not in text
    page = (out / "report.html").read_text()
    assert "<script>alert" not in page
    assert "<script>alert" not in markdown
    assert "<script>alert" not in card
    assert "](http" not in markdown
    assert r"\input" not in latex.replace(r"\textbackslash{}input", "")
    assert card.count("````yaml") == 1


@pytest.mark.parametrize("name", ["../secret", "a/b", "..", "a b", "\x1b[31m"])
def test_names_of_methods_lead_to_no_file_outside_a_run(name: str, run_folder: Path, tmp_path: Path) -> None:
    from cfl.papers.results import read_result
    from cfl.reporting.compare.reading import read
    from cfl.reporting.csv_file import RunFolderError

    run = tmp_path / "runs" / "run"
    shutil.copytree(run_folder, run)
    (run / "SHA256SUMS").unlink()  # with it the changed configuration would be refused first
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["methods"] = {name: config["methods"]["ewc"]}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    for secret in (tmp_path / "runs" / "secret.csv", run / "a b.csv"):
        secret.write_text("task,layer,used_space\n0,secret,50\n1,secret,50\n")
    warnings: list[str] = []
    assert read(run, warnings).space == {}
    with pytest.raises(RunFolderError, match="no method can be called"):
        read_result(run)


@pytest.mark.parametrize("name", ["\x1b[31m", "a\nb", "../x", ".hidden", ""])
def test_benchmarks_are_called_by_names_that_can_be_shown(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny_cli.fit(tmp_path, "--run.benchmark", name) == 2
    assert "run.benchmark" in (said := capsys.readouterr().err)
    assert "\x1b" not in said
