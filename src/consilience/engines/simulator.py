"""The simulator: all clients in one process, on one device, in chunks that are computed as one batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core.errors import ClientError, ConfigError, nearest
from consilience.core.records import Tree, nbytes, rows
from consilience.data.cohort import Cohort, take
from consilience.data.federation import Federation
from consilience.engines.plan import Plan, chunk_sizes, finalists
from consilience.engines.ranks import ALONE, Ranks
from consilience.engines.session import Session
from consilience.engines.states import States
from consilience.engines.work import Share, chunks, compute, in_short, part_of
from consilience.engines.workers import Pool, can_fork, give_memory_back, keep_memory
from consilience.tasks.task import Task

log = logging.getLogger("consilience")
PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.float32}
_PROBE_STEPS = 3
_CHUNK_BYTES = 1 << 30
_WORTH_COMPILING = 120.0


@dataclass(frozen=True)
class Simulator:
    """Where and how to simulate. What is None is chosen: `chunk`, `workers` and their `threads` by timing a few steps,
    `compile` by what it would save over the planned rounds on a GPU (on a CPU it is off unless asked for).

    `precision` is float32, float64, or bf16: networks compute in bfloat16, weights and updates stay float32.
    """

    device: str | None = None
    chunk: int | None = None
    workers: int | None = None
    threads: int | None = None
    compile: bool | None = None
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(f"unknown precision {self.precision!r}; {nearest(self.precision, PRECISIONS)}")
        for name in ("chunk", "workers", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes and prints: it is the only one."""
        return True

    @contextmanager
    def started(self) -> Iterator[tuple[Simulator, Ranks]]:
        """(what this process computes with, who computes with it), for as long as a run takes."""
        yield self, ALONE

    def open(
        self,
        algorithm: Algorithm,
        task: Task,
        federation: Federation,
        *,
        seed: int,
        cohort: int,
        rounds: int,
        plan: Plan | None = None,
        ranks: Ranks = ALONE,
    ) -> Simulation:
        """Make ready for the rounds of one algorithm, which `ranks` share. A `plan` from an earlier session is
        followed, not chosen."""
        name = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
        if self.precision == "bf16" and device.type == "cpu":
            raise ConfigError("precision 'bf16' is for GPUs: on a CPU it is slower than float32, where it works at all")
        if plan is not None and plan.device != device.type:
            plan = None  # a plan for another kind of device says nothing about this one
        return Simulation(self, device, algorithm, task, federation, seed, cohort, rounds, plan, ranks)


