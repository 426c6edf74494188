"""FedEx's loss and transformers, compiled."""

from __future__ import annotations

import pytest
import torch

import consilience as cs
from consilience.core.records import tree_map
from consilience.models import add_lora, vit


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
def test_fedexs_loss_with_a_residual_can_be_compiled():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = add_lora(vit((1, 8, 8), 3, width=8, depth=1, heads=2), rank=2)
    task, method = cs.Classification(module).prepare(dtype=torch.float64), cs.algorithms.FedEx()
    made = torch.Generator().manual_seed(7)
    models = task.initial() + 0.5 * torch.randn(3, task.size, generator=made).double()
    x, y = torch.randn(3, 7, 1, 8, 8, generator=made).double(), torch.arange(7).expand(3, -1) % 3
    batch = cs.data.Batch(x, y, torch.ones(3, 7).double(), torch.arange(3))
    info = cs.data.Info(task.initial(), *(torch.tensor(v) for v in (0, 3, 21)))
    residual = tree_map(
        lambda value: torch.randn(value.shape, generator=made).to(value), method.start(task, info).residual
    )
    without, plain, compiled = (
        task.prepare(dtype=torch.float64, compile=how, chunk=3).gradient(method.loss)(models, batch, shared=(at,))
        for how, at in ((False, tree_map(torch.zeros_like, residual)), (False, residual), (True, residual))
    )
    torch.testing.assert_close(compiled, plain, rtol=1e-8, atol=1e-10)
    assert not torch.allclose(plain[1], without[1])
