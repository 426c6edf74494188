"""Run directories: the files of a run, and the order in which they are written."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from consilience.algorithms.base import Algorithm
from consilience.core import Belief, Count, Several, Size, check_types
from consilience.core.errors import CheckpointError, RecordError
from consilience.core.files import (
    CHECKPOINTS,
    PLAIN,
    below,
    explained,
    named,
    private_folder,
    read_file,
    remove_unfinished,
    write_atomically,
)
from consilience.core.records import Tree, record
from consilience.core.seals import check_seal, seal, seal_json, unseal
from consilience.data import tables
from consilience.data.cohort import Info
from consilience.runs.identity import differences
from consilience.runs.reading import read_json, read_lines, read_posterior
from consilience.runs.rows import Sheet

log = logging.getLogger("consilience")
POSTERIOR = "posterior.safetensors"
NEWCOMER = "newcomer.safetensors"  # the belief about a new client, where it is not the posterior
STATISTICS = "statistics.safetensors"  # of BatchNorm layers, for the posterior's mean after the last round
PREPARATION = tables.FILE  # how tables become model inputs
CALIBRATION = "calibration.safetensors"  # of prediction sets, for the belief after the last round
FILES = (
    CALIBRATION, "config.toml", "evaluation.json", "metrics.csv", "metrics.jsonl", NEWCOMER, POSTERIOR, PREPARATION,
    "report.html", STATISTICS,
)  # fmt: skip
"""All files of a run beside run.json and the checkpoints."""
MADE_AT_THE_END = (CALIBRATION, "evaluation.json", NEWCOMER, POSTERIOR, "report.html", STATISTICS)
"""The files that a resumed run writes again."""
_CHECKPOINT = re.compile(r"round-(\d+)\.safetensors")
# The run directories in which this process is at work. A lock of the system keeps out processes, but not threads.
_held: set[tuple[int, int]] = set()
_holding = threading.Lock()
Beliefs = dict[str, Belief]
"""The server's beliefs, by the names of their files."""
Best = Callable[[int], int | None]
"""The best round up to a round, by validation; None if there is none."""


def beliefs_of(algorithm: Algorithm, server: Tree) -> Beliefs:
    """The posterior and, where it differs, the belief about a new client."""
    found: Beliefs = {POSTERIOR: algorithm.posterior(server)}
    return found | ({NEWCOMER: algorithm.newcomer(server)} if algorithm.pools_partially else {})


@dataclass(frozen=True)
class Storage:
    """Where a run is kept, and how: `fit(out=Storage(path, …))`, where a plain path means the defaults.

    A checkpoint is written every `checkpoint_every` rounds. The newest `keep_checkpoints` are kept, and `consilience
    rewind` goes back to an earlier one. Client states that together need more than `state_memory` bytes are kept in
    files under `path`. A `Switch` may start from the directory `warm` of a run of its first method that ends where it
    switches. A run with the path None is not kept.
    """

    path: str | Path | None
    _: KW_ONLY
    checkpoint_every: Count = 10
    keep_checkpoints: Several = CHECKPOINTS
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
        return replace(self, path=None if self.path is None else below(Path(self.path), *parts), warm=warm)


@record
class Saved:
    """A checkpoint. Randomness is a function of the round, so it needs no saving. `info` is the start of the second
    method of a `Switch`; None before the switch, where it can be computed again."""

    server: Tree
    states: Tree
    info: Info | None


