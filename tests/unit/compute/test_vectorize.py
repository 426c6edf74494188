"""Cohort functions: sizes of compiled code, and the check of its first result."""

import pytest
import torch
from torch import nn

from consilience.compute.vectorize import Cohorts
from consilience.core import guards
from consilience.core.records import rows
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


class Sequences(nn.Module):
    """Products of sequences with weights that are frozen, tied, or used by the module itself."""

    def __init__(self):
        super().__init__()
        self.frozen, self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)
        self.frozen.requires_grad_(False)
        self.second.weight = self.first.weight

    def forward(self, x):
        h = self.second(torch.relu(self.first(self.frozen(x))))
        return self.last(h.mean(1) + self.last.weight.sum(0))


def _stepped(task, theta, batch):
    """The loss after a step along the gradient: it has second derivatives."""
    return task.loss_one(theta - 0.1 * torch.func.grad(task.loss_one)(theta, batch), batch)


@pytest.mark.parametrize("loss", [None, _stepped])
def test_gradients_of_a_cohort_are_those_of_its_clients(loss):
    torch.manual_seed(0)
    task = Classification(Sequences()).prepare(dtype=torch.float64)
    gradient = task.gradient(loss)
    theta = task.initial() + torch.randn(3, task.size, dtype=torch.float64) / 10
    w = torch.tensor([[1.0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]], dtype=torch.float64)
    batch = Batch(torch.randn(3, 6, 5, 4, dtype=torch.float64), torch.randint(3, (3, 6)), w, torch.arange(3))
    found, losses = gradient(theta, batch)
    assert found.is_contiguous()
    for k in range(3):
        alone, value = gradient(theta[k : k + 1], rows(batch, slice(k, k + 1)))
        torch.testing.assert_close(found[k : k + 1], alone, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(losses[k : k + 1], value, rtol=1e-12, atol=1e-12)
