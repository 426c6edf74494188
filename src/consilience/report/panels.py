"""What an experiment wants drawn, as plain data: the report draws it, and nobody else needs to know how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Curve:
    """Points joined by a line. A method has its colour from the table; any other label makes a thin dashed line."""

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
class Panel:
    """Axes with what is on them; `log` is for the y axis, and with ellipses both axes have the same unit."""

    title: str
    curves: list[Curve] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    ellipses: list[Ellipse] = field(default_factory=list)
    x_label: str = ""
    log: bool = False


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
        )
        for panel in content.get("panels") or ()
    ]
    return Panels(str(content.get("title", "")), str(content.get("caption", "")), panels)
