"""FedNP: known answers, limits, and what must hold of q(z) and its sites."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Normal, kl_divergence

import consilience as cs
from consilience.algorithms.fednp import NETWORK, SIGNAL, LatentSite, Told
from consilience.core import keys
from consilience.core.errors import ConfigError, TaskError
from consilience.core.gaussian import Gaussian
from consilience.core.records import tree_map
from consilience.inference import sigmoid_moments
from support.one_shot import learn
from support.scenarios import blobs, linear

LOCAL = cs.SGD(lr=0.1, momentum=0.9, epochs=2, batch_size=8, weight_decay=0.01)
STILL = cs.SGD(lr=0.0, batch_size=8)
EXACT = {"rtol": 1e-11, "atol": 1e-11}
D, H = 3, 4


def fednp(train=LOCAL, **options):
    return cs.FedNP(train, **{"latent": D, "hidden": H} | options)


def adapted(method, task=None):
    return method.adapt(blobs()[0] if task is None else task, 0).prepare(dtype=torch.float64)


def everyone(run):
    return run.states.gather(torch.arange(len(run.federation)))


def fresh(method, task, federation):
    """(server, all clients' states) before the first round."""
    info = cs.data.Info(task.initial(), *(torch.tensor(v) for v in (0, len(federation), federation.examples)))
    return method.start(task, info), method.client(task, info, federation.sizes.double().unsqueeze(1))


def one_round(method, task, federation, theta=None, states=None):
    """What all clients answer, and their new states, from weights θ."""
    server, begun = fresh(method, task, federation)
    message = Told(cs.Point(task.initial() if theta is None else theta), server.q)
    sizes = federation.sizes.argsort(descending=True, stable=True)
    assert torch.equal(sizes, torch.arange(len(federation)))  # of `blobs`: all alike
    cohort = cs.data.Cohort(federation, sizes, round=1, round_size=len(sizes), seed=0, dtype=torch.float64)
    return method.local(task, message, begun if states is None else states, cohort)


# FedNP on the network of `blobs`, in plain torch

SHAPES = [(8, 2), (8,), (3, 8), (3,), (D, 8), (D,), (H, D), (H,), (24, H), (24,)]


def apart(theta):
    """The weights as matrices: of the user's two layers, of f's network, of the natural-parameter network's two."""
    sizes = [math.prod(shape) for shape in SHAPES]
    return [part.view(shape) for part, shape in zip(theta.split(sizes), SHAPES, strict=True)]


def f_by_hand(theta, x, pool="batch", bound=3.0):
    w1, b1, _, _, w, b, *_ = apart(theta)
    mean = ((x @ w1.T + b1).tanh() @ w.T + b).mean(0)
    return bound * (mean.mean().expand(D) if pool == "all" else mean).tanh()


def tilted_by_hand(f, m, s):
    kappa = 1 / (1 + math.pi / 8 * f**2 * s).sqrt()
    p = (kappa * f * m).sigmoid()
    return m + s * f * kappa * (1 - p), s * (1 - f**2 * s * kappa**2 * p * (1 - p))


def predicted_by_hand(theta, m, s):
    *_, w1, b1, w2, b2 = apart(theta)
    alpha, beta, zeta2 = 4 - 2 * 2**0.5, math.log(2**0.5 - 1), math.pi / 8
    o_m, o_s = w1 @ m + b1, w1**2 @ s
    a_m = (o_m / (1 + zeta2 * o_s).sqrt()).sigmoid()
    a_s = (alpha * (o_m + beta) / (1 + zeta2 * alpha**2 * o_s).sqrt()).sigmoid() - a_m**2
    return w2 @ a_m + b2, w2**2 @ a_s.clamp_min(1e-6)


def loss_by_hand(method, theta, x, y, mean, var):
    w1, b1, w2, b2, *_ = apart(theta)
    output = (x @ w1.T + b1).tanh() @ w2.T + b2
    f = f_by_hand(theta, x, method.pool, method.bound)
    m, s = tilted_by_hand(f.detach() if method.detach else f, mean, var)
    mu, v = predicted_by_hand(theta, m, s)
    spring = kl_divergence(Normal(mu, v.sqrt()), Normal(w2.flatten(), method.epsilon**0.5)).mean()
    latent = kl_divergence(Normal(m, s.sqrt()), Normal(torch.zeros_like(m), torch.ones_like(s))).sum()
    return nn.functional.cross_entropy(output, y) + method.strength * (spring + latent)


def case(task, count=7, pad=2):
    """θ, a batch with rows of padding that must not count, and a cavity's mean and variance."""
    made = torch.Generator().manual_seed(5)
    theta = task.initial() + 0.5 * torch.randn(task.size, generator=made).double()
    x, w = torch.randn(count, 2, generator=made).double(), (torch.arange(count) < count - pad).double()
    batch = cs.data.Batch(x, torch.arange(count) % 3, w, torch.tensor(3))
    return theta, batch, torch.randn(D, generator=made).double(), torch.rand(D, generator=made).double() + 0.5


@pytest.mark.parametrize("pool", ["all", "batch"])
@pytest.mark.parametrize("options", [{}, {"epsilon": 0.3, "bound": 1.5}, {"detach": True}], ids=str)
def test_the_loss_is_the_formulas_and_so_is_its_gradient(pool, options):
    method = fednp(strength=0.7, pool=pool, **options)
    task = adapted(method)
    theta, batch, mean, var = case(task)
    real = int(batch.w.sum())
    at = theta.clone().requires_grad_()
    wanted = loss_by_hand(method, at, batch.x[:real], batch.y[:real], mean, var)
    slope, value = task.gradient(method.loss)(
        *(tree_map(lambda t: t[None], part) for part in (theta, batch, mean, var))
    )
    torch.testing.assert_close(value[0], wanted.detach(), **EXACT)
    torch.testing.assert_close(slope[0], torch.autograd.grad(wanted, at)[0], **EXACT)


def test_f_may_hear_losses_and_they_hear_of_it():
    method = fednp(strength=0.7, signal="losses", signal_hidden=2)
    task = adapted(method)
    theta, batch, mean, var = case(task)
    real, parts = int(batch.w.sum()), task.split(theta)
    losses = task.likelihood.losses(task.apply_one(theta, batch.x), batch.y)[:real]
    w1, b1, w2, b2 = parts[SIGNAL].split([2, 2, 2 * D, D])
    heard = ((losses.unsqueeze(1) * w1 + b1).tanh() @ w2.view(D, 2).T + b2).mean(0)
    torch.testing.assert_close(method.heard(task, parts, batch, None)[0], heard, **EXACT)
    rows = [tree_map(lambda t: t[None], part) for part in (theta, batch, mean, var)]
    step = 1e-6 * torch.eye(task.size).double()
    wanted = [torch.sub(*(method.loss(task, at, batch, mean, var) for at in (theta + e, theta - e))) for e in step]
    torch.testing.assert_close(
        task.gradient(method.loss)(*rows)[0][0], torch.stack(wanted) / 2e-6, rtol=1e-5, atol=1e-8
    )


@pytest.mark.parametrize("detach", [False, True])
def test_what_others_know_reaches_every_part_unless_f_is_detached(detach):
    task = adapted(fednp(detach=detach))
    rows = [tree_map(lambda t: t[None], part) for part in case(task)]
    slopes = [task.gradient(fednp(strength=strength, detach=detach).loss)(*rows)[0][0] for strength in (0.0, 1.0)]
    moved = {
        "layer": task.slice(parameter="2.weight"),
        "npn": task.slice(NETWORK),
        "signal": task.slice(SIGNAL),
        "encoder": task.slice(parameter="0.weight"),
    }
    change = slopes[1] - slopes[0]
    found = {name: bool(change[where].abs().max() > 1e-6) for name, where in moved.items()}
    assert found == {"layer": True, "npn": True, "signal": not detach, "encoder": not detach}
    assert not change[task.slice(parameter="2.bias")].any()  # nobody predicts it
    assert not slopes[0][task.slice(SIGNAL)].any()  # the task itself does not know of f


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pool": "all", "bound": 30.0},
        {"signal": "losses", "signal_hidden": 5},
        {"own_network": True, "prior": False},
        {"moments": "quadrature", "detach": True},
        {"signal": "nothing"},
    ],
    ids=str,
)
def test_without_strength_the_users_network_is_fedavgs(options):
    task, even, _ = blobs()
    owner = torch.arange(6).repeat_interleave(torch.tensor([50, 30, 20, 10, 8, 2]))
    train, server = cs.Federation.from_owner(even.data, owner), cs.server.Momentum(0.9, 0.5)
    fedavg = learn(cs.FedAvg(LOCAL, server), task, train, rounds=3, cohort=4).posterior.mean
    silent, heard = (
        learn(fednp(server=server, strength=strength, **options), task, train, rounds=3, cohort=4)
        for strength in (0.0, 0.1)
    )
    torch.testing.assert_close(silent.posterior.mean[: task.size], fedavg, rtol=1e-10, atol=1e-12)
    assert (heard.posterior.mean[: task.size] - fedavg).abs().max() > 1e-4
    assert (silent.history[-1]["z_mean"] == 0) is (options == {"signal": "nothing"})


