"""LastLayer: sums of clients are the pooled Laplace approximation of the last layer, whatever the partition."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.functional import hessian

import consilience as cs
from consilience.algorithms.last_layer import LastLayer, curvature
from consilience.core.errors import TaskError
from consilience.runs import Run
from support.one_shot import ENGINE

TAU = 0.7


def learn(method: Any, task: cs.Task, federation: cs.Federation, **options: Any) -> Run:
    return cs.fit(method, task, federation, **{"rounds": 1, "engine": ENGINE, "progress": False} | options)


def digits(count: int = 200) -> cs.Dataset:
    data = cs.load("digits").train
    return data[torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:count]]


def network(hidden: int = 6, scale: float = 1.0) -> cs.Task:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10))
    with torch.no_grad():
        module[-1].weight.mul_(scale)
        module[-1].bias.mul_(scale)
    return cs.Classification(module)


def features(task: cs.Task, x: Tensor) -> Tensor:
    """The last layer's inputs and a 1, by the plain module."""
    module = task.module
    assert isinstance(module, nn.Sequential)
    seen = nn.Sequential(*list(module)[:-1]).double()(x.double()) if len(module) > 1 else x.double()
    return torch.cat([seen, torch.ones(len(seen), 1, dtype=torch.float64)], 1).detach()


def head_of(task: cs.Task) -> Tensor:
    """(W, b) of the last layer, [C, D]."""
    assert isinstance(task.module, nn.Sequential)
    last = task.module[-1]
    return torch.cat([last.weight, last.bias.unsqueeze(1)], 1).double().detach()


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


