"""Small games of generators and discriminators, and a player written by hand."""

import math
from dataclasses import dataclass, field

import torch
from torch import nn

import consilience as cs
from consilience.core import keys
from consilience.core.records import tree_map
from consilience.tasks.adversarial import BETWEEN, HEADS, TRUNK
from consilience.tasks.layout import MAIN

EXACT = {"rtol": 1e-11, "atol": 1e-11}


NEARLY = {"rtol": 1e-8, "atol": 1e-8}  # the penalty's √(‖·‖² + 1e-12)


ENGINE = cs.Simulator(device="cpu", precision="float64", chunk=3, workers=1)


LATENT, FLAT, IMAGE = 2, (2,), (1, 2, 2)


@dataclass
class Witness:
    """A judge that keeps the samples that it scores."""

    count: int = 40
    seen: list = field(default_factory=list)

    def __call__(self, samples, real):
        self.seen.append(samples)
        return {"spread": float(samples.std())}


def players(shape=FLAT, dropout=0.0):
    """A small generator and discriminator, the same ones every time."""
    size = math.prod(shape)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        generator = nn.Sequential(nn.Linear(LATENT, 3), nn.Tanh(), nn.Linear(3, size), nn.Unflatten(1, shape))
        layers = [nn.Flatten(), nn.Linear(size, 4), nn.Tanh(), *([nn.Dropout(dropout)] if dropout else [])]
        return generator, nn.Sequential(*layers, nn.Linear(4, 1))


def game(shape=FLAT, dropout=0.0, **options):
    """An adversarial task, by default with several samples of each network and a cheap judge."""
    options = {"generators": 3, "discriminators": 2, "judges": [Witness()]} | options
    return cs.Adversarial(*players(shape, dropout), latent=LATENT, **options)


def points(sizes=(9, 5, 2), seed=0):
    """Clients that hold clouds of points in different places."""
    made = torch.Generator().manual_seed(seed)
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    x = torch.stack([2.0 * owner - 1, 1.0 - owner], 1) + 0.3 * torch.randn(len(owner), 2, generator=made)
    return cs.Federation.from_owner(cs.Dataset(x, owner, name="points"), owner)


def learn(algorithm, task, federation, rounds=2, **options):
    return cs.fit(algorithm, task, federation, **{"rounds": rounds, "engine": ENGINE, "progress": False} | options)


def weights(task, seed=5):
    """θ somewhere else than at the start, so that no two samples are alike in anything."""
    noise = torch.randn(task.size, generator=torch.Generator().manual_seed(seed)).double()
    return task.initial() + 0.5 * noise


def group(federation, round=1):
    """All clients, most examples first."""
    ids = federation.sizes.argsort(descending=True, stable=True)
    return cs.data.Cohort(federation, ids, round=round, round_size=len(ids), seed=0, dtype=torch.float64)


def batch_of(count=5, pad=2, shape=FLAT, key=3):
    """A batch with rows of padding far away, that must not count."""
    made = torch.Generator().manual_seed(key)
    real = torch.arange(count + pad) < count
    x = torch.randn(count + pad, *shape, generator=made).double()
    x[~real] = 50.0
    return cs.data.Batch(x, torch.zeros(len(x)), real.double(), torch.tensor(key))


def rows_of(*trees):
    return [tree_map(lambda t: t[None], tree) for tree in trees]


@dataclass
class ByHand:
    """The networks as plain modules, with the parameters in θ's order: the generators' own first layers, their shared
    ones, the discriminators' shared layers and own last ones, then heads of the past."""

    theta: torch.Tensor
    generators: int = 3
    discriminators: int = 2
    shape: tuple = FLAT

    def __post_init__(self):
        size, theta = math.prod(self.shape), self.theta
        self.first = nn.ModuleList(nn.Linear(LATENT, 3) for _ in range(self.generators))
        self.rest = nn.Sequential(nn.Tanh(), nn.Linear(3, size), nn.Unflatten(1, self.shape))
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(size, 4), nn.Tanh())
        self.last, self.past = (nn.ModuleList(nn.Linear(4, 1) for _ in range(self.discriminators)) for _ in range(2))
        self.makers = [*self.first.parameters(), *self.rest.parameters()]
        self.judges = [*self.trunk.parameters(), *self.last.parameters()]
        whole = [*self.makers, *self.judges]
        played = sum(p.numel() for p in whole)
        if len(theta) > played:
            whole += self.past.parameters()
        assert len(theta) == sum(p.numel() for p in whole)
        for p in whole:
            p.data, theta = theta[: p.numel()].clone().view(p.shape), theta[p.numel() :]

    def make(self, z):
        """Example i of generator i mod count, one by one."""
        return torch.cat([self.rest(self.first[i % self.generators](one[None])) for i, one in enumerate(z)])

    def score(self, x, heads=None):
        return torch.stack([head(self.trunk(x))[:, 0] for head in heads or self.last]).mean(0)


LOSSES = {  # of a real example's score, of a fake one's, and the generator's
    cs.tasks.Wasserstein: (lambda d: -d, lambda d: d, lambda d: -d),
    cs.tasks.LeastSquares: (lambda d: (d - 1) ** 2, lambda d: d**2, lambda d: (d - 1) ** 2),
}


def both_gradients(task, hand, batch, past=False):
    """(L_D, [∂L_D/∂θ_D, ∂L_G/∂θ_G] as one vector in θ's order), each by its own backward pass."""
    real, fake, generator = LOSSES[type(task.objective)]
    count = int(batch.w.sum())
    x, z = batch.x[:count], task.latents(batch.key, count)
    with torch.no_grad():
        made = hand.make(z)
    loss = (real(hand.score(x)) + fake(hand.score(made))).mean()
    if task.objective.penalty:
        share = keys.uniform(keys.fold(batch.key, BETWEEN), count).view(-1, *[1] * (x.dim() - 1))
        lengths = []
        for one in x + share * (made - x):
            at = one[None].clone().requires_grad_()
            (g,) = torch.autograd.grad(hand.score(at).sum(), at, create_graph=True)
            lengths.append(g.norm())
        loss = loss + task.objective.penalty * (torch.stack(lengths) - 1).square().mean()
    theirs = torch.autograd.grad(loss, hand.judges)
    made = hand.make(z)
    against = generator(hand.score(made)).mean()
    if past:
        against = against + generator(hand.score(made, hand.past)).mean()
    mine = torch.autograd.grad(against, hand.makers, materialize_grads=True)  # of generators that made nothing, 0
    return loss.detach(), torch.cat([part.flatten() for part in (*mine, *theirs)])


def by_parameter(task, theta):
    """θ's parts by their names in the modules."""
    named = {}
    for part in (MAIN, TRUNK, HEADS):
        for name, p in task.part(part).named_parameters():
            named[f"{part} {name}"] = theta[task.slice(part, name)].view(p.shape)
    return named
