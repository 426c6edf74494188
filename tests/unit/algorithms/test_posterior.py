"""Methods that pass Gaussian factors, where the posterior is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import consilience as cs
from consilience.algorithms.fedep import Client
from consilience.algorithms.fedpa import by_covariance, by_variances
from consilience.algorithms.shared.factors import Server
from consilience.core import guards
from consilience.core.errors import ConfigError
from consilience.core.records import leaves, nbytes, rows
from consilience.optim import epoch_means
from support.scenarios import blobs, likelihood, linear

ENGINE = cs.Simulator(device="cpu", precision="float64", chunk=3, workers=1)
EXACT = {"rtol": 1e-9, "atol": 1e-9}
SIZES = (30, 12, 8, 20)
K, P = len(SIZES), 4
PRIOR = 0.7
TRAIN = cs.SGD(lr=0.05, batch_size=5, momentum=0.9, weight_decay=0.01)
LAPLACE = cs.inference.Laplace(TRAIN, kappa=1.0, s0=0.05, epochs=1)
INFERENCES = {
    "I": cs.inference.Identity(TRAIN),
    "M": cs.inference.MCMC(replace(TRAIN, epochs=3)),
    "L": LAPLACE,
    "V": cs.inference.NGVI(TRAIN, kappa=1.0, s0=0.05, epochs=1, samples=2),
    "N": cs.inference.Newton(),
}
each = pytest.mark.parametrize("infer", INFERENCES.values(), ids=INFERENCES.keys())


def fit(algorithm, world, rounds=1, engine=ENGINE, **options):
    return cs.fit(algorithm, *world, rounds=rounds, engine=engine, progress=False, **options)


@pytest.fixture
def world():
    return linear(SIZES, names=None)


def pooled(federation, prior=PRIOR):
    """The posterior of all data in one place."""
    return likelihood(federation) * cs.Gaussian(torch.zeros(P).double(), torch.full((1,), prior, dtype=torch.float64))


def assert_same(q, p, rtol=1e-9, atol=1e-9):
    torch.testing.assert_close(q.eta, p.eta, rtol=rtol, atol=atol)
    torch.testing.assert_close(q.lam, p.lam, rtol=rtol, atol=atol)


def everyone(run):
    return run.states.gather(torch.arange(len(run.federation)))


def test_fedep_finds_the_pooled_posterior_in_one_sweep(world):
    q = fit(cs.FedEP(cs.inference.Newton(), damping=1.0, prior=PRIOR), world).posterior
    exact = pooled(world[1])
    torch.testing.assert_close(q.mean, exact.mean, **EXACT)
    torch.testing.assert_close(q.lam.inverse(), exact.lam.inverse(), **EXACT)


def test_fedep_that_is_exact_stays_where_it_is(world):
    algorithm = cs.FedEP(cs.inference.Newton(), damping=1.0, prior=PRIOR)
    assert_same(fit(algorithm, world, rounds=5).posterior, pooled(world[1]))
    assert_same(fit(algorithm, world, rounds=14, cohort=1).posterior, pooled(world[1]))


@pytest.mark.parametrize("kind", [cs.FedEP, cs.algorithms.FedSEP])
@pytest.mark.parametrize("rounds", [1, 4])
def test_with_cautious_damping_the_error_falls_geometrically(world, kind, rounds):
    q = fit(kind(cs.inference.Newton(), prior=PRIOR), world, rounds).posterior
    exact, before = pooled(world[1]), cs.Gaussian(torch.zeros(P).double(), PRIOR * torch.eye(P, dtype=torch.float64))
    left = (1 - 1 / K) ** rounds
    assert_same(q / exact, (before / exact) ** left)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "prior"), [(cs.FedEP, PRIOR), (cs.algorithms.FedSEP, 30.0)])
def test_the_pooled_posterior_is_reached_and_the_prior_counts_once(world, kind, prior):
    q = fit(kind(cs.inference.Newton(), prior=prior), world, rounds=60).posterior
    assert_same(q, pooled(world[1], prior), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_fedsep_is_exact_for_clients_as_uneven_as_they_come():
    world = linear((57, 9, 3, 1), names=None)
    q = fit(cs.algorithms.FedSEP(cs.inference.Newton(), prior=PRIOR), world, rounds=60).posterior
    assert_same(q, pooled(world[1]), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_diagonal_fedep_finds_the_pooled_mean(world):
    run = fit(cs.FedEP(cs.inference.Newton(diagonal=True), prior=PRIOR), world, rounds=60)
    assert run.posterior.lam.shape == (P,)
    torch.testing.assert_close(run.posterior.mean, pooled(world[1]).mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
def test_adf_counts_the_same_data_once_a_round(world, diagonal, rounds):
    q = fit(
        cs.algorithms.ADF(cs.inference.Newton(diagonal=diagonal), damping=1.0, prior=PRIOR), world, rounds
    ).posterior
    if diagonal:
        assert bool((q.lam > rounds / 3 * pooled(world[1]).lam.diagonal()).all())
    else:
        counted = likelihood(world[1]) ** rounds * cs.Gaussian(
            torch.zeros(P).double(), torch.full((1,), PRIOR, dtype=torch.float64)
        )
        assert_same(q, counted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("infer", [INFERENCES[letter] for letter in "IL"], ids=lambda infer: infer.letter)
def test_adf_grows_ever_more_certain_and_fedep_does_not(world, infer):
    certain = {}
    for kind in (cs.algorithms.ADF, cs.FedEP):
        certain[kind] = [fit(kind(infer, damping=1.0), world, rounds).posterior.lam.mean() for rounds in (1, 2, 4)]
    adf, fedep = certain[cs.algorithms.ADF], certain[cs.FedEP]
    assert adf[2] > 1.5 * adf[1] > 2 * adf[0]
    assert adf[2] > 3 * fedep[2]
    assert fedep[2] < 1.5 * fedep[0]


@pytest.mark.parametrize("cohort", [None, 2])
def test_posterior_averaging_of_equal_precisions_is_fedavg(world, cohort):
    averaged = fit(cs.FedAvg(TRAIN), world, rounds=4, cohort=cohort).posterior.mean
    q = fit(cs.algorithms.FedPADiagonal(cs.inference.Identity(TRAIN)), world, rounds=4, cohort=cohort).posterior
    torch.testing.assert_close(q.mean, averaged, **EXACT)


def test_posterior_averaging_weighs_means_by_precisions(world):
    q = fit(cs.algorithms.FedPADiagonal(cs.inference.Newton(diagonal=True)), world).posterior
    alone = [likelihood(world[1], k) for k in range(K)]
    precisions = torch.stack([1 / one.lam.inverse().diagonal() for one in alone])
    means = torch.stack([one.mean for one in alone])
    torch.testing.assert_close(q.lam, precisions.mean(0), **EXACT)
    torch.testing.assert_close(q.mean, (precisions * means).sum(0) / precisions.sum(0), **EXACT)


def test_posterior_averaging_does_not_depend_on_where_it_starts(world):
    for rounds in (1, 3):
        again = fit(cs.algorithms.FedPADiagonal(cs.inference.Newton(diagonal=True)), world, rounds).posterior
        assert_same(again, fit(cs.algorithms.FedPADiagonal(cs.inference.Newton(diagonal=True)), world).posterior)


@each
@pytest.mark.parametrize("server", [cs.server.Momentum(), cs.server.Momentum(lr=0.5)], ids=["plain", "half"])
def test_sites_multiply_to_the_global_posterior(world, infer, server):
    for damping, clip in ((None, None), (0.3, 5.0)):
        algorithm = cs.FedEP(infer, server, damping=damping, clip=clip, prior=PRIOR)
        run = fit(algorithm, world, rounds=3, cohort=2, debug=True)
        product = everyone(run).factor.product() * algorithm.before(run.posterior.eta)
        assert_same(product, run.posterior)
        assert max(line["audit"]["q_apart_from_sites"] for line in run.history) < 1e-12


def test_with_momentum_the_gap_between_q_and_its_sites_is_measured(world):
    run = fit(cs.FedEP(LAPLACE, cs.server.Momentum(0.5, 0.9)), world, rounds=6, cohort=2, debug=True)
    product, q = everyone(run).factor.product(), run.posterior
    gap = float((product / q).norm / q.norm)
    assert gap > 1e-3
    assert run.history[-1]["audit"]["q_apart_from_sites"] == pytest.approx(gap)
    assert run.history[0]["audit"]["q_apart_from_sites"] < 1e-12  # the first step has no past


def test_momentum_in_step_with_everyone_keeps_sites_and_posterior_together(world):
    run = fit(cs.FedEP(LAPLACE, cs.server.Momentum(0.5, 0.9)), world, rounds=6, debug=True)
    assert max(line["audit"]["q_apart_from_sites"] for line in run.history) < 1e-12


def test_a_site_optimiser_of_its_own_is_no_error(world):
    algorithm = cs.FedEP(cs.inference.Identity(TRAIN), cs.server.Momentum(0.5), site=cs.server.Momentum(1.0))
    run = fit(algorithm, world, rounds=3, debug=True)
    assert run.history[-1]["audit"]["q_apart_from_sites"] > 1e-3


def tampered(change, at=2):
    """A callback that changes client 0's site after a round."""

    def callback(run, line):
        if line["round"] == at:
            site = run.states.gather(torch.tensor([0]))
            run.states.commit(torch.tensor([0]), Client(change(site.factor), site.memory), at)

    return callback


