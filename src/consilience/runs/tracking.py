"""Rounds as flat rows, and where they go: CSV files, TensorBoard, data frames."""

from __future__ import annotations

import csv
import io
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consilience.core.errors import ConfigError
from consilience.core.files import write_atomically
from consilience.metrics import MARGINAL

if TYPE_CHECKING:
    import pandas

    from consilience.runs.run import Run

__all__ = ["CSV", "Sheet", "TensorBoard", "flat", "frame"]

Row = dict[str, Any]


def flat(line: Mapping[str, Any]) -> Row:
    """One round as a row. Scores on the test data have their own names, those of the posterior average end in
    " (marginal)"; of clients left out and of guards that acted only the number is kept."""
    row: Row = {}
    for key, value in line.items():
        if key in ("eval", "marginal"):
            end = MARGINAL if key == "marginal" else ""
            row |= {name + (" (test)" if name in line else "") + end: score for name, score in value.items()}
        elif key == "guards":
            row[key] = sum(value.values())
        elif isinstance(value, Mapping):
            row |= {f"{key} {name}": part for name, part in value.items()}
        else:
            row[key] = len(value) if isinstance(value, list) else value
    return row


def columns(rows: Iterable[Row]) -> list[str]:
    """Every column of some rows, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row))


class Sheet:
    """Rounds as CSV, one by one: all are formatted anew only when a round brings a new column."""

    def __init__(self, history: Iterable[Mapping[str, Any]] = ()) -> None:
        self._rows: list[Row] = []
        self._columns: list[str] = []
        self._lines: list[str] = []
        for line in history:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> str | None:
        """One more round; its line of text, or None when the header has changed with it."""
        row = flat(line)
        self._rows.append(row)
        wider = columns([dict.fromkeys(self._columns), row])
        if wider != self._columns:
            self._columns, self._lines = wider, []
            return None
        self._complete()
        return self._lines[-1]

    def text(self) -> str:
        """The whole file."""
        self._complete()
        return "".join([_csv(self._columns), *self._lines]) if self._rows else ""

    def _complete(self) -> None:
        for row in self._rows[len(self._lines) :]:
            self._lines.append(_csv([row.get(name) for name in self._columns]))


def _csv(cells: Sequence[Any]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Make a sentence of what the system says about writing to `path`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}): choose another place, or free some space there"
        ) from error


class _Follower:
    """A callback for one run, whose stages share a history."""

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
        """Write a round's row."""
        new = self._is_new(run)
        text = None
        for missing in run.history if new else [line]:  # of a resumed run, all that went before
            text = self._sheet.add(missing)
        with _refused(self.path):
            if new or text is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path, self._sheet.text())
            else:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(text)


class TensorBoard(_Follower):
    """A callback that writes every round for TensorBoard: loss, seconds, bytes/down and bytes/up, eval/… and marginal/…
    on the test data, and whatever else is a number. A resumed run goes on where it went on; the file is complete
    after every round and closed at the end of the program."""

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
        """Write a round's numbers."""
        new = self._is_new(run)
        with _refused(self.directory):
            if new:
                self._writer = self._open(str(self.directory), purge_step=line["round"])
                weakref.finalize(self, self._writer.close)
            for name, value in _scalars(line).items():
                self._writer.add_scalar(name, value, line["round"])
            self._writer.flush()


def _scalars(line: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in line.items():
        name = key.replace("bytes_", "bytes/")
        if isinstance(value, Mapping):
            found |= {f"{name}/{part}": score for part, score in value.items()}
        elif key != "round":
            found[name] = len(value) if isinstance(value, list) else value
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def frame(rows: Sequence[Row], names: Sequence[str] | None = None) -> pandas.DataFrame:
    """Rows as a data frame, with the columns `names` or all."""
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("data frames need pandas: pip install 'consilience[frames]'") from error
    return pandas.DataFrame(rows, columns=columns(rows) if names is None else list(names))
