"""The round loop. Everything that outlives a round is decided here, and nothing of any method is."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core import guards, keys
from consilience.core.errors import CheckpointError, ConfigError, ConsilienceError
from consilience.core.files import write_atomically
from consilience.core.gaussian import Gaussian
from consilience.core.records import Tree, leaves, nbytes, pack, to, tree_map, unpack
from consilience.data.cohort import Info
from consilience.data.dataset import Dataset
from consilience.data.federation import Federation
from consilience.engines.plan import Plan
from consilience.engines.ranks import Ranks
from consilience.engines.session import Opener, Session
from consilience.engines.states import Fresh, InMemory, OnDisk, States
from consilience.engines.work import Share, chunks
from consilience.evaluation.scores import Evaluation
from consilience.evaluation.weights import marginals
from consilience.runs.directory import RunDirectory, Saved
from consilience.runs.progress import Bar
from consilience.runs.run import Callback, Run
from consilience.tasks.task import Task

log = logging.getLogger("consilience")
AUDITED = 64  # clients whose states an audit looks at together
DEVICE_SHARE = 0.4  # of a GPU's free memory that clients' states may take


class Interrupted(ConsilienceError):  # noqa: N818 (it is no error)
    """Ctrl-C: the run was saved and can go on."""


@dataclass(frozen=True)
class Stage:
    """A phase as this federation sees it: rounds up to `last`."""

    algorithm: Algorithm
    task: Task
    federation: Federation
    last: int


@contextmanager
def stop_requests(softly: bool = True) -> Iterator[threading.Event]:
    """Ctrl-C asks for a stop after the round; a second one, or any where it must not be `softly`, stops at once."""
    stop = threading.Event()
    if not softly or threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = signal.getsignal(signal.SIGINT)

    def ask(*_: object) -> None:
        stop.set()
        # Before the message: who reads it may press at once. A shell's background job begins with Ctrl-C ignored.
        signal.signal(signal.SIGINT, previous if callable(previous) else signal.default_int_handler)
        log.warning("stopping after this round; press Ctrl-C again to stop at once")

    signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


@dataclass
class Loop:
    """Rounds, stage after stage: states, evaluations, metrics and checkpoints. The run lives in `out`; `directory` is
    there for the rank that writes it."""

    engine: Opener
    ranks: Ranks
    out: Path | None
    directory: RunDirectory | None
    facts: dict[str, Any]
    rounds: int
    cohort: int
    seed: int
    test: Dataset | Federation | None
    evaluate_every: int
    checkpoint_every: int
    callbacks: Sequence[Callback]
    progress: bool
    state_memory: int
    debug: bool
    outside: Dataset | None
    history: list[dict[str, Any]] = field(default_factory=list)
    latest: Evaluation | None = None  # the last round is always evaluated, so at the end this is of the final model
    run: Run = field(init=False)
    session: Session = field(init=False)
    info: Info | None = None  # what the present stage was started with; None in the first
    writer: Executor = field(init=False)  # of checkpoints, while rounds go on
    writing: tuple[Future[None], Tree] | None = None  # the checkpoint that is being written, and its clients' states

    def begin(self, algorithm: Algorithm, at: int, saved: Saved, history: list[dict[str, Any]]) -> tuple[int, Saved]:
        """From a warm start, which becomes the first checkpoint."""
        self.history = history
        if self.directory is not None:
            for line in history:
                self.directory.append(line)
            self.directory.save(at, saved, algorithm.posterior(saved.server))
        return at, saved

    def go(self, stages: list[Stage], done: int, saved: Saved | None) -> Run:
        """All stages that are not over, from what was saved."""
        if done > self.rounds:
            raise CheckpointError(
                f"{self.out or 'the run'} has gone on to round {done} already: rounds is only {self.rounds}"
            )
        before: Run | None = None
        for number, stage in enumerate(stages):
            if done > stage.last:
                continue
            plan = self.facts["plans"][number]
            with self.engine.open(
                stage.algorithm,
                stage.task,
                stage.federation,
                seed=self.seed,
                cohort=self.cohort,
                rounds=stage.last - done,
                plan=None if plan is None else Plan(**plan),
                ranks=self.ranks,
            ) as self.session:
                self._enter(stage.algorithm, before, saved)
                self._rounds(number, done, stage.last)
            self._must_have_learned(since=stages[number - 1].last if number else 0)
            before, done, saved = self.run, stage.last, None
            if done == self.rounds:  # a switch that lies ahead is made when the run goes on
                break
        self.ranks.led(self._finish)
        return self.run

    def _must_have_learned(self, since: int) -> None:
        """Refuse to pass off the model that the present stage began with as what it has learned; warn of one that is of
        no use."""
        lines = [line for line in self.history if line["round"] > since]
        if lines and not any(line["clients"] for line in lines):
            reason = next((entry["reason"] for line in lines for entry in line["rejected"]), "nobody sent one")
            raise ConsilienceError(
                f"{self.run.algorithm.name}: no client's update was accepted in any of {len(lines)} rounds, so the "
                f"model is as it began ({reason}): take smaller steps (lr), or look at the data and the initial weights"
            )
        if (name := self._not_finite()) is not None:
            log.warning("the server's own %s is not finite, so the model is of no use: take smaller steps (lr)", name)

    def _finish(self) -> None:
        if self.directory is None:
            return
        self.directory.write_sheet()  # a run from before there was one may have nothing left to do
        self.run.latest = self.latest or (None if self.test is None else self._scores(last=True))
        if self.run.latest is not None:
            found = self._with_weights(self.run.latest.to_json())
            write_atomically(self.directory.path / "evaluation.json", json.dumps(found, indent=1))

    def _with_weights(self, found: dict[str, Any]) -> dict[str, Any]:
        """The last evaluation, and in short what the posterior says of single weights."""
        posterior = self.run.posterior
        weights = marginals(self.run.network, posterior) if isinstance(posterior, Gaussian) else None
        return found if weights is None else {**found, "posterior": weights}

    def _enter(self, algorithm: Algorithm, before: Run | None, saved: Saved | None) -> None:
        """The first stage, a stage that was saved, or the next one, which starts at the mean of the one before."""
        task, federation = self.session.task, self.session.federation
        numbers = (torch.tensor(value) for value in (self.seed, len(federation), federation.examples))
        info = Info(task.initial(), *numbers)
        if before is not None:
            mean = before.posterior.mean
            if mean.shape != info.initial.shape:
                raise ConfigError(
                    f"{before.algorithm.name} has made a network of another size, which {algorithm.name} cannot go on "
                    "with: fit it to a task of run.model instead"
                )
            info = replace(info, initial=mean.to(info.initial), before=before.server)
            self.info = replace(info, before=None)
        if saved is not None and saved.info is not None:
            self.info = to(saved.info, task.device)
        server = self._first(algorithm, info) if saved is None else to(saved.server, task.device)
        for_clients = self.info or info
        states = self.session.keep(self._states(lambda ids: algorithm.client(task, for_clients, self._sizes(ids))))
        if saved is not None:
            states.restore(saved.states)
        if self.test is not None:
            self.test = self.test.to(task.device)
        self.run = Run(algorithm, task, federation, server, states, self.history, self.out, test=self.test)

    def _first(self, algorithm: Algorithm, info: Info) -> Tree:
        """The server before the first round: rank 0's, where a method draws secrets and so has others in each."""
        server = algorithm.start(self.session.task, info)
        if self.ranks.size == 1:
            return server
        mine = pack(server)
        if not self.ranks.any(self.ranks.led(lambda: zlib.crc32(mine)) != zlib.crc32(mine)):
            return server
        return to(unpack(bytes.fromhex(self.ranks.led(mine.hex)), like=server), self.session.task.device)

    def _sizes(self, ids: Tensor) -> Tensor:
        return self.session.federation.sizes[ids].to(self.session.task.device, self.session.task.dtype).unsqueeze(1)

    def _states(self, fresh: Fresh) -> States:
        """On the device while they take little of its memory, else on the host, else in files. With a directory, what
        outgrows `state_memory` goes to files, at the latest when a checkpoint is made, which could not hold it all."""
        expected = nbytes(fresh(torch.tensor([0]))) * len(self.session.federation)
        device = self.session.task.device
        if device.type != "cuda" or self.ranks.any(expected >= DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]):
            device = torch.device("cpu")
        on_host = device.type == "cpu"
        if expected <= self.state_memory or (self.out is None and not on_host):
            return InMemory(fresh, device)
        if self.out is None:
            raise ConfigError(
                f"the clients' states need {expected / 2**30:.1f} GiB, more than state_memory "
                f"({self.state_memory / 2**30:.1f} GiB): pass out= so that they can be kept in files"
            )
        if self.ranks.size > 1:
            return OnDisk(fresh, self.out / "states", self.ranks.leads)
        return OnDisk(fresh, self.out / "states", room=self.state_memory if on_host else expected, device=device)

    def _rounds(self, stage: int, done: int, last: int) -> None:
        if done >= last:
            return
        self._settle(stage, done + 1)
        shown = self.progress and self.ranks.leads
        with (
            ThreadPoolExecutor(1) as self.writer,
            stop_requests(self.session.stops_softly) as stop,
            Bar(self.run.algorithm.name, self.rounds, shown, done) as bar,
        ):
            for number in range(done + 1, last + 1):
                line = self._round(number)
                bar.update(line)
                if self.callbacks:
                    self.ranks.led(partial(self._call_back, line))
                stopping = self.ranks.any(stop.is_set()) and number < self.rounds
                if number % self.checkpoint_every == 0 or number == last or stopping:
                    self.ranks.led(partial(self._save, number))
                if stopping or number == last or not self.session.saves_aside:
                    self.ranks.led(self._written)
                if stopping:
                    where = "it was not kept, as no directory was given" if self.out is None else "resume it"
                    raise Interrupted(f"stopped after round {number} of {self.rounds}; {where}")

    def _call_back(self, line: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback(self.run, line)

    def _ids(self, number: int) -> Tensor:
        key = keys.key(self.seed, purpose="cohort", round=number)
        return keys.sample(key, len(self.session.federation), self.session.cohort)

    def _settle(self, stage: int, number: int) -> None:
        """Choose the plan and write it down, so that a resumed run follows it."""
        self.run.plan = self.session.settle(self.run.server, self.run.states, self._ids(number), number)
        self.run.task = self.session.task
        log.info("plan: %s", self.run.plan)
        if self.directory is not None:
            self.facts["engine"] = f"{self.ranks}: {self.run.plan}"
            self.facts["plans"][stage] = asdict(self.run.plan)
            self.directory.write_facts(self.facts)

    def _round(self, number: int) -> dict[str, Any]:
        start = time.perf_counter()
        share, down = self.session.round(self.run.server, self.run.states, self._ids(number), number)
        if share.server is not None:
            self.run.server = share.server
        if share.accepted:
            with guards.watch() as acted:
                fused = self.run.algorithm.fuse(self.run.server, share.update)
                key = keys.key(self.seed, purpose="server", round=number)
                self.run.server = self.run.algorithm.advance(self.run.task, fused, key.to(self.run.task.device))
            for name, count in acted.items():
                share.guards[name] = share.guards.get(name, 0) + int(count)
        else:
            share.rejected = self._blamed(share.rejected)
        line = self._line(number, share, down, time.perf_counter() - start)
        if self.debug or self._due(number):
            line |= self.ranks.led(partial(self._judge, number))
        self.history.append(line)
        if self.directory is not None:
            self.directory.append(line)
        return line

    def _due(self, number: int) -> bool:
        scored = self.test is not None or self.session.asks_clients
        return scored and (number % self.evaluate_every == 0 or number == self.rounds)

    def _judge(self, number: int) -> dict[str, Any]:
        """What a round's line has of an evaluation, if one is due, and of an audit."""
        found: dict[str, Any] = {}
        scores = self._scores(last=number == self.rounds) if self._due(number) else None
        if scores is not None:
            self.latest = self.run.latest = scores
            found["eval"] = scores.point
            if scores.marginal is not None:
                found["marginal"] = scores.marginal
        if self.debug:
            found["audit"] = self.run.algorithm.audit(self.run.server, self._everyone())
        return found

    def _scores(self, last: bool) -> Evaluation | None:
        if self.test is None:
            return self.session.evaluate(self.run.algorithm, self.run.server)
        return self.run.evaluate(self.test, outside=self.outside if last else None)

    def _line(self, number: int, share: Share, down: int, seconds: float) -> dict[str, Any]:
        federation = self.session.federation
        n = federation.sizes[torch.tensor(share.accepted, dtype=torch.int64)].double()
        notes = {name: float((value.double() * n).sum() / n.sum()) for name, value in share.notes.items()}
        self._complain(number, share)
        rejected = [{"client": federation.name(c), "reason": reason} for c, reason in share.rejected.items()]
        return {
            **dict.fromkeys(("round", "seconds", "clients")),  # in this order, and never a note's
            **notes,
            "round": number,
            "seconds": seconds,
            "clients": len(share.accepted),
            "bytes_down": down,
            "bytes_up": share.bytes_up,
            "rejected": rejected,
            "guards": {name: count for name, count in share.guards.items() if count},
            **self.run.algorithm.facts(self.run.server),
        }

    def _blamed(self, rejected: dict[int, str]) -> dict[int, str]:
        """Why updates were left out, in a round in which all were: clients cannot help it if the server told them
        numbers that are not finite."""
        name = self._not_finite()
        return rejected if name is None else dict.fromkeys(rejected, f"the server's own {name} is not finite")

    def _not_finite(self) -> str | None:
        """What of the server is not, if anything."""
        return next((name for name, leaf in leaves(self.run.server) if not bool(leaf.isfinite().all())), None)

    def _complain(self, number: int, share: Share) -> None:
        """Say who was left out; once where all were, and not again while nothing has changed."""
        if share.accepted:
            for client, reason in share.rejected.items():
                who = self.session.federation.name(client)
                log.warning("round %d: the update of client %r was left out: %s", number, who, reason)
        elif share.rejected and (not self.history or self.history[-1]["clients"]):
            reason = next(iter(share.rejected.values()))
            log.warning("round %d: the update of every client was left out, and nothing is learned: %s", number, reason)

    def _save(self, number: int) -> None:
        """A checkpoint of the server as it is now, and of all states, written while the next rounds are computed."""
        if self.directory is None:
            return
        self._written()
        states, server = self.run.states.snapshot(), tree_map(torch.clone, self.run.server)
        saved = Saved(server, states, self.info)
        self.writing = (
            self.writer.submit(self.directory.save, number, saved, self.run.algorithm.posterior(server)), states
        )  # fmt: skip

    def _written(self) -> None:
        """Wait for the checkpoint; what only older ones needed may go."""
        if self.writing is not None:
            (done, states), self.writing = self.writing, None
            done.result()
            self.run.states.forget(states)

    def _everyone(self) -> Iterator[Tree]:
        """All clients' states, in groups that fit on the device."""
        clients = torch.arange(len(self.session.federation))
        for group in chunks(clients, AUDITED):
            yield to(self.run.states.gather(clients[group]), self.run.task.device)
