import hashlib

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from consilience.secure.masks import PIECE, add_streams, mask_key, stream

SALT = bytes(range(16))
SECRETS = [
    X25519PrivateKey.from_private_bytes(hashlib.sha256(b"secagg test sk" + bytes([i])).digest()) for i in (1, 2, 3)
]
PUBLIC = [key.public_key().public_bytes_raw() for key in SECRETS]
SEEDS = [hashlib.sha256(b"secagg test b" + bytes([i])).digest() for i in (1, 2, 3)]
INPUTS = [(1.5, -2.25, 0, 1000), (0.5, 0.25, -1, -1000), (-2, 8, 0.001, 0.125)]
MASKED = [
    "949e94ad2e8c7d18 4f0df724a3ef93f8 a5f95715b49d7ea9 2d0b6b3219a707ef",
    "eb6291580a77fe5d 0bbfd057f6cf7c0e 590bf94ba26342a4 cfdc5bd1d4811bfb",
    "d3360eff73b69b1c 4b556af3fab5643c 36d4d278c814bac1 6f4e7659727437ac",
]


def masks(i):
    pairs = [(mask_key(SECRETS[i], PUBLIC[j], SALT, i + 1, j + 1), 1 if j > i else -1) for j in range(3) if j != i]
    return [(SEEDS[i], 1), *pairs]


def vector(i):
    return np.round(np.array(INPUTS[i]) * 2**20).astype(np.int64).view(np.uint64)


def test_keys_and_streams_are_those_of_the_test_vector():
    assert PUBLIC[0].hex() == "5349a42d88203cffc6ee531a6184c024346281db93d5c1dcfd2a52ac6f580d15"
    key = mask_key(SECRETS[0], PUBLIC[1], SALT, 1, 2)
    assert key.hex() == "5964593cc290512b6eeac922a386dad2cc68c63e35c4d4b5b7ec35960cd29e9f"
    assert [f"{x:016x}" for x in stream(key, 0, 2)] == ["3df09ae1918f6446", "9cd7b410834a8495"]
    assert mask_key(SECRETS[1], PUBLIC[0], SALT, 2, 1) == key


@pytest.mark.parametrize("i", range(3))
def test_masked_vectors_are_those_of_the_test_vector(i):
    found = vector(i)
    add_streams(found, masks(i))
    assert " ".join(f"{x:016x}" for x in found) == MASKED[i]


def test_the_masked_vectors_add_up_to_the_sum_of_the_test_vector():
    total = sum(np.array([int(word, 16) for word in words.split()], dtype=np.uint64) for words in MASKED)
    add_streams(total, [(seed, -1) for seed in SEEDS])
    assert total.view(np.int64).tolist() == [0, 6291456, -1047527, 131072]


def test_a_stream_is_the_same_in_pieces_and_in_threads():
    key, length = bytes(range(32)), 3 * PIECE + 5
    whole = stream(key, 0, length)
    assert np.array_equal(stream(key, PIECE, 16), whole[PIECE : PIECE + 16])
    many = np.zeros(length, dtype=np.uint64)
    add_streams(many, [(key, 1), (key, 1), (key, -1)])
    assert np.array_equal(many, whole)
