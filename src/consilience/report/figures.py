"""Figures as inline SVG. Colours are placeholders that become CSS variables, so one figure serves
light and dark pages; text stays text, so it takes the page's font and can be searched and copied.
Outside of pages the same figures are SVG, PNG or PDF in the colours of a light page (`render`)."""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import get_named_colors_mapping
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from consilience.core import text
from consilience.figures.panels import Curve, Ellipse, Heat, Mark, Panel, Panels
from consilience.metrics import Reliability

LIGHT = {
    "paper": "#ffffff", "ink": "#17202a", "muted": "#5b6671", "grid": "#e2e6ea", "panel": "#f5f7f9", "link": "#0a5c9e",
    "s0": "#0072b2", "s1": "#d55e00", "s2": "#009e73", "s3": "#b8578f",
    "s4": "#e69f00", "s5": "#17202a", "s6": "#46a6de", "s7": "#9a8c00",
    "k0": "#2b7bba", "k1": "#9cc6e4", "k2": "#7d8a96", "k3": "#c9d0d6",
}  # fmt: skip
DARK = {
    "paper": "#13171b", "ink": "#e9edf0", "muted": "#9ba6b0", "grid": "#2d343b", "panel": "#1b2025", "link": "#74b8ec",
    "s0": "#4aa3df", "s1": "#f5874b", "s2": "#2fc79a", "s3": "#e29ac4",
    "s4": "#f3b23c", "s5": "#e9edf0", "s6": "#92d2f8", "s7": "#d9cd4a",
    "k0": "#2b7bba", "k1": "#8fc1e6", "k2": "#78858f", "k3": "#47525c",
}  # fmt: skip
# Matplotlib knows no CSS variables: for pages it draws with colours that nobody else uses, which stand for them.
PLACEHOLDERS = {name: f"#0102{index:02x}" for index, name in enumerate(LIGHT)}
CSS = {colour: f"var(--{name})" for name, colour in PLACEHOLDERS.items()}


def named(colour: str) -> str:
    """What matplotlib calls a colour of ours, whichever value it has in the figure at hand."""
    return f"consilience:{colour}"


INK, MUTED, GRID, PAPER = (named(colour) for colour in ("ink", "muted", "grid", "paper"))
SERIES = tuple(named(f"s{i}") for i in range(8))
SHADES = tuple(named(f"k{i}") for i in range(4))
# An image cannot hold a variable: a mid-tone whose opacity varies reads on white and on black.
HEAT = (0x2B / 255, 0x7B / 255, 0xBA / 255)

SMALL, WIDE, PANELS = (3.9, 2.75), (12.0, 3.2), (11.0, 4.6)
FEW = 12
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "font.size": 9.5,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    # A client may be called "$x"; no name is a formula.
    "text.parse_math": False,
    "xtick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.color": GRID,
    "ytick.labelcolor": MUTED,
    "ytick.left": False,
}


@dataclass(frozen=True)
class Line:
    """One curve: `low` and `high`, if given, bound its band."""

    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    dashed: bool = False
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def curves(title: str, lines: Sequence[Line], unit: str | None = None, mark: float | None = None) -> str:
    """Curves over rounds; on a log axis where an early peak would flatten all that follows. `mark` is a round of
    special interest."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for line in lines:
            dash = (0, (3, 2)) if line.dashed else "-" if line.colour < len(SERIES) else (0, (1, 1))
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
        elif is_peaked(lines):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_title(f"{title} (log scale)")
            return
        axes.set_title(title)

    return draw(title, SMALL, paint)


def is_peaked(lines: Sequence[Line]) -> bool:
    """Whether the largest value is out of all proportion to the usual one."""
    values = np.array([value for line in lines for value in line.y if math.isfinite(value)])
    return bool(len(values) and values.min() > 0 and values.max() > 30 * np.median(values))


def is_few(names: Sequence[str]) -> bool:
    """Whether the clients fit into a small figure."""
    return len(names) <= FEW


def stacked_bars(title: str, names: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Examples of each client, one shade a class: for few classes, or for none (one column)."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        table = np.asarray(counts, dtype=float).T
        base = np.cumsum(table, axis=0) - table
        for kind, (height, bottom) in enumerate(zip(table, base, strict=True)):
            style: dict[str, Any] = {"color": SHADES[kind], "edgecolor": PAPER, "linewidth": 0.6}
            axes.bar(range(len(names)), height, 0.82, bottom, **style)
        _name_clients(axes, names)
        axes.grid(axis="x", visible=False)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_title(title)

    return draw(title, SMALL if is_few(names) else WIDE, paint)


def heat_map(title: str, names: Sequence[str], classes: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Share of each class at each client as the strength of one colour, with the clients' sizes above."""
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
        # A power below one keeps small shares visible.
        image[..., 3] = (share / max(share.max(), 1e-9)) ** 0.75
        axes.imshow(image, aspect="auto", interpolation="none")
        axes.grid(visible=False)
        axes.vlines(np.arange(len(names) - 1) + 0.5, -0.5, len(classes) - 0.5, PAPER, linewidth=1)
        axes.hlines(np.arange(len(classes) - 1) + 0.5, -0.5, len(names) - 0.5, PAPER, linewidth=1)
        axes.spines[:].set_visible(False)
        _name_clients(axes, names)
        step = math.ceil(len(classes) / 24)
        axes.set_yticks(range(0, len(classes), step), [clip(name) for name in classes[::step]])

    width = SMALL[0] if is_few(names) else WIDE[0]
    return draw(title, (width, 2.2 + min(0.19 * len(classes), 4.5)), paint)


