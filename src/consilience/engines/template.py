"""Templates: updates of the right types and shapes, from which engines know the form of all others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core import ConfigError
from consilience.core.records import Tree, leaves, to, tree_map
from consilience.data import Cohort, Federation
from consilience.engines.states import States
from consilience.engines.work import part_of, work_of
from consilience.secure import Encoding
from consilience.tasks.task import Task

EXAMPLES = 2  # of the client from which the template of an update is computed


def template_of(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    server: Tree,
    states: States,
    ids: Tensor,
    *,
    seed: int,
    cohort: int,
) -> tuple[Tree, frozenset[str]]:
    """(a client's update, the names of the notes that come with it): one step of `local` of the first client, on copies
    of the federation's first example. Beside its weights, which are those of `EXAMPLES` examples, the update has zeros
    that take no memory."""
    offsets = torch.tensor([0, EXAMPLES])
    two = Federation(federation.data, torch.zeros(EXAMPLES, dtype=torch.int64), offsets)
    clients = Cohort(
        two.to(task.device),
        torch.tensor([0]),
        round=1,
        round_size=cohort,
        seed=seed,
        dtype=task.dtype,
        augment=task.augment,
        limit=1,
        examples=federation.examples,
    )
    first = ids[:1]
    message = part_of(algorithm.message(server, first), slice(0, 1))
    update, _ = work_of(algorithm, task, message, to(states.gather(first), task.device), clients)
    one = tree_map(lambda leaf: leaf[0], update) if algorithm.additive else update
    names = (name.rpartition(".")[2] for name, _ in leaves(one))
    return tree_map(lambda leaf: leaf.cpu() if next(names) == "weight" else _hollow(leaf), one), frozenset(
        clients.notes
    )


def _hollow(leaf: Tensor) -> Tensor:
    """Zeros of the same shape, in the memory of one number."""
    return torch.zeros((), dtype=leaf.dtype).expand(leaf.shape)


def encoding_of(template: Tree, federation: Federation, cohort: int) -> Encoding:
    """The integers that stand for the updates of a round of `cohort` clients."""
    return Encoding.of(template, clients=cohort, largest=int(federation.sizes.max()), examples=federation.examples)


def check_hidden(methods: Iterable[Algorithm]) -> None:
    """Refuse methods that cannot learn from sums alone."""
    for method in methods:
        if not method.additive:
            raise ConfigError(
                f"{method.name} needs the clients' updates one by one, which secure sums hide: leave secure out, or "
                "choose a method whose updates add up"
            )
