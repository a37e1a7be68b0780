"""Options of how the server gets sums, and the runs that they rule out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from cfl.data.datamodule import FederatedDataModule
from cfl.data.schedule import BoundSchedule, Schedule
from cfl.federation.channel import UPDATE
from cfl.federation.federation import Federation
from cfl.runtime.errors import ConfigError, SumRefused
from cfl.runtime.option_checks import check_choices, check_integers, check_numbers
from cfl.secure_sums.codec import check_codecs
from cfl.secure_sums.dropouts import UNTIL_MESSAGE, Attendance, check_recoverable
from cfl.secure_sums.integer_sums import IntegerSums
from cfl.secure_sums.settings import INSTALL, Aggregation, SumSettings, is_installed


class SumOptions:
    """``federated.aggregation`` and the options that belong to it.

    Arguments are those of :class:`cfl.callbacks.federated_orchestrator.FederatedOrchestrator`.

    Raises:
        ConfigError: an option has another value, or has no effect on plain sums.
    """

    def __init__(
        self,
        aggregation: Aggregation,
        neighbours: int | None,
        share_threshold: float,
        codecs: Mapping[str, Mapping[str, Any]] | None,
    ) -> None:
        check_choices("federated", ("plain", "modelled", "secure"), aggregation=aggregation)
        check_integers("federated", 2, or_null=True, neighbours=neighbours)
        check_numbers("federated", "[0.5, 1)", share_threshold=share_threshold)
        if neighbours is not None and neighbours % 2:
            raise ConfigError("federated.neighbours", neighbours, "an even number, or null")
        for key, value, default in (
            ("neighbours", neighbours, None),
            ("share_threshold", share_threshold, 0.5),
            ("codecs", codecs or None, None),
        ):
            if aggregation == "plain" and value != default:
                valid = f"{'null' if default is None else default} with federated.aggregation = plain"
                raise ConfigError(f"federated.{key}", value, valid)
        check_codecs(codecs or {})
        if aggregation == "secure" and not is_installed():
            valid = f"plain or modelled without cryptography, which {INSTALL} installs"
            raise ConfigError("federated.aggregation", aggregation, valid)
        self.aggregation, self.neighbours = aggregation, neighbours
        self.share_threshold, self.codecs = share_threshold, codecs or {}

    def integer_sums(self, data: FederatedDataModule, by_samples: bool) -> IntegerSums | None:
        """The object that computes sums of integers; None for plain sums.

        Args:
            data: data of the run.
            by_samples: whether clients' updates are weighted by their number of samples.
        """
        if self.aggregation == "plain":
            return None

        def greatest_weight(topic: str) -> float:
            return float(data.most_trained_on) if by_samples and topic == UPDATE else 1.0

        return IntegerSums(
            SumSettings(
                secure=self.aggregation == "secure",
                seed=data.seed,
                neighbours=self.neighbours,
                threshold=self.share_threshold,
                codecs=self.codecs,
                stage=data.schedule.dropout_stage,
                greatest_weight=greatest_weight,
            )
        )

    @staticmethod
    def lost(schedule: BoundSchedule) -> Callable[[int], Collection[int]] | None:
        """Round -> the clients that drop out before their message; None if no client ever drops out."""
        if not schedule.settings.client_dropout:
            return None
        return schedule.dropouts if schedule.settings.dropout_stage in UNTIL_MESSAGE else lambda round: ()

    def check_settings(self, schedule: Schedule, methods: Mapping[str, Any]) -> None:
        """Refuse integer sums with methods that read single messages, and dropout stages that plain sums do not have.

        These checks need only the settings, no data.

        Args:
            schedule: schedule of the run.
            methods: methods of the run, by name.

        Raises:
            ConfigError: the settings are refused.
        """
        if self.aggregation == "plain":
            if schedule.dropout_stage not in UNTIL_MESSAGE:
                valid = f"{', '.join(UNTIL_MESSAGE)} with federated.aggregation = plain, whose sums have no later stage"
                raise ConfigError("schedule.dropout_stage", schedule.dropout_stage, valid)
            return
        single = [f"methods.{name}" for name, method in methods.items() if method.individual_uplinks]
        if single:
            valid = f"plain with {', '.join(single)}, whose server reads single clients' messages"
            raise ConfigError("federated.aggregation", self.aggregation, valid)

    def check(self, federation: Federation, processes: int) -> None:
        """Refuse what :meth:`check_settings` does, ``secure`` in several processes, and sums that cannot be recovered.

        Raises:
            ConfigError: the run is refused.
        """
        self.check_settings(federation.schedule.settings, federation.methods)
        integers = federation.channel.integers
        if integers is None:
            return
        if self.aggregation == "secure" and processes > 1:
            valid = f"modelled with {processes} processes (trainer.devices and num_nodes), which gives the same sums"
            raise ConfigError("federated.aggregation", self.aggregation, valid)
        # Methods that average no tensor of the model may form sums of their own, as FedWeIT does of bases.
        if federation.model.shared_parameters or federation.model.shared_buffers or federation.methods:
            self._check_rounds(federation, integers)

    def _check_rounds(self, federation: Federation, integers: IntegerSums) -> None:
        schedule = federation.schedule
        varies = bool(schedule.settings.client_dropout) or schedule.settings.sampling == "poisson"
        varies = varies or schedule.client_clocks
        lost = self.lost(schedule) or (lambda round: ())
        ends = [sum(map(schedule.rounds_of, range(task))) for task in range(schedule.num_tasks)]
        for round in range(schedule.num_rounds) if varies else ends:
            asked = schedule.round(round).clients
            if not asked:
                continue
            came = frozenset(asked) - frozenset(lost(round))
            attendance = Attendance.of(asked, schedule.dropouts(round), schedule.settings.dropout_stage, came)
            what = f"round {round} has no secure sum of its messages"
            try:
                check_recoverable(attendance, integers.graph(round, attendance), self.share_threshold, what)
            except SumRefused as refused:
                key, value = "schedule.clients_per_round", schedule.settings.clients_per_round
                if schedule.settings.client_dropout:
                    key, value = "schedule.client_dropout", schedule.settings.client_dropout
                valid = f"one with which federated.aggregation = {self.aggregation} can form all sums: {refused}"
                raise ConfigError(key, value, valid) from refused
