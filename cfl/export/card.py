"""The model card: description, inputs, outputs, figures and configuration of an exported model."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cfl.data.datamodule import FederatedDataModule
from cfl.data.sources.base import Source
from cfl.export.answer import Answer, Choice
from cfl.export.prediction import last_task
from cfl.export.snippet import snippet
from cfl.federation import matrix_rows
from cfl.federation.federated_model import MODEL_TOPIC
from cfl.federation.federation import Federation
from cfl.models.density import densities_differ
from cfl.reporting.csv_file import RunFolderError
from cfl.reporting.experiment import method_name
from cfl.reporting.measures import ON_VALIDATION
from cfl.reporting.summary_file import read_summary
from cfl.runtime.atomic_write import write_whole
from cfl.runtime.errors import ConfigError
from cfl.runtime.printable import fenced, in_markdown
from cfl.runtime.run_files import CONFIG, SUMMARY

_MEANINGS = {
    "domain": "All tasks share the outputs: class k is output k in every task.",
    "task": "Every task has outputs of its own; which task a sample is of has to be known, and the largest of that "
    "task's outputs is the answer.",
    "class": "Every task has outputs of its own; the largest of all is the answer, or of a task's where that is known.",
    "density": "There are no classes.",
}
_CHANNELS = {1: "grey", 3: "red, green, blue"}


def write_card(
    path: Path, model: Path, answer: Answer, choice: Choice, federation: Federation, config: str, run: Path
) -> None:
    """Write the card of one exported file, as Markdown.

    Args:
        path: path of the card, which is replaced.
        model: the exported file.
        answer: the exported model.
        choice: client and task of the model.
        federation: the federation, restored from the checkpoint.
        config: the restored run's configuration as YAML, as the parser has accepted it.
        run: the run folder; its ``summary.json`` has the figures if it is from the same round as the checkpoint. The
            card shows its ``config.yaml``, or ``config`` if there is none.

    Raises:
        ConfigError: ``summary.json`` is damaged, or as for :func:`cfl.export.snippet.snippet`.
    """
    data = federation.data
    summary = _figures(federation, run)
    whole = "of the whole run" if federation.finished else "after the last evaluation so far"
    if federation.schedule.client_clocks and not federation.finished:
        whole = "after the last task so far after which every client has been evaluated"
    alike = not federation.model.has_personal_models and not densities_differ(federation.network)
    if choice.client is not None and alike:
        whole += ", of the global model with the statistics of test batches: not of this model"
    elif choice.client is not None:
        whole += ", over all clients, each with its own model: not of this model alone"
    elif choice.task is not None:
        whole += ", over all tasks, each with its own model: not of this model alone"
    unit = federation.measure.unit + f" {ON_VALIDATION}" * (data.evaluate_on == "validation")
    with model.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    shown = config
    if (run / CONFIG).is_file():
        shown = (run / CONFIG).read_text(encoding="utf-8", errors="backslashreplace")
    sections = [
        _heading(choice, federation, summary),
        f"## Use\n\n{fenced(snippet(model, answer, choice, federation, config), 'python')}\n\n"
        f"SHA-256 of `{model.name}`: `{digest}` (`sha256sum {model.name}`).",
        _input(data),
        _output(answer, choice, federation),
        _figures_section(f"{whole}; {federation.measure.words} in {unit}", summary),
        f"## Configuration\n\n{fenced(shown, 'yaml')}",
    ]
    if answer.frozen:
        names = ", ".join(f"`{name}.`" for name in answer.frozen)
        sections.insert(2, f"The file also holds frozen weights that were never trained: {names}.")
    write_whole(path, "\n\n".join(sections) + "\n")


def _figures(federation: Federation, run: Path) -> dict[str, Any]:
    """The figures of ``summary.json`` if they are of this round, otherwise those of the checkpoint."""
    if (run / SUMMARY).is_file():
        try:
            summary = read_summary(run)
        except RunFolderError as error:
            valid = f"figures as a run leaves them, or no such file ({error})"
            raise ConfigError(SUMMARY, str(run / SUMMARY), valid) from None
        if summary["rounds"] == federation.round:  # otherwise the checkpoint is an earlier one of a finished run
            return {key: value for key, value in summary.items() if not isinstance(value, dict | list)}
    # These are the figures after the last complete evaluation; the row of the running task may still be empty.
    return {"method": method_name(federation.methods), **matrix_rows.figures(federation, federation.measured)}


def _heading(choice: Choice, federation: Federation, summary: Mapping[str, Any]) -> str:
    data, network = federation.data, type(federation.network).__name__
    benchmark = summary.get("benchmark", data.stream.name)
    title = f"# {in_markdown(str(summary['method']))} on {in_markdown(str(benchmark))}"
    whose = "The global model" if choice.client is None else f"The model of client {choice.client}"
    if choice.task is not None:
        whose += f" for task {choice.task}" if choice.client is None else f" for its task {choice.task}"
        whose += " (from 0)"
    elif choice.client is not None and federation.model.has_personal_models:
        whose += ", as it answers the task that it is at"
    rounds = f"after {federation.round} of {federation.schedule.num_rounds} rounds"
    done = "" if federation.finished else "; the run is not over"
    text = f"{whose}, network {network}, {rounds}{done}. Seed {data.seed}, {data.num_clients} clients."
    if federation.model.personal and choice.client is not None and not _has_trained(federation, choice.client):
        text += " It has not trained so far: what clients keep to themselves is here as the run began with it."
    if choice.client is not None and not federation.model.has_personal_models:
        text += " Weights are the global model's, statistics of normalisation layers the client's own."
    return f"{title}\n\n{text}"


def _has_trained(federation: Federation, client: int) -> bool:
    return federation.clients.get(MODEL_TOPIC, client) is not None


def _input(data: FederatedDataModule) -> str:
    channels, height, width = data.input_shape
    stream = data.stream
    found = (stream.source_of(task) for task in range(stream.num_tasks))
    sources = [source for source in dict.fromkeys(found) if source is not None]
    lines = [
        "## Input",
        f"float32 `[N, {channels}, {height}, {width}]`: network input, that is, normalised: "
        "`x = (stored / scale - mean) / std` for each channel, where `stored` are the data set's values.",
    ]
    rows = ["| data set | shape | scale | mean | std |", "|---|---|---:|---|---|"]
    for source in sources:
        transform = source.transform()
        constants = [" ".join(f"{value:.6g}" for value in values) for values in (transform.mean, transform.std)]
        if source.moments(data.root) is not None:
            constants = ["of each feature", "of each feature"]
        shape = " x ".join(map(str, source.shape))
        rows.append(f"| {in_markdown(source.name)} | {shape} | {transform.scale:g} | {' | '.join(constants)} |")
    lines.append("\n".join(rows))
    lines += [f"{in_markdown(source.name)}: {_stored(source)}" for source in sources]
    about = (inspect.getdoc(type(stream)) or "").split("\n\n")[0]
    lines.append(
        f"Tasks are made by `{type(stream).__name__}`: {' '.join(about.split())} Any change of the pixels that it "
        "makes comes before the normalisation."
    )
    if any(source.shape != data.input_shape for source in sources):
        lines.append(
            "Smaller images are centred on black, and grey ones repeated over the channels, before the normalisation."
        )
    return "\n\n".join(lines)


def _stored(source: Source) -> str:
    """Describe the data set's values and axes, and how its files are read."""
    named = None if source.is_float else _CHANNELS.get(source.shape[0])
    layout = f"channels ({named}), rows from the top, columns" if named else "channels, rows, columns"
    values = "floating-point numbers" if source.is_float else f"integers from 0 (black) to {source.scale:g} (white)"
    return f"{values}; the axes are {layout}. {source.reads}".rstrip()


