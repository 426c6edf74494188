"""Parts of the user's model by name, and methods that keep some of them at the clients."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared import averaging
from consilience.algorithms.shared.averaging import Averaging
from consilience.core import Point, TaskError, Weighted, record
from consilience.core.errors import nearest
from consilience.data import Cohort, Info
from consilience.tasks.task import Task


def places(task: Task, parts: tuple[str, ...]) -> Tensor:
    """The places in θ of the parameters that belong to `parts`, in ascending order [own].

    A part is the name of a parameter or of a module inside the user's model: "head", "fc.bias", "2"; "" is the model.
    It includes the running averages of BatchNorm layers that are in θ. A parameter that several modules share belongs
    to all of them.
    """
    chosen = torch.zeros(task.size, dtype=torch.bool)
    for part in parts:
        for name in _members(task, part):
            chosen[task.slice(parameter=name)] = True
    return chosen.nonzero().squeeze(1).to(task.device)


def last_layer(task: Task, method: str) -> tuple[str, ...]:
    """The name of the last linear layer, which a method takes for the head."""
    if task.main.head is None:
        raise TaskError(f"{method} keeps the head at the clients, and the module has no linear layer: name its parts")
    return (task.main.head,)


def _members(task: Task, part: str) -> set[str]:
    """The names in θ of a part's parameters."""
    module, learned = task.module, set(task.main.names)
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    names = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
    names |= {name: name for name in learned if name not in names}  # running averages
    inside = {own for name, own in names.items() if part in ("", name) or name.startswith(f"{part}.")}
    if inside & learned:
        return inside & learned
    if inside or part in dict(module.named_modules()):
        raise TaskError(f"the part {part!r} of the model has no parameters to learn")
    prefixes = {name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)}
    near = nearest(part, (name for name in prefixes if name.count(".") <= part.count(".")))
    raise TaskError(f"there is no part {part!r} in the model; {near}")


@record
class Server(averaging.Server):
    """FedAvg's state, and the places in θ that stay at the clients [own]."""

    places: Tensor


@record
class Client:
    """The client's own entries of θ [K, own]."""

    own: Tensor


@algorithm
class KeepsParts(Averaging):
    """FedAvg on all entries of θ but those that stay at the client, which `kept` names.

    Every client predicts with its own entries, so the clients' models are tested, and not the server's: there these
    entries keep their initial values."""

    alone: ClassVar[bool] = True

    @abstractmethod
    def kept(self, task: Task) -> Tensor:
        """The places in θ of the entries that stay at the client, [own]."""

    def trained(self, task: Task, start: Tensor, cohort: Cohort) -> Tensor:
        """The clients' models [K, P] after local training."""
        return self.train(task, start, cohort)

    def start(self, task: Task, info: Info) -> Server:
        base = super().start(task, info)
        return Server(base.model, base.memory, self.kept(task))

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        return Client(info.initial[self.kept(task)].repeat(len(n), 1))

    def local(self, task: Task, message: Point, state: Client, cohort: Cohort) -> tuple[Weighted, Client]:
        kept = self.kept(task)
        start = message.theta.repeat(len(cohort), 1).index_copy_(1, kept, state.own)
        change = self.trained(task, start, cohort) - start
        own = state.own + change[:, kept]
        return Weighted.of(Point(change.index_fill_(1, kept, 0.0)), cohort.n), Client(own)

    def personal(self, server: Server, state: Client) -> Point:
        return Point(server.model.theta.index_copy(0, server.places, state.own))
