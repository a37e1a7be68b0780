"""``check_method``: checks the properties that every method must have."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from cfl.methods import Method
from cfl.testing.method_case import MethodCase
from cfl.testing.method_declarations import DECLARATIONS
from cfl.testing.method_numbers import NUMBERS
from cfl.testing.processes import check_pickles, processes_do_not_matter

PROPERTIES: dict[str, Callable[[MethodCase], None]] = {**NUMBERS, **DECLARATIONS}
"""Name of a property of every method -> its check."""


def check_method(make: Callable[[], Method], *, skip: Collection[str] = (), processes: int = 1, **needs: Any) -> None:
    """Run a method in small federations of synthetic images and check the properties that every method must have.

    It takes seconds, on the CPU, and reads no files. The checks, by name:

    - ``width``: results do not depend on the number of clients trained side by side;
    - ``engines``: ``vmap`` and ``workers`` agree;
    - ``resuming``: a run resumed from a checkpoint ends bit for bit like an uninterrupted one;
    - ``state``: a new method that loads ``state_dict`` has the same state and report;
    - ``effect``: the global model, or a client's own, differs from that of federated averaging; to be skipped for a
      method that changes only how tests are scored;
    - ``reduction``: with the options of ``reduces_to_fedavg`` it is federated averaging, bit for bit;
    - ``first task``: it is federated averaging in the first task, or not, as ``fedavg_in_first_task`` says;
    - ``missing tasks``: it works if clients lack samples of a task;
    - ``scenarios``: it works in the scenarios that it and the methods ``beside`` it declare, and is refused in those
      that it does not declare;
    - ``declarations``: exposures, clocks, sequences and optimizers that it excludes are refused, others work;
    - ``options``: the methods of ``wrong_options`` are refused by a ConfigError with key, value and what is valid;
    - ``sums``: the server reads only sums over clients, unless it declares ``individual_uplinks``;
    - ``shapes``: tensors that ``transform_step``, ``model_for``, ``recall`` and ``as_tested`` return have the shapes of
      those that they were given, and those of other hooks the shapes that the program asks for;
    - ``task_free``: if it declares so, it cannot tell one task from three;
    - ``reports``, ``storage``: its summary and table are plain values, and clients' states are counted.

    Args:
        make: makes the method, a fresh one with every call, with options under which it has an effect: a class or a
            ``functools.partial`` of it.
        skip: names of checks to leave out.
        processes: number of processes; above 1 their results are also compared with those of one process (the check
            ``processes``), which takes some seconds more. Then ``make`` and ``needs`` may hold no lambdas and no
            local functions or classes.
        needs: settings that the method needs, and its expected properties: the attributes of
            :class:`cfl.testing.method_case.MethodCase`, such as ``network``, ``stream``, ``optimizer``, ``beside`` or
            ``reduces_to_fedavg``.

    Raises:
        AssertionError: a sentence with the property, the method, where it fails, and by how much.
        TypeError: an unknown name among ``needs``, or ``make`` makes no methods.
        ValueError: an unknown name in ``skip``; or, with several processes, something that cannot be pickled.
    """
    unknown = sorted(set(skip) - set(PROPERTIES))
    if unknown:
        raise ValueError(f"skip = {unknown}: names among {list(PROPERTIES)}")
    case = MethodCase(make, **needs)
    if processes > 1:
        check_pickles(case)
    for name, check in PROPERTIES.items():
        if name not in skip:
            check(case)
    if processes > 1:
        processes_do_not_matter(case, processes)
