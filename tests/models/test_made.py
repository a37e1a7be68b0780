"""MADE: the variables that outputs depend on, probabilities that add up to one, and the draws for clients and steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cfl.metrics.measures.likelihood import negative_log_likelihoods
from cfl.models import MADE
from cfl.models.decomposition import decompose, decomposed_layers
from cfl.models.dropout import dropout_masks
from cfl.models.made_masks import Degrees, direct_mask, inner_masks, output_mask, random_hidden
from cfl.models.step_draws import StepDraws
from cfl.runtime.errors import ConfigError

VARIABLES = 10


def made(variables: int = VARIABLES, seed: int = 0, **options: Any) -> MADE:
    """A MADE in float64, with standard normal weights, large enough to matter."""
    torch.manual_seed(seed)
    network = MADE((1, 1, variables), variables, **options).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return network.eval()


def states(variables: int = VARIABLES) -> Tensor:
    """All states of the variables, ``[2^D, 1, 1, D]``."""
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=variables)), dtype=torch.float64)[:, None, None]


def steps(network: MADE) -> Iterator[Degrees]:
    """The degrees of some local steps of some clients."""
    for round, client, step in itertools.product(range(2), (0, 3), range(3)):
        yield network.degrees(round, client, step)


def logits_in_step(network: MADE, degrees: Degrees, x: Tensor) -> Tensor:
    """Logits as engines compute them: in training mode, with the degrees set for one pass."""
    network.train()
    try:
        with dropout_masks(network, {"": degrees.flat()}):
            return network(x)
    finally:
        network.eval()


def reached(network: MADE, degrees: Degrees) -> list[set[int]]:
    """For each output, the variables on which it may depend by the masks' definition, unit by unit."""
    known = [{d} for d in range(network.variables)]  # the variables that each unit of the layer before depends on
    before = degrees.order.tolist()
    for after in [h.tolist() for h in degrees.hidden]:
        seen = [set().union(*(known[j] for j in range(len(before)) if before[j] <= k)) for k in after]
        known, before = seen, after
    order = degrees.output_order.tolist()
    outputs = [set().union(*(known[j] for j in range(len(before)) if before[j] < place)) for place in order]
    if network.direct:
        places = degrees.order.tolist()
        outputs = [o | {e for e in range(len(places)) if places[e] < places[d]} for d, o in enumerate(outputs)]
    return outputs


