"""Ensembles, downpour SGD and distillation, and the modules and settings that one-shot methods refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import ConfigError, DataError, TaskError
from consilience.metrics import entropy
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


def test_members_have_equal_weights_for_a_class_without_examples():
    task, train, _ = blobs(clients=4)
    few = replace(train, data=replace(train.data, y=train.data.y.clamp_max(1)))
    weights = learn(cs.algorithms.Ensemble(TRAIN, by_class=True), task, few).posterior.weights
    torch.testing.assert_close(weights[:, 2], torch.full((4,), 0.25).double())


def test_only_clients_that_have_taken_part_are_members():
    task, train, test = blobs()
    run = learn(cs.algorithms.Ensemble(TRAIN), task, train, cohort=2)
    assert len(run.posterior.theta) == 2
    later = learn(cs.algorithms.Ensemble(TRAIN), task, train, rounds=3, cohort=2)
    assert 2 < len(later.posterior.theta) <= 6
    assert torch.equal(later.posterior.theta, later.server.theta[later.server.known[:, 0] > 0])
    assert run.predict(test.data.x.double()).shape == (len(test.data), 3)


def test_mutual_information_is_the_members_disagreement():
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
def test_equal_members_have_no_mutual_information(dtype):
    task, _, test = blobs()
    task = task.prepare(dtype=dtype)
    for copies in (1, 7, 41):
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
def test_on_a_stream_members_continue_from_their_own_networks(rounds):
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


def test_a_stored_ensemble_predicts_as_the_run_does(tmp_path):
    task, train, test = blobs(clients=3)
    run = learn(cs.algorithms.Ensemble(TRAIN), task, train, out=tmp_path / "run", test=test)
    belief, x = cs.load_posterior(tmp_path / "run"), test.data.x.double()
    assert torch.equal(belief.theta, run.posterior.theta)
    assert torch.equal(cs.evaluation.predict(run.network, belief, test.data, torch.arange(len(x))), run.predict(x))


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
            g = gradient(cs.Dataset(batch.x[0].double(), batch.y[0].double()), theta)
            total, theta = total + g, theta - train.lr * g
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


@pytest.mark.parametrize(
    ("method", "stream"),
    [(cs.algorithms.Ensemble(TRAIN), True), (cs.PFNM(TRAIN, MANY), False)],
    ids=["Ensemble", "PFNM"],
)
def test_a_student_learns_to_predict_what_its_teacher_does(method, stream):
    task, train, test = blobs()
    teacher = learn(method, task, train.stream(2) if stream else train, rounds=2)
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


def test_distillation_needs_classes():
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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"how": cs.matching.DPMeans(), "streaming": True},
            "only a Beta-Bernoulli process can continue a stream, not DP-means",
        ),
        ({"jitter": -1.0}, "PFNM: jitter must be at least 0, got -1.0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, sentence):
    with pytest.raises(ConfigError) as error:
        cs.PFNM(**options)
    assert str(error.value) == sentence


def test_a_network_that_has_grown_cannot_be_switched_from():
    task, train, _ = blobs()
    with pytest.raises(ConfigError, match="PFNM has made a network of another size, which FedAvg cannot continue from"):
        learn(cs.Switch(cs.PFNM(TRAIN, MANY), cs.FedAvg(), at=1), task, train, rounds=2)
    same = cs.PFNM(TRAIN, cs.matching.BetaBernoulli(mass=1e-300))
    switched = learn(cs.Switch(same, cs.FedAvg(STILL), at=1), task, train, rounds=2)
    torch.testing.assert_close(switched.posterior.mean, learn(same, task, train).posterior.mean)
    with pytest.raises(TaskError, match="an ensemble is several networks"):
        learn(cs.Switch(cs.algorithms.Ensemble(TRAIN), cs.FedAvg(), at=1), task, train, rounds=2)
