"""LightningCLI for federated experiments: builds the module, data, Trainer and callbacks of a run and runs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import SUPPRESS, Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torchmetrics import Metric

from cfl.callbacks import OF_SECTIONS, RoundCheckpoint, RunRecord
from cfl.callbacks.trainer_checks import check_evaluation, check_trainer
from cfl.cli.checkpoints import check_checkpoint, naming_what_cannot_be_restored
from cfl.cli.clients_of_a_round import fitting_clients_per_round
from cfl.cli.commands import TRAINING
from cfl.cli.given import Given, in_content
from cfl.cli.header import first_line
from cfl.cli.import_policy import classes_beyond
from cfl.cli.inherited_options import KEYS, inherited_options
from cfl.cli.installed_configs import DEFAULT_CONFIG
from cfl.cli.linked_defaults import BUILT_FROM, FOLLOWING
from cfl.cli.method_keys import keys_as_typed
from cfl.cli.optimizer_options import check_optimizer_options
from cfl.cli.own_classes import check_methods_names, check_options, check_untyped, naming_what_cannot_be_made
from cfl.cli.parsing import options_given
from cfl.cli.reasons import disk_error, reason_for_user
from cfl.cli.settling import settle
from cfl.cli.trainer_classes import naming_what_fails
from cfl.cli.trainer_settings import (
    WITHOUT_CHOICE,
    accelerator_for,
    check_profiler,
    check_settings,
    refused_by_lightning,
)
from cfl.data.datamodule import FederatedDataModule
from cfl.data.schedule import Schedule
from cfl.data.sources.kept import facts_of_run
from cfl.data.sources.root import data_root_given
from cfl.engines import EngineOptions
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import Method
from cfl.reporting.experiment import method_name
from cfl.runtime import signals
from cfl.runtime.command_line import ABOUT_ALLOW, ALLOW
from cfl.runtime.disk import not_written
from cfl.runtime.distributed import ProcessFailed, cause_elsewhere
from cfl.runtime.errors import BadUpdate, ConfigError, NotWritten
from cfl.runtime.printable import printable
from cfl.runtime.run_files import CHECKPOINT
from cfl.runtime.yaml_file import read_yaml
from cfl.training.access import callbacks_of
from cfl.training.strategy import DECIDE_STRATEGY, strategy_for

ADVICE = re.compile(r"\b([a-z_]+(?:\.[a-z_]+)+)=(\w+)")
"""An option that an error's message advises, with its value."""
_RESUMED = {
    "fit": "RUN/last.ckpt continues that run. `last` takes the checkpoint in --run.dir, or starts from the beginning "
    "if there is none.",
    "validate": "the checkpoint to score, RUN/last.ckpt; last: the one in --run.dir.",
}
_RESUMED["test"] = _RESUMED["validate"]


