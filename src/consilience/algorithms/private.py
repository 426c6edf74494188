"""Private: differential privacy for clients, with any method whose updates add up (DP-FedAvg, McMahan et al., 2018)."""

import copy
import math
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.fedavg import FedAvg
from consilience.algorithms.shared.accounting import epsilon
from consilience.algorithms.shared.wrapping import Wrapping
from consilience.core import guards, keys
from consilience.core.checks import Count, NonNegative, Positive
from consilience.core.errors import ConfigError
from consilience.core.ranges import Range, Ranges
from consilience.core.records import Tree, Weighted, leaves, pack, record, tree_map
from consilience.data.cohort import Cohort, Info
from consilience.tasks.task import Task


@record
class Server:
    """The method's own server; the secret key of the noise; the numbers of sums released, of all clients, and of
    clients in a round."""

    method: Tree
    key: Tensor
    releases: Tensor
    clients: Tensor
    cohort: Tensor


@record
class Update:
    """A client's update, no longer than `clip`, and the planned number of clients in the round."""

    update: Tree
    planned: Weighted


@algorithm
class Private(Wrapping):
    """`method` with (ε, δ)-differential privacy for clients, towards an observer of all models that the server sends.
    Σ v_k becomes Σ v_k min(1, clip/‖v_k‖) + N(0, s²), s = noise · clip, where v_k is a client's mean update, or factor,
    as one vector. Means are taken over the planned clients of a round, also if some do not answer. Clients clip their
    own updates, and trust the server with the noise.

    The server refuses updates that are longer than `clip` or plan another number of clients. All clients have equal
    weights. Methods that use the number of all examples, such as FedSEP, need a public number `examples`: the true one
    would reveal a client's size. δ should be far below 1/clients. ε is in every round's metrics, unless noise is 0; the
    other metrics, such as losses, are not private.

    The noise's key comes from the operating system and is stored in the run's checkpoints only, so a resumed run equals
    an uninterrupted one. With `noise_from="seed"` a run can be repeated, but anyone who knows the seed can subtract the
    noise: use it for simulations. With `sampling="secret"` ε relies on cohorts that nobody knows and that are uniform:
    they must be drawn by a secret seed from clients that are always available."""

    ranges: ClassVar[Ranges] = {"clip": Range(0.01, 10.0)}
    method: Algorithm = FedAvg()
    clip: Positive = 1.0
    noise: NonNegative = 1.0
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    noise_from: Literal["system", "seed"] = "system"
    sampling: Literal["known", "secret"] = "known"
    examples: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        epsilon(self.noise, 1, 1, 1, self.delta)  # fails here, not after a round, if the accountant is not installed

    @property
    def name(self) -> str:
        return f"Private({self.method.name})"

    def inner(self, server: Server) -> Tree:
        return server.method

    def around(self, server: Server, inner: Tree) -> Server:
        return replace(server, method=inner)

    def start(self, task: Task, info: Info) -> Server:
        if info.before is not None:
            raise ConfigError("Private must be the whole run: ε would not count the rounds before it")
        key = keys.bits(keys.key(int(info.seed), purpose="privacy"), 4)
        if self.noise_from == "system":
            key = keys.system_key()
        nothing = torch.zeros_like(info.clients)
        inner = self.method.start(task, self._public(info))
        if not all(bool(leaf.isfinite().all()) for _, leaf in leaves(inner)):
            raise ConfigError(
                f"{self.method.name} starts from the number of all examples, and the true one would reveal the size of "
                "a client: give Private a number that everybody may know, examples = clients × a typical size"
            )
        return Server(inner, key, nothing, info.clients, nothing)

    def client(self, task: Task, info: Info, n: Tensor) -> Tree:
        return self.method.client(task, self._public(info), n)

    def _public(self, info: Info) -> Info:
        """The facts without the true number of all examples: a method that uses it gets the public one, or NaN."""
        public = torch.tensor(math.nan if self.examples is None else self.examples)
        return replace(info, examples=public.to(info.examples.device))

    def local(self, task: Task, message: Any, state: Any, cohort: Cohort) -> tuple[Update, Tree]:
        cohort = copy.copy(cohort)
        cohort.examples = math.nan if self.examples is None else self.examples  # type: ignore[assignment]
        update, state = self.method.local(task, message, state, cohort)
        one = torch.ones_like(cohort.n)
        clipped = _clipped(update.mean if isinstance(update, Weighted) else update, self.clip)
        update = Weighted(clipped, one) if isinstance(update, Weighted) else clipped
        return Update(update, Weighted(one * cohort.round_size, one)), state

    def measures(
        self, message: Any, state: Any, update: Update, *, n: Tensor, round_size: int, examples: int
    ) -> dict[str, Tensor]:
        sent = update.update.total if isinstance(update.update, Weighted) else update.update
        return {"length": _lengths(sent), "planned": update.planned.mean.squeeze(-1) / round_size}

    def refusals(self, server: Server, update: Update, measures: dict[str, Tensor]) -> dict[int, str]:
        return self._objections(measures)

    def _objections(self, measures: dict[str, Tensor]) -> dict[int, str]:
        found: dict[int, str] = {}
        lengths, plans = measures["length"].tolist(), measures["planned"].tolist()
        for row, (length, planned) in enumerate(zip(lengths, plans, strict=True)):
            if not length <= self.clip * (1 + 1e-4):
                found[row] = f"its update has the length {length:.3g}, more than clip = {self.clip:g}"
            elif not abs(planned - 1) < 1e-6:
                found[row] = f"it plans {planned:.3g} times the clients of the round"
        return found

    def objection(self, measures: dict[str, Tensor]) -> str:
        return next(iter(self._objections(measures).values()), "")

    def fuse(self, server: Server, update: Update) -> Server:
        planned, total = update.planned.mean, update.update
        if isinstance(total, Weighted):
            total = Weighted(self._noised(total.total, server), planned)
        else:
            total = self._noised(total, server)
        cohort = server.cohort.maximum(planned.round().to(server.cohort).view(()))
        method = self.method.fuse(server.method, total)
        return Server(method, server.key, server.releases + 1, server.clients, cohort)

    def _noised(self, total: Tree, server: Server) -> Tree:
        sizes = [leaf.numel() for _, leaf in leaves(total)]
        context = int(server.releases).to_bytes(8, "little")
        if self.noise_from == "system":  # a repeated round with other updates needs other noise: the same would cancel
            context += pack(total)
        noise = keys.sealed_normal(server.key, context, sum(sizes)) * (self.noise * self.clip)
        parts = iter(torch.split(noise, sizes))
        return tree_map(lambda leaf: leaf + next(parts).view_as(leaf).to(leaf), total)

    def facts(self, server: Server) -> dict[str, float]:
        drawn_of = int(server.clients) if self.sampling == "secret" else int(server.cohort)
        spent = epsilon(self.noise, int(server.cohort), drawn_of, int(server.releases), self.delta)
        return super().facts(server) | ({"epsilon": spent} if math.isfinite(spent) else {})


def _lengths(values: Tree) -> Tensor:
    """The length of every client's leaves [K, ...], as one vector."""
    lengths: Tensor = torch.stack([leaf.flatten(1).norm(dim=1) for _, leaf in leaves(values)]).norm(dim=0)
    return lengths


def _clipped(values: Tree, longest: float) -> Tree:
    """Every client's leaves [K, ...], together no longer than `longest`; the clients clipped are counted."""
    lengths = _lengths(values)
    guards.count("update clipped", lengths > longest)
    shrink = longest / lengths.clamp_min(longest)
    return tree_map(lambda leaf: leaf * shrink.view(-1, *[1] * (leaf.dim() - 1)), values)
