"""Adversarial: two players in one vector, each with a loss of its own, and what can be done with what they learn."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core import keys
from consilience.core.errors import ConfigError, DataError, TaskError
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


def test_dropout_is_another_one_at_every_step_and_none_in_evaluation():
    task = game(dropout=0.4).prepare(dtype=torch.float64)
    theta, one = weights(task), batch_of()
    parts = task.split(theta)
    scores = [task.score_one(parts, one.x, key) for key in (torch.tensor(3), torch.tensor(4), None)]
    assert not torch.equal(scores[0], scores[1])
    torch.testing.assert_close(task.predict(theta, one.x), scores[2], **EXACT)
    torch.testing.assert_close(scores[2], ByHand(theta).score(one.x).detach(), **EXACT)


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