@pytest.mark.parametrize("server", [cs.server.Momentum(), cs.server.Momentum(lr=0.5)], ids=["plain", "half"])
def test_a_site_that_does_not_belong_to_q_is_found_out(world, server):
    algorithm = cs.FedEP(cs.inference.Identity(TRAIN), server)
    with pytest.raises(
        cs.ConsilienceError, match=r"q is not the product of the sites: they differ by .* of its length"
    ):
        fit(algorithm, world, rounds=4, debug=True, callbacks=[tampered(lambda factor: factor**2.0)])
    fit(algorithm, world, rounds=4, callbacks=[tampered(lambda factor: factor**2.0)])  # without debug nobody checks


def test_a_cavity_that_lost_its_precision_is_floored_and_counted(world):
    algorithm = cs.FedEP(LAPLACE)
    heavy = tampered(lambda factor: cs.Gaussian(factor.eta, 1e6 * factor.lam), at=2)
    run = fit(algorithm, world, rounds=6, callbacks=[heavy])
    assert "cavity without precision" not in run.history[1]["guards"]
    assert run.history[2]["guards"]["cavity without precision"] >= P  # every coordinate of one client
    for _, leaf in (*leaves(run.server), *leaves(everyone(run))):
        assert bool(leaf.isfinite().all())
    assert not any(line["rejected"] for line in run.history)


