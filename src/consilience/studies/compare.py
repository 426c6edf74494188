"""compare: several methods on the same federation, with the same budget, over several seeds."""

import itertools
import json
import logging
import time
import types
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from consilience.algorithms import Algorithm, LocalOnly, Pooled
from consilience.algorithms.switch import Method, Switch
from consilience.core.errors import CheckpointError, ConfigError
from consilience.metrics import as_metrics, directions
from consilience.runs import Run, Storage, fit
from consilience.runs.identity import describe
from consilience.runs.progress import Runs
from consilience.studies.comparison import Comparison
from consilience.studies.knobs import candidates
from consilience.studies.scores import Scores
from consilience.studies.setting import Setting
from consilience.studies.tune import shared
from consilience.studies.tune import tune as tune_methods

log = logging.getLogger("consilience")


def compare(
    algorithms: Mapping[str, Method] | Iterable[Method],
    setting: Setting | Callable[[int], Setting],
    *,
    seeds: int | Sequence[int] = 3,
    tune: int | None = None,
    select: str | None = None,
    target: float | None = None,
    out: str | Path | Storage | None = None,
    title: str = "Comparison",
    text: str = "",
    command: str = "",
    resume: bool = False,
    on_run: Callable[[str, int], None] | None = None,
    measure: Callable[[Run, Setting], dict[str, float]] | None = None,
    paper: Mapping[tuple[str, str], float] = types.MappingProxyType({}),
    **options: Any,
) -> Comparison:
    """Run every method for every seed with the same `options` of `fit`.

    A `setting` that is a function of the seed gives each seed its own split or initial weights. All methods share them,
    so their scores are paired. `seeds` is a number of seeds, from 0, or a sequence: `range(7, 10)`. `measure` adds
    scores to each run's; `paper` holds published figures by (method, metric). Methods that switch from the same first
    method at the same round share that warm start: with `out` it is run once a seed.

    With `validation` every method, Pooled too, stops by the same validation examples. With `intervals` and LocalOnly
    among the methods, `at_clients` has each method's differences to it at every client.

    With `tune`, every method first has that many trials with other settings, on the first seed's training data (see
    `tune`, also for `select`), and the best settings are used for all seeds. With `target`, the table has the first
    round whose accuracy is at least `target`, and no entry for a run that never reached it.

    Under torchrun all ranks make the same runs, with the engine `Distributed`. Rank 0 alone scores them, writes, and
    calls `on_run` and `measure`; every rank gets the table."""
    methods, numbers = _labelled(algorithms), _numbers(seeds)
    if select is not None and tune is None:
        raise ConfigError("select is the score to tune by: pass tune= as well, or leave it out")
    bounded = tune is not None or options.get("validation") is not None
    if (pooled := _label_of(Pooled, methods)) is not None and not bounded:
        log.warning("%s bounds the other methods only if it is tuned or stops early: pass tune= or validation=", pooled)
    storage = Storage.of(out)
    if storage.directory is not None:
        _must_be_free(storage.directory, resume)
    at = lru_cache(maxsize=1)(setting if callable(setting) else lambda _: setting)  # tuning's is the first seed's
    result, found = Comparison(title, text, command), Scores(paper)
    result.directions = directions(as_metrics(options.get("metrics", ())))
    start = time.perf_counter()
    trials = {} if tune is None else {label: len(candidates(label, m, tune)) for label, m in methods.items()}
    count = sum(trials.values()) + len(methods) * len(numbers)
    with shared(options) as ranks, Runs(count, bool(options.get("progress", True)) and ranks.leads) as runs:
        if tune is not None:

            def on_trial(label: str, trial: int) -> None:
                runs.begin(f"tuning {label}, trial {trial + 1} of {trials[label]}")

            same: dict[str, Any] = {"out": storage, "resume": resume, "select": select, "on_trial": on_trial}
            same |= {"seed": numbers[0], **options}
            tuned = tune_methods(methods, at(numbers[0]), trials=tune, **same)
            methods, result.tuning = tuned.methods, tuned.tuning
        for seed, (method, algorithm) in itertools.product(numbers, methods.items()):
            runs.begin(f"{method}, seed {seed}")
            if on_run is not None and ranks.leads:
                on_run(method, seed)
            run, where = _run(algorithm, at(seed), method, storage, resume, seed, **options)

            def score(run: Run = run, method: str = method, seed: int = seed) -> None:
                found.add(run, method, seed, {} if measure is None else measure(run, at(seed)), target)

            ranks.led(score)
            if where is not None:
                result.runs.append({"method": method, "seed": seed, "directory": str(where)})

        def finish() -> dict[str, Any]:
            result.rows, result.per_client = found.rows(), found.per_client()
            result.scores, result.paired = found.listed(numbers), found.paired(list(methods), result.directions)
            alone = _label_of(LocalOnly, methods)
            result.at_clients = found.at_clients(alone, options.get("intervals"), result.directions)
            result.seconds = time.perf_counter() - start
            if storage.directory is not None:
                result.save(storage.directory)
            return result.content()

        content = ranks.led(finish)
        return result if ranks.leads else Comparison.of(content, storage.directory)