def dependencies(network: MADE, degrees: Degrees) -> list[set[int]]:
    """For each output, the variables with a nonzero derivative. Weights are made positive, so that nothing cancels."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.abs_().add_(0.1)
    x = torch.rand(1, 1, 1, network.variables, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: logits_in_step(network, degrees, x)[0], x).flatten(1)
    return [set(row.nonzero().flatten().tolist()) for row in jacobian]


OPTIONS: list[dict[str, Any]] = [
    {
        "hidden": hidden,
        "direct": direct,
        "conditioning": conditioning,
        "order": order,
        "order_agnostic": order_agnostic,
        "num_masks": num_masks,
        "synchronised": synchronised,
    }
    for hidden, direct, conditioning, order, order_agnostic, num_masks, synchronised in itertools.product(
        ([12], [9, 11]), (False, True), (False, True), ("random", "natural"), (False, True), (1, 3), (True, False)
    )
]


def named(options: dict[str, Any]) -> str:
    return " ".join(str(value) if name in ("hidden", "order") else name for name, value in options.items() if value)


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_outputs_depend_on_earlier_variables_only(options: dict[str, Any]) -> None:
    """Outputs depend on exactly the earlier variables that the degrees allow, for each draw of the masks."""
    network = made(**options)
    for degrees in [*steps(network), network.evaluation_degrees(0, torch.device("cpu"))]:
        found, place = dependencies(network, degrees), degrees.order.tolist()
        assert sorted(place) == list(range(VARIABLES))
        assert all(place[e] < place[d] for d, seen in enumerate(found) for e in seen)
        assert found == reached(network, degrees)
        assert sum(map(len, found)) > VARIABLES  # outputs do depend on variables
        if options["direct"]:
            assert all(len(seen) == place[d] for d, seen in enumerate(found))  # all earlier variables


def test_without_hidden_layers_all_earlier_variables_are_seen() -> None:
    network = made(hidden=[], order_agnostic=True)
    for degrees in steps(network):
        assert [len(seen) for seen in dependencies(network, degrees)] == degrees.order.tolist()


def test_a_stale_output_mask_breaks_autoregression() -> None:
    """The defect of CONFEDMADE's code: about half of the outputs depend on their own variable."""
    network = made(100, hidden=[80], order_agnostic=True, stale_output_mask=True)
    fresh = made(100, hidden=[80], order_agnostic=True)
    for degrees in [network.degrees(0, 0, 0), network.evaluation_degrees(0, torch.device("cpu"))]:
        found = reached(network, degrees)
        assert 0.3 < sum(d in seen for d, seen in enumerate(found)) / 100 < 0.6
        place = degrees.order.tolist()
        wrong = sum(place[e] >= place[d] for d, seen in enumerate(found) for e in seen)
        assert 0.2 < wrong / sum(map(len, found)) < 0.5
    assert not any(d in seen for d, seen in enumerate(reached(fresh, fresh.degrees(0, 0, 0))))
    # Its probabilities do not add up to 1, because outputs depend on their own variables.
    stale = made(hidden=[12], order_agnostic=True, stale_output_mask=True)
    assert abs(float(stale.log_likelihood(states()).detach().exp().sum()) - 1) > 0.05
    with pytest.raises(ConfigError, match="stale_output_mask"):
        stale.sample(1)


@pytest.mark.parametrize(
    "options",
    [
        {"hidden": [12]},
        {"hidden": []},
        {"hidden": [9, 11], "direct": True, "conditioning": True},
        {"hidden": [12], "order_agnostic": True, "eval_orders": 4},
        {"hidden": [12], "num_masks": 3, "eval_orders": 3, "order": "natural"},
        {"hidden": [9, 11], "direct": True, "order_agnostic": True, "num_masks": 2, "eval_orders": 5},
    ],
    ids=named,
)
def test_probabilities_of_all_states_add_up_to_one(options: dict[str, Any]) -> None:
    network = made(**options)
    log_p = network.log_likelihood(states()).detach()
    assert float(log_p.exp().sum()) == pytest.approx(1, abs=1e-12)
    assert float(log_p.exp().max()) > 4 / 2**VARIABLES  # not uniform
    for degrees in steps(network):  # in training, too
        log_p = -negative_log_likelihoods(logits_in_step(network, degrees, states()), states())
        assert float(log_p.detach().exp().sum()) == pytest.approx(1, abs=1e-12)


def test_likelihood_of_a_density_written_down() -> None:
    """Likelihoods are right for p(a) = 0.25, p(b | a) = 0.8 or 0.1, and p(c | a, b) with the logit 0.5 - a + 2 b."""

    def logit(p: float) -> float:
        return math.log(p / (1 - p))

    network = made(3, hidden=[], order="natural")
    with torch.no_grad():
        network.output.bias.copy_(torch.tensor([logit(0.25), logit(0.1), 0.5], dtype=torch.float64))
        weights = [[9.0, 9, 9], [logit(0.8) - logit(0.1), 9, 9], [-1, 2, 9]]  # the nines are masked
        network.output.weight.copy_(torch.tensor(weights, dtype=torch.float64))
    for state in itertools.product((0, 1), repeat=3):
        a, b = state[:2]
        chances = (0.25, 0.8 if a else 0.1, 1 / (1 + math.exp(-(0.5 - a + 2 * b))))
        expected = sum(math.log(p if bit else 1 - p) for p, bit in zip(chances, state, strict=True))
        x = torch.tensor(state, dtype=torch.float64).view(1, 1, 1, 3)
        assert network.log_likelihood(x).item() == pytest.approx(expected, abs=1e-12)
        assert negative_log_likelihoods(network(x), x).item() == pytest.approx(-expected, abs=1e-12)


