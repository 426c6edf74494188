"""Adversarial: two players in one vector, each with a loss of its own, and what can be done with what they learn."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.compute.vectorize import Cohorts
from consilience.core import keys
from consilience.core.errors import CheckpointError, ConfigError, DataError, TaskError
from consilience.core.records import tree_map
from consilience.tasks.adversarial import HEADS, TRUNK
from consilience.tasks.layout import MAIN
from consilience.tasks.multihead import Generators, Heads
from support.games import (
    EXACT,
    FLAT,
    IMAGE,
    LATENT,
    NEARLY,
    ByHand,
    Witness,
    batch_of,
    both_gradients,
    by_parameter,
    game,
    group,
    learn,
    players,
    points,
    rows_of,
    weights,
)

PLAY = cs.SGD(lr=0.05, batch_size=4)


# The same game in plain torch


@pytest.mark.parametrize("shape", [FLAT, IMAGE], ids=["points", "images"])
@pytest.mark.parametrize("counts", [(1, 1), (3, 2)], ids=str)
@pytest.mark.parametrize(
    "objective",
    [
        cs.tasks.Wasserstein(),
        cs.tasks.Wasserstein(penalty=0.0),
        cs.tasks.LeastSquares(),
        cs.tasks.LeastSquares(penalty=2.0),
    ],
    ids=str,
)
def test_the_gradient_is_each_player_s_own_and_the_value_the_discriminator_s(objective, counts, shape):
    generators, discriminators = counts
    task = game(shape, generators=generators, discriminators=discriminators, objective=objective)
    task = task.prepare(dtype=torch.float64)
    thetas, batches = [weights(task, seed) for seed in (5, 6)], [batch_of(shape=shape, key=key) for key in (3, 4)]
    alone = task.gradient()(*rows_of(thetas[0], batches[0]))
    stacked = tree_map(lambda *parts: torch.stack(parts), *batches)
    together = task.gradient()(torch.stack(thetas), stacked)
    for k in range(2):
        loss, slope = both_gradients(task, ByHand(thetas[k], *counts, shape), batches[k])
        torch.testing.assert_close(together[0][k], slope, **NEARLY)
        torch.testing.assert_close(together[1][k], loss, **NEARLY)
    torch.testing.assert_close(alone[0], together[0][:1], **EXACT)
    torch.testing.assert_close(alone[1], together[1][:1], **EXACT)


@pytest.mark.parametrize("objective", [cs.tasks.Wasserstein(), cs.tasks.LeastSquares()], ids=str)
def test_discriminators_of_the_past_are_one_more_opponent_of_the_generator_alone(objective):
    task = game(objective=objective).prepare(dtype=torch.float64)
    theta, batch = weights(task), batch_of()
    past = torch.randn(10, generator=torch.Generator().manual_seed(0)).double()
    loss, wanted = both_gradients(task, ByHand(torch.cat([theta, past])), batch, past=True)
    slope, value = task.gradient(type(task).game_one)(*rows_of(theta, batch, past))
    torch.testing.assert_close(slope[0], wanted, **NEARLY)
    torch.testing.assert_close(value[0], loss, **NEARLY)
    without = task.gradient()(*rows_of(theta, batch))[0][0]
    made = task.slice(MAIN).stop
    assert torch.equal(slope[0, made:], without[made:])
    assert (slope[0, :made] - without[:made]).abs().max() > 1e-3


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("objective", [cs.tasks.Wasserstein(), cs.tasks.LeastSquares()], ids=str)
def test_rows_of_padding_change_nothing(objective, dropout):
    task = game(dropout=dropout, objective=objective).prepare(dtype=torch.float64)
    narrow, theta = batch_of(count=5, pad=0), weights(task)
    wanted = task.gradient()(*rows_of(theta, narrow))
    for pad in (1, 2, 7):
        beyond = torch.full((pad, 2), 1e3).double()
        wide = cs.data.Batch(
            torch.cat([narrow.x, beyond]), torch.zeros(5 + pad), torch.ones(5 + pad).double(), narrow.key
        )
        wide.w[5:] = 0
        for got, told in zip(task.gradient()(*rows_of(theta, wide)), wanted, strict=True):
            torch.testing.assert_close(got, told, **EXACT)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("around", [True, False])
def test_compiled_the_gradient_is_the_same(around, caplog, monkeypatch):
    """The penalty is a gradient inside of a loss that a GPU differentiates around `vmap`, a CPU inside of it."""
    monkeypatch.setattr(Cohorts, "on_gpu", around)
    many = [batch_of(key=k) for k in range(3)]
    batch = cs.data.Batch(*(torch.stack([getattr(one, name) for one in many]) for name in ("x", "y", "w", "key")))
    found = []
    for compile in (False, True):
        task = game(dropout=0.4, generators=1, discriminators=1).prepare(dtype=torch.float64, compile=compile, chunk=3)
        found.append(task.gradient()(torch.stack([weights(task, k) for k in range(3)]), batch))
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(plain, compiled, rtol=1e-9, atol=1e-12)
    assert "not used" not in caplog.text


def test_dropout_is_another_one_at_every_step_and_none_in_evaluation():
    task = game(dropout=0.4).prepare(dtype=torch.float64)
    theta, one = weights(task), batch_of()
    parts = task.split(theta)
    scores = [task.score_one(parts, one.x, key) for key in (torch.tensor(3), torch.tensor(4), None)]
    assert not torch.equal(scores[0], scores[1])
    torch.testing.assert_close(task.predict(theta, one.x), scores[2], **EXACT)
    torch.testing.assert_close(scores[2], ByHand(theta).score(one.x).detach(), **EXACT)


# Samples of generators and discriminators


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_example_i_comes_from_generator_i_mod_count(count):
    task = game(generators=count).prepare(dtype=torch.float64)
    theta, z = weights(task), torch.randn(11, LATENT).double()
    made = task.apply_one(theta, z)
    assert made.shape == (11, 2)
    torch.testing.assert_close(made, ByHand(theta, generators=count).make(z).detach(), **EXACT)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_first_examples_are_the_same_however_many_are_made(count):
    task = game(generators=count).prepare(dtype=torch.float64)
    theta = weights(task)
    most = task.generate(theta, 2100)
    assert len(most) == 2100
    for few in (1, 5, 999, 1000, 1001, 2000):
        torch.testing.assert_close(task.generate(theta, few), most[:few], **EXACT)
    z = task.latents(keys.key(0, purpose="generate"), 2100)
    torch.testing.assert_close(most, task.apply_one(theta, z), **EXACT)  # in one go
    assert (task.generate(theta, 5, seed=1) - most[:5]).abs().max() > 0.01


def test_one_is_the_mean_over_samples_of_what_they_do_not_share():
    task = game().prepare(dtype=torch.float64)
    theta = weights(task)
    named, found = by_parameter(task, theta), []
    own = {MAIN: 3, HEADS: 2}
    for part, owner in ((MAIN, True), (MAIN, False), (TRUNK, False), (HEADS, True)):
        if owner:
            for what in ("weight", "bias"):
                found.append(torch.stack([named[f"{part} heads.{i}.{what}"] for i in range(own[part])]).mean(0))
        else:
            found += [v for name, v in named.items() if name.startswith(part) and "heads." not in name]
    wanted = torch.cat([value.flatten() for value in found])
    torch.testing.assert_close(task.one(theta), wanted, **EXACT)
    assert len(wanted) == 6 + 3 + 6 + 2 + 8 + 4 + 4 + 1
    beyond = torch.cat([theta, torch.ones(4).double()])  # what an algorithm appends is no player's
    torch.testing.assert_close(task.one(torch.stack([beyond, 2 * beyond])), torch.stack([wanted, 2 * wanted]), **EXACT)


def test_all_gives_every_sample_the_same():
    task = game().prepare(dtype=torch.float64)
    value = torch.randn(2, 34).double()
    whole = task.all(value)
    assert whole.shape == (2, task.size)
    for theta in whole:
        named = by_parameter(task, theta)
        for what in ("weight", "bias"):
            assert all(torch.equal(named[f"main heads.0.{what}"], named[f"main heads.{i}.{what}"]) for i in (1, 2))
            assert torch.equal(named[f"heads heads.0.{what}"], named[f"heads heads.1.{what}"])
    torch.testing.assert_close(task.one(whole), value, **EXACT)
    alone = game(generators=1, discriminators=1).prepare(dtype=torch.float64)
    theta = weights(alone)
    assert torch.equal(alone.all(theta), theta)
    assert torch.equal(alone.one(theta), theta)


def test_further_samples_have_matrices_of_their_own_and_the_same_vectors():
    generator, discriminator = players()
    before = torch.get_rng_state()
    for made, first in ((Generators(generator, 3), generator[0]), (Heads(discriminator[-1], 3), discriminator[-1])):
        matrices = torch.stack([head.weight.detach() for head in made.heads])
        assert torch.equal(matrices[0], first.weight)
        assert torch.pdist(matrices.flatten(1)).min() > 0.1
        assert all(torch.equal(head.bias, first.bias) for head in made.heads)
        again = type(made)(players()[0] if first is generator[0] else players()[1][-1], 3)
        assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), before)  # nobody's generator of random numbers was asked


def test_further_samples_are_drawn_with_the_mean_and_deviation_of_the_first():
    layer = nn.Linear(50, 40)
    nn.init.normal_(layer.weight, 3.0, 0.2, generator=torch.Generator().manual_seed(0))
    for head in Heads(layer, 4).heads[1:]:
        torch.testing.assert_close(head.weight.mean(), torch.tensor(3.0), rtol=0, atol=0.02)
        torch.testing.assert_close(head.weight.std(), torch.tensor(0.2), rtol=0.06, atol=0)


@pytest.mark.parametrize("counts", [(1, 1), (2, 3), (3, 2)], ids=str)
def test_the_same_players_can_have_other_numbers_of_samples(counts):
    options = {"objective": cs.tasks.LeastSquares(), "pace": 0.5}
    made, told = (
        game(**options).with_samples(*counts),
        game(generators=counts[0], discriminators=counts[1], **options),
    )
    assert torch.equal(made.initial(), told.initial())
    assert made.settings() == told.settings()
    assert str(made.module) == str(told.module)
    assert (made.latent, made.generators, made.discriminators) == (LATENT, *counts)
    x = points().data.x
    torch.testing.assert_close(made.predict(made.initial(), x), told.predict(told.initial(), x))


# Pace


@pytest.mark.parametrize("pace", [0.25, 4.0])
@pytest.mark.parametrize(
    "chain", [cs.SGD(lr=0.01, batch_size=20), cs.optim.Adam(lr=0.01, batch_size=20)], ids=["SGD", "Adam"]
)
def test_the_generator_s_step_is_pace_times_as_long(chain, pace):
    steps = []
    for one in (1.0, pace):
        task = game(pace=one, objective=cs.tasks.LeastSquares()).prepare(dtype=torch.float64)
        steps.append(chain(task, weights(task), group(points())) - weights(task))
    made = task.slice(MAIN).stop
    assert steps[0][0].abs().min() > 0
    torch.testing.assert_close(steps[1][:, :made], pace * steps[0][:, :made], **EXACT)
    torch.testing.assert_close(steps[1][:, made:], steps[0][:, made:], **EXACT)


def test_methods_that_need_a_gradient_only_keep_the_pace():
    plain, slow = (
        learn(cs.FedAvg(cs.SGD(lr=0.01, batch_size=20)), game(pace=pace), points(), rounds=1) for pace in (1.0, 0.5)
    )
    made, start = plain.task.slice(MAIN).stop, plain.task.initial()
    way, short = (run.posterior.mean - start for run in (plain, slow))
    torch.testing.assert_close(short[:made], 0.5 * way[:made], **EXACT)
    torch.testing.assert_close(short[made:], way[made:], **EXACT)


def test_a_control_variate_is_a_gradient_at_any_pace():
    """After one step from the same weights clients have met the same gradients, however far they went."""
    plain, slow = (
        learn(cs.SCAFFOLD(cs.SGD(lr=0.01, batch_size=20)), game(pace=pace), points(), rounds=1).server.c
        for pace in (1.0, 0.5)
    )
    torch.testing.assert_close(slow, plain, **EXACT)


# Wrong input


def with_batchnorm(which):
    generator, discriminator = players()
    broken = {
        "generator": (nn.Sequential(generator[0], nn.BatchNorm1d(3), *generator[1:]), discriminator),
        "discriminator": (generator, nn.Sequential(*discriminator[:2], nn.BatchNorm1d(4), *discriminator[2:])),
    }
    return broken[which]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda g, d: cs.Adversarial(nn.Linear(2, 2), d, latent=2),
            "the generator must be an nn.Sequential, whose outermost layer each sample has of its own",
        ),
        (
            lambda g, d: cs.Adversarial(g, nn.Flatten(), latent=2),
            "the discriminator must be an nn.Sequential, whose outermost layer each sample has of its own",
        ),
        (
            lambda g, d: cs.Adversarial(nn.Sequential(), d, latent=2),
            "the generator must be an nn.Sequential, whose outermost layer each sample has of its own",
        ),
        (
            lambda g, d: cs.Adversarial(g, d, latent=0),
            "latent, generators and discriminators must be at least 1 and pace positive, got 0, 1, 1 and 1.0",
        ),
        (
            lambda g, d: cs.Adversarial(g, d, latent=2, generators=0, pace=0.0),
            "latent, generators and discriminators must be at least 1 and pace positive, got 2, 0, 1 and 0.0",
        ),
        (
            lambda g, d: cs.Adversarial(g, d, latent=2, pace=math.nan),
            "latent, generators and discriminators must be at least 1 and pace positive, got 2, 1, 1 and nan",
        ),
    ],
)
def test_players_that_cannot_be_are_refused(make, sentence):
    with pytest.raises(TaskError) as error:
        make(*players())
    assert str(error.value) == sentence


def test_an_objective_without_a_sensible_penalty_is_refused():
    for kind in (cs.tasks.Wasserstein, cs.tasks.LeastSquares):
        with pytest.raises(ConfigError, match=r"penalty must be at least 0, got -1\.0"):
            kind(penalty=-1.0)


@pytest.mark.parametrize("which", ["generator", "discriminator"])
def test_batch_norm_is_refused_in_either_player(which):
    with pytest.raises(TaskError, match=r"BatchNorm1d.* keeps running statistics of its batches, which clients cannot"):
        cs.Adversarial(*with_batchnorm(which), latent=LATENT)


@pytest.mark.parametrize(
    ("task", "kind", "sentence"),
    [
        (game(IMAGE), DataError, r"the generator makes examples of shape \(1, 2, 2\); points has \(2,\)"),
        (
            cs.Adversarial(players()[0], players(IMAGE)[1], latent=LATENT),
            DataError,
            r"the discriminator cannot score examples of points, of shape \(2,\): .*",
        ),
        (
            cs.Adversarial(players()[0], nn.Sequential(nn.Linear(2, 3)), latent=LATENT),
            DataError,
            r"the discriminator cannot score examples of points, of shape \(2,\): .*",
        ),
        (
            cs.Adversarial(*players(), latent=LATENT + 1),
            TaskError,
            r"the generator cannot take noise of 3 numbers: .*",
        ),
    ],
    ids=["generator's shape", "discriminator's input", "discriminator's output", "noise"],
)
def test_networks_that_do_not_fit_the_data_are_refused_before_anyone_trains(task, kind, sentence, tmp_path):
    with pytest.raises(kind, match=f"^{sentence}$"):
        learn(cs.FedAvg(PLAY), task, points(), out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_data_without_examples_is_refused():
    nothing = cs.Dataset(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), name="nothing")
    with pytest.raises(DataError, match=r"^nothing has no examples$"):
        game().check(nothing)


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
    ],
    ids=lambda method: method.name,
)
def test_a_method_that_needs_a_likelihood_says_so(method):
    with pytest.raises(TaskError) as error:
        learn(method, game(), points(), rounds=1)
    assert str(error.value) == LIKELIHOOD


def test_an_ensemble_of_players_is_refused_with_a_sentence_or_learned():
    try:
        run = learn(cs.algorithms.Ensemble(PLAY), game(), points(), rounds=1)
    except TaskError:
        return
    assert run.sample(6).isfinite().all()


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


def test_f_needs_a_discriminator_whose_last_layer_is_linear():
    generator, discriminator = players()
    task = cs.Adversarial(generator, nn.Sequential(*discriminator, nn.Tanh()), latent=LATENT)
    with pytest.raises(TaskError, match=r"^the discriminator's last child must be an nn.Linear, not Tanh$"):
        learn(cs.EPGAN(), task, points(), rounds=1)
    learn(cs.algorithms.ProbGAN(PLAY), task, points(), rounds=1)  # who hears no f does not mind


# Who can learn it, and what comes of it


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
def test_whoever_needs_gradients_only_learns_it(method):
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
    run.evaluate(test.data)  # of nobody in particular
    torch.testing.assert_close(witness.seen[1], wanted, **EXACT)


def test_what_an_algorithm_appends_does_not_change_what_is_made():
    task = game()
    run = learn(cs.EPGAN(replace(PLAY, lr=0.0), hidden=3), task, points(), rounds=1)
    assert run.task.size > task.size
    start = task.prepare(dtype=torch.float64)
    x = points().data.x.double()
    torch.testing.assert_close(run.sample(9), start.generate(start.initial(), 9), **EXACT)
    torch.testing.assert_close(run.predict(x, point=True), start.predict(start.initial(), x), **EXACT)
    assert [name for name, _ in run.model.named_parameters()] == task.main.names


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"objective": cs.tasks.LeastSquares()}, r"task.objective is .*Wasserstein.* there and .*LeastSquares.* here"),
        ({"objective": cs.tasks.Wasserstein(penalty=1.0)}, r"task.objective is .*10.0.* there and .*1.0.* here"),
        ({"pace": 0.5}, r"task.pace is '1.0' there and '0.5' here"),
        ({"discriminators": 3}, r"task.parameters is \d+ there and \d+ here"),
    ],
    ids=["objective", "penalty", "pace", "discriminators"],
)
def test_a_run_goes_on_with_the_same_rules_only(other, difference, tmp_path):
    out = tmp_path / "run"
    learn(cs.FedAvg(PLAY), game(), points(), rounds=1, out=out)
    with pytest.raises(CheckpointError, match=f"holds another run: .*{difference}"):
        learn(cs.FedAvg(PLAY), game(**other), points(), rounds=2, out=out, resume=True)
    run = learn(cs.FedAvg(PLAY), game(), points(), rounds=2, out=out, resume=True)
    whole = learn(cs.FedAvg(PLAY), game(), points(), rounds=2)
    assert torch.equal(run.posterior.mean, whole.posterior.mean)


# Reports


def samples_of(page):
    """The section on samples, headings apart."""
    found = re.findall(r"<h2[^>]*>Samples</h2>(.*?)(?=<h2|$)", page, flags=re.DOTALL)
    assert len(found) == 1
    return found[0]


def test_the_report_of_points_shows_them_on_the_discriminator_s_map(tmp_path):
    out, test = tmp_path / "run", points((40, 30)).data
    run = learn(cs.FedGAN(PLAY), game(), points(), out=out, test=test)
    kept = run.evaluation.samples
    assert (kept["kind"], len(kept["generated"]), len(kept["real"])) == ("points", 64, 70)
    x = test.x
    torch.testing.assert_close(torch.tensor(kept["real"]), x, rtol=0, atol=1e-4)
    room = 0.2 * (x.max(0).values - x.min(0).values)
    torch.testing.assert_close(torch.tensor(kept["low"]), x.min(0).values - room, rtol=0, atol=1e-4)
    made = torch.tensor(kept["generated"]).double()
    torch.testing.assert_close(made, run.sample(64), rtol=0, atol=1e-4)
    low, high = (torch.tensor(kept[side]).double() for side in ("low", "high"))
    corner = low + (high - low) / 120  # the middle of the first of 60 × 60 cells
    torch.testing.assert_close(
        torch.tensor(kept["map"])[0, 0].double(), run.predict(corner[None], point=True)[0], rtol=0, atol=1e-3
    )
    assert json.loads((out / "evaluation.json").read_text())["samples"] == kept
    shown = samples_of(cs.write_report(out).read_text())
    assert "What the discriminator says" in shown
    assert "64 samples of the final generators" in shown
    assert "over 70 real examples." in shown
    assert shown.count("<img") == 1
    assert shown.count("<svg") == 1


def test_the_report_of_images_shows_generated_and_real_ones(tmp_path):
    made = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (20, 1, 2, 2), generator=made).to(torch.uint8)
    y = torch.zeros(20, dtype=torch.int64)
    data = cs.Dataset(x, y, scale=torch.tensor(1 / 127.5), shift=torch.tensor(-1.0), name="tiny images")
    out, federation = tmp_path / "run", cs.Federation.from_owner(data, torch.arange(20) % 2)
    run = learn(cs.FedGAN(PLAY), game(IMAGE), federation, out=out, test=data)
    assert run.sample(3).shape == (3, 1, 2, 2)
    kept = run.evaluation.samples
    assert (kept["kind"], kept["count"]) == ("images", 64)
    shown = samples_of(cs.write_report(out).read_text())
    assert shown.index(kept["generated"]) < shown.index(kept["real"])
    assert "64 samples of the final generators." in shown
    assert shown.count("<img") == 2


def test_what_is_neither_points_nor_images_has_no_section(tmp_path):
    x, out = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), tmp_path / "run"
    data = cs.Dataset(x, torch.zeros(12, dtype=torch.int64), name="numbers")
    federation = cs.Federation.from_owner(data, torch.arange(12) % 2)
    run = learn(cs.FedGAN(PLAY), game((4,)), federation, rounds=1, out=out, test=data)
    assert run.evaluation.samples is None
    assert ">Samples<" not in cs.write_report(out).read_text()
