"""Reports: a run or a comparison as one self-contained HTML file, and its figures one by one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, overload

from consilience.core.errors import ConsilienceError
from consilience.core.files import write_atomically
from consilience.runs import Run, StoredRun
from consilience.studies import Comparison

if TYPE_CHECKING:
    from consilience.report.plots import ComparisonPlots, RunPlots

__all__ = ["plot", "write_report"]


@overload
def plot(result: Comparison) -> ComparisonPlots: ...
@overload
def plot(result: Run | StoredRun) -> RunPlots: ...
def plot(result: Run | StoredRun | Comparison) -> RunPlots | ComparisonPlots:
    """Figures of a run or a comparison, for notebooks and papers: `plot(run).curves("accuracy").save("curves.pdf")`."""
    # Matplotlib takes longer to import than a small run takes.
    from consilience.report.plots import ComparisonPlots, RunPlots

    if isinstance(result, Comparison):
        return ComparisonPlots([asdict(row) for row in result.rows], result.stored)
    return RunPlots(result.files)


def write_report(directory: Path) -> Path:
    """Write `report.html` into a run or comparison directory, and return its path.

    The page depends only on the files in the directory: the same files give the same bytes.
    """
    # Matplotlib and jinja2 take longer to import than a page takes to write.
    from consilience.report.comparison import comparison_page
    from consilience.report.page import render
    from consilience.report.run import run_page

    directory = Path(directory)
    if (directory / "comparison.json").is_file():
        page = comparison_page(directory)
    elif (directory / "run.json").is_file():
        page = run_page(directory)
    else:
        raise ConsilienceError(
            f"{directory} is neither a run (it has no run.json) nor a comparison (it has no comparison.json)"
        )
    write_atomically(directory / "report.html", render(page))
    return directory / "report.html"
