"""Panels of an experiment's own figure, as plain data that the report draws."""

from dataclasses import dataclass, field

from consilience.core.errors import ConsilienceError


@dataclass(frozen=True)
class Curve:
    """Points joined by a line: in the colour of a method, or thin and dashed for any other label. `low` and `high` are
    the edges of a band around it."""

    label: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


@dataclass(frozen=True)
class Mark:
    """A point in the colour of its method, with its name beside it if `named`; a cross for any other label."""

    label: str
    x: float
    y: float
    named: bool = False


@dataclass(frozen=True)
class Ellipse:
    """A Gaussian in the plane: its contours of one and two standard deviations, emphasised if `strong`."""

    label: str
    mean: list[float]
    covariance: list[list[float]]
    strong: bool = False


@dataclass(frozen=True)
class Heat:
    """A table of numbers as shades: `values[i][j]` is in the row `y[i]`, the first on top, and in the column `x[j]`.
    Values that are not finite leave their cells empty."""

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
    """Axes and their contents. `log` is for the y axis, `log_x` for the x axis; with ellipses, both axes have the same
    unit. A heat map has no other contents beside it; all heat maps of a figure share their shades."""

    title: str
    curves: list[Curve] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    ellipses: list[Ellipse] = field(default_factory=list)
    x_label: str = ""
    log: bool = False
    y_label: str = ""
    heat: Heat | None = None
    log_x: bool = False


@dataclass(frozen=True)
class Panels:
    """A figure of panels side by side."""

    title: str
    caption: str
    panels: list[Panel]
