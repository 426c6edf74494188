"""Which examples are worth a label? Those that draws of the posterior disagree about, against a random choice.

    python examples/active_learning.py [--quick]

Five clients hold digits, nearly all without labels. They learn a posterior together by FedEP; then every client has a
few more of its examples labelled, those of highest mutual information; and again. Examples and their scores stay where
they are. In a pool where all digits are equally common a random choice is hard to beat, and the most doubtful examples
are much alike. Where most of the pool is zeros and ones, choosing finds the rest.
"""

import argparse

import torch
from torch import nn

import consilience as cs

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true", help="one seed, one request")
quick = parser.parse_args().quick
CLIENTS, FIRST, EACH, REQUESTS, SEEDS = 5, 10, 8, 1 if quick else 3, 1 if quick else 5
METHOD = cs.FedEP(cs.inference.Newton(steps=2), damping=1.0, prior=1.0)  # a full Gaussian over all 170 weights
ENGINE = cs.Simulator(device="cpu", chunk=CLIENTS, workers=1)
digits = cs.load("digits")
common = (digits.train.y < 2) | (torch.arange(len(digits.train)) % 8 == 0)
POOLS = {"all digits alike": digits.train, "mostly 0 and 1": digits.train[common.nonzero().flatten()]}


def learn(pool: cs.Dataset, known: torch.Tensor, owner: torch.Tensor) -> cs.runs.Run:
    rows = known.nonzero().flatten()
    federation = cs.Federation.from_owner(pool[rows], owner[rows], clients=CLIENTS)
    module = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 10))
    return cs.fit(METHOD, cs.Classification(module), federation, rounds=2, engine=ENGINE, progress=False)


def label(known: torch.Tensor, owner: torch.Tensor, score: torch.Tensor, each: int) -> None:
    for client in range(CLIENTS):
        unknown = (owner == client) & ~known
        known[score.masked_fill(~unknown, -1).topk(each).indices] = True


def accuracies(pool: cs.Dataset, by_doubt: bool, seed: int) -> list[float]:  # before and after every request
    torch.manual_seed(seed)
    owner, known = torch.randint(CLIENTS, (len(pool),)), torch.zeros(len(pool), dtype=torch.bool)
    label(known, owner, torch.rand(len(pool)), FIRST)
    run, found = learn(pool, known, owner), []
    for _ in range(REQUESTS):
        found.append(run.evaluate(digits.test).point["accuracy"])
        score = run.uncertainty(pool, samples=50).mutual_information if by_doubt else torch.rand(len(pool))
        label(known, owner, score, EACH)
        run = learn(pool, known, owner)
    return [*found, run.evaluate(digits.test).point["accuracy"]]


print(f"{'labels':36}", *(f"{CLIENTS * (FIRST + EACH * request):6}" for request in range(REQUESTS + 1)))
for name, pool in POOLS.items():
    for how in ("random", "mutual information"):
        mean = torch.tensor([accuracies(pool, how != "random", seed) for seed in range(SEEDS)]).mean(0)
        print(f"{f'{name}, {how}':36}", *(f"{value:6.3f}" for value in mean))
