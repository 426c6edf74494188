"""What all programs share: the job, the data, and taking turns with the others.

A program trains as its library does, and calls `Turns.done` after each round, which waits there for its next turn. So
the programs are interleaved round by round, whatever loop the library has. It needs only numpy, as some of the
libraries have no PyTorch."""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass
class Job:
    """`x` [N, C, H, W] float32, `y` [N] and `order` [clients, examples]: the rows of every client. `initial` are the
    weights in PyTorch's order, `cohorts` the clients of every round. `device` is cpu or cuda."""

    name: str
    device: str
    lr: float
    batch_size: int
    x: np.ndarray
    y: np.ndarray
    order: np.ndarray
    initial: list
    cohorts: np.ndarray

    @classmethod
    def of(cls, folder):
        facts = json.loads((Path(folder) / "job.json").read_text())
        arrays = {name: np.load(Path(folder) / f"{name}.npy", mmap_mode="c") for name in ("x", "y", "order", "cohorts")}
        with np.load(Path(folder) / "initial.npz") as initial:
            return cls(**facts, **arrays, initial=[initial[name] for name in initial.files])

    def client(self, number):
        rows = self.order[number]
        return np.ascontiguousarray(self.x[rows]), np.ascontiguousarray(self.y[rows])


class Turns:
    """Says that the program is ready, and then answers the benchmark: go (one round), weights (write them to a file),
    or the end of its input, where `close` is called and the program ends.

    Standard output is the benchmark's. What the library prints goes to standard error."""

    def __init__(self, weights, close=lambda: None):
        self.weights, self.close, self.begun = weights, close, 0.0
        self.out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.say(ready=True)

    def wait(self):
        while True:
            command, _, rest = sys.stdin.readline().strip().partition(" ")
            if command == "go":
                self.begun = time.perf_counter()
                return
            if command != "weights":
                self.close()
                os._exit(0)
            np.savez(rest, *[np.asarray(value) for value in self.weights()])
            self.say(written=rest)

    def done(self):
        self.say(seconds=time.perf_counter() - self.begun)
        self.wait()

    def say(self, **what):
        print(json.dumps(what), file=self.out, flush=True)
