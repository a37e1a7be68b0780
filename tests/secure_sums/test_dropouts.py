"""Who attends which stage of a sum, and which sums can be recovered."""

from __future__ import annotations

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
        there -= {7} if number >= 2 else set()  # its message did not come, for another reason
        assert getattr(found, name) == there


@pytest.mark.parametrize("degree", [None, 2, 4, 8])
def test_a_sum_is_refused_where_a_needed_secret_has_too_few_holders_left(degree: int | None) -> None:
    """Against the definition, for random dropouts at every stage: of each client whose masks are in the sum, more than
    half of its neighbours and itself are left."""
    generator, refused = np.random.default_rng(0), 0
    for _ in range(300):
        gone = generator.permutation(12)[: generator.integers(0, 8)].tolist()
        stage = STAGES[generator.integers(0, 5)]
        came = [c for c in CLIENTS if c not in gone or STAGES.index(stage) > 2]
        found = Attendance.of(CLIENTS, gone, stage, came)
        near = neighbours_of(sorted(found.keys), degree, generator)
        masked = [c for c in found.shares if c in came or set(near[c]) & set(came)]
        left = {c: [h for h in (*near[c], c) if h in found.unmasking] for c in masked}
        good = len(came) > 1 and all(2 * len(left[c]) > len(near[c]) + 1 for c in masked)
        if good:
            check_recoverable(found, near, 0.5, "a sum")
            continue
        refused += 1
        with pytest.raises(SumRefused, match="a sum: "):
            check_recoverable(found, near, 0.5, "a sum")
    assert 30 < refused < 270
