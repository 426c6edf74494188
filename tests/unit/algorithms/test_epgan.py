"""EP-GAN: known answers, limits, and properties of the prior and its sites."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, MixtureSameFamily, Normal

import consilience as cs
from consilience.algorithms.gan import signal_epgan as module
from consilience.algorithms.gan.ep_players import Message, Server
from consilience.algorithms.gan.epgan import ChainMoments
from consilience.algorithms.gan.players import PAST, Sum
from consilience.algorithms.gan.signal_epgan import GUMBEL, SIGNAL
from consilience.core import keys
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.core.records import rows
from support.epgan import (
    FEATURES,
    HIDDEN,
    P0,
    SCALE,
    SGD,
    WEIGHTS,
    adapted,
    assert_same,
    conjugate_round,
    epgan,
    factors,
    started,
)
from support.games import EXACT, ByHand, batch_of, game, group, learn, points, rows_of, weights

STILL = cs.SGD(lr=0.0, batch_size=4)


def sampled(train=SGD, **options):
    return cs.EPGAN(train, **{"scale": SCALE, "critic_steps": None} | options)


def everyone(run):
    return run.states.gather(torch.arange(len(run.federation)))


# Limits


@pytest.mark.parametrize(
    ("make", "options", "history"), [(epgan, {}, True), (epgan, {"components": 3}, False), (sampled, {}, True)]
)
def test_without_strength_the_networks_are_those_of_probgan_or_fedgan(make, options, history):
    federation, train = points((12, 9, 5)), cs.optim.Adam(lr=0.02, batch_size=2)
    run_options = {"rounds": 2, "cohort": 2}
    plain = learn(
        (cs.algorithms.ProbGAN if history else cs.FedGAN)(train, critic_steps=None),
        game(pace=0.5),
        federation,
        **run_options,
    )
    zero, some = (
        learn(make(train, strength=strength, history=history, **options), game(pace=0.5), federation, **run_options)
        for strength in (0.0, 0.1)
    )
    played = plain.task.played

    def networks(run):
        theta = run.posterior.mean
        return torch.cat([theta[:played], theta[run.task.slice(PAST)]]) if history else theta[:played]

    torch.testing.assert_close(networks(zero), networks(plain), **EXACT)
    assert (networks(some) - networks(plain)).abs().max() > 1e-4
    assert [line["loss"] for line in zero.history] == pytest.approx([line["loss"] for line in plain.history])


# The prior


def signal_by_hand(task, theta, x):
    """f and the mixture's logits, means over x; the features are constants."""
    features = ByHand(theta[: task.played].detach()).trunk(x).detach()
    outputs = task.part(SIGNAL)[-1].out_features
    sizes = [HIDDEN * FEATURES, HIDDEN, outputs * HIDDEN, outputs]
    w1, b1, w2, b2 = theta[task.slice(SIGNAL)].split(sizes)
    hidden = (features @ w1.view(HIDDEN, FEATURES).T + b1).relu()
    return (hidden @ w2.view(outputs, HIDDEN).T + b2).mean(0)


def tilted_by_hand(f, m, s):
    kappa = 1 / (1 + math.pi / 8 * f**2 * s).sqrt()
    p = (kappa * f * m).sigmoid()
    return m + s * f * kappa * (1 - p), s * (1 - f**2 * s * kappa**2 * p * (1 - p))


def energy_by_hand(method, task, theta, batch, mean, var):
    """−ln Π_i Σ_j π_j N(θ_i; m_ij, s_ij), less the constant of 2π."""
    count, components = int(batch.w.sum()), method.components
    signal = signal_by_hand(task, theta, batch.x[:count])
    which = task.all(torch.arange(mean.shape[1]))
    m, s = (value[:, which] for value in tilted_by_hand(signal[:components].unsqueeze(1), mean, var))
    constant = len(which) / 2 * math.log(2 * math.pi)
    at = theta[: task.played]
    if components == 1:
        return -Normal(m[0], s[0].sqrt()).log_prob(at).sum() - constant
    gumbel = -(-keys.uniform(keys.fold(batch.key, GUMBEL), components).log()).log()
    shares = Categorical(logits=signal[components:] + gumbel)
    prior = MixtureSameFamily(Categorical(logits=shares.logits.expand(len(at), -1)), Normal(m.T, s.T.sqrt()))
    return -prior.log_prob(at).sum() - constant


