"""``cfl sweep``: the runs it makes, the options it refuses, and that an interrupted sweep continues."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import tiny_cli
from support.paper_tables import resolver, write_run
from support.when import when

from cfl.__main__ import main
from cfl.running import command
from cfl.running.grid import combinations, seeds_in, values_in
from cfl.running.jobs import Job, run_name
from cfl.running.launcher import Launcher
from cfl.running.runner import Outcome, Runner, rounds_done
from cfl.running.sweep import wanted
from cfl.runtime.errors import ConfigError

TINY = ("--config", str(tiny_cli.TINY))
LRS = ("--set", "model.optimizer.lr=0.1,0.2", "--data.validation=0.2")


@pytest.fixture(autouse=True)
def one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cfl.running.sweep.Resolver", resolver)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launcher, "begin", lambda _: None)
    monkeypatch.setattr(Launcher, "start", lambda *_: pytest.fail("a process is started"))


@pytest.fixture
def one_launcher(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make commands start their runs by the tests' launcher, which has imported the program."""

    class Shared(Launcher):
        begin, start = launcher.begin, launcher.start  # type: ignore[assignment]

        def close(self) -> None: ...

    monkeypatch.setattr(command, "Launcher", Shared)


def test_values_stand_between_commas_that_are_in_no_brackets() -> None:
    assert values_in("0.01, 0.1") == ["0.01", "0.1"]
    assert values_in("[1, 2],[3]") == ["[1, 2]", "[3]"]
    assert values_in("{class_path: SGD, init_args: {lr: 1}},Adam") == ["{class_path: SGD, init_args: {lr: 1}}", "Adam"]
    assert values_in("'a,b',c") == ["'a,b'", "c"]
    assert values_in("a,") == ["a", ""]


def test_a_grid_is_every_combination() -> None:
    grid = {"a": ["1", "2"], "b": ["x", "y", "z"]}
    found = list(combinations(grid))
    assert found[:3] == [(("a", "1"), ("b", "x")), (("a", "1"), ("b", "y")), (("a", "1"), ("b", "z"))]
    assert {(dict(c)["a"], dict(c)["b"]) for c in found} == {(a, b) for a in "12" for b in "xyz"}
    assert list(combinations({})) == [()]


def test_seeds() -> None:
    assert [*seeds_in("3")] == [*seeds_in("0-2")] == [0, 1, 2]
    assert [*seeds_in("3-4")] == [3, 4]
    assert len(seeds_in("1000")) == len(seeds_in("4294966296-4294967295")) == 1000
    for text in ("2-1", "1001", "0-1000", "20250101", "4294967295-4294967296", "9" * 5000):
        with pytest.raises(ConfigError, match=f"--seeds = '{text[:300]}"):
            seeds_in(text)


def swept(tmp_path: Path, *options: str) -> int:
    return main(["sweep", *options, "--out", str(tmp_path / "out")])


def printed(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The words of the commands that a dry run prints."""
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop() == f"{len(lines)} run{'s' if len(lines) > 1 else ''} to make, 0 finished"
    return [shlex.split(line) for line in lines]


@pytest.mark.usefixtures("nothing_runs")
def test_every_combination_is_run_and_a_methods_options_where_it_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["--set", "model.optimizer.lr=0.1,0.2", "--set", "methods.fot.threshold=0.9,0.95"]
    methods = ["--methods", "fedavg", "--methods", "fot"]
    options = [*TINY, *methods, *grid, "--seeds", "2", "--schedule.batch_size", "4", "--dry-run"]
    assert swept(tmp_path, *options) == 0
    commands = printed(capsys)
    found = set()
    for words in commands:
        config = resolver().config([word for word in words[2:] if not word.startswith("--ckpt_path")])
        assert config["schedule"]["batch_size"] == 4
        fot = config["methods"].get("fot", {"init_args": {"threshold": None}})
        lr, threshold = config["model"]["optimizer"]["init_args"]["lr"], fot["init_args"]["threshold"]
        found.add((lr, threshold, config["seed_everything"]))
        assert Path(config["run"]["dir"]).parent == tmp_path / "out"
    thresholds = (None, 0.9, 0.95)
    assert found == {(lr, threshold, seed) for lr in (0.1, 0.2) for threshold in thresholds for seed in (0, 1)}
    assert len(commands) == len(found) == len({words[-2] for words in commands})
    assert [words[-3] for words in commands] == ["--seed_everything=0"] * 6 + ["--seed_everything=1"] * 6
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("nothing_runs")
def test_a_methods_file_is_laid_below_the_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A method's file is added after the last ``--config``. A user's own file gives its name to the run."""
    own = tmp_path / "mine.yaml"
    own.write_text("methods: {fot: {class_path: FOT, init_args: {threshold: 0.5}}}\nschedule: {batch_size: 2}\n")
    assert swept(tmp_path, "--schedule.batch_size=3", *TINY, "--dry-run", "--methods", f"{own},ewc") == 0
    mine, ewc = printed(capsys)
    assert mine[2:6] == ["--schedule.batch_size=3", *TINY, f"--config={own}"]
    assert mine[-2].startswith(f"--run.dir={tmp_path / 'out' / 'mine-seed0-'}")
    assert ewc[5] == "--config=configs/methods/ewc.yaml"
    assert swept(tmp_path, "--seeds", "1", "--dry-run") == 0
    assert printed(capsys)[0][2] == "--config=configs/default.yaml"


@pytest.mark.usefixtures("nothing_runs")
def test_a_tables_list_of_missing_data_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "missing-data.json").write_text("damaged")
    assert swept(tmp_path, *TINY, "--seeds", "1", "--dry-run") == 0


