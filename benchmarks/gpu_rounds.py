"""Seconds a round on a GPU where rounds are short, and seconds before the first one.

    python benchmarks/gpu_rounds.py                      # three settings, each with a cold and a warm cache; 3 minutes
    python benchmarks/gpu_rounds.py --profile            # and where a round's time goes
    python benchmarks/gpu_rounds.py --quick --profile    # a small case, also on a CPU: does it run?

The CIFAR-10 benchmark of pfl-research: 1,000 clients with 50 images, 50 of them in a round, one epoch with batches of
10, so five steps; two convolutions of 32 and 64 channels, a pool, and dense layers of 128 and 10. Images are noise
where CIFAR-10 is not at hand. Each run is `cs.fit` in a process of its own. Seconds a round are medians of the rounds
after the tenth. `first` is the time from the call of `fit` to the end of the first round, `slowest` that of any later
round. Caches of the compiler and of plans are in a folder that is empty before the cold run and kept for the warm one;
Python's bytecode of all packages is there from the start.

With `--profile`, the functions of a round by their own host time, the kernels by their time on the device, what the
host asked of the device, and the lines that made it wait. With `--profile-first`, where the first round's time went,
with a warm cache.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch

import consilience as cs
from consilience.models import cnn
from simulator import images

SETTINGS = {
    "default": {},
    "compiled": {"compile": True},
    "compiled bf16": {"compile": True, "precision": "bf16"},
}
WARM, TIMED = 10, 60  # rounds
PROFILED, TRACED, WATCHED = 20, 5, 2  # rounds by cProfile, by torch's profiler, and with a look at every wait
TOP = 40


def cifar10(clients, each):
    """The federation, and the name of its images."""
    data = images("cifar10", clients * each)
    return cs.Federation.from_owner(data, torch.arange(clients).repeat_interleave(each)), data.name


class Watch:
    """A callback that takes the time of every round, and profiles some of them."""

    def __init__(self, profile):
        self.profile, self.seconds, self.found = profile, [], {}
        self.python, self.tracer, self.waits = cProfile.Profile(), None, collections.Counter()
        self.begun = time.perf_counter()

    def __call__(self, run, line):
        synchronize()
        self.seconds.append(time.perf_counter() - self.begun)
        if len(self.seconds) == 1:
            self.found["compiler"] = compiler_seconds()
        if self.profile:
            self.after(len(self.seconds) - WARM - TIMED)
        self.begun = time.perf_counter()

    def after(self, number):
        """Begin and end a profile after so many rounds that were not timed."""
        if number == 0:
            self.python.enable()
        elif number == PROFILED:
            self.python.disable()
            self.found["host"] = functions(self.python, PROFILED)
            self.tracer = torch.profiler.profile()
            self.tracer.start()
        elif number == PROFILED + TRACED:
            self.tracer.stop()
            self.found["device"] = events(self.tracer, TRACED)
            self.look_for_waits()
        elif number == PROFILED + TRACED + WATCHED and torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
            self.found["waits"] = [(count / WATCHED, where) for where, count in self.waits.most_common(TOP)]

    def look_for_waits(self):
        """Count the places where the host waits for the device."""
        if not torch.cuda.is_available():
            return

        def note(message, *_, **__):
            if "synchroniz" in str(message):
                frames = [f for f in traceback.extract_stack() if "consilience" in f.filename]
                self.waits[" < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[:-4:-1])] += 1

        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compiler_seconds():
    """The compiler's own account: seconds by phase, those within others included."""
    if "torch._dynamo.utils" not in sys.modules:
        return {}
    spent = {name: sum(times) for name, times in torch._dynamo.utils.compilation_time_metrics.items()}
    return dict(sorted(((n, s) for n, s in spent.items() if s > 0.05), key=lambda it: -it[1])[:TOP])


def functions(profile, rounds, order="tottime"):
    """(own ms, ms with callees, calls, function) a round."""
    rows = []
    for (file, line, name), (_, calls, own, whole, _) in pstats.Stats(profile).stats.items():
        place = f"{'/'.join(Path(file).parts[-2:])}:{line} {name}" if line else name
        rows.append((1e3 * own / rounds, 1e3 * whole / rounds, calls / rounds, place))
    return sorted(rows, key=lambda row: -row[0 if order == "tottime" else 1])[:TOP]


def events(tracer, rounds):
    """Device ms a round by kernel, and calls of the driver a round."""
    kernels, driver = [], {}
    for event in tracer.key_averages():
        if event.self_device_time_total:
            kernels.append((event.self_device_time_total / 1e3 / rounds, event.count / rounds, event.key[:100]))
        if event.key.startswith(("cuda", "cuLaunch", "cuMemcpy")):
            driver[event.key] = event.count / rounds
    return {"kernels": sorted(kernels, reverse=True)[:TOP], "busy": sum(row[0] for row in kernels), "driver": driver}


