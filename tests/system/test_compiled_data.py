"""Compiled batches are those of plain code, or plain code is used."""

import pytest
import torch

from consilience.compute.compiler import Checked
from consilience.data import Compose, Crop, Dataset, Federation, Flip, Ragged
from consilience.data.cohort import Cohort, take

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]  # the compiler's


def test_compiled_batches_are_those_of_plain_code():
    """Bytes to numbers, crop, flip: some hundred small operations, which a GPU has as a few."""
    made = torch.Generator().manual_seed(0)
    images = torch.randint(256, (30, 3, 8, 8), dtype=torch.uint8, generator=made)
    scale, shift = torch.tensor([0.01, 0.02, 0.03]).view(3, 1, 1), torch.tensor(-1.0)
    fed = Federation.from_owner(Dataset(images, torch.arange(30) % 4, scale=scale, shift=shift), torch.arange(30) % 4)
    changed = Compose((Crop(6, padding=1), Flip(), Crop(5)))
    compiled, found = Checked(take), []
    for how in (take, compiled):
        for round in (1, 2):
            group = Cohort(
                fed, torch.arange(4), round=round, round_size=4, seed=5, static=True, augment=changed, take=how
            )
            found += [(how is take, k, batch) for k, batch in group.epoch(0, 7)]
    assert compiled.run is not take  # it was not refused
    plain, fast = ([one[1:] for one in found if one[0] is kind] for kind in (True, False))
    assert {k for k, _ in plain} == {4, 2}
    for (k, a), (other, b) in zip(plain, fast, strict=True):
        assert k == other
        assert torch.equal(a.y, b.y)
        torch.testing.assert_close(a.x, b.x)


def test_a_change_that_compiled_code_gets_wrong_or_cannot_have_is_left_plain(caplog):
    def wrong(fn):
        def other(*args):
            x, y = fn(*args)
            return (x + 1e-3 if torch.compiler.is_compiling() else x), y

        return other

    def broken(*args):
        raise RuntimeError("no code for this")

    images, y = torch.ones(8, 1, 4, 4), torch.zeros(8, dtype=torch.int64)
    args = Dataset(images, y), torch.arange(8).view(2, 4), torch.arange(2), None, torch.float32
    first, second = Checked(wrong(take)), Checked(take)
    second.run = broken
    for checked in (first, second):
        for _ in range(2):
            torch.testing.assert_close(checked(*args)[0], images.view(2, 4, 1, 4, 4))
        assert checked.run is checked.plain
    assert "differs when compiled, by 0.001" in caplog.text
    assert "cannot be compiled" in caplog.text


def test_batches_of_rows_of_different_lengths_are_those_of_plain_code():
    words = torch.randint(0, 10, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = Ragged(torch.arange(1, sum(words) + 1).split(words), mask="mask", lengths="n", padding=-1)
    data = Dataset({"ids": rows, "age": torch.rand(40)}, torch.arange(40) % 2)
    compiled, chosen = Checked(take), torch.tensor([[3, 4], [5, 6]])
    for index in (chosen, chosen + 7):
        results = [fn(data, index, torch.zeros(2), None, torch.float64, data.widths) for fn in (compiled, take)]
        torch.testing.assert_close(*results)
    assert compiled.run is not compiled.plain
