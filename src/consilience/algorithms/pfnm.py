"""PFNM: clients' networks become one by telling which of their units are the same (Yurochkin et al., 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.alone import ONE_SHOT, Alone, Networks, Start
from consilience.core import keys
from consilience.core.errors import ConfigError, TaskError
from consilience.core.records import Point, record, to
from consilience.data.cohort import Info
from consilience.matching import BetaBernoulli, Clusterer, Memory, Stack, match, slice_of
from consilience.matching.streams import merged, of_clients, restart
from consilience.optim import Chain
from consilience.tasks.task import Task


@record
class Fused:
    """The global network θ, the `widths` of its hidden layers, and which of its units are whose: [clients, units of a
    client], −1 where a client is not in it. `chain` is the clients' stack of layers, `memory` what a stream knows."""

    theta: Tensor
    widths: Tensor
    units: Tensor
    chain: Tensor
    memory: Memory | None
    seed: Tensor


@algorithm
class PFNM(Alone):
    """Units of clients' networks are noisy copies of global units, which a Beta process draws: `how` infers which are
    the same and how many there are. One round is one-shot learning; in further rounds clients go on from their own
    slices of the global network. Only chains of linear and convolutional layers have units that can be matched.

    With `streaming` the posterior of a round is the prior of the next, and clients go on with the units that they have
    used most, `jitter` being the deviation of the noise on them: for federations that are streams. With
    `observe_missing`, what a client lacks was seen to be zero. `how` may be `DPMeans` instead, a baseline.
    """

    train: Chain = ONE_SHOT
    how: Clusterer = BetaBernoulli()
    streaming: bool = False
    jitter: float = 0.01
    observe_missing: bool = True

    def __post_init__(self) -> None:
        if self.streaming and not isinstance(self.how, BetaBernoulli):
            raise ConfigError(f"only a Beta-Bernoulli process can go on in a stream, not {self.how.name}")
        if not self.jitter >= 0:
            raise ConfigError(f"jitter is a standard deviation and must not be negative, got {self.jitter}")

    @property
    def name(self) -> str:
        """That of the clustering."""
        return self.how.name

    def adapt(self, task: Task, seed: int) -> Task:
        """The same; a module that is no chain is refused before anything is written."""
        Stack.of(task.module)
        return task

    def start(self, task: Task, info: Info) -> Fused:
        """The module's own weights, and nobody's units in it; after another method, its weights and everybody's."""
        stack, at = Stack.of(task.module), info.initial.device
        units = torch.cat([torch.arange(width, device=at) for width in stack.widths]).repeat(int(info.clients), 1)
        if info.before is None:
            units.fill_(-1)
        return Fused(info.initial, torch.tensor(stack.widths, device=at), units, stack.encoded(), None, info.seed)

    def check(self, task: Task, theta: Tensor, x: Tensor) -> None:
        """Hidden units must be free to change places, and to become more."""
        stack, name = Stack.of(task.module), type(task.module).__name__
        stack.check(task.predict, theta, x, name)
        wider = stack.with_widths([width + 1 for width in stack.widths])
        try:
            task.with_module(wider.rebuilt(task.module)).predict(theta.new_zeros(wider.size), x)
        except Exception as error:
            raise TaskError(f"units of {name} cannot be matched, as it cannot be made wider: {error}") from error

    def starts(self, server: Fused, ids: Tensor) -> Start:
        """Every client's slice of the global network; in a stream, what it has used most of it."""
        stack, wide = _stacks(server)
        memory: Memory | None = to(server.memory, "cpu")  # matching is done there
        layers, units = wide.layers(server.theta), server.units[ids]
        known = (units[:, :1] >= 0).to(server.theta.dtype)
        theta = server.theta.new_zeros(len(ids), stack.size)
        for k in known[:, 0].nonzero().flatten().tolist():
            if memory is None:
                theta[k] = stack.flat(slice_of(layers, units[k].split_with_sizes(stack.widths)))
            else:
                key = keys.key(int(server.seed), purpose="restart", round=int(memory.step), client=int(ids[k]))
                new = round(self.how.mass) if isinstance(self.how, BetaBernoulli) else 0
                theta[k] = stack.flat(restart(layers, memory, int(ids[k]), stack.widths, new, key))
                theta[k] += (
                    self.jitter * keys.normal(key.view(1), stack.size, dtype=theta.dtype, device=theta.device)[0]
                )
        return Start(theta, known)

    def fuse(self, server: Fused, update: Networks) -> Fused:
        """Match the networks."""
        stack, _ = _stacks(server)
        before: Memory | None = to(server.memory, "cpu")
        clients = update.client.cpu()
        found = match(
            [stack.layers(theta) for theta in update.theta],
            self.how,
            shares=update.shares,
            observe_missing=self.observe_missing,
            memory=None if before is None else of_clients(before, clients),
            seed=int(server.seed),
        )
        memory = merged(before, len(server.units), clients, found.memory) if self.streaming else None
        # Numbers of global units last in a stream only.
        units = server.units.clone() if self.streaming else torch.full_like(server.units, -1)
        units[update.client] = torch.cat([torch.stack(by_client) for by_client in found.assignments], dim=1).to(units)
        theta = stack.flat(found.layers)
        return Fused(theta, torch.tensor(found.widths).to(units), units, server.chain, memory, server.seed)

    def posterior(self, server: Fused) -> Point:
        """The posterior mean of the global units. Their deviations are those of units between clients, far too large
        to draw networks from."""
        return Point(server.theta)

    def network(self, task: Task, server: Fused) -> Task:
        """As wide as was inferred."""
        return task.with_module(_stacks(server)[1].rebuilt(task.module))

    def facts(self, server: Fused) -> dict[str, float]:
        """Hidden units of the global network."""
        return {"width": float(server.widths.sum())}


def _stacks(server: Fused) -> tuple[Stack, Stack]:
    """The clients' layers, and the global ones."""
    stack = Stack.decoded(server.chain)
    return stack, stack.with_widths(server.widths.tolist())
