"""Task sequences: the tasks of a stream that each client learns, and their order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, get_args

import numpy as np

from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices, check_integers

Split = Literal["clients", "holders", "whole"]
Outputs = Literal["task", "place"]


class TaskSequences(ABC):
    """A rule that gives every client its own sequence of tasks.

    All clients learn their t-th task at the same time, but these tasks differ. Rounds, methods and accuracy matrices
    number tasks by their position t in the client's own sequence. Images are those of the stream's task.

    Args:
        split: the shares that a task's training samples are cut into: one for each of all ``clients`` (shares of
            clients that never learn the task are not used), or one for each of the ``holders``, the clients that learn
            it. With ``whole`` each holder has all samples, so that clients share them (CONFEDMADE, Table 5).
        outputs: the network's outputs for a client's t-th task. With ``task`` they belong to the stream's task: clients
            that learn the same task, at whatever time, train the same outputs. With ``place`` they belong to the
            position t: all clients train the same outputs at the same time, for different tasks, so that a mean over
            clients mixes the tasks. ``place`` needs ``data.scenario: task``. It makes no difference to methods that
            keep outputs on their clients.

    Raises:
        ConfigError: another ``split`` or ``outputs``.
    """

    def __init__(self, split: Split = "clients", outputs: Outputs = "task") -> None:
        check_choices("data.sequences", get_args(Split), split=split)
        check_choices("data.sequences", get_args(Outputs), outputs=outputs)
        self.split, self.outputs = split, outputs

    length: int
    """Number of tasks T of every client."""

    @abstractmethod
    def of_clients(self, num_clients: int, num_tasks: int, seed: int) -> np.ndarray:
        """``[C, T]`` int64: ``[c, t]`` is the stream's number of client c's t-th task; no client has a task twice.

        Args:
            num_clients: C.
            num_tasks: number of the stream's tasks.
            seed: the run's seed.

        Raises:
            ConfigError: the rule does not fit the stream or the number of clients.
        """


class RandomTasks(TaskSequences):
    """Every client draws ``count`` of the stream's tasks, without replacement and in random order.

    Source: Overlapped-CIFAR-100 of FedWeIT (Yoon et al., 2021), section 4: 10 of 20 superclasses, the samples of each
    split over the clients. A client's draw is keyed by (seed, client).

    Args:
        count: tasks of each client, at least 1.
        split: see :class:`TaskSequences`.
        outputs: likewise.
    """

    def __init__(self, count: int = 10, split: Split = "clients", outputs: Outputs = "task") -> None:
        super().__init__(split, outputs)
        check_integers("data.sequences", 1, count=count)
        self.length = count

    def of_clients(self, num_clients: int, num_tasks: int, seed: int) -> np.ndarray:
        """See :meth:`TaskSequences.of_clients`."""
        if self.length > num_tasks:
            raise ConfigError("data.sequences.count", self.length, f"at most {num_tasks}, the number of tasks")
        drawn = [
            numpy_generator(seed, "task sequence", client).permutation(num_tasks)[: self.length]
            for client in range(num_clients)
        ]
        return np.stack(drawn)


class DisjointTasks(TaskSequences):
    """The stream's tasks in random order, dealt so that no two clients share one: ``count`` to each client.

    Source: NonIID-50 of FedWeIT, 50 tasks over 5 clients. Every client has all samples of its tasks. Keyed by the seed.

    Args:
        count: tasks of each client, at least 1.
        outputs: see :class:`TaskSequences`.
    """

    def __init__(self, count: int = 10, outputs: Outputs = "task") -> None:
        super().__init__("holders", outputs)
        check_integers("data.sequences", 1, count=count)
        self.length = count

    def of_clients(self, num_clients: int, num_tasks: int, seed: int) -> np.ndarray:
        """See :meth:`TaskSequences.of_clients`."""
        if num_clients > num_tasks:
            valid = f"at most {num_tasks}, one for each task, as no two clients are to share one"
            raise ConfigError("data.num_clients", num_clients, valid)
        if self.length * num_clients > num_tasks:
            valid = f"at most {num_tasks // num_clients}: {num_tasks} tasks for {num_clients} clients"
            raise ConfigError("data.sequences.count", self.length, valid)
        order = numpy_generator(seed, "task sequences").permutation(num_tasks)
        return order[: self.length * num_clients].reshape(num_clients, self.length)


class FixedTasks(TaskSequences):
    """Sequences given as lists, such as the published ones of NonIID-50 (FedWeIT).

    Args:
        tasks: for each client a list of stream tasks, counted from 0; all lists have the same length.
        split: see :class:`TaskSequences`. If no two clients share a task, ``holders`` gives each client all samples of
            its tasks.
        count: number of tasks to take from the start of each list; null takes all.
        outputs: see :class:`TaskSequences`.
    """

    # Typed as just a list: with a longer type the command line's parser copies all values for each of them.
    def __init__(
        self, tasks: list, split: Split = "holders", count: int | None = None, outputs: Outputs = "task"
    ) -> None:
        super().__init__(split, outputs)
        if not all(isinstance(own, list) and all(type(task) is int for task in own) for own in tasks):
            raise ConfigError("data.sequences.tasks", tasks, "a list of lists of integers")
        lengths = {len(own) for own in tasks}
        if len(lengths) != 1 or 0 in lengths:
            raise ConfigError("data.sequences.tasks", sorted(lengths), "lists of one length, at least 1")
        for client, own in enumerate(tasks):
            if len(set(own)) < len(own):
                raise ConfigError("data.sequences.tasks", own, f"no task twice for client {client}")
        if count is not None and not 1 <= count <= len(tasks[0]):
            raise ConfigError("data.sequences.count", count, f"between 1 and {len(tasks[0])}, or null")
        self.tasks = [own[:count] for own in tasks]
        self.length = len(self.tasks[0])

    def of_clients(self, num_clients: int, num_tasks: int, seed: int) -> np.ndarray:
        """See :meth:`TaskSequences.of_clients`."""
        if len(self.tasks) != num_clients:
            raise ConfigError("data.num_clients", num_clients, f"{len(self.tasks)}, as many as data.sequences.tasks")
        found = np.asarray(self.tasks, dtype=np.int64)
        if found.min() < 0 or found.max() >= num_tasks:
            raise ConfigError(
                "data.sequences.tasks", [int(found.min()), int(found.max())], f"tasks of 0 .. {num_tasks - 1}"
            )
        return found
