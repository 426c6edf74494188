"""fit: one method on one federation. What is wrong is said before anything is written; then the loop runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from consilience.algorithms.base import Algorithm
from consilience.algorithms.switch import Method, Switch, phases
from consilience.core.checks import check_type, check_types
from consilience.core.errors import CheckpointError, ConfigError, DataError
from consilience.core.version import __version__
from consilience.data.dataset import Dataset
from consilience.data.federation import Federation
from consilience.engines.ranks import Ranks
from consilience.engines.session import Engine
from consilience.engines.simulator import Simulator
from consilience.evaluation.uncertainty import check_unlabelled
from consilience.runs.directory import RunDirectory, Saved, Storage
from consilience.runs.identity import describe, differences, identity
from consilience.runs.loop import Loop, Stage
from consilience.runs.run import Callback, Run, federation_facts
from consilience.tasks.task import Task


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
    out: str | Path | Storage | None = None,
    resume: bool = False,
    engine: Engine | None = None,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    debug: bool = False,
) -> Run:
    """Run `rounds` rounds of an algorithm on a federation, `cohort` clients each (all when None).

    With `out`, a path or a `Storage`, the run is a directory: metrics.jsonl, checkpoints, evaluation.json. With
    `resume` it continues from its last checkpoint, to the result of an uninterrupted run. `evaluate_every` None
    evaluates ten times. `outside` is out-of-distribution data, used to score the final model's uncertainty. After every
    round each of `callbacks` is called with the `Run` so far and the round's line (see `Callback`). With `debug` the
    algorithm audits its own state every round. A run in which no update was accepted ends with an error.
    """
    _check_types(locals())
    cohort, evaluate_every = _checked(task, federation, test, rounds, cohort, evaluate_every)
    storage = Storage.of(out)
    if outside is not None:
        if test is None:
            raise ConfigError("outside is compared with the test data: pass test= as well")
        check_unlabelled(task, outside)
    engine = engine or Simulator()
    stages = _stages(algorithm, task, federation, rounds, seed)
    who = identity(algorithm, stages[0].task, stages[0].federation, cohort, seed, engine.precision)
    facts = _facts(algorithm, stages[0], len(stages), rounds, cohort, seed, who)
    with engine.started() as (simulator, ranks), ExitStack() as held:
        _must_agree(ranks, who)
        place = storage.directory
        directory = None if place is None or not ranks.leads else RunDirectory(place)
        loop = Loop(
            simulator, ranks, place, directory, facts, rounds, cohort, seed, test, evaluate_every,
            storage.checkpoint_every, callbacks, progress, storage.state_memory, debug, outside,
        )  # fmt: skip
        source = None if storage.warm is None else RunDirectory(Path(storage.warm))
        found = ranks.in_turn(lambda: _begin(loop, algorithm, stages[0].algorithm, who, resume, source, held))
        return loop.go(stages, *(found or (0, None)))


def _begin(
    loop: Loop, method: Method, first: Algorithm, who: Any, resume: bool, source: RunDirectory | None, held: ExitStack
) -> tuple[int, Saved] | None:
    """Where to go on from, if not from the start; the run's directory is made, or held, by who writes it."""
    directory = loop.directory
    if loop.out is not None and directory is None:  # rank 0 was here before, and has left nothing to do
        made = RunDirectory(loop.out)
        loop.facts["plans"], loop.history = made.facts()["plans"], made.history()
        return made.latest()
    old = _existing(directory, who, resume)
    loop.facts["plans"] = old["plans"] if old else loop.facts["plans"]
    begun = directory is not None and directory.has_checkpoints()
    warmed = None if source is None or begun else _warm(method, source, who, loop.rounds)
    found = None
    if directory is not None:
        if old is None:
            directory.create(loop.facts)
        held.enter_context(directory.locked())
        found = directory.latest()
        loop.history = directory.history(up_to=found[0] if found else 0)
    return found if warmed is None else loop.begin(first, *warmed)


def _must_agree(ranks: Ranks, who: Any) -> None:
    """Refuse ranks that are about to run different things, before any of them does."""
    if ranks.size == 1:
        return
    here = json.loads(json.dumps(who))
    different = differences(ranks.led(lambda: here), here)
    if ranks.any(bool(different)):
        who_does = f"rank {ranks.rank} does" if different else "another rank does"
        what = f": {'; '.join(different[:3])}" if different else ""
        raise ConfigError(f"{who_does} not run what rank 0 runs{what}. All need the same seeds, data and settings")


def _stages(method: Method, task: Task, federation: Federation, rounds: int, seed: int) -> list[Stage]:
    stages = [
        Stage(
            p.algorithm, p.algorithm.adapt(task, seed), p.algorithm.arrange(federation), min(rounds, p.last or rounds)
        )
        for p in phases(method)
    ]
    if len({(stage.task.size, id(stage.federation)) for stage in stages}) > 1:
        names = " and ".join(stage.algorithm.name for stage in stages)
        raise ConfigError(
            f"{names} do not learn the same weights from the same clients: one cannot go on for the other"
        )
    return stages


def _check_types(given: dict[str, Any]) -> None:
    """Refuse arguments of `fit` that are not what they are annotated with, and so the method's own."""
    for name, hint in get_type_hints(fit).items():
        if name in given:
            check_type(name, given[name], hint)
    check_types(given["algorithm"])
    if isinstance(engine := given["engine"], type) or not hasattr(engine or Simulator, "started"):
        raise ConfigError(f"engine must be an engine, such as Simulator(device='cuda'), got {engine!r}")
    if not -(2**63) <= given["seed"] < 2**63:
        raise ConfigError(f"seed must lie in -2**63 … 2**63 - 1, got {given['seed']}")


def _checked(
    task: Task,
    federation: Federation,
    test: Dataset | Federation | None,
    rounds: int,
    cohort: int | None,
    evaluate_every: int | None,
) -> tuple[int, int]:
    for name, value in {"rounds": rounds, "cohort": cohort, "evaluate_every": evaluate_every}.items():
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


def _facts(method: Method, stage: Stage, stages: int, rounds: int, cohort: int, seed: int, who: Any) -> dict[str, Any]:
    task = stage.task
    return {
        "algorithm": describe(method),
        "method": method.name,
        "task": {"kind": task.kind, "parameters": task.size, "module": str(task.module)},
        "federation": federation_facts(stage.federation),
        "rounds": rounds,
        "cohort": cohort,
        "seed": seed,
        "engine": "simulator",
        "plans": [None] * stages,
        "versions": {"consilience": __version__, "torch": str(torch.__version__)},
        "identity": who,
    }
