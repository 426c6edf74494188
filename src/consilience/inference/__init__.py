"""What a client does with its data: chains that move its weights, and what it then believes of them."""

from consilience.inference.chains import SGD, SGHMC, SGLD, AMSGrad, Chain, ClientAdam, RMSprop
from consilience.inference.laplace import Laplace
from consilience.inference.mcmc import MCMC
from consilience.inference.newton import Newton
from consilience.inference.ngvi import NGVI
from consilience.inference.schedules import Cosine, PerClient, Schedule, Tapered
from consilience.inference.sigmoid_moments import sigmoid_moments, sigmoid_site
from consilience.inference.tilted import Identity, Tilted

__all__ = [
    "MCMC",
    "NGVI",
    "SGD",
    "SGHMC",
    "SGLD",
    "AMSGrad",
    "Chain",
    "ClientAdam",
    "Cosine",
    "Identity",
    "Laplace",
    "Newton",
    "PerClient",
    "RMSprop",
    "Schedule",
    "Tapered",
    "Tilted",
    "sigmoid_moments",
    "sigmoid_site",
]
