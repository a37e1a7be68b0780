"""The engine of a run: the one that settings, checkpoint or an earlier trial name, or the fastest in a new trial."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from cfl.engines import remembered
from cfl.engines.against_autograd import SAMPLES
from cfl.engines.base import Engine, EngineOptions
from cfl.engines.choice import EngineChoice, build_engine, from_dict
from cfl.engines.objective import Objective
from cfl.engines.open_choices import candidates
from cfl.engines.probe import Measured, probe
from cfl.engines.trials import Trials
from cfl.federation.federation import Federation
from cfl.methods.composition import Composition
from cfl.runtime import distributed
from cfl.training.fused_sgd import fused_sgd_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chosen:
    """The engine of a run, and the measurements that led to it.

    Attributes:
        engine: the engine.
        choice: its kind and options.
        trials: this process's measurements, of this run or of an earlier one, the fastest first; empty if nothing was
            measured. With several processes, ``choice`` need not be the fastest here.
    """

    engine: Engine
    choice: EngineChoice
    trials: list[Measured]

    @property
    def seconds_per_step(self) -> float:
        """Measured seconds of a step of a whole cohort; infinity if this process has not measured the choice."""
        measured = {one.choice: one.seconds_per_client_step for one in self.trials}
        return measured.get(self.choice, math.inf) * self.choice.width


def choose_engine(
    options: EngineOptions,
    federation: Federation,
    input_shape: tuple[int, int, int],
    precision: str,
    objective: Objective,
    optimizer_of: Callable[[Iterable[nn.Parameter]], Optimizer],
    watched: Callable[[], bool],
    resumed: dict[str, Any] | None = None,
    blocks: bool = False,
) -> Chosen:
    """Build the engine of a run, and write its choice and cohort width to the schedule and to the run's summary.

    The choice is the only one that the settings leave open, the checkpoint's, that of an earlier trial between the same
    candidates under the same conditions, or the fastest in a short trial on the next round's data. In mixed precision
    trials compute in the parameters' precision; only cohort widths of one engine are compared there.

    Args:
        options: the settings of engines.
        federation: the federation whose clients will be trained. Its models and states are not changed.
        input_shape: ``(C, H, W)``.
        precision: the Trainer's precision.
        objective: what a client minimises.
        optimizer_of: builds the clients' optimizer for a cohort's parameters.
        watched: see :func:`cfl.training.fused_sgd.fused_sgd_of`.
        resumed: the choice that is stored in the checkpoint, if the run is resumed.
        blocks: whether local steps are taken in blocks.
    """
    data, network, schedule = federation.data, federation.network, federation.data.schedule
    by_hand, batch_size = objective.of_logits, schedule.batch_size
    next_round = data.rounds.next_with_clients(min(federation.round, data.num_rounds - 1))
    sgd_of = partial(fused_sgd_of, methods=cast(Composition, federation.methods), engine=None, watched=watched)
    trials = None
    if next_round is not None:
        trials = Trials(data, next_round, network, input_shape, options, optimizer_of, sgd_of, by_hand)
    open_choices = _open_choices(options, federation, input_shape, precision, by_hand, trials)
    settled = _settled(resumed, open_choices)
    question, answer = "", None
    if settled is None:
        fuses = sgd_of(optimizer_of([nn.Parameter(torch.zeros(1))])) is not None
        shapes = (input_shape, batch_size, schedule.local_epochs)
        arithmetic = (precision, options.matmul_precision, options.compile)
        question = remembered.question(network, open_choices, shapes, arithmetic, fuses, by_hand, blocks)
        answer = remembered.recall(question, open_choices)
        settled = None if answer is None else answer.choice
    # Open choices depend on a process's math threads. If one process needs a trial, all must take part in it.
    of_all = distributed.gather(settled)
    if of_all[0] is not None and None not in of_all:
        choice, measured = of_all[0], [] if answer is None else [answer]
    elif trials is None:
        choice, measured = open_choices[0], []
    else:
        choice, measured = _tried(open_choices, trials, question, blocks)
    schedule.settle_width(choice.width, choice.most_padding, choice.at_once)
    seconds = {str(one.choice): one.seconds_per_client_step for one in measured}
    federation.engine = {**choice.to_dict(), "seconds_per_client_step_in_trials": seconds}
    engine = build_engine(choice, network, input_shape, options, batch_size, by_hand=by_hand)
    return Chosen(engine, choice, measured)


def _open_choices(
    options: EngineOptions,
    federation: Federation,
    input_shape: tuple[int, int, int],
    precision: str,
    by_hand: bool,
    trials: Trials | None,
) -> Sequence[EngineChoice]:
    """The choices that the settings leave open, at least one."""
    width, most = federation.data.schedule.cohort_width, federation.data.rounds.most_clients
    if not isinstance(width, int):
        most = -(-most // distributed.count())  # approximate: processes share steps, not clients
    return candidates(
        options,
        width if isinstance(width, int) else None,
        most,
        federation.network,
        input_shape,
        precision,
        federation.data.schedule.batch_size,
        by_hand,
        None if trials is None else partial(trials.samples, SAMPLES),
    )


def _settled(resumed: dict[str, Any] | None, open_choices: Sequence[EngineChoice]) -> EngineChoice | None:
    """The only open choice, or the one of the checkpoint; None if neither is there."""
    settled = from_dict(resumed, open_choices)
    if resumed is not None and settled is None:
        before = ", ".join(f"{name} {value}" for name, value in resumed.items())
        remark = "the checkpoint's engine (%s) is not open here: figures may differ by rounding from those of one run"
        _log.warning(remark, before)
    return open_choices[0] if len(open_choices) == 1 else settled


def _tried(
    open_choices: Sequence[EngineChoice], trials: Trials, question: str, blocks: bool
) -> tuple[EngineChoice, list[Measured]]:
    """The fastest choice of the first process's trial, which is remembered, and what this process has measured."""
    in_one_go = trials.most_steps if blocks else 1
    measured = probe(open_choices, trials.of, trials.client_steps_of_run, steps_in_one_go=in_one_go)
    if distributed.rank() == 0:
        remembered.remember(question, measured[0])
    return distributed.from_first(measured[0].choice), measured
