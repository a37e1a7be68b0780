"""Names, descriptions and modules of the commands of ``cfl``. Reading them imports none of these modules."""

from __future__ import annotations

TRAINING = {
    "fit": "Train task after task, evaluate on all tasks, and leave figures and checkpoint in the run folder.",
    "validate": "Score a checkpoint on the same test sets that a fit scores, and draw samples of a density.",
    "test": "Score a checkpoint, as validate does: nothing is tuned on the test sets during a fit.",
}
"""Commands of LightningCLI (:mod:`cfl.cli.federated_cli`)."""

OTHERS = {
    "sweep": ("cfl.running.command", "Run every combination of methods, values and seeds, and compare them."),
    "compare": ("cfl.reporting.compare.command", "Make tables and a page of charts of finished runs."),
    "export": ("cfl.export.command", "Write a run's model as a file for other programs."),
    "predict": ("cfl.export.predict", "Classify images or rows of numbers by a run's model."),
    "dashboard": ("cfl.reporting.dashboard.command", "Set up panels at wandb."),
    "configs": ("cfl.cli.installed_configs", "List or show the configurations that come along."),
}
"""Name -> the module that has the command's ``main``, and the command's description."""


def overview() -> str:
    """What ``cfl --help`` prints."""
    lines = {**TRAINING, **{name: text for name, (_, text) in OTHERS.items()}}
    width = max(map(len, lines))
    return "\n".join(
        [
            "usage: cfl COMMAND [options]",
            "",
            "Train and compare methods of continual federated learning.",
            "",
            *(f"  {name:<{width}}  {text}" for name, text in lines.items()),
            "",
            "Every command has --help; cfl --version says which release this is.",
        ]
    )
