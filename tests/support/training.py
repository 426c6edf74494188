"""A cohort of small clients, and the same training by torch's own optimisers, one client at a time."""

import copy

import torch
from torch import nn

from consilience.data import Dataset, Federation
from consilience.data.cohort import Cohort
from consilience.optim import SGD, Adam, AdamW, AMSGrad, RMSprop
from consilience.tasks.supervised import Classification

EXACT = {"rtol": 1e-12, "atol": 1e-12}
SIZES = (33, 12, 7, 1)


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def world(static=False):
    """(task, cohort of clients with SIZES examples)."""
    made = torch.Generator().manual_seed(1)
    data = Dataset(torch.randn(sum(SIZES), 4, generator=made), torch.randint(3, (sum(SIZES),), generator=made))
    federation = Federation.from_owner(data, torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES)))
    task = Classification(network()).prepare(dtype=torch.float64)
    return task, cohort_of(federation, torch.arange(len(SIZES)), static=static)


def cohort_of(federation, ids, **options):
    return Cohort(federation, ids, round=1, round_size=len(SIZES), seed=0, dtype=torch.float64, **options)


def one_by_one(chain, task, group, start=None):
    """Every client's parameters, each trained in a cohort of its own."""
    start = task.initial().expand(len(group), -1) if start is None else start
    alone = (cohort_of(group.federation, group.ids[k : k + 1]) for k in range(len(group)))
    return torch.cat([chain(task, theta, one) for theta, one in zip(start, alone, strict=True)])


def walk(chain, group, size, slope=0.0):
    """The parameters after a round from 0 along a constant gradient."""

    def constant(theta, batch, shared=()):
        return torch.full_like(theta, slope), theta.new_zeros(len(theta))

    theta = torch.zeros(size, dtype=torch.float64)
    for last in chain.iterates(constant, theta, group):
        theta = last
    return theta


def torchs(chain, parameters):
    """The same optimiser in torch."""
    settings = {"lr": chain.lr, "weight_decay": chain.weight_decay}
    match chain:
        case Adam() | AMSGrad():
            betas, amsgrad = (chain.beta1, chain.beta2), isinstance(chain, AMSGrad)
            kind = torch.optim.AdamW if isinstance(chain, AdamW) else torch.optim.Adam
            return kind(parameters, betas=betas, eps=chain.eps, amsgrad=amsgrad, **settings)
        case RMSprop():
            return torch.optim.RMSprop(parameters, alpha=chain.alpha, eps=chain.eps, **settings)
        case SGD():
            return torch.optim.SGD(parameters, momentum=chain.momentum, **settings)


def by_torch(chain, group, k, energy=None):
    """(parameters after every step, mean loss of the last epoch) of client k, on the same batches without padding."""
    module = copy.deepcopy(network())
    optimiser, path, last = torchs(chain, module.parameters()), [], 0.0
    for epoch in range(chain.epochs):
        last = 0.0
        for step, (live, batch) in enumerate(group.epoch(epoch, chain.batch_size)):
            if k >= live or step >= (chain.longest or 100):
                continue
            real = int(batch.w[k].sum())
            if chain.drop_last and step and real < chain.batch_size:
                continue
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(module(batch.x[k, :real]), batch.y[k, :real])
            last += float(loss.detach()) * real
            if energy is not None:
                loss = loss + energy(torch.cat([p.flatten() for p in module.parameters()]))
            loss.backward()
            optimiser.step()
            path.append(nn.utils.parameters_to_vector(module.parameters()).detach().clone())
    return path, last / SIZES[k]
