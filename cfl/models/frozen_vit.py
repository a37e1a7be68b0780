"""A frozen vision transformer that is not among the parameters of the network that uses it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import interpolate

from cfl.models.weights_file import take_weights
from cfl.runtime.errors import ConfigError
from cfl.runtime.tensor_digest import tensors_digest

KEY = "model.network"

HOW_TO_GET = (
    "the file of a state dict of torchvision's VisionTransformer with these sizes: for ViT-B/16 vit_b_16-c867db91.pth, "
    "torchvision's ViT_B_16_Weights.IMAGENET1K_V1, from https://download.pytorch.org/models/vit_b_16-c867db91.pth"
)


class FrozenViT:
    """torchvision's ``VisionTransformer`` (Dosovitskiy et al., ICLR 2021) without its head and with fixed weights.

    It is no ``nn.Module``, so its weights are not among the parameters and buffers of the network that holds it: they
    are not stacked over clients, sent, averaged or written to checkpoints. Copies of a network share it. The network
    moves it between devices and number formats (:meth:`apply`).

    Args:
        image_size: side of the square images, in pixels; other images are scaled to it.
        patch_size: side of a patch, in pixels; divides ``image_size``.
        num_layers: encoder blocks.
        num_heads: attention heads per block; divides ``hidden_dim``.
        hidden_dim: length d of a token.
        mlp_dim: width of a block's hidden layer.
        weights: file of a state dict with torchvision's names, ``~`` is expanded; its head, if any, is not used. None
            draws weights from torch's generator.

    Raises:
        ConfigError: sizes that do not fit together, or a file that is absent, unreadable or of other sizes.

    Attributes:
        digest: digest of weights from a file; None if they were drawn.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        num_layers: int,
        num_heads: int,
        hidden_dim: int,
        mlp_dim: int,
        weights: str | None = None,
    ) -> None:
        # Imported here, because it takes as long as importing all other networks.
        from torchvision.models import VisionTransformer

        if image_size % patch_size:
            raise ConfigError(f"{KEY}.patch_size", patch_size, f"a divisor of image_size, {image_size}")
        if hidden_dim % num_heads:
            raise ConfigError(f"{KEY}.num_heads", num_heads, f"a divisor of hidden_dim, {hidden_dim}")
        vit: Any = VisionTransformer(image_size, patch_size, num_layers, num_heads, hidden_dim, mlp_dim)
        vit.heads = nn.Identity()
        if weights is not None:
            take_weights(
                weights,
                HOW_TO_GET,
                lambda state: vit.load_state_dict({n: w for n, w in state.items() if not n.startswith("heads.")}),
            )
        self.digest = None if weights is None else tensors_digest(vit.state_dict().values())
        vit.requires_grad_(False).eval()
        for layer in vit.modules():
            if isinstance(layer, nn.MultiheadAttention):
                # The fast path of evaluation mode fails under vmap. Without dropout, training mode computes the same.
                layer.training = True
        self.image_size, self.vit = image_size, vit

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change to all tensors, such as a move or a cast, like ``nn.Module._apply``."""
        self.vit._apply(change)

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenViT:
        return self

    def tokens(self, x: Tensor) -> Tensor:
        """The input of the first block: class token and patches with their positions.

        Args:
            x: ``[B, C, H, W]``, C 3, or 1 for grey images, which become three equal channels. Images are
                scaled bilinearly to ``image_size``.

        Returns:
            ``[B, 1 + (image_size / patch_size)^2, d]``.
        """
        if x.shape[-2:] != (self.image_size, self.image_size):
            x = interpolate(x, (self.image_size, self.image_size), mode="bilinear", align_corners=False)
        patches = self.vit.conv_proj(x.expand(-1, 3, -1, -1)).flatten(2).transpose(1, 2)
        first = self.vit.class_token.expand(len(patches), -1, -1)
        embedded: Tensor = torch.cat([first, patches], 1) + self.vit.encoder.pos_embedding
        return embedded

    def encode(self, tokens: Tensor) -> Tensor:
        """All blocks and the last normalisation, ``[B, n, d]`` to ``[B, n, d]`` for any number n of tokens."""
        # CUDA's fused attention refuses what vmap gives it: "LSE is not correctly aligned".
        with sdpa_kernel(SDPBackend.MATH) if tokens.is_cuda else nullcontext():
            encoded: Tensor = self.vit.encoder.ln(self.vit.encoder.layers(tokens))
        return encoded
