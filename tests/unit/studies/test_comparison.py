"""Tables of methods × metrics, and warm starts that methods share."""

import io
import json
import math

import pytest
from rich.console import Console
from scipy import stats

import consilience as cs
from consilience.core.errors import CheckpointError, ConfigError
from consilience.report import write_report
from consilience.runs import progress
from consilience.runs.progress import Bar, Runs
from consilience.studies.compare import compare
from consilience.studies.comparison import Comparison, Row
from consilience.studies.scores import costs, paired_test
from consilience.studies.setting import Setting
from support.scenarios import NAMES, blobs, linear
from support.sealed import lines

TRAIN = cs.SGD(lr=0.1)
ENGINE = cs.Simulator(device="cpu", chunk=6, workers=1)
OPTIONS = {"rounds": 3, "cohort": 4, "engine": ENGINE, "progress": False}


def shown(comparison, width=120):
    console = Console(width=width, record=True, file=None)
    with console.capture() as captured:
        for table in comparison.tables(width):
            console.print(table)
    return captured.get()


@pytest.mark.parametrize("width", [40, 200])
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
    methods = {
        "FedAvg": cs.Switch(first, first, at=2),
        "FedEP": cs.Switch(first, cs.FedEP(cs.inference.Identity(TRAIN)), at=2),
    }
    compare(methods, Setting(task, train, test), seeds=1, out=tmp_path, **OPTIONS)
    (warm,) = (tmp_path / "warm starts").iterdir()
    assert len((warm / "seed-0" / "metrics.jsonl").read_text().splitlines()) == 2
    found = {name: lines(tmp_path / name / "seed-0") for name in methods}
    assert [line["round"] for line in found["FedEP"]] == [1, 2, 3]
    assert found["FedAvg"][:2] == found["FedEP"][:2]
    whole = cs.fit(methods["FedEP"], task, train, test=test, **OPTIONS)
    assert found["FedEP"][-1]["eval"] == whole.history[-1]["eval"]


def test_a_comparison_with_warm_starts_goes_on_where_it_stopped(tmp_path):
    task, train, test = blobs()
    methods = [cs.Switch(cs.FedAvg(TRAIN), cs.algorithms.FedSEP(cs.inference.Identity(TRAIN)), at=2)]
    whole = compare(methods, Setting(task, train, test), seeds=1, out=tmp_path, **OPTIONS)
    again = compare(methods, Setting(task, train, test), seeds=1, out=tmp_path, resume=True, **OPTIONS)
    assert [(row.metric, row.mean) for row in again.rows] == [(row.metric, row.mean) for row in whole.rows]


def test_seeds_are_as_many_or_named():
    methods, named = [cs.FedAvg(TRAIN), cs.FedProx(TRAIN)], range(1, 3)
    many, few = (compare(methods, lambda s: Setting(*blobs(seed=s)), seeds=seeds, **OPTIONS) for seeds in (3, named))
    values = {(entry["method"], entry["metric"]): entry["values"] for entry in many.scores}
    for entry in few.scores:
        if entry["metric"] != "seconds":
            assert entry["values"] == values[entry["method"], entry["metric"]][1:]
    assert {entry["n"] for entry in few.paired} == {2}


def test_methods_are_tuned_on_the_first_seed(tmp_path):
    seen = []
    setting = lambda seed: seen.append(seed) or Setting(*blobs(seed=seed))  # noqa: E731
    compare([cs.FedAvg(TRAIN)], setting, seeds=[5, 2], tune=2, out=tmp_path, **OPTIONS)
    assert seen == [5, 2]
    facts = json.loads((tmp_path / "tuning" / "FedAvg" / "trial-1" / "run.json").read_text())
    assert facts["seed"] == 5


