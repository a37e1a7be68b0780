"""From the arguments of ``cfl fit`` to the experiment they describe, without a process for each."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import instantiate_class

from cfl.cli.checkpoints import SECTIONS
from cfl.cli.federated_cli import FederatedCLI
from cfl.cli.main import build
from cfl.cli.method_keys import keys_as_typed
from cfl.cli.optimizer_options import check_optimizer_options
from cfl.data.sequences import TaskSequences
from cfl.engines import EngineOptions
from cfl.methods import Method
from cfl.methods.composition import Composition
from cfl.reporting.experiment import experiment_of, with_defaults
from cfl.reporting.files_of_run import check_method_names
from cfl.runtime.command_line import read_command_line

_BUILT = {
    "engine": EngineOptions,
    **{section: SECTIONS[section] for section in ("schedule", "buffer", "data", "federated", "targets", "privacy")},
}
"""Section -> its class, for sections that can be built without files and network."""


class _Ready(Exception):
    """Raised when the parsers are built, to end the construction of the command line there."""


class _ParsersOnly(FederatedCLI):
    """Builds the command line's parsers, and runs nothing."""

    def parse_arguments(self, parser: Any, args: Any) -> None:
        raise _Ready(self)

    def resolve(self, arguments: Sequence[str], validate: bool) -> dict[str, Any]:
        # By the subcommand's own parser: the one around it would parse and check everything once more.
        self.subcommand = "fit"
        self.config = Namespace(fit=self._parser("fit").parse_args([*arguments], _skip_validation=not validate))
        return self._plain_config()


class Resolver:
    """Resolves configurations with the parser of ``cfl fit``; one parser serves all."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], dict[str, Any]] = {}

    @cached_property
    def _parsers(self) -> _ParsersOnly:
        try:
            build(_ParsersOnly, read_command_line(["fit"]))
        except _Ready as ready:
            parsers: _ParsersOnly = ready.args[0]
        parser = parsers._parser("fit")
        defaults = parser.get_defaults(skip_validation=True)  # a third of the time of each parse
        parser.get_defaults = lambda *_, **__: defaults.clone()  # type: ignore[method-assign]
        return parsers

    def config(self, arguments: Sequence[str], validate: bool = False) -> dict[str, Any]:
        """The configuration that ``cfl fit`` with these arguments would resolve to.

        Args:
            arguments: arguments of ``cfl fit``.
            validate: also validate the whole configuration, which doubles the time. Used before runs.

        Raises:
            ConfigError, NotUnderstood: ``cfl fit`` would refuse the arguments with the same message.
        """
        key = tuple(arguments)
        if validate or key not in self._known:
            self._known[key] = self._parsers.resolve(key, validate)
        return self._known[key]

    def experiment(self, arguments: Sequence[str], seed: int = 0) -> dict[str, Any]:
        """The settings that decide the results of ``cfl fit`` with these arguments and a seed.

        Raises:
            ConfigError, NotUnderstood: ``cfl fit`` would refuse the arguments.
        """
        # No other value of the configuration depends on the seed, so it can be set afterwards.
        return {**experiment_of(self.config(arguments)), "seed_everything": seed}

    def check(self, arguments: Sequence[str]) -> None:
        """Refuse arguments that ``cfl fit`` would refuse before it reads data or builds the network.

        Raises:
            ConfigError, NotUnderstood: the parser or a constructor refuses a value, or methods cannot work with the
                settings or with each other.
        """
        config = self.config(arguments, validate=True)
        check_method_names(config["methods"])
        check_optimizer_options(config["model"]["optimizer"].get("init_args") or {})
        # A copy: the parser writes into what it is given.
        plain = copy.deepcopy({key: config[key] for key in ("methods", *_BUILT)})
        with keys_as_typed({name: str(method["class_path"]) for name, method in config["methods"].items()}):
            built = self._constructors.instantiate(self._constructors.parse_object(plain))
            methods = Composition(built.methods)
            methods.check_settings(built.data)
        built.federated.sums.check_settings(built.schedule, methods)
        built.targets.check(built.schedule, built.data.num_tasks)

    @cached_property
    def _constructors(self) -> ArgumentParser:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--methods", type=dict[str, Method])
        for section, built in _BUILT.items():
            parser.add_class_arguments(built, section)
        parser.link_arguments("schedule", "data.schedule", apply_on="instantiate")
        return parser


def same_experiment(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether a run that was found belongs to the wanted experiment, whatever its seed.

    A run from before an option existed belongs to it if the wanted experiment has the option's default.
    """
    if set(wanted["methods"]) != set(found["methods"]):  # a quick test that settles most cases
        return False
    ours, theirs = ({**experiment, "seed_everything": None} for experiment in (wanted, found))
    return ours == theirs or ours == with_defaults(theirs, ours, SECTIONS)


def num_rounds(config: Mapping[str, Any]) -> int | None:
    """Number of communication rounds of a run, if no target ends it early.

    None if the number is not known without data or random draws: clients have their own clocks, or neither sequences
    nor stream give the number of tasks.
    """
    schedule = config["schedule"]
    if schedule.get("clock_spread"):
        return None
    rounds = schedule["rounds_per_task"]
    if isinstance(rounds, list):
        return sum(rounds)
    tasks = _num_tasks(config["data"])
    return rounds * tasks if tasks else None


def _num_tasks(data: Mapping[str, Any]) -> int | None:
    """Number of tasks that a client learns one after another; None or 0 if the configuration does not give it."""
    if data.get("sequences"):
        try:
            sequences: TaskSequences = instantiate_class((), data["sequences"])
            return sequences.length
        except Exception:  # the run refuses them, in words of its own
            return None
    stream = data["stream"].get("init_args") or {}
    if "tasks_per_source" in stream:  # a mixture; if null, the number of tasks depends on the sources' classes
        return sum(stream["tasks_per_source"] or [])
    return stream.get("num_tasks") or len(stream.get("sources") or [])
