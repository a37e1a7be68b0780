"""The fake device of :mod:`support.fake_device` as an accelerator of Lightning."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

from cfl.training.client import Client
from support import fake_device


class FakeAccelerator(Accelerator):
    """It is not registered by name, hence ``accelerator: auto`` does not choose it."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing to do."""

    def teardown(self) -> None:
        """Nothing to do."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """None."""
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """As given."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """The only one."""
        return [torch.device(fake_device.NAME, 0)]

    @staticmethod
    def auto_device_count() -> int:
        """One."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Whether this process has the device."""
        return fake_device.registered()

    @staticmethod
    def name() -> str:
        """Name of the device."""
        return fake_device.NAME


class Watch(Callback):
    """Notes what each round waits for and copies; the first round includes what comes before it.

    Args:
        traffic: of :func:`support.fake_device.counted`.

    Attributes:
        waits: of each round.
        copies: of each round.
        steps: local steps of all cohorts.
        cohorts: the clients of each cohort.
    """

    def __init__(self, traffic: fake_device.Traffic) -> None:
        self.traffic, self.steps = traffic, 0
        self.waits: list[fake_device.Counts] = []
        self.copies: list[fake_device.Counts] = []
        self.cohorts: list[list[int]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A round is over."""
        assert isinstance(pl_module, Client)
        self.steps += pl_module.require_work()._steps
        self.cohorts += trainer.train_dataloader.cohorts
        for rounds, counts in ((self.waits, self.traffic.waits), (self.copies, self.traffic.copies)):
            rounds.append(counts.copy())
            counts.clear()


def on_it() -> dict[str, Any]:
    """Options with which a ``Trainer`` uses the device."""
    strategy = SingleDeviceStrategy(device=torch.device(fake_device.NAME, 0), accelerator=FakeAccelerator())
    return {"accelerator": "auto", "strategy": strategy}
