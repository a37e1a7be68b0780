"""Partitions: clients' shares, compared with counts, published sizes and the Dirichlet's moments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import permuted, split, tiny_data

from cfl.data.participation import Holders
from cfl.data.partitions import (
    IID,
    ClassesPerClient,
    ClientShares,
    Dirichlet,
    LabelBlocks,
    Partition,
    Shards,
    Shares,
    classes_per_client,
    client_indices,
)
from cfl.data.partitions.client_shares import share_sizes
from cfl.data.types import ImageSet, PixelTransform, Task
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def shuffled_labels(*class_sizes: int, seed: int = 9) -> np.ndarray:
    return rng(seed).permutation(np.repeat(np.arange(len(class_sizes)), class_sizes))


def make_task(labels: np.ndarray, name: str = "task") -> Task:
    stored = ImageSet(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), torch.from_numpy(labels).long())
    return Task(name, stored, stored, int(labels.max()) + 1, PixelTransform((0.0,), (1.0,)))


def histogram(labels: np.ndarray, shares: list[np.ndarray]) -> np.ndarray:
    """[clients, classes]."""
    return np.stack([np.bincount(labels[share], minlength=labels.max() + 1) for share in shares])


EVERY = [
    IID(),
    IID(keep_remainder=True),
    Shards(2),
    Shards(3),
    Dirichlet(0.3),
    Dirichlet(5.0, balance=False),
    Dirichlet(0.05, min_samples=0, balance=False),
    ClassesPerClient(2),
    ClassesPerClient(10),
    LabelBlocks(2, block_size=10),
    LabelBlocks(3, block_size=1),
]


def left_out(partition: Partition, samples: int, clients: int) -> int:
    """Number of samples that go to no client, so that shares have equal sizes."""
    if isinstance(partition, IID):
        return 0 if partition.keep_remainder else samples % clients
    if isinstance(partition, Shards):
        return samples % (clients * partition.per_client)
    if isinstance(partition, LabelBlocks):
        blocks = partition.blocks_per_client * clients
        return samples % blocks if partition.block_size is None else samples - partition.block_size * blocks
    return 0


@pytest.mark.parametrize("partition", EVERY, ids=lambda p: p.name)
@pytest.mark.parametrize("num_clients", [5, 7, 20])
def test_shares_are_disjoint_ascending_and_complete_up_to_dropped(partition: Partition, num_clients: int) -> None:
    labels = shuffled_labels(*[103 + k for k in range(10)])
    shares = partition.split(labels, num_clients, rng())
    assert len(shares) == num_clients
    assert all(share.dtype == np.int64 and (np.diff(share) > 0).all() for share in shares)
    dealt = np.concatenate(shares)
    assert len(np.unique(dealt)) == len(dealt) == len(labels) - left_out(partition, len(labels), num_clients)
    assert dealt.min() >= 0
    assert dealt.max() < len(labels)


@pytest.mark.parametrize("partition", EVERY, ids=lambda p: p.name)
def test_the_generator_alone_decides(partition: Partition) -> None:
    labels = shuffled_labels(*[100] * 10)
    first, again, other = (partition.split(labels, 10, rng(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


# IID and Shards


@pytest.mark.parametrize(
    ("partition", "num_samples", "num_clients", "share"),
    [
        # samples per client published by FOT for MNIST, CIFAR-100 tasks, 5-Datasets and miniImageNet tasks
        (IID(), 60000, 125, 480),
        (Shards(2), 60000, 125, 480),
        (IID(), 5000, 50, 100),
        (Shards(2), 5000, 50, 100),
        (IID(), 50000, 150, 333),
        (IID(), 73257, 150, 488),
        (Shards(2), 73257, 150, 488),
        (IID(), 16853, 150, 112),
        (Shards(2), 16853, 150, 112),
        (IID(), 2500, 50, 50),
        (Shards(2), 2500, 50, 50),
        # two shards of floor(50000 / 300) are one sample less than floor(50000 / 150)
        (Shards(2), 50000, 150, 332),
    ],
)
def test_published_share_sizes(partition: Partition, num_samples: int, num_clients: int, share: int) -> None:
    shares = partition.split(rng().integers(0, 5, num_samples), num_clients, rng())
    assert {len(s) for s in shares} == {share}


def test_iid_can_keep_the_remainder() -> None:
    sizes = [len(s) for s in IID(keep_remainder=True).split(shuffled_labels(50, 53), 10, rng())]
    assert sorted(sizes) == [10] * 7 + [11] * 3


def test_iid_gives_hypergeometric_class_counts() -> None:
    labels = shuffled_labels(300, 700)
    counts = np.array([(labels[s] == 0).sum() for i in range(200) for s in IID().split(labels, 10, rng(i))])
    assert counts.mean() == pytest.approx(30, abs=1e-9)  # nothing is dropped, so the mean is exact
    assert counts.var() == pytest.approx(100 * 0.3 * 0.7 * 900 / 999, rel=0.1)


def test_shards_are_label_pure_when_they_divide_the_classes() -> None:
    labels = shuffled_labels(*[500] * 10)
    counts = histogram(labels, Shards(2).split(labels, 50, rng()))
    assert set(np.unique(counts)) <= {0, 50, 100}
    assert counts.sum(axis=0).tolist() == [500] * 10
    assert ((counts > 0).sum(axis=1) <= 2).all()


def test_shards_that_straddle_a_border_hold_neighbouring_classes() -> None:
    labels = shuffled_labels(130, 170, 200)
    for seed in range(5):
        held = histogram(labels, Shards(1).split(labels, 10, rng(seed))) > 0  # ten shards of 50
        assert sorted(map(tuple, held.astype(int).tolist())) == sorted(
            [(1, 0, 0)] * 2 + [(1, 1, 0)] + [(0, 1, 0)] * 3 + [(0, 0, 1)] * 4
        )


def test_shard_membership_is_random_within_a_class() -> None:
    labels = np.repeat(np.arange(2), 100)
    together = [np.isin([0, 1], s).all() for i in range(300) for s in Shards(1).split(labels, 20, rng(i))]
    # two samples of a class share one of its ten shards of ten with probability 9 / 99
    assert np.sum(together) / 300 == pytest.approx(9 / 99, abs=0.06)


def test_dropped_samples_are_spread_over_the_classes() -> None:
    labels = np.repeat(np.arange(3), [400, 400, 407])
    sizes = np.bincount(labels)
    lost = [sizes - histogram(labels, Shards(2).split(labels, 100, rng(i))).sum(axis=0) for i in range(100)]
    assert {int(each.sum()) for each in lost} == {7}
    np.testing.assert_allclose(np.mean(lost, axis=0), 7 * sizes / 1207, atol=0.6)


# Dirichlet


@pytest.mark.parametrize("alpha", [0.1, 0.5, 2.0, 50.0])
def test_class_proportions_have_the_dirichlets_moments(alpha: float) -> None:
    clients, size = 8, 2000
    labels = shuffled_labels(size, size, size)
    partition = Dirichlet(alpha, min_samples=0, balance=False)
    p = np.concatenate([histogram(labels, partition.split(labels, clients, rng(i))).T / size for i in range(400)])
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    covariance = -1 / clients**2 / (clients * alpha + 1)
    assert p.shape == (1200, clients)
    np.testing.assert_allclose(p.mean(axis=0), 1 / clients, atol=5 * np.sqrt(variance / 1200))
    # rounding changes an entry by up to one sample, which matters only if the spread is as small
    empirical = np.cov(p.T)
    assert np.diag(empirical).mean() == pytest.approx(variance, rel=0.08)
    off = empirical[~np.eye(clients, dtype=bool)].mean()
    assert off == pytest.approx(covariance, rel=0.08)


def naive_balanced_counts(
    class_sizes: list[int], clients: int, alpha: float, generator: np.random.Generator
) -> np.ndarray:
    """Zeroing and renormalising, one client at a time."""
    counts = np.zeros((len(class_sizes), clients))
    for k, size in enumerate(class_sizes):
        p = generator.dirichlet([alpha] * clients)
        p = np.array([x if counts[:, c].sum() < sum(class_sizes) / clients else 0.0 for c, x in enumerate(p)])
        ends = np.floor(np.cumsum(p / p.sum()) * size)
        ends[-1] = size
        counts[k] = np.diff(ends, prepend=0)
    return counts


def test_balancing_matches_zeroing_and_renormalising_in_distribution() -> None:
    sizes, clients, alpha, draws = [400, 400, 400, 400], 6, 0.5, 1500
    labels = np.repeat(np.arange(4), sizes)
    partition = Dirichlet(alpha, min_samples=0)
    ours = np.stack([histogram(labels, partition.split(labels, clients, rng(i))).T for i in range(draws)])
    naive = np.stack([naive_balanced_counts(sizes, clients, alpha, rng(10**6 + i)) for i in range(draws)])
    for statistic in (
        lambda x: x.std(axis=2).mean(axis=0),  # spread of each class over the clients
        lambda x: x.sum(axis=1).std(axis=1).mean(),  # spread of the client sizes
        lambda x: x.sum(axis=1).max(axis=1).mean(),
    ):
        np.testing.assert_allclose(statistic(ours), statistic(naive), rtol=0.04)


def test_a_full_client_gets_no_further_class() -> None:
    labels = shuffled_labels(*[200] * 10)
    for seed in range(20):
        counts = histogram(labels, Dirichlet(0.3).split(labels, 10, rng(seed)))
        before = np.cumsum(counts, axis=1) - counts
        assert not ((before >= 200) & (counts > 0)).any()
        assert (counts.sum(axis=1) >= 10).all()
    unbalanced = histogram(labels, Dirichlet(0.3, min_samples=0, balance=False).split(labels, 10, rng(0)))
    assert ((np.cumsum(unbalanced, axis=1) - unbalanced >= 200) & (unbalanced > 0)).any()


@pytest.mark.parametrize("balance", [True, False])
def test_every_client_gets_min_samples(balance: bool) -> None:
    labels = shuffled_labels(*[300] * 4)
    demanding = Dirichlet(0.5, min_samples=40, max_retries=1000, balance=balance)
    lenient = Dirichlet(0.5, min_samples=0, balance=balance)
    assert min(len(s) for i in range(20) for s in demanding.split(labels, 8, rng(i))) >= 40
    assert min(len(s) for i in range(20) for s in lenient.split(labels, 8, rng(i))) < 40


def test_redrawing_stops_and_tells_how_close_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = shuffled_labels(100, 100)
    smallest: list[int] = []
    draw = Dirichlet._draw_counts

    def recording(self: Dirichlet, *args: object) -> np.ndarray:
        counts = draw(self, *args)
        smallest.append(int(counts.sum(axis=0).min()))
        return counts

    monkeypatch.setattr(Dirichlet, "_draw_counts", recording)
    with pytest.raises(ConfigError) as caught:
        Dirichlet(0.1, min_samples=20, max_retries=7).split(labels, 10, rng())
    assert len(smallest) == 7
    assert caught.value.key == "data.partition.alpha"
    for part in ("data.partition.min_samples = 20", "in 7 draws", f"at most {max(smallest)}:", "raise alpha"):
        assert part in str(caught.value)
    assert Dirichlet(0.1, min_samples=max(smallest), max_retries=7).split(labels, 10, rng())


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize(("alpha", "min_samples"), [(0.3, 10), (1.0, 30), (0.05, 1)])
def test_clients_are_short_no_more_together_than_independently(alpha: float, min_samples: int, balance: bool) -> None:
    """The number of clients below ``min_samples`` varies like a Poisson variable. Giving up early relies on this."""
    partition, sizes = Dirichlet(alpha, min_samples, balance=balance), np.full(10, 2000)
    held = np.stack([partition._draw_counts(sizes, 300, rng(i)).sum(axis=0) for i in range(400)])
    short = (held < min_samples).sum(axis=1)
    assert 0.3 < short.mean() < 100
    assert short.var() < 1.25 * short.mean()  # 400 draws of a Poisson variable: a standard error of 7 %


def test_what_no_draw_can_give_is_refused_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, draws = shuffled_labels(*[3000] * 10), []
    draw = Dirichlet._draw_counts
    monkeypatch.setattr(Dirichlet, "_draw_counts", lambda self, *args: draws.append(1) or draw(self, *args))
    with pytest.raises(ConfigError, match=r"alpha = 0.3 .*in 1 draw over 3000 clients \(the last left \d{4} of"):
        Dirichlet(0.3).split(labels, 3000, rng())
    assert len(draws) == 1
    with pytest.raises(ConfigError, match="in 5 draws over 190 clients"):  # too few clients to be sure
        Dirichlet(0.01, max_retries=5).split(labels, 190, rng())
    assert len(draws) == 6


def test_of_many_clients_too_the_first_draw_that_will_do_is_taken() -> None:
    """Also with many clients the first sufficient draw is taken, each draw continuing the generator of the last one."""
    labels, partition = shuffled_labels(*[4000] * 10), Dirichlet(0.5, min_samples=12)
    generator, draws = rng(3), [np.zeros((10, 600))]
    while draws[-1].sum(axis=0).min() < 12:
        draws.append(partition._draw_counts(np.full(10, 4000), 600, generator))
    assert len(draws) > 4
    assert np.array_equal(histogram(labels, list(partition.split(labels, 600, rng(3)))), draws[-1].T)


# ClassesPerClient


def test_which_holder_of_a_class_gets_what_is_left_over_is_drawn() -> None:
    labels = np.repeat([0, 1], 7)  # two of four clients share the seven samples of a class
    assert {len(ClassesPerClient(1).split(labels, 4, rng(seed))[0]) for seed in range(20)} == {3, 4}


@pytest.mark.parametrize(("num_clients", "n"), [(10, 2), (7, 3), (5, 2), (33, 4), (1, 10), (4, 10)])
def test_exact_number_of_classes_evenly_spread(num_clients: int, n: int) -> None:
    labels = shuffled_labels(*[101 + 10 * k for k in range(10)])
    counts = histogram(labels, ClassesPerClient(n).split(labels, num_clients, rng()))
    assert ((counts > 0).sum(axis=1) == n).all()
    holders = (counts > 0).sum(axis=0)
    assert holders.min() >= 1
    assert holders.max() - holders.min() <= 1
    for per_client in counts.T:
        positive = per_client[per_client > 0]
        assert positive.max() - positive.min() <= 1


@pytest.mark.parametrize("at_once", [1, 70, 1 << 20])
@pytest.mark.parametrize(("total", "n"), [(10, 2), (10, 3), (10, 4), (10, 10), (7, 3), (6, 4), (1, 1), (97, 2)])
def test_clients_choose_as_if_one_after_another(
    total: int, n: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classes_per_client, "_DRAWS_AT_ONCE", at_once)
    for clients in (1, 4, 5, 23, 100):
        generator, holders, expected = rng(clients), np.zeros(total), []
        for _ in range(clients):
            expected.append(np.argpartition(holders + generator.random(total), n - 1)[:n])
            holders[expected[-1]] += 1
        assert np.array_equal(ClassesPerClient(n)._choose_classes(total, clients, rng(clients)), expected)


def test_choice_of_classes_is_uniform() -> None:
    labels = np.repeat(np.arange(4), 10)
    held = sum((histogram(labels, ClassesPerClient(2).split(labels, 3, rng(i))) > 0).astype(int) for i in range(600))
    np.testing.assert_allclose(held / 600, 0.5, atol=0.08)  # four standard errors


# LabelBlocks

MNIST_CLASSES = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@pytest.mark.parametrize(
    ("class_sizes", "clients", "per_client"),
    [(MNIST_CLASSES, 96, 2), ([10, 7, 3], 4, 1), ([10, 7, 3], 2, 3), ([5], 5, 1), ([1, 1, 40], 3, 2), ([9, 9], 1, 2)],
)
def test_blocks_are_pure_equal_and_as_large_as_can_be(class_sizes: list[int], clients: int, per_client: int) -> None:
    """Blocks have one class and one size, the greatest that trying all sizes finds."""
    needed = clients * per_client
    greatest = max(s for s in range(1, max(class_sizes) + 1) if sum(n // s for n in class_sizes) >= needed)
    labels = shuffled_labels(*class_sizes)
    shares = LabelBlocks(per_client).split(labels, clients, rng())
    counts = histogram(labels, shares)
    assert (counts.sum(axis=1) == per_client * greatest).all()
    assert (counts % greatest == 0).all()
    assert (counts.sum(axis=0) <= greatest * (np.array(class_sizes) // greatest)).all()


def test_the_blocks_of_fedcurvs_mnist() -> None:
    """MNIST gives 193 blocks of 306 samples, of which one is not dealt, as in FedCurv."""
    labels = shuffled_labels(*MNIST_CLASSES)
    shares = LabelBlocks().split(labels, 96, rng())
    assert {len(share) for share in shares} == {612}
    blocks = histogram(labels, shares).sum(axis=0) // 306
    every = np.array([19, 22, 19, 20, 19, 17, 19, 20, 19, 19])
    assert (every - blocks).sum() == 1
    assert set(every - blocks) == {0, 1}


def test_a_given_size_is_kept() -> None:
    labels = shuffled_labels(40, 25, 31)
    counts = histogram(labels, LabelBlocks(2, block_size=10).split(labels, 4, rng()))
    assert set(np.unique(counts)) <= {0, 10, 20}
    assert (counts.sum(axis=1) == 20).all()


def test_which_blocks_go_to_whom_and_which_are_left_out_is_uniform() -> None:
    """Of 3 + 2 + 2 blocks, 2 clients get 2 blocks each. All pairs of different blocks are equally likely."""
    labels, draws = shuffled_labels(35, 20, 20), 3000
    held = np.stack(
        [histogram(labels, LabelBlocks(2, block_size=10).split(labels, 2, rng(i))) // 10 for i in range(draws)]
    )
    # a block is client 0's with probability 2 / 7; both of client 0's are of class 0 with probability 3 / 21
    np.testing.assert_allclose(held.mean(axis=0), np.array([[6, 4, 4]] * 2) / 7, atol=0.05)
    for client in (0, 1):
        pure = [(held[:, client, k] == 2).mean() for k in range(3)]
        np.testing.assert_allclose(pure, [3 / 21, 1 / 21, 1 / 21], atol=0.025)  # four standard errors of the first
    # the three of seven that are left out: all of class 0 with probability 1 / 35
    assert ((held.sum(axis=1)[:, 0]) == 0).mean() == pytest.approx(1 / 35, abs=0.013)


def test_which_samples_of_a_class_are_in_a_block_is_random() -> None:
    labels = np.repeat(np.arange(2), [25, 20])
    dealt = [np.concatenate(LabelBlocks(1, block_size=10).split(labels, 4, rng(i))) for i in range(1500)]
    often = np.bincount(np.concatenate(dealt), minlength=45) / 1500
    np.testing.assert_allclose(often[:25], 20 / 25, atol=0.045)  # five samples of class 0 fill no block
    assert (often[25:] == 1).all()
    together = np.mean(
        [np.isin([30, 31], s).all() for i in range(1500) for s in LabelBlocks(1, 10).split(labels, 4, rng(i))]
    )
    assert together * 4 == pytest.approx(9 / 19, abs=0.055)


def test_labels_need_not_start_at_zero() -> None:
    labels = shuffled_labels(20, 20, 20) + 40
    for partition in (ClassesPerClient(2), Dirichlet(1.0, min_samples=1), Shards(2), LabelBlocks(2)):
        assert sum(len(s) for s in partition.split(labels, 3, rng())) == 60


# what cannot work


@pytest.mark.parametrize(
    ("partition", "sizes", "key", "says"),
    [
        (IID(), (4, 2, 10), "data.num_clients", "the task has 4"),
        (Shards(1), (4, 2, 10), "data.num_clients", "the task has 4"),
        (IID(), (4, 2, 0), "data.num_clients", "at least one client"),
        (Shards(2), (19, 2, 10), "data.partition.per_client", "at most 1: 10 clients share 19"),
        (Dirichlet(0.3), (90, 2, 10), "data.partition.min_samples", "at most 9: 10 clients share 90"),
        (ClassesPerClient(3), (90, 2, 10), "data.partition.num_classes", "at most 2, the number of classes"),
        (ClassesPerClient(2), (90, 10, 4), "data.partition.num_classes", "at least 3, or 4 clients leave a class"),
        (ClassesPerClient(2), (15, 2, 10), "data.partition.num_classes", "at most 1: 10 clients share 15"),
        (LabelBlocks(1), (4, 2, 10), "data.num_clients", "the task has 4"),
        (LabelBlocks(2), (19, 2, 10), "data.partition.blocks_per_client", "at most 1: 10 clients share 19"),
        (LabelBlocks(2, 5), (99, 2, 10), "data.partition.block_size", "at most 4: of 99 training samples .* 20 blocks"),
    ],
)
def test_check_names_the_setting(partition: Partition, sizes: tuple[int, int, int], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        partition.check(*sizes)
    assert caught.value.key == key
    if sizes[2]:
        with pytest.raises(ConfigError, match=says):
            partition.split(np.arange(sizes[0]) % sizes[1], sizes[2], rng())


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: Shards(0), "data.partition.per_client"),
        (lambda: Dirichlet(0.0), "data.partition.alpha"),
        (lambda: Dirichlet(-1.0), "data.partition.alpha"),
        (lambda: Dirichlet(float("nan")), "data.partition.alpha"),
        (lambda: Dirichlet(float("inf")), "data.partition.alpha"),
        (lambda: Dirichlet(0.3, min_samples=-1), "data.partition.min_samples"),
        (lambda: Dirichlet(0.3, max_retries=0), "data.partition.max_retries"),
        (lambda: Dirichlet(0.3, max_retries=10**9), "data.partition.max_retries"),
        (lambda: ClassesPerClient(0), "data.partition.num_classes"),
        (lambda: LabelBlocks(0), "data.partition.blocks_per_client"),
        (lambda: LabelBlocks(2, 0), "data.partition.block_size"),
    ],
)
def test_bad_settings_are_refused_when_built(build: object, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.key == key


class Mine(Partition):
    """A partition that returns given shares."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def split(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Any:
        return self.parts


