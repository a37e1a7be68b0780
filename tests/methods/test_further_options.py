"""Width, engines and resuming for options, networks and companions that keep other state than test_registry.py's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.tiny import MOMENTUM, ConvNet, deep_mlp, mlp, prompted_net, split
from torch import nn

from cfl.data.augmentation import CropFlip
from cfl.data.sequences import FixedTasks
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import (
    AGEM,
    CONFEDMADE,
    DER,
    ER,
    EWC,
    GLFC,
    L2P,
    RGO,
    SCAFFOLD,
    AnalyticHead,
    FedAGEM,
    FedCIL,
    FedCurv,
    FedWeIT,
    ICaRL,
    LearningRateDecay,
    Method,
    PersonalLayers,
    SingleTask,
)
from cfl.models import ACGAN, MADE, MLP
from cfl.testing import PROPERTIES
from cfl.testing.method_case import MethodCase
from cfl.testing.tiny_data import black_and_white

ADAM = partial(torch.optim.Adam, lr=0.02)


def no_statistics_net(input_shape: tuple[int, int, int], num_outputs: int) -> ConvNet:
    """BatchNorm that never has running statistics."""
    network = ConvNet(input_shape, num_outputs, norm=True)
    network.conv_norm = nn.BatchNorm2d(2, track_running_stats=False)
    network.fc_norm = nn.BatchNorm1d(5, track_running_stats=False)
    return network


def beside(**methods: Callable[[], Method]) -> Callable[[], dict[str, Method]]:
    """Makes these methods anew with every call."""
    return lambda: {name: make() for name, make in methods.items()}


head_stays = partial(PersonalLayers, ["head.*"])
icarl = partial(ICaRL, 12)
cropped: dict[str, Any] = {"augmentation": CropFlip(1)}
orders_and_masks = partial(
    MADE, hidden=[5], direct=True, conditioning=True, order_agnostic=True, num_masks=2, eval_orders=2, mask_seed=3
)
fedcil = MethodCase(
    partial(FedCIL, consistency=0.5, consolidation_steps=2, consolidation_batch_size=4),
    network=partial(ACGAN, classifier=partial(MLP, hidden=[8], dropout=0.5), widths=[6], noise_dim=3),
)
several_replay = MethodCase(
    partial(DER, 0.5, 0.3, 3),
    beside=beside(agem=partial(AGEM, 3), fed_agem=partial(FedAGEM, 3, clients="all")),
    network=mlp,
    data=cropped,
    buffer=partial(ReplayBuffer, 5, "random_replacement"),
)

RESUMED, WIDTH, BOTH, ENGINES = ("resuming",), ("width",), ("width", "resuming"), ("width", "engines")

CASES: dict[str, tuple[Sequence[str], MethodCase]] = {
    "SCAFFOLD, option I": (RESUMED, MethodCase(partial(SCAFFOLD, "I"))),
    "own models": (RESUMED, MethodCase(PersonalLayers, optimizer=MOMENTUM)),
    "own statistics": (RESUMED, MethodCase(partial(PersonalLayers, []), federated={"batchnorm": "local"})),
    "own head and statistics": (RESUMED, MethodCase(head_stays, federated={"batchnorm": "local"})),
    "a model for each client and task": (RESUMED, MethodCase(SingleTask, beside=beside(own=PersonalLayers))),
    "AnalyticHead, random features": (RESUMED, MethodCase(partial(AnalyticHead, random_features=12))),
    "CONFEDMADE, all options of MADE": (
        RESUMED,
        MethodCase(
            partial(CONFEDMADE, sparsity=0.02, consolidation=2.0, lambda_3=4.0, cut_off=0.4),
            network=orders_and_masks,
            optimizer=ADAM,
            stream=black_and_white,
            scenario="density",
        ),
    ),
    "FedWeIT over sequences, with decay": (
        BOTH,
        MethodCase(
            partial(LearningRateDecay, factor=4.0, patience=1, threshold=0.15, floor=2e-3),
            beside=beside(weit=partial(FedWeIT, consolidation=1.0, keep=0.5, communicating=0.5)),
            network=mlp,
            optimizer=ADAM,
            stream=lambda tasks: split(3, classes=6, train=300),
            data={"sequences": FixedTasks([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]]), "validation": 0.3},
            rounds=4,
        ),
    ),
    "EWC, online": (
        BOTH,
        MethodCase(
            partial(EWC, 5.0, consolidation="online", gamma=0.5),
            beside=beside(own=head_stays),
            optimizer=MOMENTUM,
        ),
    ),
    "FedCurv, sampled, in part": (
        BOTH,
        MethodCase(
            partial(FedCurv, 2.0, keep=0.3, fisher="sampled", on_unstable="clip"),
            beside=beside(own=head_stays),
            optimizer=MOMENTUM,
        ),
    ),
    "iCaRL, augmented": (BOTH, MethodCase(icarl, network=mlp, data=cropped)),
    "iCaRL, own statistics": (BOTH, MethodCase(icarl, federated={"batchnorm": "local"})),
    "iCaRL, statistics of batches": (BOTH, MethodCase(icarl, federated={"batchnorm": "drop"})),
    "iCaRL, no statistics": (BOTH, MethodCase(icarl, network=no_statistics_net)),
    "DER, A-GEM and Fed-A-GEM, classes": (
        ENGINES,
        replace(several_replay, stream=split, buffer=partial(ReplayBuffer, 6)),
    ),
    "DER, A-GEM and Fed-A-GEM, random replacement": (RESUMED, several_replay),
    "GLFC, augmented": (
        WIDTH,
        MethodCase(
            partial(GLFC, size=8, threshold=0.05, perturbation_steps=2, inversion_steps=1, images=1),
            network=mlp,
            data=cropped,
        ),
    ),
    "RGO, encoded features": (WIDTH, MethodCase(partial(RGO, 0.6), network=deep_mlp)),
    "FedCIL, domain": (ENGINES, fedcil),
    "FedCIL, task": (ENGINES, replace(fedcil, stream=split)),
    "FedCIL, class": (ENGINES, replace(fedcil, stream=split, scenario="class")),
    "L2P and Fed-A-GEM, Adam": (
        ENGINES,
        MethodCase(
            partial(L2P, 0.5),
            network=prompted_net,
            optimizer=ADAM,
            beside=beside(fed_agem=partial(FedAGEM, 4, when="always")),
            buffer=partial(ReplayBuffer, 6),
        ),
    ),
    "L2P and DER": (
        ENGINES,
        MethodCase(
            partial(L2P, 0.5),
            network=prompted_net,
            beside=beside(der=partial(DER, 0.5, 0.5, 3)),
            buffer=partial(ReplayBuffer, 6),
        ),
    ),
    "ER, augmented": (ENGINES, MethodCase(partial(ER, 3), data=cropped)),
    "ER, drawn in every step": (
        ENGINES,
        MethodCase(partial(ER, 5, per_task=False, update="step", batch_size=3), data=cropped),
    ),
}


@pytest.mark.parametrize(("name", "prop"), [(name, prop) for name, (props, _) in CASES.items() for prop in props])
def test_what_holds_for_every_method_holds_for_it(name: str, prop: str) -> None:
    PROPERTIES[prop](CASES[name][1])
