"""PartialPooling where the joint posterior of all clients' weights and of their mean is known."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import consilience as cs
from consilience.core import guards
from consilience.core.errors import ConfigError, TaskError
from support.scenarios import blobs, likelihood, linear

ENGINE = cs.Simulator(device="cpu", precision="float64", chunk=5, workers=1)
SIZES = (30, 12, 2, 20, 3)  # two clients have fewer examples than weights
K, P = len(SIZES), 4
PRIOR, NEWTON = 0.7, cs.inference.Newton()
FIXED = cs.PartialPooling(NEWTON, damping=1.0, prior=PRIOR, tau=0.5, parts="all", learn=False)
NAMES = [f"site {k}" for k in range(K)]


def fit(method, world, rounds=1, **options):
    return cs.fit(method, *world, rounds=rounds, engine=ENGINE, progress=False, **options)


@pytest.fixture
def world():
    return linear(SIZES, names=NAMES, spread=0.8)


def of_client(federation, k):
    """(η, Λ) of a client's likelihood."""
    alone = cs.Federation.from_silos([federation.client(k)])
    found = likelihood(alone)
    return found.eta, found.lam


def joint(federation, tau2, prior=PRIOR):
    """The Gaussian of (μ, θ_1, …, θ_K) given all data, by its dense precision: (mean, covariance)."""
    clients, unit = len(federation), torch.eye(P).double()
    lam = torch.zeros(P * (clients + 1), P * (clients + 1)).double()
    eta = torch.zeros(P * (clients + 1)).double()
    inverse = torch.diag(1 / tau2)
    lam[:P, :P] = prior * unit + clients * inverse
    for k in range(clients):
        own = slice(P * (k + 1), P * (k + 2))
        e, precision = of_client(federation, k)
        lam[own, own] = precision + inverse
        lam[own, :P] = lam[:P, own] = -inverse
        eta[own] = e
    covariance = lam.inverse()
    return covariance @ eta, covariance


