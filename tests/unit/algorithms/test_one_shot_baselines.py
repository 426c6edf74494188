"""Ensembles, downpour SGD and distillation; what one-shot methods refuse; and how configs and the command know them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tomli_w
import torch
from torch import nn

import consilience as cs
from consilience import cli
from consilience.config import read_config
from consilience.core.errors import ConfigError, DataError, TaskError
from consilience.metrics import entropy
from consilience.report import write_report
from support.one_shot import ENGINE, MANY, STILL, TRAIN, learn
from support.scenarios import blobs, gradient, linear

# Ensembles


def test_an_ensemble_predicts_the_mean_of_its_members_probabilities():
    task, train, test = blobs()
    run, x = learn(cs.algorithms.Ensemble(TRAIN), task, train), test.data.x.double()
    assert run.server.theta.shape == (6, task.size)
    total = sum(run.task.predict(theta, x) for theta in run.server.theta)
    torch.testing.assert_close(run.predict(x), total / 6)
    right = (total.argmax(1) == test.data.y).double().mean()
    assert run.evaluate(test.data).point["accuracy"] == pytest.approx(float(right))
    assert len(run.evaluate(test).clients) == 6


def test_by_class_members_count_by_their_share_of_the_class():
    task, train, test = blobs()
    run, x = learn(cs.algorithms.Ensemble(TRAIN, by_class=True), task, train), test.data.x.double()
    plain = learn(cs.algorithms.Ensemble(TRAIN), task, train)
    assert torch.equal(run.server.theta, plain.server.theta)
    counts = torch.zeros(6, 3, dtype=torch.float64)
    for client in range(6):
        for label in train.data.y[train.indices(client)].tolist():
            counts[client, label] += 1
    expected = torch.zeros(len(x), 3, dtype=torch.float64)
    for client, theta in enumerate(run.server.theta):
        for c in range(3):
            expected[:, c] += counts[client, c] / counts[:, c].sum() * run.task.predict(theta, x)[:, c]
    torch.testing.assert_close(run.predict(x), expected / expected.sum(1, keepdim=True))
    torch.testing.assert_close(run.posterior.weights.sum(0), torch.ones(3).double())
    torch.testing.assert_close(plain.posterior.weights.sum(0), torch.ones(1).double())
    assert not torch.allclose(run.predict(x), plain.predict(x), atol=0.01)


def test_a_class_that_nobody_has_is_everybodys():
    task, train, _ = blobs(clients=4)
    few = replace(train, data=replace(train.data, y=train.data.y.clamp_max(1)))
    weights = learn(cs.algorithms.Ensemble(TRAIN, by_class=True), task, few).posterior.weights
    torch.testing.assert_close(weights[:, 2], torch.full((4,), 0.25).double())


def test_only_those_who_have_taken_part_are_members():
    task, train, test = blobs()
    run = learn(cs.algorithms.Ensemble(TRAIN), task, train, cohort=2)
    assert len(run.posterior.theta) == 2
    later = learn(cs.algorithms.Ensemble(TRAIN), task, train, rounds=3, cohort=2)
    assert 2 < len(later.posterior.theta) <= 6
    assert torch.equal(later.posterior.theta, later.server.theta[later.server.known[:, 0] > 0])
    assert run.predict(test.data.x.double()).shape == (len(test.data), 3)


def test_doubt_of_an_ensemble_is_how_much_its_members_disagree():
    task, train, test = blobs()
    for method in (cs.algorithms.Ensemble(TRAIN), cs.algorithms.Ensemble(TRAIN, by_class=True)):
        run, x = learn(method, task, train), test.data.x.double()
        found = run.uncertainty(test.data)
        each = torch.stack([run.task.predict(theta, x) for theta in run.server.theta])
        whole = entropy(run.predict(x))
        torch.testing.assert_close(found.entropy, whole)
        share = run.posterior.weights.mean(1, keepdim=True)
        torch.testing.assert_close(found.mutual_information, (whole - (share * entropy(each)).sum(0)).clamp_min(0))
        assert bool((found.mutual_information >= 0).all())
        assert found.mutual_information.max() > 0.01
        far = cs.Dataset(torch.zeros(20, 2), torch.zeros(20, dtype=torch.int64), name="middle")
        assert run.detect(test.data, far).point > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_members_that_are_the_same_leave_no_doubt(dtype):
    task, _, test = blobs()
    task = task.prepare(dtype=dtype)
    for copies in (1, 3, 7, 41):
        belief = cs.core.Mixture.of(task.initial().repeat(copies, 1))
        assert cs.evaluation.uncertainty(task, belief, test.data).mutual_information.max() < 1e-14


def test_an_ensemble_is_no_single_network():
    task, train, _ = blobs()
    with pytest.raises(TaskError, match="several networks, not one vector of weights: predict with it, or distil it"):
        _ = learn(cs.algorithms.Ensemble(TRAIN), task, train).model


def test_weights_by_class_need_classes(tmp_path):
    task, federation = linear()
    with pytest.raises(TaskError, match="an ensemble by class needs class labels, but the task is regression"):
        learn(cs.algorithms.Ensemble(TRAIN, by_class=True), task, federation, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())
    run, x = learn(cs.algorithms.Ensemble(TRAIN), task, federation), federation.data.x.double()
    mean = sum(run.task.predict(theta, x) for theta in run.server.theta) / len(federation)
    torch.testing.assert_close(run.predict(x), mean)


@pytest.mark.parametrize("rounds", [2, 5])
def test_on_a_stream_members_go_on_from_their_own_networks(rounds):
    task, train, _ = blobs()
    once, more = (learn(cs.algorithms.Ensemble(STILL), task, train.stream(3), rounds=n) for n in (1, rounds))
    assert torch.equal(once.server.theta, more.server.theta)  # a fresh start would be another in every round
    assert len(once.server.theta.unique(dim=0)) == 6


def test_members_of_a_stream_have_seen_all_its_parts():
    task, train, _ = blobs()
    stream, method = train.stream(2), cs.algorithms.Ensemble(cs.SGD(lr=0.1, epochs=2, batch_size=100))
    first, second = (learn(method, task, stream, rounds=n).server for n in (1, 2))
    ids = train.sizes.argsort(descending=True, stable=True)
    group = cs.data.Cohort(stream, ids, round=2, round_size=6, seed=0, dtype=torch.float64)
    update, _ = method.local(task.prepare(dtype=torch.float64), method.message(first, ids), None, group)
    torch.testing.assert_close(second.theta[ids], update.theta, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "method",
    [cs.PFNM(TRAIN, MANY), cs.algorithms.Ensemble(TRAIN), cs.algorithms.Ensemble(TRAIN, by_class=True)],
    ids=lambda m: m.name,
)
def test_a_run_directory_is_all_there_and_can_go_on(method, tmp_path):
    task, train, test = blobs()
    options = {"test": test, "cohort": 4}
    whole = learn(method, task, train, rounds=3, **options)
    learn(method, task, train, rounds=2, out=tmp_path / "run", **options)
    run = learn(method, task, train, rounds=3, out=tmp_path / "run", resume=True, **options)
    assert torch.equal(run.posterior.theta, whole.posterior.theta)
    belief, x = cs.load_posterior(tmp_path / "run"), test.data.x.double()
    assert type(belief) is type(whole.posterior)
    assert torch.equal(belief.theta, whole.posterior.theta)
    assert torch.equal(cs.evaluation.predict(run.network, belief, test.data, torch.arange(len(x))), run.predict(x))
    written = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert written["point"]["metrics"] == run.evaluate(test).point
    assert written["marginal"] is None
    page = write_report(tmp_path / "run").read_text()
    assert page.startswith("<!doctype html>")
    assert method.name in page


# Downpour SGD


def test_downpour_with_one_client_and_one_batch_is_plain_descent():
    task, federation = linear(sizes=(20,), names=None)
    method = cs.algorithms.Downpour(cs.SGD(lr=0.3, epochs=1, batch_size=100), cs.server.Momentum(lr=0.1))
    theta, data = torch.zeros(4, dtype=torch.float64), replace(federation.data, x=federation.data.x.double())
    data = replace(data, y=data.y.double())
    for rounds in range(1, 4):
        theta = theta - 0.1 * gradient(data, theta)
        torch.testing.assert_close(learn(method, task, federation, rounds=rounds).posterior.mean, theta)


def walked(federation, client, theta, train):
    """What a client of `linear` sends: the sum of the gradients at the weights that it goes through in round 1."""
    group, total = (
        cs.data.Cohort(federation, torch.tensor([client]), round=1, round_size=1, seed=0),
        torch.zeros(4).double(),
    )
    for epoch in range(train.epochs):
        for _, batch in group.epoch(epoch, train.batch_size):
            slope = gradient(cs.Dataset(batch.x[0].double(), batch.y[0].double()), theta)
            total, theta = total + slope, theta - train.lr * slope
    return total


def test_downpour_sends_the_sum_of_gradients_and_steps_in_the_order_of_clients():
    task, federation = linear(sizes=(3, 8), names=None)  # cohorts have the larger client first
    train = cs.SGD(lr=0.1, epochs=2, batch_size=4)
    run = learn(cs.algorithms.Downpour(train, cs.server.Momentum(lr=0.05, momentum=0.5)), task, federation)
    theta, pace = torch.zeros(4).double(), torch.zeros(4).double()
    for client in (0, 1):
        pace = 0.5 * pace - walked(federation, client, torch.zeros(4).double(), train)
        theta = theta + 0.05 * pace
    torch.testing.assert_close(run.posterior.mean, theta, rtol=1e-5, atol=1e-6)


# Distillation


def student(outputs=3):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 60), nn.ReLU(), nn.Linear(60, outputs))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "method", [cs.algorithms.Ensemble(TRAIN), cs.PFNM(TRAIN, MANY), cs.FedAvg(cs.SGD(lr=0.3))], ids=str
)
def test_a_student_learns_to_predict_what_its_teacher_does(method, stream):
    task, train, test = blobs()
    teacher = learn(method, task, train.stream(4) if stream else train, rounds=4 if stream else 2)
    run = cs.studies.distil(
        teacher, student(), cs.optim.AMSGrad(lr=0.01, epochs=40, batch_size=10), test=test, engine=ENGINE
    )
    x = train.data.x[train.order].double()
    alike = (run.predict(x).argmax(1) == teacher.predict(x).argmax(1)).double().mean()
    assert alike > 0.95
    assert (run.predict(x) - teacher.predict(x)).abs().mean() < 0.1
    assert run.federation.examples == train.examples
    assert run.federation.steps == 1  # all of a stream, and not its first part alone
    assert run.history[-1]["eval"] == pytest.approx(run.evaluate(test.data[test.order]).point, rel=1e-12)
    assert isinstance(run.model, nn.Sequential)


def test_a_student_must_have_the_teachers_outputs():
    task, train, _ = blobs()
    teacher = learn(cs.algorithms.Ensemble(TRAIN), task, train)
    with pytest.raises(DataError, match="the student has 4 outputs, its teacher 3"):
        cs.studies.distil(teacher, student(4))


def test_there_is_nothing_to_distil_without_classes():
    task, federation = linear()
    with pytest.raises(TaskError, match="distillation needs class probabilities, but the task is regression"):
        cs.studies.distil(learn(cs.FedAvg(), task, federation), nn.Linear(3, 1))


# What is refused


class Residual(nn.Module):
    """A skip connection ties the units of two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.a(x).tanh()
        return self.c(h + self.b(h).tanh())


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            Residual(),
            "units of Residual cannot be matched: its predictions depend on the order of its hidden units",
        ),
        (
            nn.Sequential(nn.Linear(2, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Tanh(), nn.Linear(8, 3)),
            "units of Sequential cannot be matched, as it cannot be made wider",
        ),
        (
            nn.Sequential(nn.Linear(2, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, 3)),
            "units of Sequential cannot be matched: its parameter '1.weight' belongs to no linear or convolutional",
        ),
        (nn.Linear(2, 3), "has 1 linear or convolutional layer"),
    ],
    ids=["residual", "LayerNorm", "GroupNorm", "logistic"],
)
def test_modules_whose_units_cannot_change_places_are_refused(module, words):
    _, train, _ = blobs()
    with pytest.raises(TaskError, match=words.replace("(", r"\(")):
        learn(cs.PFNM(TRAIN), cs.Classification(module), train)