def case(components=1, history=False, **options):
    """A method, its task, θ, a batch, and a cavity's moments [J, M]."""
    method = epgan(components=components, history=history, **options)
    task = adapted(method)
    cavity = factors(components, WEIGHTS, seed=1) * Gaussian(torch.zeros(1).double(), torch.ones(1).double())
    theta = weights(task)
    theta[task.slice(SIGNAL)] *= 2
    return method, task, theta, batch_of(), cavity.mean, cavity.variance


def loss_of(method):
    return Sum(method.game, method.weighted)


def prior_gradient(method, task, theta, batch, mean, var):
    """What the prior adds to the gradient at strength 1, and both values of the loss."""
    rows_ = rows_of(theta, batch, torch.zeros(0).double(), mean, var)
    (with_prior, value), (without, alone) = (
        task.gradient(loss_of(replace(method, strength=strength)))(*rows_) for strength in (1.0, 0.0)
    )
    return (with_prior - without)[0], value[0], alone[0]


@pytest.mark.parametrize("components", [1, 2, 4])
def test_the_energy_and_its_gradient_are_those_of_a_mixture_of_gaussians(components):
    method, task, theta, batch, mean, var = case(components)
    at = theta.clone().requires_grad_()
    wanted = energy_by_hand(method, task, at, batch, mean, var)
    torch.testing.assert_close(method.energy(task, theta, batch, mean, var), wanted.detach(), **EXACT)
    gradient, value, alone = prior_gradient(method, task, theta, batch, mean, var)
    tolerance = {"rtol": 1e-9, "atol": 1e-9}  # a difference of two
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, at)[0], **tolerance)
    torch.testing.assert_close(value, alone, **EXACT)  # the reported loss is the game's
    assert all(gradient[task.slice(part)].abs().max() > 1e-3 for part in ("main", "trunk", "heads", SIGNAL))


def test_the_reported_loss_is_the_game_s_however_strong_the_prior():
    method, task, theta, batch, mean, var = case(strength=1e7)
    given_rows = rows_of(theta, batch, torch.zeros(0).double(), mean, var)
    strong, none = (task.gradient(loss_of(one))(*given_rows)[1] for one in (method, replace(method, strength=0.0)))
    torch.testing.assert_close(strong, none, **EXACT)


@pytest.mark.parametrize("components", [1, 3])
def test_the_discriminator_s_features_get_no_gradient_from_the_prior(components):
    method, task, theta, batch, _, _ = case(components)
    other = theta.clone()
    other[task.slice("trunk")] += 0.1
    f, g = (method.signal(task, one, batch) for one in (theta, other))
    assert (f - g).abs().max() > 1e-3  # f depends on the trunk
    gradient = torch.func.grad(lambda at: method.signal(task, at, batch).sum())(theta)
    assert not gradient[: task.played].any()
    assert gradient[task.slice(SIGNAL)].any()


def test_a_mixture_of_equal_components_is_that_component_whatever_its_weights():
    method, task, theta, batch, mean, var = case(1)
    three = epgan(components=3, history=False)
    wide = adapted(three)
    w1, b1, w2, b2 = theta[task.slice(SIGNAL)].split([HIDDEN * FEATURES, HIDDEN, HIDDEN, 1])
    logits = torch.randn(3 * HIDDEN + 3, generator=torch.Generator().manual_seed(0)).double()
    signal = [w1, b1, w2.repeat(3), logits[: 3 * HIDDEN], b2.repeat(3), logits[3 * HIDDEN :]]
    same = torch.cat([theta[: task.played], *signal])
    assert len(same) == wide.size
    got = three.energy(wide, same, batch, mean.expand(3, -1), var.expand(3, -1))
    torch.testing.assert_close(got, method.energy(task, theta, batch, mean, var), **EXACT)


