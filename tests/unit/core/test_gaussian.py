import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from consilience.core import guards
from consilience.core.errors import TaskError
from consilience.core.gaussian import FLOOR, Gaussian
from consilience.core.records import Point

P, K = 4, 3
FORMS = ["scalar", "diagonal", "full"]
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def draws(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def precision(form, *clients, seed=0, dtype=torch.float64):
    if form == "full":
        root = draws(*clients, P, P, seed=seed)
        return (root @ root.mT + torch.eye(P)).to(dtype)
    return (0.5 + draws(*clients, P if form == "diagonal" else 1, seed=seed).square()).to(dtype)


def gaussian(form, *clients, seed=0, dtype=torch.float64):
    lam = precision(form, *clients, seed=seed, dtype=dtype)
    return Gaussian.of(draws(*clients, P, seed=seed + 1, dtype=dtype), lam)


def matrix(q):
    return q.lam if q.full else torch.diag_embed(q.lam.expand_as(q.eta))


def reference(q):
    return MultivariateNormal(q.mean, precision_matrix=matrix(q))


def log_factor(q, theta):
    """ln of the unnormalised factor: ηᵀθ − ½θᵀΛθ."""
    return (q.eta * theta).sum(-1) - 0.5 * torch.einsum("...i,...ij,...j->...", theta, matrix(q), theta)


def assert_constant(values):
    torch.testing.assert_close(values, values[:1].expand_as(values), **EXACT)


pairs = pytest.mark.parametrize(("a", "b"), [(a, b) for a in FORMS for b in FORMS])
forms = pytest.mark.parametrize("form", FORMS)


@pairs
def test_products_and_quotients_have_those_of_the_densities(a, b):
    q, p, theta = gaussian(a, seed=1), gaussian(b, seed=5), draws(20, P, seed=9)
    q = q**50  # sharper than p, so that q / p is proper
    assert_constant((q * p).log_prob(theta) - q.log_prob(theta) - p.log_prob(theta))
    assert_constant((q / p).log_prob(theta) - q.log_prob(theta) + p.log_prob(theta))
    q, p = gaussian(a, K), gaussian(b, K, seed=5)
    back = q * p / p
    torch.testing.assert_close(back.eta, q.eta, **EXACT)
    torch.testing.assert_close(matrix(back), matrix(q), **EXACT)


@forms
def test_a_power_has_the_power_of_the_density(form):
    q, theta = gaussian(form), draws(20, P, seed=9)
    assert_constant((q**0.3).log_prob(theta) - 0.3 * q.log_prob(theta))


@pytest.mark.parametrize("clients", [(), (K,)], ids=["shared", "own"])
@forms
def test_each_client_may_have_its_own_power(form, clients):
    q, power = gaussian(form, *clients), torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.float64)
    for k in range(K):
        one = Gaussian(q.eta[k], q.lam[k]) if clients else q
        torch.testing.assert_close((q**power).eta[k], (one ** float(power[k])).eta, **EXACT)
        torch.testing.assert_close((q**power).lam[k], (one ** float(power[k])).lam, **EXACT)


@pytest.mark.parametrize("weights", [None, [[0.2], [0.5], [3.0]]])
@forms
def test_the_product_over_clients_multiplies_their_weighted_densities(form, weights):
    q, theta = gaussian(form, K), draws(20, P, seed=9)
    w = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    expected = sum((1 if w is None else w[k, 0]) * Gaussian(q.eta[k], q.lam[k]).log_prob(theta) for k in range(K))
    assert_constant(q.product(w).log_prob(theta) - expected)


@pytest.mark.parametrize("form", ["scalar", "diagonal"])
def test_the_product_counts_a_shared_precision_once_for_every_client(form):
    eta, lam = draws(K, P), precision(form)
    torch.testing.assert_close(Gaussian(eta, lam).product().lam, K * lam, **EXACT)
    torch.testing.assert_close(Gaussian(eta, lam).product().eta, eta.sum(0), **EXACT)


