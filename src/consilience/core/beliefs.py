"""Beliefs about the weights: a Gaussian, a point, or a mixture of networks."""

from __future__ import annotations

import torch
from torch import Tensor

from consilience.core.display import span
from consilience.core.errors import TaskError
from consilience.core.gaussian import Gaussian
from consilience.core.records import Point, record, shape, static


@record
class Mixture:
    """An ensemble: networks theta [M, P] with weights [M, 1], or [M, C] by class, that sum to 1 over the networks."""

    theta: Tensor
    weights: Tensor

    @classmethod
    def of(cls, theta: Tensor) -> Mixture:
        """An ensemble with equal weights."""
        return cls(theta, theta.new_full((len(theta), 1), 1 / len(theta)))

    def __repr__(self) -> str:
        by = " by class" if self.weights.shape[-1] > 1 else ""
        return f"Mixture({len(self.theta)} networks of {shape(self.theta[0])}, weights{by} {span(self.weights) or '…'})"

    @property
    def mean(self) -> Tensor:
        """Not defined: raises a TaskError, because the mean of several networks' weights is no useful network."""
        raise TaskError("an ensemble is several networks, not one vector of weights: predict with it, or distil it")

    def combine(self, predictions: Tensor) -> Tensor:
        """The mean of predictions [M, N, …]: p_c = Σ_m w_mc p_mc, scaled to sum to 1 if weights are by class."""
        shape = (len(self.theta), *[1] * (predictions.dim() - 2), self.weights.shape[1])
        weights = self.weights.to(predictions)
        total = (predictions * (weights / weights.sum(0)).view(shape)).sum(0)  # 1 in the predictions' precision
        return total / total.sum(-1, keepdim=True).clamp_min(1e-30) if self.weights.shape[1] > 1 else total


@record
class Interpolated(Mixture):
    """Networks of several clients, `each` of every client in turn. They predict log p = β Σ_k log p_k + (1 − β) log
    (1/K) Σ_k p_k, scaled to sum to 1, where p_k is the mean over client k's networks. β = 0 is the mixture of the
    clients' predictions, and β = 1 their product."""

    beta: float = static()
    each: int = static()

    def combine(self, predictions: Tensor) -> Tensor:
        """The interpolation of probabilities [M, N, …, C]."""
        own = predictions.view(-1, self.each, *predictions.shape[1:]).mean(1)
        log_own = own.clamp_min(torch.finfo(own.dtype).tiny).log()
        logs: Tensor = self.beta * log_own.sum(0) + (1 - self.beta) * own.mean(0).log()
        return logs.softmax(-1)


Belief = Gaussian | Point | Mixture


def draws(belief: Belief, samples: int, *, seed: int = 0) -> Mixture:
    """The networks that a belief predicts with: an ensemble itself, `samples` draws of a posterior, or the mean."""
    if isinstance(belief, Mixture):
        return belief
    if samples and isinstance(belief, Gaussian):
        return Mixture.of(belief.sample(samples, seed=seed))
    return Mixture.of(belief.mean.unsqueeze(0))
