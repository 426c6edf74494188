"""Stored runs: reading the directories of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from consilience.core import Belief, Mixture, text
from consilience.core.display import summary, summary_table
from consilience.core.errors import CheckpointError, DataError, RecordError, TaskError
from consilience.core.files import below
from consilience.core.records import notes
from consilience.core.seals import unseal
from consilience.core.text import plural
from consilience.data import Dataset, Federation
from consilience.data.dataset import Source
from consilience.data.prepared import examples, model_inputs
from consilience.data.tables import Preparation
from consilience.evaluation.calibration import LEVEL, Calibration, prediction_sets
from consilience.evaluation.predictions import SAMPLES, Inputs, predict_inputs
from consilience.evaluation.scores import Evaluation, evaluate
from consilience.evaluation.sets import Intervals, LabelSets
from consilience.metrics import Directions, Metrics, Reliability
from consilience.runs import coefficients as tables
from consilience.runs.directory import CALIBRATION, NEWCOMER, POSTERIOR, STATISTICS, RunDirectory
from consilience.runs.reading import read, read_json, read_lines, read_posterior
from consilience.runs.rows import flat, frame
from consilience.runs.stopping import VALIDATION, Stopping
from consilience.tasks.statistics import needs_statistics, with_sums
from consilience.tasks.task import Task

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class RunFiles:
    """The content of a run directory, as plain data."""

    config: dict[str, Any]
    rounds: list[dict[str, Any]]
    evaluation: dict[str, Any]
    toml: str = ""

    @classmethod
    def read(cls, directory: Path) -> RunFiles:
        """Read a run directory."""
        config = RunDirectory(directory).facts()
        run = str(config.get("id"))
        rounds = read_lines(directory / "metrics.jsonl", run)
        path, own = directory / "evaluation.json", directory / "config.toml"
        evaluation = read_json(path, "resume the run, which writes it again", run=run) if path.exists() else {}
        toml = read(own).decode("utf-8", "replace") if own.exists() else ""
        return cls(config, rounds, evaluation, toml)

    @property
    def directions(self) -> Directions:
        """The directions of own metrics."""
        return self.part("metrics")

    @property
    def outside(self) -> str:
        return str(self.evaluation.get("outside") or "")

    def part(self, name: str) -> dict[str, Any]:
        """A table of the configuration, empty if it is not there."""
        return self.config.get(name) or {}

    @property
    def method(self) -> str:
        """The method's name for titles."""
        name, algorithm = str(self.config.get("method", "run")), self.part("algorithm")
        if algorithm.get("name") != "Switch":
            return name
        first = str(algorithm["first"]["name"])
        return f"{name} after {text.plural(self.switch['at'], 'round')} of {first}" if self.switch else first

    @property
    def switch(self) -> dict[str, Any]:
        """The description of a switch between methods; empty where the planned rounds have none."""
        found = self.part("algorithm")
        return found if found.get("name") == "Switch" and found["at"] < self.config["rounds"] else {}

    @property
    def best_round(self) -> int | None:
        """The round whose state the run ends with, if validation data chose it."""
        rule = self.part("validation")
        if not rule:
            return None
        since = self.switch["at"] if self.switch else 0
        return Stopping(rule["monitor"], rule["patience"], since, self.directions).best(self.rounds)

    def curve(self, metric: str, kind: str = "point") -> tuple[list[int], list[float]]:
        """(rounds, values) of a metric: of the round itself, such as the training loss, or of an evaluation of the mean
        weights or of the posterior average."""
        key, own = "eval" if kind == "point" else kind, metric == "loss" or kind == "line"
        source = [(line["round"], line if own else line.get(key) or {}) for line in self.rounds]
        pairs = [(at, values[metric]) for at, values in source if text.is_number(values.get(metric))]
        return [at for at, _ in pairs], [value for _, value in pairs]

    def curve_names(self) -> list[str]:
        """Every metric that has a curve."""
        scores = [line.get(key) or {} for line in self.rounds for key in ("eval", "marginal", VALIDATION)]
        losses = ["loss"] if any("loss" in line for line in self.rounds) else []
        return text.in_order([*losses, *(metric for values in scores for metric in values)])

    def diagram(self, kind: str) -> Reliability | None:
        found = (self.evaluation.get(kind) or {}).get("reliability")
        return Reliability(*(found[key] for key in ("edges", "confidence", "accuracy", "count"))) if found else None


