"""Sections on uncertainty: entropies of predictions, marginals of weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from consilience.core import text
from consilience.metrics import spread
from consilience.report.figures import swatch
from consilience.report.page import Cell, Plot, Section, Table
from consilience.report.strips import Ridge, densities, ridges
from consilience.runs.stored import RunFiles

GROUPS = {"right": 0, "wrong": 1, "outside": 3}  # with their colours
X_LABEL = "predictive entropy in nats"


def entropy_section(run: RunFiles, kinds: Mapping[str, str]) -> Section:
    """How unsure the final model is where it is right, where it is wrong, and about examples of another kind."""
    found = {name: entropies for kind, name in kinds.items() if (entropies := entropies_of(run, kind))}
    plots = [
        Plot(entropy_figure(name.capitalize(), [entropies], run.outside), entropy_caption([entropies], run.outside))
        for name, entropies in found.items()
    ]
    return Section("Uncertainty", how_to_read(found.values(), run.outside), plots=plots)


def entropy_comparison(runs: Mapping[str, Sequence[RunFiles]]) -> Section:
    """The same for every method, the mean over its seeds; of its posterior average if it has one."""
    plots, rows, everything = [], [], []
    outside = next((run.outside for group in runs.values() for run in group if run.outside), "")
    for colour, (method, group) in enumerate(runs.items()):
        kind = "marginal" if any(entropies_of(run, "marginal") for run in group) else "point"
        found = [entropies for run in group if (entropies := entropies_of(run, kind))]
        if found:
            everything += found
            name = f"{method}, marginal" if kind == "marginal" else method
            plots.append(Plot(entropy_figure(name, found, outside), entropy_caption(found, outside)))
            rows.append(_numbers(name, found, outside, colour))
    head = ["method", "right", "wrong", "wrong, AUROC ↑", *([outside, f"{outside}, AUROC ↑"] if outside else [])]
    caption = "Mean entropies in nats, and how well entropy tells wrong predictions from right ones"
    caption += f", and {outside} from the test data" if outside else ""
    tables = [Table(head, rows, f"{caption}. An AUROC of ½ is chance.")] if rows else []
    return Section("Uncertainty", how_to_read(everything, outside), plots=plots, tables=tables)


def _numbers(name: str, found: Sequence[dict[str, Any]], outside: str, colour: int) -> list[Cell]:
    cells = [Cell(name, swatch=swatch(colour))]
    for group in ["wrong", *(["outside"] if outside else [])]:
        values = [_mean(found, "right")] if group == "wrong" else []
        for value in [*values, _mean(found, group), _auroc(found, group)]:
            cells.append(Cell(text.fixed(value, 3), sort="" if value is None else value))
    return cells


def entropies_of(run: RunFiles, kind: str) -> dict[str, Any]:
    """The histograms of one kind of prediction, if evaluation.json has any."""
    return (run.evaluation.get(kind) or {}).get("entropy") or {}


def how_to_read(found: Iterable[Mapping[str, Any]], outside: str) -> str:
    """What a reader is to look for."""
    most = next((entropies["edges"][-1] for entropies in found), 0.0)
    other = f", and so have examples of another kind ({outside})" if outside else ""
    return (
        f"Entropy is how unsure a prediction is, from 0 (certain) to {most:.2f} nats (a guess among "
        f"{round(math.exp(most))} classes): where a model knows what it does not know, wrong predictions lie further "
        f"to the right than right ones{other}. Every row is as high as its highest bar."
    )


def entropy_figure(title: str, found: Sequence[Mapping[str, Any]], outside: str) -> str:
    """A histogram a group, as shares that are averaged over several runs."""
    rows = []
    for group, colour in GROUPS.items():
        counts = [
            entropies[group]["count"] for entropies in found if sum((entropies.get(group) or {}).get("count", []))
        ]
        if counts:
            shares = [[count / sum(run) for count in run] for run in counts]
            heights = [sum(column) / len(shares) for column in zip(*shares, strict=True)]
            total = round(sum(map(sum, counts)) / len(counts))
            rows.append(Ridge(outside if group == "outside" else group, heights, colour, total))
    return ridges(title, X_LABEL, found[0]["edges"], rows)


def entropy_caption(found: Sequence[Mapping[str, Any]], outside: str) -> str:
    """The means, and how well entropy tells the groups apart."""
    means = {group: _mean(found, group) for group in GROUPS}
    names = {"right": "where right", "wrong": "where wrong", "outside": f"on {outside}"}
    listed = [f"{value:.2f} {names[group]}" for group, value in means.items() if value is not None]
    sentence = f"Mean entropy {text.listing(listed)}." if listed else ""
    told = {"wrong": "wrong from right", "outside": f"{outside} from the test data"}
    areas = [f"{told[group]} {area:.3f}" for group in told if (area := _auroc(found, group)) is not None]
    sentence += f" AUROC of entropy: {', '.join(areas)}." if areas else ""
    return sentence.strip()


def _mean(found: Sequence[Mapping[str, Any]], group: str) -> float | None:
    return _average((entropies.get(group) or {}).get("mean") for entropies in found)


def _auroc(found: Sequence[Mapping[str, Any]], group: str) -> float | None:
    return _average((entropies.get("auroc") or {}).get(group) for entropies in found)


def _average(values: Iterable[Any]) -> float | None:
    numbers = [value for value in values if text.is_number(value)]
    return spread(numbers)[0] if numbers else None


def posterior_section(run: RunFiles) -> Section:
    """What the posterior says of single weights."""
    found = run.evaluation.get("posterior") or {}
    if not found:
        return Section("Posterior")
    tensors, total = found.get("tensors") or [], found.get("of_tensors") or 0
    cut = f" The {len(tensors)} largest of {total} parameters are shown." if total > len(tensors) else ""
    plots = []
    for name, title, label, caption in (
        (
            "sd",
            "How far weights may be off",
            "posterior standard deviation, log scale",
            "Further left is more certain.",
        ),
        (
            "ratio",
            "How much of a weight is known",
            "|mean| / standard deviation, log scale",
            "Right of 2, its sign is.",
        ),
    ):
        rows = [Ridge("all weights", found["all"][name], 5)] if len(tensors) != 1 else []
        rows += [Ridge(tensor["name"], tensor[name], 0) for tensor in tensors]
        svg = ridges(title, label, found["edges"][name], rows, log=True)
        plots.append(Plot(svg, f"{caption}{cut}"))
    examples = [
        (str(weight["name"]), weight["mean"], weight["sd"]) for weight in found.get("examples") or []
        if text.is_number(weight["mean"]) and text.is_number(weight["sd"]) and weight["sd"] > 0
    ]  # fmt: skip
    if examples:
        caption = "The posterior of single weights, evenly spaced over the network: mean ± standard deviation."
        plots.append(Plot(densities("Some weights", examples), caption))
    about = (
        f"The server holds a Gaussian over {text.plural(found['weights'], 'weight')}; of {found['known']:.0%} the sign "
        "is known (the mean is more than two standard deviations from 0). Every row is as high as its highest bar."
    )
    return Section("Posterior", about, plots=plots)
