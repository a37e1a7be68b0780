"""The parser of the command line. It accepts no abbreviations, and reports a refused option in one line."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import SUPPRESS, ActionConfigFile, set_loader
from lightning.pytorch.cli import LightningArgumentParser

from cfl.cli.broken_modules import naming_broken_modules
from cfl.cli.class_entries import check_entries
from cfl.cli.class_help import show_help_asked_for, with_list_of_classes
from cfl.cli.clients_of_a_round import fitting_clients_per_round
from cfl.cli.given import Given, in_content, is_written_out, last_given, on_command_line, wrong_keys
from cfl.cli.import_policy import require_classes
from cfl.cli.installed_configs import DEFAULT_CONFIG, find_config, is_config, is_installed
from cfl.cli.joining import joined, joined_loggers, named_classes
from cfl.cli.leaves import check_leaves, dropped
from cfl.cli.linked_defaults import FOLLOWING, NAMED, check_given
from cfl.cli.plugins import import_named_in
from cfl.cli.reasons import debugging, reason_for_user
from cfl.cli.refusals import Refusal, allows_null, refusal, sentence
from cfl.reporting.former_names import REMOVED, RENAMED, with_moved_classes, with_renamed_options
from cfl.runtime.command_line import words_with_values
from cfl.runtime.errors import ConfigError, NotUnderstood
from cfl.runtime.printable import printable
from cfl.runtime.yaml_file import BadYAML, parse_yaml, read_yaml

_log = logging.getLogger(__name__)
_ROLE = re.compile(r":[a-z]+:`(~?)([^`]+)`")
_MODE = "cfl"
"""Name by which jsonargparse knows :func:`cfl.runtime.yaml_file.parse_yaml`."""
set_loader(_MODE, parse_yaml, exceptions=(BadYAML,))
_given: list[Given | str] = []
"""Options given by the words of the command line that is being parsed, and its configuration files, as typed."""
_in_files: dict[str, list[Given]] = {}
"""A file as typed -> the options that it gives."""
_refused: list[Refusal] = []
"""Options of it that parsers of single classes have refused. Another class may have accepted them since."""


class _ConfigFile(ActionConfigFile):
    """Reads a configuration file. Its methods, measures and loggers are joined with those of earlier files."""

    @staticmethod
    def apply_config(parser: Any, cfg: Any, dest: str, value: Any) -> None:
        """Apply a file's options. ``methods: {}`` or ``trainer.logger: false`` in it drop those of earlier files."""
        before, loggers = {name: cfg.get(name) for name in NAMED}, named_classes(cfg.get("trainer.logger"))
        typed = value
        if not is_written_out(value):
            value = str(find_config(dest, value))
        content = _content(dest, value)
        given = list(in_content(content, None if is_written_out(value) else value))
        _in_files[typed] = [one for one in given if one.file]  # before the checks, whose messages name the file
        check_entries(content)
        check_given(given, {action.dest.partition(".")[0] for action in parser._actions if "." in action.dest})
        section = content.get("trainer")
        own = section.get("logger") if isinstance(section, Mapping) else content.get("trainer.logger")
        more = loggers and named_classes(own)
        if more:
            cfg["trainer.logger"] = None  # another class would take over its options of the same names
        ActionConfigFile.apply_config(parser, cfg, dest, value)
        for name, earlier in before.items():
            if earlier and cfg.get(name):
                cfg[name] = joined(earlier, cfg[name])
        if more:
            every = joined_loggers(loggers, named_classes(cfg["trainer.logger"]))
            cfg["trainer.logger"] = every if len(every) > 1 else every[0]


