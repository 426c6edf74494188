"""fit: the round loop. Everything that outlives a round is decided here, and nothing of any method is."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

import consilience
from consilience import guards, keys
from consilience.algorithms.base import Algorithm
from consilience.algorithms.switch import Method, Switch, phases
from consilience.beliefs import Belief, draws
from consilience.checkpoint import RunDirectory, Saved, describe, identity
from consilience.cohort import Info
from consilience.data.dataset import Dataset
from consilience.data.federation import Federation
from consilience.display import summary, summary_table
from consilience.engines.plan import Plan
from consilience.engines.simulator import Session, Simulator
from consilience.engines.states import Fresh, InMemory, OnDisk, States
from consilience.engines.work import Share, chunks
from consilience.errors import CheckpointError, ConfigError, ConsilienceError, DataError
from consilience.evaluation import (
    Detection,
    Evaluation,
    Uncertainty,
    check_unlabelled,
    detect,
    each,
    evaluate,
    marginals,
    uncertainty,
)
from consilience.files import write_atomically
from consilience.gaussian import Gaussian
from consilience.progress import Bar
from consilience.records import Tree, nbytes, rows, to
from consilience.report.reading import RunFiles
from consilience.task import Task
from consilience.tracking import flat, frame

if TYPE_CHECKING:
    import pandas

    from consilience.plot import RunPlots

log = logging.getLogger("consilience")
DESCRIBED = 1000  # clients whose label counts go into run.json
AUDITED = 64  # clients whose states an audit looks at together
DEVICE_SHARE = 0.4  # of a GPU's free memory that clients' states may take


class Callback(Protocol):
    """What `fit` calls after every round: any function of the run so far and of the round's line in its history.
    `consilience.tracking` has some."""

    def __call__(self, run: Run, line: dict[str, Any], /) -> None:
        """Look, but do not touch: what a callback changes is not in any checkpoint."""


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
    test: Dataset | Federation | None = None
    latest: Evaluation | None = None

    def __repr__(self) -> str:
        return summary(self.algorithm.name, self.federation.data.name, self.history, self.out)

    def _repr_html_(self) -> str:
        return summary_table(self.algorithm.name, repr(self.federation), repr(self.task), self.history, self.out)

    @property
    def evaluation(self) -> Evaluation | None:
        """The last scores on the test data that `fit` was given, made now if there are none; None without test data."""
        if self.latest is None and self.test is not None:
            self.latest = self.evaluate(self.test)
        return self.latest

    @property
    def plot(self) -> RunPlots:
        """Figures: `run.plot.curves()`, `.reliability()`, `.labels()`, `.clients()`, `.communication()`."""
        from consilience.plot import RunPlots

        return RunPlots(self._files)

    def frame(self) -> pandas.DataFrame:
        """The history as a data frame, one row a round; needs pandas."""
        return frame([flat(line) for line in self.history])

    def _files(self, evaluated: bool) -> RunFiles:
        """What a directory of this run would hold."""
        config = {
            "algorithm": describe(self.algorithm),
            "method": self.algorithm.name,
            "federation": _federation_facts(self.federation),
            "rounds": len(self.history),
        }
        if self.out is not None and (self.out / "run.json").is_file():
            config = RunDirectory(self.out).facts()  # which knows of a switch
        found = self.evaluation if evaluated else None
        return RunFiles(config, self.history, {} if found is None else found.to_json())

    @property
    def posterior(self) -> Belief:
        """What the server believes of the weights: a `Gaussian`, a `Point` without uncertainty, or a `Mixture`."""
        return self.algorithm.posterior(self.server)

    @property
    def network(self) -> Task:
        """The task whose weights the posterior is about: PFNM's network is wider than its clients'."""
        return self.algorithm.network(self.task, self.server)

    @property
    def model(self) -> nn.Module:
        """The user's module with the learned (mean) weights."""
        return self.network.release(self.posterior.mean)

    def personal(self, client: int) -> Belief:
        """What one client would use."""
        state = self.states.gather(torch.tensor([client]))
        return self.algorithm.personal(self.server, to(rows(state, 0), self.task.device))

    def predict(self, x: Tensor, samples: int = 0) -> Tensor:
        """Predictions for model inputs x [N, ...]; averaged over `samples` draws of the posterior, if it has one."""
        networks = draws(self.posterior, samples)
        return networks.combine(each(self.network, networks, x))

    def evaluate(self, test: Dataset | Federation, samples: int = 10, outside: Dataset | None = None) -> Evaluation:
        """Scores on test data; for a Federation of the same clients, every client by its own belief. Of examples of
        another kind, `outside`, only the predictive entropy is of interest."""
        belief: Belief | Callable[[int], Belief] = self.posterior
        if isinstance(test, Federation) and len(test) == len(self.federation):
            belief = self.personal
        return evaluate(self.network, belief, test, samples, outside)

    def uncertainty(self, data: Dataset, samples: int = 10) -> Uncertainty:
        """How uncertain the server's belief is about every example, and why."""
        return uncertainty(self.network, self.posterior, data, samples)

    def detect(self, inside: Dataset, outside: Dataset, samples: int = 10) -> Detection:
        """How well the server's uncertainty tells examples of another kind from those it has learned."""
        return detect(self.network, self.posterior, inside, outside, samples)


