"""fit: one method on one federation. All arguments are checked before anything is written; then the loop runs."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from consilience.algorithms.switch import Method, phases
from consilience.core.checks import Count, check_type, check_types, hints_of
from consilience.core.errors import ConfigError, DataError
from consilience.core.version import __version__
from consilience.data import Dataset, Federation
from consilience.data.augment import check_augmentable
from consilience.engines import Engine, Simulator, check_hidden
from consilience.evaluation.calibration import LEVEL, check_enough
from consilience.evaluation.scores import check_metrics
from consilience.evaluation.sets import check_score
from consilience.evaluation.uncertainty import check_unlabelled
from consilience.metrics import Metrics, as_metrics, check_level, directions
from consilience.runs.directory import RunDirectory, Storage
from consilience.runs.held_out import check_unseen
from consilience.runs.identity import checksum, describe, identity
from consilience.runs.loop import Loop
from consilience.runs.run import Callback, Run, federation_facts
from consilience.runs.settings import Settings, Stage
from consilience.runs.start import find_start, must_agree
from consilience.server.optimizers import Momentum
from consilience.tasks.balance import balanced
from consilience.tasks.task import Task


def fit(
    algorithm: Method,
    task: Task,
    federation: Federation,
    *,
    rounds: Count,
    cohort: Count | None = None,
    test: Dataset | Federation | None = None,
    outside: Dataset | None = None,
    calibration: Dataset | Federation | None = None,
    seed: int = 0,
    out: str | Path | Storage | None = None,
    resume: bool = False,
    engine: Engine | None = None,
    evaluate_every: Count | None = None,
    eval_batch_size: Count | None = None,
    callbacks: Sequence[Callback] = (),
    metrics: Metrics = (),
    intervals: float | None = None,
    validation: float | Dataset | Federation | None = None,
    patience: Count | None = None,
    monitor: str | None = None,
    progress: bool = True,
    debug: bool = False,
) -> Run:
    """Run `rounds` rounds of an algorithm on a federation, `cohort` clients each (all when None).

    With `out`, a path or a `Storage`, the run is a directory: metrics.jsonl, checkpoints, evaluation.json. With
    `resume` it continues from its last checkpoint, to the result of an uninterrupted run. `evaluate_every` None
    evaluates ten times. `eval_batch_size` is the number of test examples that are predicted at once, by default at most
    1000 with at most 64 MiB of inputs. `metrics` are further scores: functions of (prediction, y) by name, or a list of
    `Metric` and of names such as "auprc". With `intervals`, a confidence level such as 0.95, the last scores have
    intervals. `outside` is out-of-distribution data, used to score the final model's uncertainty, with the scale and
    shift of the training data. `calibration` are held-out examples that calibrate prediction sets of the final model
    (see `Run.sets`). After every round each of `callbacks` is called with the `Run` so far and the round's line (see
    `Callback`). If one fails, the round is saved first. With `debug` the algorithm audits its own state every round. A
    run in which no update was accepted ends with an error.

    With `validation`, a share of every client's examples that is held out, or other data, every evaluation scores the
    mean weights on them, and the run ends with the state after its `best_round` by the score `monitor` (by default nll,
    if there is one). It stops after `patience` evaluations without a better score; None runs all rounds.
    """
    _check_types(locals())
    federation, held_out = _hold_out(federation, validation, seed)
    task = balanced(task, federation)
    _check_data(task, federation, test, outside, cohort)
    _check_calibration(task, federation, calibration, validation=held_out, test=test)
    _check_validation(task, federation, held_out, patience, monitor)
    check_level(intervals)
    check_metrics(task, own := as_metrics(metrics))
    engine = engine or Simulator()
    settings = Settings(
        rounds, cohort or len(federation), seed, Storage.of(out), test, outside, evaluate_every or max(1, rounds // 10),
        eval_batch_size, callbacks, progress, debug, own, calibration,
        held_out, patience, monitor, intervals,
    )  # fmt: skip
    stages = _stages(algorithm, task, federation, rounds, seed)
    if engine.secure:
        check_hidden(stage.algorithm for stage in stages)
    facts = _facts(algorithm, stages, settings, engine)
    with engine.started() as (opener, ranks), ExitStack() as held:
        must_agree(ranks, facts["identity"])
        path = settings.storage.directory
        directory = RunDirectory(path) if path is not None and ranks.leads else None
        start = ranks.in_turn(lambda: find_start(settings, directory, algorithm, facts, resume, held))
        if directory is not None and federation.data.preparation is not None:
            directory.write_preparation(federation.data.preparation)
        return Loop(settings, opener, ranks, directory, facts).go(stages, start)


def _check_types(given: dict[str, Any]) -> None:
    """Refuse arguments of `fit`, or fields of the method, that do not have the annotated types."""
    for name, hint in hints_of(fit).items():
        if name in given:
            check_type(name, given[name], hint)
    check_types(given["algorithm"])
    if isinstance(engine := given["engine"], type) or not hasattr(engine or Simulator, "started"):
        raise ConfigError(f"engine must be an engine, such as Simulator(device='cuda'), got {engine!r}")
    if not -(2**63) <= given["seed"] < 2**63:
        raise ConfigError(f"seed must lie in -2**63 … 2**63 - 1, got {given['seed']}")


def _check_data(
    task: Task, federation: Federation, test: Dataset | Federation | None, outside: Dataset | None, cohort: int | None
) -> None:
    if cohort is not None and cohort > len(federation):
        raise ConfigError(f"cohort is {cohort}, but the federation has {len(federation)} clients")
    empty = (federation.sizes == 0).nonzero().flatten().tolist()
    if empty:
        names = ", ".join(repr(federation.name(c)) for c in empty[:3])
        raise DataError(f"{len(empty)} of {len(federation)} clients have no data, among them {names}: leave them out")
    check_augmentable(task.augment, federation.data)
    task.check(federation.data)
    if test is not None:
        if isinstance(test, Federation) and not test.examples:
            raise DataError(f"none of the {len(test)} clients has any test data: hold out a larger share")
        task.check(test.data if isinstance(test, Federation) else test)
    if outside is not None:
        if test is None:
            raise ConfigError("outside is compared with the test data: pass test= as well")
        held = test.data if isinstance(test, Federation) else test
        check_unlabelled(task, outside.normalised_as(federation.data, held))


def _check_calibration(
    task: Task, federation: Federation, data: Dataset | Federation | None, **others: Dataset | Federation | None
) -> None:
    if data is None:
        return
    check_score(task, "lac")
    check_unseen(federation, data)
    for by, other in others.items():
        if other is not None:
            check_unseen(other, data, by=by)
    task.check(data.data if isinstance(data, Federation) else data)
    clients = int((data.sizes > 0).sum()) if isinstance(data, Federation) else 1
    check_enough(data.examples if isinstance(data, Federation) else len(data), clients, LEVEL)


def _hold_out(
    federation: Federation, validation: float | Dataset | Federation | None, seed: int
) -> tuple[Federation, Dataset | Federation | None]:
    """(training examples, validation examples): the same share of every client's examples is held out."""
    if validation is None or isinstance(validation, Dataset | Federation):
        return federation, validation
    return federation.split(validation, seed=seed)


