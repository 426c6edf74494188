"""The simulator's plan, chosen by timing a few local steps."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core import ClientError, Tree
from consilience.data.cohort import Cohort
from consilience.engines.plan import Plan, chunk_sizes, finalists
from consilience.engines.states import States
from consilience.engines.work import Share, compute, in_short
from consilience.engines.workers import can_fork
from consilience.tasks.task import Task

log = logging.getLogger("consilience")
PROBE_STEPS = 3
SLOW = 0.5  # seconds of a step that is timed once, so that choosing a plan costs less than a round or two
CHUNK_BYTES = 1 << 30
WORTH_COMPILING = 120.0  # seconds of planned work on a GPU


class Wanted(Protocol):
    """The settings of a plan that the user gave; None is chosen."""

    @property
    def chunk(self) -> int | None: ...
    @property
    def workers(self) -> int | None: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def compile(self) -> bool | None: ...


@dataclass(frozen=True)
class Autotuner:
    """Times plans on the clients `ids` of the first round. Nothing that it computes is kept.

    `cohort(ids, limit)` makes a cohort whose local work ends after `limit` steps. `trial(plan)` starts the workers of a
    plan for as long as it is open, and gives a function that computes some clients by it."""

    wanted: Wanted
    algorithm: Algorithm
    task: Task
    cohort: Callable[[Tensor, int | None], Cohort]
    trial: Callable[[Plan], AbstractContextManager[Callable[[Tensor, Tree, Tree, int], Share]]]
    cores: int
    rounds: int

    def choose(self, server: Tree, states: States, ids: Tensor) -> Plan:
        if self.task.device.type != "cpu":
            return self.choose_on_gpu(server, states, ids)
        wanted, compile = self.wanted, bool(self.wanted.compile)
        crews = self._crews(len(ids))
        if wanted.chunk and len(crews) == 1:
            return Plan(wanted.chunk, *crews.pop(), compile)
        times, why = self._times(server, states, ids, crews)
        found = [replace(plan, why=why + plan.why) for plan in finalists(times, sorted(crews), len(ids), compile)]
        if len(found) == 1:
            return found[0]
        tried = [(self._try(plan, server, states, ids), plan) for plan in found]
        best, fastest = min(tried, key=lambda one: one[0])
        # One by one needs less memory. Workers suffer less from other processes than threads, which synchronise after
        # every operation.
        near = [plan for seconds, plan in tried if plan.chunk == 1 and seconds <= 1.15 * best]
        return max(near, key=lambda plan: plan.workers, default=fastest)

    def _crews(self, clients: int) -> set[tuple[int, int]]:
        """Pairs (workers, threads of each) worth timing."""
        wanted, cores = self.wanted, self.cores
        if wanted.workers:
            workers = min(wanted.workers, clients)
            return {(workers, wanted.threads or threads) for threads in ((1, cores) if workers == 1 else (1,))}
        most = min(cores, clients) if can_fork() else 1
        return {(1, wanted.threads or cores), (1, wanted.threads or 1), (most, wanted.threads or 1)}

    def _times(
        self, server: Tree, states: States, ids: Tensor, crews: set[tuple[int, int]]
    ) -> tuple[dict[tuple[int, int], float], str]:
        """Seconds of a client's step by (chunk, threads); and why clients are computed one by one, if they must be."""
        wanted = self.wanted.chunk
        sizes = chunk_sizes(len(ids), max(w for w, _ in crews), self._largest_chunk(len(ids)))
        times: dict[tuple[int, int], float] = {}
        for chunk in [wanted] if wanted else sizes:
            try:
                for threads in sorted({t for _, t in crews}):
                    times[chunk, threads] = self.time(server, states, ids[:chunk], threads)
            except ClientError as error:
                return {(c, t): s for (c, t), s in times.items() if c == 1}, self._only_one_by_one(error, chunk)
            if min(seconds for (c, _), seconds in times.items() if c == chunk) > min(times.values()):
                break  # larger chunks will not be better, and may need much memory
        return times, ""

    def _only_one_by_one(self, error: ClientError, chunk: int) -> str:
        """The reason, where several clients at once have failed; the error itself where one client fails too."""
        if chunk == 1 or self.wanted.chunk:
            raise error
        why = f"several at once failed with {in_short(error.__cause__ or error)}"
        log.warning("clients are computed one by one, which may be slower: %s", why)
        return f"{why}; "

    def _try(self, plan: Plan, server: Tree, states: States, ids: Tensor) -> float:
        """Seconds of a few steps of the whole cohort: workers share caches and memory, so timing one is not enough."""
        message, kept = self.algorithm.message(server, ids), states.gather(ids)
        seconds = []
        with self.trial(plan) as run:
            if (first := _seconds(lambda: run(ids, message, kept, 1))) > SLOW:
                return first * PROBE_STEPS
            for _ in range(3):
                seconds.append(_seconds(lambda: run(ids, message, kept, PROBE_STEPS)))
        return min(seconds)

    def _largest_chunk(self, clients: int) -> int:
        """The largest chunk whose weights, gradients and updates stay within a share of memory."""
        bytes_a_client = 6 * self.task.size * self.task.dtype.itemsize
        return max(1, min(clients, CHUNK_BYTES // bytes_a_client))

    def time(self, server: Tree, states: States, ids: Tensor, threads: int, repeats: int = 3) -> float:
        """Seconds of one local step of one client, as measured for the clients `ids` together."""
        torch.set_num_threads(threads)
        try:
            message, kept = self.algorithm.message(server, ids), states.gather(ids)

            def run(steps: int) -> float:
                return _seconds(lambda: compute(self.algorithm, self.task, message, kept, self.cohort(ids, steps)))

            if (first := run(1)) > SLOW or repeats == 1:
                return first / len(ids)
            return min(run(PROBE_STEPS) for _ in range(repeats - 1)) / len(ids) / PROBE_STEPS
        finally:
            torch.set_num_threads(self.cores)

    def choose_on_gpu(self, server: Tree, states: States, ids: Tensor) -> Plan:
        """The largest chunk that fits, compiled if the planned rounds are worth the wait."""
        chunk, why = self.wanted.chunk or len(ids), ""
        while True:
            try:
                seconds = self._time_whole(server, states, ids[:chunk])
                break
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                if chunk == 1:
                    raise
                chunk = -(-chunk // 2)
            except ClientError as error:
                why, chunk = self._only_one_by_one(error, chunk), 1
        planned = seconds * -(-len(ids) // chunk) * self.rounds
        compile = self.wanted.compile
        if compile is None:
            compile = planned > WORTH_COMPILING
        return Plan(chunk, compile=compile, why=f"{why}{planned:.0f} s of uncompiled work planned")

    def _time_whole(self, server: Tree, states: States, ids: Tensor) -> float:
        message, kept = self.algorithm.message(server, ids), states.gather(ids)
        for limit in (1, None):  # the first step warms up
            start = time.perf_counter()
            compute(self.algorithm, self.task, message, kept, self.cohort(ids, limit))
            torch.accelerator.synchronize()
        return time.perf_counter() - start


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
