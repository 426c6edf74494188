"""Recurrences over time: by hand, their derivatives, in cohorts, and the GPU's kernels."""

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from consilience.compute.kernels import scan as kernels
from consilience.compute.scan import gated_scan, linear_scan


def by_hand(new: Tensor, forget: Tensor, v: Tensor) -> Tensor:
    c, found = torch.zeros_like(new[..., 0, :]), []
    for t in range(new.shape[-2]):
        f = (forget[..., t, :] + v * c).sigmoid()
        c = f * c + (1 - f) * new[..., t, :]
        found.append(c)
    return torch.stack(found, -2)


def inputs(*clients: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 5, 3), (2, 5, 3), (3,))
    return tuple(torch.randn(*clients, *shape, generator=generator, dtype=torch.float64) for shape in shapes)


def square(run):
    return lambda *args: run(*args).square().sum()


def test_the_gated_recurrence_and_its_two_derivatives():
    given = inputs()
    torch.testing.assert_close(gated_scan(*given), by_hand(*given))
    given = tuple(x.requires_grad_() for x in given)
    assert torch.autograd.gradcheck(gated_scan, given)
    assert torch.autograd.gradgradcheck(gated_scan, given)


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, 0, None), (None, 0, 0), (0, None, 0), (None, None, 0)])
def test_clients_side_by_side_have_the_gradients_of_plain_code_inside_and_around_vmap(dims):
    given = tuple(x if dim == 0 else x[0] for x, dim in zip(inputs(4), dims, strict=True))
    inside = (vmap(grad(square(run), (0, 1, 2)), dims)(*given) for run in (gated_scan, by_hand))
    torch.testing.assert_close(*inside)
    leaves = [x.clone().requires_grad_() for x in given]
    around = (torch.autograd.grad(vmap(square(run), dims)(*leaves).sum(), leaves) for run in (gated_scan, by_hand))
    torch.testing.assert_close(*around)


def test_second_derivatives_of_clients_side_by_side():
    found = (vmap(jacrev(grad(square(run), 2), 2))(*inputs(3)) for run in (gated_scan, by_hand))
    torch.testing.assert_close(*found)


def test_the_linear_recurrence_mapped_over_one_argument():
    a, b, _ = inputs(3)
    torch.testing.assert_close(
        vmap(linear_scan, (None, 0))(a[0], b), torch.stack([linear_scan(a[0], one) for one in b])
    )
    y = linear_scan(a, b)
    torch.testing.assert_close(y[..., 1:, :], a[..., 1:, :] * y[..., :-1, :] + b[..., 1:, :])


@pytest.mark.parametrize(("width", "dtype"), [(3, torch.float64), (70, torch.float32)])
def test_the_kernels_of_a_gpu_compute_the_same(width, dtype):
    generator = torch.Generator().manual_seed(0)
    new, forget = (torch.randn(4, 6, width, generator=generator, dtype=dtype) for _ in range(2))
    v = torch.randn(2, width, generator=generator, dtype=dtype)
    torch.testing.assert_close(kernels.gated_scan(new, forget, v), by_hand(new, forget, v.repeat_interleave(2, 0)))
    torch.testing.assert_close(kernels.linear_scan(new, forget), linear_scan(new, forget))
