"""Tensors that clients keep between rounds: in memory, in files, and moved from memory to files."""

from __future__ import annotations

import io
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cfl.federation import row_store
from cfl.federation.client_states import ClientStates
from cfl.runtime import distributed
from cfl.runtime.errors import DamagedFile

DEFAULT = {"w": torch.zeros(2, 3), "count": torch.tensor(7)}
ROW = 2 * 3 * 4 + 8
"""Bytes of one client's tensors."""


@pytest.fixture(params=[None, 0, 2 * ROW], ids=["memory", "disk", "moved"])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """A limit of memory: everything in memory, everything on disk, or memory for two clients. Blocks are small."""
    monkeypatch.setattr(row_store, "_BLOCK_BYTES", 50)
    return request.param


def stacked(clients: list[int]) -> dict[str, Tensor]:
    """Values by which clients can be told apart: w is filled with the client's id, count is 100 times the id."""
    ids = torch.tensor(clients)
    return {"w": ids.float().view(-1, 1, 1).expand(-1, 2, 3).clone(), "count": 100 * ids}


def filled(clients: list[int], limit: int | None) -> ClientStates:
    states = ClientStates(limit)
    states.scatter("model", clients, stacked(clients))
    return states


def test_what_was_scattered_is_gathered_in_any_order_and_company(limit: int | None) -> None:
    states = filled([5, 2, 9], limit)
    for asked in ([5, 2, 9], [9, 5], [2], []):
        found, expected = states.gather("model", asked, DEFAULT), stacked(asked)
        for name, value in expected.items():
            assert torch.equal(found[name], value.to(DEFAULT[name].dtype))
            assert found[name].dtype == DEFAULT[name].dtype


def test_a_client_that_has_nothing_gets_the_default(limit: int | None) -> None:
    found = filled([5], limit).gather("model", [3, 5, 1000], DEFAULT)
    assert found["count"].tolist() == [7, 500, 7]
    assert torch.equal(found["w"][0], DEFAULT["w"])
    assert torch.equal(found["w"][1], stacked([5])["w"][0])
    assert ClientStates(limit).gather("model", [3], DEFAULT)["count"].tolist() == [7]


def test_as_many_rows_as_clients() -> None:
    """Rows of a whole cohort, for example, when only some of its clients have finished."""
    with pytest.raises(ValueError, match=r"'model': .* has shape \[3.*\], not \[1, \.\.\.\], a row for each client"):
        ClientStates().scatter("model", [5], stacked([5, 2, 7]))


def test_gathered_and_scattered_memory_is_not_shared(limit: int | None) -> None:
    """Kept tensors share no memory with what was written or read, because cohorts reuse their memory."""
    states, given = ClientStates(limit), stacked([5, 2])
    states.scatter("model", [5, 2], given)
    given["w"].fill_(-1)
    for asked in ([5, 2, 3], [5], [3]):
        states.gather("model", asked, DEFAULT)["w"].fill_(-2)
    for tensor in (states.get("model", 5) or {}).values():
        tensor.fill_(-3)
    assert torch.equal(states.gather("model", [5, 2], DEFAULT)["w"], stacked([5, 2])["w"])
    assert not DEFAULT["w"].any()


def test_scattering_again_replaces_those_clients_only(limit: int | None) -> None:
    states = filled([5, 2], limit)
    states.scatter("model", [2], stacked([8]))
    assert states.gather("model", [5, 2], DEFAULT)["count"].tolist() == [500, 800]


@pytest.mark.parametrize("kept", [None, [False, True]])
def test_tensors_go_by_name_whatever_their_order(limit: int | None, kept: list[bool] | None) -> None:
    """Tensors of one dtype lie one behind the other in a client's row, in the order in which they first came."""
    states, default = ClientStates(limit), {"mean": torch.zeros(2), "last": torch.zeros(1, 2), "n": torch.tensor(0)}
    given = [{n: torch.rand(2, *t.shape).to(t.dtype) + place for place, (n, t) in enumerate(default.items())}]
    given.append({name: given[0][name] + 5 for name in reversed(default)})
    states.scatter("mine", [0, 3], given[0])
    states.scatter("mine", [0, 3], given[1], kept)
    for row, client in enumerate([0, 3]):
        expected = given[kept is None or kept[row]]
        for found in (
            states.get("mine", client) or {},
            {n: t[0] for n, t in states.gather("mine", [client], default).items()},
        ):
            assert all(torch.equal(found[name], expected[name][row]) for name in default)


