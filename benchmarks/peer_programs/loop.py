"""The loop that one writes by hand, with all threads."""

import sys

import networks
import torch
from common import Job, Turns
from torch.nn.functional import cross_entropy


def main():
    job = Job.of(sys.argv[1])
    module = networks.load(networks.network(job.name), job.initial)
    x, y = torch.from_numpy(job.x), torch.from_numpy(job.y)
    turns = Turns(lambda: networks.weights(module))
    turns.wait()
    for cohort in job.cohorts:
        before = [p.detach().clone() for p in module.parameters()]
        total = [torch.zeros_like(p) for p in before]
        for client in cohort:
            for p, start in zip(module.parameters(), before, strict=True):
                p.data.copy_(start)
            optimizer = torch.optim.SGD(module.parameters(), job.lr)
            rows = torch.from_numpy(job.order[client])
            for batch in rows[torch.randperm(len(rows))].split(job.batch_size):
                optimizer.zero_grad()
                cross_entropy(module(x[batch]), y[batch]).backward()
                optimizer.step()
            for t, p in zip(total, module.parameters(), strict=True):
                t += p.detach() / len(cohort)
        for p, t in zip(module.parameters(), total, strict=True):
            p.data.copy_(t)
        turns.done()


main()