@forms
def test_a_shared_factor_multiplies_every_client_s(form):
    q, p = gaussian(form), gaussian(form, K, seed=5)
    for k in range(K):
        alone = q * Gaussian(p.eta[k], p.lam[k])
        torch.testing.assert_close((q * p).eta[k], alone.eta, **EXACT)
        torch.testing.assert_close((q * p).lam[k], alone.lam, **EXACT)


def test_the_flat_factor_changes_nothing():
    q = gaussian("diagonal", K)
    same = q * Gaussian.flat(q.eta)
    assert torch.equal(same.eta, q.eta)
    assert torch.equal(same.lam, q.lam)
    assert Gaussian.flat(q.eta).lam.shape == (K, 1)


@pytest.mark.parametrize("clients", [(), (K,)])
@forms
def test_moments_are_those_of_torch_distributions(form, clients):
    mean, lam = draws(*clients, P, seed=3), precision(form, *clients)
    q = Gaussian.of(mean, lam)
    torch.testing.assert_close(q.mean, mean, **EXACT)
    torch.testing.assert_close(q.variance, reference(q).variance, **EXACT)
    torch.testing.assert_close(q.entropy(), reference(q).entropy(), **EXACT)
    theta = draws(7, *clients, P, seed=4)
    torch.testing.assert_close(q.log_prob(theta), reference(q).log_prob(theta), **EXACT)
    if form == "diagonal":
        each = Normal(q.mean, q.lam.rsqrt())
        torch.testing.assert_close(q.log_prob(theta), each.log_prob(theta).sum(-1), **EXACT)
        torch.testing.assert_close(q.variance, each.variance, **EXACT)


@pytest.mark.parametrize("clients", [(), (K,)])
@pairs
def test_kl_is_that_of_torch_distributions(a, b, clients):
    q, p = gaussian(a, *clients, seed=1), gaussian(b, *clients, seed=5)
    torch.testing.assert_close(q.kl(p), kl_divergence(reference(q), reference(p)), **EXACT)


@pairs
def test_kl_of_a_shared_to_every_client_s_belief(a, b):
    q, p = gaussian(a, seed=1), gaussian(b, K, seed=5)
    for k in range(K):
        one = Gaussian(p.eta[k], p.lam[k])
        torch.testing.assert_close(q.kl(p)[k], q.kl(one), **EXACT)
        torch.testing.assert_close(p.kl(q)[k], one.kl(q), **EXACT)


@forms
def test_float32_is_float64_up_to_rounding(form):
    q, p = gaussian(form, seed=1), gaussian(form, seed=5)
    short, other = (Gaussian(g.eta.float(), g.lam.float()) for g in (q, p))
    theta = draws(P, seed=9)
    for a, b in [
        (short.mean, q.mean),
        (short.variance, q.variance),
        (short.entropy(), q.entropy()),
        (short.log_prob(theta.float()), q.log_prob(theta)),
        (short.kl(other), q.kl(p)),
    ]:
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


numbers = st.floats(-3, 3)
vectors = st.lists(numbers, min_size=3, max_size=3).map(lambda v: torch.tensor(v, dtype=torch.float64))


@settings(max_examples=15, deadline=None)
@given(vectors, vectors, vectors, vectors)
def test_kl_is_positive_unless_both_are_the_same(mean, other_mean, log_lam, other_log_lam):
    q, p = Gaussian.of(mean, log_lam.exp()), Gaussian.of(other_mean, other_log_lam.exp())
    kl, apart = float(q.kl(p)), float((mean - other_mean).abs().max() + (log_lam - other_log_lam).abs().max())
    assert kl >= -1e-12
    assert abs(float(q.kl(q))) < 1e-12
    if apart > 1e-3:
        assert kl > 1e-9


