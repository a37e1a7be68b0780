"""What methods that need neither task ids nor boundaries are shown of rounds, cohorts and their context.

General continual learning has no task ids and no boundaries at training time. A method that declares so
(``Method.task_free``) gets rounds, cohorts and batches whose ``task`` is a
:class:`cfl.data.task_handles.SealedTask`: functions that address a client's current data or map a model into its
coordinates take it, arithmetic and comparisons fail. The context that it is set up with shows what is named here and
nothing else, and finds samples by a sealed task only; a buffer's samples, and those that other methods have added to a
step, come with :class:`cfl.data.task_handles.SealedTasks`. Samples go by handles, in a step's ``index`` too, and of
what clients keep it is shown its own topics, of other methods what they declare. What a loss is taken over stays open
to it: a client that computes one knows its outputs, which differ from task to task only where the scenario or
``data.class_loss`` tells clients so.

It keeps a method from leaning on a task unawares. It is no sandbox: Python lets whoever means to, reach into what
begins with an underscore.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, cast

import numpy as np
from torch import Tensor

from cfl.data.exposure import Handles
from cfl.data.schedule import RoundPlan
from cfl.data.task_handles import SealedTask, SealedTasks, TaskHidden, only_handle
from cfl.engines.cohort import Cohort
from cfl.methods.base import Method
from cfl.methods.context import Context


class _View:
    """Shows some names of what it stands in front of. Any other is refused, and so is setting one."""

    _SHOWN: ClassVar[frozenset[str]]
    _WHOSE: ClassVar[str]

    def __init__(self, behind: Any) -> None:
        object.__setattr__(self, "_behind", behind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by Python itself; a copy that is being made has nothing yet
            raise AttributeError(name)
        if name not in self._SHOWN:
            raise TaskHidden(f"{name} of {self._WHOSE}")
        return getattr(self._behind, name)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise TaskHidden(f"setting {name} of {self._WHOSE}")


class SealedPlan(_View):
    """A round without what says where its task begins and ends; see :class:`cfl.data.schedule.RoundPlan`."""

    _SHOWN = frozenset({"round", "clients"})
    _WHOSE = "a round"

    @property
    def task(self) -> SealedTask:
        """Stands for the round's task."""
        return SealedTask(self._behind.task)


class SealedCohort(_View):
    """A cohort, its task hidden."""

    _WHO = frozenset({"clients", "sizes", "round", "steps", "lr", "network"})
    _TENSORS = frozenset({"parameters", "buffers", "received", "own", "gradients", "used_outputs"})
    _SHOWN = _WHO | _TENSORS | frozenset({"gradients_on", "use_outputs", "used_rows", "rows"})
    _WHOSE = "a cohort"

    @property
    def task(self) -> SealedTask:
        """Stands for the task that the clients train."""
        return SealedTask(self._behind.task)


class SealedBuffer(_View):
    """The clients' buffers, to draw from."""

    _SHOWN = frozenset({"draw", "draw_between_rounds", "fill", "holders", "size", "keeps_logits"})
    _WHOSE = "the buffer"


class SealedStates(_View):
    """What clients keep between rounds of the method's own; not what others keep of them, such as a buffer's places.

    Args:
        behind: :class:`cfl.federation.client_states.ClientStates`.
        topics: the method's own.
    """

    _SHOWN = frozenset({"gather", "scatter", "forget", "holders", "get"})  # all of which take a topic first
    _WHOSE = "what clients keep"

    def __init__(self, behind: Any, topics: frozenset[str]) -> None:
        super().__init__(behind)
        object.__setattr__(self, "_topics", topics)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)

        def of_own(topic: str, *arguments: Any, **options: Any) -> Any:
            if topic not in self._topics:
                raise TaskHidden(f"{topic!r}, not among the method's topics {sorted(self._topics)},")
            return found(topic, *arguments, **options)

        return of_own


class SealedChannel(_View):
    """Messages between clients and server; not in which task a client was left out, nor what others send."""

    _SHOWN = frozenset(
        {"downlink", "uplink", "sum", "mean", "uplink_individually", "collect_individually", "usable", "on_bad_update"}
    )
    _WHOSE = "the channel"


class SealedMethod(_View):
    """Another method: of what class it is and what it declares, not what it was set up with."""

    _NAMES = frozenset({"name", "source", "key"})
    _SHOWN = _NAMES | frozenset({"moves_model_after_round", "kind"})
    _WHOSE = "another method"

    @property  # type: ignore[misc]
    def __class__(self) -> type[Method]:  # type: ignore[override]
        return type(self._behind)


