"""Masks: vectors of random integers that two parties compute from one key (AES in counter mode)."""

from __future__ import annotations

import numpy as np


def mask(key: bytes, count: int, modulus: int) -> np.ndarray:
    """``[count]`` unsigned integers of ``modulus`` bits, 32 or 64. A key is for one mask."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    size = count * modulus // 8
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(size)), dtype=f"<u{modulus // 8}")


def add_mask(total: np.ndarray, key: bytes, modulus: int, sign: int) -> None:
    """Add a key's mask to a vector, or subtract it, in place and modulo ``2^modulus``."""
    (np.add if sign > 0 else np.subtract)(total, mask(key, len(total), modulus), out=total)
