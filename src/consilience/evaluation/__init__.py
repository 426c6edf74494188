"""Beliefs to scores: predictions, calibration, uncertainty, detection."""

from consilience.evaluation.scores import Detection, Evaluation, Uncertainty, detect, evaluate, uncertainty

__all__ = ["Detection", "Evaluation", "Uncertainty", "detect", "evaluate", "uncertainty"]
