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
    """The fake device for Lightning. It is not registered by name, so ``accelerator: auto`` does not choose it."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing to do."""

    def teardown(self) -> None:
        """Nothing to do."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return no statistics."""
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """Return ``devices`` unchanged."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Return the only device."""
        return [torch.device(fake_device.NAME, 0)]

    @staticmethod
    def auto_device_count() -> int:
        """Return 1."""
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
    """Records the waits and copies of each round; those before the first round count as part of it.

    Args:
        traffic: from :func:`support.fake_device.counted`.

    Attributes:
        waits: waits of each round.
        copies: copies of each round.
        steps: local steps of all cohorts.
        cohorts: the clients of each cohort.
    """

    def __init__(self, traffic: fake_device.Traffic) -> None:
        self.traffic, self.steps = traffic, 0
        self.waits: list[fake_device.Counts] = []
        self.copies: list[fake_device.Counts] = []
        self.cohorts: list[list[int]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the counts of the round and reset them."""
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
