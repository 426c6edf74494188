"""Adaptive server optimisers on Gaussian factors: they step the mean, and precisions cannot collapse."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import consilience as cs
from consilience.core import Gaussian, guards
from consilience.core.errors import ConfigError
from consilience.core.gaussian import FLOOR
from consilience.server.optimizers import AdaGrad, Adam, ServerOptimizer, Yogi

ADAPTIVE = [AdaGrad(lr=0.5), Adam(lr=0.5), Yogi(lr=0.5), AdaGrad(lr=0.5, beta1=0.5, eps_inside_root=True)]


def gaussian(seed: int, size: int = 6) -> Gaussian:
    made = torch.Generator().manual_seed(seed)
    lam = torch.rand(size, generator=made, dtype=torch.float64) + 0.1
    return Gaussian.of(torch.randn(size, generator=made, dtype=torch.float64), lam)


@given(seed=st.integers(0, 1000), share=st.floats(0, 0.999), which=st.sampled_from(ADAPTIVE), rounds=st.integers(1, 30))
def test_a_silent_client_does_not_move_the_mean(seed: int, share: float, which: ServerOptimizer, rounds: int) -> None:
    """FedSEP removes a client's share of q, and a client that says nothing puts nothing in its place."""
    q = before = gaussian(seed)
    memory = which.start(q)
    for _ in range(rounds):
        q, memory = which.step(q, q**-share, memory)
    torch.testing.assert_close(q.mean, before.mean, rtol=1e-9, atol=1e-9)
    left = (before.lam * max(1 - share, 0.1) ** rounds).clamp_min(FLOOR)
    torch.testing.assert_close(q.lam, left, rtol=1e-6, atol=0)


@pytest.mark.parametrize("which", ADAPTIVE, ids=repr)
def test_the_mean_takes_the_step_that_weights_would_take(which: ServerOptimizer) -> None:
    q, delta = gaussian(1), Gaussian(*(0.1 * torch.randn(2, 6).double()))
    mean, memory = q.mean, which.start(q.mean)
    ours = which.start(q)
    for _ in range(3):
        mean, memory = which.step(mean, (delta.eta - delta.lam * q.mean) / q.lam, memory)
        lam = torch.maximum(q.lam + delta.lam, q.lam / 10)
        q, ours = which.step(q, delta, ours)
        torch.testing.assert_close(q.mean, mean)
        torch.testing.assert_close(q.lam, lam)


def test_a_precision_falls_to_a_tenth_at_most_and_is_counted() -> None:
    q = Gaussian.of(torch.tensor([1.0, 1.0]), torch.tensor([4.0, 4.0]))
    optimiser = AdaGrad()
    with guards.watch() as acted:
        after, _ = optimiser.step(q, Gaussian.of(q.mean, torch.tensor([-5.0, -1.0])), optimiser.start(q))
    torch.testing.assert_close(after.lam, torch.tensor([0.4, 3.0]))
    torch.testing.assert_close(after.mean, q.mean)
    assert int(acted["precision falls to a tenth"]) == 1


def test_a_full_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="a full precision couples the weights"):
        AdaGrad().start(Gaussian(torch.zeros(2), torch.eye(2)))


def test_eps_inside_the_root_is_the_divisor_of_optax() -> None:
    step = torch.tensor([3.0, 0.0])
    for inside, divisor in ((True, (9 + 0.25) ** 0.5), (False, 3.25)):
        optimiser = AdaGrad(lr=1.0, eps=0.25, eps_inside_root=inside)
        moved, _ = optimiser.step(torch.zeros(2), step, optimiser.start(step))
        torch.testing.assert_close(moved, torch.tensor([3 / divisor, 0.0]))


def rare_words(clients: int = 20, words: int = 12) -> tuple[cs.Federation, cs.Dataset]:
    """Every client uses a few words only, so it is silent on the others."""
    made = torch.Generator().manual_seed(0)
    owner = torch.arange(clients * 20) % clients
    own = torch.rand(clients, words, generator=made).argsort(1)[:, :3]
    x = torch.zeros(len(owner), words)
    x.scatter_(1, own[owner], (torch.rand(len(owner), 3, generator=made) < 0.6).float())
    y = (x @ torch.randn(words, 4, generator=made) * 3 > 0.5).float()
    data = cs.Dataset(x, y)
    return cs.Federation.from_owner(data, owner), data


@pytest.mark.slow
@pytest.mark.parametrize("infer", [cs.inference.Laplace, cs.inference.NGVI], ids=lambda kind: kind.letter)
def test_learned_precisions_do_not_collapse_under_adagrad(infer: type[cs.inference.Laplace]) -> None:
    """With normalisers of their own for η and Λ, the mean of words that a round's clients do not use explodes."""
    federation, data = rare_words()
    torch.manual_seed(0)
    task, train = cs.MultiLabel(nn.Linear(12, 4)), cs.SGD(lr=0.5, epochs=2)
    ada = AdaGrad(lr=0.5, eps=1e-5)
    method = cs.Switch(cs.FedAvg(train, ada), cs.algorithms.FedSEP(infer(train, kappa=1.0, s0=1e-3), ada), at=20)
    run = cs.fit(method, task, federation, test=data, rounds=60, cohort=4, evaluate_every=20, progress=False)
    scores = [line["eval"]["micro_f1"] for line in run.history if "eval" in line]
    assert scores[-1] > scores[0] - 0.03
    belief = run.posterior
    assert isinstance(belief, Gaussian)
    assert float(belief.mean.abs().max()) < 20
    assert float(belief.lam.min()) > 1e-6
