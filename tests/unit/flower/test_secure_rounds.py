"""Rounds under secure aggregation: the simulator's results to the last bit, whoever is lost at whatever step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import consilience as cs
from consilience.core.errors import ConfigError, ConsilienceError
from consilience.core.records import leaves, pack, tree_map, unpack
from consilience.flower.messages import (
    EvaluateRequest,
    MaskedReply,
    SecureReply,
    TrainRequest,
    asked,
    decode,
    encode,
)
from support.flower_grid import (
    BAD,
    FEDAVG,
    FEDEP,
    SCAFFOLD,
    TRAIN,
    Killed,
    World,
    disagreement,
    rejected,
    score,
    unhurried,
)
from support.scenarios import NAMES
from support.trust import Sites

POOLING = cs.PartialPooling(FEDEP.infer, prior=0.7)
every_method = pytest.mark.parametrize("method", [FEDAVG, FEDEP, SCAFFOLD, POOLING], ids=lambda method: method.name)
STEPS = {"keys": "advert", "shares": "shares", "arrived": "signature", "open": "opened"}


@pytest.fixture(autouse=True)
def quick():
    with unhurried():
        yield


def assert_identical(found, wanted):
    for (name, a), (_, b) in zip(leaves(found), leaves(wanted), strict=True):
        assert torch.equal(a, b), name


def without(step):
    """Lets a site's replies to a step of secure sums be lost."""

    def lose(reply):
        answer = None if reply.has_error() else decode(reply.content, SecureReply)[0]
        return None if answer and getattr(answer, STEPS[step]) else reply

    return lose


def lost(delivery):
    """The request reaches the site, which computes and masks; its reply is lost."""
    delivery.answer()


def silent(delivery):
    return None


def secure_world(method, folder, **options):
    return World.linear(method, folder, secure=True, **options)


@every_method
def test_sites_compute_the_simulators_run_to_the_last_bit(method, tmp_path):
    world = secure_world(method, tmp_path)
    run, wanted = world.serve(3), world.simulated(3)
    assert_identical(run.server, wanted.server)
    if method is not FEDAVG:
        for k, site in enumerate(world.names):
            assert_identical(world.state(run, site), wanted.states.gather(torch.tensor([k])))


@pytest.mark.parametrize("step", ["keys", "shares"])
def test_a_site_lost_before_its_vector_is_not_in_the_sum(step, tmp_path):
    world = secure_world(FEDEP, tmp_path, instead={("query.secure", BAD): without(step)})
    run = world.serve(1)
    assert rejected(run) == [(1, BAD)]
    assert_identical(run.server, world.simulated(1, missing=[BAD]).server)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [lost, silent], ids=["reply lost", "silent"])
@pytest.mark.parametrize("method", [FEDAVG, FEDEP, SCAFFOLD], ids=lambda method: method.name)
def test_a_site_whose_vector_is_lost_is_not_in_the_sum_and_keeps_its_state(method, fault, tmp_path):
    world = secure_world(method, tmp_path, faults={(1, BAD): fault})
    assert_identical(world.serve(1).server, world.simulated(1, missing=[BAD]).server)
    run = world.serve(4)
    assert [line["clients"] for line in run.history] == [4, 5, 5, 5]
    if method is FEDEP:
        assert disagreement(world, run, mirrored=False) < 1e-9


@pytest.mark.parametrize("step", ["arrived", "open"])
def test_a_site_lost_after_its_vector_is_in_the_sum(step, tmp_path):
    world = secure_world(FEDEP, tmp_path, instead={("query.secure", BAD): without(step)})
    run = world.serve(2)
    assert [line["clients"] for line in run.history] == [5, 5]
    assert_identical(run.server, world.simulated(2).server)
    assert disagreement(world, run, mirrored=False) < 1e-9


def test_below_the_threshold_nothing_is_opened_and_the_round_is_made_again(tmp_path, caplog):
    two = {(1, site): lost for site in ("Basel", "Bern")}  # of five, four must be in a sum
    opened = []

    def watch(reply):
        if not reply.has_error() and decode(reply.content, SecureReply)[0].opened:
            opened.append(reply)
        return reply

    world = secure_world(FEDEP, tmp_path, faults=two)
    world.instead = {("query.secure", site): watch for site in world.names}
    attempts = []
    world.always = {site: lambda delivery: attempts.append(len(opened)) or delivery.answer() for site in world.names}
    run = world.serve(1)
    assert "3 sites have sent a masked vector, and a secure sum of these sites needs 4" in caplog.text
    assert attempts[:3] == [0, 0, 0], "nobody has opened anything before the second attempt"
    assert len(opened) == 5
    assert_identical(run.server, world.simulated(1).server)


@pytest.mark.slow
def test_a_killed_server_resumes_to_the_same_result(tmp_path):
    world = secure_world(FEDEP, tmp_path)
    wanted, calls, kills = world.simulated(3).server, 15, 0
    while True:
        world.grid.calls_left = calls = calls + 9
        try:
            run = world.serve(3)
            break
        except Killed:
            kills += 1
    assert kills > 2
    assert disagreement(world, run, mirrored=False) < 1e-9
    full = [line["clients"] for line in run.history]
    assert full == [5, 5, 5]
    assert_identical(run.server, wanted)


