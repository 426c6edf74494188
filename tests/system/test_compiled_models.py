"""Compiled natural-parameter networks have the same gradients."""

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.inference import sigmoid_moments
from consilience.models.npn import ReLU, Sigmoid, Tanh, npn

LAYERS = (Sigmoid(), Tanh(), ReLU())


class Each(nn.Module):
    """Every activation on its share of the coordinates, in one graph."""

    def forward(self, mean, var):
        parts = zip(mean.chunk(len(LAYERS), -1), var.chunk(len(LAYERS), -1), LAYERS, strict=True)
        return tuple(map(torch.cat, zip(*(layer(m, v) for m, v, layer in parts), strict=True)))


def loss(task, theta, f, mean, var):
    out, spread = task.call_one("npn", theta, *sigmoid_moments(f, mean, var))
    return (out.square() + spread - spread.log()).mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
def test_compiled_networks_have_the_same_gradients():
    made = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        task = cs.Classification(nn.Linear(2, 2)).extend(npn=npn(3, 9, 6, Each()))
    theta = task.initial() + 0.1 * torch.randn(3, task.size, generator=made)
    f, mean, log_var = (torch.randn(3, size, generator=made) for size in (1, 3, 3))
    case = theta, f, mean, log_var.exp()
    compiled = task.prepare(compile=True, chunk=3)
    for got, wanted in zip(compiled.gradient(loss)(*case), task.gradient(loss)(*case), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