class FederatedCLI(LightningCLI):
    """LightningCLI with the keys of a federated experiment.

    ``model``, ``data``, ``methods``, ``buffer``, ``schedule``, ``federated``, ``targets``, ``privacy`` describe the
    experiment; ``run``, ``engine``, ``measures``, ``local_models``, ``checkpoint``, ``progress`` and ``trainer`` say
    where and how it runs, and what is recorded beside.

    Attributes:
        announced: the header's first line if it has been printed; otherwise empty.
    """

    config_init: Any
    announced = ""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's subcommands without ``predict``."""
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name in TRAINING}

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        """Add subcommands as Lightning does, with this project's descriptions in the overview."""
        super()._add_subcommands(parser, **kwargs)
        shown = parser._subcommands_action
        for choice in shown._choices_actions if shown is not None else []:
            choice.help = TRAINING[choice.dest]

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Prepare a subcommand's parser as Lightning does, with this project's descriptions of two options.

        Lightning's descriptions of ``--ckpt_path`` and ``--seed_everything`` are of values that do not work here. The
        help leaves out what cannot be set: options with one valid value, and keys that follow from others."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser.usage = f"cfl {subcommand} [options]"  # all of them, 130 lines, are listed below it
        described = {
            "ckpt_path": f"{_RESUMED[subcommand]} {ABOUT_ALLOW}",
            "seed_everything": "the run's seed, an integer from 0 to 4294967295.",
        }
        not_set = {"weights_only", *(f"trainer.{name}" for name in WITHOUT_CHOICE)}
        for action in parser._actions:
            if action.dest in described:
                action.help = described[action.dest]
            elif action.dest in not_set or action.dest.removesuffix(".help") in (*FOLLOWING, *BUILT_FROM):
                action.help = SUPPRESS
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the project's own keys, and link options whose values follow from others."""
        parser.add_argument(
            "--methods",
            type=dict[str, Method],
            default={},
            help="name -> method; their hooks run in this order, {} is federated averaging",
        )
        measures: Any = parser.add_argument(
            "--measures",
            type=dict[str, Metric],
            default={},
            help="name -> metric, such as torchmetrics.classification.MulticlassF1Score; computed of the same tests as "
            "the run's own measure",
        )
        measures.extra_help = lambda: ""  # a list of known classes, for which all of torchmetrics would be imported
        parser.add_class_arguments(Schedule, "schedule")
        parser.add_class_arguments(EngineOptions, "engine")
        parser.add_class_arguments(ReplayBuffer, "buffer")
        for section, callback in OF_SECTIONS.items():
            parser.add_lightning_class_args(callback, section)
        for target, source in FOLLOWING.items():
            parser.link_arguments(source, target)
        for target, source in BUILT_FROM.items():
            parser.link_arguments(source, target, apply_on="instantiate")

    def _parse_ckpt_path(self) -> None:
        """Do nothing. Lightning would read the whole checkpoint here, for hyper-parameters that ours does not hold."""

    @property
    def _settings(self) -> Any:
        return self.config[self.subcommand]

    def _set_seed(self) -> None:
        """Check the seed, and set it as Lightning does."""
        seed = self._settings.seed_everything
        if not isinstance(seed, bool) and not 0 <= seed < 2**32:
            raise ConfigError("seed_everything", seed, "an integer from 0 to 4294967295")
        super()._set_seed()

    def before_instantiate_classes(self) -> None:
        """Replace the parsed configuration by the settled one, and check its checkpoint and some of its options."""
        self._fit_default_to_clients()
        plain = self._plain = self._plain_config()
        check_untyped(plain)
        check_options(plain)
        check_methods_names(plain, options_given())
        self.settled = settle(self._settings, plain, trains=self.subcommand == "fit")
        of_clients = plain["data"]["num_clients"], plain["schedule"]["clients_per_round"]
        self._first_line = first_line(method_name(plain["methods"]), self.settled.config.run.benchmark, *of_clients)
        checkpoint, self._rounds_done, self._files = self._checkpoint()
        settings = self.settled.config
        check_profiler(settings.trainer.profiler)
        if settings.get("weights_only") is False:
            raise ConfigError("weights_only", False, "true: checkpoints hold tensors and plain values only")
        settings.trainer.strategy = strategy_for(**{name: settings.trainer[name] for name in DECIDE_STRATEGY})
        check_optimizer_options(plain["model"]["optimizer"].get("init_args") or {})
        self._say_inherited_options(settings)
        settings.ckpt_path = checkpoint
        self.config = Namespace({**vars(self.config), self.subcommand: settings})

    def _say_inherited_options(self, settings: Namespace) -> None:
        """Say which options keep values that were meant for another class, such as another optimizer."""
        if self.subcommand != "fit" or not signals.is_first_process():
            return
        every = [*_default_options(), *options_given()]
        for key in KEYS:
            chosen = settings.get(key)
            if isinstance(chosen, Namespace) and "class_path" in chosen:
                options = chosen.get("init_args", Namespace()).as_dict()
                for line in inherited_options(every, key, chosen.class_path, options):
                    print(printable(line), flush=True)

    def _fit_default_to_clients(self) -> None:
        """Lower ``schedule.clients_per_round`` to the number of clients if it has its default."""
        schedule, default = self._settings.schedule, self._settings.schedule.clients_per_round
        fitting = fitting_clients_per_round(options_given(), self._settings.data.num_clients, default)
        if fitting == default:
            return
        schedule.clients_per_round = fitting
        if self.subcommand == "fit" and signals.is_first_process():
            line = f"schedule.clients_per_round is {fitting}, as data.num_clients, instead of the default {default}"
            print(line, flush=True)

    def instantiate_classes(self) -> None:
        """Build all classes as Lightning does. Errors name methods as typed, and classes that cannot be built."""
        settings = self._settings
        with (
            keys_as_typed(self.settled.methods),
            naming_what_cannot_be_made(self._plain),
            naming_what_fails(settings.trainer),
            data_root_given(settings.data.root),
            facts_of_run(self._files),
        ):
            super().instantiate_classes()

    def _run_subcommand(self, subcommand: str) -> None:
        trainer = self._settings.trainer
        late = {"logger": trainer.logger, "callbacks": trainer.callbacks}  # some fail only in the fit, such as wandb's
        with (
            keys_as_typed(self.settled.methods),
            self._saying_how_to_go_on(),
            naming_what_fails(late),
            naming_what_cannot_be_restored(self._settings.ckpt_path),
        ):
            super()._run_subcommand(subcommand)

    def _disk_error(self, error: Exception) -> NotWritten | None:
        """A NotWritten for an error of the disk, also one that a library has raised; None for any other error."""
        failed, folder = disk_error(error), Path(self._settings.run.dir)
        if failed is None or isinstance(failed, NotWritten):
            return failed and NotWritten(str(failed))
        file = failed.filename if isinstance(failed.filename, str) else None
        return not_written(Path(file or folder), failed, name=file or f"a file in {folder}")

    @contextmanager
    def _saying_how_to_go_on(self) -> Iterator[None]:
        """Within the context, some errors and signals name the command that continues the run.

        These are errors of the disk, also those that a library raises, and errors that recommend an option."""
        saved = Path(self._settings.run.dir) / CHECKPOINT
        shown, threading.excepthook = threading.excepthook, _only_once
        try:
            yield
        except signals.Stopped as stopped:
            if self.subcommand == "fit" and saved.exists():
                stopped.advice = f"; continue with: {self._continuing(saved)}"
            raise
        except Exception as error:
            disk = self._disk_error(error)
            reason: Any = disk or cause_elsewhere(error) or reason_for_user(error)
            advised = ADVICE.findall(str(reason)) if isinstance(reason, BadUpdate | ProcessFailed) else []
            if self.subcommand == "fit" and saved.exists() and (disk or advised):
                options = "".join(f" --{key} {value}" for key, value in advised)
                raise type(reason)(f"{reason}; continue with: {self._continuing(saved)}{options}") from error
            if disk:
                raise disk from error
            raise
        finally:
            threading.excepthook = shown

    def _plain_config(self) -> dict[str, Any]:
        # Without validation, because the values have just been parsed and it takes long. JSON is read faster than YAML.
        parser = self._parser(self.subcommand)
        text = parser.dump(self._settings, format="json", skip_unset=False, skip_validation=True)
        plain = json.loads(text)
        plain["methods"] = plain.get("methods") or {}
        return plain

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Check everything that can be checked before data are read, then build the Trainer."""
        signals.hold()  # from now on the run folder may be locked, and must be released
        data: FederatedDataModule = self.datamodule
        record: RunRecord = self._get(self.config_init, "run")
        record.experiment, record.config_hash = self.settled.experiment, self.settled.config_hash
        record.config_yaml, record.wandb_id = self.settled.config_yaml, self.settled.wandb_id
        check_settings(self._settings.trainer, data.num_rounds)
        kwargs["accelerator"] = accelerator_for(self._settings.trainer.accelerator)
        if self.subcommand == "fit":
            self._get(self.config_init, "targets").check(data.schedule, data.num_tasks)
        checkpoint = self._settings.ckpt_path
        if self.subcommand == "fit" and (self._rounds_done or 0) >= data.num_rounds and signals.is_first_process():
            print(f"{checkpoint} is of a finished run: nothing is left to train", flush=True)
        try:
            # Files that have no other place, such as a profiler's, go to the run folder.
            trainer = super().instantiate_trainer(
                max_epochs=data.num_rounds, default_root_dir=self._settings.run.dir, **kwargs
            )
        except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
            if not isinstance(reason_for_user(error), MisconfigurationException | None):
                raise
            raise refused_by_lightning(self._settings.trainer, str(error)) from error
        if self.subcommand == "fit":
            here = checkpoint is not None and Path(checkpoint).parent.resolve() == record.folder.resolve()
            if here and record.overwrite:
                raise ConfigError("run.overwrite", True, "false with ckpt_path, which goes on with the folder's run")
            record.prepare(resuming=here, write=trainer.is_global_zero)
        return trainer

    def after_instantiate_classes(self) -> None:
        """Refuse Trainer settings that do not work in a federated run; before a fit, print the header."""
        if self.subcommand == "fit":
            check_trainer(self.trainer, self.datamodule)
            self._say_what_and_where()
        else:
            check_evaluation(self.trainer)

    def _say_what_and_where(self) -> None:
        """Print the header, without a first line that has been printed already."""
        if not (self._settings.progress.enabled and self.trainer.is_global_zero):
            return
        if self.announced != self._first_line:
            print(self._first_line)
        device, processes = self.trainer.strategy.root_device, self.trainer.world_size
        of_all = f", {processes} processes" if processes > 1 else ""
        print(printable(f"device {device}{of_all}, run folder {self._settings.run.dir}"), flush=True)

    def _checkpoint(self) -> tuple[str | None, int | None, Mapping[str, Any]]:
        """The checkpoint's file, and see :func:`check_checkpoint`; (None, None, {}) to start from the beginning.

        The file is compared with the configuration before anything is built."""
        given, folder = self.settled.config.ckpt_path, Path(self.settled.config.run.dir)
        if given is None:
            if self.subcommand != "fit":
                raise ConfigError("ckpt_path", None, f"a checkpoint to score, e.g. RUN/{CHECKPOINT}, or last")
            return None, None, {}
        path = folder / CHECKPOINT if given == "last" else Path(given)
        if given == "last" and not os.path.exists(path) and self.subcommand == "fit":
            if signals.is_first_process():
                print(f"no checkpoint in {folder} yet: starting from the first round", flush=True)
            return None, None, {}
        configured, resumes = bool(self._settings.get("config")), self.subcommand == "fit"
        return str(path), *check_checkpoint(path, self.settled.experiment, configured, resumes)

    def after_fit(self) -> None:
        """End an interrupted fit with the signal's exit status, so that scripts and schedulers notice.

        With several processes only the first does so. Another process with such a status would count as failed.
        """
        if self.model.federation.finished or not self.trainer.is_global_zero:  # the signal came in the last round
            return
        for callback in callbacks_of(self.trainer, RoundCheckpoint):
            if callback.interrupted_by is not None:
                saved = f"continue with: {self._continuing(Path(self._settings.run.dir) / CHECKPOINT)}"
                print(f"interrupted; {saved if callback.enabled else 'checkpoint.enabled is false'}", flush=True)
                raise SystemExit(128 + callback.interrupted_by)

    def _continuing(self, checkpoint: Path) -> str:
        """The command that continues the run, as one could type it."""
        allowed = (word for path in classes_beyond(self._settings) for word in (ALLOW, path))
        return shlex.join(["cfl", "fit", "--ckpt_path", str(checkpoint), *allowed])


def _only_once(thread: threading.ExceptHookArgs) -> None:
    """Show the error of a thread, unless it is of the disk. A logger's thread that cannot write passes its error on."""
    if disk_error(thread.exc_value) is None:
        threading.__excepthook__(thread)


def _default_options() -> Iterator[Given]:
    """The options of the default configuration, whose file may not be taken for a ``default.yaml`` of the user's."""
    return in_content(read_yaml(DEFAULT_CONFIG), f"configs/{DEFAULT_CONFIG.name}")
