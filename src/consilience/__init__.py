"""Consilience: one model from data that may not be pooled, with honest uncertainty."""

from consilience.algorithms import (
    ADF,
    MOON,
    PFNM,
    SAFL,
    SCAFFOLD,
    Algorithm,
    Downpour,
    Ensemble,
    FedAvg,
    FedBE,
    FedDC,
    FedDyn,
    FedEP,
    FedLA,
    FedNova,
    FedPA,
    FedPADiagonal,
    FedProx,
    FedSEP,
    FedSGD,
    LocalOnly,
    Pooled,
    Switch,
    algorithm,
)
from consilience.beliefs import Mixture
from consilience.cohort import Cohort, Info
from consilience.data import Compose, Crop, Data, Dataset, Federation, Flip, load, partition
from consilience.engines import Plan, Simulator
from consilience.errors import ClientError, ConsilienceError
from consilience.evaluation import Detection, Evaluation, Uncertainty, detect, evaluate, uncertainty
from consilience.gaussian import Gaussian
from consilience.inference import (
    MCMC,
    NGVI,
    SGD,
    SGHMC,
    SGLD,
    AMSGrad,
    Cosine,
    Identity,
    Laplace,
    Newton,
    PerClient,
    Tapered,
    Tilted,
)
from consilience.layers import freeze_batchnorm, replace_batchnorm
from consilience.matching import BetaBernoulli, DPMeans, match
from consilience.optimizers import AdaGrad, Adam, Momentum, Yogi
from consilience.records import Addressed, Point, Weighted, pack, record, unpack
from consilience.task import Batch, Classification, MultiLabel, Regression, Task

__version__ = "0.1.0"

from consilience import models, tracking
from consilience.checkpoint import StoredRun, load_posterior, load_run
from consilience.comparison import Comparison, Setting, compare
from consilience.distillation import distil
from consilience.experiment import fit
from consilience.ranges import Choice, Range
from consilience.report import write_report
from consilience.runs import Callback, Run

__all__ = [
    "ADF",
    "MCMC",
    "MOON",
    "NGVI",
    "PFNM",
    "SAFL",
    "SCAFFOLD",
    "SGD",
    "SGHMC",
    "SGLD",
    "AMSGrad",
    "AdaGrad",
    "Adam",
    "Addressed",
    "Algorithm",
    "Batch",
    "BetaBernoulli",
    "Callback",
    "Choice",
    "Classification",
    "ClientError",
    "Cohort",
    "Comparison",
    "Compose",
    "ConsilienceError",
    "Cosine",
    "Crop",
    "DPMeans",
    "Data",
    "Dataset",
    "Detection",
    "Downpour",
    "Ensemble",
    "Evaluation",
    "FedAvg",
    "FedBE",
    "FedDC",
    "FedDyn",
    "FedEP",
    "FedLA",
    "FedNova",
    "FedPA",
    "FedPADiagonal",
    "FedProx",
    "FedSEP",
    "FedSGD",
    "Federation",
    "Flip",
    "Gaussian",
    "Identity",
    "Info",
    "Laplace",
    "LocalOnly",
    "Mixture",
    "Momentum",
    "MultiLabel",
    "Newton",
    "PerClient",
    "Plan",
    "Point",
    "Pooled",
    "Range",
    "Regression",
    "Run",
    "Setting",
    "Simulator",
    "StoredRun",
    "Switch",
    "Tapered",
    "Task",
    "Tilted",
    "Uncertainty",
    "Weighted",
    "Yogi",
    "algorithm",
    "compare",
    "detect",
    "distil",
    "evaluate",
    "fit",
    "freeze_batchnorm",
    "load",
    "load_posterior",
    "load_run",
    "match",
    "models",
    "pack",
    "partition",
    "record",
    "replace_batchnorm",
    "tracking",
    "uncertainty",
    "unpack",
    "write_report",
]
