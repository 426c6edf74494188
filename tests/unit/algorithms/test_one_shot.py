"""PFNM through `fit`: the global network after one round, after several, and in a stream."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.algorithms.shared.one_shot import own_start
from consilience.core import keys
from consilience.matching import Known, Memory, Stack, restart, slice_of
from support.one_shot import MANY, STILL, TRAIN, learn
from support.scenarios import blobs, linear


def kept(train, task, federation, **options):
    """The clients' networks of one round, as an ensemble keeps them: layers, and shares of classes."""
    members, stack = (
        learn(cs.algorithms.Ensemble(train, by_class=True), task, federation, **options).server,
        Stack.of(task.module),
    )
    return [stack.layers(theta) for theta in members.theta], members.labels / members.labels.sum(0)


def one_client(*labels):
    """A network, and one client that has examples of some of its three classes."""
    task, _, _ = blobs()
    y = torch.tensor(labels).repeat(5)
    x = torch.randn(len(y), 2, generator=torch.Generator().manual_seed(0))
    return task, cs.Federation.from_owner(cs.Dataset(x, y, name="points"), torch.zeros(len(y), dtype=torch.int64))


def two_layers():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cs.Classification(nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))


# One shot


@pytest.mark.parametrize(
    "how", [cs.matching.BetaBernoulli(), MANY, cs.matching.DPMeans(penalty=1.0)], ids=["few", "many", "DP-means"]
)
def test_one_shot_is_the_match_of_the_networks_that_an_ensemble_keeps(how):
    task, train, _ = blobs()
    run = learn(cs.PFNM(TRAIN, how), task, train, seed=3)
    networks, shares = kept(TRAIN, task, train, seed=3)
    stack, found = Stack.of(task.module), cs.matching.match(networks, how, shares=shares, seed=3)
    torch.testing.assert_close(run.posterior.mean, stack.flat(found.layers), rtol=1e-10, atol=1e-10)
    assert torch.equal(run.server.units, torch.stack(found.assignments[0]))
    assert run.history[-1]["width"] == sum(found.widths)
    without = cs.matching.match(networks, how, seed=3)
    assert not torch.allclose(without.layers[-1][1], found.layers[-1][1])


@pytest.mark.parametrize("top_down", [False, True])
def test_layers_are_matched_in_the_order_that_the_method_says(top_down):
    task, (_, train, _) = two_layers(), blobs()
    run = learn(cs.PFNM(TRAIN, top_down=top_down), task, train)
    networks, shares = kept(TRAIN, task, train)
    orders = (top_down, not top_down)
    here, other = (cs.matching.match(networks, shares=shares, top_down=order) for order in orders)
    stack = Stack.of(task.module)
    torch.testing.assert_close(run.posterior.mean, stack.flat(here.layers), rtol=1e-10, atol=1e-10)
    assert not torch.equal(stack.flat(other.layers), stack.flat(here.layers))


@pytest.mark.parametrize("build", [lambda: blobs()[0], two_layers], ids=["one layer", "two"])
def test_the_network_is_as_wide_as_the_metrics_say_and_is_an_ordinary_module(build):
    task, (_, train, test) = build(), blobs()
    engine = cs.Simulator(device="cpu", chunk=3, workers=1)
    run = learn(cs.PFNM(TRAIN, MANY), task, train, engine=engine)
    hidden = [layer for layer in run.model if isinstance(layer, nn.Linear)][:-1]
    local = [layer for layer in task.module if isinstance(layer, nn.Linear)][:-1]
    assert sum(layer.out_features for layer in hidden) == run.history[-1]["width"]
    assert all(a.out_features > b.out_features for a, b in zip(hidden, local, strict=True))
    assert run.network.size == len(run.posterior.mean) > run.task.size
    with torch.no_grad():
        expected = run.model(test.data.x).softmax(1)
    torch.testing.assert_close(run.predict(test.data.x), expected)
    assert run.evaluate(test.data).point["accuracy"] == pytest.approx(
        float((expected.argmax(1) == test.data.y).float().mean())
    )
    assert run.uncertainty(test.data).mutual_information.max() == 0
    far = cs.Dataset(torch.zeros(20, 2), torch.zeros(20, dtype=torch.int64), name="middle")
    assert 0 <= run.detect(test.data, far).point <= 1
    assert run.evaluate(test).clients[0]["examples"] == int(test.sizes[0])


