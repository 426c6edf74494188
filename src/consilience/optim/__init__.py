"""Client optimisers, samplers and schedules of their step sizes."""

from consilience.optim.averaging import epoch_means
from consilience.optim.chain import Chain
from consilience.optim.dpsgd import DPSGD
from consilience.optim.ivon import IVON
from consilience.optim.optimizers import SGD, Adam, AdamW, AMSGrad, RMSprop
from consilience.optim.sam import SAM
from consilience.optim.samplers import SGHMC, SGLD
from consilience.optim.schedules import Cosine, Linear, PerClient, Schedule, Tapered

__all__ = [
    "DPSGD", "IVON", "SAM", "SGD", "SGHMC", "SGLD", "AMSGrad", "Adam", "AdamW", "Chain", "Cosine", "Linear",
    "PerClient", "RMSprop", "Schedule", "Tapered", "epoch_means",
]  # fmt: skip
