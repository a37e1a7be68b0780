"""Accuracy targets: counts the rounds until a run reaches given accuracies, and may then end it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning.pytorch import Callback, LightningModule, Trainer

from cfl.data.schedule import Schedule
from cfl.reporting.rounds_file import rounds_to
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_numbers
from cfl.training.access import data_of, federation_of


class AccuracyTargets(Callback):
    """Counts the communication rounds until the global model first reaches each target accuracy.

    A target is compared with the run's ACC after a round, the mean over the tasks seen so far (``acc`` in
    ``rounds.csv``). The result is a number of rounds, 1 if the first round reaches the target. Only rounds with an
    evaluation count, so the resolution is ``schedule.evaluate_every``.

    A run that stops ends between two rounds as if it were finished: ``summary.json``, pictures and checkpoint are
    written, and resuming it does nothing. Methods' ``end_task`` is not called, because no task follows.

    FedCurv (Shoham et al., 2019, Table 1) counts rounds to a test accuracy of 0.85, 0.90 and 0.95 in this way.

    Args:
        accuracies: the targets in percent, e.g. [85, 90, 95]; an empty list for no targets.
        stop: end the run once all targets are met; only for runs of a single task, otherwise false.
    """

    def __init__(self, accuracies: Sequence[float] = (), stop: bool = True) -> None:
        for accuracy in accuracies:
            check_numbers("targets", "(0, 100]", accuracies=accuracy)
        if len(set(accuracies)) < len(accuracies):
            raise ConfigError("targets.accuracies", list(accuracies), "every accuracy once")
        self.accuracies = tuple(sorted(float(accuracy) for accuracy in accuracies))
        self.stop = stop

    def check(self, schedule: Schedule, num_tasks: int) -> None:
        """Refuse a run in which targets cannot be measured.

        Args:
            schedule: schedule of the run.
            num_tasks: number of its tasks.

        Raises:
            ConfigError: nothing is evaluated between task ends, clients have clocks of their own, or the run would stop
                before its last task.
        """
        if not self.accuracies:
            return
        if schedule.clock_spread:
            valid = "0 with targets.accuracies: with clocks of their own clients are not evaluated together"
            raise ConfigError("schedule.clock_spread", schedule.clock_spread, valid)
        if schedule.evaluate_every < 1:
            raise ConfigError(
                "schedule.evaluate_every",
                schedule.evaluate_every,
                "at least 1 with targets.accuracies: rounds are counted where the model is evaluated",
            )
        if self.stop and num_tasks > 1:
            raise ConfigError(
                "targets.stop", True, f"false with {num_tasks} tasks: a run that stops would not learn the rest of them"
            )

    def rounds(self, curve: Sequence[float | None]) -> dict[str, int | None]:
        """Name of each target (``"85"``), lowest first -> rounds to it; None for targets that are not reached.

        Args:
            curve: ACC in percent after each round; None for rounds without an evaluation.
        """
        return {name_of(accuracy): rounds_to(curve, accuracy) for accuracy in self.accuracies}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what :meth:`check` refuses, and runs that measure something other than accuracy."""
        if stage == "fit":
            data = data_of(trainer)
            self.check(data.schedule, data.num_tasks)
            measure = data.measure
            if self.accuracies and not measure.is_accuracy:
                raise ConfigError("targets.accuracies", list(self.accuracies), f"[] where runs measure {measure.words}")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a resumed run at once if it has stopped with all targets met."""
        federation = federation_of(pl_module)
        if federation.stopped and self.end_the_run(federation.curve):
            trainer.should_stop = True
            if trainer.is_global_zero:
                print(f"nothing to do: the run stopped after {federation.round} rounds, with all targets met")

    def end_the_run(self, curve: Sequence[float | None]) -> bool:
        """Whether all targets are met and the run is to stop; ``curve`` as for :meth:`rounds`.

        The FederatedOrchestrator calls this after counting a round. ACC, and so the result, is the same in all
        processes.
        """
        return self.stop and bool(self.accuracies) and None not in self.rounds(curve).values()


def name_of(accuracy: float) -> str:
    """A target's name in tables and files: 85.0 is ``85``, 97.5 is ``97.5``."""
    return str(int(accuracy)) if float(accuracy).is_integer() else repr(float(accuracy))


def rounds_in_words(rounds: Mapping[str, int | None], done: int) -> list[str]:
    """Describe the rounds to each target, one line per target.

    Args:
        rounds: name of the target -> rounds to it.
        done: number of finished rounds.
    """
    return [
        f"rounds to {name} %: {f'not reached in {done}' if found is None else found}" for name, found in rounds.items()
    ]
