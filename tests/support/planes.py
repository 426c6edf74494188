"""Classification of points of the plane: tasks, beliefs and data for tests of evaluation."""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian

import consilience as cs
from support.scenarios import blobs

CLASSES = 3


def cloud(n: int = 60, centre: float = 0.0, seed: int = 0) -> cs.Dataset:
    """Points of the plane whose labels mean nothing."""
    x = centre + torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    return cs.Dataset(x, torch.full((n,), -1), name="cloud")


def plane() -> cs.Classification:
    """Logits that are linear in the input, in double precision."""
    return cs.Classification(nn.Linear(2, CLASSES)).prepare(dtype=torch.float64)


def belief(task: cs.Task, variance: float, seed: int = 0) -> cs.Gaussian:
    mean = torch.randn(task.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return cs.Gaussian.of(mean, torch.tensor([1 / variance], dtype=torch.float64))


@cache
def learned() -> tuple[cs.Classification, cs.Gaussian, cs.Dataset]:
    """Logistic regression on three clouds, with its Laplace posterior under the prior N(0, 1); and other points of
    the clouds. A third feature is 0 in all of them."""
    _, train, test = blobs()
    task = cs.Classification(nn.Linear(3, CLASSES)).prepare(dtype=torch.float64)
    x = lifted(train.data).x.double()
    theta = torch.zeros(task.size, dtype=torch.float64)

    def energy(theta: Tensor) -> Tensor:
        return task.likelihood.losses(task.apply_one(theta, x), train.data.y).sum() + 0.5 * theta.square().sum()

    for _ in range(8):
        theta = theta - torch.linalg.solve(hessian(energy, theta), torch.func.grad(energy)(theta))
    return task, cs.Gaussian.of(theta, hessian(energy, theta)), lifted(test.data)


def lifted(data: cs.Dataset, height: float = 0.0) -> cs.Dataset:
    """The same points with a third coordinate."""
    return replace(data, x=torch.cat([data.x[:, :2], torch.full((len(data), 1), height)], dim=1))
