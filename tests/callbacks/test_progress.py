"""The progress line: plain lines in a pipe, one live line on a terminal."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support import tiny_cli

import cfl.callbacks.progress
from cfl.callbacks import FederatedOrchestrator, RoundProgress
from cfl.callbacks.progress import clock, fitting
from cfl.training.client import Client

BAR = r"(?:[━╸╺ ]{10,30}  )?"
LINE = re.compile(
    BAR + r"task (\d+)/(\d+)  round (\d+)/(\d+)  clients (\d+)/(\d+)  loss (\d+\.\d{4})  "
    r"last ACC (-|\d+\.\d\d)  left (\S+)"
)

EVALUATING = re.compile(BAR + r"evaluating task (\d+)/(\d+)  (?:before training|after (\d+) of \d+ rounds)")


def progress_lines(text: str) -> list[tuple[str, ...]]:
    """The fields of every progress line."""
    return [match.groups() for line in text.splitlines() if (match := LINE.fullmatch(line))]


def test_plain_lines_tell_what_the_table_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a pause every round has a line, whose task, round, clients, loss and ACC are those of rounds.csv."""
    assert tiny_cli.fit(tmp_path, "--progress.plain_seconds", "0") == 0
    expected, acc = [], "-"
    for row in tiny_cli.rows(tmp_path / "rounds.csv"):
        acc = f"{float(row['acc']):.2f}" if row["acc"] else acc
        place = (row["task"], "1", row["round_in_task"], "2")
        expected.append((*place, "2", "2", f"{float(row['loss']):.4f}", acc))
    assert [fields[:-1] for fields in progress_lines(capsys.readouterr().out)] == expected


def test_by_default_only_task_ends_are_shown_in_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain lines come every ten seconds, so that a log file stays readable."""
    assert tiny_cli.fit(tmp_path) == 0
    lines = progress_lines(capsys.readouterr().out)
    assert [(fields[0], fields[2]) for fields in lines] == [("0", "2"), ("1", "2")]


def test_progress_can_be_turned_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_cli.fit(tmp_path, "--progress.enabled", "false", "--progress.plain_seconds", "0") == 0
    assert progress_lines(capsys.readouterr().out) == []


def test_time_left_is_rounds_left_times_mean_time_of_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time left is the mean time of a round times the rounds left. Rounds before a resume do not count.

    The clock is simulated: a round takes 40 s.
    """
    now = [0.0]
    start = FederatedOrchestrator.on_train_epoch_start

    def slow_start(*arguments: Any) -> None:
        now[0] += 40.0
        start(*arguments)

    monkeypatch.setattr(cfl.callbacks.progress, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(FederatedOrchestrator, "on_train_epoch_start", slow_start)
    with tiny_cli.die_at("training", 1, signal.SIGTERM):
        assert tiny_cli.fit(tmp_path, "--progress.plain_seconds", "0") == 143
    assert [fields[-1] for fields in progress_lines(capsys.readouterr().out)] == ["3:20", "2:40"]
    now[0] = 1e6
    assert tiny_cli.run("fit", "--ckpt_path", str(tmp_path / "last.ckpt")) == 0
    lines = progress_lines(capsys.readouterr().out)
    assert [(fields[2], fields[-1]) for fields in lines] == [
        (number, left) for number, left in (("2", "2:00"), ("0", "1:20"), ("1", "0:40"), ("2", "0:00"))
    ]


def test_a_resumed_run_shows_the_last_acc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rounds after a resume show the ACC from before it until the next evaluation."""
    with tiny_cli.die_at("training", 2, signal.SIGTERM):
        assert tiny_cli.fit(tmp_path, "--progress.plain_seconds", "0", "--schedule.evaluate_every", "2") == 143
    assert tiny_cli.run("fit", "--ckpt_path", str(tmp_path / "last.ckpt")) == 0
    lines = progress_lines(capsys.readouterr().out)
    assert [fields[:4:2] for fields in lines[2:4]] == [("0", "2"), ("1", "0")]
    assert lines[3][-2] == lines[2][-2] == f"{float(tiny_cli.rows(tmp_path / 'rounds.csv')[2]['acc']):.2f}"


def test_a_long_evaluation_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long evaluation prints its task every 10 s.

    The clock is simulated: a batch takes 6 s, and a test set has two batches.
    """
    now = [0.0]
    evaluate = Client.validation_step

    def slow(*arguments: Any, **options: Any) -> Any:
        now[0] += 6.0
        return evaluate(*arguments, **options)

    monkeypatch.setattr(cfl.callbacks.progress, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Client, "validation_step", slow)
    assert tiny_cli.fit(tmp_path, "--data.eval_batch_size", "20", "--schedule.evaluate_every", "2") == 0
    out = capsys.readouterr().out
    found = [line for line in out.splitlines() if line.startswith("evaluating")]
    places = ["before training", *(f"after {rounds} of 6 rounds" for rounds in (2, 3, 5, 6))]
    assert found == [f"evaluating task {task}/1  {place}" for place in places for task in (0, 1)]
    assert [fields[:4:2] for fields in progress_lines(out)] == [("0", "1"), ("0", "2"), ("1", "1"), ("1", "2")]
    monkeypatch.setattr(Client, "test_step", slow)
    for command in ("validate", "test"):
        assert tiny_cli.run(command, "--ckpt_path", str(tmp_path / "last.ckpt")) == 0
        out = capsys.readouterr().out
        assert out.splitlines()[:2] == [f"evaluating task {task}/1  after 6 of 6 rounds" for task in (0, 1)]
    of_four = ("--data.stream.num_tasks", "4", "--data.sequences", "RandomTasks", "--data.sequences.count", "2")
    assert tiny_cli.fit(tmp_path / "own", "--data.eval_batch_size", "20", *of_four) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2:6] == [f"evaluating task {task}/3  before training" for task in (0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3600, "1:00:00"), (90061, "25:01:01")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_piped_command_writes_text_and_ends_on_a_signal(tmp_path: Path) -> None:
    """A piped `cfl fit` that gets SIGTERM, as in a batch job, prints plain lines and ends after its round."""
    folder = tmp_path / "my run"
    command = [sys.executable, "-m", "cfl", "fit", "--config", str(tiny_cli.TINY), "--run.dir", str(folder)]
    options = ["--schedule.rounds_per_task", "2000", "--progress.plain_seconds", "0"]
    process = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "FORCE_COLOR": "1"},  # as continuous integration sets it
    )
    assert process.stdout is not None
    header = [process.stdout.readline() for _ in range(2)]
    first = process.stdout.readline()  # before the signal can be sent, rounds must be running
    while EVALUATING.fullmatch(first.rstrip()):
        first = process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 143, errors
    assert progress_lines(first), (first, errors)
    assert header[0].startswith("cfl ")
    assert header[1] == f"device cpu, run folder {folder}\n"
    assert not re.search(r"[^\n -~]", "".join(header) + first + output), "control characters"
    assert output.splitlines()[-1] == f"interrupted; continue with: cfl fit --ckpt_path '{folder}/last.ckpt'"
    assert "stopping after this round" in errors
    shown = 1 + int(progress_lines(first + output)[-1][2])  # rounds count from 0
    assert tiny_cli.checkpoint(folder)["federation"]["round"] == shown
    assert len(tiny_cli.rows(folder / "rounds.csv")) == shown