def test_training_reaches_the_entropy() -> None:
    """The training loss reaches the distribution's entropy, and is never below it."""
    torch.manual_seed(1)
    x = states(4)
    p = torch.rand(16, dtype=torch.float64).square() + 0.01
    p /= p.sum()
    network = MADE((1, 1, 4), 4, hidden=[40], direct=True, order="natural").double()
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(400):
        optimizer.zero_grad()
        loss = (p * negative_log_likelihoods(network(x), x)).sum()
        loss.backward()
        optimizer.step()
    entropy = float(-(p * p.log()).sum())
    assert entropy - 1e-12 < float(loss.detach()) < entropy + 2e-3


def test_the_ensemble_is_the_mean_of_probabilities() -> None:
    network = made(hidden=[12], order_agnostic=True, num_masks=2, eval_orders=3)
    x = states()[::37]
    total = torch.zeros(len(x), dtype=torch.float64)
    orders = set()
    for number in range(3):
        degrees = network.evaluation_degrees(number, x.device)
        orders.add(tuple(degrees.order.tolist()))
        p = network.logits(x, degrees).sigmoid()
        bits = x.flatten(1)
        total += torch.where(bits == 1, p, 1 - p).prod(1)
    torch.testing.assert_close(network.log_likelihood(x), (total / 3).log(), rtol=0, atol=1e-12)
    assert len(orders) == 3
    # The logits are those of the first order alone.
    torch.testing.assert_close(network(x), network.logits(x, network.evaluation_degrees(0, x.device)))


@pytest.mark.parametrize("eval_orders", [1, 3])
def test_samples_follow_the_density(eval_orders: int) -> None:
    network = made(4, hidden=[6], direct=True, order_agnostic=True, eval_orders=eval_orders)
    count = 20_000
    drawn = network.sample(count, torch.Generator().manual_seed(5))
    assert drawn.shape == (count, 1, 1, 4)
    assert drawn.dtype == torch.float64
    number = (drawn.flatten(1) @ torch.tensor([8.0, 4, 2, 1], dtype=torch.float64)).long()
    found = torch.bincount(number, minlength=16).double()
    p = network.log_likelihood(states(4)).exp()
    # Pearson's statistic with 15 degrees of freedom; 50 has a chance of 1e-5.
    expected = count * p
    assert float(((found - expected).square() / expected.clamp(min=1)).sum()) < 50
    assert torch.equal(drawn, network.sample(count, torch.Generator().manual_seed(5)))
    assert not torch.equal(drawn, network.sample(count, torch.Generator().manual_seed(6)))


@pytest.mark.parametrize(
    "options",
    [
        {"hidden": [12]},
        {"hidden": []},
        {"hidden": [], "conditioning": True},
        {"hidden": [9, 11, 8], "direct": True, "conditioning": True, "order_agnostic": True, "eval_orders": 3},
        {"hidden": [12], "direct": True, "synchronised": False, "num_masks": 2, "eval_orders": 2},
    ],
    ids=named,
)
def test_samples_are_those_of_whole_passes(options: dict[str, Any]) -> None:
    """Samples are those of a loop with one whole pass for each variable."""
    network = made(**options)
    count, client = 50, 2
    draws = torch.Generator().manual_seed(3)
    of = torch.randint(network.eval_orders, (count,), generator=draws)
    uniform = torch.rand(count, VARIABLES, generator=draws, dtype=torch.float64)
    expected = torch.zeros(count, VARIABLES, dtype=torch.float64)
    for row in range(count):
        degrees = network.evaluation_degrees(int(of[row]), torch.device("cpu"), client)
        for variable in degrees.order.argsort().tolist():
            p = network.logits(expected[row].view(1, 1, 1, -1), degrees)[0, variable].sigmoid()
            expected[row, variable] = float(uniform[row, variable] < p)
    found = network.sample(count, torch.Generator().manual_seed(3), client)
    assert torch.equal(found.flatten(1), expected)
    assert len({tuple(row) for row in expected.tolist()}) > 5


