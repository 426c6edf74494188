"""When a run is evaluated, and what its last evaluation has in addition."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from consilience.core import Gaussian, Tree, to
from consilience.data import Dataset, Federation
from consilience.engines import Session, chunks
from consilience.evaluation.scores import Evaluation
from consilience.evaluation.transcripts import transcripts
from consilience.evaluation.weights import marginals
from consilience.runs.coefficients import has_coefficients, to_json
from consilience.runs.run import DESCRIBED, Run
from consilience.runs.settings import Settings
from consilience.runs.stopping import VALIDATION
from consilience.runs.survival import profiles
from consilience.tasks import Supervised
from consilience.tasks.statistics import needs_statistics

AUDITED = 64  # clients whose states an audit looks at together


@dataclass(frozen=True)
class Evaluator:
    """Scores a run every `evaluate_every` rounds and after the last, on the test data or by asking the clients."""

    settings: Settings
    session: Session
    run: Run

    def is_due(self, number: int) -> bool:
        has_data = self.run.test is not None or self.settings.validation is not None
        possible = has_data or self.session.asks_clients
        return possible and (number % self.settings.evaluate_every == 0 or number == self.settings.rounds)

    def __call__(self, number: int) -> dict[str, Any]:
        """The scores of round `number` for its line, if they are due, and the audit, if debugging."""
        found: dict[str, Any] = {}
        scores = None
        if self.is_due(number):
            find_statistics(self.session, self.run)
            if can_predict(self.run):
                found |= self._validated()
                scores = self._scores(number)
        if scores is not None:
            self.run.latest = scores
            found["eval"] = scores.point
            if scores.marginal is not None:
                found["marginal"] = scores.marginal
        if self.settings.debug:
            found["audit"] = self.run.algorithm.audit(self.run.server, self._all_states())
        return found

    def _validated(self) -> dict[str, Any]:
        """The scores of the mean weights on the validation data."""
        data, settings = self.settings.validation, self.settings
        if data is None:
            return {}
        found = self.run.evaluate(data, samples=0, batch_size=settings.eval_batch_size, metrics=settings.metrics)
        return {VALIDATION: found.point}

    def _scores(self, number: int) -> Evaluation | None:
        run = self.run
        if number == self.settings.rounds:
            find_calibration(self.session, run, self.settings.calibration)
        if run.test is None:
            asked = self.session.asks_clients
            given = (run.algorithm, run.server, run.states, run.statistics, run.calibration)
            return self.session.evaluate(*given) if asked else None
        return score_test(run, self.settings, number == self.settings.rounds)

    def _all_states(self) -> Iterator[Tree]:
        """All client states, in groups that fit on the device."""
        clients = torch.arange(len(self.session.federation))
        for group in chunks(clients, AUDITED):
            yield to(self.run.states.gather(clients[group]), self.run.task.device)


def score_test(run: Run, settings: Settings, last: bool) -> Evaluation | None:
    """The scores on the test data, if there are any; the last ones with intervals and out-of-distribution data."""
    if run.test is None:
        return None
    more: dict[str, Any] = {"outside": settings.outside, "intervals": settings.intervals} if last else {}
    return run.evaluate(run.test, batch_size=settings.eval_batch_size, **more)


def find_statistics(session: Session, run: Run) -> None:
    """Let the clients estimate the statistics of BatchNorm layers for the mean weights, if the task needs them and they
    are not known."""
    if run.statistics is None and needs_statistics(run.task):
        run.statistics = session.statistics(run.posterior.mean)


def find_calibration(session: Session, run: Run, data: Dataset | Federation | None) -> None:
    """Calibrate prediction sets for the final belief on these examples, or on those that clients hold out."""
    if run.calibration is not None or not can_predict(run):
        return
    if data is not None:
        run.calibrate(data.to(run.task.device))
    else:
        run.calibration = session.calibrate(run.algorithm, run.server, run.states, run.statistics)


def can_predict(run: Run) -> bool:
    """Whether the statistics of BatchNorm layers are known, where they are estimated."""
    return run.statistics is not None or not needs_statistics(run.task)


def final_evaluation(run: Run) -> dict[str, Any] | None:
    """The content of evaluation.json: the last scores, the posterior's marginals of the weights, the coefficients of a
    linear model, and survival curves."""
    if run.latest is None:
        return None
    posterior, task = run.posterior, run.network
    weights = marginals(task, posterior) if isinstance(posterior, Gaussian) else None
    curves = None
    if run.test is not None and isinstance(posterior, Gaussian) and isinstance(task, Supervised):
        strata = [run.federation.client(k) for k in range(len(run.federation))]
        curves = profiles(task, run.newcomer(), run.test, strata)
    read = None if run.test is None or run.algorithm.alone else transcripts(task, run.newcomer(), run.test) or None
    found = {"posterior": weights, "coefficients": _coefficients(run), "survival": curves, "transcripts": read}
    return run.latest.to_json() | {name: part for name, part in found.items() if part is not None}


def _coefficients(run: Run) -> dict[str, Any] | None:
    """The coefficients of all clients together, of a new client, and of clients with beliefs of their own."""
    if not has_coefficients(run.network, run.posterior):
        return None
    found = [run.coefficients()]
    if run.algorithm.pools_partially:
        found.append(run.coefficients(newcomer=True))
    if run.algorithm.personalises and run.states.known:
        found += [run.coefficients(client) for client in range(min(len(run.federation), DESCRIBED))]
    return to_json(found)
