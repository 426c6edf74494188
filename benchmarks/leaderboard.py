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
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from consilience.recipes import leaderboard
from consilience.recipes.base import Options
from consilience.report import write_report
from consilience.runs.interrupts import Interrupted


def wanted(given, options):
    """The rows to compute: one of each federation in turn, so that the GPU and the cores both have work."""
    found = [f"{arena.name}/{name}" for arena, name in leaderboard.missing(options)]
    chosen = [row for row in found if not given.rows or any(row.startswith(start) for start in given.rows)]
    arenas = [row.partition("/")[0] for row in chosen]
    turn = [arenas[:k].count(arena) for k, arena in enumerate(arenas)]
    return [row for _, row in sorted(zip(turn, chosen, strict=True), key=lambda pair: pair[0])]


def learn(given, options):
    """One row in this process, which a background job may have started without Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arenas = {f"{arena.name}/{name}": (arena, name) for arena, name in leaderboard.rows(options.quick)}
    arena, name = arenas[given.run]
    lines = leaderboard.compute(arena, name, options, trials=given.trials, beside=given.at_once)
    leaderboard.write(lines, options)


def started(row, log):
    """A process that computes a row, and writes to the end of a file."""
    command = [sys.executable, __file__, *sys.argv[1:], "--run", row]
    with open(log, "a") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)


def side_by_side(given, options, until):
    """Rows to their ends, or until the time is up: the rows whose process failed."""
    waiting, running, failed = wanted(given, options), {}, []
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    try:
        while (waiting or running) and time.time() < until:
            while waiting and len(running) < given.at_once:
                row = waiting.pop(0)
                running[row] = started(row, logs / f"{row.replace('/', ' ')}.txt")
            for row, child in list(running.items()):
                if child.poll() is not None:
                    failed += [row] * (running.pop(row).returncode != 0)
                    print(f"{row}: {'failed' if row in failed else 'done'}", flush=True)
            time.sleep(0.2)
    except KeyboardInterrupt:  # as if the time were up
        pass
    for child in running.values():
        child.send_signal(signal.SIGINT)
    return failed + [row for row, child in running.items() if child.wait() not in (0, 2)]


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
        try:
            learn(given, options)
        except (Interrupted, KeyboardInterrupt):  # the latter before the first round
            sys.exit(2)
        return
    start = time.time()
    failed = side_by_side(given, options, start + 60 * given.minutes)
    leaderboard.page(options, time.perf_counter())
    write_report(options.out)
    left = wanted(given, options)
    if failed:
        sys.exit(f"{', '.join(failed)} failed: see {options.out / 'logs'}")
    print(f"{len(left)} rows are left: call again" if left else "all is done")


if __name__ == "__main__":
    main()
