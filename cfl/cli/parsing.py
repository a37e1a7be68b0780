"""The parser behind the command line: no abbreviations, and one line for whatever it does not accept."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ActionConfigFile, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser

from cfl.cli.given import in_content, on_command_line
from cfl.cli.import_policy import require_classes
from cfl.cli.installed_configs import find_config
from cfl.cli.linked_defaults import FOLLOWING, check_given
from cfl.cli.refusals import Refusal, refusal, sentence
from cfl.reporting.experiment import with_moved_classes
from cfl.runtime.disk import is_of_disk
from cfl.runtime.errors import FOR_USERS, ConfigError, NotWritten
from cfl.runtime.printable import printable

_SAID_IN_FULL = (*FOR_USERS, MisconfigurationException)
_ROLE = re.compile(r":[a-z]+:`(~?)([^`]+)`")
_read: list[tuple[str, Mapping[str, Any]]] = []
"""The configuration files of the command line that is being parsed, each with what it holds."""
_words: list[str] = []
"""The words of that command line."""
_refused: list[Refusal] = []
"""What the parsers of classes have refused of it; another class may have been found to do."""


class _ConfigFile(ActionConfigFile):
    """A configuration file whose methods and loggers join those of the files before, which they would replace else."""

    @staticmethod
    def apply_config(parser: Any, cfg: Any, dest: str, value: Any) -> None:
        """As the base class; ``methods: {}`` or ``trainer.logger: false`` in a file drop what was there before."""
        before, loggers = cfg.get("methods"), _named_classes(cfg.get("trainer.logger"))
        if not _is_inline(value):
            value = str(find_config(dest, value))
        content = _content(dest, value)
        check_given(
            in_content(content), {action.dest.partition(".")[0] for action in parser._actions if "." in action.dest}
        )
        trainer = content.get("trainer")
        more = loggers and isinstance(trainer, Mapping) and _named_classes(trainer.get("logger"))
        if more:
            cfg["trainer.logger"] = None  # another class would take over its options of the same names
        ActionConfigFile.apply_config(parser, cfg, dest, value)
        if before and cfg.get("methods"):
            cfg["methods"] = joined(before, cfg["methods"])
        if more:
            every = joined_loggers(loggers, _named_classes(cfg["trainer.logger"]))
            cfg["trainer.logger"] = every if len(every) > 1 else every[0]


def _is_inline(value: str) -> bool:
    """Whether this is the configuration itself, not the name of a file."""
    return any(sign in value for sign in "{\n")


def _content(key: str, value: str) -> Mapping[str, Any]:
    """What a file holds; refuses one that is no YAML by name: the parser tells neither file nor place."""
    if _is_inline(value):
        return _mapping_in(key, value, value)
    try:
        text = Path(value).read_bytes()
    except OSError as error:
        raise ConfigError(key, value, f"a file that can be read ({error.strerror})") from None
    content = _mapping_in(key, value, text)
    _read.append((value, content))
    return content


def _mapping_in(key: str, value: str, text: str | bytes) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}: {getattr(error, 'problem', '')})" if mark else ""
        raise ConfigError(key, value, f"a YAML file{where}") from None
    if not isinstance(content, dict):
        raise ConfigError(key, value, "a YAML file that holds a mapping")
    return content


def joined(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Methods of two configurations by name, the first one's first.

    Of a name in both, the second one's options are laid over the first one's if it is the same class; else the second
    one's method takes the first one's place.
    """
    found = dict(before)
    for name, method in after.items():
        old, new = _plain(before.get(name)), _plain(method)
        same = "class_path" in old and "class_path" in new and _short(old) == _short(new)
        options = {**(old.get("init_args") or {}), **(new.get("init_args") or {})}
        found[name] = {**new, "init_args": options} if same and options else method
    return found


