"""Cohort functions: sizes of compiled code, and the check of its first result."""

import torch
from torch import nn

from consilience.compute.vectorize import Cohorts
from consilience.core import guards
from consilience.data.batch import Batch
from consilience.tasks.supervised import Classification
from support.problems import problem


def test_compiled_sizes_are_the_chunk_and_its_halves():
    task, *_ = problem("classification", 1)
    for chunk, sizes in [(8, [1, 2, 4, 4, 8, 8, 8, 8]), (10, [2, 2, 3, 5, 5, 10, 10, 10, 10, 10])]:
        cohorts = task.prepare(chunk=chunk).gradient()
        assert [cohorts.bucket(k) for k in range(2, chunk + 1)] == sizes[1:]
    assert task.prepare(chunk=4).gradient().bucket(9) == 9


def test_compiled_code_that_is_wrong_is_found_and_not_used(monkeypatch, caplog):

    monkeypatch.setattr(Cohorts, "_compiled", lambda self, plain, size: lambda *a: (plain(*a)[0] * 1.5, plain(*a)[1]))
    task = Classification(nn.Linear(4, 3))
    theta = task.initial().repeat(3, 1)
    made = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 4, generator=made)
    batch = Batch(x, torch.randint(3, (3, 6), generator=made), torch.ones(3, 6), torch.arange(3))
    right, _ = task.gradient()(theta, batch)
    with guards.watch() as acted:
        for _ in range(2):
            found, _ = task.prepare(compile=True, chunk=3).gradient()(theta, batch)
            torch.testing.assert_close(found, right)
    assert int(acted["compiled code refused"]) == 2
    assert "compiled code for cohorts of 3 differs from plain code by 0.5" in caplog.text
