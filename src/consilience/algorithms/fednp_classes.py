"""FedNPClasses: FedNP whose latent z is what features each class has. The server trains the last layer under q(z)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.func import grad

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared import averaging
from consilience.algorithms.shared.averaging import Averaging
from consilience.algorithms.shared.heads import check_head, check_returned, head_layer, head_place, head_weights
from consilience.core import Choice, Point, Ranges, TaskError, Weighted, keys, record
from consilience.core.checks import Count, Proportion, Size
from consilience.data import Batch, Cohort, Info
from consilience.tasks.task import Task

PRIOR = 1.0  # examples of each class that p₀ counts for


@record
class Server(averaging.Server):
    """FedAvg's state, and the product of the sites of the last round [C, d + 1, d + 1] in float64."""

    sites: Tensor


@record
class Update:
    """n_k (w_k − w), and the client's site: Σ φ̃φ̃ᵀ by class."""

    theta: Tensor
    by_class: Tensor


@algorithm
class FedNPClasses(Averaging):
    """FedAvg, and a last layer that the server trains on features that it draws from q(z) = p₀(z) Π_k q_k(z).

    z are the mean features z_c of the classes, where features φ [d] are the inputs of the last layer, and
    p(φ | z, c) = N(z_c, S_c). The site q_k of client k has the sums n_c, Σ φ and Σ φφᵀ over its examples of each class,
    as one matrix Σ φ̃φ̃ᵀ with φ̃ = (φ, 1): natural parameters, so a product of sites is a sum. p₀ is one example of each
    class, drawn from all examples. q(z_c) = N(m_c, S_c / n_c) has the moments of all clients' examples of the class.

    site     q_k from the features under w + `ahead` (w_k − w), after local training to w_k
    fuse     w ← w + optimiser(Σ p_k (w_k − w)) as in FedAvg;  q = p₀ Π_k q_k over the clients of the round
    head     `steps` descents on E_{c ~ n_c/N, z ~ q, φ ~ N(z_c, S_c)} loss(Wφ + b, c) from the averaged W and b,
             with `draws` of φ for each class

    The features of q are those of the clients' own networks, and the averaged network's are others: more `steps` fit
    the head better to q, and may fit it worse to the network. With `ahead` = 0 all clients use the received weights:
    then q is the same for every partition. With `steps` = 0 the method is FedAvg. Steps have the largest size that is
    sure to descend. A class that no client of the round has keeps its averaged row."""

    ranges: ClassVar[Ranges] = {"steps": Choice((5, 10, 20, 50)), "ahead": Choice((0.0, 0.5, 1.0))}
    steps: Size = 20
    ahead: Proportion = 0.5
    draws: Count = 200
    batch_size: Count = 100

    def adapt(self, task: Task, seed: int) -> Task:
        if task.kind != "classification":
            raise TaskError(f"{self.name} needs an output for every class, but the task is {task.kind}")
        check_head(task, self.name)
        if task.main.batchnorms and not task.layout.averaged:
            raise TaskError(
                f"{self.name} needs features in evaluation during a round: make the task with batch_norm='averaged', "
                "or use replace_batchnorm(model)"
            )
        return task

    def start(self, task: Task, info: Info) -> Server:
        base, (c, d) = super().start(task, info), head_layer(task).weight.shape
        return Server(base.model, base.memory, info.initial.new_zeros(c, d + 1, d + 1, dtype=torch.float64))

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        w = message.theta
        check_returned(task, w, cohort, self.name)
        trained = self.train(task, w, cohort)
        site = self.site(task, torch.lerp(w.expand_as(trained), trained, self.ahead), cohort)
        return Weighted(Update(trained.sub_(w).mul_(cohort.n), site), cohort.n), None

    def site(self, task: Task, theta: Tensor, cohort: Cohort) -> Tensor:
        """Σ φ̃φ̃ᵀ over the examples of each class [K, C, d + 1, d + 1], under the weights θ [K, P]."""
        c, d = head_layer(task).weight.shape
        total = torch.zeros(len(cohort), c, d + 1, d + 1, dtype=torch.float64, device=cohort.device)
        summed = task.vectorize(site_one)
        for k, batch in cohort.in_order(self.batch_size, "features"):
            total[:k] += summed(theta[:k], batch)
        return total

    def fuse(self, server: Server, update: Weighted) -> Server:
        model, memory = self.server.step(server.model, Point(update.mean.theta), server.memory)
        return Server(model, memory, update.total.by_class)

    def advance(self, task: Task, server: Server, key: Tensor) -> Server:
        """The server with a head that is trained under q(z)."""
        if not self.steps:
            return server
        theta, classes, (start, stop) = server.model.theta, Classes.of(server.sites), head_place(task)
        weight, bias = head_weights(task, theta)
        head = torch.cat([weight, bias.unsqueeze(1)], 1)
        head = self.trained_head(task, head, classes, classes.draw(self.draws, key).to(theta))
        flat = torch.cat([theta[:start], head[:, :-1].flatten(), head[:, -1], theta[stop:]])
        return replace(server, model=Point(flat))

    def trained_head(self, task: Task, head: Tensor, classes: Classes, phi: Tensor) -> Tensor:
        """(W, b) [C, d + 1] after the descents, for draws φ̃ [C, draws, d + 1] of each class.

        The Hessian of a softmax loss is at most half of the weighted Σ φ̃φ̃ᵀ, whose largest eigenvalue bounds the
        step."""
        y = torch.arange(len(phi), device=phi.device).repeat_interleave(phi.shape[1])
        share = classes.share.to(phi)
        of_one, known, phi = (share / phi.shape[1])[y], (share > 0).unsqueeze(1), phi.flatten(0, 1)
        costs = getattr(task.likelihood, "weights", None)
        most = 1.0 if costs is None else costs.max().to(phi)
        step = 2 / (most * torch.linalg.eigvalsh((phi * of_one.unsqueeze(1)).mT @ phi)[-1]).clamp_min(1e-12)

        def loss(at: Tensor) -> Tensor:
            return (of_one * task.likelihood.losses(phi @ at.mT, y)).sum()

        for _ in range(self.steps):
            head = head - step * known * grad(loss)(head)
        return head


