"""Seconds of matching: the formula as a loop against ours, and how ours grows with clients and with units.

    python benchmarks/matching.py                  # both tables, half a minute
    python benchmarks/matching.py speed
    python benchmarks/matching.py growth --json growth.json
    python benchmarks/matching.py --quick          # small sizes, a few seconds

Weights are made up to look like networks that were trained apart: MLPs 784-100-10 whose hidden units are a random 90 %
from a common pool of one and a half times as many, with noise, and 10 % of their own, in random order; the clients'
shares of each class are Dirichlet(0.5). How long matching takes depends on them only through the global width.

Loop: the same algorithm in numpy, with the gain of every pair of an atom and a unit computed on its own, all
coordinates at once, as one reads the formula; what does not depend on the unit is computed once an atom. Rows: the same
with all atoms at once for a unit. Clients come in the same order, as often, and everything is
in double precision, so that all must find the same matching. A time is that of a whole call, with
preparation: the shortest of three.
All run on one thread unless told otherwise: ours gains little from a second, and waits for it when the core is taken.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import scipy.optimize
import torch
from scipy.optimize import linear_sum_assignment

from consilience.matching import BetaBernoulli, Units, beta_bernoulli

INPUTS, CLASSES = 784, 10
MODEL = BetaBernoulli(variance=0.1, prior_variance=10.0, mass=1.0)


def federation(clients, width, seed=0):
    """Every client's units [width, 784 + 1 + 10], and the prior mean."""
    made = np.random.default_rng(seed)
    scale = np.r_[np.full(INPUTS + 1, 0.1), np.full(CLASSES, 0.5)]
    pool = made.normal(size=(3 * width // 2, len(scale))) * scale
    shares = made.dirichlet(np.full(clients, 0.5), size=CLASSES).T
    found, common = [], width - width // 10
    for share in shares:
        known = pool[made.choice(len(pool), common, replace=False)]
        values = np.concatenate([known, made.normal(size=(width - common, len(scale))) * scale])
        values += 0.2 * scale * made.normal(size=values.shape)
        precision = np.r_[np.ones(INPUTS + 1), share]
        found.append(Units(torch.from_numpy(made.permutation(values)), torch.from_numpy(precision)))
    mean = torch.zeros(len(scale), dtype=torch.float64)
    mean[INPUTS] = 0.1
    return found, mean


class Loop:
    """Matching as one reads it: S, P and m of each atom, and two loops over atoms and units."""

    def __init__(self, model, clients, mean):
        self.model, self.clients = model, len(clients)
        self.eta0 = mean.numpy() / model.prior_variance
        self.lam0 = np.full(len(mean), 1 / model.prior_variance)
        self.precision = [units.precision.numpy() / model.variance for units in clients]
        self.evidence = [units.values.numpy() * p for units, p in zip(clients, self.precision, strict=True)]
        self.s, self.p, self.m = [], [], []
        self.assignments = [None] * len(clients)

    def run(self, seed):
        model, everyone = self.model, range(self.clients)
        for j in sorted(everyone, key=lambda j: -len(self.evidence[j])):
            self.update(j)
        trace = [self.objective()]
        best, width = trace[0], len(self.s)
        orders = np.random.default_rng(seed)
        for _ in range(model.sweeps):
            before = len(trace) - 1
            for j in orders.permutation(self.clients):
                self.update(j)
                trace.append(self.objective())
                if trace[-1] > best:
                    best, width = trace[-1], len(self.s)
            if np.ptp(trace[before:]) <= 1e-12 * abs(trace[-1]):
                break
        return best, width

    def update(self, j):
        mine = self.assignments[j]
        own = 0
        if mine is not None:
            for b, i in zip(self.evidence[j], mine, strict=True):
                self.s[i], self.p[i], self.m[i] = self.s[i] - b, self.p[i] - self.precision[j], self.m[i] - 1
            self.assignments[j] = None
            own = self.m.count(0)
            number = np.cumsum([m > 0 for m in self.m]) - 1
            alive = [i for i, m in enumerate(self.m) if m]
            self.s, self.p, self.m = ([values[i] for i in alive] for values in (self.s, self.p, self.m))
            self.assignments = [None if a is None else number[a] for a in self.assignments]
        size, atoms = len(self.evidence[j]), len(self.s)
        room = max(min(size, self.model.limit - atoms), 1, size - atoms, own)
        _, chosen = linear_sum_assignment(self.gains(j, room), maximize=True)
        for unit, i in enumerate(chosen):
            if i >= atoms:
                chosen[unit] = len(self.s)
                self.s.append(self.eta0)
                self.p.append(self.lam0)
                self.m.append(0)
        for b, i in zip(self.evidence[j], chosen, strict=True):
            self.s[i], self.p[i], self.m[i] = self.s[i] + b, self.p[i] + self.precision[j], self.m[i] + 1
        self.assignments[j] = chosen

    def gains(self, j, room):
        """[units, atoms + new]."""
        b, atoms = self.evidence[j], len(self.s)
        gains = np.empty((len(b), atoms + room))
        self.matched(b, self.precision[j], gains[:, :atoms])
        nothing = (self.eta0**2 / self.lam0).sum()
        ranks = 2 * np.log(np.arange(1, room + 1))
        for unit in range(len(b)):
            opened = ((self.eta0 + b[unit]) ** 2 / (self.lam0 + self.precision[j])).sum() - nothing
            gains[unit, atoms:] = opened + 2 * math.log(self.model.mass / self.clients) - ranks
        return gains

    def matched(self, b, p, gains):
        odds = [self.odds(m) for m in self.m]
        before = [(s**2 / lam).sum() for s, lam in zip(self.s, self.p, strict=True)]
        after = [lam + p for lam in self.p]
        for unit in range(len(b)):
            for i in range(len(self.s)):
                gains[unit, i] = ((self.s[i] + b[unit]) ** 2 / after[i]).sum() - before[i] + odds[i]

    def odds(self, m):
        return 2 * math.log(m / (self.clients - m))

    def objective(self):
        nothing = (self.eta0**2 / self.lam0).sum()
        opened = 2 * math.log(self.model.mass / self.clients) - nothing
        popular = np.cumsum([0, *(self.odds(m) for m in range(1, self.clients))])
        return sum(
            float((s**2 / p).sum() + opened + popular[m - 1]) for s, p, m in zip(self.s, self.p, self.m, strict=True)
        )


class Rows(Loop):
    """One loop, over units; all atoms at once."""

    def matched(self, b, p, gains):
        if not self.s:
            return
        s, lam = np.stack(self.s), np.stack(self.p)
        constant = np.array([self.odds(m) for m in self.m]) - (s**2 / lam).sum(1)
        after = lam + p
        for unit in range(len(b)):
            gains[unit] = ((s + b[unit]) ** 2 / after).sum(1) + constant


def timed(function, *words, repeats=1):
    """The shortest of several times, and the result."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function(*words)
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def speed(quick):
    clients, width = (5, 20) if quick else (20, 100)
    units, mean = federation(clients, width)
    MODEL.cluster(*federation(2, 10), None, 0)  # libraries wake up
    contestants = {
        "loop": lambda: Loop(MODEL, units, mean).run(0),
        "ours": lambda: _best(MODEL.cluster(units, mean, None, 0)),
        "rows": lambda: Rows(MODEL, units, mean).run(0),
    }
    found = []
    for name, function in contestants.items():
        seconds, (objective, global_width) = timed(function, repeats=3)
        found.append({"what": name, "seconds": seconds, "objective": objective, "width": global_width})
    ours = next(row for row in found if row["what"] == "ours")["seconds"]
    print(f"Speed: J = {clients}, {width} units, {INPUTS} inputs, {CLASSES} classes with shares; {machine()}")
    print(f"{'what':6} {'seconds':>9} {'over ours':>10} {'objective':>16} {'global width':>13}")
    for row in found:
        row["ratio"] = row["seconds"] / ours
        print(
            f"{row['what']:6} {row['seconds']:9.3f} {row['ratio']:9.1f}x {row['objective']:16.4f} {row['width']:13}",
            flush=True,
        )
    return found


def _best(clusters):
    return max(clusters.trace), len(clusters)


def growth(quick):
    sizes = [(j, 10) for j in (2, 4)] + [(2, w) for w in (20, 30)]
    if not quick:
        sizes = [(j, 100) for j in (10, 20, 50, 100)] + [(10, w) for w in (300, 1000)]
    print(f"Growth: no limit to the width; {machine()}")
    head = f"{'clients':>8} {'units':>6} {'seconds':>9} {'updates':>8} {'ms an update':>13}"
    print(f"{head} {'gains':>7} {'assignment':>11} {'global width':>13}")
    found = []
    for clients, width in sizes:
        units, mean = federation(clients, width)
        spent = {"gains": 0.0, "assignment": 0.0}
        with watched(spent):
            seconds, clusters = timed(replace(MODEL, limit=10**6).cluster, units, mean, None, 0)
        updates = clients + len(clusters.trace) - 1
        shares = {name: value / seconds for name, value in spent.items()}
        row = {"clients": clients, "units": width, "seconds": seconds, "updates": updates, "width": len(clusters)}
        found.append(row | shares)
        print(
            f"{clients:8} {width:6} {seconds:9.3f} {updates:8} {1e3 * seconds / updates:13.2f} "
            f"{shares['gains']:6.0%} {shares['assignment']:10.0%} {len(clusters):13}",
            flush=True,
        )
    return found


class watched:  # noqa: N801
    """While it lasts, seconds in the gains and in scipy's assignment are added up."""

    def __init__(self, spent):
        self.spent = spent

    def __enter__(self):
        self.gains, self.assignment = beta_bernoulli.State.gains, scipy.optimize.linear_sum_assignment
        beta_bernoulli.State.gains = self.count("gains", self.gains)
        scipy.optimize.linear_sum_assignment = self.count("assignment", self.assignment)

    def count(self, name, function):
        def counted(*words, **named):
            start = time.perf_counter()
            result = function(*words, **named)
            self.spent[name] += time.perf_counter() - start
            return result

        return counted

    def __exit__(self, *_):
        beta_bernoulli.State.gains, scipy.optimize.linear_sum_assignment = self.gains, self.assignment


def machine():
    return f"{os.cpu_count()} CPU cores, torch {torch.__version__} with {torch.get_num_threads()} thread(s)"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["speed", "growth"], help="one of the tables; both if left out")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--threads", type=int, default=1, help="of torch; numpy's loops have one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tables = {"speed": speed, "growth": growth}
    found = {name: table(options.quick) for name, table in tables.items() if options.what in (None, name)}
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
