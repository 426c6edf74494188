"""Means over the steps of an epoch (iterate averaging)."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from consilience.data.cohort import Cohort
from consilience.optim.chain import Chain
from consilience.tasks.task import Task


def epoch_means(chain: Chain, task: Task, theta: Tensor, cohort: Cohort, *, burn_in: int = 0) -> Iterator[Tensor]:
    """After every epoch the mean of every client's parameters over its steps, [K, P]; in the first `burn_in` epochs
    the last parameters. The same tensor may be yielded again: copy what must last."""
    total = torch.zeros(len(cohort), theta.shape[-1], dtype=theta.dtype, device=theta.device)
    count = torch.zeros_like(cohort.n)
    iterates = chain.iterates(
        chain.gradient(task), theta, cohort, pace=task.pace, running=task.running, look=_into(total, count)
    )
    for epoch, last in enumerate(iterates):
        yield last if epoch < burn_in else total / count.clamp_min(1)
        total.zero_()
        count.zero_()


def _into(total: Tensor, count: Tensor) -> Callable[[Tensor, Tensor], None]:
    def add(taken: Tensor, now: Tensor) -> None:
        total[: len(now)] += now
        count[: len(now)] += 1

    return add
