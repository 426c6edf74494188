"""What every algorithm file owes the engines."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import pytest
import torch

import consilience as cs
from consilience.core import guards
from consilience.core.beliefs import draws
from consilience.core.errors import ConsilienceError
from consilience.core.records import Addressed, leaves, rows, tree_map
from consilience.engines.states import InMemory
from consilience.engines.work import compute
from support.methods import (
    ALGORITHMS,
    CORE,
    SICK,
    SWITCH,
    assert_close,
    assert_same_run,
    cases,
    federation,
    is_gan,
    label,
    learn,
    learned,
    overrides,
    parts,
    poisoned,
    task_of,
    with_training,
)

every = cases(ALGORITHMS)
stateful = cases([m for m in ALGORITHMS if overrides(getattr(m, "method", m), "client")])


def begin(method, task, clients, initial=None):
    """(server, states) before the first round."""
    numbers = (torch.tensor(v) for v in (0, len(clients), clients.examples))
    info = cs.data.Info(task.initial() if initial is None else initial, *numbers)
    states = InMemory(lambda ids: method.client(task, info, clients.sizes[ids].to(task.dtype).unsqueeze(1)))
    return method.start(task, info), states


def prepared(method):
    """(task, federation) as the method trains them."""
    return method.adapt(task_of(method), 0).prepare(dtype=torch.float64), method.arrange(federation())


def one_round(method):
    """(server, message, states, update, new states) of a first round of all clients."""
    task, clients = prepared(method)
    server, states = begin(method, task, clients)
    ids = clients.sizes.argsort(descending=True)
    cohort = cs.data.Cohort(clients, ids, round=1, round_size=len(ids), seed=0, dtype=task.dtype)
    message, state = method.message(server, ids), states.gather(ids)
    return server, message, state, *method.local(task, message, state, cohort)


@cache
def first_round(method):
    """The result of `one_round`. Tests must not change it."""
    return one_round(method)


@cases([*ALGORITHMS, SWITCH])
def test_a_cohort_equals_its_clients_one_by_one(method):
    assert_same_run(learn(method, {"chunk": 1}), learned(method))


@cases(CORE, core=False)
def test_chunks_in_two_processes_equal_a_cohort(method):
    assert_same_run(learn(method, {"chunk": 2, "workers": 2}), learned(method))


@every
def test_the_order_of_clients_changes_nothing(method):
    (task, clients), updates = prepared(method), []
    engine = cs.Simulator(device="cpu", precision="float64", chunk=3, workers=1)
    for ids in (torch.arange(len(clients)), torch.arange(len(clients)).flip(0)):
        server, states = begin(method, task, clients)
        with engine.open(method, task, clients, seed=0, cohort=len(clients), rounds=1) as session:
            session.settle(server, states, ids, 1)
            updates.append(session.round(server, states, ids, 1).share.update)
    assert_close(*updates)


@every
def test_records_survive_packing_have_a_row_for_each_client_and_keep_their_shape(method):
    server, message, state, update, new_state = first_round(method)
    for tree in (server, message, state, update, new_state):
        assert_close(cs.core.unpack(cs.core.pack(tree), like=tree), tree, 0)
    clients = len(method.arrange(federation()))
    own = message.own if isinstance(message, Addressed) else None
    for name, leaf in (*leaves(update), *leaves(new_state), *leaves(own)):
        assert leaf.shape[0] == clients, name
    assert [(n, x.shape, x.dtype) for n, x in leaves(state)] == [(n, x.shape, x.dtype) for n, x in leaves(new_state)]


@every
def test_local_is_pure(method):
    first, second = first_round(method), one_round(method)
    for one, other in zip(first, second, strict=True):
        assert_close(one, other, 0)
    assert_close(first[0], begin(method, *prepared(method))[0], 0, "server, changed in place by local:")


@cases([*ALGORITHMS, SWITCH])
def test_a_run_in_float64_that_is_cut_and_resumed_is_the_uninterrupted_run(method, tmp_path):
    class CutError(BaseException):
        pass

    def cut(run, line):
        if line["round"] == 3:
            raise CutError

    redone, out = [], cs.runs.Storage(tmp_path / "run", checkpoint_every=2)
    with pytest.raises(CutError):
        learn(method, out=out, callbacks=[cut])
    resumed = learn(method, out=out, resume=True, callbacks=[lambda run, line: redone.append(line["round"])])
    assert redone == [3]
    assert_same_run(resumed, learned(method), 0)
    for what, tree in parts(resumed):
        for name, leaf in leaves(tree):
            assert leaf.dtype == torch.float64 or not leaf.is_floating_point(), f"{what} {name}"


@every
def test_a_client_that_sends_nan_is_rejected_and_named(method):
    task, clients = prepared(method)
    if len(clients) <= SICK:
        pytest.skip("a reference with one client")
    server, states = begin(method, task, clients)
    well = [client for client in range(len(clients)) if client != SICK]
    shares = []
    for sent, who in ((poisoned(method), range(len(clients))), (method, well)):
        ids = torch.tensor(list(who))
        cohort = cs.data.Cohort(clients, ids, round=1, round_size=len(clients), seed=0, dtype=task.dtype)
        with guards.watch():
            shares.append(compute(sent, task, method.message(server, ids), states.gather(ids), cohort))
    assert list(shares[0].rejected) == [SICK]
    assert "is not finite" in shares[0].rejected[SICK]
    assert shares[0].accepted == shares[1].accepted == well
    for part in ("update", "states"):
        assert_close(*(getattr(share, part) for share in shares), what=part)


# States that the server knows


@every
def test_a_method_that_audits_its_clients_states_can_swap_one(method):
    assert overrides(method, "audit") == overrides(method, "swap")
    assert overrides(method, "follow") or not overrides(method, "swap")


@stateful
def test_states_follow_from_updates(method):
    run = learned(method)
    ids = federation().sizes.argsort(descending=True)
    cohort = cs.data.Cohort(federation(), ids, round=4, round_size=len(ids), seed=0, dtype=torch.float64)
    states = run.states.gather(ids)
    update, after = method.local(run.task, method.message(run.server, ids), states, cohort)
    followed = method.follow(states, update)
    if followed is None:
        assert not overrides(method, "swap")
        return
    for (name, told), (_, new), (_, old) in zip(leaves(followed), leaves(after), leaves(states), strict=True):
        if method.private_state and told is old:
            continue
        torch.testing.assert_close(told, new, rtol=1e-12, atol=0, msg=lambda m, name=name: f"{name}: {m}")


def gap(method, server, states):
    try:
        return max(method.audit(server, [states]).values(), default=0.0)
    except ConsilienceError:
        return math.inf


@stateful
def test_a_swap_takes_a_lost_state_out_and_swapping_back_undoes_it(method):
    run = learned(method)
    client = torch.tensor([next(c for c in range(len(federation())) if c in run.states)])
    fresh = begin(method, run.task, federation(), draws(run.posterior, 0).theta[0])[1]
    old, new = (rows(states.gather(client), 0) for states in (run.states, fresh))
    swapped = method.swap(run.server, old, new)
    assert_close(method.swap(swapped, new, old), run.server)
    assert_close(method.swap(run.server, old, old), run.server, 1e-15)
    if isinstance(method, cs.FedEP) and method.server != cs.server.Momentum():
        return  # sites whose optimiser has a memory do not multiply to q: tests/unit/algorithms/test_lost_states.py
    states = run.states.gather(torch.arange(len(federation())))
    assert gap(method, run.server, states) < 1e-12
    states = tree_map(lambda all, one: all.index_copy(0, client, one.unsqueeze(0)), states, new)
    assert gap(method, swapped, states) < 1e-12
    assert gap(method, run.server, states) > 1e-4 or not overrides(method, "swap")


# Learning

SLOW = ("FedLangevin", "FedSGD-Momentum", "DP-means", "EP-ProbGAN-Momentum")


@cases([m for m in [*ALGORITHMS, SWITCH] if not is_gan(m) and not isinstance(m, cs.LastLayer)])  # keeps the weights
def test_learning_lowers_the_loss(method):
    task, rounds = task_of(method), 15 if label(method) in SLOW else 6
    before = cs.evaluate(task, cs.Point(task.initial()), federation().data).point["nll"]
    run = learn(method, rounds=rounds, cohort=None, engine=cs.Simulator(device="cpu", chunk=6, workers=1))
    assert run.evaluate(federation()).point["nll"] < 0.93 * before


@cases([m for m in ALGORITHMS if is_gan(m)])
def test_generators_move_towards_the_data(method):
    task, data = task_of(method), federation().data
    data = dataclasses.replace(data, x=data.x + 2)
    clients = cs.Federation.from_owner(data, torch.arange(len(data)) % 3)
    rounds, engine = 15 if label(method) in SLOW else 8, cs.Simulator(device="cpu", chunk=3, workers=1)
    run = cs.fit(with_longer_steps(method), task, clients, rounds=rounds, engine=engine, progress=False)
    before, after = (
        x.mean(0).sub(data.x.mean(0)).norm() for x in (task.generate(task.initial(), 500), run.sample(500))
    )
    assert after < 0.75 * before


def with_longer_steps(method, lr=0.04):
    """A method for GANs with longer steps at clients and at the server."""
    if hasattr(method, "method"):
        return dataclasses.replace(method, method=with_longer_steps(method.method))
    eager = with_training(method, dataclasses.replace(method.train, lr=lr, epochs=3))
    if not hasattr(eager, "generator"):
        return eager
    return dataclasses.replace(eager, generator=dataclasses.replace(eager.generator, lr=lr / 4))
