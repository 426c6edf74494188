"""PVI, BayesADMM and FedLap, whose servers hold the product of sites, where the posterior of all data is known."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import consilience as cs
from consilience.algorithms import PVI, AsynchronousPVI, BayesADMM, FedLap, FedLapCov, bayes_admm
from consilience.core import guards
from consilience.core.errors import ConfigError
from consilience.core.records import leaves, rows
from support.scenarios import likelihood, linear

NEWTON = cs.inference.Newton(steps=1)
ENGINE = cs.Simulator(device="cpu", chunk=5, workers=1, precision="float64")
K, PRIOR = 5, 0.5


def fit(method, federation=None, **options):
    task, clients = linear()
    options = {"rounds": 1, "engine": ENGINE, "progress": False, "debug": True} | options
    return cs.fit(method, task, federation or clients, **options)


def posterior(federation=None, k=None):
    federation = federation or linear()[1]
    prior = cs.Gaussian(torch.zeros(4).double(), torch.full((1,), PRIOR, dtype=torch.float64))
    return prior * likelihood(federation, k)


def error(run, exact=None):
    exact = posterior() if exact is None else exact
    return float((run.posterior / exact).norm / exact.norm)


@pytest.mark.parametrize(
    "method",
    [
        PVI(NEWTON, damping=1.0),
        cs.FedEP(NEWTON, damping=1.0),
        FedLapCov(NEWTON, damping=1.0),
        BayesADMM(NEWTON, rho=1 / K, damping=1.0),
    ],
    ids=lambda method: method.name,
)
def test_one_round_of_exact_clients_finds_the_posterior_of_all_data(method):
    run = fit(replace(method, prior=PRIOR))
    assert error(run) < 1e-12


@pytest.mark.parametrize(
    ("method", "factor"),
    [
        (PVI(NEWTON), 1 - 1 / K),
        (PVI(NEWTON, damping=0.3), 0.7),
        (FedLapCov(NEWTON, damping=0.3), 0.7),
        (BayesADMM(NEWTON, rho=1.0, damping=1.0), 1 - 1 / (1 + K)),
        (BayesADMM(NEWTON, rho=0.4, damping=1.0), 1 - 1 / (1 + 0.4 * K)),
    ],
    ids=str,
)
def test_otherwise_every_round_multiplies_the_error_by_the_same_factor(method, factor):
    found = []
    fit(replace(method, prior=PRIOR), rounds=6, callbacks=[lambda run, _: found.append(error(run))])
    ratios = [after / before for before, after in itertools.pairwise(found[1:])]
    assert ratios == pytest.approx([factor] * len(ratios), rel=1e-6)


@pytest.mark.parametrize("rho", [0.2, 1.0, 3.0])
def test_the_sites_of_bayesadmm_are_the_likelihoods_after_one_round(rho):
    run = fit(BayesADMM(NEWTON, rho=rho, damping=1.0, prior=PRIOR))
    for k in range(K):
        site = rows(run.states.gather(torch.tensor([k])), 0).site
        torch.testing.assert_close(site.lam, likelihood(run.federation, k).lam)
        torch.testing.assert_close(site.eta, likelihood(run.federation, k).eta)


@pytest.mark.parametrize(
    "method", [PVI(NEWTON), AsynchronousPVI(NEWTON), BayesADMM(NEWTON, damping=1.0), FedLapCov(NEWTON)],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
def test_with_one_client_it_is_the_centralised_method(method):
    pooled = linear()[1].pooled()
    run = fit(replace(method, prior=PRIOR), pooled)
    assert error(run) < 1e-12


def test_pvi_is_fedep_with_variational_inference():
    infer = cs.inference.Variational(cs.optim.IVON(epochs=2, batch_size=4))
    runs = [fit(method, rounds=3, cohort=3) for method in (PVI(infer, prior=PRIOR), cs.FedEP(infer, prior=PRIOR))]
    for (name, a), (_, b) in zip(*(leaves(run.server) for run in runs), strict=True):
        assert torch.equal(a, b), name


def test_bayesadmm_with_one_client_and_a_server_that_follows_its_sites_is_pvi():
    """ρ = γ = 1; as α is 1/2 for one client, T and not q is PVI's posterior."""
    task, federation = linear()
    pooled = federation.pooled()
    infer = cs.inference.Variational(cs.optim.IVON(epochs=2, batch_size=4))
    admm = fit(BayesADMM(infer, rho=1.0, damping=1.0, prior=PRIOR), pooled)
    flat = cs.Gaussian(torch.zeros(4).double(), torch.full((1,), PRIOR, dtype=torch.float64))
    cohort = cs.data.Cohort(pooled, torch.arange(1), round=1, round_size=1, seed=0, dtype=torch.float64)
    prepared = task.prepare(dtype=torch.float64)
    q = flat * infer.site(prepared.initial(), torch.tensor([28.0]).double())
    moved = infer.near(prepared, q, q, cohort)
    torch.testing.assert_close(admm.server.total.eta, (flat * rows(moved / q, 0)).eta)
    torch.testing.assert_close(admm.server.total.lam, (flat * rows(moved / q, 0)).lam)


# Servers of PVI


