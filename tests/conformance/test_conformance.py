"""What every algorithm owes the engines. A new one joins by being exported from consilience.algorithms."""

from __future__ import annotations

import dataclasses
import inspect
import math
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import consilience as cs
from consilience import algorithms
from consilience.algorithms.gan.players import Players
from consilience.core import guards
from consilience.core.errors import ConfigError, ConsilienceError
from consilience.core.records import Addressed, leaves, rows, tree_map
from consilience.engines.states import InMemory
from consilience.engines.work import compute

SIZES = (97, 64, 41, 33, 20, 7, 1)  # a last batch of one, and steps that only the largest client takes
LOCAL = cs.SGD(lr=0.1, momentum=0.9, epochs=2, batch_size=16, weight_decay=0.01)
PLAY = cs.optim.Adam(lr=0.01, epochs=1, batch_size=64, weight_decay=0.01, noise=1e-3)  # a GAN's step is a dear one
REPEATABLE = {"noise": 0.01, "noise_from": "seed"}  # of Private, whose noise is else another in every run


def plays(algorithm):
    """Whether a method is one for GANs."""
    return isinstance(getattr(algorithm, "method", algorithm), Players | cs.algorithms.FedAvgGAN | cs.algorithms.F2A)


def with_training(part, train):
    """A method or an inference with another local optimiser, wherever it keeps it."""
    if hasattr(part, "train"):
        return dataclasses.replace(part, train=train)
    return dataclasses.replace(part, infer=with_training(part.infer, train))


def variant(kind):
    """Defaults, but with momentum, two epochs and weight decay in the local optimiser, unless the method refuses."""
    plain = kind(**REPEATABLE) if kind is cs.Private else kind()
    if hasattr(plain, "method"):
        return dataclasses.replace(plain, method=variant(type(plain.method)))
    if not hasattr(getattr(plain, "infer", plain), "train"):
        return plain
    if plays(plain):
        return with_training(plain, PLAY)
    for train in (LOCAL, dataclasses.replace(LOCAL, momentum=0.0)):
        try:
            return with_training(plain, train)
        except ConfigError:
            continue
    return plain


ALGORITHMS = [
    variant(kind)
    for kind in vars(algorithms).values()
    if inspect.isclass(kind) and issubclass(kind, cs.Algorithm) and not inspect.isabstract(kind)
]
SERVERS = (cs.server.Momentum(1.0, 0.9), cs.server.Adam(), cs.server.Yogi(), cs.server.AdaGrad())
ALGORITHMS += [cs.FedAvg(LOCAL, server=server) for server in SERVERS]
LAPLACE = cs.inference.Laplace(LOCAL, kappa=1.0, s0=0.05, epochs=1, batch_size=16)
NGVI = cs.inference.NGVI(LOCAL, kappa=1.0, s0=0.05, epochs=1, batch_size=16, samples=2)
ALGORITHMS += [
    *(cs.FedEP(infer) for infer in (cs.inference.MCMC(LOCAL), LAPLACE, NGVI)),
    cs.FedEP(cs.inference.Newton(), prior=1.0),
    *(
        cs.FedEP(cs.inference.Identity(LOCAL), server)
        for server in (cs.server.Momentum(0.5, 0.9), cs.server.Adam(1.0), cs.server.AdaGrad(1.0))
    ),
    cs.algorithms.FedSEP(NGVI),
    cs.algorithms.ADF(LAPLACE),
    cs.algorithms.FedPADiagonal(LAPLACE),
    cs.algorithms.Ensemble(LOCAL, by_class=True),
    cs.PFNM(LOCAL, how=cs.matching.DPMeans(penalty=1.0)),
    cs.PFNM(LOCAL, streaming=True),
    cs.PFNM(cs.optim.AMSGrad(lr=0.01, epochs=2, batch_size=16), observe_missing=False),
    cs.FedNP(cs.optim.RMSprop(lr=0.01, epochs=2, batch_size=16), strength=1.0, damping=0.5),
    cs.SCAFFOLD(LOCAL, variate="gradient"),
    cs.Robust(cs.FedAvg(LOCAL, server=cs.server.Adam()), cs.algorithms.Krum(bad=0, keep=2)),
    cs.Robust(cs.algorithms.FedSEP(cs.inference.Identity(LOCAL)), cs.algorithms.TrimmedMean()),
    cs.Robust(cs.algorithms.MOON(LOCAL)),
    cs.Private(cs.algorithms.FedSEP(cs.inference.Identity(LOCAL)), **REPEATABLE),
    cs.Private(cs.algorithms.MOON(LOCAL), **REPEATABLE),
    cs.EPGAN(PLAY, history=False, components=3, interpolate=0.1),
    cs.Private(cs.algorithms.FedAvgGAN(PLAY), **REPEATABLE),
]