@pytest.mark.parametrize(("variance", "prior_variance"), [(1.0, 10.0), (0.3, 0.5), (1.0, 1e12)])
def test_one_client_alone_gets_its_network_shrunk_to_the_prior_mean(variance, prior_variance):
    task, federation = one_client(0, 1, 2)
    how = cs.matching.BetaBernoulli(variance, prior_variance)
    fused = learn(cs.PFNM(STILL, how), task, federation)
    (own,), _ = kept(STILL, task, federation)
    prior = [(0.0, 0.1), (0.0, 0.1)]
    expected = [
        (value / variance + mean / prior_variance) / (1 / variance + 1 / prior_variance)
        for layer, means in zip(own, prior, strict=True)
        for value, mean in zip(layer, means, strict=True)
    ]
    torch.testing.assert_close(fused.posterior.mean, torch.cat([e.flatten() for e in expected]), rtol=1e-9, atol=1e-9)
    assert fused.history[-1]["width"] == 8


def test_a_class_without_examples_has_the_prior_mean():
    task, federation = one_client(0, 2)
    run = learn(cs.PFNM(TRAIN), task, federation)
    (own,), shares = kept(TRAIN, task, federation.pooled())
    weight, bias = Stack.of(task.module).layers(run.posterior.mean)[1]
    assert shares.isnan().any()  # 0 of 0
    assert torch.equal(weight[1], torch.zeros(8).double())
    assert bias[1] == pytest.approx(0.1)
    assert not torch.allclose(own[1][0][1], weight[1])
    assert weight[[0, 2]].abs().min() > 0


def test_a_client_without_examples_of_a_class_has_no_weight_there():
    task, train, _ = blobs(clients=3)
    own = torch.arange(3).repeat_interleave(train.sizes)  # client k has class k alone
    data = cs.Dataset(train.data.x[train.order], own, name="apart")
    apart = cs.Federation.from_owner(data, own)
    run = learn(cs.PFNM(TRAIN, cs.matching.BetaBernoulli(prior_variance=1e12)), task, apart)
    networks, shares = kept(TRAIN, task, apart)
    assert torch.equal(shares, torch.eye(3).double())
    torch.testing.assert_close(run.model[2].bias.double(), torch.stack([networks[c][1][1][c] for c in range(3)]))


def test_mass_decides_between_the_local_width_and_all_units():
    task, train, _ = blobs()
    widths = [
        learn(cs.PFNM(TRAIN, cs.matching.BetaBernoulli(variance=v, mass=m)), task, train).history[-1]["width"]
        for v, m in ((1.0, 1e-300), (1.0, 1.0), (1e-6, 1e6))
    ]
    assert widths[0] == 8
    assert widths[0] <= widths[1] <= widths[2] == 6 * 8


def test_a_client_that_sends_nan_leaves_the_width_to_the_others():
    @cs.algorithm
    class Sick(cs.PFNM):
        def local(self, task, message, state, cohort):
            update, state = super().local(task, message, state, cohort)
            update.theta[cohort.ids == 1] = torch.nan
            return update, state

    task, train, _ = blobs(clients=4)
    run = learn(Sick(TRAIN, MANY), task, train)
    networks, _ = kept(TRAIN, task, train)
    counts = train.label_counts()[[0, 2, 3]].double()
    found = cs.matching.match([networks[k] for k in (0, 2, 3)], MANY, shares=counts / counts.sum(0))
    assert [r["client"] for r in run.history[-1]["rejected"]] == [train.name(1)]
    assert run.history[-1]["width"] == sum(found.widths) <= 24
    assert run.server.units[:, 0].lt(0).tolist() == [False, True, False, False]
    torch.testing.assert_close(run.posterior.mean, Stack.of(task.module).flat(found.layers), rtol=1e-10, atol=1e-10)


