"""The elementwise part of a step in one compiled pass."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import consilience as cs
from consilience.compute.advance import OnePass
from consilience.core.gaussian import Gaussian
from consilience.optim.optimizers import Adam, AdamW
from support.runs import HERE, TRAIN, fit
from support.scenarios import linear

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "chain", [TRAIN, replace(TRAIN, weight_decay=0.1), Adam(), AdamW()], ids=lambda c: str(type(c))
)
@pytest.mark.parametrize("with_prior", [False, True])
def test_it_moves_weights_and_memory_as_plain_code_does(chain: cs.optim.Chain, with_prior: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(k: int) -> Tensor:
        return torch.randn(k, 33, generator=generator, dtype=torch.float64)

    whole = OnePass(chain.advance)
    for k in (5, 5, 3, 2, 1, 5):
        theta, g, n = drawn(k), drawn(k), torch.full((k, 1), 7.0, dtype=torch.float64)
        prior = Gaussian(drawn(k), drawn(k).abs()) if with_prior else None
        memory = chain.memory(theta)
        expected, remembered = theta.clone(), tuple(part.clone() for part in memory)
        for size in (0.1, 0.2):
            whole(theta, g.clone(), memory, prior, None, None, n, None, size)
            chain.advance(expected, g.clone(), remembered, prior, None, None, n, None, size)
        torch.testing.assert_close((theta, *memory), (expected, *remembered))
    assert whole.run is not whole.plain


def test_code_that_differs_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def double(theta: Tensor, g: Tensor, memory: tuple[Tensor, ...]) -> None:
        theta.add_(g, alpha=3 if torch.compiler.is_compiling() else 2)

    whole, theta = OnePass(double), torch.zeros(2, 3)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            whole(theta, torch.ones(2, 3), ())
    assert torch.equal(theta, torch.full((2, 3), 4.0))
    assert "the optimiser's step differs when it is compiled" in caplog.text


def test_code_that_cannot_be_compiled_runs_as_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(theta: Tensor, g: Tensor, memory: tuple[Tensor, ...]) -> None:
        theta.add_(g)

    whole, theta = OnePass(moved), torch.zeros(2, 3)
    monkeypatch.setattr(whole, "run", torch.compile(moved, backend=lambda graph, inputs: 1 / 0))
    with caplog.at_level(logging.WARNING):
        whole(theta, torch.ones(2, 3), ())
    assert torch.equal(theta, torch.ones(2, 3))
    assert "cannot be compiled" in caplog.text


def test_a_compiled_run_has_the_weights_of_a_plain_one() -> None:
    task, federation = linear()
    method = cs.algorithms.FedEP(cs.inference.Identity(TRAIN))
    engine = replace(HERE, precision="float64")
    plain, compiled = (fit(method, task, federation, engine=replace(engine, compile=c)) for c in (False, True))
    torch.testing.assert_close(compiled.posterior.mean, plain.posterior.mean, rtol=1e-9, atol=1e-9)
