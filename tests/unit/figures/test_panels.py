"""Panels as plain data."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from consilience import figures
from consilience.core.errors import ConsilienceError
from consilience.figures.panels import Curve, Heat, Mark, Panel, Panels


def test_a_figure_read_from_json_equals_the_one_written() -> None:
    heat = Heat([[0.9, 0.1], [0.3, 0.0]], ["a", "b"], ["c", "d"])
    curve = Panel(
        "Sweep", [Curve("FedEP", [1, 2], [0.5, 0.25])], [Mark("FedEP", 1.0, 2.0)], x_label="J", y_label="loss"
    )
    figure = Panels("Two", "What it shows.", [curve, Panel("Prior", x_label="γ₀", y_label="σ₀²", heat=heat)])
    assert figures.read(json.loads(json.dumps(asdict(figure)))) == figure


@pytest.mark.parametrize("values", [[[1.0, 2.0]], [[1.0], [2.0, 3.0]], [[1.0, 2.0], [3.0]]])
def test_the_values_of_a_heat_map_fit_its_names(values: list[list[float]]) -> None:
    with pytest.raises(ConsilienceError, match=r"heat map of 2 × 2"):
        Heat(values, ["a", "b"], ["c", "d"])
    with pytest.raises(ConsilienceError, match="a row and a column"):
        Heat([], [], [])
