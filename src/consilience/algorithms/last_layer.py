"""LastLayer: a Laplace approximation of the last linear layer, from sums that all clients send once."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.shared.heads import check_head, check_returned, head_layer, head_place, with_head
from consilience.core import Gaussian, Point, TaskError, record
from consilience.core.checks import Count, Positive
from consilience.core.records import Addressed, add, static
from consilience.data.batch import Batch
from consilience.data.cohort import Cohort, Info
from consilience.inference.head_curvature import HeadCurvature
from consilience.models.laplace import LaplaceHead
from consilience.tasks.statistics import needs_statistics
from consilience.tasks.task import Task

KINDS = ("classification", "binary", "multi-label")
LARGEST = 2048  # weights of a head whose covariance is full by default: a matrix of 32 MiB


@record
class Sums:
    """Of some examples with features φ [D], the last layer's inputs and a 1, and information Λ [C, C] of their logits:
    the number of examples [..., 1], and either Σ Λ ⊗ φφᵀ as `outer` [..., C·D, C·D] with the number again as `inner`
    [..., 1, 1], or Σ φφᵀ [..., D, D] and Σ Λ [..., C, C]. H is `inner` ⊗ `outer` / `count`. `seen` [..., K] is 1 for
    each client that is in the sums."""

    count: Tensor
    outer: Tensor
    inner: Tensor
    seen: Tensor


@record
class Server:
    """The network's weights θ, the sums of all clients that have taken part, and the head: its place in θ, and its
    number of classes."""

    theta: Tensor
    sums: Sums
    head: tuple[int, int] = static()
    classes: int = static()


@record
class Message:
    """θ, and the number of clients of the federation."""

    theta: Tensor
    clients: int = static()


@algorithm
class LastLayer(Algorithm):
    """A posterior for the network of any method. The weights stay as they are: those of the module, or of a method that
    ran before (`Switch(FedAvg(…), LastLayer(), at=…)`). The last linear layer, with weights W, gets the Gaussian
    N(W, (Σ_k H_k + τ)⁻¹), H_k = Σ Λ(x) ⊗ φφᵀ over the examples of client k, with features φ and Λ = diag(p) − ppᵀ, the
    Hessian of the loss in the logits. The H_k add up, so one exchange with all clients gives the pooled Laplace
    approximation, whatever the partition. A client counts once, however often it takes part.

    `structure` is "full", or "kronecker" for large layers: H ≈ Σ Λ ⊗ Σ φφᵀ / N. None is full up to 2,048 weights.
    `prior` is the precision τ; None maximises the marginal likelihood, for which the same sums are enough.

    The posterior is a network whose head is a `models.LaplaceHead`: predictions average over the head's weights in
    closed form (MacKay's approximation), without draws."""

    prior: Positive | None = None
    structure: Literal["full", "kronecker"] | None = None
    batch_size: Count = 500

    def adapt(self, task: Task, seed: int) -> Task:
        if task.kind not in KINDS:
            raise TaskError(f"{self.name} needs logits of classes or of labels, but the task is {task.kind}")
        if getattr(task.likelihood, "weights", None) is not None:
            raise TaskError(f"{self.name} counts every example once: leave the class weights out of its task")
        check_head(task, self.name)
        if task.running is not None or needs_statistics(task):
            raise TaskError(
                f"{self.name} keeps the network as it is, and BatchNorm layers have no fixed statistics yet: use "
                "freeze_batchnorm(run.model)"
            )
        return task

    def turn(self, round: int, cohort: int, clients: int) -> Tensor | None:
        """One client after the other where not all are in a round, so that all take part soon."""
        if cohort == clients:
            return None
        return ((torch.arange(cohort) + (round - 1) * cohort) % clients).sort().values

    def start(self, task: Task, info: Info) -> Server:
        sums = Sums(*self._zeros(task, info.initial), info.initial.new_zeros(int(info.clients), dtype=torch.float64))
        return Server(info.initial, sums, head_place(task), head_layer(task).out_features)

    def message(self, server: Server, ids: Tensor) -> Addressed:
        """θ; and for each client 1 if its examples are still to be counted, else 0."""
        seen = server.sums.seen
        return Addressed(Message(server.theta, len(seen)), 1 - seen[ids.to(seen.device)].unsqueeze(1))

    def local(self, task: Task, message: Addressed, state: None, cohort: Cohort) -> tuple[Sums, None]:
        theta, fresh = message.shared.theta, message.own
        check_returned(task, theta, cohort, self.name)
        summed = task.vectorize(full_one if self._full(task) else kronecker_one)
        parts = [part.repeat(len(cohort), *[1] * part.dim()) for part in self._zeros(task, theta)]
        for k, batch in cohort.in_order(self.batch_size, "features"):
            for total, found in zip(parts, summed(batch, shared=(theta,)), strict=True):
                total[:k] += found
        seen = F.one_hot(cohort.ids, message.shared.clients).to(parts[0])
        return Sums(*(part * fresh.view(-1, *[1] * (part.dim() - 1)) for part in (*parts, seen))), None

    def fuse(self, server: Server, update: Sums) -> Server:
        return replace(server, sums=add(server.sums, update))

    def posterior(self, server: Server) -> Point:
        """The network with its new head."""
        (start, stop), theta = server.head, server.theta
        head = curvature(server).head(self.prior)
        return Point(torch.cat([theta[:start], *(part.to(theta.dtype).flatten() for part in head), theta[stop:]]))

    def network(self, task: Task, server: Server) -> Task:
        found = curvature(server)
        classes, features = found.weight.shape
        return with_head(task, LaplaceHead(features - 1, classes, found.directions))

    def facts(self, server: Server) -> dict[str, float]:
        return {"clients_counted": float(server.sums.seen.sum())}

    def belief(self, server: Server) -> Gaussian:
        """The Gaussian over the last layer's weights, (W, b) class by class, with a full precision."""
        found = curvature(server)
        return Gaussian.of(found.weight.flatten(), found.precision(self.prior))

    def _full(self, task: Task) -> bool:
        layer = head_layer(task)
        return self.structure == "full" or (
            self.structure is None and layer.out_features * (layer.in_features + 1) <= LARGEST
        )

    def _zeros(self, task: Task, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`count`, `outer` and `inner` of no examples."""
        layer = head_layer(task)
        c, d = layer.out_features, layer.in_features + 1
        outer, inner = (c * d, 1) if self._full(task) else (d, c)
        none = like.new_zeros((), dtype=torch.float64)
        return none.new_zeros(1), none.new_zeros(outer, outer), none.new_zeros(inner, inner)


def full_one(task: Task, batch: Batch, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`count`, `outer` and `inner` of one client's batch. They are made by rows of Λ, so that B · C · D numbers are in
    memory at once."""
    phi, lam, count = _one(task, batch, theta)
    blocks = [phi.mT @ (lam[:, c].unsqueeze(-1) * phi.unsqueeze(1)).flatten(1) for c in range(lam.shape[1])]
    return count, torch.cat(blocks), count.unsqueeze(0)


def kronecker_one(task: Task, batch: Batch, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`count`, `outer` and `inner` of one client's batch."""
    phi, lam, count = _one(task, batch, theta)
    return count, phi.mT @ (phi * batch.w.double().unsqueeze(1)), lam.sum(0)


def _one(task: Task, batch: Batch, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """φ [B, D], Λ [B, C, C] times the weights of the examples, and Σ 1 [1], in float64."""
    x, output = task.features_one(theta, batch.x)
    w, logits = batch.w.double(), output.double().reshape(len(batch.w), -1)
    roots = task.likelihood.roots(logits)
    assert roots is not None  # all of KINDS have them
    roots = roots.reshape(len(roots), len(w), -1)
    lam = torch.einsum("rbc,rbd,b->bcd", roots, roots, w)
    return torch.cat([x.double(), torch.ones_like(w).unsqueeze(1)], 1), lam, w.sum().view(1)


def curvature(server: Server) -> HeadCurvature:
    """That of all examples counted so far."""
    (start, stop), classes = server.head, server.classes
    head = server.theta[start:stop].double()
    weight = torch.cat([head[:-classes].view(classes, -1), head[-classes:].unsqueeze(1)], 1)
    return HeadCurvature(weight, server.sums.outer, server.sums.inner / server.sums.count.clamp_min(1))
