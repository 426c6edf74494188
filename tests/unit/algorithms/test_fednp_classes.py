"""FedNPClasses: sites that add up to pooled statistics, a head that is trained under q(z), and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.algorithms.fedcgs import Classes as SharedCovariance
from consilience.algorithms.fedcgs import Sums
from consilience.algorithms.fednp_classes import Classes, FedNPClasses
from consilience.core import keys
from consilience.core.errors import ConsilienceError, TaskError
from support.one_shot import ENGINE, learn
from support.scenarios import blobs

STILL = cs.SGD(lr=0.0)
LOCAL = cs.SGD(lr=0.1, momentum=0.9, epochs=2, batch_size=16, weight_decay=0.01)


def digits(count=300):
    data = cs.load("digits")
    chosen = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    return data.train[chosen[:count]]


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cs.Classification(nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10)))


PARTITIONS = {
    "one": lambda data: cs.partition.iid(data, 1),
    "iid": lambda data: cs.partition.iid(data, 7),
    "shards": lambda data: cs.partition.shards(data, 5),
    "one label": lambda data: cs.partition.one_label(data, 10),
}


def features(task, data):
    """φ̃ [N, d + 1] of all examples under the initial weights."""
    body = nn.Sequential(*list(task.module)[:3]).double()
    x = body(data.inputs(torch.arange(len(data)), torch.float64)).detach()
    return nn.functional.pad(x, (0, 1), value=1.0)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_sites_add_up_to_the_statistics_of_pooled_data(partition):
    data, task = digits(), network()
    run = learn(FedNPClasses(LOCAL, ahead=0.0), task, PARTITIONS[partition](data))
    phi = features(task, data)
    for c in range(10):
        own = phi[data.y == c]
        torch.testing.assert_close(run.server.sites[c], own.mT @ own, rtol=1e-12, atol=1e-10)


def test_the_head_is_that_of_pooled_data_for_every_partition_if_networks_stay():
    data = digits()
    found = [learn(FedNPClasses(STILL), network(), made(data)).posterior.mean for made in PARTITIONS.values()]
    assert not torch.equal(found[0], network().initial().double())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-9)


def test_ahead_are_the_features_of_the_clients_own_networks():
    data, task = digits(), network()
    one = cs.partition.iid(data, 1)
    half, whole = (learn(FedNPClasses(LOCAL, ahead=a, steps=0), task, one) for a in (0.5, 1.0))
    w = task.initial().double()
    for run, share in ((half, 0.5), (whole, 1.0)):
        middle = cs.Classification(task.release(torch.lerp(w, run.posterior.mean, share)))
        phi = features(middle, data)[data.y == 3]
        torch.testing.assert_close(run.server.sites[3], phi.mT @ phi, rtol=1e-6, atol=1e-5)


def test_without_steps_it_is_fedavg_to_the_last_bit():
    task, train, _ = blobs()
    method, same = FedNPClasses(LOCAL, cs.server.Adam(), steps=0), cs.FedAvg(LOCAL, cs.server.Adam())
    runs = [learn(m, task, train, rounds=3, cohort=4) for m in (method, same)]
    assert torch.equal(*(run.posterior.mean for run in runs))


def test_only_the_head_differs_from_fedavg_after_a_round():
    data, task = digits(), network()
    federation = cs.partition.shards(data, 5)
    found, plain = (learn(m(LOCAL), task, federation).posterior.mean for m in (FedNPClasses, cs.FedAvg))
    start = task.slice(parameter="3.weight").start
    assert torch.equal(found[:start], plain[:start])
    assert (found[start:] - plain[start:]).abs().max() > 1e-3


def gaussian_classes(count=20000):
    """Features of three classes with one covariance, and how many there are of each."""
    made = torch.Generator().manual_seed(0)
    root = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    y = torch.arange(count) % 4 % 3  # shares of a half, a quarter and a quarter
    x = torch.randn(count, 2, generator=made) @ root.mT + 1.5 * torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])[y]
    return cs.Dataset(x, y)


@pytest.mark.slow
def test_of_gaussian_classes_with_one_covariance_the_head_becomes_the_linear_discriminant():
    """In closed form: the loss under N(m_c, Σ) is least at W = m Σ⁻¹, b = log π − ½ mᵀΣ⁻¹m."""
    data = gaussian_classes()
    method = FedNPClasses(STILL, steps=600, draws=20000)
    run = learn(method, cs.Classification(nn.Linear(2, 3)), cs.partition.shards(data, 3))
    x, counts = data.x.double(), torch.bincount(data.y).double()
    by_class = nn.functional.one_hot(data.y, 3).double()
    sums = Sums(counts, by_class.mT @ x, x.mT @ x)
    weight, bias = SharedCovariance.of(sums, shrinkage=1e-6, kappa=1e-6).linear()
    found = run.posterior.mean
    w, b = found[:6].view(3, 2), found[6:]
    torch.testing.assert_close(w - w.mean(0), weight - weight.mean(0), rtol=0, atol=0.05)
    torch.testing.assert_close(b - b.mean(), bias - bias.mean(), rtol=0, atol=0.05)


def test_every_step_descends():
    data, task = digits(), network()
    run = learn(FedNPClasses(LOCAL, steps=0), task, cs.partition.shards(data, 5))
    classes = Classes.of(run.server.sites)
    phi = classes.draw(300, keys.key(1, purpose="server"))
    start = task.slice(parameter="3.weight").start
    head = run.posterior.mean[start:]
    head = torch.cat([head[:200].view(10, 20), head[200:].view(10, 1)], 1)

    def loss(at):
        logs = (phi @ at.mT).log_softmax(-1).diagonal(dim1=0, dim2=2)  # [draws, C]
        return -(classes.share * logs.mean(0)).sum()

    values = [float(loss(replace(run.algorithm, steps=s).trained_head(run.task, head, classes, phi))) for s in range(9)]
    assert all(later < earlier for earlier, later in pairwise(values))


def test_draws_have_the_moments_of_q():
    task, train, _ = blobs()
    run = learn(FedNPClasses(LOCAL), task, train)
    classes = Classes.of(run.server.sites)
    phi = classes.draw(100_000, keys.key(0, purpose="server"))
    torch.testing.assert_close(phi[..., :-1].mean(1), classes.mean, rtol=0, atol=0.02)
    for c in range(3):
        torch.testing.assert_close(phi[c, :, :-1].mT.cov(), classes.covariance[c], rtol=0.05, atol=0.02)
    assert torch.equal(phi[..., -1], torch.ones(3, 100_000).double())


def test_draws_of_statistics_that_differ_by_rounding_differ_by_rounding():
    """Equal variances, whose axes are arbitrary: any root but the symmetric one could turn."""
    phi = torch.cat([torch.eye(6), -torch.eye(6)]).double()
    sites = torch.zeros(2, 7, 7).double()
    sites[:] = nn.functional.pad(phi, (0, 1), value=1.0).mT @ nn.functional.pad(phi, (0, 1), value=1.0)
    near = sites * (1 + 1e-14 * torch.randn(2, 7, 7, generator=torch.Generator().manual_seed(0)).double())
    near = (near + near.mT) / 2
    key = keys.key(0, purpose="server")
    found, other = (Classes.of(made).draw(50, key) for made in (sites, near))
    torch.testing.assert_close(other, found, rtol=0, atol=1e-11)


def test_a_class_that_no_client_of_the_round_has_keeps_its_row():
    data, task = digits(), network()
    without = data[(data.y != 4).nonzero().flatten()]
    federation = cs.partition.iid(without, 3)
    found, plain = (learn(m(LOCAL), task, federation).posterior.mean for m in (FedNPClasses, cs.FedAvg))
    weight, bias = (task.slice(parameter=f"3.{part}") for part in ("weight", "bias"))
    rows = [torch.cat([theta[weight].view(10, 20), theta[bias].view(10, 1)], 1) for theta in (found, plain)]
    same = (rows[0] == rows[1]).all(1)
    assert same.tolist() == [c == 4 for c in range(10)]


def test_under_secure_sums_it_is_the_same_to_the_encodings_rounding():
    federation = cs.partition.shards(digits(), 5)
    plain, secure = (
        learn(FedNPClasses(LOCAL), network(), federation, rounds=2, engine=replace(ENGINE, secure=s))
        for s in (False, True)
    )
    torch.testing.assert_close(secure.server.sites, plain.server.sites, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(secure.posterior.mean, plain.posterior.mean, rtol=1e-5, atol=1e-5)
    assert secure.history[-1]["clients"] == 5


def test_private_clips_and_hides_the_sites_too():
    """The clipped vector is the weights' change and the site together, so ε counts both."""
    federation = cs.partition.shards(digits(), 5)
    plain = learn(FedNPClasses(LOCAL), network(), federation)
    method = cs.Private(FedNPClasses(LOCAL), clip=0.5, noise=0.0, noise_from="seed")
    clipped = learn(method, network(), federation).server.method.sites
    assert clipped.norm() <= 5 * 0.5 * (1 + 1e-6)
    assert plain.server.sites.norm() > 100
    noisy = learn(replace(method, noise=1.0), network(), federation)
    assert (noisy.server.method.sites - clipped).std() == pytest.approx(0.5, rel=0.1)
    assert torch.isfinite(noisy.posterior.mean).all()
    assert noisy.history[-1]["epsilon"] > 0


