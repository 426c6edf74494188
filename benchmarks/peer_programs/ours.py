"""Consilience with default settings, as a user calls it; with `--compile`, compiled; with `--bf16`, in bfloat16."""

import sys

import networks
import torch
from common import Job, Turns

import consilience as cs


def main():
    job = Job.of(sys.argv[1])
    module = networks.load(networks.network(job.name), job.initial)
    data = cs.Dataset(torch.tensor(job.x), torch.tensor(job.y), name=job.name)
    owner = torch.empty(len(data), dtype=torch.int64)
    owner[torch.tensor(job.order).flatten()] = torch.arange(len(job.order)).repeat_interleave(job.order.shape[1])
    federation = cs.Federation.from_owner(data, owner)
    how = {
        "compile": True if "--compile" in sys.argv else None,
        "precision": "bf16" if "--bf16" in sys.argv else "float32",
    }
    engine = cs.Simulator(device=job.device, **how)
    runs = []
    turns = Turns(lambda: networks.weights(runs[-1].model.cpu()))

    def alternate(run, line):
        if not runs:
            print(run.plan, file=sys.stderr)
        runs[:] = [run]
        networks.finish(job.device)
        turns.done()

    turns.wait()
    cs.fit(
        cs.FedAvg(cs.SGD(lr=job.lr, batch_size=job.batch_size)), cs.Classification(module), federation,
        rounds=len(job.cohorts), cohort=job.cohorts.shape[1], seed=0, engine=engine, callbacks=[alternate], out=None,
        progress=False,
    )  # fmt: skip


main()