@pytest.mark.parametrize("options", [{}, {"order_agnostic": True, "num_masks": 2, "eval_orders": 3}], ids=named)
def test_clients_with_masks_of_their_own_have_densities_of_their_own(options: dict[str, Any]) -> None:
    """Each client's density adds up to 1. The score of several clients is the mean of their log-densities."""
    network = made(hidden=[12], synchronised=False, **options)
    own = [network.log_likelihood(states(), (client,)).detach() for client in (0, 3, 5)]
    for log_p in own:
        assert float(log_p.exp().sum()) == pytest.approx(1, abs=1e-12)
    assert float((own[0] - own[1]).abs().max()) > 0.1
    together = network.log_likelihood(states(), (0, 3, 5)).detach()
    torch.testing.assert_close(together, torch.stack(own).mean(0), rtol=0, atol=1e-12)
    assert torch.equal(network.log_likelihood(states()).detach(), own[0])
    alike = made(hidden=[12], **options)
    assert torch.equal(alike.log_likelihood(states(), (0, 3, 5)), own[0])  # client 0's are the synchronised ones
    trained = {tuple(network.degrees(0, 3, step).hidden[0].tolist()) for step in range(network.num_masks)}
    tested = [network.evaluation_degrees(number, torch.device("cpu"), 3) for number in range(network.eval_orders)]
    assert {tuple(degrees.hidden[0].tolist()) for degrees in tested} == trained  # what this client has trained
    if not options:
        assert torch.equal(tested[0].order, network.degrees(4, 3, 2).order)


def test_masks_are_those_of_the_definition() -> None:
    order, hidden = torch.tensor([2, 0, 1]), (torch.tensor([0, 1]), torch.tensor([1]))
    degrees = Degrees(order, hidden, order)
    first, second = inner_masks(degrees)
    assert first.tolist() == [[False, True, False], [False, True, True]]
    assert second.tolist() == [[True, True]]
    assert output_mask(degrees).tolist() == [[True], [False], [False]]
    assert direct_mask(degrees).tolist() == [[False, True, True], [False, False, False], [False, True, False]]


def test_hidden_degrees_lie_between_those_below_and_the_last_but_one() -> None:
    layers = random_hidden([500, 3, 400], 6, 0, "test")
    assert [len(layer) for layer in layers] == [500, 3, 400]
    assert torch.bincount(layers[0]).tolist() == [pytest.approx(100, abs=40)] * 5
    for before, after in itertools.pairwise(layers):
        assert int(after.min()) >= int(before.min())
        assert int(after.max()) <= 4
    assert set(random_hidden([50], 1, 0, "test")[0].tolist()) == {0}


# Draws for clients and steps


def flat(network: MADE, round: int, client: int, step: int) -> list[int]:
    return network.draw(round, client, step).tolist()


@pytest.mark.parametrize("options", [{"order_agnostic": True}, {"num_masks": 4}, {}], ids=["OA", "CA", "fixed"])
def test_synchronised_masks_are_the_same_for_all_clients(options: dict[str, Any]) -> None:
    alike, distinct = (made(hidden=[12], synchronised=value, **options) for value in (True, False))
    for round, step in itertools.product(range(2), range(3)):
        drawn = [flat(alike, round, client, step) for client in range(4)]
        assert drawn == [drawn[0]] * 4
        others = [flat(distinct, round, client, step) for client in range(4)]
        assert others[0] == drawn[0]  # client 0 has the synchronised draws
        assert len({tuple(other) for other in others}) == 4
    assert bool(StepDraws(alike)) == bool(options)
    assert StepDraws(distinct)


