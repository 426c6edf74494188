"""Methods that correct for clients' drift, on quadratics: SCAFFOLD, FedDyn, FedDC, FedNova."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import consilience as cs
from consilience.core import keys
from consilience.core.errors import ConfigError
from consilience.core.records import tree_map
from support.scenarios import linear

ENGINE = cs.Simulator(device="cpu", precision="float64", chunk=3, workers=1)
TOGETHER = replace(ENGINE, chunk=4)  # for long runs
EXACT = {"rtol": 1e-11, "atol": 1e-11}
SIZES = (30, 12, 8, 20)
K, P = len(SIZES), 4
FULL = cs.SGD(lr=0.1, epochs=5, batch_size=100)
NOISY = cs.SGD(lr=0.05, epochs=2, batch_size=5, weight_decay=0.01)
CORRECTED = [cs.SCAFFOLD(FULL), cs.algorithms.FedDyn(FULL, alpha=1.0), cs.algorithms.FedDC(FULL, alpha=1.0)]
corrected = pytest.mark.parametrize("algorithm", CORRECTED, ids=lambda algorithm: algorithm.name)


def drifting(sizes=SIZES):
    """Clients that disagree: each has its own target and its own scale of inputs."""
    task, federation = linear(sizes, names=None)
    data, owner = federation.data, torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    who = owner.unsqueeze(1)
    data = cs.Dataset(data.x * (1 + 0.3 * who), data.y + who * data.x[:, :1], name="planes")
    return task, cs.Federation.from_owner(data, owner)


@pytest.fixture
def world():
    return drifting()


def fit(algorithm, world, rounds=1, engine=ENGINE, **options):
    return cs.fit(algorithm, *world, rounds=rounds, engine=engine, progress=False, **options)


def weights(algorithm, world, rounds=1, **options):
    return fit(algorithm, world, rounds, **options).posterior.mean


def everyone(run):
    return run.states.gather(torch.arange(len(run.federation)))


def quadratics(federation):
    """(H_k, b_k) of every client's loss ½ wᵀH_k w − b_kᵀw + const, w = (slopes, offset)."""
    H, b = [], []
    for start, stop in federation.offsets.unfold(0, 2, 1).tolist():
        rows = federation.order[start:stop]
        x = torch.cat([federation.data.x[rows], torch.ones(len(rows), 1)], 1).double()
        H.append(x.T @ x / len(x))
        b.append(x.T @ federation.data.y[rows, 0].double() / len(x))
    return torch.stack(H), torch.stack(b)


def minimiser(H, b, weight):
    return torch.linalg.solve((weight.view(-1, 1, 1) * H).sum(0), (weight.view(-1, 1) * b).sum(0))


@pytest.mark.slow
@corrected
def test_the_minimum_of_the_mean_loss_is_reached_exactly(world, algorithm):
    exact = minimiser(*quadratics(world[1]), torch.ones(K).double())
    cohort, rounds = (3, 120) if isinstance(algorithm, cs.SCAFFOLD) else (None, 60)
    found = weights(algorithm, world, rounds, cohort=cohort, engine=TOGETHER)
    torch.testing.assert_close(found, exact, rtol=1e-7, atol=1e-7)


def test_a_plain_mean_stays_off_that_minimum(world):
    exact = minimiser(*quadratics(world[1]), torch.ones(K).double())
    assert (weights(cs.SAFL(FULL), world, rounds=40, engine=TOGETHER) - exact).norm() > 0.02


def added(algorithm, v, w, c, own_c, own_h):
    """The term that a method adds to a client's loss at v."""
    half = getattr(algorithm, "alpha", 0.0) / 2
    match algorithm:
        case cs.SCAFFOLD():
            return (c - own_c) @ v
        case cs.algorithms.FedDyn():
            return half * (v - w).square().sum() - own_h @ v
        case cs.algorithms.FedDC():
            return half * (v + own_h - w).square().sum() + (c - own_c) @ v


