"""Sites that join, leave and are forgotten while a run goes on: q is always p₀ times the sites that have a part."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch

import consilience as cs
from consilience.core.errors import ConfigError
from consilience.core.records import leaves
from consilience.flower import changes
from consilience.flower.audit import AuditLog
from consilience.flower.registry import Registry
from support.flower_grid import (
    FEDAVG,
    FEDEP,
    PRIOR,
    SCAFFOLD,
    SIZES,
    Killed,
    World,
    assert_same,
    disagreement,
    unhurried,
)
from support.scenarios import NAMES, likelihood

EXACT = cs.FedEP(cs.inference.Newton(), damping=1.0, prior=PRIOR)  # finds the exact posterior in one round of all
DAMPED = cs.FedEP(cs.inference.Newton(), damping=0.9, prior=PRIOR)  # leaves a tenth of the way in each
LATE = NAMES[len(SIZES) - 1]
both = pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])


@pytest.fixture(autouse=True)
def quick():
    with unhurried():
        yield


def world_of(method, folder, secure=False, late=True):
    """A world whose last site is not online when the run begins, if it is `late`."""
    world = World.linear(method, folder, secure=secure, participation={"clients": len(SIZES) - late})
    if late:
        world.kill(LATE)
    return world


def posterior(world, sites):
    """The exact posterior of the data of these sites."""
    q = cs.Gaussian(torch.zeros(4, dtype=torch.float64), PRIOR * torch.eye(4, dtype=torch.float64))
    for site in sites:
        q = q * likelihood(world.federation, world.names.index(site))
    return q


def after(rounds):
    """A callback that calls `rounds[r]` after round r."""
    return lambda run, line: rounds.get(line["round"], lambda: None)()


def events(world):
    return [(event["event"], event["site"]) for event in AuditLog(world.out).read()]


def admit_late(world):
    world.nodes[LATE] = world.start(LATE)
    changes.admit(world.out, LATE)


def assert_learned(world, run, sites):
    """q is p₀ times the sites that have a part, and the exact posterior of their data but for the way that is left."""
    assert disagreement(world, run, mirrored=not world.secure) < 1e-9
    assert_same(run.server.q, posterior(world, sites), 1e-3)


@both
def test_a_site_joins_a_running_federation(tmp_path, secure):
    world = world_of(DAMPED, tmp_path, secure)
    run = world.serve(6, callbacks=[after({2: lambda: admit_late(world)})])
    assert [line["clients"] for line in run.history] == [4, 4, 5, 5, 5, 5]
    assert_learned(world, run, world.names)
    assert events(world) == [("admitted", LATE), ("joined", LATE)]
    assert Registry.read(world.out).members[-1].name == LATE


@both
def test_a_site_that_is_forgotten_leaves_the_posterior_of_the_others(tmp_path, secure):
    world = world_of(DAMPED, tmp_path, secure, late=False)
    run = world.serve(6, callbacks=[after({2: lambda: changes.forget(world.out, "Bern")})])
    assert_learned(world, run, [site for site in world.names if site != "Bern"])
    assert events(world) == [("to be forgotten", "Bern"), ("forgotten", "Bern")]
    assert AuditLog(world.out).read()[-1]["how"] == "exactly"
    assert not run.states.parts[world.names.index("Bern")]


def test_nothing_of_a_forgotten_site_is_in_the_servers_last_files(tmp_path):
    world = world_of(FEDEP, tmp_path, late=False)
    run = world.serve(1)
    ((_, factor), *_) = leaves(world.state(run, "Bern"))
    pattern = factor.numpy().tobytes()

    def found():
        return [path.name for path in world.out.rglob("*") if path.is_file() and pattern in path.read_bytes()]

    assert found(), "the server's copy of the state is in the checkpoint"
    changes.forget(world.out, "Bern")
    world.serve(3)
    assert not found()


@both
def test_a_removed_site_keeps_its_part_and_is_not_asked(tmp_path, secure):
    world = world_of(DAMPED, tmp_path, secure, late=False)
    world.serve(3, callbacks=[after({1: lambda: changes.remove(world.out, "Bern")})])
    assert {request.round for site, request in world.requests if site == "Bern"} == {1}
    changes.admit(world.out, "Bern")
    run = world.serve(6)
    assert {request.round for site, request in world.requests if site == "Bern"} == {1, 4, 5, 6}
    assert_learned(world, run, world.names)


@both
def test_a_forgotten_site_can_come_back(tmp_path, secure):
    world = world_of(DAMPED, tmp_path, secure, late=False)
    world.serve(1)
    changes.forget(world.out, "Bern")
    world.serve(3)
    changes.admit(world.out, "Bern")
    run = world.serve(7)
    assert_learned(world, run, world.names)
    assert len(Registry.read(world.out).members) == len(SIZES)


def test_a_site_that_is_gone_is_forgotten_by_the_servers_copy_of_its_state(tmp_path):
    world = world_of(EXACT, tmp_path, late=False)
    world.serve(2)
    world.kill("Bern")
    changes.forget(world.out, "Bern")
    run = world.serve(4)
    assert_same(run.server.q, posterior(world, [site for site in world.names if site != "Bern"]), 1e-8)


def test_under_secure_sums_a_site_that_is_gone_is_forgotten_by_an_estimate_alone(tmp_path):
    world = world_of(DAMPED, tmp_path, secure=True, late=False)
    world.serve(2)
    world.kill("Bern")
    changes.forget(world.out, "Bern")
    run = world.serve(4)
    assert run.states.parts.all()
    assert ("forgotten", "Bern") not in events(world), "only the site can take its part out"
    changes.forget(world.out, "Bern", estimate=True)
    run = world.serve(6)
    assert AuditLog(world.out).read()[-1]["how"] == "by an estimate of its part"
    assert bool((torch.linalg.eigvalsh(run.server.q.lam) > 0).all())
    assert not run.states.parts[world.names.index("Bern")]


@pytest.mark.parametrize("method", [FEDAVG, SCAFFOLD], ids=lambda method: method.name)
def test_methods_without_a_part_for_each_client_forget_nobody(tmp_path, method):
    world = world_of(method, tmp_path, late=False)
    before = world.serve(1).server
    changes.forget(world.out, "Bern")
    run = world.serve(2)
    assert run.history[-1]["clients"] == len(SIZES) - 1, "it takes no further part"
    entry = AuditLog(world.out).read()[-1]
    assert entry["event"] == "not forgotten"
    assert "cannot forget a client, because its server has no separate part for each client" in entry["reason"]
    assert before is not None


def test_a_stateless_method_takes_a_new_site_in(tmp_path):
    world = world_of(FEDAVG, tmp_path)
    run = world.serve(3, callbacks=[after({1: lambda: admit_late(world)})])
    assert [line["clients"] for line in run.history] == [4, 5, 5]


def test_a_method_that_cannot_take_a_site_in_refuses_it_and_goes_on(tmp_path):
    world = world_of(SCAFFOLD, tmp_path)
    run = world.serve(3, callbacks=[after({1: lambda: admit_late(world)})])
    assert [line["clients"] for line in run.history] == [4, 4, 4]
    entry = AuditLog(world.out).read()[-1]
    assert entry["event"] == "refused"
    assert "a client cannot join a run of SCAFFOLD" in entry["reason"]
    assert not Registry.read(world.out).invited


def test_a_resumed_run_has_the_sites_that_joined(tmp_path):
    world = world_of(EXACT, tmp_path)
    world.serve(2, callbacks=[after({1: lambda: admit_late(world)})])
    run = world.serve(4)
    assert len(run.federation) == len(SIZES)
    assert disagreement(world, run) < 1e-9


def test_commands_refuse_what_makes_no_sense(tmp_path):
    world = world_of(FEDEP, tmp_path, late=False)
    with pytest.raises(ConfigError, match="holds no run of a federation"):
        changes.admit(tmp_path, "Bern")
    world.serve(1)
    with pytest.raises(ConfigError, match="takes part already"):
        changes.admit(world.out, "Bern")
    with pytest.raises(ConfigError, match="'Berm' is not a site of this run; did you mean 'Bern'"):
        changes.forget(world.out, "Berm")
    changes.remove(world.out, "Bern")
    with pytest.raises(ConfigError, match="takes no part any more: it is removed"):
        changes.remove(world.out, "Bern")
    changes.forget(world.out, "Bern")
    with pytest.raises(ConfigError, match="to be forgotten, which the server has not done yet"):
        changes.admit(world.out, "Bern")


def test_without_any_site_the_run_says_so(tmp_path):
    world = world_of(FEDAVG, tmp_path, late=False)
    world.serve(1)
    for site in world.names:
        changes.remove(world.out, site)
    with pytest.raises(cs.ConsilienceError, match="no site takes part any more: admit one"):
        world.serve(2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@both
def test_joins_and_leaves_at_random_with_kills_leave_q_the_product_of_the_sites(tmp_path, seed, secure):
    draw, rounds = random.Random(seed), 50
    world = world_of(FEDEP, tmp_path, secure)
    last = kills = 0

    def change(run, line):
        nonlocal last
        last = line["round"]
        active, site = Registry.read(world.out).active, draw.choice(world.names)
        leave = draw.choice([changes.remove, changes.forget, changes.forget])
        with suppress(ConfigError):  # a site that is to be forgotten cannot be admitted yet
            if site not in active:
                changes.admit(world.out, site)
            elif len(active) > 3:
                leave(world.out, site)
        if draw.random() < 0.3:
            world.restart(draw.choice(world.names))

    world.nodes[LATE] = world.start(LATE)
    while last < rounds:
        world.grid.calls_left = draw.randrange(20, 120)
        try:
            run = world.serve(rounds, callbacks=[change])
        except Killed:
            kills += 1
            continue
        assert disagreement(world, run, mirrored=not secure) < 1e-5
    world.grid.calls_left = None
    assert disagreement(world, world.serve(rounds), mirrored=not secure) < 1e-5
    happened = [event for event, _ in events(world)]
    assert kills > 5
    assert min(happened.count("joined"), happened.count("forgotten")) > 2
