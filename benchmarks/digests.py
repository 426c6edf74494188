"""The cost of digests of stored files, relative to a round.

    python benchmarks/digests.py [--clients 2] [--examples 32]

Two runs, with a checkpoint after every round: ResNet-18 (11 million weights) on random images, by FedEP with a variance
for each weight, and a linear model with the shortest rounds. It prints the seconds of a round, those that its digests
take when files are written, and their ratio; a simulated run computes digests beside the next round.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import consilience as cs
from consilience.core import pack, unpack
from consilience.core.records import nbytes
from consilience.core.seals import seal, seal_json, unseal, unseal_json
from consilience.runs.directory import Saved


def seconds(call: Callable[[], Any], times: int = 3) -> float:
    """The shortest of several calls."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def measured(name: str, task: cs.Task, x: torch.Tensor, y: torch.Tensor, clients: int, rounds: int) -> None:
    federation = cs.Federation.from_owner(cs.Dataset(x, y), torch.arange(len(x)) % clients)
    method = cs.FedEP(cs.inference.Laplace(cs.SGD(lr=0.01, batch_size=16)))
    with tempfile.TemporaryDirectory() as place:
        out = cs.runs.Storage(Path(place, "run"), checkpoint_every=1)
        engine = cs.Simulator(device="cpu", compile=False)
        run = cs.fit(method, task, federation, rounds=rounds, out=out, engine=engine, progress=False)
    saved, belief, line = Saved(run.server, run.states.snapshot(), None), run.posterior, run.history[-1]
    text = seal_json(line)
    size = (nbytes(saved) + nbytes(belief)) / 1e6
    plain = seconds(lambda: (pack(saved), pack(belief)))
    extra = max(0.0, seconds(lambda: (seal(saved), seal(belief))) - plain) + seconds(lambda: seal_json(line))
    written, sealed = pack(saved), seal(saved)
    more = seconds(lambda: unseal(sealed)) - seconds(lambda: unpack(written)) + seconds(lambda: unseal_json(text))
    a_round = min(line["seconds"] for line in run.history)
    print(
        f"{name}: {size:.1f} MB a checkpoint, {clients} clients; a round takes {a_round:.4g} s, packing "
        f"{plain:.3g} s, digests {extra:.3g} s ({extra / a_round:.2%} of a round); reading one again {more:.3g} s more",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--examples", type=int, default=32, help="of a client")
    given = parser.parse_args()
    torch.manual_seed(0)
    count = given.clients * given.examples
    task = cs.Classification(cs.models.resnet18((3, 32, 32), 10))
    measured("ResNet-18", task, torch.randn(count, 3, 32, 32), torch.arange(count) % 10, given.clients, 1)
    measured("linear", cs.Regression(nn.Linear(10, 1)), torch.randn(400, 10), torch.randn(400, 1), 4, 20)


if __name__ == "__main__":
    main()