@pytest.mark.parametrize("repartition", [True, False])
@pytest.mark.parametrize(
    ("parts", "found"),
    [
        (None, "NoneType"),
        ([[0, 1]], "1 shares"),
        ([[0.0, 1.0], [2]], r"client 0 float64 \[2\]"),
        ([[0, 1], [True, False]], r"client 1 bool \[2\]"),
        ([[[0]], [1]], r"client 0 int64 \[1, 1\]"),
        ([[0, 1], [2, 24]], "client 1 2 numbers, the first 2 and the last 24"),
        ([[-1, 1], [2]], "client 0 2 numbers, the first -1 and the last 1"),
        ([[1, 0], [2]], "client 0 2 numbers, the first 1 and the last 0"),
        ([[0, 1], [2, 2]], "client 1 2 numbers, the first 2 and the last 2"),
        ([[0, 1], [1, 2]], "sample 1 to 2 clients"),
        ([np.array([0, 9, 3], np.uint8), [2]], "client 0 3 numbers, the first 0 and the last 3"),
        ([[0], np.array([9, 5], np.uint8)], "client 1 2 numbers, the first 9 and the last 5"),
    ],
    ids=str,
)
def test_shares_that_are_none_are_refused(parts: Any, found: str, repartition: bool) -> None:
    stream = permuted(2, train=24) if repartition else split(2, train=24)
    data = tiny_data(stream, num_clients=2, partition=Mine(parts), repartition=repartition)
    with pytest.raises(
        ConfigError, match=rf"^data\.partition = 'Mine, which gives {found}' cannot work; valid: for each"
    ):
        data.setup("fit")


