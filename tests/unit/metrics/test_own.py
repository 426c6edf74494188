"""Metrics of the user's own: in runs, evaluations, comparisons and reports."""

import json

import pytest
import torch

import consilience as cs
from consilience.core.errors import ConfigError, TaskError
from consilience.metrics import as_metrics, direction, directions
from consilience.report.sections.results import result_section
from consilience.runs.stored import RunFiles
from support.scenarios import blobs


def surprise(p, y):
    return (-p.gather(1, y[:, None]).log()).max()


def right(p, y):
    return (p.argmax(1) == y).double().mean()


OWN = [cs.Metric("hits", right, higher_is_better=True), cs.Metric("surprise", surprise, higher_is_better=False)]
TRAIN = cs.SGD(lr=0.1, epochs=1, batch_size=10)


@pytest.mark.slow
def test_a_run_has_own_metrics_beside_the_usual_ones_and_stores_their_directions(tmp_path) -> None:
    task, train, test = blobs()
    run = cs.fit(cs.FedAvg(train=TRAIN), task, train, rounds=2, test=test, out=tmp_path, metrics=OWN, progress=False)
    scores = run.history[-1]["eval"]
    assert scores["hits"] == scores["accuracy"]
    assert scores["surprise"] >= scores["nll"]
    assert all(client["metrics"]["hits"] == client["metrics"]["accuracy"] for client in run.evaluation.clients)
    assert json.loads((tmp_path / "run.json").read_text())["metrics"] == {"hits": 1, "surprise": -1}
    assert RunFiles.read(tmp_path).directions == run.files(True).directions == {"hits": 1, "surprise": -1}
    page = cs.write_report(tmp_path).read_text()
    assert "surprise" in page
    stored = cs.load_run(tmp_path)
    assert stored.evaluate(task, test, metrics=OWN).point == pytest.approx(run.evaluation.point)
    assert set(run.evaluate(test, metrics={"mine": right}).point) == {"accuracy", "nll", "ece", "brier", "mine"}
    assert set(run.evaluate(test, metrics={}).point) == {"accuracy", "nll", "ece", "brier"}


def test_posterior_averages_have_own_metrics_too() -> None:
    task, train, test = blobs()
    method = cs.FedEP(cs.inference.Identity(train=TRAIN))
    run = cs.fit(method, task, train, rounds=1, test=test, metrics={"hits": right}, progress=False)
    assert run.evaluation.marginal["hits"] == run.evaluation.marginal["accuracy"]


def test_a_direction_is_the_users_or_that_of_the_name() -> None:
    metrics = as_metrics({"error rate": right, "hits": right})
    assert directions([*metrics, *OWN[1:]]) == {"error rate": -1, "hits": 0, "surprise": -1}
    assert direction("surprise (marginal)", {"surprise": -1}) == -1
    assert direction("accuracy", {"accuracy": -1}) == -1


@pytest.mark.slow
def test_comparisons_highlight_and_pair_own_metrics_by_their_direction(tmp_path) -> None:
    task, train, test = blobs()
    slow = cs.FedAvg(train=cs.SGD(lr=0.001, epochs=1, batch_size=10))
    methods = {"fast": cs.FedAvg(train=TRAIN), "slow": slow}
    setting = cs.studies.Setting(task, train, test)
    found = cs.compare(methods, setting, rounds=3, seeds=2, out=tmp_path, metrics=OWN, progress=False)
    assert {entry["metric"] for entry in found.paired} >= {"hits", "surprise"}
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert content["directions"] == {"hits": 1, "surprise": -1}
    assert "surprise ↓" in cs.write_report(tmp_path).read_text()
    table = result_section(content["rows"], ["fast", "slow"], "seeds", content["directions"]).tables[0]
    column = list(table.head).index("surprise ↓")
    means = {row.method: row.mean for row in found.rows if row.metric == "surprise"}
    bold = {row[0].text: row[column].best for row in table.rows}
    assert bold == {method: mean == min(means.values()) for method, mean in means.items()}


def test_tuning_selects_by_an_own_metric() -> None:
    task, train, test = blobs()
    setting = cs.studies.Setting(task, train, test)
    tuned = cs.tune(
        {"FedAvg": cs.FedAvg(train=TRAIN)}, setting, trials=3, rounds=1, select="surprise", metrics=OWN, progress=False
    )
    scores = [trial["score"] for trial in tuned.tuning[0]["all"]]
    assert tuned.tuning[0]["score"] == min(scores)


def evaluate(metrics):
    task, train, test = blobs()
    run = cs.fit(cs.FedAvg(train=TRAIN), task, train, rounds=1, progress=False)
    return run.evaluate(test, metrics=metrics)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda p, y: 1 / 0, "the metric 'mine' failed with ZeroDivisionError"),
        (lambda p, y: p, "the metric 'mine' must return one number, and it returned Tensor of shape"),
        (lambda p, y: None, "the metric 'mine' must return one number, and it returned NoneType"),
        (lambda p, y: "high", "the metric 'mine' must return one number, and it returned str"),
    ],
)
def test_a_metric_that_fails_is_named(fn, words) -> None:
    with pytest.raises(TaskError) as error:
        evaluate({"mine": fn})
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"mine": 3}, "must be a function of"),
        ([right], "metrics must map names to functions, or be a list of cs.Metric"),
        ("accuracy", "metrics must map names to functions"),
        ([OWN[0], OWN[0]], "two metrics have one name"),
        ({"": right}, "a metric needs a name"),
    ],
)
def test_other_metrics_are_refused(metrics, words) -> None:
    with pytest.raises(ConfigError, match=words):
        as_metrics(metrics)


def test_fit_refuses_them_before_anything_is_written(tmp_path) -> None:
    task, train, test = blobs()
    with pytest.raises(ConfigError, match="metrics"):
        cs.fit(cs.FedAvg(), task, train, rounds=1, test=test, out=tmp_path / "run", metrics=[right], progress=False)
    assert not (tmp_path / "run").exists()


def test_generators_have_judges_and_no_own_metrics() -> None:
    pair = cs.models.mlp_gan((2,), latent=3, hidden=(4,))
    task = cs.Adversarial(pair.generator, pair.discriminator, latent=3)
    with pytest.raises(TaskError, match="give the task judges instead"):
        cs.evaluate(task, cs.Point(task.initial()), cs.Dataset(torch.randn(4, 2), torch.zeros(4).long()), metrics=OWN)
