"""Run directories: what a run is, what came of it, and where to go on."""

from __future__ import annotations

import json
import logging
import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from consilience.core.beliefs import Belief
from consilience.core.display import summary, summary_table
from consilience.core.errors import CheckpointError, RecordError
from consilience.core.files import CHECKPOINTS, explained, named, write_atomically
from consilience.core.records import Tree, notes, pack, record, unpack
from consilience.core.text import plural
from consilience.data.cohort import Info
from consilience.data.dataset import Dataset
from consilience.data.federation import Federation
from consilience.evaluation.scores import Evaluation
from consilience.runs.reading import RunFiles
from consilience.runs.tracking import Sheet, flat, frame
from consilience.tasks.task import Task

if TYPE_CHECKING:
    import pandas


log = logging.getLogger("consilience")
POSTERIOR = "posterior.safetensors"
FILES = (
    "config.toml",
    "evaluation.json",
    "metrics.csv",
    "metrics.jsonl",
    POSTERIOR,
    "report.html",
)  # beside run.json and the checkpoints


@record
class Saved:
    """All that a run needs to go on: randomness is a function of the round, so it needs no saving. `info` is what the
    algorithm of the present phase was started with; None in the first phase, where it can be made again."""

    server: Tree
    states: Tree
    info: Info | None


def describe(component: Any) -> Any:
    """A frozen component as plain data: {"name": class, field: value, …}."""
    if is_dataclass(component) and not isinstance(component, type):
        parts = {field.name: describe(getattr(component, field.name)) for field in fields(component)}
        return {"name": type(component).__name__, **parts}
    if isinstance(component, list | tuple):
        return [describe(part) for part in component]
    return component if isinstance(component, bool | int | float | str | None) else repr(component)


def about(task: Task) -> dict[str, Any]:
    """What a task is, but for its weights."""
    return {"kind": task.kind, "parameters": task.size, "module": str(task.module), **task.settings()}


