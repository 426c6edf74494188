"""FedGAN, BayesGAN, ProbGAN, FedAvg-GAN and F2A: what they are in plain torch, and their limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import consilience as cs
from consilience.algorithms.gan import f2a, fedavg_gan
from consilience.algorithms.gan.players import PAST
from consilience.core import keys
from consilience.core.errors import ConfigError
from consilience.core.records import rows
from consilience.data.cohort import Cohort
from consilience.tasks.adversarial import HEADS
from consilience.tasks.layout import MAIN
from support.games import EXACT, NEARLY, ByHand, both_gradients, game, group, learn, points, weights

ADAM = cs.optim.Adam(lr=0.02, beta1=0.5, batch_size=4, epochs=2)
SGD = cs.SGD(lr=0.05, batch_size=4, epochs=2)
SLOW = cs.SGD(lr=0.02, batch_size=2)
SIZES = (9, 5, 2)


def adapted(method, **options):
    return method.adapt(game(**options), 0).prepare(dtype=torch.float64)


def started(method, task, federation, theta=None):
    """The server before the first round, from weights θ."""
    numbers = (torch.tensor(v) for v in (0, len(federation), federation.examples))
    info = cs.data.Info(task.initial() if theta is None else theta, *numbers)
    sizes = group(federation).n
    return method.start(task, info), method.client(task, info, sizes)


def one_round(method, task, federation, theta=None, round=1):
    """(Updates, states) of all clients, most examples first."""
    server, states = started(method, task, federation, theta)
    cohort = group(federation, round)
    return method.local(task, method.message(server, cohort.ids), states, cohort)


# FedGAN


@pytest.mark.parametrize("train", [SGD, replace(ADAM, noise=0.1)], ids=["SGD", "noisy Adam"])
def test_fedgan_is_fedavg_on_players(train):
    federation, options = points(), {"rounds": 3, "cohort": 2}
    server = cs.server.Momentum(0.9, 0.5)
    players, plain = (
        learn(method, game(pace=0.5), federation, **options)
        for method in (cs.FedGAN(train, server, critic_steps=None), cs.FedAvg(train, server))
    )
    assert torch.equal(players.posterior.mean, plain.posterior.mean)
    assert [line["loss"] for line in players.history] == [line["loss"] for line in plain.history]


@pytest.mark.parametrize("share", [0.25, 0.9])
def test_after_an_epoch_a_share_of_the_global_networks_is_mixed_in(share):
    one, train = points((7,)), replace(ADAM, epochs=1)
    start = game().prepare(dtype=torch.float64).initial()
    free, held = (
        learn(cs.FedGAN(train, interpolate=rho, critic_steps=None), game(), one, rounds=1).posterior.mean
        for rho in (0.0, share)
    )
    torch.testing.assert_close(held, (1 - share) * free + share * start, **EXACT)


def test_networks_are_mixed_in_after_every_epoch_and_train_on_from_there():
    one, rho = points((7,)), 0.3
    task, cohort = game().prepare(dtype=torch.float64), group(points((7,)))
    start = task.initial()
    theta = start.unsqueeze(0)
    for epoch in range(2):
        for _, batch in cohort.epoch(epoch, 4):
            theta = theta - 0.05 * task.gradient()(theta, batch)[0]
        theta = (1 - rho) * theta + rho * start
    run = learn(cs.FedGAN(SGD, interpolate=rho, critic_steps=None), game(), one, rounds=1)
    torch.testing.assert_close(run.posterior.mean, theta[0], **EXACT)


def test_clients_that_mix_in_almost_all_of_the_global_networks_stay_there():
    start = game().prepare(dtype=torch.float64).initial()
    ways = [
        (learn(cs.FedGAN(SGD, interpolate=rho), game(), points()).posterior.mean - start).norm()
        for rho in (0.0, 0.9, 1 - 1e-9)
    ]
    assert ways[0] > 5 * ways[1] > 0
    assert ways[2] < 1e-8


@pytest.mark.slow
def test_single_players_are_those_of_a_task_with_one_each():
    for method in (cs.FedGAN(SGD), cs.algorithms.FedAvgGAN(SGD), cs.algorithms.F2A(SGD)):
        alone = learn(method, game(generators=1, discriminators=1), points())
        told = learn(replace(method, single=True), game(), points())
        assert torch.equal(told.posterior.mean, alone.posterior.mean)
        assert learn(method, game(), points(), rounds=1).task.size > told.task.size


# ProbGAN's past


def probgan(**train):
    return cs.algorithms.ProbGAN(replace(SLOW, **train), critic_steps=None)


def by_hand(sizes, rounds, epochs, batch_size=2, lr=0.02):
    """ProbGAN with one client, and the heads after each of its steps: plain gradients on the same batches and noise,
    generators that also play against the mean of the heads after steps 10, 20, …"""
    task, federation = game().prepare(dtype=torch.float64), points(sizes)
    theta, past, heads = task.initial(), task.initial()[task.slice(HEADS)], []
    for number in range(1, rounds + 1):
        cohort = group(federation, number)
        for epoch in range(epochs):
            for _, one in cohort.epoch(epoch, batch_size):
                hand = ByHand(torch.cat([theta, past]))
                theta = theta - lr * both_gradients(task, hand, rows(one, 0), past=True)[1]
                heads.append(theta[task.slice(HEADS)])
                if len(heads) % 10 == 0:
                    past = torch.stack(heads[9::10]).mean(0)
    return theta, past, heads


@pytest.mark.parametrize(("size", "rounds", "epochs"), [(23, 2, 1), (5, 4, 3)], ids=str)
def test_the_past_is_the_mean_of_the_heads_after_every_tenth_step_of_all_rounds(size, rounds, epochs):
    run = learn(probgan(epochs=epochs), game(), points((size,)), rounds=rounds)
    theta, past, heads = by_hand((size,), rounds, epochs)
    assert len(heads) == rounds * epochs * -(-size // 2) >= 10
    found = run.posterior.mean
    torch.testing.assert_close(found[run.task.slice(PAST)], past, **NEARLY)
    torch.testing.assert_close(found[: run.task.slice(PAST).start], theta, **NEARLY)
    assert (past - heads[-1]).abs().max() > 1e-4


def test_before_the_tenth_step_the_past_is_the_initial_heads():
    run = learn(probgan(), game(), points((6,)), rounds=3)  # nine steps
    start = run.task.initial()
    assert torch.equal(run.posterior.mean[run.task.slice(PAST)], start[run.task.slice(HEADS)])
    assert torch.equal(start[run.task.slice(PAST)], start[run.task.slice(HEADS)])


@pytest.mark.parametrize("epochs", [1, 5])
def test_a_client_has_the_same_past_in_every_cohort(epochs):
    federation, method = points((24, 4)), probgan(epochs=epochs)
    task = adapted(method)
    together, _ = one_round(method, task, federation, round=5)
    small = Cohort(federation, torch.tensor([1]), round=5, round_size=2, seed=0, dtype=torch.float64)
    message = method.message(started(method, task, federation)[0], None)
    alone, _ = method.local(task, message, None, small)
    torch.testing.assert_close(rows(together.mean.theta, 1), alone.mean.theta[0], **EXACT)
    assert together.mean.theta[1, task.slice(PAST)].any()  # its 10th step is among them


def test_the_past_is_averaged_like_the_networks():
    federation, method = points((24, 22)), probgan()
    task = adapted(method)
    server, _ = started(method, task, federation)
    update, _ = one_round(method, task, federation)
    own = task.initial() + update.mean.theta
    assert (own[0] - own[1])[task.slice(PAST)].abs().max() > 1e-4
    summed = cs.Weighted(cs.Point(update.total.theta.sum(0)), update.weight.sum(0))
    fused = method.posterior(method.fuse(server, summed)).theta
    torch.testing.assert_close(fused, (24 * own[0] + 22 * own[1]) / 46, **EXACT)


# BayesGAN


@pytest.mark.parametrize("train", [SGD, cs.optim.SGHMC(lr=0.01, batch_size=4)], ids=["SGD", "SGHMC"])
def test_without_a_prior_bayesgan_is_fedgan(train):
    wide, free, narrow = (
        learn(method, game(), points(), rounds=2).posterior.mean
        for method in (
            cs.algorithms.BayesGAN(train, variance=1e300),
            cs.FedGAN(train),
            cs.algorithms.BayesGAN(train, variance=0.1),
        )
    )
    assert torch.equal(wide, free)
    assert (narrow - free).abs().max() > 1e-3


@pytest.mark.parametrize("train", [SGD, ADAM], ids=["SGD", "Adam"])
def test_a_prior_of_some_variance_decays_weights_by_its_share_of_every_example(train):
    federation, variance = points(), 0.3
    task = adapted(cs.algorithms.BayesGAN(train))
    update, _ = one_round(cs.algorithms.BayesGAN(train, variance=variance), task, federation, weights(task))
    for k, n in enumerate(SIZES):
        decayed = cs.FedGAN(replace(train, weight_decay=1 / (variance * n)))
        alone, _ = one_round(decayed, task, federation, weights(task))
        torch.testing.assert_close(update.mean.theta[k], alone.mean.theta[k], **EXACT)


# FedAvg-GAN

GENERATOR = cs.optim.Adam(lr=0.01, beta1=0.5, batch_size=6)
SERVER = keys.key(0, purpose="server", round=1)


def parts(run, theta=None):
    theta = run.posterior.mean if theta is None else theta
    made = run.task.slice(MAIN).stop
    return theta[:made], theta[made:]


def test_clients_send_discriminators_and_the_server_keeps_the_generator():
    federation, method = points(), cs.algorithms.FedAvgGAN(SGD, GENERATOR, steps=2)
    run = learn(method, game(), federation, rounds=1)
    generator, discriminator = parts(run, run.task.initial())
    update, _ = one_round(method, run.task, federation)
    assert update.total.theta.shape == (3, len(discriminator))
    mean = update.total.theta.sum(0) / federation.examples
    torch.testing.assert_close(parts(run)[1], discriminator + mean, **EXACT)
    server, _ = started(method, run.task, federation)
    fused = method.fuse(server, cs.Weighted(cs.Point(update.total.theta.sum(0)), update.weight.sum(0)))
    assert torch.equal(fused.generator, generator)  # before the server's own steps
    assert (parts(run)[0] - generator).abs().max() > 1e-3


@pytest.mark.parametrize("pace", [1.0, 0.25])
def test_discriminators_train_against_a_generator_that_does_not_move(pace):
    """At every client, by plain gradients of L_D; the pace is the generator's, who has none there."""
    federation, method = points(), cs.algorithms.FedAvgGAN(SGD, GENERATOR)
    task, cohort = adapted(method, pace=pace), group(points())
    update, _ = one_round(method, task, federation, weights(task))
    made = task.slice(MAIN).stop
    for k in range(len(SIZES)):
        theta = weights(task)
        for epoch in range(2):
            for live, batch in cohort.epoch(epoch, 4):
                if k < live:
                    gradient = both_gradients(task, ByHand(theta), rows(batch, k))[1]
                    theta = torch.cat([theta[:made], theta[made:] - 0.05 * gradient[made:]])
        torch.testing.assert_close(update.mean.theta[k], (theta - weights(task))[made:], **NEARLY)