def assert_moments(belief, mean, covariance, tolerance=1e-8):
    torch.testing.assert_close(belief.mean, mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(belief.lam.inverse(), covariance, rtol=tolerance, atol=tolerance)


def test_one_round_finds_the_joint_posterior_of_a_linear_gaussian_hierarchy(world):
    run, tau2 = fit(FIXED, world), torch.full((P,), 0.25).double()
    mean, covariance = joint(world[1], tau2)
    assert_moments(run.posterior, mean[:P], covariance[:P, :P])
    for k, name in enumerate(NAMES):
        own = slice(P * (k + 1), P * (k + 2))
        assert_moments(run.personal(name), mean[own], covariance[own, own])
    assert_moments(run.newcomer(), mean[:P], covariance[:P, :P] + torch.diag(tau2))


@pytest.mark.slow
def test_cautious_damping_comes_to_the_same_posteriors(world):
    run, (mean, covariance) = fit(replace(FIXED, damping=None), world, 300), joint(world[1], torch.full((P,), 0.25))
    assert_moments(run.posterior, mean[:P].double(), covariance[:P, :P].double())


def evidence(federation, tau2, prior=PRIOR):
    """log p(D) as a function of τ² [P], up to a constant: by integrating every θ_k, then μ, out."""
    unit = torch.eye(P).double()
    total, lam, eta = torch.zeros(()).double(), prior * unit, torch.zeros(P).double()
    for k in range(len(federation)):
        e, precision = of_client(federation, k)
        a = unit + precision @ torch.diag(tau2)
        wide = torch.linalg.solve(a, precision)
        total = total - torch.logdet(a) / 2 + e @ torch.diag(tau2) @ torch.linalg.solve(a, e) / 2
        lam, eta = lam + wide, eta + torch.linalg.solve(a, e)
    return total - torch.logdet(lam) / 2 + eta @ torch.linalg.solve(lam, eta) / 2


def test_the_statistics_are_the_gradient_of_the_evidence(world):
    task, federation = world[0].prepare(dtype=torch.float64), world[1]
    run = fit(FIXED, world, 2)
    ids = federation.sizes.argsort(descending=True)
    cohort = cs.data.Cohort(federation, ids, round=3, round_size=K, seed=0, dtype=torch.float64)
    update, _ = FIXED.local(task, FIXED.message(run.server, ids), run.states.gather(ids), cohort)
    tau2 = torch.full((P,), 0.25).double().requires_grad_()
    (exact,) = torch.autograd.grad(evidence(federation, tau2), tau2)
    found = (update.squares.sum() - update.precisions.sum()) / 2
    torch.testing.assert_close(found, exact.sum(), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_learned_width_maximises_the_evidence(world):
    run = fit(replace(FIXED, learn=True, settle=1, strength=0.0), world, 200)
    best = run.server.tau2.expand(P)
    for factor in (0.98, 1.02):
        assert evidence(world[1], best) > evidence(world[1], best * factor)
    tau2 = best.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(evidence(world[1], tau2), tau2)
    assert abs(float((gradient * tau2.detach()).sum())) < 1e-6
    assert run.history[-1]["tau of weights"] == pytest.approx(float(best[0]) ** 0.5)


def test_the_evidence_rises_with_every_step_of_the_width(world):
    seen = []
    method = replace(FIXED, learn=True, settle=1, strength=0.0, tau=3.0)
    fit(method, world, 12, callbacks=[lambda run, _: seen.append(float(evidence(world[1], run.server.tau2.expand(P))))])
    assert all(b > a for a, b in itertools.pairwise(seen[1:]))


def test_a_strong_prior_keeps_the_width_where_it_is(world):
    run = fit(replace(FIXED, learn=True, settle=1, strength=1e9), world, 20)
    assert float(run.server.tau2) == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize("infer", [NEWTON, cs.inference.Identity(cs.SGD(lr=0.05, batch_size=5, epochs=2))], ids="NI")
def test_without_width_it_is_fedep(world, infer):
    """The same messages and posteriors, round by round; clients of different sizes."""
    ours, theirs = [], []
    common = {"damping": None, "prior": PRIOR}
    fit(cs.PartialPooling(infer, tau=0.0, **common), world, 6, callbacks=[lambda r, _: ours.append(r.posterior)])
    fit(cs.FedEP(infer, **common), world, 6, callbacks=[lambda r, _: theirs.append(r.posterior)])
    for q, p in zip(ours, theirs, strict=True):
        torch.testing.assert_close(q.mean, p.mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(q.variance, p.variance, rtol=1e-10, atol=1e-10)


def test_with_infinite_width_every_client_is_alone_with_a_flat_prior():
    world = linear((30, 12, 20), names=["a", "b", "c"])
    run = fit(replace(FIXED, tau=float("inf")), world)
    for k, name in enumerate("abc"):
        eta, lam = of_client(world[1], k)
        torch.testing.assert_close(run.personal(name).mean, torch.linalg.solve(lam, eta), rtol=1e-8, atol=1e-8)
    assert float(run.posterior.lam.abs().max()) == pytest.approx(PRIOR)  # nothing is known of the mean


def test_with_a_sure_mean_every_client_is_alone_with_the_prior_of_the_width(world):
    run = fit(replace(FIXED, prior=1e10, tau=1.0), world)
    for k, name in enumerate(NAMES):
        eta, lam = of_client(world[1], k)
        alone = torch.linalg.solve(lam + torch.eye(P).double(), eta)
        torch.testing.assert_close(run.personal(name).mean, alone, rtol=1e-8, atol=1e-8)


def test_one_client_has_the_prior_of_the_mean_and_of_the_width():
    world = linear((30,), names=["a"])
    run = fit(FIXED, world)
    eta, lam = of_client(world[1], 0)
    assert_moments(
        run.personal("a"),
        *(lambda precision: (torch.linalg.solve(precision, eta), precision.inverse()))(
            lam + torch.eye(P).double() / (1 / PRIOR + 0.25)
        ),
    )


@given(st.floats(-3, 6), st.floats(-6, 4), st.floats(-2, 2), st.booleans())
@settings(max_examples=50, deadline=None)
def test_widening_adds_variances_and_widths_add(precision, width, mean, full):
    lam = torch.full((3,), 10.0**precision).double()
    q = cs.Gaussian.of(torch.full((3,), mean).double(), torch.diag(lam) if full else lam)
    by = torch.full((1,), 10.0**width).double()
    wide = q.widened(by)
    torch.testing.assert_close(wide.variance, q.variance + by, rtol=1e-6, atol=0)
    torch.testing.assert_close(wide.mean, q.mean, rtol=1e-6, atol=1e-9)
    twice = q.widened(by / 2).widened(by / 2)
    torch.testing.assert_close(twice.lam, wide.lam, rtol=1e-6, atol=0)


def test_widening_by_nothing_changes_no_bit_and_flat_stays_flat():
    lam = torch.randn(4, 4).double()
    q = cs.Gaussian(torch.randn(4).double(), lam @ lam.T)
    assert torch.equal(q.widened(torch.zeros(1).double()).eta, q.eta)
    flat = cs.Gaussian.flat(torch.zeros(4)).widened(torch.full((1,), 1e12))
    assert float(flat.lam.abs().max()) == 0


def test_precisions_too_negative_to_widen_are_raised_and_counted():
    for q in (cs.Gaussian(torch.zeros(2), torch.tensor([-4.0, 1.0])),
              cs.Gaussian(torch.zeros(2), torch.diag(torch.tensor([-4.0, 1.0])))):  # fmt: skip
        with guards.watch() as acted:
            assert q.widened(torch.ones(1)).lam.isfinite().all()
        assert acted["precision too negative to widen"] == 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x).tanh())


def network():
    torch.manual_seed(0)
    return cs.Classification(Net()), blobs(5)[1]


def test_a_body_is_shared_and_a_head_is_personal():
    task, federation = network()
    infer = cs.inference.Identity(cs.SGD(lr=0.1, epochs=2))
    run = fit(cs.PartialPooling(infer, parts=("head",), learn=False), (task, federation), 3)
    body = task.slice(parameter="body.weight")
    one, other = run.personal(0).mean, run.personal(1).mean
    torch.testing.assert_close(one[body], other[body], rtol=1e-9, atol=1e-9)
    head = task.slice(parameter="head.weight")
    assert float((one[head] - other[head]).abs().max()) > 1e-3
    assert list(run.history[-1]).count("tau of head") == 1


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ("all", {"weights"}),
        ("kinds", {"weights", "biases"}),
        ("layers", {"body", "head"}),
        (("head.bias", "body"), {"head.bias", "body"}),
    ],
)
def test_every_group_has_a_width_of_its_own(parts, names):
    task, federation = network()
    run = fit(cs.PartialPooling(cs.inference.Identity(cs.SGD(lr=0.1)), parts=parts, settle=1), (task, federation), 3)
    found = {name.removeprefix("tau of ") for name in run.history[-1] if name.startswith("tau of ")}
    assert found == names


