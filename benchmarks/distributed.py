"""Seconds a round and peak memory of ranks on CPUs, beside the simulator on one core.

    python benchmarks/distributed.py               # 2 and 4 ranks; a minute or two on two cores
    python benchmarks/distributed.py --ranks 2 4 8 16 --method FedAvg --clients 48 --cohort 48 --each 600

An MLP of 784-200-10, batches of 20, one local epoch; SCAFFOLD keeps a vector of weights for each client. Strong:
the same clients and cohort for any number of ranks. Weak: so many clients and so large a cohort for each rank. Data are
a memory map, and the run is kept in a directory, so that each rank holds the states of its own clients alone. Seconds
are medians over rounds without the first two; memory is what the run adds to the process, at its peak, in the rank that
needs most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import consilience as cs
from consilience.models import mlp

METHODS = {"FedAvg": cs.FedAvg, "SCAFFOLD": cs.SCAFFOLD}


def federation(folder, clients, each):
    path = Path(folder) / f"noise-{clients}-{each}.npy"
    if not path.exists():
        np.save(path, np.random.default_rng(0).normal(size=(clients * each, 784)).astype(np.float32))
    y = torch.randint(10, (clients * each,), generator=torch.Generator().manual_seed(0))
    owner = torch.arange(clients).repeat_interleave(each)
    return cs.Federation.from_owner(cs.Dataset(cs.Rows(path), y, name="noise"), owner)


def status(field):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


def learn(engine, given, clients, cohort):
    """What one process takes for the run."""
    torch.set_num_threads(1)
    data = federation(given.folder, clients, given.each)
    torch.manual_seed(0)
    task = cs.Classification(mlp(inputs=(784,), outputs=10, hidden=(200,)))
    algorithm = METHODS[given.method](cs.SGD(lr=0.05, epochs=1, batch_size=20))
    Path("/proc/self/clear_refs").write_text("5")
    before, same = status("VmRSS"), {"rounds": given.rounds, "cohort": cohort, "engine": engine, "progress": False}
    run = cs.fit(algorithm, task, data, out=given.out, **same)
    median = statistics.median(line["seconds"] for line in run.history[2:])
    return {"seconds": median, "memory": status("VmHWM") - before, "plan": str(run.plan)}


def launched(given, ranks, clients, cohort):
    """The run by so many ranks, or by the simulator if there are none, in processes of its own."""
    federation(given.folder, clients, given.each)  # writes the file
    with tempfile.TemporaryDirectory(dir=given.folder) as out:
        command = [__file__, "--rank", "--folder", given.folder, "--out", f"{out}/run", "--method", given.method]
        for name, value in (("clients", clients), ("cohort", cohort), ("each", given.each), ("rounds", given.rounds)):
            command += [f"--{name}", str(value)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        launch = [sys.executable, *(torchrun if ranks else []), *command]
        reply = subprocess.run(launch, check=True, capture_output=True, text=True).stdout
    found = [json.loads(line) for line in reply.splitlines() if line.startswith("{")]
    return {**found[0], "memory": max(one["memory"] for one in found), "seconds": max(o["seconds"] for o in found)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--clients", type=int, default=240)
    parser.add_argument("--cohort", type=int, default=48)
    parser.add_argument("--each", type=int, default=60, help="examples of a client")
    parser.add_argument("--method", choices=METHODS, default="SCAFFOLD")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        alone = cs.Simulator(device="cpu", workers=1, threads=1, chunk=8)
        engine = (
            cs.Distributed(device="cpu", threads=1, chunk=8) if torch.distributed.is_torchelastic_launched() else alone
        )
        print(json.dumps(learn(engine, given, given.clients, given.cohort)))
        return
    rows = [("simulator", 0, 1), *((f"{n} ranks, strong", n, 1) for n in given.ranks)]
    rows += [(f"{n} ranks, weak", n, n) for n in given.ranks]
    times = {name: [] for name, _, _ in rows}
    for _ in range(given.repeats):
        for name, ranks, factor in rows:
            found = launched(given, ranks, given.clients * factor, given.cohort * factor)
            print(f"{name}: {found['seconds']:.3f} s, {found['memory']:.0f} MiB", file=sys.stderr, flush=True)
            times[name].append(found)
    print("| | ms a round | times the simulator | MiB a process |\n|---|---|---|---|")
    for name, found in times.items():
        each = ", ".join(f"{1e3 * one['seconds']:.0f}" for one in found)
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(times["simulator"], found, strict=True)]
        memory = ", ".join(f"{one['memory']:.0f}" for one in found)
        print(f"| {name} | {each} | {statistics.median(ratios):.2f} | {memory} |")


if __name__ == "__main__":
    main()
