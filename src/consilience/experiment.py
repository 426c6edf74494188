"""fit: the round loop. Everything that outlives a round is decided here, and nothing of any method is."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import consilience
from consilience import guards, keys
from consilience.algorithms.base import Algorithm
from consilience.checkpoint import RunDirectory, Saved, describe, identity
from consilience.cohort import Info
from consilience.data.dataset import Dataset
from consilience.data.federation import Federation
from consilience.engines.plan import Plan
from consilience.engines.simulator import Session, Simulator
from consilience.engines.states import InMemory, OnDisk, States
from consilience.engines.work import Share
from consilience.errors import CheckpointError, ConfigError, ConsilienceError, DataError
from consilience.evaluation import (
    Belief,
    Detection,
    Evaluation,
    Uncertainty,
    averaged,
    detect,
    draws,
    evaluate,
    uncertainty,
)
from consilience.files import write_atomically
from consilience.progress import Bar
from consilience.records import Tree, nbytes, rows, to
from consilience.task import Task

log = logging.getLogger("consilience")
DESCRIBED = 1000  # clients whose label counts go into run.json
Callback = Callable[["Run", dict[str, Any]], None]


class Interrupted(ConsilienceError):  # noqa: N818 (it is no error)
    """Ctrl-C: the run was saved and can go on."""


@dataclass
class Run:
    """A federation that has learned: the server's belief, the history, and what to do with them."""

    algorithm: Algorithm
    task: Task
    federation: Federation
    server: Tree
    states: States
    history: list[dict[str, Any]] = field(default_factory=list)
    out: Path | None = None
    plan: Plan | None = None

    @property
    def posterior(self) -> Belief:
        """What the server believes of the weights: a `Gaussian`, or a `Point` without uncertainty."""
        return self.algorithm.posterior(self.server)

    @property
    def model(self) -> nn.Module:
        """The user's module with the learned (mean) weights."""
        return self.task.release(self.posterior.mean)

    def personal(self, client: int) -> Belief:
        """What one client would use."""
        state = self.states.gather(torch.tensor([client]))
        return self.algorithm.personal(self.server, to(rows(state, 0), self.task.device))

    def predict(self, x: Tensor, samples: int = 0) -> Tensor:
        """Predictions for model inputs x [N, ...]; averaged over `samples` draws of the posterior, if it has one."""
        return averaged(self.task, draws(self.posterior, samples), x)

    def evaluate(self, test: Dataset | Federation, samples: int = 10) -> Evaluation:
        """Scores on test data; for a Federation of the same clients, every client by its own belief."""
        belief: Belief | Callable[[int], Belief] = self.posterior
        if isinstance(test, Federation) and len(test) == len(self.federation):
            belief = self.personal
        return evaluate(self.task, belief, test, samples)

    def uncertainty(self, data: Dataset, samples: int = 10) -> Uncertainty:
        """How uncertain the server's belief is about every example, and why."""
        return uncertainty(self.task, self.posterior, data, samples)

    def detect(self, inside: Dataset, outside: Dataset, samples: int = 10) -> Detection:
        """How well the server's uncertainty tells examples of another kind from those it has learned."""
        return detect(self.task, self.posterior, inside, outside, samples)


def fit(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    *,
    rounds: int,
    cohort: int | None = None,
    test: Dataset | Federation | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    engine: Simulator | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int = 10,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    state_memory: int = 8 << 30,
) -> Run:
    """Run `rounds` rounds of an algorithm on a federation, `cohort` clients each (all when None).

    With `out`, the run is a directory: metrics.jsonl, checkpoints, evaluation.json; with `resume` it goes on from its
    last checkpoint to the very same result. `evaluate_every` is a tenth of the rounds when None. Clients' states that
    together outgrow `state_memory` bytes are kept in files under `out`.
    """
    cohort, evaluate_every = _checked(task, federation, test, rounds, cohort, evaluate_every, checkpoint_every)
    engine = engine or Simulator()
    task, arranged = algorithm.adapt(task), algorithm.arrange(federation)
    who = identity(algorithm, task, arranged, cohort, seed, engine.precision)
    directory = None if out is None else RunDirectory(Path(out))
    old = _existing(directory, who, resume)
    plan = Plan(**old["plan"]) if old and old.get("plan") else None
    opened = engine.open(algorithm, task, arranged, seed=seed, cohort=cohort, rounds=rounds, plan=plan)
    with opened as session, ExitStack() as held:
        run = _begin(algorithm, session, seed, directory, state_memory)
        facts = _facts(algorithm, task, arranged, rounds, cohort, seed, who, plan)
        done = 0
        if directory is not None:
            if old is None:
                directory.create(facts)
            held.enter_context(directory.locked())
            done = _restore(run, directory) if old else 0
            if done > rounds:
                raise CheckpointError(f"{directory.path} has gone on to round {done} already: rounds is only {rounds}")
        loop = _Loop(run, session, directory, facts, seed, evaluate_every, checkpoint_every, test, callbacks)
        loop.go(done, rounds, progress)
        if test is not None and directory is not None:
            final = json.dumps((loop.latest or run.evaluate(test)).to_json(), indent=1)
            write_atomically(directory.path / "evaluation.json", final)
    return run


