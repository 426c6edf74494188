"""Private: clipping, noise and ε, its limits, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import sys

import dp_accounting
import pytest
import torch
from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent, pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st

import consilience as cs
from consilience.algorithms.private import _clipped
from consilience.config import read_config
from consilience.core import keys
from consilience.core.errors import ConfigError
from consilience.core.records import Weighted, leaves, tree_map
from support.scenarios import linear

ENGINE = cs.Simulator(device="cpu", chunk=3, workers=1, precision="float64")
TRAIN = cs.SGD(lr=0.1, epochs=2, batch_size=5)
REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE


HELD = [
    cs.FedAvg(TRAIN), cs.FedProx(TRAIN), cs.algorithms.FedSGD(), cs.algorithms.FedNova(TRAIN),
    cs.algorithms.FedPA(), cs.algorithms.MOON(TRAIN), cs.algorithms.FedLA(TRAIN),
    *(kind(cs.inference.Identity(TRAIN))
      for kind in (cs.algorithms.FedSEP, cs.algorithms.ADF, cs.algorithms.FedPADiagonal)),
]  # fmt: skip


def fit(method, task, federation, **options):
    return cs.fit(method, task, federation, **{"rounds": 3, "engine": ENGINE, "progress": False} | options)


def change(run):
    return run.posterior.mean - run.task.initial()


# Clipping


@settings(max_examples=30, deadline=None)
@given(
    numbers=st.lists(st.floats(-1e6, 1e6, width=32), min_size=8, max_size=8),
    clip=st.floats(1e-3, 1e3),
)
def test_updates_are_no_longer_than_clip_and_keep_their_direction(numbers, clip):
    eta, lam = torch.tensor(numbers).split([6, 2])
    factor = cs.Gaussian(eta.view(2, 3), lam.view(2, 1))
    flat, after = (torch.cat([g.eta, g.lam], dim=1).double() for g in (factor, _clipped(factor, clip)))
    length = flat.norm(dim=1, keepdim=True)
    assert (after.norm(dim=1) <= clip * (1 + 1e-6)).all()
    expected = torch.where(length > clip, flat * (clip / length.clamp_min(1e-30)), flat)
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-30)


def test_clipped_clients_are_counted_and_none_moves_the_mean_by_more_than_its_share():
    task, federation = linear()
    run = fit(cs.Private(cs.FedAvg(TRAIN), clip=0.01, noise=0.0), task, federation, rounds=1)
    assert run.history[0]["guards"] == {"update clipped": 5}
    assert 0 < change(run).norm() <= 0.01


# Limits


@pytest.mark.parametrize(
    "method",
    [cs.FedAvg(TRAIN, cs.server.Adam()), cs.algorithms.FedSEP(cs.inference.Identity(TRAIN))],
    ids=lambda m: m.name,
)
def test_without_noise_and_clipping_equal_clients_have_the_method_itself(method):
    task, federation = linear(sizes=(6, 6, 6, 6), names=None)
    plain, private = (
        fit(m, task, federation, cohort=3) for m in (method, cs.Private(method, clip=1e6, noise=0.0, examples=24))
    )
    for (name, x), (_, y) in zip(leaves(plain.server), leaves(private.server.method), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


class Sick(cs.FedAvg):
    """Client 1's update is NaN."""

    def local(self, task, message, state, cohort):
        update, state = super().local(task, message, state, cohort)
        bad = (cohort.ids == 1).unsqueeze(1)
        return Weighted(tree_map(lambda leaf: leaf.masked_fill(bad, torch.nan), update.total), update.weight), state


def test_who_does_not_answer_counts_as_nothing_in_the_mean():
    task, federation = linear(sizes=(6, 6, 6, 6), names=None)
    quiet = {"clip": 1e6, "noise": 0.0}
    private, plain = (fit(m, task, federation, rounds=1) for m in (cs.Private(Sick(TRAIN), **quiet), Sick(TRAIN)))
    assert [client["client"] for client in private.history[0]["rejected"]] == [federation.name(1)]
    torch.testing.assert_close(change(private), change(plain) * 3 / 4)


