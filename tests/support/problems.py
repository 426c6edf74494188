"""Small tasks with batches, and their gradients by plain autograd."""

import copy

import pytest
import torch
from torch import nn

from consilience.core import keys
from consilience.data.batch import Batch
from consilience.tasks.supervised import Classification, MultiLabel, Regression

EXACT = {"rtol": 1e-12, "atol": 1e-12}


class Net(nn.Module):
    """Convolutions, a buffer that matters, two heads' worth of layers."""

    def __init__(self, outputs=3):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)
        self.hidden, self.last = nn.Linear(4 * 9, 6), nn.Linear(6, outputs)
        self.register_buffer("shift", torch.linspace(-1, 1, 6))

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().flatten(1)
        return self.last((self.hidden(x) + self.shift).tanh())


def net(outputs=3):
    torch.manual_seed(0)
    return Net(outputs)


def mlp(outputs=3, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=bias), nn.Tanh(), nn.Linear(8, outputs, bias=bias))


def dropout_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


KINDS = {
    "classification": (Classification, lambda g, *n: torch.randint(3, n, generator=g)),
    "regression": (lambda m: Regression(m, noise=0.3), lambda g, *n: torch.randn(*n, 3, generator=g).double()),
    "multilabel": (MultiLabel, lambda g, *n: torch.randint(2, (*n, 3), generator=g).double()),
}


kinds = pytest.mark.parametrize("kind", KINDS)


def reference(kind, output, y):
    """The loss of each example by torch's own losses, one output at a time."""
    if kind == "classification":
        return nn.CrossEntropyLoss(reduction="none")(output, y)
    if kind == "regression":
        return nn.MSELoss(reduction="none")(output, y).sum(-1) / (2 * 0.3**2)
    return nn.BCEWithLogitsLoss(reduction="none")(output, y).sum(-1)


def problem(kind, clients, shape=(1, 5, 5), module=None, size=7, dtype=torch.float64):
    """A task, weights that differ by client, and batches with padding at their ends."""
    make, targets = KINDS[kind]
    task = make(module or net()).prepare(dtype=dtype)
    made = torch.Generator().manual_seed(1)
    theta = task.initial() + 0.1 * torch.randn(clients, task.size, generator=made).to(dtype)
    w = (torch.arange(size) < torch.arange(size, size - clients, -1).unsqueeze(1)).to(dtype)
    key = keys.key(0, purpose="test", client=torch.arange(clients))
    x = torch.randn(clients, size, *shape, generator=made).to(dtype)
    y = targets(made, clients, size)
    return task, theta, Batch(x, y.to(dtype) if y.is_floating_point() else y, w, key)


def module_gradient(kind, module, theta, batch):
    """Gradient and loss of one client by plain autograd on the user's module, padding cut off."""
    module = copy.deepcopy(module).to(theta.dtype)
    nn.utils.vector_to_parameters(theta, module.parameters())
    real = int(batch.w.sum())
    loss = reference(kind, module(batch.x[:real]), batch.y[:real]).mean()
    return nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(module.parameters()))), loss
