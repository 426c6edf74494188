"""Consilience: one model from data that may not be pooled, with honest uncertainty.

The names that most scripts need are here. The rest is in namespaces: `algorithms`, `optim` (client optimisers),
`server` (server optimisers), `inference`, `matching`, `metrics`, `models`, `data`, `tasks`, `engines`, `evaluation`,
`runs`, `studies` and `core` (records, Gaussians, keys).
"""

from consilience import (
    algorithms,
    core,
    data,
    engines,
    evaluation,
    inference,
    matching,
    metrics,
    models,
    optim,
    runs,
    server,
    studies,
    tasks,
)  # fmt: skip
from consilience.algorithms import (
    EPGAN,
    PFNM,
    SAFL,
    SCAFFOLD,
    Algorithm,
    FedAvg,
    FedEP,
    FedGAN,
    FedNP,
    FedProx,
    LocalOnly,
    Pooled,
    Private,
    Robust,
    Switch,
    algorithm,
)  # fmt: skip
from consilience.core import ConsilienceError, Gaussian, Point, Weighted, record
from consilience.core.version import __version__
from consilience.data import Data, Dataset, Federation, Ragged, load, partition
from consilience.engines import Distributed, Simulator
from consilience.evaluation import evaluate
from consilience.optim import SGD
from consilience.report import plot, write_report
from consilience.runs import fit, load_posterior, load_run
from consilience.studies import compare, tune
from consilience.tasks import Adversarial, Classification, MultiLabel, Regression, Task

__all__ = [
    "EPGAN",
    "PFNM",
    "SAFL",
    "SCAFFOLD",
    "SGD",
    "Adversarial",
    "Algorithm",
    "Classification",
    "ConsilienceError",
    "Data",
    "Dataset",
    "Distributed",
    "FedAvg",
    "FedEP",
    "FedGAN",
    "FedNP",
    "FedProx",
    "Federation",
    "Gaussian",
    "LocalOnly",
    "MultiLabel",
    "Point",
    "Pooled",
    "Private",
    "Ragged",
    "Regression",
    "Robust",
    "Simulator",
    "Switch",
    "Task",
    "Weighted",
    "__version__",
    "algorithm",
    "algorithms",
    "compare",
    "core",
    "data",
    "engines",
    "evaluate",
    "evaluation",
    "fit",
    "inference",
    "load",
    "load_posterior",
    "load_run",
    "matching",
    "metrics",
    "models",
    "optim",
    "partition",
    "plot",
    "record",
    "runs",
    "server",
    "studies",
    "tasks",
    "tune",
    "write_report",
]  # fmt: skip