@pytest.mark.parametrize("empty", [[], np.empty(0), np.arange(0, dtype=np.uint64)], ids=["list", "float", "unsigned"])
def test_a_share_may_be_empty_whatever_its_type(empty: Any) -> None:
    parts = [[0, 3], empty, np.array([1], dtype=np.uint64)]
    data = tiny_data(permuted(2, train=24), num_clients=3, partition=Mine(parts), participation=Holders())
    data.setup("fit")
    shares = list(data.indices[0].values())
    assert [share.tolist() for share in shares] == [[0, 3], [1]]
    assert {share.dtype for share in shares} == {np.dtype(np.int64)}


def test_a_class_too_small_for_its_holders_is_refused() -> None:
    labels = np.repeat(np.arange(2), [100, 2])
    with pytest.raises(ConfigError, match="class 1 has 2 samples for 10 clients"):
        ClassesPerClient(2).split(labels, 10, rng())


def test_classes_that_do_not_give_enough_blocks_are_refused_with_the_size_that_would() -> None:
    """60 samples would give 4 blocks of 15, but classes of 20 and 40 give only 1 + 2 blocks of one class each."""
    labels = np.repeat(np.arange(2), [20, 40])
    with pytest.raises(ConfigError, match=r"at most 13: of classes of 20 to 40 .* 4 blocks") as caught:
        LabelBlocks(2, block_size=15).split(labels, 2, rng())
    assert (caught.value.key, caught.value.value) == ("data.partition.block_size", 15)
    assert {len(share) for share in LabelBlocks(2, block_size=13).split(labels, 2, rng())} == {26}


