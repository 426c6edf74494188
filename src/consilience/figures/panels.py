"""What an experiment wants drawn, as plain data: the report draws it, and nobody else needs to know how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from consilience.core.errors import ConsilienceError


@dataclass(frozen=True)
class Curve:
    """Points joined by a line, with dots if they are few. A method has its colour from the table; any other label
    makes a thin dashed line."""

    label: str
    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Mark:
    """A point, with the colour of its method, or a cross for any other label."""

    label: str
    x: float
    y: float


@dataclass(frozen=True)
class Ellipse:
    """A Gaussian in the plane: the contours of one and two standard deviations. `strong` stands out."""

    label: str
    mean: list[float]
    covariance: list[list[float]]
    strong: bool = False


@dataclass(frozen=True)
class Heat:
    """A table of numbers as shades: `values[i][j]` is in the row `y[i]`, the first on top, and in the column `x[j]`.
    What is not finite stays empty."""

    values: list[list[float]]
    x: list[str]
    y: list[str]

    def __post_init__(self) -> None:
        if not self.x or not self.y:
            raise ConsilienceError("a heat map needs a row and a column")
        if len(self.values) != len(self.y) or any(len(row) != len(self.x) for row in self.values):
            found = [len(row) for row in self.values]
            raise ConsilienceError(f"a heat map of {len(self.y)} × {len(self.x)} has rows of length {found}")


@dataclass(frozen=True)
class Panel:
    """Axes with what is on them; `log` is for the y axis, and with ellipses both axes have the same unit. A heat map
    has the axes for itself; all heat maps of a figure share their shades."""

    title: str
    curves: list[Curve] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    ellipses: list[Ellipse] = field(default_factory=list)
    x_label: str = ""
    log: bool = False
    y_label: str = ""
    heat: Heat | None = None


@dataclass(frozen=True)
class Panels:
    """A figure of panels side by side."""

    title: str
    caption: str
    panels: list[Panel]


def read(content: Mapping[str, Any]) -> Panels:
    """From what JSON made of it."""
    panels = [
        Panel(
            str(panel.get("title", "")),
            [Curve(**curve) for curve in panel.get("curves") or ()],
            [Mark(**mark) for mark in panel.get("marks") or ()],
            [Ellipse(**ellipse) for ellipse in panel.get("ellipses") or ()],
            str(panel.get("x_label", "")),
            bool(panel.get("log")),
            str(panel.get("y_label", "")),
            Heat(**panel["heat"]) if panel.get("heat") else None,
        )
        for panel in content.get("panels") or ()
    ]
    return Panels(str(content.get("title", "")), str(content.get("caption", "")), panels)
