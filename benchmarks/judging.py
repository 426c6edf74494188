"""The cost of judging updates: CPU seconds of a FedEP round with and without it, in turns.

python benchmarks/judging.py [--rounds 40]
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import consilience as cs
from consilience.algorithms.base import Algorithm, algorithm


@algorithm
class Trusting(cs.FedEP):
    """FedEP that measures and refuses nothing."""

    measures = Algorithm.measures

    def refusals(self, server: Any, update: Any, measures: dict[str, Tensor]) -> dict[int, str]:
        return {}


def seconds(method: cs.FedEP, task: cs.Task, federation: cs.Federation, rounds: int) -> float:
    """Median CPU seconds of a round."""
    engine = cs.Simulator(device="cpu", chunk=len(federation), workers=1, compile=False)
    times = [time.process_time()]
    callback = lambda run, line: times.append(time.process_time())  # noqa: E731
    cs.fit(method, task, federation, rounds=rounds, engine=engine, callbacks=[callback], progress=False)
    return statistics.median(b - a for a, b in pairwise(times[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    train = cs.load("mnist").train
    sgd = cs.SGD(lr=0.05, batch_size=20)
    print("| network | inference | with | without | cost |\n|---|---|---|---|---|")
    for hidden in ((32,), (200,)):
        for infer in (cs.inference.Identity(sgd), cs.inference.Laplace(sgd, epochs=1)):
            torch.manual_seed(0)
            task = cs.Classification(cs.models.mlp((1, 28, 28), 10, hidden))
            federation = cs.partition.iid(train[torch.arange(6000)], 10)
            pairs = [
                [seconds(kind(infer), task, federation, rounds // 4) for kind in (cs.FedEP, Trusting)] for _ in range(4)
            ]
            judged, trusting = (statistics.median(times) for times in zip(*pairs, strict=True))
            cost = statistics.median(a / b - 1 for a, b in pairs)
            print(
                f"| 784-{hidden[0]}-10 | {infer.letter} | {judged:.3f} s | {trusting:.3f} s | {cost:+.1%} |", flush=True
            )


if __name__ == "__main__":
    main()