# compact shares


def some_shares() -> list[np.ndarray]:
    return [np.array(part, dtype=np.int64) for part in ([3, 5], [], [0, 1, 8], [], [2])]


def test_shares_are_views_of_one_array() -> None:
    shares, parts = Shares.of(some_shares()), some_shares()
    assert len(shares) == 5
    assert all(np.array_equal(a, b) and a.dtype == np.int64 for a, b in zip(shares, parts, strict=True))
    assert np.array_equal(shares[-1], [2])
    assert [len(part) for part in shares[1:4]] == [0, 3, 0]
    assert shares.sizes.tolist() == [2, 0, 3, 0, 1]
    assert all(np.shares_memory(shares[i], shares.samples) for i in (0, 2, 4))
    with pytest.raises(IndexError):
        shares[5]
    taken = shares.take(np.array([2, 1, 0, 2]))
    assert [part.tolist() for part in taken] == [[0, 1, 8], [], [3, 5], [0, 1, 8]]
    assert len(Shares.of([])) == 0


@pytest.mark.parametrize("rows", [None, np.array([4, 0, 2])])
def test_client_shares_are_a_mapping(rows: np.ndarray | None) -> None:
    """Client shares answer like a dictionary of the same shares."""
    parts = some_shares() if rows is not None else some_shares()[:3]
    clients = np.array([1, 6, 7])
    shares = ClientShares(clients, Shares.of(parts), rows)
    plain = {c: parts[i if rows is None else rows[i]] for i, c in enumerate(clients.tolist())}
    assert len(shares) == 3
    assert list(shares) == list(plain)
    assert all(type(client) is int for client in shares)
    assert all(np.array_equal(shares[c], own) for c, own in plain.items())
    assert [own.tolist() for own in shares.values()] == [own.tolist() for own in plain.values()]
    assert [client in shares for client in range(-2, 9)] == [client in plain for client in range(-2, 9)]
    for absent in (-1, 0, 2, 8, 10**6):
        with pytest.raises(KeyError, match=str(absent)):
            shares[absent]
    assert shares.sizes.tolist() == share_sizes(plain).tolist() == share_sizes(shares).tolist()
    assert [part.tolist() for part in shares.dealt(1, 3)] == [plain[6].tolist(), plain[7].tolist()]


