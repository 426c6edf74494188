"""Killed servers and nodes, lost disks and lost messages: the server and the sites' disks agree in the end."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from flwr.app import Error
from hypothesis import given, settings
from hypothesis import strategies as st

import consilience as cs
from consilience.core.errors import CheckpointError, ConsilienceError
from consilience.core.records import Point, tree_map, unpack
from consilience.flower.messages import NO_STATE, TrainReply, TrainRequest, decode, encode
from consilience.flower.registry import Registry
from consilience.runs.directory import RunDirectory
from support.flower_grid import (
    BAD,
    FEDAVG,
    FEDEP,
    HEARTBEATS,
    PRIOR,
    SCAFFOLD,
    SIZES,
    TRAIN,
    Killed,
    World,
    assert_consistent,
    assert_same,
    disagreement,
    every_method,
    rejected,
    requested,
    with_states,
)
from support.scenarios import NAMES, likelihood

MOON = cs.algorithms.MOON(TRAIN)  # whose states only the clients know
EXACT = cs.FedEP(cs.inference.Newton(), damping=1.0, prior=PRIOR)  # finds the exact posterior in one round of all


pytestmark = pytest.mark.usefixtures("_unhurried")


@pytest.fixture
def world(tmp_path):
    return lambda method, **options: World.linear(method, tmp_path, **options)


@pytest.fixture
def clouds(tmp_path):
    return lambda method: World.blobs(method, tmp_path)


# Two servers

HOLD = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); input()"


@pytest.mark.parametrize("rounds", [0, 1], ids=["new", "resumed"])
def test_a_second_server_changes_nothing(world, rounds):
    there = world(FEDEP)
    if rounds:
        there.serve(rounds)
    there.out.mkdir(exist_ok=True)
    stored = there.out / "sites.json"
    before = stored.read_bytes() if rounds else None
    command = [sys.executable, "-c", HOLD, there.out / ".lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(CheckpointError, match="another process is at work"):
            there.serve(2)
        assert (stored.read_bytes() if stored.exists() else None) == before
        other.communicate(b"\n")
    run = there.serve(2)
    assert_consistent(there, run, 2)
    assert not rejected(run)


# Messages


def twice(delivery):
    first, second = delivery.answer(), delivery.answer()
    assert decode(first.content, TrainReply) == decode(second.content, TrainReply)
    return second


@every_method
def test_a_request_that_comes_twice_is_computed_once(world, method):
    there = world(method, always=dict.fromkeys(NAMES, twice))
    run = there.serve(2)
    assert_same(run.server, there.simulated(2).server)
    assert_consistent(there, run, 2)
    if method is not FEDAVG:
        tokens = {request.token for _, request in there.requests}
        assert all(set(there.files(site).tokens()) <= tokens for site in there.names)


@with_states
def test_an_old_request_that_comes_late_undoes_nothing(world, method):
    there, old = world(method), {}

    def and_again(delivery):
        for message in old.setdefault(delivery.site, []):
            delivery.answer(message)
        old[delivery.site].append(delivery.message)
        return delivery.answer()

    there.always = dict.fromkeys(NAMES, and_again)
    run = there.serve(4)
    assert_same(run.server, there.simulated(4).server)
    assert_consistent(there, run, 4)
    assert not rejected(run)


# Lost disks


def wiped(delivery):
    delivery.world.wipe(delivery.site)
    return delivery.answer()


@with_states
def test_a_site_that_lost_its_disk_gets_a_new_state_and_the_server_drops_the_old_one(world, method, caplog):
    there = world(method, faults={(2, BAD): wiped})
    run = there.serve(4)
    assert rejected(run) == [(2, BAD)]
    assert caplog.text.count(f"{BAD!r} has lost its state and gets a new one") == 1
    assert_consistent(there, run, 4)
    assert dict(requested(there, 3))[BAD].base == NO_STATE


def test_the_new_state_is_around_the_servers_present_mean(world):
    there, believed, sent = world(FEDEP), [], []

    def read(delivery):
        _, records = decode(delivery.message.content, TrainRequest)
        sent.append(unpack(records["state"]).factor.mean[0])
        return delivery.answer()

    there.faults = {(2, BAD): wiped, (3, BAD): read}
    there.serve(3, callbacks=[lambda run, line: believed.append(run.posterior.mean)])
    assert_same(Point(sent[0]), Point(believed[1]))


def posterior(world):
    """The exact posterior of all data."""
    q = likelihood(world.federation)
    return q * cs.Gaussian(torch.zeros_like(q.eta), PRIOR * torch.eye(len(q.eta)).double())


def test_after_a_lost_disk_all_data_count_once(world):
    there = world(EXACT, faults={(2, BAD): wiped})
    assert_same(there.serve(3).server.q, posterior(there), 1e-9)


@with_states
def test_a_disk_that_is_lost_while_the_server_is_down_is_noticed(world, method):
    there = world(method)
    there.serve(1)
    there.wipe(BAD)
    run = there.serve(3)
    assert rejected(run) == [(2, BAD)]
    assert_consistent(there, run, 3)


@with_states
def test_if_all_sites_lose_their_disks_the_round_is_tried_again(world, method):
    there = world(method)
    there.serve(1)
    for site in there.names:
        there.wipe(site)
    run = there.serve(2)
    assert not rejected(run)
    assert len(requested(there, 2)) == 2 * len(SIZES)
    assert_consistent(there, run, 2)


@with_states
def test_the_only_client_may_lose_its_disk_in_every_round(world, method):
    there = world(method, sizes=(7,), always={"Basel": wiped})
    run = there.serve(3)
    assert_consistent(there, run, 3)
    assert [len(requested(there, round)) for round in (1, 2, 3)] == [1, 2, 2]


def test_a_client_that_always_says_it_has_lost_its_state_ends_with_the_servers_patience(world):
    there = world(FEDEP, sizes=(7,), participation={"patience": 15.0})
    there.always["Basel"] = lambda delivery: delivery.reply(encode(TrainReply(status="lost", reason="gone")))
    with pytest.raises(ConsilienceError, match="round 1 was given up"):
        there.serve(2)
    assert 15 <= there.grid.now < 20


def test_a_state_that_only_the_site_knew_is_replaced_when_its_disk_is_lost(clouds, caplog):
    there = clouds(MOON)
    there.faults[2, BAD] = wiped
    run = there.serve(3)
    assert rejected(run) == [(2, BAD)]
    assert f"{BAD!r} has lost its state and gets a new one" in caplog.text
    assert dict(requested(there, 3))[BAD].base == NO_STATE
    there.state(run, BAD)


@with_states
@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_no_site_ever_has_more_than_a_few_files(world, method, checkpoint_every):
    there, most = world(method), []
    for round in range(2, 10, 3):
        there.faults[round, NAMES[round % 5]] = lambda delivery: None

    def count(run, line):
        most.append(max(len(there.files(site).tokens()) for site in there.names))

    for rounds in (5, 10):
        run = there.serve(rounds, cohort=3, callbacks=[count], checkpoint_every=checkpoint_every)
    assert len(most) == 10
    assert max(most) <= 5
    assert_consistent(there, run, 10)


# Killed nodes


def restarted_before(delivery):
    delivery.world.restart(delivery.site)


def restarted_after(delivery):
    delivery.answer()
    delivery.world.restart(delivery.site)


def restarted_while_writing(delivery):
    """A kill between the writing of a file and its renaming."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("killed")))
        delivery.answer()
    delivery.world.restart(delivery.site)


