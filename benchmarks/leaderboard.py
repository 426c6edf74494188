"""The leaderboard on one machine with many cores: its rows side by side, each in a process of its own.

    python benchmarks/leaderboard.py runs/leaderboard --minutes 8.5 --at-once 14   # until it says that all is done
    python benchmarks/leaderboard.py runs/leaderboard --rows hospitals/FedAvg writers/
    python benchmarks/leaderboard.py runs/quick --quick

Rows that have a line in results.jsonl are not computed again, and a row that is stopped goes on from its checkpoints at
the next call. `--rows` are beginnings of federation/method. On a GPU several processes share it well with NVIDIA's MPS
running (`nvidia-cuda-mps-control -d`). The tables go to leaderboard.md in the directory, and a report to report.html.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from consilience.recipes import leaderboard
from consilience.recipes.base import Options
from consilience.report import write_report
from crew import side_by_side, stoppable


def wanted(given, options):
    """The rows to compute: one of each federation in turn, so that the GPU and the cores both have work."""
    found = [f"{arena.name}/{name}" for arena, name in leaderboard.missing(options)]
    chosen = [row for row in found if not given.rows or any(row.startswith(start) for start in given.rows)]
    arenas = [row.partition("/")[0] for row in chosen]
    turn = [arenas[:k].count(arena) for k, arena in enumerate(arenas)]
    return [row for _, row in sorted(zip(turn, chosen, strict=True), key=lambda pair: pair[0])]


def learn(given, options):
    """One row in this process."""
    arenas = {f"{arena.name}/{name}": (arena, name) for arena, name in leaderboard.rows(options.quick)}
    arena, name = arenas[given.run]
    lines = leaderboard.compute(arena, name, options, trials=given.trials, beside=given.at_once)
    leaderboard.write(lines, options)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="a directory, which may hold an earlier call's")
    parser.add_argument("--rows", nargs="+", help="federation/method, or the beginning of it; all unless told")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--at-once", type=int, default=1, help="how many rows are computed side by side")
    parser.add_argument("--seeds", type=int, default=leaderboard.RECIPE.seeds)
    parser.add_argument("--trials", type=int, help=f"of a method's settings; {leaderboard.TRIALS} unless told")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    given = parser.parse_args()
    options = Options(given.quick, given.seeds, Path(given.out), resume=True)
    torch.set_num_threads(1)
    if given.run:
        with stoppable():
            learn(given, options)
        return
    until, logs = time.time() + 60 * given.minutes, options.out / "logs"
    outcome = side_by_side(wanted(given, options), "--run", until=until, at_once=given.at_once, logs=logs)
    leaderboard.page(options, time.perf_counter())
    write_report(options.out)
    left = wanted(given, options)
    if outcome.failed:
        sys.exit(f"{', '.join(outcome.failed)} failed: see {logs}")
    print(f"{len(left)} rows are left: call again" if left else "all is done")


if __name__ == "__main__":
    main()
