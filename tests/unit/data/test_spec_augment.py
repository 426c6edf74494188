"""SpecAugment: stripes of a sequence's own random numbers."""

import pytest
import torch

import consilience as cs
from consilience.core import keys
from consilience.core.errors import DataError
from consilience.data import Compose, SpecAugment
from consilience.data.augment import check_augmentable

AUGMENT = SpecAugment(bands=2, band_width=3, times=2, time_width=4, longest=0.3)


def sequences(width=20):
    return torch.ones(3, 5, width, 8), torch.tensor([[20, 18, 12, 9, 3]]).expand(3, -1)


def client_keys(count=3):
    return keys.key(5, purpose="augment", client=torch.arange(count))


def test_a_cohort_equals_cohorts_of_one_and_batches_are_prefixes():
    x, lengths = sequences()
    key = client_keys()
    together, _ = AUGMENT((x, lengths), key)
    for k in range(3):
        assert torch.equal(AUGMENT((x[k : k + 1], lengths[k : k + 1]), key[k : k + 1])[0][0], together[k])
    assert torch.equal(AUGMENT((x[:, :2], lengths[:, :2]), key)[0], together[:, :2])
    assert not torch.equal(together[0], together[1])


def test_more_padding_changes_nothing():
    key = client_keys()
    (short, _), (long, _) = (AUGMENT(sequences(width), key) for width in (20, 33))
    assert torch.equal(short, long[:, :, :20])


def test_stripes_are_whole_bands_and_times_within_their_limits():
    x, lengths = torch.ones(1, 400, 20, 8), torch.full((1, 400), 20)
    only_bands = SpecAugment(bands=1, band_width=3, times=0)((x, lengths), client_keys(1))[0][0]
    gone = (only_bands == 0).all(1).sum(1)
    assert torch.equal((only_bands == 0).any(1).sum(1), gone)
    assert set(gone.tolist()) == {0, 1, 2, 3}
    only_times = SpecAugment(bands=0, times=1, time_width=9, longest=0.2)((x, lengths), client_keys(1))[0][0]
    gone = (only_times == 0).all(2).sum(1)
    assert torch.equal((only_times == 0).any(2).sum(1), gone)
    assert set(gone.tolist()) == {0, 1, 2, 3, 4}  # a fifth of twenty steps


def test_evaluation_changes_nothing():
    x = sequences()
    assert Compose((AUGMENT,)).evaluation(x)[0] is x[0]


def test_inputs_of_the_other_kind_are_refused():
    rows = [torch.ones(n, 4) for n in (2, 3)]
    y = torch.zeros(2, dtype=torch.int64)
    for x in (torch.ones(2, 3, 4), cs.Ragged(rows), cs.Ragged(rows, mask="m", lengths="n")):
        with pytest.raises(DataError, match=r"one Ragged of features \[T, F\] with lengths="):
            check_augmentable(Compose((AUGMENT,)), cs.Dataset(x, y))
    check_augmentable(Compose((AUGMENT,)), cs.Dataset(cs.Ragged(rows, lengths="n"), y))
    with pytest.raises(DataError, match="inputs of one tensor"):
        check_augmentable(cs.data.Flip(), cs.Dataset(cs.Ragged(rows, lengths="n"), y))
