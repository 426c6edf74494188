import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.core import Gaussian, RecordError, Weighted, leaves, record
from consilience.core.records import Point, stack, tree_map
from consilience.secure import Encoding, Fold


@record
class Update:
    change: Weighted
    site: Gaussian
    n: torch.Tensor


def update(seed, dtype=torch.float32, size=7):
    made = torch.Generator().manual_seed(seed)
    theta, eta = (torch.randn(size, generator=made).to(dtype) for _ in range(2))
    return Update(
        Weighted(Point(theta * 30), torch.tensor([30.0], dtype=dtype)),
        Gaussian(eta * 90, eta.square() * 90),
        torch.tensor([30]),
    )


def encoding(clients=4, **changes):
    return Encoding.of(update(0), **{"clients": clients, "largest": 50, "examples": 100, **changes})


def equal(a, b):
    return all(torch.equal(x, y) for (_, x), (_, y) in zip(leaves(a), leaves(b), strict=True))


@pytest.mark.parametrize(("clients", "bound", "exponent"), [(4, 6500.0, 47), (1000, 1e6, 32)])
def test_the_scale_is_the_largest_power_of_two_with_which_no_sum_wraps(clients, bound, exponent):
    found = Encoding(torch.zeros(3), {"value": bound}, clients)
    assert found.exponents == {"value": exponent}
    assert clients * bound * 2.0**exponent <= 2**62


def test_a_sum_of_integers_is_that_of_the_updates_up_to_the_stated_error():
    updates = [update(seed, torch.float64) for seed in range(4)]
    code = Encoding.of(updates[0], clients=4, largest=50, examples=100)
    total = tree_map(lambda *parts: sum(parts), *(code.encode(one) for one in updates))
    for (name, got), (_, rows) in zip(leaves(code.decode(total)), leaves(stack(updates)), strict=True):
        error = 4 * 2.0 ** -(code.exponents[name] + 1)
        assert (got - rows.sum(0)).abs().max() <= error * (1 + 1e-9)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9, 1e14])
def test_a_fold_has_the_sum_up_to_the_stated_error_and_rounding(scale):
    updates = [tree_map(lambda leaf: leaf * scale, update(seed, torch.float64)) for seed in range(5)]
    fold = Fold(updates[0], clients=5)
    for one in updates:
        fold.add(one)
    for (_, got), (_, rows) in zip(leaves(fold.value()), leaves(stack(updates)), strict=True):
        exact = torch.tensor([math.fsum(column) for column in rows.T.tolist()], dtype=got.dtype)
        torch.testing.assert_close(got, exact, rtol=4e-16, atol=5**2 * 2.0**-54)


@given(order=st.permutations(range(4)), gone=st.sets(st.integers(0, 3), max_size=3))
def test_a_fold_does_not_depend_on_the_order_nor_on_what_was_taken_away(order, gone):
    fold, kept = Fold(update(0), 4), Fold(update(0), 4)
    for seed in order:
        fold.add(update(seed))
    for seed in gone:
        fold.remove(update(seed))
    for seed in sorted(set(range(4)) - gone):
        kept.add(update(seed))
    assert equal(fold.coarse, kept.coarse)
    assert equal(fold.fine, kept.fine)


@pytest.mark.parametrize("wrong", [1e18, torch.inf, torch.nan])
def test_a_fold_names_what_it_cannot_add(wrong):
    far = update(3)
    far.site.eta[2] = wrong
    assert "site.eta has a number of size" in Fold(far, 4).beyond(far)
    assert not Fold(far, 4).beyond(update(2))


def test_integers_become_a_vector_and_a_tree_again():
    code = encoding()
    integers = code.encode(update(2))
    vector = code.flatten(integers)
    assert vector.shape == (code.numbers,)
    assert equal(code.unflatten(vector), integers)


def test_rows_out_of_bounds_are_named_and_others_are_not():
    far = update(3)
    far.site.eta[2] = 1e9
    assert list(encoding().beyond(stack([update(1), far]))) == [1]
    assert "site.eta" in encoding().beyond(stack([update(1), far]))[1]
    heavy = update(3)
    heavy.change.weight[0] = 51
    assert "change.weight" in encoding().beyond(stack([heavy]))[0]
    lost = update(3)
    lost.change.total.theta[0] = torch.nan
    assert 0 in encoding().beyond(stack([lost]))


def test_the_digest_is_that_of_the_layout():
    assert encoding().digest == encoding().digest
    others = [
        encoding(clients=5).digest,
        encoding(largest=51).digest,
        Encoding.of(update(0, size=8), clients=4, largest=50, examples=100).digest,
        Encoding.of(update(0, torch.float64), clients=4, largest=50, examples=100).digest,
    ]
    assert len({encoding().digest, *others}) == 5


def test_a_sum_that_the_clients_cannot_make_is_refused():
    code = encoding()
    total = tree_map(lambda *parts: sum(parts), *(code.encode(update(seed)) for seed in range(4)))
    code.check_sum(total)
    total.change.weight[0] *= 2
    with pytest.raises(RecordError, match=r"change\.weight is larger than 4 clients"):
        code.check_sum(total)
