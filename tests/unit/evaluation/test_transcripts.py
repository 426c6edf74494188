"""Transcripts of test examples for reports."""

import torch
from torch import nn

import consilience as cs
from consilience.core import Point
from consilience.evaluation.transcripts import transcripts
from consilience.models import acoustic


def utterances() -> cs.Dataset:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(6 + i, 3, generator=generator) for i in range(9)]
    y = [[1 + i % 2, 2] for i in range(9)]
    who = {"speaker": torch.arange(9) % 2}
    names = {"speaker": ("ann", "bob")}
    return cs.Dataset(cs.Ragged(x, lengths="n"), cs.Ragged(y, padding=-1), groups=who, group_names=names)


def test_examples_are_evenly_spaced_and_read_as_by_the_task():
    data = utterances()
    torch.manual_seed(0)
    task = cs.CTC(acoustic(data.x.shape[1:], 3, hidden=4, layers=1, dropout=0.0), "ab").prepare()
    found = transcripts(task, Point(task.initial()), data, count=3)
    assert [one["row"] for one in found] == [0, 4, 8]
    assert [one["reference"] for one in found] == ["ab", "ab", "ab"]
    assert {one["speaker"] for one in found} == {"ann"}
    rows = torch.tensor([0, 4, 8])
    read = task.decode(task.predict(task.initial(), data.inputs(rows)))
    assert [one["hypothesis"] for one in found] == [one.text for one in read]
    part = cs.Federation.from_owner(data, data.groups["speaker"])
    assert len(transcripts(task, Point(task.initial()), part)) == 9


def test_other_tasks_have_none():
    task = cs.Classification(nn.Linear(3, 2)).prepare()
    data = cs.Dataset(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64))
    assert transcripts(task, Point(task.initial()), data) == []
