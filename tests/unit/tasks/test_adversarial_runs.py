"""Runs of adversarial tasks: methods that can learn them, and examples that are generated."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import CheckpointError, TaskError
from consilience.tasks.adversarial import HEADS, TRUNK
from consilience.tasks.layout import MAIN
from support.games import EXACT, IMAGE, LATENT, ByHand, Witness, game, learn, players, points

PLAY = cs.SGD(lr=0.05, batch_size=4)


LIKELIHOOD = (
    "this method needs a likelihood of labels, and the task is adversarial. FedGAN, ProbGAN and EPGAN are made for "
    "GANs; methods that need gradients only (FedAvg, FedProx, SCAFFOLD, FedEP) learn them, too"
)


@pytest.mark.parametrize(
    "method",
    [
        cs.FedNP(PLAY),
        cs.algorithms.MOON(PLAY),
        cs.FedEP(cs.inference.Laplace(PLAY)),
        cs.FedEP(cs.inference.NGVI(PLAY)),
        cs.algorithms.FedLA(),
        cs.algorithms.Ensemble(PLAY),
    ],
    ids=lambda method: method.name,
)
def test_a_method_that_needs_a_likelihood_says_so(method):
    with pytest.raises(TaskError) as error:
        learn(method, game(), points(), rounds=1)
    assert str(error.value) == LIKELIHOOD


@pytest.mark.parametrize(
    "method",
    [
        cs.FedGAN(),
        cs.algorithms.BayesGAN(),
        cs.algorithms.ProbGAN(),
        cs.EPGAN(),
        cs.algorithms.FedAvgGAN(),
        cs.algorithms.F2A(),
    ],
)
def test_a_method_for_gans_says_what_it_learns(method):
    task = cs.Classification(nn.Linear(2, 3))
    with pytest.raises(TaskError) as error:
        learn(method, task, points(), rounds=1)
    assert str(error.value) == (
        f"{method.name} needs an Adversarial task, a generator and a discriminator; got classification"
    )


def test_only_generators_make_examples():
    run = learn(cs.FedAvg(PLAY), cs.Classification(nn.Linear(2, 3)), points(), rounds=1)
    with pytest.raises(TaskError, match=r"^only generators make examples: the task is classification$"):
        run.sample(3)


def test_epgan_needs_a_discriminator_whose_last_layer_is_linear():
    generator, discriminator = players()
    task = cs.Adversarial(generator, nn.Sequential(*discriminator, nn.Tanh()), latent=LATENT)
    with pytest.raises(TaskError, match=r"^the discriminator's last child must be an nn.Linear, not Tanh$"):
        learn(cs.algorithms.SignalEPGAN(), task, points(), rounds=1)
    learn(cs.algorithms.ProbGAN(PLAY), task, points(), rounds=1)  # it needs no features


def test_methods_that_need_a_gradient_only_keep_the_pace():
    plain, slow = (
        learn(cs.FedAvg(cs.SGD(lr=0.01, batch_size=20)), game(pace=pace), points(), rounds=1) for pace in (1.0, 0.5)
    )
    made, start = plain.task.slice(MAIN).stop, plain.task.initial()
    way, short = (run.posterior.mean - start for run in (plain, slow))
    torch.testing.assert_close(short[:made], 0.5 * way[:made], **EXACT)
    torch.testing.assert_close(short[made:], way[made:], **EXACT)


def test_a_control_variate_is_a_gradient_at_any_pace():
    """After one step from the same weights clients have seen the same gradients at any step size."""
    plain, slow = (
        learn(cs.SCAFFOLD(cs.SGD(lr=0.01, batch_size=20)), game(pace=pace), points(), rounds=1).server.c
        for pace in (1.0, 0.5)
    )
    torch.testing.assert_close(slow, plain, **EXACT)


@pytest.mark.parametrize(
    "method",
    [
        cs.FedAvg(PLAY),
        cs.FedProx(PLAY),
        cs.SCAFFOLD(PLAY),
        cs.FedEP(cs.inference.Identity(PLAY)),
        cs.algorithms.FedSEP(cs.inference.MCMC(cs.optim.SGHMC(lr=1e-3, batch_size=4, epochs=3))),
    ],
    ids=lambda method: method.name,
)
def test_methods_that_need_gradients_only_learn_it(method):
    task = game(pace=0.5)
    run = learn(method, task, points(), rounds=2, test=points().data, debug=True)
    assert [line["rejected"] for line in run.history] == [[], []]
    assert all(math.isfinite(line["loss"]) for line in run.history)
    change = run.posterior.mean - run.task.initial()
    assert change.isfinite().all()
    assert all(change[task.slice(part)].abs().max() > 1e-4 for part in (MAIN, TRUNK, HEADS))
    assert math.isfinite(run.history[-1]["eval"]["spread"])
    assert ("marginal" in run.history[-1]) is isinstance(run.posterior, cs.Gaussian)


@pytest.mark.parametrize(
    "method", [cs.FedAvg(PLAY), cs.FedEP(cs.inference.Identity(PLAY))], ids=lambda method: method.name
)
def test_a_run_makes_examples_and_scores_them(method):
    witness, test = Witness(count=70), points()
    run = learn(method, game(judges=[witness]), test)
    theta, z, x = run.posterior.mean, torch.randn(6, LATENT).double(), test.data.x.double()
    hand = ByHand(theta)
    torch.testing.assert_close(run.model.double()(z), hand.make(z), rtol=1e-5, atol=1e-6)  # of a float32 module
    torch.testing.assert_close(run.predict(x, point=True), hand.score(x).detach(), **EXACT)
    made = run.sample(70)
    torch.testing.assert_close(made, run.task.generate(theta, 70), **EXACT)
    torch.testing.assert_close(run.sample(8), made[:8], **EXACT)
    scores = run.evaluate(test.data)
    torch.testing.assert_close(witness.seen[-1], made, **EXACT)
    assert scores.point == {"spread": float(made.std())}
    assert scores.belief == type(run.posterior).__name__
    assert (scores.marginal is None) is isinstance(run.posterior, cs.Point)
    assert len(witness.seen) == (1 if scores.marginal is None else 2)
    assert scores.clients == []
    assert scores.reliability is None


def test_draws_of_a_posterior_take_turns():
    witness = Witness(count=20)
    run = learn(cs.FedEP(cs.inference.Identity(PLAY)), game(judges=[witness]), points())
    drawn, made = run.posterior.sample(3), run.sample(20, seed=4, samples=3)
    for i in range(20):
        wanted = run.task.generate(drawn[i % 3], 7, seed=4 + i % 3)[i // 3]
        torch.testing.assert_close(made[i], wanted, **EXACT)
    torch.testing.assert_close(run.sample(11, seed=4, samples=3), made[:11], **EXACT)
    scores = run.evaluate(points().data, samples=3)
    torch.testing.assert_close(witness.seen[0][:20], run.sample(64, samples=3)[:20], **EXACT)
    assert scores.marginal == {"spread": float(witness.seen[0].std())}
    x = points().data.x.double()
    wanted = torch.stack([ByHand(theta).score(x).detach() for theta in drawn]).mean(0)
    torch.testing.assert_close(run.predict(x, samples=3), wanted, **EXACT)


def test_clients_own_generators_are_judged_together():
    witness, test = Witness(count=64), points()
    run = learn(cs.LocalOnly(PLAY), game(judges=[witness]), test)
    own = run.states.gather(torch.arange(3)).theta
    assert torch.pdist(own).min() > 1e-3
    run.evaluate(test)
    wanted = torch.stack([run.task.generate(theta, 22, seed) for seed, theta in enumerate(own)], 1).flatten(0, 1)[:64]
    torch.testing.assert_close(witness.seen[0], wanted, **EXACT)
    run.evaluate(test.data)  # without a client
    torch.testing.assert_close(witness.seen[1], wanted, **EXACT)


def test_appended_parameters_do_not_change_generated_examples():
    task = game()
    run = learn(cs.algorithms.SignalEPGAN(replace(PLAY, lr=0.0), hidden=3), task, points(), rounds=1)
    assert run.task.size > task.size
    start = task.prepare(dtype=torch.float64)
    x = points().data.x.double()
    torch.testing.assert_close(run.sample(9), start.generate(start.initial(), 9), **EXACT)
    torch.testing.assert_close(run.predict(x, point=True), start.predict(start.initial(), x), **EXACT)
    assert [name for name, _ in run.model.named_parameters()] == task.main.names


def test_a_run_is_resumed_with_the_same_objective_pace_and_networks_only(tmp_path):
    out = tmp_path / "run"
    learn(cs.FedAvg(PLAY), game(), points(), rounds=1, out=out)
    for other, difference in (
        ({"objective": cs.tasks.LeastSquares()}, r"task.objective is .*Wasserstein.* there and .*LeastSquares.* here"),
        ({"objective": cs.tasks.Wasserstein(penalty=1.0)}, r"task.objective is .*10.0.* there and .*1.0.* here"),
        ({"pace": 0.5}, r"task.pace is '1.0' there and '0.5' here"),
        ({"discriminators": 3}, r"task.parameters is \d+ there and \d+ here"),
    ):
        with pytest.raises(CheckpointError, match=f"holds another run: .*{difference}"):
            learn(cs.FedAvg(PLAY), game(**other), points(), rounds=2, out=out, resume=True)


def test_evaluation_keeps_points_on_the_discriminator_s_map():
    test = points((40, 30)).data
    run = learn(cs.FedGAN(PLAY), game(), points(), rounds=1, test=test)
    kept = run.evaluation.samples
    assert (kept["kind"], len(kept["generated"]), len(kept["real"])) == ("points", 64, 70)
    room = 0.2 * (test.x.max(0).values - test.x.min(0).values)
    torch.testing.assert_close(torch.tensor(kept["low"]), test.x.min(0).values - room, rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.tensor(kept["generated"]).double(), run.sample(64), rtol=0, atol=1e-4)
    low, high = (torch.tensor(kept[side]).double() for side in ("low", "high"))
    corner = low + (high - low) / 120  # the middle of the first of 60 × 60 cells
    assert kept["map"][0][0] == pytest.approx(float(run.predict(corner[None], point=True)[0]), abs=1e-3)


@pytest.mark.parametrize(("shape", "kind"), [(IMAGE, "images"), ((4,), None)])
def test_evaluation_keeps_images_and_nothing_of_other_shapes(shape, kind):
    x = torch.randint(0, 256, (12, *shape), generator=torch.Generator().manual_seed(0)).byte()
    data = cs.Dataset(x, torch.zeros(12, dtype=torch.int64), scale=torch.tensor(1 / 127.5), shift=torch.tensor(-1.0))
    federation = cs.Federation.from_owner(data, torch.arange(12) % 2)
    run = learn(cs.FedGAN(PLAY), game(shape), federation, rounds=1, test=federation.data)
    assert run.sample(3).shape == (3, *shape)
    assert (run.evaluation.samples or {"kind": None})["kind"] == kind
