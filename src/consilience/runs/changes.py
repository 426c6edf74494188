"""What changes for the clients when one of them leaves or joins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from consilience.core import DataError, Gaussian
from consilience.core.display import table
from consilience.core.text import in_order, number, short
from consilience.data import Federation
from consilience.runs.rows import frame
from consilience.runs.run import Run

if TYPE_CHECKING:
    import pandas

TAKES_PART = {(True, True): "yes", (True, False): "left", (False, True): "joined", (False, False): "no"}


@dataclass(frozen=True)
class Changes:
    """Every client's scores in two runs. `rows` has an entry for each client: its name, its test examples, whether it
    took part before and after, and the scores "before" and "after" by metric. `moved` is the distance between the
    posterior means in posterior standard deviations, a mean over weights; None for beliefs without them."""

    rows: list[dict[str, Any]]
    moved: float | None

    @property
    def metrics(self) -> list[str]:
        """The metrics of both runs: after a change, a run is not calibrated."""
        return in_order(metric for row in self.rows for metric in row["before"] if metric in row["after"])

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        head = ["client", "examples", "takes part", *(short(metric) for metric in self.metrics)]
        cells = []
        for row in self.rows:
            part = TAKES_PART[row["was"], row["is"]]
            scores = [f"{number(row['before'].get(m))} → {number(row['after'].get(m))}" for m in self.metrics]
            cells.append([row["client"], str(row["examples"]), part, *scores])
        return head, cells

    def _caption(self) -> str:
        if self.moved is None:
            return ""
        return f"The posterior mean has moved by {self.moved:.3g} standard deviations (mean over weights)."

    def __repr__(self) -> str:
        head, cells = self._cells()
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in (head, *cells)
        ]
        return "\n".join(filter(None, [*lines, self._caption()]))

    def _repr_html_(self) -> str:
        head, cells = self._cells()
        return table(["", *head[1:]], cells, self._caption())

    def frame(self) -> pandas.DataFrame:
        """One row for each client and metric; needs pandas."""
        return frame(
            [
                {"client": row["client"], "metric": m, "before": row["before"].get(m), "after": row["after"].get(m)}
                for row in self.rows
                for m in self.metrics
            ]
        )


def changes(before: Run, after: Run, test: Federation | None = None) -> Changes:
    """Compare two runs on every client's test examples, such as a run and the same one after `forget` or `join`.

    Each client is predicted with its own belief, or as a new one where it does not take part. `test` is by default the
    test data of the first run. Scores are those of the mean weights."""
    test = before.test if test is None and isinstance(before.test, Federation) else test
    if not isinstance(test, Federation):
        raise DataError("changes are compared on the test data of every client: pass test=, a Federation")
    found = [{client["name"]: client for client in run.evaluate(test).clients} for run in (before, after)]
    took = [{run.federation.name(k) for k in range(len(run.federation))} for run in (before, after)]
    rows = [
        {
            "client": name,
            "examples": first["examples"],
            "was": name in took[0],
            "is": name in took[1],
            "before": first["metrics"],
            "after": found[1][name]["metrics"],
        }
        for name, first in found[0].items()
    ]
    return Changes(rows, _moved(before, after))


def _moved(before: Run, after: Run) -> float | None:
    old, new = before.posterior, after.posterior
    if not isinstance(old, Gaussian) or old.mean.shape != new.mean.shape:
        return None
    return float(((new.mean - old.mean).abs() / old.variance.sqrt()).mean())