# q(z) and its sites


def flat_prior():
    return torch.zeros(D).double(), torch.ones(D).double()


def test_with_one_client_every_round_tilts_the_prior_afresh():
    task, train, _ = blobs()
    one, seen = train.pooled(), []
    learn(fednp(), task, one, rounds=4, callbacks=[lambda run, line: seen.append(run.server)])
    for server in seen:
        f = f_by_hand(server.averaged.model.theta, one.data.x.double()[one.order])
        mean, var = tilted_by_hand(f, *flat_prior())
        torch.testing.assert_close(server.q.mean, mean, **EXACT)
        torch.testing.assert_close(server.q.variance, var, **EXACT)
    assert (seen[3].q.mean - seen[0].q.mean).abs().max() > 0.01


@pytest.mark.parametrize("prior", [True, False])
@pytest.mark.parametrize(("epochs", "damping"), [(1, 1.0), (3, 1.0), (1, None), (1, 0.4)])
@pytest.mark.parametrize("cohort", [2, 6])
def test_sites_of_weights_that_stand_still_follow_the_formulas(prior, epochs, damping, cohort):
    """However long clients train: a site is the tilted of f at the end over the cavity, not tilted upon tilted."""
    task, train, _ = blobs()
    method, rounds, clients = fednp(replace(STILL, epochs=epochs), prior=prior, damping=damping), 5, len(train)
    share = damping or 1 / cohort
    run = learn(method, task, train, rounds=rounds, cohort=cohort)
    theta = run.task.initial()
    x = [train.client(k).x.double() for k in range(clients)]
    eta = torch.zeros(clients, D).double()
    lam = torch.full_like(eta, 0.0 if prior else 1 / (clients - 1))
    for number in range(1, rounds + 1):
        q_eta, q_lam = eta.sum(0), lam.sum(0) + float(prior)
        for k in keys.sample(keys.key(0, purpose="cohort", round=number), clients, cohort).tolist():
            c_eta, c_lam = q_eta - eta[k], q_lam - lam[k]
            m, s = tilted_by_hand(f_by_hand(theta, x[k]), c_eta / c_lam, 1 / c_lam)
            eta[k] = (1 - share) * eta[k] + share * (m / s - c_eta)
            lam[k] = (1 - share) * lam[k] + share * (1 / s - c_lam)
    sites = everyone(run).factor
    torch.testing.assert_close(sites.eta, eta, **EXACT)
    torch.testing.assert_close(sites.lam, lam, **EXACT)
    torch.testing.assert_close(run.server.q.lam, lam.sum(0) + float(prior), **EXACT)


