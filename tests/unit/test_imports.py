"""Imports point down the layers of packages, and nowhere in a circle."""

from pathlib import Path

import import_graph

GRAPH = import_graph.module_graph()


def test_every_package_has_a_layer():
    assert {import_graph.package_of(module) for module in GRAPH} <= set(import_graph.RANK)


def test_no_import_points_up():
    assert import_graph.upward(GRAPH) == []


def test_no_modules_import_each_other_in_a_circle():
    assert import_graph.cycle(GRAPH) == []


def test_the_rules_find_what_they_forbid():
    assert import_graph.upward({"consilience.core.x": {"consilience.data.y"}}) == [
        "consilience.core.x imports consilience.data.y"
    ]
    circle = {"consilience.core.a": {"consilience.core.b"}, "consilience.core.b": {"consilience.core.a"}}
    assert import_graph.cycle(circle) == ["consilience.core.a", "consilience.core.b", "consilience.core.a"]


def test_the_picture_in_the_docs_is_that_of_the_code():
    drawn = Path(__file__).parents[2] / "docs" / "images" / "imports.svg"
    assert drawn.read_text() == import_graph.svg(import_graph.package_graph(GRAPH))