def joined_loggers(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """Loggers of two configurations, the first one's first; of a class in both as :func:`joined` has it.

    Where one configuration has several of a class that is in both, those of the second one take the others' place.
    """
    ours, theirs = ([_short(_plain(logger)) for logger in loggers] for loggers in (before, after))
    one_each = {name for name in ours if ours.count(name) == theirs.count(name) == 1}
    found = []
    for name, logger in zip(ours, before, strict=True):
        if name in one_each:
            logger = joined({name: logger}, {name: after[theirs.index(name)]})[name]
        if name in one_each or name not in theirs:
            found.append(logger)
    return [*found, *(logger for name, logger in zip(theirs, after, strict=True) if name not in one_each)]


def _named_classes(loggers: Any) -> list[Any]:
    """Those of a configuration's loggers that name their classes."""
    return [one for one in (loggers if isinstance(loggers, list) else [loggers]) if "class_path" in _plain(one)]


def _plain(method: Any) -> dict[str, Any]:
    method = method.as_dict() if isinstance(method, Namespace) else method
    if isinstance(method, str):
        return {"class_path": method}
    return dict(method) if isinstance(method, Mapping) else {}


def _short(method: Mapping[str, Any]) -> str:
    return str(method["class_path"]).rpartition(".")[2]


class Parser(LightningArgumentParser):
    """Lightning's parser, with option names in full only and errors in one line.

    jsonargparse makes further ones for the options of single classes, which would have the name of a Python file.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "prog": "cfl", **kwargs})
        self.owner = ""

    def add_class_arguments(self, theclass: Any, *args: Any, **kwargs: Any) -> Any:
        """As ever, remembering whose options they are."""
        if not self.exit_on_error:
            self.owner = theclass.__name__
        return super().add_class_arguments(theclass, *args, **kwargs)

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """As ever; configuration files are those whose methods join."""
        if kwargs.get("action") is ActionConfigFile:
            kwargs["action"] = _ConfigFile
        return super().add_argument(*args, **kwargs)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, remembering nothing of an earlier command line.

        Classes that have moved go by their former paths, too.
        """
        _read.clear()
        _refused.clear()
        given = args[0] if args else kwargs.pop("args", None)
        _words[:] = map(str, sys.argv[1:] if given is None else given)
        check_given(on_command_line(_words))
        found = super().parse_args([with_moved_classes(word) for word in _words], *args[1:], **kwargs)
        require_classes(found.get(found.get("subcommand"), found), copies=FOLLOWING)
        return found

    def parse_string(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, for a file's content; classes that have moved go by their former paths, too."""
        if args:
            args = (with_moved_classes(args[0]), *args[1:])
        else:
            kwargs["content"] = with_moved_classes(kwargs["content"])
        return super().parse_string(*args, **kwargs)

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """As ever, without the roles that docstrings mark names with."""
        for action in self._actions:
            action.help = _without_roles(action.help)
        for group in self._action_groups:
            group.title, group.description = _without_roles(group.title), _without_roles(group.description)
        text: str = super().format_help(*args, **kwargs)
        return text

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong and exit with 2; with JSONARGPARSE_DEBUG=true, raise with the whole trace."""
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
            given = [one for file, content in _read for one in in_content(content, file)]
            given += on_command_line(_words)
            reason = " ".join(message.split()) if refused is None else sentence(refused, given)
        print(printable(f"error: {reason}"), file=sys.stderr)
        raise SystemExit(2)


def _without_roles(text: str | None) -> str | None:
    """Docstring markup as words: a path after a tilde is shown by its last part."""
    return text and _ROLE.sub(lambda found: found[2].rpartition(".")[2] if found[1] else found[2], text)


def debugging() -> bool:
    """Whether JSONARGPARSE_DEBUG asks for traces instead of messages."""
    return os.environ.get("JSONARGPARSE_DEBUG", "").lower() not in ("", "0", "false", "no")


def reason_for_user(error: BaseException | None) -> BaseException | None:
    """The error in a chain of causes whose message is meant for the user, or None."""
    return next((one for one in _causes(error) if isinstance(one, _SAID_IN_FULL)), None)


def disk_error(error: BaseException | None) -> OSError | None:
    """The error in a chain of causes that a disk made, also one that a library has met, or None.

    An error whose message is meant for the user comes before its causes.
    """
    for one in _causes(error):
        if isinstance(one, NotWritten) or is_of_disk(one):
            return one if isinstance(one, OSError) else None
        if isinstance(one, _SAID_IN_FULL):
            return None
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