def read_runs(directory: Path, methods: Sequence[str], entries: Sequence[dict[str, Any]]) -> dict[str, list[RunFiles]]:
    """The runs of each method whose directories still exist."""
    found: dict[str, list[RunFiles]] = {method: [] for method in methods}
    for entry in entries:
        place = below(directory, str(entry.get("directory", "")))
        if (place / "run.json").is_file():
            found[str(entry["method"])].append(RunFiles.read(place))
    return found


def load_posterior(path: str | Path) -> Belief:
    """The server's belief about the weights at the last checkpoint, from a run's directory or from a copy of its
    posterior.safetensors. A site of a real federation has such a file with the belief that it predicts with itself."""
    run = RunDirectory(Path(path))
    if run.exists():
        return run.posterior()
    return read_posterior(run.path / POSTERIOR if run.path.is_dir() else run.path)[1]


@dataclass(frozen=True)
class StoredRun:
    """A run read from its directory, without its data and its module: `predict` and `evaluate` need the task again."""

    directory: Path
    config: dict[str, Any]
    history: list[dict[str, Any]]
    evaluation: Evaluation | None

    def __repr__(self) -> str:
        return summary(self.files().method, self._data("data"), self.history, self.directory, self.files().best_round)

    def _repr_html_(self) -> str:
        task = self.config.get("task") or {}
        who = [plural(self._data("clients", 0), "client"), self._data("how")]
        data = f"{self._data('data')}: {', '.join(filter(None, who))}"
        what = f"{task.get('kind', '')}, {plural(task.get('parameters') or 0, 'parameter')}"
        return summary_table(self.files().method, data, what, self.history, self.directory, self.files().best_round)

    @property
    def posterior(self) -> Belief:
        """The server's belief about the weights at the last checkpoint."""
        return load_posterior(self.directory)

    @property
    def newcomer(self) -> Belief:
        """The belief about the weights of a client that never took part, at the last checkpoint."""
        if self.config.get("alone"):
            raise no_newcomer(self.files().method)
        posterior, path = self.posterior, self.directory / NEWCOMER
        if not path.exists():
            return posterior
        round, belief = read_posterior(path, run=str(self.config.get("id")), file=NEWCOMER)
        if round != read_posterior(self.directory / POSTERIOR)[0]:
            raise CheckpointError(f"{path} is not of the posterior's round: resume the run, which writes it again")
        return belief

    def predict(
        self,
        task: Task,
        x: Inputs,
        *,
        samples: int = SAMPLES,
        point: bool = False,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> Tensor:
        """The predictive mean for model inputs x [N, ...], or for a table, as by `Run.predict`, with the module of
        `task`, at a new client."""
        belief, x = self.newcomer, model_inputs(x, self.preparation)
        how: dict[str, Any] = {"samples": samples, "point": point, "seed": seed, "batch_size": batch_size}
        return predict_inputs(self._prepared(task, belief), belief, x, **how)

    def coefficients(
        self,
        client: str | None = None,
        *,
        newcomer: bool = False,
        level: float = 0.95,
        exp: bool | None = None,
        per: Mapping[str, float] | None = None,
    ) -> tables.Coefficients:
        """The coefficients of a linear model with credible intervals, as by `Run.coefficients`, of the beliefs that the
        final evaluation has stored."""
        of = tables.NEWCOMER if newcomer else tables.EVERYONE if client is None else client
        return tables.stored(RunFiles.read(self.directory).evaluation, of, level, exp).rescaled(per or {})

    @property
    def preparation(self) -> Preparation | None:
        """How tables become model inputs; None if the run's data were no tables."""
        return RunDirectory(self.directory).preparation()

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of prediction sets; None if the run was not calibrated."""
        found: Calibration | None = self._record(CALIBRATION)
        return found

    def sets(
        self, task: Task, x: Inputs | Dataset, *, coverage: float = LEVEL, batch_size: int | None = None
    ) -> LabelSets | Intervals:
        """Prediction sets, as by `Run.sets`, with the module of `task`, at a new client."""
        calibration, belief = self.calibration, self.newcomer
        if calibration is None:
            raise DataError(f"{self.directory} has no calibration: fit the run with calibration=")
        x = model_inputs(x, self.preparation)
        how: dict[str, Any] = {"coverage": coverage, "batch_size": batch_size}
        how["classes"] = tuple(self._data("classes", ()))
        return prediction_sets(self._prepared(task, belief), belief, calibration, x, **how)

    def evaluate(
        self,
        task: Task,
        test: Source | Federation,
        *,
        samples: int = SAMPLES,
        outside: Source | None = None,
        batch_size: int | None = None,
        metrics: Metrics = (),
        intervals: float | None = None,
    ) -> Evaluation:
        """Scores on test data, as by `Run.evaluate`, with the module of `task`, of the belief about a new client."""
        belief, preparation = self.newcomer, self.preparation
        test = test if isinstance(test, Federation) else examples(test, preparation)
        outside = None if outside is None else examples(outside, preparation)
        how: dict[str, Any] = {"samples": samples, "outside": outside, "batch_size": batch_size, "metrics": metrics}
        how["intervals"] = intervals
        return evaluate(self._prepared(task, belief), belief, test, **how)

    def _prepared(self, task: Task, belief: Belief) -> Task:
        """The task in the posterior's precision. The posterior may end with the weights of networks that the method
        added, which the task does not have."""
        theta = belief.theta if isinstance(belief, Mixture) else belief.mean
        weights, learned = theta.shape[-1], self.config.get("task") or {}
        extended = weights == learned.get("parameters") and str(task.module) == learned.get("module")
        if task.size != weights and not extended:
            raise TaskError(f"the stored posterior has {weights:,} weights, but the task has {task.size:,}")
        return self._with_statistics(task.prepare(dtype=theta.dtype))

    def _with_statistics(self, task: Task) -> Task:
        """The task with the statistics of BatchNorm layers that were estimated after the posterior's round, if any."""
        sums = self._record(STATISTICS) if needs_statistics(task) else None
        return task if sums is None else with_sums(task, sums)

    def _record(self, name: str) -> Any:
        """The record in a file, if there is one of the posterior's round."""
        path = self.directory / name
        if not path.exists():
            return None
        data = read(path)
        try:
            found = unseal(data, run=str(self.config.get("id")), file=name)
        except RecordError as error:
            raise CheckpointError(f"{path} is {error}; resume the run, which writes it again") from error
        return found if notes(data)["round"] == notes(read(self.directory / POSTERIOR))["round"] else None

    def frame(self) -> pandas.DataFrame:
        """The history as a data frame, one row a round; needs pandas."""
        return frame([flat(line) for line in self.history])

    def files(self, evaluated: bool = True) -> RunFiles:
        """The run as plain data, as the report reads it."""
        found = None if self.evaluation is None else self.evaluation.to_json()
        return RunFiles(self.config, self.history, found or {})

    def _data(self, name: str, otherwise: Any = "") -> Any:
        return (self.config.get("federation") or {}).get(name) or otherwise


def no_newcomer(method: str) -> TaskError:
    """The error for predictions at a new client, where every client has learned a model for itself alone."""
    return TaskError(
        f"every client of {method} has a model of its own, and there is none for a new client: name a client, or use a "
        "method with a shared model, such as FedAvg or PartialPooling"
    )


def load_run(directory: str | Path) -> StoredRun:
    """A run from its directory, finished or not, without its data."""
    where = Path(directory)
    files = RunFiles.read(where)
    return StoredRun(where, files.config, files.rounds, _evaluation(files.evaluation))


def _evaluation(found: dict[str, Any]) -> Evaluation | None:
    point, marginal = found.get("point"), found.get("marginal") or {}
    if not point:
        return None
    return Evaluation(
        point["metrics"],
        marginal.get("metrics"),
        found.get("clients") or [],
        point.get("reliability"),
        marginal.get("reliability"),
        outside=found.get("outside"),
        belief=found.get("belief") or "",
        intervals=point.get("intervals") or {},
        marginal_intervals=marginal.get("intervals") or {},
        level=found.get("level"),
        majority=found.get("majority"),
        tempered=found.get("tempered"),
        temperature=found.get("temperature"),
    )
