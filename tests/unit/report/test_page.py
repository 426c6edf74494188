"""Whole pages: what they show, escaping, and accessibility."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from consilience.core import text
from consilience.core.errors import ConsilienceError
from consilience.figures.panels import Panels
from consilience.figures.pictures import Pictures, Row, heat
from consilience.report import write_report
from support.pages import (
    HOSTILE,
    Tags,
    check_page,
    evaluation,
    make_comparison,
    make_figure,
    make_run,
    report,
    rewrite,
    section,
    with_figures,
)
from support.sealed import content, put, put_lines


def check_no_script(page: str) -> None:
    check_page(page)
    assert [tag for tag, _ in Tags(page).tags].count("script") == 1  # the page's own
    assert not any("onload" in attributes for _, attributes in Tags(page).tags)


def bare_run(directory: Path, **federation: Any) -> Path:
    """A run without rounds, whose page has no drawings."""
    run = make_run(directory, label_counts=None, sizes=None, **federation)
    (run / "metrics.jsonl").unlink()
    return run


@pytest.mark.usefixtures("sketched")
def test_a_run_shows_all_its_sections(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", clients=3, classes=10)
    put(run / "evaluation.json", evaluation())
    page = report(run)
    check_page(page)
    assert Tags(page).headings == [
        "Learning curves",
        "Calibration",
        "Uncertainty",
        "Clients",
        "Posterior",
        "Communication",
        "Data",
        "Configuration",
    ]
    for shown in ("<h1>FedEP(I) on mnist</h1>", "Made with consilience 0.1.0, torch 2.13."):
        assert shown in page, shown
    assert all("aria-label" in attributes for tag, attributes in Tags(page).tags if tag == "svg")
    assert not re.search(r"20\d\d-\d\d-\d\d", page)


@pytest.mark.usefixtures("sketched")
def test_a_comparison_shows_all_its_sections(tmp_path: Path) -> None:
    comparison = make_comparison(tmp_path)
    write_report(bare_run(comparison / "runs" / "FedEP 1"))
    make_run(comparison / "runs" / "FedAvg 0", clients=1)  # as Pooled: the data shown are not of this run
    page = report(comparison)
    check_page(page)
    assert Tags(page).headings == [
        "Results",
        "Learning curves",
        "Scores at each client",
        "Test data",
        "Fairness",
        "Calibration",
        "Uncertainty",
        "Single runs",
        "Data",
        "Configuration",
    ]
    for shown in ("Two methods", "A paragraph. It took 41 s.", "consilience reproduce hospitals", "over 2 seeds"):
        assert shown in page, shown
    assert "Clients</dt><dd>5" in section(page, "Data")
    assert re.findall(r'<a href="([^"]*)"', page) == ["./runs/FedEP%201/report.html"]


def test_a_run_without_rounds_has_a_page(tmp_path: Path) -> None:
    page = report(bare_run(tmp_path / "run"))
    check_page(page)
    assert Tags(page).headings == ["Data", "Configuration"]
    assert "0 of 4 rounds" in page
    put(tmp_path / "run.json", {})
    check_page(report(tmp_path))


@pytest.mark.usefixtures("sketched")
def test_a_comparison_without_its_runs_keeps_its_tables(tmp_path: Path) -> None:
    put(tmp_path / "comparison.json", content(make_comparison(tmp_path / "whole") / "comparison.json"))
    assert Tags(report(tmp_path)).headings == ["Results", "Scores at each client", "Fairness", "Single runs"]


def test_text_from_data_is_escaped(tmp_path: Path) -> None:
    names = [HOSTILE, 'font-family: "x']
    run = make_run(tmp_path, clients=2, rounds=1, names=names, data=HOSTILE, how=HOSTILE)
    put(run / "evaluation.json", {"clients": evaluation(names=names)["clients"]})
    page = report(run)
    check_no_script(page)
    assert "<script>alert" not in page
    assert f"{names[1]}</text>" in page


def test_names_of_methods_figures_and_samples_are_escaped(tmp_path: Path) -> None:
    hostile = f'{HOSTILE}" onload="x'
    pictures = Pictures(hostile, hostile, [hostile], [Row(hostile, [heat([[1.0]], note=hostile)])])
    path = with_figures(tmp_path, make_figure(HOSTILE, HOSTILE), pictures) / "comparison.json"
    put(path, json.loads(json.dumps(content(path)).replace('"method": "FedEP"', f'"method": {json.dumps(hostile)}')))
    page = report(tmp_path)
    check_no_script(page)
    (image,) = [attributes for tag, attributes in Tags(page).tags if tag == "img"]
    assert image["alt"] == f"{hostile}, {hostile}, {hostile}"
    run = bare_run(tmp_path / "run")
    samples = {"kind": "images", "generated": f'">{HOSTILE}', "real": "", "count": 3}
    put(run / "evaluation.json", {"samples": samples})
    check_no_script(report(run))


def test_figures_of_the_experiment_follow_the_results(tmp_path: Path) -> None:
    cell = heat([[0.0, 1.0]], note="a note")
    pictures = Pictures(
        "Maps", "A caption.", ["FedAvg", "b"], [Row("first", [cell, None]), Row("second", [None, None])]
    )
    empty = [Panels("Nothing", "", []), Pictures("Nothing", "", ["a"], [])]
    page = report(with_figures(tmp_path, make_figure(), pictures, make_figure("Again"), *empty))
    check_page(page)
    assert Tags(page).headings == ["Results", "Two beliefs", "Maps", "Again"]
    assert page.count('<figure class="wide">') == 3
    assert page.count('border-style: solid"></i>ADF</li>') == 2  # methods are in the legend
    assert "product</li>" not in page  # other labels are in the figure
    for shown in ("What it shows.", "over 200 draws", "<b>FedAvg</b>", '"label">second<', "<small>a note</small>"):
        assert shown in page, shown
    assert f'<img src="data:image/png;base64,{cell.png}" alt="first, FedAvg, a note">' in page


def test_pictures_without_row_labels_have_no_column_for_them(tmp_path: Path) -> None:
    page = report(with_figures(tmp_path, Pictures("Plain", "", ["a"], [Row("", [heat([[1.0]])])])))
    assert 'class="grid"' in page
    assert 'class="label"' not in page


def test_a_torn_last_line_is_skipped(tmp_path: Path) -> None:
    run = bare_run(tmp_path)
    put_lines(run, [{"round": 1, "bytes_down": 6_000_000, "bytes_up": 2_000_000}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "bytes_down": 77')
    assert "6 MB down, 2 MB up" in report(run)


def test_a_score_that_is_not_finite_is_a_dash_and_no_curve(tmp_path: Path) -> None:
    run = bare_run(tmp_path)
    scores = {"accuracy": 0.5, "r2": float("nan")}
    point = {"metrics": scores, "reliability": None}
    put(run / "evaluation.json", {"point": point, "marginal": None, "clients": []})
    put_lines(run, [{"round": 1, "loss": math.nan, "eval": {"nll": math.inf}}])
    page = report(run)
    assert "Learning curves" not in Tags(page).headings
    assert "<dd>–</dd>" in page


@pytest.mark.parametrize(("below", "href"), [("A/seed-0", "../../"), ("warm starts/A/seed-0", "../../../")])
def test_a_run_links_to_its_comparison(tmp_path: Path, below: str, href: str) -> None:
    run = bare_run(tmp_path / below)
    assert "<a href" not in report(run)
    put(tmp_path / "comparison.json", {"title": "Two <methods>"})
    page = report(run)
    check_page(page)
    assert f'in <a href="{href}report.html">Two &lt;methods&gt;</a>' in page


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, r"neither a run .* nor a comparison"), ("{", r"run\.json is not valid JSON"), ("[]", "found list")],
)
def test_a_directory_without_a_run_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConsilienceError, match=message):
        write_report(tmp_path)


@pytest.mark.parametrize("place", ["../elsewhere", "/elsewhere", "runs/link"])
def test_a_comparison_does_not_show_runs_elsewhere(tmp_path: Path, place: str) -> None:
    elsewhere, comparison = make_run(tmp_path / "elsewhere"), make_comparison(tmp_path / "both")
    (comparison / "runs" / "link").symlink_to(elsewhere)
    named = str(elsewhere) if place == "/elsewhere" else place
    rewrite(comparison, runs=[{"method": "FedAvg", "seed": 0, "directory": named}])
    with pytest.raises(ConsilienceError, match=r"leads out of .*both"):
        write_report(comparison)


@pytest.mark.parametrize("name", ["comparison.json", "runs/FedEP 1/run.json"])
def test_a_comparison_with_an_altered_file_is_refused(tmp_path: Path, name: str) -> None:
    path = make_comparison(tmp_path) / name
    path.write_text(path.read_text().replace("0", "1"))
    with pytest.raises(ConsilienceError, match=f"{path.name} is damaged"):
        write_report(tmp_path)


def test_a_report_overwrites_a_link_and_not_its_target(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "run")
    (tmp_path / "thesis").write_text("mine")
    (run / "report.html").symlink_to(tmp_path / "thesis")
    check_page(report(run))
    assert (tmp_path / "thesis").read_text() == "mine"


def test_numbers_are_readable() -> None:
    assert [text.data_size(n) for n in (0, 999, 6_360_400, 3e15)] == ["0 B", "999 B", "6.36 MB", "3,000 TB"]
    assert [text.duration(s) for s in (0.213, 41, 200, 3900)] == ["0.21 s", "41 s", "3 min 20 s", "1 h 5 min"]
    assert [text.number(x) for x in (0.97312, 12.345, 159010, None)] == ["0.9731", "12.35", "159,010", "–"]
    assert [text.fixed(x, 4) for x in (0.0, 4e-5, -4e-5, 6e-5)] == ["0.0000", "4.0e-5", "-4.0e-5", "0.0001"]
    assert [text.fixed(x, 0) for x in (0.0, 0.01, 1e-5)] == ["0", "0", "1.0e-5"]
