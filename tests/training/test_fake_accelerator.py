"""Methods on an accelerator that the tests pretend to have (``support/fake_device.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fake_device
from support.tiny import dropping

from cfl.data.augmentation import CropFlip
from cfl.data.cohorts import CohortBatch
from cfl.engines.cohort import Cohort
from cfl.methods import DER, Method
from cfl.testing.method_case import MethodCase

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(fake_device.missing() is not None, reason=str(fake_device.missing()))

WAITS = {"GLFC": "gradient_inversion.py"}
"""Where a method may wait more often with more local steps. GLFC's L-BFGS asks the loss after each of its own steps,
and how many it takes follows from the model."""


@cache
def found_of(cases: str) -> dict[str, dict[str, Any]]:
    """What ``support.fake_runs`` finds, in a process of its own: the device cannot be taken back."""
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
    """What is wrong, in words."""
    waits = [f"each step waits: {place}" for place in found["more_waits"] if may_wait is None or may_wait not in place]
    return [each for each in (found["failed"], found["differs"], found["resumed"], *waits) if each]


class ReadsEveryStep(Method):
    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        assert batch.mask.any().item()
        return batch


class MixesDevices(Method):
    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        assert (batch.index >= torch.zeros(batch.index.shape)).all()
        return batch


class ComputesOtherwise(Method):
    def adjust_gradients(self, cohort: Cohort) -> None:
        for parameter in cohort.parameters.values():
            if parameter.grad is not None and parameter.device.type != "cpu":
                parameter.grad.mul_(2)


TOYS = (ReadsEveryStep, MixesDevices, ComputesOtherwise)
CASES = {
    "randomness": MethodCase(partial(DER, batch_size=4), network=dropping, data={"augmentation": CropFlip()}),
    **{kind.__name__: MethodCase(kind) for kind in TOYS},
}


def test_so_do_dropout_and_augmentation() -> None:
    assert faults(found_of("test_fake_accelerator")["randomness"]) == []


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