class SealedContext(_View):
    """A method's context without what says which task clients are at.

    Samples are found by a client's sealed task or by handles, which say nothing of whose task's they are. Places rise
    from task to task. Handles (:class:`cfl.data.exposure.Handles`) stand for them here: a client knows its own samples
    again by them, and whether those that it has now are those that it had.

    Of rounds it shows how many there are, and whose those are that have begun or are about to. Who takes part in later
    ones would tell boundaries before they come, where clients join or leave with a task.

    Args:
        behind: :class:`cfl.methods.context.Context`.
        topics: the method's own among what clients keep.
        method: whose it is.
    """

    _MODEL = frozenset({"network", "batchnorm", "shared_parameters", "shared_buffers", "personal"})
    _TENSORS = frozenset({"state_tensors", "own_tensors", "shared_tensors", "evaluation_statistics"})
    _ROUNDS = frozenset({"round", "finished", "num_rounds", "local_epochs", "batch_size", "eval_batch_size"})
    _SETTINGS = frozenset({"seed", "scenario", "exposure", "num_clients", "has_personal_models", "optimizer"})
    _SHAPES = frozenset({"input_shape", "num_outputs", "most_trained_on"})
    _SHOWN = _MODEL | _TENSORS | _ROUNDS | _SETTINGS | _SHAPES | frozenset({"everyones", "at_server"})
    _WHOSE = "the context"
    # What belongs to a task, which must be sealed, and as which argument it is given.
    _TASK_AT: ClassVar[dict[str, int]] = {
        "members": 0,
        "own_clients": 0,
        "client_batches": 0,
        "outputs_in_loss": 0,
        "outputs_in_loss_of": 1,
    }

    def __init__(self, behind: Any, topics: frozenset[str], method: Method) -> None:
        super().__init__(behind)
        object.__setattr__(self, "_topics", topics)
        object.__setattr__(self, "_method", method)

    @property
    def methods(self) -> dict[str, Method]:
        """Name -> the method itself, or what is shown of another."""
        return {
            name: method if method is self._method else cast(Method, SealedMethod(method))
            for name, method in self._behind.methods.items()
        }

    @property
    def clients(self) -> SealedStates:
        """What clients keep of the method's own."""
        return SealedStates(self._behind.clients, self._topics)

    @property
    def channel(self) -> SealedChannel:
        """What clients and server send each other."""
        return SealedChannel(self._behind.channel)

    @property
    def buffer(self) -> SealedBuffer | None:
        """Clients' buffers, if there are any."""
        return None if self._behind.buffer is None else SealedBuffer(self._behind.buffer)

    # Rounds that have begun, and the next one when none is running.

    def _begun(self, number: int) -> int:
        latest = self._behind.round
        if number > latest:
            raise TaskHidden(f"round {number} of the schedule, behind round {latest}, which is as far as one may look,")
        return number

    def plan(self, round: int) -> SealedPlan:
        """A round, sealed."""
        return SealedPlan(self._behind.plan(self._begun(round)))

    def present(self, round: int) -> np.ndarray:
        """As :meth:`cfl.methods.context.Context.present`."""
        present: np.ndarray = self._behind.present(self._begun(round))
        return present

    def task_at(self, round: int, client: int) -> SealedTask:
        """Stands for the task that a client is at in a round."""
        return SealedTask(self._behind.task_at(self._begun(round), client))

    def __getattr__(self, name: str) -> Any:
        if name not in self._TASK_AT:
            return super().__getattr__(name)
        found, at = getattr(self._behind, name), self._TASK_AT[name]

        def of_handle(*given: Any) -> Any:
            only_handle(given[at])
            return found(*given)

        return of_handle

    # Samples by handles.

    def places_trained_on(self, task: SealedTask, client: int) -> np.ndarray:
        """Ascending handles of what a client trains on: in the order of places, those of a portion (``data.exposure:
        asynchronous``) would be sorted by task."""
        return np.sort(self._handles.of(self._behind.places_trained_on(only_handle(task), client)))

    @property
    def _handles(self) -> Handles:
        handles: Handles = self._behind._data.handles
        return handles

    def samples_at(self, handles: Tensor, moment: tuple[int, int] | None = None) -> tuple[Tensor, Tensor, SealedTasks]:
        """As :meth:`cfl.methods.context.Context.samples_at`, by handles."""
        samples: tuple[Tensor, Tensor, SealedTasks] = self._behind.samples_at(self._handles.places(handles), moment)
        return samples

    def labels_at(self, handles: Tensor) -> Tensor:
        """As :meth:`cfl.methods.context.Context.labels_at`, by handles."""
        labels: Tensor = self._behind.labels_at(self._handles.places(handles))
        return labels


def sealed_plan(plan: RoundPlan) -> RoundPlan:
    """What a method is shown of a round."""
    return cast(RoundPlan, SealedPlan(plan))


def sealed_cohort(cohort: Cohort) -> Cohort:
    """What a method is shown of a cohort."""
    return cast(Cohort, SealedCohort(cohort))


def sealed_context(context: Context, topics: frozenset[str], method: Method) -> Context:
    """What a method is set up with that keeps ``topics`` of clients between rounds."""
    return cast(Context, SealedContext(context, topics, method))
