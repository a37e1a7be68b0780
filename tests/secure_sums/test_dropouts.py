"""The clients that attend each stage of a sum, and the sums that can be recovered."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pytest

from cfl.runtime.errors import SumRefused
from cfl.secure_sums.dropouts import STAGES, Attendance, check_recoverable
from cfl.secure_sums.graph import neighbours_of

CLIENTS = range(12)


@pytest.mark.parametrize("stage", STAGES)
def test_who_drops_out_attends_all_stages_before(stage: str) -> None:
    came = [c for c in CLIENTS if c != 7 and (c not in (1, 2) or STAGES.index(stage) > 2)]
    found = Attendance.of(CLIENTS, (1, 2), stage, came)
    for number, name in enumerate(STAGES):
        there = set(CLIENTS)
        there -= {1, 2} if number >= STAGES.index(stage) else set()
        there -= {7} if number >= 2 else set()  # its message is missing for another reason
        assert getattr(found, name) == there


def connected(found: Attendance, near: Mapping[int, Collection[int]]) -> bool:
    """Return whether masks connect all clients whose messages came, by powers of the matrix of neighbours."""
    came = sorted(found.message)
    masks = np.array([[one == other or other in near[one] for other in came] for one in came], dtype=float)
    return bool((np.linalg.matrix_power(masks, len(came)) > 0).all())


@pytest.mark.parametrize("degree", [None, 2, 4, 8])
def test_a_sum_is_refused_where_a_needed_secret_has_too_few_holders_left(degree: int | None) -> None:
    """A sum is refused exactly if the definition says so, for random dropouts at every stage.

    The definition: of each client whose masks are in the sum, more than half of its neighbours and itself are left, and
    masks connect all messages.
    """
    generator, refused = np.random.default_rng(0), 0
    for _ in range(300):
        gone = generator.permutation(12)[: generator.integers(0, 8)].tolist()
        stage = STAGES[generator.integers(0, 5)]
        came = [c for c in CLIENTS if c not in gone or STAGES.index(stage) > 2]
        found = Attendance.of(CLIENTS, gone, stage, came)
        near = neighbours_of(sorted(found.keys), degree, generator)
        masked = [c for c in found.shares if c in came or set(near[c]) & set(came)]
        left = {c: [h for h in (*near[c], c) if h in found.unmasking] for c in masked}
        good = len(came) > 1 and all(2 * len(left[c]) > len(near[c]) + 1 for c in masked) and connected(found, near)
        if good:
            check_recoverable(found, near, 0.5, "a sum")
            continue
        refused += 1
        with pytest.raises(SumRefused, match="a sum: "):
            check_recoverable(found, near, 0.5, "a sum")
    assert 30 < refused < 270


def test_a_sum_of_groups_that_no_mask_connects_is_refused() -> None:
    """Without clients 0 and 3 of a ring of six, the server could add up 1 and 2 apart from 4 and 5. This is refused."""
    ring = {client: [(client - 1) % 6, (client + 1) % 6] for client in range(6)}
    check_recoverable(Attendance.of(range(6), (3,), "message", [0, 1, 2, 4, 5]), ring, 0.5, "a sum")
    gone = Attendance.of(range(6), (0, 3), "message", [1, 2, 4, 5])
    with pytest.raises(SumRefused, match="a sum: no mask connects 2 of the 4 clients"):
        check_recoverable(gone, ring, 0.1, "a sum")
