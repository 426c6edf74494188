"""BatchNorm at real sites: statistics, scores and resumed runs are the simulator's, and wrong sums are rejected."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import ConfigError, TaskError
from consilience.core.records import pack, tree_map, unpack
from consilience.flower.messages import STATISTICS, StatisticsReply, decode, encode
from support.flower_grid import BAD, FEDAVG, FEDEP, LAPLACE, TRAIN, World, assert_same, score

FEDBN = cs.algorithms.FedBN(TRAIN)
QUERY = f"query.{STATISTICS}"


pytestmark = pytest.mark.usefixtures("_unhurried")


@pytest.fixture
def world(tmp_path):
    """Clouds of points at four sites that hold some out, and a network with two BatchNorm layers."""

    def make(method=FEDAVG, folder=".", *, batch_norm="estimated", held_out=True):
        there = World.blobs(method, tmp_path / folder)
        torch.manual_seed(0)
        layers = nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        task = cs.Classification(nn.Sequential(*layers), batch_norm=batch_norm)
        test = there.held_out if held_out else None
        return World(method, task, there.federation, there.folder, test)

    return make


def pooled(there):
    return replace(there.held_out, names=None).pooled().client(0)


def wrong(change):
    """A site's reply with other sums."""

    def instead(reply):
        sums = unpack(decode(reply.content, StatisticsReply)[1]["sums"])
        reply.content = encode(StatisticsReply(), sums=pack(change(sums)))
        return reply

    return instead


@pytest.mark.parametrize("method", [FEDAVG, cs.FedEP(LAPLACE)], ids=lambda method: method.name)
def test_estimated_statistics_and_scores_are_the_simulators(world, method):
    there = world(method)
    run, wanted = score(there, 2)[0], there.simulated(2)
    assert_same(run.server, wanted.server)
    assert_same(run.statistics, wanted.statistics)
    scores = wanted.evaluate(pooled(there))
    assert run.history[-1]["eval"] == pytest.approx(scores.point, abs=1e-7)
    assert run.history[-1].get("marginal") == pytest.approx(scores.marginal, abs=1e-7)
    assert [kind for kind, _ in there.grid.delivered].count(QUERY) == 2 * 2 * 4, "two passes for each evaluation"
    assert_same(run.model(there.held_out.data.x), wanted.model(there.held_out.data.x), 1e-6)


def test_test_data_at_the_server_are_scored_with_the_sites_statistics(world):
    there = world(held_out=False)
    test = there.federation.data
    run = score(there, test=test)[0]
    assert run.history[-1]["eval"] == pytest.approx(there.simulated(1).evaluate(test).point, abs=1e-10)


def test_running_averages_are_averaged_as_in_the_simulator(world):
    there = world(batch_norm="averaged")
    run, wanted = score(there, 2)[0], there.simulated(2)
    assert_same(run.server, wanted.server)
    assert run.history[-1]["eval"] == pytest.approx(wanted.evaluate(pooled(there)).point, abs=1e-7)
    assert QUERY not in {kind for kind, _ in there.grid.delivered}


def test_sites_of_fedbn_score_their_own_models(world):
    there = world(FEDBN)
    (run, saved), wanted = score(there, 2), there.simulated(2)
    assert_same(run.server, wanted.server)
    for k, site in enumerate(there.names):
        assert_same(there.state(run, site), wanted.states.gather(torch.tensor([k])))
    everyone = wanted.evaluate(there.held_out)
    assert [client["metrics"] for client in saved["clients"]] == [
        pytest.approx(client["metrics"], abs=1e-10) for client in everyone.clients
    ]
    assert run.history[-1]["eval"]["accuracy"] == pytest.approx(everyone.point["accuracy"])
    with pytest.raises(TaskError, match="the models of FedBN are at the clients' sites"):
        run.personal(0)


def test_a_site_that_never_took_part_scores_the_model_it_would_start_from(world):
    there = world(cs.LocalOnly(TRAIN), batch_norm="averaged")
    (_, saved), wanted = score(there, cohort=2), there.simulated(1, cohort=2)
    everyone = wanted.evaluate(there.held_out)
    assert len({client["metrics"]["nll"] for client in saved["clients"]}) == 4
    assert [client["metrics"] for client in saved["clients"]] == [
        pytest.approx(client["metrics"], abs=1e-10) for client in everyone.clients
    ]


def test_models_of_sites_are_not_scored_with_statistics_of_another_model(world, caplog):
    run = world(cs.LocalOnly(TRAIN)).serve(1, evaluate_every=1)
    assert "eval" not in run.history[-1]
    assert "sites cannot score LocalOnly" in caplog.text


