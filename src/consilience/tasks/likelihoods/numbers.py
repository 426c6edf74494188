"""Likelihoods of numbers: with one noise for all, with a noise for each example, and of counts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core import DataError, TaskError, keys
from consilience.data.dataset import Dataset
from consilience.metrics import regression, weighted_regression
from consilience.metrics.scores import at_least_float32
from consilience.tasks.likelihoods.base import Likelihood, targets_in_memory

Output = Tensor | tuple[Tensor, Tensor]
LARGE, COUNTS = 50.0, 128  # from this rate on, a drawn count is a rounded Gaussian; below it, counts are under COUNTS


@dataclass(frozen=True)
class Normal(Likelihood):
    """p(y | output) = N(output, noise²). The loss is ½‖y − output‖²/noise², without the constant."""

    kind = "regression"
    ratio = ""
    gaussian = True
    spreads = True
    noise: float = 1.0

    def __post_init__(self) -> None:
        if self.noise <= 0:
            raise TaskError(f"noise is a standard deviation and must be positive, got {self.noise}")

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        return 0.5 * ((output - y) / self.noise).square().reshape(len(output), -1).sum(-1)

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        return output + self.noise * keys.standard(key, output.numel(), output.dtype).view(output.shape)

    def roots(self, output: Tensor) -> Tensor:
        """e_r / noise for every number r of an output."""
        unit = torch.eye(output[0].numel(), dtype=output.dtype, device=output.device) / self.noise
        return unit.view(-1, 1, *output.shape[1:]).expand(-1, *output.shape)

    def predictive(self, output: Tensor) -> Tensor:
        return output

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """Squared and absolute error, R², and the NLL under N(prediction, noise² + spread)."""
        noise = torch.full_like(prediction, self.noise**2)
        return regression(prediction, y, noise if spread is None else noise + spread)

    def resampled(self, prediction: Tensor, y: Tensor, spread: Tensor | None, weights: Tensor) -> dict[str, Tensor]:
        return weighted_regression(prediction, y, self.sd(prediction, spread).square(), weights)

    def sd(self, prediction: Tensor, spread: Tensor | None = None) -> Tensor:
        noise = torch.full_like(prediction, self.noise**2)
        return (noise if spread is None else noise + spread).sqrt()

    def check(self, output: Tensor, data: Dataset) -> None:
        if output.shape[1:] != data.y.shape[1:] or not data.y.is_floating_point():
            got, wanted = tuple(data.y.shape[1:]), tuple(output.shape[1:])
            raise DataError(
                f"{data.name}: targets of shape {got} and type {data.y.dtype}, but the module returns {wanted}; "
                "regression needs real targets [N, ...] of the module's output shape, such as "
                f"y.float().reshape{(-1, *wanted)}"
            )


class NormalWithVariance(Likelihood):
    """p(y | output) = N(mean, e^s), where the module returns mean and log variance s.

    The output is the tuple (mean, s), each of the shape of y, or one tensor whose last axis has the means, then the
    log variances. The loss is ½ Σ (s + (y − mean)² e^{−s}), without the constant. A prediction [N, D, 2] has means and
    variances along its last axis."""

    kind = "heteroscedastic"
    trees = True
    gaussian = True
    spreads = True

    @staticmethod
    def _parts(output: Output) -> tuple[Tensor, Tensor]:
        """(means, log variances), [B, D] each."""
        mean, log_variance = output if isinstance(output, tuple) else output.chunk(2, -1)
        return mean.reshape(len(mean), -1), log_variance.reshape(len(mean), -1)

    def losses(self, output: Output, y: Tensor) -> Tensor:
        mean, s = self._parts(output)
        return 0.5 * (s + (y.reshape(mean.shape) - mean).square() * (-s).exp()).sum(-1)

    def draw(self, output: Output, key: Tensor) -> Tensor:
        mean, s = self._parts(output)
        return mean + (s / 2).exp() * keys.standard(key, mean.numel(), mean.dtype).view(mean.shape)

    def predictive(self, output: Output) -> Tensor:
        mean, s = self._parts(output)
        return torch.stack([mean, s.exp()], -1)

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """Squared and absolute error, R², and the NLL under a Gaussian with the variance of the mixture of networks."""
        sd = self.sd(prediction, spread)
        return regression(prediction[..., 0].reshape(y.shape), y, sd.square().reshape(y.shape))

    def resampled(self, prediction: Tensor, y: Tensor, spread: Tensor | None, weights: Tensor) -> dict[str, Tensor]:
        variance = self.sd(prediction, spread).square().reshape(y.shape)
        return weighted_regression(prediction[..., 0].reshape(y.shape), y, variance, weights)

    def sd(self, prediction: Tensor, spread: Tensor | None = None) -> Tensor:
        variance = prediction[..., 1]
        return (variance if spread is None else variance + spread[..., 0]).sqrt()

    def check(self, output: Output, data: Dataset) -> None:
        each = data.y[0].numel()
        tensors = output if isinstance(output, tuple) else (output,)
        fits = len(tensors) <= 2 and all(
            isinstance(t, Tensor) and t[0].numel() * len(tensors) == 2 * each for t in tensors
        )
        if not fits or not data.y.is_floating_point():
            shapes = " and ".join(str(list(t.shape)) if isinstance(t, Tensor) else type(t).__name__ for t in tensors)
            raise DataError(
                f"{data.name}: a heteroscedastic regression needs real targets and, for each, a mean and a log "
                "variance: a tuple of two tensors of the targets' shape, or one with twice the outputs; targets are "
                f"{data.y.dtype} {list(data.y.shape)}, and the module returns {shapes}"
            )


class Counts(Likelihood):
    """p(y | output) = Poisson(y; e^output), for log rates and counts of one shape; [B, 1] also fits counts [N]."""

    kind = "poisson"
    ratio = "rate ratio"
    spreads = True

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        y = y.reshape(output.shape).to(output.dtype)
        return (output.exp() - y * output + torch.lgamma(y + 1)).reshape(len(output), -1).sum(-1)

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        """By the inverse distribution function; large rates by a rounded Gaussian."""
        rate, u = output.exp(), keys.uniform(key, output.numel(), output.dtype).view(output.shape)
        below = torch.arange(COUNTS, dtype=output.dtype, device=output.device) + 1
        small = (torch.special.gammaincc(below, rate.clamp_max(LARGE).unsqueeze(-1)) <= u.unsqueeze(-1)).sum(-1)
        z = keys.standard(key, output.numel(), output.dtype).view(output.shape)
        return torch.where(rate < LARGE, small.to(output.dtype), (rate + rate.sqrt() * z).round().clamp_min(0))

    def predictive(self, output: Tensor) -> Tensor:
        return output.exp()

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """Squared and absolute error and R² of the mean rate, and the NLL per count. Averaged over networks, this is
        the NLL of the negative binomial distribution with the mixture's mean λ and variance λ + spread."""
        rate = at_least_float32(prediction).reshape(y.shape).double().clamp_min(1e-30)
        y = y.double()
        nll = rate - y * rate.log() + torch.lgamma(y + 1)
        if spread is not None:
            wide = spread.reshape(y.shape).double()
            r = rate.square() / wide.clamp_min(1e-9 * rate.square())  # above this, a Poisson distribution
            mixed = torch.lgamma(y + 1) + torch.lgamma(r) - torch.lgamma(y + r)
            mixed = mixed + r * torch.log1p(rate / r) - y * (rate / (r + rate)).log()
            nll = torch.where(wide > 1e-6 * rate, mixed, nll)
        return {**regression(rate, y), "nll": nll.mean().item()}

    def check(self, output: Tensor, data: Dataset) -> None:
        y = targets_in_memory(data)
        if y[0].numel() != output[0].numel():
            raise DataError(
                f"{data.name}: counts of shape {tuple(y.shape[1:])} expected a log rate for each, and the module "
                f"returns {tuple(output.shape[1:])}"
            )
        if not bool(((y >= 0) & (y == y.round() if y.is_floating_point() else y >= 0)).all()):
            raise DataError(f"{data.name}: counts must be whole numbers from 0 on")
