"""Whole runs of real federations in memory: whatever goes wrong, nothing that was learned is lost or counted twice."""

from __future__ import annotations

import itertools
import json
import os
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Error, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

import consilience as cs
from consilience.core.errors import CheckpointError, ConfigError, ConsilienceError
from consilience.core.records import Point, Weighted, leaves, tree_map, unpack
from consilience.flower import app as flower_app
from consilience.flower.messages import NO_STATE, EvaluateReply, SiteInfo, TrainReply, TrainRequest, decode, encode
from consilience.flower.registry import Registry
from consilience.report import write_report
from support.flower_grid import HEARTBEATS, Killed, World, unhurried
from support.scenarios import NAMES, blobs, likelihood, linear

SIZES = (7, 3, 4, 12, 5)
BAD = "Chur"
PRIOR = 0.7
TRAIN = cs.SGD(lr=0.05, batch_size=4)
LAPLACE = cs.inference.Laplace(TRAIN, kappa=1.0, s0=0.05, epochs=1)
FEDAVG, SCAFFOLD = cs.FedAvg(TRAIN), cs.SCAFFOLD(TRAIN)
FEDEP = cs.FedEP(LAPLACE, prior=PRIOR)
MOON = cs.algorithms.MOON(TRAIN)
EXACT = cs.FedEP(cs.inference.Newton(), damping=1.0, prior=PRIOR)  # finds the posterior of these data in a round of all
every_method = pytest.mark.parametrize("method", [FEDAVG, FEDEP, SCAFFOLD], ids=lambda method: method.name)
with_states = pytest.mark.parametrize("method", [FEDEP, SCAFFOLD], ids=lambda method: method.name)


@pytest.fixture(autouse=True)
def _unhurried():
    with unhurried():
        yield


@pytest.fixture
def world(tmp_path):
    def make(method, sizes=SIZES, **options):
        task, federation = linear(sizes, NAMES[: len(sizes)])
        return World(method, task, federation, tmp_path, **options)

    return make


