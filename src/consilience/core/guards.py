"""Counts of numerical guards, such as a raised precision.

A silent guard would hide a bug, and an exception would end a run for one bad number. So a guard acts and counts, and
the engine writes the counts of a `watch()` block into the round's metrics.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_counts: ContextVar[dict[str, Tensor] | None] = ContextVar("guard counts", default=None)


@contextmanager
def watch() -> Iterator[dict[str, Tensor]]:
    """Collect the counts of the guards that act inside the block; those of a nested block are its own."""
    counts: dict[str, Tensor] = {}
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)


def count(name: str, acted: Tensor) -> None:
    """Add the number of true entries of `acted`, on its device and without synchronisation."""
    counts = _counts.get()
    if counts is not None:
        counts[name] = counts.get(name, torch.zeros((), dtype=torch.int64, device=acted.device)) + acted.sum()
