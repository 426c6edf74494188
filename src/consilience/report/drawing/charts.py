"""Charts of runs: curves, clients and their classes, reliability diagrams, scores, points."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter, PercentFormatter

from consilience.core.display import clip
from consilience.metrics import Reliability
from consilience.report.drawing.canvas import (
    DASHED,
    FEW,
    GRID,
    MUTED,
    NAME,
    PAPER,
    SERIES,
    SHADES,
    WIDTH,
    Drawing,
    chart,
    series,
)

HEIGHT, WIDE = 2.75, (12.0, 3.2)
# An image cannot hold a CSS variable: a mid-tone of varying opacity is readable on white and on black.
HEAT = (0x2B / 255, 0x7B / 255, 0xBA / 255)
SLANTED: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
Points = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Line:
    """One curve; `low` and `high`, if given, bound its band."""

    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    dashed: bool = False
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def curves(title: str, lines: Sequence[Line], unit: str | None = None, mark: float | None = None) -> Drawing:
    """Curves over rounds, with a log axis if one peak would flatten the rest. `mark` draws a line at a round."""
    log = not unit and _is_peaked(lines)

    def paint(axes: Axes) -> None:
        for line in lines:
            dash = DASHED if line.dashed else "-" if line.colour < len(SERIES) else (0, (1, 1))
            dots: dict[str, Any] = {"marker": "o", "markersize": 3} if len(line.x) <= FEW else {}
            axes.plot(line.x, line.y, color=series(line.colour), linestyle=dash, **dots)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=series(line.colour), alpha=0.16, lw=0)
        if mark is not None:
            axes.axvline(mark, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("round")
        axes.margins(x=0.02)
        if unit:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(EngFormatter(unit=unit, sep=" "))
        elif log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())

    return chart(f"{title} (log scale)" if log else title, (WIDTH, HEIGHT), paint)


def _is_peaked(lines: Sequence[Line]) -> bool:
    values = np.array([value for line in lines for value in line.y if math.isfinite(value)])
    return bool(len(values) and values.min() > 0 and values.max() > 30 * np.median(values))


def stacked_bars(title: str, names: Sequence[str], counts: Sequence[Sequence[int]]) -> Drawing:
    """Examples of each client, one shade a class: for few classes, or for none (one column)."""

    def paint(axes: Axes) -> None:
        table = np.asarray(counts, dtype=float).T
        base = np.cumsum(table, axis=0) - table
        for kind, (height, bottom) in enumerate(zip(table, base, strict=True)):
            style: dict[str, Any] = {"color": SHADES[kind], "edgecolor": PAPER, "linewidth": 0.6}
            axes.bar(range(len(names)), height, 0.82, bottom, **style)
        _name_clients(axes, names)
        axes.grid(axis="x", visible=False)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter("{x:,.0f}")

    return chart(title, (WIDTH, HEIGHT) if len(names) <= FEW else WIDE, paint)


def heat_map(title: str, names: Sequence[str], classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Drawing:
    """The share of each class at each client as the strength of one colour, below the clients' sizes."""
    table = np.asarray(counts, dtype=float).T
    share = table / np.maximum(table.sum(axis=0), 1)

    def paint(figure: Figure) -> None:
        top, axes = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3])
        top.bar(range(len(names)), table.sum(axis=0), 0.82, color=MUTED, alpha=0.5)
        top.yaxis.set_major_locator(MaxNLocator(2, integer=True))
        top.yaxis.set_major_formatter("{x:,.0f}")
        top.grid(axis="x", visible=False)
        top.tick_params(bottom=False)
        top.set_title(title)
        image = np.empty((*share.shape, 4))
        image[..., :3] = HEAT
        image[..., 3] = (share / max(share.max(), 1e-9)) ** 0.75  # a power below one keeps small shares visible
        axes.imshow(image, aspect="auto", interpolation="none")
        separate_cells(axes, len(names), len(classes))
        _name_clients(axes, names)
        step = math.ceil(len(classes) / 24)
        axes.set_yticks(range(0, len(classes), step), [clip(name, NAME) for name in classes[::step]])

    width = WIDTH if len(names) <= FEW else WIDE[0]
    return Drawing(title, (width, 2.2 + min(0.19 * len(classes), 4.5)), paint)


