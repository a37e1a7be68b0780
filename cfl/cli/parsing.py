"""The parser behind the command line: no abbreviations, and one line for whatever it does not accept."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ActionConfigFile, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser

from cfl.cli.commands import OTHERS, TRAINING
from cfl.cli.import_policy import require_classes
from cfl.cli.installed_configs import find_config
from cfl.cli.linked_defaults import BUILT_FROM, FOLLOWING, check_content, check_words
from cfl.cli.methods_given import NO_CLASS, UNKNOWN, Given, in_file, on_command_line, with_name
from cfl.data.augmentation import Augmentation
from cfl.data.participation import Participation
from cfl.data.partitions import Partition
from cfl.data.sequences import TaskSequences
from cfl.data.sources import Source
from cfl.data.streams import Stream
from cfl.methods import Method
from cfl.models import Network
from cfl.reporting.experiment import with_moved_classes
from cfl.runtime.command_line import ALLOW
from cfl.runtime.errors import BadUpdate, ConfigError, DamagedFile, DataFilesMissing
from cfl.runtime.printable import printable
from cfl.training.client import ELEMENTWISE_OPTIMIZERS

_PLUGINS: dict[str, type] = {
    "<name>": Method,
    "network": Network,
    "stream": Stream,
    "source": Source,
    "sources": Source,
    "partition": Partition,
    "participation": Participation,
    "of": Participation,
    "augmentation": Augmentation,
    "sequences": TaskSequences,
}
_SAID_IN_FULL = (ConfigError, DataFilesMissing, BadUpdate, DamagedFile, MisconfigurationException)
_TYPES = {
    "NoneType": "null",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "collections.abc.Sequence": "a list",
    "dict": "a mapping",
}
_LOGGER = "--trainer.logger CSVLogger --trainer.logger.save_dir . (the run folder)"
_WITH_ALLOW = (
    "a class of cfl, torch.optim or Lightning's loggers, as nobody has named this configuration; "
    f"{ALLOW} PACKAGE, if you trust it, adds another package"
)
_OF_A_RUN = "a class that builds a part of a run"
_REQUIRED = re.compile(r"class_path '(?:\S+\.)?(\w+)':\s+the following arguments are required: (\w+(?:, \w+)*)")
_ROLE = re.compile(r":[a-z]+:`(~?)([^`]+)`")
_read: list[tuple[str, Mapping[str, Any]]] = []
"""The configuration files of the command line that is being parsed, each with what it holds."""
_words: list[str] = []
"""The words of that command line."""


class _ConfigFile(ActionConfigFile):
    """A configuration file whose methods and loggers join those of the files before, which they would replace else."""

    @staticmethod
    def apply_config(parser: Any, cfg: Any, dest: str, value: Any) -> None:
        """As the base class; ``methods: {}`` or ``trainer.logger: false`` in a file drop what was there before."""
        before, loggers = cfg.get("methods"), _named_classes(cfg.get("trainer.logger"))
        if not _is_inline(value):
            value = str(find_config(dest, value))
        content = _content(dest, value)
        check_content(content, {action.dest.partition(".")[0] for action in parser._actions if "." in action.dest})
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
        given = args[0] if args else kwargs.pop("args", None)
        _words[:] = map(str, sys.argv[1:] if given is None else given)
        check_words(_words)
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
        if not self.exit_on_error:  # the options of one class: the parser around it knows under which key they stand
            unknown = _unknown_option(message)
            names = [action.dest for action in self._actions if action.dest != "help"]
            raise argparse.ArgumentError(None, _no_option(unknown, names) if unknown else message) from ex
        if debugging():
            raise ex or ValueError(message)
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [action.dest for action in parser._actions]
        unknown = _unknown_option(message)
        file = next((f" (in {name})" for name, content in reversed(_read) if unknown and _holds(content, unknown)), "")
        reason = reason_for_user(ex) or with_name(one_line(message, options), message, _methods_given())
        print(printable(f"error: {reason}{file}"), file=sys.stderr)
        raise SystemExit(2)


def _methods_given() -> list[Given]:
    """What the command line that is being parsed says of methods, in its files and in its options."""
    files = [given for _, content in _read for given in in_file(content.get("methods"))]
    return [*files, *on_command_line(_words)]


def _without_roles(text: str | None) -> str | None:
    """Docstring markup as words: a path after a tilde is shown by its last part."""
    return text and _ROLE.sub(lambda found: found[2].rpartition(".")[2] if found[1] else found[2], text)


def _holds(content: Mapping[str, Any], key: str) -> bool:
    """Whether a file sets a dotted key."""
    found: Any = content
    for name in key.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return False
        found = found[name]
    return True


def debugging() -> bool:
    """Whether JSONARGPARSE_DEBUG asks for traces instead of messages."""
    return os.environ.get("JSONARGPARSE_DEBUG", "").lower() not in ("", "0", "false", "no")


def reason_for_user(error: BaseException | None) -> BaseException | None:
    """The error in a chain of causes whose message is meant for the user, or None."""
    while error is not None and not isinstance(error, _SAID_IN_FULL):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error


def one_line(message: str, options: list[str]) -> str:
    """A message of jsonargparse as one line that names key, value and what would be valid, as far as it tells them.

    Args:
        message: nested, each level behind ``Parser key "..."``.
        options: what the parser accepts on its top level.
    """
    key = ".".join(re.findall(r'Parser key "([^"]+)"', message))
    if invalid := re.search(r"argument subcommand: invalid choice: '(.*?)'", message):
        return str(ConfigError("command", invalid[1], f"one of {', '.join((*TRAINING, *OTHERS))}"))
    key = re.sub("^methods", UNKNOWN, FOLLOWING.get(key, key))
    if key == UNKNOWN and (given := re.search(r"Expected a <class 'dict'>\. Got value: (.*)", message)):
        return str(ConfigError("methods", given[1], "names with classes, e.g. --methods.fot FOT"))
    if own := re.search(r"\S+ = .* cannot work; valid: .*", message):  # a ConfigError that lost its type on the way
        return own.group()
    if "class_path 'cfl.methods.Method'" in message:
        return str(ConfigError(key, NO_CLASS, "names with classes, e.g. --methods.fot FOT"))
    if denied := re.search(r"Importing '(\S+)' is not allowed, denied by the '(\S+)' entry", message):
        return str(ConfigError(key, denied[1], _WITH_ALLOW if denied[2] == "*" else _OF_A_RUN))
    if function := re.search(r"Expected '(\S+)' to be a function that returns", message):
        return str(ConfigError(key, function[1], f"a class, e.g. one of {', '.join(class_names(key))}"))
    if absent := re.search(r"class_path '(\S+)':\s+(.* has no attribute .*)", message):
        return str(ConfigError(key, absent[1], f"a class that is there ({absent[2]})"))
    if other := re.search(r"Expected '(\S+)' to be a subclass of <class '(\w+)'>", message):
        return str(ConfigError(key, other[1], f"a subclass of {other[2]}"))
    if other := re.search(r"Import path (?:(\S+) )?does not correspond to a subclass of (\w+)", message):
        path = other[1] or re.findall(r"Given value: (.*)", message)[-1]
        names = class_names(key)
        return str(ConfigError(key, path, f"one of {', '.join(names)}" if names else f"a subclass of {other[2]}"))
    if inner := re.search(r"(\S+) is no option; (valid: [\w., ]*\w)(?:\. Got value|$)", message, re.M):
        return f"{key}.{inner[1]} is no option; {inner[2]}"
    if group := re.search(r"Parser key \"([\w.]+)\":\s+Unable to load config '(.*?)'\s", message):
        return str(ConfigError(group[1], group[2], f"its options, as those that begin with --{group[1]}. in --help"))
    if name := _unknown_option(message):
        return _no_option(name, options)
    if needs := _REQUIRED.search(message):  # in a Union, too, where the value below would be all of the class's options
        name, lacking = needs.groups()
        option = f"{key}.{lacking.partition(',')[0]}"
        if key == "trainer.logger":
            return str(ConfigError(option, None, f"a value, which {name} needs, e.g. {_LOGGER}"))
        return f"{option} is missing; {name} needs a value for {lacking}"
    given = re.search(r"dot import path string: (\S+)|has no attribute '\w+'\. Got value: (\S+)", message)
    if given and key == "trainer.logger":
        return str(ConfigError(key, given[1] or given[2], f"false, or a logger's class, e.g. {_LOGGER}"))
    if given and (names := class_names(key)):
        return str(ConfigError(key, given[1] or given[2], f"one of {', '.join(names)}"))
    if value := re.search(r"(?:Got|Given) value: (.*?)(?:\. Got value: .*)?$", message, re.M):
        expected = re.findall(r"Expected a (?:<class '([\w.]+)'>|typing\.Literal\[([^\]]*)\])", message)
        valid = [_TYPES.get(plain, f"a {plain}") if plain else literal for plain, literal in expected]
        if key == "seed_everything":  # Lightning's type allows true, for a seed that nobody knows
            valid = ["an integer from 0 to 4294967295"]
        if valid:
            return str(ConfigError(key, value[1], " or ".join(valid)))
    return " ".join(message.split())


def class_names(key: str) -> list[str]:
    """Short names of the classes that a key accepts, e.g. ``data.partition``; empty where that is not known."""
    kind = key.rpartition(".")[2]
    if kind == "optimizer":
        return sorted(ELEMENTWISE_OPTIMIZERS)
    found: set[str] = set()
    waiting = [_PLUGINS[kind]] if kind in _PLUGINS else []
    while waiting:
        children: list[type] = waiting.pop().__subclasses__()
        waiting += children
        # Abstract, private and local classes cannot be named in a configuration.
        named = [c for c in children if not inspect.isabstract(c) and "." not in c.__qualname__]
        found |= {c.__name__ for c in named if not c.__name__.startswith("_")}
    return sorted(found)


def _unknown_option(message: str) -> str | None:
    pattern = r"Option '([\w.]+)' is not accepted|does not accept option '([\w.]+)'|unrecognized arguments: --([\w.]+)"
    found = re.search(pattern, message)
    if found is None:
        return None
    group = re.search(r"Group '([\w.]+)'", message)
    name = next(part for part in found.groups() if part)
    return f"{group[1]}.{name}" if group else name


def _no_option(name: str, options: list[str]) -> str:
    """Name the options that begin with it or look like it, else those of the same group, else the groups."""
    group = name.rpartition(".")[0]
    following = {**FOLLOWING, **BUILT_FROM}
    options = [option for option in options if option not in following and not option.endswith(".help")]
    options = [option for option in options if not any(other.startswith(f"{option}.") for other in options)]
    valid = (
        [option for option in options if option.startswith(name)]
        or get_close_matches(name, options)
        or [option for option in options if group and option.startswith(f"{group}.")]
        or sorted({option.partition(".")[0] for option in options} - {"help", "print_config"})
    )
    return f"{name} is no option; valid: {', '.join(valid)}"
