import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilience.core import RecordError
from consilience.secure.shamir import PRIME, SHARE, combine, split


@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.integers(0, 4), st.randoms())
def test_any_threshold_of_the_shares_gives_the_secret(secret, threshold, more, random):
    shares = split(secret, threshold, range(1, threshold + more + 1))
    some = random.sample(sorted(shares), random.randint(threshold, threshold + more))
    assert combine({x: shares[x] for x in some}) == secret


def test_fewer_shares_give_another_number():
    secret = bytes(range(32))
    shares = split(secret, 3, range(1, 6))
    for few in ({1: shares[1]}, {2: shares[2], 5: shares[5]}):
        with contextlib.suppress(RecordError):  # or a number of more than 32 bytes
            assert combine(few) != secret


def test_fewer_shares_fit_every_secret():
    """Two of three shares and any secret lie on one polynomial of degree 2, so they exclude no secret."""
    shares = split(bytes(32), 3, range(1, 4))
    known = {x: int.from_bytes(shares[x], "little") for x in (1, 2)}
    for secret in (5, 2**200 + 1):
        third = (secret - 3 * known[1] + 3 * known[2]) % PRIME  # f(0) = 3 f(1) − 3 f(2) + f(3)
        full = {x: value.to_bytes(SHARE, "little") for x, value in {**known, 3: third}.items()}
        assert combine(full) == secret.to_bytes(32, "little")


def test_shares_of_no_secret_are_refused():
    with pytest.raises(RecordError, match="no secret of 32 bytes"):
        combine({1: (2**256 + 5).to_bytes(SHARE, "little")})