def fit(
    algorithm: Method,
    task: Task,
    federation: Federation,
    *,
    rounds: int,
    cohort: int | None = None,
    test: Dataset | Federation | None = None,
    outside: Dataset | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    warm: str | Path | None = None,
    engine: Simulator | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int = 10,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    state_memory: int = 8 << 30,
    debug: bool = False,
) -> Run:
    """Run `rounds` rounds of an algorithm on a federation, `cohort` clients each (all when None).

    With `out`, the run is a directory: metrics.jsonl, checkpoints, evaluation.json; with `resume` it goes on from its
    last checkpoint to the very same result. A `Switch` may begin from the directory `warm` of a run of its first method
    that ends where it switches. `evaluate_every` is a tenth of the rounds when None. Clients' states that together
    outgrow `state_memory` bytes are kept in files under `out`. With `debug` the algorithm audits itself every round.
    After every round each of `callbacks` is called with the `Run` so far and the round's line (see `Callback`).
    `outside` are examples of another kind than `test`: does the final model know that it does not know them?
    """
    cohort, evaluate_every = _checked(task, federation, test, rounds, cohort, evaluate_every, checkpoint_every)
    if outside is not None:
        if test is None:
            raise ConfigError("outside is compared with the test data: pass test= as well")
        check_unlabelled(task, outside)
    engine = engine or Simulator()
    stages = _stages(algorithm, task, federation, rounds)
    who = identity(algorithm, stages[0].task, stages[0].federation, cohort, seed, engine.precision)
    directory = None if out is None else RunDirectory(Path(out))
    old = _existing(directory, who, resume)
    facts = _facts(algorithm, stages[0], len(stages), rounds, cohort, seed, who)
    facts["plans"] = old["plans"] if old else facts["plans"]
    begun = directory is not None and directory.has_checkpoints()
    warmed = None if warm is None or begun else _warm(algorithm, RunDirectory(Path(warm)), who, rounds)
    loop = _Loop(
        engine, directory, facts, rounds, cohort, seed, test, evaluate_every, checkpoint_every, callbacks, progress,
        state_memory, debug, outside,
    )  # fmt: skip
    with ExitStack() as held:
        if directory is not None:
            if old is None:
                directory.create(facts)
            held.enter_context(directory.locked())
        found = None if directory is None else directory.latest()
        if directory is not None:
            loop.history = directory.history(up_to=found[0] if found else 0)
        if warmed is not None:
            found = loop.begin(stages[0].algorithm, *warmed)
        return loop.go(stages, *(found or (0, None)))


@dataclass(frozen=True)
class _Stage:
    """A phase as this federation sees it: rounds up to `last`."""

    algorithm: Algorithm
    task: Task
    federation: Federation
    last: int


def _stages(method: Method, task: Task, federation: Federation, rounds: int) -> list[_Stage]:
    stages = [
        _Stage(p.algorithm, p.algorithm.adapt(task), p.algorithm.arrange(federation), min(rounds, p.last or rounds))
        for p in phases(method)
    ]
    if len({(stage.task.size, id(stage.federation)) for stage in stages}) > 1:
        names = " and ".join(stage.algorithm.name for stage in stages)
        raise ConfigError(
            f"{names} do not learn the same weights from the same clients: one cannot go on for the other"
        )
    return stages


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