class RunDirectory:
    """The files of one run. An existing run is resumed or refused, never overwritten.

    Every file that a resumed run reads is sealed with the run's `id`, a random number of run.json: a damaged file, or
    one of another run, is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sheet, self._free = Sheet(), threading.Lock()

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @cached_property
    def id(self) -> str:
        """The number that the run's files are sealed with."""
        return str(self.facts().get("id"))

    def exists(self) -> bool:
        return (self.path / "run.json").exists()

    def has_checkpoints(self) -> bool:
        """Whether there is a checkpoint, readable or not."""
        return any(self._checkpoints.glob("round-*.safetensors"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes and threads out. A kill frees the lock, and workers do not inherit it. While it is held,
        a file that cannot be written raises a `CheckpointError`. Temporary files that a kill left are deleted."""
        with explained(self.path), self._alone():
            for path in self.path.iterdir():
                if path.is_symlink():
                    raise CheckpointError(f"{path} is a symbolic link: put the file or folder itself there")
            file = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | PLAIN, 0o600)
            with open(file, "w"):
                if fcntl is not None:
                    try:
                        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except OSError as error:
                        raise CheckpointError(f"another process is at work in {self.path}") from error
                for folder in (self.path, self._checkpoints, self.path / "states"):
                    remove_unfinished(folder)
                yield

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads of this process out."""
        found = self.path.stat()
        key = found.st_dev, found.st_ino
        with _holding:
            if key in _held:
                raise CheckpointError(f"another thread of this process is at work in {self.path}")
            _held.add(key)
        try:
            yield
        finally:
            with _holding:
                _held.remove(key)

    def make(self) -> None:
        """Make the directory of a new run; an error if it already has a file that the run would write."""
        if (self.path / "comparison.json").exists():
            raise CheckpointError(f"{self.path} holds a comparison: choose another directory")
        found = [name for name in FILES if (self.path / name).exists()]
        if found or self.has_checkpoints():
            what = found[0] if found else "checkpoints"
            raise CheckpointError(f"{self.path} holds {what} but no run.json: choose another directory")
        with self._made():
            self.path.mkdir(parents=True, exist_ok=True)

    def create(self, facts: dict[str, Any]) -> None:
        """Begin a run, in a directory that is locked."""
        if self.exists():
            raise CheckpointError(f"{self.path} holds a run already: resume it, or choose another directory")
        self.id = secrets.token_hex(8)
        with self._made():
            private_folder(self._checkpoints)
            self.write_facts(facts)

    @contextmanager
    def _made(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be made a run directory: {error.strerror}") from error

    def write_facts(self, facts: dict[str, Any]) -> None:
        write_atomically(self.path / "run.json", seal_json({"id": self.id, **facts}, indent=1))

    def facts(self) -> dict[str, Any]:
        """The content of run.json."""
        if not self.exists():
            raise CheckpointError(f"{self.path} is not a run directory: it has no run.json")
        return read_json(self.path / "run.json")

    def write_preparation(self, preparation: tables.Preparation) -> None:
        write_atomically(self.path / PREPARATION, seal_json(preparation.to_json(), indent=1, run=self.id))

    def preparation(self) -> tables.Preparation | None:
        """How the run's tables become model inputs; None if its data were no tables."""
        path = self.path / PREPARATION
        if not path.exists():
            return None
        remedy = "restore it from a backup"
        return tables.Preparation.from_json(json.dumps(read_json(path, remedy, run=self.id)))

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

    def save(
        self, round: int, saved: Saved, beliefs: Beliefs, keep: int = CHECKPOINTS, best: Best = lambda round: None
    ) -> None:
        """Write a checkpoint after `round`. Keep the newest `keep`, and of each that of the `best` round until then.

        The metrics are flushed first, then the posterior is written, then the checkpoint. So a kill in between leaves a
        round that is run again, and a finished run always has its posterior."""
        with named(self._metrics), open(self._metrics, "a") as file:
            os.fsync(file.fileno())
        self.write_sheet()
        self.write_beliefs(beliefs, round)
        self.write_record(_checkpoint(round), saved, round)
        kept = self.kept(keep, best)
        for number, old in self._newest_first().items():
            if number not in kept:
                old.unlink()

    def kept(self, keep: int, best: Best) -> set[int]:
        """The rounds of the newest `keep` checkpoints, and the best ones until each."""
        newest = list(self._newest_first())[:keep]
        return {*newest, *(at for number in newest if (at := best(number)) is not None)}

    def write_beliefs(self, beliefs: Beliefs, round: int) -> None:
        """Write the beliefs after `round`."""
        for name, belief in beliefs.items():
            self.write_record(name, belief, round)

    def write_record(self, name: str, value: Tree, round: int) -> None:
        """Write a sealed file of this run, of its state after `round`."""
        sealed = seal(value, run=self.id, file=name, round=str(round))
        write_atomically(self.path / name, sealed, private=True)

    def write_evaluation(self, found: dict[str, Any]) -> None:
        write_atomically(self.path / "evaluation.json", seal_json(found, indent=1, run=self.id))

    def write_sheet(self) -> None:
        """Write metrics.csv: one row a round, one column a number."""
        with self._free:  # rounds go on while a checkpoint is written
            text = self._sheet.text()
        write_atomically(self.path / "metrics.csv", text)

    def posterior(self) -> Belief:
        """The server's belief at the last checkpoint."""
        path, newest = self.path / POSTERIOR, next(iter(self._newest_first()), 0)
        round, belief = read_posterior(path, run=self.id, file=POSTERIOR)
        if round < newest:
            raise CheckpointError(
                f"{path} is of round {round}, but the last checkpoint is of round {newest}: resume the run, which "
                "writes it again"
            )
        return belief

    def has_posterior(self, round: int) -> bool:
        """Whether the posterior after this round is stored, and whole."""
        try:
            return read_posterior(self.path / POSTERIOR, run=self.id, file=POSTERIOR)[0] == round
        except CheckpointError:
            return False

    def _newest_first(self) -> dict[int, Path]:
        """The checkpoints by their rounds."""
        names = (path.name for path in self._checkpoints.glob("round-*.safetensors"))
        found = {
            int(match[1]): self._checkpoints / match[0] for name in names if (match := _CHECKPOINT.fullmatch(name))
        }
        return dict(sorted(found.items(), reverse=True))

    def latest(self) -> tuple[int, Saved] | None:
        """(round, checkpoint) of the newest checkpoint that can be read; None if none was written yet."""
        damaged: list[Path] = []
        for round, path in self._newest_first().items():
            try:
                saved = unseal(read_file(path), run=self.id, file=_checkpoint(round))
            except (RecordError, OSError) as error:
                log.warning("checkpoint %s cannot be read (%s); falling back to the one before", path, error)
                damaged.append(path)
                continue
            for bad in damaged:  # only now: with none to fall back on, the next resume must not start over
                bad.rename(bad.with_suffix(".damaged"))
            return round, saved
        if damaged:
            raise CheckpointError(f"none of the {len(damaged)} checkpoints in {self._checkpoints} can be read")
        if not self._checkpoints.is_dir() or (self.path / "evaluation.json").exists():
            raise CheckpointError(f"the checkpoints of {self.path} are gone: run it anew in another directory")
        return None

    def checkpoint(self, round: int) -> Saved:
        """The checkpoint of a round."""
        path = self.path / _checkpoint(round)
        try:
            found: Saved = unseal(read_file(path), run=self.id, file=_checkpoint(round))
        except (RecordError, OSError) as error:
            raise CheckpointError(
                f"{path}, of the best round, cannot be read: {error}. Restore it from a backup, or run anew"
            ) from error
        return found

    def rounds(self) -> list[int]:
        """The rounds of the checkpoints that can be read, the first one first."""
        self.facts()  # which refuses a directory without a run
        found = []
        for round, path in reversed(self._newest_first().items()):
            try:  # without its types: they may be in a file of the user's
                check_seal(read_file(path), run=self.id, file=_checkpoint(round))
            except (RecordError, OSError) as error:
                log.warning("checkpoint %s cannot be read (%s)", path, error)
            else:
                found.append(round)
        return found

    def rewind(self, round: int) -> None:
        """Go back to the checkpoint of `round`: later ones are deleted, with their metrics and all results. A run that
        is then resumed goes on from there."""
        self.facts()
        with self.locked():
            kept = self.rounds()
            if round not in kept:
                raise CheckpointError(f"{self.path} has no checkpoint of round {round}: {_listed(kept)}")
            read_lines(self._metrics, self.id, round)  # before anything is deleted
            for name in MADE_AT_THE_END:  # first: a kill must not leave results of a later round
                (self.path / name).unlink(missing_ok=True)
            for later, path in self._newest_first().items():
                if later > round:
                    path.unlink()
            self.history(up_to=round)
            self.write_sheet()

    def append(self, line: dict[str, Any]) -> None:
        with named(self._metrics), open(self._metrics, "a") as file:
            file.write(seal_json(line, run=self.id) + "\n")
        with self._free:
            self._sheet.add(line)

    def history(self, up_to: int | None = None) -> list[dict[str, Any]]:
        """The metrics of all rounds. With `up_to`, later lines are removed from the file: their rounds run again."""
        lines = read_lines(self._metrics, self.id, up_to)
        if up_to is not None:
            self._sheet = Sheet(lines)
            write_atomically(self._metrics, "".join(seal_json(line, run=self.id) + "\n" for line in lines))
        return lines


def _checkpoint(round: int) -> str:
    return f"checkpoints/round-{round:07d}.safetensors"


def _listed(rounds: list[int]) -> str:
    return f"there are those of {', '.join(map(str, rounds))}" if rounds else "there is none that can be read"
