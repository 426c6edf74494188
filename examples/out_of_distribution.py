"""Does the model know what it does not know? Digits that it has learned, against rotated ones, noise and blank pages.

    python examples/out_of_distribution.py [--quick]

AUROC: the chance that an outside example has a higher score than an inside one; 0.5 is guessing, 1 is perfect.
"""

import argparse
from dataclasses import replace

import torch

import consilience as cs
from consilience.models import mlp

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true", help="a few rounds")
rounds = 4 if parser.parse_args().quick else 40

data = cs.load("digits")
federation = cs.partition.dirichlet(data.train, clients=20, alpha=0.1, seed=0)
torch.manual_seed(0)
task = cs.Classification(mlp((1, 8, 8), 10, hidden=[32]))
train = cs.SGD(lr=0.2, epochs=5, weight_decay=1e-4)
posterior = cs.FedEP(cs.inference.Identity(train, scale=0.5))
method = cs.Switch(cs.FedAvg(train), posterior, at=rounds // 2)
engine = cs.Simulator(device="cpu", chunk=10, workers=1)
run = cs.fit(method, task, federation, test=data.test, rounds=rounds, cohort=10, engine=engine, progress=False)
print("accuracy on digits:", round(run.evaluate(data.test).marginal["accuracy"], 3))

inside = data.test
outside = {
    "turned by 90°": replace(inside, x=inside.x.rot90(1, (2, 3)).contiguous()),
    "upside down": replace(inside, x=inside.x.rot90(2, (2, 3)).contiguous()),
    "pixels shuffled": replace(inside, x=inside.x.flatten(1)[:, torch.randperm(64)].view_as(inside.x)),
    "noise": replace(inside, x=torch.randint(0, 17, inside.x.shape, dtype=torch.uint8)),
    "blank": replace(inside, x=torch.zeros_like(inside.x)),
}
print(f"{'':16}{'one network':>12}{'posterior':>12}{'mutual inf.':>12}")
for name, examples in outside.items():
    found = run.detect(inside, examples, samples=30)
    # Entropy of the mean network; entropy averaged over draws; how much the draws disagree.
    print(f"{name:16}{found.point:12.3f}{found.marginal:12.3f}{found.mutual_information:12.3f}")