def _content(key: str, value: str) -> Mapping[str, Any]:
    """The content of a file. Errors name the file and the place in it, which the parser's own do not."""
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
    """Lightning's parser, which accepts option names only in full and reports errors in one line.

    jsonargparse builds further parsers of this class for the options of single classes.

    Attributes:
        owner: name of the single class whose options it parses; empty for a command's parser.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "prog": "cfl", "parser_mode": _MODE, **kwargs})
        self.owner = ""

    def add_class_arguments(self, theclass: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a class's options as the base class does, and note the class in a parser for single classes."""
        if not self.exit_on_error:
            self.owner = theclass.__name__
        return super().add_class_arguments(theclass, *args, **kwargs)

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """Add an option as the base class does, but read configuration files by :class:`_ConfigFile`."""
        if kwargs.get("action") is ActionConfigFile:
            kwargs["action"] = _ConfigFile
        return super().add_argument(*args, **kwargs)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse a command line as the base class does, and check the values that it gives.

        Former paths of classes that have moved are accepted. Notes about an earlier command line are deleted.
        """
        if not self.exit_on_error:  # a parser for the options of one class
            # jsonargparse passes a null that it has parsed on to the next class's parser as the text None.
            of_class = [f"{word[:-4]}null" if word.endswith("=None") else word for word in args[0]]
            return super().parse_args(of_class, *args[1:], **kwargs)
        for noted in (_given, _in_files, _refused):
            noted.clear()
        given = args[0] if args else kwargs.pop("args", None)
        words = list(map(str, sys.argv[1:] if given is None else given))
        _given.extend(_in_order(words))
        check_given(options_given())
        import_named_in("\n".join(words))
        commands = self._subcommands_action.choices if self._subcommands_action else {}
        show_help_asked_for(commands.get(words[0], self) if words else self, words)
        with naming_broken_modules(options_given):
            found = super().parse_args([with_moved_classes(word) for word in words], *args[1:], **kwargs)
        config = found.get(found.get("subcommand"), found)
        chosen = commands.get(found.get("subcommand"), self)
        sections = {action.dest.partition(".")[0] for action in chosen._actions}
        require_classes(config, copies=FOLLOWING, sections=sections)
        check_leaves(config, options_given(), copies=FOLLOWING)
        # Installed configurations are meant to be combined, so there is no warning about their options.
        of_user = {one.key: one for one in options_given() if one.file and not is_installed(one.file)}
        for warning in dropped(config, list(of_user.values())) if config is found else ():  # only a command's parser
            _log.warning("%s", printable(warning))
        return found

    def parse_string(self, *args: Any, **kwargs: Any) -> Any:
        """Parse a file's content as the base class does. Former names of classes and options are accepted."""
        content = args[0] if args else kwargs.pop("content")
        import_named_in(content)
        args = (_with_renamed_options(with_moved_classes(content)), *args[1:])
        return super().parse_string(*args, **kwargs)

    def validate(self, namespace: Any, *args: Any, **kwargs: Any) -> None:
        """Validate as the base class does, and refuse null if an option's type does not allow it.

        Options whose default is null may be null."""
        super().validate(namespace, *args, **kwargs)
        for action in self._actions:
            kind = getattr(action, "_typehint", None)
            if kind is None or action.default in (None, SUPPRESS) or allows_null(kind):
                continue
            if action.dest in namespace and namespace[action.dest] is None:
                error: Any = TypeError(f'Parser key "{action.dest}": null is no value of it')
                error.subcommand_parser = self  # the attribute by which jsonargparse names an option's parser
                raise error

    def dump(self, cfg: Any, *args: Any, **kwargs: Any) -> str:
        """Write a configuration as the base class does, with the number of clients per round that a run would use.

        This is also the output of ``--print_config``."""
        if "schedule" in cfg and "data" in cfg:
            cfg = cfg.clone()
            schedule, clients = cfg.schedule, cfg.data.num_clients
            schedule.clients_per_round = fitting_clients_per_round(options_given(), clients, schedule.clients_per_round)
        text: str = super().dump(cfg, *args, **kwargs)
        return text

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Format the help as the base class does, without the roles of names in docstrings.

        The help of a single class also lists the classes derived from it."""
        for action in self._actions:
            action.help = _without_roles(action.help)
        for group in self._action_groups:
            group.title, group.description = _without_roles(group.title), _without_roles(group.description)
        text: str = with_list_of_classes(super().format_help(*args, **kwargs), self.description)
        return text.replace("usage: cfl [options] ", "usage: cfl ", 1)  # options stand behind a command's name

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an error of one sentence; with JSONARGPARSE_DEBUG=true, the original error.

        Raises:
            NotUnderstood: the command line is refused.
            Refusal: a parser for the options of one class refuses one of them.
            argparse.ArgumentError: such a parser fails, but not because of an option.
        """
        parser = getattr(ex, "subcommand_parser", None) or self
        refused = refusal(parser, message, ex, _refused)
        if not self.exit_on_error:  # for the options of one class, whose key only the outer parser knows
            if refused is None:
                raise argparse.ArgumentError(None, message) from ex
            _refused.append(refused)
            raise refused from ex
        if debugging():
            raise ex or ValueError(message)
        reason: Any = reason_for_user(ex)
        if reason is not None:
            reason = f"{reason}{place_of(reason)}"
        else:
            reason = _with_hint(message) if refused is None else sentence(refused, options_given())
        raise NotUnderstood(reason) from ex


def _with_hint(message: str) -> str:
    """The parser's message in one line; where a configuration is given as a bare word, with the option for it."""
    line = " ".join(message.split())
    _, stray, words = line.partition("unrecognized arguments: ")
    files = [word for word in words.split() if stray and word.endswith((".yaml", ".yml"))]
    if not any(map(is_config, files)):
        return line
    return f"{line}; a configuration is given by --config, e.g. --config {next(filter(is_config, files))}"


def _with_renamed_options(text: str) -> str:
    """A configuration's text with present names of options in place of former ones; unchanged if it has none."""
    if not any(name in text for name in (*RENAMED, *REMOVED)):
        return text
    content = parse_yaml(text)
    renamed = with_renamed_options(content)
    return text if renamed == content else yaml.safe_dump(renamed, sort_keys=False)


def options_given() -> list[Given]:
    """The options that the last parsed command line and its files have given, in the order of the command line."""
    return [one for noted in _given for one in (_in_files.get(noted, ()) if isinstance(noted, str) else (noted,))]


def _in_order(words: Sequence[str]) -> Iterator[Given | str]:
    """The options that words give, and names of configuration files in their places."""
    for option, value in words_with_values(words):
        if option in ("--config", "-c") and not is_written_out(value):
            yield with_moved_classes(value)  # as the parser is given it
        else:
            yield from on_command_line([f"{option}={value}"])


def place_of(error: BaseException) -> str:
    """`` (in FILE)`` if the refused value is from a configuration file, which may be meant for another class."""
    if not isinstance(error, ConfigError):
        return ""
    defaults = in_content(read_yaml(DEFAULT_CONFIG), str(DEFAULT_CONFIG))
    found = last_given(error.key, [*defaults, *options_given()])
    return f" (in {found.file})" if found.file and str(found.value) in str(error.value) else ""


def _without_roles(text: str | None) -> str | None:
    """Replace roles of docstrings by the names in them. Of a path after a tilde only the last part remains."""
    return text and _ROLE.sub(lambda found: found[2].rpartition(".")[2] if found[1] else found[2], text)