def _check_validation(
    task: Task, federation: Federation, data: Dataset | Federation | None, patience: int | None, monitor: str | None
) -> None:
    if data is None:
        if patience is not None or monitor is not None:
            raise ConfigError("patience and monitor are about scores on validation data: pass validation= as well")
        return
    if not (data.examples if isinstance(data, Federation) else len(data)):
        raise DataError("no client has a validation example: hold out a larger share by validation=")
    check_unseen(federation, data, "validation")
    task.check(data.data if isinstance(data, Federation) else data)


def _stages(method: Method, task: Task, federation: Federation, rounds: int, seed: int) -> list[Stage]:
    stages = [
        Stage(
            p.algorithm, p.algorithm.adapt(task, seed), p.algorithm.arrange(federation), min(rounds, p.last or rounds)
        )
        for p in phases(method)
    ]
    for stage in stages:
        _check_averages(stage)
    if len({(stage.task.size, id(stage.federation)) for stage in stages}) > 1:
        names = " and ".join(stage.algorithm.name for stage in stages)
        raise ConfigError(
            f"{names} do not learn the same weights from the same clients: one cannot continue from the other"
        )
    return stages


def _check_averages(stage: Stage) -> None:
    """Refuse running averages of BatchNorm where the server does more to the entries of θ than to average them."""
    method = getattr(stage.algorithm, "method", stage.algorithm)
    server = getattr(method, "server", None)
    plain = server is None or (isinstance(server, Momentum) and not server.momentum and server.lr <= 1)
    if stage.task.running is not None and (method.by_gradients or not plain):
        raise ConfigError(
            f"{stage.algorithm.name} moves all entries of the model as gradients would, and running averages of "
            "BatchNorm must be averaged: make the task with batch_norm='estimated', or use replace_batchnorm(model)"
        )


def _facts(method: Method, stages: list[Stage], settings: Settings, engine: Engine) -> dict[str, Any]:
    """The content of run.json before the first round."""
    task, federation = stages[0].task, stages[0].federation
    own: dict[str, Any] = {"metrics": directions(settings.metrics)} if settings.metrics else {}
    who = identity(method, task, federation, settings.cohort, settings.seed, engine.precision)
    if engine.secure:
        own["secure"] = who["secure"] = True
    if settings.validation is not None:
        examples = settings.validation
        size = examples.examples if isinstance(examples, Federation) else len(examples)
        rule: dict[str, Any] = {"patience": settings.patience, "monitor": settings.monitor, "examples": size}
        own["validation"], who["validation"] = rule, {**rule, "contents": checksum(examples)}
    return {
        "algorithm": describe(method),
        "method": method.name,
        "alone": stages[-1].algorithm.alone,
        "task": {"kind": task.kind, "parameters": task.size, "module": str(task.module)},
        "federation": federation_facts(federation),
        "rounds": settings.rounds,
        "cohort": settings.cohort,
        "seed": settings.seed,
        "engine": "simulator",
        "plans": [None] * len(stages),
        "versions": {"consilience": __version__, "torch": str(torch.__version__)},
        **own,
        "identity": who,
    }
