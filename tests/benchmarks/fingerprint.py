"""One number for all weights of a network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def fingerprint(weights: Iterable[Any]) -> float:
    """Return one number that changes with every weight: the sum of the weights, each times the cosine of its position.

    Args:
        weights: tensors or arrays, in the order of the network's parameters and with torch's shapes.
    """
    flat = np.concatenate([np.asarray(w, dtype=np.float64).ravel() for w in weights])
    return float(flat @ np.cos(np.arange(len(flat))))
