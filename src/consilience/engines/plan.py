"""Plans: how a round's clients are computed. A resumed run follows the plan that was chosen first."""

from dataclasses import dataclass

from torch import Tensor


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


def compiled_sizes(plan: Plan, examples: Tensor) -> list[int]:
    """The cohorts for which a round's graphs are compiled, for the clients of a worker: a chunk and what remains of
    their number; and, where clients have different numbers of `examples`, those that are left when some have ended."""
    share = -(-len(examples) // plan.workers)
    sizes = {min(plan.chunk, share), share % plan.chunk or min(plan.chunk, share)}
    size = max(sizes)
    while size > 1 and bool((examples != examples[0]).any()):
        size = -(-size // 2)
        sizes.add(size)
    return sorted(sizes, reverse=True)


def finalists(
    times: dict[tuple[int, int], float], crews: list[tuple[int, int]], clients: int
) -> list[tuple[float, Plan]]:
    """The plans worth a trial, best first, with the seconds that a step of all clients is estimated to take: of each
    kind (alone or with workers, one by one or vectorised) the one with the shortest estimate, without kinds that take
    more than 1.5 times the shortest.

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
    costs = [(cost(*plan), plan) for plan in best.values()]
    shortest = min(seconds for seconds, _ in costs)
    timing = ", ".join(f"{c} on {t}: {1e3 * s:.2g}" for (c, t), s in times.items())
    why = f"ms a client step by chunk on threads: {timing}"
    return [(seconds, Plan(*plan, why=why)) for seconds, plan in costs if seconds <= 1.5 * shortest]
