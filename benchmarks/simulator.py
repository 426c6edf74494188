"""Seconds a round: a plain PyTorch loop over clients against the simulator, in one run on the same machine.

    python benchmarks/simulator.py                 # W1, W2 and W3, about five minutes on two cores
    python benchmarks/simulator.py W3 --repeats 9

The loop is what one writes by hand: one module; for each client load the global weights, run SGD over its shuffled
batches, add the difference up. It uses all threads. Ours runs twice: with default settings, and with `compile=True`.
Rounds of all three are interleaved, so that whatever else the machine does hits them alike; figures are medians.
Loop and simulator see the same batches, and their weights after the first round are compared before anything is
reported. A line ends with the ratio loop / ours (compiled). Peak memory is that of separate processes, each with its
children, shared pages counted once.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import consilience as cs
from consilience import keys
from consilience.engines.states import InMemory
from consilience.errors import DataError
from consilience.models import cnn, logistic, mlp

TRAIN = cs.SGD(lr=0.05, epochs=1, batch=20)


@dataclass(frozen=True)
class Workload:
    what: str
    module: nn.Module
    clients: int
    cohort: int


def workload(name):
    torch.manual_seed(0)
    if name == "W1":
        return Workload("MLP 784-200-10, 10 of 100 clients x 600", mlp((1, 28, 28), 10), 100, 10)
    if name == "W2":
        return Workload("CNN 32-64-128-62, 10 of 100 clients x 600", cnn((1, 28, 28), 62), 100, 10)
    return Workload("logistic regression, 500 of 10,000 clients x 6", logistic((1, 28, 28), 10), 10_000, 500)


def images():
    """MNIST where it is at hand, else noise of the same shape: speed does not depend on what is in the pictures."""
    try:
        return cs.load("mnist").train
    except DataError:
        made = torch.Generator().manual_seed(0)
        x = torch.randint(256, (60_000, 1, 28, 28), generator=made, dtype=torch.uint8)
        scale = torch.full((1, 1, 1), 1 / 255)
        return cs.Dataset(x, torch.randint(10, (60_000,), generator=made), scale=scale, name="noise")


class Loop:
    """The hand-written loop. Its inputs are float32 in memory, as a DataLoader would leave them."""

    def __init__(self, job, federation):
        self.federation, self.module = federation, job.module
        self.x = federation.data.inputs(torch.arange(len(federation.data)))
        self.y = federation.data.y
        self.weights = [p.detach().clone() for p in self.module.parameters()]
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=TRAIN.lr)
        self.loss = nn.CrossEntropyLoss()

    def batches(self, ids, number):
        """The shuffles that the simulator will draw; prepared outside the clock."""
        key = keys.fold(keys.key(0, purpose="client", round=number, client=ids), "epoch 0")
        sizes = self.federation.sizes[ids]
        order = keys.permutations(key, sizes, int(sizes.max()))
        return [self.federation.indices(int(c))[order[i, : sizes[i]]] for i, c in enumerate(ids)]

    def round(self, shuffles):
        total = [torch.zeros_like(w) for w in self.weights]
        examples = 0
        for rows in shuffles:
            with torch.no_grad():
                for p, w in zip(self.module.parameters(), self.weights, strict=True):
                    p.copy_(w)
            for batch in rows.split(TRAIN.batch):
                self.optimizer.zero_grad()
                self.loss(self.module(self.x[batch]), self.y[batch]).backward()
                self.optimizer.step()
            with torch.no_grad():
                for t, p, w in zip(total, self.module.parameters(), self.weights, strict=True):
                    t.add_(p - w, alpha=len(rows))
            examples += len(rows)
        self.weights = [w + t / examples for w, t in zip(self.weights, total, strict=True)]

    def vector(self):
        return torch.cat([w.flatten() for w in self.weights])


class Ours:
    def __init__(self, job, federation, compile):
        self.algorithm = cs.FedAvg(TRAIN)
        engine = cs.Simulator(device="cpu", compile=compile)
        task = cs.Classification(job.module)
        self.session = engine.open(self.algorithm, task, federation, seed=0, cohort=job.cohort, rounds=100)
        info = cs.Info(*(torch.as_tensor(v) for v in (task.initial(), 0, job.clients, federation.examples)))
        self.server, self.states = self.algorithm.start(task, info), InMemory(lambda ids: None)

    def round(self, ids, number):
        share, _ = self.session.round(self.server, self.states, ids, number)
        self.server = self.algorithm.fuse(self.server, share.update)

    def vector(self):
        return self.server.model.theta


def seconds(call, *arguments):
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def measure(name, repeats):
    job = workload(name)
    federation = cs.partition.iid(images(), job.clients, seed=0)
    loop = Loop(job, federation)
    rivals = {"ours": Ours(job, federation, None), "compiled": Ours(job, federation, True)}
    times = {"loop": [], "ours": [], "compiled": []}
    for number in range(1, repeats + 2):
        ids = keys.sample(keys.key(0, purpose="cohort", round=number), job.clients, job.cohort)
        times["loop"].append(seconds(loop.round, loop.batches(ids, number)))
        for rival, it in rivals.items():
            times[rival].append(seconds(it.round, ids, number))
            if number == 1:
                torch.testing.assert_close(it.vector(), loop.vector(), rtol=1e-3, atol=1e-5)
    for it in rivals.values():
        it.session.close()
    median = {which: statistics.median(values[1:]) for which, values in times.items()}  # the first round warms up
    peak = {which: peak_memory(name, which) for which in median}
    for which, it in rivals.items():
        print(f"   {which}: {it.session.plan}; first round {times[which][0]:.1f} s")
    print(
        f"{name} {job.what}: loop {median['loop']:.4f} s ({peak['loop']:.0f} MiB), ours {median['ours']:.4f} s "
        f"{median['loop'] / median['ours']:.2f}x ({peak['ours']:.0f} MiB), compiled {median['compiled']:.4f} s "
        f"({peak['compiled']:.0f} MiB) {median['loop'] / median['compiled']:.2f}x",
        flush=True,
    )


def alone(name, which):
    """Two rounds of one rival, for its peak memory."""
    job = workload(name)
    federation = cs.partition.iid(images(), job.clients, seed=0)
    rival = Loop(job, federation) if which == "loop" else Ours(job, federation, True if which == "compiled" else None)
    for number in (1, 2):
        ids = keys.sample(keys.key(0, purpose="cohort", round=number), job.clients, job.cohort)
        if which == "loop":
            rival.round(rival.batches(ids, number))
        else:
            rival.round(ids, number)


def peak_memory(name, which):
    """MiB of a process and its children at the worst moment."""
    child = subprocess.Popen([sys.executable, __file__, name, "--alone", which], stdout=subprocess.DEVNULL)
    peak = 0.0
    while child.poll() is None:
        peak = max(peak, sum(proportional(pid) for pid in family(child.pid)))
        time.sleep(0.02)
    if child.returncode:
        raise SystemExit(f"{name} {which} failed on its own")
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
    parser.add_argument("workloads", nargs="*", default=["W1", "W2", "W3"], help="W1, W2, W3")
    parser.add_argument("--repeats", type=int, default=7, help="rounds counted for each")
    parser.add_argument("--alone", choices=["loop", "ours", "compiled"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in options.workloads:
        if name not in ("W1", "W2", "W3"):
            parser.error(f"unknown workload {name}")
        if options.alone:
            alone(name, options.alone)
        else:
            measure(name, options.repeats)


if __name__ == "__main__":
    main()