def by_hand(algorithm, world, rounds, cohort):
    """The formulas, client by client: w, all c_k and all h_k."""
    H, b = quadratics(world[1])
    w, c, h = (torch.zeros(P).double() for _ in range(3))
    own_c, own_h = torch.zeros(K, P).double(), torch.zeros(K, P).double()
    train, alpha = algorithm.train, getattr(algorithm, "alpha", 1.0)
    for number in range(1, rounds + 1):
        chosen = keys.sample(keys.key(0, purpose="cohort", round=number), K, cohort)
        ends, changes = [], []
        for k in chosen:
            v = w
            for _ in range(train.epochs):
                extra = torch.func.jacrev(added, argnums=1)(algorithm, v, w, c, own_c[k], own_h[k])
                v = v - train.lr * (H[k] @ v - b[k] + extra)
            ends.append(v)
            changes.append((w - v) / (train.epochs * train.lr) - c)
        ends, changes = torch.stack(ends), torch.stack(changes)
        own_c[chosen] += changes
        own_h[chosen] += ends - w if isinstance(algorithm, cs.algorithms.FedDC) else -alpha * (ends - w)
        c, h = c + len(chosen) / K * changes.mean(0), h - alpha / K * (ends - w).sum(0)
        match algorithm:
            case cs.SCAFFOLD():
                w = ends.mean(0)
            case cs.algorithms.FedDyn():
                w = ends.mean(0) - h / alpha
            case cs.algorithms.FedDC():
                w = ends.mean(0) + own_h.mean(0)
    return w, own_c, own_h


@corrected
@pytest.mark.parametrize("cohort", [1, 3])
def test_rounds_follow_the_formulas(world, algorithm, cohort):
    run = fit(algorithm, world, rounds=4, cohort=cohort)
    w, c, h = by_hand(algorithm, world, 4, cohort)
    torch.testing.assert_close(run.posterior.mean, w, **EXACT)
    for name, value in (("c", c), ("h", h)):
        if hasattr(everyone(run), name):
            torch.testing.assert_close(getattr(everyone(run), name), value, **EXACT)


@settings(max_examples=3, deadline=None)
@given(cohort=st.integers(1, K), seed=st.integers(0, 99), alpha=st.floats(0.05, 3.0), lr=st.floats(0.1, 1.0))
def test_the_servers_means_are_those_of_all_clients(cohort, seed, alpha, lr):
    train = replace(NOISY, schedule=cs.optim.Cosine(unit="steps", total=30, floor=0.1))
    for algorithm in (
        cs.SCAFFOLD(train, cs.server.Momentum(lr, 0.5)),
        cs.algorithms.FedDyn(train, alpha),
        cs.algorithms.FedDC(train, alpha),
    ):
        run = fit(algorithm, drifting(), rounds=4, cohort=cohort, seed=seed, debug=True)
        assert max(gap for line in run.history for gap in line["audit"].values()) < 1e-12


@corrected
def test_a_client_whose_state_was_changed_is_found_out(world, algorithm):
    def tamper(run, line):
        if line["round"] == 2:
            one = run.states.gather(torch.tensor([0]))
            run.states.commit(torch.tensor([0]), tree_map(lambda leaf: 2 * leaf, one), 2)

    with pytest.raises(cs.ConsilienceError, match=r"the server's \w+ is not the mean of the clients': off by"):
        fit(algorithm, world, rounds=4, debug=True, callbacks=[tamper])


def test_scaffold_begins_as_a_plain_mean(world):
    torch.testing.assert_close(weights(cs.SCAFFOLD(NOISY), world), weights(cs.SAFL(NOISY), world), **EXACT)
    assert not torch.allclose(weights(cs.SCAFFOLD(NOISY), world, 2), weights(cs.SAFL(NOISY), world, 2))


