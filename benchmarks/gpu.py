"""Milliseconds of one local step on a GPU: a cohort as a loop, as an eager vmap, and as we run it.

    python benchmarks/gpu.py                          # the whole table; some minutes, nearly all of it compilation
    python benchmarks/gpu.py --only ResNet-18 CNN     # some of it
    python benchmarks/gpu.py --precision float32
    python benchmarks/gpu.py --only "ResNet-18, 32" --clients 20 --profile

Every row is a cohort: K clients, batches of 20 (LoRA: 8 sequences of 128), weights of their own, plain SGD. `loop` is
plain PyTorch: one module, load the client's weights, forward, backward, step, copy out; it is measured on ten clients,
as it takes K times one.
`vmap` is `torch.func` without a compiler. `ours` is a step as a chain takes it, recorded and replayed; deep networks go
through in chunks of at most 50 clients. `fit` is a step of a whole round as `cs.fit` runs it: FedAvg, ten steps, with
batches, updates and their checks. `shared` is one model, compiled, channels last, on the same K · 20 images (of a
chunk): no federation at all. `peak` is the share of what the GPU reaches in large matrix products of that precision, in
the same run, for the multiplications that the step must do.

With `--profile` a step of ours is listed by kernels, with the multiplications a second that convolutions reach, and the
time that a large copy would take for the weights' bytes, if each were read and written as often as the step must.

Cohorts are compiled side by side, in processes of their own, and measured one after the other.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import consilience as cs
from consilience.compute.vectorize import stepper
from consilience.core import to
from consilience.data import Info
from consilience.data.batch import Batch
from consilience.engines import Plan
from consilience.engines.states import InMemory
from consilience.models import add_lora, cnn, lenet5, mlp, resnet18, transformer, vit
from consilience.optim import SGD

LARGEST, LOOPED, STEPS, TOP = 50, 10, 10, 30


def with_batchnorm(inputs, outputs):
    """ResNet-18 as it was published: BatchNorm in place of our GroupNorm."""
    module = resnet18(inputs, outputs)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.GroupNorm):
                setattr(parent, name, nn.BatchNorm2d(child.num_channels))
    return module


def vit_tiny(inputs, outputs):
    """ViT-tiny: 192 wide, 6 layers, 64 patches."""
    return vit(inputs, outputs, patch=4, width=192, depth=6, heads=3)


def lora(inputs, outputs):
    """Adapters of rank 8 on the queries, keys and values of a frozen transformer, 768 wide, 12 layers."""
    return add_lora(transformer(inputs, outputs, width=768, depth=12, heads=12), rank=8, targets=["q", "k", "v"])


NETWORKS = {
    "ResNet-18, 24 px": (resnet18, (3, 24, 24), 100, 20),
    "ResNet-18, 32 px": (resnet18, (3, 32, 32), 100, 20),
    "BatchNorm ResNet-18, 32 px": (with_batchnorm, (3, 32, 32), 100, 20),
    "ViT-tiny, 64 patches": (vit_tiny, (3, 32, 32), 100, 20),
    "LoRA on 12 layers of 768": (lora, (128,), 256, 8),
    "CNN, 28 px": (cnn, (1, 28, 28), 62, 20),
    "LeNet-5, 28 px": (lenet5, (1, 28, 28), 10, 20),
    "MLP 784-200-10": (mlp, (1, 28, 28), 10, 20),
}
DEEP = (resnet18, with_batchnorm, vit_tiny, lora)  # in chunks of at most LARGEST clients


@dataclass
class Row:
    """One cohort, in milliseconds a step of all its clients."""

    name: str
    clients: int
    batch: int
    loop: float
    vmap: float | None
    ours: float
    fit: float
    shared: float
    flops: float
    compiled_in: float

    def times(self, clients: int) -> Row:
        """A larger cohort, in chunks of this one."""
        if clients == self.clients:
            return self
        share = clients / self.clients
        longer = {name: getattr(self, name) * share for name in ("loop", "ours", "fit", "shared", "flops")}
        return replace(self, clients=clients, vmap=None, **longer)

    def text(self, peak: float) -> str:
        images = self.clients * self.batch / self.ours * 1e3
        eager = "–" if self.vmap is None else f"{self.vmap:.2f}"
        return (
            f"| {self.name} | {self.clients} | {self.loop:.1f} | {eager} | {self.ours:.2f} | {self.fit:.2f} | "
            f"{self.shared:.2f} | "
            f"{self.loop / self.ours:.0f}× | {images:,.0f} | {self.flops / self.ours / 1e9 / peak:.0%} | "
            f"{self.compiled_in:.0f} |"
        )


def milliseconds(step, repeats=5, steps=10):
    """Median over repeats of the mean over ten steps: within a round nothing waits for the device."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / steps)
    return 1e3 * sorted(times)[len(times) // 2]


GROUPS = {
    "convolutions, forward and images": ("_gather",),
    "convolutions, kernels": ("_kernels_grad",),
    "norms": ("_norm",),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma"),
    "compiled elementwise passes": ("triton_poi",),
    "compiled sums": ("triton_red", "triton_per"),
}


def profile(name, clients, bf16, peak, repeats=5):
    """Print the device milliseconds of a step of ours by groups of kernels, and its longest kernels."""
    torch.manual_seed(0)
    make, shape, classes, size = NETWORKS[name]
    module, batch, begun = make(shape, classes), batch_of(clients, shape, classes, size), time.perf_counter()
    step = ours(module, batch, bf16=bf16, compile=True)
    step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    print(f"{name}, {clients} clients: compiled in {seconds:.1f} s, {milliseconds(step):.2f} ms a step")
    with torch.profiler.profile() as tracer:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    rows = [(e.self_device_time_total / 1e3 / repeats, e.count / repeats, e.key) for e in tracer.key_averages()]
    rows = sorted((row for row in rows if row[0] and not row[2].startswith("aten::")), reverse=True)
    sums = dict.fromkeys([*GROUPS, "others"], 0.0)
    for ms, _, kernel in rows:
        sums[next((group for group, words in GROUPS.items() if any(w in kernel for w in words)), "others")] += ms
    print(f"{sum(sums.values()):.2f} ms busy: " + ", ".join(f"{group} {ms:.2f}" for group, ms in sums.items()))
    flops = flops_of(module, batch_of(1, shape, classes, size, "cpu")) * clients
    convolving, copied = sum(ms for group, ms in sums.items() if group.startswith("conv")), copied_in_a_second()
    print(f"convolutions: {flops / max(convolving, 1e-9) / 1e9:.0f} TFLOP/s of {peak:.0f}")
    weights = clients * sum(p.numel() for p in module.parameters() if p.requires_grad)
    moved = weights * (4 + 2 + 2 * 2 + 2 + 2 + 2 * 4)  # to bf16, read twice; gradient written and read; step
    print(f"weights: {moved / 1e9:.2f} GB at least, {moved / copied * 1e3:.2f} ms at {copied / 1e12:.2f} TB/s")
    for ms, count, kernel in rows[:TOP]:
        print(f"{ms:9.3f} ms {count:6g} × {kernel[:110]}")


def copied_in_a_second():
    """Bytes that a large copy reads and writes."""
    a = torch.randn(1 << 30, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / milliseconds(lambda: b.copy_(a)) * 1e3


def batch_of(clients, shape, classes, size, device="cuda"):
    """Images and their classes, or tokens and those after them."""
    tokens = len(shape) == 1
    x = torch.randint(classes, (clients, size, *shape)) if tokens else torch.randn(clients, size, *shape)
    y = torch.randint(classes, (clients, size, *(shape if tokens else ())))
    return to(Batch(x, y, torch.ones(clients, size), torch.arange(clients)), device)


def loss_of(output, y):
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def ours(module, batch, *, bf16, compile):
    clients, size = batch.w.shape
    kind = cs.LanguageModel if batch.y.dim() == 3 else cs.Classification
    task = kind(module).prepare("cuda", bf16=bf16, compile=compile, chunk=clients, even=True)
    chain, theta = SGD(lr=0.01), task.initial().repeat(clients, 1)
    along = stepper(task.gradient(), chain.advance)
    n = torch.full((clients, 1), float(size), device="cuda")
    return lambda: along(theta, batch, (), (), ((), None, None, None), (n, None, chain.lr))


def fitted(module, batch, *, bf16):
    """A round of FedAvg with `STEPS` local steps, by the engine that `cs.fit` has."""
    clients, size = batch.w.shape
    kind = cs.LanguageModel if batch.y.dim() == 3 else cs.Classification
    x, y = (t.repeat_interleave(STEPS, 1).flatten(0, 1).cpu() for t in (batch.x, batch.y))
    federation = cs.Federation.from_owner(cs.Dataset(x, y), torch.arange(clients).repeat_interleave(size * STEPS))
    method, ids = cs.FedAvg(SGD(lr=0.01, batch_size=size)), torch.arange(clients)
    engine = cs.Simulator(device="cuda", precision="bf16" if bf16 else "float32")
    plan = Plan(chunk=clients, compile=True, device="cuda")
    session = engine.open(method, kind(module), federation, seed=0, cohort=clients, rounds=10, plan=plan)
    numbers = (torch.tensor(n) for n in (0, clients, federation.examples))
    server, states = method.start(session.task, Info(session.task.initial(), *numbers)), InMemory(lambda ids: None)
    session.settle(server, states, ids, 1)
    return lambda: session.round(server, states, ids, 1)


def loop(module, batch, *, bf16):
    """A step of the first `LOOPED` clients."""
    module = copy.deepcopy(module).cuda()
    learned = [p for p in module.parameters() if p.requires_grad]
    weights = [[p.detach().clone() for p in learned] for _ in range(LOOPED)]
    optimizer = torch.optim.SGD(learned, lr=0.01)

    def step():
        for k in range(LOOPED):
            with torch.no_grad():
                for p, w in zip(learned, weights[k], strict=True):
                    p.copy_(w)
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                value = loss_of(module(batch.x[k]), batch.y[k])
            value.backward()
            optimizer.step()
            with torch.no_grad():
                for p, w in zip(learned, weights[k], strict=True):
                    w.copy_(p)

    return step


def shared(module, batch, *, bf16):
    module, x, y = copy.deepcopy(module).cuda(), batch.x.flatten(0, 1), batch.y.flatten(0, 1)
    if x.dim() == 4:
        module, x = module.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01, fused=True)

    @torch.compile(mode="reduce-overhead")
    def loss(x, y):
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            return loss_of(module(x), y)

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()

    return step


def flops_of(module, batch):
    """Of one client's step, forward and backward."""
    module = copy.deepcopy(module)
    with FlopCounterMode(display=False) as counter:
        loss_of(module(batch.x[0]), batch.y[0]).backward()
    return counter.get_total_flops()


def peak_of(bf16):
    """TFLOP/s of a large matrix product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16 if bf16 else torch.float32)
    return 2 * 8192**3 / milliseconds(lambda: a @ a) / 1e9


def begin(barrier, moved, turn):
    global READY, MOVED, TURN
    READY, MOVED, TURN = barrier, moved, turn


def chunk(name, clients):
    """How many clients go through at once."""
    return min(clients, LARGEST) if NETWORKS[name][0] in DEEP else clients


@contextmanager
def alone(number):
    """One after the other, in the order of the table: what has been measured when time is up has been printed."""
    with MOVED:
        MOVED.wait_for(lambda: TURN.value == number)
        try:
            yield
        finally:
            TURN.value += 1
            MOVED.notify_all()


def measured(number, name, clients, bf16):
    """A step of clients that go through at once."""
    try:
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(0)
        make, shape, classes, size = NETWORKS[name]
        module, batch, start = make(shape, classes), batch_of(clients, shape, classes, size), time.perf_counter()
        fast = ours(module, batch, bf16=bf16, compile=True)
        fast()
        torch.cuda.synchronize()
        compiled_in = time.perf_counter() - start
        whole = fitted(module, batch, bf16=bf16)
        whole()
        one = shared(module, batch, bf16=bf16)
        for _ in range(3):
            one()
        torch.cuda.empty_cache()
        flops = flops_of(module, batch_of(1, shape, classes, size, "cpu")) * clients
        READY.wait()
    except Exception:
        READY.abort()  # nobody is to wait for this one
        raise
    with alone(number):
        times = {"ours": milliseconds(fast), "shared": milliseconds(one)}
        times["fit"] = milliseconds(whole, 3, 3) / STEPS
        times["loop"] = milliseconds(loop(module, batch, bf16=bf16), 3, 3) * clients / LOOPED
        eager = None
        if make not in DEEP or clients <= 20:
            eager = milliseconds(ours(module, batch, bf16=bf16, compile=False), 3, 3)
        del fast, one, whole
        torch.cuda.empty_cache()
    return Row(name, clients, size, vmap=eager, flops=flops, compiled_in=compiled_in, **times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["bf16", "float32"], default="bf16")
    parser.add_argument("--only", nargs="+", default=[""], help="names of networks begin so")
    parser.add_argument("--clients", nargs="+", type=int, default=[10, 20, 100, 500])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    bf16 = options.precision == "bf16"
    torch.set_float32_matmul_precision("high")
    rows = [(n, k) for n in NETWORKS for k in options.clients if n.startswith(tuple(options.only))]
    cases = list(dict.fromkeys((n, chunk(n, k)) for n, k in rows))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, 2 * (os.cpu_count() or 1) // len(cases))))
    spawn = multiprocessing.get_context("spawn")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, python {platform.python_version()}", flush=True)
    peak = peak_of(bf16)
    print(f"{options.precision}; large products reach {peak:.0f} TFLOP/s\n")
    if options.profile:
        for case in cases:
            profile(*case, bf16, peak)
        return
    print(
        "| network | K | loop, ms | vmap, ms | ours, ms | fit, ms | shared, ms | loop / ours | img/s | peak "
        "| compiled in, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    torch.cuda.empty_cache()
    shared_things = spawn.Barrier(len(cases)), spawn.Condition(), spawn.Value("i", 0)
    with ProcessPoolExecutor(len(cases), spawn, initializer=begin, initargs=shared_things) as pool:
        found = {case: pool.submit(measured, number, *case, bf16) for number, case in enumerate(cases)}
        for name, clients in rows:
            print(found[name, chunk(name, clients)].result().times(clients).text(peak), flush=True)


if __name__ == "__main__":
    main()
