"""Sections of reports: their tables, captions and facts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from consilience.evaluation.samples import image_samples, point_samples
from consilience.evaluation.uncertainty import Entropies
from consilience.report.page import Section, Table
from consilience.report.sections.clients import comparison_clients, fairness_section, run_clients
from consilience.report.sections.clinical import coefficient_section, survival_section
from consilience.report.sections.configuration import comparison_configuration, run_configuration
from consilience.report.sections.curves import comparison_curves, run_curves, server_section
from consilience.report.sections.federation import communication_section, data_section
from consilience.report.sections.results import difference_section, local_section, result_section, tuning_section
from consilience.report.sections.samples import sample_section
from consilience.report.sections.sets import run_sets
from consilience.report.sections.transcripts import transcript_section
from consilience.report.sections.uncertainty import (
    comparison_calibration,
    comparison_entropy,
    posterior_section,
    run_calibration,
    run_entropy,
)
from consilience.runs.stored import RunFiles
from support.pages import FEDEP, PAIRED, evaluation, make_run, posterior
from support.pictures import WHITE, at
from support.sealed import put

LOWER, UPPER = [-2.0, -1.0], [2.0, 3.0]
Make = Callable[..., RunFiles]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """The files of a run whose evaluation has some changes."""

    def run(changes: dict[str, Any] | None = None, **options: Any) -> RunFiles:
        make_run(tmp_path, **options)
        put(tmp_path / "evaluation.json", {**evaluation(), **(changes or {})})
        return RunFiles.read(tmp_path)

    return run


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def best(section: Section) -> list[str]:
    folded = [block for _, block in section.folded if isinstance(block, Table)]
    return [cell.text for table in [*section.tables, *folded] for row in table.rows for cell in row if cell.best]


# One run


def test_curves_are_of_the_point_model_and_the_posterior_average(make: Make) -> None:
    section = run_curves(make())
    assert [plot.drawing.title for plot in section.plots] == ["Training loss", "Accuracy", "Negative log-likelihood"]
    assert [(key.label, key.style) for key in section.legend] == [
        ("point model", "solid"),
        ("posterior average", "dashed"),
    ]


def test_a_switch_is_marked_in_the_curves_and_has_two_algorithms(make: Make) -> None:
    switch = {"name": "Switch", "first": {"name": "FedAvg", "server": {"name": "Adam"}}, "then": FEDEP, "at": 3}
    run = make(algorithm=switch)
    assert run.method == "FedEP(I) after 3 rounds of FedAvg"
    assert run_curves(run).text == "The dotted line marks the last round of FedAvg."
    facts = dict(run_configuration(run).facts)
    assert facts["To round 3"] == "FedAvg(server=Adam())"
    assert facts["From round 4"] == "FedEP(infer=Identity(scale=0.05), damping=None)"
    assert "Algorithm" not in facts


def test_before_its_switch_a_run_is_one_of_the_first_method(make: Make) -> None:
    run = make(algorithm={"name": "Switch", "first": {"name": "FedAvg"}, "then": FEDEP, "at": 4})
    assert run.method == "FedAvg"
    assert run_curves(run).text == ""
    assert dict(run_configuration(run).facts)["Algorithm"].startswith("Switch(first=FedAvg(), then=FedEP(")


@pytest.mark.parametrize(
    ("accuracy", "verdict"),
    [
        (0.5, "Overconfident: mean confidence is 0.250 above accuracy."),
        (1.0, "Underconfident: mean confidence is 0.250 below accuracy."),
        (0.75, "Mean confidence equals accuracy."),
    ],
)
def test_calibration_begins_with_the_verdict(make: Make, accuracy: float, verdict: str) -> None:
    diagram = {"edges": [0.0, 0.5, 1.0], "confidence": [0.0, 0.75], "accuracy": [0.0, accuracy], "count": [0, 40]}
    run = make({"point": {"metrics": {}, "reliability": diagram}, "marginal": None})
    (plot,) = run_calibration(run).plots
    assert plot.caption == f"{verdict} 40 predictions; the lower bars are their shares in the bins."


def test_an_ensemble_is_called_an_ensemble(make: Make) -> None:
    run = make({"belief": "Mixture", "marginal": None, "posterior": None})
    assert [plot.drawing.title for plot in [*run_calibration(run).plots, *run_entropy(run).plots]] == ["Ensemble"] * 2
    assert not posterior_section(run).shown


def test_entropies_are_of_right_and_wrong_predictions_and_out_of_distribution(make: Make) -> None:
    section = run_entropy(make())
    assert section.text == (
        "Entropy should be higher for wrong predictions and for out-of-distribution examples (letters) than for right "
        "ones. It reaches from 0 (certain) to 1.10 nats (a guess among 3 classes). Each row has its own scale."
    )
    for plot in section.plots:
        assert plot.caption.startswith("AUROC of entropy: wrong from right 0.")
        assert "letters from the test data 0." in plot.caption
    svg = section.plots[0].drawing.element("salt")
    assert [svg.count(f">{label}</text>") for label in ("right", "wrong", "letters", "50")] == [1, 1, 1, 1]


def test_a_group_without_predictions_has_no_histogram(make: Make) -> None:
    sure = Entropies(torch.tensor([0.1, 0.2, float("nan")]), torch.tensor([True] * 3), 3).to_json()
    scored = {"metrics": {"accuracy": 1.0}, "reliability": None, "entropy": sure}
    (plot,) = run_entropy(make({"point": scored, "marginal": None, "outside": None})).plots
    assert plot.caption == "Mean entropy 0.15 where right."
    assert "wrong" not in plot.drawing.element("salt")


def test_the_posterior_is_shown_by_parameter_and_by_example(make: Make) -> None:
    section = posterior_section(make({"posterior": posterior(3, of=40)}))
    assert section.text.startswith("The sign of 25% of 1,234 weights is known")
    assert [plot.drawing.title for plot in section.plots][2:] == ["Some weights"]
    assert section.plots[0].caption == "Left is more certain. The 3 largest of 40 parameters are shown."
    assert posterior_section(make()).plots[0].caption == "Left is more certain."


def test_clients_have_a_table_of_scores(make: Make) -> None:
    scores = [("Basel", 10, {"accuracy": 0.5}), ("Bern", None, {"nll": float("nan")})]
    clients = [{"name": name, "examples": size, "metrics": metrics} for name, size, metrics in scores]
    (table,) = run_clients(make({"clients": clients})).tables
    assert table.head == ["client", "test examples", "accuracy", "NLL"]
    assert texts(table) == [["Basel", "10", "0.5000", "–"], ["Bern", "–", "–", "–"]]
    assert not run_clients(make({"clients": []})).shown


def test_numbers_of_the_server_are_curves_or_facts(make: Make) -> None:
    run = make()
    for index, line in enumerate(run.rounds):
        line |= {"width": 100.0 + index, "members": 7.0, "word": "x", "audit": {"gap": 0.1}}
    section = server_section(run)
    assert [plot.drawing.title for plot in section.plots] == ["Width"]
    assert section.facts == [("Members", "7")]


def test_communication_has_traffic_rejected_updates_and_guards(make: Make) -> None:
    section = communication_section(make())
    assert section.plots[0].caption == "In total 4 MB to clients and 8 MB from clients."
    assert [texts(table) for table in section.tables] == [
        [["Basel", "not finite", "1 time", "2"]],
        [["precision floor", "6"]],
    ]


@pytest.mark.parametrize("classes", [2, 5])
def test_few_classes_are_bars_and_many_a_heat_map(make: Make, classes: int) -> None:
    section = data_section(make(clients=14, classes=classes))
    assert ("<image" in section.plots[0].drawing.element("salt")) == (classes > 4)
    assert len(section.legend) == (classes if classes <= 4 else 0)
    assert dict(section.facts)["Out of distribution"] == "letters"
    (sizes,) = data_section(make(label_counts=None)).plots
    assert sizes.caption == "A bar is a client; its height is the number of its examples."


@pytest.mark.parametrize("clients", [60, 61])
def test_more_clients_than_can_be_drawn_are_cut(make: Make, clients: int) -> None:
    (plot,) = data_section(make(clients=clients, classes=10)).plots
    assert ("The first 60 of 61 clients are drawn." in plot.caption) == (clients == 61)


def test_images_are_shown_beside_real_ones(make: Make) -> None:
    shades = torch.linspace(0, 1, 70).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    many, few = (image_samples(shades[:count], shades[:20]) for count in (70, 12))
    generated, real = sample_section(make({"samples": many})).pictures
    assert (generated.columns, generated.caption) == (["Generated"], "64 of 70 samples of the final generators.")
    assert generated.rows[0].cells[0].png == many["generated"]  # type: ignore[union-attr]
    assert real.rows[0].cells[0].png == many["real"]  # type: ignore[union-attr]
    generated, _ = sample_section(make({"samples": few})).pictures
    assert generated.caption == "12 samples of the final generators."


def test_points_are_shown_on_the_discriminators_map_and_over_real_ones(make: Make) -> None:
    made = torch.tensor([[1.0, 0.0], [1.0, 0.2], [5.0, 0.0]])  # at 3/4 to the right and 1/4 up; the last is outside
    samples = point_samples(made, torch.zeros(40, 2), LOWER, UPPER, torch.rand(60, 60))
    section = sample_section(make({"samples": samples}))
    (picture,), (plot,) = section.pictures, section.plots
    assert at(picture.rows[0].cells[0], 0.75, 0.25) == WHITE  # type: ignore[arg-type]
    counted = "3 samples of the final generators, 1 of them outside the picture"
    assert picture.caption == f"Brighter means a higher score: more like the data. Dots are {counted}."
    assert plot.caption == f"{counted}, over 40 real examples."
    assert [key.label for key in section.legend] == ["real", "generated"]
    assert sample_section(make({"samples": {**samples, "map": None}})).pictures == []


@pytest.mark.parametrize("samples", [None, {}, {"kind": "sounds"}])
def test_without_samples_there_is_no_section(make: Make, samples: Any) -> None:
    assert not sample_section(make({"samples": samples})).shown


def test_files_of_a_run_are_folded(make: Make, tmp_path: Path) -> None:
    make()
    (tmp_path / "config.toml").write_text("[data]")
    section = run_configuration(RunFiles.read(tmp_path))
    assert [name for name, _ in section.folded] == ["config.toml", "run.json", "Module"]
    assert "label_counts" not in section.folded[1][1]
    assert dict(section.facts) == {
        "Algorithm": "FedEP(infer=Identity(scale=0.05), damping=None)",
        "Task": "classification, 159,010 parameters",
        "Engine": "simulator: vectorised",
        "Time": "2 s, 0.5 s a round",
        "Traffic": "4 MB down, 8 MB up",
    }


# Comparisons


def row(method: str, metric: str, mean: Any, **rest: Any) -> dict[str, Any]:
    return {"method": method, "metric": metric, "mean": mean, "std": None, "n": 1, **rest}


def test_results_emphasise_the_best_in_the_direction_of_the_metric() -> None:
    rows = [
        row("A", "accuracy", 0.9, std=0.01, n=2, paper=0.925),
        row("B", "accuracy", 0.91, n=1),
        row("A", "nll", 0.5, n=2),
        row("B", "nll", 0.4, n=2),
        row("B", "nll (marginal)", 0.3, n=2),
        row("A", "width", 100, n=2),
    ]
    section = result_section(rows, ["A", "B"], "seeds")
    (table,) = section.tables
    assert table.head == ["method", "accuracy ↑", "paper", "NLL ↓", "width"]
    assert texts(table) == [
        ["A", "0.9000", "0.9250", "0.5000", "100"],
        ["B", "0.9100", "", "0.4000", "–"],
        ["B, marginal", "–", "–", "0.3000", "–"],
    ]
    assert best(section) == ["0.9100", "0.3000"]
    assert [line[1].spread for line in table.rows] == ["± 0.0100", "(1 of 2)", ""]
    assert table.caption == (
        "Mean ± sample standard deviation over 2 seeds. Bold: the best mean, in the direction of the arrow. Grey: the "
        "paper's figures. Click a heading to sort."
    )


def test_equal_means_are_equally_good_and_one_method_has_no_rival() -> None:
    rows = [row("A", "nll", 0.50001), row("B", "nll", 0.5)]
    assert best(result_section(rows, ["A", "B"], "seeds")) == ["0.5000", "0.5000"]
    assert best(result_section(rows[:1], ["A"], "seeds")) == []


def test_differences_have_intervals_and_significant_ones_are_bold() -> None:
    section = difference_section(PAIRED, ["FedAvg", "FedEP"])
    assert section.text.startswith("1 of 3 differences is significant: the 95 % interval excludes 0.")
    assert texts(section.tables[0]) == [
        ["FedEP", "FedAvg", "accuracy", "+0.0200", "+0.0100 to +0.0300", "< 0.001", "5"],
        ["FedEP", "FedAvg", "ECE", "+0.1000", "–", "–", "1"],
        ["FedEP", "FedAvg", "NLL, marginal", "−0.1000", "−0.3000 to +0.1000", "0.250", "5"],
    ]
    assert best(section) == ["+0.0200"]
    assert ">FedEP − FedAvg</text>" in section.plots[0].drawing.element("salt")
    few = difference_section([entry for entry in PAIRED if entry["metric"] == "ece"], ["FedAvg", "FedEP"])
    assert few.text.startswith("There are too few seeds for 95 % intervals.")


def test_tuning_lists_the_chosen_settings_and_all_trials() -> None:
    tried = [{"settings": {"train.lr": 0.1}, "score": 0.9}, {"settings": {"train.lr": 0.2}, "score": None}]
    entry = {"method": "FedEP", "trials": 2, "chosen": {"train.lr": 0.1}, "score": 0.9, "metric": "accuracy"}
    tuning = [{**entry, "all": tried}, {"method": "FedAvg", "trials": 1, "chosen": {}, "score": 0.8}]
    section = tuning_section(tuning)
    chosen, trials = (table for _, table in section.folded)
    assert isinstance(chosen, Table)
    assert isinstance(trials, Table)
    assert texts(chosen) == [
        ["FedEP", "train.lr = 0.1", "0.9000", "accuracy", "2"],
        ["FedAvg", "as configured", "0.8000", "", "1"],
    ]
    assert texts(trials) == [["1", "0.1", "0.9000"], ["2", "0.2", "–"]]
    assert best(section) == ["0.9000"]


def test_curves_and_diagrams_of_a_comparison_are_over_all_seeds(make: Make) -> None:
    runs = {"FedAvg": [make({"marginal": None})] * 2, "FedEP": [make()] * 2}
    section = comparison_curves(runs)
    assert section.text == (
        "Lines are means over seeds; bands reach from the lowest to the highest seed. Solid lines: point model. Dashed "
        "lines: posterior average."
    )
    assert [key.label for key in section.legend] == ["FedAvg", "FedEP"]
    captions = [plot.caption for plot in comparison_calibration(runs).plots]
    assert [caption.partition(".")[0] for caption in captions] == ["Point model", "Posterior average"]
    assert all("400 predictions" in caption for caption in captions)
    (table,) = comparison_entropy(runs).tables
    assert table.head == ["method", "right", "wrong", "wrong, AUROC ↑", "letters", "letters, AUROC ↑"]
    assert [line[0] for line in texts(table)] == ["FedAvg", "FedEP, marginal"]


def client_row(method: str, client: str, mean: float, std: float | None = None) -> dict[str, Any]:
    return {"method": method, "client": client, "metric": "accuracy", "mean": mean, "std": std}


def test_scores_at_each_client_are_drawn_and_listed() -> None:
    rows = [client_row("A", "x", 0.9, 0.01), client_row("A", "y", 0.7), client_row("B", "x", 0.8)]
    section = comparison_clients(rows, ["A", "B"])
    (_, table), (plot,) = *section.folded, section.plots
    assert isinstance(table, Table)
    assert texts(table) == [["x", "0.9000", "0.8000"], ["y", "0.7000", "–"]]
    assert plot.caption == (
        "More is better. A row is a client, a dot a method. Bars are ± one standard deviation over seeds."
    )


def test_fairness_is_within_seeds_and_then_averaged_over_them(make: Make) -> None:
    def run(values: list[float]) -> RunFiles:
        scores = [{"name": str(i), "metrics": {"accuracy": value, "nll": value}} for i, value in enumerate(values)]
        return make({"clients": scores})

    group = [run([0.0, 1.0, 0.5]), run([0.4, 0.4, 0.4])]
    section = fairness_section({"FedAvg": group, "FedEP": group}, [], ["FedAvg", "FedEP"])
    (accuracy,), ((_, nll),) = section.tables, section.folded
    assert isinstance(nll, Table)
    assert texts(accuracy)[0] == ["FedAvg", "0.200", "0.250", "0.450", "0.700", "0.250"]
    assert texts(nll)[0] == ["FedAvg", "0.700", "0.650", "0.450", "0.200", "0.250"]  # less is better
    assert (accuracy.head[2], nll.head[2]) == ("10th percentile", "90th percentile")
    assert best(section) == []  # the methods are equal


def test_without_runs_fairness_is_of_the_clients_means() -> None:
    means = {"A": [0.9, 0.7], "B": [0.8, 0.8]}
    rows = [client_row(m, client, mean) for m, both in means.items() for client, mean in zip("xy", both, strict=True)]
    section = fairness_section({}, rows, ["A", "B"])
    assert [line[:2] for line in texts(section.tables[0])] == [["A", "0.700"], ["B", "0.800"]]
    assert best(section) == ["0.900", "0.800", "0.800", "0.000"]
    assert not fairness_section({}, rows[:1], ["A"]).shown  # one client has no one to be compared with


def test_the_settings_of_each_method_are_listed(make: Make) -> None:
    switch = {"name": "Switch", "first": {"name": "FedAvg"}, "then": FEDEP, "at": 2}
    section = comparison_configuration({"FedAvg": [make(algorithm=switch)], "FedEP": [make()]})
    facts = dict(section.facts)
    assert facts["FedEP"] == "FedEP(infer=Identity(scale=0.05), damping=None)"
    assert facts["FedAvg, to round 2"] == "FedAvg()"
    assert facts["Rounds"] == "4"


def test_prediction_sets_have_a_section_and_are_not_among_the_scores_of_clients(make: Make) -> None:
    sets = {"coverage": 0.9, "naive_coverage": 0.8, "set_size": 1.2, "naive_set_size": 1.1}
    clients = [
        {"name": "Basel", "examples": 10, "metrics": {"accuracy": 0.5, **sets}, "intervals": {"coverage": [0.6, 0.98]}}
    ]
    run = make({"marginal": {"metrics": {"accuracy": 0.5, **sets}}, "clients": clients})
    section = run_sets(run)
    assert "with probability 90% at least" in section.text
    (table,) = section.tables
    assert table.head == ["client", "test examples", "coverage", "naive coverage", "set size", "naive set size"]
    assert [[cell.text for cell in row] for row in table.rows][1] == ["Basel", "10", "0.900", "0.800", "1.200", "1.100"]
    assert table.rows[1][2].spread == "[0.600, 0.980]"
    assert run_clients(run).tables[0].head == ["client", "test examples", "accuracy"]
    assert not run_sets(make({"clients": clients[:0]})).shown


def test_a_score_of_a_client_has_its_interval_and_its_majority_baseline(make: Make) -> None:
    clients = [
        {
            "name": "Basel",
            "examples": 10,
            "majority": 0.6,
            "metrics": {"auroc": 0.7},
            "intervals": {"auroc": [0.4, 0.9]},
        },
        {"name": "Chur", "examples": 2, "majority": 1.0, "metrics": {"auroc": float("nan")}, "intervals": {}},
    ]
    (table,) = run_clients(make({"clients": clients, "level": 0.95})).tables
    assert table.head == ["client", "test examples", "majority", "AUROC"]
    assert [(row[2].text, row[3].text, row[3].spread) for row in table.rows] == [
        ("0.600", "0.700", "[0.400, 0.900]"),
        ("1.000", "–", ""),
    ]
    assert "95% confidence intervals" in table.caption


# Clinical studies


def about(of: str, *means: float) -> dict[str, Any]:
    return {"of": of, "mean": list(means), "sd": [0.1] * len(means)}


def table_of(*beliefs: dict[str, Any], ratio: str = "hazard ratio") -> dict[str, Any]:
    return {"coefficients": {"names": ["age", "dose"], "ratio": ratio, "beliefs": list(beliefs)}}


def test_coefficients_of_all_clients_stand_beside_those_of_a_new_one_and_the_range_of_clients(make: Make) -> None:
    beliefs = [
        about("all clients", 0.0, 1.0),
        about("a new client", 0.0, 1.0),
        about("a", -0.1, 1.0),
        about("b", 0.1, 1.0),
    ]
    section = coefficient_section(make(table_of(*beliefs)))
    assert list(section.tables[0].head) == [
        "covariate", "hazard ratio", "95% interval", "P(sign)", "interval of a new client", "estimates of clients",
    ]  # fmt: skip
    assert texts(section.tables[0])[0] == [
        "age", "1.000", "0.822 to 1.217", "0.500", "0.822 to 1.217", "0.905 to 1.105",
    ]  # fmt: skip
    assert [key.label for key in section.legend] == ["all clients", "a", "b"]
    ((title, own),) = section.folded
    assert title == "Coefficients of each client"
    assert isinstance(own, Table)
    assert [row[:2] for row in texts(own)] == [["a", "age"], ["a", "dose"], ["b", "age"], ["b", "dose"]]


def test_differences_over_splits_say_in_how_many_a_method_was_better() -> None:
    entry = {"method": "FedEP", "versus": "alone", "client": "Chur", "metric": "nll", "difference": -0.1}
    over = entry | {"low": -0.2, "high": 0.0, "better": 2, "n": 3}
    section = local_section([over], ["alone", "FedEP"])
    assert section.title == "Differences to alone at each client"
    assert "random splits" in section.text
    assert section.tables[0].rows[0][1].spread == "[−0.200, 0.000] better in 2 of 3"
    assert "bootstrap" in local_section([entry], ["FedEP"]).text


def test_coefficients_of_tables_name_the_difference_that_they_are_for(make: Make) -> None:
    content = table_of(about("all clients", 0.0, 1.0))
    content["coefficients"]["per"] = [10.0, 0.0]
    section = coefficient_section(make(content))
    assert [row[0] for row in texts(section.tables[0])] == ["age (per 10)", "dose"]
    assert "A number is compared over the difference in brackets" in section.text
    assert section.plots[0].whole  # also on a phone


def test_of_many_clients_only_the_common_coefficients_have_colours(make: Make) -> None:
    beliefs = [about("all clients", 0.0, 1.0), about("a new client", 0.0, 1.0)]
    beliefs += [about(f"site {k}", 0.1 * k, 1.0) for k in range(9)]
    section = coefficient_section(make(table_of(*beliefs)))
    assert [key.label for key in section.legend] == ["all clients", "a new client"]
    assert "pale dots" in section.plots[0].caption


def test_effects_are_shown_as_they_are_and_a_shared_model_has_no_legend(make: Make) -> None:
    section = coefficient_section(make(table_of(about("all clients", 0.0, 1.0), ratio="")))
    assert list(section.tables[0].head) == ["covariate", "coefficient", "95% interval", "P(sign)"]
    assert not section.legend
    assert "same side of 0" in section.text


def test_survival_curves_have_a_legend_and_their_level(make: Make) -> None:
    curve = {"name": "median risk", "mean": [1.0, 0.5], "lower": [1.0, 0.4], "upper": [1.0, 0.6]}
    section = survival_section(make({"survival": {"times": [0.0, 9.0], "level": 0.9, "curves": [curve]}}))
    assert [key.label for key in section.legend] == ["median risk"]
    assert "probability of 90%" in section.text


def test_a_run_without_coefficients_and_survival_shows_neither(make: Make) -> None:
    assert not coefficient_section(make()).shown
    assert not survival_section(make()).shown


def test_transcripts_stand_beside_what_was_said_with_their_confidence(make: Make) -> None:
    read = {"row": 3, "speaker": "ann", "reference": "GO ON", "hypothesis": "", "confidence": 0.256, "errors": 2}
    (table,) = transcript_section(make({"transcripts": [read]})).tables
    assert list(table.head) == ["speaker", "reference", "hypothesis", "confidence", "wrong words"]
    assert texts(table) == [["ann", "GO ON", "–", "0.26", "2"]]
    (table,) = transcript_section(make({"transcripts": [{**read, "speaker": ""}]})).tables
    assert (table.head[0], texts(table)[0][0]) == ("utterance", "3")


def test_without_transcripts_there_is_no_section(make: Make) -> None:
    assert not transcript_section(make()).shown