@pytest.mark.parametrize(("damping", "rounds"), [(1.0, 12), (None, 40)])
def test_q_comes_near_the_true_posterior_of_z(damping, rounds):
    task, train, _ = blobs()
    run = learn(fednp(STILL, moments="quadrature", damping=damping), task, train, rounds=rounds)
    z = torch.linspace(-8, 8, 4001).double()
    x = [train.client(k).x.double() for k in range(len(train))]
    fs = torch.stack([f_by_hand(run.task.initial(), x_k) for x_k in x])
    assert fs.abs().max() > 0.5
    logs = nn.functional.logsigmoid(fs.unsqueeze(-1) * z).sum(0) - z**2 / 2
    weight = logs.softmax(-1)
    mean = weight @ z
    torch.testing.assert_close(run.server.q.mean, mean, rtol=0, atol=0.01)
    torch.testing.assert_close(run.server.q.variance, weight @ z**2 - mean**2, rtol=0.02, atol=0)


@settings(max_examples=12, deadline=None)
@given(
    cohort=st.integers(1, 6),
    seed=st.integers(0, 99),
    prior=st.booleans(),
    pool=st.sampled_from(["all", "batch"]),
    moments=st.sampled_from(["derivative", "corrected", "printed"]),
    damping=st.sampled_from([None, 0.3, 1.0]),
)
def test_q_is_the_prior_times_all_sites(cohort, seed, prior, pool, moments, damping):
    task, train, _ = blobs()
    method = fednp(prior=prior, pool=pool, moments=moments, damping=damping)
    run = learn(method, task, train, rounds=4, cohort=cohort, seed=seed, debug=True)
    assert max(line["audit"]["q_apart_from_sites"] for line in run.history) < 1e-12
    product = everyone(run).factor.product() * Gaussian(
        torch.zeros(D).double(), torch.full((D,), float(prior)).double()
    )
    for name in ("eta", "lam"):
        torch.testing.assert_close(getattr(run.server.q, name), getattr(product, name), **EXACT)


