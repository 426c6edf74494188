"""What a generator makes, beside what it learned from: as evaluation.json keeps it, and as a run's report shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from consilience.core import text
from consilience.figures.pictures import Picture, Pictures, Row, heat

# Evaluation makes samples, and matplotlib takes long to import: only reports pay for it.
if TYPE_CHECKING:
    from consilience.report.page import Section
    from consilience.runs.stored import RunFiles

MAX_IMAGES, ACROSS = 64, 8
MAX_POINTS, MAX_CELLS = 500, 60
DIGITS = 4
TITLE = "Samples"
REAL, GENERATED = 0, 1  # their colours

Point = Sequence[float] | Tensor


def generated_section(run: RunFiles) -> Section:
    """What the final generator makes, beside real examples."""
    from consilience.report.page import Section

    samples = run.evaluation.get("samples") or {}
    kinds = {"images": _image_section, "points": _point_section}
    return kinds[samples["kind"]](samples) if samples.get("kind") in kinds else Section(TITLE)


def _image_section(samples: Mapping[str, Any]) -> Section:
    from consilience.report.page import Section

    count = samples["count"]
    made = f"{MAX_IMAGES} of {_count(count)}" if count > MAX_IMAGES else _count(count)
    shown = [
        _alone("Generated", Picture(samples["generated"]), f"{made}."),
        _alone("Real examples", Picture(samples["real"]), "From the data, for comparison."),
    ]
    return Section(TITLE, pictures=shown)


def _point_section(samples: Mapping[str, Any]) -> Section:
    from consilience.report.page import Key, Plot, Section

    made, real, low, high = (samples[name] for name in ("generated", "real", "low", "high"))
    unit = [[(value - a) / (b - a or 1.0) for value, a, b in zip(point, low, high, strict=True)] for point in made]
    outside = sum(not all(0 <= value <= 1 for value in point) for point in unit)
    counted = _count(len(made)) + (f", {outside:,} of them outside the picture" if outside else "")
    pictures = []
    if samples.get("map"):
        caption = f"The discriminator's score: brighter is more like the data. Dots are {counted}."
        pictures = [_alone("What the discriminator says", heat(samples["map"], unit), caption)]
    caption = f"{counted}, over {text.plural(len(real), 'real example')}."
    legend = [Key("real", f"s{REAL}", "dot"), Key("generated", f"s{GENERATED}", "dot")]
    plots = [Plot(_scatter("Generated and real", real, made, low, high), caption)]
    return Section(TITLE, legend=legend, pictures=pictures, plots=plots)


def _count(count: int) -> str:
    return f"{text.plural(count, 'sample')} of the final generators"


def _alone(title: str, picture: Picture, caption: str) -> Pictures:
    return Pictures(title, caption, [title], [Row("", [picture])])


Points = Sequence[Sequence[float]]


def _scatter(title: str, real: Points, made: Points, low: Sequence[float], high: Sequence[float]) -> str:
    """Generated points over real ones, between two corners."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from consilience.report.figures import SMALL, draw, series

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for points, colour in ((real, REAL), (made, GENERATED)):
            x, y = zip(*points, strict=True) if points else ((), ())
            axes.plot(x, y, "o", color=series(colour), alpha=0.5, markersize=3, markeredgewidth=0)
        axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
        axes.set_aspect("equal")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_title(title)

    return draw(title, (SMALL[0], SMALL[0]), paint)
