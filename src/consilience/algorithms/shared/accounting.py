"""What differential privacy costs: ε, counted by Google's dp_accounting."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from consilience.core.errors import ConfigError


def epsilon(noise: float, cohort: int, clients: int, rounds: int, delta: float = 1e-5) -> float:
    """ε at `delta` of `rounds` sums over `cohort` of all `clients`, drawn anew each time, of vectors no longer than 1
    with noise N(0, noise²) on top; inf without noise, 0 without rounds.

    Neighbours are federations of which one client has other data. A cohort has a fixed size, so that is what can
    change, and it moves a sum by up to 2: what accountants call the noise multiplier, deviation by sensitivity, is
    noise/2. ε is the smaller of two bounds: the Rényi divergences of sampling without replacement (Wang, Balle &
    Kasiviswanathan, 2019), and without help from sampling the exact one of Gaussian noise, where all clients take part
    or noise is so small that sampling hides nothing.
    """
    if not (noise >= 0 and 0 < delta < 1 and 0 <= cohort <= clients and rounds >= 0):
        raise ConfigError(
            "noise must not be negative, delta must lie in (0, 1) and cohort be some of the clients, "
            f"got noise={noise}, delta={delta}, {cohort} of {clients} clients and {rounds} rounds"
        )
    if not noise or not rounds:
        return math.inf if rounds else 0.0
    try:
        import dp_accounting
    except ImportError as error:
        raise ConfigError("dp-accounting counts ε and is missing: pip install consilience[privacy]") from error
    with np.errstate(divide="ignore"):  # log 0 on the way to an ε of 0
        unsampled = float(dp_accounting.get_epsilon_gaussian(noise / 2 / math.sqrt(rounds), delta))
    if cohort == clients:
        return unsampled
    orders, divergences = _sampled(noise / 2, cohort, clients)
    return min(unsampled, float(dp_accounting.rdp.compute_epsilon(orders, rounds * divergences, delta)[0]))


@lru_cache(maxsize=64)
def _sampled(multiplier: float, cohort: int, clients: int) -> tuple[Any, Any]:
    """(orders, Rényi divergences of one sum), which take a while to compute, and add up over rounds. For Rényi
    accounting the multiplier is relative to the sensitivity, whatever neighbours are; privacy loss distributions
    (PLDAccountant) double the sensitivity themselves where one record is replaced."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent, rdp

    accountant = rdp.RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    accountant.compose(SampledWithoutReplacementDpEvent(clients, cohort, GaussianDpEvent(multiplier)))
    return accountant.orders, accountant.rdp
