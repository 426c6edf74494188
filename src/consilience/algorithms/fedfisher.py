"""FedFisher: one-shot learning with the Fisher information of the clients' networks (Jhunjhunwala et al., 2024)."""

from typing import ClassVar

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.core import ConfigError, Point, Range, Ranges, Weighted, record
from consilience.core.checks import Count, Positive
from consilience.core.records import static, tree_map
from consilience.data.cohort import Cohort, Info
from consilience.optim import SGD, Chain
from consilience.tasks.curvature import Kronecker, diagonal_one, kronecker_one, product_layers
from consilience.tasks.task import Task

CLOSE = 1e-12  # the residual, relative to the right-hand side, at which the equations of a layer count as solved


@record
class Update:
    """F_k and (F_k + ε) (w_k − w), [K, P] both."""

    fisher: Tensor
    pull: Tensor


@algorithm
class FedFisher(Algorithm):
    """w ← argmin Σ p_k (v − w_k)ᵀ (F_k + ε) (v − w_k) over v, with the Fisher information F_k of client k's network w_k
    as a diagonal: (Σ p_k F_k + ε)⁻¹ Σ p_k (F_k + ε) w_k.

    All clients train from the same weights. F_k is the mean over the client's examples of E_y (∂ log p(y|x,w_k)/∂w)².
    The expectation over y is exact for classes, labels and numbers, and one draw otherwise. `prior` is ε: it adds the
    factor N(w̄, 1/ε) around the mean w̄ of the clients, so weights without information go to w̄, and a large ε is FedAvg.
    The result is one network, meant for one round. `batch_size` examples have their information computed at once."""

    by_gradients: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {"prior": Range(1e-6, 1e-1)}
    train: Chain = SGD()
    prior: Positive = 1e-3
    batch_size: Count = 50

    def start(self, task: Task, info: Info) -> Point:
        return Point(info.initial)

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        trained = self.train(task, message.theta, cohort)
        return self.update(self.information(task, trained, cohort), trained - message.theta, cohort.n), None

    def information(self, task: Task, trained: Tensor, cohort: Cohort) -> Tensor:
        """F_k at the clients' networks, [K, P]."""
        return cohort.mean(task.vectorize(diagonal_one), trained, self.batch_size, tag="fisher")

    def update(self, fisher: Tensor, change: Tensor, n: Tensor) -> Weighted:
        """What clients with this information and these changes w_k − w send."""
        return Weighted.of(Update(fisher, (fisher + self.prior) * change), n)

    def fuse(self, server: Point, update: Weighted) -> Point:
        found = update.mean
        return Point(server.theta + found.pull / (found.fisher + self.prior))

    def posterior(self, server: Point) -> Point:
        return server


@record
class KroneckerServer:
    """The weights, and (start, stop, whether there is a bias) in θ of every layer that has Kronecker factors."""

    model: Point
    layers: tuple[tuple[int, int, bool], ...] = static()


@record
class KroneckerUpdate:
    """w_k − w [K, P], the factors of every layer, and the numbers of examples [K, 1]."""

    change: Tensor
    layers: tuple[Kronecker, ...]
    n: Tensor


