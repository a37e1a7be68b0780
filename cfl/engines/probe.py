"""A short trial that finds the fastest way to compute this network's local steps on this machine."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cfl.engines.choice import EngineChoice
from cfl.runtime.errors import ConfigError, EngineCannot

_log = logging.getLogger(__name__)

TRAINER_SECONDS = 6e-4
"""Seconds that Lightning's loop and the callbacks take per call of local steps, whatever the steps are; measured, see
docs/speed-ledger.md. They decide between widths whose arithmetic takes equally long."""

SHARE_OF_RUN = 0.02
"""A probe may take this share of the run's estimated time, but at least :data:`LEAST_SECONDS`."""

LEAST_SECONDS = 0.25
MOST_SECONDS = 5.0
MOST_OF_RUN = 0.25
"""A probe never takes more than this share of a short run, because it could not save that much time."""

BUILDING_SHARE = 0.05
MOST_BUILDING = 2.0
"""Building choices, recordings included, is not counted up to this share of the run and this number of seconds.
Otherwise only one choice could be tried for a network whose steps are recorded."""

WARM_UP = 2
"""Steps that count as building: the first makes a recording, whose first replay is still slow."""

AGAIN = 3
"""Number of choices that are tried again. At most one more than this are built at any time."""

Trial = Callable[[int], float]
"""Takes a number of steps and returns seconds per step; the first call includes building everything."""


@dataclass(frozen=True)
class Measured:
    """What a probe found about one choice.

    Attributes:
        choice: the choice that was tried.
        seconds_per_client_step: best of its trials, the Trainer's share included.
    """

    choice: EngineChoice
    seconds_per_client_step: float


def probe(
    choices: Sequence[EngineChoice],
    trial_of: Callable[[EngineChoice], Trial],
    client_steps: int,
    clock: Callable[[], float] = time.perf_counter,
    steps_in_one_go: int = 1,
) -> list[Measured]:
    """Try choices until the time set aside is used up, the best ones again. A choice that fails is left out.

    Args:
        choices: the most promising first.
        trial_of: builds the trial of a choice.
        client_steps: local steps of all clients in the whole run.
        clock: returns the time in seconds.
        steps_in_one_go: local steps of a cohort that Lightning runs at a time.

    Returns:
        The choices that were tried, the fastest first.

    Raises:
        Exception: the first failure, if no choice works; a ConfigError at once, unless it is an EngineCannot.
    """
    start, building = clock(), 0.0
    trials: dict[EngineChoice, Trial] = {}
    best: dict[EngineChoice, float] = {}
    first_failure: Exception | None = None

    def measure(choice: EngineChoice, steps: int) -> None:
        seconds = trials[choice](steps)
        cost = (seconds + TRAINER_SECONDS / steps_in_one_go) / choice.width
        best[choice] = min(best.get(choice, float("inf")), cost)

    def budget() -> float:
        return min(max(SHARE_OF_RUN * run(), LEAST_SECONDS), MOST_SECONDS, MOST_OF_RUN * run())

    def run() -> float:
        return min(best.values()) * client_steps

    def spent() -> float:
        return clock() - start - min(building, BUILDING_SHARE * run(), MOST_BUILDING)

    for choice in choices:
        if best and spent() > 0.6 * budget():
            break
        began = clock()
        try:
            trials[choice] = trial_of(choice)
            trials[choice](WARM_UP)  # memory, threads, caches
            building += clock() - began
            measure(choice, 2)
        except Exception as error:  # not every network works with every engine
            if isinstance(error, ConfigError) and not isinstance(error, EngineCannot):
                raise
            trials.pop(choice, None)
            _log.warning("%s is no choice for this network: %s: %s", choice, type(error).__name__, error)
            _let_go(error)
            first_failure = first_failure or error
            continue
        for beaten in sorted(best, key=best.__getitem__)[AGAIN:]:
            trials.pop(beaten, None)  # its trial holds the models of a cohort
    if first_failure and not best:
        raise first_failure
    for _ in range(3):
        for choice in sorted(best, key=best.__getitem__)[:AGAIN]:
            if spent() < budget():
                measure(choice, 3)
    return [Measured(choice, best[choice]) for choice in sorted(best, key=best.__getitem__)]


def _let_go(error: BaseException | None) -> None:
    """Drop local variables in the frames of a failure and its causes, such as a cohort's models; keep the traceback."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
