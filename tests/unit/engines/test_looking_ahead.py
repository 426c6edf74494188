"""The first batch of a round is made while a GPU computes the round before; here it is made on a CPU."""

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.data.cohort import Cohort
from consilience.engines.simulator import Simulation


def learned(method, chunk=4):
    made = torch.Generator().manual_seed(0)
    data = cs.Dataset(torch.randn(60, 4, generator=made), torch.randint(3, (60,), generator=made), classes=tuple("abc"))
    federation = cs.Federation.from_owner(data, torch.arange(60).sqrt().long())
    torch.manual_seed(0)
    engine = cs.Simulator(device="cpu", chunk=chunk, workers=1, threads=1)
    return cs.fit(
        method, cs.Classification(nn.Linear(4, 3)), federation, rounds=4, cohort=4, engine=engine, progress=False
    )


@pytest.mark.parametrize("chunk", [4, 3])
@pytest.mark.parametrize("method", [cs.FedAvg(cs.SGD(epochs=2)), cs.SCAFFOLD(), cs.FedEP()], ids=lambda m: m.name)
def test_rounds_that_were_begun_ahead_are_the_same(method, chunk, monkeypatch):
    plain = learned(method, chunk)
    begun, begin_like = [], Cohort.begin_like

    def begin(self, other):
        begin_like(self, other)
        begun.append(self)

    monkeypatch.setattr(Simulation, "_looks_ahead", True)
    monkeypatch.setattr(Cohort, "begin_like", begin)
    ahead = learned(method, chunk)
    assert torch.equal(plain.posterior.mean, ahead.posterior.mean)
    assert [cohort.round for cohort in begun] == [2, 3, 4, 5]
    assert [not cohort._begun for cohort in begun] == [True, True, True, False]  # there was no fifth round