def test_scaffold_corrects_nothing_where_clients_are_alike(world):
    task, federation = world
    data = federation.data
    copies = cs.Dataset(data.x.repeat(3, 1), data.y.repeat(3, 1), name="copies")
    alike = task, cs.Federation.from_owner(copies, torch.arange(3).repeat_interleave(len(data)))
    for server in (cs.server.Momentum(0.5), cs.server.Adam(0.1)):
        fedavg = weights(cs.FedAvg(FULL, server), alike, rounds=3)
        torch.testing.assert_close(weights(cs.SCAFFOLD(FULL, server), alike, rounds=3), fedavg, **EXACT)
    alone = task, federation.pooled()
    torch.testing.assert_close(
        weights(cs.SCAFFOLD(NOISY), alone, rounds=3), weights(cs.FedAvg(NOISY), alone, rounds=3), **EXACT
    )


@pytest.mark.parametrize(
    "schedule",
    [None, cs.optim.Tapered(unit="steps"), cs.optim.PerClient(factors=(1.0, 0.2, 3.0, 0.5))],
    ids=lambda s: type(s).__name__,
)
def test_a_control_variate_is_the_gradient_that_a_client_met(world, schedule):
    H, b = quadratics(world[1])
    met = H @ world[0].initial().double() - b
    one_step = replace(FULL, epochs=1, schedule=schedule)
    torch.testing.assert_close(everyone(fit(cs.SCAFFOLD(one_step), world)).c, met, **EXACT)
    torch.testing.assert_close(everyone(fit(cs.algorithms.FedDC(one_step), world)).c, met, **EXACT)


def test_scaffold_by_gradients_follows_the_formulas(world):
    """Option I of the paper, with momentum, and clients that come and go."""
    train = cs.SGD(lr=0.05, epochs=3, batch_size=100, momentum=0.8)
    (H, b), lr, momentum = quadratics(world[1]), 0.05, 0.8
    w, c, own = torch.zeros(P).double(), torch.zeros(P).double(), torch.zeros(K, P).double()
    for number in range(1, 7):
        chosen = keys.sample(keys.key(0, purpose="cohort", round=number), K, 3)
        ends = []
        for k in chosen:
            v, velocity = w, torch.zeros(P).double()
            for _ in range(3):
                velocity = momentum * velocity + H[k] @ v - b[k] - own[k] + c
                v = v - lr * velocity
            ends.append(v)
        met = torch.stack([H[k] @ w - b[k] for k in chosen])
        c = c + (met - own[chosen]).sum(0) / K
        own[chosen], w = met, torch.stack(ends).mean(0)
    run = fit(cs.SCAFFOLD(train, variate="gradient"), world, rounds=6, cohort=3, debug=True)
    torch.testing.assert_close(run.posterior.mean, w, **EXACT)
    torch.testing.assert_close(everyone(run).c, own, **EXACT)
    torch.testing.assert_close(run.server.c, c, **EXACT)


@pytest.mark.parametrize("batch", [5, 100])
def test_a_gradient_for_variate_is_over_all_data_where_the_round_began(world, batch):
    H, b = quadratics(world[1])
    algorithm = cs.SCAFFOLD(cs.optim.AMSGrad(lr=0.1, epochs=2, batch_size=batch), variate="gradient")
    before = weights(algorithm, world, rounds=2)
    torch.testing.assert_close(everyone(fit(algorithm, world, rounds=3)).c, H @ before - b, **EXACT)


def test_both_variates_of_scaffold_are_the_same_after_one_step_and_to_first_order_after_more(world):
    def both(train):
        return [fit(cs.SCAFFOLD(train, variate=variate), world, rounds=4, cohort=3) for variate in ("path", "gradient")]

    path, gradient = both(replace(FULL, epochs=1))
    torch.testing.assert_close(path.posterior.mean, gradient.posterior.mean, **EXACT)
    torch.testing.assert_close(everyone(path).c, everyone(gradient).c, **EXACT)
    apart = []
    for lr in (1e-4, 1e-5):
        path, gradient = both(replace(FULL, lr=lr))
        apart.append(float((everyone(path).c - everyone(gradient).c).norm() / everyone(path).c.norm()))
    assert 1e-6 < apart[1] < 1e-4
    assert apart[0] == pytest.approx(10 * apart[1], rel=0.01)