@pytest.mark.parametrize(
    ("method", "killed"),
    [
        (FEDAVG, restarted_after),
        *itertools.product([FEDEP, SCAFFOLD], [restarted_before, restarted_after, restarted_while_writing]),
    ],
    ids=lambda value: getattr(value, "__name__", None) or value.name,
)
def test_a_killed_node_that_restarts_gets_its_request_again_in_the_same_round(world, method, killed):
    there = world(method, faults={(2, BAD): killed})
    run = there.serve(3)
    assert_same(run.server, there.simulated(3).server)
    assert not rejected(run)
    assert_consistent(there, run, 3)
    assert there.grid.now < 20, "the server did not wait for the dead node"
    again = [request for site, request in requested(there, 2) if site == BAD]
    assert len(again) == 2
    assert again[0] == again[1]
    assert not list(there.disk(BAD).rglob("*.tmp"))


@every_method
def test_a_round_without_an_offline_client_is_as_if_its_update_were_rejected(world, method):
    there = world(method, faults={(1, BAD): lambda delivery: delivery.world.kill(delivery.site)})
    run = there.serve(2)
    assert rejected(run) == [(1, BAD)], "later rounds know that it is offline"
    assert [line["clients"] for line in run.history] == [4, 4]
    assert_same(run.server, there.simulated(2, missing=[BAD]).server)
    assert_consistent(there, run, 2)


