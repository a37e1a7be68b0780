"""FedProx (Li et al., MLSys 2020)."""

from __future__ import annotations

from typing import ClassVar

from cfl.data.scenarios import EVERY_SCENARIO
from cfl.engines.cohort import Cohort
from cfl.engines.quadratic_pull import Pull
from cfl.methods.base import Method
from cfl.methods.context import Context
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_numbers


class FedProx(Method):
    """Adds a proximal term to every client's loss, which keeps it near the received model::

        L_i(w) + mu / 2 ||w - w_t||^2                                        (Li et al., 2020, eq 2)

    with ``w_t``, the global model at the start of the round. Every local step adds ``mu (w - w_t)`` to the gradient,
    before clipping and the optimizer, so that the term is part of the loss with Adam, too. The norm is over the
    parameters that clients and server exchange: personal ones have no global value, and running statistics are no
    parameters. As for all methods, the reported training loss does not include the term.

    Differs from the paper: clients are sampled and weighted as configured (``federated.client_weighting``; the paper
    samples by size and averages uniformly, the authors' code the other way round). There are no slow clients: all do
    the same number of local epochs.

    Gradient steps along the term are stable where ``learning rate * mu`` stays below 2.

    Sends nothing of its own. Extra memory per client: none between rounds, the received model during one. Extra
    compute: an element-wise pass over the weights per local step. Scenarios: all. Optimizers: any.

    Args:
        mu: at least 0; 0 is federated averaging.

    Raises:
        ConfigError: for another value, or if clients and server exchange no parameter.
    """

    scenarios = EVERY_SCENARIO
    pulls_with: ClassVar[str] = "mu"
    task_free = True
    client_clocks = True

    def __init__(self, mu: float = 0.01) -> None:
        check_numbers("methods.fedprox", "[0, inf)", mu=mu)
        self.mu = mu

    def setup(self, context: Context) -> None:
        """Refuse a run in which clients and server exchange no parameter."""
        super().setup(context)
        if self.mu > 0 and not context.shared_parameters:
            raise ConfigError(f"{self.key}.mu", self.mu, "0 where all parameters stay on their client")

    def pulls(self, cohort: Cohort) -> dict[str, Pull]:
        """Pulls towards the received model."""
        if self.mu == 0:
            return {}
        return {name: Pull(self.mu, cohort.global_parameters[name][None]) for name in self.context.shared_parameters}

    @property
    def computes_locally(self) -> bool:
        """Whether ``mu`` is above 0."""
        return self.mu > 0
