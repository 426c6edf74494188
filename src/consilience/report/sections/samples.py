"""Generated samples beside real examples."""

from collections.abc import Mapping
from typing import Any

from consilience.core import text
from consilience.evaluation.samples import MAX_IMAGES
from consilience.figures.pictures import Picture, Pictures, Row, heat
from consilience.report.drawing.charts import scatter
from consilience.report.page import Key, Plot, Section
from consilience.runs.stored import RunFiles

TITLE = "Samples"


def sample_section(run: RunFiles) -> Section:
    """Samples of the final generators, as images or as points of the plane."""
    samples = run.evaluation.get("samples") or {}
    kinds = {"images": _image_section, "points": _point_section}
    return kinds[samples["kind"]](samples) if samples.get("kind") in kinds else Section(TITLE)


def _image_section(samples: Mapping[str, Any]) -> Section:
    count = samples["count"]
    made = f"{MAX_IMAGES} of {_count(count)}" if count > MAX_IMAGES else _count(count)
    shown = [
        _single("Generated", Picture(samples["generated"]), f"{made}."),
        _single("Real examples", Picture(samples["real"]), "From the data, for comparison."),
    ]
    return Section(TITLE, pictures=shown)


def _point_section(samples: Mapping[str, Any]) -> Section:
    made, real, low, high = (samples[name] for name in ("generated", "real", "low", "high"))
    unit = [[(value - a) / (b - a or 1.0) for value, a, b in zip(point, low, high, strict=True)] for point in made]
    outside = sum(not all(0 <= value <= 1 for value in point) for point in unit)
    counted = _count(len(made)) + (f", {outside:,} of them outside the picture" if outside else "")
    pictures = []
    if samples.get("map"):
        caption = f"Brighter means a higher score: more like the data. Dots are {counted}."
        pictures = [_single("The discriminator's score", heat(samples["map"], unit), caption)]
    caption = f"{counted}, over {text.plural(len(real), 'real example')}."
    legend = [Key("real", "s0", "dot"), Key("generated", "s1", "dot")]
    plots = [Plot(scatter("Generated and real", [real, made], low, high), caption)]
    return Section(TITLE, legend=legend, pictures=pictures, plots=plots)


def _count(count: int) -> str:
    return f"{text.plural(count, 'sample')} of the final generators"


def _single(title: str, picture: Picture, caption: str) -> Pictures:
    return Pictures(title, caption, [title], [Row("", [picture])])