def test_tensors_of_other_processes_go_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have stored the same tensors in another order."""
    here, there = ClientStates(), ClientStates()
    here.scatter("mine", [0], {"mean": torch.tensor([[1.0, 2.0]]), "last": torch.tensor([[3.0, 4.0]])})
    there.scatter("mine", [1], {"last": torch.tensor([[7.0, 8.0]]), "mean": torch.tensor([[5.0, 6.0]])})
    sent = there.state_dict()["mine"]
    monkeypatch.setattr(distributed, "count", lambda: 2)
    monkeypatch.setattr(distributed, "gather", lambda own: [own, ({"mine": [1]}, {"mine": sent["fields"]})])
    monkeypatch.setattr(distributed, "share_out", lambda own: {**own, ("mine", 1): sent["rows"]})
    monkeypatch.setattr(distributed, "rank", lambda: 0)
    here.synchronise()
    found = [{name: tensor.tolist() for name, tensor in (here.get("mine", client) or {}).items()} for client in (0, 1)]
    assert found == [{"mean": [1, 2], "last": [3, 4]}, {"mean": [5, 6], "last": [7, 8]}]


def test_what_is_no_tensor_is_refused() -> None:
    states: Any = ClientStates()
    with pytest.raises(
        TypeError, match=r"clients' 'mine': s is float, not a tensor \[2, \.\.\.\], a row for each client"
    ):
        states.scatter("mine", [0, 3], {"s": 1.0})
    with pytest.raises(TypeError, match=r"clients' 'mine': Tensor, not a dict of tensors \[2, \.\.\.\] by name"):
        states.scatter("mine", [0, 3], torch.ones(2))
    with pytest.raises(TypeError, match=r"clients' 'mine': the default of s is float, not a tensor"):
        states.gather("mine", [0, 3], {"s": 1.0})


def test_clients_left_out_stay_as_they_were(limit: int | None) -> None:
    states = filled([5, 2], limit)
    states.scatter("model", [5, 2, 3], stacked([6, 7, 8]), [False, True, False])
    assert states.holders("model") == [2, 5]
    assert states.gather("model", [5, 2, 3], DEFAULT)["count"].tolist() == [500, 700, 7]
    held = [states.any_holds("model", clients) for clients in ([2], [3, 5], [3], [3, 4, 1000], [])]
    assert held == [True, True, False, False, False]
    assert not states.any_holds("other", [2, 5])
    states.scatter("model", [4, 5], stacked([6, 7]), [False, False])
    assert states.holders("model") == [2, 5]


def test_topics_are_separate(limit: int | None) -> None:
    states = filled([5], limit)
    states.scatter("buffer", [5], stacked([1]))
    assert states.gather("model", [5], DEFAULT)["count"].tolist() == [500]
    assert states.gather("buffer", [5], DEFAULT)["count"].tolist() == [100]
    assert states.gather("other", [5], DEFAULT)["count"].tolist() == [7]


def test_one_clients_tensors(limit: int | None) -> None:
    states = filled([5, 2], limit)
    kept = states.get("model", 2)
    assert kept is not None
    assert torch.equal(kept["w"], torch.full((2, 3), 2.0))
    assert kept["count"].shape == ()
    assert states.get("model", 3) is None
    assert states.get("other", 2) is None
    assert states.holders("model") == [2, 5]
    assert states.holders("other") == []


def test_tensors_that_require_gradients_are_kept_as_plain_values(limit: int | None) -> None:
    states, weight = ClientStates(limit), torch.ones(1, 2, requires_grad=True)
    states.scatter("model", [0], {"w": weight * 3})
    kept = states.get("model", 0)
    assert kept is not None
    assert not kept["w"].requires_grad
    assert kept["w"].tolist() == [3.0, 3.0]


def test_bytes(limit: int | None) -> None:
    assert ClientStates(limit).bytes() == 0
    states = filled([5, 2, 9], limit)
    assert states.bytes() == 3 * ROW
    states.scatter("model", [2], stacked([2]))
    assert states.bytes() == 3 * ROW


@pytest.mark.parametrize("again", [None, 0, 2 * ROW])
def test_a_checkpoint_holds_every_client_and_topic(limit: int | None, again: int | None) -> None:
    """A checkpoint holds every client and topic, and can be loaded under any memory limit."""
    states = filled([5, 2], limit)
    states.scatter("model", [4], stacked([4]))
    states.scatter("buffer", [5], stacked([1]))
    file = io.BytesIO()
    torch.save(states.state_dict(), file)
    file.seek(0)
    restored = filled([7], again)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert restored.gather("model", [2, 5, 7, 4], DEFAULT)["count"].tolist() == [200, 500, 7, 400]
    assert restored.gather("buffer", [5, 2], DEFAULT)["count"].tolist() == [100, 7]
    restored.scatter("model", [2], stacked([8]))
    assert restored.gather("model", [2, 5, 4], DEFAULT)["count"].tolist() == [800, 500, 400]
    assert states.gather("model", [2], DEFAULT)["count"].tolist() == [200]


def test_what_is_held_in_memory_is_saved_in_the_order_of_clients() -> None:
    """States in memory are saved in the order of clients, so that equal states give equal files."""
    one, other = filled([5, 2, 9], None).state_dict(), filled([9, 5, 2], None).state_dict()
    assert one["model"]["clients"].tolist() == other["model"]["clients"].tolist() == [2, 5, 9]
    assert one["model"]["rows"]["int64"].tolist() == other["model"]["rows"]["int64"].tolist() == [[200], [500], [900]]


def test_a_restored_state_shares_no_memory_with_what_it_was_restored_from(limit: int | None) -> None:
    state = filled([5, 2], None).state_dict()
    restored = ClientStates(limit)
    restored.load_state_dict(state)
    state["model"]["rows"]["float32"].fill_(-1)
    assert restored.gather("model", [5, 2], DEFAULT)["w"].flatten(1).mean(1).tolist() == [5, 2]


# Many clients, topics and dtypes, compared with a dictionary of dictionaries.

MANY = {
    "float": torch.randn(3, 2),
    "half": torch.randn(5).bfloat16(),
    "double": torch.randn((), dtype=torch.float64),
    "count": torch.tensor(2**62 + 1),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "wave": torch.randn(2, dtype=torch.complex64),
    "empty": torch.zeros(0, 4),
}
MANY_ROW = sum(tensor.nbytes for tensor in MANY.values())


def drawn(k: int, seed: int) -> dict[str, Tensor]:
    """Random bytes as values of k clients, with infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in MANY.items():
        values = torch.randint(0, 256, (k, *tensor.shape, tensor.itemsize), generator=generator, dtype=torch.uint8)
        found[name] = (values > 127)[..., 0] if tensor.dtype == torch.bool else values.view(tensor.dtype)[..., 0]
    return found


