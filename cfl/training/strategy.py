"""Several processes train one experiment: the clients of each round are shared out among them."""

from __future__ import annotations

import atexit
import os
import platform
import subprocess
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch import Tensor, nn

from cfl.data.cohorts import CohortBatch
from cfl.reporting import folder_lock
from cfl.runtime import distributed
from cfl.runtime.cpu_cores import usable_cores
from cfl.runtime.distributed import GLOO_INTERFACE
from cfl.runtime.errors import ConfigError
from cfl.runtime.network_interface import interface_towards
from cfl.training.gathering import Gathering

_SECONDS_BETWEEN_QUESTIONS = 1.0
_SECONDS_TO_END = 5.0


class ClientParallel(DDPStrategy):
    """Every process trains a share of each round's clients; what they send is summed over processes.

    Lightning's DDP launches the processes and connects them (``trainer.devices`` and ``num_nodes`` say how many;
    torchrun and SLURM may have started them already), but nothing is wrapped: gradients of clients never mix, and no
    process's data are cut. All processes hold the same global model and make the same server step from the same sums.
    The first process alone writes and prints. If one fails, all end, the first with the reason.

    Args:
        timeout_seconds: a process that lets the others wait for longer than this is taken for dead.
        process_group_backend: of torch.distributed; null takes gloo on CPUs and both gloo and NCCL on CUDA devices.
    """

    def __init__(self, timeout_seconds: float = 600.0, process_group_backend: str | None = None) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_seconds),
        )
        self.timeout_seconds = timeout_seconds
        # Before anything below sets the variable.
        self._threads_are_set = "OMP_NUM_THREADS" in os.environ
        self._children: list[subprocess.Popen] = []
        self._idle = False
        self._asked_at = 0.0

    # Connecting.

    def setup_environment(self) -> None:
        """Connect the processes and divide each machine's cores among those that run on it."""
        self._take_over_children()
        super().setup_environment()
        distributed.watch(self.timeout_seconds)
        if not self._threads_are_set:
            torch.set_num_threads(fair_threads())

    def setup_distributed(self) -> None:
        """As DDP's, with a plain message when not all processes come, and an end to the waiting.

        Gloo takes the address of the machine's name, which is often the loopback's. Between machines, it is told the
        interface that leads to the first process, unless the user has.
        """
        if self.num_nodes > 1 and GLOO_INTERFACE not in os.environ and self.cluster_environment is not None:
            environment = self.cluster_environment
            interface = interface_towards(environment.main_address, environment.main_port)
            if interface is not None:
                os.environ[GLOO_INTERFACE] = interface
        with distributed.answered(), Gathering(self._children, self.num_processes * self.num_nodes, self._put_away):
            super().setup_distributed()
        if "nccl" in (self.process_group_backend or ""):  # Lightning does so where that is all of the name
            atexit.register(distributed.leave)

    def _get_process_group_backend(self) -> str:
        # Gloo beside NCCL: values go over the CPU, where a dead process is noticed at once instead of at the timeout.
        usual = "gloo" if self.root_device.type == "cpu" else "cpu:gloo,cuda:nccl"
        return self._process_group_backend or usual

    def _take_over_children(self) -> None:
        """From here on a failing process tells the others; Lightning's observer would kill this one without a word."""
        launcher = self.launcher
        if isinstance(launcher, _SubprocessScriptLauncher):
            self._children = list(launcher.procs)
            launcher.procs.clear()  # the list that the observer looks at
            launcher.procs = list(self._children)

    def setup(self, trainer: Trainer) -> None:
        """As DDP's; and spare the processes a message before every training step, which Lightning has for SIGTERM.

        RoundCheckpoint has the processes agree on signals at the end of each round.
        """
        super().setup(trainer)
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def configure_ddp(self) -> None:
        """Leave the module as it is."""

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        return model

    # Steps without clients: a process that is through with its share before the others.

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Notice a step without clients, and other processes' failures."""
        self._idle = isinstance(batch, CohortBatch) and not batch.clients
        self._ask()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing to train gives a loss that depends on nothing: Lightning wants one from every process."""
        if self._idle:
            return torch.zeros((), device=self.root_device, requires_grad=True)
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Nothing in a step without clients."""
        return closure_loss if self._idle else super().backward(closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """In a step without clients, neither hooks nor optimizer."""
        return closure() if self._idle else super().optimizer_step(optimizer, closure, model, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """As DDP's; notice other processes' failures."""
        self._ask()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As DDP's; notice other processes' failures."""
        self._ask()
        return super().test_step(*args, **kwargs)

    # Messages of Lightning's own, with a plain word when there is no answer.

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As DDP's."""
        with distributed.answered():
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """As DDP's."""
        with distributed.answered():
            return super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As DDP's."""
        with distributed.answered():
            return super().reduce(tensor, group, reduce_op)

    # Failing together.

    def _ask(self) -> None:
        now = time.monotonic()
        if now - self._asked_at >= _SECONDS_BETWEEN_QUESTIONS:
            self._asked_at = now
            distributed.raise_if_one_failed()

    def teardown(self) -> None:
        """As DDP's; from here on processes end when they are through."""
        distributed.unwatch()
        super().teardown()

    def _put_away(self) -> None:
        """What is left to do where this process ends while it waits for others to connect."""
        for child in self._children:
            child.kill()
            child.wait()
        folder_lock.release()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other processes, and see that those started here end."""
        self._take_over_children()  # there may have been no time for it
        elsewhere = distributed.cause_elsewhere(exception) is not None
        if not elsewhere:
            distributed.report_failure(exception)
        distributed.unwatch()
        for child in self._children:
            if elsewhere:  # one of them may be telling what went wrong
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_SECONDS_TO_END)
            child.kill()
            child.wait()
        self._children = []


def fair_threads() -> int:
    """Cores that this process may use, divided by the processes that may use the same ones; at least 1."""
    cores = usable_cores()
    machine = platform.node()
    sharing = [1 for node, theirs in distributed.gather((machine, cores)) if node == machine and cores & theirs]
    return max(1, len(cores) // len(sharing))


def check_strategy(trainer: Trainer) -> None:
    """Refuse several processes that know nothing of each other, or would mix clients.

    Raises:
        ConfigError: naming the setting.
    """
    strategy, settings = trainer.strategy, cast(Any, trainer)
    if settings._accelerator_connector._layer_sync is not None:
        raise ConfigError("trainer.sync_batchnorm", True, "false: batch statistics of clients never mix")
    started = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if not isinstance(strategy, ClientParallel):
        wanted = max(trainer.world_size, started)
        if wanted > 1 or isinstance(strategy, ParallelStrategy):
            several = (
                f"cfl.training.strategy.ClientParallel for {wanted} processes, which shares the clients of a round out"
            )
            valid = f"{several} among them" if wanted > 1 else "auto for one process"
            raise ConfigError("trainer.strategy", type(strategy).__name__, valid)
        return
    if not strategy.timeout_seconds > 0:
        raise ConfigError("trainer.strategy.timeout_seconds", strategy.timeout_seconds, "a number of seconds above 0")
    here = trainer.num_devices * trainer.num_nodes
    if started not in (1, here):
        raise ConfigError(
            "trainer.devices",
            trainer.num_devices,
            f"such that times trainer.num_nodes it is {started}, the number of processes that torchrun has started",
        )


# `trainer.strategy: cfl.training.strategy.ClientParallel` alone is text to Lightning, which looks it up in lower case.
for _name in ("cfl.training.strategy.clientparallel", "cfl.parallel.clientparallel", "clientparallel"):
    StrategyRegistry.register(_name, ClientParallel, description=ClientParallel.__doc__ or "", override=True)