class Simulation(Session):
    """The device's copy of the data, the prepared task, and the workers: everything that rounds share."""

    def __init__(
        self,
        simulator: Simulator,
        device: torch.device,
        algorithm: Algorithm,
        task: Task,
        federation: Federation,
        seed: int,
        cohort: int,
        rounds: int,
        plan: Plan | None,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._simulator, self._algorithm, self._seed, self._rounds = simulator, algorithm, seed, rounds
        if device.type == "cpu":
            keep_memory()
        self.federation = federation.to(device)
        self.cohort = min(cohort, len(federation))
        self.task = self._prepare(task, device, Plan(chunk=self.cohort))
        self._given = plan
        self._pool: Pool | None = None
        self.plan: Plan | None = None
        self._kept_on = torch.device("cpu")
        self._host_task, self._probed, self._cores = task, 0, torch.get_num_threads()

    def _prepare(self, task: Task, device: torch.device, plan: Plan) -> Task:
        precision = self._simulator.precision
        return task.prepare(
            device, PRECISIONS[precision], compile=plan.compile, bf16=precision == "bf16", chunk=plan.chunk
        )

    def close(self) -> None:
        """End the workers, and give torch its threads back."""
        torch.set_num_threads(self._cores)
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def settle(self, server: Tree, states: States, ids: Tensor, round: int) -> Plan:
        """Choose the plan (by timing, unless given) and start the workers; once, before the first round."""
        if self.plan is None:
            self._kept_on = states.device
            ids, self._probed = self._longest_first(ids)[:: self._ranks.size], round
            found = self._given or self._choose(server, states, ids)  # by all ranks at once, as it will be in earnest
            chosen = replace(Plan(**self._ranks.led(lambda: asdict(found))), device=self.task.device.type)
            if self._ranks.size > 1:
                chosen = replace(chosen, workers=1)  # a plan of the simulator may have had more
            give_memory_back()  # what large chunks took while they were timed
            self.task = self._prepare(self._host_task, self.task.device, chosen)
            if chosen.workers > 1 and chosen.compile:  # once, here: workers inherit the code and share its memory
                self._time(server, states, ids[: chosen.chunk], chosen.threads or 1, repeats=1)
            self._start(chosen)
        assert self.plan is not None
        return self.plan

    def _start(self, plan: Plan) -> None:
        self.plan = plan
        if plan.workers > 1:
            self._pool = Pool(plan.workers, plan.threads or 1, self._group)
        elif plan.threads:
            torch.set_num_threads(plan.threads)

    def round(self, server: Tree, states: States, ids: Tensor, round: int) -> tuple[Share, int]:
        """All of a round's clients: (their share, bytes sent down). Commits the accepted clients' new states.
        Clients are dealt out to the ranks like cards, longest first, so that all have about as much to do."""
        self.settle(server, states, ids, round)
        ids = self._longest_first(ids)
        hand = slice(self._ranks.rank, None, self._ranks.size)

        def work() -> Share:
            return self._everyone(ids[hand], part_of(message, hand), states.gather(ids[hand]), round)

        with self._cores_for_workers():
            message = self._algorithm.message(server, ids)
            share = self._ranks.merge(work, server, self._algorithm.additive)
            states.commit(torch.tensor(share.accepted, dtype=torch.int64), share.states, round)
        shared, own = nbytes(part_of(message, slice(0))), nbytes(message) - nbytes(part_of(message, slice(0)))
        return _by_id(share, self._algorithm.additive), shared * len(ids) + own

    @contextmanager
    def _cores_for_workers(self) -> Iterator[None]:
        """One thread here while workers have the cores: more would wait for each other at every copy of a state."""
        before = torch.get_num_threads()
        if self._pool is not None:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _longest_first(self, ids: Tensor) -> Tensor:
        return ids[self.federation.sizes[ids].argsort(descending=True, stable=True)]

    def _cohort(self, ids: Tensor, round: int, limit: int | None = None) -> Cohort:
        return Cohort(
            self.federation,
            ids,
            round=round,
            round_size=self.cohort,
            seed=self._seed,
            dtype=self.task.dtype,
            static=self.task.execution.compiled,
            augment=self.task.augment,
            take=self.task.once(take),
            limit=limit,
        )

    def _everyone(self, ids: Tensor, message: Tree, states: Tree, round: int, limit: int | None = None) -> Share:
        if self._pool is None:
            return self._group(ids, message, states, round, limit)
        return self._pool.run(ids, message, states, round, self._algorithm.additive, limit)

    def _group(self, ids: Tensor, message: Tree, states: Tree, round: int, limit: int | None = None) -> Share:
        """Some of a round's clients in this process, chunk by chunk: memory does not grow with their number."""
        assert self.plan is not None
        share = Share()
        for part in chunks(ids, self.plan.chunk):
            done = compute(
                self._algorithm,
                self.task,
                part_of(message, part),
                rows(states, part),
                self._cohort(ids[part], round, limit),
                self._kept_on,
            )
            share = share.merge(done, self._algorithm.additive)
        return share

    def _choose(self, server: Tree, states: States, ids: Tensor) -> Plan:
        if self.task.device.type != "cpu":
            return self._choose_on_device(server, states, ids)
        wanted, compile, cores = self._simulator, bool(self._simulator.compile), self._cores
        most_workers = min(cores, len(ids)) if can_fork() else 1
        crews = {(1, wanted.threads or cores), (1, wanted.threads or 1), (most_workers, wanted.threads or 1)}
        if wanted.workers:
            workers = min(wanted.workers, len(ids))
            crews = {(workers, wanted.threads or threads) for threads in ((1, cores) if workers == 1 else (1,))}
        if wanted.chunk and len(crews) == 1:
            return Plan(wanted.chunk, *crews.pop(), compile)
        sizes = chunk_sizes(len(ids), max(w for w, _ in crews), self._most(len(ids)))
        times: dict[tuple[int, int], float] = {}
        alone = ""
        for chunk in [wanted.chunk] if wanted.chunk else sizes:
            try:
                for threads in sorted({t for _, t in crews}):
                    times[chunk, threads] = self._time(server, states, ids[:chunk], threads)
            except ClientError as error:
                alone = self._only_alone(error, chunk)
                times = {(c, t): seconds for (c, t), seconds in times.items() if c == 1}
                break
            if min(seconds for (c, _), seconds in times.items() if c == chunk) > min(times.values()):
                break  # larger chunks will not be better, and may need much memory
        found = finalists(times, sorted(crews), len(ids), compile)
        left = [replace(plan, why=alone + plan.why) for plan in found]
        if len(left) == 1:
            return left[0]
        tried = [(self._try(plan, server, states, ids), plan) for plan in left]
        best, fastest = min(tried, key=lambda one: one[0])
        # Where one by one is as good as equal it needs less memory, and there workers suffer less than threads, which
        # meet after every operation, from whatever else runs.
        near = [plan for seconds, plan in tried if plan.chunk == 1 and seconds <= 1.15 * best]
        return max(near, key=lambda plan: plan.workers, default=fastest)

    def _only_alone(self, error: ClientError, chunk: int) -> str:
        """Why clients are computed one by one, if that was not tried yet, where several at once have failed."""
        if chunk == 1 or self._simulator.chunk:
            raise error
        why = f"several at once failed with {in_short(error.__cause__ or error)}"
        log.warning("clients are computed one by one, which may be slower: %s", why)
        return f"{why}; "

    def _try(self, plan: Plan, server: Tree, states: States, ids: Tensor) -> float:
        """Seconds of a few steps of the whole cohort: workers share caches and memory, which no timing of one tells."""
        self._start(plan)
        message, kept = self._algorithm.message(server, ids), states.gather(ids)
        seconds = []
        with self._cores_for_workers():
            for _ in range(4):
                start = time.perf_counter()
                self._everyone(ids, message, kept, self._probed, _PROBE_STEPS)
                seconds.append(time.perf_counter() - start)
        self.close()
        return min(seconds[1:])

    def _most(self, clients: int) -> int:
        """The largest chunk whose weights, gradients and updates stay within a share of memory."""
        bytes_a_client = 6 * self.task.size * self.task.dtype.itemsize
        return max(1, min(clients, _CHUNK_BYTES // bytes_a_client))

    def _time(self, server: Tree, states: States, ids: Tensor, threads: int, repeats: int = 3) -> float:
        """Seconds of one local step of one client, as measured for the clients `ids` together."""
        torch.set_num_threads(threads)
        try:
            message, kept = self._algorithm.message(server, ids), states.gather(ids)
            seconds = []
            for _ in range(repeats):  # the first warms up
                start = time.perf_counter()
                compute(self._algorithm, self.task, message, kept, self._cohort(ids, self._probed, _PROBE_STEPS))
                seconds.append(time.perf_counter() - start)
            return min(seconds[1:] or seconds) / len(ids) / _PROBE_STEPS
        finally:
            torch.set_num_threads(self._cores)

    def _choose_on_device(self, server: Tree, states: States, ids: Tensor) -> Plan:
        """On a GPU: the largest chunk that fits, compiled if the planned rounds are worth the wait."""
        chunk, alone = self._simulator.chunk or len(ids), ""
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
                alone, chunk = self._only_alone(error, chunk), 1
        planned = seconds * -(-len(ids) // chunk) * self._rounds
        compile = self._simulator.compile
        if compile is None:
            compile = planned > _WORTH_COMPILING
        return Plan(chunk, compile=compile, why=f"{alone}{planned:.0f} s of uncompiled work planned")

    def _time_whole(self, server: Tree, states: States, ids: Tensor) -> float:
        message, kept = self._algorithm.message(server, ids), states.gather(ids)
        for limit in (1, None):  # the first step warms up
            start = time.perf_counter()
            compute(self._algorithm, self.task, message, kept, self._cohort(ids, self._probed, limit))
            torch.accelerator.synchronize()
        return time.perf_counter() - start


def _by_id(share: Share, additive: bool) -> Share:
    """Methods that see updates one by one see them in the order of client ids, whatever the plan was."""
    if additive or not share.accepted:
        return share
    order = torch.tensor(share.accepted).argsort()
    update = rows(share.update, order)
    notes = {name: value[order] for name, value in share.notes.items()}
    accepted = [share.accepted[i] for i in order.tolist()]
    return replace(share, update=update, accepted=accepted, notes=notes, states=rows(share.states, order))
