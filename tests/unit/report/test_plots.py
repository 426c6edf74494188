"""plot(run) and plot(comparison): figures of runs in memory and on disk."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import consilience as cs
from consilience.core.errors import CheckpointError, ConfigError
from consilience.report.drawing import canvas, charts
from consilience.report.figure import Figure
from consilience.studies.comparison import Comparison, Row
from support.pages import make_comparison
from support.scenarios import blobs, linear

HERE = cs.Simulator(device="cpu", chunk=4, workers=1)
FEDEP = cs.FedEP(cs.inference.Identity(cs.SGD(lr=0.05, batch_size=4)))
FEDAVG = cs.FedAvg(cs.SGD(lr=0.1, batch_size=4))
OPTIONS: dict[str, Any] = {"rounds": 2, "engine": HERE, "progress": False, "evaluate_every": 2}
MAGIC = {"svg": b"<svg", "png": b"\x89PNG\r\n", "pdf": b"%PDF-"}
KINDS = ["reliability", "labels", "clients", "communication"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> cs.runs.Run:
    task, federation, test = blobs()
    return cs.fit(FEDEP, task, federation, test=test, out=tmp_path_factory.mktemp("run") / "out", **OPTIONS)


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    content = json.loads((make_comparison(tmp_path) / "comparison.json").read_text())
    rows = [Row(**row) for row in content["rows"]]
    found = Comparison("Two", rows=[*rows, Row("FedEP", "accuracy (marginal)", 0.9, 0.1, 2)], runs=content["runs"])
    found.save(tmp_path)
    return found


def words(figure: Figure) -> list[str]:
    """The texts of a figure, which must be valid SVG in fixed colours."""
    svg = figure.svg
    assert "var(" not in svg
    assert not set(canvas.PLACEHOLDERS.values()) & set(re.findall(r"#[0-9a-f]{6}", svg))
    assert "consilience:" not in svg
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert float(root.attrib["width"].removesuffix("pt")) > 100
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("kind", KINDS)
def test_figures_of_a_run_in_memory_are_svg_in_the_colours_of_a_light_page(run: cs.runs.Run, kind: str) -> None:
    figure = getattr(cs.plot(run), kind)()
    assert words(figure)
    assert set(re.findall(r"#[0-9a-f]{6}", figure.svg)) & set(canvas.LIGHT.values())
    assert figure._repr_svg_() == figure.svg
    assert figure.svg in figure._repr_html_()
    assert html.escape(figure.caption) in figure._repr_html_()
    assert len(repr(figure)) < 60


@pytest.mark.parametrize("kind", MAGIC)
def test_figures_are_saved_by_the_suffix_of_their_name(kind: str, tmp_path: Path) -> None:
    figure = Figure("A", (charts.curves("A", [charts.Line([1, 2], [1, 2])]),))
    path = figure.save(tmp_path / "new" / f"figure.{kind.upper()}")
    assert path.read_bytes().startswith(MAGIC[kind])
    assert figure.save(tmp_path / f"again.{kind}").read_bytes() == path.read_bytes()


def test_a_figure_cannot_be_saved_as_anything_else(run: cs.runs.Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.svg, \.png, \.pdf, not as 'x\.docx'"):
        cs.plot(run).labels().save(tmp_path / "x.docx")


def test_a_page_and_a_figure_beside_it_do_not_share_colours(run: cs.runs.Run) -> None:
    drawing = charts.curves("A", [charts.Line([1, 2], [1, 2])])
    before = drawing.element("salt")
    assert cs.plot(run).curves("accuracy").svg
    assert drawing.element("salt") == before
    assert "var(--s0)" in before


def test_curves_are_of_the_metrics_asked_for_or_of_all(run: cs.runs.Run) -> None:
    shown = words(cs.plot(run).curves("nll"))
    assert "Negative log-likelihood" in shown
    assert "Accuracy" not in shown
    assert {"point model", "posterior average"} <= set(shown)
    everything = {drawing.title for drawing in cs.plot(run).curves().drawings}
    assert {"Training loss", "Accuracy", "Negative log-likelihood", "Brier score"} <= everything
    # A process's first round may take a hundred times as long as others: that would be a log scale.
    even = replace(run, history=[{**line, "seconds": 0.1} for line in run.history])
    assert cs.plot(even).curves("seconds").drawings[0].title == "Seconds"
    with pytest.raises(ConfigError, match="no curve of 'acuracy'; did you mean 'accuracy'"):
        cs.plot(run).curves("acuracy")


def test_reliability_and_clients_are_of_the_last_evaluation_or_of_another(run: cs.runs.Run) -> None:
    found = run.evaluation
    assert found is not None
    assert found.point == run.history[-1]["eval"]
    assert f"ECE {found.point['ece']:.3f}" in words(cs.plot(run).reliability())
    _, _, other = blobs(seed=3)
    again = run.evaluate(other)
    assert f"ECE {again.point['ece']:.3f}" in words(cs.plot(run).reliability(again))
    assert cs.plot(run).clients("brier").drawings[0].title == "Brier score"
    assert cs.plot(run).clients(evaluation=again).drawings[0].title == "Accuracy"


def test_a_run_that_was_never_scored_is_scored_for_its_figure() -> None:
    task, federation, test = blobs()
    run = cs.fit(FEDAVG, task, federation, test=test, **OPTIONS)
    run.latest = None
    assert cs.plot(run).reliability().drawings
    assert run.latest is not None


def test_a_figure_that_cannot_be_drawn_says_why() -> None:
    task, federation = linear()
    run = cs.fit(FEDAVG, task, federation, **OPTIONS)
    with pytest.raises(ConfigError, match="give fit test data"):
        cs.plot(run).reliability()
    run = cs.fit(FEDAVG, task, federation, test=federation.data, **OPTIONS)
    with pytest.raises(ConfigError, match="only classifiers"):
        cs.plot(run).reliability()
    with pytest.raises(ConfigError, match="on a Federation"):
        cs.plot(run).clients()
    run.history.clear()
    with pytest.raises(ConfigError, match="no rounds"):
        cs.plot(run).curves()


def test_labels_of_many_clients_and_classes_are_a_map() -> None:
    y = torch.arange(400) % 10
    data = cs.Dataset(torch.zeros(400, 2), y, classes=tuple(f"<{c}>" for c in range(10)), name="d")
    federation = cs.Federation.from_owner(data, torch.arange(400) % 40)
    task = cs.Classification(torch.nn.Linear(2, 10))
    run = cs.runs.Run(FEDAVG, task, federation, None, None)  # type: ignore[arg-type]
    assert "<3>" in words(cs.plot(run).labels())


def test_a_comparison_draws_its_results_and_the_curves_of_its_runs(comparison: Comparison) -> None:
    assert {"Accuracy", "FedAvg", "FedEP", "posterior average"} <= set(words(cs.plot(comparison).results("accuracy")))
    assert {"Training loss", "FedAvg", "FedEP"} <= set(words(cs.plot(comparison).curves("loss")))
    with pytest.raises(ConfigError, match="no result of 'f1'"):
        cs.plot(comparison).results("f1")


def test_a_comparison_that_kept_no_runs_has_results_but_no_curves() -> None:
    found = Comparison("One", rows=[Row("A", "accuracy", 0.9, None, 1, paper=0.8)])
    assert {"A", "paper"} <= set(words(cs.plot(found).results()))
    with pytest.raises(ConfigError, match="pass out= to compare"):
        cs.plot(found).curves("accuracy")
    with pytest.raises(ConfigError, match="pass out= to compare"):
        found.frame(runs=True)


# Runs from disk


def test_a_run_is_loaded_without_its_data(run: cs.runs.Run) -> None:
    loaded = cs.load_run(run.out)  # type: ignore[arg-type]
    assert loaded.config["seed"] == 0
    assert [line["round"] for line in loaded.history] == [1, 2]
    assert loaded.evaluation is not None
    assert loaded.evaluation.point == loaded.history[-1]["eval"]
    assert isinstance(loaded.posterior, cs.Gaussian)
    assert repr(loaded).startswith("Run(FedEP(I) on blobs: 2 rounds, marginal accuracy")
    assert "6 clients" in loaded._repr_html_()
    assert len(loaded._repr_html_()) < 2000


def test_a_loaded_run_draws_what_the_run_itself_draws(run: cs.runs.Run) -> None:
    loaded = cs.load_run(run.out)  # type: ignore[arg-type]
    assert cs.plot(loaded).curves("nll").svg == cs.plot(run).curves("nll").svg
    assert cs.plot(loaded).clients().svg == cs.plot(run).clients().svg


def test_a_directory_without_a_run_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no run\.json"):
        cs.load_run(tmp_path)
