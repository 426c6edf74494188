"""Plans: how a round's clients are computed. Chosen by the clock, written down, and followed by a resumed run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """How clients are computed: `chunk` at once (1: one after the other) in each of `workers` processes.
    Plans differ in speed, and in results by rounding only."""

    chunk: int
    workers: int = 1
    compile: bool = False
    why: str = "given"
    device: str = "cpu"

    def __str__(self) -> str:
        how = "one by one" if self.chunk == 1 else f"vectorised, chunks of {self.chunk}"
        parts = [how, *([f"{self.workers} workers"] if self.workers > 1 else []), *(["compiled"] * self.compile)]
        return f"{', '.join(parts)} ({self.why})"


def chunk_sizes(clients: int, workers: int, most: int) -> list[int]:
    """Chunks worth timing: one by one, then by fours, up to a worker's whole share and to `most`."""
    share = min(most, -(-clients // workers))
    return sorted({1, most, share, *(4**i for i in range(1, 8) if 4**i < most)})


def cheapest(times: dict[tuple[int, int], float], clients: int, compile: bool) -> Plan:
    """The plan with the shortest round, from seconds of a client's step in (chunk, workers). The last chunk of a
    worker may be smaller: its clients cost what they would in the largest measured chunk that is not larger."""

    def cost(chunk: int, workers: int) -> float:
        share = -(-clients // workers)
        whole, rest = share // chunk * chunk, share % chunk
        smaller = [c for c, w in times if w == workers and c <= rest]
        return whole * times[chunk, workers] + rest * times[max(smaller, default=chunk), workers]

    chunk, workers = min(times, key=lambda plan: cost(*plan))
    timing = ", ".join(f"{c}×{w}: {1e3 * t:.2g}" for (c, w), t in times.items())
    return Plan(chunk, workers, compile, f"ms a client step by chunk×workers: {timing}")
