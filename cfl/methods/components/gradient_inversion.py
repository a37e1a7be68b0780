"""Reconstructs images from their gradients ("Deep Leakage from Gradients", Zhu, Liu and Han, 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap

from cfl.methods.components.lbfgs import minimised

AT_ONCE = 64
"""Images whose gradients are inverted together. L-BFGS remembers up to 400 tensors of an image's size for each."""


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
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` to logits ``[B, num_outputs]``."""
        for conv in (self.conv1, self.conv2, self.conv3):
            x = torch.sigmoid(conv(x))
        logits: Tensor = self.head(x.flatten(1))
        return logits


def encoder_gradient(encoder: nn.Module, image: Tensor, label: Tensor) -> dict[str, Tensor]:
    """Gradient of the cross-entropy of one image by the encoder's parameters, name -> tensor.

    Args:
        encoder: its output layer is called ``head``.
        image: ``[C, H, W]``.
        label: class, int64.
    """

    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        logits: Tensor = functional_call(encoder, dict(parameters), (image.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    found: dict[str, Tensor] = grad(loss)({name: tensor.detach() for name, tensor in encoder.named_parameters()})
    return found


def recovered_label(gradient: Mapping[str, Tensor]) -> int:
    """The label of the image that belongs to a gradient (Zhao, Mopuri and Bilen, 2020, "iDLG").

    The output layer's gradient is ``(p - onehot(y)) h^T``. Its input h is positive, as it follows a sigmoid. The true
    class is therefore the one whose row is negative.

    Args:
        gradient: a result of :func:`encoder_gradient`.
    """
    return int(gradient["head.weight"].sum(1).argmin())


def invert_gradients(
    encoder: nn.Module,
    gradients: Mapping[str, Tensor],
    labels: Tensor,
    input_shape: tuple[int, int, int],
    steps: int,
    generators: Sequence[torch.Generator],
    keep: int,
) -> Tensor:
    """Images whose gradients are closest to given ones: the last iterates of L-BFGS.

    Minimises ``sum over parameters || g(x) - gradient ||^2`` over each image x alone, starting at a standard normal
    one, with a line search for the strong Wolfe conditions (:func:`cfl.methods.components.lbfgs.minimised`). The
    distances of up to 64 images are differentiated together, on the gradients' device and in their precision.

    Args:
        encoder: its parameters have the gradients' names; on their device and of their dtype.
        gradients: name -> ``[B, ...]``.
        labels: ``[B]`` int64, the images' classes, such as from :func:`recovered_label`.
        input_shape: ``(C, H, W)``.
        steps: at least 1, each of up to 20 iterations, as torch's ``LBFGS.step`` takes them.
        generators: B of them; each draws an image's start.
        keep: number of last iterates to return.

    Returns:
        ``[B, min(keep, steps), C, H, W]`` on the CPU, finite; the last one of each image is the best.
    """
    some = next(iter(gradients.values()))
    labels = labels.to(some.device)
    starts = torch.stack([torch.randn(input_shape, generator=generator).flatten() for generator in generators])

    def distance(image: Tensor, label: Tensor, wanted: Mapping[str, Tensor]) -> Tensor:
        found = encoder_gradient(encoder, image.view(input_shape), label)
        return torch.stack([(found[name] - gradient).square().sum() for name, gradient in wanted.items()]).sum()

    differentiated = vmap(grad_and_value(distance))

    def inverted(rows: Tensor) -> Tensor:
        def evaluate(places: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
            at = rows[places].to(some.device)
            wanted = {name: gradient[at] for name, gradient in gradients.items()}
            slopes, distances = differentiated(images.to(some.device), labels[at], wanted)
            return distances.cpu(), slopes.cpu()

        return minimised(starts[rows].to(some.dtype), evaluate, steps, keep)

    found = torch.cat([inverted(rows) for rows in torch.arange(len(starts)).split(AT_ONCE)])
    return found.view(*found.shape[:2], *input_shape)
