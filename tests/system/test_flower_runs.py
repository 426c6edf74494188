"""Whole runs in memory: they equal the simulator's, and a site that misbehaves changes nothing for the others."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from flwr.app import ConfigRecord, Error, RecordDict

import consilience as cs
from consilience.core.errors import CheckpointError, ConfigError, ConsilienceError
from consilience.core.records import Point, Weighted, leaves, tree_map
from consilience.flower import app as flower_app
from consilience.flower import client_app
from consilience.flower.messages import NO_STATE, EvaluateReply, SiteInfo, TrainReply, decode, encode
from consilience.report import write_report
from support.flower_grid import (
    BAD,
    FEDAVG,
    FEDEP,
    LAPLACE,
    SCAFFOLD,
    SIZES,
    TRAIN,
    World,
    assert_consistent,
    assert_same,
    disagreement,
    every_method,
    json_content,
    rejected,
    requested,
    score,
    with_states,
)
from support.fuzzing import nested
from support.scenarios import NAMES

pytestmark = pytest.mark.usefixtures("_unhurried")


@pytest.fixture
def world(tmp_path):
    return lambda method, folder=".", **options: World.linear(method, tmp_path / folder, **options)


@pytest.fixture
def clouds(tmp_path):
    return lambda method: World.blobs(method, tmp_path)


@every_method
def test_without_faults_a_run_is_the_simulators(world, method):
    for cohort in (2, None):
        there = world(method, f"cohort {cohort}")
        run, wanted = there.serve(3, cohort=cohort), there.simulated(3, cohort=cohort)
        assert_same(run.server, wanted.server)
        assert_consistent(there, run, 3)
        assert [line["clients"] for line in run.history] == [cohort or len(SIZES)] * 3
        assert not rejected(run)
        for ours, theirs in zip(run.history, wanted.history, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
            assert ours["bytes_up"] == theirs["bytes_up"]


def test_a_switch_of_methods_is_the_simulators_and_sends_new_states(world):
    there = world(cs.Switch(SCAFFOLD, FEDEP, at=2))
    run, wanted = there.serve(4), there.simulated(4)
    assert_same(run.server, wanted.server)
    there.method = FEDEP
    assert disagreement(there, run) < 1e-9
    for site, request in there.requests:
        assert request.stage == (request.round > 2)
        assert (request.base == NO_STATE) == (request.round in (1, 3)), site


# Scores


@pytest.mark.parametrize("method", [FEDAVG, cs.FedEP(LAPLACE)], ids=lambda method: method.name)
def test_the_scores_of_sites_are_those_of_all_held_out_examples_together(clouds, method):
    there = clouds(method)
    run, saved = score(there)
    wanted = there.simulated(1)
    test = replace(there.held_out, names=None).pooled().client(0)
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


def test_with_test_data_at_the_server_no_site_is_asked_for_scores(clouds):
    there = clouds(FEDAVG)
    test = there.held_out.data
    run, _ = score(there, test=test)
    assert run.history[-1]["eval"] == pytest.approx(there.simulated(1).evaluate(test).point, abs=1e-12)
    assert "evaluate" not in {kind for kind, _ in there.grid.delivered}


def test_sites_without_scores_are_named_and_the_others_scores_count(clouds, caplog):
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
    there.instead = {("evaluate", site): lambda reply: None for site in there.names}
    run = there.serve(2, evaluate_every=1)
    assert "eval" not in run.history[-1], "a run that no site can score continues"


def says(kind, **changes):
    """Changes fields of a reply."""

    def instead(reply):
        fields = json.loads(decode(reply.content, kind)[0].model_dump_json()) | changes
        reply.content = json_content(fields)
        return reply

    return instead


def boasts(reply):
    """Scores of very many examples, with a diagram that fits them."""
    fields = decode(reply.content, EvaluateReply)[0]
    count = [10**9 * n // fields.examples for n in fields.reliability.count]
    diagram = fields.reliability.model_dump() | {"count": count}
    return says(EvaluateReply, examples=sum(count), reliability=diagram)(reply)


def scoring(**scores):
    """Other scores of the point prediction."""

    def instead(reply):
        point = decode(reply.content, EvaluateReply)[0].point
        return says(EvaluateReply, point=point | scores)(reply)

    return instead


def test_a_site_that_claims_to_hold_very_many_examples_out_counts_for_no_more_than_all_others(clouds, caplog):
    there = clouds(FEDAVG)
    there.instead = {
        ("query", BAD): says(SiteInfo, held_out=10**12),
        ("evaluate", BAD): lambda reply: boasts(scoring(accuracy=0.0, nll=80.0)(reply)),
    }
    run, saved = score(there)
    assert [client["examples"] for client in saved["clients"]] == [5, 5, 15, 5]
    others = [client["metrics"]["accuracy"] for client in saved["clients"] if client["name"] != BAD]
    assert run.history[-1]["eval"]["accuracy"] == pytest.approx(sum(others) / 6)
    assert f"{BAD!r} scored 1000000000 examples: it counts for 15 in the means" in caplog.text


BAD_SCORES = {
    "too many": (FEDAVG, boasts, "it scored 1000000000 examples, but holds 5 out"),
    "other scores": (FEDAVG, says(EvaluateReply, point={"beauty": 1.0}), "its scores are not those of the task"),
    "accuracy": (FEDAVG, scoring(accuracy=1e6), "its accuracy is 1e+06, which is not between 0 and 1"),
    "infinite": (FEDAVG, scoring(brier=math.inf), "its brier is inf, which is not between 0 and 2"),
    "no posterior": (cs.FedEP(LAPLACE), says(EvaluateReply, marginal=None), "its scores are not those of the task"),
    "no diagram": (cs.FedEP(LAPLACE), says(EvaluateReply, marginal_reliability=None), "its reliability diagram does"),
}


@pytest.mark.parametrize(("method", "instead", "reason"), BAD_SCORES.values(), ids=BAD_SCORES)
def test_a_site_with_impossible_scores_counts_as_one_without_scores(clouds, method, instead, reason, caplog):
    there, without = clouds(method), clouds(method)
    without.folder = there.folder / "without"
    there.instead["evaluate", BAD], without.instead["evaluate", BAD] = instead, lambda reply: None
    (run, saved), (wanted, expected) = score(there), score(without)
    assert run.history[-1].get("marginal") == wanted.history[-1].get("marginal")
    assert saved == expected
    assert BAD not in [client["name"] for client in saved["clients"]]
    assert f"the scores of {BAD!r} are rejected: {reason}" in caplog.text


@pytest.mark.parametrize("lies", [False, True], ids=["honest", "lies"])
def test_a_site_that_holds_nothing_out_is_asked_only_if_it_claims_to(clouds, lies, caplog):
    there = clouds(FEDAVG)
    data = there.data
    there.data = lambda k: data(k).train if there.names[k] == BAD else data(k)
    if lies:
        there.instead["query", BAD] = says(SiteInfo, held_out=5)
    run, saved = score(there)
    assert [client["name"] for client in saved["clients"]] == [name for name in there.names if name != BAD]
    assert "nll" in run.history[-1]["eval"]
    assert (("evaluate", BAD) in there.grid.delivered) == lies
    refusal = f"the scores of {BAD!r} are rejected: SiteError: it holds no examples out"
    assert (refusal in caplog.text) == (BAD in caplog.text) == lies


# Sites that misbehave


def test_a_site_with_impossible_information_is_named_and_the_run_resumes_without_it(clouds, caplog):
    there = clouds(FEDAVG)
    there.instead["query", BAD] = says(SiteInfo, held_out=10**400)
    with pytest.raises(ConsilienceError, match=r"only 3 of 4 sites came online .*\(Basel, Bern, Genf\)"):
        there.serve(1)
    invalid = f"node {there.nodes[BAD]} is rejected: its information is not valid: SiteInfo: held_out: "
    assert invalid in caplog.text
    honest, there.instead = there.instead, {}
    assert_same(there.serve(1).server, there.simulated(1).server)
    caplog.clear()
    there.instead = honest
    run, saved = score(there, 2)
    assert invalid in caplog.text
    assert [line["clients"] for line in run.history] == [4, 3]
    assert [client["name"] for client in saved["clients"]] == [name for name in there.names if name != BAD]


def reply(change=lambda update: update, **fields):
    """A fault: the client's reply with another update and other fields."""
    return lambda delivery: delivery.with_update(change, **fields)


