"""FedCGS: a Gaussian classifier on frozen features, from sums that all clients send once (Guan et al., 2025)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.shared.heads import check_head, head_layer, head_place, with_head
from consilience.core import ConsilienceError, Point, Range, Ranges, TaskError, record, tree_map
from consilience.core.checks import Count, Positive
from consilience.core.records import add, leaves, static
from consilience.data.batch import Batch
from consilience.data.cohort import Cohort, Info
from consilience.models.student import StudentHead
from consilience.tasks.task import Task


@record
class Sums:
    """Of the features x of some examples: numbers by class n_c [..., C], Σ x by class [..., C, d], and Σ x xᵀ of all
    [..., d, d], in float64."""

    counts: Tensor
    totals: Tensor
    products: Tensor


@record
class Server:
    """The network's weights θ, the sums of all clients that took part, and the place of the head in θ."""

    theta: Tensor
    sums: Sums
    head: tuple[int, int] = static()


@record
class Client:
    """What the server has of each client."""

    sums: Sums


@algorithm
class FedCGS(Algorithm):
    """Features x, the input of the last linear layer, are Gaussian given the class: N(μ_c, Σ). Numbers, sums and sums
    of products of features add up over clients, so one exchange gives the posterior of μ and Σ from all examples. It is
    the same for every partition, and exactly that of pooled data. The layers before the last stay as they are: frozen
    ones, those of a network that another method has trained (`Switch(FedAvg(…), FedCGS(), at=…)`), or none, where the
    data are features already and the module is one linear layer.

    The prior is μ_c | Σ ~ N(x̄, Σ / `kappa`) and Σ ~ IW(Ψ₀, ν₀), around the mean x̄ of all examples, with ν₀ = d + 1 +
    m and Ψ₀ = m s for m = `shrinkage` · d examples of the average variance s within classes. The predictive density of
    a class is Student's t. The head becomes a `models.StudentHead`, which predicts by these densities and by the
    frequencies of classes, (n_c + 1) / (N + C). With `plug_in` the user's linear head stays: the linear discriminant of
    the posterior means of μ and Σ.

    Clients send the change of their sums. A client that comes again changes nothing, and a client can join and be
    forgotten exactly."""

    ranges: ClassVar[Ranges] = {"shrinkage": Range(1e-3, 10.0), "kappa": Range(1e-2, 10.0)}
    shrinkage: Positive = 0.5
    kappa: Positive = 1.0
    plug_in: bool = False
    batch_size: Count = 100

    def adapt(self, task: Task, seed: int) -> Task:
        if task.kind != "classification":
            raise TaskError(f"{self.name} needs an output for every class, but the task is {task.kind}")
        check_head(task, self.name)
        if task.running is not None:
            raise TaskError(f"{self.name} keeps the network as it is: use freeze_batchnorm(model)")
        return task

    def start(self, task: Task, info: Info) -> Server:
        return Server(info.initial, self._no_sums(task, info.initial.device), head_place(task))

    def client(self, task: Task, info: Info, n: Tensor) -> Client:
        fresh: Sums = tree_map(lambda leaf: leaf.repeat(len(n), *[1] * leaf.dim()), self._no_sums(task, n.device))
        return Client(fresh)

    def message(self, server: Server, ids: Tensor) -> Point:
        return Point(server.theta)

    def local(self, task: Task, message: Point, state: Client, cohort: Cohort) -> tuple[Sums, Client]:
        summed = task.vectorize(sums_one)
        update: Sums = tree_map(Tensor.neg, state.sums)
        for k, batch in cohort.in_order(self.batch_size, "features"):
            found = summed(batch, shared=(message.theta,))
            tree_map(lambda into, leaf, k=k: into[:k].add_(leaf), update, found)
        return update, self.follow(state, update)

    def follow(self, state: Client, update: Sums) -> Client:
        return Client(add(state.sums, update))

    def swap(self, server: Server, old: Client, new: Client) -> Server:
        change: Sums = tree_map(Tensor.sub, new.sums, old.sums)
        return self.fuse(server, change)

    def fuse(self, server: Server, update: Sums) -> Server:
        return replace(server, sums=add(server.sums, update))

    def posterior(self, server: Server) -> Point:
        """The network with its new head."""
        start, stop = server.head
        classes = Classes.of(server.sums, shrinkage=self.shrinkage, kappa=self.kappa)
        head = classes.linear() if self.plug_in else classes.student()
        theta = server.theta
        return Point(torch.cat([theta[:start], *(p.to(theta.dtype).flatten() for p in head), theta[stop:]]))

    def network(self, task: Task, server: Server) -> Task:
        if self.plug_in:
            return task
        classes, features = server.sums.totals.shape
        return with_head(task, StudentHead(features, classes))

    def audit(self, server: Server, states: Iterable[Client]) -> dict[str, float]:
        left: Sums = server.sums
        for group in states:
            left = tree_map(lambda leaf, own: leaf - own.sum(0), left, group.sums)
        pairs = zip(leaves(left), leaves(server.sums), strict=True)
        gap = max(float(rest.norm() / whole.norm().clamp_min(1e-3)) for (_, rest), (_, whole) in pairs)
        if gap > 1e-3:
            raise ConsilienceError(f"the server's sums are not those of its clients: they differ by {gap:.2g}")
        return {"sums_apart_from_clients": gap}

    def admit(self, server: Server, state: Client) -> Server:
        return self.fuse(server, state.sums)

    def forget(self, server: Server, state: Client) -> Server:
        return self.fuse(server, tree_map(Tensor.neg, state.sums))

    def _no_sums(self, task: Task, device: torch.device) -> Sums:
        (c, d), like = head_layer(task).weight.shape, torch.zeros((), dtype=torch.float64, device=device)
        return Sums(like.new_zeros(c), like.new_zeros(c, d), like.new_zeros(d, d))