@pytest.mark.parametrize("kind", [cs.FedEP, cs.algorithms.FedSEP])
def test_the_scaled_identity_sends_and_changes_no_precision(world, kind):
    task, federation = world
    engine = cs.Simulator(device="cpu", chunk=3, workers=1)
    fresh = cs.FedEP(cs.inference.Identity(TRAIN, scale=0.1)).client(
        task, cs.data.Info(task.initial(), *torch.zeros(3)), federation.sizes.float().unsqueeze(1)
    )
    for server in (cs.server.Momentum(0.5, 0.9), cs.server.Adam()):
        run = fit(kind(cs.inference.Identity(TRAIN, scale=0.1), server), world, rounds=3, engine=engine, cohort=3)
        first = fit(kind(cs.inference.Identity(TRAIN, scale=0.1), server), world, rounds=1, engine=engine, cohort=3)
        assert torch.equal(run.posterior.lam, first.posterior.lam)
        assert torch.equal(run.posterior.lam, torch.tensor([0.1 * 70]))
        assert not torch.equal(run.posterior.eta, first.posterior.eta)
        assert all(line["bytes_up"] == 3 * 4 * (P + 1) for line in run.history)
        if kind is cs.FedEP:
            assert torch.equal(everyone(run).factor.lam, fresh.factor.lam)
            assert nbytes(everyone(run).factor) == K * 4 * (P + 1)