def reliability(title: str, diagram: Reliability, colour: int = 0) -> str:
    """Accuracy by confidence against the diagonal, and below it how many predictions each bin holds."""

    def paint(figure: Figure) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
        filled = [bin for bin, count in enumerate(diagram.count) if count]
        left = [diagram.edges[bin] for bin in filled]
        width = [diagram.edges[bin + 1] - diagram.edges[bin] for bin in filled]
        accuracy = [diagram.accuracy[bin] for bin in filled]
        bars: dict[str, Any] = {"align": "edge", "color": series(colour), "edgecolor": PAPER, "linewidth": 0.6}
        top.bar(left, accuracy, width, alpha=0.4, **bars)
        top.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (3, 2)))
        marks = [diagram.confidence[bin] for bin in filled]
        top.plot(marks, accuracy, color=series(colour), marker="o", markersize=3.5, linewidth=1.4)
        top.set(ylim=(0, 1.02), xlim=(0, 1), ylabel="accuracy")
        top.tick_params(bottom=False)
        top.text(0.04, 0.9, f"ECE {diagram.ece:.3f}", color=INK, fontsize=10, transform=top.transAxes)
        top.set_title(clip(title, 40))
        total = sum(diagram.count)
        bottom.bar(left, [diagram.count[bin] / total for bin in filled], width, alpha=0.8, **bars)
        bottom.yaxis.set_major_locator(MaxNLocator(2))
        bottom.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        bottom.set(xlabel="confidence")

    return draw(title, (3.9, 3.7), paint)


