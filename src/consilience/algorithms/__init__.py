"""One file a method. What is exported here is known to the command and joins the conformance suite."""

from consilience.algorithms.base import Algorithm, algorithm
from consilience.algorithms.fedavg import FedAvg
from consilience.algorithms.fedprox import FedProx
from consilience.algorithms.fedsgd import FedSGD
from consilience.algorithms.references import LocalOnly, Pooled

__all__ = ["Algorithm", "FedAvg", "FedProx", "FedSGD", "LocalOnly", "Pooled", "algorithm"]
