"""Judges of generated samples: do they look like the data (precision, distances), and like all of it (recall)?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from consilience.core.errors import ConfigError, DataError
from consilience.metrics.inception_v3 import inception
from consilience.metrics.scores import _at_least_float32, entropy

if TYPE_CHECKING:
    from torchmetrics.image.fid import FrechetInceptionDistance

    from consilience.data.dataset import Dataset


class Judge(Protocol):
    """Scores `samples` [N, ...] in the units of `real.inputs(index)`."""

    @property
    def count(self) -> int:
        """How many samples it wants to see."""

    def __call__(self, samples: Tensor, real: Dataset) -> dict[str, float]:
        """Its scores by name."""


@dataclass(frozen=True, eq=False)
class PrecisionRecall:
    """Improved precision and recall (Kynkäänniemi et al., 2019).

    A set covers the balls around its points that reach to their `neighbours`-th nearest fellows. Precision is the share
    of samples in what (at most `count`) real examples cover, recall the share of real examples in what samples cover.
    Distances are between inputs, or between their `features`. A sample that is not finite is not precise and covers
    nothing.
    """

    neighbours: int = 5
    count: int = 2000
    features: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if min(self.neighbours, self.count) < 1:
            raise ConfigError(f"neighbours and count must be at least 1, got {self.neighbours} and {self.count}")

    @torch.no_grad()
    def __call__(self, samples: Tensor, real: Dataset) -> dict[str, float]:
        """{"precision", "recall"}, both from 0 to 1."""
        _check_some(samples)
        true = self._rows(_examples(real, self.count).to(samples.device))
        made = _finite(samples)
        if not len(made):
            return {"precision": 0.0, "recall": 0.0}
        made = _finite(self._rows(made))
        _check_alike(made, true.shape[1])
        return {
            "precision": int(_covered(made, true, self.neighbours).sum()) / len(samples),
            "recall": int(_covered(true, made, self.neighbours).sum()) / len(true),
        }

    def _rows(self, x: Tensor) -> Tensor:
        return _flat(x if self.features is None else self.features(x))


@dataclass(frozen=True, eq=False)
class Modes:
    """Which of the clouds around `centres` [C, D] are found. A sample belongs to the nearest centre and is good if it
    is within `reach` times the deviation [C] of it; a mode is found if it has `least` of its fair share N/C as good
    samples.

    A deviation is per coordinate, so a sample of the cloud itself is about deviation·√D away: `reach` is for the plane.
    """

    centres: Tensor
    deviations: Tensor
    reach: float = 3.0
    least: float = 0.2
    count: int = 2000

    def __post_init__(self) -> None:
        if self.centres.dim() != 2 or self.deviations.shape != self.centres.shape[:1] or not len(self.centres):
            got = f"{list(self.centres.shape)} and {list(self.deviations.shape)}"
            raise DataError(f"centres must be [C, D] and deviations [C], got {got}")

    @classmethod
    def of(cls, data: Dataset) -> Modes:
        """A mode for each label: its examples' mean, and their root mean square distance from it per coordinate."""
        if data.y.dim() != 1 or data.y.is_floating_point() or not len(data):
            raise DataError(f"{data.name} has no classes that could be modes")
        clouds = [_flat(data.inputs((data.y == label).nonzero()[:, 0])) for label in torch.unique(data.y)]
        centres = torch.stack([cloud.mean(dim=0) for cloud in clouds])
        spreads = [(cloud - centre).square().mean().sqrt() for cloud, centre in zip(clouds, centres, strict=True)]
        return cls(centres, torch.stack(spreads))

    @torch.no_grad()
    def __call__(self, samples: Tensor, real: Dataset) -> dict[str, float]:
        """{"modes": how many are found, "good_share": the share of good samples}."""
        _check_some(samples)
        rows = _flat(samples)
        _check_alike(rows, self.centres.shape[1])
        distances = torch.cdist(rows, self.centres.to(rows), compute_mode="donot_use_mm_for_euclid_dist")
        distance, nearest = distances.min(dim=1)
        good = distance <= self.reach * self.deviations.to(rows)[nearest]
        found = _fair_shares(nearest[good], len(self.centres), len(rows)) >= self.least
        return {"modes": float(found.sum()), "good_share": int(good.sum()) / len(rows)}


