"""Computes the epsilons of a run's sums under noise, writes a table of them, and ends the run at a budget."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from cfl.data.exposure import ONE_AT_A_TIME
from cfl.federation.channel import UPDATE
from cfl.federation.federation import Federation
from cfl.methods.capabilities import NoisySums, crosses_tasks
from cfl.methods.composition import Composition
from cfl.privacy.accounting import INSTALL, Accountant, is_installed
from cfl.privacy.ledger import Ledger
from cfl.privacy.release import Release
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices, check_numbers
from cfl.training.access import federation_of

UNITS = {
    "epsilon_per_release": "what one client adds to one sum that the server reads",
    "epsilon_one_task": "all that one client contributes to the sums that depend on its data of one task",
    "epsilon_all_tasks": "all that one client contributes, over all tasks so far",
}
"""Figure -> the data in which neighbouring data sets differ. Figures are maxima over releases, clients and tasks."""
_log = logging.getLogger(__name__)


class PrivacyBudget(Callback):
    """Computes epsilon of a run whose methods add noise, and may end the run before it exceeds a budget.

    ``privacy.csv`` has a row for every sum under noise that the server has read. The summary has three epsilons, each
    with its unit, and what they do not cover. They need the library dp-accounting (extra ``privacy``).

    A run with a budget ends between two rounds as if it were finished, before the first round with which the epsilon of
    one client over all tasks (``epsilon_all_tasks``) would exceed the budget. The model is evaluated after the last
    round, unless clients have their own clocks: each is then evaluated where its tasks end. Future releases are
    computed as if the messages of all clients arrive. If clients add the noise and some messages do not arrive, the
    last round may exceed the budget.

    Args:
        budget: greatest epsilon of one client over all tasks, above 0; null for no limit.
        delta: probability that the privacy loss is larger, between 0 and 1. It should be well below 1 divided by the
            number of clients.
        accountant: ``pld``: privacy loss distributions, tight. ``rdp``: Rényi divergences, looser and faster.

    Raises:
        ConfigError: an option has another value.
    """

    def __init__(
        self, budget: float | None = None, delta: float = 1e-5, accountant: Literal["pld", "rdp"] = "pld"
    ) -> None:
        check_numbers("privacy", "(0, inf)", or_null=True, budget=budget)
        check_numbers("privacy", "(0, 1)", delta=delta)
        check_choices("privacy", ("pld", "rdp"), accountant=accountant)
        self.budget = budget
        self.accountant = Accountant(delta, accountant)

    # The budget.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a budget without the library that computes epsilon."""
        if stage == "fit" and self.budget is not None and not is_installed():
            raise ConfigError("privacy.budget", self.budget, f"null without dp-accounting, which {INSTALL} installs")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the round before which the run has to end.

        Raises:
            ConfigError: no method adds noise, or the first round would exceed the budget.
        """
        federation = federation_of(pl_module)
        if not is_installed() and _adds_noise(federation) and trainer.is_global_zero:
            _log.warning("no epsilons of this run's noise: %s installs what computes them", INSTALL)
        if self.budget is None:
            return
        if not _adds_noise(federation):
            raise ConfigError("privacy.budget", self.budget, "null: no method of this run adds noise to a sum")
        self._foresee(federation)
        if not federation.round and federation.schedule.ends_after == 0:
            spent = federation.channel.ledger.epsilon_of_client(self.accountant, _foreseen(federation, 0))
            least = math.ceil(1000 * spent) / 1000
            valid = f"null or at least {least:g}, which the first round takes"
            raise ConfigError("privacy.budget", self.budget, valid)
        last = federation.schedule.ends_after
        if last is not None and last <= federation.round < federation.schedule.num_rounds:
            federation.stopped = trainer.should_stop = True
            if trainer.is_global_zero:
                print(f"nothing to do: the run stopped after {federation.round} rounds, {self.why_stopped}")

    def look_ahead(self, federation: Federation) -> None:
        """Find the run's last round anew if some messages did not arrive; called between a round and its evaluation."""
        if self.budget is None or federation.finished:
            return
        done = federation.round - 1
        came = [one for one in federation.channel.ledger.releases if one.round == done]
        if _costs(came) != _costs(_foreseen(federation, done)):
            self._foresee(federation)

    def end_the_run(self, federation: Federation) -> bool:
        """Whether the budget allows no further round; the FederatedOrchestrator asks after counting a round."""
        last = federation.schedule.ends_after
        return self.budget is not None and last is not None and federation.round >= last

    @property
    def why_stopped(self) -> str:
        """The reason why the run has ended early, for messages."""
        return f"as another round would exceed privacy.budget = {self.budget:g}"

    def _foresee(self, federation: Federation) -> None:
        """Tell the schedule the number of rounds that the budget allows, or None for all."""
        fits, exceeds = federation.round, federation.schedule.num_rounds
        to_come = [one for round in range(fits, exceeds) for one in _foreseen(federation, round)]

        def keeps_to_it(rounds: int) -> bool:
            more = [one for one in to_come if one.round < rounds]
            return federation.channel.ledger.epsilon_of_client(self.accountant, more) <= (self.budget or 0.0)

        if keeps_to_it(exceeds):
            federation.schedule.ends_after = None
            return
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            fits, exceeds = (middle, exceeds) if keeps_to_it(middle) else (fits, middle)
        federation.schedule.ends_after = fits

    # Reports.

    def summary(self, federation: Federation) -> dict[str, Any]:
        """The run's epsilons and what they mean; empty if no sum was noisy."""
        ledger = federation.channel.ledger
        if not ledger.releases:
            return {}
        back = reaches_back(federation)
        figures: dict[str, Any] = dict.fromkeys(UNITS)
        if is_installed():
            figures = {
                "epsilon_per_release": ledger.epsilon_of_release(self.accountant),
                "epsilon_one_task": ledger.epsilon_of_task(self.accountant, bool(back)),
                "epsilon_all_tasks": ledger.epsilon_of_client(self.accountant),
            }
        words = {
            "delta": self.accountant.delta,
            "accountant": self.accountant.kind if is_installed() else f"none: {INSTALL}",
            "releases": len(ledger.releases),
            "units": UNITS,
            "later_tasks_use_earlier_data": back,
            "not_covered": not_covered(federation),
        }
        return {**figures, "privacy": words}

    def rows(self, federation: Federation) -> list[dict[str, Any]]:
        """A row for every release. Epsilons over several releases are in the last row of each task that has ended."""
        releases, back = federation.channel.ledger.releases, bool(reaches_back(federation))
        known, so_far, found = is_installed(), Ledger(), []
        for number, one in enumerate(releases):
            so_far.releases.append(one)
            last = federation.finished if number + 1 == len(releases) else releases[number + 1].task != one.task
            found.append(
                {
                    "round": one.round,
                    "task": one.task,
                    "topic": one.topic,
                    "noise_by": one.noise.added_by,
                    "sensitivity": one.noise.sensitivity,
                    "noise_multiplier": one.noise.multiplier,
                    "parts": one.noise.parts,
                    "clients": len(one.clients),
                    "sampling_rate": "" if one.rate is None else one.rate,
                    "epsilon_per_release": self.accountant.epsilon(one.spent) if known else "",
                    "epsilon_one_task": so_far.epsilon_of_task(self.accountant, back) if known and last else "",
                    "epsilon_all_tasks": so_far.epsilon_of_client(self.accountant) if known and last else "",
                }
            )
        return found