def test_a_part_that_does_not_exist_is_refused():
    task, federation = network()
    with pytest.raises(TaskError, match=r"there is no part 'hed' in the model; did you mean 'head'\?"):
        fit(cs.PartialPooling(parts=("hed",)), (task, federation))


@pytest.mark.parametrize("infer", [cs.inference.Identity(cs.SGD(lr=0.1)), cs.inference.MCMC()], ids=["I", "M"])
def test_widths_are_not_learned_from_a_precision_that_is_a_constant(infer):
    """It would take the clients' differences for nothing, or for all."""
    with pytest.raises(ConfigError, match="cannot learn tau, because the precision of its sites is a constant"):
        cs.PartialPooling(infer, learn=True)
    task, federation = network()
    run = fit(cs.PartialPooling(infer, tau=0.2, settle=1), (task, federation), 4)
    assert run.history[-1]["tau of weights"] == pytest.approx(0.2)


def test_a_server_that_is_not_plain_is_refused():
    with pytest.raises(ConfigError, match="plain server"):
        cs.PartialPooling(server=cs.server.Adam())
    with pytest.raises(ConfigError, match="tau must be at least 0"):
        cs.PartialPooling(tau=-1.0)


@pytest.mark.parametrize(("squares", "precisions"), [(1e9, 1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, 1e9)])
def test_a_client_whose_statistics_no_data_give_is_refused(world, squares, precisions):
    """Alone it would decide the widths."""

    @cs.algorithm
    class Lying(cs.PartialPooling):
        def local(self, task, message, state, cohort):
            update, new = super().local(task, message, state, cohort)
            liar = (cohort.ids == 0).unsqueeze(1)
            lie = {"squares": squares, "precisions": precisions}
            return replace(update, **{k: torch.where(liar, v, getattr(update, k)) for k, v in lie.items()}), new

    run = fit(Lying(NEWTON, damping=1.0, prior=PRIOR, settle=1), world, 3)
    assert [line["rejected"][0]["client"] for line in run.history] == ["site 0"] * 3


def test_a_sick_federation_in_float32_learns_finite_widths():
    task, federation = network()
    engine = cs.Simulator(device="cpu", chunk=5, workers=1)
    for tau in (1e-4, 1e4):
        run = cs.fit(
            cs.PartialPooling(cs.inference.Laplace(kappa=1.0), tau=tau, settle=1), task, federation, rounds=8,
            engine=engine, progress=False, debug=True,
        )  # fmt: skip
        assert all(line["clients"] == len(federation) for line in run.history)
        assert torch.isfinite(run.newcomer().mean).all()


def test_a_weight_of_which_no_client_knows_anything_gets_none_rejected(caplog):
    """Cox's likelihood does not depend on a constant, so that the widths of biases have rounding errors as evidence."""
    made = torch.Generator().manual_seed(0)
    x, time = torch.randn(90, 2, generator=made), torch.rand(90, 1, generator=made)
    data = cs.Dataset(x, torch.cat([time, torch.ones(90, 1)], 1))
    sites = cs.Federation.from_owner(data, torch.arange(90) % 3)
    method = cs.PartialPooling(NEWTON, damping=1.0, prior=1.0)
    engine = cs.Simulator(precision="float64", workers=1, threads=1)
    run = cs.fit(method, cs.Cox(torch.nn.Linear(2, 1)), sites, rounds=20, engine=engine, progress=False)
    assert "rejected" not in caplog.text
    assert run.posterior.mean.isfinite().all()