@algorithm
class FedFisherKFAC(Algorithm):
    """FedFisher with F_k = G_k ⊗ A_k for each layer that multiplies its input, or patches of it, by a matrix: linear
    layers and convolutions. Other weights, such as those of norms, are averaged.

    The server solves Σ p_k G_k V A_k + ε V = Σ p_k G_k W_k A_k + ε W̄ for the matrix V of each layer, by at most `steps`
    conjugate gradients from the mean W̄. It needs each client's factors: updates do not add up, and have a² + o² numbers
    for a layer with a inputs and o outputs."""

    additive: ClassVar[bool] = False
    by_gradients: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {"prior": Range(1e-6, 1e-1)}
    train: Chain = SGD()
    prior: Positive = 1e-3
    batch_size: Count = 50
    steps: Count = 300

    def adapt(self, task: Task, seed: int) -> Task:
        if not product_layers(task):
            raise ConfigError(
                f"{self.name} found no linear layer or convolution in {type(task.module).__name__} whose calls it can "
                "follow: use FedFisher, whose information is diagonal"
            )
        return task

    def start(self, task: Task, info: Info) -> KroneckerServer:
        layers = tuple((place.start, place.stop, biased) for place, biased in product_layers(task).values())
        return KroneckerServer(Point(info.initial), layers)

    def message(self, server: KroneckerServer, ids: Tensor) -> Point:
        return server.model

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[KroneckerUpdate, None]:
        trained = self.train(task, message.theta, cohort)
        factors = self.information(task, trained, cohort)
        return KroneckerUpdate(trained - message.theta, factors, cohort.n.clone()), None

    def information(self, task: Task, trained: Tensor, cohort: Cohort) -> tuple[Kronecker, ...]:
        """The factors of every layer at the clients' networks [K, P]."""
        factors = task.vectorize(kronecker_one)
        total: tuple[Kronecker, ...] | None = None
        for k, batch in cohort.in_order(self.batch_size, "fisher"):
            share = batch.w.sum(1) / cohort.n[:k, 0]
            found = tree_map(lambda leaf, s=share: leaf * s.view(-1, 1, 1), factors(trained[:k], batch))
            if total is None:
                total = found
            else:
                tree_map(lambda into, leaf, k=k: into[:k].add_(leaf), total, found)
        assert total is not None  # every client has an example
        return total

    def fuse(self, server: KroneckerServer, update: KroneckerUpdate) -> KroneckerServer:
        share = (update.n / update.n.sum()).double()
        w, change = server.model.theta, update.change.double()
        mean = (share * change).sum(0)
        moved = mean.clone()
        for (start, stop, biased), layer in zip(server.layers, update.layers, strict=True):
            inputs, outputs = layer.inputs.double(), share.unsqueeze(-1) * layer.outputs.double()
            rows = outputs.shape[-1]
            own = _matrix(change[:, start:stop], rows, biased)
            solved = self.solve(inputs, outputs, own, _matrix(mean[start:stop], rows, biased))
            moved[start:stop] = torch.cat([solved[:, :-1].flatten(), solved[:, -1]]) if biased else solved.flatten()
        return KroneckerServer(Point(w + moved.to(w.dtype)), server.layers)

    def solve(self, inputs: Tensor, outputs: Tensor, own: Tensor, mean: Tensor) -> Tensor:
        """V [o, a] with Σ_k G_k V A_k + ε V = Σ_k G_k W_k A_k + ε W̄, by conjugate gradients, preconditioned by the
        diagonal of the left side."""

        def left(v: Tensor) -> Tensor:
            found: Tensor = (outputs @ v @ inputs).sum(0) + self.prior * v
            return found

        right = (outputs @ own @ inputs).sum(0) + self.prior * mean
        diagonal = torch.einsum("ki,kj->ij", outputs.diagonal(dim1=1, dim2=2), inputs.diagonal(dim1=1, dim2=2))
        v, residual, scale = mean, right - left(mean), diagonal + self.prior
        ahead = direction = residual / scale
        enough = CLOSE * right.norm()
        for _ in range(self.steps):
            if residual.norm() <= enough:
                break
            pushed, before = left(direction), (residual * ahead).sum()
            step = before / (direction * pushed).sum()
            v, residual = v + step * direction, residual - step * pushed
            ahead = residual / scale
            direction = ahead + (residual * ahead).sum() / before * direction
        return v

    def posterior(self, server: KroneckerServer) -> Point:
        return server.model


def _matrix(flat: Tensor, rows: int, biased: bool) -> Tensor:
    """[W, b] of a layer with `rows` outputs from its part [..., o · a] of θ."""
    if not biased:
        return flat.reshape(*flat.shape[:-1], rows, -1)
    return torch.cat([_matrix(flat[..., :-rows], rows, False), flat[..., -rows:].unsqueeze(-1)], -1)