def _foreseen(federation: Federation, round: int) -> list[Release]:
    """The releases of a round if the messages of all clients arrive."""
    plan, methods = federation.schedule.round(round), federation.methods
    assert isinstance(methods, Composition)
    return Ledger.foreseen(round, plan.task, federation.sample(plan), methods.releases(plan), UPDATE)


def _costs(releases: list[Release]) -> list[Any]:
    """The values of releases that decide epsilon, sorted, so that lists of releases can be compared."""
    return sorted((one.topic, one.multiplier, one.clients, one.rate or 0.0) for one in releases)


def _adds_noise(federation: Federation) -> bool:
    """Whether any round of the run has, or will have, a release under noise."""
    if not federation.methods.with_capability(NoisySums):
        return False
    rounds = range(federation.schedule.num_rounds)
    return bool(federation.channel.ledger.releases) or any(_foreseen(federation, round) for round in rounds)


def reaches_back(federation: Federation) -> list[str]:
    """Settings and methods that make releases depend on clients' samples of earlier tasks; empty if none do.

    Server state from earlier tasks is not a reason, because it was counted when it was released. State that clients
    keep was never released, and is a reason.
    """
    exposure = federation.data.exposure
    found = [] if exposure in ONE_AT_A_TIME else [f"data.exposure = {exposure}"]
    for name, method in federation.methods.items():
        if crosses_tasks(method) or (method.looks_back and method.client_storage()):
            found.append(f"methods.{name}")
    if not found and federation.clients.bytes():
        found.append("what clients keep from round to round")
    return found


def not_covered(federation: Federation) -> list[str]:
    """Describe the messages and disclosures that the epsilons of a run do not cover."""
    ledger = federation.channel.ledger
    found = [
        f"{topic}: {'the models are averaged' if topic == UPDATE else 'messages are read'} without noise"
        for topic in federation.channel.uplink_bytes
        if topic not in ledger.topics
    ]
    found += ledger.uncovered
    if federation.data.outputs.train is not None:
        found.append("class masks: the outputs that a round trains tell which classes occur")
    if ledger.releases and federation.channel.integers is not None:
        found.append("rounding to integers: it moves each number that a client sends by less than a step of its codec")
    if any(one.rate is not None for one in ledger.releases):
        found.append(
            "schedule.sampling: poisson hides clients from those who do not know who took part; the server knows"
        )
    return found
