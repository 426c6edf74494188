"""A hundred thousand clients: seconds a round, and memory over the rounds.

    python benchmarks/scale.py                     # 100,000 clients of 10 examples, 1,000 a round

Logistic regression (784 → 10) on noise, since only sizes matter. Memory is what the process and its workers hold
after each round, shared pages counted once; it must not grow.
"""

from __future__ import annotations

import argparse
import os
import statistics

import torch

import consilience as cs
from consilience.models import logistic
from simulator import family, proportional


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--examples", type=int, default=10, help="of each client")
    parser.add_argument("--cohort", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    made = torch.Generator().manual_seed(0)
    total = options.clients * options.examples
    x = torch.randint(256, (total, 784), generator=made, dtype=torch.uint8)
    data = cs.Dataset(x, torch.randint(10, (total,), generator=made), scale=torch.tensor(1 / 255), name="noise")
    federation = cs.partition.iid(data, options.clients)
    memory = []

    def watch(run, line):
        memory.append(sum(proportional(pid) for pid in family(os.getpid())))

    torch.manual_seed(0)
    run = cs.fit(
        cs.FedAvg(cs.SGD(lr=0.1, batch_size=10)),
        cs.Classification(logistic((784,), 10)),
        federation,
        rounds=options.rounds,
        cohort=options.cohort,
        callbacks=[watch],
    )
    seconds = [line["seconds"] for line in run.history]
    print(f"plan: {run.plan}")
    for number in sorted({1, 2, 5, 10, options.rounds // 2, options.rounds}):
        print(f"round {number:4d}: {seconds[number - 1]:.3f} s, {memory[number - 1]:.0f} MiB")
    print(
        f"{options.clients:,} clients x {options.examples}, {options.cohort:,} a round: median "
        f"{statistics.median(seconds):.3f} s a round; memory after round 5 and after round {options.rounds}: "
        f"{memory[4]:.0f} and {memory[-1]:.0f} MiB, of which the data {x.nbytes / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    main()
