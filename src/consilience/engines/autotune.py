"""The simulator's plan, chosen by timing a few local steps."""

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core import ClientError, Tree
from consilience.data.cohort import Cohort
from consilience.engines.plan import Plan, chunk_sizes, finalists
from consilience.engines.remembered import Known, Timed
from consilience.engines.states import States
from consilience.engines.work import Share, compute, in_short
from consilience.engines.workers import can_fork
from consilience.tasks.task import Task

log = logging.getLogger("consilience")
PROBE_STEPS = 3
REPEATS = 3
SLOW = 0.25  # seconds: of slower steps no more than one is timed at once
FAR = 2.0  # slow steps that take so many times the best plan's are timed once; the first one has much to set up
ALLOWED = 5.0, 2.0  # choosing takes these seconds at most, or so many rounds if they are longer
CHUNK_BYTES = 1 << 30


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


@dataclass
class Stopwatch:
    """The time that choosing has taken, and what is known of a round."""

    begun: float = field(default_factory=time.perf_counter)
    steps: int = 1
    """The steps of the longest client."""
    batches: float = 0.0
    """The steps of a client on average; 0 until a client was timed."""
    round: float = 0.0
    """Seconds of a round, at least."""

    def allows(self, seconds: float) -> bool:
        """Whether there is time for something that takes so many seconds."""
        least, rounds = ALLOWED
        return time.perf_counter() - self.begun + seconds <= max(least, rounds * self.round)

    def taken(self, limit: int) -> int:
        """The steps of a client whose local work ends after `limit` steps."""
        return min(limit, self.steps)