# Noise


def state(method, parameters=4000, seed=0, clients=10):
    initial = torch.zeros(parameters)
    return method.start(None, cs.data.Info(initial, *torch.tensor([seed, clients, 100])))


def nothing(parameters=4000, planned=5.0, answered=4.0):
    """The sum of a round in which nobody has moved."""
    planned = Weighted(torch.tensor([planned * answered]), torch.tensor([answered]))
    return cs.algorithms.private.Update(Weighted(cs.Point(torch.zeros(parameters)), torch.tensor([answered])), planned)


@pytest.mark.parametrize("noise_from", ["seed", "system"])
def test_noise_has_the_deviation_of_its_length_over_the_planned_clients(noise_from, monkeypatch):
    monkeypatch.setattr(secrets, "token_bytes", bytes)
    method = cs.Private(clip=0.5, noise=3.0, noise_from=noise_from)
    first = method.fuse(state(method), nothing())
    second = method.fuse(first, nothing())
    steps = first.method.model.theta, second.method.model.theta - first.method.model.theta
    for step in steps:
        assert step.dtype == torch.float32
        assert float(step.std()) == pytest.approx(3.0 * 0.5 / 5, rel=0.05)
        assert abs(float(step.mean())) < 4 * 0.3 / math.sqrt(4000)
    together = torch.corrcoef(torch.stack(steps))[0, 1]
    assert abs(float(together)) < 4 / math.sqrt(4000)  # every release has its own
    assert (int(second.releases), int(second.cohort), int(second.clients)) == (2, 5, 10)


def test_factors_get_the_noise_of_a_sum():
    method = cs.Private(cs.algorithms.FedSEP(), clip=0.5, noise=3.0, noise_from="seed", examples=100)
    before = state(method)
    zeros = tree_map(torch.zeros_like, before.method.q)
    planned = Weighted(torch.tensor([25.0]), torch.tensor([5.0]))
    after = method.fuse(before, cs.algorithms.private.Update(zeros, planned))
    assert float((after.method.q.eta - before.method.q.eta).std()) == pytest.approx(1.5, rel=0.05)


def test_the_hash_stream_is_normal_and_another_for_every_key_and_context():
    key = torch.arange(4)
    noise = keys.sealed_normal(key, b"", 20_000)
    within = [float((noise < q).double().mean()) for q in (-2.0, -0.5, 0.0, 1.0)]
    assert within == pytest.approx([0.0228, 0.3085, 0.5, 0.8413], abs=0.01)
    for other in (keys.sealed_normal(key, b"1", 20_000), keys.sealed_normal(key + (1 << 60), b"", 20_000)):
        assert abs(float(torch.corrcoef(torch.stack([noise, other]))[0, 1])) < 0.03


def test_noise_of_the_seed_repeats_and_that_of_the_system_does_not():
    for noise_from, same in (("seed", True), ("system", False)):
        method = cs.Private(noise_from=noise_from)
        a, b = (method.fuse(state(method), nothing()).method.model.theta for _ in range(2))
        assert torch.equal(a, b) == same


def test_a_round_that_is_run_again_with_other_clients_has_other_noise():
    """Else the difference of both would be that of the clients, without any noise."""
    method = cs.Private(clip=1.0, noise=1.0)
    before = state(method)
    more = nothing()
    more.update.total.theta[0] += 1e-3
    a, again, b = (method.fuse(before, update).method.model.theta for update in (nothing(), nothing(), more))
    assert torch.equal(a, again)
    assert float((a - b).std()) == pytest.approx(math.sqrt(2) / 5, rel=0.05)


def test_clients_are_told_nothing_of_the_key():
    method = cs.Private(noise_from="system")
    told = method.message(state(method), torch.arange(2))
    assert [name for name, _ in leaves(told)] == ["theta"]