def content(value):
    """A fault: a reply with this content."""
    return lambda delivery: delivery.reply(value)


def no_record(delivery):
    return delivery.reply(encode(decode(delivery.answer().content, TrainReply)[0], update=b"\x00" * 64))


def more_records(delivery):
    answer, records = decode(delivery.answer().content, TrainReply)
    return delivery.reply(encode(answer, **records, luggage=b"\x00" * 10**6))


def long_record(delivery):
    return delivery.reply(encode(decode(delivery.answer().content, TrainReply)[0], update=b"\x00" * 10**6))


def nested_lists(delivery):
    return delivery.reply(encode(decode(delivery.answer().content, TrainReply)[0], update=nested(492)))


def more_notes(delivery):
    notes = decode(delivery.answer().content, TrainReply)[0].notes
    return reply(notes=notes | {"round": 1e6, "clients": 1e6})(delivery)


def mapped(change):
    return reply(lambda update: tree_map(change, update))


NAN = mapped(lambda leaf: leaf * torch.nan)
RAISES = content(Error(2, "<class 'torch.OutOfMemoryError'>:<'too large'>"))
BAD_REPLIES = {
    "nan": (NAN, "is not finite"),
    "longer": (mapped(lambda leaf: torch.cat([leaf, leaf])), "has shape"),
    "rounded": (mapped(torch.Tensor.float), "is torch.float32 where torch.float64 was expected"),
    "other record": (reply(lambda update: Point(torch.zeros(4).double())), "got Point"),
    "raises": (RAISES, "OutOfMemoryError: too large"),
    "silent": (lambda delivery: None, "it did not reply within 20 seconds"),
    "empty": (content(RecordDict()), "the message is not a TrainReply: 'payload' is missing"),
    "garbage": (
        content(RecordDict({"payload": ConfigRecord({"json": '{"status": "done", "price": 7}'})})),
        "TrainReply: price: Extra inputs are not permitted",
    ),
    "without update": (content(encode(TrainReply(status="done"))), "its reply has no update"),
    "no record": (no_record, "hold no record"),
    "no notes": (reply(notes={}), "its notes are not those of the method"),
    "more notes": (more_notes, "its notes are not those of the method"),
    "too many guards": (
        reply(guards={"precision floor": 10**400}),
        "TrainReply: guards.precision floor: Input should be less than or equal to 1000000000000",
    ),
    "more records": (more_records, "a TrainReply came with records that were not asked for: luggage"),
    "a long record": (long_record, "its update has 1,000,000 bytes, where at most "),
    "nested lists": (nested_lists, "the record is nested more than 64 levels deep"),
    "escape codes": (
        content(encode(TrainReply(status="failed", reason="\x1b[2J\x1b]0;gone\x07xxx"))),
        r"\x1b[2J\x1b]0;gone\x07xxx",
    ),
    "class with escape codes": (content(Error(2, "<class 'a.B'>:<'\x1b[2J\r'>")), r"B: \x1b[2J"),
    "rejects itself": (content(encode(TrainReply(status="rejected", reason="eta is not finite"))), "eta is not finite"),
}


