"""A module and a likelihood as functions of one flat vector."""

from consilience.tasks.adversarial import Adversarial, LeastSquares, Wasserstein
from consilience.tasks.likelihoods import Classification, MultiLabel, Regression
from consilience.tasks.task import Task

__all__ = ["Adversarial", "Classification", "LeastSquares", "MultiLabel", "Regression", "Task", "Wasserstein"]
