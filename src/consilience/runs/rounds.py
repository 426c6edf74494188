"""The rounds of one stage of a run: their lines of metrics, their checkpoints and warnings."""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch

from consilience.core import Tree, guards, keys, leaves, tree_map
from consilience.core.errors import CallbackError
from consilience.data.cohort import Info
from consilience.engines import Ranks, Session, Share
from consilience.runs.directory import Best, RunDirectory, Saved, beliefs_of
from consilience.runs.evaluating import Evaluator
from consilience.runs.interrupts import Interrupted, stop_requests
from consilience.runs.progress import Bar
from consilience.runs.run import Run
from consilience.runs.settings import Settings
from consilience.runs.stopping import Stopping

rejections = logging.getLogger("consilience.rejections")


@dataclass(frozen=True)
class Rounds:
    """Runs the rounds of a stage: the server and the history of `run` change round by round.

    `info` is the start of a later stage, which a checkpoint must hold. Only the rank that leads has a `directory`.
    `setup` are the seconds before the first round, in which a plan was chosen; they count in that round's."""

    settings: Settings
    session: Session
    run: Run
    ranks: Ranks
    directory: RunDirectory | None
    info: Info | None
    setup: float
    stopping: Stopping | None = None

    def go(self, first: int, last: int) -> Saved | None:
        """The rounds `first` to `last`, each with its metrics, callbacks and, when due, checkpoint; fewer if validation
        stops them. Returns the state after the best round, if it is in no checkpoint."""
        settings, ranks, best = self.settings, self.ranks, None
        with (
            CheckpointWriter(self.directory, settings.storage.keep_checkpoints, self._best) as writer,
            stop_requests(self.session.stops_softly) as stop,
            Bar(self.run.algorithm.name, settings.rounds, settings.progress and ranks.leads, first - 1) as bar,
        ):
            for number in range(first, last + 1):
                line = self._round(number, self.setup if number == first else 0.0)
                bar.update(line)
                failed = self._called_back(line)
                over = self.stopping is not None and self.stopping.is_over(self.run.history)
                improved = self._best(number) == number
                if improved and settings.storage.path is None:
                    best = snapshot(self.run, self.info)
                stopping = ranks.any(stop.is_set()) and number < settings.rounds and not over
                ends = number == last or over or stopping or failed is not None
                if number % settings.storage.checkpoint_every == 0 or improved or ends:
                    ranks.led(partial(writer.save, number, self.run, self.info))
                if ends or not self.session.saves_aside:
                    ranks.led(writer.wait)
                if failed is not None:
                    raise failed
                if over:
                    break
                if stopping:
                    kept = settings.storage.path is not None
                    where = "resume it" if kept else "it was not kept, as no directory was given"
                    raise Interrupted(f"stopped after round {number} of {settings.rounds}; {where}")

        return best

    def _best(self, number: int) -> int | None:
        """The best round up to this one, by validation."""
        return None if self.stopping is None else self.stopping.best(self.run.history, number)

    def _called_back(self, line: dict[str, Any]) -> CallbackError | None:
        """Call the callbacks; the error of one that failed, in all ranks, so that the round can be saved first."""
        raised: list[CallbackError] = []

        def call() -> str | None:
            try:
                self._call_back(line)
            except CallbackError as error:
                raised.append(error)
                return str(error)
            return None

        told = self.ranks.led(call) if self.settings.callbacks else None
        return None if told is None else raised[0] if raised else CallbackError(told)

    def _call_back(self, line: dict[str, Any]) -> None:
        kept = self.settings.storage.path is not None
        for callback in self.settings.callbacks:
            try:
                callback(self.run, line)
            except Exception as error:
                name = getattr(callback, "__name__", type(callback).__name__)
                then = "resume the run" if kept else "run again with out=, which keeps the rounds before an error"
                raise CallbackError(
                    f"the callback {name} failed after round {line['round']} with {type(error).__name__}: {error}; "
                    f"correct it and {then}"
                ) from error

    def _round(self, number: int, setup: float) -> dict[str, Any]:
        start, run = time.perf_counter(), self.run
        ids = self.session.clients(run.algorithm, self.settings.seed, number)
        run.statistics = None
        result = self.session.round(run.server, run.states, ids, number)
        run.server, run.federation = result.server, self.session.federation
        share = self._fused(result.share, number) if result.share.accepted else self._blamed(result.share)
        warn_of_rejected(number, share, run)
        line = metrics_line(number, share, result.bytes_down, setup + time.perf_counter() - start, run)
        evaluator = Evaluator(self.settings, self.session, run)
        if self.settings.debug or evaluator.is_due(number):
            line |= self.ranks.led(partial(evaluator, number))
        run.history.append(line)
        if self.directory is not None:
            self.directory.append(line)
        return line

    def _fused(self, share: Share, number: int) -> Share:
        """Update the server; the share with the guards that acted meanwhile."""
        run = self.run
        with guards.watch() as acted, self.session.cores_for_workers():
            fused = run.algorithm.fuse(run.server, share.update)
            key = keys.key(self.settings.seed, purpose="server", round=number)
            run.server = run.algorithm.advance(run.task, fused, key.to(run.task.device, non_blocking=True))
        counts = {name: share.guards.get(name, 0) + int(count) for name, count in acted.items()}
        return replace(share, guards=share.guards | counts)

    def _blamed(self, share: Share) -> Share:
        """A share without any accepted update: if the server's state is not finite, that is the reason for all."""
        if (name := not_finite(self.run.server)) is None:
            return share
        return replace(share, rejected=dict.fromkeys(share.rejected, f"the server's own {name} is not finite"))