FADING = cs.optim.Cosine(unit="rounds", total=60)
ANY = {
    "momentum": cs.SGD(lr=0.05, epochs=5, batch_size=100, momentum=0.9),
    "RMSprop": cs.optim.RMSprop(lr=0.1, epochs=5, batch_size=100, schedule=FADING),
}


@pytest.mark.slow
@pytest.mark.parametrize("train", ANY.values(), ids=ANY.keys())
def test_with_gradients_for_variates_any_chain_comes_to_that_minimum(world, train):
    """The steps of adaptive optimisers do not shrink with the gradient: a schedule must end them."""
    exact = minimiser(*quadratics(world[1]), torch.ones(K).double())
    corrected, plain = (
        float((weights(method, world, rounds=60, engine=TOGETHER) - exact).norm())
        for method in (cs.SCAFFOLD(train, variate="gradient"), cs.SAFL(train))
    )
    assert plain > 0.02
    assert corrected < (1e-5 if train.schedule is None else 1e-2)


@pytest.mark.parametrize("kind", [cs.SCAFFOLD, cs.algorithms.FedDC, cs.algorithms.FedNova])
def test_a_client_with_steps_of_no_size_is_no_trouble(world, kind):
    algorithm = kind(replace(FULL, schedule=cs.optim.PerClient(factors=(1.0, 0.0, 1.0, 1.0))))
    run = fit(algorithm, world, rounds=3, debug=True)
    assert not any(line["rejected"] for line in run.history)
    if kind is not cs.algorithms.FedNova:
        c = everyone(run).c
        assert bool((c[1] == 0).all())
        assert bool((c[[0, 2, 3]] != 0).all())


@pytest.mark.parametrize("kind", [cs.algorithms.FedDyn, cs.algorithms.FedDC])
@pytest.mark.parametrize("alpha", [0.01, 1.0])
def test_the_first_round_goes_twice_as_far_as_fedprox(kind, alpha):
    world = drifting((10, 10, 10))
    start = world[0].initial().double()
    step = weights(cs.FedProx(NOISY, mu=alpha), world) - start
    torch.testing.assert_close(weights(kind(NOISY, alpha), world), start + 2 * step, **EXACT)


def test_only_what_is_needed_travels(world):
    vectors = {
        cs.SCAFFOLD: (2, 2),
        cs.algorithms.FedDC: (2, 2),
        cs.algorithms.FedDyn: (1, 1),
        cs.algorithms.FedNova: (1, 1),
    }
    for kind, (down, up) in vectors.items():
        line = fit(kind(), world, cohort=3).history[0]
        numbers = 3 if kind is cs.algorithms.FedNova else 1  # beside vectors: a weight; FedNova's steps
        assert line["bytes_up"] == 3 * 8 * (up * P + numbers)
        assert line["bytes_down"] == 3 * 8 * down * P


def test_a_server_with_momentum_goes_on_after_a_switch(world):
    server = cs.server.Momentum(1.0, 0.9)
    before = fit(cs.FedAvg(NOISY, server), world, rounds=2)
    info = cs.data.Info(before.posterior.mean, *(torch.tensor(v) for v in (0, K, 70)), before=before.server)
    for kind in (cs.SCAFFOLD, cs.algorithms.FedNova):
        state = kind(NOISY, server).start(world[0], info)
        memory = state.memory
        assert torch.equal(memory.first.theta, before.server.memory.first.theta)
    for then in (cs.SCAFFOLD(NOISY, server), cs.algorithms.FedDyn(NOISY), cs.algorithms.FedDC(NOISY)):
        run = fit(cs.Switch(cs.FedAvg(NOISY, server), then, at=2), world, rounds=5, cohort=2, debug=True)
        assert all(gap < 1e-12 for line in run.history[2:] for gap in line["audit"].values())


