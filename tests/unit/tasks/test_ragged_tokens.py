"""Language models and CTC on rows of different lengths."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import consilience as cs
from consilience.core.errors import DataError

LENGTHS = [3, 1, 4, 2, 6, 5, 2, 3, 1]


def rows(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, (n,), generator=generator) for n in LENGTHS]


def test_tokens_of_padding_do_not_count(monkeypatch) -> None:
    monkeypatch.setattr("consilience.evaluation.predictions.AT_ONCE", 4 * 6 * 5)  # batches of four rows
    x = rows()
    y = [(row + 1) % 5 for row in x]
    data = cs.Dataset(cs.Ragged(x), cs.Ragged(y, padding=-100))
    torch.manual_seed(0)
    task = cs.LanguageModel(nn.Embedding(5, 5))
    parts = cs.Federation.from_owner(data, torch.arange(len(x)) % 3, clients=3)
    train = cs.SGD(lr=0.1, epochs=1, batch_size=3)
    run = cs.fit(cs.FedAvg(train=train), task, parts, rounds=2, test=data, progress=False)
    expected = F.cross_entropy(run.model(torch.cat(x)), torch.cat(y)).item()
    assert run.evaluation.point["nll"] == pytest.approx(expected, rel=1e-5)


def test_rows_without_a_target_are_named() -> None:
    data = cs.Dataset(cs.Ragged(rows()), cs.Ragged([row * 0 - 100 if i == 4 else row for i, row in enumerate(rows())],
                                                   padding=-100), name="ward 3")  # fmt: skip
    with pytest.raises(DataError, match="ward 3: row 4 has no target"):
        cs.LanguageModel(nn.Embedding(5, 5)).check(data)
