"""What FedEP costs: seconds a round beside FedAvg's, and rounds and memory as the number of clients grows.

    python benchmarks/fedep.py                     # both tables, about ten minutes on two cores
    python benchmarks/fedep.py overhead --repeats 5
    python benchmarks/fedep.py scale

Overhead: MNIST by writer (noise of the same shape where it is not at hand), MLP 784-200-10, 20 writers a round, 5
epochs in batches of 20, momentum, as in `consilience reproduce fedep-mnist-writers`. All methods start from the same
rounds of FedAvg, follow the plan that FedAvg's session chose, and meet the same clients. They take turns, a block of
rounds each, in an order that changes, so that whatever else the machine does hits them alike; the first round of a
block, which finds the others' data in the caches, is not counted. A ratio is of one block's median round to FedAvg's
in the same turn.

Scale: logistic regression (64 → 10) on noise, 5 examples a client. Each number of clients has a process of its own,
where FedAvg and FedSEP(I) take turns with both sizes of cohort. Memory is what that process holds beyond what it held
when the data was ready, at its highest.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys

import torch

import consilience as cs
from consilience.core.errors import DataError
from consilience.engines.simulator import Simulator
from consilience.engines.workers import give_memory_back
from consilience.models import logistic, mlp
from consilience.recipes.fedep import MNIST_WRITERS
from contest import Contestant, contest, machine
from simulator import family, images, proportional, seconds

RIVALS = ("FedEP(I)", "FedSEP(I)", "FedEP(L)", "FedEP(V)")
COHORT, WARM = 20, 5
CLIENTS, COHORTS, EXAMPLES = (3_424, 34_247, 342_477), (10, 100), 5


def writers():
    try:
        return cs.partition.by_group(cs.load("mnist-writers").train, "writer")
    except DataError:
        return cs.partition.iid(images("mnist", 60_000), 539)


def overhead(repeats):
    federation = writers()
    torch.manual_seed(0)
    task = cs.Classification(mlp((1, 28, 28), 10))
    warm = Contestant(MNIST_WRITERS.method("FedAvg"), task, federation, COHORT)
    for number in range(1, WARM + 1):
        warm.round(number)
    start, plan = warm.server.model.mean, warm.session.plan
    crew = {
        name: Contestant(MNIST_WRITERS.method(name), task, federation, COHORT, start, plan)
        for name in ("FedAvg", *RIVALS)
    }
    warm.session.close()
    print(f"Overhead: {len(federation)} clients of {federation.data.name}, {COHORT} a round; {machine()}")
    contest(crew, repeats, first=WARM + 1)


def scale(repeats):
    print(f"Scale: {EXAMPLES} examples a client, logistic regression 64 -> 10, on one thread; {machine()}")
    print(f"{'clients':>8} {'cohort':>7} {'FedAvg ms':>10} {'FedSEP(I) ms':>13} {'beyond data':>12} {'data':>9}")
    for clients in CLIENTS:
        words = [sys.executable, __file__, "scale", "--repeats", str(repeats), "--clients", str(clients)]
        found = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
        for cohort in COHORTS:
            ms = {name: 1e3 * found["seconds"][f"{name} {cohort}"] for name in ("FedAvg", "FedSEP(I)")}
            print(
                f"{clients:8,} {cohort:7} {ms['FedAvg']:10.2f} {ms['FedSEP(I)']:13.2f} "
                f"{found['beyond']:8.0f} MiB {found['data']:5.0f} MiB",
                flush=True,
            )


def alone(clients, repeats):
    """One number of clients, in a process of its own."""
    made = torch.Generator().manual_seed(0)
    total = clients * EXAMPLES
    x = torch.randint(256, (total, 64), generator=made, dtype=torch.uint8)
    data = cs.Dataset(x, torch.randint(10, (total,), generator=made), scale=torch.tensor(1 / 255), name="noise")
    federation = cs.partition.iid(data, clients)
    torch.manual_seed(0)
    task = cs.Classification(logistic((64,), 10))
    before = held()
    train = cs.SGD(lr=0.1, batch_size=EXAMPLES)
    methods = {"FedAvg": cs.FedAvg(train), "FedSEP(I)": cs.algorithms.FedSEP(cs.inference.Identity(train))}
    crew = {
        f"{name} {cohort}": Contestant(method, task, federation, cohort, engine=Simulator("cpu", cohort, 1, 1))
        for name, method in methods.items()
        for cohort in COHORTS
    }
    times, most = {name: [] for name in crew}, 0.0
    for number in range(1, 20 * repeats + 11):
        for name, contestant in crew.items():
            times[name].append(seconds(contestant.round, number))
        if number % 20 == 0:
            most = max(most, family_memory())
    typical = {name: statistics.median(values[10:]) for name, values in times.items()}
    size = sum(t.nbytes for t in (x, data.y, federation.order, federation.offsets)) / 2**20
    print(json.dumps({"seconds": typical, "beyond": most - before, "data": size}))


def held():
    """Memory when nothing is going on."""
    gc.collect()
    give_memory_back()
    return family_memory()


def family_memory():
    return sum(proportional(pid) for pid in family(os.getpid()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["overhead", "scale"], help="one of the tables; both if left out")
    parser.add_argument("--repeats", type=int, default=15, help="turns of each")
    parser.add_argument("--clients", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients:
        alone(options.clients, options.repeats)
        return
    for what, table in {"overhead": overhead, "scale": scale}.items():
        if options.what in (None, what):
            table(options.repeats)


if __name__ == "__main__":
    main()
