"""The outputs of clients' old models, which iCaRL and GLFC distil."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cfl.methods.components.client_model import evaluating, run_model
from cfl.methods.context import Context
from cfl.runtime.moving import moved


@torch.no_grad()
def old_sigmoids(context: Context, models: Sequence[Mapping[str, Tensor] | None], x: Tensor, mask: Tensor) -> Tensor:
    """``sigmoid(h(x))`` ``[K, M, O]`` of each client's old model, in evaluation mode.

    Computed client by client: layers may depend on the whole batch, and clients' running statistics may differ.

    Args:
        context: of the method.
        models: the K clients' old models, name -> tensor; None for a client without one, which gets zeros.
        x: ``[K, M, C, H, W]`` inputs.
        mask: ``[K, M]`` bool on the CPU, False where there is no sample; these get zeros.
    """
    found = x.new_zeros((*mask.shape, context.num_outputs))
    with evaluating(context):
        for row, (model, own) in enumerate(zip(models, mask, strict=True)):
            if model is not None and bool(own.any()):
                rows = moved(own.nonzero().squeeze(1), x.device)
                logits = run_model(context, model, x[row][rows])
                found = found.to(logits.dtype)
                found[row, rows] = logits.sigmoid()
    return found