def _output(answer: Answer, choice: Choice, federation: Federation) -> str:
    data = federation.data
    meaning = _MEANINGS.get(data.scenario, "All tasks share the outputs.")
    last = last_task(federation)  # with clients' own clocks, that of the fastest
    if data.outputs.grows and (last + 1 < data.num_tasks or not federation.finished):  # a finished run may have stopped
        seen = data.outputs.offsets[last] + data.stream.classes_per_task[last]
        meaning += f" Only outputs below {seen} have been trained so far, and the run's tests asked no others."
    if answers := federation.measure.answers:
        return f"## Output\n\nfloat32 `{federation.measure.answers_shape}`: {answers}. {meaning}"
    what = "logits"
    if answer.classifiers:
        what = f"scores of {', '.join(type(method).__name__ for method in answer.classifiers)}, larger is better"
    lines = ["## Output", f"float32 `[N, {data.num_outputs}]`: {what}. {meaning}"]
    names = data.stream.class_names(data.root, data.seed)
    rows = ["| task | outputs | classes |", "|---:|---|---|"]
    if choice.client is not None and data.order is not None:
        lines.append(f"Tasks are those of client {choice.client}, in its order.")
    for number, task in enumerate(choice.stream_tasks(data)):
        first, count = data.outputs.offsets[task], data.stream.classes_per_task[task]
        classes = in_markdown(", ".join(names[task]))
        rows.append(f"| {number} | {first} to {first + count - 1} | {classes} |")
    return "\n\n".join([*lines, "\n".join(rows)])


def _figures_section(about: str, summary: Mapping[str, Any]) -> str:
    rows = ["| figure | value |", "|---|---|"]
    rows += [f"| {in_markdown(str(key))} | {_shown(value)} |" for key, value in summary.items()]
    return f"## Figures\n\n({about})\n\n" + "\n".join(rows)


def _shown(value: Any) -> str:
    if value is None:
        return "undefined"
    return f"{value:.6g}" if isinstance(value, float) else in_markdown(str(value))
