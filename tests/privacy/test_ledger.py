"""The ledger: the clients about whom sums may reveal something, and epsilons against closed forms and naive sums."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import pytest
import torch
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp
from scipy.stats import norm

from cfl.privacy import accounting
from cfl.privacy.accounting import Accountant, Spent
from cfl.privacy.ledger import Ledger, spent_by_clients
from cfl.privacy.release import Noise, Sample
from cfl.randomness.generators import numpy_generator

DELTA = 1e-5
POOL = (0, 1, 2, 3)


def ledger_of(*rounds: tuple[int, Sample, dict[str, Noise], Sequence[str]]) -> Ledger:
    """A ledger of rounds, each given by its task, sample, noise by topic, and the topics that the server reads."""
    ledger = Ledger()
    for number, (task, sample, noise, read) in enumerate(rounds):
        ledger.enter_round(sample, noise)
        for topic in read:
            ledger.read(number, task, topic, sample.clients, sample.clients)
    return ledger


def balle_wang(mu: float) -> float:
    """Epsilon of a Gaussian with sensitivity mu and standard deviation 1, from the closed form of its delta (Balle and
    Wang, 2018, theorem 5)."""

    def delta(epsilon: float) -> float:
        inside = norm.cdf(mu / 2 - epsilon / mu)
        return float(inside - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu)) - DELTA)

    return float(brentq(delta, 0, 50 * (mu + mu**2), xtol=1e-12))


def naive_rdp(rate: float, multiplier: float, rounds: int) -> float:
    """Epsilon of Poisson sampling by Rényi divergences of whole orders, written out (Mironov et al., 2019)."""
    found = []
    for order in range(2, 65):
        terms = [
            gammaln(order + 1)
            - gammaln(k + 1)
            - gammaln(order - k + 1)
            + (order - k) * math.log1p(-rate)
            + k * math.log(rate)
            + k * (k - 1) / (2 * multiplier**2)
            for k in range(order + 1)
        ]
        divergence = rounds * float(logsumexp(terms)) / (order - 1)
        found.append(divergence + math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1))
    return min(found)


@pytest.mark.parametrize("kind", ["pld", "rdp"])
@pytest.mark.parametrize(("multiplier", "rounds"), [(4.0, 1), (4.0, 30), (0.7, 1), (0.685, 57)])
def test_several_gaussians_are_one(multiplier: float, rounds: int, kind: str) -> None:
    pytest.importorskip("dp_accounting")
    noise = {"update": Noise(multiplier, 1.0)}
    ledger = ledger_of(*[(0, Sample(POOL, POOL), noise, ["update"])] * rounds)
    found = ledger.epsilon_of_client(Accountant(DELTA, kind))  # type: ignore[arg-type]
    expected = balle_wang(math.sqrt(rounds) / multiplier)
    assert expected * (1 - 1e-9) <= found <= expected * (1.002 if kind == "pld" else 1.2)


def test_hiding_in_a_sample_against_a_naive_sum() -> None:
    pytest.importorskip("dp_accounting")
    sample, noise = Sample((1,), POOL, 0.05), {"update": Noise(1.1, 0.5)}
    ledger = ledger_of(*[(0, sample, noise, ["update"])] * 40)
    naive = naive_rdp(0.05, 1.1, 40)
    by_rdp, by_pld = (ledger.epsilon_of_client(Accountant(DELTA, kind)) for kind in ("rdp", "pld"))  # type: ignore[arg-type]
    assert 0.97 * naive <= by_rdp <= naive * (1 + 1e-9)  # it tries more orders
    assert 0.5 * naive < by_pld < by_rdp
    assert by_rdp < 0.2 * balle_wang(math.sqrt(40) / 1.1)


def test_a_finer_grid_of_losses_changes_epsilon_by_less_than_a_thousandth(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dp_accounting")
    ledger = ledger_of(*[(0, Sample((1,), POOL, 0.05), {"update": Noise(1.1, 0.5)}, ["update"])] * 40)
    found = ledger.epsilon_of_client(Accountant(DELTA, "pld"))
    monkeypatch.setattr(accounting, "_FINENESS", accounting._FINENESS / 4)
    accounting._epsilon.cache_clear()
    assert ledger.epsilon_of_client(Accountant(DELTA, "pld")) == pytest.approx(found, rel=1e-3)


def test_a_sample_that_is_used_again_hides_nobody_and_all_of_the_pool_pay() -> None:
    noise = {"update": Noise(2.0, 1.0), "more": Noise(4.0, 1.0)}
    sample = Sample((1,), POOL, 0.5)
    (spent,) = spent_by_clients(ledger_of((0, sample, noise, ["update", "more"])).releases)
    assert spent == Spent(1 / 16, {(0.5, 2.0): 1})
    # A topic read without noise has used the sample as well.
    (spent,) = spent_by_clients(ledger_of((0, sample, {"more": noise["more"]}, ["update", "more"])).releases)
    assert spent == Spent(1 / 16, {})
    # A rate of 1 hides nobody, and neither does noise that reveals the number of clients.
    for sampled, kind in (
        (Sample(POOL, POOL, 1.0), Noise(2.0, 1.0)),
        (sample, Noise(2.0, 1.0, "clients")),
    ):
        ledger = ledger_of((0, sampled, {"update": kind}, ["update"]))
        assert ledger.releases[0].rate is None
        assert ledger.releases[0].clients == POOL


def test_noise_that_clients_add_is_that_of_those_whose_messages_came() -> None:
    for added_by, expected in (("clients", 3.0 * math.sqrt(0.75)), ("server", 3.0)):
        ledger = Ledger()
        ledger.enter_round(Sample(POOL, POOL), {"sketch": Noise(3.0, 1.0, added_by, parts=4)})  # type: ignore[arg-type]
        ledger.read(0, 0, "sketch", POOL, POOL[1:])
        (release,) = ledger.releases
        assert release.noise.multiplier == pytest.approx(expected, rel=1e-12)
        assert release.multiplier == pytest.approx(expected / 2, rel=1e-12)  # of four parts together
        assert release.clients == POOL


def test_the_client_that_pays_most_by_a_loop_over_clients() -> None:
    generator = numpy_generator(0, "who takes part")
    rounds, naive = [], dict.fromkeys(range(12), 0.0)
    for _ in range(50):
        who = tuple(sorted(generator.choice(12, 3, replace=False).tolist()))
        multiplier = float(generator.uniform(0.5, 5))
        rounds.append((0, Sample(who, tuple(range(12))), {"update": Noise(multiplier, 1.0)}, ["update"]))
        for client in who:
            naive[client] += multiplier**-2
    (spent,) = spent_by_clients(ledger_of(*rounds).releases)
    assert spent.gaussian == pytest.approx(max(naive.values()), rel=1e-12)


def test_clients_of_different_pools_are_added_up_apart() -> None:
    rounds = [
        (0, Sample((0,), (0, 1), 0.5), {"update": Noise(1.0, 1.0)}, ["update"]),
        (1, Sample((1,), (1, 2), 0.5), {"update": Noise(1.0, 1.0)}, ["update"]),
        (1, Sample((2,), (1, 2)), {"update": Noise(2.0, 1.0)}, ["update"]),
    ]
    found = spent_by_clients(ledger_of(*rounds).releases)
    assert sorted((s.gaussian, sum(s.sampled.values())) for s in found) == [(0.0, 1), (0.0, 2), (0.25, 1)]


def test_a_task_pays_for_later_ones_only_if_these_use_its_data() -> None:
    pytest.importorskip("dp_accounting")
    rounds = [(task, Sample(POOL, POOL), {"update": Noise(3.0, 1.0)}, ["update"]) for task in (0, 1, 1, 2)]
    ledger, accountant = ledger_of(*rounds), Accountant(DELTA)
    one, two, four = (balle_wang(math.sqrt(count) / 3) for count in (1, 2, 4))
    assert ledger.epsilon_of_release(accountant) == pytest.approx(one, rel=2e-3)
    assert ledger.epsilon_of_task(accountant, reaches_back=False) == pytest.approx(two, rel=2e-3)
    assert ledger.epsilon_of_task(accountant, reaches_back=True) == pytest.approx(four, rel=2e-3)
    assert ledger.epsilon_of_client(accountant) == pytest.approx(four, rel=2e-3)


def test_it_comes_back_from_a_file() -> None:
    noise = {"update": Noise(1 / 3, 0.1, without="a count"), "sketch": Noise(0.7, 1.0, "clients", "all", 3)}
    ledger = ledger_of(
        (0, Sample((1,), POOL, 0.3), noise, ["update", "sketch"]), (1, Sample((2, 3), POOL), noise, ["update"])
    )
    file = io.BytesIO()
    torch.save(ledger.state_dict(), file)
    file.seek(0)
    again = Ledger()
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.releases == ledger.releases
    assert again.uncovered == ["update: a count"]
    assert len(ledger.state_dict()["clients"]) == 3
