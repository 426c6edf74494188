"""The simulator: all clients in one process, on one device, in chunks that are computed as one batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.compute.compiler import keep_code
from consilience.core import ConfigError, Count, check_types
from consilience.core.records import Tree, nbytes, rows
from consilience.data.cohort import Cohort, take
from consilience.data.federation import Federation
from consilience.engines.autotune import Autotuner
from consilience.engines.choice import Choice, Say, silent
from consilience.engines.plan import Plan, compiled_sizes
from consilience.engines.ranks import ALONE, Ranks
from consilience.engines.remembered import Remembered, key_of
from consilience.engines.session import RoundResult, Session
from consilience.engines.states import States
from consilience.engines.template import check_hidden, encoding_of, template_of
from consilience.engines.work import Share, chunks, compute, part_of, refused_clients
from consilience.engines.workers import Pool, give_memory_back, keep_memory
from consilience.secure import Encoding
from consilience.tasks.statistics import Sums, client_sums, estimate, with_sums
from consilience.tasks.task import Task

log = logging.getLogger("consilience")
Precision = Literal["float32", "float64", "bf16"]
PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.float32}


@dataclass(frozen=True)
class Simulator:
    """Simulates all clients in this process and its workers.

    The engine chooses every setting that is None: `chunk`, `workers` and their `threads` by timing a few steps,
    `compile` by the time that it saves over the planned rounds. What it measures it remembers for later runs, in the
    user's cache folder (see docs/architecture.md). With the `precision` bf16, networks compute in bfloat16 while
    weights and updates stay float32.

    With `secure`, updates become integers before anything is added (see `consilience.secure.Encoding`), as in a
    deployment with secure aggregation. Sums are then exact, and do not depend on the plan. An update out of the
    encoding's bounds is rejected, and methods that need updates one by one are refused.
    """

    device: str | None = None
    chunk: Count | None = None
    workers: Count | None = None
    threads: Count | None = None
    compile: bool | None = None
    precision: Precision = "float32"
    secure: bool = False

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def leads(self) -> bool:
        return True

    @contextmanager
    def started(self) -> Iterator[tuple[Simulator, Ranks]]:
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
        if self.secure:
            check_hidden([algorithm])
        return Simulation(self, device, algorithm, task, federation, seed, cohort, rounds, plan, ranks)


class Simulation(Session):
    """The device's copy of the data, the prepared task, and the workers."""

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
        if not task.pads:
            self._simulator = _without_padding(simulator)
        if device.type == "cpu":
            keep_memory()
        self.federation = federation.to(device)
        self.cohort = min(cohort, len(federation))
        self.task = self._prepare(task, device, Plan(chunk=self.cohort))
        self._given, self._tasks = plan, {(False, self.cohort): self.task}
        self._pool: Pool | None = None
        self.plan: Plan | None = None
        self._encoding: Encoding | None = None
        self._next: Cohort | None = None
        self._drawn: tuple[int, Tensor] | None = None
        self._kept_on = torch.device("cpu")
        self._host_task, self._cores = task, torch.get_num_threads()

    def _prepare(self, task: Task, device: torch.device, plan: Plan) -> Task:
        if plan.compile:
            keep_code()
        precision, sizes = self._simulator.precision, self.federation.sizes
        return task.prepare(
            device, PRECISIONS[precision], compile=plan.compile, bf16=precision == "bf16", chunk=plan.chunk,
            even=bool((sizes == sizes[0]).all()) and self.federation.steps == 1,
        )  # fmt: skip

    def close(self) -> None:
        torch.set_num_threads(self._cores)
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def settle(self, server: Tree, states: States, ids: Tensor, round: int, say: Say = silent) -> Plan:
        self._kept_on, states = states.device, states.local  # to time steps, any states will do
        if self._simulator.secure:
            self._encoding = self._integers(server, states, ids)
        ids = self._longest_first(ids)[:: self._ranks.size]

        def ready(plan: Plan) -> float:
            return self._ready(plan, server, states, ids, round)

        found = self._given
        if found is None:  # chosen by all ranks at once, as in a round
            wanted, sizes = self._simulator, self.federation.sizes[ids]
            key = key_of(wanted, self._algorithm, self.task, self.federation, len(ids), self._ranks.size)
            tuner = partial(self.autotuner, round)
            found = Choice(Remembered.default(), key, self._rounds, sizes, tuner, ready, say)(server, states, ids)
        chosen = replace(Plan(**self._ranks.led(lambda: asdict(found))), device=self.task.device.type)
        if self._ranks.size > 1:
            chosen = replace(chosen, workers=1)  # a plan of the simulator may have had more
        give_memory_back()  # what large chunks took while they were timed
        if chosen.compile:
            say("compiling")
        ready(chosen)
        self._tasks = {(chosen.compile, chosen.chunk): self.task}
        self._start(chosen)
        return chosen

    def _ready(self, plan: Plan, server: Tree, states: States, ids: Tensor, round: int) -> float:
        """Prepare the task for a plan, and return the seconds that it took. On a CPU it is compiled for the cohorts of
        a first step here, once: workers inherit the code and share its memory."""
        begun, kind = time.perf_counter(), (plan.compile, plan.chunk)
        if kind in self._tasks:
            self.task = self._tasks[kind]
            return 0.0
        self.task = self._tasks[kind] = self._prepare(self._host_task, self.task.device, plan)
        if plan.compile and self.task.device.type == "cpu":
            for clients in compiled_sizes(plan, self.federation.sizes[ids]):
                self.autotuner(round).time(server, states, ids[:clients], plan.threads or 1, repeats=1)
        return time.perf_counter() - begun

    def _integers(self, server: Tree, states: States, ids: Tensor) -> Encoding:
        """The integers that stand for updates."""
        given = self._algorithm, self.task, self.federation, server, states, ids
        template, _ = template_of(*given, seed=self._seed, cohort=self.cohort)
        return encoding_of(template, self.federation, self.cohort)

    def autotuner(self, round: int) -> Autotuner:
        @contextmanager
        def trial(plan: Plan) -> Iterator[Callable[[Tensor, Tree, Tree, int], Share]]:
            self._start(plan)
            with self.cores_for_workers():
                yield lambda ids, message, kept, limit: self._everyone(ids, message, kept, round, limit)
            self.close()

        def cohort(ids: Tensor, limit: int | None) -> Cohort:
            return self._cohort(ids, round, limit)

        examples = self.federation.examples / len(self.federation) / self.federation.steps
        return Autotuner(self._simulator, self._algorithm, self.task, cohort, trial, self._cores, examples)

    def _start(self, plan: Plan) -> None:
        self.plan = plan
        if plan.workers > 1:
            self._pool = Pool(plan.workers, plan.threads or 1, self._group)
        elif plan.threads:
            torch.set_num_threads(plan.threads)

    def round(self, server: Tree, states: States, ids: Tensor, round: int) -> RoundResult:
        ids = self._longest_first(ids)  # dealt out in turn, so that all ranks have about as much to do
        message = self._algorithm.message(server, ids)
        with self.cores_for_workers():
            share = self._judged(server, message, states, ids, round)
            states.commit(torch.tensor(share.kept, dtype=torch.int64), share.states, round)
            share = replace(share, states=None)
        shared, own = nbytes(part_of(message, slice(0))), nbytes(message) - nbytes(part_of(message, slice(0)))
        return RoundResult(_by_id(share, self._algorithm.additive), server, shared * len(ids) + own)

    def _judged(self, server: Tree, message: Tree, states: States, ids: Tensor, round: int) -> Share:
        """The round's share without the clients that the method refuses. As their updates are in the sum, the others
        are computed again: all randomness is a function of the round and the client, so their updates are the same."""
        share = self._shared(server, message, states, ids, round)
        refused = refused_clients(self._algorithm, server, share)
        if not refused:
            return share
        kept = torch.tensor([client not in refused for client in ids.tolist()])
        again = Share()
        if kept.any():
            again = self._judged(server, part_of(message, kept), states, ids[kept], round)
        return replace(again, rejected=again.rejected | refused, bytes_up=share.bytes_up)

    def _shared(self, server: Tree, message: Tree, states: States, ids: Tensor, round: int) -> Share:
        """The share of all ranks, each of which computes its hand of the clients `ids`."""
        hands = self._ranks.deal(ids, self.federation.sizes[ids])
        hand = hands[self._ranks.rank]

        def work() -> Share:
            return self._everyone(ids[hand], part_of(message, hand), states.lent(ids, hands), round)

        share = self._ranks.merge(work, server, self._algorithm.additive)
        if self._encoding is None or not share.accepted:
            return share
        return replace(share, update=self._encoding.decode(share.update))

    def statistics(self, theta: Tensor) -> Sums | None:
        def ask(total: Sums | None) -> Iterator[Sums]:
            task = self.task if total is None else with_sums(self.task, total)
            for client in range(len(self.federation)):
                yield client_sums(task, theta, self._cohort(torch.tensor([client]), 1))

        return estimate(ask)

    @contextmanager
    def cores_for_workers(self) -> Iterator[None]:
        """One thread here while workers have the cores, and shortly before. More threads would wait for each other at
        every copy of a state, and after a parallel operation they keep a core busy for some milliseconds."""
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
            take=take if self.federation.data.by_index or self.task.augment is None else self.task.once(take),
            limit=limit,
        )

    def _everyone(self, ids: Tensor, message: Tree, states: Tree, round: int, limit: int | None = None) -> Share:
        if self._pool is None:
            return self._group(ids, message, states, round, limit)
        return self._pool.run(ids, message, states, round, self._algorithm.additive, limit)

    def _group(self, ids: Tensor, message: Tree, states: Tree, round: int, limit: int | None = None) -> Share:
        """Compute some clients in this process, chunk by chunk, so that memory does not grow with their number."""
        assert self.plan is not None
        share = Share()
        for part in chunks(ids, self.plan.chunk):
            own, cohort = (part_of(message, part), rows(states, part)), self._ready_cohort(ids[part], round, limit)
            last = part.stop >= len(ids) and limit is None
            ahead = partial(self._look_ahead, cohort) if last and self._looks_ahead else None
            done = compute(self._algorithm, self.task, *own, cohort, self._kept_on, self._encoding, ahead)
            share = share.merge(done, self._algorithm.additive)
        return share

    @property
    def _looks_ahead(self) -> bool:
        """Whether the host has time for the next round while it waits for the device."""
        return self.task.device.type != "cpu" and self._ranks.size == 1 and not self.federation.data.by_index

    def clients(self, algorithm: Algorithm, seed: int, round: int) -> Tensor:
        if self._drawn is None or self._drawn[0] != round:
            self._drawn = round, super().clients(algorithm, seed, round)
        return self._drawn[1]

    def _look_ahead(self, cohort: Cohort) -> None:
        """Make the first cohort of the next round, and its first batch, while the device computes this one."""
        assert self.plan is not None
        ids = self._longest_first(self.clients(self._algorithm, self._seed, cohort.round + 1))
        self._next = self._cohort(ids[: self.plan.chunk], cohort.round + 1)
        self._next.begin_like(cohort)

    def _ready_cohort(self, ids: Tensor, round: int, limit: int | None) -> Cohort:
        """The clients of a chunk; those that were made ahead, if they are the same."""
        ready, self._next = self._next, None
        if ready is None or limit is not None or ready.round != round or not torch.equal(ready.ids, ids):
            return self._cohort(ids, round, limit)
        return ready


def _without_padding(simulator: Simulator) -> Simulator:
    """Settings under which batches have no padding, for tasks that mix the examples of a batch."""
    if (simulator.chunk or 1) > 1 or simulator.compile:
        log.warning(
            "the task mixes the examples of a batch, so its clients are computed one by one, without padding: chunk is "
            "1 and compile is false"
        )
    return replace(simulator, chunk=1, compile=False)


def _by_id(share: Share, additive: bool) -> Share:
    """Methods that see updates one by one see them in the order of client ids, whatever the plan was."""
    if additive or not share.accepted:
        return share
    order = torch.tensor(share.accepted).argsort()
    update = rows(share.update, order)
    notes, measures = rows(share.numbers, order)
    accepted = [share.accepted[i] for i in order.tolist()]
    return replace(share, update=update, accepted=accepted, notes=notes, measures=measures)
