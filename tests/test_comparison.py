"""Tables of methods × metrics, and warm starts that methods share."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

import consilience as cs
from consilience.comparison import Comparison, Row, Setting, compare
from consilience.report import write_report
from scenarios import blobs

TRAIN = cs.SGD(lr=0.1, epochs=2)
ENGINE = cs.Simulator(device="cpu", chunk=6, workers=1)
OPTIONS = {"rounds": 4, "cohort": 4, "engine": ENGINE, "progress": False}


def shown(comparison, width=120):
    console = Console(width=width, record=True, file=None)
    with console.capture() as captured:
        for table in comparison.tables(width):
            console.print(table)
    return captured.get()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_table_that_is_too_wide_goes_on_below(width):
    rows = [Row(method, f"metric {i}", i + 0.125, 0.001, 3) for method in ("FedAvg", "FedEP") for i in range(9)]
    text = shown(Comparison("Nine scores", rows=rows), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert all(text.count(f"{i}.125 ± 0.001") == 2 for i in range(9))
    assert text.count("Nine scores") == 1


def test_a_score_that_not_every_run_has_says_of_how_many_it_is(tmp_path):
    rows = [Row("A", "accuracy", 0.9, 0.01, 3), Row("A", "rounds to 90%", 7.0, None, 1)]
    comparison = Comparison("Two scores", rows=rows)
    assert "7.000 (1 of 3)" in shown(comparison)
    comparison.save(tmp_path)
    assert "(1 of 3)" in write_report(tmp_path).read_text()


def test_what_a_posterior_predicts_has_a_line_of_its_own():
    rows = [Row("A", "nll", 0.5, None, 1), Row("B", "nll", 0.4, None, 1), Row("B", "nll (marginal)", 0.3, None, 1)]
    lines = [line for line in shown(Comparison("One score", rows=rows)).splitlines() if "0." in line]
    assert [line.split()[1] for line in lines] == ["A", "B", "marginal"]


def test_methods_after_the_same_first_method_share_its_rounds(tmp_path):
    task, train, test = blobs()
    first = cs.FedAvg(TRAIN)
    methods = {"FedAvg": cs.Switch(first, first, at=2), "FedEP": cs.Switch(first, cs.FedEP(cs.Identity(TRAIN)), at=2)}
    compare(methods, Setting(task, train, test), seeds=1, out=tmp_path, **OPTIONS)
    (warm,) = (tmp_path / "warm starts").iterdir()
    assert len((warm / "seed-0" / "metrics.jsonl").read_text().splitlines()) == 2
    lines = {
        name: [json.loads(line) for line in (tmp_path / name / "seed-0" / "metrics.jsonl").read_text().splitlines()]
        for name in methods
    }
    assert [line["round"] for line in lines["FedEP"]] == [1, 2, 3, 4]
    assert lines["FedAvg"][:2] == lines["FedEP"][:2]
    whole = cs.fit(methods["FedEP"], task, train, test=test, **OPTIONS)
    assert lines["FedEP"][-1]["eval"] == whole.history[-1]["eval"]


def test_a_comparison_with_warm_starts_goes_on_where_it_stopped(tmp_path):
    task, train, test = blobs()
    methods = [cs.Switch(cs.FedAvg(TRAIN), cs.FedSEP(cs.Identity(TRAIN)), at=2)]
    whole = compare(methods, Setting(task, train, test), seeds=1, out=tmp_path, **OPTIONS)
    again = compare(methods, Setting(task, train, test), seeds=1, out=tmp_path, resume=True, **OPTIONS)
    assert [(row.metric, row.mean) for row in again.rows] == [(row.metric, row.mean) for row in whole.rows]