def assert_same(found, wanted, tolerance=1e-10):
    for (name, a), (_, b) in zip(leaves(found), leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def apart(world, run):
    """How far what the server has of its clients together is from the states on their own disks: q from p₀ Π q_k, or c
    from the mean of all c_k. The server's mirror of every state must be what is there."""
    states = [world.state(run, site) for site in world.names]
    for k, state in enumerate(states):
        assert_same(run.states.gather(torch.tensor([k])), state)
    if isinstance(world.method, cs.SCAFFOLD):
        return float((run.server.c - torch.stack([state.c[0] for state in states]).mean(0)).norm())
    product = world.method.before(run.server.q.eta)
    for state in states:
        product = product * state.factor.product()
    return float((run.server.q / product).norm / run.server.q.norm)


def assert_nothing_is_lost(world, run, rounds):
    """The server agrees with the sites' disks, and every round is there once, with somebody in it."""
    if world.method is not FEDAVG:
        assert apart(world, run) < 1e-9
    assert [line["round"] for line in run.history] == list(range(1, rounds + 1))
    assert all(line["clients"] for line in run.history)
    written = [json.loads(line) for line in (world.out / "metrics.jsonl").read_text().splitlines()]
    assert written == run.history


def left_out(run):
    """(round, site) of every update that was not taken."""
    return [(line["round"], entry["client"]) for line in run.history for entry in line["rejected"]]


def requested(world, round):
    """The training requests of a round, as (site, request)."""
    return [(site, request) for site, request in world.requests if request.round == round]


@every_method
@pytest.mark.parametrize("cohort", [None, 2])
def test_where_nothing_goes_wrong_it_is_the_simulators_run(world, method, cohort):
    there = world(method)
    run, wanted = there.serve(4, cohort=cohort), there.simulated(4, cohort=cohort)
    assert_same(run.server, wanted.server)
    assert_nothing_is_lost(there, run, 4)
    assert [line["clients"] for line in run.history] == [cohort or len(SIZES)] * 4
    assert not left_out(run)
    for ours, theirs in zip(run.history, wanted.history, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["bytes_up"] == theirs["bytes_up"]


def test_a_switch_of_methods_is_the_simulators_run_and_sends_states_anew(world):
    there = world(cs.Switch(SCAFFOLD, FEDEP, at=2))
    run, wanted = there.serve(4), there.simulated(4)
    assert_same(run.server, wanted.server)
    there.method = FEDEP
    assert apart(there, run) < 1e-9
    for site, order in there.requests:
        assert order.stage == (order.round > 2)
        assert (order.base == NO_STATE) == (order.round in (1, 3)), site


def score(world, rounds=2, **options):
    run = world.serve(rounds, evaluate_every=1, **options)
    saved = json.loads((world.out / "evaluation.json").read_text())
    assert saved["point"]["metrics"] == run.history[-1]["eval"]
    return run, saved


@pytest.fixture
def clouds(tmp_path):
    def make(method):
        task, train, test = blobs(clients=4)
        names = NAMES[:4]
        return World(method, task, replace(train, names=names), tmp_path, replace(test, names=names))

    return make


@pytest.mark.parametrize("method", [FEDAVG, cs.FedEP(LAPLACE)], ids=lambda method: method.name)
def test_sites_score_the_model_on_what_they_hold_out_and_the_scores_are_those_of_all_together(clouds, method):
    there = clouds(method)
    run, saved = score(there)
    wanted = there.simulated(2)
    test = replace(there.held_out, names=None).pooled().client(0)  # as one data set: nobody's own belief
    scores, everyone = wanted.evaluate(test), wanted.evaluate(there.held_out)
    kinds = {"eval": scores.point} | ({"marginal": scores.marginal} if scores.marginal else {})
    assert ("marginal" in run.history[-1]) == ("marginal" in kinds) == (method is not FEDAVG)
    for kind, expected in kinds.items():
        for name in ("accuracy", "nll", "ece"):
            assert run.history[-1][kind][name] == pytest.approx(expected[name], abs=1e-7), (kind, name)
    assert [client["name"] for client in saved["clients"]] == list(there.names)
    for ours, theirs in zip(saved["clients"], everyone.clients, strict=True):
        assert ours["examples"] == theirs["examples"]
        assert ours["metrics"] == pytest.approx(theirs["metrics"], abs=1e-12)
    assert sum(saved["point"]["reliability"]["count"]) == there.held_out.examples


def test_with_test_data_at_the_server_no_site_is_asked(clouds):
    there = clouds(FEDAVG)
    test = there.held_out.data
    run, _ = score(there, test=test)
    assert run.history[-1]["eval"] == pytest.approx(there.simulated(2).evaluate(test).point, abs=1e-12)
    assert "evaluate" not in {kind for kind, _ in there.grid.delivered}


def test_a_site_that_fails_to_score_the_model_is_named_and_the_others_scores_stand(clouds, caplog):
    there = clouds(FEDAVG)

    def fails(reply):
        reply.__dict__.update(_content=None, _error=Error(2, "<class 'a.DataError'>:<'no disk'>"))
        return reply

    def says_nothing(reply):
        reply.content = RecordDict()
        return reply

    there.instead = {
        ("evaluate", "Basel"): fails,
        ("evaluate", "Bern"): lambda reply: None,
        ("evaluate", "Chur"): says_nothing,
    }
    run, saved = score(there)
    assert [client["name"] for client in saved["clients"]] == ["Genf"]
    assert run.history[-1]["eval"]["nll"] == pytest.approx(saved["clients"][0]["metrics"]["nll"])
    assert "the scores of 'Basel' are rejected: DataError: no disk" in caplog.text
    assert "the scores of 'Bern' are rejected: it did not reply within 20 seconds" in caplog.text
    assert "the scores of 'Chur' are rejected: the message is not a EvaluateReply" in caplog.text


def test_a_run_that_nobody_can_score_goes_on(clouds):
    there = clouds(FEDAVG)
    there.instead = {("evaluate", site): lambda reply: None for site in there.names}
    run = there.serve(2, evaluate_every=1)
    assert not any("eval" in line for line in run.history)


def says(kind, **changes):
    """A reply with other facts in it, whatever they are."""

    def instead(reply):
        facts = json.loads(decode(reply.content, kind)[0].model_dump_json()) | changes
        reply.content = RecordDict({"payload": ConfigRecord({"json": json.dumps(facts)})})
        return reply

    return instead


BINS = {"edges": [0.0, 1.0], "confidence": [0.5], "accuracy": [0.25], "count": [4]}
UNFIT = "its reliability diagram does not fit its examples"
NONSENSE = {
    "no scores": ({"point": {}}, "its scores are not those of the task"),
    "other scores": ({"point": {"beauty": 1.0}}, "its scores are not those of the task"),
    "a posterior's scores": ({"marginal": {"nll": 1.0}}, "its scores are not those of the task"),
    "other bins": ({"reliability": BINS}, UNFIT),
    "no diagram": ({"reliability": None}, UNFIT),
    "another diagram": ({"marginal_reliability": BINS}, UNFIT),
    "no bins": ({"reliability": {}}, "EvaluateReply: reliability.edges: Field required"),
    "words for numbers": ({"reliability": BINS | {"count": ["x"]}}, "EvaluateReply: reliability.count.0"),
    "more than all": ({"reliability": BINS | {"accuracy": [7.0]}}, "EvaluateReply: reliability.accuracy.0"),
    "more examples than in the diagram": ({"examples": 10**9}, UNFIT),
    "more examples than a float holds": ({"examples": 10**400}, "EvaluateReply: examples"),
}


@pytest.mark.parametrize(("nonsense", "reason"), NONSENSE.values(), ids=NONSENSE)
def test_a_site_whose_scores_make_no_sense_is_named_and_the_others_scores_stand(clouds, nonsense, reason, caplog):
    there = clouds(FEDAVG)
    there.instead["evaluate", BAD] = says(EvaluateReply, **nonsense)
    run, saved = score(there, 1)
    sites = saved["clients"]
    assert [site["name"] for site in sites] == [name for name in there.names if name != BAD]
    mean = sum(site["examples"] * site["metrics"]["nll"] for site in sites) / sum(site["examples"] for site in sites)
    assert run.history[-1]["eval"]["nll"] == pytest.approx(mean)
    assert f"the scores of {BAD!r} are rejected: {reason}" in caplog.text


def with_and_without(clouds, method, instead):
    """Two runs with their scores: one where `BAD` scores the model so, and one where it says nothing."""
    there, without = clouds(method), clouds(method)
    without.folder = there.folder / "without"
    there.instead["evaluate", BAD], without.instead["evaluate", BAD] = instead, lambda reply: None
    return score(there, 1), score(without, 1)


def test_a_site_cannot_score_with_more_examples_than_it_said_it_holds_out(clouds, caplog):
    def boasts(reply):
        facts = decode(reply.content, EvaluateReply)[0]
        count = [10**9 * n // facts.examples for n in facts.reliability.count]
        diagram = facts.reliability.model_dump() | {"count": count}
        return says(EvaluateReply, examples=sum(count), reliability=diagram)(reply)

    (run, saved), (wanted, without) = with_and_without(clouds, FEDAVG, boasts)
    assert run.history[-1]["eval"] == wanted.history[-1]["eval"]
    assert saved == without
    assert BAD not in [client["name"] for client in saved["clients"]]
    assert f"the scores of {BAD!r} are rejected: it scored 1000000000 examples, but holds 5 out" in caplog.text


@pytest.mark.parametrize(
    ("missing", "reason"), [("marginal", "its scores are not those of the task"), ("marginal_reliability", UNFIT)]
)
def test_a_site_without_a_posteriors_scores_does_not_take_those_of_the_others_away(clouds, missing, reason, caplog):
    instead = says(EvaluateReply, **{missing: None})
    (run, saved), (wanted, without) = with_and_without(clouds, cs.FedEP(LAPLACE), instead)
    assert "nll" in run.history[-1]["marginal"]
    assert run.history[-1]["marginal"] == wanted.history[-1]["marginal"]
    assert saved == without
    assert f"the scores of {BAD!r} are rejected: {reason}" in caplog.text


@pytest.mark.parametrize("boasts", [False, True], ids=["honest", "boasts"])
def test_a_site_that_holds_nothing_out_is_asked_only_if_it_says_that_it_does(clouds, boasts, caplog):
    there = clouds(FEDAVG)
    data = there.data
    there.data = lambda k: data(k).train if there.names[k] == BAD else data(k)
    if boasts:
        there.instead["query", BAD] = says(SiteInfo, held_out=5)
    run, saved = score(there, 1)
    assert [client["name"] for client in saved["clients"]] == [name for name in there.names if name != BAD]
    assert "nll" in run.history[-1]["eval"]
    assert (("evaluate", BAD) in there.grid.delivered) == boasts
    refusal = f"the scores of {BAD!r} are rejected: ConsilienceError: it holds no examples out"
    assert (refusal in caplog.text) == (BAD in caplog.text) == boasts


IMPOSSIBLE = [("held_out", 10**12 + 1), ("held_out", 10**400), ("examples", 10**400), ("x", ["bytes", [2]])]


@pytest.mark.parametrize(("fact", "value"), IMPOSSIBLE, ids=range(4))
def test_a_site_that_says_what_cannot_be_is_named_and_does_not_end_the_run(clouds, fact, value, caplog):
    there = clouds(FEDAVG)
    there.serve(1)
    there.instead["query", BAD] = says(SiteInfo, **{fact: value})
    run, saved = score(there, 2)
    assert f"node {there.nodes[BAD]} is rejected: its information is not valid: SiteInfo: {fact}" in caplog.text
    assert [line["clients"] for line in run.history] == [4, 3]
    assert [client["name"] for client in saved["clients"]] == [name for name in there.names if name != BAD]


def test_a_run_does_not_begin_with_a_site_that_says_what_cannot_be_until_it_is_mended(clouds, caplog):
    there = clouds(FEDAVG)
    there.instead["query", BAD] = says(SiteInfo, held_out=10**400)
    with pytest.raises(ConsilienceError, match=r"only 3 of 4 sites came online .*\(Basel, Bern, Genf\)"):
        there.serve(1)
    assert f"node {there.nodes[BAD]} is rejected: its information is not valid: SiteInfo: held_out: " in caplog.text
    there.instead.clear()
    assert_same(there.serve(1).server, there.simulated(1).server)


def nan(delivery):
    return delivery.with_update(lambda update: tree_map(lambda leaf: leaf * torch.nan, update))


def longer(delivery):
    return delivery.with_update(lambda update: tree_map(lambda leaf: torch.cat([leaf, leaf]), update))


def rounded(delivery):
    return delivery.with_update(lambda update: tree_map(lambda leaf: leaf.float(), update))


def other_record(delivery):
    return delivery.with_update(lambda update: Point(torch.zeros(4).double()))


def raises(delivery):
    return delivery.reply(Error(2, "<class 'torch.OutOfMemoryError'>:<'too large'>"))


def silent(delivery):
    return None


def empty(delivery):
    return delivery.reply(RecordDict())


def garbage(delivery):
    return delivery.reply(RecordDict({"payload": ConfigRecord({"json": '{"status": "done", "price": 7}'})}))


def without_update(delivery):
    return delivery.reply(encode(TrainReply(status="done")))


def no_record(delivery):
    answer, _ = decode(delivery.answer().content, TrainReply)
    return delivery.reply(encode(answer, update=b"\x00" * 64))


def no_notes(delivery):
    return delivery.with_update(lambda update: update, notes={})


def more_notes(delivery):
    answer, _ = decode(delivery.answer().content, TrainReply)
    return delivery.with_update(lambda update: update, notes=answer.notes | {"round": 1e6, "clients": 1e6})


def too_many_guards(delivery):
    return delivery.with_update(lambda update: update, guards={"precision floor": 10**400})


def refuses(delivery):
    return delivery.reply(encode(TrainReply(status="rejected", reason="its update's eta is not finite")))


BADLY = {
    nan: "is not finite",
    longer: "has shape",
    rounded: "is torch.float32 where torch.float64 was expected",
    other_record: "got Point",
    raises: "OutOfMemoryError: too large",
    silent: "it did not reply within 20 seconds",
    empty: "the message is not a TrainReply: 'payload' is missing",
    garbage: "TrainReply: price: Extra inputs are not permitted",
    without_update: "its reply has no update",
    no_record: "hold no record",
    no_notes: "its notes are not those of the method",
    more_notes: "its notes are not those of the method",
    too_many_guards: "TrainReply: guards.precision floor: Input should be less than or equal to 1000000000000",
    refuses: "its update's eta is not finite",
}


@every_method
@pytest.mark.parametrize("badly", BADLY, ids=lambda fault: fault.__name__)
def test_a_client_that_answers_badly_is_named_and_all_is_as_if_it_had_said_nothing(world, method, badly, caplog):
    there = world(method, always={BAD: badly})
    run = there.serve(2)
    assert left_out(run) == [(1, BAD), (2, BAD)]
    assert all(BADLY[badly] in line["rejected"][0]["reason"] for line in run.history)
    assert f"the update of client {BAD!r} was rejected" in caplog.text
    assert_same(run.server, there.simulated(2, missing=[BAD]).server)
    assert_nothing_is_lost(there, run, 2)


@with_states
@pytest.mark.parametrize("badly", [nan, raises, silent], ids=lambda fault: fault.__name__)
def test_a_client_that_answers_badly_once_goes_on_from_the_state_before(world, method, badly):
    there = world(method, faults={(2, BAD): badly})
    run = there.serve(3)
    assert left_out(run) == [(2, BAD)]
    assert_nothing_is_lost(there, run, 3)
    (_, first), (_, second), (_, third) = (entry for entry in there.requests if entry[0] == BAD)
    assert first.base == NO_STATE
    assert second.base == third.base == first.token


def heavier(update, factor):
    """An update whose weighted part has a larger weight."""
    if isinstance(update, Weighted):
        return tree_map(lambda leaf: leaf * factor, update)
    return replace(update, w=heavier(update.w, factor))


@pytest.mark.parametrize(("method", "own"), [(FEDAVG, 4), (SCAFFOLD, 1)], ids=["by examples", "one for each"])
def test_a_weight_of_a_billion_counts_as_what_the_client_may_have(world, method, own, caplog):
    there = world(method)
    there.always[BAD] = lambda delivery: delivery.with_update(lambda update: heavier(update, 1e9 / own))
    run = there.serve(3)
    assert_same(run.server, there.simulated(3).server, 1e-9)
    assert_nothing_is_lost(there, run, 3)
    assert caplog.text.count("which is reduced") == 1, "a client is named once"
    assert f"round 1: {BAD!r} claims a weight of 1e+09, which is reduced" in caplog.text
    assert [line["guards"] for line in run.history] == [{"weight reduced": 1}] * 3


@pytest.mark.parametrize("method", [FEDAVG, SCAFFOLD], ids=lambda method: method.name)
def test_of_honest_clients_no_weight_is_cut(world, method, caplog):
    run = world(method).serve(2)
    assert not any(line["guards"] for line in run.history)
    assert "reduced" not in caplog.text


def test_a_claim_of_a_billion_examples_changes_nothing_where_clients_are_counted_by_what_they_send(world, caplog):
    there = world(FEDAVG, instead={("query", BAD): says(SiteInfo, examples=10**9)})
    run = there.serve(2)
    assert run.federation.sizes.tolist() == [7, 3, 700, 12, 5]
    assert f"{BAD!r} claims 1000000000 examples" in caplog.text
    assert_same(run.server, there.simulated(2).server)


@with_states
def test_a_claim_of_a_billion_examples_is_cut_and_the_run_is_sound(world, method, caplog):
    there = world(method, instead={("query", BAD): says(SiteInfo, examples=10**9)}, participation={"max_examples": 10})
    run = there.serve(3)
    assert run.federation.sizes.tolist() == [7, 3, 10, 10, 5]
    assert f"{BAD!r} claims 1000000000 examples: it counts for max_examples = 10" in caplog.text
    assert_nothing_is_lost(there, run, 3)


OVER = ("round", "seconds", "clients", "bytes_down", "bytes_up", "rejected", "guards")


class Noting(cs.FedAvg):
    """Clients note what the server knows itself."""

    name = "Noting"

    def local(self, task, message, state, cohort):
        found = super().local(task, message, state, cohort)
        cohort.note(**dict.fromkeys(OVER, torch.full((len(cohort),), 1e6)))
        return found


def test_a_clients_notes_cannot_write_over_the_servers_own(world):
    there = world(Noting(TRAIN))
    run = there.serve(2)
    assert not left_out(run)
    assert_same(run.server, there.simulated(2).server)
    assert [line["round"] for line in run.history] == [1, 2]
    for line in run.history:
        assert set(OVER) < set(line)
        assert 1e6 not in line.values()


@pytest.mark.parametrize("other", [0, 10**6], ids=["somebody else", "nobody"])
def test_a_client_cannot_send_a_network_in_anothers_name(clouds, other):
    there = clouds(cs.algorithms.Ensemble(TRAIN))
    there.always[BAD] = lambda delivery: delivery.with_update(
        lambda update: replace(update, client=torch.full_like(update.client, other), theta=9 * update.theta)
    )
    run = there.serve(1)
    assert_same(run.server.theta[0], there.simulated(1).server.theta[0])
    assert left_out(run) == [(1, BAD)]
    assert run.history[0]["rejected"][0]["reason"] == "its update's client is another client's"


def twice(delivery):
    first, second = delivery.answer(), delivery.answer()
    assert decode(first.content, TrainReply) == decode(second.content, TrainReply)
    return second


@every_method
def test_an_order_that_comes_twice_is_done_once(world, method):
    there = world(method, always=dict.fromkeys(NAMES, twice))
    run = there.serve(3)
    assert_same(run.server, there.simulated(3).server)
    assert_nothing_is_lost(there, run, 3)
    if method is not FEDAVG:
        tokens = {order.token for _, order in there.requests}
        assert all(set(there.files(site).tokens()) <= tokens for site in there.names)


@every_method
def test_an_old_order_that_comes_late_undoes_nothing(world, method):
    there, old = world(method), {}

    def and_again(delivery):
        for message in old.setdefault(delivery.site, []):
            delivery.answer(message)
        old[delivery.site].append(delivery.message)
        return delivery.answer()

    there.always = dict.fromkeys(NAMES, and_again)
    run = there.serve(5)
    assert_same(run.server, there.simulated(5).server)
    assert_nothing_is_lost(there, run, 5)
    assert not left_out(run)


def wiped(delivery):
    delivery.world.wipe(delivery.site)
    return delivery.answer()


@with_states
def test_a_site_that_lost_its_disk_begins_anew_and_what_the_server_had_of_it_is_taken_out(world, method, caplog):
    there = world(method, faults={(3, BAD): wiped})
    run = there.serve(5)
    assert left_out(run) == [(3, BAD)]
    assert f"{BAD!r} has lost its state and gets a new one" in caplog.text
    assert caplog.text.count("gets a new one") == 1
    assert_nothing_is_lost(there, run, 5)
    assert dict(requested(there, 4))[BAD].base == NO_STATE


def test_a_site_that_begins_anew_is_sent_a_state_around_what_the_server_believes_now(world):
    there, believed, sent = world(FEDEP), [], []

    def read(delivery):
        _, records = decode(delivery.message.content, TrainRequest)
        sent.append(unpack(records["state"]).factor.mean[0])
        return delivery.answer()

    there.faults = {(3, BAD): wiped, (4, BAD): read}
    there.serve(4, callbacks=[lambda run, line: believed.append(run.posterior.mean)])
    assert_same(Point(sent[0]), Point(believed[2]))


def test_after_a_lost_disk_the_data_count_as_before(world):
    there = world(EXACT, faults={(2, BAD): wiped})
    run = there.serve(3)
    assert_same(run.server.q, posterior(there), 1e-9)


def posterior(world):
    """Of all data, exactly."""
    q = likelihood(world.federation)
    return q * cs.Gaussian(torch.zeros_like(q.eta), PRIOR * torch.eye(len(q.eta)).double())


@with_states
def test_a_disk_that_is_lost_while_the_server_is_down_is_found_out(world, method, caplog):
    there = world(method)
    there.serve(2)
    there.wipe(BAD)
    run = there.serve(4)
    assert left_out(run) == [(3, BAD)]
    assert f"{BAD!r} has lost its state" in caplog.text
    assert_nothing_is_lost(there, run, 4)


@with_states
def test_where_all_sites_lose_their_disks_at_once_the_round_is_tried_again(world, method):
    there = world(method)
    there.serve(2)
    for site in there.names:
        there.wipe(site)
    run = there.serve(3)
    assert not left_out(run)
    assert len(requested(there, 3)) == 2 * len(SIZES)
    assert_nothing_is_lost(there, run, 3)


@with_states
def test_the_only_client_may_lose_its_disk_in_every_round(world, method):
    there = world(method, sizes=(7,), always={"Basel": wiped})
    run = there.serve(4)
    assert_nothing_is_lost(there, run, 4)
    assert [len(requested(there, round)) for round in (1, 2, 3, 4)] == [1, 2, 2, 2]


def test_a_client_that_always_says_it_has_lost_its_state_ends_with_the_servers_patience(world):
    there = world(FEDEP, sizes=(7,), participation={"patience": 15.0})
    there.always["Basel"] = lambda delivery: delivery.reply(encode(TrainReply(status="lost", reason="gone")))
    with pytest.raises(ConsilienceError, match="round 1 was given up"):
        there.serve(2)
    assert 15 <= there.grid.now < 20


def restarted_before(delivery):
    delivery.world.restart(delivery.site)


def restarted_after(delivery):
    delivery.answer()
    delivery.world.restart(delivery.site)


def restarted_while_writing(delivery):
    """A kill between the file and its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("killed")))
        delivery.answer()
    delivery.world.restart(delivery.site)


@every_method
@pytest.mark.parametrize(
    "killed", [restarted_before, restarted_after, restarted_while_writing], ids=lambda fault: fault.__name__
)
def test_a_node_that_is_killed_and_comes_back_as_another_gets_its_order_again_in_the_same_round(world, method, killed):
    there = world(method, faults={(2, BAD): killed})
    run = there.serve(3)
    assert_same(run.server, there.simulated(3).server)
    assert not left_out(run)
    assert_nothing_is_lost(there, run, 3)
    assert there.grid.now < 20, "nobody waited for the dead node"
    again = [order for site, order in requested(there, 2) if site == BAD]
    assert len(again) == 2
    assert again[0] == again[1]
    torn = list(there.disk(BAD).rglob("*.tmp"))
    assert not torn


def dies_at(round):
    """A server that is killed after this round, before the round is saved."""

    def callback(run, line):
        if line["round"] == round:
            raise Killed

    return [callback]


def killed_after(world, rounds, at, **options):
    with pytest.raises(Killed):
        world.serve(rounds, callbacks=dies_at(at), **options)


@every_method
@pytest.mark.parametrize("checkpoint_every", [1, 3])
@pytest.mark.parametrize("at", [1, 4])
def test_a_server_that_was_killed_goes_on_to_the_same_end(world, method, checkpoint_every, at):
    there = world(method)
    killed_after(there, 5, at, checkpoint_every=checkpoint_every)
    first, ordered_then = Registry.read(there.out).start, len(there.requests)
    run = there.serve(5, checkpoint_every=checkpoint_every)
    assert_same(run.server, there.simulated(5).server)
    assert_nothing_is_lost(there, run, 5)
    second = Registry.read(there.out).start
    assert 0 < first < second
    starts = [order.token.start for _, order in there.requests]
    assert starts == [first] * ordered_then + [second] * (len(starts) - ordered_then)


def test_a_server_that_was_killed_around_a_switch_goes_on_to_the_same_end(world):
    there = world(cs.Switch(SCAFFOLD, FEDEP, at=2))
    for at in (1, 2, 3, 4):
        killed_after(there, 5, at, checkpoint_every=3)
    run = there.serve(5)
    assert_same(run.server, there.simulated(5).server)


def life(world, calls=None, writes=None, before=True, **options):
    """A server's run, or None if it is killed: when it has called the grid so many times, or when it has written so
    many files, before or after the next one gets its name."""
    real, left = os.replace, writes

    def replace(source, target):
        nonlocal left
        if left is None or world.out not in Path(target).parents:
            return real(source, target)
        left -= 1
        if left >= 0 or not before:
            real(source, target)
        if left < 0:
            raise Killed

    world.grid.calls_left = calls
    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        patch.setattr(os, "replace", replace)
        return world.serve(**options)


@pytest.mark.parametrize("instants", [{}, {"before": True}, {"before": False}], ids=["calls", "before", "after"])
def test_a_server_that_is_killed_at_any_instant_goes_on_to_the_same_end(tmp_path, instants):
    task, federation = linear(SIZES[:3], NAMES[:3])
    wanted, options = None, {"rounds": 3, "cohort": 2, "checkpoint_every": 2}
    for instant in range(100):
        there = World(FEDEP, task, federation, tmp_path / f"{instant}")
        wanted = wanted or there.simulated(3, cohort=2).server
        if life(there, **(instants | {"writes": instant} if instants else {"calls": instant}), **options):
            break
        run = life(there, **options)
        assert_same(run.server, wanted)
        assert_nothing_is_lost(there, run, 3)
        assert not left_out(run)
    assert 10 < instant < 50, "it was killed at all instants that there are"


@every_method
@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_a_server_that_is_killed_again_and_again_goes_on_to_the_same_end(world, method, checkpoint_every):
    there, chance = world(method), random.Random(checkpoint_every)
    options = {"rounds": 12, "cohort": 3, "checkpoint_every": checkpoint_every}
    lives = 0
    while True:
        instant = chance.choice([{"calls": chance.randrange(35)}, {"writes": chance.randrange(9)}])
        if run := life(there, **instant, before=chance.random() < 0.5, **options):
            break
        lives += 1
    assert 3 <= lives < 100
    assert_same(run.server, there.simulated(12, cohort=3).server)
    assert_nothing_is_lost(there, run, 12)
    assert not left_out(run)


def test_states_that_only_the_sites_know_outlive_the_server(clouds):
    there = clouds(MOON)
    killed_after(there, 4, 3, checkpoint_every=2)
    run, wanted = there.serve(4), there.simulated(4)
    assert_same(run.server, wanted.server)
    for k, site in enumerate(there.names):
        assert_same(there.state(run, site), wanted.states.gather(torch.tensor([k])))


def test_a_state_that_only_a_site_knew_begins_anew_when_its_disk_is_lost(clouds, caplog):
    there = clouds(MOON)
    there.faults[2, BAD] = wiped
    run = there.serve(3)
    assert left_out(run) == [(2, BAD)]
    assert f"{BAD!r} has lost its state and gets a new one" in caplog.text
    assert dict(requested(there, 3))[BAD].base == NO_STATE
    there.state(run, BAD)


def damage_newest(world):
    newest = max((world.out / "checkpoints").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-20])


@every_method
@pytest.mark.parametrize(("checkpoint_every", "at"), [(1, 4), (2, 6), (2, 5)])
def test_where_the_newest_checkpoint_is_damaged_the_states_of_the_one_before_are_still_at_the_sites(
    world, method, checkpoint_every, at, caplog
):
    there = world(method)
    killed_after(there, 6, at, checkpoint_every=checkpoint_every)
    damage_newest(there)
    run = there.serve(6, checkpoint_every=checkpoint_every)
    assert "falling back to the one before" in caplog.text
    assert "gets a new one" not in caplog.text
    assert_same(run.server, there.simulated(6).server)
    assert_nothing_is_lost(there, run, 6)


@with_states
def test_where_a_server_was_killed_twice_a_damaged_checkpoint_still_falls_back_to_states_that_are_there(
    world, method, caplog
):
    there = world(method)
    killed_after(there, 6, 4)
    killed_after(there, 6, 4)
    damage_newest(there)
    run = there.serve(6)
    assert "falling back to the one before" in caplog.text
    assert not left_out(run)
    assert_same(run.server, there.simulated(6).server)
    assert_nothing_is_lost(there, run, 6)


@pytest.mark.parametrize("lives", [1, 2])
def test_a_damaged_checkpoint_after_a_switch_falls_back_to_states_that_are_there(world, lives, caplog):
    there = world(cs.Switch(SCAFFOLD, FEDEP, at=3))
    for _ in range(lives):
        killed_after(there, 6, 4, checkpoint_every=2)
    damage_newest(there)
    run = there.serve(6)
    assert "falling back to the one before" in caplog.text
    assert not left_out(run)
    assert_same(run.server, there.simulated(6).server)
    there.method = FEDEP
    assert apart(there, run) < 1e-9


def test_a_round_with_too_few_sites_is_waited_for_and_then_given_up_with_a_sentence(world, caplog):
    there = world(FEDEP, participation={"min_clients": 4, "patience": 400.0})

    def two_go(run, line):
        if line["round"] == 2:
            for site in ("Bern", "Zug"):
                there.kill(site, noticed=HEARTBEATS)

    with pytest.raises(ConsilienceError, match=r"round 3 was given up: it needs updates of 4 clients.*400 seconds"):
        there.serve(4, callbacks=[two_go])
    assert "waiting: round 3 needs 4 of its clients" in caplog.text
    written = (there.out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["clients"] for line in written] == [5, 5]
    for site in ("Bern", "Zug"):
        there.nodes[site] = there.start(site)
    run = there.serve(4)
    assert_same(run.server, there.simulated(4).server)
    assert_nothing_is_lost(there, run, 4)


def test_a_round_that_fails_at_once_is_tried_again_after_longer_and_longer_pauses(world):
    there, tries = world(FEDAVG, participation={"patience": 200.0}), []

    def fails(delivery):
        tries.append(there.grid.now)
        return raises(delivery)

    there.always = dict.fromkeys(NAMES, fails)
    with pytest.raises(ConsilienceError, match="round 1 was given up"):
        there.serve(1)
    assert len(tries) == 9 * len(NAMES)
    pauses = [b - a for a, b in itertools.pairwise(tries[:: len(NAMES)])]
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60], abs=0.5)
    assert 200 <= there.grid.now < 200 + 61


def test_sites_that_come_back_while_the_server_waits_are_in_the_round(world):
    there = world(FEDEP, participation={"min_clients": 4})
    for site in ("Bern", "Zug"):
        there.faults[2, site] = lambda delivery: there.kill(delivery.site)
    sleep, back = there.grid.sleep, []

    def and_then(seconds):
        sleep(seconds)
        if there.grid.now > 100 and not back:
            back.extend(there.start(site) for site in ("Bern", "Zug"))

    there.grid.sleep = and_then
    run = there.serve(3)
    assert not left_out(run)
    assert_same(run.server, there.simulated(3).server)
    assert_nothing_is_lost(there, run, 3)


def test_a_server_without_its_sites_gives_up_before_a_run_begins(world):
    there = world(FEDAVG)
    there.kill("Zug")
    with pytest.raises(ConsilienceError, match=r"only 4 of 5 sites came online .*\(Basel, Bern, Chur, Genf\)"):
        there.serve(2)
    assert not there.out.exists()
    there.start("Zug")
    assert_same(there.serve(2).server, there.simulated(2).server)


@every_method
def test_a_round_of_fewer_clients_than_planned_is_as_if_the_others_had_said_nothing(world, method):
    there = world(method, faults={(1, BAD): lambda delivery: delivery.world.kill(delivery.site)})
    run = there.serve(3)
    assert left_out(run) == [(1, BAD)], "later rounds know that it is not there"
    assert [line["clients"] for line in run.history] == [4, 4, 4]
    assert_same(run.server, there.simulated(3, missing=[BAD]).server)
    assert_nothing_is_lost(there, run, 3)


def test_who_is_not_there_is_replaced_by_another_who_is(world):
    there = world(FEDEP)
    there.serve(1, cohort=2)
    planned = [site for site, _ in requested(there, 1)]
    again = world(FEDEP)
    again.folder = there.folder / "again"
    again.serve(5, cohort=2)
    plan = {round: sorted(site for site, _ in requested(again, round)) for round in range(1, 6)}
    assert plan[1] == sorted(planned)
    gone = plan[3][0]
    there.kill(gone)
    run = there.serve(5, cohort=2)
    assert [line["clients"] for line in run.history] == [2] * 5
    for round in range(2, 6):
        sites = {site for site, _ in requested(there, round)}
        assert gone not in sites
        assert set(plan[round]) - {gone} <= sites, "those who are there and were chosen take part"
    assert_nothing_is_lost(there, run, 5)


@with_states
@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_no_site_ever_has_more_than_a_few_files(world, method, checkpoint_every):
    there, most = world(method), []
    for round in range(2, 20, 3):
        there.faults[round, NAMES[round % 5]] = silent

    def count(run, line):
        most.append(max(len(there.files(site).tokens()) for site in there.names))

    for rounds in (10, 20):
        run = there.serve(rounds, cohort=3, callbacks=[count], checkpoint_every=checkpoint_every)
    assert len(most) == 20
    assert max(most) <= 5
    assert_nothing_is_lost(there, run, 20)


def test_who_joins_later_is_not_part_of_the_experiment(world):
    there = world(FEDAVG)
    there.serve(1)
    task, federation = there.task, there.federation
    stranger = flower_app.client_app(FEDAVG, task, lambda node: federation.client(0))
    there.grid.start(stranger, site="Aarau", states=str(there.disk("Aarau")))
    run = there.serve(3)
    assert run.federation.names == NAMES
    assert_same(run.server, there.simulated(3).server)


def test_a_run_that_is_over_needs_no_sites(world):
    there = world(FEDEP)
    run = there.serve(2)
    for site in there.names:
        there.kill(site)
    again = there.serve(2)
    assert_same(again.server, run.server, 0)
    assert again.history == run.history


def test_another_method_in_the_same_directory_is_refused(world):
    there = world(FEDEP)
    there.serve(2)
    other = World(FEDAVG, there.task, there.federation, there.folder)
    with pytest.raises(CheckpointError, match="holds another run"):
        other.serve(4)


def test_a_mistake_in_the_settings_is_said_and_can_be_mended(world):
    there = world(FEDAVG)
    with pytest.raises(ConfigError, match="cohort is 9, but the federation has 5 clients"):
        there.serve(2, cohort=9)
    assert_same(there.serve(2).server, there.simulated(2).server)


def test_a_site_with_other_settings_is_left_out_and_named_until_it_is_mended(world, caplog):
    there = world(FEDAVG, participation={"patience": 10.0})
    there.kill(BAD)
    other = flower_app.client_app(replace(FEDAVG, train=cs.SGD(lr=0.2)), there.task, lambda node: there.data(2))
    node = there.grid.start(other, site=BAD, states=str(there.disk(BAD)))
    with pytest.raises(ConsilienceError, match="only 4 of 5 sites"):
        there.serve(2)
    assert f"the method or network of {BAD!r} is not the server's" in caplog.text
    there.grid.kill(node)
    there.start(BAD)
    assert_same(there.serve(2).server, there.simulated(2).server)


def test_a_run_has_a_report_and_a_line_for_every_round(world, monkeypatch, capsys):
    monkeypatch.setattr(flower_app, "write_report", write_report)
    there = world(FEDEP, faults={(2, BAD): nan})
    there.serve(2)
    assert BAD in (there.out / "report.html").read_text()
    first, second, report = capsys.readouterr().out.splitlines()
    assert first.startswith("round 1, 5 of 5 sites")
    assert second.startswith("round 2, 4 of 5 sites")
    assert second.endswith(f"rejected: {BAD}")
    assert report == f"report: {there.out / 'report.html'}"


def lost(delivery):
    delivery.answer()


FAULTS = [lost, twice, raises, nan, wiped, restarted_before, restarted_after]
FAULTY, CLEAN = 4, 2
SITES = NAMES[:4]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    faults=st.dictionaries(
        st.tuples(st.integers(1, FAULTY), st.sampled_from(SITES)), st.sampled_from(FAULTS), max_size=12
    ),
    crashes=st.lists(st.integers(1, FAULTY), max_size=3),
    checkpoint_every=st.sampled_from([1, 2, 3]),
    method=st.sampled_from([FEDEP, EXACT, SCAFFOLD]),
)
def test_whatever_goes_wrong_the_server_and_the_sites_disks_agree_in_the_end(
    tmp_path_factory, faults, crashes, checkpoint_every, method
):
    task, federation = linear(SIZES[:4], SITES)
    there = World(method, task, federation, tmp_path_factory.mktemp("world"), faults=dict(faults))
    rounds = FAULTY + CLEAN
    for crash in sorted(crashes):
        killed_after(there, rounds, crash, checkpoint_every=checkpoint_every)
    run = there.serve(rounds, checkpoint_every=checkpoint_every)
    assert_nothing_is_lost(there, run, rounds)
    if method is EXACT:
        assert_same(run.server.q, posterior(there), 1e-9)
