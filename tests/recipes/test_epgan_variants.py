"""Variants of EP-GAN: the spring is FedProx, and the printed fusion counts shared factors once a client."""

from __future__ import annotations

import pytest
import torch

import consilience as cs
from consilience.core.gaussian import Gaussian
from consilience.core.records import leaves, rows
from consilience.recipes.epgan_variants import InitialAnchor, MeanOnly, PixelPenalty, Printed, Spring
from support.epgan import P0, SCALE, SGD, WEIGHTS, adapted, assert_same, epgan, factors, fused, started
from support.games import EXACT, by_parameter, game, group, learn, points, weights


def printed(**options):
    return Printed(SGD, **{"hidden": 3, "scale": SCALE, "critic_steps": None} | options)


def test_without_a_signal_every_sample_is_pulled_to_the_mean_of_the_averaged_samples():
    """Of one step, what is not the game's is −lr λ (θ − centre)/scale², for every sample with the same centre."""
    train, strength, ways = cs.SGD(lr=0.01, batch_size=20), 0.7, []
    for one in (0.0, strength):
        method = Spring(train, scale=SCALE, history=False, strength=one, critic_steps=None)
        task = adapted(method)
        server, states = started(method, task, theta=weights(task))
        update, state = method.local(task, method.message(server, None), states, group(points()))
        assert not any(value.any() for _, value in leaves((update.site, state)))
        ways.append(update.change.mean.theta)
    named = by_parameter(task, weights(task))
    centre = dict(named)
    for heads in ("main heads", "heads heads"):
        for what in ("weight", "bias"):
            own = [name for name in named if name.startswith(heads) and name.endswith(what)]
            centre |= dict.fromkeys(own, torch.stack([named[name] for name in own]).mean(0))
    off = torch.cat([(named[name] - centre[name]).flatten() for name in named])
    assert off.any()
    torch.testing.assert_close(ways[1] - ways[0], (-0.01 * strength * off / SCALE**2).expand(3, -1), **EXACT)


def test_a_spring_with_one_sample_of_each_player_is_fedprox():
    spring = Spring(SGD, history=False, strength=0.02, scale=0.1, critic_steps=None)
    prox = cs.FedProx(SGD, mu=2.0)  # λ/scale²
    one = {"generators": 1, "discriminators": 1}
    ours, theirs = (learn(method, game(**one), points()).posterior.mean for method in (spring, prox))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_an_initial_anchor_stays_where_the_networks_began():
    run = learn(InitialAnchor(SGD, hidden=3, scale=SCALE), game(), points(), debug=True)
    sites = run.states.gather(torch.arange(3)).product()
    wanted = sites * Gaussian.of(run.task.one(run.task.initial()), P0)
    assert_same(run.algorithm.prior(run.task, run.server), wanted)
    assert not torch.equal(run.posterior.mean, run.task.initial())


def test_sites_with_the_mean_only_have_one_precision_below_p0_s():
    run = learn(MeanOnly(SGD, scale=SCALE, damping=1.0, critic_steps=None), game(), points(), rounds=1)
    lam = run.states.gather(torch.arange(3)).lam
    torch.testing.assert_close(lam, lam[..., :1].expand_as(lam))
    assert bool((lam < SCALE**-2).all())
    assert bool((lam >= SCALE**-2 / 2 - 1e-9).all())


def test_the_authors_penalty_is_on_the_sum_of_all_heads_and_by_pixel():
    gradient = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    found = PixelPenalty(heads=4).excess(gradient)
    norms = torch.stack([(4 * gradient[:, :, i, j]).norm(dim=1) for i in range(4) for j in range(4)], 1)
    torch.testing.assert_close(found, (norms - 1).square().mean(1), rtol=1e-6, atol=1e-6)
    points_of = PixelPenalty(heads=1).excess(gradient[:, :2, 0, 0])
    torch.testing.assert_close(points_of, cs.tasks.Wasserstein().excess(gradient[:, :2, 0, 0]))
    task = game(objective=PixelPenalty(heads=2))
    assert learn(cs.FedGAN(SGD), task, points(), rounds=1).posterior.mean.isfinite().all()


@pytest.mark.parametrize("clients", [2, 5])
def test_as_printed_shared_factors_are_counted_once_for_each_client_every_round(clients):
    """Λ ← K Λ + Σ Λ_k: after t rounds K^t times the prior's precision, and the likelihoods several times."""
    method = printed()
    task = adapted(method)
    server, _ = started(method, task, clients)
    p0 = method.prior(task, server)
    assert_same(p0, Gaussian.of(task.one(task.initial()), P0))
    likelihoods = factors(clients, 1, WEIGHTS, seed=2)
    for number in range(1, 5):
        q = method.prior(task, server)
        server = fused(method, task, server, [q * rows(likelihoods, k) for k in range(clients)])
        often = (clients**number - 1) / (clients - 1)
        assert_same(method.prior(task, server), p0**clients**number * likelihoods.product() ** often)


def test_as_printed_variances_shrink_with_every_round_and_with_sites_they_do_not():
    federation = points((6, 6))
    shrinking, steady = (
        [line["sites_precision"] for line in learn(method, game(), federation, rounds=4, debug=True).history]
        for method in (printed(), epgan())
    )
    assert all(precision >= 2**number for number, precision in enumerate(shrinking, 1))
    assert shrinking[-1] / shrinking[-2] == pytest.approx(2, rel=0.2)
    assert max(steady) < 1


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (Spring(), "EP-ProbGAN, f = 0"),
        (Spring(history=False), "EP-BGAN, f = 0"),
        (printed(), "EP-ProbGAN, printed"),
        (printed(components=2), "Mixture-EP-ProbGAN, printed"),
    ],
)
def test_variants_have_names_of_their_own(method, name):
    assert method.name == name
