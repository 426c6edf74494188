"""Acoustic models: windows of frames, both cells, and padding."""

import pytest
import torch

from consilience.core.errors import ConfigError
from consilience.models import acoustic

SHAPE = (9, 4)


def model(cell, **options):
    torch.manual_seed(0)
    return acoustic(SHAPE, 5, cell=cell, hidden=3, layers=2, dropout=0.0, **options).double().eval()


@pytest.mark.parametrize("cell", ["sru", "gru"])
def test_padding_and_its_contents_change_nothing(cell):
    module, x = model(cell), torch.randn(2, 9, 4, dtype=torch.float64)
    padded = torch.cat([x, torch.full((2, 5, 4), 7.0, dtype=torch.float64)], 1)
    lengths = torch.tensor([9, 4])
    for row, length in enumerate(lengths.tolist()):
        alone, count = module(x[row : row + 1, :length], lengths[row : row + 1])
        both, counts = module(padded, lengths)
        assert int(count) == int(counts[row]) == -(-length // 3) == alone.shape[1]
        torch.testing.assert_close(both[row, : int(count)], alone[0])


@pytest.mark.parametrize("cell", ["sru", "gru"])
def test_every_output_sees_the_whole_sequence(cell):
    module, x = model(cell), torch.randn(1, 9, 4, dtype=torch.float64)
    for at, place in ((0, -1), (8, 0)):  # the first frame reaches the last output, and the other way round
        changed = x.clone()
        changed[:, at] += 1
        before, after = (module(each, torch.tensor([9]))[0] for each in (x, changed))
        assert not torch.allclose(before[:, place], after[:, place])


def test_a_window_is_centred_on_the_first_frame_of_its_stride():
    module = model("sru", window=5, stride=2)
    seen = []
    module.first.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.arange(1.0, 10.0, dtype=torch.float64).view(1, 9, 1).expand(-1, -1, 4)
    module(x, torch.tensor([9]))
    assert seen[0][0, :, ::4].tolist() == [
        [0, 0, 1, 2, 3],
        [1, 2, 3, 4, 5],
        [3, 4, 5, 6, 7],
        [5, 6, 7, 8, 9],
        [7, 8, 9, 0, 0],
    ]


@pytest.mark.parametrize(
    ("shape", "options", "sentence"),
    [
        ((3, 8, 8), {}, r"sequences of features \[T, F\]"),
        (SHAPE, {"cell": "lstm"}, "'sru' and 'gru'"),
        (SHAPE, {"window": 2, "stride": 3}, "stride ≤ window"),
    ],
)
def test_what_it_cannot_be_is_refused(shape, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        acoustic(shape, 5, **options)
