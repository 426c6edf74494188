"""Players that take turns: steps of either player, generated examples, the average generator, and the decay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.algorithms.gan.players import NOISY
from consilience.core import keys
from consilience.core.errors import ConfigError
from consilience.core.records import rows
from consilience.data.cohort import Cohort
from consilience.tasks.adversarial import AVERAGE, TURN
from consilience.tasks.layout import MAIN
from support.games import ByHand, both_gradients, game, group, learn, points, weights

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SGD = cs.SGD(lr=0.02, batch_size=3, epochs=2)
ADAM = cs.optim.Adam(lr=0.01, beta1=0.5, beta2=0.9, batch_size=3, epochs=2)
WASSERSTEIN = cs.tasks.Wasserstein()
LEAST = cs.tasks.LeastSquares()


def flat(parameters):
    return torch.cat([p.detach().flatten() for p in parameters])


def optimiser(train, parameters, pace=1.0):
    if isinstance(train, cs.SGD):
        return torch.optim.SGD(parameters, lr=train.lr * pace)
    return torch.optim.Adam(parameters, lr=train.lr * pace, betas=(train.beta1, train.beta2), eps=train.eps)


def made_anew(hand, task, batch, generated):
    """The generator's loss on noise of its own: example j of row i is generator (i · generated + j) mod count."""
    z = task.latents(keys.fold(batch.key, TURN), len(batch.w) * generated)
    d = hand.score(hand.make(z)).view(-1, generated)[batch.w > 0]
    return ((d - 1) ** 2 if isinstance(task.objective, cs.tasks.LeastSquares) else -d).mean()


def played(train, critic_steps, generated, objective, federation, rounds=1, pace=1.0):
    """(θ, generators after each of their steps) of one client, by plain torch."""
    task = game(objective=objective).prepare(dtype=torch.float64)
    hand, seen = ByHand(task.initial()), []
    for number in range(1, rounds + 1):
        makers, judges = optimiser(train, hand.makers, pace), optimiser(train, hand.judges)
        for epoch in range(train.epochs):
            for step, (_, batch) in enumerate(group(federation, number).epoch(epoch, train.batch_size)):
                one = rows(batch, 0)
                gradient = both_gradients(task, hand, one)[1][len(flat(hand.makers)) :]
                for p, g in zip(hand.judges, gradient.split([p.numel() for p in hand.judges]), strict=True):
                    p.grad = g.view(p.shape)
                judges.step()
                if step % critic_steps == 0:
                    against = made_anew(hand, task, one, generated)
                    mine = torch.autograd.grad(against, hand.makers, materialize_grads=True)
                    for p, g in zip(hand.makers, mine, strict=True):
                        p.grad = g
                    makers.step()
                    seen.append(flat(hand.makers))
    return torch.cat([flat(hand.makers), flat(hand.judges)]), seen


