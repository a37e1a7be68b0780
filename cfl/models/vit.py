"""A frozen vision transformer with trained prompts from a pool (L2P)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from cfl.models.base import Network
from cfl.models.frozen_vit import FrozenViT
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import MOST_AT_ONCE, check_integers

_MOST_LAYERS = 1000


class PromptPool(nn.Module):
    """M prompts of L tokens, each with a key; a sample chooses the k prompts whose keys are closest to its query.

    ``argmax_{S, |S| = k} sum_{s in S} cos(q, key_s)``, eq 3 of Wang et al. (CVPR 2022); of equal cosines the first
    prompt wins. Prompts and keys start uniform on [-1, 1].

    Args:
        size: M.
        length: L, in tokens.
        top_k: k, at most ``size``.
        dim: length d of tokens and keys.
    """

    def __init__(self, size: int, length: int, top_k: int, dim: int) -> None:
        super().__init__()
        self.prompts = nn.Parameter(torch.empty(size, length, dim).uniform_(-1, 1))
        self.keys = nn.Parameter(torch.empty(size, dim).uniform_(-1, 1))
        self.top_k = top_k

    def forward(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, d]`` queries to the chosen prompts ``[B, k L, d]`` and their keys' cosines ``[B, k]``, best first."""
        cosines = normalize(query, dim=-1) @ normalize(self.keys, dim=-1).T
        chosen = cosines.argsort(dim=-1, descending=True, stable=True)[:, : self.top_k]
        # A product with zeros and ones: on a GPU, gradients of indexing are summed in no fixed order.
        places = torch.arange(len(self.keys), device=query.device)
        selection = (chosen.unsqueeze(-1) == places).to(cosines.dtype)  # [B, k, M]
        prompts = (selection @ self.prompts.flatten(1)).unflatten(-1, self.prompts.shape[1:]).flatten(1, 2)
        return prompts, (selection * cosines.unsqueeze(1)).sum(-1)


class PromptedViT(Network):
    """Learning to Prompt (Wang et al., CVPR 2022): a frozen vision transformer, trained prompts, keys and head.

    The query of an image is the frozen transformer's class feature without prompts. The prompts chosen by the query
    (:class:`PromptPool`) are put before the image's tokens. The input of the head is the mean of the transformer's
    outputs for these prompts (eq 4 and the authors' code)::

        q(x) = f(x)[class],   features(x) = mean_prompts f([P_s1; ...; P_sk; x_e])

    Only prompts, keys and head are trained, sent and stored in checkpoints: M d (L + 1) weights, 46,080 with the
    defaults, and those of the head. Every client is assumed to have the transformer, 85,798,656 weights with the
    defaults, which are not counted. Each image takes two passes through it, one of them with gradients.

    The logits' gradients with respect to keys are 0, so that keys do not change unless the method ``L2P`` trains them
    by its pull term.

    Differs from the authors' code: every sample chooses its own prompts, as in the paper. The code uses for a whole
    batch the prompts that most of its samples choose, so that a prediction depends on its test batch. Prompts have no
    position embeddings: as prompts are trained, these would add nothing, and the order of tokens does not matter.

    The defaults are ViT-B/16. Pre-trained weights expect pixels normalised as in their training: for torchvision's,
    mean 0.485, 0.456, 0.406 and std 0.229, 0.224, 0.225 of the data source.

    Args:
        input_shape: ``(C, H, W)``, C 1 or 3; images are scaled to the transformer's size.
        num_outputs: outputs of all tasks together.
        weights: file of a state dict of torchvision's ``VisionTransformer``; null draws a random transformer from the
            run's seed.
        pool_size: M, prompts in the pool.
        prompt_length: L, tokens of a prompt.
        top_k: k, prompts that an image chooses, at most ``pool_size``.
        image_size: side of the transformer's images, in pixels.
        patch_size: side of a patch, in pixels; divides ``image_size``.
        num_layers: encoder blocks.
        num_heads: attention heads; divides ``hidden_dim``.
        hidden_dim: length d of a token.
        mlp_dim: width of a block's hidden layer.

    Raises:
        ConfigError: an option is out of range, or the file of weights is absent or does not fit.
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_outputs: int,
        weights: str | None = None,
        pool_size: int = 10,
        prompt_length: int = 5,
        top_k: int = 5,
        image_size: int = 224,
        patch_size: int = 16,
        num_layers: int = 12,
        num_heads: int = 12,
        hidden_dim: int = 768,
        mlp_dim: int = 3072,
    ) -> None:
        super().__init__(input_shape, num_outputs)
        self.weights, self.pool_size, self.prompt_length, self.top_k = weights, pool_size, prompt_length, top_k
        self.image_size, self.patch_size, self.num_layers = image_size, patch_size, num_layers
        self.num_heads, self.hidden_dim, self.mlp_dim = num_heads, hidden_dim, mlp_dim
        check = partial(check_integers, "model.network", 1, at_most=MOST_AT_ONCE)
        check(pool_size=pool_size, prompt_length=prompt_length, top_k=top_k, image_size=image_size)
        check(patch_size=patch_size, num_heads=num_heads, hidden_dim=hidden_dim, mlp_dim=mlp_dim)
        check_integers("model.network", 1, at_most=_MOST_LAYERS, num_layers=num_layers)
        if top_k > pool_size:
            raise ConfigError("model.network.top_k", top_k, f"at most pool_size, {pool_size}")
        if self.input_shape[0] not in (1, 3):
            raise ConfigError("model.network", f"PromptedViT on {self.input_shape[0]} channels", "1 or 3 channels")
        self.backbone = FrozenViT(image_size, patch_size, num_layers, num_heads, hidden_dim, mlp_dim, weights)
        self.fixed_digest = self.backbone.digest
        self.pool = PromptPool(pool_size, prompt_length, top_k, hidden_dim)
        self.head = nn.Linear(hidden_dim, num_outputs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PromptedViT:
        """Also move the transformer to another device or number format."""
        super()._apply(fn, recurse)
        self.backbone.apply(fn)
        return self

    def prompted(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images ``[B, C, H, W]`` to features ``[B, d]`` and the cosines ``[B, k]`` of query and chosen keys."""
        tokens = self.backbone.tokens(x.to(self.head.weight.dtype))
        with torch.no_grad():
            query = self.backbone.encode(tokens)[:, 0]
        prompts, cosines = self.pool(query)
        encoded = self.backbone.encode(torch.cat([prompts, tokens], 1))
        return encoded[:, : prompts.shape[1]].mean(1), cosines

    def features(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` to the mean of the prompts' outputs ``[B, hidden_dim]``."""
        return self.prompted(x)[0]