def noise(task, round, step):
    """What the server's generator is given at a step."""
    return task.latents(keys.fold(keys.key(0, purpose="server", round=round), f"step {step}"), GENERATOR.batch_size)


def flat(parameters):
    return torch.cat([p.detach().flatten() for p in parameters])


def adam(parameters):
    return torch.optim.Adam(parameters, lr=GENERATOR.lr, betas=(GENERATOR.beta1, GENERATOR.beta2), eps=GENERATOR.eps)


@pytest.mark.parametrize(
    ("objective", "pace"), [(cs.tasks.Wasserstein(), 0.25), (cs.tasks.LeastSquares(), 1.0)], ids=str
)
def test_the_server_s_generator_is_trained_by_adam_whose_memory_lasts(objective, pace):
    seen = []
    run = learn(
        cs.algorithms.FedAvgGAN(SGD, GENERATOR, steps=2),
        game(objective=objective, pace=pace),
        points(),
        rounds=3,
        callbacks=[lambda run, line: seen.append(run.posterior.mean)],
    )

    hand = ByHand(run.task.initial())
    optimiser = adam(hand.makers)
    for number, found in enumerate(seen, 1):
        for p, now in zip(hand.judges, ByHand(found).judges, strict=True):
            p.data = now.data
        for step in range(2):
            optimiser.zero_grad()
            d = hand.score(hand.make(noise(run.task, number, step)))
            loss = -d.mean() if isinstance(objective, cs.tasks.Wasserstein) else ((d - 1) ** 2).mean()
            loss.backward()
            optimiser.step()
        torch.testing.assert_close(parts(run, found)[0], flat(hand.makers), **EXACT)


