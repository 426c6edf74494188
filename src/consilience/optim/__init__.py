"""Client optimisers, samplers and schedules of their step sizes."""

from consilience.optim.chains import SGD, SGHMC, SGLD, Adam, AMSGrad, Chain, RMSprop
from consilience.optim.schedules import Cosine, PerClient, Schedule, Tapered

__all__ = [
    "SGD",
    "SGHMC",
    "SGLD",
    "AMSGrad",
    "Adam",
    "Chain",
    "Cosine",
    "PerClient",
    "RMSprop",
    "Schedule",
    "Tapered",
]  # fmt: skip
