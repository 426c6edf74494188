"""EP-GAN: known answers, limits, and what must hold of the prior and its sites."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, MixtureSameFamily, Normal

import consilience as cs
from consilience.algorithms.fedavg import Averaged
from consilience.algorithms.gan import epgan as module
from consilience.algorithms.gan.epgan import MIXTURE, SIGNAL, Briefing, Priored, Report
from consilience.algorithms.gan.players import PAST
from consilience.core import keys
from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.core.records import leaves, rows
from support.games import EXACT, ByHand, batch_of, by_parameter, game, group, learn, points, rows_of, weights

SGD = cs.SGD(lr=0.02, batch_size=4)
STILL = cs.SGD(lr=0.0, batch_size=4)
HIDDEN, FEATURES, SCALE = 3, 4, 0.2
WEIGHTS = 34  # of one generator and one discriminator
P0 = torch.full((WEIGHTS,), SCALE**-2, dtype=torch.float64)


def epgan(train=SGD, **options):
    return cs.EPGAN(train, **{"hidden": HIDDEN, "scale": SCALE} | options)


def adapted(method):
    return method.adapt(game(), 0).prepare(dtype=torch.float64)


def started(method, task, clients=3, theta=None):
    """(server, clients' states) before the first round, from weights θ."""
    info = cs.data.Info(task.initial() if theta is None else theta, *(torch.tensor(v) for v in (0, clients, 16)))
    return method.start(task, info), method.client(task, info, torch.ones(clients, 1).double())


def everyone(run):
    return run.states.gather(torch.arange(len(run.federation)))


def factors(*shape, seed=0, precision=5.0):
    """Gaussian factors that say something of every weight."""
    made = torch.Generator().manual_seed(seed)
    lam = precision * torch.rand(*shape, generator=made).double()
    return Gaussian(lam * torch.randn(*shape, generator=made).double(), lam)


def assert_same(a, b, **tolerance):
    for (name, x), (_, y) in zip(leaves(a), leaves(b), strict=True):
        torch.testing.assert_close(x, y.expand_as(x), **tolerance or EXACT, msg=lambda m, name=name: f"{name}: {m}")


# Limits


@pytest.mark.parametrize("options", [{}, {"components": 3}, {"sites": "nothing"}, {"sites": "samples"}], ids=str)
@pytest.mark.parametrize("history", [True, False])
def test_without_strength_the_networks_are_probgan_s_or_fedgan_s(options, history):
    federation, train = points((23, 9, 5)), cs.optim.Adam(lr=0.02, batch_size=2)
    run_options = {"rounds": 3, "cohort": 2}
    plain = learn((cs.algorithms.ProbGAN if history else cs.FedGAN)(train), game(pace=0.5), federation, **run_options)
    silent, heard = (
        learn(epgan(train, strength=strength, history=history, **options), game(pace=0.5), federation, **run_options)
        for strength in (0.0, 0.1)
    )
    played = plain.task.played

    def networks(run):
        theta = run.posterior.mean
        return torch.cat([theta[:played], theta[run.task.slice(PAST)]]) if history else theta[:played]

    torch.testing.assert_close(networks(silent), networks(plain), **EXACT)
    assert (networks(heard) - networks(plain)).abs().max() > 1e-4
    assert [line["loss"] for line in silent.history] == pytest.approx([line["loss"] for line in plain.history])


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("anchor", ["global", "init"])
def test_where_f_is_nothing_the_prior_is_a_spring_to_the_anchor(anchor, apart):
    """Of one step, what is not the game's is −lr λ (θ − centre)/scale², for every sample with the same centre; apart,
    with its own."""
    train, strength = cs.SGD(lr=0.01, batch_size=20), 0.7
    ways = []
    for one in (0.0, strength):
        method = epgan(train, sites="nothing", anchor=anchor, apart=apart, history=False, strength=one)
        task = adapted(method)
        server, states = started(method, task)
        moved = replace(server, averaged=Averaged(cs.Point(weights(task)), server.averaged.memory))
        update, state = method.local(task, method.message(moved, None), states, group(points()))
        assert state is None
        assert not any(value.any() for _, value in leaves(update.site))
        ways.append(update.change.mean.theta)
    theta = weights(task)
    named, centre = by_parameter(task, theta), by_parameter(task, theta if anchor == "global" else task.initial())
    for heads in () if apart else ("main heads", "heads heads"):
        for what in ("weight", "bias"):
            own = [name for name in named if name.startswith(heads) and name.endswith(what)]
            mean = torch.stack([centre[name] for name in own]).mean(0)
            centre |= dict.fromkeys(own, mean)
    wanted = torch.cat([(named[name] - centre[name]).flatten() for name in named])
    pull = -0.01 * strength * wanted / SCALE**2
    torch.testing.assert_close(ways[1] - ways[0], pull.expand(3, -1), **EXACT)
    held = {name for name in named if not torch.equal(named[name], centre[name])}
    own = {name for name in named if "heads." in name}
    assert held == (set(named) if anchor == "init" else set() if apart else own)  # a mean of one pulls at nothing


@pytest.mark.parametrize("options", [{}, {"components": 2}, {"sites": "samples"}], ids=str)
def test_a_prior_apart_is_another_one_only_where_there_are_several_samples(options):
    one, several = (
        [learn(epgan(apart=apart, strength=0.1, **options), game(**counts), points()) for apart in (False, True)]
        for counts in ({"generators": 1, "discriminators": 1}, {})
    )
    assert torch.equal(one[0].posterior.mean, one[1].posterior.mean)
    assert_same(one[0].server.sites, one[1].server.sites)
    assert several[0].server.sites.eta.shape[-1] == WEIGHTS
    assert several[1].server.sites.eta.shape[-1] == several[1].task.played
    assert not torch.equal(several[0].posterior.mean, several[1].posterior.mean)


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
    heard = signal_by_hand(task, theta, batch.x[:count])
    which = task.all(torch.arange(mean.shape[1]))
    m, s = (value[:, which] for value in tilted_by_hand(heard[:components].unsqueeze(1), mean, var))
    constant = len(which) / 2 * math.log(2 * math.pi)
    at = theta[: task.played]
    if components == 1:
        return -Normal(m[0], s[0].sqrt()).log_prob(at).sum() - constant
    gumbel = -(-keys.uniform(keys.fold(batch.key, MIXTURE), components).log()).log()
    shares = Categorical(logits=heard[components:] + gumbel)
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


def prior_slope(method, task, theta, batch, mean, var):
    """What the prior adds to the gradient at strength 1, and both values of the loss."""
    rows_ = rows_of(theta, batch, torch.zeros(0).double(), mean, var)
    (with_prior, value), (without, alone) = (
        task.gradient(replace(method, strength=strength).loss)(*rows_) for strength in (1.0, 0.0)
    )
    return (with_prior - without)[0], value[0], alone[0]


@pytest.mark.parametrize("components", [1, 2, 4])
def test_the_energy_is_that_of_a_mixture_of_gaussians_and_so_is_its_gradient(components):
    method, task, theta, batch, mean, var = case(components)
    at = theta.clone().requires_grad_()
    wanted = energy_by_hand(method, task, at, batch, mean, var)
    torch.testing.assert_close(method.energy(task, theta, batch, mean, var), wanted.detach(), **EXACT)
    slope, value, alone = prior_slope(method, task, theta, batch, mean, var)
    tolerance = {"rtol": 1e-9, "atol": 1e-9}  # a difference of two
    torch.testing.assert_close(slope, torch.autograd.grad(wanted, at)[0], **tolerance)
    torch.testing.assert_close(value, alone, **EXACT)  # the loss that is reported is the game's
    assert all(slope[task.slice(part)].abs().max() > 1e-3 for part in ("main", "trunk", "heads", SIGNAL))


def test_the_loss_that_is_reported_is_the_game_s_however_strong_the_prior():
    method, task, theta, batch, mean, var = case(strength=1e7)
    told = rows_of(theta, batch, torch.zeros(0).double(), mean, var)
    strong, none = (task.gradient(one.loss)(*told)[1] for one in (method, replace(method, strength=0.0)))
    torch.testing.assert_close(strong, none, **EXACT)


@pytest.mark.parametrize("components", [1, 3])
def test_the_discriminator_s_features_do_not_learn_to_please_the_prior(components):
    method, task, theta, batch, _, _ = case(components)
    other = theta.clone()
    other[task.slice("trunk")] += 0.1
    f, g = (method.heard(task, one, batch, None) for one in (theta, other))
    assert (f - g).abs().max() > 1e-3  # f does hear the trunk

    def heard(at):
        return method.heard(task, at, batch, None).sum()

    slope = torch.func.grad(heard)(theta)
    assert not slope[: task.played].any()
    assert slope[task.slice(SIGNAL)].any()


def test_a_mixture_of_one_repeated_is_that_one_whatever_its_weights():
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

    many = keys.key(0, purpose="test", client=torch.arange(5000))
    best = torch.func.vmap(energy)(many).argmin(1)
    found = torch.bincount(best, minlength=3) / len(best)
    torch.testing.assert_close(found.double(), logits.softmax(0), rtol=0, atol=0.03)


# Sites


def sites_by_hand(method, task, message, states, theta, federation):
    """New sites of clients at weights θ [K, P]: q̂ / cavity with f over all data, damped."""
    p0 = Gaussian.of(task.one(message.model.theta) if message.anchor is None else message.anchor, P0)
    eta, lam = [], []
    for k in range(len(federation)):
        cavity = p0 * message.sites / rows(states, k)
        heard = signal_by_hand(task, theta[k], federation.client(k).x.double())
        m, s = tilted_by_hand(heard[: method.components].unsqueeze(1), cavity.eta / cavity.lam, 1 / cavity.lam)
        eta.append(m / s - cavity.eta)
        lam.append(1 / s - cavity.lam)
    return Gaussian(torch.stack(eta), torch.stack(lam))


@pytest.mark.parametrize("damping", [None, 1.0, 0.4])
@pytest.mark.parametrize("components", [1, 3])
@pytest.mark.parametrize("anchor", ["global", "init"])
def test_a_site_is_what_f_over_all_data_says_damped(damping, components, anchor, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 1)  # so that the largest client has several batches
    federation, method = points(), epgan(damping=damping, components=components, anchor=anchor, strength=0.1)
    task = adapted(method)
    theta = weights(task)
    theta[task.slice(SIGNAL)] *= 3
    states = factors(3, components, WEIGHTS)
    server, _ = started(method, task)
    message = Briefing(cs.Point(theta), states.product(), server.anchor)
    report, after = method.local(task, message, states, group(federation))
    theta_k = theta + report.change.mean.theta
    assert report.change.mean.theta[:, task.slice(SIGNAL)].abs().max() > 1e-6  # f is heard after training
    found = sites_by_hand(method, task, message, states, theta_k, federation)
    share = 1 / 3 if damping is None else damping
    assert_same(after, states ** (1 - share) * found**share, rtol=1e-9, atol=1e-9)
    assert_same(report.site, after / states, rtol=1e-9, atol=1e-9)
    assert (after.lam - states.lam).abs().max() > 1e-3


def test_the_prior_of_a_step_is_the_tilted_of_the_cavity_without_ones_own_site():
    """One step of training from the same networks: what it adds to the game is the energy around q̂ of one's cavity."""
    federation = points()
    ways = []
    for strength in (0.0, 0.5):
        method = epgan(cs.SGD(lr=0.01, batch_size=20), strength=strength, history=False)
        task = adapted(method)
        theta, states = weights(task), factors(3, 1, WEIGHTS)
        message = Briefing(cs.Point(theta), states.product(), None)
        ways.append(method.local(task, message, states, group(federation))[0].change.mean.theta)
    p0 = Gaussian.of(task.one(theta), P0)
    _, batch = next(iter(group(federation).epoch(0, 20)))
    for k in range(3):
        cavity = p0 * rows(states, torch.tensor([i for i in range(3) if i != k])).product()
        at = theta.clone().requires_grad_()
        (slope,) = torch.autograd.grad(
            energy_by_hand(method, task, at, rows(batch, k), cavity.eta / cavity.lam, 1 / cavity.lam), at
        )
        torch.testing.assert_close((ways[1] - ways[0])[k], -0.01 * 0.5 * slope, rtol=1e-9, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    f=st.floats(-30, 30).filter(lambda f: abs(f) > 1e-3),
    scale=st.floats(1e-3, 3.0),
    damping=st.sampled_from([None, 0.3, 1.0]),
)
def test_a_client_says_one_thing_of_all_weights_and_never_takes_precision_away(f, scale, damping):
    method = epgan(STILL, scale=scale, damping=damping)
    task = adapted(method)
    theta = weights(task)
    theta[task.slice(SIGNAL)] = 0
    theta[task.slice(SIGNAL).stop - 1] = f
    server, states = started(method, task, theta=theta)
    _, after = method.local(task, method.message(server, None), states, group(points()))
    assert (after.lam >= 0).all()
    towards = after.eta - after.lam * task.one(theta)  # the force at the cavity's mean
    assert (towards * math.copysign(1, f) > 0).all()
    q = method.prior(task, server) * after.product()
    assert ((q.mean - task.one(theta)) * math.copysign(1, f) >= -1e-12).all()


# The conjugate check: clients whose likelihood is a Gaussian factor


def no_change(task):
    """As the engine sums it over clients."""
    return cs.Weighted(cs.Point(torch.zeros(task.size).double()), torch.ones(1).double())


def conjugate_round(method, task, server, states, likelihoods, who):
    """One round in which client k answers what its likelihood is worth: tilted over site, or printed tilted whole."""
    message, told = method.message(server, None), []
    for k in who:
        state = None if states is None else rows(states, k)
        tilted = method.cavity(task, message, state) * rows(likelihoods, k)
        cavity = method.cavity(task, message, state)
        told.append(tilted if state is None else (tilted / cavity / state) ** (method.damping or 1 / len(who)))
    change = Gaussian(torch.stack([one.eta for one in told]), torch.stack([one.lam for one in told]))
    server = method.fuse(server, Report(no_change(task), change.product()))
    if states is not None:
        for k, one in zip(who, told, strict=True):
            mine = method.follow(rows(states, k), Report(None, one))
            states.eta[k], states.lam[k] = mine.eta, mine.lam
    return server


@pytest.mark.parametrize("anchor", ["global", "init"])
@pytest.mark.parametrize("components", [1, 2])
@pytest.mark.parametrize("clients", [1, 4])
def test_with_sites_the_prior_is_p0_times_all_likelihoods_at_once_and_for_good(clients, components, anchor):
    method = epgan(damping=1.0, components=components, anchor=anchor)
    task = adapted(method)
    likelihoods = factors(clients, components, WEIGHTS, seed=2)
    server, states = started(method, task, clients)
    p0 = Gaussian.of(task.one(task.initial()), P0)
    assert_same(method.prior(task, server), Gaussian(p0.eta.expand(components, -1), p0.lam.expand(components, -1)))
    for _ in range(5):
        server = conjugate_round(method, task, server, states, likelihoods, range(clients))
        assert_same(method.prior(task, server), p0 * likelihoods.product())
        assert_same(states, likelihoods)
    assert method.facts(server)["sites_precision"] == pytest.approx(float(server.sites.lam.mean()) * SCALE**2)


def test_damped_sites_come_half_as_near_every_round():
    method = epgan(damping=0.5)
    task = adapted(method)
    likelihoods, (server, states) = factors(4, 1, WEIGHTS, seed=2), started(method, task, 4)
    p0 = method.prior(task, server)
    for number in range(1, 6):
        server = conjugate_round(method, task, server, states, likelihoods, range(4))
        assert_same(method.prior(task, server), p0 * likelihoods.product() ** (1 - 0.5**number))


def test_clients_that_come_and_go_end_at_the_same_prior():
    method = epgan(damping=1.0)
    task = adapted(method)
    likelihoods, (server, states) = factors(4, 1, WEIGHTS, seed=2), started(method, task, 4)
    p0 = method.prior(task, server)
    for who in ([0, 2], [2], [1, 3], [0, 3]):
        server = conjugate_round(method, task, server, states, likelihoods, who)
    assert_same(method.prior(task, server), p0 * likelihoods.product())


@pytest.mark.parametrize("clients", [2, 5])
def test_as_printed_what_clients_share_is_counted_once_for_each_of_them_every_round(clients):
    """Λ ← K Λ + Σ Λ_k: after t rounds K^t times the prior's precision, and the likelihoods themselves several times."""
    method = epgan(fusion="printed")
    task = adapted(method)
    server, states = started(method, task, clients)
    assert states is None
    p0 = method.prior(task, server)
    assert_same(p0, Gaussian.of(task.one(task.initial()), P0))
    nothing = Gaussian(torch.zeros(clients, 1, WEIGHTS).double(), torch.zeros(clients, 1, WEIGHTS).double())
    silent, heard, likelihoods = server, server, factors(clients, 1, WEIGHTS, seed=2)
    for number in range(1, 5):
        silent = conjugate_round(method, task, silent, None, nothing, range(clients))
        assert_same(method.prior(task, silent), p0**clients**number)
        heard = conjugate_round(method, task, heard, None, likelihoods, range(clients))
        often = (clients**number - 1) / (clients - 1)
        assert_same(method.prior(task, heard), p0**clients**number * likelihoods.product() ** often)


@pytest.mark.parametrize("clients", [2, 3])
def test_as_printed_a_run_s_variances_shrink_with_every_round_and_with_sites_they_do_not(clients):
    federation = points((6,) * clients)
    printed, sites = (
        [line["sites_precision"] for line in learn(epgan(fusion=fusion), game(), federation, rounds=4).history]
        for fusion in ("printed", "sites")
    )
    for number, precision in enumerate(printed, 1):
        assert precision >= clients**number
    assert printed[-1] / printed[-2] == pytest.approx(clients, rel=0.2)
    assert max(sites) < 1


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


@pytest.mark.parametrize(
    "epochs",
    [
        1,
        3,
    ],
)
@pytest.mark.parametrize(
    "train", [cs.SGD(lr=0.05, batch_size=2), cs.optim.SGHMC(lr=0.01, batch_size=2)], ids=["SGD", "SGHMC"]
)
def test_the_tilted_mean_of_samples_is_that_of_the_later_half_of_the_steps(train, epochs):
    federation = points((14, 9, 5))  # 7, 5 and 3 steps an epoch
    method = epgan(replace(train, epochs=epochs), sites="samples", history=False, damping=1.0, strength=0.01)
    task = adapted(method)
    theta = weights(task)
    states = factors(3, 1, WEIGHTS)
    message = Briefing(cs.Point(theta), states.product(), None)
    _, after = method.local(task, message, states, group(federation))
    cavity = method.cavity(task, message, states)
    tilted = cavity * after
    for k, steps in enumerate(chain_by_hand(method, task, theta, cavity, federation)):
        later = steps[len(steps) // 2 :]
        assert len(steps) == epochs * (7, 5, 3)[k]
        torch.testing.assert_close(tilted.mean[k, 0], task.one(later).mean(0), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(after.lam[k].mean(), P0[0], **EXACT)
        off = later[:, : task.played] - task.all(task.one(later).mean(0))
        var = task.one(off.square()).mean(0)
        order = var.argsort()
        assert (after.lam[k, 0][order].diff() <= 1e-9).all()  # the less a weight spreads, the more it matters
        assert after.lam[k].max() > 1.1 * after.lam[k].min() > 0


@pytest.mark.parametrize("scale", [0.01, 0.3])
def test_a_site_of_samples_is_worth_as_much_as_p0_on_average(scale):
    run = learn(epgan(sites="samples", scale=scale, damping=1.0), game(), points(), rounds=2)
    sites = everyone(run)
    torch.testing.assert_close(sites.lam.mean(-1), torch.full((3, 1), scale**-2, dtype=torch.float64), **EXACT)
    assert run.history[-1]["sites_precision"] == pytest.approx(3)


def test_samples_say_where_a_client_s_weights_are_and_a_signal_does_not():
    """The prior's mean comes nearer to a client's own networks through the former only."""
    gaps = {}
    for sites in ("samples", "signal"):
        method = epgan(replace(SGD, epochs=1, batch_size=20), sites=sites, history=False, damping=1.0, strength=0.0)
        task = adapted(method)
        server, states = started(method, task, 1)
        update, after = method.local(task, method.message(server, None), states, group(points((9,))))
        w = task.one(task.initial())
        own = task.one(task.initial() + update.change.mean.theta[0])
        q = method.prior(task, server) * rows(after, 0)
        gaps[sites] = float((q.mean[0] - own).norm() / (w - own).norm())
    assert gaps["samples"] < 1e-9 < 0.5 < gaps["signal"]


# Runs


@pytest.mark.parametrize(
    "options",
    [{}, {"components": 3}, {"sites": "samples"}, {"anchor": "init", "damping": 0.7}, {"apart": True}],
    ids=str,
)
def test_the_server_s_sites_are_the_product_of_all_clients_sites(options):
    federation = points((9, 5, 4, 2))
    run = learn(epgan(**options), game(), federation, rounds=5, cohort=3, debug=True)
    assert all(0 <= line["audit"]["sites_apart"] < 1e-10 for line in run.history)
    assert_same(run.server.sites, everyone(run).product())
    assert everyone(run).lam.abs().amax((1, 2)).min() > 0  # everyone was there
    q = run.algorithm.prior(run.task, run.server)
    at = run.task.initial() if options.get("anchor") == "init" else run.posterior.mean
    centre = at[: run.task.played] if "apart" in options else run.task.one(at)
    assert_same(q, everyone(run).product() * Gaussian.of(centre, P0[:1].expand_as(centre)))


@pytest.mark.parametrize("options", [{"sites": "nothing"}, {"fusion": "printed"}], ids=str)
def test_without_sites_of_clients_there_is_nothing_to_audit(options):
    run = learn(epgan(**options), game(), points(), rounds=2, debug=True)
    assert [line["audit"] for line in run.history] == [{}, {}]


def test_an_audit_finds_a_site_that_was_changed():
    def tamper(run, line):
        if line["round"] == 2:
            one = run.states.gather(torch.tensor([0]))
            run.states.commit(torch.tensor([0]), one**2.0, 2)

    with pytest.raises(
        cs.ConsilienceError, match=r"the prior is not the product of the sites: they differ by .* of its"
    ):
        learn(epgan(), game(), points(), rounds=4, debug=True, callbacks=[tamper])
    learn(epgan(), game(), points(), rounds=3, callbacks=[tamper])  # unless nobody looks


def test_a_site_can_be_taken_out():
    method = epgan()
    task = adapted(method)
    sites = factors(3, 1, WEIGHTS)
    server = Priored(Averaged(cs.Point(task.initial()), None), sites.product(), None)
    flat = Gaussian(torch.zeros(1, WEIGHTS).double(), torch.zeros(1, WEIGHTS).double())
    assert_same(method.swap(server, rows(sites, 1), flat).sites, rows(sites, torch.tensor([0, 2])).product())


def test_f_s_network_is_averaged_and_begins_alike_in_every_run():
    before = torch.get_rng_state()
    first, second = (adapted(epgan()).initial() for _ in range(2))
    assert torch.equal(first, second)
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
    ("options", "name"),
    [
        ({}, "EP-ProbGAN"),
        ({"history": False}, "EP-BGAN"),
        ({"components": 4}, "Mixture-EP-ProbGAN"),
        ({"components": 4, "history": False}, "Mixture-EP-BGAN"),
        ({"sites": "nothing"}, "EP-ProbGAN, f = 0"),
        ({"sites": "nothing", "history": False}, "EP-BGAN, f = 0"),
        ({"sites": "samples"}, "EP-ProbGAN, samples"),
        ({"fusion": "printed"}, "EP-ProbGAN, printed"),
        ({"fusion": "printed", "components": 2}, "Mixture-EP-ProbGAN, printed"),
        ({"apart": True, "history": False}, "EP-BGAN, apart"),
        ({"sites": "samples", "apart": True}, "EP-ProbGAN, samples, apart"),
    ],
    ids=str,
)
def test_names_are_those_of_the_paper_s_tables(options, name):
    assert epgan(**options).name == name


NUMBERS = "strength must not be negative, scale positive, components and hidden at least 1, got"
OF_SIGNALS = "a mixture and the printed fusion are of signals: sites ="


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"strength": -1.0}, f"{NUMBERS} -1.0, 0.1, 1 and 8"),
        ({"strength": math.nan}, f"{NUMBERS} nan, 0.1, 1 and 8"),
        ({"scale": 0.0}, f"{NUMBERS} 0.5, 0.0, 1 and 8"),
        ({"components": 0}, f"{NUMBERS} 0.5, 0.1, 0 and 8"),
        ({"hidden": 0}, f"{NUMBERS} 0.5, 0.1, 1 and 0"),
        ({"damping": 0.0}, "damping must lie in (0, 1], got 0.0"),
        ({"damping": 1.5}, "damping must lie in (0, 1], got 1.5"),
        ({"interpolate": 1.0}, "interpolate must lie in [0, 1), got 1.0"),
        ({"sites": "samples", "components": 2}, f"{OF_SIGNALS} 'samples' has neither"),
        ({"sites": "nothing", "fusion": "printed"}, f"{OF_SIGNALS} 'nothing' has neither"),
        ({"sites": "sample"}, "sites='sample' is not known; did you mean 'samples'? allowed: nothing, samples, signal"),
        ({"anchor": "start"}, "anchor='start' is not known; allowed: global, init"),
        ({"fusion": "print"}, "fusion='print' is not known; did you mean 'printed'? allowed: printed, sites"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_with_a_sentence(options, sentence):
    with pytest.raises(ConfigError) as error:
        cs.EPGAN(**{"strength": 0.5, "scale": 0.1, "hidden": 8} | options)
    assert str(error.value) == sentence


def test_a_spring_for_every_sample_is_fedprox():
    federation = points()
    spring = epgan(sites="nothing", apart=True, history=False, strength=0.02, scale=0.1)
    leash = cs.FedProx(spring.train, mu=2.0)  # λ/scale²
    ours, theirs = (learn(method, game(), federation, rounds=2).posterior.mean for method in (spring, leash))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
