"""Coverage and size of prediction sets, beside naive sets."""

from consilience.core import text
from consilience.evaluation.calibration import LEVEL, OWN
from consilience.report.page import Cell, Section, Table
from consilience.runs.stored import RunFiles

COVERAGE, SIZES = "coverage", ("set_size", "interval_width")
SETS = tuple(f"{naive}{metric}" for naive in ("", "naive_") for metric in (COVERAGE, *SIZES))
"""The scores that this section shows."""
GUARANTEE = (
    "A set holds the true {what} with probability {level:.0%} at least, whether the model is right or not: at each "
    "client with {own} calibration examples or more, and over all clients together for the others."
)


def run_sets(run: RunFiles) -> Section:
    """The sets of each client and of all together, if the run is calibrated."""
    clients = run.evaluation.get("clients") or []
    parts = [run.evaluation.get(kind) or {} for kind in ("marginal", "point")]
    whole = next((part for part in parts if COVERAGE in (part.get("metrics") or {})), None)
    if whole is None:
        return Section("Prediction sets")
    size = next(name for name in SIZES if name in whole["metrics"])
    metrics = [COVERAGE, f"naive_{COVERAGE}", size, f"naive_{size}"]
    rows = [("all clients" if clients else "all examples", sum(c.get("examples") or 0 for c in clients), whole)]
    rows += [(str(client.get("name")), client.get("examples"), client) for client in clients]
    table = []
    for name, examples, found in rows:
        scores, ends = found.get("metrics") or {}, found.get("intervals") or {}
        cells = [Cell.of(scores.get(metric), 3, spread=text.interval(ends.get(metric))) for metric in metrics]
        table.append([Cell(name), Cell.of(examples or None, 0), *cells])
    head = ["client", "test examples", COVERAGE, f"naive {COVERAGE}", text.short(size), f"naive {text.short(size)}"]
    caption = (
        f"Naive sets take the model to be right: they have a probability of {LEVEL:.0%} under it, and no guarantee."
    )
    what = "class" if size == SIZES[0] else "number"
    about = GUARANTEE.format(what=what, level=LEVEL, own=OWN)
    return Section("Prediction sets", about, tables=[Table(head, table, caption)])