def _run(
    algorithm: Method, at: Setting, method: str, storage: Storage, resume: bool, seed: int, **options: Any
) -> tuple[Run, Path | None]:
    """A run, and its directory inside the comparison's."""
    same: dict[str, Any] = {"test": at.test, "calibration": at.calibration, "seed": seed, **options}
    if storage.directory is None:
        return fit(algorithm, at.task, at.federation, out=storage, **same), None
    where, warm = Path(method) / f"seed-{seed}", _warm_start(algorithm, at, storage, **same)
    out = storage.below(str(where), warm=warm)
    return fit(algorithm, at.task, at.federation, out=out, resume=resume, **same), where


def _warm_start(method: Method, at: Setting, out: Storage, *, rounds: int, seed: int, **same: Any) -> Path | None:
    """The directory of a run of a switch's first method, run now if it is not there yet; None for other methods, and
    with validation, which would choose a round of the first method."""
    if not isinstance(method, Switch) or rounds <= method.at or same.get("validation") is not None:
        return None
    first = zlib.crc32(json.dumps(describe(method.first)).encode())
    own = out.below("warm starts", f"{method.first.name}-{method.at}-{first:08x}", f"seed-{seed}")
    where = own.directory
    assert where is not None
    resume = (where / "run.json").exists()
    fit(method.first, at.task, at.federation, rounds=method.at, seed=seed, out=own, resume=resume, **same)
    return where


def _must_be_free(out: Path, resume: bool) -> None:
    """Refuse a directory with something else in it."""
    if (out / "run.json").exists():
        raise CheckpointError(f"{out} holds a run: choose another directory for the comparison")
    if not resume and (out / "comparison.json").exists():
        raise CheckpointError(f"{out} holds a comparison already: resume it, or choose another directory")


def _label_of(kind: type[Algorithm], methods: Mapping[str, Method]) -> str | None:
    """The label of the first method of a kind."""
    return next((label for label, method in methods.items() if isinstance(method, kind)), None)


def _numbers(seeds: int | Sequence[int]) -> list[int]:
    found = list(range(seeds) if isinstance(seeds, int) else seeds)
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"seeds must be a number of at least 1, or a list of different seeds, got {seeds!r}")
    return found


def _labelled(algorithms: Mapping[str, Method] | Iterable[Method]) -> dict[str, Method]:
    """Methods by label; a label is the name of a folder too."""
    if isinstance(algorithms, Mapping):
        labelled = list(algorithms.items())
    else:
        labelled = [(algorithm.name, algorithm) for algorithm in algorithms]
    methods: dict[str, Method] = {}
    for label, algorithm in labelled:
        if label in methods:
            raise ConfigError(f"two methods are called {label!r}: pass a mapping from labels to methods")
        if label in ("", ".", "..") or "/" in label or "\0" in label:
            raise ConfigError(f"{label!r} cannot be a method's label: it names a folder, so it must have no '/'")
        methods[label] = algorithm
    if not methods:
        raise ConfigError("there is nothing to compare: pass at least one method")
    return methods
