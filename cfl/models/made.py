"""MADE: masked autoencoder for distribution estimation (Germain et al., ICML 2015)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cfl.metrics.measures.likelihood import negative_log_likelihoods
from cfl.models.density import DensityNetwork
from cfl.models.made_masks import (
    Degrees,
    direct_mask,
    inner_masks,
    output_mask,
    random_hidden,
    random_order,
)
from cfl.models.step_draws import DrawsEachStep
from cfl.randomness.generators import seed_for
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import MOST_AT_ONCE, check_choices, check_integers


class MaskedLinear(nn.Linear):
    """``(W * M) x + b`` with the mask as an argument of every call."""

    def forward(self, input: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        """Inputs ``[B, I]`` and mask ``[O, I]`` bool to ``[B, O]``."""
        weight = self.weight
        # In the weight's type, so that torch does not convert the mask once more in the backward pass.
        return F.linear(input, weight * mask.to(weight.dtype), self.bias)


class MADE(DrawsEachStep, DensityNetwork):
    """An autoencoder whose masks make output d a function of the variables before d: ``p(x) = prod_d p(x_d | x_<d)``::

        h_l = relu((W_l * M_l) h_{l-1} + b_l)             h_0 = x
        logits = (V * M_V) h_L + c  [+ (D * M_D) x]       [direct connections]

    (Germain et al., 2015, eq 8 to 13; masks in :mod:`cfl.models.made_masks`). With conditioning weights every layer
    also adds ``(U_l * M_l) 1``. The loss is the mean over samples of ``-log p(x)``, the sum over variables of their
    binary cross-entropies.

    Order-agnostic training uses another random order of the variables in every local step. Connectivity-agnostic
    training cycles through ``num_masks`` draws of the hidden degrees, beginning with a random one in each round. All
    masks of a step follow from one draw. Draws are keyed by (``mask_seed``, round, step), so that all clients of a
    round have the same masks. Without ``synchronised`` they are keyed by the client as well, so that weights of
    different connectivities are averaged (CONFEDMADE, Table 1). With ``start`` all clients have the same first order
    and first hidden degrees. All later draws, and the positions in the cycle of draws, differ by client; CONFEDMADE's
    section 3.2 lets clients resample "independently" in this way. Client 0's draws are always those of the synchronised
    case.

    Evaluation uses the first order and the first hidden degrees. With ``eval_orders`` above 1 it uses the mean of p
    over this many draws of them, including the first. Without ``synchronised`` each client has its own density, by its
    own first order and hidden degrees; the score of a global model is the mean of all clients' log-likelihoods. With
    ``start`` clients have their own densities only if several draws of hidden degrees are averaged.

    Differs from the papers: Germain et al. draw masks from one stream of random numbers, here each draw has a key.
    Initial weights are torch's for linear layers. The direct connections into hidden layers of Germain et al.'s code
    are left out. CONFEDMADE's code, in order-agnostic training with one draw of hidden degrees, keeps the mask into the
    outputs at the first order while all other masks change. An output may then depend on its own variable, so that the
    values are no likelihoods (``stale_output_mask``).

    Args:
        input_shape: ``(C, H, W)`` of one sample.
        num_outputs: C H W.
        hidden: widths of the hidden layers, each at least 1; default ``[500]``. An empty list is a fully visible
            sigmoid belief network.
        direct: direct connections from variables to outputs.
        conditioning: conditioning weights U, of the shapes of W and V.
        order: the first order: ``random``, or ``natural``, row by row.
        order_agnostic: another order in every local step.
        num_masks: number of draws of the hidden degrees; with 2 or more, training is connectivity-agnostic.
        synchronised: all clients have the same masks (true), each client has its own (false), or only the first masks
            are the same (``start``; needs masks that are drawn anew: ``order_agnostic``, or ``num_masks`` above 1).
        eval_orders: number of draws whose densities are averaged in evaluation, for ``order_agnostic`` or
            ``num_masks`` above 1.
        mask_seed: seed of all draws, at least 0; null draws it with the initial weights, and so from the run's seed.
            Give a number to use trained weights outside of their run.
        stale_output_mask: reproduce the defect described above in training and evaluation; evaluation then uses another
            order than the first. For comparisons; needs ``order_agnostic`` and ``num_masks`` 1. The method CONFEDMADE
            then also treats U and D as that code does.

    Raises:
        ConfigError: for values other than these, or options that have no effect together.
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_outputs: int,
        hidden: list[int] | None = None,
        direct: bool = False,
        conditioning: bool = False,
        order: Literal["random", "natural"] = "random",
        order_agnostic: bool = False,
        num_masks: int = 1,
        synchronised: bool | Literal["start"] = True,
        eval_orders: int = 1,
        mask_seed: int | None = None,
        stale_output_mask: bool = False,
    ) -> None:
        super().__init__(input_shape, num_outputs)
        self.hidden = [500] if hidden is None else list(hidden)
        self.direct, self.conditioning = direct, conditioning
        self.order, self.order_agnostic, self.num_masks = order, order_agnostic, num_masks
        self.synchronised, self.eval_orders, self.stale_output_mask = synchronised, eval_orders, stale_output_mask
        self._check_options(mask_seed)
        # Always drawn, so that initial weights do not depend on ``mask_seed``.
        drawn = int(torch.randint(2**62, ()))
        self.mask_seed = drawn if mask_seed is None else mask_seed

        widths = [self.variables, *self.hidden]
        self.layers = nn.ModuleList(MaskedLinear(i, o) for i, o in pairwise(widths))
        self.output = MaskedLinear(widths[-1], self.variables)
        self.shortcut = MaskedLinear(self.variables, self.variables, bias=False) if direct else None
        pairs = [*pairwise(widths), (widths[-1], self.variables)] if conditioning else []
        self.conditions = nn.ModuleList(MaskedLinear(i, o, bias=False) for i, o in pairs)
        self._first_orders: dict[int, Tensor] = {}
        self._hidden_degrees: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def _check_options(self, mask_seed: int | None) -> None:
        key = "model.network"
        for width in self.hidden:
            check_integers(key, 1, at_most=MOST_AT_ONCE, hidden=width)
        check_integers(key, 1, num_masks=self.num_masks, eval_orders=self.eval_orders)
        if mask_seed is not None and (type(mask_seed) is not int or mask_seed < 0):  # a drawn one is above 2^32
            raise ConfigError(f"{key}.mask_seed", mask_seed, "an integer of at least 0, or null")
        check_choices(key, ("random", "natural"), order=self.order)
        if self.synchronised not in (True, False, "start"):
            raise ConfigError(f"{key}.synchronised", self.synchronised, "true, false or start")
        if self.synchronised == "start" and not self.order_agnostic and self.num_masks == 1:
            valid = "true or false where all steps have the first masks: without order_agnostic and num_masks above 1"
            raise ConfigError(f"{key}.synchronised", self.synchronised, valid)
        if not self.hidden and self.direct:
            raise ConfigError(f"{key}.direct", self.direct, "false without hidden layers: all connections are direct")
        if not self.hidden and self.num_masks > 1:
            raise ConfigError(f"{key}.num_masks", self.num_masks, "1 without hidden layers")
        if self.eval_orders > 1 and not self.order_agnostic and self.num_masks == 1:
            valid = "1 where training knows one order and one connectivity"
            raise ConfigError(f"{key}.eval_orders", self.eval_orders, valid)
        if self.eval_orders > self.num_masks and not self.order_agnostic:
            valid = f"at most {self.num_masks}, as many as num_masks"
            raise ConfigError(f"{key}.eval_orders", self.eval_orders, valid)
        if self.stale_output_mask and (not self.order_agnostic or self.num_masks > 1):
            valid = "false without order_agnostic, or with num_masks above 1"
            raise ConfigError(f"{key}.stale_output_mask", True, valid)

    # Degrees: of a local step, of an evaluation.

    @property
    def draws(self) -> bool:
        """Whether degrees are drawn anew in every step."""
        return self.order_agnostic or self.num_masks > 1 or not self.synchronised

    def draw(self, round: int, client: int, step: int) -> Tensor:
        """``[D + sum H + D]`` int64, a client's degrees in a local step; see :meth:`Degrees.of_flat`."""
        return self.degrees(round, client, step).flat()

    def degrees(self, round: int, client: int, step: int) -> Degrees:
        """A client's degrees in a local step."""
        order, owner = self._first_order(client), self._owner(client)
        if self.order_agnostic:
            order = random_order(self.variables, self.mask_seed, "order", round, step, owner)
        own = (owner,) if owner and self.synchronised == "start" else ()
        start = seed_for(self.mask_seed, "first mask", round, *own) if self.num_masks > 1 else 0
        hidden = self._hidden((start + step) % self.num_masks, client)
        return Degrees(order, hidden, self._first_order(client) if self.stale_output_mask else order)

    @property
    def differs_by_client(self) -> bool:
        """Whether clients have their own masks in evaluation, and so their own densities."""
        if self.synchronised == "start":
            return self.num_masks > 1 and self.eval_orders > 1
        return not self.synchronised

    def evaluation_degrees(self, number: int, device: torch.device, client: int = 0) -> Degrees:
        """The degrees of one of the densities, numbered from 0, that are averaged in a client's evaluation."""
        client = client if self.differs_by_client else 0
        order = first = self._first_order(client)
        if self.order_agnostic and (number > 0 or self.stale_output_mask):
            order = random_order(self.variables, self.mask_seed, "order in evaluation", number)
        hidden = self._hidden(number % self.num_masks, client)
        return Degrees(order, hidden, first if self.stale_output_mask else order).to(device)

    def masks(self, degrees: Degrees) -> dict[str, Tensor]:
        """Name of every layer with masked weights -> its mask ``[to, from]`` bool under these degrees."""
        inner, into_outputs = inner_masks(degrees), output_mask(degrees)
        found = {f"layers.{number}": mask for number, mask in enumerate(inner)} | {"output": into_outputs}
        if self.direct:
            found["shortcut"] = direct_mask(degrees)
        both = [*inner, into_outputs]
        return found | {f"conditions.{number}": mask for number, mask in enumerate(both) if self.conditioning}

    def _owner(self, client: int, first: bool = False) -> int:
        """Number of the client whose draws a client uses, 0 if they are shared; of the first draws if ``first``."""
        return 0 if (first if self.synchronised == "start" else self.synchronised) else client

    def _first_order(self, client: int) -> Tensor:
        client = self._owner(client, first=True)
        if client not in self._first_orders:
            self._first_orders[client] = (
                torch.arange(self.variables)
                if self.order == "natural"
                else random_order(self.variables, self.mask_seed, "first order", client)
            )
        return self._first_orders[client]

    def _hidden(self, number: int, client: int) -> tuple[Tensor, ...]:
        key = (number, self._owner(client, first=number == 0))
        if key not in self._hidden_degrees:
            drawn = random_hidden(self.hidden, self.variables, self.mask_seed, "hidden degrees", *key)
            self._hidden_degrees[key] = drawn
        return self._hidden_degrees[key]

    # Passes.

    def features(self, x: Tensor) -> Tensor:
        """Samples ``[B, C, H, W]`` to the last hidden layer ``[B, hidden[-1]]``."""
        return self._hidden_layers(self._variables(x), self._present_degrees(x))

    def _variables(self, x: Tensor) -> Tensor:
        return x.flatten(1).to(self.output.bias.dtype)  # the bias's type: a decomposed weight would be computed first

    def forward(self, x: Tensor) -> Tensor:
        """Samples ``[B, C, H, W]``, each variable 0 or 1, to logits ``[B, D]``, by the step's degrees or the first."""
        return self.logits(x, self._present_degrees(x))

    def logits(self, x: Tensor, degrees: Degrees) -> Tensor:
        """As :meth:`forward`, under given degrees, on the same device."""
        x = self._variables(x)
        h = self._hidden_layers(x, degrees)
        mask = output_mask(degrees)
        logits: Tensor = self.output(h, mask)
        if self.conditioning:
            logits = logits + self.conditions[-1](torch.ones_like(h), mask)
        if self.shortcut is not None:
            logits = logits + self.shortcut(x, direct_mask(degrees))
        return logits

    def log_likelihood(self, x: Tensor, clients: Sequence[int] = (0,)) -> Tensor:
        """``log p(x)`` ``[B]`` in nats of samples ``[B, C, H, W]``, each variable 0 or 1, as in evaluation.

        With n = ``eval_orders`` above 1: ``log (1/n sum_e p_e(x))``. If clients have their own masks: the mean of
        ``log p(x)`` over ``clients``, with one pass for each.
        """
        if not self.differs_by_client or not clients:
            clients = (0,)
        total = self._log_likelihood_of(x, clients[0])
        for client in clients[1:]:
            total = total + self._log_likelihood_of(x, client)
        return total / len(clients)

    def _log_likelihood_of(self, x: Tensor, client: int) -> Tensor:
        every = [self.evaluation_degrees(number, x.device, client) for number in range(self.eval_orders)]
        found = torch.stack([-negative_log_likelihoods(self.logits(x, degrees), x) for degrees in every])
        return found.logsumexp(0) - math.log(len(every))

    @torch.no_grad()
    def sample(self, count: int, generator: torch.Generator | None = None, client: int = 0) -> Tensor:
        """``[count, C, H, W]`` ancestral samples of the evaluated density, variable by variable in their order.

        With ``eval_orders`` above 1 each sample first draws one of the averaged densities. For each variable, the first
        hidden layer is updated, and the layers above it and one output are computed.

        Args:
            count: number of samples.
            generator: on the CPU; torch's own if not given.
            client: the client to sample for, if clients have their own masks.

        Raises:
            ConfigError: with ``stale_output_mask`` there is no density to sample from.
        """
        if self.stale_output_mask:
            raise ConfigError("model.network.stale_output_mask", True, "false for samples")
        device, dtype = self.output.bias.device, self.output.bias.dtype
        of = torch.randint(self.eval_orders, (count,), generator=generator)
        uniform = torch.rand(count, self.variables, generator=generator, dtype=torch.float64).to(device, dtype)
        x = torch.zeros(count, self.variables, device=device, dtype=dtype)
        for number in of.unique().tolist():
            rows = (of == number).nonzero().squeeze(1).to(device)
            x[rows] = self._ancestral(uniform[rows], self.evaluation_degrees(number, device, client))
        return x.view(count, *self.input_shape)

    def _ancestral(self, uniform: Tensor, degrees: Degrees) -> Tensor:
        """Samples ``[n, D]``: a variable is 1 if its entry of ``uniform`` ``[n, D]`` is below its probability."""
        masks = [*inner_masks(degrees), output_mask(degrees)]
        layers = cast(list[MaskedLinear], [*self.layers, self.output])
        *inner, outer = (layer.weight * mask for layer, mask in zip(layers, masks, strict=True))
        direct = None if self.shortcut is None else self.shortcut.weight * direct_mask(degrees)
        biases: list[Tensor] = [layer.bias for layer in layers]
        if self.conditioning:
            conditions = cast(list[MaskedLinear], list(self.conditions))
            added = [(u.weight * mask).sum(1) for u, mask in zip(conditions, masks, strict=True)]
            biases = [bias + more for bias, more in zip(biases, added, strict=True)]
        x = torch.zeros_like(uniform)
        first = biases[0].expand(len(x), -1).clone()  # input of the first hidden layer from the variables drawn so far
        for variable in degrees.order.argsort().tolist():
            h = torch.relu(first) if inner else x
            for weight, bias in zip(inner[1:], biases[1:-1], strict=True):
                h = torch.relu(F.linear(h, weight, bias))
            logits = h @ outer[variable] + biases[-1][variable]
            if direct is not None:
                logits = logits + x @ direct[variable]
            x[:, variable] = (uniform[:, variable] < logits.sigmoid()).to(x.dtype)
            if inner:
                first += x[:, variable, None] * inner[0][:, variable]
        return x

    def _present_degrees(self, x: Tensor) -> Degrees:
        if self.training and self._drawn is not None:
            return Degrees.of_flat(self._drawn, self.variables, self.hidden)
        return self.evaluation_degrees(0, x.device)

    def _hidden_layers(self, x: Tensor, degrees: Degrees) -> Tensor:
        h = x
        for number, (layer, mask) in enumerate(zip(self.layers, inner_masks(degrees), strict=True)):
            z = layer(h, mask)
            if self.conditioning:
                z = z + self.conditions[number](torch.ones_like(h), mask)
            h = torch.relu(z)
        return h
