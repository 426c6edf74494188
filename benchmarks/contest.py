"""Methods that take turns in one process: what a round of each costs beside the first one's.

They follow one plan and meet the same clients, a block of rounds each, in an order that changes, so that whatever else
the machine does hits them alike. The first round of a block, which finds the others' data in the caches, is not
counted. A ratio is of one block's median round to the first method's in the same turn.
"""

from __future__ import annotations

import os
import statistics

import torch

import consilience as cs
from consilience.core import keys
from consilience.engines.simulator import Simulator
from consilience.engines.states import InMemory
from simulator import seconds

BLOCK = 3


class Contestant:
    """A method with its session, round by round as `fit` would run it."""

    def __init__(self, algorithm, task, federation, cohort, initial=None, plan=None, engine=None):
        self.algorithm, self.cohort = algorithm, cohort
        self.session = (engine or Simulator(device="cpu")).open(
            algorithm, algorithm.adapt(task, 0), federation, seed=0, cohort=cohort, rounds=1000, plan=plan
        )
        ready, sizes = self.session.task, federation.sizes
        counts = (torch.tensor(value) for value in (0, len(federation), federation.examples))
        info = cs.data.Info(ready.initial() if initial is None else initial, *counts)
        self.server = algorithm.start(ready, info)
        self.states = InMemory(lambda ids: algorithm.client(ready, info, sizes[ids].float().unsqueeze(1)))

    def round(self, number):
        key = keys.key(0, purpose="cohort", round=number)
        ids = keys.sample(key, len(self.session.federation), self.cohort)
        if self.session.plan is None:
            self.session.settle(self.server, self.states, ids, number)
        share = self.session.round(self.server, self.states, ids, number).share
        self.server = self.algorithm.fuse(self.server, share.update)


def contest(crew, repeats, first=1):
    """The table of a crew, the first of whom is the measure."""
    measure, *_ = order = list(crew)
    ratios, every = {name: [] for name in crew}, {name: [] for name in crew}
    for turn in range(repeats + 1):  # the first warms up
        numbers = range(first + turn * BLOCK, first + (turn + 1) * BLOCK)
        block = {name: [seconds(crew[name].round, number) for number in numbers][1:] for name in order}
        order = order[1:] + order[:1]
        if turn:
            for name, times in block.items():
                ratios[name].append(statistics.median(times) / statistics.median(block[measure]))
                every[name] += times
    plan = crew[measure].session.plan
    for contestant in crew.values():
        contestant.session.close()
    how = ", compiled" if plan.compile else ""
    print(f"plan: {plan.chunk} clients at once, {plan.workers} worker(s), {plan.threads or 'all'} thread(s) each{how}")
    print(f"{'method':14} {'s a round':>10} {f'over {measure}':>12} {'quartiles':>14}   ({repeats} turns)")
    for name in crew:
        low, middle, high = statistics.quantiles(ratios[name], n=4)
        print(f"{name:14} {statistics.median(every[name]):10.3f} {middle:11.2f}x {low:6.2f}-{high:.2f}x", flush=True)


def machine():
    return f"{os.cpu_count()} CPU cores, torch {torch.__version__} with {torch.get_num_threads()} threads"
