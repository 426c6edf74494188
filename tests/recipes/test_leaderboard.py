"""The leaderboard: rows are computed once, methods that refuse a task say why, and tables show what was measured."""

from __future__ import annotations

import json

import pytest

from consilience.metrics import MARGINAL
from consilience.recipes import leaderboard
from consilience.recipes.base import Options
from consilience.recipes.leaderboard_setting import ARENAS

HOSPITALS = ARENAS[-1].quick()


@pytest.fixture
def options(tmp_path):
    return Options(quick=True, seeds=2, out=tmp_path)


def test_a_row_has_a_line_for_each_seed_and_is_not_computed_again(options, monkeypatch):
    monkeypatch.setattr(leaderboard, "rows", lambda quick: [(HOSPITALS, "FedAvg"), (HOSPITALS, "FedEP(N)")])
    leaderboard.write(leaderboard.compute(HOSPITALS, "FedAvg", options), options)
    assert [name for _, name in leaderboard.missing(options)] == ["FedEP(N)"]
    assert not (options.out / "runs" / "hospitals" / "FedAvg").exists()
    result = leaderboard.run(options)
    assert not leaderboard.missing(options)
    monkeypatch.setattr(leaderboard, "compute", lambda *_: pytest.fail("computed twice"))
    assert leaderboard.run(options).rows == result.rows
    lines = leaderboard.read(options.out)
    assert [(line["method"], line["seed"]) for line in lines] == [
        ("FedAvg", 0), ("FedAvg", 1), ("FedEP(N)", 0), ("FedEP(N)", 1),
    ]  # fmt: skip
    assert lines[0]["settings"] == lines[1]["settings"]
    assert set(leaderboard.METRICS) <= set(lines[0])
    shown = (options.out / "leaderboard.md").read_text()
    assert (options.out / "leaderboard-hospitals.svg").read_text().count("FedAvg") == 2  # always named
    assert "| FedEP(N), average | " in shown
    assert f"| {sum(line['accuracy'] for line in lines[:2]) / 2:.3f} ± " in shown


def test_a_row_that_was_stopped_goes_on(options, monkeypatch):
    whole = leaderboard.compute(HOSPITALS, "FedAvg", options)

    def cut(run, at):
        raise KeyboardInterrupt

    again = Options(quick=True, seeds=2, out=options.out / "again")
    monkeypatch.setattr(leaderboard, "worst", cut)
    with pytest.raises(KeyboardInterrupt):
        leaderboard.compute(HOSPITALS, "FedAvg", again)
    monkeypatch.undo()
    resumed = leaderboard.compute(HOSPITALS, "FedAvg", again)
    for one, other in zip(resumed, whole, strict=True):
        assert {k: v for k, v in one.items() if k != "seconds"} == {k: v for k, v in other.items() if k != "seconds"}


def test_a_method_that_cannot_learn_the_task_is_named_with_its_reason(options):
    (line,) = leaderboard.compute(HOSPITALS, "PFNM", options)
    assert "hidden" in line["refused"]
    leaderboard.write([line], options)
    assert f"- PFNM: {line['refused']}" in leaderboard.markdown([line, *_lines("FedAvg", 0.5)])


def test_the_best_accuracy_comes_first_and_what_needs_no_messages_sends_none():
    lines = [*_lines("LocalOnly", 0.4), *_lines("FedAvg", 0.6), *_lines("FedEP(I)", 0.5, 0.7)]
    found = dict(leaderboard.table(lines, HOSPITALS))
    assert list(found) == ["FedEP(I), average", "FedAvg", "FedEP(I)", "LocalOnly"]
    assert found["LocalOnly"][leaderboard.METRICS.index("MB sent")] == []
    assert found["FedEP(I), average"][leaderboard.METRICS.index("MB sent")] == [2.0]
    figure = leaderboard.figures(lines)[0]
    assert [mark.label for mark in figure.panels[0].marks] == ["FedEP(I), average", "FedAvg", "FedEP(I)"]


def test_differences_to_fedavg_are_paired_by_seed():
    values = {"FedAvg": (0.4, 0.6), "FedProx": (0.3, 0.65)}
    lines = [
        {**_lines(method, 0.5)[0], "seed": seed, "nll": nll}
        for method, each in values.items()
        for seed, nll in enumerate(each)
    ]
    shown = leaderboard.markdown(lines)
    assert "| FedProx | 0.500 ± 0.000 | 0.475 ± 0.247 | −0.025 (1 of 2) |" in shown
    assert "+0.000 (0 of 2)" in shown


def test_of_a_row_that_was_computed_twice_the_last_lines_count(tmp_path):
    lines = [*_lines("FedAvg", 0.6), *_lines("FedAvg", 0.7)]
    (tmp_path / leaderboard.RESULTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["accuracy"] for line in leaderboard.read(tmp_path)] == [0.7]


def _lines(method, accuracy, average=None):
    values = dict.fromkeys(leaderboard.METRICS, 2.0) | {"accuracy": accuracy}
    if average is not None:
        values |= {f"{metric}{MARGINAL}": 0.1 for metric in ("nll", "ece")} | {f"accuracy{MARGINAL}": average}
    return [{"federation": "hospitals", "method": method, "seed": 0, **values}]


def test_a_method_is_named_in_a_plot_if_no_other_is_better_in_both():
    costs = {"cheap": (1.0, 5.0), "good": (4.0, 1.0), "between": (2.0, 3.0), "worse": (2.0, 4.0), "same": (4.0, 1.0)}
    assert leaderboard.unbeaten(costs) == ["cheap", "good", "between", "same"]
