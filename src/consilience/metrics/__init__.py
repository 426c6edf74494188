"""Metrics of predictions (scores, calibration, detection), judges of generated samples, and summaries for tables."""

from consilience.metrics.calibration import Reliability, binned, reliability
from consilience.metrics.classified import Classified, frechet
from consilience.metrics.fid import InceptionDistance
from consilience.metrics.histograms import ScoreCounts
from consilience.metrics.inception_v3 import inception
from consilience.metrics.intervals import auroc_interval, check_level, mean_of_shares, percentiles, wilson
from consilience.metrics.judge import Judge, pixels
from consilience.metrics.modes import Modes, density_mse, mixture_density
from consilience.metrics.own import ClassMetric, Metric, Metrics, as_metrics, directions, named
from consilience.metrics.precision_recall import PrecisionRecall
from consilience.metrics.scores import (
    auroc,
    classification,
    entropy,
    multilabel,
    regression,
    weighted_classification,
    weighted_regression,
)
from consilience.metrics.sequences import concordance, concordant_pairs, label_errors, text_errors
from consilience.metrics.summary import (
    MARGINAL,
    NO_OWN,
    Directions,
    best,
    bounds,
    choose_score,
    direction,
    rounds_to,
    running_means,
    spread,
)
from consilience.metrics.survival import brier_scores, integrated_brier, kaplan_meier

__all__ = [
    "MARGINAL", "NO_OWN", "ClassMetric", "Classified", "Directions", "InceptionDistance", "Judge", "Metric",
    "Metrics", "Modes", "PrecisionRecall", "Reliability", "ScoreCounts", "as_metrics", "auroc", "auroc_interval",
    "best", "binned", "bounds", "brier_scores", "check_level", "choose_score", "classification", "concordance",
    "concordant_pairs", "density_mse", "direction", "directions", "entropy", "frechet", "inception",
    "integrated_brier", "kaplan_meier", "label_errors", "mean_of_shares", "mixture_density", "multilabel", "named",
    "percentiles", "pixels", "regression", "reliability", "rounds_to", "running_means", "spread", "text_errors",
    "weighted_classification", "weighted_regression", "wilson",
]  # fmt: skip
