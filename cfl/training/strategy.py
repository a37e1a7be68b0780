"""Trains one experiment in several processes, each of which trains some of the clients of each round."""

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
from cfl.runtime.option_checks import check_numbers
from cfl.training.connection_watch import ConnectionWatch

_SECONDS_BETWEEN_QUESTIONS = 1.0
_SECONDS_TO_END = 5.0


class ClientParallel(DDPStrategy):
    """Every process trains a share of each round's clients. Their messages are summed over processes.

    Lightning's DDP launches the processes and connects them (``trainer.devices`` and ``num_nodes`` say how many;
    torchrun and SLURM may have started them already). The module is not wrapped: clients' gradients are not averaged
    over processes. All processes hold the same global model and make the same server step from the same sums. Only the
    first process writes and prints. If a process fails, all end, and the first prints the reason.

    Args:
        timeout_seconds: a process for which the others wait longer than this counts as failed; at most 10^9.
        process_group_backend: of torch.distributed; null takes gloo on CPUs and both gloo and NCCL on CUDA devices.
    """

    def __init__(self, timeout_seconds: float = 600.0, process_group_backend: str | None = None) -> None:
        # check_strategy refuses other times. An error raised here would reach users as one of the parser's.
        can_be_waited = 0 < timeout_seconds <= 1e9
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_seconds if can_be_waited else 0),
        )
        self.timeout_seconds = timeout_seconds
        # Read here, because Lightning's launcher sets the variable later.
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
        """Connect the processes as DDP does, but end with a plain message if some of them cannot connect.

        By default gloo uses the address to which the machine's name resolves, which is often the loopback address. With
        several machines, gloo is given the interface that leads to the first process, unless the user has chosen one.
        """
        if self.num_nodes > 1 and GLOO_INTERFACE not in os.environ and self.cluster_environment is not None:
            environment = self.cluster_environment
            interface = interface_towards(environment.main_address, environment.main_port)
            if interface is not None:
                os.environ[GLOO_INTERFACE] = interface
        with (
            distributed.answered(),
            ConnectionWatch(self._children, self.num_processes * self.num_nodes, self._put_away),
        ):
            super().setup_distributed()
        if "nccl" in (self.process_group_backend or ""):  # Lightning does this for the exact name "nccl" only
            atexit.register(distributed.leave)

    def _get_process_group_backend(self) -> str:
        # Gloo beside NCCL: values go over the CPU, where a dead process is noticed at once instead of at the timeout.
        usual = "gloo" if self.root_device.type == "cpu" else "cpu:gloo,cuda:nccl"
        return self._process_group_backend or usual

    def _take_over_children(self) -> None:
        """Take the children from Lightning's observer, which would kill this process without a message if one fails."""
        launcher = self.launcher
        if isinstance(launcher, _SubprocessScriptLauncher):
            self._children = list(launcher.procs)
            launcher.procs.clear()  # the list that the observer looks at
            launcher.procs = list(self._children)

    def setup(self, trainer: Trainer) -> None:
        """Set up as DDP does, but without Lightning's message about SIGTERM before every training step.

        RoundCheckpoint lets the processes agree on signals at the end of each round.
        """
        super().setup(trainer)
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def configure_ddp(self) -> None:
        """Leave the module as it is."""

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        return model

    # Steps without clients: a process that is through with its share before the others.

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note whether the step has clients, and raise if another process has failed."""
        self._idle = isinstance(batch, CohortBatch) and not batch.clients
        self._ask()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return a constant loss for a step without clients, because Lightning needs a loss from every process."""
        if self._idle:
            return torch.zeros((), device=self.root_device, requires_grad=True)
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute gradients, except in a step without clients."""
        return closure_loss if self._idle else super().backward(closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Take the optimizer's step; in a step without clients, call only the closure, without hooks or optimizer."""
        return closure() if self._idle else super().optimizer_step(optimizer, closure, model, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Validate as DDP does; raise if another process has failed."""
        self._ask()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Test as DDP does; raise if another process has failed."""
        self._ask()
        return super().test_step(*args, **kwargs)

    # Lightning's messages between processes, with a plain error if one is not answered.

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes, on the CPU: NCCL notices a process that has died only after its timeout."""
        distributed.gather(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object to all processes, as DDP does."""
        with distributed.answered():
            return super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all processes, as DDP does."""
        with distributed.answered():
            return super().reduce(tensor, group, reduce_op)

    # Failing together.

    def _ask(self) -> None:
        now = time.monotonic()
        if now - self._asked_at >= _SECONDS_BETWEEN_QUESTIONS:
            self._asked_at = now
            distributed.raise_if_one_failed()

    def teardown(self) -> None:
        """Stop watching the other processes, and tear down as DDP does."""
        distributed.unwatch()
        super().teardown()

    def _put_away(self) -> None:
        """End the children and release the run folder, if this process ends while it waits for others to connect."""
        for child in self._children:
            child.kill()
            child.wait()
        folder_lock.release()

    def on_exception(self, exception: BaseException) -> None:
        """Report the failure to the other processes, and end those that this process has started."""
        self._take_over_children()  # needed if the failure came before setup_environment
        elsewhere = distributed.cause_elsewhere(exception) is not None
        if not elsewhere:
            distributed.report_failure(exception)
        distributed.unwatch()
        for child in self._children:
            if elsewhere:  # the child may be the one that failed and still be reporting the reason
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_SECONDS_TO_END)
            child.kill()
            child.wait()
        self._children = []


def fair_threads() -> int:
    """Number of cores that this process may use, divided by the number of processes that may use them; at least 1."""
    cores = usable_cores()
    machine = platform.node()
    sharing = [1 for node, theirs in distributed.gather((machine, cores)) if node == machine and cores & theirs]
    return max(1, len(cores) // len(sharing))


DECIDE_STRATEGY = ("strategy", "accelerator", "devices", "num_nodes")
"""The Trainer's settings that :func:`strategy_for` takes."""


def strategy_for(strategy: Any = "auto", accelerator: Any = "auto", devices: Any = "auto", num_nodes: int = 1) -> Any:
    """Return :class:`ClientParallel`'s path for ``auto`` with several processes; otherwise the strategy that was given.

    Lightning's own choice for several processes is DDP, which would average the clients' gradients.

    Args:
        strategy: the Trainer's setting, as the others are.
        accelerator: kind of device.
        devices: number of devices of a machine, ``auto``, or their numbers.
        num_nodes: number of machines.
    """
    text = str(devices)
    if text in ("auto", "-1"):
        count = torch.cuda.device_count() if accelerator != "cpu" else 1
    else:
        count = int(text) if text.isdecimal() else len(text.strip("[], ").split(","))
    several = count > 1 or num_nodes > 1 or _started_by_torchrun() > 1
    return "cfl.training.strategy.ClientParallel" if strategy == "auto" and several else strategy


def _started_by_torchrun() -> int:
    """The number of processes that torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def check_strategy(trainer: Trainer) -> None:
    """Refuse settings with which several processes would not share a round's clients, or would mix them.

    Raises:
        ConfigError: a setting of the Trainer is not possible. The error names it.
    """
    strategy, settings = trainer.strategy, cast(Any, trainer)
    if settings._accelerator_connector._layer_sync is not None:
        raise ConfigError("trainer.sync_batchnorm", True, "false: batch statistics of clients never mix")
    started = _started_by_torchrun()
    if not isinstance(strategy, ClientParallel):
        wanted = max(trainer.world_size, started)
        if wanted > 1 or isinstance(strategy, ParallelStrategy):
            several = f"cfl.training.strategy.ClientParallel for {wanted} processes"
            divides = "which divides a round's clients among them"
            valid = f"{several}, {divides}" if wanted > 1 else "auto for one process"
            raise ConfigError("trainer.strategy", type(strategy).__name__, valid)
        return
    check_numbers("trainer.strategy", "(0, 1e9]", timeout_seconds=strategy.timeout_seconds)
    here = trainer.num_devices * trainer.num_nodes
    if started not in (1, here):
        raise ConfigError(
            "trainer.devices",
            trainer.num_devices,
            f"such that times trainer.num_nodes it is {started}, the number of processes that torchrun has started",
        )


# `trainer.strategy: cfl.training.strategy.ClientParallel` is a text, which Lightning looks up here in lower case.
for _name in ("cfl.training.strategy.clientparallel", "cfl.parallel.clientparallel", "clientparallel"):
    StrategyRegistry.register(_name, ClientParallel, description=ClientParallel.__doc__ or "", override=True)
