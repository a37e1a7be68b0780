"""Tensors that do not fit into memory are refused before they are allocated, with needed and free size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny import mlp

from cfl.engines import EngineOptions
from cfl.engines.open_choices import candidates
from cfl.runtime import memory
from cfl.runtime.errors import ConfigError
from cfl.runtime.memory import WithinMemory, free_memory, lack_of_memory, require_memory


@pytest.fixture
def thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make 1 GB free, and check tensors of every size."""
    monkeypatch.setattr(memory, "free_memory", lambda: 10**9)
    monkeypatch.setattr(memory, "_SMALL", 0)


def test_some_memory_is_free() -> None:
    assert 2**20 < free_memory() < 2**50


@pytest.mark.usefixtures("thousand")
def test_what_is_needed_is_said() -> None:
    require_memory("a.b", 3, 10**9, "less")
    with pytest.raises(ConfigError) as caught:
        require_memory("a.b", 3, 2.5e9, "less")
    assert str(caught.value) == "a.b = 3 cannot work; valid: less: 2.5 GB would be needed, and 1.0 GB are free"


@pytest.mark.usefixtures("thousand")
def test_tensors_are_refused_together() -> None:
    with WithinMemory("a", None, "less"):
        torch.empty(10**8)
        torch.zeros((10**7, 5), dtype=torch.float64)
        with pytest.raises(ConfigError, match=r"a = 'a tensor of 10000 x 20000 numbers' .* 1\.6 GB would be needed"):
            torch.empty((10_000, 20_000))
    torch.empty(10**8)


@pytest.mark.usefixtures("thousand")
def test_what_will_be_there_several_times() -> None:
    with WithinMemory("a", 7, "less", copies=3):
        torch.empty(8 * 10**7)
        with pytest.raises(ConfigError, match=r"1\.2 GB would be needed"):
            torch.empty(2 * 10**7)


@pytest.mark.usefixtures("thousand")
def test_sizes_beyond_any_number_and_none_at_all() -> None:
    with WithinMemory("a", 7, "less"):
        assert torch.empty(()).shape == ()
        assert torch.full((2,), 3.0).tolist() == [3, 3]
        with pytest.raises(ConfigError, match=r"a = 7 .* more memory than there is anywhere would be needed"):
            torch.empty(2**32, 2**32)


def test_drawing_is_as_without() -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    after = torch.rand(3)
    with WithinMemory("a", None, "less"):
        assert torch.rand(3, generator=torch.Generator().manual_seed(1)).equal(expected)
        torch.manual_seed(2)
        assert torch.rand(3).equal(after)


@pytest.mark.usefixtures("thousand")
def test_sizes_that_are_given_by_name() -> None:
    with WithinMemory("a.b", None, "less"), pytest.raises(ConfigError, match="a tensor of 300 x 1000000 numbers"):
        torch.randn(size=(300, 1_000_000))


def test_memory_of_files_that_were_read_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that caches files counts as free: 75 of 100 MB if 90 are used, 65 of them by cached files.

    Without memory.stat, only the 10 MB that the container does not use are free.
    """
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    for name, text in (
        ("max", "100000000"),
        ("current", "90000000"),
        ("stat", "anon 20000000\nfile 70000000\nactive_file 50000000\ninactive_file 15000000\nshmem 5000000\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_memory() == 75_000_000
    (tmp_path / "memory.stat").unlink()
    assert free_memory() == 10_000_000


def test_memory_that_could_not_be_had() -> None:
    """An error of lacking memory is explained in one line, also if it is wrapped in another error."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    for error in (caught.value, RuntimeError(f"closing failed: {caught.value}"), MemoryError(), MemoryError("Unable")):
        said = str(lack_of_memory(error))
        assert said.startswith("there is not enough memory: a smaller network, ")
        assert "\n" not in said
    assert lack_of_memory(RuntimeError("another")) is None


def test_clients_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    network = mlp((1, 4, 4), 4)
    size = sum(parameter.nbytes for parameter in network.parameters())
    monkeypatch.setattr(memory, "free_memory", lambda: 4 * 10 * size)
    vmap = EngineOptions(kind="vmap")
    assert candidates(vmap, 10, 100, network, (1, 4, 4), "32-true", 8)[0].width == 10
    assert candidates(vmap, 11, 10, network, (1, 4, 4), "32-true", 8)[0].width == 10
    with pytest.raises(ConfigError, match=r"schedule\.cohort_width = 11 .*fewer clients side by side, or auto"):
        candidates(vmap, 11, 100, network, (1, 4, 4), "32-true", 8)