@dataclass(frozen=True)
class Autotuner:
    """Times plans on the clients `ids` of the first round. Nothing that it computes is kept.

    `cohort(ids, limit)` makes a cohort whose local work ends after `limit` steps. `trial(plan)` starts the workers of a
    plan for as long as it is open, and gives a function that computes some clients by it. A client has so many
    `examples` on average."""

    wanted: Wanted
    algorithm: Algorithm
    task: Task
    cohort: Callable[[Tensor, int | None], Cohort]
    trial: Callable[[Plan], AbstractContextManager[Callable[[Tensor, Tree, Tree, int], Share]]]
    cores: int
    examples: float
    watch: Stopwatch = field(default_factory=Stopwatch)

    def choose(self, server: Tree, states: States, ids: Tensor) -> Known:
        """The fastest plan without compiled code, and the plans worth compiling."""
        if self.task.device.type != "cpu":
            return self.choose_on_gpu(server, states, ids)
        wanted = self.wanted
        crews = self._crews(len(ids))
        if wanted.chunk and len(crews) == 1:
            given = Plan(wanted.chunk, *crews.pop())
            return Known(Timed(given, 0.0), (given,))
        times, why = self._times(server, states, ids, crews)
        found = [
            Timed(replace(plan, why=why + plan.why), seconds * self.watch.batches)
            for seconds, plan in finalists(times, sorted(crews), len(ids))
        ]
        if len(found) > 1 or wanted.compile is None:  # compiled code is tried out too, and compared
            found = [self.try_out(it, server, states, ids) for it in found]
        fastest = min(found, key=lambda it: it.round)
        # One by one needs less memory. Workers suffer less from other processes than threads, which synchronise after
        # every operation.
        near = [it for it in found if it.plan.chunk == 1 and it.round <= 1.15 * fastest.round]
        return Known(max(near, key=lambda it: it.plan.workers, default=fastest), candidates(found))

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
            best = min(times.values(), default=math.inf)
            if times and not self.watch.allows(2 * chunk * best):
                break
            try:
                for threads in sorted({t for _, t in crews}):
                    times[chunk, threads] = self.time(server, states, ids[:chunk], threads, best)
                    if not self.watch.round:
                        self.watch.round = times[chunk, threads] * self.watch.batches * len(ids) / self.cores
            except ClientError as error:
                return {(c, t): s for (c, t), s in times.items() if c == 1}, self._only_one_by_one(error, chunk)
            if min(seconds for (c, _), seconds in times.items() if c == chunk) > best:
                break  # larger chunks will not be better, and may need much memory
        return times, ""

    def _only_one_by_one(self, error: ClientError, chunk: int) -> str:
        """The reason, where several clients at once have failed; the error itself where one client fails too."""
        if chunk == 1 or self.wanted.chunk:
            raise error
        why = f"several at once failed with {in_short(error.__cause__ or error)}"
        log.warning("clients are computed one by one, which may be slower: %s", why)
        return f"{why}; "

    def try_out(self, found: Timed, server: Tree, states: States, ids: Tensor) -> Timed:
        """The plan with its round as a few steps of the whole cohort tell it: workers share caches and memory, so
        timing one is not enough. Without time for that, the plan as it was."""
        step = found.round / self.watch.batches
        if not self.watch.allows(2 * step):
            return found
        message, kept = self.algorithm.message(server, ids), states.gather(ids)
        with self.trial(found.plan) as run:
            best = _seconds(lambda: run(ids, message, kept, 1))
            limit = 1 if best > SLOW else PROBE_STEPS
            steps = self.watch.taken(limit)
            for _ in range(REPEATS - 1):
                if self.watch.allows(best * steps):
                    best = min(best, _seconds(lambda: run(ids, message, kept, limit)) / steps)
        return replace(found, round=best * self.watch.batches)

    def _largest_chunk(self, clients: int) -> int:
        """The largest chunk whose weights, gradients and updates stay within a share of memory."""
        bytes_a_client = 6 * self.task.size * self.task.dtype.itemsize
        return max(1, min(clients, CHUNK_BYTES // bytes_a_client))

    def time(
        self, server: Tree, states: States, ids: Tensor, threads: int, best: float = math.inf, repeats: int = REPEATS
    ) -> float:
        """Seconds of one local step of one client, as measured for the clients `ids` together. A slow step that takes
        far longer than the `best` one is timed once."""
        torch.set_num_threads(threads)
        try:
            message, kept = self.algorithm.message(server, ids), states.gather(ids)

            def run(limit: int) -> float:
                cohort = self.cohort(ids, limit)
                seconds = _seconds(lambda: compute(self.algorithm, self.task, message, kept, cohort))
                self._note(cohort)
                return seconds / len(ids) / self.watch.taken(limit)

            least = run(1)
            for _ in range(repeats - 1):
                more = len(ids) * least * self.watch.taken(PROBE_STEPS)
                if (least < FAR * best or more < SLOW) and self.watch.allows(more):
                    least = min(least, run(PROBE_STEPS))
            return least
        finally:
            torch.set_num_threads(self.cores)

    def _note(self, cohort: Cohort) -> None:
        """Note the steps of the first clients that are timed; those of the others are in proportion to their data."""
        if not self.watch.batches:
            self.watch.steps = max(1, -(-cohort.batches // len(cohort)))
            self.watch.batches = max(1.0, cohort.batches / float(cohort.n.sum()) * self.examples)

    def choose_on_gpu(self, server: Tree, states: States, ids: Tensor) -> Known:
        """The largest chunk that fits."""
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
        round = seconds * -(-len(ids) // chunk)
        plan = Plan(chunk, compile=bool(self.wanted.compile), why=f"{why}{round:.2g} s an uncompiled round")
        return Known(Timed(plan, round), (plan,))

    def _time_whole(self, server: Tree, states: States, ids: Tensor) -> float:
        message, kept = self.algorithm.message(server, ids), states.gather(ids)
        for limit in (1, None):  # the first step warms up
            start = time.perf_counter()
            compute(self.algorithm, self.task, message, kept, self.cohort(ids, limit))
            torch.accelerator.synchronize()
        return time.perf_counter() - start


def candidates(found: list[Timed]) -> tuple[Plan, ...]:
    """The plans worth compiling: the fastest with several clients at once, and the fastest one by one. Plain code does
    not tell which of them compiled code would follow: most networks gain more at once, and large convolutions less."""
    kinds = [[it for it in found if (it.plan.chunk > 1) == several] for several in (True, False)]
    return tuple(min(kind, key=lambda it: it.round).plan for kind in kinds if kind)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