def test_a_round_with_too_few_sites_is_waited_for_and_then_given_up(world, caplog):
    there = world(FEDEP, participation={"min_clients": 4, "patience": 400.0})

    def two_go(run, line):
        for site in ("Bern", "Zug"):
            there.kill(site, noticed=HEARTBEATS)

    with pytest.raises(ConsilienceError, match=r"round 2 was given up: it needs updates of 4 clients.*400 seconds"):
        there.serve(3, callbacks=[two_go])
    assert "waiting: round 2 needs 4 of its clients" in caplog.text
    written = (there.out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["clients"] for line in written] == [5]
    for site in ("Bern", "Zug"):
        there.nodes[site] = there.start(site)
    run = there.serve(3)
    assert_same(run.server, there.simulated(3).server)
    assert_consistent(there, run, 3)


def test_a_round_that_fails_at_once_is_tried_again_after_longer_pauses(world):
    there, tries = world(FEDAVG, sizes=(7,), participation={"patience": 200.0}), []

    def fails(delivery):
        tries.append(there.grid.now)
        return delivery.reply(Error(2, "out of memory"))

    there.always = {"Basel": fails}
    with pytest.raises(ConsilienceError, match="round 1 was given up"):
        there.serve(1)
    pauses = [b - a for a, b in itertools.pairwise(tries)]
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
    run = there.serve(2)
    assert not rejected(run)
    assert_same(run.server, there.simulated(2).server)
    assert_consistent(there, run, 2)


# Killed servers


def killed_after(world, rounds, at, **options):
    """A server that is killed after round `at`, before the round is saved."""

    def callback(run, line):
        if line["round"] == at:
            raise Killed

    with pytest.raises(Killed):
        world.serve(rounds, callbacks=[callback], **options)


@every_method
@pytest.mark.parametrize(("checkpoint_every", "at"), [(1, 1), (2, 3)])
def test_a_killed_server_resumes_to_the_same_result(world, method, checkpoint_every, at):
    there = world(method)
    killed_after(there, 4, at, checkpoint_every=checkpoint_every)
    first, requests = Registry.read(there.out).start, len(there.requests)
    run = there.serve(4, checkpoint_every=checkpoint_every)
    assert_same(run.server, there.simulated(4).server)
    assert_consistent(there, run, 4)
    second = Registry.read(there.out).start
    assert 0 < first < second
    starts = [request.token.start for _, request in there.requests]
    assert starts == [first] * requests + [second] * (len(starts) - requests)


def test_a_server_that_was_killed_around_a_switch_resumes_to_the_same_result(world):
    there = world(cs.Switch(SCAFFOLD, FEDEP, at=2))
    for at in (1, 2, 3):
        killed_after(there, 4, at, checkpoint_every=3)
    assert_same(there.serve(4).server, there.simulated(4).server)


def test_states_that_only_the_sites_know_survive_the_server(clouds):
    there = clouds(MOON)
    killed_after(there, 4, 3, checkpoint_every=2)
    run, wanted = there.serve(4), there.simulated(4)
    assert_same(run.server, wanted.server)
    for k, site in enumerate(there.names):
        assert_same(there.state(run, site), wanted.states.gather(torch.tensor([k])))


@every_method
def test_a_server_that_went_back_to_an_earlier_checkpoint_resumes_to_the_same_result(world, method):
    there, options = world(method), {"cohort": 3, "keep_checkpoints": 4}
    there.serve(7, **options)
    for back in (5, 4):
        RunDirectory(there.out).rewind(back)
        run = there.serve(7, **options)
        assert_same(run.server, there.simulated(7, cohort=3).server)
        assert_consistent(there, run, 7)
    assert not any(line["rejected"] for line in run.history), "no site has lost a state"


def test_a_server_with_the_list_of_sites_of_another_run_is_refused(world):
    there = world(FEDEP)
    there.serve(2)
    other = Registry.read(there.out).model_copy(update={"experiment": "0" * 16})
    (there.out / "sites.json").unlink()
    other.started(there.out)
    with pytest.raises(CheckpointError, match="the list of sites is of another experiment than the checkpoint"):
        there.serve(3)


