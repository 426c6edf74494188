"""Robust: rules against naive loops, limits, what it is for, and what it refuses."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import consilience as cs
from consilience.config import read_config
from consilience.core.errors import ConfigError, ConsilienceError
from consilience.core.records import Weighted, leaves, rows, tree_map
from support.scenarios import blobs, linear

ENGINE = cs.Simulator(device="cpu", chunk=8, workers=1, precision="float64")
TRAIN = cs.SGD(lr=0.1, epochs=2, batch_size=5)
RULES = (cs.algorithms.Median(), cs.algorithms.TrimmedMean(0.3), cs.algorithms.Krum(1, 2))


def values(clients=7, seed=0):
    made = torch.Generator().manual_seed(seed)
    return cs.Gaussian(*torch.randn(2, clients, 3, generator=made, dtype=torch.float64))


def naive_trimmed(column, cut):
    return statistics.fmean(sorted(column)[cut : len(column) - cut])


def naive_krum(vectors, bad, keep):
    """The paper's words: for every client, the nearest K − bad − 2 others."""
    scores = []
    for i, mine in enumerate(vectors):
        to_others = [sum((a - b) ** 2 for a, b in zip(mine, v, strict=True)) for j, v in enumerate(vectors) if j != i]
        scores.append((sum(sorted(to_others)[: len(vectors) - bad - 2]), i))
    chosen = [vectors[i] for _, i in sorted(scores)[:keep]]
    return [statistics.fmean(column) for column in zip(*chosen, strict=True)]


@pytest.mark.parametrize("clients", [1, 2, 5, 6])
def test_the_median_is_that_of_every_coordinate(clients):
    found = cs.algorithms.Median()(values(clients))
    for name, leaf in leaves(values(clients)):
        expected = [statistics.median(column) for column in leaf.T.tolist()]
        torch.testing.assert_close(getattr(found, name), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("share", "clients", "cut"), [(0.2, 5, 1), (0.2, 4, 0), (0.29, 100, 29), (0.49, 3, 1)])
def test_a_trimmed_mean_leaves_out_its_share_at_both_ends(share, clients, cut):
    found = cs.algorithms.TrimmedMean(share)(values(clients))
    for name, leaf in leaves(values(clients)):
        expected = [naive_trimmed(column, cut) for column in leaf.T.tolist()]
        torch.testing.assert_close(getattr(found, name), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("bad", "keep"), [(0, 1), (1, 1), (2, 1), (1, 3), (0, 7)])
@pytest.mark.parametrize("seed", range(3))
def test_krum_is_that_of_the_paper_over_all_leaves_together(bad, keep, seed):
    update = values(7, seed)
    vectors = torch.cat([update.eta, update.lam], dim=1).tolist()
    found = cs.algorithms.Krum(bad, keep)(update)
    expected = torch.tensor(naive_krum(vectors, bad, keep), dtype=torch.float64)
    torch.testing.assert_close(torch.cat([found.eta, found.lam]), expected)


def test_krum_picks_an_honest_client_of_those_that_agree():
    honest = torch.tensor([[1.0, 1.0], [1.1, 1.0], [1.0, 1.1], [0.9, 1.0]])
    hostile = torch.tensor([[1e30, -1e30]])  # its square is beyond float32
    found = cs.algorithms.Krum(bad=1)(cs.Point(torch.cat([honest[:2], hostile, honest[2:]])))
    torch.testing.assert_close(found.theta, honest[0])


def test_what_all_updates_have_in_common_does_not_blur_their_distances():
    apart = torch.tensor([0.0, 0.05, 0.11, 0.06, 0.5, 0.055, 0.9]).unsqueeze(1)
    vectors = 1000 + apart.repeat(1, 4)
    assert cs.algorithms.Krum(bad=1)(cs.Point(vectors)).theta.tolist() == vectors[5].tolist()


