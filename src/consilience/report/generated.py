"""What a generator makes, beside what it learned from: as evaluation.json keeps it, and as a run's report shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from consilience.report import text
from consilience.report.pictures import Picture, Pictures, Row, heat, photo

# Evaluation makes samples, and matplotlib takes long to import: only reports pay for it.
if TYPE_CHECKING:
    from consilience.report.page import Section
    from consilience.report.reading import RunFiles

MAX_IMAGES, ACROSS = 64, 8
MAX_POINTS, MAX_CELLS = 500, 60
DIGITS = 4
TITLE = "Samples"
REAL, GENERATED = 0, 1  # their colours

Point = Sequence[float] | Tensor


def image_samples(generated: Tensor, real: Tensor) -> dict[str, Any]:
    """Images [N, C, H, W] in 0..1 as evaluation.json keeps them."""
    pictures = [photo(_some(images, MAX_IMAGES), ACROSS).png for images in (generated, real)]
    return {"kind": "images", "generated": pictures[0], "real": pictures[1], "count": len(generated)}


def point_samples(
    generated: Tensor, real: Tensor, low: Point, high: Point, map: Tensor | None = None
) -> dict[str, Any]:
    """Points [N, 2] as evaluation.json keeps them, and what the discriminator says between the corners `low` and
    `high`: scores [rows, columns] at the places of `cells`. Points that are not finite are lost."""
    return {
        "kind": "points",
        "low": _rounded(torch.as_tensor(low)),
        "high": _rounded(torch.as_tensor(high)),
        "generated": _points(generated),
        "real": _points(real),
        "map": None if map is None else _map(map),
    }


def cells(low: Point, high: Point, size: int = MAX_CELLS) -> Tensor:
    """The centres [size², 2] of even cells, row by row from the lowest: where to ask a discriminator. Its scores are a
    map once they are `reshape(size, size)`."""
    start, end = (torch.as_tensor(corner, dtype=torch.get_default_dtype()) for corner in (low, high))
    y, x = torch.meshgrid(*[(torch.arange(size) + 0.5) / size] * 2, indexing="ij")
    return start + (end - start) * torch.stack([x, y], dim=-1).reshape(-1, 2)


def _some(values: Tensor, most: int) -> Tensor:
    """Evenly spaced: neighbours are often of one client, or of one generator."""
    return values[torch.linspace(0, len(values) - 1, min(len(values), most)).round().long().to(values.device)]


def _points(values: Tensor) -> Any:
    return _rounded(_some(values[values.isfinite().all(dim=1)], MAX_POINTS))


def _map(scores: Tensor) -> list[list[float | None]]:
    rows, columns = (min(side, MAX_CELLS) for side in scores.shape)
    means = functional.adaptive_avg_pool2d(scores.detach().double()[None], (rows, columns))[0]
    return [[value if math.isfinite(value) else None for value in row] for row in _rounded(means)]


def _rounded(values: Tensor) -> Any:
    """Lists; in double, where 0.1 is written as such."""
    return values.detach().cpu().double().round(decimals=DIGITS).tolist()


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