def test_a_resumed_run_goes_on_with_the_key_that_it_had(tmp_path, monkeypatch):
    class CutError(BaseException):
        pass

    def cut(run, line):
        if line["round"] == 3:
            raise CutError

    task, federation = linear()
    method, options = cs.Private(cs.FedAvg(TRAIN)), {"rounds": 5, "cohort": 3}
    out = cs.runs.Storage(tmp_path / "run", checkpoint_every=2)
    monkeypatch.setattr(secrets, "token_bytes", bytes)
    whole = fit(method, task, federation, **options)
    with pytest.raises(CutError):
        fit(method, task, federation, out=out, callbacks=[cut], **options)
    monkeypatch.setattr(secrets, "token_bytes", lambda n: bytes(range(n)))
    resumed = fit(method, task, federation, out=out, resume=True, **options)
    assert torch.equal(whole.posterior.mean, resumed.posterior.mean)
    assert [line["epsilon"] for line in resumed.history] == [line["epsilon"] for line in whole.history]
    other = fit(method, task, federation, **options)
    assert not torch.equal(whole.posterior.mean, other.posterior.mean)


# ε


def rdp_epsilon(event, rounds, delta):
    accountant = rdp.RdpAccountant(neighboring_relation=REPLACE_ONE)
    return accountant.compose(event, rounds).get_epsilon(delta)


@pytest.mark.parametrize(("noise", "cohort", "clients", "rounds"), [(2.0, 100, 1000, 40), (8.0, 5, 20, 300)])
def test_epsilon_of_sampled_cohorts_is_dp_accountings(noise, cohort, clients, rounds):
    event = SampledWithoutReplacementDpEvent(clients, cohort, GaussianDpEvent(noise / 2))
    expected = rdp_epsilon(event, rounds, 1e-6)
    assert cs.algorithms.epsilon(noise, cohort, clients, rounds, 1e-6) == pytest.approx(expected, rel=1e-12)
    assert expected < cs.algorithms.epsilon(noise, clients, clients, rounds, 1e-6)


@pytest.mark.parametrize(("noise", "rounds"), [(2.0, 10), (4.0, 3)])
def test_epsilon_where_all_take_part_is_that_of_a_privacy_loss_distribution(noise, rounds):
    """Which doubles the sensitivity itself where one client is replaced, so it gets the noise and not half of it."""
    accountant = pld.PLDAccountant(REPLACE_ONE)
    expected = accountant.compose(GaussianDpEvent(noise), rounds).get_epsilon(1e-5)
    assert cs.algorithms.epsilon(noise, 3, 3, rounds) == pytest.approx(expected, rel=1e-3)


def test_sampling_never_costs_privacy():
    """The bound of Rényi accounting alone would: with little noise it is above that of taking everybody."""
    alone = rdp_epsilon(SampledWithoutReplacementDpEvent(1000, 100, GaussianDpEvent(0.25)), 40, 1e-5)
    assert cs.algorithms.epsilon(0.5, 100, 1000, 40) == cs.algorithms.epsilon(0.5, 1000, 1000, 40) < alone


@pytest.mark.slow
def test_epsilon_grows_with_rounds_and_cohorts_and_falls_with_noise_and_clients():
    here = cs.algorithms.epsilon(2.0, 10, 100, 20)
    assert cs.algorithms.epsilon(2.0, 10, 100, 21) > here > cs.algorithms.epsilon(2.0, 10, 100, 19)
    assert cs.algorithms.epsilon(2.0, 11, 100, 20) > here > cs.algorithms.epsilon(2.0, 10, 110, 20)
    assert cs.algorithms.epsilon(1.9, 10, 100, 20) > here > cs.algorithms.epsilon(2.0, 10, 100, 20, delta=1e-4)
    assert cs.algorithms.epsilon(2.0, 10, 100, 0) == 0
    assert cs.algorithms.epsilon(0.0, 10, 100, 1) == math.inf