def one(options):
    """One run in this process."""
    setting, small = SETTINGS[options.one], options.quick
    begun = time.perf_counter()
    federation, name = cifar10(*((40, 10) if small else (1000, 50)))
    torch.manual_seed(0)
    task = cs.Classification(cnn((3, 32, 32), 10))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        setting = {key: value for key, value in setting.items() if key != "precision"}
    synchronize()
    watch, before = Watch(options.profile and not options.first), time.perf_counter() - begun
    rounds = WARM + TIMED + (options.profile and PROFILED + TRACED + WATCHED)
    rounds = 3 if options.first else rounds
    if options.first:
        watch.python.enable()
    run = cs.fit(
        cs.FedAvg(cs.SGD(lr=0.1, batch_size=10)), task, federation, rounds=rounds, cohort=4 if small else 50, seed=0,
        engine=cs.Simulator(device=device, **setting), callbacks=[watch], out=None, progress=False,
    )  # fmt: skip
    if options.first:
        watch.python.disable()
        watch.found["first"] = functions(watch.python, 1, "cumulative")
    first, *rest = watch.seconds
    timed = watch.seconds[WARM : WARM + TIMED] or rest
    facts = {"first": first, "slowest": max(rest), "round": statistics.median(timed), "least": min(timed)}
    memory = torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else 0.0
    facts |= {
        "evaluation": evaluation(run, 200 if small else 10_000),
        "data": before,
        "loss": run.history[-1]["loss"],
        "GiB": memory,
        "plan": str(run.plan),
        "images": name,
    }
    print(json.dumps({**facts, **watch.found}))


def evaluation(run, examples):
    """Seconds of scoring the model on so many examples, the second time."""
    data = run.federation.data[:examples]
    for _ in range(2):
        synchronize()
        begun = time.perf_counter()
        run.evaluate(data)
    return time.perf_counter() - begun


def launched(setting, folder, options, *words):
    """A run in a process of its own, whose caches are in the folder."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CONSILIENCE_PLANS": "plans.json"}
    environment = os.environ | {name: str(folder / place) for name, place in caches.items()}
    command = [sys.executable, __file__, "--one", setting, *words, *(["--quick"] if options.quick else [])]
    begun = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{setting} failed")
    return json.loads(done.stdout.splitlines()[-1]) | {"process": time.perf_counter() - begun}


def print_profile(found):
    """What `--profile` has found of one setting's rounds."""
    device, round = found["device"], 1e3 * found["round"]
    print(f"  device busy {device['busy']:.2f} ms of {round:.2f} ms a round; the driver's calls a round:")
    print("  " + ", ".join(f"{name} {count:g}" for name, count in sorted(device["driver"].items())))
    print("  device: ms, launches, kernel")
    for ms, count, name in device["kernels"]:
        print(f"  {ms:9.3f} {count:7g}  {name}")
    print("  host: own ms, ms with callees, calls, function (by cProfile, which slows it)")
    for own, whole, calls, name in found["host"]:
        print(f"  {own:9.3f} {whole:9.3f} {calls:8g}  {name}")
    for count, where in found.get("waits", []):
        print(f"  waits {count:g}: {where}")


def print_first(found):
    print("  before and in the first rounds: own s, s with callees, calls, function (by cProfile, which slows it)")
    for own, whole, calls, name in found["first"]:
        print(f"  {own / 1e3:9.3f} {whole / 1e3:9.3f} {calls:8g}  {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--profile-first", action="store_true")
    parser.add_argument("--quick", action="store_true", help="40 clients, 4 of them in a round")
    parser.add_argument("--one", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return one(options)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{gpu}, torch {torch.__version__}, {os.cpu_count()} cores", flush=True)
    print("| setting | cache | s a round | least | first, s | slowest | process, s | GiB | loss |")
    print("|---|---|---|---|---|---|---|---|---|")
    bytecode = tempfile.TemporaryDirectory()  # some machines keep none, and then each process compiles torch's anew
    os.environ.setdefault("PYTHONPYCACHEPREFIX", bytecode.name)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(
        [sys.executable, "-c", "import consilience, torch._inductor.compile_fx, torch._inductor.codegen.triton"]
    )
    for setting in options.settings:
        with tempfile.TemporaryDirectory() as temporary:
            for cache in ("cold", "warm"):
                words = ["--profile"] if options.profile and cache == "warm" else []
                it = launched(setting, Path(temporary), options, *words)
                print(
                    f"| {setting} | {cache} | {it['round']:.5f} | {it['least']:.5f} | {it['first']:.2f} | "
                    f"{it['slowest']:.2f} | {it['process']:.1f} | {it['GiB']:.2f} | {it['loss']:.4f} |",
                    flush=True,
                )
                print(f"  {it['plan']}; {it['images']}; 10,000 examples scored in {it['evaluation']:.3f} s", flush=True)
                print(f"  the compiler's account: { {n: round(s, 2) for n, s in it['compiler'].items()} }", flush=True)
            if options.profile:
                print_profile(it)
            if options.profile_first:
                print_first(launched(setting, Path(temporary), options, "--first"))


if __name__ == "__main__":
    main()
