from dataclasses import replace

import pytest
import torch
from torch import nn

from consilience.compute.taps import only_linear
from consilience.core import keys
from consilience.core.records import rows
from consilience.data.batch import Batch
from consilience.tasks import fisher
from consilience.tasks.supervised import Classification, MultiLabel, Regression

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def mlp(bias=True):
    return nn.Sequential(nn.Linear(5, 7, bias=bias), nn.Tanh(), nn.Linear(7, 4, bias=bias), nn.ReLU(), nn.Linear(4, 3))


class TwoLayers(nn.Module):
    def __init__(self, hidden=4):
        super().__init__()
        self.inner, self.outer = nn.Linear(5, hidden), nn.Linear(hidden, 3)


class Twice(TwoLayers):
    """One linear layer, applied twice to an example."""

    def forward(self, x):
        return self.outer(self.inner(self.inner(x).tanh()))


class Borrowed(TwoLayers):
    """Weights that are also used outside their layer."""

    def forward(self, x):
        return self.outer(self.inner(x)) + x @ self.inner.weight.T @ self.outer.weight.T


class Branching(TwoLayers):
    """A forward that depends on values."""

    def forward(self, x):
        return self.outer(self.inner(x) if x.shape[-1] == len(self.inner.weight) else x)


class Sequences(TwoLayers):
    """A layer on every position of a sequence: its gradient is a sum of outer products."""

    def forward(self, x):
        return self.outer(self.inner(x).tanh().mean(1))


class Folded(TwoLayers):
    """Positions folded into the batch: two dimensions, but not one row an example."""

    def forward(self, x):
        return self.outer(self.inner(x.reshape(-1, 5)).tanh().reshape(x.shape[0], -1, 4).sum(1))


def tied():
    module = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))
    module[2].weight = module[0].weight
    return module


def conv():
    return nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3))


def shared():
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, 3))


FAST = {
    "mlp": (mlp, (5,)),
    "mlp without bias": (lambda: mlp(bias=False), (5,)),
    "one layer": (lambda: nn.Linear(5, 3), (5,)),
    "flattened": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), (2, 3)),
    "dropout": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)), (5,)),
}
NAIVE = {
    "conv": (conv, (1, 5)),
    "twice": (lambda: Twice(5), (5,)),
    "borrowed": (Borrowed, (5,)),
    "branching": (lambda: Branching(5), (5,)),
    "tied": (tied, (5,)),
    "shared": (shared, (5,)),
    "norm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)), (5,)),
}
LATE = {"sequences": (Sequences, (2, 5)), "folded": (Folded, (2, 5))}  # known from the shapes of inputs
LIKELIHOODS = {"classification": Classification, "regression": Regression, "multilabel": MultiLabel}


def problem(module, shape, clients, kind="classification", size=4, dtype=torch.float64):
    torch.manual_seed(0)
    task = LIKELIHOODS[kind](module()).extend(critic=nn.Linear(2, 2)).prepare(dtype=dtype)
    made = torch.Generator().manual_seed(1)
    theta = torch.randn(clients, task.size, generator=made).to(dtype)
    x = torch.randn(clients, size, *shape, generator=made).to(dtype)
    w = (torch.arange(size) < torch.arange(size, size - clients, -1).unsqueeze(1)).to(dtype)
    key = keys.key(0, purpose="fisher", client=torch.arange(clients))
    return task, theta, Batch(x, torch.zeros(clients, size, dtype=torch.int64), w, key)


def rule(of):
    """A rule of Fisher information as a function of the task."""
    return lambda task, theta, batch: of(task.networks, task.likelihood, theta, batch)


def by_loop(task, theta, batch):
    """The definition, one example after the other, by autograd on a flat leaf; without padding."""
    theta = theta.clone().requires_grad_()
    y = task.likelihood.draw(task.apply_one(theta, batch.x).detach(), keys.mix(batch.key ^ 0x5EED))
    total, count = torch.zeros_like(theta), int(batch.w.sum())
    for i in range(count):
        loss = task.likelihood.losses(task.apply_one(theta, batch.x[i : i + 1]), y[i : i + 1]).sum()
        (g,) = torch.autograd.grad(loss, theta)
        total += g.square()
    return (total / count).detach()


