"""tune: the same number of trials for every method, on a validation part of the training data.

Components declare the settings worth tuning in `ranges`. Trial 0 is the method as given, the others are random draws.
The settings with the best score on validation data are kept. Test data is not used.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from consilience.algorithms.switch import Method
from consilience.core.errors import CallbackError, ClientError, ConsilienceError, DataError
from consilience.core.files import write_atomically
from consilience.data import Dataset, Federation
from consilience.engines import ALONE, Distributed, Ranks
from consilience.metrics import as_metrics, choose_score, direction, directions
from consilience.runs import Run, fit
from consilience.runs.directory import RunDirectory, Storage
from consilience.runs.identity import describe
from consilience.runs.interrupts import Interrupted
from consilience.runs.rounds import rejections
from consilience.studies.knobs import candidates, with_settings
from consilience.studies.setting import Setting

log = logging.getLogger("consilience")
VALIDATION = 0.2  # the share of every client's training examples that trials are scored on
DIVERGED = "diverged.txt"  # in a trial's directory: why it ended


@dataclass(frozen=True)
class Tuned:
    """The methods with their best settings, and all trials: one entry a method, as in comparison.json. A trial that
    diverged has the score None."""

    methods: dict[str, Method]
    tuning: list[dict[str, Any]]


_FAILURES = (ClientError, ArithmeticError, ValueError, RuntimeError)  # of a trial whose numbers are extreme
_OF_THE_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)  # whatever the numbers are


class _Diverged(ConsilienceError):  # noqa: N818 (it is no error)
    """No update was finite: the trial ends."""


def tune(
    methods: Mapping[str, Method],
    setting: Setting,
    *,
    trials: int,
    rounds: int,
    seed: int = 0,
    out: str | Path | Storage | None = None,
    resume: bool = False,
    select: str | None = None,
    on_trial: Callable[[str, int], None] | None = None,
    **options: Any,
) -> Tuned:
    """Every method's best of `trials` trials with the same `options` of `fit`.

    Trials are scored by `select` (NLL if there is one, else the first score with a direction) on a fifth of every
    client's training examples, which trials do not learn from. A trial that diverges is the worst. With `out`, trials
    are runs in out/tuning/label/trial-k. Under torchrun all ranks make the same trials, with the engine `Distributed`;
    rank 0 alone scores them and writes."""
    with shared(options) as ranks:
        return _tuned(ranks, methods, setting, trials, rounds, seed, Storage.of(out), resume, select, on_trial, options)


@contextmanager
def shared(options: Mapping[str, Any]) -> Iterator[Ranks]:
    """The ranks that share all runs of a study with these options of `fit`."""
    engine = options.get("engine")
    if isinstance(engine, Distributed):
        with engine.started() as (_, ranks):
            yield ranks
    else:
        yield ALONE


def _tuned(
    ranks: Ranks,
    methods: Mapping[str, Method],
    setting: Setting,
    trials: int,
    rounds: int,
    seed: int,
    out: Storage,
    resume: bool,
    select: str | None,
    on_trial: Callable[[str, int], None] | None,
    options: Mapping[str, Any],
) -> Tuned:
    planned = {label: candidates(label, method, trials, seed) for label, method in methods.items()}
    versions = {label: [with_settings(methods[label], drawn) for drawn in found] for label, found in planned.items()}
    train, valid = _validation(setting, seed)
    same: dict[str, Any] = {name: value for name, value in options.items() if name not in ("outside", "intervals")}
    same |= {"test": valid, "seed": seed, "rounds": rounds, "evaluate_every": rounds}
    tuned, ways = Tuned({}, []), directions(as_metrics(options.get("metrics", ())))
    for label, found in planned.items():
        if not found[0]:
            log.warning("%s has no settings with ranges: nothing to tune, it is run as given", label)
        scores: list[float | None] = []
        for k, version in enumerate(versions[label]):
            if on_trial is not None and ranks.leads:
                on_trial(label, k)
            own = out.below("tuning", label, f"trial-{k}")
            scored = _trial(ranks, version, setting, train, own, resume, f"{label}, trial {k}", **same)
            if scored is not None:
                select = choose_score(scored, select, "select", ways)
            scores.append(None if scored is None or select is None else _finite(scored[select]))
        best = _best(scores, direction(select or "", ways))
        if scores[best] is None:
            log.warning("all trials of %s diverged: it is run as given", label)
        tuned.methods[label] = versions[label][best]
        entry = {"method": label, "trials": len(found), "chosen": found[best], "score": scores[best], "metric": select}
        every = [{"settings": drawn, "score": score} for drawn, score in zip(found, scores, strict=True)]
        tuned.tuning.append({**entry, "all": every})
    return tuned


def _validation(setting: Setting, seed: int) -> tuple[Federation, Dataset | Federation]:
    """(training data of trials, validation data). Each client is scored with its own belief if the test data is a
    Federation too."""
    train, held = setting.federation.split(VALIDATION, seed=seed)
    if not held.examples:
        least = math.ceil(1 / VALIDATION)
        raise DataError(f"tuning holds out {VALIDATION:.0%} of every client's examples, but no client has {least}")
    one_by_one = isinstance(setting.test, Federation) and len(setting.test) == len(held)
    return train, held if one_by_one else held.data[held.order]


def _trial(
    ranks: Ranks, method: Method, setting: Setting, train: Federation, out: Storage, resume: bool, name: str,
    **options: Any,
) -> dict[str, float] | None:  # fmt: skip
    """Validation scores of one run; None if it diverged, which its directory notes."""
    where, run, failure = out.directory, None, None
    resume = resume and where is not None
    if ranks.led(lambda: resume and where is not None and (where / DIVERGED).exists() and _same(where, method)):
        return None
    callbacks = [*options.pop("callbacks", ()), _must_accept]
    try:
        with _quiet():
            run = fit(method, setting.task, train, out=out, resume=resume, callbacks=callbacks, **options)
        _must_accept(run, run.history[-1])  # a finished run has no callbacks
    except Interrupted:
        raise
    except Exception as error:  # rank 0 decides what it means for all
        failure = error
    return ranks.led(lambda: _scored(run, failure, where, name))


def _scored(run: Run | None, failure: Exception | None, where: Path | None, name: str) -> dict[str, float] | None:
    """The scores of a trial, or None if its failure means that it diverged; other failures are raised."""
    if failure is None:
        found = None if run is None else run.evaluation
        return None if found is None else found.point
    error = failure.__cause__ if isinstance(failure, CallbackError) else failure
    diverged = isinstance(error, _Diverged) or (error is failure and isinstance(failure, _FAILURES))
    by_device = any(isinstance(one, _OF_THE_DEVICE) for one in (error, error and error.__cause__))
    if by_device or not diverged:
        raise failure
    log.log(logging.INFO if isinstance(error, _Diverged) else logging.WARNING, "%s diverged: %s", name, error)
    if where is not None and where.exists():
        write_atomically(where / DIVERGED, f"{error}\n")
    return None


def _same(where: Path, method: Method) -> bool:
    """Whether a directory holds a run of this method."""
    there = RunDirectory(where).facts().get("algorithm")
    return bool(there == json.loads(json.dumps(describe(method))))


def _must_accept(_: Run, line: dict[str, Any]) -> None:
    if not line["clients"]:
        raise _Diverged(f"no update of round {line['round']} was finite")


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of rejected updates: drawn settings may be extreme, and the trial's metrics have them."""
    before, rejections.disabled = rejections.disabled, True
    try:
        yield
    finally:
        rejections.disabled = before


def _finite(score: float) -> float | None:
    return score if math.isfinite(score) else None


def _best(scores: Sequence[float | None], way: int) -> int:
    """The first of the best. A trial that diverged is the worst."""
    return max(range(len(scores)), key=lambda k: -math.inf if (score := scores[k]) is None else way * score)
