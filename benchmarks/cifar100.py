"""The papers' CIFAR-100 benchmarks on one GPU: the methods side by side, each in a process of its own.

    python benchmarks/cifar100.py runs/cifar100 --minutes 9      # again and again, until it says that all is done
    python benchmarks/cifar100.py runs/cifar100 --methods FedAvg "FedEP(I)" --rounds 1000 --minutes 25
    python benchmarks/cifar100.py runs/fednp --recipe fednp-cifar100 --minutes 25
    python benchmarks/cifar100.py runs/quick --quick             # a few rounds of small networks, on any machine

For FedEP's recipe first the rounds of FedAvg that all methods begin with; then the methods, for so many minutes. A run
that is stopped goes on from its checkpoint at the next call. With `--volatile` nothing is kept but the figures: FedEP's
500 sites are 45 GB, which take a while to be written. One process leaves a part of an H200 idle; with NVIDIA's MPS
running (`nvidia-cuda-mps-control -d`) several share it well. Do not kill one of them: the others hang. Ctrl-C lets all
end their round.

Figures go to points.csv in the directory, and a table of what there is so far is printed at the end.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import consilience as cs
from consilience.metrics import best, rounds_to
from consilience.recipes import fedep, fednp, fednp_published
from crew import side_by_side, stoppable

WARM = "warm"


@dataclass(frozen=True)
class Plan:
    """A recipe, the methods that matter most, what its tables show, and rounds from one evaluation to the next."""

    recipe: fedep.Benchmark | fednp.Benchmark
    methods: tuple[str, ...]
    limits: tuple[int, ...]
    window: int
    target: float
    every: int


PLANS = {
    "fedep-cifar100": Plan(
        fedep.CIFAR100, ("FedAvg", "FedPA", "FedEP(I)", "FedSEP(I)"), (1000, 1500), 100, target=0.45, every=20
    ),
    "fednp-cifar100": Plan(
        fednp_published.BENCHMARKS[0],
        ("FedAvg", fednp_published.FASTER, "FedNP", fednp_published.PUBLISHED),
        (50, 100),
        10,
        target=0.6,
        every=1,
    ),
}
COLUMNS = (
    "method",
    "round",
    "seconds",
    "accuracy",
    "nll",
    "ece",
    "accuracy, marginal",
    "nll, marginal",
    "ece, marginal",
)


def folder(name):
    return name.lower().replace("(", "-").replace(")", "").replace(", ", "-").replace(" ", "-")


def learn(options, name):
    """One method in this process; the warm start is FedAvg's first rounds."""
    plan, bench, here = PLANS[options.recipe], benchmark(options), Path(options.out)
    setting = bench.setting(options.seed, options.quick)
    warming, warm = name == WARM, switch(options)
    cohort = bench.cohort if warm else None
    chunk = {"chunk": cohort or len(setting.federation), "precision": "bf16", "compile": True}
    method = bench.method("FedAvg") if warming else bench.methods()[name]
    kept = warming or not options.volatile
    with open(here / f"{folder(name)}.csv", "a", newline="") as file:
        sheet = csv.writer(file)

        def note(run, line):
            if "eval" in line:
                scores = [
                    part.get(m)
                    for part in (line["eval"], line.get("marginal") or {})
                    for m in ("accuracy", "nll", "ece")
                ]
                sheet.writerow(["FedAvg" if warming else name, line["round"], line["seconds"], *scores])
                file.flush()

        cs.fit(
            method,
            setting.task,
            setting.federation,
            rounds=warm if warming else options.rounds or bench.rounds,
            cohort=cohort,
            test=setting.test,
            seed=options.seed,
            out=cs.runs.Storage(
                here / folder(name) if kept else None,
                checkpoint_every=500,
                warm=None if warming or not warm else here / WARM,
            ),
            resume=kept,
            engine=cs.Simulator(**(chunk if torch.cuda.is_available() else {"chunk": 3, "workers": 1})),
            evaluate_every=1 if options.quick else options.every or plan.every,
            callbacks=[note],
            progress=False,
        )


def benchmark(options):
    """The recipe's setting, at its size."""
    recipe = PLANS[options.recipe].recipe
    return recipe.quick() if options.quick else recipe


def switch(options):
    """Rounds of FedAvg that all methods begin with."""
    return getattr(benchmark(options), "switch", 0)


def points(here):
    """Every evaluation, the last one where a round was run again."""
    found = {}
    for path in sorted(here.glob("*.csv")):
        if path.name != "points.csv":
            with open(path, newline="") as file:
                found |= {(row[0], int(row[1])): row for row in csv.reader(file)}
    rows = [found[key] for key in sorted(found)]
    with open(here / "points.csv", "w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return rows


def table(rows, plan, window):
    """Best mean accuracy over a window up to some rounds, and means over the last one of the others."""
    reach = f"rounds to {plan.target:.0%}"
    print(f"| method | up to round | accuracy | {reach} | ECE | NLL | marginal accuracy | ECE | NLL | s a round |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    warm = [row for row in rows if row[0] == "FedAvg"]
    for name in dict.fromkeys(row[0] for row in rows):
        mine = [row for row in rows if row[0] == name]
        whole = mine if name == "FedAvg" else [row for row in warm if int(row[1]) < int(mine[0][1])] + mine
        for last in sorted({min(limit, int(whole[-1][1])) for limit in plan.limits}):
            some = [row for row in whole if int(row[1]) <= last]
            curve = [(int(row[1]), float(row[3])) for row in some]
            recent = [row for row in some if int(row[1]) > last - window]

            def mean(column, recent=recent):
                values = [float(row[column]) for row in recent if row[column]]
                return sum(values) / len(values) if values else None

            seconds = sorted(float(row[2]) for row in recent)[len(recent) // 2]
            figures = [best(curve, window), mean(5), mean(4), mean(6), mean(8), mean(7)]
            accuracy, *others = ("–" if f is None else f"{f:.3f}" for f in figures)
            reached = rounds_to(curve, plan.target)
            print(f"| {name} | {last} | {accuracy} | {reached or '–'} | {' | '.join(others)} | {seconds:.3f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="a directory, which may hold an earlier call's")
    parser.add_argument("--recipe", choices=PLANS, default="fedep-cifar100")
    parser.add_argument("--methods", nargs="+", help="those that matter most unless told")
    parser.add_argument("--rounds", type=int, help="the paper's unless told")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--every", type=int, help="rounds from one evaluation to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--volatile", action="store_true", help="keep figures only: no checkpoints of the methods")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if options.run:
        with stoppable():
            learn(options, options.run)
        return
    here, until, plan = Path(options.out), time.time() + 60 * options.minutes, PLANS[options.recipe]
    here.mkdir(parents=True, exist_ok=True)
    outcome = side_by_side([WARM] if switch(options) else [], "--run", until=until)
    if outcome.done:
        outcome = side_by_side(options.methods or plan.methods, "--run", until=until)
    table(points(here), plan, 3 if options.quick else plan.window)
    if outcome.failed:
        sys.exit(f"{', '.join(outcome.failed)} failed, with a message above")
    print("all is done" if outcome.done else "not all is done: call again")


if __name__ == "__main__":
    main()
