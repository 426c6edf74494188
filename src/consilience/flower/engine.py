"""The engine whose clients are real sites."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.algorithms.switch import Method, phases
from consilience.core.errors import ConfigError
from consilience.core.files import CHECKPOINTS
from consilience.data import Federation
from consilience.engines import ALONE, PRECISIONS, Alone, Plan, Ranks
from consilience.flower.coordinator import Coordinator
from consilience.flower.exchange import Exchange
from consilience.flower.folding import Spill
from consilience.flower.registry import Registry, RemoteFederation
from consilience.flower.secure_session import SecureExchange, SecureSession
from consilience.flower.session import FlowerSession
from consilience.tasks.task import Task


@dataclass(frozen=True)
class Flower:
    """An engine whose clients are sites with their own data, which a Flower server app reaches."""

    coordinator: Coordinator
    registry: Registry
    place: Path
    method: Method
    device: str = "cpu"
    precision: str = "float32"
    secure: bool = False
    cohort: int | None = None
    """The most clients of a round; None for all, however many join."""
    leads = True
    saved_tokens: deque[Tensor] = field(default_factory=lambda: deque(maxlen=CHECKPOINTS))
    """The tokens in the checkpoints on the server's disk."""

    @cached_property
    def _started(self) -> Registry:
        """The registry with the number of this start. It is written when the run opens, and so by the one server that
        has locked the run's directory."""
        return self.registry.started(self.place)

    @contextmanager
    def started(self) -> Iterator[tuple[Flower, Ranks]]:
        yield self, _Alone()

    def open(
        self,
        algorithm: Algorithm,
        task: Task,
        federation: Federation,
        *,
        seed: int,
        cohort: int,
        rounds: int,
        plan: Plan | None = None,
        ranks: Ranks = ALONE,
    ) -> FlowerSession:
        if not isinstance(federation, RemoteFederation):
            raise ConfigError(
                f"{algorithm.name} moves the data to one place, which a real federation cannot do: choose another "
                "method"
            )
        prepared = task.prepare(
            torch.device(self.device), PRECISIONS[self.precision], compile=False, bf16=False, chunk=1
        )
        started = self._started
        Spill(self.place).clear()
        self.coordinator.activity.open(self.place, secure=self.secure)
        kind, session = (SecureExchange, SecureSession) if self.secure else (Exchange, FlowerSession)
        exchange = kind(
            self.coordinator,
            started.founding(),
            algorithm,
            prepared,
            federation,
            stage=next(i for i, phase in enumerate(phases(self.method)) if phase.algorithm is algorithm),
            seed=seed,
            most=self.cohort,
            precision=self.precision,
            folder=self.place,
        )
        return session(exchange, self.saved_tokens)


class _Alone(Alone):
    def __str__(self) -> str:
        return "Flower"
