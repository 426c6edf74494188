"""Pooling in a pass: the same numbers and gradients as torch's own kernels."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from consilience.compute import pooling  # noqa: F401 - registers handlers
from consilience.compute.passes import Pass

SETTINGS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (2, 3), "stride": 1, "dilation": 2, "ceil_mode": True},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_maximum_and_its_gradient_are_torchs(settings):
    made = torch.Generator().manual_seed(0)
    x = torch.randint(4, (3, 5, 9, 8), generator=made).double()  # many maxima are equal
    x[0, 0, 0, 0] = float("nan")
    x.requires_grad_()
    right = F.max_pool2d(x, **settings)
    with Pass():
        found = F.max_pool2d(x, **settings)
    torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)
    upstream = torch.randn(right.shape, generator=made, dtype=torch.float64)
    gradients = (torch.autograd.grad(y, x, upstream)[0] for y in (found, right))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-14)


def test_the_maximum_of_other_layouts_is_torchs():
    x = torch.randn(3, 5, 8, 8, generator=torch.Generator().manual_seed(0))
    for given in (x.to(memory_format=torch.channels_last), x[0], x[:, :, ::2], x[:0]):
        with Pass():
            found = F.max_pool2d(given, 2)
        assert torch.equal(found, F.max_pool2d(given, 2))
