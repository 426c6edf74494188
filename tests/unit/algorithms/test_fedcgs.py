"""FedCGS: the same head for every partition, its posterior predictive, and clients that come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import nn

import consilience as cs
from consilience.algorithms.fedcgs import Classes, FedCGS, Sums
from consilience.core.errors import TaskError
from support.one_shot import ENGINE


def learn(method, task, federation, **options):
    return cs.fit(method, task, federation, **{"rounds": 1, "engine": ENGINE, "progress": False} | options)


def digits(count=300):
    data = cs.load("digits")
    chosen = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    return data.train[chosen[:count]], data.test


def flat():
    return cs.Classification(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cs.Classification(nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10)))


@pytest.mark.parametrize("plug_in", [False, True])
def test_the_head_is_that_of_pooled_data_for_every_partition(plug_in):
    data, _ = digits()
    pooled = learn(FedCGS(plug_in=plug_in), network(), cs.partition.iid(data, 1)).posterior.mean
    for federation in (cs.partition.iid(data, 7), cs.partition.shards(data, 5), cs.partition.one_label(data, 10)):
        found = learn(FedCGS(plug_in=plug_in), network(), federation).posterior.mean
        torch.testing.assert_close(found, pooled, rtol=1e-9, atol=1e-9)


def test_under_secure_sums_it_is_the_same_to_the_encodings_rounding():
    data, _ = digits()
    federation = cs.partition.shards(data, 5)
    plain = learn(FedCGS(), network(), federation)
    secure = learn(FedCGS(), network(), federation, engine=replace(ENGINE, secure=True))
    torch.testing.assert_close(secure.posterior.mean, plain.posterior.mean, rtol=1e-6, atol=1e-6)
    assert secure.history[-1]["clients"] == 5


def test_the_statistics_are_those_of_the_features():
    data, _ = digits(50)
    task = network()
    run = learn(FedCGS(), task, cs.partition.shards(data, 5))
    x = nn.Sequential(*list(task.module)[:3]).double()(data.inputs(torch.arange(50), torch.float64)).detach()
    assert torch.equal(run.server.sums.counts.long(), torch.bincount(data.y, minlength=10))
    torch.testing.assert_close(run.server.sums.products, x.mT @ x)
    torch.testing.assert_close(run.server.sums.totals, nn.functional.one_hot(data.y, 10).double().mT @ x)


def test_the_predictive_density_is_students_t():
    """Against scipy, for the conjugate posterior written out."""
    made = torch.Generator().manual_seed(3)
    x, y = torch.randn(40, 3, generator=made).double(), torch.arange(40) % 2
    x[:, 0] += 2 * y
    run = learn(
        FedCGS(shrinkage=2.0, kappa=0.5), cs.Classification(nn.Linear(3, 2)), cs.partition.iid(cs.Dataset(x, y), 4)
    )
    n, d, centre = 40, 3, x.mean(0)
    z, strength = x - centre, 2.0 * 3
    means = torch.stack([z[y == c].mean(0) for c in (0, 1)])
    within = sum(((z[y == c] - means[c]) ** 2).sum() for c in (0, 1)) / (d * (n - 2))
    kappa, m = 20.5, means * 20 / 20.5
    scatter = strength * within * torch.eye(d).double() + z.mT @ z - kappa * m.mT @ m
    nu = (d + 1 + strength) + n - d + 1
    new = torch.randn(5, 3, generator=made).double()
    logs = [
        torch.tensor(stats.multivariate_t(m[c] + centre, scatter * (kappa + 1) / (kappa * nu), nu).logpdf(new))
        for c in (0, 1)
    ]
    torch.testing.assert_close(run.predict(new), torch.stack(logs, 1).softmax(1))


def test_with_many_examples_the_density_and_the_linear_head_agree():
    made = torch.Generator().manual_seed(0)
    y = torch.arange(20000) % 3
    x = torch.randn(20000, 2, generator=made) + 1.5 * torch.eye(3)[y][:, :2]
    federation, task = cs.partition.iid(cs.Dataset(x, y), 3), cs.Classification(nn.Linear(2, 3))
    student, linear = learn(FedCGS(), task, federation), learn(FedCGS(plug_in=True), task, federation)
    torch.testing.assert_close(student.predict(x[:100]), linear.predict(x[:100]), rtol=2e-3, atol=2e-3)
    assert isinstance(linear.model, nn.Linear)


def test_few_examples_of_many_features_are_predicted_better_by_the_posterior_than_by_its_mean():
    data, test = digits()
    federation = cs.partition.shards(data, 5)
    student, linear = (learn(FedCGS(plug_in=p), flat(), federation).evaluate(test).point for p in (False, True))
    assert student["accuracy"] > 0.91
    assert student["nll"] < 0.38
    assert student["nll"] < linear["nll"] - 0.015


def test_a_class_that_nobody_has_stays_at_the_prior():
    sums = Sums(torch.tensor([5.0, 0.0]).double(), torch.ones(2, 3).double() * torch.tensor([[5.0], [0.0]]),
                5 * torch.ones(3, 3).double() + torch.eye(3))  # fmt: skip
    found = Classes.of(sums, shrinkage=1.0, kappa=0.1)
    assert torch.equal(found.mean[1], torch.zeros(3).double())
    assert found.kappa.tolist() == pytest.approx([5.1, 0.1])
    assert found.log_prior.exp().tolist() == pytest.approx([6 / 7, 1 / 7])


def test_before_any_client_all_classes_are_alike():
    like = torch.zeros((), dtype=torch.float64)
    nobody = Classes.of(Sums(like.new_zeros(3), like.new_zeros(3, 2), like.new_zeros(2, 2)), shrinkage=0.5, kappa=0.1)
    assert all(part.isfinite().all() for part in (*nobody.student(), *nobody.linear()))


def test_a_client_that_comes_again_changes_nothing_and_one_that_leaves_is_gone():
    data, _ = digits()
    federation = cs.partition.shards(data, 5)
    once = learn(FedCGS(), network(), federation)
    again = learn(FedCGS(), network(), federation, rounds=3, cohort=4, seed=1)
    assert again.history[-1]["clients"] == 4
    torch.testing.assert_close(again.posterior.mean, once.posterior.mean, rtol=1e-9, atol=1e-9)
    others = cs.Federation.from_silos([federation.client(k) for k in (0, 1, 3, 4)])
    torch.testing.assert_close(
        once.forget(2).posterior.mean, learn(FedCGS(), network(), others).posterior.mean, rtol=1e-7, atol=1e-7
    )


def test_it_continues_from_a_network_that_fedavg_has_trained():
    data, test = digits(900)
    federation = cs.partition.dirichlet(data, 5, alpha=0.1, seed=0)
    train = cs.SGD(lr=0.1, epochs=3)
    before = learn(cs.FedAvg(train), network(), federation)
    after = learn(cs.Switch(cs.FedAvg(train), FedCGS(), at=1), network(), federation, rounds=2)
    for name, value in before.model[1].state_dict().items():
        assert torch.equal(value, after.model[1].state_dict()[name])
    assert isinstance(after.model[3], cs.models.StudentHead)
    assert after.evaluate(test).point["accuracy"] > before.evaluate(test).point["accuracy"] + 0.1


def test_a_frozen_trunk_stays_and_is_not_sent():
    data, _ = digits()
    task = network()
    module = task.module
    module[1].requires_grad_(False)
    frozen = cs.Classification(module)
    run = learn(FedCGS(), frozen, cs.partition.iid(data, 3))
    x = data.inputs(torch.arange(5), torch.float64)
    assert run.history[0]["bytes_down"] < 3 * 8 * 250
    torch.testing.assert_close(run.predict(x), learn(FedCGS(), network(), cs.partition.iid(data, 3)).predict(x))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (lambda: cs.Regression(nn.Linear(2, 3)), "needs an output for every class"),
        (lambda: cs.Classification(nn.Sequential(nn.Linear(2, 3, bias=False))), "must have a bias"),
        (lambda: cs.Classification(nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten())), "the module has none"),
    ],
)
def test_other_tasks_and_heads_are_refused(task, words):
    with pytest.raises(TaskError, match=words):
        FedCGS().adapt(task(), 0)