PARTITIONS = {
    "one client": lambda data: cs.partition.iid(data, 1),
    "seven alike": lambda data: cs.partition.iid(data, 7),
    "one label each": lambda data: cs.partition.one_label(data, 10),
}


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_softmax_model_has_the_pooled_laplace_approximation_by_autograd(partition: str) -> None:
    data = digits()
    task = cs.Classification(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    run = learn(LastLayer(TAU), task, PARTITIONS[partition](data))
    phi, y, w = features(task, data.inputs(torch.arange(len(data)), torch.float64)), data.y, head_of(task)

    def energy(flat: Tensor) -> Tensor:
        return F.cross_entropy(phi @ flat.view(10, -1).mT, y, reduction="sum") + TAU / 2 * flat.square().sum()

    wanted = hessian(energy, w.flatten())
    assert isinstance(run.algorithm, LastLayer)
    found = run.algorithm.belief(run.server)
    torch.testing.assert_close(found.lam, wanted, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.mean, w.flatten(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", [cs.Binary, cs.MultiLabel], ids=lambda kind: kind.__name__)
def test_a_logistic_model_has_it_too(kind: Any) -> None:
    made = torch.Generator().manual_seed(1)
    x, labels = torch.randn(60, 3, generator=made), 1 if kind is cs.Binary else 2
    y = (x @ torch.randn(3, labels, generator=made) > 0).float()
    data = cs.Dataset(x, y.squeeze(1).long() if kind is cs.Binary else y)
    task = kind(nn.Sequential(nn.Linear(3, labels)))
    run = learn(LastLayer(TAU), task, cs.partition.iid(data, 4))
    phi, w = features(task, x), head_of(task)

    def energy(flat: Tensor) -> Tensor:
        logits = phi @ flat.view(labels, -1).mT
        return F.binary_cross_entropy_with_logits(logits, y.double(), reduction="sum") + TAU / 2 * flat.square().sum()

    assert isinstance(run.algorithm, LastLayer)
    torch.testing.assert_close(run.algorithm.belief(run.server).lam, hessian(energy, w.flatten()), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("structure", ["full", "kronecker"])
def test_every_partition_gives_the_same_network(structure: Any) -> None:
    data, found = digits(), []
    for partition in PARTITIONS.values():
        run = learn(LastLayer(structure=structure), network(), partition(data))
        found.append(run.predict(data.inputs(torch.arange(20))))
        assert run.history[-1]["clients_counted"] == len(run.federation)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[0], found[2], rtol=1e-9, atol=1e-9)


def test_under_secure_sums_it_is_the_same_to_the_encodings_rounding() -> None:
    data = digits()
    plain, secure = (
        learn(LastLayer(), network(), cs.partition.shards(data, 5), engine=replace(ENGINE, secure=secure))
        for secure in (False, True)
    )
    torch.testing.assert_close(secure.posterior.mean, plain.posterior.mean, rtol=1e-5, atol=1e-5)


def test_predictions_are_softmaxes_of_logits_shrunk_by_their_variance() -> None:
    data, task = digits(), network()
    run = learn(LastLayer(TAU), task, cs.partition.iid(data, 3))
    assert isinstance(run.algorithm, LastLayer)
    x = data.inputs(torch.arange(15))
    phi, covariance = features(task, x), torch.linalg.inv(run.algorithm.belief(run.server).lam)
    blocks = covariance.view(10, 7, 10, 7)
    variance = torch.stack([((phi @ blocks[c, :, c]) * phi).sum(1) for c in range(10)], 1)
    wanted = (phi @ head_of(task).mT / (1 + math.pi / 8 * variance).sqrt()).softmax(1)
    torch.testing.assert_close(run.predict(x), wanted, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(run.model.double()(x.double()).softmax(1), wanted, rtol=1e-8, atol=1e-9)


def test_of_a_head_that_finds_all_classes_alike_the_kronecker_product_is_exact() -> None:
    data, runs = digits(), []
    for structure in ("full", "kronecker"):
        runs.append(learn(LastLayer(TAU, structure), network(scale=0.0), cs.partition.iid(data, 3)))
    full, kronecker = (curvature(run.server) for run in runs)
    torch.testing.assert_close(kronecker.precision(TAU), full.precision(TAU), rtol=1e-9, atol=1e-9)
    head, other = cs.models.LaplaceHead(6, 10, full.directions), cs.models.LaplaceHead(6, 10, kronecker.directions)
    x = torch.randn(9, 6).double()
    for module, found in ((head, full), (other, kronecker)):
        for parameter, value in zip(module.double().parameters(), found.head(TAU), strict=True):
            parameter.data = value
        module.weight.data = torch.ones(10, 6).double()
    torch.testing.assert_close(head(x), other(x), rtol=1e-9, atol=1e-9)


def test_without_a_prior_it_has_the_largest_marginal_likelihood() -> None:
    data = digits()
    run = learn(LastLayer(), network(scale=3.0), cs.partition.iid(data, 3))
    found = curvature(run.server)
    precision, h = found.precision(), found.precision(1e-12)
    tau = float((precision - h).diagonal().mean())

    def evidence(at: float) -> float:
        whole = h + at * torch.eye(len(h)).double()
        return 0.5 * float(len(h) * math.log(at) - torch.logdet(whole) - at * found.weight.square().sum())

    assert evidence(tau) >= max(evidence(tau * factor) for factor in (0.5, 0.97, 1.03, 2.0))


def test_a_client_counts_once_and_all_take_part_where_rounds_are_smaller() -> None:
    data = digits()
    federation = cs.partition.shards(data, 5)
    once = learn(LastLayer(), network(), federation)
    often = learn(LastLayer(), network(), federation, rounds=7, cohort=2)
    assert [line["clients_counted"] for line in often.history] == [2, 4, 5, 5, 5, 5, 5]
    torch.testing.assert_close(often.posterior.mean, once.posterior.mean, rtol=1e-9, atol=1e-9)


def test_it_keeps_the_classes_that_a_method_before_it_found_and_is_less_sure_far_away() -> None:
    data = cs.load("digits")
    federation = cs.partition.dirichlet(data.train, clients=5, alpha=0.5, seed=0)
    train = cs.SGD(lr=0.2, epochs=2)
    point = learn(cs.FedAvg(train), network(16), federation, rounds=5)
    run = learn(cs.Switch(cs.FedAvg(train), LastLayer(), at=5), network(16), federation, rounds=6)
    near = data.test.inputs(torch.arange(50))
    for method in (point, run):
        assert isinstance(method.posterior, cs.Point)
    agree = (run.predict(near).argmax(1) == point.predict(near).argmax(1)).double().mean()
    assert agree > 0.95
    assert float(run.predict(near).max(1).values.mean()) < float(point.predict(near).max(1).values.mean())


def test_what_it_cannot_do_is_refused() -> None:
    data = cs.partition.iid(digits(30), 2)
    flat = nn.Flatten()
    refused: dict[str, cs.Task] = {
        "BatchNorm layers have no fixed statistics yet": cs.Classification(
            nn.Sequential(flat, nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))
        ),
        "it must have a bias": cs.Classification(nn.Sequential(flat, nn.Linear(64, 10, bias=False))),
        "this module does something else": cs.Classification(nn.Sequential(flat, nn.Linear(64, 10), nn.Tanh())),
        "makes of one vector for each example": cs.Classification(
            nn.Sequential(
                flat, nn.Unflatten(1, (4, 16)), nn.Linear(16, 10), nn.Flatten(1), nn.Unflatten(1, (4, 10)), Mean()
            )
        ),
        "leave the class weights out": cs.Classification(nn.Sequential(flat, nn.Linear(64, 10)), weights=[1.0] * 10),
    }
    for sentence, task in refused.items():
        with pytest.raises(TaskError, match=sentence):
            learn(LastLayer(), task, data)
    with pytest.raises(TaskError, match="needs logits of classes or of labels, but the task is regression"):
        LastLayer().adapt(cs.Regression(nn.Linear(2, 1)), 0)
