"""Checks that all processes hold the same global model."""

from __future__ import annotations

from torch import Tensor, arange

from cfl.federation.federation import Federation
from cfl.runtime import distributed


def check_same_model(federation: Federation) -> None:
    """Refuse to continue if a method has changed the global model by values that only one process knows.

    Two numbers per tensor are compared: its norm, and its product with a fixed vector, which also depends on signs and
    on the order of entries.

    Raises:
        RuntimeError: the model of a process differs from that of process 0 by more than rounding. The message names the
            first such process.
    """
    if distributed.count() == 1:
        return
    of_all = distributed.gather([_digest(t.detach()) for t in federation.model.shared_tensors().values()])
    for process, digests in enumerate(of_all):
        pairs = zip(digests, of_all[0], strict=True)
        if any(abs(a - b) > 1e-3 * first[0] for theirs, first in pairs for a, b in zip(theirs, first, strict=True)):
            raise RuntimeError(
                f"process {process} has another global model than process 0: a method changed it by what one process "
                "alone knows, other than the channel's sums"
            )


def _digest(tensor: Tensor) -> tuple[float, float]:
    """Norm of a tensor, and its product with a fixed vector of norm 1."""
    values = tensor.double().flatten()
    direction = arange(1, len(values) + 1, dtype=values.dtype, device=values.device).sqrt().mul_(1e3).sin_()
    return values.norm().item(), (values @ direction / direction.norm().clamp(min=1e-300)).item()