@pytest.mark.parametrize(("name", "clients"), [("mlp", 1), ("conv", 1), *((name, 2) for name in (FAST | NAIVE | LATE))])
def test_fisher_is_the_mean_of_squared_gradients(name, clients):
    module, shape = (FAST | NAIVE | LATE)[name]
    task, theta, batch = problem(module, shape, clients)
    information = task.fisher(theta, batch)
    for k in range(clients):
        torch.testing.assert_close(information[k], by_loop(task, theta[k], rows(batch, k)), **EXACT)


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("name", FAST)
def test_networks_of_linear_layers_take_the_fast_rule_with_the_result_of_the_naive_one(name, kind):
    task, theta, batch = problem(*FAST[name], 2, kind)
    fast, naive = (task.vectorize(rule(kind))(theta, batch) for kind in (fisher.by_layers, fisher.by_examples))
    torch.testing.assert_close(fast, naive, **EXACT)
    assert bool((naive > 0).any())
    assert task.networks.only_linear


@pytest.mark.parametrize("name", NAIVE)
def test_other_networks_take_the_naive_rule(name):
    assert not only_linear(NAIVE[name][0]())


@pytest.mark.parametrize("name", LATE)
def test_layers_that_see_more_than_one_row_an_example_take_the_naive_rule(name):
    task, theta, batch = problem(*LATE[name], 1)
    assert rule(fisher.by_layers)(task, theta[0], rows(batch, 0)) is None


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_other_parts_have_no_information(name):
    task, theta, batch = problem(*(FAST | NAIVE)[name], 2)
    information = task.fisher(theta, batch)
    assert not information[:, task.slice("critic")].any()
    assert bool(information[:, task.slice()].any(1).all())


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_weights_weigh_examples(name):
    task, theta, batch = problem(*(FAST | NAIVE)[name], 1)
    weight = torch.linspace(0.1, 2, 4, dtype=torch.float64)
    single = [task.fisher(theta, replace(batch, w=one[None])) for one in torch.eye(4, dtype=torch.float64)]
    expected = sum(w * f for w, f in zip(weight, single, strict=True)) / weight.sum()
    torch.testing.assert_close(task.fisher(theta, replace(batch, w=weight[None])), expected, **EXACT)


X = torch.tensor([1.5, -0.7, 2.0], dtype=torch.float64)
THETA = torch.tensor([0.5, -1.0, 0.3, 0.2], dtype=torch.float64)
P = torch.sigmoid(THETA[:3] @ X + THETA[3])


@pytest.mark.parametrize(
    ("task", "factor"), [(MultiLabel(nn.Linear(3, 1)), P * (1 - P)), (Regression(nn.Linear(3, 1), noise=0.5), 4.0)]
)
def test_fisher_of_one_layer_is_known_in_closed_form(task, factor):
    """E (y − p)² x² = p (1 − p) x² for Bernoulli labels, x² / σ² for a regression; here over many draws of y."""
    w, key = torch.ones(1, 40_000).double(), keys.key(0, purpose="y").view(1)
    batch = Batch(X.expand(1, 40_000, 3), torch.zeros(1, 40_000, 1), w, key)
    expected = factor * torch.cat([X, torch.ones(1)]).square()
    torch.testing.assert_close(
        task.prepare(dtype=torch.float64).fisher(THETA[None], batch)[0], expected, rtol=0.03, atol=0
    )


def test_dropout_does_not_act_in_fisher_information():
    task, theta, batch = problem(*FAST["dropout"], 2)
    plain = Classification(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))).extend(critic=nn.Linear(2, 2))
    expected = plain.prepare(dtype=torch.float64).fisher(theta, batch)
    torch.testing.assert_close(task.fisher(theta, batch), expected, **EXACT)


def test_taps_are_closed_after_fisher_information():
    task, theta, batch = problem(*FAST["mlp"], 2)
    x = batch.x[0]
    before = task.apply_one(theta[0], x)
    task.fisher(theta, batch)
    assert torch.equal(task.apply_one(theta[0], x), before)
    assert all(
        tap.input is None and tap.offset is None for tap in task.networks.functions["main"].evaluation[1].values()
    )
