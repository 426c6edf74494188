"""Variants of PFNM that its studies compare."""

import pytest
import torch

from consilience.core.errors import ConfigError
from consilience.matching import BetaBernoulli, match
from consilience.recipes.pfnm_variants import EvenPriors, EvenShares
from support.nets import net, permuted

NETS = [net(3, 5, 4, 2, seed=seed) for seed in range(4)]
SKEWED = torch.tensor([[0.7, 0.1], [0.1, 0.2], [0.1, 0.7], [0.1, 0.0]])


def equal(one, two):
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-9)
        for layer, other in zip(one.layers, two.layers, strict=True)
        for a, b in zip(layer, other, strict=True)
    )


@pytest.mark.parametrize("top_down", [False, True])
def test_even_shares_of_an_even_split_are_no_shares(top_down):
    even = torch.full((4, 2), 0.25)
    plain = match(NETS, top_down=top_down)
    alike = match(NETS, EvenShares(), shares=even, top_down=top_down)
    for (weight, _), (expected, _) in zip(alike.layers, plain.layers, strict=True):  # the last bias is not clustered
        torch.testing.assert_close(weight, expected)
    assert not equal(match(NETS, shares=even, top_down=top_down), plain)


@pytest.mark.parametrize("top_down", [False, True])
def test_even_priors_change_the_assignment_and_not_the_posterior_mean(top_down):
    copies = [permuted(NETS[0], seed)[0] for seed in range(4)]  # these have one assignment, up to names
    usual, even, shares = (
        match(copies, how(), shares=SKEWED, top_down=top_down) for how in (BetaBernoulli, EvenPriors, EvenShares)
    )
    assert usual.widths == even.widths == [5, 4]
    assert equal(usual, even)
    assert not equal(usual, shares)


def test_even_priors_refuse_a_stream():
    with pytest.raises(ConfigError, match="no posterior to continue a stream from"):
        match(NETS, EvenPriors(), memory=match(NETS, EvenPriors()).memory)