@pytest.mark.parametrize("infer", [INFERENCES[letter] for letter in "MLV"], ids=lambda infer: infer.letter)
def test_other_precisions_travel_with_as_many_numbers_as_means(world, infer):
    engine = cs.Simulator(device="cpu", chunk=3, workers=1)
    run = fit(cs.FedEP(infer), world, rounds=2, engine=engine, cohort=3)
    assert all(line["bytes_up"] == 3 * 8 * P for line in run.history)


def updates(algorithm, world):
    """Every client's message in a first round."""
    task, federation = world[0].prepare(dtype=torch.float64), world[1]
    ids = federation.sizes.argsort(descending=True)
    cohort = cs.data.Cohort(federation, ids, round=1, round_size=K, seed=0, dtype=torch.float64)
    info = cs.data.Info(task.initial(), *(torch.tensor(v) for v in (0, K, federation.examples)))
    server, state = algorithm.start(task, info), algorithm.client(task, info, cohort.n)
    return algorithm.local(task, algorithm.message(server, ids), state, cohort)[0]


@pytest.mark.parametrize("kind", [cs.FedEP, cs.algorithms.FedSEP, cs.algorithms.ADF, cs.algorithms.FedPADiagonal])
def test_a_clipped_update_has_the_length_asked_for_and_its_direction(world, kind):
    infer = LAPLACE
    free = updates(kind(infer, damping=1.0), world)
    longest = float(free.norm.median())
    clipped = updates(kind(infer, damping=1.0, clip=longest), world)
    for k in range(K):
        share = min(1.0, longest / float(free.norm[k]))
        assert_same(rows(clipped, k), rows(free, k) ** share)
    assert float(clipped.norm.max()) == pytest.approx(longest)


def test_damping_comes_after_the_clip(world):
    infer = LAPLACE
    longest = 0.1 * float(updates(cs.FedEP(infer, damping=1.0), world).norm.min())
    damped = updates(cs.FedEP(infer, clip=longest), world)
    torch.testing.assert_close(damped.norm, torch.full((K, 1), longest / K, dtype=torch.float64), **EXACT)


def test_clipped_updates_are_counted(world):
    run = fit(cs.FedEP(LAPLACE, clip=1e-3), world, rounds=3, cohort=2)
    assert [line["guards"]["update clipped"] for line in run.history] == [2, 2, 2]
    run = fit(cs.FedEP(LAPLACE, clip=1e9), world, rounds=3, cohort=2)
    assert not any("update clipped" in line["guards"] for line in run.history)


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_single_client_s_posterior_is_the_exact_one(world, diagonal):
    alone = (world[0], world[1].pooled())
    q = fit(cs.FedEP(cs.inference.Newton(diagonal=diagonal), damping=1.0, prior=PRIOR), alone).posterior
    exact = pooled(world[1])
    torch.testing.assert_close(q.mean, exact.mean, **EXACT)
    torch.testing.assert_close(q.variance, exact.variance, **EXACT)


@pytest.mark.parametrize(
    "kind", [cs.FedEP, cs.algorithms.FedSEP, cs.algorithms.ADF, cs.algorithms.FedPADiagonal, cs.algorithms.FedPA]
)
def test_the_names_of_clients_do_not_matter(world, kind):
    task, federation = world
    owner = torch.arange(K).repeat_interleave(torch.tensor(SIZES))
    other = cs.Federation.from_owner(federation.data, torch.tensor([2, 0, 3, 1])[owner])
    whole = cs.SGD(lr=0.05, batch_size=100, epochs=3)  # full batches, so that nothing is drawn
    algorithm = cs.algorithms.FedPA(whole) if kind is cs.algorithms.FedPA else kind(cs.inference.MCMC(whole))
    one, two = (fit(algorithm, (task, clients), rounds=4).posterior for clients in (federation, other))
    for (name, a), (_, b) in zip(leaves(one), leaves(two), strict=True):
        torch.testing.assert_close(a, b, **EXACT, msg=lambda m, n=name: f"{n}: {m}")


def samples(clients, count, size, seed):
    made = torch.Generator().manual_seed(seed)
    theta = torch.randn(clients, count, size, generator=made, dtype=torch.float64)
    return theta, torch.randn(clients, size, generator=made, dtype=torch.float64)


