"""Python code for a model card: it turns images into network input, runs an exported file, and names classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from keyword import iskeyword
from pathlib import Path
from typing import Any

from torch import Tensor

from cfl.data.datamodule import FederatedDataModule
from cfl.data.sources.base import Source
from cfl.data.streams.sequence import repeat_channels
from cfl.export.answer import Answer, Choice
from cfl.export.prediction import last_task, output_names
from cfl.federation.federation import Federation
from cfl.models import MADE, PromptedViT, ResNet18
from cfl.models.density import densities_differ
from cfl.runtime.class_paths import named_class, own_parameter
from cfl.runtime.errors import ConfigError
from cfl.runtime.yaml_file import parse_yaml

_KEY = "model.network"
_READS_WEIGHTS = (PromptedViT, ResNet18)
"""Networks whose option ``weights`` names a file of weights, all of which the exported file holds."""


def snippet(model: Path, answer: Answer, choice: Choice, federation: Federation, config: str) -> str:
    """Return code that runs in the folder of the exported file; its input is a black image, for readers to replace.

    Args:
        model: the exported file.
        answer: the exported model.
        choice: its client and task.
        federation: the federation, restored from the checkpoint.
        config: the restored run's configuration as YAML, as the parser has accepted it.

    Raises:
        ConfigError: the network has an option that cannot be written as Python code, for ``.safetensors``.
    """
    data = federation.data
    tasks = choice.stream_tasks(data) if choice.task is None else [choice.stream_task(data)]
    imports, load = _loading(model, answer, data, config)
    parts = [*_input(data, tasks), "", *load]
    if answers := federation.measure.answers:
        parts.append(f"print(outputs)  # {answers}")
    else:
        allowed = data.outputs.test_after(last_task(federation))
        by_task = allowed is not None and choice.task is None  # the code then knows the task
        choices = [Choice(choice.client, task) for task in choice.tasks(data)] if by_task else [choice]
        parts += [
            "",
            f"classes = {_by_task([str(output_names(federation, one)) for one in choices])}  # of the outputs",
        ]
        parts += _choosing(allowed, tasks)
    if any("[task]" in line for line in parts):
        parts.insert(0, f"task = 0  # of the images, 0 to {len(tasks) - 1}")
    return "\n".join([*imports, "", *parts])


def _input(data: FederatedDataModule, stream_tasks: list[int]) -> list[str]:
    """Return lines that compute ``x``, using ``task`` if the tasks' data sets are normalised differently."""
    channels, height, width = data.input_shape
    found = [data.stream.source_of(number) for number in stream_tasks]
    sources = [source for source in found if source is not None]
    if len(sources) < len(found):
        return [f"x = np.zeros((1, {channels}, {height}, {width}), np.float32)  # network input, in its place"]
    normalise = _by_task([_normalisation(source, channels, data.root) for source in sources])
    if all(source.holds_rows for source in sources):
        return [
            f"features = np.zeros((1, {width}))  # yours in their place: [N, {width}]",
            f"scale, mean, std = {normalise}",
            "x = ((features / scale - mean) / std).astype(np.float32)[:, None, None]",
        ]
    kinds = {("np.float32", "") if x.is_float else ("np.uint8", f", 0 to {x.transform().scale:g}") for x in sources}
    kind, about = kinds.pop() if len(kinds) == 1 else ("np.float32", ", as the task's data set has them")
    return [
        f"images = np.zeros((1, {height}, {width}, {channels}), {kind})  # yours in their place: [N, H, W, C]{about}",
        f"scale, mean, std = {normalise}",
        "x = ((images / scale - mean) / std).transpose(0, 3, 1, 2).astype(np.float32)",
    ]


def _normalisation(source: Source, channels: int, root: Path) -> str:
    """Return scale, mean and std as Python code."""
    moments = source.moments(root)
    if moments is not None:
        mean, std = ([float(f"{value:.9g}") for value in values] for values in moments)
        return f"1, np.array({mean}), np.array({std})"
    transform = repeat_channels(source.transform(), channels)
    return f"{transform.scale:g}, {list(transform.mean)}, {list(transform.std)}"


def _by_task(values: list[str]) -> str:
    """Return code for the common value of all tasks, or for the task's value in a list of tuples."""
    if len(set(values)) == 1:
        return values[0]
    return f"[{', '.join(f'({value})' for value in values)}][task]"


