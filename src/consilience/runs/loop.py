"""The loop over a run's stages. It knows engines and records, but no method."""

import logging
import time
import zlib
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core.beliefs import Mixture
from consilience.core.errors import CheckpointError, ConfigError, ConsilienceError, TaskError
from consilience.core.records import Tree, pack, to, unpack
from consilience.data.cohort import Info
from consilience.engines import Opener, Plan, Ranks, Session, place_states
from consilience.metrics import directions
from consilience.runs.directory import CALIBRATION, STATISTICS, RunDirectory, Saved, beliefs_of
from consilience.runs.evaluating import can_predict, final_evaluation, find_calibration, find_statistics, score_test
from consilience.runs.progress import Wait
from consilience.runs.rounds import Rounds, not_finite
from consilience.runs.run import Run
from consilience.runs.settings import Settings, Stage
from consilience.runs.start import Plans, Start
from consilience.runs.stopping import Stopping
from consilience.tasks.statistics import needs_statistics

log = logging.getLogger("consilience")


@dataclass(frozen=True)
class Loop:
    """Runs stage after stage. `facts` are the content of run.json; only the rank that leads has a `directory`."""

    settings: Settings
    engine: Opener
    ranks: Ranks
    directory: RunDirectory | None
    facts: dict[str, Any]

    def go(self, stages: list[Stage], start: Start) -> Run:
        """The run after all stages that are not done at the start."""
        settings, done, saved, plans = self.settings, start.done, start.saved, list(start.plans)
        if done > settings.rounds:
            raise CheckpointError(
                f"{settings.storage.path or 'the run'} is at round {done} already: rounds is only {settings.rounds}"
            )
        run: Run | None = None
        best: Saved | None = None
        for number, stage in enumerate(stages):
            if done > stage.last:
                continue
            with self._open(stage, done, plans[number]) as session:
                run, info = self._enter(session, stage.algorithm, run, saved, start)
                _must_suit(run)
                stopping = self._stopping(stages, number)
                if done < stage.last and not (stopping and stopping.is_over(run.history)):
                    begun = time.perf_counter()
                    plans[number] = self._settle(session, run, done + 1)
                    self._note(run, plans)
                    setup = time.perf_counter() - begun
                    rounds = Rounds(settings, session, run, self.ranks, self.directory, info, setup, stopping)
                    best = rounds.go(done + 1, stage.last)
                if stopping is not None:
                    self._take_best(run, stopping, best)
                if stage.last >= settings.rounds:
                    find_statistics(session, run)
                    find_calibration(session, run, settings.calibration)
            _must_have_learned(run, since=stages[number - 1].last if number else 0)
            done, saved = stage.last, None
            if done == settings.rounds:  # the next stage begins when the run is resumed with more rounds
                break
        assert run is not None
        self.ranks.led(lambda: self._finish(run))
        run.states = run.states.complete()
        return run

    def _stopping(self, stages: list[Stage], number: int) -> Stopping | None:
        """The rule by which validation chooses a round of the last stage; None for others, or without validation."""
        settings = self.settings
        if settings.validation is None or stages[number].last < settings.rounds:
            return None
        since = stages[number - 1].last if number else 0
        return Stopping(settings.monitor, settings.patience, since, directions(settings.metrics))

    def _take_best(self, run: Run, stopping: Stopping, kept: Saved | None) -> None:
        """Return to the state after the best round."""
        run.best_round = stopping.best(run.history)
        if run.best_round is None:
            log.warning("no round has a finite score on the validation data: the run ends with its last round")
            return
        if run.best_round == run.history[-1]["round"]:
            return
        place = self.settings.storage.directory
        saved = kept if place is None else RunDirectory(place).checkpoint(run.best_round)
        assert saved is not None
        run.server = to(saved.server, run.task.device)
        run.states.restore(saved.states)
        run.latest = run.statistics = run.calibration = None

    def _open(self, stage: Stage, done: int, plan: dict[str, Any] | None) -> Session:
        return self.engine.open(
            stage.algorithm,
            stage.task,
            stage.federation,
            seed=self.settings.seed,
            cohort=self.settings.cohort,
            rounds=stage.last - done,
            plan=None if plan is None else Plan(**plan),
            ranks=self.ranks,
        )

    def _enter(
        self,
        session: Session,
        algorithm: Algorithm,
        before: Run | None,
        saved: Saved | None,
        start: Start,
    ) -> tuple[Run, Info | None]:
        """The run at the start of a stage, and what a checkpoint must hold of that start: None for the first stage."""
        task, federation, settings = session.task, session.federation, self.settings
        seed, clients, examples = map(torch.tensor, (settings.seed, len(federation), federation.examples))
        info, kept = Info(task.initial(), seed, clients, examples, sizes=federation.sizes), None
        if before is not None:
            info = replace(info, initial=_continued(before, algorithm, info.initial), before=before.server)
            kept = replace(info, before=None)
        if saved is not None and saved.info is not None:
            kept = to(saved.info, task.device)
        server = self._first(session, algorithm, info) if saved is None else to(saved.server, task.device)

        def fresh(ids: Tensor) -> Tree:
            n = session.federation.sizes[ids].to(task.device, task.dtype, non_blocking=True).unsqueeze(1)
            return algorithm.client(task, kept or info, n)

        storage, history = settings.storage, start.history
        folder = None if storage.directory is None else storage.directory / "states"
        states = session.keep(
            place_states(
                fresh, len(federation), task.device, storage.state_memory, folder, self.ranks, start.run,
                storage.keep_checkpoints, None if saved is None else saved.states,
            )
        )  # fmt: skip
        if saved is not None:
            states.restore(saved.states)
        test = None if settings.test is None else settings.test.to(task.device)
        return Run(
            algorithm, task, federation, server, states, history, storage.directory, test=test, metrics=settings.metrics
        ), kept

    def _first(self, session: Session, algorithm: Algorithm, info: Info) -> Tree:
        """The server before the first round. Where a method draws secrets the ranks' differ, and all take rank 0's."""
        server = algorithm.start(session.task, info)
        if self.ranks.size == 1:
            return server
        mine = pack(server)
        if not self.ranks.any(self.ranks.led(lambda: zlib.crc32(mine)) != zlib.crc32(mine)):
            return server
        return to(unpack(bytes.fromhex(self.ranks.led(mine.hex)), like=server), session.task.device)

    def _settle(self, session: Session, run: Run, number: int) -> dict[str, Any]:
        ids = session.clients(run.algorithm, self.settings.seed, number)
        with Wait(run.algorithm.name, self.settings.progress and self.ranks.leads) as wait:
            run.plan = session.settle(run.server, run.states, ids, number, wait.say)
        run.task = session.task
        log.info("plan: %s", run.plan)
        return asdict(run.plan)

    def _note(self, run: Run, plans: Plans) -> None:
        """Write the plans to run.json, so that a resumed run follows them."""
        if self.directory is not None:
            how = f"{self.ranks}, secure sums" if self.facts.get("secure") else str(self.ranks)
            self.directory.write_facts({**self.facts, "engine": f"{how}: {run.plan}", "plans": plans})

    def _finish(self, run: Run) -> None:
        if run.latest is None and can_predict(run):
            run.latest = score_test(run, self.settings, last=True)
        if self.directory is None:
            return
        rounds = run.history[-1]["round"]
        self.directory.write_sheet()  # also of a run that had nothing left to do
        if run.best_round is not None or not self.directory.has_posterior(rounds):
            self.directory.write_beliefs(beliefs_of(run.algorithm, run.server), rounds)
        if run.statistics is not None:
            self.directory.write_record(STATISTICS, to(run.statistics, "cpu"), rounds)
        if run.calibration is not None:
            self.directory.write_record(CALIBRATION, to(run.calibration, "cpu"), rounds)
        if (found := final_evaluation(run)) is not None:
            self.directory.write_evaluation(found)