def same(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality."""
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


@pytest.mark.parametrize("limit", [None, 0, 1, 20 * MANY_ROW, 45 * MANY_ROW])
@pytest.mark.parametrize("block", [1, 200, 1 << 24])
def test_any_sequence_of_rounds_is_that_of_a_plain_dictionary(
    limit: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_store, "_BLOCK_BYTES", block)
    rng, states, naive = np.random.default_rng(0), ClientStates(limit), {"a": {}, "b": {}}
    for step in range(40):
        topic = "a" if rng.random() < 0.7 else "b"
        clients = rng.choice(60, size=int(rng.integers(0, 9)), replace=False).tolist()
        values, keep = drawn(len(clients), step), (rng.random(len(clients)) < 0.8).tolist()
        states.scatter(topic, clients, values, keep)
        for row, client in enumerate(clients):
            if keep[row]:
                naive[topic][client] = {name: rows[row].clone() for name, rows in values.items()}
        if step % 13 == 12:
            restored = ClientStates(limit)
            restored.load_state_dict(states.state_dict())
            states = restored
        for kind, held in naive.items():
            asked = rng.choice(60, size=7, replace=False).tolist()
            found = states.gather(kind, asked, MANY)
            assert list(found) == list(MANY)
            for row, client in enumerate(asked):
                expected = held.get(client, MANY)
                assert all(same(found[name][row], expected[name]) for name in MANY)
            assert states.holders(kind) == sorted(held)
        assert states.bytes() == MANY_ROW * sum(map(len, naive.values()))
        in_memory = [kind for kind in naive if not states.on_disk(kind)]
        assert limit is None or MANY_ROW * sum(len(naive[kind]) for kind in in_memory) <= limit
        assert (len(in_memory) < 2) == (limit is not None and states.bytes() > limit)
        assert len(in_memory) > 0 or limit != 45 * MANY_ROW


def test_other_tensors_than_before_are_refused(limit: int | None) -> None:
    states = filled([5], limit)
    for others, complaint in (
        ({"w": torch.zeros(1, 2, 3)}, "'count' is torch.int64 .* here and absent there"),
        ({"w": torch.zeros(1, 3, 2), "count": torch.zeros(1).long()}, r"'w' is torch.float32 \[2, 3\] here"),
        ({"w": torch.zeros(1, 2, 3), "count": torch.zeros(1)}, r"'count' is torch.int64 \[\] here and torch.float32"),
    ):
        with pytest.raises(ValueError, match=f"keeps other tensors of 'model' than before: {complaint}"):
            states.scatter("model", [5], others)
    assert states.gather("model", [5], DEFAULT)["count"].tolist() == [500]


# Files.


def test_the_topic_that_exceeds_the_limit_goes_to_disk(limit: int | None) -> None:
    states = filled([1, 2], 4 * ROW)
    states.scatter("buffer", [1, 2], stacked([1, 2]))
    assert not states.on_disk("model")
    states.scatter("model", [1], stacked([1]))  # no new row
    assert not states.on_disk("model")
    states.scatter("buffer", [3], stacked([3]))
    assert states.on_disk("buffer")
    states.scatter("model", [3, 4], stacked([3, 4]))  # there is room again
    assert not states.on_disk("model")
    assert not states.on_disk("other")


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for open files")
def test_files_have_no_name_and_are_gone_with_the_states(tmp_path: Path) -> None:
    states = ClientStates(0, tmp_path)
    before = open_files(tmp_path)
    states.scatter("model", [5], stacked([5]))
    assert len(open_files(tmp_path)) == len(before) + 2  # one per dtype
    assert list(tmp_path.iterdir()) == []
    del states
    assert open_files(tmp_path) == before


def open_files(folder: Path) -> list[str]:
    """Files in ``folder`` that this process has open."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [name for link in links if (name := str(link.readlink())).startswith(str(folder))]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of this process's files within the context, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_an_error_and_nobody_is_said_to_have_more_than_he_has(tmp_path: Path) -> None:
    states = ClientStates(0, tmp_path)
    states.scatter("model", [5, 2], stacked([5, 2]))
    with largest_file(3 * 24), pytest.raises(OSError, match=r"large|space"):
        states.scatter("model", [7, 8], stacked([7, 8]))
    assert states.holders("model") == [2, 5]
    assert states.gather("model", [5, 8, 2], DEFAULT)["count"].tolist() == [500, 7, 200]
    states.scatter("model", [8, 7], stacked([8, 7]))
    assert states.gather("model", [5, 8, 2, 7], DEFAULT)["count"].tolist() == [500, 800, 200, 700]


def test_a_file_that_is_shorter_than_it_should_be_is_an_error(tmp_path: Path) -> None:
    """Reading beyond the end of a file is an error: another program may have truncated the file."""
    rows = row_store.FileRows(3, torch.float32, tmp_path)
    rows.write(np.arange(4), torch.ones(4, 3))
    rows._file.truncate(40)
    assert rows.read(np.array([2])).tolist() == [[1, 1, 1]]
    with pytest.raises(DamagedFile, match="it ends before row 3"):
        rows.read(np.array([1, 3]))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([], []), ([3], [(0, 1)]), ([3, 4, 5], [(0, 3)]), ([3, 5, 6, 2, 1], [(0, 1), (1, 3), (3, 4), (4, 5)])],
)
def test_neighbouring_rows_are_found(rows: list[int], expected: list[tuple[int, int]]) -> None:
    assert list(row_store.runs(np.array(rows, dtype=np.int64))) == expected