def sums_one(task: Task, batch: Batch, theta: Tensor) -> Sums:
    """The sums of one client's batch."""
    x, output = task.features_one(theta, batch.x)
    x, w = x.double(), batch.w.double()
    by_class = F.one_hot(batch.y, output.shape[-1]).double() * w.unsqueeze(1)
    return Sums(by_class.sum(0), by_class.mT @ x, (x * w.unsqueeze(1)).mT @ x)


@dataclass(frozen=True)
class Classes:
    """The posterior of the classes' Gaussians, in coordinates around the mean x̄ of all examples: μ_c | Σ ~ N(m_c, Σ /
    κ_c), Σ ~ IW(Ψ, ν + d − 1), with log frequencies log π_c."""

    centre: Tensor
    mean: Tensor
    kappa: Tensor
    scatter: Tensor
    degrees: Tensor
    log_prior: Tensor

    @classmethod
    def of(cls, sums: Sums, *, shrinkage: float, kappa: float) -> Classes:
        """From the sums of all examples; κ_c = `kappa` + n_c, ν = ν₀ + N − d + 1 as in `FedCGS`."""
        counts, n, d = sums.counts, sums.counts.sum(), sums.totals.shape[-1]
        centre = sums.totals.sum(0) / n.clamp_min(1)
        totals = sums.totals - counts.unsqueeze(1) * centre
        products = sums.products - n * torch.outer(centre, centre)
        means = totals / counts.clamp_min(1).unsqueeze(1)
        between = (counts * means.square().sum(1)).sum()
        within = (products.diagonal().sum() - between) / (d * (n - len(counts)).clamp_min(1))
        strength, own = shrinkage * d, kappa + counts
        mean = totals / own.unsqueeze(1)
        prior = strength * torch.where(within > 0, within, 1.0) * torch.eye(d).to(n)
        scatter = prior + products - (own.unsqueeze(1) * mean).mT @ mean
        log_prior = ((counts + 1) / (n + len(counts))).log()
        return cls(centre, mean, own, scatter, strength + 2 + n, log_prior)

    def student(self) -> tuple[Tensor, ...]:
        """The parameters of a `StudentHead`: the densities are t_ν(m_c, Ψ (κ_c + 1) / (κ_c ν))."""
        root = torch.linalg.cholesky(self.scatter)
        whiten = torch.linalg.solve_triangular(root, torch.eye(len(root)).to(root), upper=False)
        return (
            self.mean @ whiten.mT, (self.kappa + 1) / self.kappa, self.degrees.view(1), self.log_prior,
            whiten, -whiten @ self.centre,
        )  # fmt: skip

    def linear(self) -> tuple[Tensor, ...]:
        """The weight and bias of the linear discriminant: log π_c + m_cᵀ Σ⁻¹ (x − x̄) − ½ m_cᵀ Σ⁻¹ m_c, with the
        posterior mean Σ = Ψ / (ν − 2)."""
        weight = torch.linalg.solve(self.scatter / (self.degrees - 2), self.mean.mT).mT
        return weight, self.log_prior - weight @ self.centre - (weight * self.mean).sum(1) / 2
