"""Runs whose clients keep more than fits into memory: the same numbers, resumable, with little memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import TorchCheckpointIO
from support import tiny_cli
from support.tiny import SaveAfter, fit, kept_by, norm_net, tiny_client, tiny_data, weights

from cfl.callbacks import RoundCheckpoint, RunRecord
from cfl.callbacks.streamed_checkpoints import StreamedCheckpoints
from cfl.data.participation import RandomShare
from cfl.data.partitions import Dirichlet
from cfl.federation.client_states import ClientStates
from cfl.federation.federation import Federation
from cfl.methods.personal import PersonalLayers
from cfl.reporting.rounding import rounded
from cfl.runtime.errors import ConfigError
from cfl.testing.processes import Crew

HEAD = 4 * 8 + 4
LIMITS = {"memory": "null", "disk": "0", "moved": str(2.5 * 4 * HEAD / 1e6)}
"""Values of ``federated.client_state_memory_mb``. Two clients' heads fit into the last one."""

PERSONAL = (
    *("--methods.own", "PersonalLayers", "--methods.own.layers", "['head.*']", "--schedule.rounds_per_task", "4"),
    *("--engine.kind", "vmap", "--schedule.cohort_width", "2"),
)


def limited(limit: str) -> tuple[str, ...]:
    return "--federated.client_state_memory_mb", limit


@pytest.mark.parametrize(("layers", "batchnorm"), [(["*"], "average"), (["head.*"], "local")])
@pytest.mark.parametrize("limit", [0, 0.001])
def test_where_it_is_kept_changes_no_bit(layers: list[str], batchnorm: str, limit: float) -> None:
    """Keeping tensors on disk changes no bit, also for absent and unequal clients, statistics and integer counters."""

    def run(limit: float | None) -> Federation:
        data = tiny_data(
            num_clients=7,
            partition=Dirichlet(1.0, 3),
            participation=RandomShare(0.7),
            schedule={"clients_per_round": 3, "cohort_width": 2, "rounds_per_task": 4},
        )
        optimizer = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
        client = tiny_client(data, norm_net, optimizer, {"own": PersonalLayers(layers)})
        options = {"batchnorm": batchnorm, "on_bad_update": "skip", "client_state_memory_mb": limit}
        return fit(client, data, options)

    here, there = run(None), run(limit)
    assert there.clients.on_disk("model")
    assert not here.clients.on_disk("model")
    assert there.clients.bytes() == here.clients.bytes() > 1000
    tiny_cli.assert_same(kept_by(there), kept_by(here))
    tiny_cli.assert_same(weights(there), weights(here))
    tiny_cli.assert_same(there.accuracy.state_dict(), here.accuracy.state_dict())
    dtypes = {tensor.dtype for tensor in kept_by(here)[here.clients.holders("model")[0]].values()}
    assert dtypes == {torch.float32, torch.int64}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of an uninterrupted run with everything in memory."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert tiny_cli.fit(folder, *PERSONAL, *limited("null")) == 0
    return comparable(folder)


def comparable(folder: Path) -> dict[str, Any]:
    """A run's results, with clients' tensors in a dictionary by client, because their order in files may differ."""
    found = tiny_cli.results(folder)
    states = ClientStates()
    states.load_state_dict(found["federation"].pop("clients"))
    found["kept"] = {client: states.get("model", client) for client in states.holders("model")}
    return found


@pytest.mark.parametrize("limit", ["disk", "moved"])
def test_killed_at_any_moment_and_resumed_equals_uninterrupted(
    tmp_path: Path, limit: str, whole: dict[str, Any]
) -> None:
    """A killed and resumed run ends as an uninterrupted one.

    The files of clients' tensors are lost with the process, and a checkpoint holds the state of one moment.
    """
    arguments = ("fit", "--config", str(tiny_cli.TINY), "--run.dir", str(tmp_path), *PERSONAL, *limited(LIMITS[limit]))
    resume = (*arguments, "--ckpt_path", "last")
    for stage, round in [("closed", 0), ("training", 1), ("writing", 3), ("written", 4), ("closed", 6)]:
        assert tiny_cli.killed(stage, round, *resume) == -signal.SIGKILL, stage
        assert tiny_cli.checkpoint(tmp_path)["federation"]["round"] > 0 if round else True
    assert tiny_cli.run(*resume) == 0
    tiny_cli.assert_same(comparable(tmp_path), whole)
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.is_file()) == sorted(
        [".yaml", ".ckpt", ".json", "", *[".csv"] * 3, *[".png"] * 3]  # without a suffix: SHA256SUMS
    )


