"""The cost of secure sums: seconds and bytes of a round with and without them, and the server's peak memory.

python benchmarks/secure.py rounds [--sites 3 10 100] [--weights 10000 1000000 10000000]
python benchmarks/secure.py memory [--sites 200] [--weights 11000000] [--method FedAvg] [--secure]

Sites are in memory, and their messages are Flower's. `rounds` computes the sites one after another in this process and
times them apart from the server. `memory` computes every answer in a process of its own, so that the peak is that of
the server alone.
"""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from flwr.app import Message
from torch import nn

import consilience as cs

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from consilience.flower import Participation, client_app
from consilience.flower import app as flower_app
from consilience.flower.coordinator import Coordinator
from consilience.flower.messages import packed_records
from support.flower_grid import MemoryGrid, unhurried
from support.secure_sums import proofs

ROUNDS = 2  # the first compiles and imports; the second counts
EXAMPLES = 8  # of a site
SGD = cs.SGD(lr=0.1, batch_size=EXAMPLES)
METHODS = {"FedAvg": cs.FedAvg(SGD), "FedEP": cs.FedEP(cs.inference.Identity(SGD))}


class Wide(nn.Module):
    """A regression with many weights and few numbers in an example, so that rounds are about weights."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, weights))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w.square().mean() + self.w[:1]


@dataclass
class TimedGrid(MemoryGrid):
    """Counts the seconds of sites' answers, and the bytes of all messages."""

    seconds: float = 0.0
    down: int = 0
    up: int = 0

    def _answer(self, message: Message, node: object) -> Message | None:
        start = time.perf_counter()
        reply = super()._answer(message, node)
        self.seconds += time.perf_counter() - start
        self.down += size(message)
        self.up += 0 if reply is None else size(reply)
        return reply


@dataclass
class ForkedGrid(MemoryGrid):
    """Lets every answer be computed in a process of its own."""

    def _answer(self, message: Message, node: object) -> Message | None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "reply"
            child = os.fork()
            if not child:
                reply = super()._answer(message, node)
                file.write_bytes(pickle.dumps(None if reply is None or reply.has_error() else reply.content))
                os._exit(0)
            os.waitpid(child, 0)
            content = pickle.loads(file.read_bytes())
        return None if content is None else Message(content, reply_to=message)


def size(message: Message) -> int:
    if message.has_error():
        return 0
    content = message.content
    text = sum(len(str(value)) for record in content.config_records.values() for value in record.values())
    return text + sum(map(len, packed_records(content).values()))


def federation_of(sites: int) -> cs.Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sites * EXAMPLES, 1, generator=generator)
    owner = torch.arange(sites).repeat_interleave(EXAMPLES)
    return cs.Federation.from_owner(cs.Dataset(x, 2 * x), owner, names=[f"site {k:03}" for k in range(sites)])


def run(grid: MemoryGrid, method: str, sites: int, weights: int, secure: bool, folder: Path, callback) -> None:
    """Serve `ROUNDS` rounds to sites in memory."""
    task, federation = cs.Regression(Wide(weights)), federation_of(sites)
    for k in range(sites):
        name = federation.name(k)
        app = client_app(METHODS[method], task, lambda node, k=k: federation.client(k))
        grid.start(app, site=name, states=str(folder / "sites"), **(proofs(name) if secure else {}))
    with unhurried() as patch:
        patch.setattr(flower_app, "Coordinator", partial(Coordinator, clock=grid.clock, sleep=grid.sleep))
        flower_app.serve(
            grid, METHODS[method], task, participation=Participation(sites), rounds=ROUNDS, out=folder / "run",
            evaluate_every=ROUNDS + 1, callbacks=[callback], secure=secure,
        )  # fmt: skip


def round_cost(method: str, sites: int, weights: int, secure: bool) -> tuple[float, float, int, int]:
    """(seconds of the server, seconds of one site, bytes down and up of one site) in the last round."""
    grid, marks = TimedGrid(), []

    def mark(run, line) -> None:
        marks.append((time.perf_counter(), grid.seconds, grid.down, grid.up))

    with tempfile.TemporaryDirectory() as name:
        run(grid, method, sites, weights, secure, Path(name), mark)
    (start, before, *bytes_before), (end, after, *bytes_after) = marks[-2:]
    at_sites = after - before
    down, up = ((b - a) // sites for a, b in zip(bytes_before, bytes_after, strict=True))
    return end - start - at_sites, at_sites / sites, down, up


def rounds(arguments: argparse.Namespace) -> None:
    print("| sites | weights | server, plain | secure | a site, plain | secure | bytes up, plain | secure |")
    print("|---|---|---|---|---|---|---|---|")
    for sites in arguments.sites:
        for weights in arguments.weights:
            plain, hidden = (round_cost(arguments.method, sites, weights, secure) for secure in (False, True))
            seconds = (f"{plain[i]:.3f} s | {hidden[i]:.3f} s" for i in (0, 1))
            print(f"| {sites} | {weights:.0e} | {' | '.join(seconds)} | {plain[3]:,} | {hidden[3]:,} |", flush=True)


def memory(arguments: argparse.Namespace) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as name:
        run(ForkedGrid(), arguments.method, arguments.sites[0], arguments.weights[0], arguments.secure, Path(name),
            lambda run, line: None)  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bound = 4 * arguments.weights[0] * 8 / 1e6
    how = "secure" if arguments.secure else "plain"
    print(f"{arguments.method}, {how}: {arguments.sites[0]} sites × {arguments.weights[0]:,} weights: "
          f"{before / 1000:.0f} MB before, {peak / 1000:.0f} MB at the peak, {(peak - before) / 1000:.0f} MB more "
          f"(4 × P × 8 bytes = {bound:.0f} MB)")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rounds", "memory"])
    parser.add_argument("--sites", type=int, nargs="+")
    parser.add_argument("--weights", type=int, nargs="+")
    parser.add_argument("--method", choices=METHODS, default="FedAvg")
    parser.add_argument("--secure", action="store_true")
    arguments = parser.parse_args()
    every_round = arguments.what == "rounds"
    arguments.sites = arguments.sites or ([3, 10, 100] if every_round else [200])
    arguments.weights = arguments.weights or ([10**4, 10**6, 10**7] if every_round else [11_000_000])
    (rounds if every_round else memory)(arguments)


if __name__ == "__main__":
    main()