def test_a_mixture_s_weights_are_drawn_by_gumbel_softmax():
    """Over many keys the greatest share is that of component j with probability π_j."""
    method, task, theta, batch, mean, var = case(3)
    part = theta[task.slice(SIGNAL)]
    part[:] = 0
    logits = torch.tensor([0.0, 1.0, 2.0]).double()
    part[-3:] = logits
    apart = torch.tensor([-100.0, 0.0, 100.0]).double().unsqueeze(1).expand_as(mean)  # f = 0: cavities stay
    everywhere = torch.cat([task.all(apart), part.expand(3, -1)], 1)

    def energy(key):
        one = replace(batch, key=key)
        return torch.func.vmap(lambda at: method.energy(task, at, one, apart, torch.ones_like(var)))(everywhere)

    many = keys.key(0, purpose="test", client=torch.arange(3000))
    best = torch.func.vmap(energy)(many).argmin(1)
    found = torch.bincount(best, minlength=3) / len(best)
    torch.testing.assert_close(found.double(), logits.softmax(0), rtol=0, atol=0.03)


# Sites


def sites_by_hand(method, task, message, states, theta, federation):
    """New sites of clients at weights θ [K, P]: q̂ / cavity with f over all data."""
    p0 = Gaussian.of(task.one(message.model.theta), P0)
    eta, lam = [], []
    for k in range(len(federation)):
        cavity = p0 * message.sites / rows(states, k)
        signal = signal_by_hand(task, theta[k], federation.client(k).x.double())
        m, s = tilted_by_hand(signal[: method.components].unsqueeze(1), cavity.eta / cavity.lam, 1 / cavity.lam)
        eta.append(m / s - cavity.eta)
        lam.append(1 / s - cavity.lam)
    return Gaussian(torch.stack(eta), torch.stack(lam))


@pytest.mark.parametrize("damping", [None, 1.0, 0.4])
@pytest.mark.parametrize("components", [1, 3])
def test_a_site_is_tilted_over_cavity_with_f_over_all_data_damped(damping, components, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 1)  # so that the largest client has several batches
    federation, method = points(), epgan(damping=damping, components=components, strength=0.1)
    task = adapted(method)
    theta = weights(task)
    theta[task.slice(SIGNAL)] *= 3
    states = factors(3, components, WEIGHTS)
    message = Message(cs.Point(theta), states.product())
    update, after = method.local(task, message, states, group(federation))
    assert update.change.mean.theta[:, task.slice(SIGNAL)].abs().max() > 1e-6  # f is taken after training
    found = sites_by_hand(method, task, message, states, theta + update.change.mean.theta, federation)
    share = 1 / 3 if damping is None else damping
    assert_same(after, states ** (1 - share) * found**share, rtol=1e-9, atol=1e-9)
    assert_same(update.site, after / states, rtol=1e-9, atol=1e-9)
    assert (after.lam - states.lam).abs().max() > 1e-3


def test_the_prior_of_a_step_is_the_tilted_of_the_cavity():
    """After one step from the same networks, the prior's part is the energy around q̂ of the client's own cavity."""
    federation = points()
    ways = []
    for strength in (0.0, 0.5):
        method = epgan(cs.SGD(lr=0.01, batch_size=20), strength=strength, history=False)
        task = adapted(method)
        theta, states = weights(task), factors(3, 1, WEIGHTS)
        message = Message(cs.Point(theta), states.product())
        ways.append(method.local(task, message, states, group(federation))[0].change.mean.theta)
    p0 = Gaussian.of(task.one(theta), P0)
    _, batch = next(iter(group(federation).epoch(0, 20)))
    for k in range(3):
        cavity = p0 * rows(states, torch.tensor([i for i in range(3) if i != k])).product()
        at = theta.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(
            energy_by_hand(method, task, at, rows(batch, k), cavity.eta / cavity.lam, 1 / cavity.lam), at
        )
        torch.testing.assert_close((ways[1] - ways[0])[k], -0.01 * 0.5 * gradient, rtol=1e-9, atol=1e-9)


