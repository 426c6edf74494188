"""Charts of rows: histograms, densities, intervals, spreads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from consilience.core.display import clip
from consilience.report.drawing.canvas import DASHED, GRID, INK, MUTED, PAPER, WIDTH, Drawing, chart, series

HEIGHT = 0.82  # of a row: its highest bar
MAX_DOTS = 300


@dataclass(frozen=True)
class Ridge:
    """One row: the heights of a histogram, its colour, and the number of its examples if it is shown."""

    label: str
    heights: Sequence[float]
    colour: int = 0
    count: int | None = None


def ridges(title: str, x_label: str, edges: Sequence[float], rows: Sequence[Ridge], log: bool = False) -> Drawing:
    """Histograms over the same bins, one above the other, each as high as its row. With `log` the bins are of log₁₀."""

    def paint(axes: Axes) -> None:
        for at, row in enumerate(rows):
            top = max(row.heights, default=0) or 1.0
            heights = [HEIGHT * value / top for value in row.heights]
            colour = series(row.colour)
            axes.stairs([at - value for value in heights], edges, baseline=at, fill=True, color=colour, alpha=0.35)
            axes.stairs([at - value for value in heights], edges, baseline=at, color=colour, linewidth=1.2)
        counts = ["" if row.count is None else f"\n{row.count:,}" for row in rows]
        _rows(axes, [clip(row.label, 20) + count for row, count in zip(rows, counts, strict=True)])
        axes.set_xlim(edges[0], edges[-1])
        if log:
            _ticks_of_log(axes, edges[0], edges[-1])
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.set_xlabel(x_label)

    few = 0.62 if len(rows) <= 4 else 0.3
    return chart(title, (WIDTH, 0.9 + few * len(rows)), paint)


def densities(title: str, weights: Sequence[tuple[str, float, float]]) -> Drawing:
    """Normal densities (name, mean, sd) on one axis, each as high as its row; the widest may leave the axes."""
    usual = sorted(sd for _, _, sd in weights)[len(weights) // 2]
    low, high = (end(mean for _, mean, _ in weights) for end in (min, max))
    low, high = low - 3.5 * usual, high + 3.5 * usual

    def paint(axes: Axes) -> None:
        for at, (_, mean, sd) in enumerate(weights):
            near = mean + sd * np.linspace(-4, 4, 81)
            x = np.unique(np.concatenate([[low, high], near[(near >= low) & (near <= high)]]))
            y = at - HEIGHT * np.exp(-0.5 * ((x - mean) / sd) ** 2)
            axes.fill_between(x, y, at, color=series(1), alpha=0.3, linewidth=0)
            axes.plot(x, y, color=series(1), linewidth=1.2)
        axes.axvline(0, color=MUTED, linewidth=1, linestyle=DASHED)
        _rows(
            axes, [f"{clip(name, 20)}\n{mean:.2g} ± {sd:.1g}".replace("-", "−") for name, mean, sd in weights], size=8
        )
        axes.set_xlim(low, high)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel("value of the weight")

    return chart(title, (WIDTH, 0.9 + 0.42 * len(weights)), paint)


def _rows(axes: Axes, labels: Sequence[str], size: float | None = None) -> None:
    """Base lines of rows at whole numbers, the first on top; labels in the middle of the rows."""
    axes.hlines(range(len(labels)), 0, 1, GRID, transform=axes.get_yaxis_transform(), linewidth=0.8)
    axes.grid(axis="y", visible=False)
    axes.set_yticks([at - HEIGHT / 2 for at in range(len(labels))], labels, fontsize=size)
    axes.set_ylim(len(labels) - 0.98, -1.02)
    axes.spines["left"].set_visible(False)


def _ticks_of_log(axes: Axes, low: float, high: float) -> None:
    """Ticks at round numbers, of an axis in log₁₀."""
    digits = (1,) if high - low > 2.5 else (1, 3) if high - low > 1.2 else (1, 2, 5)
    step = max(1, math.ceil((high - low) / 6))
    decades = [at for at in range(math.floor(low), math.ceil(high) + 1) if at % step == 0]
    found = [(at + math.log10(digit), digit * 10.0**at) for at in decades for digit in digits]
    inside = [(at, value) for at, value in found if low <= at <= high]
    if len(inside) < 2:
        values = MaxNLocator(4).tick_values(10.0**low, 10.0**high)
        inside = [(math.log10(value), value) for value in values if 10.0**low <= value <= 10.0**high]
    axes.set_xticks([at for at, _ in inside], [_round(value) for _, value in inside])


def _round(value: float) -> str:
    if 1e-3 <= value < 1e4:
        return f"{value:.2g}" if value < 100 else f"{value:.0f}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def forest(title: str, rows: Sequence[tuple[str, float, float | None, float | None, int]]) -> Drawing:
    """Differences (label, estimate, low, high, colour) with their intervals, and a line at 0."""

    def paint(axes: Axes) -> None:
        axes.axvline(0, color=INK, linewidth=1)
        for at, (_, mean, low, high, colour) in enumerate(rows):
            if low is not None and high is not None:
                axes.plot([low, high], [at, at], color=series(colour), linewidth=1.8)
            axes.plot(mean, at, "o", color=series(colour), markersize=5.5)
        axes.grid(axis="y", visible=False)
        axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.margins(x=0.08)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.set_xlabel("difference")

    return chart(title, (WIDTH, 0.95 + 0.32 * len(rows)), paint)


@dataclass(frozen=True)
class Spread:
    """One method over its clients: the ends, the middle 80 %, the median, and the clients themselves."""

    label: str
    low: float
    inner: tuple[float, float]
    median: float
    high: float
    clients: Sequence[float]


def spreads(title: str, rows: Sequence[Spread]) -> Drawing:
    """A row for each method, in order of colour: pale dots are clients, the thin line is the whole range."""

    def paint(axes: Axes) -> None:
        for at, row in enumerate(rows):
            some = row.clients[:: math.ceil(len(row.clients) / MAX_DOTS) or 1]
            # Steps of the golden section keep neighbours apart, and are the same in every drawing.
            jitter = [at + 0.6 * ((i * 0.6180339887) % 1 - 0.5) for i in range(len(some))]
            axes.plot(some, jitter, "o", color=series(at), alpha=0.28, markersize=3.5, markeredgewidth=0)
            axes.plot([row.low, row.high], [at, at], color=series(at), linewidth=1.2)
            axes.plot(row.inner, [at, at], color=series(at), linewidth=5, solid_capstyle="butt")
            axes.plot(row.median, at, "o", color=series(at), markersize=8, markeredgecolor=PAPER, markeredgewidth=1.5)
        axes.grid(axis="y", visible=False)
        axes.set_yticks(range(len(rows)), [clip(row.label, 20) for row in rows])
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.xaxis.set_major_locator(MaxNLocator(5))

    return chart(title, (WIDTH, 0.75 + 0.42 * len(rows)), paint)
