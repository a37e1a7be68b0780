"""Prints the figures of a run, at its end and in ``cfl validate`` and ``cfl test``."""

from __future__ import annotations

from collections.abc import Iterator

from cfl.callbacks.accuracy_targets import AccuracyTargets, rounds_in_words
from cfl.callbacks.privacy_budget import UNITS, PrivacyBudget
from cfl.callbacks.run_figures import figures_by_owner, known_tasks
from cfl.federation import matrix_rows
from cfl.federation.federation import Federation
from cfl.reporting.matrix_table import matrix_table
from cfl.reporting.measures import ON_VALIDATION, figures_of_own
from cfl.reporting.rounding import rounded
from cfl.reporting.text_table import print_table
from cfl.training.evaluation import mean_matrix


def print_figures(federation: Federation, targets: AccuracyTargets, privacy: PrivacyBudget) -> None:
    """Print accuracy matrix, ACC, FGT, BWT and FWT, the bytes of all clients together and the time.

    Args:
        federation: the federation after a fit, or from a checkpoint.
        targets: the run's targets.
        privacy: the run's privacy budget.
    """
    print_table(matrix_table(mean_matrix(federation), federation.measure, matrix_rows.means(federation)))
    for line in (
        *_of_which_samples(federation),
        *_how_far(federation, targets, privacy),
        *_of_matrices(federation),
        *_of_owners(federation),
        *rounds_in_words(targets.rounds(federation.curve), federation.round),
        *_epsilons(federation, privacy),
        _costs(federation),
    ):
        print(line)


def _of_which_samples(federation: Federation) -> Iterator[str]:
    if federation.data.evaluate_on == "validation":
        yield f"all figures are {ON_VALIDATION} (data.evaluate_on), not on the test sets"


def _how_far(federation: Federation, targets: AccuracyTargets, privacy: PrivacyBudget) -> Iterator[str]:
    """Lines that say which part of the run is not finished, and why."""
    done, schedule = federation.round, federation.schedule
    if schedule.client_clocks and not federation.finished:
        whole, at = matrix_rows.last_complete(federation), matrix_rows.current(federation).values()
        of_all = f"figures are after task {whole}, the last after which all have been evaluated"
        state = "not all have been evaluated yet" if whole is None else of_all
        yield f"clients are at tasks {min(at)} to {max(at)}: {state}"
    if federation.stopped:
        reason = "all targets are met" if targets.end_the_run(federation.curve) else privacy.why_stopped
        yield f"stopped after {done} of {schedule.num_rounds} rounds: {reason}"
    elif done and not schedule.round(done - 1).last_of_task:
        yield f"task {federation.last_task} is not finished: {done} of {schedule.num_rounds} rounds"


def _of_matrices(federation: Federation) -> list[str]:
    """A line for each figure of the measure's matrix, and of the one with known tasks: name, value, formula."""
    matrices = [("", federation.measured), *((" (task known)", known) for known in known_tasks(federation).values())]
    shown = [
        (key.upper() + ending, values[key], formula)
        for ending, values in [(ending, matrix_rows.figures(federation, matrix)) for ending, matrix in matrices]
        for key, formula in federation.measure.formulas.items()
    ]
    own = matrix_rows.own_figures(federation, matrix_rows.last_complete(federation))
    for name, matrix in federation.own_measures.items() if own else ():
        for figure in figures_of_own(name, matrix.better):
            shown.append((figure.key, own[figure.key], f"{figure.meaning} ({figure.better} is better)"))
    width = max(len(name) for name, _, _ in shown)
    return [
        f"{name:<{width}} {'undefined' if value is None else rounded(value, 3).rjust(9)}   {formula}"
        for name, value, formula in shown
    ]


def _of_owners(federation: Federation) -> Iterator[str]:
    found = figures_by_owner(federation)
    numbers = [rounded(value, 3) for value in found.values() if value is not None]
    if numbers and len(numbers) == len(found):
        yield "ACC of clients on their own test samples: mean {}, deviation {}, lowest {}".format(*numbers)


def _epsilons(federation: Federation, privacy: PrivacyBudget) -> list[str]:
    """A line for each epsilon, and below these a line for each thing that they do not cover."""
    summary = privacy.summary(federation)
    epsilons = [
        f"epsilon {rounded(epsilon, 3)} (delta {privacy.accountant.delta:g}): {UNITS[figure]}"
        for figure, epsilon in summary.items()
        if figure in UNITS and epsilon is not None
    ]
    return epsilons and [*epsilons, *(f"epsilon does not cover {what}" for what in summary["privacy"]["not_covered"])]


def _costs(federation: Federation) -> str:
    sent = (federation.channel.total_uplink_bytes, federation.channel.total_downlink_bytes)
    up, down = (rounded(number / 1e6, 2, ",") for number in sent)
    return f"{federation.round:,} rounds, uplink {up} MB, downlink {down} MB, {rounded(federation.seconds, 1, ',')} s"