REFUSED = [
    (lambda: cs.SCAFFOLD(cs.SGD(momentum=0.9)), "SCAFFOLD needs plain SGD: momentum must be 0, got 0.9"),
    (lambda: cs.algorithms.FedDC(cs.SGD(momentum=0.5)), "FedDC needs plain SGD: momentum must be 0, got 0.5"),
    (lambda: cs.SCAFFOLD(cs.optim.AMSGrad()), "SCAFFOLD needs plain SGD, got AMSGrad"),
    (lambda: cs.SCAFFOLD(variate="gradients"), "variate must be 'path' or 'gradient', got 'gradients'"),
    (lambda: cs.algorithms.FedDyn(alpha=0.0), "alpha must be above 0, got 0.0"),
    (lambda: cs.algorithms.FedDC(alpha=-1.0), "alpha must be above 0, got -1.0"),
    (lambda: cs.algorithms.FedDC(alpha=21.0), "lr · alpha must be at most 1, got lr=0.05 and alpha=21.0"),
    (lambda: cs.algorithms.FedNova(reach=0.5), "reach must be at least 1, got 0.5"),
    (
        lambda: cs.algorithms.FedNova(cs.SGD(momentum=0.9, schedule=cs.optim.Tapered(unit="epochs"))),
        "with momentum, FedNova needs steps of one size within a round: the unit of the schedule must be rounds, "
        "got epochs",
    ),
]


@pytest.mark.parametrize(("make", "sentence"), REFUSED, ids=[sentence[:30] for _, sentence in REFUSED])
def test_what_cannot_work_is_refused(make, sentence):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).endswith(sentence)


COPIES = (40, 20, 10, 4)
STEPS = torch.tensor([10.0, 5.0, 3.0, 1.0]).double()
SHARES = torch.tensor(COPIES).double() / sum(COPIES)


def repeating(start=(0.0, 0.0)):
    """Clients with many copies of one example: all their batches, and so all their steps, have the same loss."""
    owner = torch.arange(len(COPIES)).repeat_interleave(torch.tensor(COPIES))
    x, y = torch.tensor([[0.5], [-1.0], [1.5], [-0.3]]), torch.tensor([[1.0], [2.0], [-1.0], [0.5]])
    module = nn.Linear(1, 1).double()
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), start, strict=True):
            parameter.fill_(float(value))
    return cs.Regression(module), cs.Federation.from_owner(cs.Dataset(x[owner], y[owner], name="copies"), owner)


def trained(H, b, w, lr, momentum):
    """All clients' weights after their steps of SGD."""
    ends = []
    for H_k, b_k, count in zip(H, b, STEPS.int().tolist(), strict=True):
        end, velocity = w, torch.zeros_like(w)
        for _ in range(count):
            velocity = momentum * velocity + H_k @ end - b_k
            end = end - lr * velocity
        ends.append(end)
    return torch.stack(ends)


def effective(momentum):
    """‖a_k‖₁: the last gradient counts once, the one before 1 + ρ times, and so on."""
    counts = [sum(sum(momentum**i for i in range(age)) for age in range(1, int(count) + 1)) for count in STEPS]
    return torch.tensor(counts, dtype=torch.float64)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_fednova_is_the_mean_change_per_step_times_the_mean_number_of_steps(momentum):
    world, tau, w = repeating(), effective(momentum), torch.zeros(2).double()
    algorithm = cs.algorithms.FedNova(cs.SGD(lr=0.02, batch_size=4, momentum=momentum), reach=math.inf)
    H, b = quadratics(world[1])
    for rounds in (1, 2):
        change = trained(H, b, w, 0.02, momentum) - w
        w = w + SHARES @ tau * ((SHARES / tau) @ change)
        torch.testing.assert_close(weights(algorithm, world, rounds), w, **EXACT)


