"""Client optimisers, samplers and schedules of their step sizes."""

from consilience.optim.averaging import epoch_means
from consilience.optim.chain import Chain
from consilience.optim.ivon import IVON
from consilience.optim.optimizers import SGD, Adam, AMSGrad, RMSprop
from consilience.optim.samplers import SGHMC, SGLD
from consilience.optim.schedules import Cosine, PerClient, Schedule, Tapered

__all__ = [
    "IVON", "SGD", "SGHMC", "SGLD", "AMSGrad", "Adam", "Chain", "Cosine", "PerClient", "RMSprop", "Schedule", "Tapered",
    "epoch_means",
]  # fmt: skip
