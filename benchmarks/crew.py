"""Rows of a table side by side: this program is started once more for each row, in a process of its own; their cells.

A row that is asked to stop ends its round, writes a checkpoint and exits with `STOPPED`; the next call resumes it. Do
not kill a row on a GPU with NVIDIA's MPS: the others hang. So the crew sends Ctrl-C and waits.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from consilience.runs.interrupts import Interrupted
from consilience.studies.scores import paired_test

STOPPED = 2  # the exit code of a row that can be resumed


@dataclass(frozen=True)
class Outcome:
    """The rows that failed, and those that were stopped or not started."""

    failed: list[str]
    left: list[str]

    @property
    def done(self) -> bool:
        return not (self.failed or self.left)


def side_by_side(
    rows: Sequence[str], option: str, *, until: float, at_once: int | None = None, logs: Path | None = None
) -> Outcome:
    """Run this program with `option row` for each of `rows`, in their order and `at_once` at most (all if None), until
    all have ended or the time is `until`; then stop those that run. Ctrl-C is the end of the time.

    With a folder `logs` a row writes to the end of its own file there, and its end is announced."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with Ctrl-C ignored
    waiting, running, codes = list(rows), dict[str, subprocess.Popen[bytes]](), dict[str, int]()
    try:
        while (waiting or running) and time.time() < until:
            while waiting and (at_once is None or len(running) < at_once):
                running[waiting[0]] = _started(waiting[0], option, logs)
                del waiting[0]
            time.sleep(0.2)
            for row in [row for row, child in running.items() if child.poll() is not None]:
                codes[row] = running.pop(row).returncode
                if logs is not None:
                    print(f"{row}: {'failed' if codes[row] else 'done'}", flush=True)
    except KeyboardInterrupt:
        pass
    for child in running.values():
        child.send_signal(signal.SIGINT)
    codes |= {row: child.wait() for row, child in running.items()}
    failed = [row for row, code in codes.items() if code not in (0, STOPPED)]
    return Outcome(failed, [row for row in rows if codes.get(row, STOPPED) == STOPPED])


def _started(row: str, option: str, logs: Path | None) -> subprocess.Popen[bytes]:
    """The process of a row. Ctrl-C waits until `stoppable` is entered, so that it does not interrupt the imports."""
    with ExitStack() as held:
        out = None
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            out = held.enter_context(open(logs / f"{row.replace('/', ' ')}.txt", "a"))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        held.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        command = [sys.executable, *sys.argv, option, row]
        return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)


@contextmanager
def stoppable() -> Iterator[None]:
    """In the process of a row: Ctrl-C ends it with the exit code `STOPPED`."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield
    except (Interrupted, KeyboardInterrupt):  # the latter before the first round or after the last
        sys.exit(STOPPED)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process ends now, with the code of its own end


def folder_of(key: str) -> str:
    """A row's key as the name of a folder."""
    return "".join(c if c.isalnum() else "-" for c in key.lower())


def read_lines(path: str | Path | None) -> list[dict]:
    """The lines of JSON in a file, if there is one; other lines of a log are left out."""
    if path is None or not Path(path).exists():
        return []
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.startswith("{")]


def cell(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation of a table's cell."""
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def gap(differences: Sequence[float], digits: int) -> str:
    """The mean of paired differences, with its 95 % interval by Student's t where there are three or more."""
    if not differences:
        return "–"
    found = paired_test([(difference, 0.0) for difference in differences])
    interval = "" if found["low"] is None else f" [{found['low']:+.{digits}f}, {found['high']:+.{digits}f}]"
    return f"{found['difference']:+.{digits}f}{interval}".replace("-", "−")