BAD: list[tuple[list[str], list[str]]] = [
    (["--schedule.batch_sizes", "4"], []),
    (["--schedule.batch_size", "0"], []),
    (["--model.optimizer.lr", "-1"], []),
    (["--methods.fot", "FTO"], []),
    (["--methods.fot", "FOT", "--methods.fot.threshold", "2"], []),
    (["--methods.fot.threshold=2"], ["--methods", "fot"]),
    (["stray"], []),
    (["--config", "nowhere.yaml"], []),
    (["--engine.kind", "fast"], []),
    (["--methods.a b", "FOT"], []),
    (["--data.stream.num_tasks", "0"], []),
    (["--data.evaluate_on", "validation"], []),
    (["--data.scenario", "domain"], ["--methods", "glfc"]),
    (["--data.exposure", "unannounced"], ["--methods", "gpm"]),
    (["--methods.more", "DPFedAvg", "--methods.more.clip_norm", "1.0"], ["--methods", "dp-fedavg"]),
    (["--federated.aggregation", "modelled"], ["--methods", "fedweit"]),
    (["--federated.neighbours", "4"], []),
    (["--targets.accuracies", "[85]"], []),
    (["--schedule.client_dropout", "0.01"], ["--methods", "scaffold"]),
    (["--schedule.client_dropout", "0.5", "--schedule.dropout_stage", "check"], []),
    (["--privacy.delta", "2"], []),
]


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("bad", "methods"), BAD)
def test_what_cfl_fit_refuses_is_refused_once_in_the_same_words(
    bad: list[str], methods: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ["--config", f"methods/{methods[1]}.yaml"] if methods else []
    assert tiny_cli.run("fit", *TINY, *file, *bad, "--run.dir", str(tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert swept(tmp_path, *TINY, *methods, *bad, "--seeds", "3", "--set", "schedule.local_epochs=1,2") == 2
    assert capsys.readouterr().err == said
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "schedule.batch_size=4,0"], "schedule.batch_size = 0 cannot work"),
        (["--set", "schedule.batch_sizes=4"], "schedule.batch_sizes"),
        (["--methods", "ewc", "--set", "methods.fot.threshold=0.9"], "methods.fot"),
        (["--methods", "fto"], "--methods = 'fto' cannot work; valid: one of agem, "),
        (["--methods", ""], "--methods = '' cannot work; valid: one of agem, "),
        (["--methods", "fto"], "; did you mean fot?"),
        (["--methods", "fot,fot"], "each method once"),
        (["--methods", "nowhere.yaml"], "--methods = 'nowhere.yaml' cannot work; valid: an existing file"),
        (["--set", "lr"], "--set = 'lr' cannot work; valid: an option and its values"),
        (["--set", "model.optimizer.lr=0.1,"], "--set = 'model.optimizer.lr=0.1,' cannot work"),
        (["--set", "model.optimizer.lr=0.1", "--set", "model.optimizer.lr=0.2"], "each option once"),
        (["--set", "model.optimizer.lr=0.1,0.10"], "'lr 0.1 and lr 0.10' cannot work; valid: different experiments"),
        (["--set", "engine.kind=vmap,workers"], "no result depends on what differs"),
        (["--set", "seed_everything=1,2"], "--set = 'seed_everything=1,2' cannot work; valid: --seeds"),
        (["--seed_everything", "1"], "--seed_everything = 'for all runs' cannot work; valid: --seeds"),
        (["--run.dir=x"], "valid: --out"),
        (["--ckpt_path", "last"], "the same command goes on"),
        (["--seeds", "two"], "--seeds = 'two' cannot work"),
        (["--jobs", "0"], "--jobs = 0 cannot work"),
        ([*LRS, "--choose", "accc"], "--choose = 'accc' cannot work; valid: one of acc, fgt, fgt_max, bwt, fwt\n"),
        ([*LRS, "--choose", "nll"], "--choose = 'nll' cannot work"),
        ([*LRS, "--choose", ""], "--choose = '' cannot work"),
        ([*LRS, "--choose", "seconds"], "--choose = 'seconds' cannot work"),
        (["--choose", "acc", "--data.validation=0.2"], "--choose = 'acc' cannot work; valid: --set KEY=V1,V2"),
        ([LRS[0], LRS[1], "--choose", "acc"], "data.validation = 0.0 cannot work; valid: above 0 with --choose"),
        ([*LRS, "--choose", "acc", "--data.evaluate_on=validation"], "data.evaluate_on = 'validation' cannot work"),
        ([*LRS, "--choose", "acc", "--set", "data.num_clients=2,4"], "--set = 'data.num_clients' cannot work"),
        ([*LRS, "--choose", "acc", "--set", "data={num_clients: 2},{num_clients: 4}"], "--set = 'data' cannot work"),
        ([*LRS, "--choose", "acc", "--set", "config=iid.yaml,shards.yaml"], "--set = 'config' cannot work; valid: val"),
        ([*LRS, "--choose", "acc", "--seeds", "3", "--choose-seeds", "2-4"], "--choose-seeds = '2-4' cannot work"),
        ([*LRS, "--choose", "acc", "--seeds", "3", "--choose-seeds", "2-4"], "nothing is tested, unlike 2\n"),
        (
            [*LRS, "--choose", "acc", "--seeds", "1", "--choose-seeds", "10"],
            "nothing is tested, unlike 0; 10 is how many, from seed 0 on: 10-10 is seed 10\n",
        ),
        ([*LRS, "--choose", "acc", "--choose-seeds", "x"], "--choose-seeds = 'x' cannot work"),
        ([*LRS, "--choose-seeds", "4"], "--choose-seeds = '4' cannot work; valid: --choose FIGURE beside it"),
    ],
)
def test_bad_options_are_named_before_anything_runs(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("IID", "Shards"):
        Path(f"{name.lower()}.yaml").write_text(f"data: {{partition: {name}}}\n")
    assert swept(tmp_path, *TINY, *options) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_method_of_a_long_name_has_run_folders_that_can_be_made(tmp_path: Path) -> None:
    """File systems count bytes, and a letter of other scripts may have several."""
    file = tmp_path / f"{'方法' * 40}.yaml"
    file.write_text("methods: {}\n")
    (one,) = wanted(TINY, str(file), {"model.optimizer.lr": ["0.1"]}, tmp_path, resolver())[file.stem].values()
    (one.above / run_name(one.prefix, {"seed_everything": 2**32 - 1})).mkdir()


@pytest.mark.parametrize("words", [[], ["--jobs", "2", "--dry-run"]])
def test_a_sweep_of_nothing_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    assert "error: one of the following is required: --methods, --seeds, --set" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_runs")
def test_pictures_of_an_unknown_format_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        swept(tmp_path, *TINY, "--pictures", "svg,gif")
    assert capsys.readouterr().err.endswith(
        "'svg,gif' cannot work; valid: some of png, pdf, svg, with commas between them\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("nothing_runs")
def test_a_run_folder_is_no_place_for_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "out", TINY)
    assert swept(tmp_path, *TINY) == 2
    assert "--out = " in capsys.readouterr().err


@pytest.mark.usefixtures("one_launcher")
def test_runs_are_made_compared_and_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep makes its runs, compares them, names those that diverged, and does not make them again."""
    short = [*TINY, "--schedule.rounds_per_task=1", "--methods", "fedavg,fot", "--jobs", "2", "--pictures", "svg"]
    options = [*short, "--set", "model.optimizer.lr=0.1,1e30"]
    assert swept(tmp_path, *options) == 1
    said = capsys.readouterr().out
    assert "4 runs to make, 0 finished" in said
    lost = [line for line in said.splitlines() if line.startswith("no result of ")]
    assert [line.split(":")[0] for line in sorted(lost)] == [
        f"no result of {method}, lr 1e30 seed 0" for method in ("fedavg", "fot")
    ]
    assert all("NaN or infinity" in line for line in lost)
    page = tmp_path / "out" / "report.html"
    assert (tmp_path / "out" / "accuracy_curve.svg").exists()
    assert page.is_file()
    assert {row["row"] for row in tiny_cli.rows(tmp_path / "out" / "means.csv")} == {"FedAvg", "FOT"}
    for method, words in {"fedavg": [], "fot": ["--config", "methods/fot.yaml"]}.items():
        (folder,) = (path.parent for path in (tmp_path / "out").glob(f"{method}-lr-0.1-seed0-*/summary.json"))
        own = ["--schedule.rounds_per_task=1", "--model.optimizer.lr=0.1", f"--run.dir={tmp_path / method}"]
        assert tiny_cli.run("fit", *TINY, *words, *own) == 0
        tiny_cli.assert_same(tiny_cli.results(folder), tiny_cli.results(tmp_path / method))
    capsys.readouterr()
    page.unlink()
    assert swept(tmp_path, *options) == 1
    said = capsys.readouterr().out
    assert "0 runs to make, 2 finished, 2 diverged" in said
    assert "no result of fot, lr 1e30 seed 0: diverged; remove " in said
    assert page.is_file()
    # A smaller sweep with another engine makes no run again.
    assert swept(tmp_path, *short, "--set", "model.optimizer.lr=0.1", "--engine.kind=workers") == 0
    assert "0 runs to make, 2 finished" in capsys.readouterr().out


TOP2 = ("--measures.top2=torchmetrics.classification.MulticlassAccuracy", "--measures.top2.num_classes=4")
EVALUATED = ("--schedule.evaluate_every=1", "--targets.stop=false")


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("made", "wanted", "missing"),
    [
        ((), TOP2, "measures.top2"),
        (TOP2, (*TOP2, "--measures.top2.top_k=2"), "measures.top2"),
        (TOP2, (), None),
        (EVALUATED, (*EVALUATED, "--targets.accuracies=[90]"), "targets.accuracies"),
        ((*EVALUATED, "--targets.accuracies=[80, 90]"), (*EVALUATED, "--targets.accuracies=[90.0]"), None),
        ((), ("--privacy.delta=0.01", "--privacy.accountant=rdp"), "privacy.accountant, privacy.delta"),
        ((), ("--local_models.evaluate=true",), "local_models.evaluate"),
    ],
)
def test_a_finished_run_that_was_made_without_what_is_to_be_recorded_is_named(
    made: Sequence[str], wanted: Sequence[str], missing: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options on which no result depends may still be wanted of a run, which is then named if it lacks them."""
    folder = write_run(tmp_path / "out" / "made", [*TINY, *made], epsilon_all_tasks=9.0)
    status = swept(tmp_path, *TINY, *wanted)
    said = capsys.readouterr().out
    assert "0 runs to make, 1 finished" in said
    lost = [line for line in said.splitlines() if line.startswith("no result of ")]
    told = f"no result of run seed 0: made without the given {missing}; remove {folder} to run again"
    assert (status, lost) == ((0, []) if missing is None else (1, [told]))


@pytest.mark.usefixtures("nothing_runs")
def test_a_delta_matters_only_to_runs_that_have_an_epsilon(tmp_path: Path) -> None:
    write_run(tmp_path / "out" / "made", TINY)
    assert swept(tmp_path, *TINY, "--privacy.delta=0.01") == 0


@pytest.mark.usefixtures("one_launcher")
def test_an_interrupted_sweep_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*TINY, "--schedule.rounds_per_task=30", "--seeds", "2"]

    def begun() -> bool:
        return any(rounds_done(path.parent) >= 5 for path in (tmp_path / "out").glob("*/rounds.csv"))

    thread = when(begun, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert swept(tmp_path, *options) == 143
    thread.join()
    said = capsys.readouterr().out
    assert "interrupted run seed 1, 0 s: not started" in said
    assert said.endswith("interrupted; the same command goes on\n")
    assert swept(tmp_path, *options) == 0
    assert "started  run seed 0 (continued)\n" in capsys.readouterr().out
    assert [len(tiny_cli.rows(path)) for path in (tmp_path / "out").glob("*/rounds.csv")] == [60, 60]


@pytest.mark.usefixtures("nothing_runs")
def test_a_run_that_fails_otherwise_is_named_with_what_it_said_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: Runner, jobs: Sequence[Job]) -> list[Outcome]:
        write_run(jobs[0].folder, jobs[0].arguments, 0)
        write_run(jobs[3].folder, [*jobs[3].arguments, "--schedule.batch_size=3"], 3)
        write_run(jobs[4].folder, jobs[4].arguments, 4)
        return [
            Outcome(jobs[0], "finished"),
            Outcome(jobs[1], "failed", "exit status 2, see log.txt\n    first\n    error: no such file"),
            Outcome(jobs[2], "cannot run here", "needs SVHN"),
            Outcome(jobs[3], "finished"),
            Outcome(jobs[4], "runs elsewhere", "another sweep's, which has finished since"),
        ]

    monkeypatch.setattr(Runner, "run", run)
    assert swept(tmp_path, *TINY, "--seeds", "5") == 1
    *_, failed, missing, other = capsys.readouterr().out.splitlines()
    assert [failed, missing] == [
        "no result of run seed 1: failed, exit status 2, see log.txt: error: no such file",
        "no result of run seed 2: cannot run here, needs SVHN",
    ]
    assert other.startswith("no result of run seed 3: ")
    assert other.endswith("config.yaml is not of the experiment that was asked for")
