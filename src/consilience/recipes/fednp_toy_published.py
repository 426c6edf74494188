"""FedNP's toy as the published code runs it: one optimiser for all clients and rounds, gradients that add up.

These are not federated methods, as clients share the memory of one RMSprop, so they are written out here. All seeds are
computed at once: tensors have the seeds on their first axis.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from consilience.recipes.base import Options, Recipe, finished, rows_of
from consilience.recipes.parabola import NOISE, PIECES, ROUNDS, powers
from consilience.studies.comparison import Comparison
from consilience.studies.scores import paired_test

NAME, TITLE, MSE = "fednp-toy-published", "FedNP's toy as its published code runs it", "mse"
FIT, REPAIRED = "Pooled fit", "FedNP, repaired"
PAPER = {"FedAvg": 116.48, "FedProx": 117.11, "SCAFFOLD": 100.48, REPAIRED: 72.42}
CONSTANT, BATCH, RATE, DECAY, ALPHA, EPS = 4.0, 10, 1e-2, 0.9, 0.99, 1e-8
LONGEST = 1e3  # of a gradient, in the part of the code that has FedAvg, FedProx and SCAFFOLD
LEAST = 1e-5
TEXT = (
    "y = −x² + 2x + 4 with noise of deviation 5, x in equal steps in [−7, −5] (30 points), [−2, 2] (20) and [4, 8] "
    "(50). A cubic with coefficients drawn from ±0.05, ten rounds of four local epochs in batches of 10, RMSprop with "
    "a rate of 0.01 that falls by a factor of 0.9 a round. As in the published code, all clients and rounds share one "
    "memory of RMSprop, and gradients are never zeroed: each step follows the sum of all gradients so far, cut to a "
    "length of 1,000. The error is that on all clients' points. “zeroed” gradients and an “own optimiser” for each "
    "client and round mend one of these. “repaired” is the code's FedNP, which stops at its first step, because the "
    "second layer of its network expects two inputs and gets four: here it expects four, or, “by two units”, gets two. "
    "The code does not cut FedNP's gradients; “cut” and “not cut” change this. With f = 0 no data reach z."
)


@dataclass(frozen=True)
class Variant:
    """A method of the published code, whose FedNP does not cut gradients; `hidden` is the size of the first layer.
    Gradients `zeroed` before each step, an optimiser of a client's `own`, new in every round and without gradients, and
    a `silent` f, which is 0, are not its."""

    epochs: int = 4
    mu: float = 0.0
    scaffold: bool = False
    fednp: bool = False
    hidden: int = 4
    cut: bool = True
    zeroed: bool = False
    own: bool = False
    silent: bool = False


VARIANTS = {
    "FedAvg": Variant(),
    "FedProx": Variant(mu=0.01),
    "SCAFFOLD": Variant(scaffold=True),
    REPAIRED: Variant(fednp=True, cut=False),
    "FedNP, repaired by two units": Variant(fednp=True, cut=False, hidden=2),
    "FedNP, repaired, f = 0": Variant(fednp=True, cut=False, silent=True),
    "FedNP, repaired, cut": Variant(fednp=True),
    "FedAvg, not cut": Variant(cut=False),
    "FedAvg, one epoch": Variant(epochs=1),
    "FedAvg, zeroed": Variant(zeroed=True),
    "FedAvg, own optimiser": Variant(own=True),
    "FedAvg, zeroed, own optimiser": Variant(zeroed=True, own=True),
}


@dataclass(frozen=True)
class Toy:
    """Points x [N] and y [S, N] of the clients one after another, and initial coefficients [S, 4], for S seeds."""

    x: Tensor
    y: Tensor
    start: Tensor
    generators: list[np.random.Generator] = field(default_factory=list)

    @classmethod
    def of(cls, seeds: int) -> "Toy":
        generators = [np.random.default_rng([seed, 4]) for seed in range(seeds)]
        x = torch.cat([torch.linspace(low, high, count, dtype=torch.float64) for low, high, count in PIECES])
        noise = torch.stack([torch.from_numpy(rng.normal(size=len(x))) for rng in generators])
        start = torch.stack([torch.from_numpy(rng.uniform(-0.05, 0.05, 4)) for rng in generators])
        return cls(x, -(x**2) + 2 * x + CONSTANT + NOISE * noise, start, generators)

    def shuffled(self, first: int, count: int) -> Tensor:
        """A client's points in a random order for each seed, [S, count]."""
        return torch.stack([torch.from_numpy(first + rng.permutation(count)) for rng in self.generators])

    def mse(self, w: Tensor) -> Tensor:
        """The error of coefficients [S, 4] on all points, [S]."""
        return (w @ powers(self.x.unsqueeze(1)).T - self.y).square().mean(1)


