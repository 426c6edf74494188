"""Robust: aggregation that a few wrong or hostile clients cannot corrupt, for methods whose updates add up."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.fedavg import FedAvg
from consilience.algorithms.shared.wrapping import Wrapping
from consilience.core import ConsilienceError, Count, Size, Tree, Weighted, check_types, leaves, tree_map


class Rule(ABC):
    """One value from those of K clients, leaves [K, ...], without weights."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def name(self) -> str:
        """The name within a method's name."""
        return type(self).__name__

    @abstractmethod
    def __call__(self, values: Tree) -> Tree:
        """The robust mean."""


def middle(values: Tensor, cut: int) -> Tensor:
    """The mean of every coordinate without its `cut` lowest and highest values; NaN is higher than all."""
    return values.sort(0).values[cut : len(values) - cut].mean(0)


@dataclass(frozen=True)
class Median(Rule):
    """The median of every coordinate, the mean of the middle two for an even K (Yin et al., 2018)."""

    def __call__(self, values: Tree) -> Tree:
        return tree_map(lambda leaf: middle(leaf, (len(leaf) - 1) // 2), values)


@dataclass(frozen=True)
class TrimmedMean(Rule):
    """The mean of every coordinate without its ⌊share · K⌋ lowest and highest values (Yin et al., 2018)."""

    share: Annotated[float, Field(ge=0, lt=0.5)] = 0.2

    def __call__(self, values: Tree) -> Tree:
        return tree_map(lambda leaf: middle(leaf, int(self.share * len(leaf) + 1e-9)), values)


@dataclass(frozen=True)
class Krum(Rule):
    """The mean of the `keep` clients with the smallest Σ ‖v_k − v_j‖² over the K − bad − 2 clients j nearest to them
    (Blanchard et al., 2017; multi-Krum where `keep` > 1). It tolerates `bad` hostile clients of K ≥ 2 bad + 3."""

    bad: Size = 1
    keep: Count = 1

    def __call__(self, values: Tree) -> Tree:
        flat = torch.cat([leaf.flatten(1) for _, leaf in leaves(values)], dim=1).double()
        clients, needed = len(flat), max(2 * self.bad + 3, self.bad + self.keep)
        if clients < needed:
            raise ConsilienceError(
                f"Krum with bad={self.bad} and keep={self.keep} needs {needed} clients in every round, got {clients}"
            )
        product = flat @ flat.T
        squares = product.diagonal()
        distance = (squares + squares.unsqueeze(1) - 2 * product).fill_diagonal_(0)
        scores = distance.sort(1).values[:, 1 : clients - self.bad - 1].sum(1)  # without the distance 0 to itself
        chosen = scores.argsort(stable=True)[: self.keep]
        return tree_map(lambda leaf: leaf[chosen].mean(0), values)


@algorithm
class Robust(Wrapping):
    """`method` with a `rule` in place of the mean of a round's updates: Σ w_k v_k / Σ w_k becomes rule(v_1, …, v_K).
    For factors, which multiply, Σ Δ_k becomes K · rule(Δ_1, …, Δ_K).

    The method's updates must add up, and its server must not hold the sum of its clients' states. The rules do not
    weight by examples, because a client reports its own weight. So with clients of unequal size the objective is not
    FedAvg's, and where clients differ much, honest ones are cut off too. The server has all updates in memory."""

    additive: ClassVar[bool] = False
    method: Algorithm = FedAvg()
    rule: Rule = Median()

    @property
    def name(self) -> str:
        return f"Robust({self.method.name}, {self.rule.name})"

    def fuse(self, server: Any, update: Tree) -> Tree:
        clients = len(next(leaf for _, leaf in leaves(update)))
        if not isinstance(update, Weighted):
            return self.method.fuse(server, tree_map(lambda leaf: clients * leaf, self.rule(update)))
        weight = clients * Median()(update.weight)
        total = tree_map(lambda leaf: leaf * weight.view(()), self.rule(update.mean))
        return self.method.fuse(server, Weighted(total, weight))