SHORT = cs.SGD(lr=1e-7, batch_size=4)
VARIED = {
    "plain": SHORT,
    "momentum": replace(SHORT, momentum=0.9),
    "tapered": replace(SHORT, schedule=cs.optim.Tapered(unit="steps")),
    "per client": replace(
        SHORT, momentum=0.5, schedule=cs.optim.PerClient(unit="rounds", factors=(1.0, 0.3, 2.0, 5.0))
    ),
}


@pytest.mark.parametrize("train", VARIED.values(), ids=VARIED.keys())
def test_with_short_steps_fednova_descends_the_mean_loss_and_fedavg_another(train):
    world = repeating()
    b = quadratics(world[1])[1]
    downhill = SHARES @ b  # at 0, where the module starts
    for kind, follows in ((cs.algorithms.FedNova, True), (cs.FedAvg, False)):
        step = weights(kind(train), world)
        straight = torch.cosine_similarity(step, downhill, dim=0)
        assert bool(straight > 1 - 1e-9) is follows
    torch.testing.assert_close(weights(cs.FedAvg(SHORT), world) / 1e-7, (SHARES * STEPS) @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reach", [1.0, 2.0, math.inf])
def test_fednova_comes_to_rest_nearer_the_minimum_than_fedavg(reach):
    lr, (H, b) = 0.05, quadratics(repeating()[1])
    minimum = minimiser(H, b, SHARES)
    unit = torch.eye(2).double()
    # Δ_k = −(1 − (1 − lr H_k)^τ)(w − w_k): what client k's loss looks like from the server.
    seen = torch.stack([unit - torch.matrix_power(unit - lr * h, int(t)) for h, t in zip(H, STEPS, strict=True)])
    alone = torch.stack([torch.linalg.lstsq(h, v, driver="gelsd").solution for h, v in zip(H, b, strict=True)])
    pulls = (seen @ alone.unsqueeze(-1)).squeeze(-1)
    rests = {}
    train = replace(SHORT, lr=lr)
    for algorithm, weight in ((cs.FedAvg(train), SHARES), (cs.algorithms.FedNova(train, reach=reach), SHARES / STEPS)):
        rest = minimiser(seen, pulls, weight)
        torch.testing.assert_close(weights(algorithm, repeating(rest.tolist()), rounds=3), rest, **EXACT)
        rests[algorithm.name] = (rest - minimum).norm()
    assert rests["FedNova"] < 0.4 * rests["FedAvg"]


@pytest.mark.parametrize(
    "server", [cs.server.Momentum(), cs.server.Momentum(0.7, 0.9), cs.server.Adam(0.1)], ids=lambda s: type(s).__name__
)
def test_with_equal_steps_fednova_is_fedavg(server):
    world, train = drifting((10, 10, 9, 7)), cs.SGD(lr=0.05, epochs=2, batch_size=5, momentum=0.9)
    assert torch.equal(train.batches(world[1].sizes), torch.full((4,), 2.0).double())
    fedavg = weights(cs.FedAvg(train, server), world, rounds=4, cohort=3)
    torch.testing.assert_close(
        weights(cs.algorithms.FedNova(train, server), world, rounds=4, cohort=3), fedavg, **EXACT
    )


def test_reach_shortens_a_step_and_is_counted():
    world, train = repeating(), cs.SGD(lr=0.02, batch_size=4)
    whole = fit(cs.algorithms.FedNova(train, reach=math.inf), world)
    held = fit(cs.algorithms.FedNova(train, reach=1.2), world)
    total = (SHARES @ STEPS) * (SHARES / STEPS).sum()
    assert 1.2 < total < 2
    torch.testing.assert_close(held.posterior.mean * total / 1.2, whole.posterior.mean, **EXACT)
    assert held.history[0]["guards"] == {"reach held": 1}
    assert whole.history[0]["guards"] == {}
    torch.testing.assert_close(weights(cs.algorithms.FedNova(train), world), whole.posterior.mean, **EXACT)
