"""What FedNP and the other methods cost: seconds a round beside FedAvg's.

    python benchmarks/fednp.py                     # both networks, plain and compiled; a quarter of an hour
    python benchmarks/fednp.py LeNet-5 --repeats 5

Fashion-MNIST (noise of the same shape where it is not at hand), ten clients of 600 images, five epochs in batches of
20, plain SGD. How methods take turns is said in contest.py.
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
METHODS = ("FedAvg", "FedNP", "FedNP, f = 0", "MOON", "SCAFFOLD", "FedDC", "FedLA")
CLIENTS, EXAMPLES = 10, 600
PLAN = Plan(chunk=CLIENTS, workers=1, threads=2, device="cpu")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(NETWORKS)}; all if left out")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each")
    options = parser.parse_args()
    federation, methods = (
        cs.partition.iid(images("fashion-mnist", CLIENTS * EXAMPLES), CLIENTS),
        everyone(cs.SGD(lr=0.05, epochs=5, batch=20)),
    )
    for name in options.networks or NETWORKS:
        torch.manual_seed(0)
        task = cs.Classification(NETWORKS[name]())
        for compile in (False, True):
            print(f"{name}: {CLIENTS} clients x {EXAMPLES}; {machine()}")
            plan = replace(PLAN, compile=compile)
            contest({m: Contestant(methods[m], task, federation, CLIENTS, plan=plan) for m in METHODS}, options.repeats)


if __name__ == "__main__":
    main()
