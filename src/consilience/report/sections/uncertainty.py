"""Calibration, entropies of predictions, and the posterior of weights."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

from consilience.core import text
from consilience.metrics import Reliability, spread
from consilience.report.drawing.canvas import Drawing, swatch
from consilience.report.drawing.charts import reliability
from consilience.report.drawing.rows import Ridge, densities, ridges
from consilience.report.page import Cell, Plot, Section, Table
from consilience.report.sections.words import Runs, kinds
from consilience.runs.stored import RunFiles

DIAGONAL = "A calibrated model lies on the diagonal: of its predictions with confidence 0.8, 80 % are right."
COLOURS = {"right": 0, "wrong": 1, "outside": 3}
ROWS = "Each row has its own scale."
Entropies = Mapping[str, Any]  # histograms of one kind of prediction in evaluation.json


def run_calibration(run: RunFiles) -> Section:
    """A reliability diagram for each predictor of the final model."""
    plots = []
    for colour, (kind, name) in enumerate(kinds(run).items()):
        diagram = run.diagram(kind)
        if diagram and sum(diagram.count):
            plots.append(Plot(reliability(name.capitalize(), diagram, colour), _verdict(diagram)))
    return Section("Calibration", DIAGONAL, plots=plots)


def comparison_calibration(runs: Runs) -> Section:
    """A reliability diagram for each method, of the predictions of all its seeds."""
    plots = []
    for colour, (method, group) in enumerate(runs.items()):
        kind = "marginal" if any(run.diagram("marginal") for run in group) else "point"
        diagrams = [diagram for run in group if (diagram := run.diagram(kind)) and sum(diagram.count)]
        if diagrams:
            pooled = reduce(add, diagrams)
            caption = f"{kinds(group[0])[kind].capitalize()}. {_verdict(pooled)}"
            plots.append(Plot(reliability(method, pooled, colour), caption))
    return Section("Calibration", f"{DIAGONAL} A diagram has all seeds of a method.", plots=plots)


def _verdict(diagram: Reliability) -> str:
    total = sum(diagram.count)
    rows = zip(diagram.count, diagram.confidence, diagram.accuracy, strict=True)
    gap = sum(count * (confidence - accuracy) for count, confidence, accuracy in rows) / total
    verdict = "Mean confidence equals accuracy."
    if abs(gap) >= 0.0005:
        word, side = ("Overconfident", "above") if gap > 0 else ("Underconfident", "below")
        verdict = f"{word}: mean confidence is {abs(gap):.3f} {side} accuracy."
    return f"{verdict} {total:,} predictions; the lower bars are their shares in the bins."


def run_entropy(run: RunFiles) -> Section:
    """Entropies of right and wrong predictions, and of out-of-distribution examples."""
    found = {name: entropies for kind, name in kinds(run).items() if (entropies := _entropies(run, kind))}
    plots = [
        Plot(_drawing(name.capitalize(), [entropies], run.outside), _caption([entropies], run.outside))
        for name, entropies in found.items()
    ]
    return Section("Uncertainty", _about(found.values(), run.outside), plots=plots)


def comparison_entropy(runs: Runs) -> Section:
    """Entropies of each method, mean over seeds: of its posterior average if it has one, else of its point model."""
    plots, rows, everything = [], [], []
    outside = next((run.outside for group in runs.values() for run in group if run.outside), "")
    for colour, (method, group) in enumerate(runs.items()):
        kind = "marginal" if any(_entropies(run, "marginal") for run in group) else "point"
        found = [entropies for run in group if (entropies := _entropies(run, kind))]
        if found:
            everything += found
            name = f"{method}, marginal" if kind == "marginal" else method
            plots.append(Plot(_drawing(name, found, outside), _caption(found, outside)))
            numbers = [_mean(found, "right"), _mean(found, "wrong"), _auroc(found, "wrong")]
            numbers += [_mean(found, "outside"), _auroc(found, "outside")] if outside else []
            rows.append([Cell(name, swatch=swatch(colour)), *(Cell.of(value, 3) for value in numbers)])
    head = ["method", "right", "wrong", "wrong, AUROC ↑", *([outside, f"{outside}, AUROC ↑"] if outside else [])]
    other = f", or {outside} from the test data" if outside else ""
    caption = f"Mean entropies in nats. AUROC: how well entropy separates wrong predictions from right ones{other}; "
    tables = [Table(head, rows, f"{caption}½ is chance.")] if rows else []
    return Section("Uncertainty", _about(everything, outside), plots=plots, tables=tables)


def _entropies(run: RunFiles, kind: str) -> Entropies:
    return (run.evaluation.get(kind) or {}).get("entropy") or {}


def _about(found: Iterable[Entropies], outside: str) -> str:
    most = next((entropies["edges"][-1] for entropies in found), 0.0)
    other = f" and for out-of-distribution examples ({outside})" if outside else ""
    return (
        f"Entropy should be higher for wrong predictions{other} than for right ones. It reaches from 0 (certain) to "
        f"{most:.2f} nats (a guess among {round(math.exp(most))} classes). {ROWS}"
    )


def _drawing(title: str, found: Sequence[Entropies], outside: str) -> Drawing:
    rows = []
    for group, colour in COLOURS.items():
        counts = [
            entropies[group]["count"] for entropies in found if sum((entropies.get(group) or {}).get("count", []))
        ]
        if counts:
            shares = [[count / sum(run) for count in run] for run in counts]
            heights = [sum(column) / len(shares) for column in zip(*shares, strict=True)]
            total = round(sum(map(sum, counts)) / len(counts))
            rows.append(Ridge(outside if group == "outside" else group, heights, colour, total))
    return ridges(title, "predictive entropy in nats", found[0]["edges"], rows)


def _caption(found: Sequence[Entropies], outside: str) -> str:
    told = {"wrong": "wrong from right", "outside": f"{outside} from the test data"}
    areas = [f"{told[group]} {area:.3f}" for group in told if (area := _auroc(found, group)) is not None]
    sentences = [f"AUROC of entropy: {', '.join(areas)}."] if areas else []
    names = {"right": "where right", "wrong": "where wrong", "outside": f"on {outside}"}
    means = [f"{mean:.2f} {names[group]}" for group in COLOURS if (mean := _mean(found, group)) is not None]
    sentences += [f"Mean entropy {text.listing(means)}."] if means else []
    return " ".join(sentences)


def _mean(found: Sequence[Entropies], group: str) -> float | None:
    return _average((entropies.get(group) or {}).get("mean") for entropies in found)


def _auroc(found: Sequence[Entropies], group: str) -> float | None:
    return _average((entropies.get("auroc") or {}).get(group) for entropies in found)


def _average(values: Iterable[Any]) -> float | None:
    numbers = [value for value in values if text.is_number(value)]
    return spread(numbers)[0] if numbers else None


DEVIATIONS = ("sd", "Posterior standard deviations", "posterior standard deviation, log scale", "Left is more certain.")
RATIOS = ("ratio", "Means over standard deviations", "|mean| / standard deviation, log scale",
          "Right of 2, the sign of a weight is known.")  # fmt: skip


def posterior_section(run: RunFiles) -> Section:
    """The posterior's standard deviations, by parameter and of some weights."""
    found = run.evaluation.get("posterior") or {}
    if not found:
        return Section("Posterior")
    tensors, total = found.get("tensors") or [], found.get("of_tensors") or 0
    cut = f" The {len(tensors)} largest of {total} parameters are shown." if total > len(tensors) else ""
    plots = []
    for name, title, label, caption in (DEVIATIONS, RATIOS):
        rows = [Ridge("all weights", found["all"][name], 5)] if len(tensors) != 1 else []
        rows += [Ridge(tensor["name"], tensor[name], 0) for tensor in tensors]
        plots.append(Plot(ridges(title, label, found["edges"][name], rows, log=True), f"{caption}{cut}"))
    examples = [
        (str(weight["name"]), weight["mean"], weight["sd"]) for weight in found.get("examples") or []
        if text.is_number(weight["mean"]) and text.is_number(weight["sd"]) and weight["sd"] > 0
    ]  # fmt: skip
    if examples:
        caption = "Posteriors of single weights, evenly spaced over the network: mean ± standard deviation."
        plots.append(Plot(densities("Some weights", examples), caption))
    about = (
        f"The sign of {found['known']:.0%} of {text.plural(found['weights'], 'weight')} is known: their mean is more "
        f"than two standard deviations from 0. {ROWS}"
    )
    return Section("Posterior", about, plots=plots)
