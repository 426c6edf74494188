"""p(D_k|θ) times a cavity, where the answer is known."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core import guards, keys
from consilience.core.errors import ConfigError
from consilience.core.records import rows
from support.scenarios import SIZES, linear

EXACT = {"rtol": 1e-9, "atol": 1e-9}
ORDER = torch.tensor(SIZES).argsort(descending=True)
K, P = len(SIZES), 4


def cohort_of(federation, ids=None, round_size=K):
    ids = federation.sizes.argsort(descending=True, stable=True) if ids is None else ids
    return cs.data.Cohort(federation, ids, round=1, round_size=round_size, seed=0, dtype=torch.float64)


def line(noise=1.0):
    task, federation = linear()
    task = cs.Regression(task.module, noise=noise).prepare(dtype=torch.float64)
    return task, cohort_of(federation)


def own(cohort, k):
    """Design matrix and targets of the k-th client of a cohort."""
    data, start, stop = cohort.federation.data, *cohort.federation.offsets[cohort.ids[k] : cohort.ids[k] + 2]
    chosen = cohort.federation.order[start:stop]
    x = data.x[chosen].double()
    return torch.cat([x, torch.ones(len(x), 1).double()], 1), data.y[chosen].double()[:, 0]


def cavity_of(form, clients=K, size=P, seed=0):
    made = torch.Generator().manual_seed(seed)
    mean = torch.randn(clients, size, generator=made, dtype=torch.float64)
    root = torch.randn(clients, size, size, generator=made, dtype=torch.float64)
    lam = root @ root.mT + torch.eye(size, dtype=torch.float64)
    diagonal = lam.diagonal(dim1=1, dim2=2)
    return cs.Gaussian.of(mean, {"full": lam, "diagonal": diagonal, "scalar": diagonal[:, :1]}[form])


def exact(cohort, cavity, k, noise=1.0):
    """The posterior of one client's line under its cavity."""
    x, y = own(cohort, k)
    return rows(cavity, k) * cs.Gaussian(x.mT @ y / noise**2, x.mT @ x / noise**2)


forms = pytest.mark.parametrize("form", ["scalar", "diagonal", "full"])


@forms
@pytest.mark.parametrize("batch", [1024, 2])
def test_newton_is_exact_for_a_line_in_one_step(form, batch):
    task, cohort = line(noise=0.5)
    cavity, start = cavity_of(form), torch.full((P,), 7.0, dtype=torch.float64)
    tilted = cs.inference.Newton(steps=1, batch_size=batch)(task, cavity, start, cohort)
    for k in range(K):
        posterior = exact(cohort, cavity, k, noise=0.5)
        torch.testing.assert_close(tilted.mean[k], posterior.mean, **EXACT)
        torch.testing.assert_close(tilted.lam[k].inverse(), posterior.lam.inverse(), **EXACT)


@forms
def test_diagonal_newton_keeps_the_mean_and_every_variance(form):
    task, cohort = line()
    cavity = cavity_of(form)
    whole, marginals = (
        cs.inference.Newton(diagonal=d)(task, cavity, torch.zeros(P).double(), cohort) for d in (False, True)
    )
    assert whole.full
    assert not marginals.full
    torch.testing.assert_close(marginals.mean, whole.mean, **EXACT)
    for k in range(K):
        torch.testing.assert_close(marginals.variance[k], exact(cohort, cavity, k).lam.inverse().diagonal(), **EXACT)


