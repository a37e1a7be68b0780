"""Python code for a model card: it turns images into network input, asks an exported file, and names classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from cfl.data.datamodule import FederatedDataModule
from cfl.data.streams.sequence import repeat_channels
from cfl.export.answer import Answer, Choice
from cfl.export.prediction import last_task, output_names
from cfl.federation.federation import Federation
from cfl.runtime.yaml_file import BadYAML, parse_yaml


def snippet(model: Path, answer: Answer, choice: Choice, federation: Federation, config: str) -> str:
    """Code that runs as it stands in the folder of the exported file, on a black image until others take its place.

    Args:
        model: the exported file.
        answer: the exported model.
        choice: its client and task.
        federation: the federation, restored from the checkpoint.
        config: the run's configuration as YAML.
    """
    data, owner, task = federation.data, choice.client, choice.task
    imports, load = _loading(model, answer, data, config)
    parts = [*_input(data, 0 if task is None else _stream_tasks(data, owner)[task]), "", *load]
    if answers := federation.measure.answers:
        parts.append(f"print(outputs)  # {answers}")
    else:
        parts += ["", f"classes = {output_names(federation, owner, task)}  # of the outputs"]
        parts += _choosing(data.outputs.test_after(last_task(federation)), _stream_tasks(data, owner), task)
    return "\n".join([*imports, "", *parts])


def _stream_tasks(data: FederatedDataModule, owner: int | None) -> list[int]:
    """The stream's numbers of the tasks that ``--task`` counts."""
    if owner is None:
        return list(range(data.stream.num_tasks))
    return [data.stream_task(task, owner) for task in range(data.num_tasks)]


def _input(data: FederatedDataModule, stream_task: int) -> list[str]:
    channels, height, width = data.input_shape
    source = data.stream.source_of(stream_task)
    if source is None:
        return [f"x = np.zeros((1, {channels}, {height}, {width}), np.float32)  # network input, in its place"]
    moments = source.moments(data.root)
    if moments is not None:
        mean, std = ([float(f"{value:.9g}") for value in values] for values in moments)
        return [
            f"features = np.zeros((1, {width}))  # yours in their place: [N, {width}]",
            f"mean = np.array({mean})",
            f"std = np.array({std})",
            "x = ((features - mean) / std).astype(np.float32)[:, None, None]",
        ]
    transform = repeat_channels(source.transform(), channels)
    mean, std = list(transform.mean), list(transform.std)
    if source.is_float:
        kind, about = "np.float32", "[N, H, W, C]"
    else:
        kind, about = "np.uint8", f"[N, H, W, C], 0 to {transform.scale:g}"
    return [
        f"images = np.zeros((1, {height}, {width}, {channels}), {kind})  # yours in their place: {about}",
        f"scale, mean, std = {transform.scale:g}, {mean}, {std}",
        "x = ((images / scale - mean) / std).transpose(0, 3, 1, 2).astype(np.float32)",
    ]


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
    module, network = _network(answer, data, config)
    load = [f"network = {network}", f"tensors = load_file({name!r})"]
    for part in answer.frozen:
        load += [
            f"frozen = {{name: tensors.pop(name) for name in list(tensors) if name.startswith({part + '.'!r})}}",
            f"frozen = {{name.removeprefix({part + '.'!r}): tensor for name, tensor in frozen.items()}}",
            f"network.{part}.vit.load_state_dict(frozen)",
        ]
    load += ["network.load_state_dict(tensors)", "outputs = network.eval()(torch.from_numpy(x)).detach().numpy()"]
    imports = ["import numpy as np", "import torch", "from safetensors.torch import load_file", "", module]
    return imports, load


def _network(answer: Answer, data: FederatedDataModule, config: str) -> tuple[str, str]:
    """The import of the network's class, and the call that makes it."""
    kind = type(answer.network)
    options = _options(config)
    arguments = [repr(tuple(data.input_shape)), str(data.num_outputs), *(f"{k}={v!r}" for k, v in options.items())]
    return f"from {kind.__module__} import {kind.__qualname__}", f"{kind.__name__}({', '.join(arguments)})"


def _options(config: str) -> dict[str, Any]:
    """The network's options in a configuration; none in one that is damaged, which the card just shows."""
    try:
        found: Any = parse_yaml(config)
        for key in ("model", "network", "init_args"):
            found = found.get(key) or {}
        return dict(found)
    except (BadYAML, AttributeError, TypeError, ValueError):
        return {}


def _choosing(allowed: Tensor | None, stream_tasks: list[int], task: int | None) -> list[str]:
    if allowed is None:
        return ["print([classes[k] for k in outputs.argmax(1)])"]
    places = [allowed[number].nonzero().flatten().tolist() for number in stream_tasks]
    ranges = [(own[0], own[-1] + 1) for own in places]
    if task is None and len(set(ranges)) > 1:
        chosen = [f"task = 0  # of the images, 0 to {len(ranges) - 1}", f"first, end = {ranges}[task]  # its outputs"]
    else:
        first, end = ranges[task or 0]
        chosen = [f"first, end = {first}, {end}  # the outputs to choose among"]
    return [*chosen, "print([classes[first + k] for k in outputs[:, first:end].argmax(1)])"]