def _warm(method: Method, source: RunDirectory, who: Any, rounds: int) -> tuple[int, Saved, list[dict[str, Any]]]:
    """The end of a run of a switch's first method and its history, checked before anything is written. Its clients'
    states stay behind: the second method makes its own."""
    if not isinstance(method, Switch):
        raise ConfigError(f"warm is for a Switch: {method.name} has no first method")
    if rounds <= method.at:
        raise ConfigError(f"rounds is {rounds}, but the warm start has {method.at} already: nothing is left to do")
    source.must_match({**who, "algorithm": describe(method.first)})
    found = source.latest()
    if found is None or found[0] != method.at:
        at = "no round" if found is None else f"round {found[0]}"
        raise CheckpointError(f"{source.path} ends at {at}, but the switch is after round {method.at}")
    history = [line for line in source.history() if line["round"] <= method.at]
    return method.at, replace(found[1], states=None), history


def _facts(method: Method, stage: _Stage, stages: int, rounds: int, cohort: int, seed: int, who: Any) -> dict[str, Any]:
    task = stage.task
    return {
        "algorithm": describe(method),
        "method": method.name,
        "task": {"kind": task.kind, "parameters": task.size, "module": str(task.module)},
        "federation": _federation_facts(stage.federation),
        "rounds": rounds,
        "cohort": cohort,
        "seed": seed,
        "engine": "simulator",
        "plans": [None] * stages,
        "versions": {"consilience": consilience.__version__, "torch": str(torch.__version__)},
        "identity": who,
    }


