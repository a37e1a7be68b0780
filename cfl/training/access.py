"""Access for callbacks to the client module, its federation, the data module and other callbacks of a Trainer."""

from __future__ import annotations

from typing import TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer

from cfl.data.datamodule import FederatedDataModule
from cfl.federation.federation import Federation
from cfl.training.client import Client

T = TypeVar("T")


def client_of(module: LightningModule) -> Client:
    """Return the module, typed as :class:`cfl.training.client.Client`.

    Raises:
        TypeError: the module is of another class.
    """
    if not isinstance(module, Client):
        raise TypeError(f"cfl's callbacks go with a cfl.training.client.Client, not with {type(module).__name__}")
    return module


def federation_of(module: LightningModule) -> Federation:
    """The federation that the FederatedOrchestrator has set up.

    Raises:
        RuntimeError: no federation has been set up.
        TypeError: as :func:`client_of`.
    """
    return client_of(module).require_federation()


def data_of(trainer: Trainer) -> FederatedDataModule:
    """Return the Trainer's data module, typed as :class:`cfl.data.datamodule.FederatedDataModule`.

    Raises:
        TypeError: the data module is of another class, or there is none.
    """
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, FederatedDataModule):
        raise TypeError(f"cfl's callbacks need a FederatedDataModule, not {type(data).__name__}")
    return data


def callbacks_of(trainer: Trainer, kind: type[T]) -> list[T]:
    """The Trainer's callbacks of a kind, in their order."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, kind)]


def callback_of(trainer: Trainer, kind: type[T]) -> T | None:
    """The Trainer's first callback of a kind, or None."""
    return next(iter(callbacks_of(trainer, kind)), None)
