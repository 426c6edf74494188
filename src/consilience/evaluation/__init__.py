"""Evaluation of beliefs: predictions, scores, calibration, uncertainty, detection."""

from consilience.evaluation.calibration import Calibration, calibrate, prediction_sets
from consilience.evaluation.detection import Detection, detect
from consilience.evaluation.predictions import predict, predict_inputs
from consilience.evaluation.scores import Evaluation, evaluate
from consilience.evaluation.sets import Intervals, LabelSets
from consilience.evaluation.tempering import Tempering, temper
from consilience.evaluation.uncertainty import Uncertainty, uncertainty

__all__ = [
    "Calibration", "Detection", "Evaluation", "Intervals", "LabelSets", "Tempering", "Uncertainty", "calibrate",
    "detect", "evaluate", "predict", "predict_inputs", "prediction_sets", "temper", "uncertainty",
]  # fmt: skip