@settings(max_examples=8, deadline=None)
@given(
    f=st.floats(-30, 30).filter(lambda f: abs(f) > 1e-3),
    scale=st.floats(1e-3, 3.0),
    damping=st.sampled_from([None, 0.3, 1.0]),
)
def test_a_site_moves_all_weights_the_same_way_and_never_removes_precision(f, scale, damping):
    method = epgan(STILL, scale=scale, damping=damping)
    task = adapted(method)
    theta = weights(task)
    theta[task.slice(SIGNAL)] = 0
    theta[task.slice(SIGNAL).stop - 1] = f
    server, states = started(method, task, theta=theta)
    _, after = method.local(task, method.message(server, None), states, group(points()))
    assert (after.lam >= 0).all()
    force = after.eta - after.lam * task.one(theta)  # at the cavity's mean
    assert (force * math.copysign(1, f) > 0).all()
    q = method.prior(task, server) * after.product()
    assert ((q.mean - task.one(theta)) * math.copysign(1, f) >= -1e-12).all()


# Clients whose likelihood is a Gaussian factor


@pytest.mark.parametrize("components", [1, 2])
@pytest.mark.parametrize("clients", [1, 4])
def test_the_prior_is_p0_times_all_likelihoods_after_one_round_and_for_good(clients, components):
    method = epgan(damping=1.0, components=components)
    task = adapted(method)
    likelihoods = factors(clients, components, WEIGHTS, seed=2)
    server, states = started(method, task, clients)
    p0 = Gaussian.of(task.one(task.initial()), P0)
    assert_same(method.prior(task, server), Gaussian(p0.eta.expand(components, -1), p0.lam.expand(components, -1)))
    for _ in range(3):
        server = conjugate_round(method, task, server, states, likelihoods, range(clients))
        assert_same(method.prior(task, server), p0 * likelihoods.product())
        assert_same(states, likelihoods)
    assert method.facts(server)["sites_precision"] == pytest.approx(float(server.sites.lam.mean()) * SCALE**2)


def test_damped_sites_come_half_as_near_every_round():
    method = epgan(damping=0.5)
    task = adapted(method)
    likelihoods, (server, states) = factors(4, 1, WEIGHTS, seed=2), started(method, task, 4)
    p0 = method.prior(task, server)
    for number in range(1, 5):
        server = conjugate_round(method, task, server, states, likelihoods, range(4))
        assert_same(method.prior(task, server), p0 * likelihoods.product() ** (1 - 0.5**number))


def test_clients_that_take_part_at_times_end_at_the_same_prior():
    method = epgan(damping=1.0)
    task = adapted(method)
    likelihoods, (server, states) = factors(4, 1, WEIGHTS, seed=2), started(method, task, 4)
    p0 = method.prior(task, server)
    for who in ([0, 2], [2], [1, 3], [0, 3]):
        server = conjugate_round(method, task, server, states, likelihoods, who)
    assert_same(method.prior(task, server), p0 * likelihoods.product())


# Sites from samples