@pytest.mark.parametrize("rule", RULES, ids=repr)
@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(7)), seed=st.integers(0, 5))
def test_the_order_of_clients_does_not_matter(rule, order, seed):
    update = values(7, seed)
    for (_, a), (_, b) in zip(leaves(rule(update)), leaves(rule(rows(update, torch.tensor(order)))), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rule", [cs.algorithms.Median(), cs.algorithms.TrimmedMean(0.3)], ids=repr)
@settings(max_examples=20, deadline=None)
@given(wrong=st.lists(st.floats(-1e30, 1e30), min_size=2, max_size=2))
def test_two_wrong_clients_of_seven_cannot_leave_the_range_of_the_others(rule, wrong):
    honest = values(5).eta
    found = rule(torch.cat([honest, torch.tensor(wrong, dtype=torch.float64).unsqueeze(1).expand(-1, 3)]))
    assert ((found >= honest.min(0).values) & (found <= honest.max(0).values)).all()


# In a federation


def fit(method, task, federation, **options):
    return cs.fit(method, task, federation, **{"rounds": 3, "engine": ENGINE, "progress": False} | options)


@pytest.mark.parametrize(
    "method",
    [cs.FedAvg(TRAIN, cs.server.Adam()), cs.algorithms.FedSEP(cs.inference.Identity(TRAIN))],
    ids=lambda m: m.name,
)
def test_nothing_trimmed_among_equal_clients_is_the_method_itself(method):
    task, federation = linear(sizes=(6, 6, 6, 6), names=None)
    plain, robust = (fit(m, task, federation) for m in (method, cs.Robust(method, cs.algorithms.TrimmedMean(0))))
    for (name, x), (_, y) in zip(leaves(plain.server), leaves(robust.server), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def test_clients_of_unequal_size_count_the_same():
    task, federation = linear()
    start = task.initial().double()
    whole = (
        fit(cs.Robust(cs.FedAvg(TRAIN), cs.algorithms.TrimmedMean(0)), task, federation, rounds=1).posterior.mean
        - start
    )
    trained = fit(cs.LocalOnly(TRAIN), task, federation, rounds=1)
    alone = [trained.personal(client).mean - start for client in range(len(federation))]
    torch.testing.assert_close(whole, torch.stack(alone).mean(0))


class Hostile(cs.FedAvg):
    """Client 2 sends the opposite of its update, a hundred times."""

    def local(self, task, message, state, cohort):
        update, state = super().local(task, message, state, cohort)
        factor = torch.where(cohort.ids == 2, -100.0, 1.0).unsqueeze(1)
        return Weighted(tree_map(lambda leaf: leaf * factor, update.total), update.weight), state


@pytest.mark.parametrize(
    "rule",
    [cs.algorithms.Median(), cs.algorithms.TrimmedMean(), cs.algorithms.Krum(keep=3)],
    ids=repr,
)
def test_one_hostile_client_of_five_spoils_fedavg_and_not_robust(rule):
    task, train, test = blobs(clients=5)
    hostile = Hostile(cs.SGD(lr=0.3, epochs=2, batch_size=5))
    spoilt, held = (fit(m, task, train, rounds=8, test=test) for m in (hostile, cs.Robust(hostile, rule)))
    assert spoilt.evaluate(test).point["accuracy"] < 0.6
    assert held.evaluate(test).point["accuracy"] > 0.9


@pytest.mark.parametrize("weight", [0.0, 1e300, -5.0])
def test_a_weight_that_a_client_makes_up_changes_little(weight):
    honest = values(5).eta
    weights = torch.ones(6, 1, dtype=torch.float64)
    weights[-1] = weight
    update = Weighted(cs.Point(torch.cat([honest, honest[:1]])), weights)
    server = cs.FedAvg().start(None, cs.data.Info(torch.zeros(3, dtype=torch.float64), *torch.tensor([0, 6, 6])))
    found = cs.Robust(cs.FedAvg()).fuse(server, update).model.theta
    assert ((found >= honest.min(0).values) & (found <= honest.max(0).values)).all()


# Settings and refusals


def test_a_config_builds_it_and_short_keys_reach_the_inner_optimiser(tmp_path):
    config = tmp_path / "robust.toml"
    config.write_text(
        """
        data.name = "heart-disease"
        partition = {name = "by_group", group = "hospital"}
        model.name = "logistic"
        run.rounds = 1
        [algorithm]
        name = "Robust"
        method = {name = "FedAvg", lr = 0.1}
        rule = {name = "TrimmedMean", share = 0.3}
        """
    )
    assert read_config(config).algorithm() == cs.Robust(cs.FedAvg(cs.SGD(lr=0.1)), cs.algorithms.TrimmedMean(0.3))
    given = ["algorithm.method=FedSEP", "algorithm.lr=0.3", "algorithm.rule=Krum"]
    assert read_config(config, given).algorithm() == cs.Robust(
        cs.algorithms.FedSEP(cs.inference.Identity(cs.SGD(lr=0.3))), cs.algorithms.Krum()
    )


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: cs.Robust(cs.algorithms.FedBE()),
            "Robust needs a method whose updates add up, but FedBE takes them one by one",
        ),
        (lambda: cs.Robust(cs.Robust()), "Robust cannot hold Robust(FedAvg, Median)"),
        (lambda: cs.Robust(cs.Private(noise=0.0)), "Robust cannot hold Private(FedAvg)"),
        (lambda: cs.Robust(cs.FedEP()), "Robust cannot hold FedEP(I), whose server has the sum"),
        (lambda: cs.Robust(cs.SCAFFOLD()), "Robust cannot hold SCAFFOLD, whose server has the sum"),
        (lambda: cs.algorithms.TrimmedMean(0.5), "TrimmedMean: share must be below 0.5, got 0.5"),
        (lambda: cs.algorithms.TrimmedMean(-0.1), "TrimmedMean: share must be at least 0, got -0.1"),
        (lambda: cs.algorithms.Krum(bad=-1), "Krum: bad must be at least 0, got -1"),
        (lambda: cs.algorithms.Krum(keep=0), "Krum: keep must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_right_is_refused_in_a_sentence(make, sentence):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(("bad", "keep", "clients", "needed"), [(1, 1, 4, 5), (2, 1, 6, 7), (0, 5, 4, 5), (1, 5, 5, 6)])
def test_krum_with_too_few_clients_is_an_error(bad, keep, clients, needed):
    with pytest.raises(ConsilienceError, match=f"needs {needed} clients in every round, got {clients}"):
        cs.algorithms.Krum(bad, keep)(values(clients))
    cs.algorithms.Krum(bad, keep)(values(needed))
