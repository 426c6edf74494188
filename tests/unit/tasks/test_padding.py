"""Padding does not matter: modules for which it does are refused, and others give the same at any width."""

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import TaskError
from support.zoo import Causal, Encoder, Packed, following, sentences

CLIENTS = 3


def rows(n=12, vocabulary=20):
    torch.manual_seed(0)
    return sentences(vocabulary=vocabulary)(n)


class Pooled(nn.Module):
    """Embedded tokens and a function of (what was embedded, mask) that pools them."""

    def __init__(self, pool):
        super().__init__()
        self.embedding, self.head, self.pool = nn.Embedding(20, 4), nn.Linear(4, 3), pool

    def forward(self, ids, mask):
        return self.head(self.pool(self.embedding(ids), mask.unsqueeze(-1)))


class Frames(nn.Module):
    """Vectors in place of tokens."""

    def __init__(self, pool):
        super().__init__()
        self.head, self.pool = nn.Linear(4, 3), pool

    def forward(self, x, mask):
        return self.head(self.pool(x, mask.unsqueeze(-1)))


WRONG = {
    "mean": lambda x, m: x.mean(1),
    "sum over the width": lambda x, m: (x * m).sum(1) / x.shape[1],
    "tiny": lambda x, m: (x * m).sum(1) + 1e-6 * x.sum(1),
    "last": lambda x, m: x[:, -1],
    "maximum": lambda x, m: x.amax(1),
    "minimum": lambda x, m: x.amin(1),
}
RIGHT = {
    "mean": lambda x, m: (x * m).sum(1) / m.sum(1),
    "first": lambda x, m: x[:, 0],
    "maximum": lambda x, m: x.masked_fill(m == 0, -torch.inf).amax(1),
    "softmax": lambda x, m: (x.masked_fill(m == 0, -torch.inf).softmax(1) * x).sum(1),
}


def datasets():
    tokens = rows()
    torch.manual_seed(1)
    vectors = cs.Ragged([torch.randn(int(n), 4) for n in tokens.sizes], mask="mask")
    y = torch.arange(len(tokens)) % 3
    ragged = cs.Ragged(list(tokens), mask="mask")
    return {
        Pooled: cs.Dataset(ragged, y),
        Frames: cs.Dataset({"x": vectors}, y),
    }


@pytest.mark.parametrize("kind", [Pooled, Frames])
@pytest.mark.parametrize("pool", WRONG.values(), ids=WRONG.keys())
def test_a_module_that_sees_its_padding_is_refused(kind, pool):
    with pytest.raises(TaskError, match=r"if it has more padding.*use the mask or the lengths in forward") as caught:
        cs.Classification(kind(pool)).check(datasets()[kind])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [Pooled, Frames])
@pytest.mark.parametrize("pool", RIGHT.values(), ids=RIGHT.keys())
def test_a_module_that_uses_its_mask_is_accepted(kind, pool):
    cs.Classification(kind(pool)).check(datasets()[kind])


def test_rows_without_mask_and_lengths_are_told_to_have_one():
    module = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.LazyLinear(3))
    module(torch.zeros(1, 7, dtype=torch.int64))
    data = cs.Dataset(rows(), torch.arange(12) % 3)

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(20, 3)

        def forward(self, ids):
            return self.embedding(ids).mean(1)

    with pytest.raises(TaskError, match=r"give cs.Ragged of x a mask= or lengths= and use it in forward"):
        cs.Classification(Mean()).check(data)


def test_a_module_of_one_width_is_refused():
    module = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(28, 3))
    longest = cs.Ragged([torch.ones(7, dtype=torch.int64)] * 2 + list(rows()))
    with pytest.raises(TaskError, match="cannot take rows of different lengths") as caught:
        cs.Classification(module).check(cs.Dataset(longest, torch.arange(14) % 3))
    assert "\n" not in str(caught.value)


def test_rows_of_one_length_have_no_padding():
    module = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(28, 3))
    same = cs.Ragged([torch.ones(7, dtype=torch.int64)] * 4)
    cs.Classification(module).check(cs.Dataset(same, torch.arange(4) % 3))


def test_a_recurrent_layer_that_reads_backwards_from_the_padding_is_refused():
    class Backwards(Packed):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.LSTM(4, 6, batch_first=True, bidirectional=True), nn.Linear(12, 3)

    data = cs.Dataset(cs.Ragged(list(rows()), lengths="lengths"), torch.arange(12) % 3)
    cs.Classification(Packed()).check(data)
    with pytest.raises(TaskError, match="if it has more padding"):
        cs.Classification(Backwards()).check(data)


CASES = {
    "LSTM": (Packed, lambda r: cs.Ragged(r, lengths="n"), None, cs.Classification),
    "transformer": (Encoder, lambda r: {"input_ids": cs.Ragged(r, mask="attention_mask")}, None, cs.Classification),
    "language model": (Causal, lambda r: {"input_ids": cs.Ragged(r, mask="attention_mask")}, following,
                       cs.LanguageModel),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_client_s_result_does_not_depend_on_the_widths_of_its_neighbours(case):
    make, inputs, targets, kind = case
    words = list(rows())
    words[0] = torch.arange(11) + 3  # one client has a row that is longer than all others
    x = inputs(words)
    y = torch.arange(len(words)) % 3 if targets is None else targets(x)
    fed = cs.Federation.from_owner(cs.Dataset(x, y), torch.tensor([0] * 5 + [1] * 4 + [2] * 3))
    torch.manual_seed(2)
    module, found = make(), []
    for chunk in (1, CLIENTS):
        engine = cs.Simulator(device="cpu", precision="float64", chunk=chunk, workers=1)
        method = cs.algorithms.LocalOnly(cs.SGD(lr=0.01, epochs=2, batch_size=3))
        run = cs.fit(method, kind(module), fed, rounds=1, engine=engine, progress=False)
        found.append(torch.stack([run.personal(client).mean for client in range(CLIENTS)]))
    assert not torch.equal(found[0][0], found[0][1])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
