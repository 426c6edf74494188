"""Scores of generated samples by a classifier, and the Fréchet distance of its features."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from consilience.core.errors import ConfigError
from consilience.data.dataset import Dataset
from consilience.metrics.judge import check_some, counted, evaluating, examples, fair_shares, finite, flat
from consilience.metrics.scores import entropy


@dataclass(frozen=True, eq=False)
class Classified:
    """Scores by a classifier that was trained on the data: `module` takes model inputs and returns logits.

    "classifier_score" is exp(E KL(p(y|x) ‖ p(y))), the Inception Score's formula with this classifier: 1 if all samples
    look alike, C if they are certainly of all classes in equal parts. "classes" counts those that get `least` of their
    fair share N/C of the samples, and "class_coverage" is the mean over classes of the share of a fair share that they
    get, at most 1: 0.9 if one of ten is missing. "classifier_distance" is the Fréchet distance between samples and (at
    most `count`) real examples, by `features`, or else by the inputs of the last nn.Linear. A sample that is not finite
    is of no class, carries no information about y, and is infinitely far. Names are as `counted` makes them."""

    module: nn.Module
    count: int = 2000
    batch_size: int = 500
    least: float = 0.2
    features: Callable[[Tensor], Tensor] | None = None

    @torch.no_grad()
    def __call__(self, samples: Tensor, real: Dataset) -> dict[str, float]:
        check_some(samples)
        _, true = self._read(examples(real, self.count).to(samples.device))
        read = finite(samples)
        if len(read):
            logits, made = self._read(read)
            usable = logits.isfinite().all(dim=1) & made.isfinite().all(dim=1)
            logits, made = logits[usable], made[usable]
        if not len(read) or not len(made):
            worst = {"classifier_score": 1.0, "classes": 0.0, "class_coverage": 0.0, "classifier_distance": math.inf}
            return counted(worst, samples)
        probs = logits.softmax(dim=1)
        information = entropy(probs.mean(dim=0)) - entropy(probs).mean()
        shares = fair_shares(logits.argmax(dim=1), logits.shape[1], len(samples))
        scores = {
            "classifier_score": math.exp(float(information) * len(made) / len(samples)),
            "classes": float((shares >= self.least).sum()),
            "class_coverage": float(shares.clamp(max=1).mean()),
            "classifier_distance": frechet(*_moments(made), *_moments(true)) if len(made) == len(samples) else math.inf,
        }
        return counted(scores, samples)

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, features) of all rows."""
        at = next(self.module.parameters(), None)
        with evaluating(self.module), self._features() as features:
            pairs = [features(part if at is None else part.to(at)) for part in torch.split(x, self.batch_size)]
        logits, found = (torch.cat([flat(part).double() for part in column]) for column in zip(*pairs, strict=True))
        return logits, found

    @contextmanager
    def _features(self) -> Iterator[Callable[[Tensor], tuple[Tensor, Tensor]]]:
        """x ↦ (logits, features), by a hook unless there is a function for the features."""
        own = self.features
        if own is not None:
            yield lambda x: (self.module(x), own(x))
            return
        layers = [layer for layer in self.module.modules() if isinstance(layer, nn.Linear)]
        if not layers:
            raise ConfigError("the classifier has no nn.Linear whose inputs are its features: pass features=")
        seen: list[Tensor] = []
        handle = layers[-1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            yield lambda x: (self.module(x), seen.pop())
        finally:
            handle.remove()


def frechet(mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor) -> float:
    """‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2 (Σ₁^½ Σ₂ Σ₁^½)^½), the squared Fréchet distance of two Gaussians; nan if an input
    is not finite. By eigenvalues of symmetric matrices in float64, so covariances may be singular."""
    mean1, cov1, mean2, cov2 = (x.double() for x in (mean1, cov1, mean2, cov2))
    if not all(bool(x.isfinite().all()) for x in (mean1, cov1, mean2, cov2)):
        return math.nan
    values, vectors = _spectrum(cov1)
    root = vectors * values.sqrt()  # Σ₁ = root · rootᵀ
    overlap = _spectrum(root.T @ cov2 @ root)[0].sqrt().sum()
    return float(((mean1 - mean2).square().sum() + cov1.trace() + cov2.trace() - 2 * overlap).clamp(min=0))


def _moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance (n − 1) over rows; one row has no covariance."""
    mean = rows.mean(dim=0)
    return mean, (rows - mean).T @ (rows - mean) / max(len(rows) - 1, 1)


def _spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a covariance, without those that are 0 up to rounding: their roots are not."""
    values, vectors = torch.linalg.eigh(matrix)
    some = values > values[-1:].clamp(min=0) * len(values) * torch.finfo(values.dtype).eps
    return values[some], vectors[:, some]