def life(world, calls=None, writes=None, before=True, **options):
    """A server's run, or None if it is killed: after so many calls of the grid, or after so many written files, before
    or after the renaming of the next one."""
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
def test_a_server_that_is_killed_at_any_instant_resumes_to_the_same_result(tmp_path, instants):
    wanted, options = None, {"rounds": 3, "cohort": 2, "checkpoint_every": 2}
    for instant in range(100):
        there = World.linear(FEDEP, tmp_path / f"{instant}", sizes=SIZES[:3])
        wanted = wanted or there.simulated(3, cohort=2).server
        if life(there, **(instants | {"writes": instant} if instants else {"calls": instant}), **options):
            break
        run = life(there, **options)
        assert_same(run.server, wanted)
        assert_consistent(there, run, 3)
        assert not rejected(run)
    assert 10 < instant < 50, "it was killed at all instants that there are"


@with_states
def test_a_server_that_is_killed_again_and_again_resumes_to_the_same_result(world, method):
    there, chance = world(method), random.Random(3)
    options = {"rounds": 8, "cohort": 3, "checkpoint_every": 3}
    lives = 0
    while lives < 100:
        instant = chance.choice([{"calls": chance.randrange(90)}, {"writes": chance.randrange(24)}])
        if run := life(there, **instant, before=chance.random() < 0.5, **options):
            break
        lives += 1
    assert 3 <= lives < 100
    assert_same(run.server, there.simulated(8, cohort=3).server)
    assert_consistent(there, run, 8)
    assert not rejected(run)


def damage_newest(world):
    newest = max((world.out / "checkpoints").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-20])


@with_states
@pytest.mark.parametrize(("checkpoint_every", "at", "lives"), [(1, 3, 1), (2, 5, 1), (1, 3, 2)])
def test_a_damaged_checkpoint_falls_back_to_states_that_are_still_at_the_sites(
    world, method, checkpoint_every, at, lives, caplog
):
    there = world(method)
    for _ in range(lives):
        killed_after(there, 5, at, checkpoint_every=checkpoint_every)
    damage_newest(there)
    run = there.serve(5, checkpoint_every=checkpoint_every)
    assert "falling back to the one before" in caplog.text
    assert "has lost its state" not in caplog.text
    assert_same(run.server, there.simulated(5).server)
    assert_consistent(there, run, 5)


@pytest.mark.parametrize("lives", [1, 2])
def test_a_damaged_checkpoint_after_a_switch_falls_back_to_states_that_are_still_there(world, lives, caplog):
    there = world(cs.Switch(SCAFFOLD, FEDEP, at=3))
    for _ in range(lives):
        killed_after(there, 5, 4, checkpoint_every=2)
    damage_newest(there)
    run = there.serve(5)
    assert "falling back to the one before" in caplog.text
    assert not rejected(run)
    assert_same(run.server, there.simulated(5).server)
    there.method = FEDEP
    assert disagreement(there, run) < 1e-9


# Random faults


def lost(delivery):
    delivery.answer()


def nan(delivery):
    return delivery.with_update(lambda update: tree_map(lambda leaf: leaf * torch.nan, update))


def raises(delivery):
    return delivery.reply(Error(2, "out of memory"))


FAULTS = [lost, twice, raises, nan, wiped, restarted_before, restarted_after]
FAULTY, CLEAN = 3, 2
SITES = NAMES[:4]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    faults=st.dictionaries(
        st.tuples(st.integers(1, FAULTY), st.sampled_from(SITES)), st.sampled_from(FAULTS), max_size=10
    ),
    crashes=st.lists(st.integers(1, FAULTY), max_size=3),
    checkpoint_every=st.sampled_from([1, 2, 3]),
    method=st.sampled_from([FEDEP, EXACT, SCAFFOLD]),
)
def test_after_any_faults_the_server_and_the_sites_disks_agree(
    tmp_path_factory, faults, crashes, checkpoint_every, method
):
    there = World.linear(method, tmp_path_factory.mktemp("world"), sizes=SIZES[:4], faults=dict(faults))
    rounds = FAULTY + CLEAN
    for crash in sorted(crashes):
        killed_after(there, rounds, crash, checkpoint_every=checkpoint_every)
    run = there.serve(rounds, checkpoint_every=checkpoint_every)
    assert_consistent(there, run, rounds)
    if method is EXACT:
        assert_same(run.server.q, posterior(there), 1e-9)
