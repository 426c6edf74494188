"""Masks: streams of ChaCha20 that are added to a vector modulo 2⁶⁴."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

Vector = NDArray[np.uint64]
PIECE = 1 << 17  # numbers of a stream that are made at once: 1 MiB
CHACHA = 64  # bytes of a block of ChaCha20
MASK, SHARE = b"consilience/secagg/mask", b"consilience/secagg/share"


def agreed_key(own: X25519PrivateKey, other: bytes, salt: bytes, purpose: bytes, a: int, b: int) -> bytes:
    """The key of 32 bytes that two clients have in common, for a purpose and the numbers a and b of the clients."""
    common = own.exchange(X25519PublicKey.from_public_bytes(other))
    info = purpose + a.to_bytes(4, "little") + b.to_bytes(4, "little")
    return HKDF(hashes.SHA256(), 32, salt, info).derive(common)


def mask_key(own: X25519PrivateKey, other: bytes, salt: bytes, a: int, b: int) -> bytes:
    """The key of the mask of the clients a and b."""
    return agreed_key(own, other, salt, MASK, min(a, b), max(a, b))


def stream(key: bytes, start: int, length: int) -> Vector:
    """The numbers start, …, start + length − 1 of a key's stream. `start` is a multiple of eight."""
    counter = (8 * start // CHACHA).to_bytes(4, "little") + bytes(12)
    cipher = Cipher(ChaCha20(key, counter), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * length)), dtype="<u8")


def add_streams(vector: Vector, keys: Iterable[tuple[bytes, int]]) -> None:
    """Add the streams of these keys to `vector` in place, each with its sign, +1 or −1. A key must serve one vector
    only. Pieces are made in threads, so memory does not grow with the number of keys."""
    signed = list(keys)

    def work(start: int) -> None:
        piece = vector[start : start + PIECE]
        for key, sign in signed:
            numbers = stream(key, start, len(piece))
            if sign > 0:
                np.add(piece, numbers, out=piece)
            else:
                np.subtract(piece, numbers, out=piece)

    starts = range(0, len(vector), PIECE)
    if len(starts) * len(signed) < 4:
        for start in starts:
            work(start)
        return
    with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1)) as pool:
        for done in [pool.submit(work, start) for start in starts]:
            done.result()
