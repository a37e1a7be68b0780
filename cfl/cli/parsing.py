"""The parser behind the command line: no abbreviations, and one line for whatever it does not accept."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import SUPPRESS, ActionConfigFile, set_loader
from lightning.pytorch.cli import LightningArgumentParser

from cfl.cli.broken_modules import naming_broken_modules
from cfl.cli.class_entries import check_entries
from cfl.cli.clients_of_a_round import fitting_clients_per_round
from cfl.cli.given import Given, in_content, is_written_out, on_command_line, value_of, wrong_keys
from cfl.cli.import_policy import require_classes
from cfl.cli.installed_configs import DEFAULT_CONFIG, find_config, is_installed
from cfl.cli.joining import joined, joined_loggers, named_classes
from cfl.cli.leaves import check_leaves, dropped
from cfl.cli.linked_defaults import FOLLOWING, check_given
from cfl.cli.plugins import import_named_in
from cfl.cli.reasons import debugging, reason_for_user
from cfl.cli.refusals import Refusal, allows_null, refusal, sentence
from cfl.reporting.experiment import RENAMED, with_moved_classes, with_renamed_options
from cfl.runtime.errors import ConfigError, NotUnderstood
from cfl.runtime.printable import printable
from cfl.runtime.yaml_file import BadYAML, parse_yaml, read_yaml

_log = logging.getLogger(__name__)
_ROLE = re.compile(r":[a-z]+:`(~?)([^`]+)`")
_MODE = "cfl"
"""Name by which jsonargparse knows :func:`cfl.runtime.yaml_file.parse_yaml`."""
set_loader(_MODE, parse_yaml, exceptions=(BadYAML,))
_in_files: list[Given] = []
"""What the configuration files of the command line that is being parsed say."""
_in_words: list[Given] = []
"""What the words of that command line say."""
_refused: list[Refusal] = []
"""What the parsers of classes have refused of it; another class may have been found to do."""


class _ConfigFile(ActionConfigFile):
    """A configuration file whose methods and loggers join those of the files before, which they would replace else."""

    @staticmethod
    def apply_config(parser: Any, cfg: Any, dest: str, value: Any) -> None:
        """As the base class; ``methods: {}`` or ``trainer.logger: false`` in a file drop what was there before."""
        before, loggers = cfg.get("methods"), named_classes(cfg.get("trainer.logger"))
        if not is_written_out(value):
            value = str(find_config(dest, value))
        content = _content(dest, value)
        check_entries(content)
        given = list(in_content(content, None if is_written_out(value) else value))
        check_given(given, {action.dest.partition(".")[0] for action in parser._actions if "." in action.dest})
        _in_files.extend(one for one in given if one.file)
        trainer = content.get("trainer")
        more = loggers and isinstance(trainer, Mapping) and named_classes(trainer.get("logger"))
        if more:
            cfg["trainer.logger"] = None  # another class would take over its options of the same names
        ActionConfigFile.apply_config(parser, cfg, dest, value)
        if before and cfg.get("methods"):
            cfg["methods"] = joined(before, cfg["methods"])
        if more:
            every = joined_loggers(loggers, named_classes(cfg["trainer.logger"]))
            cfg["trainer.logger"] = every if len(every) > 1 else every[0]


def _content(key: str, value: str) -> Mapping[str, Any]:
    """What a file holds; refuses one that is no YAML by name: the parser tells neither file nor place."""
    try:
        content = parse_yaml(value) if is_written_out(value) else read_yaml(Path(value))
    except OSError as error:
        raise ConfigError(key, value, f"a file that can be read ({error.strerror})") from None
    except BadYAML as error:
        raise ConfigError(key, value, f"a YAML file ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(key, value, "a YAML file that holds a mapping")
    if wrong := wrong_keys(content):
        raise ConfigError(key, value, f"a YAML file ({wrong})")
    return dict(with_renamed_options(content))


class Parser(LightningArgumentParser):
    """Lightning's parser, with option names in full only and errors in one line.

    jsonargparse makes further ones for the options of single classes, which would have the name of a Python file.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "prog": "cfl", "parser_mode": _MODE, **kwargs})
        self.owner = ""

    def add_class_arguments(self, theclass: Any, *args: Any, **kwargs: Any) -> Any:
        """As the base class, remembering whose options they are."""
        if not self.exit_on_error:
            self.owner = theclass.__name__
        return super().add_class_arguments(theclass, *args, **kwargs)

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class; configuration files are those whose methods join."""
        if kwargs.get("action") is ActionConfigFile:
            kwargs["action"] = _ConfigFile
        return super().add_argument(*args, **kwargs)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class, remembering nothing of an earlier command line.

        Classes that have moved go by their former paths, too.
        """
        if not self.exit_on_error:  # for the options of one class, from words of the command line
            return super().parse_args(*args, **kwargs)
        for noted in (_in_files, _in_words, _refused):
            noted.clear()
        given = args[0] if args else kwargs.pop("args", None)
        words = list(map(str, sys.argv[1:] if given is None else given))
        _in_words.extend(on_command_line(words))
        check_given(_in_words)
        import_named_in("\n".join(words))
        with naming_broken_modules(options_given):
            found = super().parse_args([with_moved_classes(word) for word in words], *args[1:], **kwargs)
        config = found.get(found.get("subcommand"), found)
        require_classes(config, copies=FOLLOWING)
        check_leaves(config, options_given(), copies=FOLLOWING)
        # The files that come along are made to be laid over each other.
        of_user = {one.key: one for one in _in_files if not is_installed(str(one.file))}
        for warning in dropped(config, list(of_user.values())) if config is found else ():  # once: this is a command's
            _log.warning("%s", printable(warning))
        return found

    def parse_string(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class, for a file's content; classes and options go by their former names, too."""
        content = args[0] if args else kwargs.pop("content")
        import_named_in(content)
        args = (_with_renamed_options(with_moved_classes(content)), *args[1:])
        return super().parse_string(*args, **kwargs)

    def validate(self, namespace: Any, *args: Any, **kwargs: Any) -> None:
        """As the base class, without null where an option has another default and its type does not allow it."""
        super().validate(namespace, *args, **kwargs)
        for action in self._actions:
            kind = getattr(action, "_typehint", None)
            if kind is None or action.default in (None, SUPPRESS) or allows_null(kind):
                continue
            if action.dest in namespace and namespace[action.dest] is None:
                error: Any = TypeError(f'Parser key "{action.dest}": null is no value of it')
                error.subcommand_parser = self  # as jsonargparse says whose option it is
                raise error

    def dump(self, cfg: Any, *args: Any, **kwargs: Any) -> str:
        """As the base class, with the clients per round that a run would have, also for ``--print_config``."""
        if "schedule" in cfg and "data" in cfg:
            cfg = cfg.clone()
            schedule, clients = cfg.schedule, cfg.data.num_clients
            schedule.clients_per_round = fitting_clients_per_round(options_given(), clients, schedule.clients_per_round)
        text: str = super().dump(cfg, *args, **kwargs)
        return text

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """As the base class, without the roles that docstrings mark names with."""
        for action in self._actions:
            action.help = _without_roles(action.help)
        for group in self._action_groups:
            group.title, group.description = _without_roles(group.title), _without_roles(group.description)
        text: str = super().format_help(*args, **kwargs)
        return text.replace("usage: cfl [options] ", "usage: cfl ", 1)  # options stand behind a command's name

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise what is wrong in one sentence; with JSONARGPARSE_DEBUG=true, with the whole trace."""
        parser = getattr(ex, "subcommand_parser", None) or self
        refused = refusal(parser, message, ex, _refused)
        if not self.exit_on_error:  # the options of one class: the parser around it knows under which key they stand
            if refused is None:
                raise argparse.ArgumentError(None, message) from ex
            _refused.append(refused)
            raise refused from ex
        if debugging():
            raise ex or ValueError(message)
        reason: Any = reason_for_user(ex)
        if reason is None:
            reason = " ".join(message.split()) if refused is None else sentence(refused, options_given())
        raise NotUnderstood(str(reason)) from ex


def _with_renamed_options(text: str) -> str:
    """A configuration's text with the names that options have now; unchanged if it has no former one."""
    if not any(name in text for name in RENAMED):
        return text
    content = parse_yaml(text)
    renamed = with_renamed_options(content)
    return text if renamed == content else yaml.safe_dump(renamed, sort_keys=False)


def options_given() -> list[Given]:
    """What the command line that was parsed last, and its files, have said."""
    return [*_in_files, *_in_words]


def place_of(error: BaseException) -> str:
    """`` (in FILE)`` where the refused value stands in a configuration file, written for another class maybe."""
    if not isinstance(error, ConfigError):
        return ""
    defaults = in_content(read_yaml(DEFAULT_CONFIG), str(DEFAULT_CONFIG))
    found = value_of(error.key, [*defaults, *options_given()])
    return f" (in {found.file})" if found.file and str(found.value) in str(error.value) else ""


def _without_roles(text: str | None) -> str | None:
    """Docstring markup as words: a path after a tilde is shown by its last part."""
    return text and _ROLE.sub(lambda found: found[2].rpartition(".")[2] if found[1] else found[2], text)
