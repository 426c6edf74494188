"""Likelihoods p(y | output): of classes, numbers, sequences and survival times, and plain functions as losses."""

from consilience.tasks.likelihoods.alignments import Alignments, Transcript
from consilience.tasks.likelihoods.base import IGNORED, Likelihood, Predictions, Tally, samples
from consilience.tasks.likelihoods.classes import Bernoulli, Binary, Categorical, Ordinal, Weighing
from consilience.tasks.likelihoods.function import Function
from consilience.tasks.likelihoods.hazards import Hazards, Link
from consilience.tasks.likelihoods.numbers import Counts, Normal, NormalWithVariance
from consilience.tasks.likelihoods.sequences import Tokens
from consilience.tasks.likelihoods.survival import PartialLikelihood, Ties

__all__ = [
    "IGNORED", "Alignments", "Bernoulli", "Binary", "Categorical", "Counts", "Function", "Hazards", "Likelihood",
    "Link", "Normal", "NormalWithVariance", "Ordinal", "PartialLikelihood", "Predictions", "Tally", "Ties", "Tokens",
    "Transcript", "Weighing", "samples",
]  # fmt: skip
