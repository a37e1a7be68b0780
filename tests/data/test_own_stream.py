"""User-written stream, partition and participation: the code and command printed in the documentation page work."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support import tiny_cli
from support.tiny import tiny_data

from cfl.data.participation import Participation
from cfl.data.partitions import Partition
from cfl.data.streams import Stream
from cfl.testing.tiny_data import source

PAGE = (Path(__file__).parents[2] / "docs" / "writing-a-stream.md").read_text()


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_data.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_data", raising=False)


def test_the_printed_command_runs_them(tmp_path: Path) -> None:
    (printed,) = re.findall(r"PYTHONPATH=\. cfl (fit .*?)\n\n", PAGE, re.DOTALL)
    command = shlex.split(printed.replace("\\\n", " "))
    short = ("--schedule.rounds_per_task", "1", "--data.stream.num_tasks", "2")
    assert tiny_cli.run(*command, *short, "--run.dir", str(tmp_path / "run"), "--trainer.accelerator", "cpu") == 0
    summary = tiny_cli.summary(tmp_path / "run")
    assert (summary["benchmark"], summary["partition"]) == ("darker-digits", "bypowers")
    assert (summary["participation"], summary["tasks"], summary["clients"]) == ("shifts", 2, 8)


def test_they_do_what_they_say() -> None:
    import my_data

    stream, partition, participation = my_data.Darker(source(), 3), my_data.ByPowers(0.5), my_data.Shifts()
    assert isinstance(stream, Stream)
    assert isinstance(partition, Partition)
    assert isinstance(participation, Participation)
    data = tiny_data(stream, num_clients=4, partition=partition, participation=participation)
    data.setup("fit")
    assert data.scenario == "domain"
    first, third = data.tasks[0].train.images, data.tasks[2].train.images
    assert torch.equal(third, (first.double() / 3).byte())
    assert all(len(clients) == 2 for clients in data.members)
    shares = partition.split(np.arange(300) % 4, 4, np.random.default_rng(0))
    assert [len(share) for share in shares] == [160, 80, 40, 20]
    assert sorted(np.concatenate(shares).tolist()) == list(range(300))