def chain_by_hand(method, task, theta, cavity, federation):
    """Every client's θ after each of its own steps: the game with λ times the cavity's energy, of every sample."""
    cohort, steps = group(federation), [[] for _ in federation.sizes]
    prior = Gaussian(task.all(cavity.eta[:, 0]), task.all(cavity.lam[:, 0])) ** method.strength

    def look(taken, now):
        for client, theta in enumerate(now):
            steps[client].append(theta.clone())

    for _ in method.train.iterates(task.gradient(), theta, cohort, prior=prior, look=look):
        pass
    return [torch.stack(one) for one in steps]


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize(
    "train", [cs.SGD(lr=0.05, batch_size=2), cs.optim.SGHMC(lr=0.01, batch_size=2)], ids=["SGD", "SGHMC"]
)
def test_the_tilted_mean_of_samples_is_that_of_the_later_half_of_the_steps(train, epochs):
    federation = points((14, 9, 5))  # 7, 5 and 3 steps an epoch
    method = sampled(replace(train, epochs=epochs), history=False, damping=1.0, strength=0.01)
    task = adapted(method)
    theta = weights(task)
    states = factors(3, 1, WEIGHTS)
    message = Message(cs.Point(theta), states.product())
    _, after = method.local(task, message, states, group(federation))
    cavity = method.cavity(task, message, states)
    tilted = cavity * after
    for k, steps in enumerate(chain_by_hand(method, task, theta, cavity, federation)):
        later = steps[len(steps) // 2 :]
        assert len(steps) == epochs * (7, 5, 3)[k]
        torch.testing.assert_close(tilted.mean[k, 0], task.one(later).mean(0), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(after.lam[k, 0], precision_by_hand(task, later), rtol=1e-6, atol=1e-6)
        assert after.lam[k].max() > 1.1 * after.lam[k].min() > 0


def precision_by_hand(task, later, rho=0.1, floor=0.1, cap=10.0):
    """Λ_k of the steps [T, P]: shrunk by layer, clipped, in units of p₀'s precision, times τ."""
    off = later[:, : task.played] - task.all(task.one(later).mean(0))
    variance, inverse = task.one(off.square()).mean(0), []
    for one in variance.split(list(task.layers.values())):
        inverse += ((1 - rho) * one + rho * one.mean()).reciprocal().tolist()
    inverse = torch.tensor(inverse).double()
    mean, deviation = inverse.mean(), inverse.std(correction=0)
    clipped = inverse.clamp(mean - 2 * deviation, mean + 2 * deviation)
    lam = share_by_hand(task.one(later)) * P0[0] * clipped / clipped.mean()
    return lam.clamp(floor * P0[0], cap * P0[0])


def share_by_hand(chain):
    """τ = T / (T + 1) of the effective number of draws T."""
    count, spread = len(chain), (chain - chain.mean(0)).square().sum(1).mean()
    r = 1 - chain.diff(dim=0).square().sum(1).mean() / 2 / spread if count > 1 else torch.tensor(1.0).double()
    effective = (count * (1 - r) / (1 + r)).clamp(1, count)
    return effective / (effective + 1)


def test_the_effective_number_of_draws_is_one_for_a_drift_and_all_for_independent_steps():
    task, steps = game().prepare(dtype=torch.float64), 400
    made = torch.Generator().manual_seed(0)
    noise = torch.randn(2 * steps, task.size, generator=made).double()
    slow = torch.zeros_like(noise)
    for t in range(1, len(slow)):  # a correlation of 0.8: (1 − r)/(1 + r) = 1/9
        slow[t] = 0.8 * slow[t - 1] + noise[t]
    drift = torch.arange(2.0 * steps).double().unsqueeze(1).expand(-1, task.size)
    for path, low, high in ((noise, 0.95, 1.0), (slow, 0.08, 0.14), (drift, 0.0, 0.02)):
        moments = ChainMoments(task, torch.zeros(task.size).double(), torch.full((1, 1), 2.0 * steps).double())
        for t, theta in enumerate(path, 1):
            moments(torch.tensor([[float(t)]]).double(), theta[None])
        assert low * steps <= float(moments.effective) <= high * steps + 1
        torch.testing.assert_close(moments.mean[0], task.one(path[steps:]).mean(0), **EXACT)


@pytest.mark.parametrize("scale", [0.01, 0.3])
def test_a_site_of_samples_has_about_the_precision_of_p0_on_average(scale):
    run = learn(sampled(scale=scale, damping=1.0), game(), points(), rounds=2)
    relative = everyone(run).lam.mean(-1) * scale**2
    assert bool(((relative > 0.3) & (relative <= 1.5)).all())
    assert run.history[-1]["sites_precision"] == pytest.approx(float(relative.sum()))


def test_a_site_stays_between_floor_and_cap_and_the_guards_count_it():
    method = sampled(scale=SCALE, damping=1.0, floor=0.9, cap=0.95)
    run = learn(method, game(), points(), rounds=1)
    relative = everyone(run).lam * SCALE**2
    torch.testing.assert_close(
        (relative.min(), relative.max()), (torch.tensor(0.9).double(), torch.tensor(0.95).double())
    )
    assert run.history[-1]["guards"]["site at its floor or cap"] > 0
    assert run.history[-1]["guards"]["site clipped"] > 0


@pytest.mark.parametrize(("begin", "parts"), [("discriminator", ("trunk", "heads")), ("generator", ("main",))])
def test_the_prior_of_some_layers_can_be_left_out(begin, parts):
    method = sampled(history=False, layers=((begin, 0.0),), strength=0.1)
    task = adapted(method)
    factors_of = method.factors(task)
    for part in ("main", "trunk", "heads"):
        assert bool((factors_of[task.slice(part)] == (0.0 if part in parts else 1.0)).all())
    theta, ways = weights(task), []
    for one in (method, replace(method, layers=()), replace(method, strength=0.0)):
        server, states = started(one, task, theta=theta)
        far = replace(server, sites=Gaussian(3 * P0.expand(1, -1), P0.expand(1, -1)))
        single = replace(one, train=replace(SGD, batch_size=20))
        ways.append(single.local(task, single.message(far, None), states, group(points()))[0].change.mean.theta)
    off = torch.cat([torch.arange(task.slice(part).start, task.slice(part).stop) for part in parts])
    torch.testing.assert_close(ways[0][:, off], ways[2][:, off], **EXACT)  # as without a prior, after one step
    assert (ways[1][:, off] - ways[2][:, off]).abs().max() > 1e-4
    assert (ways[0] - ways[2]).abs().max() > 1e-4  # the other player has it


def test_a_single_layer_can_have_a_stronger_prior_and_unknown_ones_are_named():
    method = sampled(layers=(("generator.2.bias", 5.0),))
    task = adapted(method)
    chosen = method.factors(task) == 5.0
    assert int(chosen.sum()) == 2
    assert bool(chosen[task.slice("main", "trunk.1.bias")].all())
    with pytest.raises(cs.ConsilienceError, match=r"layers: no weights are called 'critic'; there are generator.0"):
        replace(method, layers=(("critic", 0.0),)).factors(task)


@pytest.mark.slow
def test_sites_of_chains_that_draw_from_gaussians_multiply_to_their_known_product():
    """Chains of independent draws from N(m_k, s_k): p₀ times the sites is the Gaussian that one computes by hand."""
    method, steps, clients = sampled(shrinkage=0.0, history=False), 20_000, 2
    task = game(generators=1, discriminators=1).prepare(dtype=torch.float64)
    made = torch.Generator().manual_seed(0)
    mean = torch.randn(clients, WEIGHTS, generator=made).double()
    variance = 0.5 + torch.rand(clients, WEIGHTS, generator=made).double()
    moments = ChainMoments(task, task.initial(), torch.full((clients, 1), float(steps)).double())
    for t in range(1, steps + 1):
        draw = mean + variance.sqrt() * torch.randn(clients, WEIGHTS, generator=made).double()
        moments(torch.full((clients, 1), float(t)).double(), draw)
    unit = SCALE**-2
    sites = Gaussian.of(moments.mean, method.precision(task, moments))
    wanted = Gaussian.of(mean, unit / variance / (1 / variance).mean(1, keepdim=True))
    p0 = method.anchor(task, task.initial())
    found, known = p0 * sites.product(), p0 * wanted.product()
    torch.testing.assert_close(found.lam, known.lam, rtol=0.05, atol=0)
    torch.testing.assert_close(found.mean, known.mean, rtol=0, atol=0.05)


def test_samples_say_where_a_client_s_weights_are_and_a_signal_does_not():
    """Only with sites from samples does the prior's mean come nearer to a client's own networks."""
    gaps = {}
    for make in (sampled, epgan):
        method = make(replace(SGD, epochs=1, batch_size=20), history=False, damping=1.0, strength=0.0)
        task = adapted(method)
        server, states = started(method, task, 1)
        update, after = method.local(task, method.message(server, None), states, group(points((9,))))
        w = task.one(task.initial())
        own = task.one(task.initial() + update.change.mean.theta[0])
        q = method.prior(task, server) * rows(after, 0)
        gaps[make] = float((q.mean[0] - own).norm() / (w - own).norm())
    assert gaps[sampled] < 1e-9 < 0.5 < gaps[epgan]


# Runs


@pytest.mark.parametrize("method", [epgan(), epgan(components=3, damping=0.7), sampled()], ids=lambda m: m.name)
def test_the_server_s_sites_are_the_product_of_all_clients_sites(method):
    run = learn(method, game(), points((9, 5, 4, 2)), rounds=4, cohort=3, debug=True)
    assert all(0 <= line["audit"]["sites_apart"] < 1e-10 for line in run.history)
    assert_same(run.server.sites, everyone(run).product())
    assert everyone(run).lam.abs().amax((1, 2)).min() > 0  # every client took part
    q = run.algorithm.prior(run.task, run.server)
    assert_same(q, everyone(run).product() * Gaussian.of(run.task.one(run.posterior.mean), P0))


def test_an_audit_finds_a_site_that_was_changed():
    def tamper(run, line):
        if line["round"] == 2:
            one = run.states.gather(torch.tensor([0]))
            run.states.commit(torch.tensor([0]), one**2.0, 2)

    with pytest.raises(cs.ConsilienceError, match=r"the prior is not the product of the sites: they differ by .* norm"):
        learn(epgan(), game(), points(), rounds=3, debug=True, callbacks=[tamper])


def test_a_site_can_be_taken_out():
    method, sites = epgan(), factors(3, 1, WEIGHTS)
    server = Server(cs.Point(adapted(method).initial()), None, sites.product())
    flat = Gaussian(torch.zeros(1, WEIGHTS).double(), torch.zeros(1, WEIGHTS).double())
    assert_same(method.swap(server, rows(sites, 1), flat).sites, rows(sites, torch.tensor([0, 2])).product())


def test_the_network_of_f_follows_from_the_seed_and_is_averaged():
    before = torch.get_rng_state()
    first, second, other = (epgan().adapt(game(), seed).prepare(dtype=torch.float64).initial() for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
    federation, method = points((6, 6)), epgan(strength=0.5)
    run = learn(method, game(), federation, rounds=1)
    task = run.task
    server, states = started(method, task, 2)
    update, _ = method.local(task, method.message(server, None), states, group(federation))
    own = task.initial() + update.change.mean.theta
    torch.testing.assert_close(run.posterior.mean, own.mean(0), **EXACT)
    assert (own[0] - own[1])[task.slice(SIGNAL)].abs().max() > 1e-6


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (epgan(), "EP-ProbGAN, f"),
        (epgan(history=False), "EP-BGAN, f"),
        (epgan(components=4), "Mixture-EP-ProbGAN, f"),
        (epgan(components=4, history=False), "Mixture-EP-BGAN, f"),
        (sampled(), "EP-ProbGAN"),
    ],
)
def test_names_are_those_of_the_paper_s_tables(method, name):
    assert method.name == name


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"strength": -1.0}, "strength must be at least 0, got -1.0"),
        ({"strength": math.nan}, "strength must be finite, got nan"),
        ({"scale": 0.0}, "scale must be above 0, got 0.0"),
        ({"components": 0}, "components must be at least 1, got 0"),
        ({"hidden": 0}, "hidden must be at least 1, got 0"),
        ({"damping": 0.0}, "damping must be above 0, got 0.0"),
        ({"shrinkage": 1.5}, "shrinkage must be at most 1, got 1.5"),
        ({"cap": 0.0}, "cap must be above 0, got 0.0"),
        ({"damping": 1.5}, "damping must be at most 1, got 1.5"),
        ({"interpolate": 1.0}, "interpolate must be below 1, got 1.0"),
    ],
    ids=str,
)
def test_settings_out_of_bounds_are_refused(options, sentence):
    kind = cs.algorithms.SignalEPGAN if {"components", "hidden"} & set(options) else cs.EPGAN
    with pytest.raises(ConfigError) as error:
        kind(**options)
    assert str(error.value) == f"{kind.__name__}: {sentence}"