def test_a_site_with_wrong_numbers_adds_nothing(tmp_path):
    world = secure_world(FEDEP, tmp_path)
    k = world.names.index(BAD)
    data = world.data

    def damaged(client):
        found = data(client)
        return replace(found, y=found.y * 1e30) if client == k else found

    world.data = damaged
    world.restart(BAD)
    run = world.serve(1)
    assert run.history[0]["guards"]["update withheld"] == 1
    assert_identical(run.server, world.simulated(1, missing=[BAD]).server)


def test_what_the_server_gets_says_nothing_of_one_site(tmp_path):
    """Every record of every reply differs in all numbers from the integers of the site's own update."""
    world, sent = secure_world(FEDAVG, tmp_path), {}

    def keep(delivery):
        answer = delivery.answer()
        sent[delivery.site] = unpack(decode(answer.content, MaskedReply)[1]["masked"])
        return answer

    world.always = dict.fromkeys(world.names, keep)
    world.serve(1)
    for masked in sent.values():
        high = (masked >> 32).double()
        assert high.abs().mean() > 2**29, "numbers are spread over all 64 bits"
        assert len(masked.unique()) == len(masked)


@pytest.mark.parametrize("method", [cs.Robust(FEDAVG), cs.algorithms.Ensemble(TRAIN)], ids=lambda method: method.name)
def test_methods_that_need_single_updates_are_refused(method, tmp_path):
    world = secure_world(method, tmp_path)
    with pytest.raises(ConfigError, match="needs the clients' updates one by one, which secure sums hide"):
        world.serve(1)
    assert not world.requests


def test_a_secure_site_gives_a_plain_server_no_answer(tmp_path, caplog):
    world = Sites.linear(FEDAVG, tmp_path, policies=dict.fromkeys(NAMES, "secure_only = true"))
    with pytest.raises(ConsilienceError, match="was given up"):
        world.serve(1)
    assert not any(b"__metadata__" in data for _, _, data in world.sent), "a record left"
    assert "its policy has secure_only = true" in caplog.text


def test_a_secure_server_says_that_a_site_has_no_certificate(tmp_path, caplog):
    world = secure_world(FEDAVG, tmp_path)
    world.secure = False
    for site in world.names:
        world.restart(site)
    world.secure = True
    with pytest.raises(ConsilienceError, match="was given up"):
        world.serve(1)
    assert "secure aggregation needs the site's certificate and key" in caplog.text


def test_a_server_that_asks_one_site_something_else_gets_no_sum(tmp_path, caplog):
    """If only one site got a model that can be learned from, the sum would be its update."""
    world = secure_world(FEDAVG, tmp_path)

    def other_model(delivery):
        request, records = decode(delivery.message.content, TrainRequest)
        moved = tree_map(lambda leaf: leaf + 1, unpack(records["message"]))
        delivery.message.content = encode(request, **records | {"message": pack(moved)})
        return delivery.answer(delivery.message)

    world.faults = {(1, BAD): other_model}
    run = world.serve(1)
    assert "the server asks this site for something else than the other sites of the sum" in caplog.text
    assert rejected(run) == [(1, BAD)]


def test_what_sites_are_asked_differs_in_what_is_their_own_alone():
    request = EvaluateRequest(fingerprint="f", seed=1, precision="float32", samples=3)
    records = {"belief": b"a belief"}
    same = request.model_copy(update={"base": (1, 2)})
    assert asked(request, records) == asked(same, {**records, "state": b"own"})
    assert asked(request, records) != asked(request, {**records, "belief": b"other"})
    assert asked(request, records) != asked(request.model_copy(update={"samples": 4}), records)


def plain_and_secure(folder, **options):
    """(world, run, evaluation.json) of the same federation without and with secure sums."""
    for secure in (False, True):
        world = World.blobs(FEDEP, folder / str(secure), secure=secure)
        yield world, *score(world, **options)


def test_scores_of_all_sites_are_those_of_their_sums(tmp_path):
    (_, _, plain), (_, run, hidden) = plain_and_secure(tmp_path)
    for kind in ("point", "marginal"):
        for name, value in hidden[kind]["metrics"].items():
            assert value == pytest.approx(plain[kind]["metrics"][name], rel=1e-5, abs=1e-6), (kind, name)
    assert plain["clients"]
    assert not hidden["clients"], "no site's own scores are known"
    assert run.history[-1]["eval"]["accuracy"] > 0.5


def test_scores_with_a_site_too_few_are_left_out(tmp_path, caplog):
    world = World.blobs(FEDEP, tmp_path, secure=True)
    gone = {("evaluate", site): lambda reply: None for site in world.names[:2]}
    world.instead = gone
    world.serve(1, evaluate_every=1)
    assert "there are no scores of all sites: 2 sites have sent a masked vector" in caplog.text


@pytest.mark.slow
def test_a_lost_disk_is_replaced_by_an_estimate_of_the_sites_part(tmp_path, caplog):
    world = secure_world(FEDEP, tmp_path)
    world.serve(2)
    world.wipe(BAD)
    run = world.serve(5)
    assert f"the state of {BAD!r} is replaced by an estimate" in caplog.text
    assert run.history[-1]["clients"] == 5
    assert bool((run.server.q.lam > 0).all())


def test_a_lost_disk_of_a_method_without_an_estimate_is_an_error_that_names_the_way_out(tmp_path):
    world = secure_world(SCAFFOLD, tmp_path)
    world.serve(1)
    world.wipe(BAD)
    with pytest.raises(ConsilienceError, match=r"only 'Chur' knows its part .* restore it from a backup"):
        world.serve(3)
