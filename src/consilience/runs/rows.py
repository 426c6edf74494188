"""Rounds as flat rows: CSV text and data frames."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from consilience.core.errors import ConfigError
from consilience.metrics import MARGINAL

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]


def flat(line: Mapping[str, Any]) -> Row:
    """One round as a row. The names of scores of the posterior average end in " (marginal)". Of rejected clients and
    of guards that acted, the row has the number."""
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
    """All columns, in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


class Sheet:
    """Rounds as CSV. All rows are formatted again only when a round has a new column."""

    def __init__(self, history: Iterable[Mapping[str, Any]] = ()) -> None:
        self._rows: list[Row] = []
        self._columns: list[str] = []
        self._lines: list[str] = []
        for line in history:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> str | None:
        """Add a round; its line of text, or None if the header changed with it."""
        row = flat(line)
        self._rows.append(row)
        wider = columns([dict.fromkeys(self._columns), row])
        if wider != self._columns:
            self._columns, self._lines = wider, []
            return None
        self._complete()
        return self._lines[-1]

    def text(self) -> str:
        self._complete()
        return "".join([_csv(self._columns), *self._lines]) if self._rows else ""

    def _complete(self) -> None:
        for row in self._rows[len(self._lines) :]:
            self._lines.append(_csv([row.get(name) for name in self._columns]))


def _csv(cells: Sequence[Any]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


def frame(rows: Sequence[Row], names: Sequence[str] | None = None) -> pandas.DataFrame:
    """Rows as a data frame, with the columns `names` or all."""
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("data frames need pandas: pip install 'consilience[frames]'") from error
    return pandas.DataFrame(rows, columns=columns(rows) if names is None else list(names))