def _loading(model: Path, answer: Answer, data: FederatedDataModule, config: str) -> tuple[list[str], list[str]]:
    """Lines that import, and lines that compute ``outputs`` of ``x``."""
    name = model.name
    if model.suffix == ".onnx":
        return ["import numpy as np", "import onnxruntime"], [
            f"session = onnxruntime.InferenceSession({name!r})",
            '(outputs,) = session.run(None, {"input": x})',
        ]
    if model.suffix == ".pt2":
        return ["import numpy as np", "import torch"], [
            f"model = torch.export.load({name!r}).module()",
            "outputs = model(torch.from_numpy(x)).detach().numpy()",
        ]
    modules, network = _network(answer, data, config)
    load = [f"network = {network}", f"tensors = load_file({name!r})"]
    for part in answer.frozen:
        load += [
            f"frozen = {{name: tensors.pop(name) for name in list(tensors) if name.startswith({part + '.'!r})}}",
            f"frozen = {{name.removeprefix({part + '.'!r}): tensor for name, tensor in frozen.items()}}",
            f"network.{part}.vit.load_state_dict(frozen)",
        ]
    of_client = f", ({answer.client},)" if densities_differ(answer.network) else ""
    outputs = f"outputs = network.eval().answers(torch.from_numpy(x){of_client}).detach().numpy()"
    imports = ["import numpy as np", "import torch", "from safetensors.torch import load_file", "", *modules]
    return imports, [*load, "network.load_state_dict(tensors)", outputs]


def _network(answer: Answer, data: FederatedDataModule, config: str) -> tuple[list[str], str]:
    """The imports of the network's class and of classes among its options, and the call that makes it."""
    kind = type(answer.network)
    entry = {"class_path": f"{kind.__module__}.{kind.__qualname__}", **_entry(config)}
    if isinstance(answer.network, MADE):  # masks are drawn by a seed, which null in the configuration leaves to the run
        entry["init_args"] = {**(entry.get("init_args") or {}), "mask_seed": answer.network.mask_seed}
    imports: set[str] = set()
    arguments = [repr(tuple(data.input_shape)), str(data.num_outputs), *_options(entry, _KEY, imports)]
    call = f"{_imported(entry['class_path'], imports)}({', '.join(arguments)})"
    return sorted(imports), call


def _entry(config: str) -> dict[str, Any]:
    """The network's class and options in a configuration; empty if it has none, as in a run built in Python."""
    found: Any = parse_yaml(config)
    for key in _KEY.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def _options(entry: Mapping[str, Any], key: str, imports: set[str]) -> list[str]:
    """The options of a class as keyword arguments. Imports that they need are added to ``imports``."""
    kind, arguments = named_class(entry["class_path"]), []
    options = {**(entry.get("init_args") or {}), **(entry.get("dict_kwargs") or {})}
    for name, value in options.items():
        if not str(name).isidentifier() or iskeyword(name):
            raise ConfigError(f"{key}.{name}", value, "an option whose name is one in Python, for the card's code")
        if name == "weights" and kind is not None and issubclass(kind, _READS_WEIGHTS):
            value = None
        if isinstance(value, Mapping) and "class_path" in value and name in (entry.get("init_args") or {}):
            inner, made = _options(value, f"{key}.{name}", imports), _imported(value["class_path"], imports)
            if _takes_a_factory(kind, name):
                arguments.append(f"{name}={_imported('functools.partial', imports)}({', '.join([made, *inner])})")
            else:
                arguments.append(f"{name}={made}({', '.join(inner)})")
        else:
            _require_plain(value, f"{key}.{name}")
            arguments.append(f"{name}={value!r}")
    return arguments


def _imported(path: str, imports: set[str]) -> str:
    """The name of a class in the code, after an import of it."""
    module, _, name = path.rpartition(".")
    imports.add(f"from {module} import {name}")
    return name


def _takes_a_factory(kind: type | None, option: str) -> bool:
    """Whether an option of a class is a function that builds an object, not the object."""
    found = (own_parameter(base, option) for base in (kind.__mro__ if kind else ()))
    parameter = next(filter(None, found), None)
    return parameter is None or "Callable" in str(parameter.annotation)


def _require_plain(value: Any, key: str) -> None:
    """Refuse values that ``repr`` does not write as Python code, and classes within lists and mappings."""
    is_class = isinstance(value, Mapping) and "class_path" in value
    is_plain = isinstance(value, Mapping | list | str | int | float | None) and not is_class
    if not is_plain or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(key, value, "numbers, texts, true, false, null, and lists and mappings of these")
    for part in [*value, *value.values()] if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _require_plain(part, key)


def _choosing(allowed: Tensor | None, stream_tasks: list[int]) -> list[str]:
    if allowed is None:
        return ["print([classes[k] for k in outputs.argmax(1)])"]
    places = [allowed[number].nonzero().flatten().tolist() for number in stream_tasks]
    first_and_end = _by_task([f"{own[0]}, {own[-1] + 1}" for own in places])
    return [
        f"first, end = {first_and_end}  # the outputs to choose among",
        "print([classes[first + k] for k in outputs[:, first:end].argmax(1)])",
    ]
