"""Masks: vectors of random integers that two parties compute from one key (AES in counter mode)."""

from __future__ import annotations

import numpy as np

_PIECE = 2**14
"""Integers that are made together, so that they stay in a core's cache."""


def add_mask(total: np.ndarray, key: bytes, modulus: int, sign: int) -> None:
    """Add a key's mask to a vector, or subtract it, in place and modulo ``2^modulus``.

    Args:
        total: ``[d]`` unsigned integers of ``modulus`` bits.
        key: 32 bytes, for one mask only.
        modulus: 32 or 64.
        sign: 1 or -1.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    size = modulus // 8
    zeros = memoryview(bytes(_PIECE * size))
    for start in range(0, len(total), _PIECE):
        piece = total[start : start + _PIECE]
        mask = np.frombuffer(stream.update(zeros[: len(piece) * size]), dtype=f"<u{size}")
        (np.add if sign > 0 else np.subtract)(piece, mask, out=piece)
