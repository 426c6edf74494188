"""The kernel for random numbers against plain code: interpreted on a CPU, as it is on a GPU."""

import pytest
import torch
from torch.func import vmap

from consilience.core import keys

pytest.importorskip("triton", reason="Triton comes with torch for GPUs, and with the development tools")
from consilience.compute.kernels.random import uniform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def some_keys(*shape):
    edges = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    drawn = keys.bits(torch.tensor(7), torch.Size(shape).numel()).view(shape)
    drawn.view(-1)[: len(edges)] = edges[: drawn.numel()]
    return drawn.to(DEVICE)


@pytest.mark.parametrize(("shape", "count"), [((5,), 1), ((2, 3), 700), ((), 2048)])
def test_the_kernel_draws_the_numbers_of_plain_code_to_the_bit(shape, count):
    key = some_keys(*shape)
    assert torch.equal(uniform(key, count), keys.uniform(key, count, torch.float32))


@pytest.mark.parametrize("dim", [0, 1])
def test_it_maps_over_clients(dim):
    key = some_keys(4, 3)
    found = vmap(lambda one: uniform(one, 9), dim)(key)
    assert torch.equal(found, keys.uniform(key.movedim(dim, 0), 9, torch.float32))


def test_a_key_that_all_clients_share_gives_all_the_same():
    key, w = some_keys(3), torch.ones(2, 1, 1, device=DEVICE)
    found = vmap(lambda one: one * uniform(key, 9))(w)
    assert torch.equal(found, keys.uniform(key, 9, torch.float32).expand(2, 3, 9))