def shrunk_covariance(theta, rho):
    """ρ_ℓ·1 + (1 − ρ_ℓ) S of samples [ℓ, P]."""
    count, unit = len(theta), torch.eye(theta.shape[1], dtype=torch.float64)
    weight = 1 / (1 + (count - 1) * rho)
    scatter = torch.zeros_like(unit) if count == 1 else torch.atleast_2d(torch.cov(theta.mT))
    return weight * unit + (1 - weight) * scatter


shapes = (st.integers(1, 3), st.integers(1, 7), st.integers(1, 9), st.floats(0, 20), st.integers(0, 10_000))


@settings(max_examples=25, deadline=None)
@given(*shapes)
def test_fedpa_s_product_is_that_of_a_dense_solve(clients, count, size, rho, seed):
    theta, v = samples(clients, count, size, seed)
    got = by_covariance(theta - theta.mean(1, keepdim=True), v, rho)
    for k in range(clients):
        expected = torch.linalg.solve(shrunk_covariance(theta[k], rho), v[k])
        torch.testing.assert_close(got[k], expected, rtol=1e-7, atol=1e-8)


@settings(max_examples=25, deadline=None)
@given(*shapes)
def test_diagonal_fedpa_s_product_is_that_with_variances_alone(clients, count, size, rho, seed):
    theta, v = samples(clients, count, size, seed)
    got = by_variances(theta - theta.mean(1, keepdim=True), v, rho)
    for k in range(clients):
        torch.testing.assert_close(got[k], v[k] / shrunk_covariance(theta[k], rho).diagonal(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_fedpa_with_one_sample_of_one_step_is_fedavg_bit_for_bit(world, diagonal, precision):
    engine = replace(ENGINE, precision=precision)
    train = cs.SGD(lr=0.1, batch_size=30, momentum=0.9, weight_decay=0.01)
    for server in (cs.server.Momentum(0.5, 0.9), cs.server.Adam()):
        fedavg = fit(cs.FedAvg(train, server), world, rounds=3, engine=engine).posterior.mean
        fedpa = fit(
            cs.algorithms.FedPA(train, server, diagonal=diagonal), world, rounds=3, engine=engine
        ).posterior.mean
        assert torch.equal(fedavg, fedpa)


def epochs_of(train, world):
    """The averages of every epoch, [epochs, K, P], and clients' sizes."""
    task, federation = world[0].prepare(dtype=torch.float64), world[1]
    ids = federation.sizes.argsort(descending=True)
    cohort = cs.data.Cohort(federation, ids, round=1, round_size=K, seed=0, dtype=torch.float64)
    iterates = epoch_means(train, task, task.initial(), cohort)
    return torch.stack([sample.clone() for sample in iterates]), cohort.n


def test_one_sample_gives_the_fedavg_of_averaged_iterates(world):
    train = cs.SGD(lr=0.05, batch_size=5, epochs=4)
    averages, n = epochs_of(train, world)
    got = fit(cs.algorithms.FedPA(train, burn_in=3), world).posterior.mean
    start = world[0].initial().double()
    torch.testing.assert_close(got, start + ((averages[-1] - start) * n).sum(0) / n.sum(), **EXACT)


@pytest.mark.parametrize("diagonal", [False, True])
def test_fedpa_s_step_is_the_mean_of_precision_weighted_changes(world, diagonal):
    train, rho = cs.SGD(lr=0.05, batch_size=5, epochs=5), 2.0
    averages, n = epochs_of(train, world)
    start, total = world[0].initial().double(), torch.zeros(P).double()
    for k in range(K):
        kept = averages[2:, k]
        covariance = shrunk_covariance(kept, rho)
        covariance = covariance.diagonal().diag() if diagonal else covariance
        total += n[k] / n.sum() * torch.linalg.solve(covariance, kept.mean(0) - start)
    got = fit(
        cs.algorithms.FedPA(train, cs.server.Momentum(0.1), rho=rho, burn_in=2, diagonal=diagonal), world
    ).posterior.mean
    torch.testing.assert_close(got, start + 0.1 * total, **EXACT)


def test_samples_with_covariance_tell_more_than_samples_without(world):
    train = cs.SGD(lr=0.05, batch_size=5, epochs=5)
    plain, informed = (fit(cs.algorithms.FedPA(train, rho=rho), world).posterior.mean for rho in (0.0, 1.0))
    averages, n = epochs_of(train, world)
    start = world[0].initial().double()
    torch.testing.assert_close(plain, start + ((averages.mean(0) - start) * n).sum(0) / n.sum(), **EXACT)
    assert not torch.allclose(plain, informed, rtol=1e-2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cs.FedEP(damping=-0.5), "damping must be above 0, got -0.5"),
        (lambda: cs.FedEP(damping=float("nan")), "damping must be .*, got nan"),
        (lambda: cs.algorithms.FedSEP(clip=0.0), "clip must be above 0, got 0.0"),
        (lambda: cs.algorithms.ADF(prior=-1.0), "prior must be at least 0, got -1.0"),
        (lambda: cs.algorithms.FedPADiagonal(prior=1.0), "clients that infer alone have no common prior"),
        (lambda: cs.algorithms.FedPA(rho=-0.1), "rho must be at least 0, got -0.1"),
        (lambda: cs.algorithms.FedPA(burn_in=-1), "burn_in must be at least 0, got -1"),
        (lambda: cs.algorithms.FedPA(burn_in=5), r"burn_in must be below epochs \(5\), got 5"),
        (
            lambda: cs.algorithms.FedPA(cs.SGD(epochs=5, mixed=True), burn_in=1),
            r"burn_in must be below epochs \(1, as they are mixed\), got 1",
        ),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_names_are_those_of_the_papers_tables():
    assert cs.FedEP(cs.inference.NGVI()).name == "FedEP(V)"
    assert cs.algorithms.FedSEP().name == "FedSEP(I)"
    assert cs.algorithms.FedPADiagonal(cs.inference.MCMC()).name == "FedPA(M)"


@pytest.mark.slow
def test_a_network_of_one_layer_learns_with_every_inference():
    made = torch.Generator().manual_seed(0)
    x = torch.randn(90, 3, generator=made)
    federation = cs.Federation.from_owner(cs.Dataset(x, (x[:, 0] > 0).long()), torch.arange(90) % 5)
    task = cs.Classification(nn.Linear(3, 2))
    for infer in INFERENCES.values():
        run = fit(cs.FedEP(infer, prior=PRIOR), (task, federation), rounds=6)
        assert run.evaluate(federation.data).point["accuracy"] > 0.9, infer.letter


def test_momentum_does_not_turn_precisions_negative():
    task, federation, _ = blobs()
    train = cs.SGD(lr=0.1, momentum=0.9, epochs=3, batch_size=8, weight_decay=1e-3)
    method = cs.FedEP(cs.inference.Laplace(train, kappa=20.0, s0=0.0, epochs=1), cs.server.Momentum(1.0, 0.95))
    run = cs.fit(
        method,
        task,
        federation,
        rounds=40,
        cohort=3,
        engine=cs.Simulator(device="cpu", chunk=3, workers=1),
        progress=False,
    )
    assert bool((run.posterior.lam > 0).all())
    assert any("overshoot refused" in line["guards"] for line in run.history)
    assert not any(line["rejected"] for line in run.history)


def test_a_step_that_overshoots_in_precision_is_refused_unless_the_factors_say_so():
    before = torch.tensor([1.0, 1.0, 1.0, 1.0])
    method = cs.FedEP(server=cs.server.Momentum(1.0, 0.9))
    memory = method.server.start(cs.Gaussian(before, before))
    memory = replace(memory, first=cs.Gaussian(torch.zeros(4), torch.tensor([-2.0, 0.0, -1.0, 0.5])))
    change = cs.Gaussian(torch.zeros(4), torch.tensor([0.0, -0.95, -1.5, 0.25]))
    with guards.watch() as acted:
        after = method.fuse(Server(cs.Gaussian(before, before), memory), change)
    torch.testing.assert_close(after.q.lam, torch.tensor([1.0, 0.05, 1.0, 1.7]))
    torch.testing.assert_close(after.memory.first.lam, torch.tensor([0.0, -0.95, 0.0, 0.7]))
    assert int(acted["overshoot refused"]) == 2
