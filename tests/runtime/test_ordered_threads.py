"""Jobs on threads: results are in the jobs' order, and at most one job more than there are threads is taken."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from cfl.runtime.ordered_threads import in_order


@pytest.fixture(autouse=True)
def three_math_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_jobs_order_and_no_tool_is_used_twice_at_once() -> None:
    busy: set[str] = set()
    seen = set()

    def compute(tool: str, job: int) -> int:
        assert tool not in busy
        busy.add(tool)
        seen.add((tool, threading.get_ident()))
        assert torch.get_num_threads() == 1
        time.sleep(0.02 if job % 3 == 0 else 0.0)
        busy.remove(tool)
        return job * job

    assert list(in_order(compute, range(20), ["a", "b", "c"])) == [job * job for job in range(20)]
    assert {tool for tool, _ in seen} == {"a", "b", "c"}
    assert threading.get_ident() not in {thread for _, thread in seen}
    assert torch.get_num_threads() == 3


def test_one_tool_works_in_the_callers_thread_with_its_math_threads() -> None:
    def compute(tool: str, job: int) -> tuple[str, int, int, int]:
        return tool, job, threading.get_ident(), torch.get_num_threads()

    here = threading.get_ident()
    assert list(in_order(compute, [1, 2], ["a"])) == [("a", 1, here, 3), ("a", 2, here, 3)]


def test_jobs_are_taken_when_they_can_be_done_and_in_the_callers_thread() -> None:
    """Jobs are taken in the caller's thread, at most one more than there are tools.

    The additional one is waiting, so that no thread is idle while the caller uses a result.
    """
    taken, used = [], 0

    def jobs() -> Iterator[int]:
        for job in range(12):
            taken.append(threading.get_ident())
            yield job

    for _ in in_order(lambda tool, job: job, jobs(), ["a", "b"]):
        assert len(taken) <= used + 3
        used += 1
    assert used == 12
    assert set(taken) == {threading.get_ident()}


def test_both_threads_compute_at_the_same_time() -> None:
    together = threading.Barrier(2, timeout=20)

    def compute(tool: str, job: int) -> int:
        together.wait()
        return job

    assert list(in_order(compute, range(4), ["a", "b"])) == [0, 1, 2, 3]


@pytest.mark.parametrize("tools", [["a"], ["a", "b", "c"]])
def test_an_error_is_raised_in_its_turn_and_ends_the_rest(tools: list[str]) -> None:
    done: list[int] = []

    def compute(tool: str, job: int) -> int:
        if job == 2:
            raise KeyError(job)
        done.append(job)
        return job

    results = in_order(compute, range(100), tools)
    found = [next(results), next(results)]
    with pytest.raises(KeyError):
        next(results)
    assert found == [0, 1]
    assert max(done) <= 2 + len(tools) + 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("in-order")]
