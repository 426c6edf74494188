"""FedNP's toy as its published code runs it, against the same program by torch's modules and optimiser."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from consilience.recipes import fednp_toy_published as toy
from consilience.recipes.base import Options
from consilience.recipes.parabola import PIECES

ROOT, CUBE = math.sqrt(2), 2**1.5


@pytest.fixture(autouse=True)
def two_rounds(monkeypatch):
    monkeypatch.setattr(toy, "ROUNDS", 2)


class Networks(nn.Module):
    """FedNP's f and decoder for one seed, with the recipe's weights."""

    def __init__(self, seed, hidden):
        super().__init__()
        drawn = {name: w[seed] for name, w in toy.networks(seed + 1, hidden).items()}
        self.inner, self.outer = nn.Linear(1, 1).double(), nn.Linear(1, 1).double()
        for layer, name in ((self.inner, "f1"), (self.outer, "f2")):
            layer.weight.data.fill_(drawn[name][0])
            layer.bias.data.fill_(drawn[name][1])
        self.w1, self.b1 = nn.Parameter(drawn["first"].view(1, -1)), nn.Parameter(drawn["first bias"])
        self.w2, self.b2 = nn.Parameter(drawn["second"].view(-1, 4)), nn.Parameter(drawn["second bias"])

    def decoded(self, m, s):
        o_m, o_s = m @ self.w1 + self.b1, s @ self.w1**2
        a_m = torch.sigmoid(o_m / (1 + math.pi / 8 * o_s) ** 0.5)
        a = 4 - 2 * ROOT
        a_s = torch.sigmoid(a * (o_m - math.log(ROOT + 1)) / (1 + math.pi / 8 * a**2 * o_s) ** 0.5) - a_m**2
        return a_m @ self.w2 + self.b2, a_s @ self.w2**2


def tilted(m, s, f):
    def expected(x, y, a, b):
        return torch.sigmoid(a * (x + b) / (torch.sqrt(1 + math.pi / 8 * a * a * y) + 1e-5))

    x, y = f * m, f * f * s
    e = [expected(x, y, *ab) for ab in (
        (1, 0), (4 - 2 * ROOT, math.log(ROOT + 1)), (6 * (1 - 1 / CUBE), math.log(CUBE - 1))
    )]  # fmt: skip
    first = (x + y) * e[0] - y * e[1]
    second = (x + 2 * y) * e[1] - 2 * y * e[2]
    s1 = first / (e[0] * f + 1e-5)
    s2 = (y * e[0] + (x + y) * first - y * second) / (e[0] * f * f + 1e-5)
    return s1, torch.relu(s2 - s1 * s1) + 1e-5


def one_by_one(seed, variant):
    """The coefficients of one seed by modules, autograd and torch's RMSprop; as the library has x⁰ first."""
    made = toy.Toy.of(seed + 1)
    x, y = torch.stack([made.x**p for p in range(4)], 1), made.y[seed]
    cubic = nn.Linear(4, 1, bias=False).double()
    cubic.weight.data.copy_(made.start[seed])
    networks = Networks(seed, variant.hidden)
    optimizer = torch.optim.RMSprop(
        [{"params": cubic.parameters(), "lr": 1e-2}, {"params": networks.parameters(), "lr": 0.0015}]
    )
    schedule, rng = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), np.random.default_rng([seed, 5])
    sizes = [count for *_, count in PIECES]
    server, cavity = cubic.weight.data.clone(), [(torch.zeros(1).double(), torch.ones(1).double())] * 3
    c, variates = torch.zeros(1, 4).double(), [torch.zeros(1, 4).double() for _ in sizes]

    def signal(rows):
        squares = (cubic(x[rows]) - y[rows].unsqueeze(1)) ** 2
        return torch.tanh(networks.outer(torch.relu(networks.inner(squares)))).mean(0)

    for _ in range(2):
        sent, moved, found = 0, 0, []
        for client, size in enumerate(sizes):
            cubic.weight.data.copy_(server)
            if variant.own:
                optimizer.state.clear()
                optimizer.zero_grad()
            for _ in range(variant.epochs):
                order = torch.from_numpy(sum(sizes[:client]) + rng.permutation(size))
                for rows in order.split(10):
                    if variant.zeroed:
                        optimizer.zero_grad()
                    loss = nn.functional.mse_loss(cubic(x[rows])[:, 0], y[rows])
                    loss = loss + variant.mu / 2 * (cubic.weight - server).square().sum()
                    if variant.fednp:
                        m, s = tilted(*cavity[client], signal(rows))
                        mu, v = networks.decoded(m, s)
                        kl = torch.mean(-0.5 * (1 + torch.log(s) - m**2 - s))
                        loss = loss + 10 * (((cubic.weight - mu) ** 2 / (2 * v)).mean() + kl + 0.5 * v.mean())
                    loss.backward()
                    if variant.cut:
                        nn.utils.clip_grad_norm_(cubic.parameters(), 1e3)
                    optimizer.step()
                    if variant.scaffold:
                        cubic.weight.data -= 1e-2 * (c - variates[client])
            if variant.scaffold:
                steps = variant.epochs * (size // 10)
                new = variates[client] - c + (server - cubic.weight.data) / (steps * 0.1)
                moved, variates[client] = moved + new - variates[client], new
            if variant.fednp:
                with torch.no_grad():
                    found.append(tilted(*cavity[client], signal(order)))
            sent = sent + size / 100 * cubic.weight.data
        server, c = sent, c + (moved / 300 if variant.scaffold else 0)
        schedule.step()
        if variant.fednp:
            precisions = [1 / (s + 1e-5) for _, s in found]
            cavity = []
            for own in range(3):
                rest = [k for k in range(3) if k != own]
                s = 1 / (sum(precisions[k] for k in rest) + 1e-5)
                cavity.append((s * sum(found[k][0] * precisions[k] for k in rest), s))
    return server[0]


SAME = [name for name, variant in toy.VARIANTS.items() if not variant.silent and not (variant.fednp and variant.cut)]


@pytest.mark.parametrize("name", SAME)
def test_all_seeds_at_once_are_torchs_modules_one_by_one(name):
    variant = toy.VARIANTS[name]
    together = toy.learn(toy.Toy.of(2), variant)
    for seed in range(2):
        torch.testing.assert_close(together[seed], one_by_one(seed, variant), rtol=1e-6, atol=1e-8)


def test_a_silent_f_tells_nothing_of_the_data():
    silent = toy.VARIANTS["FedNP, repaired, f = 0"]
    weights = {"cubic": torch.randn(2, 4).double(), **toy.networks(2, 4)}
    x, y = torch.randn(2, 10, 4).double(), torch.randn(2, 10).double()
    assert not toy.signal(weights, x, y, silent).any()
    spoken = toy.signal(weights, x, y, replace(silent, silent=False))
    assert bool((spoken != 0).all())


def test_the_problem_is_that_of_the_code():
    made = toy.Toy.of(200)
    off = made.y - (-(made.x**2) + 2 * made.x + 4)
    assert off.std() == pytest.approx(5, rel=0.02)
    assert abs(off.mean()) < 0.15
    assert made.start.abs().max() <= 0.05
    assert len(made.x) == 100
    ends = [(float(piece[0]), float(piece[-1])) for piece in made.x.split([30, 20, 50])]
    assert ends == [(-7, -5), (-2, 2), (4, 8)]
    assert torch.allclose(made.x[:30].diff(), made.x[1] - made.x[0])


def test_the_fit_is_least_squares_and_no_variant_beats_it(tmp_path):
    made = toy.Toy.of(2)
    wanted = np.polyfit(made.x.numpy(), made.y[1].numpy(), 3)[::-1]
    np.testing.assert_allclose(toy.fit(made)[1].numpy(), wanted, rtol=1e-6, atol=1e-8)
    result = toy.run(Options(quick=True, seeds=2, out=tmp_path))
    means = {row.method: row.mean for row in result.rows if row.metric == "mse"}
    assert set(means) == {toy.FIT, *toy.VARIANTS}
    assert all(math.isfinite(mean) and mean > means[toy.FIT] for name, mean in means.items() if name != toy.FIT)
    assert {row.method: row.paper for row in result.rows if row.paper is not None} == toy.PAPER
    assert {entry["versus"] for entry in result.paired} == set(toy.VARIANTS) - {toy.REPAIRED}