def label(algorithm):
    server = getattr(algorithm, "server", None)
    return algorithm.name if server is None else f"{algorithm.name}-{type(server).__name__}"


def overrides(algorithm, hook):
    return getattr(type(algorithm), hook) is not getattr(cs.Algorithm, hook)


every = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=label)
STATEFUL = [a for a in ALGORITHMS if overrides(getattr(a, "method", a), "client")]
stateful = pytest.mark.parametrize("algorithm", STATEFUL, ids=label)


@pytest.fixture(scope="module")
def federation():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SIZES), 5, generator=generator)
    y = (x @ torch.randn(5, 3, generator=generator)).argmax(1)
    owner = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    shuffled = torch.randperm(len(owner), generator=generator)
    names = [f"site {k}" for k in range(len(SIZES))]
    return cs.Federation.from_owner(cs.Dataset(x, y, name="blobs"), owner[shuffled], names=names)


@pytest.fixture
def task(algorithm):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        if isinstance(
            getattr(algorithm, "infer", None), cs.inference.Newton
        ):  # begins at 0, where a network has a saddle
            return cs.Classification(nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 3)))
        if plays(algorithm):
            generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5))
            discriminator = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))
            return cs.Adversarial(generator, discriminator, latent=3, generators=2, discriminators=2, pace=0.5)
        return cs.Classification(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)))


def learn(algorithm, task, federation, plan=None, **options):
    engine = cs.Simulator(device="cpu", precision="float64", **{"chunk": len(SIZES), "workers": 1} | (plan or {}))
    return cs.fit(algorithm, task, federation, rounds=3, cohort=5, engine=engine, progress=False, **options)


@cache
def learned(algorithm):
    """The run that others are compared with, all clients of a round together; nobody may change it."""
    return learn(algorithm, inspect.unwrap(task)(algorithm), inspect.unwrap(federation)())


def belief_of_everyone(run):
    clients = range(len(run.federation))
    return [("server", run.server), *((f"client {c}", run.states.gather(torch.tensor([c]))) for c in clients)]


def assert_same(a, b, tolerance):
    for (what, one), (_, other) in zip(belief_of_everyone(a), belief_of_everyone(b), strict=True):
        for (name, x), (_, y) in zip(leaves(one), leaves(other), strict=True):
            where = f"{what} {name}"
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda m, w=where: f"{w}: {m}")


@every
@pytest.mark.parametrize("plan", [{"chunk": 1}, {"chunk": 2, "workers": 2}], ids=str)  # two chunks for one of them
def test_a_cohort_is_the_same_as_its_clients_one_by_one(algorithm, plan, task, federation):
    assert_same(learned(algorithm), learn(algorithm, task, federation, plan), 1e-10)


