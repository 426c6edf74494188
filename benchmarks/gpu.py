"""Milliseconds of one local step on a GPU: a cohort as a client loop, as an eager vmap, and as we run it.

    python benchmarks/gpu.py            # one table; a few minutes, mostly compilation

Every row is one cohort: K clients, batch B each, their own weights. `loop` is plain PyTorch: one module, load the
client's weights, forward, backward, SGD step, copy out. `shared` trains one model on the same K·B images: no
federation at all. `ours` is `Task.gradient`, compiled, plus the SGD step, as in `inference/chains.py`.
"""

from __future__ import annotations

import argparse
import platform
import time

import torch
import torch.nn.functional as F  # noqa: N812

import consilience as cs
from consilience.models import cnn, resnet18
from consilience.task import Batch


def milliseconds(step, repeats=7, steps=10):
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


def batch_of(clients, size, shape, classes):
    return Batch(
        torch.randn(clients, size, *shape, device="cuda"),
        torch.randint(classes, (clients, size), device="cuda"),
        torch.ones(clients, size, device="cuda"),
        torch.arange(clients, device="cuda"),
    )


def ours(module, batch, *, bf16, compile):
    clients = len(batch.x)
    task = cs.Classification(module).prepare("cuda", bf16=bf16, compile=compile, chunk=clients)
    theta, gradient = task.initial().repeat(clients, 1), task.gradient()

    def step():
        g, _ = gradient(theta, batch)
        theta.sub_(g, alpha=0.01)

    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return milliseconds(step), time.perf_counter() - start


def loop(module, batch, *, bf16, clients=None):
    """Milliseconds for all clients; with `clients`, measured on so many of them and scaled up."""
    module = module.cuda()
    measured = clients or len(batch.x)
    weights = [[p.detach().clone() for p in module.parameters()] for _ in range(measured)]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step():
        for k in range(measured):
            with torch.no_grad():
                for p, w in zip(module.parameters(), weights[k], strict=True):
                    p.copy_(w)
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                value = F.cross_entropy(module(batch.x[k]), batch.y[k])
            value.backward()
            optimizer.step()
            with torch.no_grad():
                for p, w in zip(module.parameters(), weights[k], strict=True):
                    w.copy_(p)

    return milliseconds(step, 3, 3) * len(batch.x) / measured


def shared(module, batch, *, bf16):
    joint = Batch(batch.x.flatten(0, 1)[None], batch.y.flatten()[None], batch.w.flatten()[None], batch.key[:1])
    return ours(module, joint, bf16=bf16, compile=True)[0]


def row(name, module, clients, size, shape, classes, bf16):
    torch.manual_seed(0)
    batch = batch_of(clients, size, shape, classes)
    slow = loop(module, batch, bf16=bf16)
    eager, _ = ours(module, batch, bf16=bf16, compile=False)
    fast, compile_s = ours(module, batch, bf16=bf16, compile=True)
    one = shared(module, batch, bf16=bf16)
    images = clients * size / fast * 1e3
    print(
        f"{name} {'bf16' if bf16 else 'fp32'} {clients}x{size}: loop {slow:.1f} ms, vmap {eager:.1f} ms, "
        f"shared model {one:.1f} ms, ours {fast:.2f} ms ({images:,.0f} img/s, first call {compile_s:.0f} s) "
        f"{slow / fast:.1f}x",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bf16", action="store_true", help="leave out the float32 rows")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, python {platform.python_version()}")
    for bf16 in (True, False)[: 1 if options.bf16 else 2]:
        row("ResNet-18", resnet18((3, 32, 32), 100), 20, 20, (3, 32, 32), 100, bf16)
        row("CNN", cnn((1, 28, 28), 62), 100, 20, (1, 28, 28), 62, bf16)


if __name__ == "__main__":
    main()