@dataclass(frozen=True, eq=False)
class Classified:
    """What a classifier, trained on the data, says: `module` takes model inputs and returns logits.

    "classifier_score" is exp(E KL(p(y|x) ‖ p(y))), the Inception Score's formula with this classifier: 1 if all samples
    look alike, C if they are surely of all classes in equal parts. "classes" counts those that get `least` of their
    fair share N/C of the samples. "classifier_distance" is Fréchet's between samples and (at most `count`) real
    examples, by `features`, or else by what goes into the last nn.Linear. A sample that is not finite is of no class,
    says nothing about y, and is infinitely far.
    """

    module: nn.Module
    count: int = 2000
    batch_size: int = 500
    least: float = 0.2
    features: Callable[[Tensor], Tensor] | None = None

    @torch.no_grad()
    def __call__(self, samples: Tensor, real: Dataset) -> dict[str, float]:
        """{"classifier_score", "classes", "classifier_distance"}."""
        _check_some(samples)
        _, true = self._read(_examples(real, self.count).to(samples.device))
        read = _finite(samples)
        if len(read):
            logits, made = self._read(read)
            usable = logits.isfinite().all(dim=1) & made.isfinite().all(dim=1)
            logits, made = logits[usable], made[usable]
        if not len(read) or not len(made):
            return {"classifier_score": 1.0, "classes": 0.0, "classifier_distance": math.inf}
        probs = logits.softmax(dim=1)
        information = entropy(probs.mean(dim=0)) - entropy(probs).mean()
        found = _fair_shares(logits.argmax(dim=1), logits.shape[1], len(samples)) >= self.least
        return {
            "classifier_score": math.exp(float(information) * len(made) / len(samples)),
            "classes": float(found.sum()),
            "classifier_distance": frechet(*_moments(made), *_moments(true)) if len(made) == len(samples) else math.inf,
        }

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, features) of all rows."""
        at = next(self.module.parameters(), None)
        with _evaluating(self.module), self._features() as features:
            pairs = [features(part if at is None else part.to(at)) for part in torch.split(x, self.batch_size)]
        logits, found = (torch.cat([_flat(part).double() for part in column]) for column in zip(*pairs, strict=True))
        return logits, found

    @contextmanager
    def _features(self) -> Iterator[Callable[[Tensor], tuple[Tensor, Tensor]]]:
        """x ↦ (logits, features), while a hook looks on if there is no function for them."""
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


@dataclass(frozen=True, eq=False)
class InceptionDistance:
    """FID (Heusel et al., 2017) by torchmetrics: Fréchet's distance between Inception's features of samples and of at
    most `count` real images, whose moments are computed once for each data set.

    Images are bytes, of one or three channels. A `network` of one's own takes bytes [N, 3, H, W] to features [N, D] and
    has D as `num_features`. A sample that is not finite is infinitely far. FID falls with the number of images, so
    compare only equal counts.
    """

    count: int = 10_000
    batch_size: int = 100
    network: nn.Module | None = None
    # By id of the examples, and the examples along with it, so that no others can get that id.
    _known: dict[int, tuple[Tensor, FrechetInceptionDistance]] = field(default_factory=dict, init=False, repr=False)

    @torch.no_grad()
    def __call__(self, samples: Tensor, real: Dataset) -> dict[str, float]:
        """{"fid"}."""
        if min(len(samples), known := min(len(real), self.count)) < 2:
            raise DataError(f"FID needs two images of either kind, got {len(samples)} made and {known} real")
        if len(_finite(samples)) < len(samples):
            return {"fid": math.inf}
        metric = self._metric(real, samples.device)
        metric.reset()
        with _evaluating(self._network):
            for part in torch.split(samples, self.batch_size):
                metric.update(_bytes(part, real), real=False)
        # LAPACK may end the process on eigenvalues of what is not finite.
        if not bool((metric.real_features_sum + metric.fake_features_sum).isfinite().all()):
            return {"fid": math.nan}
        return {"fid": float(metric.compute().clamp(min=0))}

    def _metric(self, real: Dataset, device: torch.device) -> FrechetInceptionDistance:
        """torchmetrics' metric, which has seen the real images."""
        if id(real.x) not in self._known:
            try:
                from torchmetrics.image.fid import FrechetInceptionDistance
            except ImportError as error:
                raise ConfigError("FID needs torchmetrics, which is missing: pip install 'consilience[gan]'") from error
            metric = FrechetInceptionDistance(self._network, reset_real_features=False).to(device)
            with _evaluating(self._network):
                for part in torch.split(_spaced(real, self.count), self.batch_size):
                    metric.update(_bytes(real.inputs(part), real).to(device), real=True)
            self._known[id(real.x)] = real.x, metric
        return self._known[id(real.x)][1].to(device)

    @cached_property
    def _network(self) -> nn.Module:
        return inception() if self.network is None else self.network


def frechet(mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor) -> float:
    """‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2 (Σ₁^½ Σ₂ Σ₁^½)^½), Fréchet's distance (squared) of two Gaussians; nan if anything is
    not finite. By eigenvalues of symmetric matrices in float64, so covariances may be singular."""
    mean1, cov1, mean2, cov2 = (x.double() for x in (mean1, cov1, mean2, cov2))
    if not all(bool(x.isfinite().all()) for x in (mean1, cov1, mean2, cov2)):
        return math.nan
    values, vectors = _spectrum(cov1)
    root = vectors * values.sqrt()  # Σ₁ = root · rootᵀ
    overlap = _spectrum(root.T @ cov2 @ root)[0].sqrt().sum()
    return float(((mean1 - mean2).square().sum() + cov1.trace() + cov2.trace() - 2 * overlap).clamp(min=0))


