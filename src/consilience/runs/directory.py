"""Run directories: the files of a run, and the order in which they are written."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from consilience.core import Belief, Count, Size, check_types
from consilience.core.errors import CheckpointError, RecordError
from consilience.core.files import CHECKPOINTS, explained, named, write_atomically
from consilience.core.records import Tree, notes, pack, record, unpack
from consilience.data.cohort import Info
from consilience.runs.identity import differences
from consilience.runs.rows import Sheet

log = logging.getLogger("consilience")
POSTERIOR = "posterior.safetensors"
STATISTICS = "statistics.safetensors"  # of BatchNorm layers, for the posterior's mean after the last round
FILES = ("config.toml", "evaluation.json", "metrics.csv", "metrics.jsonl", POSTERIOR, "report.html", STATISTICS)
"""All files of a run beside run.json and the checkpoints."""


@dataclass(frozen=True)
class Storage:
    """Where a run is kept, and how: `fit(out=Storage(path, …))`, where a plain path means the defaults.

    A checkpoint is written every `checkpoint_every` rounds. Client states that together need more than `state_memory`
    bytes are kept in files under `path`. A `Switch` may start from the directory `warm` of a run of its first method
    that ends where it switches. A run with the path None is not kept.
    """

    path: str | Path | None
    _: KW_ONLY
    checkpoint_every: Count = 10
    state_memory: Size = 8 << 30
    warm: str | Path | None = None

    def __post_init__(self) -> None:
        check_types(self)

    @classmethod
    def of(cls, out: str | Path | Storage | None) -> Storage:
        return out if isinstance(out, Storage) else cls(out)

    @property
    def directory(self) -> Path | None:
        return None if self.path is None else Path(self.path)

    def below(self, *parts: str, warm: Path | None = None) -> Storage:
        return replace(self, path=None if self.path is None else Path(self.path, *parts), warm=warm)


@record
class Saved:
    """A checkpoint. Randomness is a function of the round, so it needs no saving. `info` is the start of the second
    method of a `Switch`; None before the switch, where it can be computed again."""

    server: Tree
    states: Tree
    info: Info | None


class RunDirectory:
    """The files of one run. An existing run is resumed or refused, never overwritten."""

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
        return (self.path / "run.json").exists()

    def has_checkpoints(self) -> bool:
        """Whether there is a checkpoint, readable or not."""
        return bool(self._newest_first())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out. A kill frees the lock, and workers do not inherit it. While it is held, a file
        that cannot be written raises a `CheckpointError`."""
        with explained(self.path), open(self.path / ".lock", "w") as file:
            if fcntl is not None:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise CheckpointError(f"another process is at work in {self.path}") from error
            yield

    def create(self, facts: dict[str, Any]) -> None:
        """Begin a run; an error if the directory already has a file that the run would write."""
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
        write_atomically(self.path / "run.json", json.dumps(facts, indent=1, ensure_ascii=False))

    def facts(self) -> dict[str, Any]:
        """The content of run.json."""
        try:
            facts: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} is not a run directory: {error}") from error
        return facts

    def must_match(self, new: Any) -> None:
        """Refuse to resume a run with another identity."""
        different = differences(self.facts().get("identity") or {}, json.loads(json.dumps(new)))
        where = {difference.split(" is ")[0] for difference in different}
        if "task.weights" in where and where <= {"task.weights", "contents.frozen"}:
            raise CheckpointError(
                f"{self.path} holds a run whose module had other initial weights: call torch.manual_seed(…) before you "
                "make the module, with the same number each time, or choose another directory"
            )
        if different:
            raise CheckpointError(
                f"{self.path} holds another run: {'; '.join(different[:3])}. Choose another directory, or its settings"
            )

    def save(self, round: int, saved: Saved, belief: Belief) -> None:
        """Write a checkpoint after `round`, and keep the newest two.

        The metrics are flushed first, then the posterior is written, then the checkpoint. So a kill in between leaves a
        round that is run again, and a finished run always has its posterior."""
        with named(self._metrics), open(self._metrics, "a") as file:
            os.fsync(file.fileno())
        self.write_sheet()
        write_atomically(self.path / POSTERIOR, pack(belief, round=str(round)))
        write_atomically(self._checkpoints / f"round-{round:07d}.safetensors", pack(saved, round=str(round)))
        for old in [*self._newest_first()[CHECKPOINTS:], *self._checkpoints.glob(".*.tmp")]:  # .tmp: left by a kill
            old.unlink()

    def write_sheet(self) -> None:
        """Write metrics.csv: one row a round, one column a number."""
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
        """(round, checkpoint) of the newest checkpoint that can be read; None if none was written yet."""
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
        with named(self._metrics), open(self._metrics, "a") as file:
            file.write(json.dumps(line) + "\n")
        with self._free:
            self._sheet.add(line)

    def history(self, up_to: int | None = None) -> list[dict[str, Any]]:
        """The metrics of all rounds. With `up_to`, later lines are removed from the file: their rounds run again."""
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