def dots(title: str, names: Sequence[str], groups: Sequence[Sequence[tuple[float, float] | None]]) -> str:
    """A row a client, a dot a method (in order of colour), its mean with ± one standard deviation."""
    pitch = max(0.34, 0.11 * len(groups))

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for group, points in enumerate(groups):
            shift = (group - (len(groups) - 1) / 2) * 0.72 / max(len(groups), 1)
            found = [(row + shift, *point) for row, point in enumerate(points) if point is not None]
            y, mean, std = zip(*found, strict=True) if found else ((), (), ())
            style: dict[str, Any] = {"fmt": "o", "markersize": 4, "elinewidth": 1.3, "color": series(group)}
            axes.errorbar(mean, y, xerr=std, **style)
        axes.hlines(np.arange(len(names) - 1) + 0.5, 0, 1, GRID, transform=axes.get_yaxis_transform(), lw=0.8)
        axes.grid(axis="y", visible=False)
        axes.set_yticks(range(len(names)), [clip(name) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_title(title)

    return draw(title, (SMALL[0], 0.75 + pitch * len(names)), paint)


def side_by_side(figure: Panels, methods: Sequence[str]) -> str:
    """An experiment's own panels; methods have the colours of the table."""
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
                _fit(axes, panel.heat)

    return draw(figure.title, PANELS, paint)


def _lines(axes: Axes, panel: Panel, colours: Mapping[str, str]) -> None:
    """Everything that has coordinates."""
    for ellipse in panel.ellipses:
        _ellipse(axes, ellipse)
    again = list(colours)[len(SERIES) :]  # whose colour another has: dotted, as in the legend
    for index, curve in enumerate(panel.curves):
        _curve(axes, curve, colours.get(curve.label), panel, panel.curves[:index], curve.label in again)
    for mark in panel.marks:
        _mark(axes, mark, colours.get(mark.label))
    axes.set_title(f"{panel.title} (log scale)" if panel.log else panel.title)
    if panel.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=9))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power_of_ten(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if panel.ellipses:
        axes.set_aspect("equal", adjustable="datalim")


def _heat(axes: Axes, heat: Heat, scale: tuple[float, float]) -> None:
    """Cells of one colour, the larger the stronger, with their values. The strongest is pale enough for dark ink on
    white paper, and dark enough for pale ink on black: 4.5 to 1 on both."""
    (low, high), columns, rows = scale, len(heat.x), len(heat.y)
    cells = {(i, j): value for i, row in enumerate(heat.values) for j, value in enumerate(row) if text.is_number(value)}
    whole = all(float(value).is_integer() for value in cells.values())
    places = 0 if whole else max(0, text.decimals(cells.values()) - 1)
    for (i, j), value in cells.items():
        strength = 0.08 + 0.77 * ((value - low) / (high - low) if high > low else 0.5)
        axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=SHADES[0], alpha=strength, linewidth=0))
        axes.text(j, i, _digits(value, places), color=INK, ha="center", va="center")
    axes.vlines(np.arange(columns - 1) + 0.5, -0.5, rows - 0.5, PAPER, linewidth=1)
    axes.hlines(np.arange(rows - 1) + 0.5, -0.5, columns - 0.5, PAPER, linewidth=1)
    axes.set_xticks([])
    axes.set_yticks(range(rows), [clip(name) for name in heat.y])
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    axes.tick_params(bottom=False)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _fit(axes: Axes, heat: Heat) -> None:
    """Values as large as the cells allow, and names of columns that do not run into each other."""
    box = axes.get_position()
    width, height = 72 * PANELS[0] * box.width / len(heat.x), 72 * PANELS[1] * box.height / len(heat.y)
    longest = max((len(label.get_text()) for label in axes.texts), default=0)
    for label in axes.texts:  # a digit is about 0.6 of its size wide
        label.set_fontsize(min(9.5, 0.7 * height, width / (0.6 * (longest + 1))))
    names = [clip(name) for name in heat.x]
    slant: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    crowded = 6 * max(map(len, names)) > width
    axes.set_xticks(range(len(names)), names, **(slant if crowded else {}))


