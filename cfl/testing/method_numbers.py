"""Checks of what a method's numbers may and must depend on. Each raises AssertionError."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning.pytorch import Callback
from torch import Tensor

from cfl.federation.federation import Federation
from cfl.testing.comparing import difference, distance
from cfl.testing.method_case import MethodCase, Run, error_text
from cfl.testing.tiny_networks import mlp, norm_net
from cfl.testing.tiny_runs import SaveRounds, everything

Models = Sequence[Mapping[str, Tensor]]
"""Models after several rounds, name -> tensor."""


def width_does_not_matter(case: MethodCase) -> None:
    """One, two or all clients of a round side by side give the same models, states and bytes, in float64."""
    alone = case.run(width=1, in_double=True, shares="unequal")
    for width in (2, 5):
        many = case.run(width=width, in_double=True, shares="unequal")
        require_equal(case, "width", f"with {width} clients side by side instead of 1", many, alone, case.tolerance)


def engines_agree(case: MethodCase) -> None:
    """Stacked clients (``vmap``) and clients one by one on threads (``workers``) agree up to rounding."""
    which = "with engine.kind workers instead of vmap"
    expected = case.run(in_double=True)
    require_equal(case, "engines", which, case.run(in_double=True, engine="workers"), expected, case.tolerance)
    # Also in float32, where workers keep no gradients of a chain of layers if no method uses them.
    for network in {case.network, *([mlp] if case.network is norm_net else [])}:
        found, expected = case.run(engine="workers", network=network), case.run(network=network)
        by = distance(found.models[-1], expected.models[-1])
        if not by < case.rough_tolerance:
            raise AssertionError(
                f"engines: {case.who} ends with other weights {which} (float32): they differ by {by:.3g}, "
                f"{case.rough_tolerance:.3g} is allowed"
            )


def resumed_equals_straight(case: MethodCase) -> None:
    """A run resumed from a checkpoint ends bit for bit like an uninterrupted one.

    The run is interrupted after its first round, at the end of its first task, and after the next round. Checkpoints
    are read with ``weights_only``.
    """
    with tempfile.TemporaryDirectory() as folder:
        stops = (1, case.rounds, case.rounds + 1)
        try:
            straight = _resumable(case, [SaveRounds(stops, Path(folder))])
        except Exception as error:
            raise AssertionError(f"resuming: {case.who} fails in a run of three tasks: {error_text(error)}") from error
        for stop in sorted(set(stops)):
            where = f"after {stop} of {3 * case.rounds} rounds"
            try:
                resumed = _resumable(case, [], Path(folder) / f"{stop}.ckpt")
            except pickle.UnpicklingError as error:
                raise AssertionError(
                    f"resuming: the state_dict of {case.who} must hold tensors and plain values alone: "
                    f"{error_text(error)}"
                ) from error
            except Exception as error:
                raise AssertionError(f"resuming: {case.who} fails when resumed {where}: {error_text(error)}") from error
            differs = difference(everything(resumed), everything(straight))
            if differs:
                raise AssertionError(
                    f"resuming: {case.who} goes on otherwise when interrupted {where}: {differs}; its state has to "
                    "name every attribute on which later rounds depend"
                )


def state_is_complete(case: MethodCase) -> None:
    """A new method that loads ``state_dict`` has the same state and the same report."""
    run = case.run(tasks=3)
    method, other = run.method, case.make()
    assert method is not None
    state = method.state_dict()
    other.setup(method.context)
    other.load_state_dict(state)
    first, second = method.report(), other.report()
    for what, found, expected in (
        ("values of state_dict", other.state_dict(), state),
        ("rows of its report", second.rows, first.rows),
        ("figures of its report", second.figures, first.figures),
    ):
        differs = difference(found, expected)
        if differs:
            raise AssertionError(f"state: {case.who} restores other {what} than it saved: {differs}")


def changes_something(case: MethodCase) -> None:
    """After two tasks the global model, or the one of a client, differs from that of federated averaging."""
    tried, plain = case.run(), case.run("fedavg")
    by = distance(tried.models[-1], plain.models[-1])
    if tried.federation.model.has_personal_models:
        clients = range(tried.federation.data.num_clients)
        ours, theirs = ([run.federation.model_of(client, 0) for client in clients] for run in (tried, plain))
        by = max(by, *(distance(one, other) for one, other in zip(ours, theirs, strict=True)))
    if not by > case.least_change:
        raise AssertionError(
            f"effect: {case.who} ends where federated averaging ends, up to {by:.3g} in any weight; with options under "
            f"which it has an effect it must be more than {case.least_change:.3g} (clients have equal "
            "numbers of samples; data={'partition': ...} deals them otherwise)"
        )


def reduces_to_fedavg(case: MethodCase) -> None:
    """With its neutral options it is federated averaging, bit for bit."""
    if case.reduces_to_fedavg is None:
        return
    differs = _first_of(case.run("neutral").models, case.run("fedavg").models, 0.0)
    if differs:
        found, plain = case.run("neutral", in_double=True).models, case.run("fedavg", in_double=True).models
        raise AssertionError(
            f"reduction: {case.who} with the options of reduces_to_fedavg is not federated averaging: {differs}"
            f"{_if_rounding(case, found, plain)}"
        )


def first_task(case: MethodCase) -> None:
    """Until the first task ends, it equals federated averaging or not, as declared; in runs of one and two tasks."""
    if case.fedavg_in_first_task is None:
        return
    for tasks in (1, 2):
        tried, plain = _in_first_task(case, tasks)
        differs = _first_of(tried, plain, 0.0)
        if case.fedavg_in_first_task and differs:
            raise AssertionError(
                f"first task: {case.who} is said to be federated averaging until the first task is over, but {differs}"
                f"{_if_rounding(case, *_in_first_task(case, tasks, in_double=True))}"
            )
        if not case.fedavg_in_first_task and not differs:
            raise AssertionError(
                f"first task: {case.who} is said to have an effect in the first of {tasks} tasks, but is federated "
                "averaging until it is over"
            )


def _in_first_task(case: MethodCase, tasks: int, in_double: bool = False) -> list[Models]:
    """The models after the rounds of the first task, with the method and without."""
    return [case.run(which, tasks=tasks, in_double=in_double).models[: case.rounds] for which in ("tried", "fedavg")]


def _if_rounding(case: MethodCase, found: Models, plain: Models) -> str:
    """What to do if models in float64 differ from those of federated averaging by rounding alone; empty if by more."""
    if _first_of(found, plain, 1e-11):
        return ""
    return (
        "; it is in float64, up to rounding: other operations compute the same loss. Declare reweighs_added_only, or "
        "set passes_forward to False (cfl/methods/capabilities.py)"
    )


def clients_may_lack_tasks(case: MethodCase) -> None:
    """A run of three tasks in which clients lack samples of tasks ends with finite weights."""
    run = case.run(tasks=3, shares="missing")
    wrong = sorted(n for n, v in run.models[-1].items() if v.is_floating_point() and not bool(v.isfinite().all()))
    if wrong:
        raise AssertionError(f"missing tasks: {case.who} leaves NaN or infinity in {wrong}")


def require_equal(case: MethodCase, what: str, which: str, found: Run, expected: Run, tolerance: float) -> None:
    """Require equal models after every round, states of clients and method, and bytes."""
    differs = _first_of(found.models, expected.models, tolerance)
    assert found.method is not None
    assert expected.method is not None
    differs = differs or difference(found.kept(), expected.kept(), tolerance, "what clients keep")
    differs = differs or difference(found.method.state_dict(), expected.method.state_dict(), tolerance, "its state")
    for way in ("uplink_bytes", "downlink_bytes"):
        sizes, others = (getattr(run.federation.channel, way) for run in (found, expected))
        differs = differs or difference(sizes, others, place=way)
    if differs:
        raise AssertionError(f"{what}: {case.who} computes something else {which}: {differs} ({tolerance:.3g} allowed)")


def _first_of(found: Models, expected: Models, tolerance: float) -> str | None:
    """The first round after which two global models differ, in words; rounds count from 0."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        differs = difference(one, other, tolerance)
        if differs:
            return f"after round {number} of {len(expected)}, {differs}"
    return None


def _resumable(case: MethodCase, callbacks: Sequence[Callback], ckpt_path: Path | None = None) -> Federation:
    """A run of three tasks with server momentum, which has to be restored as well."""
    data, methods = case.data_of(tasks=3), case.methods("tried")
    # Momentum is refused if clients keep all parameters.
    shares = bool(case.run().federation.model.shared_parameters)
    momentum = {"server_momentum": 0.5} if shares else {}
    return case.start(data, methods, callbacks=callbacks, ckpt_path=ckpt_path, federated=momentum)


NUMBERS: dict[str, Callable[[MethodCase], None]] = {
    "width": width_does_not_matter,
    "engines": engines_agree,
    "resuming": resumed_equals_straight,
    "state": state_is_complete,
    "effect": changes_something,
    "reduction": reduces_to_fedavg,
    "first task": first_task,
    "missing tasks": clients_may_lack_tasks,
}
"""Name of a property -> its check."""
