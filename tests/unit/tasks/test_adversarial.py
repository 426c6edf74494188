"""Adversarial tasks: the losses of generators and discriminators, their samples, and wrong input."""

import math
import re

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
    players,
    points,
    rows_of,
    weights,
)


@pytest.mark.parametrize(
    ("objective", "counts", "shape"),
    [
        (cs.tasks.Wasserstein(), (3, 2), FLAT),
        (cs.tasks.Wasserstein(penalty=0.0), (1, 1), IMAGE),
        (cs.tasks.LeastSquares(), (3, 2), IMAGE),
        (cs.tasks.LeastSquares(penalty=2.0), (1, 1), FLAT),
    ],
    ids=str,
)
def test_each_network_has_its_own_gradient_and_the_value_is_the_discriminator_s(objective, counts, shape):
    generators, discriminators = counts
    task = game(shape, generators=generators, discriminators=discriminators, objective=objective)
    task = task.prepare(dtype=torch.float64)
    thetas, batches = [weights(task, seed) for seed in (5, 6)], [batch_of(shape=shape, key=key) for key in (3, 4)]
    alone = task.gradient()(*rows_of(thetas[0], batches[0]))
    stacked = tree_map(lambda *parts: torch.stack(parts), *batches)
    together = task.gradient()(torch.stack(thetas), stacked)
    for k in range(2):
        loss, g = both_gradients(task, ByHand(thetas[k], *counts, shape), batches[k])
        torch.testing.assert_close((together[0][k], together[1][k]), (g, loss), **NEARLY)
    torch.testing.assert_close(alone, (together[0][:1], together[1][:1]), **EXACT)


def test_discriminators_of_the_past_enter_the_generator_s_loss_alone():
    task = game().prepare(dtype=torch.float64)
    theta, batch = weights(task), batch_of()
    past = torch.randn(10, generator=torch.Generator().manual_seed(0)).double()
    loss, expected = both_gradients(task, ByHand(torch.cat([theta, past])), batch, past=True)
    (g,), (value,) = task.gradient(type(task).game_one)(*rows_of(theta, batch, past))
    torch.testing.assert_close((g, value), (expected, loss), **NEARLY)
    without = task.gradient()(*rows_of(theta, batch))[0][0]
    made = task.slice(MAIN).stop
    assert torch.equal(g[made:], without[made:])
    assert (g[:made] - without[:made]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("objective", "dropout"), [(cs.tasks.Wasserstein(), 0.4), (cs.tasks.LeastSquares(), 0.0)], ids=str
)
def test_rows_of_padding_change_nothing(objective, dropout):
    task = game(dropout=dropout, objective=objective).prepare(dtype=torch.float64)
    narrow, theta = batch_of(count=5, pad=0), weights(task)
    expected = task.gradient()(*rows_of(theta, narrow))
    for pad in (1, 7):
        x = torch.cat([narrow.x, torch.full((pad, 2), 1e3).double()])
        wide = cs.data.Batch(x, torch.zeros(5 + pad), (torch.arange(5 + pad) < 5).double(), narrow.key)
        torch.testing.assert_close(task.gradient()(*rows_of(theta, wide)), expected, **EXACT)


def test_dropout_differs_by_step_and_does_not_act_in_evaluation():
    task = game(dropout=0.4).prepare(dtype=torch.float64)
    theta, one = weights(task), batch_of()
    parts = task.split(theta)
    scores = [task.score_one(parts, one.x, key) for key in (torch.tensor(3), torch.tensor(4), None)]
    assert not torch.equal(scores[0], scores[1])
    torch.testing.assert_close(task.predict(theta, one.x), scores[2], **EXACT)
    torch.testing.assert_close(scores[2], ByHand(theta).score(one.x).detach(), **EXACT)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_example_i_comes_from_generator_i_mod_count(count):
    task = game(generators=count).prepare(dtype=torch.float64)
    theta, z = weights(task), torch.randn(11, LATENT).double()
    made = task.apply_one(theta, z)
    assert made.shape == (11, 2)
    torch.testing.assert_close(made, ByHand(theta, generators=count).make(z).detach(), **EXACT)


@pytest.mark.parametrize("count", [1, 7])
def test_the_first_examples_are_the_same_however_many_are_made(count):
    task = game(generators=count).prepare(dtype=torch.float64)
    theta = weights(task)
    most = task.generate(theta, 2100)
    for few in (1, 999, 1000, 1001):
        torch.testing.assert_close(task.generate(theta, few), most[:few], **EXACT)
    z = task.latents(keys.key(0, purpose="generate"), 2100)
    torch.testing.assert_close(most, task.apply_one(theta, z), **EXACT)  # in one go
    assert (task.generate(theta, 5, seed=1) - most[:5]).abs().max() > 0.01