def density_mse(map: Tensor, truth: Tensor) -> float:
    """Mean squared difference of two maps on one grid, each scaled to [0, 1] there; a constant map becomes 0."""
    if map.shape != truth.shape:
        raise DataError(f"the maps differ in shape: {list(map.shape)} and {list(truth.shape)}")
    return float((_from_0_to_1(map) - _from_0_to_1(truth)).square().mean())


def mixture_density(points: Tensor, centres: Tensor, variances: Tensor | float) -> Tensor:
    """1/C Σ_c N(x; μ_c, v_c I) at `points` [..., D], with `centres` [C, D] and `variances` [C], or one for all."""
    variance = torch.as_tensor(variances, dtype=centres.dtype, device=centres.device).expand(len(centres))
    squares = (points[..., None, :] - centres).square().sum(dim=-1)
    logs = -(squares / variance + centres.shape[1] * (2 * math.pi * variance).log()) / 2
    return logs.logsumexp(dim=-1).exp() / len(centres)


def pixels(samples: Tensor, real: Dataset) -> Tensor:
    """(x − shift)/scale, clamped to 0..255: model inputs as the pixels they stand for."""
    if real.scale is None:
        raise DataError(f"{real.name} has no scale from pixels to inputs, so it is not made of images")
    x = _at_least_float32(samples)
    return ((x if real.shift is None else x - real.shift.to(x)) / real.scale.to(x)).clamp(0, 255)


def _bytes(samples: Tensor, real: Dataset) -> Tensor:
    """Images [N, 3, H, W] as bytes; grey becomes three equal channels."""
    images = pixels(samples, real)
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise DataError(f"FID needs images [N, 1 or 3, H, W], got {list(images.shape)} of {real.name}")
    return images.round().byte().expand(-1, 3, -1, -1)


def _spaced(real: Dataset, count: int) -> Tensor:
    """The rows of at most `count` examples, at even spacing."""
    if not len(real):
        raise DataError(f"{real.name} has no examples to compare samples with")
    chosen = min(count, len(real))
    return torch.arange(chosen, device=real.x.device) * len(real) // chosen


def _examples(real: Dataset, count: int) -> Tensor:
    return real.inputs(_spaced(real, count))


def _flat(x: Tensor) -> Tensor:
    """[N, ...] as [N, D], in float32 or float64."""
    return _at_least_float32(x).reshape(len(x), -1)


def _finite(x: Tensor) -> Tensor:
    """The rows that are finite."""
    return x[x.reshape(len(x), -1).isfinite().all(dim=1)]


def _check_some(samples: Tensor) -> None:
    if not samples.numel():
        raise DataError("there are no samples to judge")


def _check_alike(rows: Tensor, width: int) -> None:
    if rows.shape[1] != width:
        raise DataError(f"samples have {rows.shape[1]} coordinates, but what they are compared with has {width}")


def _covered(points: Tensor, by: Tensor, neighbours: int) -> Tensor:
    """Which points lie in a ball around one of `by` that reaches to its `neighbours`-th nearest fellow, or to the
    farthest if there are fewer; a point without fellows covers itself."""
    if not len(by):
        return torch.zeros(len(points), dtype=torch.bool)
    radii = by.new_zeros(1)
    if len(by) > 1:
        nearest = _squares(by, by).fill_diagonal_(math.inf).topk(min(neighbours, len(by) - 1), largest=False).values
        radii = nearest.amax(dim=1)
    # Balls are closed: who lies on the edge is inside, whichever way its distance was rounded.
    return (_squares(points, by) <= radii * (1 + 1e-9)).any(dim=1)


def _squares(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances [len(a), len(b)] by products, forty times as fast as by differences; in float64 and 0 where
    smaller than rounding, so that equal points are at no distance."""
    centre = b.mean(dim=0, dtype=torch.float64)
    a, b = a - centre, b - centre
    sizes = a.square().sum(dim=1)[:, None] + b.square().sum(dim=1)
    squares = sizes - 2 * a @ b.T
    return squares.masked_fill_(squares < 1e-12 * sizes, 0)


def _fair_shares(labels: Tensor, kinds: int, total: int) -> Tensor:
    """How many of `total` samples got each label, by the fair share total/kinds."""
    return torch.bincount(labels, minlength=kinds).double() * kinds / total


def _moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance (n − 1) over rows; one row has no covariance."""
    mean = rows.mean(dim=0)
    return mean, (rows - mean).T @ (rows - mean) / max(len(rows) - 1, 1)


def _spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors of a covariance, but those that are 0 up to rounding: their roots would not be."""
    values, vectors = torch.linalg.eigh(matrix)
    some = values > values[-1:].clamp(min=0) * len(values) * torch.finfo(values.dtype).eps
    return values[some], vectors[:, some]


def _from_0_to_1(map: Tensor) -> Tensor:
    map = map.double()
    low, high = map.min(), map.max()
    return (map - low) / (high - low) if bool(high != low) else torch.zeros_like(map)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """The module and its parts in evaluation mode, and afterwards each as it was."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
