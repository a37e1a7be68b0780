"""What callbacks work on: the client module, its federation and the data module behind a Trainer."""

from __future__ import annotations

from typing import TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer

from cfl.data.datamodule import FederatedDataModule
from cfl.federation.federation import Federation
from cfl.training.client import Client

T = TypeVar("T")


def client_of(module: LightningModule) -> Client:
    """The module as what it has to be.

    Raises:
        TypeError: it is another one.
    """
    if not isinstance(module, Client):
        raise TypeError(f"cfl's callbacks go with a cfl.training.client.Client, not with {type(module).__name__}")
    return module


def federation_of(module: LightningModule) -> Federation:
    """The federation that the FederatedOrchestrator has set up.

    Raises:
        RuntimeError: there is none.
        TypeError: as :func:`client_of`.
    """
    return client_of(module).require_federation()


def data_of(trainer: Trainer) -> FederatedDataModule:
    """The Trainer's data module as what it has to be.

    Raises:
        TypeError: it is another one.
    """
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, FederatedDataModule):
        raise TypeError(f"cfl's callbacks need a FederatedDataModule, not {type(data).__name__}")
    return data


def callbacks_of(trainer: Trainer, kind: type[T]) -> list[T]:
    """The Trainer's callbacks of a kind, in their order."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, kind)]
