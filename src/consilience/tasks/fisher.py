"""Diagonal Fisher information of one client: a rule for every module, and a fast one for linear layers.

F(θ) = E_x E_{y ~ p(y|x,θ)} (∂ log p(y|x,θ) / ∂θ)², with one draw of y an example. Both rules draw the same y and
differ by rounding only.
"""

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from consilience.core import keys
from consilience.core.records import Tree, tree_map
from consilience.data.batch import Batch
from consilience.tasks.likelihoods import Likelihood
from consilience.tasks.networks import Networks


def diagonal(networks: Networks, likelihood: Likelihood, theta: Tensor, batch: Batch) -> Tensor:
    """The mean over a batch, [P]; by the fast rule where it holds."""
    fast = by_layers(networks, likelihood, theta, batch) if networks.only_linear else None
    return by_examples(networks, likelihood, theta, batch) if fast is None else fast


def by_examples(networks: Networks, likelihood: Likelihood, theta: Tensor, batch: Batch) -> Tensor:
    """One squared gradient an example, for any module; [B, P] in memory. Statistics of BatchNorm are those of the
    batch, held fixed."""
    output, seen = networks.watched(lambda: networks.apply(theta, batch.x, w=batch.w))
    given = [tree_map(torch.detach, found) for _, _, found, _ in seen]

    def loss(theta: Tensor, x: Tree, y: Tree) -> Tensor:
        one_x, one_y = tree_map(lambda leaf: leaf.unsqueeze(0), (x, y))
        return likelihood.losses(networks.apply(theta, one_x, given=given), one_y).sum()

    y = drawn(likelihood, output, batch)
    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(theta, batch.x, y)
    total: Tensor = batch.w @ gradients.square()
    return total / batch.w.sum().clamp_min(1e-12)


def by_layers(networks: Networks, likelihood: Likelihood, theta: Tensor, batch: Batch) -> Tensor | None:
    """For h = Wa + b and g = ∂loss/∂h an example's gradient in W is g aᵀ, and its square is g² (a²)ᵀ: hence
    F_W = Σ w g² (a²)ᵀ and F_b = Σ w g², without anything of size [B, P]. g is the gradient in a zero added to h.

    None if an input is not [B, features]: then a layer acts on an example more than once.
    """
    main = networks.layout.main
    layers = {name: layer for name, layer in main.module.named_modules() if isinstance(layer, nn.Linear)}

    def loss(zeros: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        output, inputs = networks.tapped(theta, batch.x, offsets=zeros)
        return likelihood.losses(output, drawn(likelihood, output, batch)).sum(), inputs

    rows = batch.size
    zeros = {name: theta.new_zeros(rows, layer.out_features) for name, layer in layers.items()}
    gradients, inputs = grad(loss, has_aux=True)(zeros)
    if any(a.dim() != 2 or len(a) != rows for a in inputs.values()):
        return None
    information: dict[str, Tensor] = {}
    for name in layers:
        square = batch.w.unsqueeze(1) * gradients[name].square()
        prefix = f"{name}." if name else ""
        information[f"{prefix}weight"] = square.mT @ inputs[name].to(theta.dtype).square()
        information[f"{prefix}bias"] = square.sum(0)
    others = theta.new_zeros(networks.layout.size - main.slice.stop)
    found = torch.cat([*(information[name].reshape(-1) for name in main.names), others])
    return found / batch.w.sum().clamp_min(1e-12)


def drawn(likelihood: Likelihood, output: Tensor, batch: Batch) -> Tensor:
    """A target for each example, from the likelihood."""
    found = likelihood.draw(tree_map(torch.detach, output), keys.mix(batch.key ^ 0x5EED))
    return likelihood.masked(found, batch.y)