def test_a_module_without_hidden_units_is_refused_before_anything_is_written(tmp_path):
    _, train, _ = blobs()
    with pytest.raises(TaskError, match="no hidden units"):
        learn(cs.PFNM(), cs.Classification(nn.Linear(2, 3)), train, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_only_a_beta_process_can_go_on_in_a_stream():
    with pytest.raises(ConfigError, match="only a Beta-Bernoulli process can go on in a stream, not"):
        cs.PFNM(how=cs.matching.DPMeans(), streaming=True)
    with pytest.raises(ConfigError, match="jitter is a standard deviation"):
        cs.PFNM(jitter=float("nan"))


def test_a_network_that_has_grown_cannot_be_switched_from():
    task, train, _ = blobs()
    with pytest.raises(ConfigError, match="PFNM has made a network of another size, which FedAvg cannot go on with"):
        learn(cs.Switch(cs.PFNM(TRAIN, MANY), cs.FedAvg(), at=1), task, train, rounds=2)
    same = cs.PFNM(TRAIN, cs.matching.BetaBernoulli(mass=1e-300))
    switched = learn(cs.Switch(same, cs.FedAvg(STILL), at=1), task, train, rounds=2)
    torch.testing.assert_close(switched.posterior.mean, learn(same, task, train).posterior.mean)
    with pytest.raises(TaskError, match="an ensemble is several networks"):
        learn(cs.Switch(cs.algorithms.Ensemble(TRAIN), cs.FedAvg(), at=1), task, train, rounds=2)


# In configs and the command

OWN = """
import torch
import consilience as cs

def points():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    data = cs.Dataset(x, (x[:, 0] > 0).long(), classes=("a", "b"), name="points")
    return cs.Data(data, data)
"""
BASE = {
    "data": {"name": "own.py:points"},
    "partition": {"name": "iid", "clients": 2},
    "model": {"name": "mlp", "hidden": [4]},
    "algorithm": {"name": "PFNM", "epochs": 1},
    "run": {"rounds": 1},
    "engine": {"device": "cpu", "chunk": 2, "workers": 1},
}


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """The command in an empty folder but for own.py and config.toml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "config.toml").write_text(tomli_w.dumps(BASE))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["consilience", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        ended = capsys.readouterr()
        return SimpleNamespace(code=stop.value.code or 0, out=ended.out, err=ended.err)

    return run


def test_the_command_refuses_a_model_without_hidden_units_in_a_line(command, tmp_path):
    (tmp_path / "bad.toml").write_text(tomli_w.dumps(BASE | {"model": {"name": "logistic"}}))
    before = sorted(tmp_path.iterdir())
    ended = command("run", "bad.toml")
    assert ended.code == 2
    assert "it has no hidden units to match" in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize("name", ["PFNM", "Ensemble", "Downpour"])
def test_the_command_runs_and_lists_them(command, tmp_path, name):
    ended = command("run", "config.toml", "--set", f"algorithm.name={name}")
    assert ended.code == 0
    assert f"{name}, round 1" in ended.out
    assert (tmp_path / "runs" / "config" / "report.html").stat().st_size > 1000
    assert name in command("list", "algorithms").out


def test_configs_say_how_units_are_matched(tmp_path):
    def chosen(**algorithm):
        path = tmp_path / "config.toml"
        path.write_text(tomli_w.dumps(BASE | {"algorithm": {"name": "PFNM"} | algorithm}))
        return read_config(path).algorithm()

    usual = cs.PFNM().train
    assert chosen() == cs.PFNM()
    assert chosen(how={"name": "BetaBernoulli", "mass": 0.5}) == cs.PFNM(how=cs.matching.BetaBernoulli(mass=0.5))
    assert chosen(how={"mass": 0.5}, streaming=True).how == cs.matching.BetaBernoulli(mass=0.5)
    assert chosen(how="DPMeans") == cs.PFNM(how=cs.matching.DPMeans())
    assert chosen(lr=0.3, epochs=2).train == cs.optim.AMSGrad(
        lr=0.3, epochs=2, batch_size=usual.batch_size, weight_decay=usual.weight_decay
    )
    assert chosen(name="Ensemble", by_class=True, lr=0.3).train.lr == 0.3
    assert chosen(name="Downpour", server={"lr": 0.5}).server == cs.server.Adam(lr=0.5, eps=1e-8)
    with pytest.raises(ConfigError, match="mass must be a positive number"):
        chosen(how={"mass": 0.0})