@pytest.mark.parametrize(("fault", "reason"), BAD_REPLIES.values(), ids=BAD_REPLIES)
def test_a_client_with_a_bad_reply_is_named_and_its_round_counts_without_it(world, fault, reason, caplog):
    there = world(FEDEP, sizes=SIZES[:3], always={BAD: fault})
    run = there.serve(1)
    assert rejected(run) == [(1, BAD)]
    assert reason in run.history[0]["rejected"][0]["reason"]
    assert f"the update of client {BAD!r} was rejected" in caplog.text
    assert_same(run.server, there.simulated(1, missing=[BAD]).server)
    assert_consistent(there, run, 1)


@with_states
@pytest.mark.parametrize("fault", [NAN, RAISES, lambda delivery: None], ids=["nan", "raises", "silent"])
def test_a_client_with_one_bad_reply_continues_from_the_state_before(world, method, fault):
    there = world(method, faults={(2, BAD): fault})
    run = there.serve(3)
    assert rejected(run) == [(2, BAD)]
    assert_consistent(there, run, 3)
    (_, first), (_, second), (_, third) = (entry for entry in there.requests if entry[0] == BAD)
    assert first.base == NO_STATE
    assert second.base == third.base == first.token


@pytest.mark.parametrize("sizes", [(1e308, 1e307), (1e200, 1e160)], ids=["sum", "squares"])
def test_clients_whose_updates_overflow_are_rejected_and_the_run_resumes(world, sizes):
    """The largest first: a third client's update is large too, but the server's state stays of use with it."""
    there = world(cs.Robust(FEDAVG, cs.algorithms.TrimmedMean(share=0.0)))
    for site, size in zip(("Bern", BAD, "Genf"), (*sizes, 1e100), strict=True):
        change = reply(
            lambda update, size=size: replace(update, total=Point(torch.full((1, 4), size, dtype=torch.float64)))
        )
        there.faults[2, site] = change
    run = there.serve(2)
    assert rejected(run) == [(2, "Bern"), (2, BAD)]
    assert all("would overflow" in entry["reason"] for entry in run.history[1]["rejected"])
    assert all(bool(leaf.isfinite().all()) for _, leaf in leaves(run.server))
    assert len(there.serve(3).history) == 3


