"""Seconds a round beside other simulators of federated learning, in one run on the same machine.

    python benchmarks/peers.py                       # W1 to W3, about ten minutes once everything is installed
    python benchmarks/peers.py W2 --rounds 6 --folder ~/peers
    python benchmarks/peers.py W5 --rounds 100 --packages ~/wheels   # on a GPU

Every library trains in a process of its own, in a virtual environment that this script makes in `--folder` (a temporary
one if left out): PyTorch first, in the version of this environment, and then the library by its name. A library that
cannot be installed, imported or run is named with the reason, and left out. All start from the same weights, with the
same examples at the same clients, batches and step sizes, and take turns, one round each, so that whatever else the
machine does hits them alike. Flower draws the clients of a round itself; all others train the same.

W5 is the CIFAR-10 benchmark of pfl-research, on a GPU if there is one: beside ours in three settings there are the loop
and pfl-research. A machine that cannot install anything takes the libraries from a folder of unpacked wheels.
pfl-research needs these beside torch, numpy and scipy:

    for wheel in pfl dill multiprocess dp-accounting==0.5.1 prv-accountant absl-py attrs packaging==25.0; do
        pip download $wheel -d fetched --no-deps --only-binary=:all: --python-version 312
    done
    for wheel in fetched/*.whl; do unzip -q -o $wheel -d wheels; done

Figures are medians over the rounds after the first, which is listed apart, with everything that precedes it: compiling,
choosing a plan, starting workers. At the end all must reach about the same accuracy, else the run fails when all its
tables are printed. Two rounds are too few for that: early accuracies depend on the shuffles.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import venv
from pathlib import Path

import numpy as np
import torch

import consilience as cs
from consilience.core import keys
from simulator import images

PROGRAMS = Path(__file__).parent / "peer_programs"
sys.path.insert(0, str(PROGRAMS))
import networks  # noqa: E402

# Clients, and those of a round.
SHAPES = {"W1": (100, 10), "W2": (100, 10), "W3": (10_000, 500), "W4": (10, 10), "W5": (1_000, 50)}
IMAGES = {"W4": ("fashion-mnist", 6_000), "W5": ("cifar10", 50_000)}
STEPS = {"W4": {"lr": 0.05, "batch_size": 16}, "W5": {"lr": 0.1, "batch_size": 10}}
OURS = {"ours": ("ours.py",), "ours, compiled": ("ours.py", "--compile"), "loop": ("loop.py",)}
ON_GPU = {**OURS, "ours, bf16": ("ours.py", "--compile", "--bf16")}
PEERS = {
    "pfl-research": ("pfl_research.py", "pfl"),
    "Flower": ("flower_program.py", "flwr[simulation]"),
    "FedJAX": (
        "fedjax_program.py",
        "fedjax",
        "dm-haiku<0.0.13",
        "jax<0.4.26",
        "jaxlib<0.4.26",
        "numpy<2",
        "scipy<1.13",
    ),  # has tree_map
    "FedLab": ("fedlab_program.py", "fedlab"),
}
TORCH = torch.__version__.partition("+")[0]
APART = 0.03  # accuracies may differ by so much: shuffles do, and Flower's clients
PATIENCE = 300  # seconds to wait for a round


def job(name, rounds, folder):
    """Write what every program reads; the test set."""
    clients, cohort = SHAPES[name]
    data = images(*IMAGES.get(name, ("mnist", 60_000)))
    every = torch.arange(len(data))
    x, y = data.inputs(every).numpy(), data.y.numpy()
    order = keys.permutations(keys.key(0, purpose="peers"), torch.tensor(len(data)), len(data)).numpy()
    torch.manual_seed(0)
    cohorts = [
        keys.sample(keys.key(0, purpose="cohort", round=r), clients, cohort).numpy() for r in range(1, rounds + 1)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {"x": x, "y": y, "order": order.reshape(clients, -1), "cohorts": np.stack(cohorts)}
    for what, array in arrays.items():
        np.save(folder / f"{what}.npy", array)
    np.savez(folder / "initial.npz", *networks.weights(networks.network(name)))
    device = "cuda" if name == "W5" and torch.cuda.is_available() else "cpu"
    facts = {"name": name, "device": device} | STEPS.get(name, {"lr": 0.05, "batch_size": 20})
    (folder / "job.json").write_text(json.dumps(facts))
    return torch.from_numpy(x[:10_000]), torch.from_numpy(y[:10_000])


def installed(name, packages, folder):
    """The Python of a library's own environment; an error's last line if it cannot be made."""
    home = folder / "environments" / name
    python = home / "bin" / "python"
    if (home / "ready").exists():
        return python
    venv.create(home, with_pip=True, clear=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    fixed = home / "fixed.txt"
    fixed.write_text(f"torch=={TORCH}\n")
    for wanted in ([f"torch=={TORCH}", "numpy"], [*packages, "-c", fixed]):
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=1200)
        if done.returncode:
            raise RuntimeError(last_line(done.stderr))
    (home / "ready").touch()
    return python


def takers(name):
    """Those that run a workload."""
    if name != "W5":
        return {*OURS, *PEERS}
    return {*(ON_GPU if torch.cuda.is_available() else OURS), "pfl-research"}


def last_line(text):
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


class Program:
    """A program that waits for its turns. It may import from a folder of `packages`."""

    def __init__(self, words, log, packages=None):
        self.log = log
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        if packages is not None:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages), environment.get("PYTHONPATH")]))
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                [*map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                cwd=PROGRAMS, env=environment, start_new_session=True,
            )  # fmt: skip

    def asked(self, command=""):
        """The answer to a command; without one, the program's word that it is ready."""
        timer = threading.Timer(PATIENCE, self.process.kill)
        timer.start()
        try:
            if command:
                self.process.stdin.write(f"{command}\n")
                self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            raise RuntimeError(last_line(self.log.read_text()))
        return json.loads(answer)

    def end(self):
        with contextlib.suppress(OSError):  # it ended by itself
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # with the processes that it started


