"""FedNP compiled."""

import pytest
import torch

import consilience as cs
from support.one_shot import learn
from support.scenarios import blobs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
def test_compiled_a_run_is_the_same():
    task, train, _ = blobs()
    plain, compiled = (
        learn(
            cs.FedNP(cs.SGD(lr=0.1, batch_size=8), latent=3, hidden=4),
            task,
            train,
            rounds=2,
            engine=cs.Simulator(device="cpu", precision="float64", chunk=6, workers=1, compile=how),
        )
        for how in (False, True)
    )
    assert compiled.task.execution.compiled
    torch.testing.assert_close(compiled.posterior.mean, plain.posterior.mean, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(compiled.server.q.eta, plain.server.q.eta, rtol=1e-8, atol=1e-10)
    assert not any("compiled code refused" in line["guards"] for line in compiled.history)