# On a terminal.


class Terminal(io.StringIO):
    """A terminal that keeps the lines it would show. It knows the few control sequences that rich uses here."""

    def __init__(self, width: int = 120) -> None:
        super().__init__()
        self.lines, self.row, self.column = [""], 0, 0
        self.console = Console(force_terminal=True, file=self, width=width)
        self.cursor = True
        self.colours: set[str] = set()
        self.seen: list[list[str]] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[^\x1b]", text):
            if part == "\n":
                self.row, self.column = self.row + 1, 0
                if self.row == len(self.lines):
                    self.lines.append("")
            elif part == "\r":
                self.column = 0
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif part == "\x1b[J":
                self.lines[self.row :] = [self.lines[self.row][: self.column]]
            elif part in ("\x1b[1A", "\x1b[A"):
                self.row -= 1
            elif part in ("\x1b[?25l", "\x1b[?25h"):
                self.cursor = part.endswith("h")
            elif part.startswith("\x1b"):
                assert part.endswith("m"), part
                self.colours.add(part)
            else:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + part + line[self.column + 1 :]
                self.column += 1
                assert self.column < self.console.width, line
        self.seen.append([line.rstrip() for line in self.lines if line.strip()])
        return len(text)

    def resize(self, width: int) -> None:
        """Change the width and wrap lines that are too long for it. The cursor stays on its character."""
        wrapped: list[str] = []
        for number, line in enumerate(self.lines):
            if number == self.row:
                row = len(wrapped) + self.column // width
            wrapped += [line[start : start + width] for start in range(0, max(len(line.rstrip()), 1), width)]
        self.lines, self.row, self.column, self.console.width = wrapped, row, self.column % width, width


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")  # on a dumb one there is no live line
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(cfl.callbacks.progress, "Console", lambda: screen.console)
    return screen