def accuracy(name, file, x, y):
    with np.load(file) as saved:
        module = networks.load(networks.network(name), [saved[key] for key in saved.files])
    with torch.no_grad():
        return float((module(x).argmax(1) == y).float().mean())


def quiet():
    """Wait, for a minute at most, until the machine idles for a second: a program that still sets up its library would
    slow the others' first round, in which ours chooses a plan. Whether it does."""

    def ticks():
        numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return sum(numbers), numbers[3] + numbers[4]  # idle, or waiting for a disk

    for _ in range(60):
        before = ticks()
        time.sleep(1)
        total, idle = (b - a for a, b in zip(before, ticks(), strict=True))
        if idle > 0.9 * total:
            return True
    return False


def contest(name, commands, rounds, folder, packages):
    """Seconds of every round by program, accuracies, and the reasons of those that failed."""
    place = folder / name
    test = job(name, rounds, place)
    crew, times, found, failed = {}, {}, {}, {}

    def ask(who, command=""):
        try:
            return crew[who].asked(command)
        except RuntimeError as error:
            failed[who] = str(error)
            crew.pop(who).end()

    for who, words in commands.items():
        own = packages if who in PEERS else None
        crew[who] = Program([*words[:2], place, *words[2:]], folder / f"{name} {who}.log", own)
        times[who] = []
    for who in list(crew):
        ask(who)
    if not quiet():
        print(f"{name}: the machine is busy before the first round")
    for _ in range(rounds - 1):  # the last one would end the programs
        for who in list(crew):
            if answer := ask(who, "go"):
                times[who].append(answer["seconds"])
    for who, program in crew.items():
        program.asked(f"weights {place / 'weights.npz'}")
        found[who] = accuracy(name, place / "weights.npz", *test)
        program.end()
    return times, found, failed


def table(name, times, found, failed, plans):
    own = statistics.median(times["ours"][1:])
    print(f"\n{name}: seconds a round, {len(times['ours']) - 1} rounds after the first")
    print(f"{'':16} {'median':>8} {'least':>8} {'first':>8} {'over ours':>10} {'accuracy':>9}")
    for who, score in found.items():
        first, *rest = times[who]
        middle = statistics.median(rest)
        print(f"{who:16} {middle:8.4f} {min(rest):8.4f} {first:8.2f} {middle / own:9.2f}x {score:9.4f}", flush=True)
    for who in found:
        if who in plans and who != "loop":
            print(f"{who}: {last_line(plans[who].read_text())[:110]}")
    for who, reason in failed.items():
        print(f"{who:16} failed: {reason[:160]}")
    spread = max(found.values()) - min(found.values())
    return "" if spread <= APART else f"{name}: accuracies are {spread:.3f} apart, so they do not train the same"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["W1", "W2", "W3"], help=", ".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each program, the first included")
    parser.add_argument("--folder", type=Path, help="where environments and data are kept; temporary if left out")
    parser.add_argument("--only", nargs="*", default=list(PEERS), choices=list(PEERS), help="peers to run")
    parser.add_argument("--packages", type=Path, help="a folder of unpacked wheels, in place of virtual environments")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs peers from this folder")
    options = parser.parse_args()
    if unknown := [name for name in options.workloads if name not in SHAPES]:
        parser.error(f"unknown workload {unknown[0]}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        packages = options.packages and options.packages.resolve()
        os.environ.setdefault("CONSILIENCE_PLANS", str(folder / "plans.json"))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiler"))
        commands = {who: (sys.executable, PROGRAMS / words[0], *words[1:]) for who, words in ON_GPU.items()}
        for who in options.only:
            program, *wanted = PEERS[who]
            try:
                python = options.python if options.packages else installed(who, wanted, folder)
                commands[who] = python, PROGRAMS / program
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                print(f"{who} cannot be installed: {error}")
        print(f"{os.cpu_count()} CPU cores, torch {torch.__version__}, consilience {cs.__version__}", flush=True)
        found = []
        for name in options.workloads:
            plans = {who: folder / f"{name} {who}.log" for who in ON_GPU}
            running = {who: words for who, words in commands.items() if who in takers(name)}
            found.append(table(name, *contest(name, running, options.rounds + 1, folder, packages), plans))
        if any(found):
            raise SystemExit("\n".join(filter(None, found)))


if __name__ == "__main__":
    main()
