"""Reconstructs an image from its gradient ("Deep Leakage from Gradients", Zhu, Liu and Han, 2019)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call


class GradientEncoder(nn.Module):
    """The LeNet of deep leakage: three 5 x 5 convolutions to 12 maps, strides 2, 2, 1, sigmoids, one linear layer.

    Weights and biases are uniform on -0.5 .. 0.5, as in the paper. It has sigmoids because inversion differentiates
    twice. It is never trained, so that clients and server create the same encoder from a seed.

    Args:
        input_shape: ``(C, H, W)`` of one image.
        num_outputs: number of classes.
        generator: draws the weights.
    """

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv1 = nn.Conv2d(channels, 12, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(12, 12, 5, stride=2, padding=2)
        self.conv3 = nn.Conv2d(12, 12, 5, padding=2)
        self.head = nn.Linear(12 * -(-height // 4) * -(-width // 4), num_outputs)
        self.input_shape = input_shape
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` to logits ``[B, num_outputs]``."""
        for conv in (self.conv1, self.conv2, self.conv3):
            x = torch.sigmoid(conv(x))
        logits: Tensor = self.head(x.flatten(1))
        return logits


def encoder_gradient(encoder: nn.Module, image: Tensor, label: int, create_graph: bool = False) -> dict[str, Tensor]:
    """Gradient of the cross-entropy of one image by the encoder's parameters, name -> tensor.

    Args:
        encoder: its output layer is called ``head``.
        image: ``[C, H, W]``.
        label: class.
        create_graph: whether the gradient is to be differentiated by the image.
    """
    # Copies, so that the encoder's own parameters need not require gradients.
    leaves = {name: parameter.detach().requires_grad_() for name, parameter in encoder.named_parameters()}
    with torch.enable_grad():
        logits: Tensor = functional_call(encoder, leaves, (image.unsqueeze(0),))
        loss = F.cross_entropy(logits, torch.tensor([label], device=image.device))
        found = torch.autograd.grad(loss, list(leaves.values()), create_graph=create_graph)
    return dict(zip(leaves, found, strict=True))


def recovered_label(gradient: Mapping[str, Tensor]) -> int:
    """The label of the image that belongs to a gradient (Zhao, Mopuri and Bilen, 2020, "iDLG").

    The output layer's gradient is ``(p - onehot(y)) h^T``. Its input h is positive, as it follows a sigmoid. The true
    class is therefore the one whose row is negative.

    Args:
        gradient: as :func:`encoder_gradient` gives it.
    """
    return int(gradient["head.weight"].sum(1).argmin())


def invert_gradient(
    encoder: nn.Module,
    gradient: Mapping[str, Tensor],
    label: int,
    input_shape: tuple[int, int, int],
    steps: int,
    generator: torch.Generator,
    keep: int = 1,
) -> Tensor:
    """Images whose gradient is closest to a given one: the last iterates of L-BFGS.

    Minimises ``sum over parameters || g(x) - gradient ||^2`` over x, starting at a standard normal image, with a line
    search for the strong Wolfe conditions. Runs on the gradient's device, in its precision. After convergence a step
    takes one evaluation and changes nothing.

    Args:
        encoder: its parameters have the gradient's names; on the gradient's device and of its dtype.
        gradient: name -> tensor.
        label: the image's class, such as from :func:`recovered_label`.
        input_shape: ``(C, H, W)``.
        steps: at least 1, each of up to 20 iterations, as torch's ``LBFGS.step`` takes them.
        generator: draws the first image.
        keep: number of last iterates to return.

    Returns:
        ``[min(keep, steps), C, H, W]``, finite; the last one is the best.
    """
    some = next(iter(gradient.values()))
    start = torch.randn(input_shape, generator=generator).to(some)
    image = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([image], line_search_fn="strong_wolfe")

    def distance() -> Tensor:
        optimizer.zero_grad()
        found = encoder_gradient(encoder, image, label, create_graph=True)
        total = torch.stack([(found[name] - wanted).square().sum() for name, wanted in gradient.items()]).sum()
        total.backward()
        return total

    iterates = [start]
    with torch.enable_grad():
        for _ in range(steps):
            optimizer.step(distance)
            if not bool(image.isfinite().all()):
                break
            iterates.append(image.detach().clone())
    count = min(keep, steps)
    kept = iterates[-count:]
    return torch.stack([*kept, *[kept[-1]] * (count - len(kept))])
