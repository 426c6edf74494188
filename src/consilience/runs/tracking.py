"""Callbacks that write every round to a CSV file, to TensorBoard, to Weights & Biases or to MLflow."""

import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from consilience.core.errors import ConfigError
from consilience.core.files import write_atomically
from consilience.runs.directory import RunDirectory
from consilience.runs.rows import Sheet
from consilience.runs.run import Run

__all__ = ["CSV", "MLflow", "TensorBoard", "WandB"]


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Turn an error of the system about `path` into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}): choose another place, or free some space there"
        ) from error


class _Follower:
    """A callback that follows one run. All stages of a run share one history list."""

    def __init__(self) -> None:
        self._history: list[dict[str, Any]] | None = None

    def _is_new(self, run: Run) -> bool:
        new = self._history is None
        if not new and self._history is not run.history:
            name = type(self).__name__
            raise ConfigError(f"this {name} has followed another run already: make a {name} for each run")
        self._history = run.history
        return new


class CSV(_Follower):
    """A callback that keeps a run's rounds in a CSV file, for runs without a directory (which have metrics.csv)."""

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path, self._sheet = Path(path), Sheet()

    def __call__(self, run: Run, line: dict[str, Any]) -> None:
        new = self._is_new(run)
        text = None
        for missing in run.history if new else [line]:  # of a resumed run, all earlier rounds
            text = self._sheet.add(missing)
        with _refused(self.path):
            if new or text is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path, self._sheet.text())
            else:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(text)


class TensorBoard(_Follower):
    """A callback that writes every number of a round for TensorBoard: loss, seconds, bytes/down, bytes/up, eval/… and
    marginal/… on the test data. A resumed run appends to the same log."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("TensorBoard is not installed: pip install 'consilience[track]'") from error
        self.directory, self._open = Path(directory), SummaryWriter
        with _refused(self.directory):  # before any round is run
            self.directory.mkdir(parents=True, exist_ok=True)

    def __call__(self, run: Run, line: dict[str, Any]) -> None:
        new = self._is_new(run)
        with _refused(self.directory):
            if new:
                self._writer = self._open(str(self.directory), purge_step=line["round"])
                weakref.finalize(self, self._writer.close)
            for name, value in _scalars(line).items():
                self._writer.add_scalar(name, value, line["round"])
            self._writer.flush()


class WandB(_Follower):
    """A callback that logs every number of a round to Weights & Biases, with the names of `TensorBoard`. `options` are
    those of `wandb.init`: project, entity, dir, mode="offline", … A resumed run goes on in the same run there."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("Weights & Biases is not installed: pip install 'consilience[wandb]'") from error
        self._open, self._options = wandb.init, options

    def __call__(self, run: Run, line: dict[str, Any]) -> None:
        if self._is_new(run):
            config = run.files(evaluated=False).config
            kept = {"id": _number(run), "resume": "allow"} if run.out is not None else {}
            self._run = self._open(**{"name": run.algorithm.name, "config": config, **kept, **self._options})
            weakref.finalize(self, self._run.finish)
        self._run.log(_scalars(line), step=line["round"], commit=True)


class MLflow(_Follower):
    """A callback that logs every number of a round to MLflow, with the names of `TensorBoard`. `tracking_uri` is a
    server, or a place such as "sqlite:///mlflow.db"; by default MLflow's own. A resumed run goes on in the same run
    there."""

    def __init__(self, tracking_uri: str | None = None, *, experiment: str = "consilience") -> None:
        super().__init__()
        try:
            from mlflow import MlflowClient, entities
        except ImportError as error:
            raise ConfigError("MLflow is not installed: pip install 'consilience[mlflow]'") from error
        self._client, self._metric, self._name = MlflowClient(tracking_uri), entities.Metric, experiment

    def __call__(self, run: Run, line: dict[str, Any]) -> None:
        if self._is_new(run):
            self._run = self._find(run)
        now, at = int(time.time() * 1000), line["round"]
        metrics = [self._metric(name, float(value), now, at) for name, value in _scalars(line).items()]
        self._client.log_batch(self._run, metrics=metrics)

    def _find(self, run: Run) -> str:
        """The id of the run there, which is made if it is new."""
        found = self._client.get_experiment_by_name(self._name)
        experiment = self._client.create_experiment(self._name) if found is None else found.experiment_id
        tags = {"consilience.run": _number(run)} if run.out is not None else {}
        if tags:
            same = self._client.search_runs([experiment], f"tags.`consilience.run` = '{tags['consilience.run']}'")
            if same:
                return str(same[0].info.run_id)
        made = self._client.create_run(experiment, run_name=run.algorithm.name, tags=tags).info.run_id
        for key, value in run.files(evaluated=False).config.items():
            if isinstance(value, str | int | float):
                self._client.log_param(made, key, value)
        return str(made)


def _number(run: Run) -> str:
    """The id of a stored run."""
    assert run.out is not None
    return RunDirectory(run.out).id


def _scalars(line: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in line.items():
        name = key.replace("bytes_", "bytes/")
        if isinstance(value, Mapping):
            found |= {f"{name}/{part}": score for part, score in value.items()}
        elif key != "round":
            found[name] = len(value) if isinstance(value, list) else value
    return {name: value for name, value in found.items() if isinstance(value, int | float)}
