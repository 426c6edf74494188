"""Networks and losses as functions of one flat vector."""

from consilience.tasks.adversarial import Adversarial
from consilience.tasks.likelihoods import Likelihood
from consilience.tasks.objectives import LeastSquares, Objective, Wasserstein
from consilience.tasks.supervised import Classification, MultiLabel, Regression, Supervised
from consilience.tasks.task import Task

__all__ = [
    "Adversarial", "Classification", "LeastSquares", "Likelihood", "MultiLabel", "Objective", "Regression",
    "Supervised", "Task", "Wasserstein",
]  # fmt: skip
