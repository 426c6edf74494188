"""Networks and losses as functions of one flat vector."""

from consilience.tasks.adversarial import Adversarial
from consilience.tasks.likelihoods import Likelihood
from consilience.tasks.objectives import LeastSquares, Objective, Wasserstein
from consilience.tasks.supervised import (
    CTC,
    Binary,
    Classification,
    Cox,
    DiscreteHazards,
    Heteroscedastic,
    LanguageModel,
    MultiLabel,
    Ordinal,
    Poisson,
    Regression,
    Supervised,
)  # fmt: skip
from consilience.tasks.task import Task

__all__ = [
    "CTC", "Adversarial", "Binary", "Classification", "Cox", "DiscreteHazards", "Heteroscedastic", "LanguageModel",
    "LeastSquares", "Likelihood", "MultiLabel", "Objective", "Ordinal", "Poisson", "Regression", "Supervised",
    "Task", "Wasserstein",
]  # fmt: skip