def test_robust_takes_medians_of_the_sites():
    run = learn(cs.Robust(FedNPClasses(LOCAL)), network(), cs.partition.iid(digits(), 5), rounds=2)
    assert torch.isfinite(run.posterior.mean).all()


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (
            cs.Classification(nn.Sequential(nn.Unflatten(1, (2, 1)), nn.Conv1d(2, 3, 1), nn.Flatten())),
            "FedNPClasses replaces the last linear layer, and the module has none: end it with nn.Linear",
        ),
        (
            cs.Classification(nn.Linear(2, 3, bias=False)),
            "FedNPClasses replaces the last linear layer '': it must have a bias, and must not be frozen",
        ),
        (cs.Regression(nn.Linear(2, 1)), "needs an output for every class, but the task is regression"),
        (
            cs.Classification(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))),
            "needs features in evaluation during a round: make the task with batch_norm='averaged', or use replace_",
        ),
    ],
)
def test_a_module_without_a_head_to_train_is_refused(task, sentence):
    with pytest.raises(TaskError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        FedNPClasses().adapt(task, 0)


@pytest.mark.parametrize("after", [nn.Tanh(), nn.LogSoftmax(-1)])
def test_a_module_that_changes_the_output_of_its_last_linear_layer_is_refused(after):
    task = cs.Classification(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3), after))
    with pytest.raises(ConsilienceError, match="returns what its last linear layer '2' makes"):
        learn(FedNPClasses(LOCAL), task, blobs()[1])


def test_with_averaged_batch_norm_it_learns():
    _, train, test = blobs()
    module = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    run = learn(FedNPClasses(LOCAL), cs.Classification(module, batch_norm="averaged"), train, rounds=10)
    assert run.evaluate(test.data).point["accuracy"] > 0.9


def test_class_weights_count_in_the_head_too():
    data = gaussian_classes(400)
    heads = []
    for weights in (None, [1.0, 20.0, 1.0]):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            task = cs.Classification(nn.Linear(2, 3), weights=weights)
        heads.append(learn(FedNPClasses(STILL, steps=200), task, cs.partition.iid(data, 2)))
    plain, weighted = (run.predict(data.x[:100].double())[:, 1].mean() for run in heads)
    assert weighted > plain + 0.2