def test_a_site_whose_own_norms_are_lost_is_named(world, caplog):
    there = world(FEDBN)
    there.serve(1)
    there.instead["query", BAD] = lambda reply: there.wipe(BAD) or reply
    there.faults[2, BAD] = lambda delivery: there.wipe(BAD)  # no reply, and no disk when it is asked for scores
    run = there.serve(2, evaluate_every=2)
    assert "eval" in run.history[-1]
    assert f"the scores of {BAD!r} are rejected: SiteError: the state that it predicts with" in caplog.text


def test_the_server_cannot_test_models_that_only_sites_know(world):
    there = world(FEDBN)
    with pytest.raises(ConfigError, match="every site of FedBN has a model of its own"):
        there.serve(1, test=there.federation.data)
    assert not there.out.exists()


NOT_FINITE = "its sums are not finite"
WRONG = {
    "another shape": (lambda sums: tree_map(lambda leaf: leaf[:-1], sums), "shape"),
    "another type": (lambda sums: tree_map(torch.Tensor.float, sums), "float32"),
    "another record": (lambda sums: sums.count, ""),
    "not a number": (lambda sums: replace(sums, first=sums.first * torch.nan), NOT_FINITE),
    "infinite": (lambda sums: replace(sums, second=sums.second + torch.inf), NOT_FINITE),
    "too large": (lambda sums: tree_map(lambda leaf: 1e6 * leaf, sums), "its sums do not count the entries of its"),
    "overflowing": (lambda sums: replace(sums, second=sums.second + 1e300), "its sums are so large that they would"),
    "nothing": (lambda sums: tree_map(torch.zeros_like, sums), "its sums do not count the entries of its"),
    "negative": (lambda sums: replace(sums, second=-sums.second), "its sums have a negative variance"),
}


@pytest.mark.parametrize(("change", "reason"), WRONG.values(), ids=WRONG)
def test_a_site_with_impossible_sums_counts_as_one_without_sums(world, change, reason, caplog):
    there, without = world(), world(folder="without")
    there.instead[QUERY, BAD], without.instead[QUERY, BAD] = wrong(change), lambda reply: None
    run, wanted = there.serve(1, evaluate_every=1), without.serve(1, evaluate_every=1)
    assert_same(run.statistics, wanted.statistics, 0)
    assert run.history[-1]["eval"] == wanted.history[-1]["eval"]
    assert f"the statistics of {BAD!r} are rejected: " in caplog.text
    assert reason in caplog.text


def test_a_site_counts_for_no_more_examples_than_the_run_allows(world):
    there, other = world(), world(folder="limited")
    other.participation = {"max_examples": 5}
    run, limited = there.serve(1), other.serve(1)
    assert run.statistics.count.tolist() == [there.federation.examples] * 11
    assert limited.statistics.count.tolist() == pytest.approx([5 * 4] * 11)


def test_a_run_without_any_statistics_continues_without_scores(world, caplog):
    there = world()
    there.instead = {(QUERY, site): lambda reply: None for site in there.names}
    run = there.serve(2, evaluate_every=1)
    assert [line["round"] for line in run.history] == [1, 2]
    assert "eval" not in run.history[-1]
    assert run.statistics is None
    assert "no site sent the statistics of BatchNorm layers" in caplog.text
    with pytest.raises(TaskError, match="the statistics of BatchNorm layers are not known"):
        run.predict(there.federation.data.x.double())


@pytest.mark.parametrize("method", [FEDAVG, FEDBN, FEDEP], ids=lambda method: method.name)
def test_a_resumed_run_is_the_uninterrupted_one(world, method):
    whole, parts = world(method), world(method, "parts")
    wanted = whole.serve(3, evaluate_every=1)
    parts.serve(1, evaluate_every=1)
    parts.restart(BAD)
    run = parts.serve(3, evaluate_every=1)
    assert_same(run.server, wanted.server, 0)
    assert [line["eval"] for line in run.history] == [line["eval"] for line in wanted.history]
    if run.statistics is not None:
        assert_same(run.statistics, wanted.statistics, 0)


def test_a_finished_run_needs_no_sites(world):
    there = world()
    run = there.serve(1, evaluate_every=1)
    before = (there.out / "evaluation.json").read_bytes()
    for site in there.names:
        there.kill(site)
    again = there.serve(1, evaluate_every=1)
    assert_same(again.server, run.server, 0)
    assert (there.out / "evaluation.json").read_bytes() == before
