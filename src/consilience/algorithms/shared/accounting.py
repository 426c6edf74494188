"""ε of differential privacy, by Google's dp_accounting."""

import math
from functools import lru_cache
from typing import Any

import numpy as np

from consilience.core.errors import ConfigError


def epsilon(noise: float, cohort: int, clients: int, rounds: int, delta: float = 1e-5) -> float:
    """ε at `delta` of `rounds` sums with noise N(0, noise²), each over a new `cohort` of all `clients`, of vectors no
    longer than 1; inf without noise, 0 without rounds.

    Neighbouring federations differ in one client's data. A cohort has a fixed size, so a sum changes by up to 2, and
    the accountants' noise multiplier (deviation by sensitivity) is noise/2. ε is the smaller of two bounds: the Rényi
    divergences of sampling without replacement (Wang, Balle & Kasiviswanathan, 2019), and the exact one of Gaussian
    noise without sampling, which is smaller where all clients take part or noise is small."""
    if not (noise >= 0 and 0 < delta < 1 and 0 <= cohort <= clients and rounds >= 0):
        raise ConfigError(
            "noise must not be negative, delta must lie in (0, 1) and cohort must not exceed clients, "
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
    """(orders, Rényi divergences of one sum), which add up over rounds. In Rényi accounting the multiplier is relative
    to the sensitivity; privacy loss distributions (PLDAccountant) double the sensitivity themselves for a replaced
    record."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent, rdp

    accountant = rdp.RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    accountant.compose(SampledWithoutReplacementDpEvent(clients, cohort, GaussianDpEvent(multiplier)))
    return accountant.orders, accountant.rdp