def test_clients_may_share_the_first_masks_alone() -> None:
    """With ``start`` (section 3.2 of CONFEDMADE), clients share the first masks only, and evaluation uses these.

    Each client draws its own orders and hidden units in training. The model is still one density.
    """
    options = {"order_agnostic": True, "num_masks": 3, "mask_seed": 5}
    alike, started = (made(hidden=[12], synchronised=value, **options) for value in (True, "start"))
    drawn = {c: [started.degrees(r, c, s) for r in range(4) for s in range(3)] for c in range(4)}
    orders = {c: [tuple(d.order.tolist()) for d in of] for c, of in drawn.items()}
    assert len({order for of in orders.values() for order in of}) == 4 * 12
    assert all(torch.equal(d.order, d.output_order) for of in drawn.values() for d in of)
    hidden = {c: [tuple(d.hidden[0].tolist()) for d in of] for c, of in drawn.items()}
    first = tuple(alike.evaluation_degrees(0, torch.device("cpu")).hidden[0].tolist())
    for of in hidden.values():
        assert all(len(set(of[at : at + 3])) == 3 and first in of[at : at + 3] for at in range(0, 12, 3))
    own = [set(of) - {first} for of in hidden.values()]
    assert len(set().union(*own)) == 4 * 2
    places = {tuple(of[at : at + 3].index(first) for at in range(0, 12, 3)) for of in hidden.values()}
    assert len(places) == 4  # each client uses the first masks at other places of its cycles
    for r, s in itertools.product(range(2), range(3)):
        assert flat(started, r, 0, s) == flat(alike, r, 0, s)  # client 0 has the synchronised draws
    assert not started.differs_by_client
    assert torch.equal(started.log_likelihood(states(), (1, 3)), alike.log_likelihood(states()))

    several = made(hidden=[12], synchronised="start", eval_orders=3, **options)
    assert several.differs_by_client
    tested = {c: [several.evaluation_degrees(n, torch.device("cpu"), c) for n in range(3)] for c in range(4)}
    for c, of in tested.items():
        assert {tuple(d.hidden[0].tolist()) for d in of} == set(hidden[c])  # what this client has trained
    fixed = made(hidden=[12], synchronised="start", order_agnostic=True, eval_orders=3)
    assert not fixed.differs_by_client


def test_order_agnostic_training_takes_an_order_per_step() -> None:
    network = made(hidden=[12], order_agnostic=True)
    drawn = {(r, s): network.degrees(r, 1, s) for r in range(3) for s in range(4)}
    assert len({tuple(d.order.tolist()) for d in drawn.values()}) == 12
    assert all(torch.equal(d.order, d.output_order) for d in drawn.values())
    assert len({tuple(d.hidden[0].tolist()) for d in drawn.values()}) == 1
    assert flat(made(hidden=[12], order_agnostic=True), 2, 1, 3) == drawn[2, 3].flat().tolist()  # draws keep no state
    places = torch.stack([network.degrees(0, 0, s).order for s in range(2000)]).double()
    assert (places.mean(0) - 4.5).abs().max() < 0.3  # every variable at every place: the deviation is 0.064


def test_connectivity_agnostic_training_takes_the_draws_in_turn() -> None:
    network = made(hidden=[12], num_masks=3)
    of = [[tuple(network.degrees(r, 0, s).hidden[0].tolist()) for s in range(6)] for r in range(12)]
    assert len({degrees for row in of for degrees in row}) == 3
    for row in of:
        assert len(set(row[:3])) == 3
        assert row[:3] == row[3:]
    assert len({row[0] for row in of}) == 3  # rounds of one step use all three draws
    assert len({tuple(network.degrees(r, 0, 0).order.tolist()) for r in range(6)}) == 1


