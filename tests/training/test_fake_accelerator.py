"""Methods on a fake accelerator (``support/fake_device.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fake_device
from support.tiny import dropping, norm_net

from cfl.data.augmentation import CropFlip
from cfl.data.cohorts import CohortBatch
from cfl.data.sequences import RandomTasks
from cfl.engines.cohort import Cohort
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import CONFEDMADE, DER, GLFC, FedAGEM, FedCIL, FedProx, LearningRateDecay, Method
from cfl.models import ACGAN, MADE, TinyYOLO
from cfl.testing.method_case import MethodCase
from cfl.testing.tiny_data import black_and_white, split, squares

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(fake_device.missing() is not None, reason=str(fake_device.missing()))

WAITS = {"GLFC": "gradient_inversion.py"}
"""By method, the file in which more local steps may add waits for the device. GLFC's L-BFGS reads the loss after each
of its own steps, and their number depends on the model."""


@cache
def found_of(cases: str) -> dict[str, dict[str, Any]]:
    """The findings of ``support.fake_runs``, in a separate process, because a fake device cannot be unregistered."""
    folders = (ROOT, *(ROOT / "tests" / folder for folder in ("", "methods", "training")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "support.fake_runs", "--json", "--cases", cases]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


def test_every_method_does_the_same_on_a_device_and_waits_for_it_in_no_local_step() -> None:
    found = found_of("test_registry")
    assert {"FOT", "SCAFFOLD", "DER"} <= set(found)
    wrong = {name: faults(of, WAITS.get(name)) for name, of in found.items()}
    assert {name: each for name, each in wrong.items() if each} == {}


def faults(found: dict[str, Any], may_wait: str | None = None) -> list[str]:
    """Descriptions of all faults in one case's findings."""
    where = (("each step", found["more_waits"]), ("each step of a resumed run", found["more_resumed"]))
    waits = [f"{what} waits: {at}" for what, of in where for at in of if may_wait is None or may_wait not in at]
    return [each for each in (found["failed"], found["differs"], found["resumed"], *waits) if each]


class ReadsEveryStep(Method):
    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        assert batch.mask.any().item()
        return batch


class MixesDevices(Method):
    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        assert (batch.index >= torch.zeros(batch.index.shape)).all()
        return batch


class TakesSamples(Method):
    task_free = True

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        assert len(batch.x) == len(batch.index_on_cpu)
        return batch


class ComputesOtherwise(Method):
    def adjust_gradients(self, cohort: Cohort) -> None:
        for parameter in cohort.parameters.values():
            if parameter.grad is not None and parameter.device.type != "cpu":
                parameter.grad.mul_(2)


def of_the_page(name: str) -> type[Method]:
    """A class that the page "Writing a method" prints."""
    blocks = (ROOT / "docs" / "writing-a-method.md").read_text().split("```python\n")
    (code,) = (block.partition("```")[0] for block in blocks if f"class {name}(" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    kind: type[Method] = names[name]
    return kind


TOYS = (ReadsEveryStep, MixesDevices, ComputesOtherwise)
FEDPROX = MethodCase(partial(FedProx, 0.1))
OF_TASKS = MethodCase(TakesSamples, stream=lambda tasks: split(tasks, classes=2 * tasks, train=120), scenario="task")
SETTINGS = {
    "cumulative": replace(FEDPROX, data={"exposure": "cumulative", "augmentation": CropFlip()}),
    "joint": replace(FEDPROX, data={"exposure": "joint"}),
    "asynchronous": replace(OF_TASKS, data={"exposure": "asynchronous", "augmentation": CropFlip()}),
    "streaming": replace(OF_TASKS, data={"exposure": "streaming"}),
    "sequences": replace(OF_TASKS, data={"sequences": RandomTasks(2)}),
    "boxes": replace(FEDPROX, stream=squares, network=partial(TinyYOLO, width=2)),
    "masks drawn anew": MethodCase(
        partial(CONFEDMADE, consolidation=1.0),
        network=partial(MADE, hidden=[8], order_agnostic=True),
        stream=black_and_white,
        scenario="density",
    ),
    "Fed-A-GEM in tasks": replace(OF_TASKS, make=partial(FedAGEM, 8, when="always"), buffer=partial(ReplayBuffer, 6)),
    "FedCIL in tasks": replace(
        OF_TASKS,
        make=partial(FedCIL, consistency=0.5, consolidation_steps=2),
        network=partial(ACGAN, classifier=norm_net, widths=[6], noise_dim=4),
    ),
    "GLFC, outputs seen": replace(
        OF_TASKS,
        make=partial(GLFC, size=8, threshold=0.05, perturbation_steps=2, inversion_steps=2, images=1),
        scenario="class",
        data={"class_loss": "seen"},
    ),
    "a state in a checkpoint": MethodCase(of_the_page("Anchor")),
    "a client that stops": MethodCase(
        partial(LearningRateDecay, factor=1e6, patience=1, threshold=0.99, floor=1e-3),
        data={"validation": 0.25},
        rounds=4,
    ),
}
"""Settings of data, networks and methods with local steps that no case of the methods has."""
CASES = {
    **SETTINGS,
    "randomness": MethodCase(partial(DER, batch_size=4), network=dropping, data={"augmentation": CropFlip()}),
    **{kind.__name__: MethodCase(kind) for kind in TOYS},
}


def test_so_do_dropout_and_augmentation() -> None:
    assert faults(found_of("test_fake_accelerator")["randomness"]) == []


def test_so_do_other_settings() -> None:
    found = found_of("test_fake_accelerator")
    wrong = {name: faults(found[name], WAITS.get(name.partition(",")[0])) for name in SETTINGS}
    assert {name: each for name, each in wrong.items() if each} == {}


def test_what_must_not_be_is_noticed() -> None:
    found = found_of("test_fake_accelerator")
    reads, mixes, otherwise = (found[kind.__name__] for kind in TOYS)
    assert [(place.rpartition(":")[0], times) for place, times in reads["more_waits"].items()] == [
        ("_local_scalar_dense at tests/training/test_fake_accelerator.py", reads["steps"])
    ]
    assert (reads["failed"], reads["differs"], reads["resumed"]) == (None, None, None)
    assert "tensors to be on the same device" in mixes["failed"]
    assert "after round 0" in otherwise["differs"]
    assert otherwise["resumed"]