def test_updates_beyond_what_sums_are_made_of_are_rejected(world):
    there = world(FEDAVG)
    there.faults[1, BAD] = reply(
        lambda update: replace(update, total=Point(torch.full((4,), 1e17, dtype=torch.float64)))
    )
    run = there.serve(1)
    assert rejected(run) == [(1, BAD)]
    assert "has a number of size 1e+17, and sums are made up to 7e+16" in run.history[0]["rejected"][0]["reason"]


PRIVATE = cs.Private(FEDAVG, clip=0.5, noise=0.0)
TAMPERED = {
    "turned round": (lambda update: planning(update, -20.0), "it plans -4 times the clients of the round"),
    "larger": (lambda update: planning(update, 100.0), "it plans 20 times the clients of the round"),
    "no privacy left": (lambda update: planning(update, 1e15), "it plans 2e+14 times"),
    "longer": (lambda update: longer(update, 100), "more than clip = 0.5"),
}


def longer(update, factor):
    total = tree_map(lambda leaf: factor * leaf, update.update.total)
    return replace(update, update=Weighted(total, update.update.weight))


def planning(update, clients):
    return replace(update, planned=Weighted(torch.tensor([clients]).double(), update.planned.weight))


@pytest.mark.parametrize(("change", "reason"), TAMPERED.values(), ids=TAMPERED)
def test_a_client_cannot_change_what_private_promises(world, change, reason):
    there = world(PRIVATE, always={BAD: reply(change)})
    run = there.serve(2)
    assert rejected(run) == [(1, BAD), (2, BAD)]
    assert reason in run.history[0]["rejected"][0]["reason"]
    assert int(run.server.cohort) == 5
    start = there.task.prepare(torch.device("cpu"), torch.float64).initial()
    assert float((run.posterior.mean - start).norm()) <= 2 * 0.5 * 4 / 5 + 1e-9


def heavier(update, factor):
    """An update whose weighted part has a larger weight."""
    if isinstance(update, Weighted):
        return tree_map(lambda leaf: leaf * factor, update)
    return replace(update, w=heavier(update.w, factor))


@pytest.mark.parametrize(("method", "own"), [(FEDAVG, 4), (SCAFFOLD, 1)], ids=["by examples", "uniform"])
def test_a_weight_of_a_billion_is_reduced_to_the_clients_own(world, method, own, caplog):
    there = world(method, always={BAD: reply(lambda update: heavier(update, 1e9 / own))})
    run = there.serve(2)
    assert_same(run.server, there.simulated(2).server, 1e-9)
    assert_consistent(there, run, 2)
    assert caplog.text.count("which is reduced") == 1, "a client is named once"
    assert f"round 1: {BAD!r} claims a weight of 1e+09, which is reduced" in caplog.text
    assert [line["guards"] for line in run.history] == [{"weight reduced": 1}] * 2
    caplog.clear()
    there.always.clear()
    assert not there.serve(3).history[-1]["guards"]
    assert "reduced" not in caplog.text


def test_a_claim_of_a_billion_examples_changes_nothing_if_weights_come_with_updates(world, caplog):
    there = world(FEDAVG, instead={("query", BAD): says(SiteInfo, examples=10**9)})
    run = there.serve(1)
    assert run.federation.sizes.tolist() == [7, 3, 27, 12, 5]
    assert f"{BAD!r} claims 1000000000 examples" in caplog.text
    assert_same(run.server, there.simulated(1).server)


@with_states
def test_a_claim_of_a_billion_examples_is_reduced_to_max_examples(world, method, caplog):
    lies = {("query", BAD): says(SiteInfo, examples=10**9)}
    there = world(method, instead=lies, participation={"max_examples": 10})
    run = there.serve(2)
    assert run.federation.sizes.tolist() == [7, 3, 10, 10, 5]
    assert f"{BAD!r} claims 1000000000 examples: it counts for max_examples = 10" in caplog.text
    assert_consistent(there, run, 2)


OVER = ("round", "seconds", "clients", "bytes_down", "bytes_up", "rejected", "guards")


