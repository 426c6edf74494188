"""Client optimisers against torch's, and against their formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from consilience.core.gaussian import Gaussian
from consilience.optim import SGD, Adam, AdamW, AMSGrad, RMSprop
from support.training import EXACT, SIZES, by_torch, walk, world

CHAINS = [
    SGD(lr=0.1, batch_size=5),
    SGD(lr=0.05, batch_size=8, epochs=2, momentum=0.9, weight_decay=0.1),
    SGD(lr=0.05, batch_size=100, epochs=3, momentum=0.5),
    AMSGrad(batch_size=5, epochs=2),
    AMSGrad(lr=0.1, batch_size=5, epochs=2, beta1=0.8, beta2=0.5, eps=1e-3),
    AMSGrad(lr=0.02, batch_size=8, epochs=2, beta1=0.0, beta2=0.0, weight_decay=0.1),
    AMSGrad(lr=0.0, batch_size=8),
    RMSprop(lr=0.1, batch_size=5, epochs=2, alpha=0.5, eps=1e-3),
    RMSprop(lr=0.02, batch_size=8, epochs=2, alpha=0.0, weight_decay=0.1),
    Adam(lr=0.02, batch_size=5, epochs=2),
    AdamW(lr=0.02, batch_size=5, epochs=2, weight_decay=0.5),
    Adam(lr=0.1, batch_size=5, epochs=2, beta1=0.5, beta2=0.9, eps=1e-3),
    Adam(lr=0.02, batch_size=5, epochs=3, beta1=0.0, weight_decay=0.1, longest=2),
]


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_every_step_of_every_client_is_torchs(chain):
    task, group = world(static=chain.batch_size == 5)
    seen = []
    for _ in chain.iterates(task.gradient(), task.initial(), group, look=lambda _, now: seen.append(now.clone())):
        pass
    for k in range(len(SIZES)):
        path, loss = by_torch(chain, group, k)
        found = [now[k] for now in seen if k < len(now)]
        assert len(found) == len(path) == int(chain.steps(group)[k])
        for mine, expected in zip(found, path, strict=True):
            torch.testing.assert_close(mine, expected, **EXACT)
        if chain.longest is None:
            torch.testing.assert_close(float(group.notes["loss"][k]), loss, **EXACT)


def stepped(chain, gradients, like):
    """The steps θ − θ' along the gradients, one after another."""
    theta, steps = torch.zeros_like(like), []
    memory = chain.memory(theta)
    for gradient in gradients:
        before = theta.clone()
        chain.move(theta, memory, torch.full_like(theta, gradient), torch.ones(len(theta), 1), None, 1.0)
        steps.append(before - theta)
    return steps


def test_amsgrad_never_forgets_a_large_gradient():
    steps = stepped(AMSGrad(lr=1.0, beta1=0.0, beta2=0.5), [100.0] + [1.0] * 98, torch.zeros(1, 1).double())
    torch.testing.assert_close(steps[-1], torch.full_like(steps[-1], (0.5 * 100.0**2) ** -0.5))


def test_adam_is_amsgrad_where_gradients_only_grow():
    one, other = (
        stepped(kind(lr=1.0), map(float, range(1, 20)), torch.zeros(1, 2).double()) for kind in (Adam, AMSGrad)
    )
    torch.testing.assert_close(torch.stack(one), torch.stack(other), **EXACT)


def test_adam_steps_along_a_constant_gradient_are_lr_in_single_precision_too():
    for step in stepped(AMSGrad(lr=1.0), [0.3] * 49, torch.zeros(2, 3)):
        torch.testing.assert_close(step, torch.ones(2, 3), rtol=1e-5, atol=0)


def test_rmsprop_is_not_corrected_for_its_start():
    """Step t along a constant gradient is lr/√(1 − αᵗ)."""
    steps = stepped(RMSprop(lr=1.0, alpha=0.99), [0.3] * 49, torch.zeros(2, 3).double())
    for t, step in enumerate(steps, 1):
        torch.testing.assert_close(step, torch.full_like(step, (1 - 0.99**t) ** -0.5), rtol=1e-6, atol=0)


def test_the_decay_of_adamw_is_no_part_of_a_prior():
    """The weights shrink beside the step along the gradient, and Adam's normalisation does not see it."""
    task, group = world()
    prior = Gaussian(torch.zeros(task.size).double(), torch.full((1,), 0.3).double())
    chain = AdamW(lr=0.01, batch_size=100, weight_decay=2.0)
    step, plain = (c(task, task.initial(), group, prior=prior) for c in (chain, replace(chain, weight_decay=0.0)))
    torch.testing.assert_close(step, plain - 0.02 * task.initial(), **EXACT)


@pytest.mark.parametrize("kind", [Adam, AMSGrad, RMSprop])
def test_an_adaptive_step_along_a_zero_gradient_is_zero(kind):
    assert not walk(kind(batch_size=5, epochs=2), world()[1], 7).any()


def test_the_noise_of_adam_is_added_to_gradients_with_the_stated_deviation():
    """With eps far above all gradients a step is lr/eps times the gradient."""
    _, group = world()
    chain = Adam(lr=1e6, batch_size=5, beta1=0.0, beta2=0.0, eps=1e6, noise=0.03)
    walked = walk(chain, group, 20_000)
    torch.testing.assert_close(walked.var(1), 0.03**2 * chain.steps(group)[:, 0], rtol=0.05, atol=0)
    assert float(walked.mean(1).abs().max()) < 0.005
    assert float(torch.corrcoef(walked).fill_diagonal_(0).abs().max()) < 0.05  # each client has its own noise
    assert not walk(replace(chain, noise=0.0), group, 7).any()