def test_the_memory_of_the_server_s_optimiser_is_part_of_its_state():
    run = learn(cs.algorithms.FedAvgGAN(SGD, GENERATOR, steps=3), game(), points(), rounds=2)
    assert isinstance(run.server, fedavg_gan.Server)
    *moments, steps = run.server.memory
    assert float(steps) == 6
    assert all(part.any() for part in moments)


@pytest.mark.parametrize(
    ("method", "settings", "sentence"),
    [
        (cs.FedGAN, {"interpolate": 1.0}, "FedGAN: interpolate must be below 1, got 1.0"),
        (cs.algorithms.BayesGAN, {"variance": 0.0}, "BayesGAN: variance must be above 0, got 0.0"),
        (cs.algorithms.FedAvgGAN, {"steps": 0}, "FedAvgGAN: steps must be at least 1, got 0"),
        (cs.algorithms.F2A, {"beta": -1.0}, "F2A: beta must be at least 0, got -1.0"),
        (
            cs.algorithms.FedAvgGAN,
            {"generator": replace(GENERATOR, weight_decay=5.0)},
            "generator.weight_decay has no effect at the server: omit it, got 5.0",
        ),
        (
            cs.algorithms.F2A,
            {"generator": replace(GENERATOR, longest=3)},
            "generator.longest has no effect at the server: omit it, got 3",
        ),
        (
            cs.algorithms.F2A,
            {"generator": replace(GENERATOR, mixed=True)},
            "generator.mixed has no effect at the server: omit it, got True",
        ),
    ],
)
def test_settings_out_of_bounds_or_without_effect_are_refused(method, settings, sentence):
    with pytest.raises(ConfigError) as error:
        method(**settings)
    assert str(error.value) == sentence


