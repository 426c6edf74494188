"""Consilience: one model from data that may not be pooled, with honest uncertainty."""

from consilience.algorithms import Algorithm, FedAvg, FedProx, FedSGD, LocalOnly, Pooled, algorithm
from consilience.cohort import Cohort, Info
from consilience.data import Compose, Crop, Data, Dataset, Federation, Flip, load, partition
from consilience.engines import Plan, Simulator
from consilience.errors import ClientError, ConsilienceError
from consilience.evaluation import Evaluation, evaluate
from consilience.gaussian import Gaussian
from consilience.inference import SGD
from consilience.layers import freeze_batchnorm, replace_batchnorm
from consilience.optimizers import AdaGrad, Adam, Momentum, Yogi
from consilience.records import Addressed, Point, Weighted, pack, record, unpack
from consilience.task import Batch, Classification, MultiLabel, Regression, Task

__version__ = "0.1.0"

from consilience.experiment import Run, fit

__all__ = [
    "SGD",
    "AdaGrad",
    "Adam",
    "Addressed",
    "Algorithm",
    "Batch",
    "Classification",
    "ClientError",
    "Cohort",
    "Compose",
    "ConsilienceError",
    "Crop",
    "Data",
    "Dataset",
    "Evaluation",
    "FedAvg",
    "FedProx",
    "FedSGD",
    "Federation",
    "Flip",
    "Gaussian",
    "Info",
    "LocalOnly",
    "Momentum",
    "MultiLabel",
    "Plan",
    "Point",
    "Pooled",
    "Regression",
    "Run",
    "Simulator",
    "Task",
    "Weighted",
    "Yogi",
    "algorithm",
    "evaluate",
    "fit",
    "freeze_batchnorm",
    "load",
    "pack",
    "partition",
    "record",
    "replace_batchnorm",
    "unpack",
]
