import copy

import pytest
import torch
from torch import nn

from consilience.cohort import Cohort
from consilience.data import Dataset, Federation
from consilience.errors import ConfigError
from consilience.gaussian import Gaussian
from consilience.inference import SGD
from consilience.task import Classification

EXACT = {"rtol": 1e-12, "atol": 1e-12}
SIZES = [33, 12, 7, 1]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def world(static=False):
    made = torch.Generator().manual_seed(1)
    total = sum(SIZES)
    data = Dataset(torch.randn(total, 4, generator=made), torch.randint(3, (total,), generator=made))
    fed = Federation.from_owner(data, torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES)))
    task = Classification(network()).prepare(dtype=torch.float64)
    ids = torch.arange(len(SIZES))
    group = Cohort(fed, ids, round=1, round_size=4, seed=0, dtype=torch.float64, static=static)
    return task, group


def by_torch(sgd, group, k, energy=None):
    """One client trained by torch's own optimiser on its own module, on the same batches without padding."""
    module = copy.deepcopy(network())
    optimiser = torch.optim.SGD(module.parameters(), lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
    last = 0.0
    for epoch in range(sgd.epochs):
        last = 0.0
        for live, batch in group.epoch(epoch, sgd.batch):
            if k >= live:
                continue
            real = int(batch.w[k].sum())
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(module(batch.x[k, :real]), batch.y[k, :real])
            last += float(loss.detach()) * real
            if energy is not None:
                loss = loss + energy(torch.cat([p.flatten() for p in module.parameters()]))
            loss.backward()
            optimiser.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach(), last / SIZES[k]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "sgd",
    [
        SGD(lr=0.1, batch=5),
        SGD(lr=0.1, batch=5, epochs=3, momentum=0.9),
        SGD(lr=0.05, batch=8, epochs=2, weight_decay=0.1),
        SGD(lr=0.05, batch=100, epochs=4, momentum=0.5, weight_decay=0.01),
    ],
    ids=["plain", "momentum", "decay", "both"],
)
def test_every_client_trains_as_torch_would_train_it(sgd, static):
    task, group = world(static)
    trained = sgd(task.gradient(), task.initial(), group)
    for k in range(len(SIZES)):
        expected, loss = by_torch(sgd, group, k)
        torch.testing.assert_close(trained[k], expected, **EXACT)
        torch.testing.assert_close(float(group.notes["loss"][k]), loss, **EXACT)


@pytest.mark.parametrize("form", ["scalar", "diagonal", "full"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_a_prior_adds_the_gradient_of_its_energy(form, own):
    task, group = world()
    size, clients = task.size, (len(SIZES),) if own else ()
    made = torch.Generator().manual_seed(2)
    eta = 0.1 * torch.randn(*clients, size, generator=made).double()
    lam = 0.1 * torch.rand(*clients, 1 if form == "scalar" else size, generator=made).double()
    prior = Gaussian(eta, torch.diag_embed(lam) + 0.001 if form == "full" else lam)
    sgd = SGD(lr=0.1, batch=5, epochs=2, momentum=0.9)
    trained = sgd(task.gradient(), task.initial(), group, prior=prior)
    for k in range(len(SIZES)):
        one = Gaussian(prior.eta[k], prior.lam[k]) if own else prior

        def energy(theta, one=one):
            scaled = one.lam @ theta if one.full else one.lam * theta
            return 0.5 * theta @ scaled - one.eta @ theta

        torch.testing.assert_close(trained[k], by_torch(sgd, group, k, energy)[0], **EXACT)


def test_weight_decay_is_a_prior_around_zero():
    task, group = world()
    prior = Gaussian(torch.zeros(task.size).double(), torch.full((1,), 0.2, dtype=torch.float64))
    decayed = SGD(batch=5, weight_decay=0.2)(task.gradient(), task.initial(), group)
    torch.testing.assert_close(decayed, SGD(batch=5)(task.gradient(), task.initial(), group, prior=prior), **EXACT)


def test_clients_may_start_from_their_own_weights():
    task, group = world()
    start = task.initial() + 0.1 * torch.randn(4, task.size).double()
    kept = start.clone()
    together = SGD(batch=5)(task.gradient(), start, group)
    for k in range(4):
        alone = Cohort(group.federation, group.ids[k : k + 1], round=1, round_size=4, seed=0, dtype=torch.float64)
        torch.testing.assert_close(together[k], SGD(batch=5)(task.gradient(), start[k], alone)[0], **EXACT)
    assert torch.equal(start, kept)


def pulled(task, theta, batch, anchor, strength):
    """A loss with an own and a shared argument."""
    return task.loss_one(theta, batch) + 0.5 * strength * (theta - anchor.mean).square().sum()


def test_own_arguments_follow_the_clients_that_still_have_a_batch():
    task, group = world()
    anchor = Gaussian(torch.randn(4, task.size).double(), torch.ones(4, 1).double())
    strength = torch.tensor(0.3, dtype=torch.float64)
    got = SGD(batch=5, epochs=2)(task.gradient(pulled), task.initial(), group, anchor, shared=(strength,))
    prior = Gaussian(0.3 * anchor.eta, 0.3 * anchor.lam)
    expected = SGD(batch=5, epochs=2)(task.gradient(), task.initial(), group, prior=prior)
    torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, "lr must be at least 0, got -0.1"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1.0"),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1.0"),
        ({"momentum": -0.1}, r"momentum must lie in \[0, 1\), got -0.1"),
        ({"lr": float("nan")}, "lr must be at least 0, got nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SGD(**settings)
