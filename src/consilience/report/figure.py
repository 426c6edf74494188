"""Figures for notebooks and papers: drawings in a grid, with a legend and a caption."""

import math
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from matplotlib import figure as mpl
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from consilience.core.errors import ConfigError
from consilience.core.files import write_atomically
from consilience.report.drawing.canvas import INK, Drawing, named
from consilience.report.page import Key

COLUMNS = 3
FORMATS = ("svg", "png", "pdf")
LETTER, SWATCH, LEGEND_LINE = 0.085, 0.55, 0.24  # inches


@dataclass(frozen=True)
class Figure:
    """A figure that a notebook shows and that can be saved, in the colours of a light page."""

    title: str
    drawings: tuple[Drawing, ...]
    legend: tuple[Key, ...] = ()
    caption: str = ""

    @cached_property
    def svg(self) -> str:
        """The figure as an SVG file."""
        return self._drawing().file("svg").decode()

    def save(self, path: str | Path) -> Path:
        """Write the figure as SVG, PNG or PDF, by the suffix of `path`."""
        path = Path(path)
        kind = path.suffix.lower().removeprefix(".")
        if kind not in FORMATS:
            raise ConfigError(f"a figure is saved as {', '.join(f'.{name}' for name in FORMATS)}, not as {path.name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self._drawing().file(kind))
        return path

    def __repr__(self) -> str:
        return f"Figure({self.title!r})"

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        below = f'<figcaption style="font-size: 0.85em">{escape(self.caption)}</figcaption>' if self.caption else ""
        return f'<figure style="margin: 0">{self.svg}{below}</figure>'

    def _drawing(self) -> Drawing:
        columns = min(len(self.drawings), COLUMNS)
        rows = math.ceil(len(self.drawings) / columns)
        width = columns * max(drawing.size[0] for drawing in self.drawings)
        height = rows * max(drawing.size[1] for drawing in self.drawings)
        longest = max((SWATCH + LETTER * len(key.label) for key in self.legend), default=width)
        entries = max(1, int(width / longest))
        height += LEGEND_LINE * math.ceil(len(self.legend) / entries)

        def paint(figure: mpl.Figure) -> None:
            several = len(self.drawings) > 1
            parts = figure.subfigures(rows, columns, squeeze=False).flat if several else [figure]
            for part, drawing in zip(parts, self.drawings, strict=False):
                drawing.paint(part)
            if self.legend:
                style: dict[str, Any] = {"frameon": False, "labelcolor": INK, "handlelength": 1.6}
                figure.legend(handles=[*map(_handle, self.legend)], loc="outside lower left", ncols=entries, **style)

        return Drawing(self.title, (width, height), paint)


def _handle(key: Key) -> Any:
    colour = named(key.colour)
    if key.colour.startswith("k"):
        return Patch(facecolor=colour, label=key.label)
    style: Any = {"linestyle": key.style}
    return Line2D([], [], color=colour, label=key.label, **style)
