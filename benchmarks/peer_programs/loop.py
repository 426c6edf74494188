"""The loop that one writes by hand, with all threads; on a GPU, with all data there."""

import sys

import networks
import torch
from common import Job, Turns
from torch.nn.functional import cross_entropy


def main():
    job = Job.of(sys.argv[1])
    module = networks.load(networks.network(job.name), job.initial).to(job.device)
    x, y, order = (torch.from_numpy(array).to(job.device) for array in (job.x, job.y, job.order))
    turns = Turns(lambda: networks.weights(module))
    turns.wait()
    for cohort in job.cohorts:
        before = [p.detach().clone() for p in module.parameters()]
        total = [torch.zeros_like(p) for p in before]
        for client in cohort:
            for p, start in zip(module.parameters(), before, strict=True):
                p.data.copy_(start)
            optimizer = torch.optim.SGD(module.parameters(), job.lr)
            rows = order[client]
            for batch in rows[torch.randperm(len(rows), device=job.device)].split(job.batch_size):
                optimizer.zero_grad()
                cross_entropy(module(x[batch]), y[batch]).backward()
                optimizer.step()
            for t, p in zip(total, module.parameters(), strict=True):
                t += p.detach() / len(cohort)
        for p, t in zip(module.parameters(), total, strict=True):
            p.data.copy_(t)
        networks.finish(job.device)
        turns.done()


main()