@dataclass(frozen=True)
class Classes:
    """What q says of each class: its share of the examples [C], and N(mean, covariance) of its features, where z has
    been integrated out."""

    share: Tensor
    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, sites: Tensor) -> Classes:
        """From a product of sites, Σ φ̃φ̃ᵀ by class."""
        seen = sites[:, -1, -1].clamp_min(0)  # noise can make a number negative
        every = seen.sum().clamp_min(1e-12)
        q = sites + PRIOR * sites.sum(0) / every
        n = q[:, -1, -1].clamp_min(PRIOR)
        mean = q[:, -1, :-1] / n.unsqueeze(1)
        within = q[:, :-1, :-1] / n.view(-1, 1, 1) - mean.unsqueeze(2) * mean.unsqueeze(1)
        return cls(seen / every, mean, within * (1 + 1 / n).view(-1, 1, 1))

    def draw(self, count: int, key: Tensor) -> Tensor:
        """φ̃ [C, count, d + 1]. Directions in which rounding or noise has made a variance negative have none. The root
        of the covariance is the symmetric one, which is unique: engines differ by rounding, and so do their draws."""
        (c, d), at = self.mean.shape, self.mean.device
        values, vectors = torch.linalg.eigh(self.covariance)
        noise = torch.randn(c, count, d, dtype=self.mean.dtype, device=at, generator=keys.generator(key, at))
        root = (vectors * values.clamp_min(0).sqrt().unsqueeze(1)) @ vectors.mT
        return F.pad(self.mean.unsqueeze(1) + noise @ root, (0, 1), value=1.0)


def site_one(task: Task, theta: Tensor, batch: Batch) -> Tensor:
    """One client's Σ φ̃φ̃ᵀ by class."""
    x, _ = task.features_one(theta, batch.x)
    phi = F.pad(x.double(), (0, 1), value=1.0)
    of_class = F.one_hot(batch.y, head_layer(task).out_features).double() * batch.w.double().unsqueeze(1)
    return torch.einsum("bc,bi,bj->cij", of_class, phi, phi)
