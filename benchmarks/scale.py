"""How the cost of a run grows: seconds a round and memory over clients, parameters, cohort, and the place of states.

    python benchmarks/scale.py                               # 10² … 10⁶ clients, 10⁴ … 10⁸ parameters; some minutes
    python benchmarks/scale.py clients states --most 100000

One core, one thread, the plan fixed. Clients have 10 examples and take one step of SGD, or of SCAFFOLD where states are
kept. Clients share a table of 1,000 examples, so that only what belongs to clients grows with them. Every row of a
table is a process of its own. Seconds are the median over rounds, without the first two; memory is the peak of the
process above what it had before the run; bytes are what the clients of a round send. An exponent e says that a column
grows as n^e, by least squares on logarithms. At the end, a cost model is fitted to all rows without states.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

import consilience as cs
from consilience.core import Point, pack, unpack
from consilience.models import mlp
from consilience.secure import Fold

INPUTS, EACH, ROWS = 64, 10, 1000
COLUMNS = {"seconds": "s a round", "memory": "MiB", "setup": "s before", "bytes": "bytes up"}


def module(parameters):
    """A network 64 → h → h → 10 of about so many weights."""
    width = max(4, round(math.sqrt(parameters + 37.5**2) - 37.5))
    torch.manual_seed(0)
    return mlp((INPUTS,), 10, (width, width))


def federation(clients):
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(ROWS, INPUTS, generator=made), torch.randint(10, (ROWS,), generator=made)
    order = torch.arange(clients * EACH) % ROWS
    return cs.Federation(cs.Dataset(x, y, name="noise"), order, torch.arange(clients + 1) * EACH)


def status(field):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


def measure(clients, parameters, cohort, chunk, rounds, place):
    """One row. `place` is where states of SCAFFOLD are kept, "" for FedAvg, which has none."""
    torch.set_num_threads(1)
    sgd, before = cs.SGD(lr=0.01, batch_size=EACH), status("VmRSS")
    start, task = time.perf_counter(), cs.Classification(module(parameters))
    with tempfile.TemporaryDirectory() as folder:
        kept = cs.runs.Storage(
            f"{folder}/run" if place == "files" else None, state_memory=0 if place == "files" else 1 << 40
        )
        run = cs.fit(
            cs.SCAFFOLD(sgd) if place else cs.FedAvg(sgd),
            task,
            federation(clients),
            rounds=rounds,
            cohort=cohort,
            engine=cs.Simulator(device="cpu", chunk=chunk, workers=1, threads=1),
            out=kept,
            progress=False,
        )
    seconds = [line["seconds"] for line in run.history]
    return {
        "clients": clients,
        "parameters": task.size,
        "cohort": cohort,
        "chunk": min(chunk, cohort),
        "place": place,
        "seconds": statistics.median(seconds[2:]),
        "setup": time.perf_counter() - start - sum(seconds),
        "memory": status("VmHWM") - before,
        "bytes": run.history[-1]["bytes_up"],
    }


def apart(**how):
    """`measure` in a forked process, whose peak memory is its own."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        os.write(write, json.dumps(measure(**how)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as reply:
        found = reply.read()
    os.waitpid(child, 0)
    return json.loads(found)


def exponent(rows, by, column):
    """The e of n^e."""
    x = torch.tensor([math.log(row[by]) for row in rows]).double()
    y = torch.tensor([math.log(max(row[column], 1e-9)) for row in rows]).double()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def table(title, by, rows):
    print(f"\n{title}\n\n| {by} | {' | '.join(COLUMNS.values())} |\n|{'---|' * (1 + len(COLUMNS))}")
    for row in rows:
        cells = [f"{row['seconds']:.4f}", f"{row['memory']:.0f}", f"{row['setup']:.1f}", f"{row['bytes']:.3g}"]
        print(f"| {row[by]:,} | {' | '.join(cells)} |")
    print(f"| exponent | {' | '.join(f'{exponent(rows, by, column):.2f}' for column in COLUMNS)} |", flush=True)