def _checked(
    task: Task,
    federation: Federation,
    test: Dataset | Federation | None,
    rounds: int,
    cohort: int | None,
    evaluate_every: int | None,
    checkpoint_every: int,
) -> tuple[int, int]:
    at_least_one = {
        "rounds": rounds,
        "cohort": cohort,
        "evaluate_every": evaluate_every,
        "checkpoint_every": checkpoint_every,
    }
    for name, value in at_least_one.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if cohort is not None and cohort > len(federation):
        raise ConfigError(f"cohort is {cohort}, but the federation has {len(federation)} clients")
    empty = (federation.sizes == 0).nonzero().flatten().tolist()
    if empty:
        names = ", ".join(repr(federation.name(c)) for c in empty[:3])
        raise DataError(f"{len(empty)} of {len(federation)} clients have no data, among them {names}: leave them out")
    task.check(federation.data)
    if test is not None:
        if isinstance(test, Federation) and not test.examples:
            raise DataError(f"none of the {len(test)} clients has any test data: hold out a larger share")
        task.check(test.data if isinstance(test, Federation) else test)
    return cohort or len(federation), evaluate_every or max(1, rounds // 10)


def _existing(directory: RunDirectory | None, who: Any, resume: bool) -> dict[str, Any] | None:
    """The facts of the run to go on with, if there is one."""
    if resume and directory is None:
        raise ConfigError("resume needs the run's directory: pass out=")
    if directory is None or not directory.exists():
        return None
    if not resume:
        raise CheckpointError(f"{directory.path} holds a run already: resume it, or choose another directory")
    directory.must_match(who)
    return directory.facts()


def _begin(algorithm: Algorithm, session: Session, seed: int, directory: RunDirectory | None, state_memory: int) -> Run:
    task, federation = session.task, session.federation
    info = Info(task.initial(), torch.tensor(seed), torch.tensor(len(federation)), torch.tensor(federation.examples))

    def fresh(ids: Tensor) -> Tree:
        n = federation.sizes[ids].to(task.device, task.dtype).unsqueeze(1)
        return algorithm.client(task, info, n)

    expected = nbytes(fresh(torch.tensor([0]))) * len(federation)
    states: States = InMemory(fresh)
    if expected > state_memory:
        if directory is None:
            raise ConfigError(
                f"the clients' states need {expected / 2**30:.1f} GiB, more than state_memory "
                f"({state_memory / 2**30:.1f} GiB): pass out= so that they can be kept in files"
            )
        states = OnDisk(fresh, directory.path / "states")
    out = None if directory is None else directory.path
    return Run(algorithm, task, federation, algorithm.start(task, info), states, out=out)


def _facts(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    rounds: int,
    cohort: int,
    seed: int,
    who: Any,
    plan: Plan | None,
) -> dict[str, Any]:
    data, counts = federation.data, federation.label_counts()
    return {
        "algorithm": describe(algorithm),
        "task": {"kind": task.kind, "parameters": task.size, "module": str(task.module)},
        "federation": {
            "data": data.name,
            "note": data.note,
            "how": federation.how,
            "clients": len(federation),
            "examples": federation.examples,
            "names": None if federation.names is None else list(federation.names[:DESCRIBED]),
            "sizes": federation.sizes[:DESCRIBED].tolist(),
            "classes": list(data.classes),
            "label_counts": None if counts is None else counts[:DESCRIBED].tolist(),
        },
        "rounds": rounds,
        "cohort": cohort,
        "seed": seed,
        "engine": "simulator",
        "plan": None if plan is None else asdict(plan),
        "versions": {"consilience": consilience.__version__, "torch": str(torch.__version__)},
        "identity": who,
    }


def _restore(run: Run, directory: RunDirectory) -> int:
    found = directory.latest()
    if found is None:
        directory.history(up_to=0)
        return 0
    done, saved = found
    in_files = isinstance(saved.states, Tensor)
    if saved.states is not None and in_files != isinstance(run.states, OnDisk):
        place = "files" if in_files else "memory"
        raise CheckpointError(f"{directory.path} keeps the clients' states in {place}: give state_memory as before")
    run.server = to(saved.server, run.task.device)
    run.states.restore(saved.states)
    run.history = directory.history(up_to=done)
    log.info("going on after round %d", done)
    return done


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """Ctrl-C asks for a stop after the round; a second one stops at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = signal.getsignal(signal.SIGINT)

    def ask(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, previous)  # before the message: who reads it may press at once
        log.warning("stopping after this round; press Ctrl-C again to stop at once")

    signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


@dataclass
class _Loop:
    run: Run
    session: Session
    directory: RunDirectory | None
    facts: dict[str, Any]
    seed: int
    evaluate_every: int
    checkpoint_every: int
    test: Dataset | Federation | None
    callbacks: Sequence[Callback]
    latest: Evaluation | None = None  # the last round is always evaluated, so at the end this is of the final model

    def go(self, done: int, rounds: int, progress: bool) -> None:
        if done >= rounds:
            return
        self._settle(done + 1)
        with _stop_requests() as stop, Bar(self.run.algorithm.name, rounds, progress, done) as bar:
            for number in range(done + 1, rounds + 1):
                line = self._round(number, last=number == rounds)
                bar.update(line)
                for callback in self.callbacks:
                    callback(self.run, line)
                stopping = stop.is_set() and number < rounds
                if number % self.checkpoint_every == 0 or number == rounds or stopping:
                    self._save(number)
                if stopping:
                    where = "it was not kept, as no directory was given" if self.directory is None else "resume it"
                    raise Interrupted(f"stopped after round {number} of {rounds}; {where}")

    def _ids(self, number: int) -> Tensor:
        key = keys.key(self.seed, purpose="cohort", round=number)
        return keys.sample(key, len(self.session.federation), self.session.cohort)

    def _settle(self, number: int) -> None:
        """Choose the plan and write it down, so that a resumed run follows it."""
        self.run.plan = self.session.settle(self.run.server, self.run.states, self._ids(number), number)
        self.run.task = self.session.task
        log.info("plan: %s", self.run.plan)
        if self.directory is not None:
            self.facts |= {"engine": f"simulator: {self.run.plan}", "plan": asdict(self.run.plan)}
            self.directory.write_facts(self.facts)

    def _round(self, number: int, last: bool) -> dict[str, Any]:
        start = time.perf_counter()
        share, down = self.session.round(self.run.server, self.run.states, self._ids(number), number)
        if share.accepted:
            with guards.watch() as acted:
                self.run.server = self.run.algorithm.fuse(self.run.server, share.update)
            for name, count in acted.items():
                share.guards[name] = share.guards.get(name, 0) + int(count)
        line = self._line(number, share, down, time.perf_counter() - start)
        if self.test is not None and (number % self.evaluate_every == 0 or last):
            self.latest = scores = self.run.evaluate(self.test)
            line["eval"] = scores.point
            if scores.marginal is not None:
                line["marginal"] = scores.marginal
        self.run.history.append(line)
        if self.directory is not None:
            self.directory.append(line)
        return line

    def _line(self, number: int, share: Share, down: int, seconds: float) -> dict[str, Any]:
        federation = self.session.federation
        n = federation.sizes[torch.tensor(share.accepted, dtype=torch.int64)].double()
        notes = {name: float((value.double() * n).sum() / n.sum()) for name, value in share.notes.items()}
        for client, reason in share.rejected.items():
            log.warning("round %d: the update of client %r was left out: %s", number, federation.name(client), reason)
        rejected = [{"client": federation.name(c), "reason": reason} for c, reason in share.rejected.items()]
        return {
            "round": number,
            "seconds": seconds,
            "clients": len(share.accepted),
            **notes,
            "bytes_down": down,
            "bytes_up": share.bytes_up,
            "rejected": rejected,
            "guards": {name: count for name, count in share.guards.items() if count},
        }

    def _save(self, number: int) -> None:
        if self.directory is None:
            return
        states = self.run.states.snapshot()
        self.directory.save(number, Saved(self.run.server, states))
        self.run.states.forget(states)
