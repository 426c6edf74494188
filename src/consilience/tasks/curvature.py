"""Expected Fisher information of one client: its diagonal, and its Kronecker factors by layer.

Of a layer that multiplies the columns a_t of its input (places t: one for a vector, all patches for a convolution)
with W, the gradient of an example in W is Σ_t g_t a_tᵀ, with g_t that in the layer's output. Where the likelihood has
`roots`, the expectation over targets is exact; elsewhere one target an example is drawn.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import grad, vjp, vmap

from consilience.core.errors import TaskError
from consilience.core.records import Tree, record, tree_map
from consilience.data.batch import Batch
from consilience.tasks.fisher import drawn
from consilience.tasks.layout import MAIN
from consilience.tasks.task import Task


@record
class Kronecker:
    """Information in the matrix [W, b] of a layer, G ⊗ A: A [a, a] of its inputs with a 1 for the bias, and G [o, o] of
    its outputs."""

    inputs: Tensor
    outputs: Tensor


def product_layers(task: Task) -> dict[str, tuple[slice, bool]]:
    """The layers that `kronecker_one` is about, by name: the place in θ of their weight, which the bias follows, and
    whether there is a bias. Layers with frozen parameters are not among them."""
    found, names = {}, set(task.main.names)
    for name in task.networks.functions[MAIN].products[1]:
        prefix = f"{name}." if name else ""
        own = [f"{prefix}{p}" for p, _ in task.module.get_submodule(name).named_parameters()]
        if names.issuperset(own):
            start = task.slice(parameter=own[0]).start
            found[name] = slice(start, task.slice(parameter=own[-1]).stop), len(own) > 1
    return found


def kronecker_one(task: Task, theta: Tensor, batch: Batch) -> tuple[Kronecker, ...]:
    """The factors of every layer of `product_layers`, means over a batch: A = Σ_t a_t a_tᵀ, and G the mean over places
    of g_t g_tᵀ (Grosse & Martens, 2016). For layers with one place, G ⊗ A is exact if g does not depend on a."""
    found, weight = [], batch.w / batch.w.sum().clamp_min(1e-12)
    for _, a, g in _passes(task, theta, batch):
        inputs = torch.einsum("bit,bjt,b->ij", a, a, weight)
        outputs = torch.einsum("rbit,rbjt,b->ij", g, g, weight) / a.shape[-1]
        found.append(Kronecker(inputs, outputs))
    return tuple(found)


def diagonal_one(task: Task, theta: Tensor, batch: Batch) -> Tensor:
    """The mean over a batch of E_y (∂ log p(y|x,θ) / ∂θ)², [P]."""
    layers = product_layers(task)
    if sum(place.stop - place.start for place, _ in layers.values()) < task.size:
        return _by_examples(task, theta, batch)
    found, weight = torch.zeros_like(theta), batch.w / batch.w.sum().clamp_min(1e-12)
    parts = {}
    for name, a, g in _passes(task, theta, batch):
        if a.shape[-1] == 1:  # (g aᵀ)² = g² (a²)ᵀ, without anything of size [B, o, a]
            square = g[..., 0].square().sum(0).mul(weight.unsqueeze(1)).mT @ a[..., 0].square()
        else:
            each = (torch.einsum("bit,bjt->bij", part, a).square() for part in g)
            square = torch.einsum("bij,b->ij", sum(each, torch.zeros(())), weight)
        parts[name] = square
    pieces = sorted((place.start, _flat(parts[name], biased)) for name, (place, biased) in layers.items())
    return found + torch.cat([piece for _, piece in pieces])


def _flat(matrix: Tensor, biased: bool) -> Tensor:
    """[W, b] as W and b lie in θ."""
    if not biased:
        return matrix.flatten()
    return torch.cat([matrix[:, :-1].flatten(), matrix[:, -1]])


def _passes(task: Task, theta: Tensor, batch: Batch) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, inputs a [B, a, T] with ones for a bias, gradients g [R, B, o, T]) of every layer of `product_layers`."""
    networks, layers = task.networks.with_taps_on_products(), product_layers(task)
    modules = {name: task.module.get_submodule(name) for name in layers}
    with torch.no_grad():
        _, seen = networks.tapped(theta, batch.x)
    zeros = {name: theta.new_zeros(_output_shape(layer, seen[name])) for name, layer in modules.items()}

    def run(offsets: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return networks.tapped(theta, batch.x, offsets=offsets)

    passed: Any = vjp(run, zeros, has_aux=True)
    output, pull, inputs = passed
    gradients = vmap(pull)(_roots(task, output, batch))[0]
    for name, layer in modules.items():
        a = _columns(layer, inputs[name].to(theta.dtype))
        g = gradients[name]
        g = g.flatten(3) if isinstance(layer, nn.Conv2d) else g.reshape(*g.shape[:2], -1, g.shape[-1]).mT
        yield name, torch.cat([a, torch.ones_like(a[:, :1])], 1) if layers[name][1] else a, g


def _output_shape(layer: nn.Module, x: Tensor) -> tuple[int, ...]:
    if isinstance(layer, nn.Conv2d):
        padding = map(int, layer.padding)
        sides = zip(x.shape[2:], layer.kernel_size, layer.stride, padding, layer.dilation, strict=True)
        return len(x), layer.out_channels, *(
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, pad, dilation in sides
        )  # fmt: skip
    assert isinstance(layer, nn.Linear)
    return *x.shape[:-1], layer.out_features


def _columns(layer: nn.Module, x: Tensor) -> Tensor:
    """The columns that a layer multiplies, [B, a, T]."""
    if isinstance(layer, nn.Conv2d):
        padding = tuple(map(int, layer.padding))
        return F.unfold(x, layer.kernel_size, layer.dilation, padding, layer.stride)
    return x.reshape(len(x), -1, x.shape[-1]).mT


def _roots(task: Task, output: Tensor, batch: Batch) -> Tensor:
    """Gradients in the output whose squares add up to its Fisher information, [R, B, …]."""
    if not isinstance(output, Tensor):
        raise TaskError(
            f"Fisher information by layers needs a module that returns one tensor, and {task.kind} has more"
        )
    output = output.detach()
    found = task.likelihood.roots(output)
    if found is not None:
        return found
    y = drawn(task.likelihood, output, batch)
    root: Tensor = grad(lambda at: task.likelihood.losses(at, y).sum())(output)
    return root.unsqueeze(0)


def _by_examples(task: Task, theta: Tensor, batch: Batch) -> Tensor:
    """The diagonal for any module: a squared gradient for each example and root, [B, P] in memory."""
    networks = task.networks
    output, seen = networks.watched(lambda: networks.apply(theta, batch.x, w=batch.w))
    given = [tree_map(torch.detach, moments) for _, _, moments, _ in seen]

    def along(theta: Tensor, x: Tree, root: Tensor) -> Tensor:
        one = tree_map(lambda leaf: leaf.unsqueeze(0), x)
        value: Tensor = (networks.apply(theta, one, given=given)[0] * root).sum()
        return value

    total = torch.zeros_like(theta)
    for root in _roots(task, output, batch):
        total = total + batch.w @ vmap(grad(along), in_dims=(None, 0, 0))(theta, batch.x, root).square()
    return total / batch.w.sum().clamp_min(1e-12)
