"""A client's inference: from a cavity and data to a tilted distribution."""

from consilience.inference.laplace import Laplace
from consilience.inference.mcmc import MCMC
from consilience.inference.newton import Newton
from consilience.inference.ngvi import NGVI
from consilience.inference.sigmoid_moments import sigmoid_moments, sigmoid_site
from consilience.inference.tilted import Identity, Tilted
from consilience.inference.variational import Variational

__all__ = ["MCMC", "NGVI", "Identity", "Laplace", "Newton", "Tilted", "Variational", "sigmoid_moments", "sigmoid_site"]
