"""Processes that are killed, and what must be left of their runs."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import consilience as cs
from consilience.core.records import leaves
from support.sealed import lines

BIN = Path(sys.executable).parent
PATIENCE = 90.0  # seconds; only a failure takes as long


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(Path(__file__).parents[1] / part) for part in ("", "system")),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def forked(work: Callable[..., Any], *args: Any) -> Iterator[BaseProcess]:
    """A process that does `work`, without the seconds that a new Python takes to import torch."""

    def child() -> None:
        torch.set_num_threads(1)  # a fork has none of its parent's threads
        work(*args)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def ended(process: BaseProcess) -> int | None:
    """The exit code of a forked process."""
    process.join(PATIENCE)
    return process.exitcode


def until(true: Callable[[], bool], alive: Callable[[], bool] = lambda: True) -> None:
    """Wait for something, as long as the process that is to bring it about is alive."""
    last = time.monotonic() + PATIENCE
    while not true():
        assert alive()
        assert time.monotonic() < last
        time.sleep(0.001)


def rounds_done(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def end(out: Path, rounds: int) -> dict[str, Tensor]:
    """All that the last checkpoint holds, and the client states that it names."""
    saved = cs.core.unpack((out / "checkpoints" / f"round-{rounds:07d}.safetensors").read_bytes())
    found = dict(leaves(saved))
    if (out / "states").exists():
        for client, round in saved.states.tolist():
            state = cs.core.unpack((out / "states" / f"{client}-{round}.safetensors").read_bytes())
            found |= {f"{client}.{name}": leaf for name, leaf in leaves(state)}
    return found


def assert_same_end(one: Path, other: Path, rounds: int) -> None:
    """Equal in every bit: the server, every client's state, and the metrics but for the clock."""
    a, b = end(one, rounds), end(other, rounds)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    histories = [lines(out) for out in (one, other)]
    assert [line["round"] for line in histories[0]] == list(range(1, rounds + 1))
    assert [{**line, "seconds": 0} for line in histories[0]] == [{**line, "seconds": 0} for line in histories[1]]
