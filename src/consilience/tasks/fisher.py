"""Diagonal Fisher information of one client: a rule for every module, and a fast one for linear layers.

F(θ) = E_x E_{y ~ p(y|x,θ)} (∂ log p(y|x,θ) / ∂θ)², with one draw of y an example. Both rules draw the same y and
differ by rounding only.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn
from torch.func import grad, vmap

from consilience.core import keys

if TYPE_CHECKING:
    from consilience.data.batch import Batch
    from consilience.tasks.task import Task


def diagonal(task: Task, theta: Tensor, batch: Batch) -> Tensor:
    """The mean over a batch, [P]; by the fast rule where it holds."""
    fast = by_layers(task, theta, batch) if task.only_linear else None
    return by_examples(task, theta, batch) if fast is None else fast


def by_examples(task: Task, theta: Tensor, batch: Batch) -> Tensor:
    """One squared gradient an example, whatever the module is; [B, P] in memory."""

    def loss(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return task.losses(task.apply_one(theta, x.unsqueeze(0)), y.unsqueeze(0)).sum()

    y = _draw(task, task.apply_one(theta, batch.x), batch)
    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(theta, batch.x, y)
    total: Tensor = batch.w @ gradients.square()
    return total / batch.w.sum().clamp_min(1e-12)


def by_layers(task: Task, theta: Tensor, batch: Batch) -> Tensor | None:
    """For h = Wa + b and g = ∂loss/∂h an example's gradient in W is g aᵀ, and its square is g² (a²)ᵀ: hence
    F_W = Σ w g² (a²)ᵀ and F_b = Σ w g², without anything of size [B, P]. g is the gradient in a zero added to h.

    None if an input turns out not to be [B, features]: then a layer acts on an example more than once.
    """
    layers = {name: layer for name, layer in task.module.named_modules() if isinstance(layer, nn.Linear)}

    def loss(zeros: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        output, inputs = task.tapped_one(theta, batch.x, offsets=zeros)
        return task.losses(output, _draw(task, output, batch)).sum(), inputs

    rows = len(batch.x)
    zeros = {name: theta.new_zeros(rows, layer.out_features) for name, layer in layers.items()}
    slopes, inputs = grad(loss, has_aux=True)(zeros)
    if any(a.dim() != 2 or len(a) != rows for a in inputs.values()):
        return None
    information: dict[str, Tensor] = {}
    for name in layers:
        square = batch.w.unsqueeze(1) * slopes[name].square()
        prefix = f"{name}." if name else ""
        information[f"{prefix}weight"] = square.mT @ inputs[name].to(theta.dtype).square()
        information[f"{prefix}bias"] = square.sum(0)
    main = [information[name].reshape(-1) for name in task.names]
    others = theta.new_zeros(task.size - task.slice().stop)
    return torch.cat([*main, others]) / batch.w.sum().clamp_min(1e-12)


def _draw(task: Task, output: Tensor, batch: Batch) -> Tensor:
    return task.draw(output.detach(), keys.mix(batch.key ^ 0x5EED))


def only_linear(module: nn.Module) -> bool:
    """Whether the fast rule may hold: every parameter is the weight or bias of an `nn.Linear` that shares it with
    nobody, and every such layer is called once. Seen from the module's structure, so that it is decided once."""
    layers = {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear}
    own = {f"{name}.{p}" if name else p for name in layers for p in ("weight", "bias")}
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if not own.issuperset(parameters) or len(parameters) != len(list(module.parameters())):
        return False
    if "" in layers:
        return True
    try:
        nodes = fx.Tracer().trace(module).nodes
    except Exception:  # a forward that depends on values, or does more than fx can follow
        return False
    calls = Counter(node.target for node in nodes if node.op == "call_module" and node.args)
    direct = {node.target for node in nodes if node.op == "get_attr"}
    return all(calls[name] == 1 for name in layers) and direct.isdisjoint(parameters)
