"""Counts of how often a numerical guard had to act.

A guard that acts silently hides a bug; one that raises kills a run for one bad number. So guards act, and count:
whoever runs the computation opens `watch()` and puts the counts into the round's metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_counts: ContextVar[dict[str, Tensor] | None] = ContextVar("guard counts", default=None)


@contextmanager
def watch() -> Iterator[dict[str, Tensor]]:
    """Collect the counts of all guards that act inside the block; nested blocks do not see each other's."""
    counts: dict[str, Tensor] = {}
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)


def count(name: str, acted: Tensor) -> None:
    """Add the number of true entries of `acted`; stays on the device, so nothing waits for it."""
    counts = _counts.get()
    if counts is not None:
        counts[name] = counts.get(name, torch.zeros((), dtype=torch.int64, device=acted.device)) + acted.sum()
