"""One file a method. What is exported here is known to the command and joins the conformance suite."""

from consilience.algorithms.adf import ADF
from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.downpour import Downpour
from consilience.algorithms.ensemble import Ensemble
from consilience.algorithms.fedavg import FedAvg
from consilience.algorithms.fedep import FedEP
from consilience.algorithms.fedpa import FedPA, FedPADiagonal
from consilience.algorithms.fedprox import FedProx
from consilience.algorithms.fedsep import FedSEP
from consilience.algorithms.fedsgd import FedSGD
from consilience.algorithms.pfnm import PFNM
from consilience.algorithms.references import LocalOnly, Pooled
from consilience.algorithms.safl import SAFL
from consilience.algorithms.switch import Switch

__all__ = [
    "ADF",
    "PFNM",
    "SAFL",
    "Algorithm",
    "Downpour",
    "Ensemble",
    "FedAvg",
    "FedEP",
    "FedPA",
    "FedPADiagonal",
    "FedProx",
    "FedSEP",
    "FedSGD",
    "LocalOnly",
    "Pooled",
    "Switch",
    "algorithm",
]
