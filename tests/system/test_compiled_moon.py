"""MOON's loss, compiled."""

from __future__ import annotations

import pytest
import torch

import consilience as cs
from support.scenarios import blobs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
def test_moons_loss_can_be_compiled():
    task, method = blobs()[0], cs.algorithms.MOON(mu=3.0)
    made = torch.Generator().manual_seed(7)
    models = task.initial() + 0.5 * torch.randn(3, task.size, generator=made)
    x, y = torch.randn(3, 7, 2, generator=made), torch.arange(7).expand(3, -1) % 3
    batch = cs.data.Batch(x, y, torch.ones(3, 7), torch.arange(3))
    own, w = (models, batch, models.flip(0)), models[2]
    plain, compiled = (
        task.prepare(compile=how, chunk=3).gradient(method.loss)(*own, shared=(w,)) for how in (False, True)
    )
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
