"""How good are predictions, and how honest: scores, calibration, detection, and what tables need to know of them."""

from consilience.metrics.calibration import Reliability, reliability
from consilience.metrics.detection import auroc
from consilience.metrics.scores import classification, entropy, multilabel, regression
from consilience.metrics.summary import MARGINAL, best, direction, rounds_to, running_means, spread

__all__ = [
    "MARGINAL",
    "Reliability",
    "auroc",
    "best",
    "classification",
    "direction",
    "entropy",
    "multilabel",
    "regression",
    "reliability",
    "rounds_to",
    "running_means",
    "spread",
]
