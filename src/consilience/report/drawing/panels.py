"""An experiment's own panels: lines, dots, ellipses and heat maps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from consilience.core import text
from consilience.core.display import clip
from consilience.figures.panels import Curve, Ellipse, Heat, Mark, Panel, Panels
from consilience.report.drawing.canvas import DASHED, FEW, INK, MUTED, NAME, PAPER, SERIES, SHADES, Drawing, series
from consilience.report.drawing.charts import SLANTED, separate_cells

SIZE, ONE = (11.0, 4.6), (5.4, 3.4)  # inches of several panels, and of one
SHORT = 30.0  # below this ratio of its ends, a logarithmic axis has labels between powers of ten


def side_by_side(figure: Panels, methods: Sequence[str]) -> Drawing:
    """The panels in a row. Methods have the colours of the result table."""
    size = SIZE if len(figure.panels) > 1 else ONE
    colours = {method: series(index) for index, method in enumerate(methods)}
    cells = [value for panel in figure.panels if panel.heat for row in panel.heat.values for value in row]
    finite = [value for value in cells if text.is_number(value)]
    scale = (min(finite), max(finite)) if finite else (0.0, 0.0)

    def paint(canvas: Figure) -> None:
        widths = [1.2 if panel.ellipses else 1.0 for panel in figure.panels]
        row = canvas.subplots(1, len(figure.panels), squeeze=False, width_ratios=widths)[0]
        for axes, panel in zip(row, figure.panels, strict=True):
            axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
            if panel.heat:
                axes.set_title(panel.title)
                _heat(axes, panel.heat, scale)
            else:
                _lines(axes, panel, colours)
        if cells:
            canvas.draw_without_rendering()  # so that the panels know how large they are
        for axes, panel in zip(row, figure.panels, strict=True):
            if panel.heat:
                _fit(axes, panel.heat, size)

    return Drawing(figure.title, size, paint)


def _lines(axes: Axes, panel: Panel, colours: Mapping[str, str]) -> None:
    for ellipse in panel.ellipses:
        _ellipse(axes, ellipse)
    again = list(colours)[len(SERIES) :]  # their colours repeat: dotted, as in the legend
    for index, curve in enumerate(panel.curves):
        _curve(axes, curve, colours.get(curve.label), panel, panel.curves[:index], curve.label in again)
    for mark in panel.marks:
        _mark(axes, mark, colours.get(mark.label))
    axes.set_title(f"{panel.title} (log scale)" if panel.log else panel.title)
    if panel.log_x:
        axes.set_xscale("log")
        plain = FuncFormatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_major_formatter(plain)
        low, high = axes.get_xlim()
        axes.xaxis.set_minor_formatter(plain if high / low < SHORT else NullFormatter())
    if panel.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=9))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power_of_ten(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if panel.ellipses:
        axes.set_aspect("equal", adjustable="datalim")


def _heat(axes: Axes, heat: Heat, scale: tuple[float, float]) -> None:
    """Cells with their values; a larger value has a stronger colour. Text has a contrast of at least 4.5 to 1 on the
    strongest colour, on light and on dark pages."""
    (low, high), columns, rows = scale, len(heat.x), len(heat.y)
    cells = {(i, j): value for i, row in enumerate(heat.values) for j, value in enumerate(row) if text.is_number(value)}
    whole = all(float(value).is_integer() for value in cells.values())
    places = 0 if whole else max(0, text.decimals(cells.values()) - 1)
    for (i, j), value in cells.items():
        strength = 0.08 + 0.77 * ((value - low) / (high - low) if high > low else 0.5)
        axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=SHADES[0], alpha=strength, linewidth=0))
        axes.text(j, i, _digits(value, places), ha="center", va="center")
    separate_cells(axes, columns, rows)
    axes.set_xticks([])
    axes.set_yticks(range(rows), [clip(name, NAME) for name in heat.y])
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    axes.tick_params(bottom=False)


def _fit(axes: Axes, heat: Heat, size: tuple[float, float]) -> None:
    """Set the font size by the size of a cell, and slant the names of columns if they would overlap."""
    box = axes.get_position()
    width, height = 72 * size[0] * box.width / len(heat.x), 72 * size[1] * box.height / len(heat.y)
    longest = max((len(label.get_text()) for label in axes.texts), default=0)
    for label in axes.texts:  # a digit is about 0.6 of its size wide
        label.set_fontsize(min(9.5, 0.7 * height, width / (0.6 * (longest + 1))))
    names = [clip(name, NAME) for name in heat.x]
    crowded = 6 * max(map(len, names)) > width
    axes.set_xticks(range(len(names)), names, **(SLANTED if crowded else {}))


def _digits(value: float, places: int) -> str:
    """A number in a small cell: `places` decimals, or more for two digits, or with an exponent."""
    if value and not 1e-3 <= abs(value) < 1e5:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits}e{int(exponent)}"
    if value and not float(value).is_integer():
        places = max(places, 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def _curve(axes: Axes, curve: Curve, colour: str | None, panel: Panel, before: Sequence[Curve], dotted: bool) -> None:
    """A line, with dots if its points are few; dashed if it would hide an earlier one, dotted if its colour repeats."""
    x, y = np.array(curve.x, dtype=float), np.array(curve.y, dtype=float)
    fine = np.isfinite(x) & np.isfinite(y) & ((y > 0) | (not panel.log))
    style: dict[str, Any] = {"color": colour}
    if len(x) <= FEW and (colour is not None or len(x) > 2):  # not at the two ends of a reference
        style |= {"marker": "o", "markersize": 3.5}
    if colour is None:
        style |= {"color": MUTED, "linestyle": DASHED, "linewidth": 1.2, "markersize": 2.5}
        if fine.any():
            at = int(np.flatnonzero(fine)[-1])
            axes.annotate(curve.label, (x[at], y[at]), (0, 4), textcoords="offset points", color=MUTED, ha="right")
    elif panel.ellipses:  # a path, whose steps are of interest
        style |= {"linewidth": 1.2, "marker": "o", "markersize": 2.5}
    elif dotted:
        style |= {"linestyle": (0, (1, 1.6))}
    elif any(len(other.y) == len(y) and np.allclose(other.y, y, rtol=0.02, atol=0) for other in before):
        style |= {"linestyle": (0, (3, 3)), "solid_capstyle": "butt"}
    (line,) = axes.plot(x[fine], y[fine], **style)
    if curve.low is not None and curve.high is not None:
        low, high = (np.array(edge, dtype=float)[fine] for edge in (curve.low, curve.high))
        axes.fill_between(x[fine], low, high, color=line.get_color(), alpha=0.12, linewidth=0)


def _mark(axes: Axes, mark: Mark, colour: str | None) -> None:
    if not math.isfinite(mark.x + mark.y):
        return
    if mark.named:
        place: dict[str, Any] = {"xytext": (5, 2), "textcoords": "offset points", "fontsize": 7, "color": MUTED}
        axes.annotate(mark.label, (mark.x, mark.y), **place)
    if colour is None:
        axes.plot(mark.x, mark.y, "+", color=INK, markersize=14, markeredgewidth=1.8, zorder=2.5)
    else:
        axes.plot(mark.x, mark.y, "o", color=colour, markersize=7.5, markeredgecolor=PAPER, zorder=3)


def _ellipse(axes: Axes, ellipse: Ellipse) -> None:
    """The image of a circle under the covariance's Cholesky factor. The label is in the middle, or on top if the
    contours are strong."""
    angle = np.linspace(0, 2 * np.pi, 121)
    mean, covariance = (np.array(value, dtype=float) for value in (ellipse.mean, ellipse.covariance))
    if not np.isfinite(covariance).all() or not np.isfinite(mean).all():
        return
    ring = np.linalg.cholesky(covariance) @ np.stack([np.cos(angle), np.sin(angle)])
    colour = INK if ellipse.strong else MUTED
    for deviations in (2, 1):
        x, y = mean[:, None] + deviations * ring
        axes.fill(x, y, color=colour, alpha=0.08, linewidth=0)
        axes.plot(x, y, color=colour, linewidth=1.4 if ellipse.strong else 0.9, alpha=0.9)
    x, y = mean + 2 * covariance[:, 1] / math.sqrt(covariance[1, 1]) if ellipse.strong else mean
    place: dict[str, Any] = {"xytext": (0, 3), "va": "bottom"} if ellipse.strong else {"xytext": (0, 0), "va": "center"}
    axes.annotate(ellipse.label, (x, y), textcoords="offset points", color=colour, ha="center", **place)


def _power_of_ten(value: float) -> str:
    exponent = round(math.log10(value))
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