@every
def test_the_order_of_clients_changes_nothing(algorithm, task, federation):
    task, federation = algorithm.adapt(task, 0), algorithm.arrange(federation)
    shares = []
    for ids in (torch.arange(len(federation)), torch.arange(len(federation)).flip(0)):
        engine = cs.Simulator(device="cpu", precision="float64", chunk=3, workers=1)
        with engine.open(algorithm, task, federation, seed=0, cohort=len(federation), rounds=1) as session:
            server, states, _ = begin(algorithm, session.task, federation)
            session.settle(server, states, ids, 1)
            shares.append(session.round(server, states, ids, 1).share)
    for (_, a), (_, b) in zip(leaves(shares[0].update), leaves(shares[1].update), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def begin(algorithm, task, federation, initial=None):
    numbers = (torch.tensor(v) for v in (0, len(federation), federation.examples))
    info = cs.data.Info(task.initial() if initial is None else initial, *numbers)
    states = InMemory(lambda ids: algorithm.client(task, info, federation.sizes[ids].to(task.dtype).unsqueeze(1)))
    return algorithm.start(task, info), states, info


def one_round(algorithm, task, federation):
    """(server, message, states, update, new states) of one round of all clients."""
    task, federation = algorithm.adapt(task, 0).prepare(dtype=torch.float64), algorithm.arrange(federation)
    server, states, _ = begin(algorithm, task, federation)
    ids = federation.sizes.argsort(descending=True)
    cohort = cs.data.Cohort(federation, ids, round=1, round_size=len(ids), seed=0, dtype=task.dtype)
    message, state = algorithm.message(server, ids), states.gather(ids)
    return server, message, state, *algorithm.local(task, message, state, cohort)


@cache
def first_round(algorithm):
    """What `one_round` finds; nobody may change it."""
    return one_round(algorithm, inspect.unwrap(task)(algorithm), inspect.unwrap(federation)())


@every
def test_all_that_travels_or_is_stored_survives_packing(algorithm):
    for tree in first_round(algorithm):
        back = cs.core.unpack(cs.core.pack(tree), like=tree)
        for (name, x), (_, y) in zip(leaves(tree), leaves(back), strict=True):
            assert torch.equal(x, y), name


@every
def test_local_is_pure(algorithm, task, federation):
    first, second = first_round(algorithm), one_round(algorithm, task, federation)
    for a, b in zip(first, second, strict=True):
        for (name, x), (_, y) in zip(leaves(a), leaves(b), strict=True):
            assert torch.equal(x, y), name
    server = first[0]
    fresh = begin(algorithm, algorithm.adapt(task, 0).prepare(dtype=torch.float64), algorithm.arrange(federation))[0]
    for (name, x), (_, y) in zip(leaves(server), leaves(fresh), strict=True):
        assert torch.equal(x, y), f"local changed the server's {name} in place"


@every
def test_updates_and_states_have_a_row_for_each_client_and_keep_their_shape(algorithm, federation):
    _, message, state, update, new_state = first_round(algorithm)
    clients = len(algorithm.arrange(federation))
    for name, leaf in (*leaves(update), *leaves(new_state)):
        assert leaf.shape[0] == clients, name
    if isinstance(message, Addressed):
        assert all(len(leaf) == clients for _, leaf in leaves(message.own))
    assert [(n, x.shape, x.dtype) for n, x in leaves(state)] == [(n, x.shape, x.dtype) for n, x in leaves(new_state)]


@every
def test_a_run_in_float64_is_float64_throughout(algorithm):
    for what, tree in belief_of_everyone(learned(algorithm)):
        for name, leaf in leaves(tree):
            assert leaf.dtype == torch.float64 or not leaf.is_floating_point(), f"{what} {name}"


@every
def test_a_run_that_is_cut_short_and_resumed_is_the_same_run(algorithm, task, federation, tmp_path):
    class CutError(Exception):
        pass

    def cut(run, line):
        if line["round"] == 3:
            raise CutError

    redone, out = [], cs.runs.Storage(tmp_path / "run", checkpoint_every=2)
    with pytest.raises(CutError):
        learn(algorithm, task, federation, out=out, callbacks=[cut])
    again = {"resume": True, "callbacks": [lambda run, line: redone.append(line["round"])]}
    resumed = learn(algorithm, task, federation, out=out, **again)
    assert redone == [3]
    for (what, a), (_, b) in zip(belief_of_everyone(learned(algorithm)), belief_of_everyone(resumed), strict=True):
        for (name, x), (_, y) in zip(leaves(a), leaves(b), strict=True):
            assert torch.equal(x, y), f"{what} {name}"


def poisoned(algorithm):
    """The algorithm's client half, with a client 2 whose update is NaN."""

    def local(task, message, state, cohort):
        update, state = algorithm.local(task, message, state, cohort)
        sick = cohort.ids == 2

        def spoilt(leaf):
            if not leaf.is_floating_point():
                return leaf
            return torch.where(sick.view(-1, *[1] * (leaf.dim() - 1)), torch.nan, leaf)

        return tree_map(spoilt, update), state

    return SimpleNamespace(local=local, additive=algorithm.additive)


@every
def test_a_client_that_sends_nan_is_left_out_and_named(algorithm, task, federation):
    if len(algorithm.arrange(federation)) < 3:
        pytest.skip("a reference with one client has nobody to leave out")
    task = algorithm.adapt(task, 0).prepare(dtype=torch.float64)
    server, states, _ = begin(algorithm, task, federation)
    updates = []
    for method, who in ((poisoned(algorithm), range(7)), (algorithm, (0, 1, 3, 4, 5, 6))):
        ids = torch.tensor(list(who))
        cohort = cs.data.Cohort(federation, ids, round=1, round_size=7, seed=0, dtype=task.dtype)
        with guards.watch():
            share = compute(method, task, algorithm.message(server, ids), states.gather(ids), cohort)
        updates.append(share)
    assert list(updates[0].rejected) == [2]
    assert "is not finite" in updates[0].rejected[2]
    assert updates[0].accepted == updates[1].accepted == [0, 1, 3, 4, 5, 6]
    for name in ("update", "states"):
        mine, theirs = (leaves(getattr(share, name)) for share in updates)
        for (_, x), (_, y) in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@every
def test_who_audits_what_it_has_of_its_clients_states_can_take_one_out(algorithm):
    assert overrides(algorithm, "audit") == overrides(algorithm, "swap")
    assert overrides(algorithm, "follow") or not overrides(algorithm, "swap")


@stateful
def test_whoever_sees_the_updates_can_follow_the_states(algorithm, federation):
    run = learned(algorithm)
    ids = federation.sizes.argsort(descending=True)
    cohort = cs.data.Cohort(federation, ids, round=4, round_size=len(ids), seed=0, dtype=torch.float64)
    states = run.states.gather(ids)
    update, after = algorithm.local(run.task, algorithm.message(run.server, ids), states, cohort)
    followed = algorithm.follow(states, update)
    if followed is None:
        assert not overrides(algorithm, "swap")
        pytest.skip("only its clients know their states")
    for (name, told), (_, old), (_, new) in zip(leaves(followed), leaves(states), leaves(after), strict=True):
        known = old if name == "network" else new  # a network of a client's own never travels
        torch.testing.assert_close(told, known, rtol=1e-12, atol=0, msg=lambda m, name=name: f"{name}: {m}")


def lose(algorithm, federation):
    """(run, one of its clients, what that client holds, what it begins with again when this is lost)."""
    run = learned(algorithm)
    client = torch.tensor([next(c for c in range(len(federation)) if c in run.states)])
    _, fresh, _ = begin(algorithm, run.task, federation, run.posterior.mean)
    return run, client, *(rows(states.gather(client), 0) for states in (run.states, fresh))


def gap(algorithm, server, states):
    try:
        return max(algorithm.audit(server, [states]).values(), default=0.0)
    except ConsilienceError:
        return math.inf


@stateful
def test_a_server_takes_out_what_it_has_of_a_lost_state(algorithm, federation):
    if isinstance(algorithm, cs.FedEP) and algorithm.server != cs.server.Momentum():
        pytest.skip("sites whose optimiser has a memory do not multiply to q")  # tests/algorithms/test_lost_states.py
    run, client, old, new = lose(algorithm, federation)
    server, states = run.server, run.states.gather(torch.arange(len(federation)))
    assert gap(algorithm, server, states) < 1e-12
    states = tree_map(lambda all, one: all.index_copy(0, client, one.unsqueeze(0)), states, new)
    assert gap(algorithm, algorithm.swap(server, old, new), states) < 1e-12
    assert gap(algorithm, server, states) > 1e-4 or not overrides(algorithm, "swap")


@stateful
def test_a_swap_is_undone_by_swapping_back(algorithm, federation):
    run, _, old, new = lose(algorithm, federation)
    there = algorithm.swap(run.server, old, new)
    back, same = algorithm.swap(there, new, old), algorithm.swap(run.server, old, old)
    for (name, x), (_, y), (_, z) in zip(leaves(run.server), leaves(back), leaves(same), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(z, x, rtol=1e-15, atol=0)


SLOW = ("FedSGD-Momentum", "FedAvg-AdaGrad")  # theirs are small steps


@every
def test_learning_lowers_the_loss(algorithm, task, federation):
    if plays(algorithm):
        pytest.skip("generators have no loss to lower: test_generators_go_where_the_data_is")
    before = cs.evaluate(task, cs.Point(task.initial()), federation.data).point["nll"]
    rounds, engine = 15 if label(algorithm) in SLOW else 6, cs.Simulator(device="cpu", chunk=7, workers=1)
    run = cs.fit(algorithm, task, federation, rounds=rounds, engine=engine, progress=False)
    assert run.evaluate(federation).point["nll"] < 0.9 * before


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if plays(a)], ids=label)
def test_generators_go_where_the_data_is(algorithm, task, federation):
    data = dataclasses.replace(federation.data, x=federation.data.x + 2)
    eager = with_pace(algorithm, 0.04)
    run = cs.fit(
        eager,
        task,
        cs.Federation.from_owner(data, torch.arange(len(data)) % 3),
        rounds=15 if label(algorithm) in SLOW else 8,
        engine=cs.Simulator(device="cpu", chunk=3, workers=1),
        progress=False,
    )
    before, after = (
        x.mean(0).sub(data.x.mean(0)).norm() for x in (task.generate(task.initial(), 500), run.sample(500))
    )
    assert after < 0.7 * before


def with_pace(algorithm, lr):
    """A method for GANs with longer steps, at clients and at the server."""
    if hasattr(algorithm, "method"):
        return dataclasses.replace(algorithm, method=with_pace(algorithm.method, lr))
    eager = with_training(algorithm, dataclasses.replace(algorithm.train, lr=lr, epochs=3))
    return (
        dataclasses.replace(eager, generator=dataclasses.replace(eager.generator, lr=lr / 4))
        if hasattr(eager, "generator")
        else eager
    )
