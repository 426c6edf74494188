"""Evaluation of beliefs: predictions, scores, calibration, uncertainty, detection."""

from consilience.evaluation.detection import Detection, detect
from consilience.evaluation.predictions import predict
from consilience.evaluation.scores import Evaluation, evaluate
from consilience.evaluation.uncertainty import Uncertainty, uncertainty

__all__ = ["Detection", "Evaluation", "Uncertainty", "detect", "evaluate", "predict", "uncertainty"]
