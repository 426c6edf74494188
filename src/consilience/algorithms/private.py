"""Private: differential privacy for clients, with any method whose updates add up (DP-FedAvg, McMahan et al., 2018)."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.fedavg import FedAvg
from consilience.algorithms.shared.accounting import epsilon
from consilience.algorithms.shared.wrapping import Wrapping
from consilience.core import guards, keys
from consilience.core.errors import ConfigError, check_word
from consilience.core.ranges import Range, Ranges
from consilience.core.records import Tree, Weighted, leaves, pack, record, tree_map
from consilience.data.cohort import Cohort, Info
from consilience.tasks.task import Task

NoiseFrom = Literal["system", "seed"]
Sampling = Literal["known", "secret"]


@record
class ClippedUpdate:
    """A client's update, no longer than `clip`, and how many clients the round was planned to have."""

    update: Tree
    planned: Weighted


@record
class PrivateServer:
    """The method's own server; the key of the noise, which nobody is told; how many sums were released, of how many
    clients there are, and of how many a round has."""

    method: Tree
    key: Tensor
    releases: Tensor
    clients: Tensor
    cohort: Tensor


@algorithm
class Private(Wrapping):
    """`method`, with differential privacy for clients: whoever sees all models that the server ever sends learns hardly
    more about a client than if it had other data, (ε, δ)-privately. Σ v_k becomes Σ v_k min(1, clip/‖v_k‖) + N(0, s²),
    s = noise · clip, where v_k is a client's mean update, or factor, as one vector; means are taken over the planned
    clients of a round, whoever answers. Clients clip themselves, and trust the server with the noise.

    All clients count the same, whatever their size. δ should be far below 1/clients. ε is in every round's metrics,
    unless noise is 0; the other metrics, such as losses, are not private.

    The noise's key comes from the "system" and is in the run's checkpoints alone, so a resumed run goes on as it would
    have. With `noise_from="seed"` a run can be repeated, and whoever knows the seed can take the noise off: it is for
    simulations. With `sampling="secret"` ε counts on it that nobody knows who took part in which round, and that all
    were as likely to: true only of cohorts that are drawn by a seed nobody knows, of clients who are always there.
    """

    ranges: ClassVar[Ranges] = {"clip": Range(0.01, 10.0)}
    method: Algorithm = FedAvg()
    clip: float = 1.0
    noise: float = 1.0
    delta: float = 1e-5
    noise_from: NoiseFrom = "system"
    sampling: Sampling = "known"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_word("noise_from", self.noise_from, get_args(NoiseFrom))
        check_word("sampling", self.sampling, get_args(Sampling))
        if not 0 < self.clip < math.inf:
            raise ConfigError(f"clip must be a positive length, got {self.clip}")
        epsilon(self.noise, 1, 1, 1, self.delta)  # what is wrong with these, and what is missing, is said at once

    @property
    def name(self) -> str:
        """With the method."""
        return f"Private({self.method.name})"

    def inner(self, server: PrivateServer) -> Tree:
        """The method's own server."""
        return server.method

    def around(self, server: PrivateServer, inner: Tree) -> PrivateServer:
        """With the same key and count."""
        return replace(server, method=inner)

    def start(self, task: Task, info: Info) -> PrivateServer:
        """The method's, and a key."""
        if info.before is not None:
            raise ConfigError("Private must be the whole run: ε would not count what clients gave away before it")
        key = keys.bits(keys.key(int(info.seed), purpose="privacy"), 4)
        if self.noise_from == "system":
            key = torch.frombuffer(bytearray(secrets.token_bytes(32)), dtype=torch.int64)
        nothing = torch.zeros_like(info.clients)
        return PrivateServer(self.method.start(task, info), key, nothing, info.clients, nothing)

    def local(self, task: Task, message: Any, state: Any, cohort: Cohort) -> tuple[ClippedUpdate, Tree]:
        """The method's, clipped."""
        update, state = self.method.local(task, message, state, cohort)
        one = torch.ones_like(cohort.n)
        clipped = _clipped(update.mean if isinstance(update, Weighted) else update, self.clip)
        update = Weighted(clipped, one) if isinstance(update, Weighted) else clipped
        return ClippedUpdate(update, Weighted(one * cohort.round_size, one)), state

    def fuse(self, server: PrivateServer, update: ClippedUpdate) -> PrivateServer:
        """The method's step along a sum with noise, once a round."""
        planned, heard = update.planned.mean, update.update
        if isinstance(heard, Weighted):
            heard = Weighted(self._noised(heard.total, server), planned)
        else:
            heard = self._noised(heard, server)
        cohort = server.cohort.maximum(planned.round().to(server.cohort).view(()))
        method = self.method.fuse(server.method, heard)
        return PrivateServer(method, server.key, server.releases + 1, server.clients, cohort)

    def _noised(self, total: Tree, server: PrivateServer) -> Tree:
        sizes = [leaf.numel() for _, leaf in leaves(total)]
        context = int(server.releases).to_bytes(8, "little")
        if self.noise_from == "system":  # a server that goes back a round may hear others: the same noise would cancel
            context += pack(total)
        noise = keys.sealed_normal(server.key, context, sum(sizes)) * (self.noise * self.clip)
        parts = iter(torch.split(noise, sizes))
        return tree_map(lambda leaf: leaf + next(parts).view_as(leaf).to(leaf), total)

    def facts(self, server: PrivateServer) -> dict[str, float]:
        """ε so far."""
        drawn_of = int(server.clients) if self.sampling == "secret" else int(server.cohort)
        spent = epsilon(self.noise, int(server.cohort), drawn_of, int(server.releases), self.delta)
        return super().facts(server) | ({"epsilon": spent} if math.isfinite(spent) else {})


def _clipped(values: Tree, longest: float) -> Tree:
    """Every client's leaves [K, ...], together no longer than `longest`; the clients clipped are counted."""
    lengths = torch.stack([leaf.flatten(1).norm(dim=1) for _, leaf in leaves(values)]).norm(dim=0)
    guards.count("update clipped", lengths > longest)
    shrink = longest / lengths.clamp_min(longest)
    return tree_map(lambda leaf: leaf * shrink.view(-1, *[1] * (leaf.dim() - 1)), values)