def _federation_facts(federation: Federation) -> dict[str, Any]:
    data, counts = federation.data, federation.label_counts()
    return {
        "data": data.name,
        "note": data.note,
        "how": federation.how,
        "clients": len(federation),
        "examples": federation.examples,
        "names": None if federation.names is None else list(federation.names[:DESCRIBED]),
        "sizes": federation.sizes[:DESCRIBED].tolist(),
        "classes": list(data.classes),
        "label_counts": None if counts is None else counts[:DESCRIBED].tolist(),
    }


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
    engine: Simulator
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

    def begin(self, algorithm: Algorithm, at: int, saved: Saved, history: list[dict[str, Any]]) -> tuple[int, Saved]:
        """From a warm start, which becomes the first checkpoint."""
        self.history = history
        if self.directory is not None:
            for line in history:
                self.directory.append(line)
            self.directory.save(at, saved, algorithm.posterior(saved.server))
        return at, saved

    def go(self, stages: list[_Stage], done: int, saved: Saved | None) -> Run:
        """All stages that are not over, from what was saved."""
        if done > self.rounds:
            where = "the run" if self.directory is None else self.directory.path
            raise CheckpointError(f"{where} has gone on to round {done} already: rounds is only {self.rounds}")
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
            ) as self.session:
                self._enter(stage.algorithm, before, saved)
                self._rounds(number, done, stage.last)
            before, done, saved = self.run, stage.last, None
            if done == self.rounds:  # a switch that lies ahead is made when the run goes on
                break
        if self.directory is not None:
            self.directory.write_sheet()  # a run from before there was one may have nothing left to do
        if self.test is not None and self.directory is not None:
            write_atomically(self.directory.path / "evaluation.json", json.dumps(self._final(self.test), indent=1))
        return self.run

    def _final(self, test: Dataset | Federation) -> dict[str, Any]:
        """The last evaluation, and in short what the posterior says of single weights."""
        found = (self.latest or self.run.evaluate(test, outside=self.outside)).to_json()
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
        server = algorithm.start(task, info) if saved is None else to(saved.server, task.device)
        for_clients = self.info or info
        states = self._states(lambda ids: algorithm.client(task, for_clients, self._sizes(ids)))
        if saved is not None:
            self._restore(states, saved.states)
        out = None if self.directory is None else self.directory.path
        self.run = Run(algorithm, task, federation, server, states, self.history, out, test=self.test)

    def _restore(self, states: States, saved: Tree) -> None:
        in_files = isinstance(saved, Tensor)
        if saved is not None and in_files != isinstance(states, OnDisk):
            place = "files" if in_files else "memory"
            where = "the run" if self.directory is None else self.directory.path
            raise CheckpointError(f"{where} keeps the clients' states in {place}: give state_memory as before")
        states.restore(saved)

    def _sizes(self, ids: Tensor) -> Tensor:
        return self.session.federation.sizes[ids].to(self.session.task.device, self.session.task.dtype).unsqueeze(1)

    def _states(self, fresh: Fresh) -> States:
        """On the device while they take little of its memory, else on the host, else in files. With a directory, what
        outgrows `state_memory` goes to files at once: a checkpoint of all of it would be too much."""
        expected = nbytes(fresh(torch.tensor([0]))) * len(self.session.federation)
        device = self.session.task.device
        small = expected <= self.state_memory or self.directory is None
        if small and device.type == "cuda" and expected < DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]:
            return InMemory(fresh, device)
        if expected <= self.state_memory:
            return InMemory(fresh)
        if self.directory is None:
            raise ConfigError(
                f"the clients' states need {expected / 2**30:.1f} GiB, more than state_memory "
                f"({self.state_memory / 2**30:.1f} GiB): pass out= so that they can be kept in files"
            )
        return OnDisk(fresh, self.directory.path / "states")

    def _rounds(self, stage: int, done: int, last: int) -> None:
        if done >= last:
            return
        self._settle(stage, done + 1)
        with _stop_requests() as stop, Bar(self.run.algorithm.name, self.rounds, self.progress, done) as bar:
            for number in range(done + 1, last + 1):
                line = self._round(number)
                bar.update(line)
                for callback in self.callbacks:
                    callback(self.run, line)
                stopping = stop.is_set() and number < self.rounds
                if number % self.checkpoint_every == 0 or number == last or stopping:
                    self._save(number)
                if stopping:
                    where = "it was not kept, as no directory was given" if self.directory is None else "resume it"
                    raise Interrupted(f"stopped after round {number} of {self.rounds}; {where}")

    def _ids(self, number: int) -> Tensor:
        key = keys.key(self.seed, purpose="cohort", round=number)
        return keys.sample(key, len(self.session.federation), self.session.cohort)

    def _settle(self, stage: int, number: int) -> None:
        """Choose the plan and write it down, so that a resumed run follows it."""
        self.run.plan = self.session.settle(self.run.server, self.run.states, self._ids(number), number)
        self.run.task = self.session.task
        log.info("plan: %s", self.run.plan)
        if self.directory is not None:
            self.facts["engine"] = f"simulator: {self.run.plan}"
            self.facts["plans"][stage] = asdict(self.run.plan)
            self.directory.write_facts(self.facts)

    def _round(self, number: int) -> dict[str, Any]:
        start = time.perf_counter()
        share, down = self.session.round(self.run.server, self.run.states, self._ids(number), number)
        if share.accepted:
            with guards.watch() as acted:
                self.run.server = self.run.algorithm.fuse(self.run.server, share.update)
            for name, count in acted.items():
                share.guards[name] = share.guards.get(name, 0) + int(count)
        line = self._line(number, share, down, time.perf_counter() - start)
        if self.test is not None and (number % self.evaluate_every == 0 or number == self.rounds):
            last = number == self.rounds
            self.latest = scores = self.run.evaluate(self.test, outside=self.outside if last else None)
            self.run.latest = scores
            line["eval"] = scores.point
            if scores.marginal is not None:
                line["marginal"] = scores.marginal
        if self.debug:
            line["audit"] = self.run.algorithm.audit(self.run.server, self._everyone())
        self.history.append(line)
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
            **self.run.algorithm.facts(self.run.server),
        }

    def _save(self, number: int) -> None:
        if self.directory is None:
            return
        states = self.run.states.snapshot()
        self.directory.save(number, Saved(self.run.server, states, self.info), self.run.posterior)
        self.run.states.forget(states)

    def _everyone(self) -> Iterator[Tree]:
        """All clients' states, in groups that fit on the device."""
        clients = torch.arange(len(self.session.federation))
        for group in chunks(clients, AUDITED):
            yield to(self.run.states.gather(clients[group]), self.run.task.device)
