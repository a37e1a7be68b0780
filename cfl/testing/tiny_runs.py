"""Runs small federations on the CPU, without files or output, in a twentieth of a second each."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from cfl.callbacks import FederatedOrchestrator
from cfl.callbacks.run_figures import run_figures
from cfl.data.datamodule import FederatedDataModule
from cfl.engines import EngineOptions
from cfl.federation.federation import Federation
from cfl.methods import Method
from cfl.methods.context import Context
from cfl.testing.tiny_networks import NetworkFactory, mlp
from cfl.training.client import Client

sgd = partial(torch.optim.SGD, lr=0.1)


def tiny_client(
    data: FederatedDataModule,
    network: NetworkFactory = mlp,
    optimizer: Any = sgd,
    methods: dict[str, Method] | None = None,
    engine: EngineOptions | None = None,
) -> Client:
    """A Client for these data, with the data's seed and, by default, the engine vmap."""
    engine = EngineOptions("vmap") if engine is None else engine
    return Client(network, optimizer, methods, data.input_shape, data.num_outputs, data.seed, engine)


def tiny_trainer(
    data: FederatedDataModule,
    federated: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Trainer:
    """A silent Trainer on the CPU.

    Args:
        data: the data module, which sets the number of rounds.
        federated: options of ``FederatedOrchestrator``.
        callbacks: further callbacks, after the orchestrator.
        options: of ``Trainer``.
    """
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": -1,
        "reload_dataloaders_every_n_epochs": 1,
        "use_distributed_sampler": False,
        "max_epochs": data.num_rounds,
        "callbacks": [FederatedOrchestrator(**(federated or {})), *callbacks],
    }
    return Trainer(**{**settings, **options})


def fit(
    client: Client,
    data: FederatedDataModule,
    federated: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    ckpt_path: Any = None,
    **options: Any,
) -> Federation:
    """Run all rounds and return the federation; arguments as for :func:`tiny_trainer`."""
    with _quiet():
        trainer = tiny_trainer(data, federated, callbacks, **options)
        trainer.fit(client, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    assert client.federation is not None
    return client.federation


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the context Lightning prints errors only."""
    log = logging.getLogger("lightning.pytorch")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
            yield
    finally:
        log.setLevel(before)


def weights(federation: Federation | Context) -> dict[str, Tensor]:
    """A copy of the global model: parameters and buffers by name."""
    model = federation.model if isinstance(federation, Federation) else federation
    return {name: tensor.detach().clone() for name, tensor in model.state_tensors().items()}


def everything(federation: Federation) -> dict[str, Any]:
    """The global model and everything else that a checkpoint holds."""
    return {"model": weights(federation), **federation.state_dict()}


class OneStepAtATime(Callback):
    """Makes Lightning run local steps one at a time instead of in blocks, by having a hook of single steps."""

    def on_train_batch_end(self, *args: Any) -> None:
        """Do nothing."""


class Rounds(Callback):
    """Stores a copy of the global model after every round.

    Attributes:
        models: name -> tensor, one model per finished round.
    """

    def __init__(self) -> None:
        self.models: list[dict[str, Tensor]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the model."""
        assert isinstance(pl_module, Client)
        assert pl_module.federation is not None
        self.models.append(weights(pl_module.federation))


def figures_of_every_run(federation: Federation) -> set[str]:
    """Names of the figures in every run's summary, which methods must not use for their own figures."""
    return set(run_figures(federation, "", "", {}, torch.device("cpu")))


class SaveRounds(Callback):
    """Writes checkpoints between rounds, like those of a run killed there.

    Args:
        rounds: numbers of finished rounds after which to write.
        folder: folder of the files ``<finished rounds>.ckpt``.
    """

    def __init__(self, rounds: Sequence[int], folder: Path) -> None:
        self.rounds, self.folder = tuple(rounds), folder

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write a checkpoint, if one is due after this round."""
        assert isinstance(pl_module, Client)
        assert pl_module.federation is not None
        done = pl_module.federation.round
        if done in self.rounds:
            trainer.save_checkpoint(self.folder / f"{done}.ckpt")
