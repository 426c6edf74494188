"""σ(f z) times a Gaussian: against integrals, against its derivation, and at the limits of float32."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import log_expit
from torch.func import grad, vmap
from torch.nn.functional import logsigmoid

from consilience.core.gaussian import Gaussian
from consilience.inference import sigmoid_moments, sigmoid_site
from consilience.inference.sigmoid_moments import ZETA2, derivative, quadrature

both = pytest.mark.parametrize("by", [derivative, quadrature])


def cases(count=200, steepness=3.0, largest=3.0):
    """f ~ U(−steepness, steepness), m ~ N(0, 1), s ~ U(0.05, largest)."""
    made = torch.Generator().manual_seed(0)
    f, s = torch.rand(2, count, generator=made, dtype=torch.float64)
    m = torch.randn(count, generator=made, dtype=torch.float64)
    return steepness * (2 * f - 1), m, 0.05 + (largest - 0.05) * s


def integral(f, m, s):
    """Mean and variance by an adaptive rule."""
    reach = (12 + abs(f) * math.sqrt(s)) * math.sqrt(s)

    def density(z):
        return np.exp(log_expit(f * z) - (z - m) ** 2 / (2 * s))

    def expected(function):
        ends = m - reach, m + reach
        return quad(lambda z: function(z) * density(z), *ends, epsabs=1e-14, epsrel=1e-12, limit=500, points=[0, m])[0]

    total = expected(lambda z: 1.0)
    mean = expected(lambda z: z) / total
    return mean, expected(lambda z: (z - mean) ** 2) / total


@pytest.mark.parametrize(("steepness", "largest", "bound"), [(3, 4, 1e-7), (6, 10, 5e-3)])
def test_quadrature_is_the_integral(steepness, largest, bound):
    case = cases(20, steepness, largest)
    found = [integral(*one) for one in zip(*(part.tolist() for part in case), strict=True)]
    wanted = torch.tensor(found, dtype=torch.float64).T
    assert (torch.stack(sigmoid_moments(*case, by=quadrature)) - wanted).abs().max() < bound


@pytest.mark.parametrize(("largest", "mean", "var"), [(2, 0.005, 0.005), (3, 0.011, 0.023)])
def test_the_closed_form_is_near_quadrature(largest, mean, var):
    case = cases(2000, largest, largest)
    found, exact = (torch.stack(sigmoid_moments(*case, by=by)) for by in (derivative, quadrature))
    errors = (found - exact).abs().median(1).values
    assert errors[0] < mean
    assert errors[1] < var


@both
def test_moments_are_derivatives_of_log_z(by):
    f, m, s = cases(20)
    t = torch.linspace(-12, 12, 2001, dtype=torch.float64)

    def log_z(at, f, s):
        if by is derivative:
            return logsigmoid(f * at / torch.sqrt(1 + ZETA2 * f**2 * s))
        return (logsigmoid(f * (at + s.sqrt() * t)) - t**2 / 2).logsumexp(0)

    first, second = vmap(grad(log_z))(m, f, s), vmap(grad(grad(log_z)))(m, f, s)
    mean, var = sigmoid_moments(f, m, s, by=by)
    torch.testing.assert_close(mean, m + s * first, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(var, s + s**2 * second, rtol=1e-6, atol=1e-7)


def test_a_steep_sigmoid_at_the_mean_leaves_half_a_gaussian():
    f, m, s = (torch.tensor(value, dtype=torch.float64) for value in (1e6, 0.0, 2.0))
    mean, var = sigmoid_moments(f, m, s)
    assert float(mean) == pytest.approx(math.sqrt(2 * 2 / math.pi))
    assert float(var) == pytest.approx(2 * (1 - 2 / math.pi))


@both
def test_f_of_zero_changes_nothing(by):
    _, m, s = cases(50)
    f = torch.zeros_like(m)
    site = sigmoid_site(f, Gaussian.of(m, 1 / s), by=by)
    bound = 1e-12 if by is quadrature else 0
    for got, wanted in zip((*sigmoid_moments(f, m, s, by=by), site.eta, site.lam), (m, s, 0 * m, 0 * m), strict=True):
        torch.testing.assert_close(got, wanted, rtol=bound, atol=bound)


@both
def test_a_mirrored_sigmoid_mirrors_the_mean(by):
    f, m, s = cases()
    (mean, var), (mirrored, same) = sigmoid_moments(f, m, s, by=by), sigmoid_moments(-f, -m, s, by=by)
    torch.testing.assert_close((mirrored, same), (-mean, var))


@both
def test_site_times_cavity_is_tilted(by):
    f, m, s = cases()
    cavity = Gaussian.of(m, 1 / s)
    product = sigmoid_site(f, cavity, by=by) * cavity
    torch.testing.assert_close((product.mean, product.variance), sigmoid_moments(f, m, s, by=by))


def test_a_weak_site_keeps_its_digits_in_float32():
    f, m, s = cases(steepness=1e-2)
    wanted = sigmoid_site(f, Gaussian.of(m, 1 / s))
    got = sigmoid_site(f.float(), Gaussian.of(m.float(), 1 / s.float()))
    divided = (1 / sigmoid_moments(f.float(), m.float(), s.float())[1] - 1 / s.float()).double()
    off = ((got.lam.double() - wanted.lam) / wanted.lam).abs().median()
    assert off < 1e-6
    assert ((divided - wanted.lam) / wanted.lam).abs().median() > 100 * off
    torch.testing.assert_close(got.eta.double(), wanted.eta, rtol=1e-4, atol=1e-8)


def test_f_broadcasts_over_cavities_with_one_precision_or_many():
    f, m, s = cases(12)
    f, m, s = f[:4].unsqueeze(1), m.view(4, 3), s.view(4, 3)
    for lam in (1 / s, 1 / s[:, :1]):
        site = sigmoid_site(f, Gaussian.of(m, lam))
        alone = sigmoid_site(f[2], Gaussian.of(m[2], lam[2]))
        assert site.eta.shape == site.lam.shape == (4, 3)
        torch.testing.assert_close((site.eta[2], site.lam[2]), (alone.eta, alone.lam))


def anywhere(least, most):
    return st.floats(math.log10(least), math.log10(most)).map(lambda power: 10**power)


many = settings(max_examples=60, deadline=None)
numbers = given(
    st.just(0.0) | st.builds(lambda size, sign: size * sign, anywhere(1e-6, 1e3), st.sampled_from([-1, 1])),
    st.floats(-1e4, 1e4) | st.just(0.0),
    anywhere(1e-6, 1e6),
)


@many
@numbers
def test_everywhere_in_float32_sites_are_proper_and_gradients_finite(f, m, s):
    inputs = [torch.tensor(value, dtype=torch.float32, requires_grad=True) for value in (f, m, s)]
    mean, var = sigmoid_moments(*inputs)
    site = sigmoid_site(inputs[0], Gaussian.of(inputs[1], 1 / inputs[2]))
    assert bool((var > 0) & (var <= inputs[2]))
    assert bool(site.lam >= 0)
    for value in (mean, var, site.eta, site.lam, *sigmoid_moments(*inputs, by=quadrature)):
        gradients = torch.autograd.grad(value, inputs, retain_graph=True)
        assert all(bool(part.isfinite()) for part in (value, *gradients))


@many
@numbers
def test_float32_agrees_with_float64(f, m, s):
    inputs = [torch.tensor(value, dtype=torch.float32) for value in (f, m, s)]
    f, m, s = (value.double() for value in inputs)
    mean, var = sigmoid_moments(*inputs)
    wanted, spread = sigmoid_moments(f, m, s)
    assert float(var) == pytest.approx(float(spread), rel=2e-6)
    # Rounding of g m, which may be large, is amplified only where the sigmoid is already saturated.
    assert float(mean) == pytest.approx(float(wanted), rel=2e-6, abs=2e-6 * float(m.abs() + s.sqrt()))


@both
def test_gradients_are_those_of_finite_differences(by):
    inputs = [part.clone().requires_grad_() for part in cases(5)]
    assert torch.autograd.gradcheck(lambda *case: sigmoid_moments(*case, by=by), inputs)
