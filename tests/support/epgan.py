"""EP-GAN on a small game: its start, Gaussian factors, and rounds of clients with Gaussian likelihoods."""

import torch

import consilience as cs
from consilience.algorithms.gan.ep_players import Update
from consilience.core.gaussian import Gaussian
from consilience.core.records import leaves, rows
from support.games import EXACT, game

SGD = cs.SGD(lr=0.02, batch_size=4)
HIDDEN, FEATURES, SCALE = 3, 4, 0.2
WEIGHTS = 34  # of one generator and one discriminator
P0 = torch.full((WEIGHTS,), SCALE**-2, dtype=torch.float64)


def epgan(train=SGD, **options):
    """EP-GAN of the paper, both players at once."""
    return cs.algorithms.SignalEPGAN(train, **{"hidden": HIDDEN, "scale": SCALE, "critic_steps": None} | options)


def adapted(method, **options):
    return method.adapt(game(**options), 0).prepare(dtype=torch.float64)


def started(method, task, clients=3, theta=None):
    """(server, clients' states) before the first round, from weights θ."""
    info = cs.data.Info(task.initial() if theta is None else theta, *(torch.tensor(v) for v in (0, clients, 16)))
    return method.start(task, info), method.client(task, info, torch.ones(clients, 1).double())


def factors(*shape, seed=0, precision=5.0):
    """Informative Gaussian factors of every weight."""
    made = torch.Generator().manual_seed(seed)
    lam = precision * torch.rand(*shape, generator=made).double()
    return Gaussian(lam * torch.randn(*shape, generator=made).double(), lam)


def assert_same(a, b, **tolerance):
    for (name, x), (_, y) in zip(leaves(a), leaves(b), strict=True):
        torch.testing.assert_close(x, y.expand_as(x), **tolerance or EXACT, msg=lambda m, name=name: f"{name}: {m}")


def fused(method, task, server, sites):
    """The server after a round in which clients send these factors and unchanged networks."""
    unchanged = cs.Weighted(cs.Point(torch.zeros(task.size).double()), torch.ones(1).double())
    eta, lam = (torch.stack([getattr(one, name) for one in sites]) for name in ("eta", "lam"))
    return method.fuse(server, Update(unchanged, Gaussian(eta, lam).product()))


def conjugate_round(method, task, server, states, likelihoods, who):
    """The server after a round in which the tilted of client k is its cavity times its Gaussian likelihood."""
    sent = []
    for k in who:
        state = rows(states, k)
        sent.append((rows(likelihoods, k) / state) ** (method.damping or 1 / len(who)))
        after = method.follow(state, Update(None, sent[-1]))
        states.eta[k], states.lam[k] = after.eta, after.lam
    return fused(method, task, server, sent)