def test_terminal_has_one_live_line(tmp_path: Path, terminal: Terminal) -> None:
    """The live line is rewritten in place below the lines of finished tasks. At the end only these are left."""
    assert tiny_cli.fit(tmp_path, "--progress.live_seconds", "0") == 0
    for screen in terminal.seen:
        assert len(screen) <= 3  # two finished tasks and the live line
        assert all(LINE.fullmatch(line) or (line == screen[-1] and EVALUATING.fullmatch(line)) for line in screen), (
            screen
        )
    every = {line for screen in terminal.seen for line in screen}
    shown = {line for line in every if LINE.fullmatch(line)}
    after = {int(EVALUATING.fullmatch(line)[3]) for line in every - shown}  # type: ignore[index]
    assert after == {3, 6}
    rounds = {LINE.fullmatch(line).groups()[:3:2] for line in shown}  # type: ignore[union-attr]
    assert rounds == {(str(task), str(round)) for task in (0, 1) for round in (0, 1, 2)}
    partial = [LINE.fullmatch(line).groups()[4:6] for line in shown]  # type: ignore[union-attr]
    assert ("2", "2") in partial
    ends = terminal.seen[-1]
    assert [LINE.fullmatch(line).groups()[:3:2] for line in ends] == [("0", "2"), ("1", "2")]  # type: ignore[union-attr]
    assert terminal.cursor


def test_terminal_is_refreshed_no_more_often_than_asked(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default pause, a short run draws only the ends of its tasks: drawing takes longer than a local step."""
    monkeypatch.setattr(cfl.callbacks.progress, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    drawn = []
    show = RoundProgress._show
    monkeypatch.setattr(RoundProgress, "_show", lambda *given: (drawn.append(1), show(*given)))
    assert tiny_cli.fit(tmp_path) == 0
    assert len(drawn) == 2


PARTS = {
    "task": "task 19/19",
    "round": "round 999/999",
    "clients": "clients 100/100",
    "loss": "loss 12.3456",
    "mean": "last ACC 100.00",
    "left": "left 10:23:11",
}


def test_a_line_fits_and_tells_the_time_left() -> None:
    """A line fits every width and always has task and time left. A wider terminal shows the same parts or more."""
    narrower: set[str] = set()
    for width in range(40, 201):
        shown, bar = fitting(PARTS, width)
        assert sum(map(len, shown.values())) + 2 * (len(shown) - 1) + (bar + 2 if bar else 0) <= width
        assert list(shown) == [name for name in PARTS if name in shown]
        assert {"left", "task"} | narrower <= set(shown)
        assert bar == 0 or 10 <= bar <= 30
        assert bar or width < 60
        narrower = set(shown)
    assert (narrower, bar) == (set(PARTS), 30)


@pytest.mark.parametrize("width", [40, 60, 200])
def test_a_narrow_terminal_shows_the_time_left(width: int, tmp_path: Path, terminal: Terminal) -> None:
    """At any width the line ends with the time left and leaves the last column free, where a terminal would wrap it."""
    terminal.console.width = width
    assert tiny_cli.fit(tmp_path, "--progress.live_seconds", "0") == 0
    lines = {line for screen in terminal.seen for line in screen if "evaluating" not in line}
    assert all(re.search(r"  left (-|\d:\d\d)$", line) for line in lines), lines
    assert any("━" in line for line in lines) or width == 40


def test_a_window_that_becomes_narrower_keeps_one_line(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a terminal wraps the live line, the next line replaces all its rows."""
    widths = iter([200, 50, 120, 41, 80])
    start = RoundProgress.on_train_epoch_start

    def resized(progress: RoundProgress, *given: Any) -> None:
        if width := next(widths, None):
            terminal.resize(width)
        start(progress, *given)

    monkeypatch.setattr(RoundProgress, "on_train_epoch_start", resized)
    assert tiny_cli.fit(tmp_path, "--progress.live_seconds", "0") == 0
    ends = "\n".join(terminal.seen[-1])
    assert ends.count("task 0/1") == ends.count("task 1/1") == 1, ends
    assert ends.count("round 2/2") == 2
    assert "round 1/2" not in ends
    assert "━" not in ends


@pytest.mark.parametrize("asked", [True, False])
def test_colours_are_left_out_where_nobody_wants_them(
    asked: bool, tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "" if asked else "1")
    terminal.console = Console(force_terminal=True, file=terminal, width=120)
    assert tiny_cli.fit(tmp_path, "--progress.live_seconds", "0") == 0
    coloured = {part for part in terminal.colours if re.search(r"[\[;][34][0-9](;|m)", part)}
    assert bool(coloured) == asked


def test_a_dumb_terminal_has_plain_lines(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert tiny_cli.fit(tmp_path) == 0
    assert terminal.seen == []
    assert len(progress_lines(capsys.readouterr().out)) == 2


def test_terminal_is_left_in_order_after_an_error(tmp_path: Path, terminal: Terminal) -> None:
    """After an error the cursor is visible and the live line is gone, so that the error is not written into it."""
    assert tiny_cli.fit(tmp_path, "--model.optimizer.lr", "1e30", "--progress.live_seconds", "0") == 2
    assert terminal.cursor
    assert terminal.seen[-1] == []
