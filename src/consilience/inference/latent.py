"""Parts of FedNP's inference about a latent z: the predicted layer, and two divergences of diagonal Gaussians."""

from torch import Tensor

from consilience.core.errors import ConfigError, TaskError, nearest
from consilience.tasks.task import Task

LEAST = 1e-6  # the smallest variance, relative to the one it is compared with


def layer_weights(task: Task, layer: str | None) -> slice:
    """The coordinates of a layer's weight matrix in the flat vector; None is the last linear layer."""
    if task.main.head is None:
        raise TaskError("FedNP needs a linear layer, whose weights it can predict, but the module has none")
    layer = task.main.head if layer is None else layer
    name = f"{layer}.weight".removeprefix(".")  # a module that is one linear layer has the name ""
    if name not in task.main.names:
        layers = [known.removesuffix(".weight") for known in task.main.names if known.endswith(".weight")]
        raise ConfigError(f"layer {layer!r} has no weights to predict; {nearest(layer, layers)}")
    return task.slice(parameter=name)


def kl_to_weights(mu: Tensor, v: Tensor, w: Tensor, epsilon: float) -> Tensor:
    """mean_i KL(N(μ_i, v_i) ‖ N(w_i, ε))."""
    v = v.clamp_min(LEAST * epsilon)
    return ((v + (mu - w).square()) / epsilon - 1 - (v / epsilon).log()).mean() / 2


def kl_to_standard(mean: Tensor, var: Tensor) -> Tensor:
    """Σ_j KL(N(mean_j, var_j) ‖ N(0, 1))."""
    return (var + mean.square() - 1 - var.log()).sum() / 2
