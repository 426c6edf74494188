"""Seconds a round: the simulator on one core against ranks on as many, all on the CPU, turn by turn.

    python benchmarks/distributed.py               # two ranks; about a minute on two cores
    python benchmarks/distributed.py --ranks 2 4 8 16 --clients 48

An MLP of 784-200-10, clients of 600 examples, batches of 20. Medians over rounds, the first left out.
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


def federation(clients, each=600):
    made = torch.Generator().manual_seed(0)
    x = torch.randn(clients * each, 1, 28, 28, generator=made)
    y = torch.randint(10, (clients * each,), generator=made)
    return cs.Federation.from_owner(cs.Dataset(x, y, name="noise"), torch.arange(clients).repeat_interleave(each))


def seconds(engine, rounds, clients):
    torch.manual_seed(0)
    task = cs.Classification(mlp(inputs=(1, 28, 28), outputs=10, hidden=(200,)))
    algorithm = cs.FedAvg(cs.SGD(lr=0.05, epochs=1, batch_size=20))
    run = cs.fit(algorithm, task, federation(clients), rounds=rounds, engine=engine, progress=False)
    return {"seconds": statistics.median(line["seconds"] for line in run.history[1:]), "plan": str(run.plan)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rank", action="store_true", help="be one of the ranks")
    given = parser.parse_args()
    if given.rank:
        engine = cs.Distributed(device="cpu", threads=1)
        found = seconds(engine, given.rounds, given.clients)
        if engine.leads:
            print(json.dumps(found))
        return
    times = {ranks: [] for ranks in (1, *given.ranks)}
    for _ in range(given.repeats):
        times[1].append(seconds(cs.Simulator(device="cpu", workers=1, threads=1), given.rounds, given.clients))
        for ranks in given.ranks:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            command = [*launch, __file__, "--rank", "--rounds", str(given.rounds), "--clients", str(given.clients)]
            reply = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            times[ranks].append(json.loads(reply.splitlines()[-1]))
    for ranks, found in times.items():
        each = ", ".join(f"{1e3 * one['seconds']:.0f}" for one in found)
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(times[1], found, strict=True)]
        ratio = f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        name = "simulator, one core" if ranks == 1 else f"{ranks} ranks"
        print(f"{name}: {each} ms a round; {ratio}; {found[-1]['plan']}")


if __name__ == "__main__":
    main()