def separate_cells(axes: Axes, columns: int, rows: int) -> None:
    """Gaps between the cells of a heat map, in place of grid and spines."""
    axes.grid(visible=False)
    axes.vlines(np.arange(columns - 1) + 0.5, -0.5, rows - 0.5, PAPER, linewidth=1)
    axes.hlines(np.arange(rows - 1) + 0.5, -0.5, columns - 0.5, PAPER, linewidth=1)
    axes.spines[:].set_visible(False)


def _name_clients(axes: Axes, names: Sequence[str]) -> None:
    """Name every client, or every n-th one if they do not fit."""
    step = max(1, math.ceil(len(names) / 30))
    labels = [clip(name, NAME) for name in names[::step]]
    crowded = sum(len(label) + 2 for label in labels) > (45 if len(names) <= FEW else 150)
    axes.set_xticks(range(0, len(names), step), labels, **(SLANTED if crowded else {}))
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_xlabel("client")


def reliability(title: str, diagram: Reliability, colour: int = 0) -> Drawing:
    """Accuracy by confidence against the diagonal, above the share of predictions in each bin."""

    def paint(figure: Figure) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
        filled = [bin for bin, count in enumerate(diagram.count) if count]
        left = [diagram.edges[bin] for bin in filled]
        width = [diagram.edges[bin + 1] - diagram.edges[bin] for bin in filled]
        accuracy = [diagram.accuracy[bin] for bin in filled]
        bars: dict[str, Any] = {"align": "edge", "color": series(colour), "edgecolor": PAPER, "linewidth": 0.6}
        top.bar(left, accuracy, width, alpha=0.4, **bars)
        top.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=DASHED)
        marks = [diagram.confidence[bin] for bin in filled]
        top.plot(marks, accuracy, color=series(colour), marker="o", markersize=3.5, linewidth=1.4)
        top.set(ylim=(0, 1.02), xlim=(0, 1), ylabel="accuracy")
        top.tick_params(bottom=False)
        top.text(0.04, 0.9, f"ECE {diagram.ece:.3f}", fontsize=10, transform=top.transAxes)
        top.set_title(clip(title, 40))
        total = sum(diagram.count)
        bottom.bar(left, [diagram.count[bin] / total for bin in filled], width, alpha=0.8, **bars)
        bottom.yaxis.set_major_locator(MaxNLocator(2))
        bottom.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        bottom.set(xlabel="confidence")

    return Drawing(title, (WIDTH, 3.7), paint)


def dots(title: str, names: Sequence[str], groups: Sequence[Sequence[tuple[float, float] | None]]) -> Drawing:
    """A row for each name; in it, a dot for each group, its mean, in a bar of ± one standard deviation."""
    pitch = max(0.34, 0.11 * len(groups))

    def paint(axes: Axes) -> None:
        for group, points in enumerate(groups):
            shift = (group - (len(groups) - 1) / 2) * 0.72 / max(len(groups), 1)
            found = [(row + shift, *point) for row, point in enumerate(points) if point is not None]
            y, mean, std = zip(*found, strict=True) if found else ((), (), ())
            style: dict[str, Any] = {"fmt": "o", "markersize": 4, "elinewidth": 1.3, "color": series(group)}
            axes.errorbar(mean, y, xerr=std, **style)
        axes.hlines(np.arange(len(names) - 1) + 0.5, 0, 1, GRID, transform=axes.get_yaxis_transform(), lw=0.8)
        axes.grid(axis="y", visible=False)
        axes.set_yticks(range(len(names)), [clip(name, NAME) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.xaxis.set_major_locator(MaxNLocator(5))

    return chart(title, (WIDTH, 0.75 + pitch * len(names)), paint)


def scatter(title: str, groups: Sequence[Points], low: Sequence[float], high: Sequence[float]) -> Drawing:
    """Points of the plane between two corners, one colour a group."""

    def paint(axes: Axes) -> None:
        for colour, points in enumerate(groups):
            x, y = zip(*points, strict=True) if points else ((), ())
            axes.plot(x, y, "o", color=series(colour), alpha=0.5, markersize=3, markeredgewidth=0)
        axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
        axes.set_aspect("equal")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_locator(MaxNLocator(5))

    return chart(title, (WIDTH, WIDTH), paint)