def identity(algorithm: Any, task: Task, federation: Federation, cohort: int, seed: int, precision: str) -> Any:
    """What must be the same for a run to be the same run. Runs from before there was `contents` are resumed without."""
    return {
        "algorithm": describe(algorithm),
        "task": {**about(task), "weights": _crc(task.initial())},
        "augmentation": describe(task.augment),
        "federation": {
            "clients": len(federation),
            "examples": federation.examples,
            "partition": _crc(federation.order, federation.offsets),
            "labels": _crc(federation.data.y),
            "inputs": _crc(federation.data.x[:: max(1, len(federation.data) // 1000)]),
            # only of streams: runs from before there were any must still resume
            **({"steps": federation.steps} if federation.steps > 1 else {}),
        },
        "cohort": cohort,
        "seed": seed,
        "precision": precision,
        "contents": _contents(task, federation.data),
    }


def _contents(task: Task, data: Dataset) -> dict[str, int]:
    """All examples, how they become inputs, and what of the module is not learned."""
    found = {"inputs": [data.x], "frozen": task.fixed()}
    found |= {name: [t] for name, t in (("scale", data.scale), ("shift", data.shift)) if t is not None}
    return {name: _crc(*tensors) for name, tensors in found.items() if tensors}


def _crc(*tensors: Tensor) -> int:
    """A gigabyte takes a quarter of a second."""
    value = 0
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        value = zlib.crc32(flat.view(torch.uint8).numpy().data, value)  # NumPy has no bfloat16
    return value


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where two identities differ, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [d for key in keys for d in differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)]
    return [] if old == new else [f"{path} is {old!r} there and {new!r} here"]


def load_posterior(path: str | Path) -> Belief:
    """What a run's server believed of the weights at its last checkpoint: from the run's directory, or from a copy of
    its posterior.safetensors."""
    file = Path(path) / POSTERIOR if Path(path).is_dir() else Path(path)
    try:
        belief = unpack(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"there is no posterior at {file}: {error.strerror}") from error
    except RecordError as error:
        raise CheckpointError(f"{file} holds no posterior: {error}") from error
    if not isinstance(belief, Belief):
        raise CheckpointError(f"{file} holds no posterior, but a {type(belief).__name__}")
    return belief


@dataclass(frozen=True)
class StoredRun:
    """What a run left behind, without its data and its module: enough to look at it. To predict, make the task again
    and call `task.predict(stored.posterior.mean, x)` or `evaluate(task, stored.posterior, data)`."""

    directory: Path
    config: dict[str, Any]
    history: list[dict[str, Any]]
    evaluation: Evaluation | None

    def __repr__(self) -> str:
        return summary(self.files().method, self._data("data"), self.history, self.directory)

    def _repr_html_(self) -> str:
        task = self.config.get("task") or {}
        who = [plural(self._data("clients", 0), "client"), self._data("how")]
        data = f"{self._data('data')}: {', '.join(filter(None, who))}"
        what = f"{task.get('kind', '')}, {plural(task.get('parameters') or 0, 'parameter')}"
        return summary_table(self.files().method, data, what, self.history, self.directory)

    @property
    def posterior(self) -> Belief:
        """What the server believed of the weights at the last checkpoint."""
        return load_posterior(self.directory)

    def frame(self) -> pandas.DataFrame:
        """The history as a data frame, one row a round; needs pandas."""
        return frame([flat(line) for line in self.history])

    def files(self, evaluated: bool = True) -> RunFiles:
        """The run as plain data, as the report reads it."""
        found = None if self.evaluation is None else self.evaluation.to_json()
        return RunFiles(self.config, self.history, found or {})

    def _data(self, name: str, otherwise: Any = "") -> Any:
        return (self.config.get("federation") or {}).get(name) or otherwise


def load_run(directory: str | Path) -> StoredRun:
    """A run from its directory, finished or not. No data is needed, and none is read."""
    where = Path(directory)
    if not RunDirectory(where).exists():
        raise CheckpointError(f"{where} is not a run directory: it has no run.json")
    files = RunFiles.read(where)
    return StoredRun(where, files.config, files.rounds, _evaluation(files.evaluation))


def _evaluation(found: dict[str, Any]) -> Evaluation | None:
    """The scores of evaluation.json. Its histograms stay there."""
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
    )


class RunDirectory:
    """The files of one run. Nothing is written over: an old run is resumed or refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sheet, self._free = Sheet(), threading.Lock()

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def exists(self) -> bool:
        """Whether a run lives here."""
        return (self.path / "run.json").exists()

    def has_checkpoints(self) -> bool:
        """Whether there is a checkpoint, be it damaged."""
        return bool(self._newest_first())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out; a kill frees the lock, and workers never have it. A file that cannot be written
        meanwhile, in whichever thread, ends in a sentence."""
        with explained(self.path), open(self.path / ".lock", "w") as file:
            if fcntl is not None:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise CheckpointError(f"another process is at work in {self.path}") from error
            yield

    def create(self, facts: dict[str, Any]) -> None:
        """Begin a run, where none of its files would be written over."""
        if (self.path / "comparison.json").exists():
            raise CheckpointError(f"{self.path} holds a comparison: choose another directory")
        found = [name for name in FILES if (self.path / name).exists()]
        if found or self.has_checkpoints():
            what = found[0] if found else "checkpoints"
            raise CheckpointError(f"{self.path} holds {what} but no run.json: choose another directory")
        try:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            self.write_facts(facts)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be made a run directory: {error.strerror}") from error

    def write_facts(self, facts: dict[str, Any]) -> None:
        """run.json."""
        write_atomically(self.path / "run.json", json.dumps(facts, indent=1, ensure_ascii=False))

    def facts(self) -> dict[str, Any]:
        """run.json, as it was written."""
        try:
            facts: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} is not a run directory: {error}") from error
        return facts

    def must_match(self, new: Any) -> None:
        """Refuse to go on with another run."""
        old, new = self.facts().get("identity") or {}, json.loads(json.dumps(new))
        different = differences(old, {key: value for key, value in new.items() if key in old or key != "contents"})
        where = {difference.split(" is ")[0] for difference in different}
        if "task.weights" in where and where <= {"task.weights", "contents.frozen"}:
            raise CheckpointError(
                f"{self.path} holds a run whose module had other weights at first: call torch.manual_seed(…) before "
                "you make the module, with the same number each time, or choose another directory"
            )
        if different:
            raise CheckpointError(
                f"{self.path} holds another run: {'; '.join(different[:3])}. Choose another directory, or its settings"
            )

    def save(self, round: int, saved: Saved, belief: Belief) -> None:
        """A checkpoint after `round`, with the metrics so far safely on the disk; the newest two are kept. What the
        server believes of the weights is written beside them, for those who want nothing else: first, so that a kill
        before the checkpoint leaves a round that is run again, and a finished run is never without it."""
        with named(self._metrics), open(self._metrics, "a") as file:
            os.fsync(file.fileno())
        self.write_sheet()
        write_atomically(self.path / POSTERIOR, pack(belief, round=str(round)))
        write_atomically(self._checkpoints / f"round-{round:07d}.safetensors", pack(saved, round=str(round)))
        for old in [*self._newest_first()[CHECKPOINTS:], *self._checkpoints.glob(".*.tmp")]:  # and a kill's leftovers
            old.unlink()

    def write_sheet(self) -> None:
        """metrics.csv: the rounds so far for a spreadsheet, with a column for each number."""
        with self._free:  # rounds go on while a checkpoint is written
            text = self._sheet.text()
        write_atomically(self.path / "metrics.csv", text)

    def _newest_first(self) -> list[Path]:
        return sorted(self._checkpoints.glob("round-*.safetensors"), reverse=True)

    def _read(self, path: Path) -> tuple[int, Saved] | None:
        try:
            data = path.read_bytes()
            saved = unpack(data)
        except (RecordError, OSError) as error:
            log.warning("checkpoint %s cannot be read (%s); falling back to the one before", path, error)
            return None
        return (int(notes(data)["round"]), saved) if isinstance(saved, Saved) else None

    def latest(self) -> tuple[int, Saved] | None:
        """The newest checkpoint that can be read, with its round; None where there is none yet."""
        paths = self._newest_first()
        for i, path in enumerate(paths):
            found = self._read(path)
            if found is not None:
                for damaged in paths[:i]:  # only now: with none to fall back on, the next resume must not start over
                    damaged.rename(damaged.with_suffix(".damaged"))
                return found
        if paths:
            raise CheckpointError(f"none of the {len(paths)} checkpoints in {self._checkpoints} can be read")
        if not self._checkpoints.is_dir() or (self.path / "evaluation.json").exists():
            raise CheckpointError(f"the checkpoints of {self.path} are gone: run it anew in another directory")
        return None

    def append(self, line: dict[str, Any]) -> None:
        """One round's metrics."""
        with named(self._metrics), open(self._metrics, "a") as file:
            file.write(json.dumps(line) + "\n")
        with self._free:
            self._sheet.add(line)

    def history(self, up_to: int | None = None) -> list[dict[str, Any]]:
        """The metrics of all rounds, or of those up to `up_to`, in which case later lines are taken off the file:
        they belong to rounds that will be run again."""
        lines = []
        for text in self._metrics.read_text().splitlines() if self._metrics.exists() else []:
            try:
                lines.append(json.loads(text))
            except ValueError:  # a line cut short by a kill
                break
        if up_to is None:
            return lines
        kept = [line for line in lines if line["round"] <= up_to]
        self._sheet = Sheet(kept)
        write_atomically(self._metrics, "".join(json.dumps(line) + "\n" for line in kept))
        return kept