Weights = dict[str, Tensor]  # of the cubic and of FedNP's networks, [S, ...]


class Shared:
    """One RMSprop, and the gradients that it has seen."""

    def __init__(self, weights: Weights, variant: Variant) -> None:
        self.variant = variant
        self.grad, self.second = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))

    def step(self, weights: Weights, grads: Weights, rate: float) -> None:
        """Add the gradients, cut them, and step along them, in place."""
        for name, w in weights.items():
            grad = grads[name] if self.variant.zeroed else self.grad[name] + grads[name]
            if self.variant.cut:
                grad = grad * (LONGEST / (grad.norm(dim=1, keepdim=True) + 1e-6)).clamp_max(1)
            self.grad[name] = grad
            second = self.second[name].mul_(ALPHA).addcmul_(grad, grad, value=1 - ALPHA)
            w.sub_((rate if name == "cubic" else 0.15 * rate) * grad / (second.sqrt() + EPS))


def learn(toy: Toy, variant: Variant) -> Tensor:
    """The server's coefficients after the last round, [S, 4]."""
    toy = replace(toy, generators=[np.random.default_rng([seed, 5]) for seed in range(len(toy.generators))])
    server, seeds = toy.start.clone(), len(toy.start)
    weights = {"cubic": server.clone(), **(networks(seeds, variant.hidden) if variant.fednp else {})}
    shared, sites = Shared(weights, variant), [(torch.zeros(seeds, 1).double(), torch.ones(seeds, 1).double())] * 3
    mean, variates = torch.zeros_like(server), [torch.zeros_like(server) for _ in PIECES]
    sizes = [count for *_, count in PIECES]
    for round in range(ROUNDS):
        sent, correction, tilted = torch.zeros_like(server), torch.zeros_like(server), []
        for client, size in enumerate(sizes):
            w, rate = weights["cubic"].copy_(server), RATE * DECAY**round
            if variant.own:
                shared = Shared(weights, variant)
            for _ in range(variant.epochs):
                order = toy.shuffled(sum(sizes[:client]), size)
                for batch in torch.split(order, BATCH, 1):
                    x, y = powers(toy.x[batch].unsqueeze(2)), toy.y.gather(1, batch)
                    shared.step(weights, gradients(weights, x, y, server, sites[client], variant), rate)
                    if variant.scaffold:
                        w.sub_(1e-2 * (mean - variates[client]))
            if variant.scaffold:
                new = variates[client] - mean + (server - w) / (variant.epochs * (size // BATCH) * 0.1)
                correction += new - variates[client]
                variates[client] = new
            if variant.fednp:
                x, y = powers(toy.x[order].unsqueeze(2)), toy.y.gather(1, order)
                tilted.append(moments(*sites[client], signal(weights, x, y, variant)))
            sent += size / sum(sizes) * w
        server, mean = sent, mean + correction / 300
        sites = cavities(tilted) if variant.fednp else sites
    return server


def gradients(
    weights: Weights, x: Tensor, y: Tensor, server: Tensor, cavity: tuple[Tensor, Tensor], variant: Variant
) -> Weights:
    """Of a batch's loss, for every seed."""
    with torch.enable_grad():
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        w = leaves["cubic"]
        loss = ((x @ w.unsqueeze(2)).squeeze(2) - y).square().mean(1) + variant.mu / 2 * (w - server).square().sum(1)
        if variant.fednp:
            m, s = moments(*cavity, signal(leaves, x, y, variant))
            mu, v = predicted(leaves, m, s)
            kl = -0.5 * (1 + s.log() - m.square() - s).mean(1)
            loss = loss + 10 * (((w - mu).square() / (2 * v)).mean(1) + kl + 0.5 * v.mean(1))
        found = torch.autograd.grad(loss.sum(), list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def networks(seeds: int, hidden: int) -> Weights:
    """The weights of f, and those of the network that predicts the cubic, drawn from ±0.05."""
    shapes = {"f1": 2, "f2": 2, "first": hidden, "first bias": hidden, "second": 4 * hidden, "second bias": 4}
    drawn = {}
    for number, (name, size) in enumerate(shapes.items()):
        rows = [np.random.default_rng([seed, 6, number]).uniform(-0.05, 0.05, size) for seed in range(seeds)]
        drawn[name] = torch.from_numpy(np.stack(rows))
    return drawn


def signal(weights: Weights, x: Tensor, y: Tensor, variant: Variant) -> Tensor:
    """f, the mean over a batch, [S, 1]."""
    if variant.silent:
        return torch.zeros_like(y[:, :1])
    squares = ((x @ weights["cubic"].unsqueeze(2)).squeeze(2) - y).square()
    (a, b), (c, d) = (weights[name].unsqueeze(2).unbind(1) for name in ("f1", "f2"))
    return ((a * squares + b).relu() * c + d).tanh().mean(1, keepdim=True)


def moments(m: Tensor, s: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """The moments of z after a batch by the code's formulas, which are those of the paper."""

    def power(a: float, b: float) -> Tensor:
        return (a * (x + b) / ((1 + math.pi / 8 * a * a * y).sqrt() + LEAST)).sigmoid()

    x, y = f * m, f * f * s
    root, cube = math.sqrt(2), 2**1.5
    e1, e2, e3 = power(1, 0), power(4 - 2 * root, math.log(root + 1)), power(6 * (1 - 1 / cube), math.log(cube - 1))
    p1, p2 = (x + y) * e1 - y * e2, (x + 2 * y) * e2 - 2 * y * e3
    mean = p1 / (e1 * f + LEAST)
    square = (y * e1 + (x + y) * p1 - y * p2) / (e1 * f * f + LEAST)
    return mean, (square - mean.square()).relu() + LEAST


def predicted(weights: Weights, m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The Gaussian over the coefficients from z, [S, 4] each."""
    first, second = weights["first"], weights["second"].view(len(m), -1, 4)
    mean, var = m * first + weights["first bias"], s * first.square()
    a, b = 4 - 2 * math.sqrt(2), -math.log(math.sqrt(2) + 1)
    out = (mean / (1 + math.pi / 8 * var).sqrt()).sigmoid()
    spread = (a * (mean + b) / (1 + math.pi / 8 * a * a * var).sqrt()).sigmoid() - out.square()
    means = (out.unsqueeze(1) @ second).squeeze(1) + weights["second bias"]
    return means, (spread.unsqueeze(1) @ second.square()).squeeze(1)


def cavities(tilted: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """For every client the product of what the others sent."""
    precisions = [1 / (s + LEAST) for _, s in tilted]
    found = []
    for own in range(len(tilted)):
        others = [number for number in range(len(tilted)) if number != own]
        s = 1 / (sum((precisions[o] for o in others), torch.zeros(())) + LEAST)
        found.append((s * sum((tilted[o][0] * precisions[o] for o in others), torch.zeros(())), s))
    return found


def fit(toy: Toy) -> Tensor:
    """The coefficients with the least error, [S, 4]."""
    solved: Tensor = torch.linalg.lstsq(powers(toy.x.unsqueeze(1)), toy.y.T).solution
    return solved.T


def run(options: Options) -> Comparison:
    """Every variant for all seeds."""
    start, toy = time.perf_counter(), Toy.of(options.seeds)
    scores = {(FIT, MSE): toy.mse(fit(toy)).tolist()}
    for name, variant in VARIANTS.items():
        options.tell(name, 0)
        w = learn(toy, replace(variant, epochs=1) if options.quick else variant)
        scores[name, MSE] = toy.mse(w).tolist()
        scores[name, "x² coefficient"] = w[:, 2].tolist()
    paper: Mapping[tuple[str, str], float] = {(name, MSE): value for name, value in PAPER.items()}
    differences = [
        {"method": REPAIRED, "versus": name, "metric": MSE}
        | paired_test(list(zip(scores[REPAIRED, MSE], scores[name, MSE], strict=True)))
        for name in VARIANTS
        if name != REPAIRED
    ]
    return finished(NAME, TITLE, TEXT, options, rows_of(scores, paper), [], start, paired=differences)


RECIPE = Recipe(NAME, TITLE, run, seeds=20)