def fit(rows):
    """Constants of seconds = a + K (b + c P) and bytes of memory = m + n P, n for each client at once and for the
    server, by least squares on relative errors."""
    rows = [row for row in rows if not row["place"]]

    def solve(columns, target):
        weight = 1 / torch.tensor(target).double()
        found = torch.linalg.lstsq(torch.tensor(columns).double() * weight[:, None], torch.ones_like(weight)[:, None])
        solution = found.solution.flatten()
        off = (torch.tensor(columns).double() @ solution * weight).log().abs().max().exp()
        return solution.tolist(), float(off)

    cost = [[1, row["cohort"], row["cohort"] * row["parameters"]] for row in rows]
    (a, b, c), off = solve(cost, [row["seconds"] for row in rows])
    print(f"\nseconds a round = {a:.3g} + K ({b:.3g} + {c:.3g} P), at most {off:.1f} times off")
    large = [row for row in rows if row["parameters"] > 10**6]
    if len(large) > 1:
        held = [[row["parameters"] * 4 / 2**20] for row in large]
        (vectors,), off = solve(held, [row["memory"] for row in large])
        print(f"memory = {vectors:.1f} vectors of P weights in float32, at most {off:.1f} times off")


def server(parameters):
    """Seconds in which a server of a deployment unpacks, checks and adds one update."""
    sent = pack(Point(torch.randn(parameters)))
    fold = Fold(Point(torch.zeros(parameters)), 1000)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        update = unpack(sent)
        assert not fold.beyond(update)
        fold.add(update)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=["clients", "parameters", "cohort", "states", "server"])
    parser.add_argument("--most", type=int, default=10**6, help="clients at most")
    parser.add_argument("--parameters", type=int, default=10**8, help="at most")
    given = parser.parse_args()
    torch.set_num_threads(1)
    measure(100, 10**4, 10, 10, 3, "")  # what is imported late is in every process
    rows, powers = [], [10**n for n in range(2, 9)]
    base = {"clients": 10_000, "parameters": 10**4, "cohort": 100, "chunk": 10, "rounds": 12, "place": ""}
    clients = [n for n in powers if n <= given.most]
    sweeps = {
        "clients": ("clients", [{**base, "clients": n} for n in clients]),
        "parameters": (
            "parameters",
            [
                {**base, "parameters": n, "cohort": 4, "chunk": 1, "rounds": 5 if n > 10**7 else 8}
                for n in powers
                if 10**4 <= n <= given.parameters
            ],
        ),
        "cohort": ("cohort", [{**base, "cohort": n} for n in (10, 30, 100, 300, 1000)]),
    }
    for name, (by, points) in sweeps.items():
        if name in given.tables:
            own = [apart(**point) for point in points]
            fixed = {k: v for k, v in base.items() if k in ("clients", "parameters", "cohort") and k != by}
            fixed |= {"cohort": 4} if by == "parameters" else {}
            table(", ".join(f"{key} {value:,}" for key, value in fixed.items()), by, own)
            rows += own
    if "states" in given.tables:
        for place in ("memory", "files"):
            kept = {**base, "place": place}
            own = [apart(**{**kept, "clients": n}) for n in clients]
            table(f"SCAFFOLD, states in {place}, parameters 10,000, cohort 100", "clients", own)
            own = [apart(**{**kept, "parameters": n}) for n in (10**4, 3 * 10**4, 10**5)]
            table(f"SCAFFOLD, states in {place}, clients 10,000, cohort 100", "parameters", own)
    if rows:
        fit(rows)
    if "server" in given.tables:
        sizes = [n for n in (10**5, 10**6, 10**7) if n <= given.parameters]
        each = [server(n) / n for n in sizes]
        found = ", ".join(f"{1e9 * one:.2f} (P = {n:.0e})" for n, one in zip(sizes, each, strict=True))
        print(f"server, ns a weight for each update: {found}")


if __name__ == "__main__":
    main()