# F2A


def server_of(task, sharpness, method):
    """Three discriminators that differ, around one generator."""
    made = task.slice(MAIN).stop
    discriminators = torch.stack([weights(task, seed)[made:] for seed in (5, 6, 7)])
    generator = weights(task)[:made]
    memory = method.generator.memory(torch.zeros(1, made + 1).double())
    return f2a.Server(generator, torch.tensor([sharpness]).double(), discriminators, memory)


@pytest.mark.parametrize(
    ("sharpness", "score"),
    [
        (0.0, lambda each: each.mean(0)),
        (1e6, lambda each: each.max(0).values),
        (1.0, lambda each: (each.softmax(0) * each).sum(0)),
    ],
    ids=["the mean", "the greatest", "between"],
)
def test_the_generator_plays_against_the_mean_of_all_discriminators_or_the_greatest(sharpness, score):
    method = cs.algorithms.F2A(SGD, GENERATOR, steps=1, beta=0.0)
    task = adapted(method)
    server = server_of(task, sharpness, method)
    hands = [ByHand(torch.cat([server.generator, one])) for one in server.discriminators]
    optimiser, made = adam(hands[0].makers), hands[0].make(noise(task, 1, 0))
    (-score(torch.stack([hand.score(made) for hand in hands])).mean()).backward()
    optimiser.step()
    after = method.advance(task, server, SERVER)
    torch.testing.assert_close(after.generator, flat(hands[0].makers), **EXACT)
    assert torch.equal(after.discriminators, server.discriminators)