def coins(features=3, seed=2):
    """Biased coins, some of whose clients have seen one side only."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(SIZES), features, generator=made)
    y = (torch.rand(len(x), 1, generator=made) < (2 * x[:, :1] - 0.5).sigmoid()).float()
    owner = torch.arange(K).repeat_interleave(torch.tensor(SIZES))
    federation = cs.Federation.from_owner(cs.Dataset(x, y), owner)
    return cs.MultiLabel(nn.Linear(features, 1)).prepare(dtype=torch.float64), cohort_of(federation)


@forms
def test_newton_finds_where_a_logistic_posterior_is_flat_and_how_it_curves_there(form):
    task, cohort = coins()
    cavity = cavity_of(form)
    tilted = cs.inference.Newton()(task, cavity, torch.zeros(P).double(), cohort)
    for k in range(K):
        x, y = own(cohort, k)
        theta = tilted.mean[k]
        p = (x @ theta).sigmoid()
        slope = x.mT @ (p - y) + rows(cavity, k).energy_gradient(theta)
        assert float(slope.abs().max()) < 1e-9
        prior = rows(cavity, k).lam if form == "full" else rows(cavity, k).lam.expand(P).diag()
        torch.testing.assert_close(tilted.lam[k], (x.mT * (p * (1 - p))) @ x + prior, **EXACT)


expansions = []


class Watched(cs.inference.Newton):
    def _expand(self, task, theta, cohort):
        expansions.append(theta)
        return super()._expand(task, theta, cohort)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_newton_stops_when_nobody_moves(dtype):
    expansions.clear()
    task, federation = linear()
    cohort = cs.data.Cohort(federation, ORDER, round=1, round_size=K, seed=0, dtype=dtype)
    cavity = cs.Gaussian(*(leaf.to(dtype) for leaf in (cavity_of("full").eta, cavity_of("full").lam)))
    Watched(steps=30)(task.prepare(dtype=dtype), cavity, torch.zeros(P, dtype=dtype), cohort)
    assert 2 <= len(expansions) <= 4  # one that arrives, one that sees it, and rounding


CHAIN = cs.SGD(lr=0.02, epochs=4, batch_size=100, weight_decay=0.3)
BY_SGD = [
    cs.inference.Identity(CHAIN, scale=0.7),
    cs.inference.MCMC(CHAIN, scale=0.7),
    cs.inference.Laplace(CHAIN, epochs=1),
    cs.inference.NGVI(CHAIN, epochs=1, samples=1),
]
by_sgd = pytest.mark.parametrize("infer", BY_SGD, ids=lambda infer: infer.letter)


@by_sgd
@pytest.mark.parametrize("form", ["scalar", "diagonal"])
def test_the_mean_is_that_of_the_epochs_on_the_way_to_the_tilted_one(infer, form):
    task, cohort = line(noise=1.5)
    cavity, start = cavity_of(form), torch.full((P,), 0.5, dtype=torch.float64)
    tilted = infer(task, cavity, start, cohort)
    unit = torch.eye(P, dtype=torch.float64)
    for k in range(K):
        n = float(cohort.n[k])
        decay = cs.Gaussian(torch.zeros(P).double(), torch.full((1,), 0.3 * n, dtype=torch.float64))
        target = exact(cohort, cavity, k, noise=1.5) * decay
        # Full-batch descent of a quadratic: θ_t − θ* = (1 − lr H/n)^t (θ_0 − θ*).
        shrink = unit - CHAIN.lr / n * target.lam
        ways = [torch.linalg.matrix_power(shrink, t) @ (start - target.mean) for t in range(1, CHAIN.epochs + 1)]
        torch.testing.assert_close(tilted.mean[k], target.mean + sum(ways) / CHAIN.epochs, **EXACT)


@pytest.mark.parametrize("form", ["scalar", "diagonal"])
def test_identity_adds_the_same_precision_for_every_example(form):
    task, cohort = line()
    cavity = cavity_of(form)
    tilted = cs.inference.Identity(CHAIN, scale=0.7)(task, cavity, torch.zeros(P).double(), cohort)
    torch.testing.assert_close(tilted.lam, cavity.lam + 0.7 * torch.tensor(SIZES).double()[ORDER].unsqueeze(1), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identity_refines_the_mean_and_never_the_precision(dtype):
    task, federation = linear()
    cohort = cs.data.Cohort(federation, ORDER, round=1, round_size=K, seed=0, dtype=dtype)
    infer, n = cs.inference.Identity(scale=0.1), torch.tensor(SIZES, dtype=dtype)[ORDER].unsqueeze(1)
    start = torch.full((P,), 1 / 3, dtype=dtype)
    q = infer.site(start, n.sum().view(1))
    tilted = infer(task.prepare(dtype=dtype), q / infer.site(start, n), start, cohort)
    delta = infer.refinement(tilted, q)
    assert torch.equal(delta.lam, torch.zeros(K, 1, dtype=dtype))
    torch.testing.assert_close((tilted / q).lam, delta.lam, rtol=0, atol=1e-5)
    assert torch.equal(delta.eta, (tilted / q).eta)
    assert bool((delta.eta != 0).any(1).all())


def scatter(infer, task, cavity, start, cohort):
    iterates = infer.train.iterates(task.gradient(), start, cohort, prior=cavity ** (1 / cohort.n))
    return torch.stack([sample.clone() for sample in iterates]).var(0)


def wide(features=9):
    """Enough coordinates for an outlier, one of which is: a feature that is hardly ever seen."""
    task, federation = linear(sizes=(40, 25, 9), names=None, features=features)
    federation.data.x[:, 0] *= 0.03
    return task.prepare(dtype=torch.float64), cohort_of(federation)


def test_mcmc_s_precision_is_as_long_as_identity_s_and_as_uneven_as_the_samples():
    task, cohort = wide()
    infer = cs.inference.MCMC(cs.SGD(lr=0.1, epochs=5, batch_size=5), scale=0.7)
    cavity, start = cavity_of("diagonal", 3, task.size), torch.zeros(task.size).double()
    tilted = infer(task, cavity, start, cohort)
    identity = cs.inference.Identity(infer.train, scale=0.7)(task, cavity, start, cohort)
    torch.testing.assert_close(tilted.lam.norm(dim=1), identity.lam.norm(dim=1), **EXACT)
    variances = scatter(infer, task, cavity, start, cohort)
    by_samples = tilted.variance.gather(1, variances.argsort(1))
    assert bool((by_samples.diff(dim=1) >= -1e-15).all())
    assert bool((by_samples[:, -1] > 1.5 * by_samples[:, 0]).all())


def test_mcmc_limits_precisions_to_two_deviations():
    task, cohort = wide()
    infer = cs.inference.MCMC(cs.SGD(lr=0.1, epochs=5, batch_size=5), scale=0.7, shrink=1e-3)
    cavity, start = cavity_of("scalar", 3, task.size), torch.zeros(task.size).double()
    tilted = infer(task, cavity, start, cohort)
    raw = 1 / (1e-3 + (1 - 1e-3) * scatter(infer, task, cavity, start, cohort))
    middle, spread = raw.mean(1, keepdim=True), raw.var(1, correction=0, keepdim=True).sqrt()
    clipped = raw.clamp(middle - 2 * spread, middle + 2 * spread)
    assert bool((clipped != raw).any())
    shape = tilted.lam / tilted.lam.norm(dim=1, keepdim=True)
    torch.testing.assert_close(shape, clipped / clipped.norm(dim=1, keepdim=True), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "chain",
    [cs.optim.SGLD(lr=0.06, epochs=600), cs.optim.SGHMC(lr=0.03, friction=0.3, epochs=600)],
    ids=["SGLD", "SGHMC"],
)
def test_a_true_sampler_s_variances_are_the_exact_ones(chain):
    clients, n = 40, 12  # all with the same data: independent chains of one posterior
    task, federation = linear(sizes=(n,), names=None)
    x, y = (t.repeat(clients, 1) for t in (federation.data.x, federation.data.y))
    same = cs.Federation.from_owner(cs.Dataset(x, y), torch.arange(clients).repeat_interleave(n))
    cohort = cohort_of(same, round_size=clients)
    one = cavity_of("diagonal", 1)
    cavity = cs.Gaussian(one.eta.expand(clients, -1), one.lam.expand(clients, -1))
    posterior = exact(cohort, cavity, 0)
    infer = cs.inference.MCMC(replace(chain, batch_size=n), shrink=1e-9, rescale=False)
    tilted = infer(task.prepare(dtype=torch.float64), cavity, posterior.mean, cohort)
    torch.testing.assert_close(tilted.variance.mean(0), posterior.variance, rtol=0.12, atol=0)
    torch.testing.assert_close(tilted.mean.mean(0), posterior.mean, rtol=0, atol=0.05)


def test_mcmc_counts_precisions_that_would_take_information_out():
    task, cohort = wide()
    cavity = cavity_of("diagonal", 3, task.size)
    infer = cs.inference.MCMC(cs.SGD(lr=0.1, epochs=5, batch_size=5), scale=0.01)
    with guards.watch() as counts:
        tilted = infer(task, cavity, torch.zeros(task.size).double(), cohort)
    assert int(counts["precision below the cavity's"]) == int((tilted.lam < cavity.lam).sum()) > 0


def information(tilted, cavity, cohort, infer):
    """F, taken out of κ n (F + wd) + Λ₋ₖ."""
    return (tilted.lam - cavity.lam) / (infer.kappa * cohort.n) - infer.train.weight_decay


STILL = cs.SGD(lr=0.0, weight_decay=0.002)  # leaves the mean at the start


def test_laplace_finds_the_squares_of_a_line_s_inputs():
    task, federation = linear(sizes=(150, 60), names=None)
    task, cohort = cs.Regression(task.module, noise=0.5).prepare(dtype=torch.float64), cohort_of(federation)
    cavity = cavity_of("diagonal", 2)
    infer = cs.inference.Laplace(cs.SGD(weight_decay=0.1), kappa=3.0, epochs=15, clip=False)
    tilted = infer(task, cavity, torch.zeros(P).double(), cohort)
    for k in range(2):
        squares = own(cohort, k)[0].square().mean(0) / 0.25
        torch.testing.assert_close(information(tilted, cavity, cohort, infer)[k], squares, rtol=0.2, atol=0)


def test_laplace_s_clip_limits_the_information_to_two_deviations():
    task, federation = linear(sizes=(40, 25, 9), names=None, features=9)
    federation.data.x[:, 2] *= 10
    task, cohort = task.prepare(dtype=torch.float64), cohort_of(federation)
    cavity = cavity_of("diagonal", 3, 10)
    open_, clipped = (
        information(infer(task, cavity, torch.zeros(10).double(), cohort), cavity, cohort, infer)
        for infer in (cs.inference.Laplace(cs.SGD(lr=1e-3), epochs=2, clip=clip) for clip in (False, True))
    )
    most = open_.mean(1) + 2 * open_.var(1, correction=0).sqrt()
    torch.testing.assert_close(clipped[:, 2], most, rtol=1e-8, atol=0)
    assert bool((open_[:, 2] > most).all())
    others = torch.arange(10) != 2
    torch.testing.assert_close(clipped[:, others], open_[:, others], **EXACT)


def test_ngvi_s_clip_limits_the_information_of_every_batch():
    task, federation = linear(sizes=(40,), names=None, features=9)
    federation.data.x[:, 2] *= 10
    task, cohort = task.prepare(dtype=torch.float64), cohort_of(federation)
    cavity, theta = cavity_of("diagonal", 1, 10), torch.zeros(1, 10).double()
    how = {"epochs": 2, "batch_size": 8, "samples": 1, "beta": 0.9}
    open_, clipped = (
        cs.inference.NGVI(STILL, **how, clip=clip).curvature(task, cavity, theta, cohort)[0] for clip in (False, True)
    )
    expected = torch.zeros(10).double()
    for epoch in range(2):
        for _, batch in cohort.epoch(STILL.epochs + epoch, 8):
            one = relabelled(task, theta, batch, draws=1)[0]
            deviation = one.var(correction=0).sqrt()
            expected = 0.9 * expected + 0.1 * one.clamp(one.mean() - 2 * deviation, one.mean() + 2 * deviation)
    torch.testing.assert_close(clipped, expected, **EXACT)
    assert float(clipped[2]) < 0.9 * float(open_[2])


def test_laplace_sees_augmented_inputs_if_it_is_told_to():
    """Flipped images have their light columns on either side; a crop that evaluation takes has them on one."""
    x = torch.zeros(60, 1, 1, 2)
    x[..., 0] = 1.0
    federation = cs.Federation.from_owner(cs.Dataset(x, torch.arange(60) % 2), torch.zeros(60, dtype=torch.int64))
    flip = cs.data.Flip()
    task = cs.Classification(nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)), augment=flip)
    task = task.prepare(dtype=torch.float64)
    cohort = cs.data.Cohort(
        federation, torch.tensor([0]), round=1, round_size=1, seed=0, dtype=torch.float64, augment=flip
    )
    theta = torch.zeros(1, 4).double()
    for augmented, expected in ((False, [0.25, 0.0]), (True, [0.125, 0.125])):
        infer = cs.inference.Laplace(STILL, epochs=10, clip=False, augmented=augmented)
        got = infer.curvature(task, cavity_of("diagonal", 1, 4), theta, cohort)[0]
        torch.testing.assert_close(got, torch.tensor(2 * expected).double(), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    "infer", [cs.inference.MCMC(), cs.inference.Laplace(), cs.inference.NGVI()], ids=lambda infer: infer.letter
)
def test_a_model_may_have_one_parameter(infer):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 1, generator=generator)
    federation = cs.Federation.from_owner(cs.Dataset(x, 2 * x), torch.arange(20) % 3)
    task = cs.Regression(nn.Linear(1, 1, bias=False)).prepare(dtype=torch.float64)
    tilted = infer(task, cavity_of("diagonal", 3, 1), torch.zeros(1).double(), cohort_of(federation))
    assert bool(tilted.mean.isfinite().all())
    assert bool((tilted.lam > 0).all())


def relabelled(task, theta, batch, draws):
    """The mean information over draws of the labels, as NGVI draws them."""
    batches = [dataclasses.replace(batch, key=keys.fold(batch.key, f"draw {d}")) for d in range(draws)]
    return sum(task.fisher(theta, one) for one in batches) / draws


def test_ngvi_s_information_is_a_running_average_over_batches():
    task, cohort = line()
    infer = cs.inference.NGVI(CHAIN, kappa=2.0, epochs=3, batch_size=5, samples=3, beta=0.8)
    cavity = cavity_of("diagonal")
    got = information(infer(task, cavity, torch.zeros(P).double(), cohort), cavity, cohort, infer)
    expected, anywhere = torch.zeros(K, P).double(), torch.full((K, P), 0.123, dtype=torch.float64)
    for epoch in range(3):  # a line curves the same everywhere, so draws of θ do not matter
        for k, batch in cohort.epoch(CHAIN.epochs + epoch, 5):
            expected[:k] = 0.8 * expected[:k] + 0.2 * relabelled(task, anywhere[:k], batch, draws=3)
    torch.testing.assert_close(got, expected, **EXACT)


def test_ngvi_s_information_begins_at_nothing_and_grows_to_that_of_the_data():
    task, federation = linear(sizes=(2000,), names=None)
    task, cohort = task.prepare(dtype=torch.float64), cohort_of(federation)
    cavity = cavity_of("scalar", 1)
    squares = own(cohort, 0)[0].square().mean(0)
    for steps in (1, 12):
        infer = cs.inference.NGVI(cs.SGD(), epochs=steps, batch_size=2000, samples=1, beta=0.9)
        got = information(infer(task, cavity, torch.zeros(P).double(), cohort), cavity, cohort, infer)[0]
        torch.testing.assert_close(got, (1 - 0.9**steps) * squares, rtol=0.15, atol=0)


@pytest.mark.parametrize("precision", [1e12, 1.0])
def test_ngvi_averages_curvature_over_the_belief(precision):
    made = torch.Generator().manual_seed(0)
    x = torch.where(torch.rand(500, 1, generator=made) < 0.5, -2.0, 2.0)
    federation = cs.Federation.from_owner(cs.Dataset(x, (x > 0).float()), torch.zeros(500, dtype=torch.int64))
    task, cohort = cs.MultiLabel(nn.Linear(1, 1, bias=False)).prepare(dtype=torch.float64), cohort_of(federation)
    cavity = cs.Gaussian.of(torch.zeros(1, 1).double(), torch.full((1, 1), precision, dtype=torch.float64))
    infer = cs.inference.NGVI(STILL, kappa=1e9, epochs=1, batch_size=500, samples=300, beta=0.5)
    got = float(information(infer(task, cavity, torch.zeros(1).double(), cohort), cavity, cohort, infer))
    theta = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    spread = (precision + 500 * 0.002) ** -0.5  # before the first batch F is 0
    belief = (-0.5 * theta.square()).exp() / (2 * torch.pi) ** 0.5 * 16 / 4000
    p = (2 * spread * theta).sigmoid()
    expected = 0.5 * float((belief * p * (1 - p) * 4).sum())
    assert got == pytest.approx(expected, rel=0.08)
    assert (got < 0.5 * 0.25 * 4 * 0.95) is (precision < 1e12)


def test_ngvi_of_a_sharp_belief_is_the_information_at_its_mean():
    task, cohort = coins()
    start = torch.tensor([0.5, -1.0, 0.2, 0.1], dtype=torch.float64)
    cavity = cs.Gaussian.of(start.expand(K, -1).contiguous(), torch.full((K, 1), 1e16, dtype=torch.float64))
    infer = cs.inference.NGVI(STILL, epochs=1, batch_size=100, samples=2, beta=0.0)
    (_, batch), *_ = cohort.epoch(STILL.epochs, 100)
    expected = relabelled(task, start.expand(K, -1), batch, draws=2)
    torch.testing.assert_close(infer.curvature(task, cavity, start.expand(K, -1), cohort), expected, rtol=1e-6, atol=0)


SHORT = cs.SGD(lr=0.05, epochs=2, batch_size=4, momentum=0.9, weight_decay=0.01)
EVERY = {
    "Identity": cs.inference.Identity(SHORT),
    "MCMC": cs.inference.MCMC(SHORT),
    "MCMC by SGLD": cs.inference.MCMC(cs.optim.SGLD(lr=0.05, epochs=3, batch_size=4), rescale=False),
    "MCMC by SGHMC": cs.inference.MCMC(cs.optim.SGHMC(lr=0.05, epochs=3, batch_size=4)),
    "Laplace": cs.inference.Laplace(SHORT, batch_size=4),
    "NGVI": cs.inference.NGVI(SHORT, batch_size=4),
    "Newton": cs.inference.Newton(batch_size=4),
    "diagonal Newton": cs.inference.Newton(batch_size=4, diagonal=True),
}
every = pytest.mark.parametrize("infer", EVERY.values(), ids=EVERY.keys())


@every
def test_a_cohort_is_its_clients_one_by_one_and_arguments_stay_unchanged(infer):
    task, cohort = coins()
    cavity, start = cavity_of("diagonal"), torch.full((P,), 0.1, dtype=torch.float64)
    together = infer(task, cavity, start, cohort)
    for k in range(K):
        alone = infer(task, rows(cavity, slice(k, k + 1)), start, cohort_of(cohort.federation, cohort.ids[k : k + 1]))
        torch.testing.assert_close(together.eta[k], alone.eta[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(together.lam[k], alone.lam[0], rtol=1e-10, atol=1e-10)
    assert torch.equal(cavity.eta, cavity_of("diagonal").eta)
    assert torch.equal(start, torch.full((P,), 0.1, dtype=torch.float64))


@every
def test_unseen_examples_are_worth_as_much_together_as_apart(infer):
    start, n = torch.randn(P).double(), torch.tensor([[3.0], [5.0], [4.0]], dtype=torch.float64)
    together = infer.site(start, n.sum().view(1))
    apart = infer.site(start, n)
    torch.testing.assert_close(apart.product().eta, together.eta, **EXACT)
    torch.testing.assert_close(apart.product().lam, together.lam, **EXACT)
    if not isinstance(infer, cs.inference.Newton):
        torch.testing.assert_close(apart.mean, start.expand(3, -1), **EXACT)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (cs.inference.Identity, {"scale": 0.0}, "Identity: scale must be above 0, got 0.0"),
        (cs.inference.MCMC, {"train": cs.SGD(epochs=1)}, "a variance needs epochs of at least 2, got 1"),
        (cs.inference.MCMC, {"train": cs.SGD(epochs=5, mixed=True)}, "epochs of at least 2, got mixed ones"),
        (cs.inference.MCMC, {"shrink": 0.0}, "MCMC: shrink must be above 0, got 0.0"),
        (cs.inference.Laplace, {"kappa": 0.0}, "Laplace: kappa must be above 0, got 0.0"),
        (cs.inference.Laplace, {"s0": 0.0}, "s0 or weight_decay must be above 0"),
        (cs.inference.Laplace, {"epochs": 0}, "Laplace: epochs must be at least 1, got 0"),
        (cs.inference.NGVI, {"samples": 0}, "NGVI: samples must be at least 1, got 0"),
        (cs.inference.NGVI, {"beta": 1.0}, "NGVI: beta must be below 1, got 1.0"),
        (cs.inference.Newton, {"steps": 0}, "Newton: steps must be at least 1, got 0"),
        (cs.inference.Newton, {"tolerance": -1.0}, "Newton: tolerance must be at least 0, got -1.0"),
    ],
)
def test_settings_out_of_bounds_are_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)
