"""The frozen settings of a run, and its stages."""

from collections.abc import Sequence
from dataclasses import dataclass

from consilience.algorithms.base import Algorithm
from consilience.data import Dataset, Federation
from consilience.metrics import Metric
from consilience.runs.directory import Storage
from consilience.runs.run import Callback
from consilience.tasks.task import Task


@dataclass(frozen=True)
class Settings:
    """The arguments of `fit` that hold for all rounds, with the defaults filled in."""

    rounds: int
    cohort: int
    seed: int
    storage: Storage
    test: Dataset | Federation | None
    outside: Dataset | None
    evaluate_every: int
    eval_batch_size: int | None
    callbacks: Sequence[Callback]
    progress: bool
    debug: bool
    metrics: tuple[Metric, ...] = ()
    calibration: Dataset | Federation | None = None
    validation: Dataset | Federation | None = None
    patience: int | None = None
    monitor: str | None = None
    intervals: float | None = None


@dataclass(frozen=True)
class Stage:
    """One method of a run, up to the round `last`: a `Switch` has two stages, other methods one."""

    algorithm: Algorithm
    task: Task
    federation: Federation
    last: int