def _must_suit(run: Run) -> None:
    """Refuse BatchNorm layers whose statistics are estimated, if the posterior is several networks."""
    if needs_statistics(run.task) and isinstance(run.posterior, Mixture):
        raise TaskError(
            f"{run.algorithm.name} predicts with several networks, and statistics of BatchNorm layers are estimated "
            "for one: make the task with batch_norm='averaged'"
        )


def _continued(before: Run, algorithm: Algorithm, initial: Tensor) -> Tensor:
    """The mean of the stage before, from which the next one starts."""
    mean = before.posterior.mean
    if before.network.main.offsets and type(algorithm) is not type(before.algorithm):
        raise ConfigError(
            f"{algorithm.name} cannot continue {before.algorithm.name}, whose network has a residual in its frozen "
            "weights: train run.model in a run of its own"
        )
    if mean.shape != initial.shape:
        raise ConfigError(
            f"{before.algorithm.name} has made a network of another size, which {algorithm.name} cannot continue from: "
            "fit it to a task of run.model instead"
        )
    return mean.to(initial)


def _must_have_learned(run: Run, since: int) -> None:
    """Raise an error if no update was accepted after the round `since`; warn of a model that is not finite."""
    lines = [line for line in run.history if line["round"] > since]
    if lines and not any(line["clients"] for line in lines):
        reason = next((entry["reason"] for line in lines for entry in line["rejected"]), "no client sent one")
        raise ConsilienceError(
            f"{run.algorithm.name}: no client's update was accepted in any of {len(lines)} rounds, so the model is as "
            f"it began ({reason}): take smaller steps (lr), or look at the data and the initial weights"
        )
    if (name := not_finite(run.server)) is not None:
        log.warning("the server's own %s is not finite, so the model is of no use: take smaller steps (lr)", name)
