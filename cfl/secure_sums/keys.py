"""Keys of the protocol: pairs for key agreement, encrypted shares, tags and signatures (library cryptography)."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any

from cfl.runtime.errors import SumRefused
from cfl.secure_sums.traffic import PUBLIC, SHARE


class AgreementKey:
    """A pair of X25519 keys.

    Args:
        secret: the private key as a number, to rebuild the pair; a new one if not given.
    """

    def __init__(self, secret: int | None = None) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        # Below 2^255, so that it is a number of the field in which it is shared; X25519 ignores the highest bit.
        self.secret = secrets.randbits(255) if secret is None else secret
        self._pair = X25519PrivateKey.from_private_bytes(self.secret.to_bytes(PUBLIC, "little"))

    @property
    def public(self) -> bytes:
        """The public key."""
        return self._pair.public_key().public_bytes_raw()

    def agreed(self, public: bytes, session: bytes, use: bytes) -> bytes:
        """32 bytes that only the owners of the two pairs know, for one session and use."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        try:
            shared = self._pair.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:  # a point of small order
            raise SumRefused("a public key with which nothing secret can be agreed") from error
        return hmac.digest(session + use, shared, hashlib.sha256)


def encrypt(key: bytes, plain: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate by AES-GCM; the nonce is a hash of the context, so use a key only once per context."""
    return _gcm(key).encrypt(_nonce(context), plain, context)


def decrypt(key: bytes, sealed: bytes, context: bytes) -> bytes:
    """Undo :func:`encrypt`.

    Raises:
        SumRefused: the bytes were changed, or are of another session, sender or receiver.
    """
    from cryptography.exceptions import InvalidTag

    try:
        return bytes(_gcm(key).decrypt(_nonce(context), sealed, context))
    except InvalidTag as error:
        raise SumRefused("shares that their sender has not encrypted for this client and session") from error


def _gcm(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _nonce(context: bytes) -> bytes:
    return hashlib.sha256(context).digest()[:12]


def tag(key: bytes, content: bytes) -> bytes:
    """Authentication code of a content, 32 bytes (HMAC-SHA256), which owners of the key can verify."""
    return hmac.digest(key, content, hashlib.sha256)


class Identity:
    """A client's signing key (Ed25519); the server knows the public key in advance."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.generate()

    @property
    def public(self) -> bytes:
        """The public key."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, content: bytes) -> bytes:
        """Signature of the content, 64 bytes."""
        return self._key.sign(content)


def is_signed(public: bytes, content: bytes, signature: bytes) -> bool:
    """Whether the owner of a public key has signed the content."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except InvalidSignature:
        return False
    return True


def as_bytes(number: int) -> bytes:
    """A number of the field of shares as bytes."""
    return number.to_bytes(SHARE, "little")
