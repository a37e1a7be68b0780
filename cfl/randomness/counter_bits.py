"""Random bits computed as a hash of a counter: the same on every device and in any order.

The hash is SplitMix64 (Steele, Lea, Flood, 2014): word j of a key is ``mix(key + j * step)``, modulo 2^64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def _signed(value: int) -> int:
    """A 64-bit pattern as torch's int64 holds it."""
    return value - (1 << 64) if value >= 1 << 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_STAGES = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, None))
_UNSIGNED_STAGES = tuple((np.uint64(s), None if f is None else np.uint64(f % (1 << 64))) for s, f in _STAGES)

_PIECE = 2**15
"""Number of words that are mixed at a time; with their scratch space they take 512 KiB."""


_counters: dict[tuple[int, torch.device], Tensor] = {}


def _counter(count: int, device: torch.device) -> Tensor:
    """``[count]`` int64: 1 .. count times the step. Cached, because the same few sizes recur."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # Not cached in a CUDA graph, which would go on reading a cached tensor after the cache has dropped it.
        return torch.arange(1, count + 1, device=device).mul_(_STEP)
    key = (count, device)
    counter = _counters.get(key)  # another thread may empty the cache at any time
    if counter is None:
        counter = torch.arange(1, count + 1, device=device).mul_(_STEP)
        if len(_counters) >= 64:
            _counters.clear()
        _counters[key] = counter
    return counter


def _mixed(words: Tensor) -> Tensor:
    """Apply the hash's finaliser to words, in place if possible."""
    if words.device.type == "cpu":
        return _mixed_on_cpu(words)
    scratch = torch.empty_like(words)
    for shift, factor in _STAGES:
        # Torch shifts signed numbers arithmetically: the bits that come in from the left are taken away again.
        torch.bitwise_right_shift(words, shift, out=scratch)
        words.bitwise_xor_(scratch.bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            words.mul_(factor)
    return words


def _mixed_on_cpu(words: Tensor) -> Tensor:
    """As :func:`_mixed`, by numpy, which shifts unsigned numbers, in pieces that fit a cache: three times as fast."""
    words = words.contiguous()
    whole = words.numpy().view(np.uint64).reshape(-1)
    scratch = np.empty(min(_PIECE, len(whole)), np.uint64)
    for start in range(0, len(whole), _PIECE):
        piece = whole[start : start + _PIECE]
        shifted = scratch[: len(piece)]
        for shift, factor in _UNSIGNED_STAGES:
            np.right_shift(piece, shift, out=shifted)
            np.bitwise_xor(piece, shifted, out=piece)
            if factor is not None:
                np.multiply(piece, factor, out=piece)
    return words


def random_words(keys: Tensor, count: int) -> Tensor:
    """``[k]`` int64 keys to ``[k, count]`` int64 words of 64 random bits: words 1 .. count of each key.

    Word j of a key is the same whatever ``count`` and the other keys are.
    """
    return _mixed(_counter(count, keys.device) + keys[:, None])


def random_words_at(key: int | Tensor, places: Tensor) -> Tensor:
    """Selected words of a key: ``[...]`` int64 places from 0 to ``[...]`` int64, word ``place + 1`` for each.

    Args:
        key: any 64-bit integer that int64 holds; or int64 keys that broadcast to ``[...]``.
        places: on any device.
    """
    if isinstance(key, Tensor):
        return _mixed(places.add(1).mul_(_STEP) + key)
    return _mixed(places.mul(_STEP).add_(_signed((key + _STEP) % (1 << 64))))
