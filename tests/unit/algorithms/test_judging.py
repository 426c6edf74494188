"""Judging: measures against naive formulas, bounds that one hostile client of four cannot pass, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import consilience as cs
from consilience.algorithms.shared.judging import judged, measured, ratios
from consilience.core.records import rows, tree_map
from support.scenarios import linear

P, SIZES = 3, (30, 12, 8, 20)
ENGINE = cs.Simulator(device="cpu", chunk=8, workers=1, precision="float64")
NEWTON = cs.inference.Newton(diagonal=True)


def gaussians(seed, clients=4, size=P, spread=1.0):
    made = torch.Generator().manual_seed(seed)
    mean, scale = spread * torch.randn(clients, size, generator=made), torch.rand(clients, size, generator=made) + 0.5
    return cs.Gaussian.of(mean.double(), scale.double())


def one_client(measures, k):
    return {name: float(values[k]) for name, values in measures.items()}


def test_measures_are_those_of_the_definitions():
    q, tilted, cavity = rows(gaussians(0), 0), gaussians(1), gaussians(2) ** 0.3
    n = torch.tensor(SIZES).double().unsqueeze(1)
    site = tilted / cavity
    found = measured(q, tilted / q, 1.0, cavity, n, round_size=1)
    for k in range(4):
        mine = one_client(found, k)
        assert mine["least"] == pytest.approx(float((tilted.lam[k] / q.lam).min()))
        assert mine["move"] == pytest.approx(float(((tilted.mean[k] - q.mean).abs() * q.lam.sqrt()).max()))
        assert mine["precision"] == pytest.approx(float(site.lam[k].abs().max()))
        off = (tilted.mean[k] - q.mean) * q.lam.sqrt()
        assert mine["surprise"] == pytest.approx(float(off.square().mean().sqrt()))


def test_a_rotation_of_full_precisions_changes_no_measure():
    n, turn = torch.ones(4, 1).double(), torch.linalg.qr(torch.randn(P, P).double()).Q

    def turned(g):
        return cs.Gaussian(g.eta @ turn.T, turn @ torch.diag_embed(g.lam) @ turn.T)

    q, tilted, cavity = rows(gaussians(0), 0), gaussians(1), gaussians(2) ** 0.3
    plain = measured(q, tilted / q, 1.0, cavity, n, round_size=1)
    rotated = measured(turned(q), turned(tilted) / turned(q), 1.0, turned(cavity), n, round_size=1)
    for name in plain:
        torch.testing.assert_close(rotated[name], plain[name])


def test_one_precision_for_all_coordinates_gives_the_measures_of_a_diagonal_one():
    scalar = cs.Gaussian(gaussians(0).eta, torch.tensor([[2.0]]).double().expand(4, 1))
    diagonal = cs.Gaussian(scalar.eta, scalar.lam.expand(4, P))
    n = torch.ones(4, 1).double()
    a, b = (measured(rows(g, 0), g / rows(g, 0), 1.0, g**0.2, n, round_size=1) for g in (scalar, diagonal))
    for name in a:
        torch.testing.assert_close(a[name], b[name])


def test_a_flat_cavity_of_full_precisions_has_one_number():
    q, n = rows(gaussians(0), 0), torch.ones(P, 1).double()
    full = cs.Gaussian(q.eta, torch.diag(q.lam))
    delta = rows(gaussians(1), slice(0, P))
    whole = cs.Gaussian(delta.eta, torch.diag_embed(delta.lam))
    flat = cs.Gaussian.flat(delta.eta)
    plain = measured(q, delta, 1.0, flat, n, round_size=1)
    found = measured(full, whole, 1.0, flat, n, round_size=1)
    for name in plain:
        torch.testing.assert_close(found[name], plain[name])


def measures_of(precision, move=(1.0,) * 4, n=(10.0,) * 4, least=(1.0,) * 4):
    given = {"least": least, "move": move, "precision": precision, "examples": n, "surprise": move}
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in given.items()}


def test_a_client_with_few_examples_may_have_as_much_precision_as_a_typical_one():
    found = ratios(measures_of(precision=(100.0, 200.0, 300.0, 90.0), n=(100.0, 200.0, 300.0, 1.0)))
    torch.testing.assert_close(found["precision"], torch.tensor([0.5, 1.0, 1.0, 0.45]).double())


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, float("inf"), float("nan")])
def test_one_client_of_four_cannot_choose_what_is_typical(value):
    honest = (1.0, 2.0, 3.0)
    found = ratios(measures_of(precision=(*honest, value), move=(*honest, value)))
    assert bool((found["precision"][:3] <= 3).all())
    assert bool((found["precision"][:3] >= 1 / 3).all())
    refused = judged(
        measures_of(precision=(*honest, value), move=(*honest, value)), precision=30.0, move=100.0, surprise=30.0
    )
    assert set(refused) == (set() if value < 1 else {3})


def test_without_any_precision_nobody_is_refused():
    assert not judged(measures_of(precision=(0.0,) * 4), precision=30.0, move=100.0, surprise=30.0)


def test_a_reason_says_by_how_much_a_bound_is_exceeded():
    found = judged(
        measures_of((1.0, 1.0, 1.0, 50.0), least=(1.0, 1.0, -2.0, 1.0)), precision=30.0, move=None, surprise=None
    )
    assert "no positive precision: -2" in found[2]
    assert found[3] == "the precision of its factor is 50 times a typical client's, more than max_precision = 30"


def test_without_damping_the_clients_that_take_most_precision_are_refused_until_enough_is_left():
    method, q, n = cs.algorithms.FedSEP(NEWTON, damping=1.0), rows(gaussians(0), 0), torch.ones(4, 1).double()
    takes = cs.Gaussian(torch.zeros(4, P).double(), -q.lam * torch.tensor([[0.5], [0.2], [0.6], [0.1]]).double())
    found = method.measures(q, None, takes, n=n, round_size=4, examples=4)
    server = cs.algorithms.shared.factors.Server(q, method.server.start(q))
    assert list(method.refusals(server, takes.product(), found)) == [2]
    kept = torch.tensor([0, 1, 3])
    assert not method.refusals(server, rows(takes, kept).product(), rows(found, kept))


numbers = st.floats(-10, 10) | st.floats(-1e8, 1e8) | st.sampled_from([-1e30, 1e30])


@settings(max_examples=200, deadline=None)
@given(
    eta=st.lists(numbers, min_size=P, max_size=P),
    lam=st.lists(numbers, min_size=P, max_size=P),
    seed=st.integers(0, 99),
)
def test_one_hostile_client_of_four_moves_the_mean_by_no_more_than_the_bound(eta, lam, seed):
    """K = 4, δ = 1/K, any finite Δ of client 3: q's mean moves by at most max_move · max(1, the largest honest move)
    standard deviations, and its precision stays positive and below the bound."""
    method = cs.FedEP(NEWTON)
    honest = gaussians(seed, spread=3.0)
    sites = gaussians(seed + 1)
    q = sites.product()
    n = torch.full((4, 1), 10.0).double()
    update = (honest * (q / sites) / q) ** 0.25
    bad = cs.Gaussian(torch.tensor(eta).double(), torch.tensor(lam).double())
    update = tree_map(lambda leaf, hostile: torch.cat([leaf[:3], hostile.unsqueeze(0)]), update, bad)
    found = method.measures(q, cs.algorithms.fedep.Client(sites, None), update, n=n, round_size=4, examples=40)
    server = cs.algorithms.shared.factors.Server(q, method.server.start(q))
    refused = method.refusals(server, update.product(), found)
    assert set(refused) <= {3}
    kept = torch.tensor([k for k in range(4) if k not in refused])
    after = method.fuse(server, rows(update, kept).product()).q
    most = method.max_move * max(1.0, float(found["move"][:3].max()))
    moved = (after.mean - q.mean).abs() * q.lam.sqrt()
    assert bool((after.lam > 0).all())
    assert float(moved.max()) <= most * (1 + 1e-6)
    assert float(after.lam.max()) <= float(q.lam.max()) + method.max_precision * float(found["precision"][:3].max())


@cs.algorithm
class Hostile(cs.FedEP):
    """FedEP whose client 1 adds `eta` and `lam` to its Δ in the round `when`, and follows."""

    eta: float = 0.0
    lam: float = 0.0
    when: int = 2

    def local(self, task, message, state, cohort):
        update, new = super().local(task, message, state, cohort)
        if cohort.round != self.when:
            return update, new
        bad = (cohort.ids == 1).unsqueeze(1)
        eta, lam = (
            torch.where(bad, leaf + more, leaf) for leaf, more in ((update.eta, self.eta), (update.lam, self.lam))
        )
        update = cs.Gaussian(eta, lam)
        return update, self.follow(state, update)


ATTACKS = pytest.mark.parametrize(("eta", "lam"), [(0.0, -1000.0), (0.0, -1e6), (0.0, 1e6), (1e6, 0.0), (-1e30, 0.0)])


@ATTACKS
@pytest.mark.parametrize("chunk", [1, 8])
def test_a_hostile_factor_is_refused_and_its_client_keeps_the_one_it_had(eta, lam, chunk):
    task, federation = linear(SIZES, names=None)
    method = Hostile(NEWTON, prior=0.7, eta=eta, lam=lam)
    engine = cs.Simulator(device="cpu", chunk=chunk, workers=1, precision="float64")
    run = cs.fit(method, task, federation, rounds=4, engine=engine, debug=True, progress=False)
    assert [[r["client"] for r in line["rejected"]] for line in run.history] == [[], [federation.name(1)], [], []]
    assert run.history[-1]["audit"]["q_apart_from_sites"] < 1e-9


@ATTACKS
def test_without_the_hostile_client_the_round_is_the_same(eta, lam):
    """The others' updates are computed again: the sum is that of a round in which the client sent nothing finite."""
    task, federation = linear(SIZES, names=None)
    servers = [
        cs.fit(
            Hostile(NEWTON, prior=0.7, eta=e, lam=precision), task, federation, rounds=3, engine=ENGINE, progress=False
        ).server.q
        for e, precision in ((eta, lam), (float("nan"), 0.0))
    ]
    torch.testing.assert_close(servers[0].eta, servers[1].eta, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_after_an_attack_fedep_still_finds_the_exact_posterior():
    task, federation = linear(SIZES, names=None)
    honest, attacked = (
        cs.fit(Hostile(NEWTON, prior=0.7, lam=lam), task, federation, rounds=60, engine=ENGINE, progress=False).server.q
        for lam in (0.0, 1e6)
    )
    torch.testing.assert_close(attacked.mean, honest.mean, rtol=1e-5, atol=1e-5)


def test_bounds_can_be_lifted():
    task, federation = linear(SIZES, names=None)
    free = Hostile(NEWTON, prior=0.7, lam=1e6, max_precision=None, max_move=None)
    run = cs.fit(free, task, federation, rounds=2, engine=ENGINE, progress=False)
    assert not run.history[1]["rejected"]


def test_surprising_factors_are_left_out_where_a_bound_is_given():
    task, federation = linear(SIZES, names=None)
    method = Hostile(NEWTON, prior=0.7, eta=40.0, when=5)
    kept, left_out = (
        cs.fit(m, task, federation, rounds=5, engine=ENGINE, progress=False).history[-1]["rejected"]
        for m in (method, replace(method, max_surprise=20.0))
    )
    assert not kept
    assert [r["client"] for r in left_out] == [federation.name(1)]
    assert "the distance of its tilted mean" in left_out[0]["reason"]


@pytest.mark.slow
def test_where_all_have_converged_rounding_is_not_surprising():
    task, federation = linear(SIZES, names=None)
    method = cs.FedEP(NEWTON, prior=0.7, max_surprise=20.0)
    run = cs.fit(method, task, federation, rounds=150, engine=ENGINE, progress=False)
    assert not any(line["rejected"] for line in run.history)


@pytest.mark.parametrize(("infer", "prior", "advised"), [(NEWTON, 0.0, True), (NEWTON, 1.0, False), (None, 0.0, False)])
def test_a_refusal_names_the_prior_where_sites_begin_without_information(infer, prior, advised):
    method = cs.FedEP(infer or cs.inference.Identity(), prior=prior)
    n, cavity = torch.ones(1, 1).double(), gaussians(2, clients=1)
    q = rows(gaussians(0), 0)
    found = measured(q, cs.Gaussian(q.eta, -2 * q.lam.expand(1, -1)), 1.0, cavity, n, round_size=1)
    assert ("give a prior such as prior=1.0" in method.objection(found)) == advised