REFUSED = {
    "no method": ({"algorithms": []}, "nothing to compare: pass at least one method"),
    "no seed": ({"seeds": 0}, "seeds must be a number of at least 1, or a list of different seeds, got 0"),
    "a seed twice": ({"seeds": [1, 1]}, r"a list of different seeds, got \[1, 1\]"),
    "a score to tune by, and no tuning": ({"select": "nll"}, "select is the score to tune by: pass tune= as well"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_compared_gets_a_sentence_and_nothing_is_run(tmp_path, what):
    change, sentence = REFUSED[what]
    given = {"algorithms": [cs.FedAvg(TRAIN)], "setting": Setting(*blobs()), "out": tmp_path / "out", **OPTIONS}
    with pytest.raises(ConfigError, match=sentence):
        compare(**{**given, **change})
    assert not (tmp_path / "out").exists()


def test_a_setting_without_test_data_is_refused():
    task, train, _ = blobs()
    with pytest.raises(ConfigError, match="scores on test data: give the setting some as test="):
        Setting(task, train, None)


def test_a_comparison_does_not_go_into_a_runs_directory(tmp_path):
    task, train, test = blobs()
    cs.fit(cs.FedAvg(TRAIN), task, train, out=tmp_path, **OPTIONS)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for resume in (False, True):
        with pytest.raises(CheckpointError, match="holds a run: choose another directory for the comparison"):
            compare([cs.FedAvg(TRAIN)], Setting(task, train, test), seeds=1, out=tmp_path, resume=resume, **OPTIONS)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


# Paired differences


def test_paired_differences_are_those_of_the_t_test(tmp_path):
    methods = {
        "FedAvg": cs.FedAvg(TRAIN),
        "FedProx": cs.FedProx(TRAIN, mu=1.0),
        "FedEP": cs.FedEP(cs.inference.Identity(TRAIN)),
    }
    result = compare(methods, lambda seed: Setting(*blobs(seed=seed)), seeds=3, out=tmp_path, **OPTIONS)
    values = {(entry["method"], entry["metric"]): entry["values"] for entry in result.scores}
    assert len(values["FedEP", "nll (marginal)"]) == 3
    asked = {(entry["method"], entry["metric"]) for entry in result.paired}
    assert asked == {
        (method, metric) for method in ("FedProx", "FedEP") for metric in ("accuracy", "nll", "ece", "brier")
    }
    for entry in result.paired:
        assert set(entry) == {"method", "versus", "metric", "difference", "t", "low", "high", "p", "n"}
        assert (entry["versus"], entry["n"]) == ("FedAvg", 3)
        a, b = values[entry["method"], entry["metric"]], values["FedAvg", entry["metric"]]
        differences = [x - y for x, y in zip(a, b, strict=True)]
        mean = sum(differences) / 3
        assert entry["difference"] == pytest.approx(mean, abs=1e-12)
        if len(set(differences)) == 1:
            assert entry["p"] is None
            continue
        error = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2 / 3)
        reach = stats.t.ppf(0.975, 2) * error
        assert (entry["low"], entry["high"]) == (pytest.approx(mean - reach), pytest.approx(mean + reach))
        assert entry["p"] == pytest.approx(2 * stats.t.sf(abs(mean / error), 2))
    assert any(entry["p"] is not None for entry in result.paired)
    saved = json.loads((tmp_path / "comparison.json").read_text())
    assert (saved["paired"], saved["scores"], saved["tuning"]) == (result.paired, result.scores, [])


@pytest.mark.parametrize("pairs", [[(1.0, 0.5)], [(1.0, 0.5), (1.0, 0.25)], [(0.3, 0.2), (0.4, 0.3), (0.5, 0.4)]])
def test_two_seeds_or_differences_without_variance_have_no_test(pairs):
    found = paired_test(pairs)
    assert found["difference"] == pytest.approx(sum(a - b for a, b in pairs) / len(pairs))
    assert (found["low"], found["high"], found["p"], found["n"]) == (None, None, None, len(pairs))


def test_overlapping_splits_widen_the_interval_as_nadeau_and_bengio_compute_it():
    pairs = [(0.50, 0.49), (0.60, 0.56), (0.40, 0.39), (0.55, 0.49)]  # differences .01 .04 .01 .06: mean .03, s² .0006
    t = 0.03 / math.sqrt(0.0006 * (1 / 4 + 1 / 3))
    found = paired_test(pairs, overlap=1 / 3)
    assert found["t"] == pytest.approx(t)
    assert found["high"] == pytest.approx(0.03 * (1 + 3.182446 / t))
    assert paired_test(pairs)["p"] == pytest.approx(stats.ttest_1samp([0.01, 0.04, 0.01, 0.06], 0).pvalue)


def test_seeds_where_one_of_the_two_has_no_score_are_left_out():
    scores = {("A", 0): 0.5, ("A", 1): 0.6, ("A", 2): math.nan, ("B", 1): 0.7, ("B", 2): 0.9}

    def measure(run, at):
        key = (type(run.algorithm).__name__[-1], len(seen) // 2)
        seen.append(key)
        return {"own f1": scores[key]} if key in scores else {}

    class A(cs.FedAvg):
        pass

    class B(cs.FedAvg):
        pass

    seen = []
    options = {**OPTIONS, "rounds": 1}
    result = compare([A(TRAIN), B(TRAIN)], Setting(*blobs()), seeds=3, measure=measure, **options)
    (entry,) = [entry for entry in result.paired if entry["metric"] == "own f1"]
    assert (entry["method"], entry["versus"], entry["n"]) == ("B", "A", 1)
    assert entry["difference"] == pytest.approx(0.1)
    (listed,) = [e["values"] for e in result.scores if (e["method"], e["metric"]) == ("B", "own f1")]
    assert listed == [None, 0.7, 0.9]


# Costs and targets


def test_every_comparison_says_what_its_runs_cost(tmp_path):
    result = compare([cs.FedAvg(TRAIN)], Setting(*blobs()), seeds=2, out=tmp_path, **OPTIONS)
    rows = {row.metric: row for row in result.rows}
    seconds, sent = [], []
    for seed in range(2):
        text = (tmp_path / "FedAvg" / f"seed-{seed}" / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        seconds.append(sum(line["seconds"] for line in lines))
        sent.append(sum(line["bytes_up"] + line["bytes_down"] for line in lines) / 1e6)
    assert rows["seconds"].mean == pytest.approx(sum(seconds) / 2)
    assert rows["MB sent"].mean == pytest.approx(sum(sent) / 2)
    assert sum(sent) > 0
    assert list(rows)[-2:] == ["seconds", "MB sent"]
    assert not [entry for entry in result.paired if entry["metric"] in ("seconds", "MB sent")]


def test_a_measure_of_ones_own_goes_before_the_usual_cost():
    result = compare(
        [cs.FedAvg(TRAIN)], Setting(*blobs()), seeds=1, measure=lambda run, at: {"seconds": 42.0}, **OPTIONS
    )
    assert [row.mean for row in result.rows if row.metric == "seconds"] == [42.0]


def test_rounds_to_a_target_are_those_of_the_learning_curve(tmp_path):
    options = {**OPTIONS, "rounds": 6, "evaluate_every": 1}
    result = compare(
        {"FedAvg": cs.FedAvg(cs.SGD(lr=0.3)), "idle": cs.FedAvg(cs.SGD(lr=1e-9))},
        Setting(*blobs()), seeds=1, target=0.8, out=tmp_path, **options,
    )  # fmt: skip
    text = (tmp_path / "FedAvg" / "seed-0" / "metrics.jsonl").read_text()
    curve = [json.loads(line)["eval"]["accuracy"] for line in text.splitlines()]
    (row,) = [row for row in result.rows if row.metric == "rounds to 0.8"]
    assert (row.method, row.mean, row.n) == ("FedAvg", 1 + [value >= 0.8 for value in curve].index(True), 1)


def test_a_regressions_target_is_of_the_score_that_rises():
    task, federation = linear()
    options = {**OPTIONS, "rounds": 2, "evaluate_every": 1}
    methods = [cs.FedAvg(TRAIN)]
    result = compare(methods, Setting(task, federation, federation), seeds=1, target=-1e6, **options)
    assert [row.mean for row in result.rows if row.metric.startswith("rounds to")] == [1.0]


def test_a_target_where_nothing_rises_is_refused():
    task, train, test = blobs()
    result = cs.fit(cs.FedAvg(TRAIN), task, train, test=test, **OPTIONS)
    for line in result.history:
        line["eval"] = {"nll": 1.0}
    with pytest.raises(ConfigError, match="target needs a score for which higher is better, and there is none: nll"):
        costs(result, target=0.5)


def test_two_methods_of_one_name_are_refused_rather_than_one_forgotten() -> None:
    task, federation = linear()
    setting = Setting(task, federation, federation)
    methods = [cs.FedAvg(TRAIN), cs.FedAvg(TRAIN, server=cs.server.Adam())]
    with pytest.raises(ConfigError, match="two methods are called 'FedAvg': pass a mapping"):
        compare(methods, setting, seeds=1, rounds=1, engine=ENGINE)
    labelled = dict(zip(["FedAvg", "FedAdam"], methods, strict=True))
    result = compare(labelled, setting, seeds=1, rounds=1, engine=ENGINE, progress=False)
    assert {row.method for row in result.rows} == {"FedAvg", "FedAdam"}


def test_every_seed_has_its_own_setting_and_all_methods_share_it() -> None:
    asked: list[int] = []

    def setting(seed: int) -> Setting:
        asked.append(seed)
        task, federation = linear(seed=seed)
        return Setting(task, federation, federation)

    methods = {"one": cs.FedAvg(TRAIN), "same": cs.FedAvg(TRAIN)}
    result = compare(methods, setting, seeds=3, rounds=1, engine=ENGINE, progress=False)
    assert asked == [0, 1, 2]
    scores = {(row.method, row.metric): (row.mean, row.std) for row in result.rows}
    assert scores["one", "mse"] == scores["same", "mse"]
    assert scores["one", "mse"][1] > 0
    by_client = {(entry["method"], entry["client"]) for entry in result.per_client}
    assert by_client == {(method, client) for method in methods for client in NAMES}


# Progress


@pytest.fixture
def terminal(monkeypatch):
    written = io.StringIO()

    def console(**_):
        return Console(file=written, force_terminal=True, width=120, legacy_windows=False)

    monkeypatch.setattr(progress, "Console", console)
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    return written


def test_all_runs_and_the_present_ones_rounds_are_shown_together(terminal):
    options = {**OPTIONS, "progress": True}
    compare({"a[b]": cs.FedAvg(TRAIN)}, Setting(*blobs()), seeds=2, tune=2, **options)
    text = terminal.getvalue()
    for part in ("tuning a[b], trial 2 of 2", "a[b], seed 1", "all runs", "0/4", "3/4", "4/4", "FedAvg", "clients/s"):
        assert part in text
    assert Runs._present.get() is None


def test_a_run_by_itself_has_its_own_bar(terminal):
    with Bar("FedAvg", 3, shown=True) as bar:
        bar.update({"round": 2, "clients": 4, "seconds": 2.0, "loss": 0.5})
    assert "loss 0.5000 · 2 clients/s" in terminal.getvalue()
    assert "all runs" not in terminal.getvalue()


@pytest.mark.parametrize("shown", [True, False])
def test_nothing_is_shown_where_nobody_looks(shown, capfd):
    options = {**OPTIONS, "progress": shown}
    compare([cs.FedAvg(TRAIN)], Setting(*blobs()), seeds=1, **options)
    assert capfd.readouterr() == ("", "")


def test_the_display_is_closed_when_a_run_fails(terminal):
    with pytest.raises(ConfigError):
        compare([cs.FedAvg(TRAIN)], Setting(*blobs()), seeds=1, **{**OPTIONS, "cohort": 99, "progress": True})
    assert Runs._present.get() is None


def two_classes():
    task, train, test = blobs(clients=3, each=60)
    return Setting(task, train, test)


@pytest.mark.slow
def test_differences_to_local_only_have_an_interval_at_each_client(tmp_path):
    methods = {"FedAvg": cs.FedAvg(TRAIN), "Alone": cs.LocalOnly(TRAIN)}
    options = {**OPTIONS, "cohort": 3, "intervals": 0.9, "rounds": 5}
    result = compare(methods, two_classes(), seeds=2, out=tmp_path, **options)
    found = {(entry["client"], entry["metric"]): entry for entry in result.at_clients}
    assert {client for client, _ in found} == {"0", "1", "2"}
    means = {(row["method"], row["client"], row["metric"]): row["mean"] for row in result.per_client}
    for (client, metric), entry in found.items():
        assert (entry["method"], entry["versus"]) == ("FedAvg", "Alone")
        assert entry["difference"] == pytest.approx(means["FedAvg", client, metric] - means["Alone", client, metric])
    entry = found["0", "nll"]
    assert entry["low"] < entry["difference"] < entry["high"]
    assert "Differences to Alone at each client" in write_report(tmp_path).read_text()


def test_without_intervals_or_local_only_there_are_no_such_differences():
    options = {**OPTIONS, "cohort": 3}
    assert not compare([cs.FedAvg(TRAIN), cs.LocalOnly(TRAIN)], two_classes(), seeds=1, **options).at_clients
    assert not compare([cs.FedAvg(TRAIN)], two_classes(), seeds=1, intervals=0.9, **options).at_clients


def test_pooled_is_called_a_bound_only_if_it_stops_early_or_is_tuned(caplog):
    options = {**OPTIONS, "cohort": 1}
    compare([cs.Pooled(TRAIN)], two_classes(), seeds=1, **options)
    assert "Pooled bounds the other methods only if it is tuned or stops early" in caplog.text
    caplog.clear()
    compare([cs.Pooled(TRAIN)], two_classes(), seeds=1, validation=0.2, **options)
    assert not caplog.records


def test_methods_stop_by_the_same_validation_examples(tmp_path):
    options = {**OPTIONS, "cohort": None, "rounds": 6, "validation": 0.2, "patience": 2, "evaluate_every": 1}
    switch = cs.Switch(cs.FedAvg(TRAIN), cs.FedProx(TRAIN), at=2)
    result = compare([cs.Pooled(TRAIN), cs.LocalOnly(TRAIN), switch], two_classes(), seeds=1, out=tmp_path, **options)
    facts = [json.loads((tmp_path / run["directory"] / "run.json").read_text()) for run in result.runs]
    assert len({json.dumps(one["identity"]["validation"]) for one in facts}) == 1
