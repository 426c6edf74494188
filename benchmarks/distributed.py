"""Seconds a round: the simulator on one core against two ranks on two, both on the CPU, turn by turn.

    python benchmarks/distributed.py               # about a minute on two cores

An MLP of 784-200-10, 10 clients of 600 examples, batches of 20. Medians over rounds, the first left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

import torch

import consilience as cs
from consilience.models import mlp


def federation(clients=10, each=600):
    made = torch.Generator().manual_seed(0)
    x = torch.randn(clients * each, 1, 28, 28, generator=made)
    y = torch.randint(10, (clients * each,), generator=made)
    return cs.Federation.from_owner(cs.Dataset(x, y, name="noise"), torch.arange(clients).repeat_interleave(each))


def seconds(engine, rounds):
    torch.manual_seed(0)
    task = cs.Classification(mlp(inputs=(1, 28, 28), outputs=10, hidden=(200,)))
    algorithm = cs.FedAvg(cs.SGD(lr=0.05, epochs=1, batch=20))
    run = cs.fit(algorithm, task, federation(), rounds=rounds, engine=engine, progress=False)
    return {"seconds": statistics.median(line["seconds"] for line in run.history[1:]), "plan": str(run.plan)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help="be one of the ranks")
    given = parser.parse_args()
    if given.rank:
        engine = cs.Distributed(device="cpu", threads=1)
        found = seconds(engine, given.rounds)
        if engine.leads:
            print(json.dumps(found))
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, __file__, "--rank", "--rounds", str(given.rounds)]
    alone, together = [], []
    for _ in range(given.repeats):
        alone.append(seconds(cs.Simulator(device="cpu", workers=1, threads=1), given.rounds))
        reply = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        together.append(json.loads(reply.splitlines()[-1]))
    for name, found in (("simulator, one core", alone), ("two ranks", together)):
        times = ", ".join(f"{1e3 * one['seconds']:.0f}" for one in found)
        print(f"{name}: {times} ms a round; {found[-1]['plan']}")
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(alone, together, strict=True)]
    print(f"ratio: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