@pytest.mark.parametrize(("first", "then"), [("memory", "disk"), ("disk", "memory"), ("moved", "disk")])
def test_a_run_may_be_resumed_with_another_limit(
    tmp_path: Path, first: str, then: str, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run may be resumed with another memory limit, and its results stay the same."""
    with tiny_cli.die_at("training", 3, signal.SIGTERM):
        assert tiny_cli.fit(tmp_path, *PERSONAL, *limited(LIMITS[first])) == 143
    assert tiny_cli.fit(tmp_path, *PERSONAL, *limited(LIMITS[then]), "--ckpt_path", "last") == 0
    tiny_cli.assert_same(comparable(tmp_path), whole)
    capsys.readouterr()
    assert tiny_cli.run("validate", "--ckpt_path", str(tmp_path / "last.ckpt"), *limited(LIMITS[first])) == 0
    shown = capsys.readouterr().out
    assert f" {rounded(whole['summary']['acc'], 3)}" in shown


def test_a_checkpoint_may_be_moved_and_read_by_plain_torch(tmp_path: Path, whole: dict[str, Any]) -> None:
    """A checkpoint is one file, which plain torch can read and which can be moved."""
    with tiny_cli.die_at("training", 3, signal.SIGTERM):
        assert tiny_cli.fit(tmp_path / "old", *PERSONAL, *limited("0")) == 143
    (tmp_path / "new").mkdir()
    for name in ("last.ckpt", "config.yaml", "rounds.csv"):
        (tmp_path / "old" / name).rename(tmp_path / "new" / name)
    state = torch.load(tmp_path / "new" / "last.ckpt", weights_only=True)["federation"]["clients"]["model"]
    assert state["fields"] == {"head.weight": ["float32", [4, 8]], "head.bias": ["float32", [4]]}
    assert state["rows"]["float32"].shape == (len(state["clients"]), HEAD)
    assert tiny_cli.run("fit", "--ckpt_path", str(tmp_path / "new" / "last.ckpt")) == 0
    tiny_cli.assert_same(comparable(tmp_path / "new"), whole)


@pytest.mark.parametrize("limit", [0, None])
def test_checkpoints_of_other_writers_hold_everything_too(limit: int | None, tmp_path: Path) -> None:
    """Checkpoints written or read by Lightning's own plugin hold the same content."""

    def client_of(data: Any) -> Any:
        return tiny_client(data, norm_net, methods={"own": PersonalLayers(["*"])})

    path, options = tmp_path / "after.ckpt", {"client_state_memory_mb": limit}
    schedule = {"clients_per_round": 2}
    data = tiny_data(schedule=schedule)
    whole = fit(client_of(data), data, options, callbacks=[SaveAfter(3, path)])
    data = tiny_data(schedule=schedule)
    resumed = fit(client_of(data), data, options, ckpt_path=path)
    tiny_cli.assert_same(kept_by(resumed), kept_by(whole))
    ways = (StreamedCheckpoints(), TorchCheckpointIO())
    found, expected = (way.load_checkpoint(path, weights_only=True) for way in ways)
    assert vars(found["state_dict"]) == vars(expected["state_dict"])  # which holds the modules' versions
    tiny_cli.assert_same(found, expected)
    StreamedCheckpoints().save_checkpoint(expected, tmp_path / "new" / "again.ckpt")
    again = torch.load(tmp_path / "new" / "again.ckpt", weights_only=True)
    assert again.pop("ends_with_digest")
    tiny_cli.assert_same(again, expected)


def test_what_a_run_goes_on_with_does_not_hang_on_the_checkpoint_file(tmp_path: Path) -> None:
    """Overwriting a checkpoint in place does not change what was loaded from it."""
    content = {"federation": {"round": 3, "methods": {"m": [torch.ones(3)]}}, "state_dict": {"w": torch.ones(2)}}
    torch.save(content, tmp_path / "a")
    loaded = StreamedCheckpoints().load_checkpoint(tmp_path / "a", weights_only=True)
    with (tmp_path / "a").open("r+b") as file:
        file.write(bytes(os.path.getsize(tmp_path / "a")))
    assert loaded["state_dict"]["w"].tolist() == [1, 1]
    assert loaded["federation"]["methods"]["m"][0].tolist() == [1, 1, 1]


def test_a_plugin_of_the_users_own_stays(tmp_path: Path) -> None:
    class Own(TorchCheckpointIO):
        saved = 0

        def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
            Own.saved += 1
            super().save_checkpoint(*arguments, **options)

    data = tiny_data()
    callbacks = [RunRecord(str(tmp_path)), RoundCheckpoint()]
    fit(tiny_client(data), data, callbacks=callbacks, enable_checkpointing=True, plugins=[Own()])
    assert Own.saved > 0


@pytest.mark.parametrize("value", [-1, float("nan")])
def test_a_negative_limit_is_refused(value: float) -> None:
    data = tiny_data()
    with pytest.raises(ConfigError, match=r"federated\.client_state_memory_mb = .*at least 0, or null"):
        fit(tiny_client(data), data, {"client_state_memory_mb": value})


# Several processes.


def rounds_of_one(limit: int | None) -> tuple[dict[str, Any], list[bool]]:
    """Scatter values to this process's clients in four rounds. Returns the state, and whether each topic is on disk."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=size)
    states = ClientStates(limit)
    for number, shares in enumerate([([4, 9], [1]), ([], [4, 2]), ([1], [9]), ([], [])]):
        own = shares[rank]
        if own:
            ids = torch.tensor(own)
            states.scatter("model", own, {"w": ids.float().view(-1, 1) + 100 * number, "n": ids})
            states.scatter(f"of process {rank}", own, {"x": ids.double()})
        states.synchronise()
    return states.state_dict(), [states.on_disk(topic) for topic in sorted(states.state_dict())]


def test_every_process_knows_what_all_clients_keep() -> None:
    crew = Crew(2)
    try:
        for limit in (None, 0, 40):
            for state, on_disk in crew.run(rounds_of_one, limit):
                assert any(on_disk) == (limit is not None)
                assert all(on_disk) == (limit == 0)
                states = ClientStates()
                states.load_state_dict(state)
                found = {c: (states.get("model", c) or {})["w"].item() for c in states.holders("model")}
                assert found == {1: 201, 2: 102, 4: 104, 9: 209}
                assert states.holders("of process 0") == [1, 4, 9]
                assert states.holders("of process 1") == [1, 2, 4, 9]
    finally:
        crew.close()


# Memory.

BUSY = """
import sys, torch
from pathlib import Path
from cfl.federation.client_states import ClientStates
from cfl.callbacks.streamed_checkpoints import StreamedCheckpoints

def megabytes(kind):
    return int(next(line for line in open("/proc/self/status") if line.startswith(kind)).split()[1]) / 1024

folder, clients, width = Path(sys.argv[1]), int(sys.argv[2]), 50
default = {"w": torch.zeros(64, 375), "b": torch.zeros(999), "n": torch.tensor(0)}
trained = {name: torch.ones(width, *tensor.shape, dtype=tensor.dtype) for name, tensor in default.items()}
states = ClientStates(int(sys.argv[3]), folder)
states.scatter("warm", [0], {"x": torch.zeros(1, 1)})
before, own = megabytes("VmRSS"), megabytes("RssAnon")
for _ in range(2):
    for first in range(0, clients, width):
        cohort = list(range(first, min(first + width, clients)))
        states.gather("model", cohort, default)
        states.scatter("model", cohort, {name: tensor[: len(cohort)] for name, tensor in trained.items()})
trained_with = megabytes("VmHWM") - before
StreamedCheckpoints().save_checkpoint({"federation": {"clients": states.state_dict()}}, folder / "c")
saved_with = megabytes("RssAnon") - own
loaded = StreamedCheckpoints().load_checkpoint(folder / "c", weights_only=True)
states = ClientStates(int(sys.argv[3]), folder)
states.load_state_dict(loaded["federation"]["clients"])
assert states.bytes() > clients * 99_000 and len(states.holders("model")) == clients
print(trained_with, saved_with, megabytes("RssAnon") - own)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for memory")
def test_memory_stays_near_the_limit_however_many_clients_keep_something(tmp_path: Path) -> None:
    """Memory stays near a limit of 10 MB, although 2000 clients keep 100 kB each, 200 MB in all.

    The bound of 40 MB is the limit, four cohorts of 5 MB, and 10 MB that the allocator may keep.
    """
    command = [sys.executable, "-c", BUSY, str(tmp_path), "2000", str(10**7)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    training, saving, loading = map(float, done.stdout.split())
    assert training < 40
    assert saving < 40
    assert loading < 40
    assert os.path.getsize(tmp_path / "c") > 200e6