class Noting(cs.FedAvg):
    """Clients note values that the server knows itself."""

    name = "Noting"

    def local(self, task, message, state, cohort):
        found = super().local(task, message, state, cohort)
        cohort.note(**dict.fromkeys(OVER, torch.full((len(cohort),), 1e6)))
        return found


def test_a_clients_notes_cannot_overwrite_the_servers_own(world):
    there = world(Noting(TRAIN))
    run = there.serve(2)
    assert not rejected(run)
    assert_same(run.server, there.simulated(2).server)
    assert [line["round"] for line in run.history] == [1, 2]
    for line in run.history:
        assert set(OVER) < set(line)
        assert 1e6 not in line.values()


@pytest.mark.parametrize("other", [0, 10**6], ids=["another client", "no client"])
def test_a_client_cannot_send_a_network_as_another_client(clouds, other):
    there = clouds(cs.algorithms.Ensemble(TRAIN))
    there.always[BAD] = reply(
        lambda update: replace(update, client=torch.full_like(update.client, other), theta=9 * update.theta)
    )
    run = there.serve(1)
    assert_same(run.server.theta[0], there.simulated(1).server.theta[0])
    assert rejected(run) == [(1, BAD)]
    assert run.history[0]["rejected"][0]["reason"] == "its update's client is another client's"


# Members and settings


def test_a_site_that_is_offline_is_replaced_by_another(world):
    plan = world(FEDEP)
    plan.serve(4, cohort=2)
    planned = {round: sorted(site for site, _ in requested(plan, round)) for round in range(1, 5)}
    there = world(FEDEP, "again")
    there.serve(1, cohort=2)
    gone = planned[3][0]
    there.kill(gone)
    run = there.serve(4, cohort=2)
    assert [line["clients"] for line in run.history] == [2] * 4
    for round in range(2, 5):
        sites = {site for site, _ in requested(there, round)}
        assert gone not in sites
        assert set(planned[round]) - {gone} <= sites, "those that are online and were chosen take part"
    assert_consistent(there, run, 4)


def test_a_site_that_joins_later_is_not_part_of_the_experiment(world):
    there = world(FEDAVG)
    there.serve(1)
    stranger = client_app(FEDAVG, there.task, lambda node: there.federation.client(0))
    there.grid.start(stranger, site="Aarau", states=str(there.disk("Aarau")))
    run = there.serve(2)
    assert run.federation.names == NAMES
    assert_same(run.server, there.simulated(2).server)


def test_a_finished_run_needs_no_sites_and_another_method_is_refused(world):
    there = world(FEDEP)
    run = there.serve(1)
    for site in there.names:
        there.kill(site)
    again = there.serve(1)
    assert_same(again.server, run.server, 0)
    assert again.history == run.history
    other = World(FEDAVG, there.task, there.federation, there.folder)
    with pytest.raises(CheckpointError, match="holds another run"):
        other.serve(4)


def test_a_wrong_setting_is_refused_and_can_be_corrected(world):
    there = world(FEDAVG)
    with pytest.raises(ConfigError, match="cohort is 9, but the federation has 5 clients"):
        there.serve(1, cohort=9)
    assert_same(there.serve(1).server, there.simulated(1).server)


def test_a_site_with_other_settings_is_rejected_until_it_is_corrected(world, caplog):
    there = world(FEDAVG, participation={"patience": 10.0})
    there.kill(BAD)
    other = client_app(replace(FEDAVG, train=cs.SGD(lr=0.2)), there.task, lambda node: there.data(2))
    node = there.grid.start(other, site=BAD, states=str(there.disk(BAD)))
    with pytest.raises(ConsilienceError, match="only 4 of 5 sites"):
        there.serve(1)
    assert not there.out.exists()
    assert f"the method or network of {BAD!r} is not the server's" in caplog.text
    there.grid.kill(node)
    there.start(BAD)
    assert_same(there.serve(1).server, there.simulated(1).server)


def test_a_run_has_a_report_and_a_line_for_every_round(world, monkeypatch, capsys, sketched):
    monkeypatch.setattr(flower_app, "write_report", write_report)
    there = world(FEDEP, faults={(2, BAD): NAN})
    there.serve(2)
    assert BAD in (there.out / "report.html").read_text()
    first, second, report = capsys.readouterr().out.splitlines()
    assert first.startswith("round 1, 5 of 5 sites")
    assert second.startswith("round 2, 4 of 5 sites")
    assert second.endswith(f"rejected: {BAD}")
    assert report == f"report: {there.out / 'report.html'}"
