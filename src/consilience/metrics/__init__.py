"""How good are predictions, and how honest: scores, calibration, detection; judges of generated samples; and what
tables need to know of them."""

from consilience.metrics.calibration import Reliability, reliability
from consilience.metrics.detection import auroc
from consilience.metrics.generative import (
    Classified,
    InceptionDistance,
    Judge,
    Modes,
    PrecisionRecall,
    density_mse,
    frechet,
    mixture_density,
    pixels,
)
from consilience.metrics.inception_v3 import inception
from consilience.metrics.scores import classification, entropy, multilabel, regression
from consilience.metrics.summary import MARGINAL, best, direction, rounds_to, running_means, spread

__all__ = [
    "MARGINAL",
    "Classified",
    "InceptionDistance",
    "Judge",
    "Modes",
    "PrecisionRecall",
    "Reliability",
    "auroc",
    "best",
    "classification",
    "density_mse",
    "direction",
    "entropy",
    "frechet",
    "inception",
    "mixture_density",
    "multilabel",
    "pixels",
    "regression",
    "reliability",
    "rounds_to",
    "running_means",
    "spread",
]