def test_clients_in_turn_are_the_sequential_server():
    method = PVI(NEWTON, prior=PRIOR, in_turn=True)
    turns = [method.turn(round, 2, K).tolist() for round in (1, 2, 3, 4)]
    assert turns == [[0, 1], [2, 3], [0, 4], [1, 2]]
    errors = []
    fit(method, rounds=K, cohort=1, callbacks=[lambda run, _: errors.append(error(run))])
    assert errors[-1] < 1e-12 < 1e-3 < errors[-2]  # each client once, none twice


def test_an_asynchronous_client_works_from_the_posterior_of_its_last_delivery():
    """Against the same by hand, with variances alone, where every cavity counts."""
    infer = cs.inference.Newton(steps=1, diagonal=True)
    method, rounds = AsynchronousPVI(infer, prior=PRIOR, in_turn=True, damping=0.6), 3 * K
    run = fit(method, rounds=rounds, cohort=1)
    likelihoods = [likelihood(run.federation, k) for k in range(K)]
    q = cs.Gaussian(torch.zeros(4).double(), torch.full((4,), PRIOR, dtype=torch.float64))
    sites, seen = [q / q] * K, [q] * K
    for turn in range(rounds):
        k = turn % K
        exact = (seen[k] / sites[k]) * likelihoods[k]
        delta = (cs.Gaussian.of(exact.mean, 1 / exact.variance) / seen[k]) ** 0.6
        sites[k], q = sites[k] * delta, q * delta
        seen[k] = q
    torch.testing.assert_close(run.posterior.eta, q.eta)
    torch.testing.assert_close(run.posterior.lam, q.lam)
    fresh = fit(PVI(infer, prior=PRIOR, in_turn=True, damping=0.6), rounds=rounds, cohort=1)
    assert float((fresh.posterior / q).norm) > 1e-3


# FedLap


DESCENT = cs.SGD(lr=0.2, epochs=4, batch_size=100)


@pytest.mark.slow
def test_fedlap_finds_the_minimum_under_the_prior():
    run = fit(FedLap(DESCENT, prior=5.0), rounds=200, debug=False)
    exact = posterior() * cs.Gaussian(torch.zeros(4), torch.full((1,), 5.0 - PRIOR))
    torch.testing.assert_close(run.posterior.mean, exact.mean, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_fedlap_cov_finds_it_too_whatever_its_curvatures_are():
    infer = cs.inference.Laplace(DESCENT, kappa=1.0, s0=0.01, epochs=1, clip=False)
    run = fit(FedLapCov(infer, prior=PRIOR, max_move=None, max_precision=None), rounds=200, debug=False)
    torch.testing.assert_close(run.posterior.mean, posterior().mean, rtol=0, atol=1e-4)


def test_fedlap_is_fedep_whose_sites_have_next_to_no_precision():
    train, scale = cs.SGD(lr=0.05, epochs=1, batch_size=100), 1e-9
    ep = fit(cs.FedEP(cs.inference.Identity(train, scale=scale), prior=PRIOR), rounds=4)
    lap = fit(FedLap(train, prior=PRIOR), rounds=4)  # the model starts at 0
    torch.testing.assert_close(ep.posterior.mean, lap.posterior.mean, rtol=1e-6, atol=0)


def test_the_first_round_of_fedlap_keeps_the_initial_weights():
    task, federation = linear()
    with torch.no_grad():
        task.module.weight.fill_(3.0)
    run = cs.fit(FedLap(cs.SGD(lr=0.0)), task, federation, rounds=2, engine=ENGINE, progress=False, debug=True)
    torch.testing.assert_close(run.posterior.mean, run.task.initial())


# Refusals, and clients that come and go


def test_bayesadmm_refuses_a_constant_precision_and_no_prior():
    with pytest.raises(ConfigError, match="with one constant precision use FedLap"):
        BayesADMM(cs.inference.Identity())
    with pytest.raises(ConfigError, match="prior must be above 0"):
        BayesADMM(prior=0.0)


def test_where_the_sites_take_precision_away_bayesadmm_keeps_its_mean():
    """Estimates of a curvature are noisy, and a posterior without precision would be lost."""
    method, flat = BayesADMM(prior=2.0), torch.zeros(2, dtype=torch.float64)
    q = cs.Gaussian.of(torch.tensor([3.0, 1.0]).double(), torch.tensor([5.0, 5.0]).double())
    total = cs.Gaussian(torch.tensor([-40.0, 7.0]).double(), torch.tensor([-8.0, 9.0]).double())
    server = bayes_admm.Server(q, method.server.start(q), total, torch.tensor([4.0]).double())
    update = cs.Weighted(cs.Gaussian(flat, flat), torch.tensor([4.0]).double())
    for _ in range(200):
        with guards.watch() as counts:
            server = method.fuse(server, update)
    assert int(counts["precision of all sites negative"]) == 1
    assert torch.equal(server.total.lam, total.lam)
    torch.testing.assert_close(server.q.lam, torch.tensor([2.0, 9.0]).double())
    torch.testing.assert_close(server.q.mean, torch.tensor([3.0, 7 / 9]).double())


def test_bayesadmm_forgets_a_client():
    method = BayesADMM(NEWTON, rho=1 / K, damping=1.0, prior=PRIOR)
    run = fit(method)
    left = method.forget(run.server, rows(run.states.gather(torch.tensor([3])), 0))
    others = posterior() / likelihood(run.federation, 3)
    torch.testing.assert_close(left.q.lam, others.lam)
    torch.testing.assert_close(left.q.eta, others.eta)
    assert float(left.clients) == K - 1
