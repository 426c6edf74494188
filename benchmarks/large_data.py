"""Data larger than memory: peak memory over the number of examples, and seconds a round against data in memory.

    python benchmarks/large_data.py                          # 10⁵, 10⁶ and 10⁷ examples of 784 bytes; an 8 GB file
    python benchmarks/large_data.py --examples 100000 --folder /scratch

Clients of 1,000 examples, 20 of them a round, batches of 20, one local epoch. `memory` is a tensor, `map` the .npy file
read by index, `cold` the same after the kernel has dropped the file from its cache before every round, and `arrow` the
same rows as an Arrow file with record batches of 10,000 rows. Peak memory is that of a process without workers that
learns from the map alone; its own memory and mapped pages of the file are the largest after a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

import consilience as cs
from consilience.models import logistic, mlp

EACH, COHORT, PIXELS = 1000, 20, 784
MODELS = {"logistic": lambda: logistic((PIXELS,), 10), "mlp": lambda: mlp((PIXELS,), 10, (200,))}


def write(path, count):
    """Random bytes, a part at a time."""
    rng = np.random.default_rng(0)
    made = np.lib.format.open_memmap(path, "w+", np.uint8, (count, PIXELS))
    for start in range(0, count, 100_000):
        stop = min(count, start + 100_000)
        made[start:stop] = rng.integers(0, 256, (stop - start, PIXELS), dtype=np.uint8)
    made.flush()


def write_arrow(path, rows):
    pixels = pa.list_(pa.uint8(), PIXELS)
    with pa.ipc.new_file(path, pa.schema([("pixels", pixels)])) as writer:
        for start in range(0, len(rows), 10_000):
            part = pa.FixedSizeListArray.from_arrays(pa.array(rows[start : start + 10_000].reshape(-1)), PIXELS)
            writer.write_batch(pa.record_batch([part], names=["pixels"]))


def learn(x, rounds, model, callback=None, workers=2):
    labels = torch.randint(10, (len(x),), generator=torch.Generator().manual_seed(0))
    data = cs.Dataset(x, labels, scale=torch.tensor(1 / 255), name="noise")
    federation = cs.partition.iid(data, max(COHORT, len(x) // EACH))
    torch.manual_seed(0)
    method, task = cs.FedAvg(cs.SGD(lr=0.01, batch_size=20)), cs.Classification(MODELS[model]())
    engine = cs.Simulator(device="cpu", chunk=10, workers=workers, threads=1)
    options = {"engine": engine, "progress": False, "callbacks": [callback] if callback else []}
    return cs.fit(method, task, federation, rounds=rounds, cohort=COHORT, **options)


def forget(path):
    """Drop a file from the kernel's cache."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak(path):
    """The peak memory of this process, and after a round its own and that of mapped pages of the file, in MiB. Workers
    have pages of their own, so there are none here."""
    found = {"own": 0.0, "file": 0.0}

    def watch(run, line):
        found["own"] = max(found["own"], status("RssAnon"))
        found["file"] = max(found["file"], resident(path))

    learn(cs.Rows(path), 10, "logistic", watch, workers=1)
    return {"peak": status("VmHWM"), **found}


def status(field):
    """A number of /proc/self/status, in MiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


def resident(path):
    """Pages of a file that are mapped into this process, in MiB."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.endswith(str(path))]
    return sum(int(line.split()[1]) / 1024 for at in starts for line in lines[at : at + 6] if line.startswith("Rss:"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--compared", type=int, default=10**6, help="examples of the comparison with data in memory")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--peak", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        print(json.dumps(peak(given.peak)))
        return
    files = {count: given.folder / f"noise-{count}.npy" for count in {*given.examples, given.compared}}
    for count, path in files.items():
        if not path.exists():
            write(path, count)
    for count in given.examples:
        command = [sys.executable, __file__, "--peak", str(files[count])]
        reply = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        size = files[count].stat().st_size / 2**20
        shares = f"its own {reply['own']:.0f}, the file's {reply['file']:.0f}"
        print(f"{count:,} examples, a file of {size:,.0f} MiB: peak memory {reply['peak']:.0f} MiB ({shares})")
    compare(files[given.compared], given.rounds)


def compare(path, rounds):
    arrow, inside = path.with_suffix(".arrow"), torch.from_numpy(np.load(path))
    if not arrow.exists():
        write_arrow(arrow, inside.numpy())
    for model in MODELS:
        np.load(path).max()  # the file is in the kernel's cache from here on
        runs = {
            "memory": lambda model=model: learn(inside, rounds, model),
            "map": lambda model=model: learn(cs.Rows(path), rounds, model),
            "arrow": lambda model=model: learn(cs.Rows(arrow, "pixels"), rounds, model),
            "cold": lambda model=model: learn(cs.Rows(path), rounds, model, lambda run, line: forget(path)),
        }
        times, weights = {name: [] for name in runs}, {}
        for name in ("memory", "map", "arrow", "arrow", "map", "memory", "cold", "cold"):
            found = runs[name]()
            times[name].append(statistics.median(line["seconds"] for line in found.history[2:]))
            weights[name] = found.posterior.mean
        assert all(torch.equal(weights["memory"], other) for other in weights.values()), "results differ"
        first = statistics.mean(times["memory"])
        for name, found in times.items():
            each = " and ".join(f"{1e3 * seconds:.1f}" for seconds in found)
            print(f"{model}, {name}: {each} ms a round; {statistics.mean(found) / first:.2f} times memory")


if __name__ == "__main__":
    main()
