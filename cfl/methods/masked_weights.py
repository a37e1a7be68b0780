"""Federated averaging of MADE's weights after each client has multiplied its own with its masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cfl.engines.cohort import Cohort
from cfl.methods.base import Method
from cfl.methods.context import Context
from cfl.models import MADE
from cfl.runtime.errors import ConfigError


class MaskedWeights(Method):
    """Lets clients multiply MADE's weights with their masks before the server averages them::

        W_G = 1/C sum_c W_c * M_c                         (CONFEDMADE, Paul et al., 2023, Algorithm 1, lines 11 and 12)

    with ``M_c``, client c's masks in the round's first local step. 1/C is that of ``federated.client_weighting:
    uniform``; ``samples`` has shares of samples in its place. Without this method a weight that a client's mask hides
    keeps the value that the server sent. With it the weight counts as 0, so that clients with masks of their own shrink
    each other's weights: one that a third of the clients can use is divided by three in every round.

    Differs from the paper: the weights are those of federated averaging, without CONFEDMADE's masks m per task.

    Sends nothing of its own; the zeros count as sent. Extra memory per client: none. Extra compute: the masks of every
    client, once a round. Scenarios: densities, with the network MADE. Optimizers: any.

    Raises:
        ConfigError: before training, what :meth:`setup` refuses.
    """

    scenarios = frozenset({"density"})
    task_free = True
    client_clocks = True

    def setup(self, context: Context) -> None:
        """Find the masked weights.

        Raises:
            ConfigError: the network is no MADE, its masks are the same at all clients in every step, so that nothing
                would change, or its weights are not shared; or there are two of these methods.
        """
        super().setup(context)
        self.refuse_twins(MaskedWeights, "one MaskedWeights")
        network = context.network
        if not isinstance(network, MADE):
            raise ConfigError("model.network", type(network).__name__, f"MADE with {type(self).__name__}")
        if not network.draws:
            valid = f"false, order_agnostic or num_masks above 1 with {type(self).__name__}: else all have one mask"
            raise ConfigError("model.network.synchronised", True, valid)
        self._made = network
        weights = {f"{name}.weight" for name in network.masks(network.degrees(0, 0, 0))}
        if other := sorted(weights - set(context.shared_parameters)):
            valid = f"weights that no method decomposes or keeps local, with {type(self).__name__}"
            raise ConfigError("methods", ", ".join(other), valid)

    @torch.no_grad()
    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Multiply the trained weights ``[k, O, I]`` with their clients' masks ``[O, I]``."""
        for position in positions:
            degrees = self._made.degrees(cohort.round, cohort.clients[position], 0)
            for name, mask in self._made.masks(degrees).items():
                weight = cohort.parameters[f"{name}.weight"]
                weight[position] *= mask.to(weight)