def test_sharpness_is_learned_with_the_generator_and_limited_by_beta():
    """One Adam for both: two steps on −mean d + β λ² by hand."""
    for beta in (0.0, 5.0):
        method = cs.algorithms.F2A(SGD, GENERATOR, steps=2, beta=beta)
        task = adapted(method)
        server = server_of(task, 1.0, method)
        hands = [ByHand(torch.cat([server.generator, one])) for one in server.discriminators]
        sharpness = torch.ones(1).double().requires_grad_()
        optimiser = adam([*hands[0].makers, sharpness])
        for step in range(2):
            made = hands[0].make(noise(task, 1, step))
            each = torch.stack([hand.score(made) for hand in hands])
            optimiser.zero_grad()
            loss = -((sharpness * each).softmax(0) * each).sum(0).mean() + beta * sharpness.square().sum()
            loss.backward()
            optimiser.step()
        after = method.advance(task, server, SERVER)
        torch.testing.assert_close(after.sharpness, sharpness.detach(), **EXACT)
        torch.testing.assert_close(after.generator, flat(hands[0].makers), **EXACT)
        assert (after.sharpness > 1) if beta == 0 else (after.sharpness < 1)  # λ pays unless it costs


def test_sharpness_does_not_become_negative():
    method = cs.algorithms.F2A(SGD, cs.SGD(lr=1.0, batch_size=6), steps=3, beta=50.0)
    task = adapted(method)
    server = server_of(task, 0.5, method)
    after = method.advance(task, server, SERVER)
    assert float(after.sharpness) == 0  # a step of −2 · 50 · λ would have gone far beyond
    run = learn(replace(method, generator=cs.SGD(lr=0.1, batch_size=6)), game(), points(), rounds=3)
    assert all(line["sharpness"] >= 0 for line in run.history)


def test_clients_keep_discriminators_of_their_own():
    federation = points()
    run = learn(cs.algorithms.F2A(SGD, GENERATOR, steps=1), game(), federation, rounds=10)
    own = run.states.gather(torch.arange(3)).theta
    assert torch.pdist(own).min() > 0.01
    torch.testing.assert_close(run.server.discriminators, own, **EXACT)
    torch.testing.assert_close(parts(run)[1], own.mean(0), **EXACT)
    x = [federation.client(k).x.double() for k in range(3)]
    judges = [ByHand(torch.cat([run.server.generator, one])) for one in own]
    scores = torch.stack([torch.stack([judge.score(some).mean() for some in x]) for judge in judges]).detach()
    assert (scores - scores.mean(1, keepdim=True)).argmax(0).tolist() == [0, 1, 2]  # one's own data looks best


def test_only_a_round_s_clients_train_their_discriminators_and_each_continues_its_own():
    federation = points((6, 6, 6))
    seen = []
    run = learn(
        cs.algorithms.F2A(SGD, GENERATOR, steps=1),
        game(),
        federation,
        rounds=3,
        cohort=2,
        callbacks=[lambda run, line: seen.append((run.server, run.states.gather(torch.arange(3)).theta.clone()))],
    )
    start = parts(run, run.task.initial())[1]
    before = start.expand(3, -1)
    for number, (server, after) in enumerate(seen, 1):
        chosen = keys.sample(keys.key(0, purpose="cohort", round=number), 3, 2)
        moved = (after - before).abs().amax(1) > 0
        assert moved.nonzero().flatten().tolist() == chosen.tolist()
        assert torch.equal(server.discriminators, after[chosen])
        before = after