@pytest.mark.parametrize("train", [SGD, ADAM], ids=["SGD", "Adam"])
@pytest.mark.parametrize(
    ("critic_steps", "generated", "objective"),
    [(1, 1, LEAST), (5, 1, LEAST), (5, 2, LEAST), (2, 3, cs.tasks.Wasserstein(penalty=0.0)), (5, 1, WASSERSTEIN)],
)
def test_turns_are_those_of_a_loop_by_hand(train, critic_steps, generated, objective):
    one = points((20,))  # seven batches an epoch
    method = cs.FedGAN(train, critic_steps=critic_steps, generated=generated)
    run = learn(method, game(objective=objective, pace=0.5), one, rounds=1)
    theta, seen = played(train, critic_steps, generated, objective, one, pace=0.5)
    assert len(seen) == train.epochs * -(-7 // critic_steps)
    close = {"rtol": 1e-7, "atol": 1e-7} if objective.penalty else CLOSE  # √(‖·‖² + 1e-12) in the penalty
    torch.testing.assert_close(run.posterior.mean, theta, **close)
    at_once = learn(cs.FedGAN(train, critic_steps=None), game(objective=objective, pace=0.5), one, rounds=1)
    assert (at_once.posterior.mean - theta).abs().max() > 1e-5


@pytest.mark.parametrize("method", [
    cs.FedGAN(ADAM, critic_steps=5, generated=2, average=0.9), cs.algorithms.ProbGAN(ADAM, critic_steps=2, average=0.5),
    cs.algorithms.BayesGAN(ADAM, critic_steps=3), cs.EPGAN(ADAM, critic_steps=2),
    cs.algorithms.SignalEPGAN(ADAM, hidden=3),
], ids=lambda method: type(method).__name__)  # fmt: skip
def test_a_client_that_takes_turns_computes_the_same_in_every_cohort(method):
    federation = points((20, 11, 2))
    task = method.adapt(game(), 0).prepare(dtype=torch.float64)
    info = cs.data.Info(weights(task), *(torch.tensor(v) for v in (0, 3, 33)))
    server = method.start(task, info)

    def theta(ids):
        cohort = Cohort(federation, torch.tensor(ids), round=2, round_size=3, seed=0, dtype=torch.float64)
        state = method.client(task, info, cohort.n)
        update, _ = method.local(task, method.message(server, cohort.ids), state, cohort)
        return getattr(update, "change", update).mean.theta

    together = theta([0, 1, 2])
    for k in range(3):
        torch.testing.assert_close(theta([k])[0], together[k], rtol=1e-9, atol=1e-9)
    assert together.abs().amax(1).min() > 1e-4


@pytest.mark.parametrize("critic_steps", [None, 1, 5])
def test_the_average_generator_is_the_recursion_over_its_steps_in_all_rounds(critic_steps):
    one, decay = points((20,)), 0.6
    seen = []
    method = cs.FedGAN(SGD, critic_steps=critic_steps, average=decay)
    run = learn(method, game(), one, rounds=3)

    if critic_steps is None:
        task = game().prepare(dtype=torch.float64)
        theta = task.initial().unsqueeze(0)
        for number in (1, 2, 3):
            for epoch in range(2):
                for _, batch in group(one, number).epoch(epoch, 3):
                    theta = theta - SGD.lr * task.gradient()(theta, batch)[0]
                    seen.append(theta[0, task.slice(MAIN)].clone())
    else:
        seen = played(SGD, critic_steps, 1, cs.tasks.Wasserstein(), one, rounds=3)[1]
    average = run.task.initial()[run.task.slice(MAIN)]
    for number, now in enumerate(seen, 1):
        share = min(decay, (1 + number) / (10 + number))
        average = share * average + (1 - share) * now
    assert len(seen) > 5
    torch.testing.assert_close(run.posterior.mean[run.task.slice(AVERAGE)], average, rtol=1e-7, atol=1e-7)
    assert (average - seen[-1]).abs().max() > 1e-4


def test_samples_and_the_released_module_are_of_the_average_generator():
    run = learn(cs.FedGAN(SGD, average=0.9), game(), points(), rounds=2)
    theta, task = run.posterior.mean, run.task
    plain = game().prepare(dtype=torch.float64)
    shown = theta[: plain.size].clone()
    shown[task.slice(MAIN)] = theta[task.slice(AVERAGE)]
    torch.testing.assert_close(run.sample(9), plain.generate(shown, 9), **CLOSE)
    assert (run.sample(9) - plain.generate(theta[: plain.size], 9)).abs().max() > 1e-4
    z = task.latents(keys.key(0, purpose="generate"), 9)
    torch.testing.assert_close(run.model.double()(z), run.sample(9), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(run.predict(points().data.x.double(), point=True), ByHand(shown).score(points().data.x.double()).detach())  # fmt: skip  # noqa: E501


def test_the_average_does_not_change_how_players_learn():
    ways = [learn(cs.FedGAN(ADAM, critic_steps=2, average=beta), game(), points()) for beta in (0.0, 0.9)]
    played = ways[0].task.played
    assert torch.equal(ways[0].posterior.mean, ways[1].posterior.mean[:played])


def test_a_run_with_an_average_resumes_exactly(tmp_path):
    method = cs.algorithms.ProbGAN(replace(ADAM, noise=0.01), critic_steps=3, average=0.9)
    whole = learn(method, game(), points(), rounds=4)
    learn(method, game(), points(), rounds=2, out=tmp_path / "run")
    resumed = learn(method, game(), points(), rounds=4, out=tmp_path / "run", resume=True)
    assert torch.equal(resumed.posterior.mean, whole.posterior.mean)


def test_a_linear_decay_is_zero_after_its_last_update():
    """Ten steps in all: the tenth has a tenth of the first one's length, and every later one none."""
    decay = cs.optim.Linear(unit="steps", total=10)
    factors = decay.factor(torch.arange(1, 13).double())
    torch.testing.assert_close(factors, torch.tensor([*(1 - n / 10 for n in range(10)), 0, 0]).double())
    train = replace(ADAM, epochs=1, batch_size=2, schedule=decay)
    ends = []
    learn(
        cs.FedGAN(train), game(), points((10,)), rounds=4,
        callbacks=[lambda run, line: ends.append(run.posterior.mean.clone())],
    )  # fmt: skip
    assert (ends[1] - ends[0]).abs().max() > 1e-4
    assert torch.equal(ends[1], ends[2])
    assert torch.equal(ends[2], ends[3])


def test_noise_of_bayesian_gans_has_the_deviation_of_published_code():
    assert NOISY.noise == pytest.approx(0.03 * 0.02**0.5, rel=0.01)


def test_chains_that_look_around_cannot_take_turns():
    with pytest.raises(ConfigError, match=r"which SAM does not take: choose Adam or SGD, or critic_steps=None"):
        cs.FedGAN(cs.optim.SAM(lr=0.01, batch_size=4))
    learn(cs.FedGAN(cs.optim.SAM(lr=0.01, batch_size=4), critic_steps=None), game(), points(), rounds=1)


@pytest.mark.parametrize("settings", [{"critic_steps": 0}, {"generated": 0}, {"average": 1.0}])
def test_impossible_turns_are_refused(settings):
    with pytest.raises(ConfigError, match=f"FedGAN: {next(iter(settings))} must be"):
        cs.FedGAN(**settings)


# BatchNorm in generators


def normed(**options):
    """A generator with BatchNorm behind its first child."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        generator = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2))
        discriminator = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    return cs.Adversarial(generator, discriminator, latent=2, **options)


@pytest.mark.parametrize("critic_steps", [None, 2])
def test_batch_norm_in_a_generator_uses_the_examples_made_together_also_in_a_cohort(critic_steps):
    federation, method = points((9, 5, 3)), cs.FedGAN(ADAM, critic_steps=critic_steps)
    task = normed(generators=2).prepare(dtype=torch.float64)
    info = cs.data.Info(task.initial(), *(torch.tensor(v) for v in (0, 3, 17)))
    message = method.message(method.start(task, info), None)

    def theta(ids):
        cohort = Cohort(federation, torch.tensor(ids), round=1, round_size=3, seed=0, dtype=torch.float64)
        return method.local(task, message, None, cohort)[0].mean.theta

    together = theta([0, 1, 2])
    for k in range(3):
        torch.testing.assert_close(theta([k])[0], together[k], **CLOSE)


def test_the_gradient_through_batch_norm_is_that_of_torch_s_own_layer():
    task = normed(objective=LEAST).prepare(dtype=torch.float64)
    theta, x = weights(task), torch.randn(6, 2).double()
    batch = cs.data.Batch(x[None], torch.zeros(1, 6), torch.ones(1, 6).double(), torch.tensor([3]))
    (g,), _ = task.gradient(type(task).generator_turn_one)(theta[None], batch)
    generator = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)).double()
    judge = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    nn.utils.vector_to_parameters(theta, [*generator.parameters(), *judge.parameters()])
    made = generator(task.latents(keys.fold(torch.tensor(3), TURN), 6))
    (judge(made) - 1).square().mean().backward()
    torch.testing.assert_close(g[: task.slice(MAIN).stop], torch.cat([p.grad.flatten() for p in generator.parameters()]), **CLOSE)  # fmt: skip  # noqa: E501
    assert not g[task.slice(MAIN).stop :].any()


def test_samples_use_the_statistics_of_fixed_noise_however_many_are_drawn():
    run = learn(cs.FedGAN(SGD, average=0.9), normed(generators=2), points(), rounds=2)
    many = run.sample(1500)
    torch.testing.assert_close(run.sample(3), many[:3], **CLOSE)
    module = run.model.double()
    z = run.task.latents(keys.key(0, purpose="generate"), 1500)
    torch.testing.assert_close(module(z), many, rtol=1e-4, atol=1e-5)  # buffers are float32 there
    hidden = module.trunk[0](module.heads[0](run.task.latents(keys.key(1, purpose="test"), 4000)[::2]))
    assert hidden.mean(0).abs().max() < 0.5
    assert (hidden.std(0) - 1).abs().max() < 0.5


def test_methods_with_running_averages_refuse_a_generator_s_batch_norm():
    with pytest.raises(cs.ConsilienceError, match="BatchNorm layers have no running averages"):
        learn(cs.algorithms.FedBN(SGD), normed(), points(), rounds=1)


def test_flips_change_real_examples_only():
    x = torch.arange(16.0).view(4, 1, 2, 2)
    data = cs.Dataset(x, torch.zeros(4, dtype=torch.int64))
    federation = cs.Federation.from_owner(data, torch.zeros(4, dtype=torch.int64))
    runs = [
        learn(cs.FedGAN(SGD), game((1, 2, 2), augment=augment, judges=[]), federation, rounds=1)
        for augment in (None, cs.data.augment.Flip())
    ]
    assert not torch.equal(runs[0].posterior.mean, runs[1].posterior.mean)
    symmetric = cs.Federation.from_owner(
        cs.Dataset(x.mean(-1, keepdim=True).expand(-1, -1, -1, 2).clone(), data.y), data.y
    )
    same = [
        learn(cs.FedGAN(SGD), game((1, 2, 2), augment=augment, judges=[]), symmetric, rounds=1).posterior.mean
        for augment in (None, cs.data.augment.Flip())
    ]
    torch.testing.assert_close(same[0], same[1], **CLOSE)