@forms
def test_samples_have_the_moments_of_the_density(form):
    q, count = gaussian(form, 2), 2000
    theta = q.sample(count, seed=3)
    assert theta.shape == (count, 2, P)
    for k in range(2):
        one = Gaussian(q.eta[k], q.lam[k])
        root = torch.linalg.cholesky(matrix(one))
        white = (theta[:, k] - one.mean) @ root  # covariance Λ⁻¹ becomes the identity
        assert float(white.mean(0).abs().max()) < 5 / count**0.5
        torch.testing.assert_close(white.mT @ white / count, torch.eye(P).double(), rtol=0, atol=7 / count**0.5)
    across = (
        (theta[:, 0] - q.mean[0]).mT @ (theta[:, 1] - q.mean[1]) / count / q.variance[0].sqrt() / q.variance[1].sqrt()
    )
    assert float(across.abs().max()) < 10 / count**0.5  # clients' draws are their own


@forms
def test_a_draw_depends_on_seed_and_number_alone(form):
    q, before = gaussian(form, K), torch.get_rng_state()
    assert torch.equal(q.sample(5, seed=1), q.sample(9, seed=1)[:5])
    assert not torch.equal(q.sample(1, seed=1), q.sample(1, seed=2))
    assert not torch.equal(*q.sample(2, seed=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_point_is_a_belief_without_uncertainty():
    point = Point(draws(P))
    assert torch.equal(point.mean, point.theta)
    assert torch.equal(point.variance, torch.zeros(P, dtype=torch.float64))
    assert torch.equal(point.sample(3, seed=1), point.theta.expand(3, P))
    with pytest.raises(TaskError, match="a Point has no density: learn a Gaussian posterior"):
        point.log_prob(point.theta)


@pytest.mark.parametrize("sign", [1, -1], ids=["proper", "improper"])
@forms
def test_the_energy_gradient_is_that_of_the_log_factor(form, sign):
    q, theta = gaussian(form, K) ** sign, draws(K, P, seed=8).requires_grad_()
    (expected,) = torch.autograd.grad(-log_factor(q, theta).sum(), theta)
    torch.testing.assert_close(q.energy_gradient(theta), expected, **EXACT)
    added = q.add_energy_gradient(torch.ones(K, P).double(), theta.detach())
    torch.testing.assert_close(added, 1 + expected, **EXACT)


@forms
def test_improper_factors_can_be_put_in_and_taken_out(form):
    q, site = gaussian(form), gaussian(form, seed=5)
    site = Gaussian(site.eta, -3 * site.lam)
    with guards.watch() as counts:
        back = q * site / site
        cavity = q / (q * q)
    assert not counts  # factors are no densities: no guard may act on them
    torch.testing.assert_close(back.lam, q.lam, **EXACT)
    torch.testing.assert_close(cavity.lam, -q.lam, **EXACT)


def test_proper_raises_what_is_below_the_floor_and_counts_it():
    q = Gaussian(torch.ones(2, 3), torch.tensor([[1.0, -2.0, 0.0], [FLOOR, 1e-9, 5.0]]))
    with guards.watch() as counts:
        fixed = q.proper()
    assert fixed.lam.tolist() == torch.tensor([[1.0, FLOOR, FLOOR], [FLOOR, FLOOR, 5.0]]).tolist()
    assert torch.equal(fixed.eta, q.eta)
    assert counts["precision floor"] == 3


def test_proper_raises_eigenvalues_and_leaves_eigenvectors():
    vectors, _ = torch.linalg.qr(draws(3, 3))
    values = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    with guards.watch() as counts:
        fixed = Gaussian(torch.ones(3).double(), vectors @ values.diag() @ vectors.mT).proper(floor=1e-3)
    expected = vectors @ torch.tensor([2.0, 1e-3, 0.5], dtype=torch.float64).diag() @ vectors.mT
    torch.testing.assert_close(fixed.lam, expected, **EXACT)
    assert counts["precision floor"] == 1


@forms
def test_a_proper_gaussian_is_left_alone(form):
    q = gaussian(form, K)
    with guards.watch() as counts:
        fixed = q.proper()
    assert torch.equal(fixed.lam, q.lam)
    assert int(counts["precision floor"]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 12])
def test_moments_of_an_improper_full_gaussian_are_finite_and_count_once(dtype, size):
    for seed in range(3):
        root = draws(K, size, size, seed=seed, dtype=dtype)
        q = Gaussian(draws(K, size, seed=99, dtype=dtype), 100 * (root + root.mT))
        low = int((torch.linalg.eigvalsh(q.lam) < FLOOR).sum())
        for moment in ("mean", "variance", "entropy"):
            with guards.watch() as counts:
                value = getattr(q, moment)
                value = value() if callable(value) else value
            assert bool(value.isfinite().all())
            assert int(counts["precision floor"]) == low
        with guards.watch() as counts:
            assert bool(q.sample(2).isfinite().all())
            assert int(counts["precision floor"]) == low
            assert bool(q.log_prob(torch.zeros(size, dtype=dtype)).isfinite().all())
            assert int(counts["precision floor"]) == 2 * low


def test_a_client_that_is_not_finite_spoils_its_own_moments_only():
    q = gaussian("full", K)
    lam = q.lam.clone()
    lam[1, 0, 2] = torch.nan
    broken = Gaussian(q.eta, lam)
    for value, fine in [(broken.mean, q.mean), (broken.variance, q.variance), (broken.entropy(), q.entropy())]:
        assert not value[1].isfinite().any()
        torch.testing.assert_close(value[[0, 2]], fine[[0, 2]], **EXACT)


def test_nested_watches_do_not_see_each_other_s_counts():
    bad = Gaussian(torch.zeros(5), -torch.ones(5))
    with guards.watch() as outer:
        bad.proper()
        with guards.watch() as inner:
            bad.proper()
            bad.proper()
        bad.proper()
    assert int(inner["precision floor"]) == 10
    assert int(outer["precision floor"]) == 10
    bad.proper()  # nobody watches: nothing to count into
    assert int(outer["precision floor"]) == 10


def test_a_watch_ends_with_an_error_too():
    with guards.watch() as outer:
        try:
            with guards.watch() as inner:
                raise RuntimeError
        except RuntimeError:
            guards.count("test", torch.tensor([True, False, True]))
    assert int(outer["test"]) == 2
    assert not inner


@forms
def test_first_takes_the_first_clients_and_leaves_shared_parts_alone(form):
    q, shared = gaussian(form, K), gaussian(form)
    assert torch.equal(q.first(2).eta, q.eta[:2])
    assert torch.equal(q.first(2).lam, q.lam[:2])
    assert torch.equal(shared.first(2).eta, shared.eta)
    one = precision("scalar")
    assert torch.equal(Gaussian(q.eta, one).first(2).lam, one)


@pytest.mark.parametrize("clients", [(), (K,)])
@forms
def test_the_norm_is_that_of_all_natural_parameters_in_one_vector(form, clients):
    q = gaussian(form, *clients)
    one_vector = torch.cat([q.eta.reshape(*clients, -1), q.lam.reshape(*clients, -1)], -1)
    assert q.norm.shape == (*clients, 1)
    torch.testing.assert_close(q.norm, one_vector.norm(dim=-1, keepdim=True), **EXACT)


@forms
def test_a_clipped_factor_has_the_norm_asked_for_and_its_direction(form):
    q = gaussian(form, K) ** torch.tensor([[0.01], [1.0], [100.0]], dtype=torch.float64)
    bound = float(q.norm[1]) * 0.9
    with guards.watch() as counts:
        clipped = q.clip(bound)
    assert int(counts["update clipped"]) == 2
    assert torch.equal(clipped.eta[0], q.eta[0])
    assert torch.equal(clipped.lam[0], q.lam[0])
    torch.testing.assert_close(clipped.norm[1:, 0], torch.full((2,), bound, dtype=torch.float64), **EXACT)
    for k in (1, 2):
        share = bound / float(q.norm[k])
        torch.testing.assert_close(clipped.eta[k], share * q.eta[k], **EXACT)
        torch.testing.assert_close(clipped.lam[k], share * q.lam[k], **EXACT)


def test_a_factor_of_norm_zero_can_be_clipped():
    nothing = Gaussian.flat(torch.zeros(K, P))
    with guards.watch() as counts:
        clipped = nothing.clip(1e-3)
    assert int(counts["update clipped"]) == 0
    assert torch.equal(clipped.eta, nothing.eta)