def _digits(value: float, places: int) -> str:
    """A number in a small cell: `places` decimals, or as many as two digits need; an exponent where those are many."""
    if value and not 1e-3 <= abs(value) < 1e5:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits}e{int(exponent)}"
    if value and not float(value).is_integer():
        places = max(places, 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def _curve(axes: Axes, curve: Curve, colour: str | None, panel: Panel, before: Sequence[Curve], dotted: bool) -> None:
    """A line, with dots if its points are few; dashed where it would hide one from before, dotted if another has its
    colour."""
    x, y = np.array(curve.x, dtype=float), np.array(curve.y, dtype=float)
    fine = np.isfinite(x) & np.isfinite(y) & ((y > 0) | (not panel.log))
    style: dict[str, Any] = {"color": colour}
    if len(x) <= FEW and (colour is not None or len(x) > 2):  # not at the two ends of a reference
        style |= {"marker": "o", "markersize": 3.5}
    if colour is None:
        style |= {"color": MUTED, "linestyle": (0, (3, 2)), "linewidth": 1.2, "markersize": 2.5}
        if fine.any():
            at = int(np.flatnonzero(fine)[-1])
            axes.annotate(curve.label, (x[at], y[at]), (0, 4), textcoords="offset points", color=MUTED, ha="right")
    elif panel.ellipses:  # a path, whose steps are of interest
        style |= {"linewidth": 1.2, "marker": "o", "markersize": 2.5}
    elif dotted:
        style |= {"linestyle": (0, (1, 1.6))}
    elif any(len(other.y) == len(y) and np.allclose(other.y, y, rtol=0.02, atol=0) for other in before):
        style |= {"linestyle": (0, (3, 3)), "solid_capstyle": "butt"}
    axes.plot(x[fine], y[fine], **style)


def _mark(axes: Axes, mark: Mark, colour: str | None) -> None:
    if not math.isfinite(mark.x + mark.y):
        return
    if colour is None:
        axes.plot(mark.x, mark.y, "+", color=INK, markersize=14, markeredgewidth=1.8, zorder=2.5)
    else:
        axes.plot(mark.x, mark.y, "o", color=colour, markersize=7.5, markeredgecolor=PAPER, zorder=3)


def _ellipse(axes: Axes, ellipse: Ellipse) -> None:
    """The image of a circle under the covariance's root. A label stands in the middle; where the contours are strong,
    and other things are likely to be there, on top."""
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


def _name_clients(axes: Axes, names: Sequence[str]) -> None:
    """Every name while they fit, then every fifth or so."""
    step = max(1, math.ceil(len(names) / 30))
    labels = [clip(name) for name in names[::step]]
    slant: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    crowded = sum(len(label) + 2 for label in labels) > (45 if is_few(names) else 150)
    axes.set_xticks(range(0, len(names), step), labels, **(slant if crowded else {}))
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_xlabel("client")


def clip(name: str, limit: int = 22) -> str:
    """A name that fits beside an axis."""
    return name if len(name) <= limit else name[: limit - 1] + "…"


def swatch(index: int) -> str:
    """The colour of a method in legends and tables, as the page calls it."""
    return f"s{index % len(SERIES)}"


def series(index: int) -> str:
    """A method's colour; they come round again."""
    return SERIES[index % len(SERIES)]


Paint = Callable[[Figure], None]


class Drawing(str):
    """A figure as the SVG element of a page, and what it takes to draw it elsewhere."""

    heading: str
    size: tuple[float, float]
    paint: Paint

    def __new__(cls, svg: str, heading: str, size: tuple[float, float], paint: Paint) -> Drawing:
        """`svg` is what a page shows."""
        drawing = super().__new__(cls, svg)
        drawing.heading, drawing.size, drawing.paint = heading, size, paint
        return drawing


def draw(title: str, size: tuple[float, float], paint: Paint) -> str:
    """Paint a figure and return it as an SVG element that fits into a page among others: a `Drawing`."""
    svg = _element(_save(title, size, paint, "svg", PLACEHOLDERS), title)
    return Drawing(re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', "", svg, count=1), title, size, paint)


def render(title: str, size: tuple[float, float], paint: Paint, kind: str) -> bytes:
    """Paint a figure in the colours of a light page, as an "svg", "png" or "pdf" file that needs no page around it."""
    found = _save(title, size, paint, kind, LIGHT)
    if kind != "svg":
        return found
    style = "font-family: system-ui, 'Segoe UI', Arial, sans-serif; stroke-linejoin: round; max-width: 100%"
    return _element(found, title).replace("<svg", f'<svg style="{style}"', 1).encode()


def _save(title: str, size: tuple[float, float], paint: Paint, kind: str, colours: Mapping[str, str]) -> bytes:
    """Ids are hashed with the kind and title: unlike within a page, alike from one writing to the next."""
    style = {**STYLE, "svg.hashsalt": f"{paint.__qualname__} {title}", "pdf.fonttype": 42}
    with _palette(colours), mpl.rc_context(style), warnings.catch_warnings():
        # A script that the layout font lacks is still drawn by the browser, which has more fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=size, layout="constrained", facecolor=PAPER)
        paint(figure)
        out = io.BytesIO()
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
        figure.savefig(out, format=kind, transparent=colours is PLACEHOLDERS, dpi=200, metadata=undated)
    return out.getvalue()


@contextmanager
def _palette(colours: Mapping[str, str]) -> Iterator[None]:
    """Our named colours have these values while a figure is painted and saved."""
    known = get_named_colors_mapping()
    try:
        for name, value in colours.items():  # not update(), which would leave old values in matplotlib's cache
            known[named(name)] = value
        yield
    finally:
        for name in colours:
            known.pop(named(name), None)


def _element(file: bytes, title: str) -> str:
    """A saved SVG without what only a file of its own needs, with its title for those who cannot see it."""
    svg = file.decode()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # Tags only: a client may be called "font-family", and its name is to stay as it is.
    svg = re.sub(r"<[^<>]*>", lambda tag: _tidy(tag[0]), svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1).strip()


def _tidy(tag: str) -> str:
    """A tag without what the page knows better: the font, group ids, the sixth decimal, fixed colours."""
    tag = re.sub(r'^<g id="[^"]*"', "<g", tag)
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    tag = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]).replace(" \n", " "), tag)
    return re.sub(r"#0[0-9a-f]{5}\b", lambda colour: CSS.get(colour[0], colour[0]), tag)