def test_a_run_counts_its_releases(tmp_path):
    task, federation = linear()
    private = cs.Private(cs.FedAvg(TRAIN), noise=4.0, delta=1e-4, sampling="secret")
    run = fit(private, task, federation, cohort=2, out=tmp_path / "run")
    expected = [cs.algorithms.epsilon(4.0, 2, 5, rounds, 1e-4) for rounds in (1, 2, 3)]
    assert [line["epsilon"] for line in run.history] == expected
    known = fit(dataclasses.replace(private, sampling="known"), task, federation, cohort=2)
    assert known.history[-1]["epsilon"] == cs.algorithms.epsilon(4.0, 5, 5, 3, 1e-4) > expected[-1]
    everyone = fit(cs.Private(cs.FedAvg(TRAIN), noise=4.0), task, federation)
    assert everyone.history[-1]["epsilon"] == cs.algorithms.epsilon(4.0, 5, 5, 3)


def test_a_round_without_any_answer_releases_nothing():
    class Ill(cs.FedAvg):
        def local(self, task, message, state, cohort):
            update, state = super().local(task, message, state, cohort)
            return tree_map(lambda leaf: leaf * (math.nan if cohort.round < 3 else 1), update), state

    task, federation = linear()
    run = fit(cs.Private(Ill(TRAIN)), task, federation, rounds=3)
    assert [line["epsilon"] for line in run.history] == [0.0, 0.0, cs.algorithms.epsilon(1.0, 5, 5, 1)]


def test_without_noise_metrics_have_no_epsilon_and_are_strict_json(tmp_path):
    task, federation = linear()
    run = fit(cs.Private(cs.FedAvg(TRAIN), noise=0.0), task, federation, out=tmp_path / "run")
    assert "epsilon" not in run.history[-1]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    assert len([json.loads(line, parse_constant=refuse) for line in lines]) == 3


# Sizes of clients


@pytest.mark.parametrize(
    "method",
    [cs.algorithms.FedSEP(cs.inference.Identity(TRAIN)), cs.algorithms.ADF(cs.inference.Identity(TRAIN)),
     cs.algorithms.FedPADiagonal(cs.inference.Identity(TRAIN)), cs.algorithms.FedLA(TRAIN)],
    ids=lambda m: m.name,
)  # fmt: skip
def test_a_method_that_uses_the_number_of_all_examples_needs_a_public_one(method):
    with pytest.raises(ConfigError, match="would reveal the size of a client: give Private a number"):
        state(cs.Private(method))
    started = [
        cs.Private(method, examples=50).start(None, cs.data.Info(torch.zeros(4), *torch.tensor([0, 10, total])))
        for total in (100, 10**6)
    ]
    for (name, a), (_, b) in zip(leaves(started[0].method), leaves(started[1].method), strict=True):
        assert torch.equal(a, b), f"{name} reveals the number of examples"


@pytest.mark.parametrize("method", HELD, ids=lambda m: m.name)
def test_a_clients_size_moves_no_other_client_and_the_sum_by_no_more_than_twice_clip(method):
    """All methods that Private can hold: client 0 has 6 or 600 examples, and the others learn the same."""
    private, (task, federation) = cs.Private(method, clip=0.1, noise=0.0, examples=20), linear((6, 5, 4), names=None)
    many = torch.cat([federation.indices(0).repeat(100), federation.indices(1), federation.indices(2)])
    larger = cs.Federation(federation.data, many, torch.tensor([0, 600, 605, 609]))
    seen = []
    for clients in (federation, larger):
        prepared = private.adapt(task, 0).prepare(torch.device("cpu"), torch.float64)
        info = cs.data.Info(prepared.initial(), *torch.tensor([0, 3, clients.examples]))
        server, ids = private.start(prepared, info), torch.arange(3)
        cohort = cs.data.Cohort(clients, ids, round=1, round_size=3, seed=0, dtype=torch.float64)
        n = clients.sizes.double().unsqueeze(1)
        message, held = private.message(server, ids), private.client(prepared, info, n)
        update, _ = private.local(prepared, message, held, cohort)
        seen.append((server.method, torch.cat([leaf.flatten(1) for _, leaf in leaves(update.update)], 1)))
    for (name, a), (_, b) in zip(*(leaves(inner) for inner, _ in seen), strict=True):
        assert torch.equal(a, b), f"{name} depends on a client's size"
    change = seen[0][1] - seen[1][1]
    others = float(change[1:].abs().max())  # rounding alone: batches of other widths are summed in another order
    assert others < 1e-15, "the update of another client depends on its size"
    assert float(change[0].norm()) <= 0.2 + 1e-9


