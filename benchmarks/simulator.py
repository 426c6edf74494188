"""Seconds a round: a plain PyTorch loop over clients against the simulator, in one run on the same machine.

    python benchmarks/simulator.py                 # W1 to W4, less than five minutes on two idle cores
    python benchmarks/simulator.py W3 --repeats 9

The loop is what one writes by hand: one module; for each client load the global weights, run SGD over its shuffled
batches, add the weights up. It uses all threads. Ours runs twice: with default settings, and with `compile=True`.
The three take turns, a block of rounds each, so that whatever else the machine does hits them alike; figures are
medians over rounds, without the first of each block, which finds the others' data in the caches.
Loop and simulator see the same batches and must give the same model: to 1e-9 in float64 for two clients, and in the
timed float32 runs the updates of the first round may differ by 2 % of their length (ReLU networks amplify rounding).
A line ends with the ratio loop / ours (compiled). Default settings are for 100 rounds, and no plan is remembered from
an earlier run. Peak memory is that of separate processes, each with its
children, shared pages counted once.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import consilience as cs
from consilience.core import keys
from consilience.core.errors import DataError
from consilience.engines.states import InMemory
from consilience.models import cnn, lenet5, logistic, mlp

WORKLOADS = ("W1", "W2", "W3", "W4")
TRAIN = cs.SGD(lr=0.05, epochs=1, batch_size=20)


@dataclass(frozen=True)
class Workload:
    what: str
    module: nn.Module
    clients: int
    cohort: int
    block: int
    train: cs.SGD = TRAIN
    data: str = "mnist"
    examples: int = 60_000


def workload(name):
    torch.manual_seed(0)
    if name == "W1":
        return Workload("MLP 784-200-10, 10 of 100 clients x 600", mlp((1, 28, 28), 10), 100, 10, 4)
    if name == "W2":
        return Workload("CNN 32-64-128-62, 10 of 100 clients x 600", cnn((1, 28, 28), 62), 100, 10, 2)
    if name == "W3":
        return Workload("logistic regression, 500 of 10,000 clients x 6", logistic((1, 28, 28), 10), 10_000, 500, 8)
    module, train = lenet5((1, 28, 28), 10), replace(TRAIN, batch_size=16)
    return Workload("LeNet-5, 10 of 10 clients x 600", module, 10, 10, 4, train, "fashion-mnist", 6_000)


def images(data, examples):
    """Pictures where they are at hand, else noise of the same shape: speed does not depend on what is in the
    pictures."""
    try:
        whole = cs.load(data).train
        return whole if len(whole) == examples else whole[:examples]
    except DataError:
        made = torch.Generator().manual_seed(0)
        shape = (3, 32, 32) if data == "cifar10" else (1, 28, 28)
        x = torch.randint(256, (examples, *shape), generator=made, dtype=torch.uint8)
        scale = torch.full((1, 1, 1), 1 / 255)
        return cs.Dataset(x, torch.randint(10, (examples,), generator=made), scale=scale, name="noise")


class Loop:
    """The hand-written loop. Its inputs are float32 in memory, as a DataLoader would leave them."""

    def __init__(self, job, federation, dtype=torch.float32):
        self.federation, self.train = federation, job.train
        self.module = copy.deepcopy(job.module).to(dtype)
        self.x = federation.data.inputs(torch.arange(len(federation.data)), dtype)
        self.y = federation.data.y
        self.weights = copy.deepcopy(self.module.state_dict())
        self.loss = nn.CrossEntropyLoss()

    def batches(self, ids, number):
        """The shuffles that the simulator will draw; prepared outside the clock."""
        key = keys.fold(keys.key(0, purpose="client", round=number, client=ids), "epoch 0")
        sizes = self.federation.sizes[ids]
        order = keys.permutations(key, sizes, int(sizes.max()))
        return [self.federation.indices(int(c))[order[i, : sizes[i]]] for i, c in enumerate(ids)]

    def round(self, shuffles):
        total = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        examples = 0
        for rows in shuffles:
            self.module.load_state_dict(self.weights)
            optimizer = torch.optim.SGD(self.module.parameters(), lr=self.train.lr)
            for batch in rows.split(self.train.batch_size):
                optimizer.zero_grad()
                self.loss(self.module(self.x[batch]), self.y[batch]).backward()
                optimizer.step()
            for name, w in self.module.state_dict().items():
                total[name].add_(w, alpha=len(rows))
            examples += len(rows)
        self.weights = {name: t / examples for name, t in total.items()}

    def vector(self):
        return torch.cat([w.flatten() for w in self.weights.values()])


class Ours:
    def __init__(self, job, federation, **options):
        self.algorithm = cs.FedAvg(job.train)
        engine = cs.Simulator(device="cpu", **options)
        task = cs.Classification(job.module)
        self.session = engine.open(self.algorithm, task, federation, seed=0, cohort=job.cohort, rounds=100)
        task = self.session.task
        info = cs.data.Info(*(torch.as_tensor(v) for v in (task.initial(), 0, job.clients, federation.examples)))
        self.server, self.states = self.algorithm.start(task, info), InMemory(lambda ids: None)

    def round(self, ids, number):
        if self.session.plan is None:
            self.session.settle(self.server, self.states, ids, number)
        share = self.session.round(self.server, self.states, ids, number).share
        with self.session.cores_for_workers():
            self.server = self.algorithm.fuse(self.server, share.update)

    def vector(self):
        return self.server.model.theta


def seconds(call, *arguments):
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def cohort_of(job, number):
    return keys.sample(keys.key(0, purpose="cohort", round=number), job.clients, job.cohort)


def verify(job, federation):
    """Two clients, one round, float64: loop and simulator agree."""
    ids = torch.tensor([3, 7])
    loop = Loop(job, federation, torch.float64)
    loop.round(loop.batches(ids, 1))
    ours = Ours(replace(job, cohort=2), federation, precision="float64", chunk=2, workers=1)
    ours.round(ids, 1)
    ours.session.close()
    torch.testing.assert_close(ours.vector(), loop.vector(), rtol=1e-9, atol=1e-9)


def measure(name, repeats):
    job = workload(name)
    federation = cs.partition.iid(images(job.data, job.examples), job.clients, seed=0)
    verify(job, federation)
    loop = Loop(job, federation)
    before = loop.vector()
    rivals = {"ours": Ours(job, federation), "compiled": Ours(job, federation, compile=True)}
    first = cohort_of(job, 1)
    warm = {"loop": seconds(loop.round, loop.batches(first, 1))}
    for rival, it in rivals.items():
        warm[rival] = seconds(it.round, first, 1)
        apart = (it.vector() - loop.vector()).norm() / (loop.vector() - before).norm()
        assert apart < 0.02, f"{name} {rival}: the update of the first round is {100 * apart:.1f} % off"
    times = {"loop": [], "ours": [], "compiled": []}
    for block in range(repeats):
        numbers = range(2 + block * job.block, 2 + (block + 1) * job.block)
        rounds = [(cohort_of(job, number), number) for number in numbers]
        shuffles = [loop.batches(*one) for one in rounds]
        times["loop"] += [seconds(loop.round, shuffle) for shuffle in shuffles][1:]
        for rival, it in rivals.items():
            times[rival] += [seconds(it.round, *one) for one in rounds][1:]
    for it in rivals.values():
        it.session.close()
    median = {which: statistics.median(values) for which, values in times.items()}
    peak = {which: peak_memory(__file__, name, "--alone", which) for which in median}
    for which, it in rivals.items():
        print(f"   {which}: {it.session.plan}; first round {warm[which]:.1f} s")
    print(
        f"{name} {job.what}: loop {median['loop']:.4f} s ({peak['loop']:.0f} MiB), ours {median['ours']:.4f} s "
        f"{median['loop'] / median['ours']:.2f}x ({peak['ours']:.0f} MiB), compiled {median['compiled']:.4f} s "
        f"({peak['compiled']:.0f} MiB) {median['loop'] / median['compiled']:.2f}x",
        flush=True,
    )


def alone(name, which):
    """Two rounds of one rival, for its peak memory."""
    job = workload(name)
    federation = cs.partition.iid(images(job.data, job.examples), job.clients, seed=0)
    rival = Loop(job, federation) if which == "loop" else Ours(job, federation, compile=which == "compiled")
    for number in (1, 2):
        ids = cohort_of(job, number)
        if which == "loop":
            rival.round(rival.batches(ids, number))
        else:
            rival.round(ids, number)


def peak_memory(*command):
    """MiB of a Python process and its children at the worst moment."""
    child, peak = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL), 0.0
    while child.poll() is None:
        peak = max(peak, sum(proportional(pid) for pid in family(child.pid)))
        time.sleep(0.02)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} failed on its own")
    return peak


def family(pid):
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [member for child in task.read_text().split() for member in family(int(child))]
        except OSError:
            continue
    return found


def proportional(pid):
    """MiB of a process, pages shared by n processes counted as 1/n."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--repeats", type=int, help="blocks of rounds for each; 5, and 3 for W2")
    parser.add_argument("--alone", choices=["loop", "ours", "compiled"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.workloads if name not in WORKLOADS]:
        parser.error(f"unknown workload {unknown[0]}")
    if options.alone:
        for name in options.workloads:
            alone(name, options.alone)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CONSILIENCE_PLANS"] = f"{folder}/plans.json"
        for name in options.workloads:
            measure(name, options.repeats or (3 if name == "W2" else 5))


if __name__ == "__main__":
    main()
