"""Which engine computes a run's local steps, and what of a step it may do in the place of optimizer and methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from cfl.engines import remembered
from cfl.engines.base import Engine, EngineOptions
from cfl.engines.choice import EngineChoice, build_engine, candidates, from_dict
from cfl.engines.objective import Objective
from cfl.engines.probe import Measured, probe
from cfl.engines.trials import Trials
from cfl.engines.updates import plain_sgd
from cfl.federation.federation import Federation
from cfl.methods.composition import Composition, Factors, Pulls
from cfl.runtime import distributed


@dataclass(frozen=True)
class Chosen:
    """An engine, and what was measured to find it, now or by an earlier run; nothing where there was no choice."""

    choice: EngineChoice
    trials: list[Measured]


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
    """What the settings say, the checkpoint's choice, the one that an earlier trial of the same question has found, or
    the fastest in a short trial on the next round's data.

    Args:
        options: the settings of engines.
        federation: whose clients will be trained; it is not changed.
        input_shape: ``(C, H, W)``.
        precision: the Trainer's.
        objective: what a client minimises.
        optimizer_of: the clients' optimizer for a cohort's parameters.
        watched: see :func:`step_at_once`.
        resumed: what a checkpoint says of its run's choice.
        blocks: whether local steps are taken several in one go.
    """
    data, network = federation.data, federation.network
    by_hand = objective.of_logits
    width, most = data.schedule.cohort_width, data.rounds.most_clients
    if not isinstance(width, int):
        most = -(-most // distributed.count())  # of clients with alike samples: who has fewer may have more of them
    open_choices = candidates(
        options,
        width if isinstance(width, int) else None,
        most,
        network,
        input_shape,
        precision,
        data.schedule.batch_size,
        by_hand,
    )
    fused_sgd = partial(step_at_once, methods=cast(Composition, federation.methods), engine=None, watched=watched)
    settled = open_choices[0] if len(open_choices) == 1 else from_dict(resumed, open_choices)
    asked, known = "", None
    if settled is None:
        fused = fused_sgd(optimizer_of([nn.Parameter(torch.zeros(1))]))
        shapes = (input_shape, data.schedule.batch_size, data.schedule.local_epochs)
        asked = remembered.question(network, open_choices, shapes, fused is not None, by_hand, blocks)
        known = remembered.recall(asked, open_choices)
        settled = None if known is None else known.choice
    # What is open depends on a process's math threads: if one needs a trial, the others must be in it.
    everyones = distributed.gather(settled)
    if everyones[0] is not None and None not in everyones:
        return Chosen(everyones[0], [] if known is None else [known])
    next_round = data.rounds.next_with_clients(min(federation.round, data.num_rounds - 1))
    if next_round is None:
        return Chosen(open_choices[0], [])
    trials = Trials(data, next_round, network, input_shape, options, optimizer_of, fused_sgd, by_hand)
    in_one_go = trials.most_steps if blocks else 1
    measured = probe(open_choices, trials.of, trials.client_steps_of_run, steps_in_one_go=in_one_go)
    if distributed.rank() == 0:
        remembered.remember(asked, measured[0])
    return Chosen(distributed.from_first(measured[0].choice), measured)


def chosen_engine(
    chosen: Chosen,
    options: EngineOptions,
    federation: Federation,
    input_shape: tuple[int, int, int],
    objective: Objective,
) -> Engine:
    """Build the engine, and note the choice in the schedule and in the record of the run; arguments as for
    :func:`choose_engine`."""
    choice, schedule = chosen.choice, federation.data.schedule
    schedule.settle_width(choice.width, choice.most_padding, choice.at_once)
    trials = {str(trial.choice): trial.seconds_per_client_step for trial in chosen.trials}
    federation.engine = {**choice.to_dict(), "seconds_per_client_step_in_trials": trials}
    return build_engine(
        choice, federation.network, input_shape, options, schedule.batch_size, by_hand=objective.of_logits
    )


def gradients_are_watched(trainer: Trainer) -> bool:
    """Whether clipping or a callback wants to see the gradients of local steps."""
    settings: Any = trainer
    looks = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
    return bool(settings.gradient_clip_val) or any(
        is_overridden(hook, callback) for callback in settings.callbacks for hook in looks
    )


def step_at_once(
    optimizer: Optimizer, methods: Composition, engine: Engine | None, watched: Callable[[], bool]
) -> tuple[float, float] | None:
    """Learning rate and weight decay, if an engine may take the optimizer's step without leaving gradients.

    That is so for plain SGD whose weight decay leaves something of the weights, unless a method or somebody else wants
    to see the gradients.

    Args:
        optimizer: the clients'.
        methods: the methods of the run.
        engine: what computes the steps; None while one is being chosen.
        watched: whether somebody else wants to see gradients.
    """
    pulls, factors = left_to_engine(methods, engine)
    if (methods.changing_gradients() and not (pulls or factors)) or watched():
        return None
    plain = plain_sgd(optimizer)
    return None if plain is not None and plain[0] * plain[1] >= 1 else plain


def left_to_engine(methods: Composition, engine: Engine | None) -> tuple[Pulls, Factors]:
    """What an engine does itself of a method, see :meth:`cfl.methods.composition.Composition.left_to_engine`; nothing
    while one is being chosen."""
    return methods.left_to_engine(engine is not None and engine.multiplies, engine is not None and engine.pulls)
