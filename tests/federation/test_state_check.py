"""A checkpoint's state with values that no run has is refused before anything is restored from it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_cli
from support.tiny import fit, tiny_client, tiny_data
from torchmetrics.classification import MulticlassF1Score

from cfl.federation.federation import Federation
from cfl.methods import ER, DPFedAvg
from cfl.runtime.checkpoint_file import read_checkpoint
from cfl.runtime.errors import ConfigError
from cfl.testing.comparing import difference
from cfl.testing.tiny_runs import everything

State = dict[str, Any]
ROUNDS, CLIENTS = 4, 3
PERSONAL = (
    "--methods.own",
    "PersonalLayers",
    "--methods.own.layers",
    "['head.*']",
    "--federated.server_momentum",
    "0.5",
)


def trained(methods: State, sampling: str = "fixed") -> Federation:
    schedule = {"rounds_per_task": 2, "clients_per_round": 2, "sampling": sampling}
    data = tiny_data(num_clients=CLIENTS, schedule=schedule)
    assert (data.num_rounds, data.num_tasks) == (ROUNDS, 2)
    return fit(tiny_client(data, methods=methods), data, {"measures": {"f1": MulticlassF1Score(data.num_outputs)}})


@pytest.fixture(scope="module")
def remembering() -> Federation:
    federation = trained({"er": ER(size=4)})
    federation.channel.skipped = [(1, 0, 2)]
    federation.channel.skipped_messages = [(1, "er", 2)]
    return federation


@pytest.fixture(scope="module")
def private() -> Federation:
    return trained({"dp": DPFedAvg(noise_multiplier=1.0)}, "poisson")


def put(*path: Any, value: Any) -> Callable[[State], None]:
    """Set the entry at a path to a value."""

    def forge(state: State) -> None:
        *before, last = path
        inner: Any = state
        for key in before:
            inner = inner[key]
        inner[last] = value

    return forge


def memory(field: int, value: int) -> Callable[[State], None]:
    return put("clients", "er memory", "rows", "int64", (0, field), value=value)


def test_a_run_of_any_length_is_restored() -> None:
    """Its curve has as many entries as it has rounds, so that none may be taken for granted."""
    federation = trained({})
    state = federation.state_dict()
    for rounds in range(ROUNDS + 1):
        federation.load_state_dict({**state, "round": rounds, "curve": state["curve"][:rounds]})
        assert federation.round == rounds


def refused(federation: Federation, forge: Callable[[State], None], said: str) -> None:
    state = copy.deepcopy(federation.state_dict())
    federation.load_state_dict(copy.deepcopy(state))  # which is fine as it was
    before = copy.deepcopy(everything(federation))
    forge(state)
    with pytest.raises(ValueError, match=rf"^federation\.{said}"):
        federation.load_state_dict(state)
    assert difference(everything(federation), before, 0.0) is None


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (put("round", value=-1), "round = -1 cannot be; valid: an integer from 0 to 4, the rounds of the run"),
        (put("round", value=5), "round = 5 cannot be"),
        (put("round", value=1.0), r"round = 1\.0 cannot be"),
        (put("round", value=3), r"curve = \[.*\] cannot be; valid: a list of 3 entries"),
        (put("curve", 0, value=math.nan), "curve = .* cannot be; valid: .*None or a number"),
        (put("seconds", value=-0.5), r"seconds = -0\.5 cannot be; valid: a number of at least 0"),
        (put("seconds", value=math.inf), "seconds = inf cannot be"),
        (put("stopped", value=1), "stopped = 1 cannot be; valid: True or False"),
        (put("channel", "uplink_bytes", "update", value=-1), r"channel\.uplink_bytes\.update = -1 cannot be"),
        (put("channel", "downlink_bytes", "model", value=0.5), r"channel\.downlink_bytes\.model = 0\.5 cannot be"),
        (put("channel", "skipped", 0, value=[4, 0, 2]), r"channel\.skipped = \[4, 0, 2\] .*0 to 3, 0 to 1 and 0 to 2"),
        (put("channel", "skipped", 0, value=[1, 2, 2]), r"channel\.skipped = \[1, 2, 2\] cannot be"),
        (put("channel", "skipped", 0, value=[1, 0, 3]), r"channel\.skipped = \[1, 0, 3\] cannot be"),
        (put("channel", "skipped_messages", 0, value=[1, "er", -1]), r"channel\.skipped_messages = \[1, 'er', -1\]"),
        (
            put("clients", "er memory", "clients", 0, value=3),
            r"clients\.er memory\.clients = .*different ones of 0 to 2",
        ),
        (
            put("clients", "er memory", "clients", value=torch.tensor([1, 1, 2])),
            r"clients\.er memory\.clients = \[1, 1, 2",
        ),
        (memory(0, 2), r"clients\.er memory\.rows, task = \[2\] cannot be; valid: 0 to 1, or -1 for none"),
        (memory(0, -2), r"clients\.er memory\.rows, task = \[-2\] cannot be"),
        (
            put("accuracy", "counts", (0, 1), value=-1),
            r"accuracy\.counts = -1 cannot be; valid: numbers of test samples",
        ),
        (put("accuracy", "sums", (0, 1), value=10**6), r"accuracy\.sums and counts = \[1000000, \d+\] cannot be"),
        (put("accuracy", "sums", (0, 1), value=-1), r"accuracy\.sums and counts = \[-1, \d+\] cannot be"),
        (put("measures.f1", 1, "counts", (0, 1), value=-1), r"measures\.f1\.counts = -1 cannot be"),
    ],
)
def test_it_is_refused(remembering: Federation, forge: Callable[[State], None], said: str) -> None:
    refused(remembering, forge, said)


def test_a_ledger_with_noise_that_cannot_be_is_refused(private: Federation) -> None:
    for path, value, said in (
        ((0, 5), 7.5, r"rate = 7\.5 cannot be; valid: None or above 0 and at most 1"),
        ((0, 3, 4), 0, "parts = 0: an integer of at least 1"),
        ((0, 3, 1), math.nan, "sensitivity = nan: a number of at least 0"),
        ((0, 3, 2), "me", "added_by = 'me': one of server, clients"),
    ):
        refused(
            private, put("channel", "ledger", "releases", *path, value=value), rf"channel\.ledger\.releases, {said}"
        )


@pytest.mark.parametrize(
    ("path", "value"),
    [(("clients", 0), (0, 3)), (("releases", 0, 0), 4), (("releases", 0, 1), -1), (("releases", 0, 4), 9)],
)
def test_a_ledger_of_other_clients_rounds_or_tasks_is_refused(private: Federation, path: Any, value: Any) -> None:
    refused(
        private, put("channel", "ledger", *path, value=value), rf"channel\.ledger\.{path[0]} = .* cannot be; valid:"
    )


def test_the_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_cli.fit(tmp_path / "run", "--schedule.rounds_per_task", "1", *PERSONAL) == 0
    whole, path = tiny_cli.checkpoint(tmp_path / "run"), tmp_path / "run" / "forged.ckpt"
    del whole["ends_with_digest"]

    def forged(forge: Callable[[State], None]) -> str:
        content = copy.deepcopy(whole)
        forge(content["federation"])
        torch.save(content, path)
        return str(path)

    for command in ("validate", "fit"):
        capsys.readouterr()
        assert tiny_cli.run(command, "--ckpt_path", forged(put("round", value=-1))) == 2
        error = capsys.readouterr().err
        assert f"ckpt_path = '{path}' cannot work" in error
        assert "federation.round = -1 cannot be; valid: an integer from 0 to 2" in error
    for place, named in {
        ("server", "velocity", "layers.0.bias"): "the server's momentum of layers.0.bias",
        ("initial", "head.bias"): "the initial head.bias",
    }.items():
        forged(put(*place, 0, value=math.nan))
        with pytest.raises(ConfigError, match=rf"{path}.* with finite weights; {named} holds NaN"):
            read_checkpoint(path)
