"""Scores of a set of predictions, as a dict of plain numbers. All averages are over examples."""

import math

import torch
from torch import Tensor

from consilience.core.errors import DataError
from consilience.metrics import classes
from consilience.metrics.classes import TINY as TINY


def classification(probs: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy, NLL −log p(y), ECE (15 bins, top label) and Brier score Σ_c (p_c − 1[y = c])²; for two classes also
    AUROC and balanced accuracy, nan if one of them is missing.

    `probs` [N, C] sums to one over classes, `y` [N] holds class indices."""
    classes.check_classes(probs, y)
    return {name: classes.alone(found) for name, found in weighted_classification(probs, y, classes.once(y)).items()}


def weighted_classification(probs: Tensor, y: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The scores of `classification` for weights of the examples [R, N], [R] each."""
    names = ("accuracy", "nll", "ece", "brier", *(("auroc", "balanced_accuracy") if probs.shape[1] == 2 else ()))
    return {name: getattr(classes, name)(probs, y, weights) for name in names}


def entropy(probs: Tensor) -> Tensor:
    """−Σ_c p_c log p_c of every row, in nats; the classes are the last axis."""
    terms: Tensor = torch.special.entr(at_least_float32(probs))
    return terms.sum(dim=-1)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Area under the ROC curve, P(s_out > s_in) + ½ P(s_out = s_in): 1 when all outside scores are higher, ½ by chance.

    From the pooled ranks r, the mean one for ties: (Σ_out r − n_out (n_out + 1)/2) / (n_in n_out)."""
    from scipy.stats import rankdata  # slow to import

    for name, scores in {"inside": inside, "outside": outside}.items():
        if not scores.numel():
            raise DataError(f"there are no scores of {name} examples")
        if not bool(torch.isfinite(scores).all()):
            raise DataError(f"the scores of {name} examples are not all finite")
    n, m = inside.numel(), outside.numel()
    pooled = torch.cat([scores.detach().cpu().double().reshape(-1) for scores in (outside, inside)])
    total = float(rankdata(pooled.numpy())[:m].sum())
    return (total - m * (m + 1) / 2) / (n * m)


def regression(mean: Tensor, y: Tensor, variance: Tensor | None = None) -> dict[str, float]:
    """MSE, RMSE, MAE and R² (averaged over outputs); with a predictive variance, Gaussian NLL per output.

    R² is nan where it has no meaning: a target that does not vary."""
    if mean.shape != y.shape:
        # [N, 1] against [N] would broadcast to [N, N] and give a plausible number.
        raise DataError(f"predictions and targets differ in shape: {list(mean.shape)} and {list(y.shape)}")
    _check_not_empty(y)
    mean, y = at_least_float32(mean), at_least_float32(y)
    error = (y - mean).flatten(1) if y.dim() > 1 else (y - mean)[:, None]
    target = y.reshape(error.shape)
    varies = (target != target[0]).any(dim=0)
    share = error.square().sum(dim=0) / (target - target.mean(dim=0)).square().sum(dim=0)
    mse = error.square().mean().item()
    scores = {
        "mse": mse,
        "rmse": math.sqrt(mse),
        "mae": error.abs().mean().item(),
        "r2": (1 - share).mean().item() if bool(varies.all()) else math.nan,
    }
    if variance is not None:
        # A variance of 0 is a claim of certainty: finite, so that it can be written and averaged.
        spread = at_least_float32(variance).expand_as(mean).reshape(error.shape).clamp(min=1e-12)
        scores["nll"] = 0.5 * ((2 * math.pi * spread).log() + error.square() / spread).mean().item()
    return scores


def weighted_regression(mean: Tensor, y: Tensor, variance: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The scores of `regression` for weights of the examples [R, N], [R] each."""
    mean, y, variance = (x.double().reshape(len(y), -1) for x in (mean, y, variance.expand_as(mean)))
    total, error = weights.sum(1), y - mean
    mse = weights @ error.square().mean(1) / total
    offset = y - y.mean(0)  # squares of large targets would cancel
    varies = (weights @ offset.square() - (weights @ offset).square() / total[:, None]).clamp(min=0)
    share = weights @ error.square() / torch.where(varies > 1e-12 * offset.square().sum(0), varies, torch.nan)
    spread = variance.clamp(min=1e-12)
    loss = 0.5 * ((2 * math.pi * spread).log() + error.square() / spread).mean(1)
    mae = weights @ error.abs().mean(1) / total
    return {"mse": mse, "rmse": mse.sqrt(), "mae": mae, "r2": (1 - share).mean(1), "nll": weights @ loss / total}


def multilabel(probs: Tensor, y: Tensor) -> dict[str, float]:
    """Micro-averaged precision, recall and F1, macro F1 over labels, all at p > 0.5, and NLL per label.

    A ratio 0/0 (a label that is never set nor predicted) counts as 0."""
    if probs.dim() != 2 or probs.shape != y.shape:
        raise DataError(f"probabilities and labels must be [N, L], got {list(probs.shape)} and {list(y.shape)}")
    _check_not_empty(y)
    probs, truth = at_least_float32(probs), y > 0.5
    chosen = probs > 0.5
    hits, predicted, actual = (flags.sum(dim=0).double() for flags in (chosen & truth, chosen, truth))
    likelihood = torch.where(truth, probs, 1 - probs)
    return {
        "precision": _ratio(hits.sum(), predicted.sum()).item(),
        "recall": _ratio(hits.sum(), actual.sum()).item(),
        "micro_f1": _ratio(2 * hits.sum(), (predicted + actual).sum()).item(),
        "macro_f1": _ratio(2 * hits, predicted + actual).mean().item(),
        "nll": -likelihood.clamp(min=TINY).log().mean().item(),
    }


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, 0 where both are."""
    return part / whole.clamp(min=1)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision and integers as float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def _check_not_empty(y: Tensor) -> None:
    if y.numel() == 0:
        raise DataError("there are no examples to score")
