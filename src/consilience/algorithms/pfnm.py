"""PFNM: the server matches the hidden units of clients' networks and fuses them into one (Yurochkin et al., 2019)."""

from dataclasses import replace

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.one_shot import TRAIN, Message, OneShot, Update
from consilience.core import ConfigError, NonNegative, TaskError, keys
from consilience.core.records import Point, record, static, to
from consilience.data.cohort import Info
from consilience.matching import BetaBernoulli, Clusterer, Memory, Stack, match, slice_of
from consilience.matching.streams import merged, of_clients, restart
from consilience.optim import Chain
from consilience.tasks.task import Task


@record
class Server:
    """The global network θ, the `widths` of its hidden layers, and the global unit of every client's units, [clients,
    units of a client], −1 for clients that are not in it. `memory` is a stream's posterior. `shapes` and `biased` are
    the fields of the clients' `Stack`."""

    theta: Tensor
    widths: Tensor
    units: Tensor
    memory: Memory | None
    seed: Tensor
    shapes: tuple[tuple[int, ...], ...] = static()
    biased: tuple[bool, ...] = static()

    @property
    def stack(self) -> Stack:
        """The clients' layers."""
        return Stack(self.shapes, self.biased)

    @property
    def wide(self) -> Stack:
        """The global layers."""
        return self.stack.with_widths(self.widths.tolist())


@algorithm
class PFNM(OneShot):
    """Units of clients' networks are noisy copies of global units, which a Beta process draws. `how` infers which are
    the same and how many there are; `DPMeans` is a baseline. One round is one-shot learning. In further rounds clients
    continue from their own slices of the global network. Only chains of linear and convolutional layers can be matched.

    With `streaming` the posterior of a round is the prior of the next, and clients continue with the units that they
    have used most, plus noise of standard deviation `jitter`: for federations that are streams. Layers are matched from
    the bottom up by incoming weights, or `top_down` by outgoing ones, as in the paper; one hidden layer by both. With
    `observe_missing`, weights to global units that a client lacks are zeros that were observed."""

    train: Chain = TRAIN
    how: Clusterer = BetaBernoulli()
    streaming: bool = False
    jitter: NonNegative = 0.01
    top_down: bool = False
    observe_missing: bool = True

    def __post_init__(self) -> None:
        if self.streaming and not isinstance(self.how, BetaBernoulli):
            raise ConfigError(f"only a Beta-Bernoulli process can continue a stream, not {self.how.name}")

    @property
    def name(self) -> str:
        return self.how.name

    def adapt(self, task: Task, seed: int) -> Task:
        Stack.of(task.module)
        return task

    def start(self, task: Task, info: Info) -> Server:
        """The initial weights, without units of any client; after another method, with the units of all clients."""
        stack, at = Stack.of(task.module), info.initial.device
        units = torch.cat([torch.arange(width, device=at) for width in stack.widths]).repeat(int(info.clients), 1)
        if info.before is None:
            units.fill_(-1)
        widths = torch.tensor(stack.widths, device=at)
        return Server(info.initial, widths, units, None, info.seed, stack.shapes, stack.biased)

    def check(self, task: Task, theta: Tensor, x: Tensor) -> None:
        """Refuse a module whose predictions depend on the order of its hidden units, or that cannot be made wider."""
        stack, name = Stack.of(task.module), type(task.module).__name__
        stack.check(task.predict, theta, x, name)
        wider = stack.with_widths([width + 1 for width in stack.widths])
        try:
            task.with_module(wider.rebuilt(task.module)).predict(theta.new_zeros(wider.size), x)
        except Exception as error:
            raise TaskError(f"units of {name} cannot be matched, as it cannot be made wider: {error}") from error

    def starts(self, server: Server, ids: Tensor) -> Message:
        """Every client's slice of the global network; in a stream, the units that it has used most."""
        stack, wide = server.stack, server.wide
        memory: Memory | None = to(server.memory, "cpu")  # matching runs on the CPU
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
        return Message(theta, known)

    def fuse(self, server: Server, update: Update) -> Server:
        stack = server.stack
        before: Memory | None = to(server.memory, "cpu")
        clients = update.client.cpu()
        found = match(
            [stack.layers(theta) for theta in update.theta],
            self.how,
            shares=update.shares,
            top_down=self.top_down,
            observe_missing=self.observe_missing,
            memory=None if before is None else of_clients(before, clients),
            seed=int(server.seed),
        )
        memory = merged(before, len(server.units), clients, found.memory) if self.streaming else None
        # Only in a stream do numbers of global units keep their meaning.
        units = server.units.clone() if self.streaming else torch.full_like(server.units, -1)
        units[update.client] = torch.cat([torch.stack(by_client) for by_client in found.assignments], dim=1).to(units)
        theta = stack.flat(found.layers)
        return replace(server, theta=theta, widths=torch.tensor(found.widths).to(units), units=units, memory=memory)

    def posterior(self, server: Server) -> Point:
        """The posterior mean of the global units. Their variances are those between clients, far too large to sample
        networks from."""
        return Point(server.theta)

    def network(self, task: Task, server: Server) -> Task:
        return task.with_module(server.wide.rebuilt(task.module))

    def facts(self, server: Server) -> dict[str, float]:
        return {"width": float(server.widths.sum())}