def test_a_site_that_does_not_belong_to_q_is_found_out():
    task, train, _ = blobs()

    def tamper(run, line):
        if line["round"] == 2:
            one = run.states.gather(torch.tensor([0]))
            run.states.commit(torch.tensor([0]), LatentSite(one.factor**2.0, None), 2)

    with pytest.raises(cs.ConsilienceError, match=r"q\(z\) is not the product of the sites: they differ by .* of its"):
        learn(fednp(), task, train, rounds=4, debug=True, callbacks=[tamper])
    learn(fednp(), task, train, rounds=4, callbacks=[tamper])  # unless nobody looks


@pytest.mark.parametrize("prior", [True, False])
def test_every_cavity_begins_as_the_standard_normal(prior):
    _, train, _ = blobs()
    method = fednp(prior=prior)
    server, states = fresh(method, adapted(method), train)
    cavity = server.q / states.factor
    torch.testing.assert_close(cavity.mean, torch.zeros(6, D).double(), rtol=0, atol=0)
    torch.testing.assert_close(cavity.variance, torch.ones(6, D).double(), rtol=1e-15, atol=0)
    sites = states.factor.product()
    torch.testing.assert_close(server.q.lam, sites.lam + float(prior))
    torch.testing.assert_close(1 / states.factor.lam, torch.full((6, D), math.inf if prior else 5.0).double())


def test_one_client_without_a_prior_is_refused():
    task, train, _ = blobs()
    with pytest.raises(ConfigError) as error:
        learn(fednp(prior=False), task, train.pooled())
    assert str(error.value) == "one client has no others whose sites could be its cavity: it needs prior = true"


def test_without_a_prior_q_runs_away_where_all_clients_agree():
    """Π σ(f_k z) tends to 1 on one side, if all f_k have the same sign. Here f hears how large losses are."""
    task, train, _ = blobs()
    held, free = (
        learn(fednp(STILL, signal="losses", prior=prior, damping=1.0), task, train, rounds=20).server.q
        for prior in (True, False)
    )
    assert held.mean.abs().max() < 3
    assert held.variance.max() < 1
    assert free.mean.abs().min() > 30
    assert free.variance.min() > 100


def test_damped_clients_that_turn_round_at_once_do_not_overshoot():
    """σ(fz) is a slope without curvature where it is small: all sites together can push q far beyond what they want."""
    _, train, _ = blobs(clients=12, each=4)
    found = {}
    for damping in (1.0, None):
        method = fednp(STILL, damping=damping)
        task = adapted(method)
        server, states = fresh(method, task, train)
        q, found[damping] = server.q, []
        cohort = cs.data.Cohort(train, torch.arange(12), round=1, round_size=12, seed=0, dtype=torch.float64)
        for bias in [1.0] * 15 + [-1.0] * 15:
            theta = task.initial()
            theta[task.slice(SIGNAL)] = torch.cat([torch.zeros(8 * D), torch.full((D,), bias)]).double()
            answer, states = method.local(task, Told(cs.Point(theta), q), states, cohort)
            q = q * answer.site.product()
            found[damping].append(float(q.mean[0]))
    assert min(found[1.0]) < -4 < -2 < min(found[None]) < -0.5
    assert max(found[1.0]) < 2 > max(found[None]) > 0.5