def test_draws_are_stacked_for_clients() -> None:
    network = made(hidden=[12], order_agnostic=True, synchronised=False)
    drawn = StepDraws(network).draw(1, [4, 0, 4], 2, torch.device("cpu"))
    assert list(drawn) == [""]
    assert drawn[""].tolist() == [flat(network, 1, client, 2) for client in (4, 0, 4)]
    degrees = Degrees.of_flat(drawn[""][0], VARIABLES, network.hidden)
    assert degrees.flat().tolist() == drawn[""][0].tolist()


def test_the_seed_of_masks_follows_from_the_run_or_is_given() -> None:
    first, again, other = (made(seed=seed, order_agnostic=True) for seed in (1, 1, 2))
    assert flat(first, 0, 0, 0) == flat(again, 0, 0, 0) != flat(other, 0, 0, 0)
    given = [made(seed=seed, order_agnostic=True, mask_seed=7) for seed in (1, 2)]
    assert flat(given[0], 0, 0, 0) == flat(given[1], 0, 0, 0) != flat(first, 0, 0, 0)
    torch.manual_seed(3)
    drawn = MADE((1, 1, 4), 4)
    torch.manual_seed(3)
    named = MADE((1, 1, 4), 4, mask_seed=7)
    assert torch.equal(drawn.output.weight, named.output.weight)


# Decomposition, parameters and options


def test_its_weights_can_be_decomposed() -> None:
    """Decomposed weights start as 1/2 (base) + 1/3 (adaptive) of the plain weights."""
    network = made(hidden=[12], direct=True, conditioning=True, order_agnostic=True)
    smaller = made(hidden=[12], direct=True, conditioning=True, order_agnostic=True)
    with torch.no_grad():
        for name, parameter in smaller.named_parameters():
            if name.endswith("weight"):
                parameter.mul_(5 / 6)
    decompose(network)
    names = ["layers.0", "output", "shortcut", "conditions.0", "conditions.1"]
    assert sorted(layer.name for layer in decomposed_layers(network)) == sorted(names)
    x = states()[::50]
    for degrees in steps(network):
        torch.testing.assert_close(logits_in_step(network, degrees, x), logits_in_step(smaller, degrees, x))


def test_number_of_parameters() -> None:
    """CONFEDMADE's MNIST network has the parameters W, b, V, c, D. Conditioning adds as many weights as W and V."""
    plain = MADE((1, 28, 28), 784, hidden=[500], direct=True)
    assert sum(p.numel() for p in plain.parameters()) == 2 * 784 * 500 + 500 + 784 + 784**2
    more = MADE((1, 28, 28), 784, hidden=[500, 400], conditioning=True)
    weights = 784 * 500 + 500 * 400 + 400 * 784
    assert sum(p.numel() for p in more.parameters()) == 2 * weights + 500 + 400 + 784


def test_the_last_hidden_layer() -> None:
    network = made(hidden=[5, 7])
    assert network.features(states()[:3]).shape == (3, 7)


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("hidden", {"hidden": [3, 0]}),
        ("order", {"order": "reversed"}),
        ("num_masks", {"num_masks": 0}),
        ("num_masks", {"hidden": [], "num_masks": 2}),
        ("direct", {"hidden": [], "direct": True}),
        ("eval_orders", {"eval_orders": 0}),
        ("eval_orders", {"eval_orders": 2}),
        ("eval_orders", {"eval_orders": 4, "num_masks": 3}),
        ("synchronised", {"synchronised": "first", "order_agnostic": True}),
        ("synchronised", {"synchronised": "start"}),
        *(("mask_seed", {"mask_seed": seed}) for seed in (-1, True, 1.0)),
        ("stale_output_mask", {"stale_output_mask": True}),
        ("stale_output_mask", {"stale_output_mask": True, "order_agnostic": True, "num_masks": 2}),
    ],
)
def test_bad_options(option: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        MADE((1, 2, 3), 6, **options)
    assert caught.value.key == f"model.network.{option}"


def test_outputs_are_the_variables() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.network = 'MADE'.*data\.scenario density: there are 4 outputs, not 6"
    ):
        MADE((1, 2, 3), 4)
