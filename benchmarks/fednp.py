"""What FedNP and the other methods cost: seconds a round beside FedAvg's.

    python benchmarks/fednp.py                     # both networks, plain and compiled; a quarter of an hour
    python benchmarks/fednp.py LeNet-5 --repeats 5

Fashion-MNIST (noise of the same shape where it is not at hand), ten clients of 600 images, batches of 20, plain SGD.
How methods take turns is said in contest.py. Pooled is not among them: it sees another federation.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

import consilience as cs
from consilience.engines.plan import Plan
from consilience.models import lenet5, mlp
from consilience.recipes.fednp import everyone
from contest import Contestant, contest, machine
from simulator import images

NETWORKS = {"MLP": lambda: mlp((1, 28, 28), 10, (100,)), "LeNet-5": lambda: lenet5((1, 28, 28), 10)}
CLIENTS, EXAMPLES = 10, 600
PLAN = Plan(chunk=CLIENTS, workers=1, threads=2, device="cpu")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(NETWORKS)}; all if left out")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each")
    parser.add_argument("--epochs", type=int, default=5, help="local epochs")
    parser.add_argument("--methods", nargs="*", help="beside FedAvg; all if left out")
    options = parser.parse_args()
    federation = cs.partition.iid(images("fashion-mnist", CLIENTS * EXAMPLES), CLIENTS)
    methods = everyone(cs.SGD(lr=0.05, epochs=options.epochs, batch_size=20))
    names = ["FedAvg", *(options.methods or [m for m in methods if m not in ("FedAvg", "Pooled")])]
    for name in options.networks or NETWORKS:
        torch.manual_seed(0)
        task = cs.Classification(NETWORKS[name]())
        for compile in (False, True):
            print(f"{name}: {CLIENTS} clients x {EXAMPLES}; {machine()}")
            plan = replace(PLAN, compile=compile)
            contest({m: Contestant(methods[m], task, federation, CLIENTS, plan=plan) for m in names}, options.repeats)


if __name__ == "__main__":
    main()