@pytest.mark.parametrize("prior", [True, False])
def test_pooled_over_outputs_all_coordinates_of_z_remain_alike(prior):
    task, train, _ = blobs()
    same, own = (
        learn(fednp(pool=pool, prior=prior), task, train, rounds=5, cohort=4).server.q for pool in ("all", "batch")
    )
    for leaf in (same.eta, same.lam):
        torch.testing.assert_close(leaf, leaf[:1].expand(D), **EXACT)
    assert same.mean.abs().min() > 1e-3
    assert (own.mean - own.mean[0])[1:].abs().min() > 1e-3


def test_pooled_over_outputs_twice_as_many_coordinates_say_the_same():
    _, train, _ = blobs()
    sites = []
    for latent in (2, 4):
        method = fednp(STILL, latent=latent, pool="all")
        task = adapted(method)
        theta, made = task.initial(), torch.Generator().manual_seed(2)
        pair = torch.randn(2, 9, generator=made).double()
        w, b = pair[:, :8], pair[:, 8]
        theta[task.slice(SIGNAL)] = torch.cat([w.repeat(latent // 2, 1).flatten(), b.repeat(latent // 2)])
        sites.append(one_round(method, task, train, theta)[1].factor)
    for name in ("eta", "lam"):
        few, many = (getattr(site, name) for site in sites)
        torch.testing.assert_close(many, few[:, :1].expand(-1, 4), **EXACT)
        assert (few[:, 0].diff().abs() > 1e-6).all()  # clients differ


# The ablation


@pytest.mark.parametrize("prior", [True, False])
@pytest.mark.parametrize("moments", ["derivative", "printed"])
def test_where_f_hears_nothing_sites_stay_as_they_are(prior, moments):
    task, train, _ = blobs()
    method = fednp(replace(LOCAL, weight_decay=0.0), signal="nothing", prior=prior, moments=moments)
    assert method.name == "FedNP, f = 0"
    assert fednp().name == "FedNP"
    run = learn(method, task, train, rounds=4, cohort=4, debug=True)
    server, states = fresh(method, run.task, train)
    for name in ("eta", "lam"):
        assert torch.equal(getattr(run.server.q, name), getattr(server.q, name))
        assert torch.equal(getattr(everyone(run).factor, name), getattr(states.factor, name))
    assert (run.history[-1]["rejected"], run.history[-1]["guards"]) == ([], {})
    moved = run.posterior.mean - run.task.initial()
    assert not moved[run.task.slice(SIGNAL)].any()
    assert moved[run.task.slice(NETWORK)].abs().max() > 1e-4  # what is left is a learned spring


def test_a_site_hears_the_network_without_dropout():
    _, train, _ = blobs()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with_dropout = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))
    without = nn.Sequential(with_dropout[0], with_dropout[1], with_dropout[3])
    method = fednp(STILL)
    sites = []
    for module in (with_dropout, without):
        task = adapted(method, cs.Classification(module))
        sites.append(one_round(method, task, train)[1].factor)
    torch.testing.assert_close(sites[0].eta, sites[1].eta, **EXACT)
    keyed, plain = (task.gradient(method.loss) for task in (adapted(method, cs.Classification(with_dropout)), task))
    rows = [tree_map(lambda t: t[None], part) for part in case(task)]
    assert not torch.equal(keyed(*rows)[0][:, task.slice(SIGNAL)], plain(*rows)[0][:, task.slice(SIGNAL)])


# Networks


def test_a_network_of_ones_own_stays_at_home():
    _, train, _ = blobs()
    method = fednp(own_network=True)
    task = adapted(method)
    mine, rest = task.slice(NETWORK), slice(0, task.slice(NETWORK).start)
    made = torch.Generator().manual_seed(3)
    own = torch.randn(len(train), mine.stop - mine.start, generator=made).double()
    begun = fresh(method, task, train)[1]
    answer, after = one_round(method, task, train, states=replace(begun, network=own))
    assert not answer.change.total.theta[:, mine].any()
    assert answer.change.total.theta[:, rest].abs().amax(1).min() > 0
    for k in range(len(train)):  # as if everyone had client k's network
        theta = task.initial()
        theta[mine] = own[k]
        alike = one_round(fednp(), task, train, theta)[0].change.mean.theta
        torch.testing.assert_close(after.network[k], (theta + alike[k])[mine], **EXACT)
        torch.testing.assert_close(answer.change.mean.theta[k, rest], alike[k, rest], **EXACT)


def test_networks_of_ones_own_grow_apart_and_the_servers_learns_nothing():
    task, train, _ = blobs()
    run = learn(fednp(own_network=True, strength=1.0), task, train, rounds=3)
    mine, networks = run.task.slice(NETWORK), everyone(run).network
    assert torch.equal(run.posterior.mean[mine], run.task.initial()[mine])
    assert torch.pdist(networks).min() > 1e-3
    with pytest.raises(ConfigError, match="only clients have a network that has learned to predict weights"):
        run.algorithm.weights(run.task, run.server)


def test_predicted_weights_are_those_of_the_network_at_q():
    task, train, _ = blobs()
    run = learn(fednp(), task, train, rounds=3)
    belief = run.algorithm.weights(run.task, run.server)
    mu, v = predicted_by_hand(run.posterior.mean, run.server.q.mean, run.server.q.variance)
    assert len(mu) == 24  # three classes of eight features
    torch.testing.assert_close(belief.mean, mu, **EXACT)
    torch.testing.assert_close(belief.variance, v, **EXACT)


def test_the_spring_draws_predictions_and_weights_together():
    task, train, _ = blobs()
    gaps = []
    for strength in (0.0, 0.01, 1.0):
        train_long = replace(LOCAL, weight_decay=0.0)
        run = learn(fednp(train_long, strength=strength, hidden=H), task, train, rounds=15)
        w = run.posterior.mean[run.task.slice(parameter="2.weight")]
        gaps.append(float((run.algorithm.weights(run.task, run.server).mean - w).norm()))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[2] < 0.5 * gaps[0]


def test_the_user_gets_a_plain_module_back():
    task, train, test = blobs()
    run = learn(fednp(), task, train, rounds=10)
    assert isinstance(run.posterior, cs.Point)
    assert [name for name, _ in run.model.named_parameters()] == task.main.names
    x = test.data.x
    torch.testing.assert_close(run.model.double()(x.double()).softmax(-1), run.predict(x.double()), rtol=0, atol=1e-6)
    assert run.evaluate(test.data).point["accuracy"] > 0.9


def test_what_travels_is_three_networks_and_a_small_gaussian():
    task, train, _ = blobs()
    run = learn(fednp(), task, train, cohort=4)
    size = task.size + D * 9 + H * (D + 1) + 24 * (H + 1)
    assert run.task.size == size
    assert run.history[0]["bytes_down"] == 4 * 8 * (size + 2 * D)
    assert run.history[0]["bytes_up"] == 4 * 8 * (size + 1 + 2 * D)


@pytest.mark.parametrize(("layer", "weights"), [(None, 24), ("2", 24), ("0", 16)])
def test_the_layer_can_be_chosen(layer, weights):
    task, train, _ = blobs()
    method = fednp(replace(LOCAL, weight_decay=0.0), strength=1.0, layer=layer)
    extended = adapted(method)
    assert len(method.weights(extended, fresh(method, extended, train)[0]).eta) == weights
    theta, batch, mean, var = case(extended)
    leash = [fednp(strength=strength, layer=layer, detach=True) for strength in (0.0, 1.0)]
    rows = [tree_map(lambda t: t[None], part) for part in (theta, batch, mean, var)]
    change = torch.sub(*(extended.gradient(one.loss)(*rows)[0][0] for one in leash))
    pulled = [name for name in task.main.names if change[extended.slice(parameter=name)].any()]
    assert pulled == [f"{layer or 2}.weight"]
    learn(method, task, train, rounds=2)


def test_a_module_that_is_a_linear_layer_itself_has_a_layer_to_predict():
    task, federation = linear(names=None)
    run = learn(fednp(cs.SGD(lr=0.1, epochs=5)), task, federation, rounds=20)
    assert len(run.algorithm.weights(run.task, run.server).eta) == 3
    assert run.evaluate(federation.data).point["rmse"] < 1


def frozen():
    module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    module[2].requires_grad_(False)
    return cs.Classification(module)


@pytest.mark.parametrize(
    ("layer", "task", "sentence"),
    [
        ("3", blobs()[0], "layer '3' has no weights to predict; allowed: 0, 2"),
        ("1", blobs()[0], "layer '1' has no weights to predict; allowed: 0, 2"),
        (None, frozen(), "layer '2' has no weights to predict; allowed: 0"),
    ],
)
def test_a_layer_without_weights_is_named(layer, task, sentence, tmp_path):
    with pytest.raises(ConfigError) as error:
        learn(fednp(layer=layer), task, blobs()[1], out=tmp_path / "run")
    assert str(error.value) == sentence
    assert not list(tmp_path.iterdir())


def test_a_module_without_a_linear_layer_is_refused():
    _, train, _ = blobs()
    module = nn.Sequential(nn.Unflatten(1, (2, 1)), nn.Conv1d(2, 3, 1), nn.Flatten())
    with pytest.raises(TaskError) as error:
        learn(fednp(), cs.Classification(module), train)
    assert str(error.value) == "FedNP needs a linear layer, whose weights it can predict, but the module has none"


def test_the_runs_seed_alone_decides_the_added_networks():
    task, before = blobs()[0], torch.get_rng_state()
    first, again, other = (fednp().adapt(task, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for part in (SIGNAL, NETWORK):
        weights, same, different = (made.initial()[made.slice(part)] for made in (first, again, other))
        assert torch.equal(weights, same)
        assert not torch.equal(weights, different)
    assert torch.equal(first.initial()[: task.size], other.initial()[: task.size])


# Moments


@pytest.mark.parametrize("moments", ["derivative", "corrected", "printed", "quadrature"])
def test_a_site_without_precision_is_refused_and_counted(moments):
    """Large f and a wide cavity, where two of the four ways give negative variances."""
    _, train, _ = blobs()
    method = fednp(STILL, moments=moments, bound=6.0, damping=1.0)
    task = adapted(method)
    theta = task.initial()
    theta[task.slice(SIGNAL)] *= 5
    server, states = fresh(method, task, train)
    states = replace(states, factor=Gaussian(0.3 + states.factor.eta, 0.9 + states.factor.lam))  # cavities' s is 10
    cohort = cs.data.Cohort(train, torch.arange(6), round=1, round_size=6, seed=0, dtype=torch.float64)
    with cs.guards.watch() as acted:
        answer, after = method.local(task, Told(cs.Point(theta), server.q), states, cohort)
    cavity = server.q / states.factor
    fs = torch.stack([f_by_hand(theta, train.client(k).x.double(), bound=6.0) for k in range(6)])
    _, var = sigmoid_moments(fs, cavity.mean, cavity.variance, moments)
    bad = (var <= 0) | (var > cavity.variance)
    assert int(acted["site refused"]) == int(bad.sum())
    assert bool(bad.any()) is (moments in ("corrected", "printed"))
    assert torch.equal(after.factor.lam[bad], states.factor.lam[bad])
    assert not answer.site.eta[bad].any()
    assert (after.factor.lam >= 0).all()
    assert torch.equal(after.factor.lam[~bad] != states.factor.lam[~bad], torch.ones_like(bad[~bad]))


@pytest.mark.parametrize("moments", ["corrected", "printed", "quadrature"])
def test_every_way_to_the_moments_runs_and_keeps_q_proper(moments):
    task, train, test = blobs()
    run = learn(fednp(moments=moments, bound=6.0), task, train, rounds=8, cohort=4, debug=True)
    assert not any(line["rejected"] for line in run.history)
    assert (run.server.q.lam >= 1).all()
    learned = run.evaluate(test.data).point["accuracy"] > 0.9
    assert learned or moments == "printed"  # with f in its denominators, its slopes know no bound
    refused = sum(line["guards"].get("site refused", 0) for line in run.history)
    assert (refused > 0) is (moments == "printed")


# Tasks and precisions


def labels():
    """The points of `blobs` with a label for each cloud, and one that all of them have."""
    _, train, _ = blobs()
    y = torch.cat([nn.functional.one_hot(train.data.y, 3).float(), torch.ones(len(train.data), 1)], 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
    return cs.MultiLabel(module), replace(train, data=cs.Dataset(train.data.x, y, name="labels"))


def plane():
    _, federation = linear(names=None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cs.Regression(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))), federation


@pytest.mark.parametrize("world", [labels, plane], ids=["multi-label", "regression"])
@pytest.mark.parametrize("signal", ["features", "losses"])
def test_other_tasks_learn_too(world, signal):
    task, federation = world()
    before = cs.evaluate(task, cs.Point(task.initial()), federation.data).point["nll"]
    run = learn(fednp(cs.SGD(lr=0.05, epochs=2, batch_size=8), signal=signal), task, federation, rounds=15, debug=True)
    assert run.evaluate(federation.data).point["nll"] < 0.6 * before
    assert run.history[-1]["z_mean"] != 0


@pytest.mark.usefixtures("_plain_kernels")
@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_beside_a_network_in_bfloat16_the_small_ones_stay_in_float32():
    method = fednp(strength=1.0)
    whole = method.adapt(blobs()[0], 0)
    short = whole.prepare(bf16=True)
    theta, batch, mean, var = (tree_map(lambda t: t.float() if t.is_floating_point() else t, p) for p in case(whole))
    parts = short.split(theta)
    features = short.features_one(theta, batch.x)[0]
    assert not torch.equal(features, whole.features_one(theta, batch.x)[0])
    heard = method.heard(short, parts, batch, None)[0]
    assert torch.equal(heard, batch.mean(whole.call_one(SIGNAL, theta, features)))
    assert not torch.equal(heard, batch.mean(short.call_one(SIGNAL, theta, features)))
    m, s = method.tilted(heard, mean, var)
    mu, v = whole.call_one(NETWORK, theta, m, s)
    spring = (
        Gaussian.of(mu, 1 / v).kl(Gaussian.of(parts["main"][short.slice(parameter="2.weight")], torch.ones(1))) / 24
    )
    latent = Gaussian.of(m, 1 / s).kl(Gaussian(torch.zeros(D), torch.ones(1)))
    added = method.loss(short, theta, batch, mean, var) - replace(method, strength=0.0).loss(
        short, theta, batch, mean, var
    )
    torch.testing.assert_close(added, spring + latent, rtol=1e-5, atol=1e-5)
    rows = [tree_map(lambda t: t[None], part) for part in (theta, batch, mean, var)]
    (slope, loss), (rough, rough_loss) = (task.gradient(method.loss)(*rows) for task in (whole, short))
    assert rough.dtype == rough_loss.dtype == torch.float32
    assert not torch.equal(slope, rough)
    assert torch.cosine_similarity(slope[0], rough[0], dim=0) > 0.99
    torch.testing.assert_close(loss, rough_loss, rtol=0.05, atol=0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
def test_compiled_a_run_is_the_same():
    task, train, _ = blobs()
    plain, compiled = (
        learn(
            fednp(),
            task,
            train,
            rounds=2,
            engine=cs.Simulator(device="cpu", precision="float64", chunk=6, workers=1, compile=how),
        )
        for how in (False, True)
    )
    assert compiled.task.execution.compiled
    torch.testing.assert_close(compiled.posterior.mean, plain.posterior.mean, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(compiled.server.q.eta, plain.server.q.eta, rtol=1e-8, atol=1e-10)
    assert not any("compiled code refused" in line["guards"] for line in compiled.history)


REFUSED = [
    ({"strength": -0.1}, "strength must be at least 0, got -0.1"),
    ({"strength": math.nan}, "strength must be at least 0, got nan"),
    ({"latent": 0}, "latent must be at least 1, got 0"),
    ({"hidden": 0}, "hidden must be at least 1, got 0"),
    ({"signal_hidden": -1}, "signal_hidden must be at least 0, got -1"),
    ({"epsilon": 0.0}, "epsilon must be positive, got 0.0"),
    ({"bound": -3.0}, "bound must be positive, got -3.0"),
    ({"damping": 0.0}, "damping must lie in (0, 1], got 0.0"),
    ({"damping": 1.5}, "damping must lie in (0, 1], got 1.5"),
    (
        {"signal": "feature"},
        "signal='feature' is not known; did you mean 'features'? allowed: features, losses, nothing",
    ),
    ({"pool": "mean"}, "pool='mean' is not known; allowed: all, batch"),
    (
        {"moments": "print"},
        "moments='print' is not known; did you mean 'printed'? allowed: corrected, derivative, printed, quadrature",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=lambda value: str(value)[:30])
def test_settings_that_make_no_sense_are_refused(options, sentence):
    with pytest.raises(ConfigError) as error:
        cs.FedNP(**options)
    assert str(error.value) == sentence
