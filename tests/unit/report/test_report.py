"""Reports of synthetic runs and comparisons: what is shown, what is left out, and that nothing gets in or out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from consilience.core import text
from consilience.core.errors import ConsilienceError
from consilience.evaluation.uncertainty import Entropies
from consilience.figures import panels
from consilience.figures.panels import Curve, Heat, Mark, Panel, Panels
from consilience.report import write_report
from consilience.report.drawing.panels import side_by_side
from support.pages import (
    FEDEP,
    HOSTILE,
    PAIRED,
    Tags,
    check_page,
    evaluation,
    make_comparison,
    make_figure,
    make_run,
    posterior,
    report,
    rewrite,
    section,
    with_figures,
)

AWKWARD = ['font-family: "x', 'x d="1.2345"', "$x_{", "東京"]


def best_cells(page: str) -> list[str]:
    return re.findall(r'class="best">([^<\s]*)', page)


def test_a_run_shows_all_its_sections(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "evaluation.json").write_text(json.dumps(evaluation()))
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
    for shown in (
        "<h1>FedEP(I) on mnist</h1>",
        "FedEP(infer=Identity(scale=0.05), damping=None)",
        "159,010 parameters",
        "4 MB down, 8 MB up",
        "2 s, 0.5 s a round",
        "not finite",
        "precision floor",
        "Made with consilience 0.1.0, torch 2.13.",
        "Posterior average",
    ):
        assert shown in page, shown


def shown_facts(page: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", page))


@pytest.mark.parametrize(("at", "after"), [(1, "1 round"), (3, "3 rounds")])
def test_a_switch_is_titled_by_both_methods_and_marked_in_the_curves(tmp_path: Path, at: int, after: str) -> None:
    switch = {"name": "Switch", "first": {"name": "FedAvg", "server": {"name": "Adam"}}, "then": FEDEP, "at": at}
    page = report(make_run(tmp_path, algorithm=switch))
    check_page(page)
    assert f"<h1>FedEP(I) after {after} of FedAvg on mnist</h1>" in page
    facts = shown_facts(page)
    assert facts[f"To round {at}"] == "FedAvg(server=Adam())"
    assert facts[f"From round {at + 1}"] == "FedEP(infer=Identity(scale=0.05), damping=None)"
    assert "Algorithm" not in facts
    assert "The dotted line is the end of FedAvg." in page


def test_before_its_switch_a_run_is_one_of_the_first_method(tmp_path: Path) -> None:
    switch = {"name": "Switch", "first": {"name": "FedAvg"}, "then": FEDEP, "at": 4}
    page = report(make_run(tmp_path, algorithm=switch))
    assert "<h1>FedAvg on mnist</h1>" in page
    assert shown_facts(page)["Algorithm"].startswith("Switch(first=FedAvg(), then=FedEP(")
    assert "dotted line" not in page


def test_a_run_that_has_barely_begun_lacks_what_is_not_there(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", label_counts=None, sizes=None)
    (run / "metrics.jsonl").unlink()
    page = report(run)
    check_page(page)
    assert Tags(page).headings == ["Data", "Configuration"]
    assert "0 of 4 rounds" in page


def test_an_empty_configuration_still_gives_a_page(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    check_page(report(tmp_path))


def test_without_classes_the_sizes_are_shown(tmp_path: Path) -> None:
    page = report(make_run(tmp_path, label_counts=None))
    assert "its height the number of its examples." in page


@pytest.mark.parametrize("classes", [2, 4, 5, 62])
def test_few_classes_are_bars_and_many_a_heat_map(tmp_path: Path, classes: int) -> None:
    page = report(make_run(tmp_path, clients=14, classes=classes))
    check_page(page)
    assert ("<image" in page) == (classes > 4)


def test_more_clients_than_can_be_drawn_are_cut_and_it_says_so(tmp_path: Path) -> None:
    assert "The first 60 of 61 clients are drawn." in report(make_run(tmp_path / "a", clients=61, classes=10))
    assert "are drawn" not in report(make_run(tmp_path / "b", clients=60, classes=10))


def test_text_from_data_is_escaped_and_names_stay_as_they_are(tmp_path: Path) -> None:
    names = [HOSTILE, *AWKWARD]
    run = make_run(tmp_path, names=names, data=HOSTILE, how=HOSTILE)
    (run / "evaluation.json").write_text(json.dumps(evaluation(names=names)))
    page = report(run)
    check_page(page)
    parsed = Tags(page)
    assert [tag for tag, _ in parsed.tags].count("script") == 1
    assert "<script>alert" not in page
    for name in AWKWARD:
        assert f"{name}</text>" in page, name


def test_a_method_s_name_is_escaped_wherever_it_is_shown(tmp_path: Path) -> None:
    path = make_comparison(tmp_path) / "comparison.json"
    path.write_text(path.read_text().replace('"method": "FedEP"', f'"method": "{HOSTILE}\\" onload=\\"x"'))
    page = report(tmp_path)
    check_page(page)
    parsed = Tags(page)
    assert [tag for tag, _ in parsed.tags].count("script") == 1
    assert not any("onload" in attributes for _, attributes in parsed.tags)


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", classes=10)
    (run / "evaluation.json").write_text(json.dumps(evaluation()))
    code = "import sys, pathlib; from consilience.report import write_report; write_report(pathlib.Path(sys.argv[1]))"
    here = report(run)
    subprocess.run([sys.executable, "-c", code, str(run)], check=True)
    assert (run / "report.html").read_text(encoding="utf-8") == here
    assert not re.search(r"20\d\d-\d\d-\d\d", here)


def test_later_lines_override_and_torn_ones_are_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path, rounds=2)
    with (run / "metrics.jsonl").open("a") as out:
        out.write(json.dumps({"round": 2, "bytes_down": 5_000_000, "bytes_up": 0}) + "\n")
        out.write('{"round": 3, "bytes_down": 77')
    assert "6 MB down, 2 MB up" in report(run)


def test_not_a_number_is_a_dash_and_not_a_curve(tmp_path: Path) -> None:
    run = make_run(tmp_path, rounds=1)
    scores = {"accuracy": 0.5, "r2": float("nan")}
    content = {"point": {"metrics": scores, "reliability": None}, "marginal": None, "clients": []}
    (run / "evaluation.json").write_text(json.dumps(content))
    (run / "metrics.jsonl").write_text('{"round": 1, "loss": NaN, "eval": {"nll": Infinity}}\n')
    page = report(run)
    assert "Learning curves" not in Tags(page).headings
    assert "<dd>–</dd>" in page


def test_a_comparison_shows_all_its_sections(tmp_path: Path) -> None:
    page = report(make_comparison(tmp_path))
    check_page(page)
    assert Tags(page).headings == [
        "Results",
        "Learning curves",
        "At each client",
        "Fairness",
        "Calibration",
        "Uncertainty",
        "Single runs",
        "Data",
        "Configuration",
    ]
    for shown in ("Two methods", "A paragraph. It took 41 s.", "consilience reproduce hospitals", "over 2 seeds"):
        assert shown in page, shown
    assert "400 predictions" in page


def test_best_is_emphasised_in_the_direction_of_the_metric(tmp_path: Path) -> None:
    page = report(make_comparison(tmp_path))
    results, _, _ = page.partition("<h2>Learning curves</h2>")
    assert best_cells(results) == ["0.0200", "0.9100", "0.4000"]
    for head in ("accuracy ↑", "NLL ↓", "ECE ↓", "width"):
        assert f">{head}</button>" in page
    assert 'class="quiet">0.9250' in page


def test_equal_at_the_shown_precision_is_equally_good_and_one_method_has_no_rival(tmp_path: Path) -> None:
    rows = [{"method": m, "metric": "nll", "mean": v, "std": None} for m, v in {"A": 0.50001, "B": 0.5}.items()]
    (tmp_path / "comparison.json").write_text(json.dumps({"title": "t", "rows": rows}))
    assert best_cells(report(tmp_path)) == ["0.5000", "0.5000"]
    (tmp_path / "comparison.json").write_text(json.dumps({"title": "t", "rows": rows[:1]}))
    assert best_cells(report(tmp_path)) == []


def test_an_experiment_s_own_figures_have_sections_after_the_results(tmp_path: Path) -> None:
    page = report(with_figures(tmp_path, make_figure(), make_figure("Again")))
    check_page(page)
    assert Tags(page).headings == ["Results", "Two beliefs", "Again"]
    assert page.count('<figure class="wide">') == 2
    for shown in ("In the plane", "Error (log scale)", "What it shows.", ">sweep<", "10⁻¹²", "over 200 draws"):
        assert shown in page, shown
    assert page.count('border-style: solid"></i>FedAvg</li>') == 2  # of the marks
    assert page.count('border-style: solid"></i>ADF</li>') == 2  # of the curves
    assert "product</li>" not in page  # what is no method is named in the figure
    assert page.count("product</text>") == 4


def test_a_figure_leaves_out_what_cannot_be_drawn(tmp_path: Path) -> None:
    page = report(with_figures(tmp_path, make_figure()))
    (svg,) = re.findall(r'<figure class="wide">.*?</figure>', page, re.DOTALL)
    assert not re.search(r"\bnan\b|\binf\b", svg, re.IGNORECASE)


def test_the_words_of_a_figure_are_escaped(tmp_path: Path) -> None:
    page = report(with_figures(tmp_path, make_figure(HOSTILE, HOSTILE)))
    check_page(page)
    assert [tag for tag, _ in Tags(page).tags].count("script") == 1


def test_a_figure_without_panels_is_not_shown(tmp_path: Path) -> None:
    assert Tags(report(with_figures(tmp_path, Panels("Nothing", "", [])))).headings == ["Results"]


def test_small_numbers_have_an_exponent_where_decimals_would_all_be_nought(tmp_path: Path) -> None:
    page = report(with_figures(tmp_path))
    assert best_cells(page) == ["1.1e-7"]
    assert [text.fixed(x, 4) for x in (0.0, 4e-5, -4e-5, 6e-5)] == ["0.0000", "4.0e-5", "-4.0e-5", "0.0001"]
    assert [text.fixed(x, 0) for x in (0.0, 0.01, 1e-5)] == ["0", "0", "1.0e-5"]


def test_single_runs_are_linked_once_they_have_a_report(tmp_path: Path) -> None:
    comparison = make_comparison(tmp_path)
    assert 'href="./' not in report(comparison)
    write_report(comparison / "runs" / "FedEP 1")
    page = report(comparison)
    assert re.findall(r'<a href="([^"]*)"', page) == ["./runs/FedEP%201/report.html"]


def test_a_comparison_whose_runs_are_gone_keeps_its_table(tmp_path: Path) -> None:
    content = json.loads((make_comparison(tmp_path / "whole") / "comparison.json").read_text())
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    assert Tags(report(tmp_path)).headings == ["Results", "At each client", "Fairness", "Single runs"]


def test_what_is_no_run_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConsilienceError, match=r"neither a run .* nor a comparison"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConsilienceError, match=r"run\.json is not valid JSON"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ConsilienceError, match="found list"):
        write_report(tmp_path)


def test_numbers_read_well() -> None:
    assert [text.data_size(n) for n in (0, 999, 6_360_400, 3e15)] == ["0 B", "999 B", "6.36 MB", "3,000 TB"]
    assert [text.duration(s) for s in (0.213, 41, 200, 3900)] == ["0.21 s", "41 s", "3 min 20 s", "1 h 5 min"]
    assert [text.number(x) for x in (0.97312, 1.5, 12.345, 159010, None)] == [
        "0.9731",
        "1.500",
        "12.35",
        "159,010",
        "–",
    ]


def make_heat(title: str = "Prior", scale: float = 1.0) -> Panel:
    values = [[0.9123 * scale, 0.05 * scale, float("nan")], [0.3 * scale, 0.004 * scale, 0.0]]
    return Panel(title, x_label="γ₀", y_label="σ₀²", heat=Heat(values, ["0.1", "1", "10"], ["row a", "row b"]))


def cells(svg: str) -> tuple[list[float], list[str]]:
    """How strong each cell is, and what is written in the cells."""
    return (
        [float(found) for found in re.findall(r"fill: var\(--k0\); opacity: ([\d.]+)", svg)],
        re.findall(r">(-?[\d.,]+(?:e-?\d+)?)</text>", svg),
    )


def drawn(*shown: Panel) -> str:
    return side_by_side(Panels("Some", "", list(shown)), ["FedAvg", "FedEP"]).element("x")


def test_a_figure_comes_back_from_json_as_it_was() -> None:
    heat = Heat([[0.9, 0.1], [0.3, 0.0]], ["a", "b"], ["c", "d"])
    curve = Panel(
        "Sweep", [Curve("FedEP", [1, 2], [0.5, 0.25])], [Mark("FedEP", 1.0, 2.0)], x_label="J", y_label="loss"
    )
    figure = Panels("Two", "What it shows.", [curve, Panel("Prior", x_label="γ₀", y_label="σ₀²", heat=heat)])
    assert panels.read(json.loads(json.dumps(asdict(figure)))) == figure


def test_a_figure_written_before_there_were_heat_maps_is_still_read() -> None:
    content = asdict(make_figure())
    for panel in content["panels"]:
        del panel["heat"], panel["y_label"]
    assert [(panel.heat, panel.y_label) for panel in panels.read(content).panels] == [(None, "")] * 2


def test_a_heat_map_says_its_values_and_leaves_out_what_is_none() -> None:
    svg = drawn(make_heat())
    strengths, written = cells(svg)
    assert len(strengths) == 5
    assert [word for word in written if word not in ("0.1", "1", "10")] == [
        "0.912",
        "0.050",
        "0.300",
        "0.0040",
        "0.000",
    ]
    assert not re.search(r"\bnan\b|\binf\b", svg, re.IGNORECASE)
    for name in ("row a", "row b", "0.1", "10", "γ₀", "σ₀²", "Prior"):
        assert f">{name}</text>" in svg, name
    assert "(log scale)" not in svg


def test_heat_maps_of_a_figure_share_their_shades() -> None:
    together, _ = cells(drawn(make_heat(), make_heat("Half", 0.5)))
    alone, _ = cells(drawn(make_heat("Half", 0.5)))
    assert max(together[:5]) == max(together) == max(alone)
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


def test_a_page_holds_curves_and_heat_maps_side_by_side(tmp_path: Path) -> None:
    sweep = Panel("Sweep", [Curve("FedEP", [1, 2, 5], [0.5, 0.4, 0.3])], x_label="clients", y_label="loss")
    same = [make_heat("One"), make_heat("Two")]
    page = report(with_figures(tmp_path, Panels("Mixed", "What it shows.", [sweep, *same])))
    check_page(page)
    assert Tags(page).headings == ["Results", "Mixed"]
    (svg,) = re.findall(r'<figure class="wide">.*?</figure>', page, re.DOTALL)
    assert len(cells(svg)[0]) == 10
    for shown in ("Sweep", "clients", "loss", "One", "Two"):
        assert f">{shown}</text>" in svg, shown
    assert page.count("</i>FedEP</li>") == 1  # the legend is of the curves


def test_the_names_of_a_heat_map_are_escaped(tmp_path: Path) -> None:
    heat = Heat([[1.0, 2.0]], [HOSTILE[:20], AWKWARD[0]], [AWKWARD[2]])
    page = report(with_figures(tmp_path, Panels("Names", "", [Panel(HOSTILE, heat=heat)])))
    check_page(page)
    assert [tag for tag, _ in Tags(page).tags].count("script") == 1
    assert f"{AWKWARD[2]}</text>" in page


@pytest.mark.parametrize("values", [[[1.0, 2.0]], [[1.0], [2.0, 3.0]], [[1.0, 2.0], [3.0]]])
def test_a_heat_map_s_values_fit_its_names(values: list[list[float]]) -> None:
    with pytest.raises(ConsilienceError, match=r"heat map of 2 × 2"):
        Heat(values, ["a", "b"], ["c", "d"])
    with pytest.raises(ConsilienceError, match="a row and a column"):
        Heat([], [], [])


@pytest.mark.parametrize(
    ("label", "points", "dots"), [("FedEP", 12, 12), ("FedEP", 13, 0), ("limit", 5, 5), ("limit", 2, 0)]
)
def test_few_points_of_a_curve_are_dots(label: str, points: int, dots: int) -> None:
    curve = Curve(label, list(range(points)), [0.5 + 0.1 * at for at in range(points)])
    colour = "--s1" if label == "FedEP" else "--muted"
    svg = drawn(Panel("Sweep", [curve]))
    assert len(re.findall(rf"<use [^>]*fill: var\({colour}\)", svg)) == dots


# Uncertainty


def with_evaluation(directory: Path, **changes: Any) -> Path:
    run = make_run(directory)
    (run / "evaluation.json").write_text(json.dumps({**evaluation(), **changes}))
    return run


def test_entropies_are_shown_of_what_is_right_wrong_and_outside(tmp_path: Path) -> None:
    shown = section(report(with_evaluation(tmp_path)), "Uncertainty")
    assert "from 0 (certain) to 1.10 nats (a guess among 3 classes)" in shown
    assert "another kind (letters)" in shown
    assert shown.count("<figure") == 2
    for label in ("right", "wrong", "letters", "50"):
        assert shown.count(f">{label}</text>") == 2, label
    assert re.search(r"AUROC of entropy: wrong from right 0\.\d{3}, letters from the test data 0\.\d{3}", shown)


def test_what_is_not_there_has_no_histogram(tmp_path: Path) -> None:
    sure = Entropies(torch.tensor([0.1, 0.2, float("nan")]), torch.tensor([True] * 3), 3).to_json()
    scored = {"metrics": {"accuracy": 1.0}, "reliability": None, "entropy": sure}
    shown = section(report(with_evaluation(tmp_path, point=scored, marginal=None, outside=None)), "Uncertainty")
    assert ">right</text>" in shown
    assert ">wrong</text>" not in shown
    assert "Mean entropy 0.15 where right." in shown
    assert "AUROC" not in shown
    assert "another kind" not in shown


def test_an_ensemble_is_called_one(tmp_path: Path) -> None:
    page = report(with_evaluation(tmp_path, belief="Mixture", marginal=None, posterior=None))
    assert ">Ensemble</text>" in section(page, "Uncertainty")
    assert ">Ensemble</text>" in section(page, "Calibration")
    assert "Posterior" not in Tags(page).headings


def test_the_posterior_is_shown_by_parameter_and_by_example(tmp_path: Path) -> None:
    shown = section(report(with_evaluation(tmp_path, posterior=posterior(3, of=40))), "Posterior")
    assert "a Gaussian over 1,234 weights; of 25% the sign is known" in shown
    assert "The 3 largest of 40 parameters are shown." in shown
    assert shown.count("<figure") == 3
    assert shown.count(">layer2.weight</text>") == 2
    assert "are shown" not in section(report(with_evaluation(tmp_path)), "Posterior")


def test_evaluations_from_before_there_were_entropies_still_give_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    old = {"point": {"metrics": {"accuracy": 0.5}, "reliability": None}, "marginal": None, "clients": []}
    (run / "evaluation.json").write_text(json.dumps(old))
    headings = Tags(report(run)).headings
    assert "Uncertainty" not in headings
    assert "Posterior" not in headings


def test_numbers_of_the_server_are_curves_or_facts(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for index, line in enumerate(lines):
        line |= {"width": 100.0 + index, "members": 7.0, "word": "x", "audit": {"gap": 0.1}}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = section(report(run), "Server")
    assert shown.count("<figure") == 1
    assert 'aria-label="Width"' in shown
    assert "<dt>Members</dt><dd>7</dd>" in shown
    assert "Word" not in shown


@pytest.mark.parametrize(("below", "href"), [("A/seed-0", "../../"), ("warm starts/A/seed-0", "../../../")])
def test_a_run_links_to_the_comparison_that_it_is_part_of(tmp_path: Path, below: str, href: str) -> None:
    run = make_run(tmp_path / below)
    assert "<a href" not in report(run)
    (tmp_path / "comparison.json").write_text(json.dumps({"title": "Two <methods>"}))
    page = report(run)
    check_page(page)
    assert f'in <a href="{href}report.html">Two &lt;methods&gt;</a>' in page


def test_the_config_a_run_was_started_with_is_kept_at_the_bottom(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "config.toml").write_text('[data]\nname = "mnist"\n')
    shown = section(report(run), "Configuration")
    assert "<summary>config.toml</summary>\n<pre>[data]\nname = &#34;mnist&#34;" in shown


# Methods against each other


def cells_of(table: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    texts = [[re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<td.*?</td>", row)] for row in rows]
    return [row for row in texts if row]


def test_fairness_is_within_seeds_and_then_averaged_over_them(tmp_path: Path) -> None:
    make_comparison(tmp_path)
    by_seed = {0: [0.0, 1.0, 0.5], 1: [0.4, 0.4, 0.4]}
    for method in ("FedAvg", "FedEP"):
        for seed, values in by_seed.items():
            clients = [
                {"name": str(index), "examples": 3, "metrics": {"accuracy": value, "nll": value}}
                for index, value in enumerate(values)
            ]
            place = tmp_path / "runs" / f"{method} {seed}" / "evaluation.json"
            place.write_text(json.dumps({**evaluation(seed), "clients": clients}))
    shown = section(report(tmp_path), "Fairness")
    accuracy, nll = re.findall(r"<table.*?</table>", shown, re.DOTALL)
    assert cells_of(accuracy)[0] == ["FedAvg", "0.200", "0.250", "0.450", "0.700", "0.250"]
    assert cells_of(nll)[0] == ["FedAvg", "0.700", "0.650", "0.450", "0.200", "0.250"]  # less is better
    assert ">10th percentile<" in accuracy
    assert ">90th percentile<" in nll
    assert shown.count("<figure") == 2
    assert 'class="best"' not in shown  # both methods are alike


def test_without_runs_fairness_is_of_the_clients_means(tmp_path: Path) -> None:
    per_client = [
        {"method": method, "client": client, "metric": "accuracy", "mean": mean, "std": None}
        for method, means in {"A": [0.9, 0.7], "B": [0.8, 0.8]}.items()
        for client, mean in zip(("x", "y"), means, strict=True)
    ]
    (tmp_path / "comparison.json").write_text(json.dumps({"title": "t", "per_client": per_client}))
    shown = section(report(tmp_path), "Fairness")
    assert [row[:2] for row in cells_of(shown)] == [["A", "0.700"], ["B", "0.800"]]
    assert best_cells(shown) == ["0.900", "0.800", "0.800", "0.000"]


def test_one_client_is_not_treated_unfairly(tmp_path: Path) -> None:
    row = {"method": "A", "client": "x", "metric": "accuracy", "mean": 0.5, "std": None}
    (tmp_path / "comparison.json").write_text(json.dumps({"title": "t", "per_client": [row]}))
    assert "Fairness" not in Tags(report(tmp_path)).headings


def test_differences_have_intervals_and_what_is_clear_is_bold(tmp_path: Path) -> None:
    shown = section(report(rewrite(make_comparison(tmp_path), paired=PAIRED)), "Differences")
    assert cells_of(shown) == [
        ["FedEP", "FedAvg", "accuracy", "+0.0200", "+0.0100 to +0.0300", "&lt; 0.001", "5"],
        ["FedEP", "FedAvg", "ECE", "+0.1000", "–", "–", "1"],
        ["FedEP", "FedAvg", "NLL, marginal", "−0.1000", "−0.3000 to +0.1000", "0.250", "5"],
    ]
    assert best_cells(shown) == ["+0.0200"]
    assert shown.count("<figure") == 3
    assert ">FedEP − FedAvg</text>" in shown


def test_tuning_is_folded_and_the_chosen_settings_are_bold(tmp_path: Path) -> None:
    tried = [{"settings": {"train.lr": 0.1}, "score": 0.9}, {"settings": {"train.lr": 0.2}, "score": None}]
    entry = {"method": "FedEP", "trials": 2, "chosen": {"train.lr": 0.1}, "score": 0.9, "metric": "accuracy"}
    tuning = [{**entry, "all": tried}, {"method": "FedAvg", "trials": 1, "chosen": {}, "score": 0.8}]
    shown = section(report(rewrite(make_comparison(tmp_path), tuning=tuning)), "Tuning")
    assert cells_of(shown) == [
        ["FedEP", "train.lr = 0.1", "0.9000", "accuracy", "2"],
        ["FedAvg", "as it is", "0.8000", "", "1"],
        ["1", "0.1", "0.9000"],
        ["2", "0.2", "–"],
    ]
    assert best_cells(shown) == ["0.9000"]
    assert shown.count("<details>") == 2


def test_methods_are_compared_by_their_entropies(tmp_path: Path) -> None:
    shown = section(report(make_comparison(tmp_path)), "Uncertainty")
    assert shown.count("<figure") == 2
    names = [row[0] for row in cells_of(shown)]
    assert names == ["FedAvg", "FedEP, marginal"]
    assert ">letters, AUROC ↑</button>" in shown


def test_the_federation_shown_is_not_the_pooled_one(tmp_path: Path) -> None:
    make_comparison(tmp_path)
    make_run(tmp_path / "runs" / "FedAvg 0", clients=1)
    assert "Clients</dt><dd>5; " in section(report(tmp_path), "Data")


def test_every_method_s_settings_are_at_the_bottom(tmp_path: Path) -> None:
    switch = {"name": "Switch", "first": {"name": "FedAvg"}, "then": FEDEP, "at": 2}
    make_run(make_comparison(tmp_path) / "runs" / "FedAvg 0", algorithm=switch)
    facts = shown_facts(section(report(tmp_path), "Configuration"))
    assert facts["FedEP"] == "FedEP(infer=Identity(scale=0.05), damping=None)"
    assert facts["FedAvg, to round 2"] == "FedAvg()"
    assert facts["Rounds"] == "4"
