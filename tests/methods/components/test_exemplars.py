"""Clients' tables of exemplars by class."""

from __future__ import annotations

import torch

from cfl.methods.components.exemplars import no_exemplars, with_classes
from cfl.methods.components.herding import herd


def test_classes_join_and_earlier_ones_keep_their_first() -> None:
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(30, 4, generator=generator), torch.arange(30) % 2
    places = 100 + torch.arange(30)
    first = with_classes(no_exemplars(12), 6, features, labels, places)
    for output in (0, 1):
        rows = (labels == output).nonzero().squeeze(1)
        own = first["output"] == output
        assert first["place"][own].tolist() == places[rows[herd(features[rows], 6)]].tolist()
        assert first["rank"][own].tolist() == list(range(6))
    second = with_classes(first, 4, features[:9], torch.full((9,), 2), 200 + torch.arange(9))
    for output in (0, 1):
        assert (
            second["place"][second["output"] == output].tolist()
            == first["place"][first["output"] == output].tolist()[:4]
        )
    assert sorted(second["output"].tolist()) == [0] * 4 + [1] * 4 + [2] * 4
    assert bool((second["place"][second["output"] == 2] >= 200).all())
    again = with_classes(second, 3, features[:9], torch.full((9,), 2), 300 + torch.arange(9))
    assert bool((again["place"][again["output"] == 2] >= 300).all()), "a class that comes again is chosen anew"
    assert (again["place"] >= 0).sum() == 9


def test_where_there_are_too_few_slots_the_latest_classes_stay() -> None:
    features = torch.eye(6)
    table = with_classes(no_exemplars(4), 1, features, torch.arange(6), torch.arange(6))
    assert table["output"].tolist() == [2, 3, 4, 5]
