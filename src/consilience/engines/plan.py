"""Plans: how a round's clients are computed. A resumed run follows the plan that was chosen first."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """How clients are computed: `chunk` at once (1: one after the other) in each of `workers` processes, which have
    `threads` threads each (0: as many as torch has; small networks are faster on one).
    Plans differ in speed, and in results by rounding only."""

    chunk: int
    workers: int = 1
    threads: int = 0
    compile: bool = False
    why: str = "given"
    device: str = "cpu"

    def __str__(self) -> str:
        how = "one by one" if self.chunk == 1 else f"vectorised, chunks of {self.chunk}"
        crew = [f"{self.workers} workers"] * (self.workers > 1) + ["one thread"] * (self.threads == 1 == self.workers)
        parts = [how, *crew, *(["compiled"] * self.compile)]
        return f"{', '.join(parts)} ({self.why})"


def chunk_sizes(clients: int, workers: int, most: int) -> list[int]:
    """Chunks worth timing: one by one, then by fours, up to a worker's whole share and to `most`."""
    share = min(most, -(-clients // workers))
    return sorted({1, most, share, *(4**i for i in range(1, 8) if 4**i < most)})


def finalists(
    times: dict[tuple[int, int], float], crews: list[tuple[int, int]], clients: int, compile: bool
) -> list[Plan]:
    """The plans worth a trial, best first: of each kind (alone or with workers, one by one or vectorised) the one with
    the shortest estimated round, without kinds that take more than 1.5 times the shortest.

    `crews` are (workers, threads of each), `times` the seconds of a client's step by (chunk, threads). The last chunk
    of a worker may be smaller: its clients cost as much as in the largest measured chunk that is not larger."""

    def cost(chunk: int, workers: int, threads: int) -> float:
        share = -(-clients // workers)
        whole, rest = share // chunk * chunk, share % chunk
        smaller = [c for c, t in times if t == threads and c <= rest]
        return whole * times[chunk, threads] + rest * times[max(smaller, default=chunk), threads]

    plans = [(chunk, *crew) for crew in crews for chunk, threads in times if threads == crew[1]]
    fitting = [plan for plan in plans if plan[0] <= -(-clients // plan[1])] or plans
    best: dict[tuple[bool, bool], tuple[int, int, int]] = {}
    for plan in sorted(fitting, key=lambda plan: cost(*plan)):
        best.setdefault((plan[0] > 1, plan[1] > 1), plan)
    shortest = min(cost(*plan) for plan in best.values())
    timing = ", ".join(f"{c} on {t}: {1e3 * s:.2g}" for (c, t), s in times.items())
    why = f"ms a client step by chunk on threads: {timing}"
    return [Plan(*plan, compile, why) for plan in best.values() if cost(*plan) <= 1.5 * shortest]