def test_convolutional_networks_are_matched_channel_by_channel():
    made = torch.Generator().manual_seed(0)
    y = torch.arange(45) % 3
    x = torch.randn(45, 1, 8, 8, generator=made) + y.view(-1, 1, 1, 1)
    federation = cs.Federation.from_owner(cs.Dataset(x, y, name="images"), torch.arange(45) // 15)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 6), nn.ReLU()]
        task = cs.Classification(nn.Sequential(*layers, nn.Linear(6, 3)))
    run = learn(cs.PFNM(cs.optim.AMSGrad(lr=0.01, epochs=8, batch_size=8)), task, federation, rounds=2)
    conv, dense = run.model[0], run.model[4]
    assert 4 <= conv.out_channels <= 12
    assert 6 <= dense.out_features <= 18
    assert dense.in_features == 9 * conv.out_channels
    assert run.history[-1]["width"] == conv.out_channels + dense.out_features
    assert run.predict(x.double()).isfinite().all()
    assert run.evaluate(federation.data).point["accuracy"] > 0.5


def test_regression_has_no_shares_of_classes_and_is_matched_without():
    _, federation = linear()
    task = cs.Regression(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    run = learn(cs.PFNM(TRAIN), task, federation)
    members, stack = learn(cs.algorithms.Ensemble(TRAIN), task, federation).server, Stack.of(task.module)
    assert members.labels is None
    found = cs.matching.match([stack.layers(theta) for theta in members.theta], cs.matching.BetaBernoulli())
    torch.testing.assert_close(run.posterior.mean, stack.flat(found.layers), rtol=1e-10, atol=1e-10)


# Several rounds


def test_in_the_next_round_clients_start_from_their_slices():
    task, (_, train, _) = two_layers(), blobs()
    method = cs.PFNM(TRAIN, MANY)
    run = learn(method, task, train, rounds=2)
    ids, stack = torch.tensor([4, 0, 3]), Stack.of(task.module)
    start = method.starts(run.server, ids)
    wide = [(layer.weight.double(), layer.bias.double()) for layer in run.model if isinstance(layer, nn.Linear)]
    for client, theta in zip(ids.tolist(), start.theta, strict=True):
        units = run.server.units[client].split([6, 5])
        torch.testing.assert_close(theta.float(), stack.flat(slice_of(wide, units)).float())
    assert start.known.tolist() == [[1.0]] * 3


def test_one_client_that_does_not_train_comes_back_the_same():
    task, federation = one_client(0, 1, 2)
    how = cs.matching.BetaBernoulli(prior_variance=1e12)
    once, twice = (learn(cs.PFNM(STILL, how), task, federation, rounds=n) for n in (1, 2))
    torch.testing.assert_close(once.posterior.mean, twice.posterior.mean, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(once.posterior.mean, task.initial().double(), atol=0.01)  # a start of the client's own


def test_a_client_that_missed_the_last_round_draws_its_own_start():
    task, train, _ = blobs()
    method = cs.PFNM(STILL, cs.matching.BetaBernoulli(prior_variance=1e12))
    run = learn(method, task, train, rounds=3, cohort=2)
    start = method.starts(run.server, torch.arange(6))
    absent = (start.known[:, 0] == 0).nonzero().flatten()
    assert len(absent) == 4
    at = run.task
    group = cs.data.Cohort(train, absent[train.sizes[absent].argsort(descending=True)], round=4, round_size=4, seed=0)
    group.dtype = at.dtype
    update, _ = method.local(at, method.message(run.server, group.ids), None, group)
    torch.testing.assert_close(update.theta, own_start(at, group))
    assert torch.equal(update.client, group.ids)


# Streams


def snapshots(method, task, stream, **options):
    """The server after every round."""
    servers = []
    learn(method, task, stream, callbacks=[lambda run, line: servers.append(run.server)], **options)
    return servers


@pytest.mark.parametrize("build", [lambda: blobs()[0], two_layers], ids=["one layer", "two"])
def test_in_a_stream_units_stay_and_are_counted(build):
    task, (_, train, _) = build(), blobs()
    servers = snapshots(cs.PFNM(TRAIN, MANY, streaming=True), task, train.stream(3), rounds=4)
    local = Stack.of(task.module).widths
    for step, server in enumerate(servers, 1):
        assert int(server.memory.step) == step + 1
        for width, own, known in zip(server.widths.tolist(), local, server.memory.layers, strict=True):
            assert known.counts.shape == (6, width)
            assert 0 <= known.counts.min() <= known.counts.max() <= step
            assert known.counts.sum(1).tolist() == [own * step] * 6
    for before, after in pairwise(servers):
        assert bool((after.widths >= before.widths).all())
        for old, new in zip(before.memory.layers, after.memory.layers, strict=True):
            grown = new.counts[:, : old.counts.shape[1]] - old.counts
            assert set(grown.unique().tolist()) <= {0, 1}
            # A wider layer below adds incoming weights, in front of a bias and three outgoing weights.
            end, more = old.lam.shape[1] - 4, new.lam.shape[1] - old.lam.shape[1]
            stayed = torch.cat([new.lam[:, :end], new.lam[:, end + more :]], dim=1)
            assert bool((stayed[: len(old.lam)] >= old.lam - 1e-9).all())


def test_in_a_stream_absent_clients_keep_their_counts_and_units():
    task, train, _ = blobs()
    servers = snapshots(cs.PFNM(TRAIN, MANY, streaming=True), task, train.stream(3), rounds=4, cohort=2)
    for before, after in pairwise(servers):
        old, new = before.memory.layers[0].counts, after.memory.layers[0].counts
        there = new.sum(1) > old.sum(1)
        assert int(there.sum()) == 2
        assert torch.equal(new[~there, : old.shape[1]], old[~there])
        assert not new[~there, old.shape[1] :].any()
        assert torch.equal(after.units[~there], before.units[~there])
        assert bool((after.units[there] >= 0).all())
    asked = cs.PFNM(TRAIN, MANY, streaming=True).starts(servers[-1], torch.arange(6))
    assert torch.equal(asked.known[:, 0] > 0, servers[-1].memory.layers[0].counts.sum(1) > 0)


@pytest.mark.parametrize(("mass", "fresh"), [(0.2, 0), (3.0, 3), (100.0, 8)])
def test_a_client_continues_with_the_units_it_used_and_a_few_at_zero(mass, fresh):
    task, train, _ = blobs()
    how, ids = cs.matching.BetaBernoulli(variance=0.1, mass=mass), torch.arange(6)
    (server,) = snapshots(cs.PFNM(TRAIN, how, streaming=True), task, train.stream(4), rounds=1)
    stack = Stack.of(task.module)
    exact, noisy = (
        cs.PFNM(TRAIN, how, streaming=True, jitter=jitter).starts(server, ids).theta for jitter in (0.0, 0.01)
    )
    (weight, bias), (onward, last) = stack.with_widths(server.widths.tolist()).layers(server.theta)
    units = torch.cat([weight, bias.unsqueeze(1), onward.T], dim=1)
    for client in range(6):
        (w, b), (o, output) = stack.layers(exact[client])
        mine = torch.cat([w, b.unsqueeze(1), o.T], dim=1)
        drawn = (mine[: 8 - fresh].unsqueeze(1) == units).all(2)
        assert drawn.sum(1).tolist() == [1] * (8 - fresh)  # each is one of the global units
        assert server.memory.layers[0].counts[client, drawn.int().argmax(1)].tolist() == [1] * (8 - fresh)
        assert drawn.sum(0).max() <= 1
        assert not mine[8 - fresh :].any()
        assert torch.equal(output, last)
    assert (noisy - exact).std() == pytest.approx(0.01, rel=0.2)


def known(counts):
    """A network of as many hidden units as there are counts, unit i being i + 1 throughout; and a memory."""
    numbers = torch.arange(1.0, len(counts) + 1)
    layers = [(numbers.unsqueeze(1), numbers), (numbers.unsqueeze(0), torch.zeros(1))]
    empty = torch.zeros(len(counts), 3)
    return layers, Memory((Known(empty, empty, torch.tensor([counts]), torch.tensor(5)),), None)


def test_units_are_drawn_by_how_often_they_were_used_and_unused_ones_come_last():
    layers, memory = known([0, 3, 0, 1, 2, 0])
    for seed in range(20):
        units = restart(layers, memory, 0, [4], 0, keys.key(seed, purpose="test"))[0][1].long() - 1
        assert {1, 3, 4} < set(units.tolist())
        assert len(set(units.tolist())) == 4
    layers, memory = known([0, 9, 1])
    first = [int(restart(layers, memory, 0, [1], 0, keys.key(s, purpose="test"))[0][1]) - 1 for s in range(1000)]
    assert 0 not in first
    assert first.count(1) / 1000 == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize(
    "second",
    [cs.PFNM(STILL, cs.matching.BetaBernoulli(prior_variance=1e12)), cs.algorithms.Ensemble(STILL)],
    ids=lambda method: method.name,
)
def test_after_another_method_clients_continue_from_its_weights(second):
    task, federation, test = blobs()
    first = learn(cs.FedAvg(TRAIN), task, federation, rounds=2)
    run = learn(cs.Switch(cs.FedAvg(TRAIN), second, at=2), task, federation, rounds=3)
    x = test.data.x[:20].double()
    torch.testing.assert_close(run.predict(x), first.predict(x), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(run.predict(x), task.prepare(dtype=torch.float64).predict(task.initial(), x))
