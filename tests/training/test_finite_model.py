"""A global model that the server or a method has made NaN ends the run before it is saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from support.tiny import SaveAfter, fit, mlp, permuted, tiny_client, tiny_data
from torch import Tensor

from cfl.data.schedule import RoundPlan
from cfl.methods import Method
from cfl.runtime.errors import BadUpdate


class InStep(Method):
    def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value * (torch.nan if self.context.round == 2 else 1) for name, value in step.items()}


class AtEnd(Method):
    moves_model_after_round = True

    def end_round(self, plan: RoundPlan) -> None:
        if plan.round == 2:
            self.context.state_tensors()["head.bias"][0] = torch.inf


class AfterTask(Method):
    def end_task(self, plan: RoundPlan) -> None:
        self.context.state_tensors()["head.bias"][0] = torch.nan


@pytest.mark.parametrize(
    ("method", "cause"),
    [
        (InStep, "by the server's step, which methods may transform"),
        (AtEnd, "by what methods do when it ends"),
        (AfterTask, "by what methods do when it ends"),
    ],
)
@pytest.mark.parametrize("on_bad_update", ["stop", "skip"])
def test_the_run_ends_with_the_round_and_the_methods(
    method: type[Method], cause: str, on_bad_update: str, tmp_path: Path
) -> None:
    data, saved = tiny_data(), [SaveAfter(number, tmp_path / str(number)) for number in range(3)]
    with pytest.raises(BadUpdate, match=rf"in \S+ after round 2 \(task 0\), {cause}; .*; methods: methods\.mine$"):
        fit(tiny_client(data, methods={"mine": method()}), data, {"on_bad_update": on_bad_update}, saved)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"]


def test_a_large_model_is_finite() -> None:
    """A finite model is accepted, even if the sum of its float32 values overflows."""

    class Large(Method):
        moves_model_after_round = True

        def end_round(self, plan: RoundPlan) -> None:
            if plan.round == data.num_rounds - 1:
                self.context.state_tensors()["head.weight"].fill_(3e38)

    data = tiny_data()
    assert fit(tiny_client(data, methods={"mine": Large()}), data).finished


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("on_bad_update", ["stop", "skip"])
def test_finite_updates_with_an_infinite_sum_end_the_run(width: int, on_bad_update: str) -> None:
    """An infinite sum of finite updates ends the run, for any width: no client could be skipped to avoid it."""
    schedule = {"rounds_per_task": 1, "batch_size": 100, "cohort_width": width}
    data = tiny_data(permuted(1), schedule=schedule)
    client = tiny_client(data, mlp, partial(torch.optim.SGD, lr=1e38))
    with pytest.raises(BadUpdate, match=r"NaN or infinity in .* by the sum of what clients sent"):
        fit(client, data, {"on_bad_update": on_bad_update, "client_weighting": "samples"})
