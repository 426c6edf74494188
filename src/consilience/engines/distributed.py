"""Several processes, each on its own GPU or core: ranks that torchrun starts share the clients of every round."""

import atexit
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from consilience.core import ConfigError, ConsilienceError, Count, Positive, check_types
from consilience.engines.ranks import Ranks
from consilience.engines.simulator import Precision, Simulator
from consilience.engines.together import Together

log = logging.getLogger("consilience")


@dataclass(frozen=True)
class Distributed:
    """The simulator under `torchrun`: every rank computes its part of a round's clients, on its own GPU or on a CPU,
    and updates are all-reduced. Results equal the simulator's up to rounding. `secure` is the simulator's.

    All ranks run the same script with the same seeds. Each holds the server, and the states of its own clients: rank r
    those of r, r + size, …; data that are read by index are read by the rank that needs them. Rank 0 alone evaluates,
    writes all but states, and calls callbacks; `leads` is True there. All ranks must see the run's directory. If one
    ends, or does not answer for `timeout` seconds, the others end too. It has not been run on several GPUs yet.
    """

    device: Literal["cpu", "cuda"] | None = None
    chunk: Count | None = None
    threads: Count | None = None
    compile: bool | None = None
    precision: Precision = "float32"
    secure: bool = False
    timeout: Positive = 1800.0

    def __post_init__(self) -> None:
        check_types(self)

    def _simulator(self, device: str | None) -> Simulator:
        return Simulator(device, self.chunk, 1, self.threads, self.compile, self.precision, self.secure)

    @property
    def leads(self) -> bool:
        return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0

    @contextmanager
    def started(self) -> Iterator[tuple[Simulator, Ranks]]:
        if not dist.is_initialized() and not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ConfigError(
                "Distributed runs in processes that torchrun starts: torchrun --nproc-per-node 2 script.py, or "
                "torchrun --no-python --nproc-per-node 2 consilience run config.toml --set engine.name=Distributed"
            )
        device = self._own_device()
        ranks, level = Together(_group(device, timedelta(seconds=self.timeout)), self.timeout), log.level
        if not ranks.leads:
            log.setLevel(logging.ERROR)  # the same message is logged once
        try:
            yield self._simulator(device), ranks
        finally:
            log.setLevel(level)
            ranks.leave()

    def _own_device(self) -> str:
        if (self.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
            return "cpu"
        number, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if number >= there:
            raise ConfigError(f"rank {number} of this machine has no GPU of its own, as there are {there}: start fewer")
        torch.cuda.set_device(number)  # "cuda" now means this one
        return f"cuda:{number}"


def _group(device: str, timeout: timedelta) -> dist.ProcessGroup:
    """A group of all processes, for one run. Host bytes go through gloo, GPU tensors through NCCL. The world group
    stays until the process ends: a second one at the same address would read the first one's keys."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=timeout)
            atexit.register(_leave)
        group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise ConsilienceError(f"the ranks did not find each other: {str(error).splitlines()[0]}") from error
    return group


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