# Updates that are not as a client makes them


def judged(method, **changes):
    """Which of two clients' updates are refused, if the second has other values."""
    update = nothing_of(2, planned=5.0)
    update.update.total.theta[:, 0] = method.clip * (1 - 1e-7)
    for name, value in changes.items():
        if name == "planned":
            update.planned.total[1] = value
        else:
            update.update.total.theta[1] = value
    measures = method.measures(None, None, update, n=torch.ones(2, 1), round_size=5, examples=9)
    return method.refusals(None, None, measures)


def nothing_of(clients, planned, parameters=4):
    one = torch.ones(clients, 1)
    return cs.algorithms.private.Update(
        Weighted(cs.Point(torch.zeros(clients, parameters)), one), Weighted(one * planned, one.clone())
    )


def test_the_server_refuses_updates_longer_than_clip_and_other_plans():
    method = cs.Private(clip=0.5)
    assert judged(method) == {}
    for planned in (-20.0, 100.0, 1e30, 0.0, 4.0, math.nan):
        assert set(judged(method, planned=planned)) == {1}
    assert judged(method, theta=0.26) == {1: "its update has the length 0.52, more than clip = 0.5"}
    assert set(judged(method, theta=1e30)) == {1}


# Settings and refusals


def test_a_config_builds_it_and_short_keys_reach_the_inner_optimiser(tmp_path):
    config = tmp_path / "private.toml"
    config.write_text(
        """
        data.name = "heart-disease"
        partition = {name = "by_group", group = "hospital"}
        model.name = "logistic"
        run.rounds = 1
        [algorithm]
        name = "Private"
        clip = 0.5
        noise_from = "seed"
        lr = 0.2
        """
    )
    assert read_config(config).algorithm() == cs.Private(cs.FedAvg(cs.SGD(lr=0.2)), clip=0.5, noise_from="seed")
    inner = read_config(config, ["algorithm.method.name=FedSEP", "algorithm.method.clip=3"]).algorithm()
    assert inner == cs.Private(
        cs.algorithms.FedSEP(cs.inference.Identity(cs.SGD(lr=0.2)), clip=3.0), clip=0.5, noise_from="seed"
    )


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: cs.Private(cs.algorithms.Downpour()),
            "Private needs a method whose updates add up, but Downpour takes them one",
        ),
        (lambda: cs.Private(cs.Robust()), "Private cannot hold Robust(FedAvg, Median)"),
        (lambda: cs.Private(cs.Private()), "Private cannot hold Private(FedAvg)"),
        (
            lambda: cs.Private(cs.algorithms.FedDyn()),
            "Private cannot hold FedDyn, whose server has the sum of its clients' states",
        ),
        (lambda: cs.Private(clip=0.0), "Private: clip must be above 0, got 0.0"),
        (lambda: cs.Private(clip=math.inf), "Private: clip must be finite, got inf"),
        (lambda: cs.Private(noise=-1.0), "Private: noise must be at least 0, got -1.0"),
        (lambda: cs.Private(delta=1.0), "Private: delta must be below 1, got 1.0"),
        (lambda: cs.Private(noise_from="sed"), "Private: noise_from must be 'system' or 'seed', got 'sed'"),
        (
            lambda: cs.algorithms.epsilon(1.0, 5, 4, 1),
            "noise must not be negative, delta must lie in (0, 1) and cohort must not",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_in_a_sentence(make, sentence):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).startswith(sentence)


def test_private_after_another_method_is_refused():
    task, federation = linear()
    with pytest.raises(ConfigError, match="Private must be the whole run"):
        fit(cs.Switch(cs.FedAvg(TRAIN), cs.Private(cs.FedAvg(TRAIN)), at=1), task, federation)


def test_without_the_accountant_it_says_what_to_install_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"pip install consilience\[privacy\]"):
        cs.Private()
    assert cs.Private(noise=0.0).noise == 0