def test_one_is_the_mean_over_samples_of_their_own_layers():
    task = game().prepare(dtype=torch.float64)
    theta = weights(task)
    named = by_parameter(task, theta)

    def own(part, count):
        kinds = ("weight", "bias")
        return [torch.stack([named[f"{part} heads.{i}.{kind}"] for i in range(count)]).mean(0) for kind in kinds]

    def shared(part):
        return [value for name, value in named.items() if name.startswith(part) and "heads." not in name]

    found = [*own(MAIN, 3), *shared(MAIN), *shared(TRUNK), *own(HEADS, 2)]
    wanted = torch.cat([value.flatten() for value in found])
    torch.testing.assert_close(task.one(theta), wanted, **EXACT)
    assert len(wanted) == 6 + 3 + 6 + 2 + 8 + 4 + 4 + 1
    beyond = torch.cat([theta, torch.ones(4).double()])  # with parameters that an algorithm appends
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
    assert torch.equal(torch.get_rng_state(), before)  # no random generator was used


def test_further_samples_are_drawn_with_the_mean_and_deviation_of_the_first():
    layer = nn.Linear(50, 40)
    nn.init.normal_(layer.weight, 3.0, 0.2, generator=torch.Generator().manual_seed(0))
    nn.init.zeros_(layer.bias)  # a hash of all weights seeds the draws
    for head in Heads(layer, 4).heads[1:]:
        torch.testing.assert_close(head.weight.mean(), torch.tensor(3.0), rtol=0, atol=0.02)
        torch.testing.assert_close(head.weight.std(), torch.tensor(0.2), rtol=0.06, atol=0)


@pytest.mark.parametrize("counts", [(1, 1), (2, 3)], ids=str)
def test_the_same_players_can_have_other_numbers_of_samples(counts):
    options = {"objective": cs.tasks.LeastSquares(), "pace": 0.5}
    made = game(**options).with_samples(*counts)
    expected = game(generators=counts[0], discriminators=counts[1], **options)
    assert torch.equal(made.initial(), expected.initial())
    assert made.settings() == expected.settings()
    assert str(made.module) == str(expected.module)
    assert (made.latent, made.generators, made.discriminators) == (LATENT, *counts)
    x = points().data.x
    torch.testing.assert_close(made.predict(made.initial(), x), expected.predict(expected.initial(), x))


@pytest.mark.parametrize(
    ("chain", "pace"), [(cs.SGD(lr=0.01, batch_size=20), 0.25), (cs.optim.Adam(lr=0.01, batch_size=20), 4.0)], ids=str
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


SEQUENTIAL = "the {} must be an nn.Sequential: every sample has its own outermost layer"
NUMBERS = "latent, generators and discriminators must be at least 1 and pace positive, got {}"
STATISTICS = "layer '{}' (BatchNorm1d) makes a discriminator's score depend on the batch"
NORM = nn.BatchNorm1d(3)
OWN = "layer '{}' (BatchNorm1d) is in the generator's first child, of which every sample has its own"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g, d: cs.Adversarial(nn.Linear(2, 2), d, latent=2), SEQUENTIAL.format("generator")),
        (lambda g, d: cs.Adversarial(g, nn.Flatten(), latent=2), SEQUENTIAL.format("discriminator")),
        (lambda g, d: cs.Adversarial(nn.Sequential(), d, latent=2), SEQUENTIAL.format("generator")),
        (lambda g, d: cs.Adversarial(g, d, latent=0), NUMBERS.format("0, 1, 1 and 1.0")),
        (lambda g, d: cs.Adversarial(g, d, latent=2, generators=0, pace=0.0), NUMBERS.format("2, 0, 1 and 0.0")),
        (lambda g, d: cs.Adversarial(g, d, latent=2, pace=math.nan), NUMBERS.format("2, 1, 1 and nan")),
        (
            lambda g, d: cs.Adversarial(nn.Sequential(nn.Sequential(g[0], nn.BatchNorm1d(3))), d, latent=2),
            OWN.format("1"),
        ),
        (lambda g, d: cs.Adversarial(g, d.insert(2, nn.BatchNorm1d(4)), latent=2), STATISTICS.format("2")),
    ],
)
def test_impossible_games_are_refused(make, message):
    with pytest.raises(TaskError, match=f"^{re.escape(message)}"):
        make(*players())


def test_an_objective_without_a_sensible_penalty_is_refused():
    for kind in (cs.tasks.Wasserstein, cs.tasks.LeastSquares):
        with pytest.raises(ConfigError, match=r"penalty must be at least 0, got -1\.0"):
            kind(penalty=-1.0)


SCORE = "the discriminator cannot score examples of points, of shape (2,): "


@pytest.mark.parametrize(
    ("task", "kind", "message"),
    [
        (game(IMAGE), DataError, "the generator makes examples of shape (1, 2, 2); points has (2,)"),
        (cs.Adversarial(players()[0], players(IMAGE)[1], latent=LATENT), DataError, SCORE),
        (cs.Adversarial(players()[0], nn.Sequential(nn.Linear(2, 3)), latent=LATENT), DataError, SCORE),
        (cs.Adversarial(*players(), latent=LATENT + 1), TaskError, "the generator cannot take noise of 3 numbers: "),
    ],
    ids=["generator's shape", "discriminator's input", "discriminator's output", "noise"],
)
def test_networks_that_do_not_fit_the_data_are_refused(task, kind, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}"):
        task.check(points().data)


def test_data_without_examples_is_refused():
    nothing = cs.Dataset(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), name="nothing")
    with pytest.raises(DataError, match=r"^nothing has no examples$"):
        game().check(nothing)