class CheckpointWriter:
    """Writes one checkpoint at a time in its own thread, and keeps the newest `keep`. Without a directory it writes
    nothing."""

    def __init__(self, directory: RunDirectory | None, keep: int, best: Best) -> None:
        self._directory, self._keep, self._best, self._thread = directory, keep, best, ThreadPoolExecutor(1)
        self._writing: tuple[Future[None], Run, int, Tree] | None = None
        self._spared = {} if directory is None else {
            number: directory.checkpoint(number).states for number in directory.kept(keep, best)
            if number == best(number)
        }  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def save(self, number: int, run: Run, info: Info | None) -> None:
        """Begin to write the server and all client states as they are now, after the checkpoint before is on disk."""
        if self._directory is None:
            return
        self.wait()
        saved = snapshot(run, info)
        given = (number, saved, beliefs_of(run.algorithm, saved.server), self._keep, self._best)
        self._writing = self._thread.submit(self._directory.save, *given), run, number, saved.states

    def wait(self) -> None:
        """Wait for the checkpoint; then drop the states that only older ones needed."""
        if self._writing is not None and self._directory is not None:
            (done, run, number, states), self._writing = self._writing, None
            done.result()
            if self._best(number) == number:
                self._spared[number] = states
            kept = self._directory.kept(self._keep, self._best)
            self._spared = {at: spared for at, spared in self._spared.items() if at in kept}
            run.states.forget(states, [*self._spared.values()])


def snapshot(run: Run, info: Info | None) -> Saved:
    """The server and all client states as they are now."""
    return Saved(tree_map(torch.clone, run.server), run.states.snapshot(), info)


def metrics_line(number: int, share: Share, bytes_down: int, seconds: float, run: Run) -> dict[str, Any]:
    """The line of metrics.jsonl, without scores. Clients' notes are averaged with the weights of their examples. A note
    that is NaN has no value: a site keeps it."""
    n = run.federation.sizes[torch.tensor(share.accepted, dtype=torch.int64)].double()
    given = {name: (value.double(), ~value.isnan()) for name, value in share.notes.items()}
    notes = {name: float((x[at] * n[at]).sum() / n[at].sum()) for name, (x, at) in given.items() if at.any()}
    name = run.federation.name
    return {
        **dict.fromkeys(("round", "seconds", "clients")),  # in this order, and never a note's
        **notes,
        "round": number,
        "seconds": seconds,
        "clients": len(share.accepted),
        "bytes_down": bytes_down,
        "bytes_up": share.bytes_up,
        "rejected": [{"client": name(c), "reason": reason} for c, reason in share.rejected.items()],
        "guards": {guard: count for guard, count in share.guards.items() if count},
        **run.algorithm.facts(run.server),
    }


def warn_of_rejected(number: int, share: Share, run: Run) -> None:
    """Log every rejected update; one warning where all were rejected, and none where so they were the round before."""
    if share.accepted:
        for client, reason in share.rejected.items():
            who = run.federation.name(client)
            rejections.warning("round %d: the update of client %r was rejected: %s", number, who, reason)
    elif share.rejected and (not run.history or run.history[-1]["clients"]):
        reason = next(iter(share.rejected.values()))
        rejections.warning(
            "round %d: the update of every client was rejected, and nothing is learned: %s", number, reason
        )


def not_finite(server: Tree) -> str | None:
    """The name of the first tensor of a server state that has a value that is not finite."""
    return next((name for name, leaf in leaves(server) if not bool(leaf.isfinite().all())), None)
