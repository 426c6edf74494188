"""Drawings: an experiment's own panels as SVG."""

import re
from typing import Any

import pytest

from consilience.figures.panels import Curve, Heat, Panel, Panels
from consilience.report.drawing.charts import Line, curves
from consilience.report.drawing.panels import side_by_side
from support.pages import HOSTILE, make_figure

NAN = float("nan")


def make_heat(title: str = "Prior", scale: float = 1.0) -> Panel:
    values = [[0.9123 * scale, 0.05 * scale, NAN], [0.3 * scale, 0.004 * scale, 0.0]]
    return Panel(title, x_label="γ₀", y_label="σ₀²", heat=Heat(values, ["0.1", "1", "10"], ["row a", "row b"]))


def cells(svg: str) -> tuple[list[float], list[str]]:
    """The strength of each cell, and the texts of the cells."""
    return (
        [float(found) for found in re.findall(r"fill: var\(--k0\); opacity: ([\d.]+)", svg)],
        re.findall(r">(-?[\d.,]+(?:e-?\d+)?)</text>", svg),
    )


def drawn(*shown: Panel) -> str:
    return side_by_side(Panels("Some", "", list(shown)), ["FedAvg", "FedEP"]).element("salt")


def test_panels_show_their_words_and_skip_values_that_are_not_finite() -> None:
    svg = side_by_side(make_figure(label="product"), ["FedAvg", "FedEP", "ADF"]).element("salt")
    for shown in ("In the plane", "Error (log scale)", "sweep", "10⁻¹²"):
        assert f">{shown}</text>" in svg, shown
    assert svg.count("product</text>") == 2
    assert not re.search(r"\bnan\b|\binf\b", svg, re.IGNORECASE)


def test_a_heat_map_shows_its_values_and_names() -> None:
    svg = drawn(make_heat())
    strengths, written = cells(svg)
    assert len(strengths) == 5
    values = [word for word in written if word not in ("0.1", "1", "10")]
    assert values == ["0.912", "0.050", "0.300", "0.0040", "0.000"]
    assert not re.search(r"\bnan\b|\binf\b", svg, re.IGNORECASE)
    for name in ("row a", "row b", "0.1", "10", "γ₀", "σ₀²", "Prior"):
        assert f">{name}</text>" in svg, name


def test_heat_maps_of_a_figure_share_their_shades() -> None:
    together, _ = cells(drawn(make_heat(), make_heat("Half", 0.5)))
    assert max(together[:5]) == max(together)
    assert together[5] == pytest.approx((min(together) + max(together)) / 2, abs=1e-3)
    assert together[9] == together[4] == min(together)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([1.0, 20.0, 1500.0], ["1", "20", "1,500"]),
        ([0.5, 0.5], ["0.500", "0.500"]),
        ([-0.25, 12.34, 4e-5], ["-0.25", "12.3", "4.0e-5"]),
        ([1234567.0, 2.0], ["1.2e6", "2"]),
        ([float("inf"), None], []),
    ],
)
def test_cells_have_two_or_three_digits(values: list[Any], shown: list[str]) -> None:
    names = [chr(ord("a") + at) for at in range(len(values))]
    strengths, written = cells(drawn(Panel("Row", heat=Heat([values], names, ["r"]))))
    assert (len(strengths), written) == (len(shown), shown)


@pytest.mark.parametrize(("label", "points", "dots"), [("FedEP", 12, 12), ("FedEP", 13, 0), ("limit", 2, 0)])
def test_few_points_of_a_curve_are_dots(label: str, points: int, dots: int) -> None:
    curve = Curve(label, list(range(points)), [0.5 + 0.1 * at for at in range(points)])
    colour = "--s1" if label == "FedEP" else "--muted"
    assert len(re.findall(rf"<use [^>]*fill: var\({colour}\)", drawn(Panel("Sweep", [curve])))) == dots


@pytest.mark.parametrize("name", [HOSTILE[:20], 'font-family: "x', 'x d="1.2345"', "$x_{", "東京"])
def test_names_are_escaped_and_do_not_change(name: str) -> None:
    svg = drawn(Panel("Names", heat=Heat([[1.0]], ["column"], [name])))
    assert f"{name.replace('<', '&lt;').replace('>', '&gt;')}</text>" in svg
    assert "<script" not in svg


def test_a_peak_gets_a_log_scale() -> None:
    assert curves("Loss", [Line([1, 2, 3, 4], [100.0, 1.0, 1.0, 1.0])]).title == "Loss (log scale)"
    assert curves("Loss", [Line([1, 2], [2.0, 1.0])]).title == "Loss"
