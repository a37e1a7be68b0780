"""FedJAX (Ro et al., 2021): its federated averaging on compiled steps, with the work's network in Haiku.

It repeats samples where the last batch of a client is not full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg

from benchmarks.arrays import task_tensors
from benchmarks.simulators.clients import network_of, shares_of
from benchmarks.simulators.turns import Turns
from benchmarks.works import Work

Array = Any


def _drop(rate: float, h: Array) -> Array:
    return hk.dropout(hk.next_rng_key(), rate, h) if rate else h


def _pool(h: Array) -> Array:
    return hk.max_pool(h, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _flat(h: Array) -> Array:
    return jnp.transpose(h, (0, 3, 1, 2)).reshape(len(h), -1)  # as torch flattens


def _mlp(work: Work, h: Array) -> Array:
    h = h.reshape(len(h), -1)
    hidden = work.options["hidden"]
    given = work.options["dropout"]
    rates = given if isinstance(given, list) else [given] * len(hidden)
    for width, rate in zip(hidden, rates, strict=True):
        h = _drop(rate, jax.nn.relu(hk.Linear(width)(h)))
    return hk.Linear(work.outputs)(h)


def _alexnet(work: Work, h: Array) -> Array:
    rates = iter(work.options["dropout"])
    for maps, side in ((64, 4), (128, 3), (256, 2)):
        h = _pool(_drop(next(rates), jax.nn.relu(hk.Conv2D(maps, side, padding="VALID", with_bias=False)(h))))
    h = _flat(h)
    for _ in range(2):
        h = _drop(next(rates), jax.nn.relu(hk.Linear(2048, with_bias=False)(h)))
    return hk.Linear(work.outputs, with_bias=False)(h)


def _dropout_cnn(work: Work, h: Array) -> Array:
    for maps in (32, 64):
        h = jax.nn.relu(hk.Conv2D(maps, 3, padding="VALID")(h))
    h = _flat(_drop(work.options["dropout"][0], _pool(h)))
    h = _drop(work.options["dropout"][1], jax.nn.relu(hk.Linear(128)(h)))
    return hk.Linear(work.outputs)(h)


NETWORKS: dict[str, Callable[[Work, Array], Array]] = {"MLP": _mlp, "AlexNet": _alexnet, "DropoutCNN": _dropout_cnn}
"""The works' networks; channels are last, which is faster on a CPU."""


def _from_torch(weight: Array) -> Array:
    return jnp.asarray(np.transpose(weight, {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}[weight.ndim]))


def _to_torch(weight: Array) -> Array:
    return np.transpose(weight, {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[weight.ndim])


def _in_torch_order(parameters: Any) -> list[tuple[str, str]]:
    """Modules in the order in which the network uses them, convolutions first, each with its weight, then its bias."""

    def place(name: str) -> tuple[bool, int]:
        number = name.rpartition("_")[2]
        return not name.startswith("conv"), int(number) if number.isdigit() else 0

    return [(name, part) for name in sorted(parameters, key=place) for part in ("w", "b") if part in parameters[name]]


def _weights(parameters: Any, order: Sequence[tuple[str, str]]) -> list[Array]:
    """The parameters as torch has them."""
    return [_to_torch(np.asarray(parameters[name][part])) for name, part in order]


def main(work_file: Path, data: Path, turns: Turns) -> None:
    """Run rounds as the coordinator asks for them."""
    work = Work.load(work_file)
    x, y = task_tensors(data, work)
    images, labels = x.permute(0, 2, 3, 1).contiguous().numpy(), y.numpy().astype(np.int32)
    shares = shares_of(work).numpy()
    clients = [fedjax.ClientDataset({"x": images[share], "y": labels[share]}) for share in shares]
    del x, images

    def loss(batch: Any, logits: Array) -> Array:
        chosen = jax.nn.log_softmax(logits[:, : work.classes])
        return -jnp.take_along_axis(chosen, batch["y"][:, None], axis=1)[:, 0]

    network = NETWORKS[work.network]
    transformed = hk.transform(lambda batch: network(work, batch["x"]))
    model = fedjax.create_model_from_haiku(transformed, clients[0].all_examples(), loss)
    algorithm = fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(work.lr),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch_size, num_epochs=1),
    )
    made = hk.data_structures.to_mutable_dict(model.init(jax.random.PRNGKey(0)))
    order = _in_torch_order(made)
    for (name, part), parameter in zip(order, network_of(work).parameters(), strict=True):
        made[name][part] = _from_torch(parameter.detach().numpy())
    state = algorithm.init(made)
    rng, key = np.random.default_rng(0), jax.random.PRNGKey(1)
    while True:
        turns.begin()
        sampled = rng.choice(work.clients, work.sampled, replace=False)
        key, used = jax.random.split(key)
        keys = jax.random.split(used, work.sampled)
        state, _ = algorithm.apply(state, [(int(c), clients[c], keys[i]) for i, c in enumerate(sampled)])
        jax.block_until_ready(state.params)
        turns.end(partial(_weights, state.params, order))
