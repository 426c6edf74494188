"""Drawings for clinical studies: coefficients with their intervals, and survival curves with bands."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from consilience.core.display import clip
from consilience.report.drawing.canvas import GRID, INK, MUTED, Drawing, chart, series

ROUND = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
CLOSE = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2)
WIDE = 5.4


@dataclass(frozen=True)
class Estimates:
    """One belief's estimates of all covariates with the ends of their intervals; pale dots without a colour."""

    estimate: Sequence[float]
    lower: Sequence[float]
    upper: Sequence[float]
    colour: int | None = None


def coefficient_plot(title: str, names: Sequence[str], groups: Sequence[Estimates], x_label: str, log: bool) -> Drawing:
    """A row for each covariate; in it, an estimate with its interval for each belief. Ratios have a log axis and a line
    at 1, others a line at 0."""
    coloured = [group for group in groups if group.colour is not None]
    pitch = max(0.42, 0.13 * len(coloured) + 0.16)

    def paint(axes: Axes) -> None:
        axes.axvline(1 if log else 0, color=INK, linewidth=1)
        for group in groups:
            if group.colour is None:
                axes.plot(group.estimate, range(len(names)), "o", color=MUTED, alpha=0.35, markersize=3.5, mew=0)
        for place, group in enumerate(coloured):
            shift = (place - (len(coloured) - 1) / 2) * 0.76 / max(len(coloured), 1)
            for row, (at, low, high) in enumerate(zip(group.estimate, group.lower, group.upper, strict=True)):
                axes.plot([low, high], [row + shift] * 2, color=series(group.colour or 0), linewidth=1.5)
                axes.plot(at, row + shift, "o", color=series(group.colour or 0), markersize=4.5)
        axes.hlines(
            [at + 0.5 for at in range(len(names) - 1)], 0, 1, GRID, transform=axes.get_yaxis_transform(), lw=0.8
        )
        axes.grid(axis="y", visible=False)
        axes.set_yticks(range(len(names)), [clip(name, 30) for name in names])
        axes.set_ylim(len(names) - 0.45, -0.55)
        axes.set_xlabel(x_label)
        if log:
            _ratio_axis(axes)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6))

    return chart(title, (WIDE, 0.95 + pitch * len(names)), paint)


def _ratio_axis(axes: Axes) -> None:
    """A log axis with ticks at round ratios."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [tick for tick in ROUND if low <= tick <= high]
    ticks = [tick for tick in CLOSE if low <= tick <= high] if len(ticks) < 4 else ticks
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(low, high)


@dataclass(frozen=True)
class Survival:
    """One survival curve with its band."""

    mean: Sequence[float]
    lower: Sequence[float]
    upper: Sequence[float]
    colour: int


def survival_plot(title: str, times: Sequence[float], curves: Sequence[Survival]) -> Drawing:
    """Step curves from 1 on, each in its band."""

    def paint(axes: Axes) -> None:
        for curve in curves:
            colour = series(curve.colour)
            axes.fill_between(times, curve.lower, curve.upper, step="post", color=colour, alpha=0.16, linewidth=0)
            axes.step(times, curve.mean, where="post", color=colour)
        axes.set(ylim=(0, 1.02), xlim=(0, times[-1]), xlabel="time", ylabel="survival")
        axes.xaxis.set_major_locator(MaxNLocator(6))

    return chart(title, (WIDE, 3.2), paint)