# client_indices


def test_each_task_is_dealt_among_its_members() -> None:
    tasks = [make_task(shuffled_labels(30, 30, seed=t)) for t in range(3)]
    members = [np.array([0, 4, 7]), np.array([1]), np.array([0, 1, 2, 3])]
    indices = client_indices(tasks, IID(), members, 8, seed=0, repartition=True)
    for of_client, clients in zip(indices, members, strict=True):
        assert list(of_client) == clients.tolist()
        assert {len(share) for share in of_client.values()} == {60 // len(clients)}
        assert sorted(np.concatenate(list(of_client.values()))) == list(range(60))


def test_the_draw_of_a_task_does_not_depend_on_the_others() -> None:
    tasks = [make_task(shuffled_labels(30, 30, seed=t)) for t in range(3)]
    everyone, few = np.arange(4), np.arange(2)
    full = client_indices(tasks, IID(), [everyone] * 3, 4, seed=0, repartition=True)
    mixed = client_indices([tasks[2], tasks[1]], IID(), [few, everyone], 4, seed=0, repartition=True)
    assert all(np.array_equal(full[1][c], mixed[1][c]) for c in range(4))
    assert not np.array_equal(full[1][0], full[2][0])
    reseeded = client_indices(tasks, IID(), [everyone] * 3, 4, seed=1, repartition=True)
    assert not np.array_equal(full[1][0], reseeded[1][0])


def test_one_partition_for_tasks_that_share_their_training_set() -> None:
    task = make_task(shuffled_labels(32, 32))
    tasks = [task, Task("rotated", task.train, task.test, 2, task.transform), task]
    members = [np.array([1, 3]), np.arange(4), np.array([0, 1])]
    indices = client_indices(tasks, Shards(2), members, 4, seed=0, repartition=False)
    assert [list(of_client) for of_client in indices] == [[1, 3], [0, 1, 2, 3], [0, 1]]
    assert sorted(np.concatenate(list(indices[1].values()))) == list(range(64))
    for of_client in indices:
        assert all(np.array_equal(share, indices[1][client]) for client, share in of_client.items())
    anew = client_indices(tasks, Shards(2), [np.arange(4)] * 3, 4, seed=0, repartition=True)
    assert not np.array_equal(anew[0][0], anew[1][0])
    assert np.array_equal(anew[0][0], indices[1][0])


@pytest.mark.parametrize("partition", [IID(), Dirichlet(0.3, min_samples=1), Shards(2)], ids=lambda p: p.name)
def test_different_training_sets_are_dealt_as_one(partition: Partition) -> None:
    """Training sets are dealt as one set that has the classes of all tasks, kept apart."""
    sizes = ((30, 30), (20, 20, 40), (60, 24))
    tasks = [make_task(shuffled_labels(*counts, seed=t), f"task {t}") for t, counts in enumerate(sizes)]
    found = client_indices(tasks, partition, [np.arange(4)] * 3, 4, seed=0, repartition=False)
    labels = [task.train.labels.numpy() for task in tasks]
    whole = np.concatenate([labels[0], labels[1] + 2, labels[2] + 5])
    expected = partition.split(whole, 4, numpy_generator(0, "partition", 0))
    for client in range(4):
        together = np.concatenate([found[t][client] + start for t, start in enumerate((0, 60, 140))])
        assert np.array_equal(together, expected[client])
        assert all(np.array_equal(found[t][client], np.sort(found[t][client])) for t in range(3))
    for t, task in enumerate(tasks):
        assert sorted(np.concatenate(list(found[t].values()))) == list(range(len(task.train)))


def test_different_training_sets_are_dealt_as_one_to_clients_of_all_tasks_only() -> None:
    tasks = [make_task(shuffled_labels(30, 30), name) for name in ("mnist", "svhn")]
    with pytest.raises(ConfigError, match=r"data\.repartition = False .*some tasks only"):
        client_indices(tasks, IID(), [np.arange(4), np.arange(3)], 4, seed=0, repartition=False)


def test_a_refused_task_is_named() -> None:
    tasks = [make_task(shuffled_labels(30, 30)), make_task(shuffled_labels(2, 1), "notmnist")]
    with pytest.raises(ConfigError, match=r"data\.partition\.per_client .*\(task 1, 'notmnist'\)") as caught:
        client_indices(tasks, Shards(2), [np.arange(3)] * 2, 3, seed=0, repartition=True)
    assert caught.value.key == "data.partition.per_client"
