"""σ(f z) times a Gaussian: against integrals, against its own derivation, and at the ends of float32."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import log_expit
from torch.func import grad, vmap

from consilience.core.errors import ConfigError
from consilience.core.gaussian import Gaussian
from consilience.inference import sigmoid_moments, sigmoid_site
from consilience.inference.sigmoid_moments import WAYS, ZETA2, quadrature

CLOSED, REAL = ("derivative", "corrected"), ("derivative", "corrected", "quadrature")
closed, real = (pytest.mark.parametrize("how", ways) for ways in (CLOSED, REAL))


def cases(count=2000, slope=3.0, largest=3.0, seed=0):
    """f ~ U(−slope, slope), m ~ N(0, 1), s ~ U(0.05, largest)."""
    made = torch.Generator().manual_seed(seed)
    f, s = torch.rand(2, count, generator=made, dtype=torch.float64)
    m = torch.randn(count, generator=made, dtype=torch.float64)
    return slope * (2 * f - 1), m, 0.05 + (largest - 0.05) * s


def integrals(f, m, s):
    """Mean and variance by an adaptive rule, one case at a time."""
    found = [integral(*case) for case in zip(f.tolist(), m.tolist(), s.tolist(), strict=True)]
    return torch.tensor(found, dtype=torch.float64).T


def integral(f, m, s):
    reach = (12 + abs(f) * math.sqrt(s)) * math.sqrt(s)
    peak = logarithm(np.linspace(m - reach, m + reach, 1001), f, m, s).max()

    def expected(power, centre):
        def integrand(z):
            return (z - centre) ** power * np.exp(logarithm(z, f, m, s) - peak)

        ends = m - reach, m + reach
        return quad(integrand, *ends, epsabs=1e-12, epsrel=1e-12, limit=500, points=[0.0, m])[0]

    total = expected(0, 0.0)
    mean = expected(1, 0.0) / total
    return mean, expected(2, mean) / total


def logarithm(z, f, m, s):
    """Of σ(f z) exp(−(z − m)²/2s)."""
    return log_expit(f * z) - (z - m) ** 2 / (2 * s)


def errors(how, *case, exact=None):
    exact = exact_moments(*case) if exact is None else exact
    return [(got - wanted).abs() for got, wanted in zip(sigmoid_moments(*case, how), exact, strict=True)]


def exact_moments(f, m, s):
    pull, lost = quadrature(f, m, s, nodes=4001, reach=20.0)
    return m + s * pull, s * (1 - lost)


# Accuracy


@pytest.mark.parametrize(("slope", "largest", "bound"), [(3, 4, 1e-7), (6, 10, 5e-3)])
def test_quadrature_is_the_integral(slope, largest, bound):
    case = cases(60, slope, largest)
    exact = integrals(*case)
    for error in errors("quadrature", *case, exact=exact):
        assert error.max() < bound
    for got, wanted in zip(exact_moments(*case), exact, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("how", "slope", "largest", "mean", "var"),
    [
        ("derivative", 2, 2, 0.005, 0.005),
        ("corrected", 2, 2, 0.022, 0.016),
        ("derivative", 3, 3, 0.011, 0.023),
        ("corrected", 3, 3, 0.05, 0.034),
    ],
)
def test_closed_forms_are_near_the_integral(how, slope, largest, mean, var):
    found = errors(how, *cases(2000, slope, largest))
    assert found[0].median() < mean
    assert found[1].median() < var


@pytest.mark.parametrize(("slope", "largest"), [(1, 1), (2, 2), (3, 3), (6, 10)])
def test_derivative_is_nearer_than_corrected(slope, largest):
    case = cases(2000, slope, largest)
    ours, theirs = (errors(how, *case) for how in CLOSED)
    assert ours[0].median() < theirs[0].median()
    assert ours[1].median() < theirs[1].median()


def negative(how, *case):
    return float((sigmoid_moments(*case, how)[1] < 0).double().mean())


def test_the_printed_variance_is_negative_in_a_third_of_cases_and_no_other_is():
    case = cases(20_000)
    assert 0.34 < negative("printed", *case) < 0.41
    assert [negative(how, *case) for how in REAL] == [0, 0, 0]


def test_in_a_wider_range_corrected_is_negative_too():
    case = cases(20_000, 6, 10)
    assert 0.05 < negative("corrected", *case) < 0.12
    assert negative("derivative", *case) == 0


# Derivation


def test_derivative_differentiates_the_log_of_one_sigmoid():
    f, m, s = cases(200)

    def log_z(at, f, s):
        return torch.nn.functional.logsigmoid(f * at / torch.sqrt(1 + ZETA2 * f**2 * s))

    first, second = vmap(grad(log_z))(m, f, s), vmap(grad(grad(log_z)))(m, f, s)
    mean, var = sigmoid_moments(f, m, s)
    torch.testing.assert_close(mean, m + s * first)
    torch.testing.assert_close(var, s + s**2 * second)


def test_the_moments_of_the_integral_are_derivatives_of_its_log():
    f, m, s = cases(50)
    t = torch.linspace(-12, 12, 4001, dtype=torch.float64)

    def log_z(at, f, s):
        return (torch.nn.functional.logsigmoid(f * (at + s.sqrt() * t)) - t**2 / 2).logsumexp(0)

    first, second = vmap(grad(log_z))(m, f, s), vmap(grad(grad(log_z)))(m, f, s)
    mean, var = sigmoid_moments(f, m, s, "quadrature")
    torch.testing.assert_close(mean, m + s * first, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(var, s + s**2 * second, rtol=1e-6, atol=1e-7)


def test_a_steep_sigmoid_at_the_mean_leaves_half_a_gaussian():
    f, m, s = (torch.tensor(value, dtype=torch.float64) for value in (1e6, 0.0, 2.0))
    mean, var = sigmoid_moments(f, m, s)
    assert float(mean) == pytest.approx(math.sqrt(2 * 2 / math.pi))
    assert float(var) == pytest.approx(2 * (1 - 2 / math.pi))


@real
def test_without_a_slope_nothing_happens(how):
    _, m, s = cases(50)
    f = torch.zeros_like(m)
    mean, var = sigmoid_moments(f, m, s, how)
    site = sigmoid_site(f, Gaussian.of(m, 1 / s), how)
    exact = {"rtol": 1e-12, "atol": 1e-12} if how == "quadrature" else {"rtol": 0, "atol": 0}
    for got, wanted in ((mean, m), (var, s), (site.eta, 0 * m), (site.lam, 0 * m)):
        torch.testing.assert_close(got, wanted, **exact)


@pytest.mark.parametrize("how", WAYS)
def test_a_mirrored_sigmoid_mirrors_the_mean(how):
    f, m, s = cases(200)
    (mean, var), (mirrored, same) = sigmoid_moments(f, m, s, how), sigmoid_moments(-f, -m, s, how)
    torch.testing.assert_close(mirrored, -mean)
    torch.testing.assert_close(same, var)


# Sites


@pytest.mark.parametrize("how", WAYS)
def test_site_times_cavity_is_tilted(how):
    f, m, s = cases(200)
    cavity = Gaussian.of(m, 1 / s)
    product = sigmoid_site(f, cavity, how) * cavity
    mean, var = sigmoid_moments(f, m, s, how)
    torch.testing.assert_close(1 / product.lam, var)
    torch.testing.assert_close(product.eta / product.lam, mean)


@closed
def test_a_faint_site_keeps_its_digits_in_float32(how):
    f, m, s = cases(200, slope=1e-2)
    wanted = sigmoid_site(f, Gaussian.of(m, 1 / s), how)
    got = sigmoid_site(f.float(), Gaussian.of(m.float(), 1 / s.float()), how)
    divided = (1 / sigmoid_moments(f.float(), m.float(), s.float(), how)[1] - 1 / s.float()).double()
    off = ((got.lam.double() - wanted.lam) / wanted.lam).abs().median()
    assert off < 1e-6
    assert ((divided - wanted.lam) / wanted.lam).abs().median() > 100 * off
    torch.testing.assert_close(got.eta.double(), wanted.eta, rtol=1e-4, atol=1e-8)


@real
def test_a_slope_for_each_client_meets_cavities_with_one_precision_or_many(how):
    f, m, s = cases(12)
    f, m, s = f[:4].unsqueeze(1), m.view(4, 3), s.view(4, 3)
    for lam in (1 / s, 1 / s[:, :1]):
        site = sigmoid_site(f, Gaussian.of(m, lam), how)
        assert site.eta.shape == site.lam.shape == (4, 3)
        alone = sigmoid_site(f[2], Gaussian.of(m[2], lam[2]), how)
        torch.testing.assert_close((site.eta[2], site.lam[2]), (alone.eta, alone.lam))


# The ends of float32


def anywhere(least, most):
    return st.floats(math.log10(least), math.log10(most)).map(lambda power: 10**power)


slopes = st.just(0.0) | st.builds(lambda size, sign: size * sign, anywhere(1e-6, 1e3), st.sampled_from([-1, 1]))
means = st.floats(-1e4, 1e4) | st.just(0.0)
variances = anywhere(1e-6, 1e6)
many = settings(max_examples=300, deadline=None)


@many
@given(slopes, means, variances)
def test_derivative_is_proper_everywhere_with_gradients(f, m, s):
    inputs = [torch.tensor(value, dtype=torch.float32, requires_grad=True) for value in (f, m, s)]
    mean, var = sigmoid_moments(*inputs)
    site = sigmoid_site(inputs[0], Gaussian.of(inputs[1], 1 / inputs[2]))
    assert bool((var > 0) & (var <= inputs[2]))
    assert bool(site.lam >= 0)
    for value in (mean, var, site.eta, site.lam):
        slopes = torch.autograd.grad(value, inputs, retain_graph=True)
        assert all(bool(part.isfinite()) for part in (value, *slopes))


@many
@given(slopes, means, variances)
def test_float32_agrees_with_float64(f, m, s):
    inputs = [torch.tensor(value, dtype=torch.float32) for value in (f, m, s)]
    f, m, s = (value.double() for value in inputs)
    mean, var = sigmoid_moments(*inputs)
    wanted, spread = sigmoid_moments(f, m, s)
    assert float(var) == pytest.approx(float(spread), rel=2e-6)
    # Rounding of g m, which may be large, is amplified only where the sigmoid has already decided.
    assert float(mean) == pytest.approx(float(wanted), rel=2e-6, abs=2e-6 * float(m.abs() + s.sqrt()))


@settings(max_examples=100, deadline=None)
@given(slopes, means, variances, st.sampled_from(["corrected", "quadrature"]))
def test_the_other_ways_are_finite_everywhere_with_gradients(f, m, s, how):
    inputs = [torch.tensor(value, dtype=torch.float32, requires_grad=True) for value in (f, m, s)]
    for value in sigmoid_moments(*inputs, how):
        slopes = torch.autograd.grad(value, inputs, retain_graph=True)
        assert all(bool(part.isfinite()) for part in (value, *slopes))


# As a part of a loss


@real
def test_gradients_are_those_of_finite_differences(how):
    inputs = [part.clone().requires_grad_() for part in cases(5)]
    assert torch.autograd.gradcheck(lambda *case: sigmoid_moments(*case, how), inputs)


def energy(f, m, s, how):
    mean, var = sigmoid_moments(f, m, s, how)
    return (mean.square() + var - var.log()).sum()


@real
def test_a_cohort_is_its_clients_one_by_one(how):
    f, m, s = cases(12)
    f, m, s = f[:4], m.view(4, 3), s.view(4, 3)
    slope = grad(lambda *case: energy(*case, how), argnums=(0, 1, 2))
    together = vmap(slope)(f, m, s)
    for k in range(4):
        torch.testing.assert_close(tuple(part[k] for part in together), slope(f[k], m[k], s[k]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
def test_compiled_it_is_the_same():
    f, m, s = (part.float() for part in cases(12))
    case = f[:4], m.view(4, 3), s.view(4, 3)

    def slopes(*case):
        return [vmap(grad(lambda *case: energy(*case, how), argnums=(0, 1, 2)))(*case) for how in REAL]  # noqa: B023

    compiled = torch.compile(slopes, fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(*case), slopes(*case), rtol=1e-4, atol=1e-5)


def test_an_unknown_way_is_refused_with_the_nearest():
    f, m, s = cases(1)
    with pytest.raises(ConfigError, match=r"how='derivate' .* did you mean 'derivative'\? allowed: corrected, "):
        sigmoid_moments(f, m, s, "derivate")
