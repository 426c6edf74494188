"""Seconds a round for the networks that people train: a plain PyTorch loop over clients against `cs.fit`, on the CPU.

    python benchmarks/models.py                  # all rows, some minutes on two cores
    python benchmarks/models.py LSTM GRU --repeats 9
    python benchmarks/models.py --quick          # two rounds of little work: does it run?

The loop is what one writes by hand: one module; for each client load the global weights, train it by torch.optim.SGD
with torch's own kernels, add the weights up. It uses all threads. Ours is `fit` with the default engine on the CPU,
which chooses its plan. They take turns, a round each, in one process; figures are medians over rounds without the
first. Loop and `fit` see the same batches and must give the same weights: to 1e-8 in float64 for two clients. Peak
memory is that of separate processes, each with its children, shared pages counted once. A ratio above 1 means that
`fit` is faster.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from dataclasses import dataclass, replace

import torch
from torch import nn

import consilience as cs
from consilience.core import keys
from consilience.models import add_lora, resnet18, vit
from simulator import peak_memory, seconds

CLASSES = 10
TRAIN = cs.SGD(lr=0.01, epochs=1, batch_size=20)


@dataclass(frozen=True)
class Work:
    """A network, the shape of an example, and the examples of each client."""

    what: str
    make: object
    shape: tuple[int, ...]
    clients: int = 10
    each: int = 80
    train: cs.SGD = TRAIN

    def module(self):
        torch.manual_seed(0)
        return self.make()

    def federation(self):
        made, count = torch.Generator().manual_seed(0), self.clients * self.each
        x, y = torch.randn(count, *self.shape, generator=made), torch.randint(CLASSES, (count,), generator=made)
        return cs.partition.iid(cs.Dataset(x, y, name="noise"), self.clients, seed=0)


class Encoder(nn.Module):
    """nn.TransformerEncoder on rows of vectors; the mean over positions."""

    def __init__(self, width=64, depth=2, heads=4):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        self.inputs = nn.Linear(16, width)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.head(self.encoder(self.inputs(x)).mean(1))


class Recurrent(nn.Module):
    """A recurrent layer on rows of vectors; its last output."""

    def __init__(self, kind, width=64):
        super().__init__()
        self.layer, self.head = kind(16, width, batch_first=True), nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


def small_vit():
    return vit((3, 32, 32), CLASSES, patch=4, width=64, depth=3, heads=4)


def adapted_vit():
    return add_lora(small_vit(), rank=4, also=("head",))


IMAGES, ROWS = (3, 32, 32), (32, 16)
WORK = {
    "ViT": Work("ViT, 3 blocks of 64, 64 patches", small_vit, IMAGES),
    "LoRA": Work("the same, frozen, LoRA of rank 4", adapted_vit, IMAGES),
    "BatchNorm": Work(
        "ResNet-18, width 8, BatchNorm", lambda: resnet18(IMAGES, CLASSES, width=8, norm="batch"), IMAGES, each=60
    ),
    "GroupNorm": Work("ResNet-18, width 8, GroupNorm", lambda: resnet18(IMAGES, CLASSES, width=8), IMAGES, each=60),
    "Transformer": Work("nn.TransformerEncoder, 2 layers of 64, 32 places", Encoder, ROWS, each=200),
    "LSTM": Work("nn.LSTM of 64, 32 places", lambda: Recurrent(nn.LSTM), ROWS, each=200),
    "GRU": Work("nn.GRU of 64, 32 places", lambda: Recurrent(nn.GRU), ROWS, each=200),
}


class Loop:
    """The hand-written loop over all clients."""

    def __init__(self, work, federation, dtype=torch.float32):
        self.federation, self.train, self.threads = federation, work.train, torch.get_num_threads()
        self.module = work.module().to(dtype).train()
        self.x, self.y = federation.data.x.to(dtype), federation.data.y
        self.weights = copy.deepcopy(self.learned())
        self.loss = nn.CrossEntropyLoss()

    def learned(self):
        """The parameters that are trained, by name; frozen ones and buffers stay in the module."""
        return {name: p.data for name, p in self.module.named_parameters() if p.requires_grad}

    def batches(self, number):
        """The shuffles that `fit` draws; prepared outside the clock."""
        ids = torch.arange(len(self.federation))
        key = keys.fold(keys.key(0, purpose="client", round=number, client=ids), "epoch 0")
        sizes = self.federation.sizes
        order = keys.permutations(key, sizes, int(sizes.max()))
        return [self.federation.indices(int(c))[order[i, : sizes[i]]] for i, c in enumerate(ids)]

    def round(self, shuffles):
        total = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        for rows in shuffles:
            for name, p in self.learned().items():
                p.copy_(self.weights[name])
            optimizer = torch.optim.SGD([p for p in self.module.parameters() if p.requires_grad], lr=self.train.lr)
            for batch in rows.split(self.train.batch_size):
                optimizer.zero_grad()
                self.loss(self.module(self.x[batch]), self.y[batch]).backward()
                optimizer.step()
            for name, p in self.learned().items():
                total[name].add_(p, alpha=len(rows))
        self.weights = {name: t / self.federation.examples for name, t in total.items()}

    def turn(self, number):
        """Seconds of a round, with all threads, whatever the engine has set."""
        shuffles, before = self.batches(number), torch.get_num_threads()
        torch.set_num_threads(self.threads)
        taken = seconds(self.round, shuffles)
        torch.set_num_threads(before)
        return taken

    def vector(self):
        return torch.cat([w.flatten() for w in self.weights.values()])


def fitted(work, federation, rounds, callbacks=(), **options):
    engine = cs.Simulator(device="cpu", **options)
    method, task = cs.FedAvg(work.train), cs.Classification(work.module())
    return cs.fit(method, task, federation, rounds=rounds, engine=engine, callbacks=list(callbacks), progress=False)


def verify(work):
    """Two clients, one round, float64: loop and `fit` agree."""
    work = replace(work, clients=2, each=30)
    federation = work.federation()
    loop = Loop(work, federation, torch.float64)
    loop.round(loop.batches(1))
    run = fitted(work, federation, 1, precision="float64", chunk=2, workers=1)
    torch.testing.assert_close(run.posterior.mean, loop.vector(), rtol=1e-8, atol=1e-8)


def measure(name, repeats, quick):
    work = sized(name, quick)
    verify(work)
    federation = work.federation()
    loop, times = Loop(work, federation), {"loop": [], "ours": []}

    def turns(run, line):
        times["ours"].append(line["seconds"])
        times["loop"].append(loop.turn(line["round"]))

    run = fitted(work, federation, 1 + repeats, [turns])
    median = {which: statistics.median(values[1:]) for which, values in times.items()}
    small = ["--quick"] if quick else []
    peak = {which: peak_memory(__file__, name, "--alone", which, *small) for which in median}
    plan, _, _ = str(run.plan).partition(" (")
    steps = -(-work.each // work.train.batch_size)
    print(
        f"| {work.what} | {work.clients} × {steps} | {median['loop']:.3f} | {median['ours']:.3f} | "
        f"{median['loop'] / median['ours']:.2f} | {peak['loop']:.0f} | {peak['ours']:.0f} | {plan} |",
        flush=True,
    )


def sized(name, quick):
    return replace(WORK[name], clients=3, each=40) if quick else WORK[name]


def alone(name, which, quick):
    """Two rounds of one of them, for its peak memory."""
    work = sized(name, quick)
    if which == "ours":
        fitted(work, work.federation(), 2)
        return
    loop = Loop(work, work.federation())
    for number in (1, 2):
        loop.turn(number)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(WORK), help=", ".join(WORK))
    parser.add_argument("--repeats", type=int, default=7, help="rounds that are timed")
    parser.add_argument("--quick", action="store_true", help="little work, two rounds")
    parser.add_argument("--alone", choices=["loop", "ours"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in options.networks:
        if name not in WORK:
            parser.error(f"unknown network {name}")
    if options.alone:
        alone(options.networks[0], options.alone, options.quick)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("| network | clients × steps | loop, s | ours, s | loop / ours | loop, MiB | ours, MiB | plan |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in options.networks:
        measure(name, 2 if options.quick else options.repeats, options.quick)


if __name__ == "__main__":
    main()
