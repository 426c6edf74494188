"""Layers that keep state: replaced by forms that clients can train side by side, or refused."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from consilience.core import TaskError, keys


class KeyedDropout(nn.Module):
    """Dropout whose mask is a hash of (client's key, layer, position): the same for a client trained alone or in a
    cohort. It uses no random generator. The key is a buffer that the task replaces at each call. A layer called twice
    in one pass drops the same positions twice."""

    key: Tensor

    def __init__(self, rate: float, layer: int, channelwise: bool) -> None:
        super().__init__()
        self.rate, self.layer, self.channelwise = rate, layer, channelwise
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.channelwise else x.shape
        draw = keys.uniform(keys.mix(self.key ^ (self.layer + 1)), shape.numel(), dtype=torch.float32)
        kept = (draw.view(shape) >= self.rate).to(x.dtype)
        return x * kept / (1 - self.rate) if self.rate < 1 else x * kept


class FrozenBatchNorm(nn.Module):
    """BatchNorm with fixed statistics: an affine map per channel whose weight and bias are still learned."""

    mean: Tensor
    var: Tensor

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        mean, var = layer.running_mean, layer.running_var
        self.register_buffer("mean", torch.zeros(layer.num_features) if mean is None else mean.clone())
        self.register_buffer("var", torch.ones(layer.num_features) if var is None else var.clone())
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, self.weight, self.bias, eps=self.eps)


def _swap(module: nn.Module, kind: type, make: Callable[[Any], nn.Module]) -> nn.Module:
    module = copy.deepcopy(module)
    if isinstance(module, kind):
        return make(module)
    made: dict[Any, nn.Module] = {}  # a layer in two places stays one layer
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if isinstance(layer, kind):
            parent, _, attribute = name.rpartition(".")
            if layer not in made:
                made[layer] = make(layer)
            setattr(module.get_submodule(parent), attribute, made[layer])
    return module


def freeze_batchnorm(module: nn.Module) -> nn.Module:
    """A copy whose BatchNorm layers keep their present statistics (for pretrained networks)."""
    return _swap(module, _BatchNorm, FrozenBatchNorm)


def replace_batchnorm(module: nn.Module, groups: int = 2) -> nn.Module:
    """A copy with GroupNorm in place of every BatchNorm, which needs no statistics of the batch."""

    def group_norm(layer: _BatchNorm) -> nn.Module:
        fitting = next(g for g in range(min(groups, layer.num_features), 0, -1) if layer.num_features % g == 0)
        return nn.GroupNorm(fitting, layer.num_features, eps=layer.eps, affine=layer.affine)

    return _swap(module, _BatchNorm, group_norm)


def with_keyed_dropout(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """A copy for training with every dropout keyed, and the names of the buffers that take the key."""
    names = [name for name, layer in module.named_modules() if isinstance(layer, _DropoutNd) and layer.p > 0]
    if not names:
        return module, []
    count = iter(range(len(names)))

    def keyed(layer: _DropoutNd) -> nn.Module:
        if layer.p == 0:
            return nn.Identity()
        return KeyedDropout(layer.p, next(count), not isinstance(layer, nn.Dropout))

    return _swap(module, _DropoutNd, keyed), [f"{name}.key" if name else "key" for name in names]


def trains_otherwise(module: nn.Module, x: Tensor) -> bool:
    """Whether a module computes something else in training, beside its dropout layers: `F.dropout`, or an `if
    self.training`. Pass a copy: it stays in training mode."""
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        evaluated = module(x)
        for layer in module.train().modules():
            if isinstance(layer, _DropoutNd):
                layer.eval()
        try:
            trained = module(x)
        except Exception:  # as of a detector that also needs boxes
            return True
    if not isinstance(trained, Tensor) or trained.shape != evaluated.shape:
        return True
    return bool((trained - evaluated).norm() > 1e-3 * evaluated.norm())  # fused and plain attention differ by less


def check_layers(module: nn.Module) -> None:
    """Raise a TaskError for layers whose training depends on more than parameters and one client's batch."""
    for name, layer in module.named_modules():
        where = f"layer {name!r} ({type(layer).__name__})"
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
            raise TaskError(f"{where} has no shape yet: call the module once on an example before making a task")
        if isinstance(layer, _BatchNorm | _InstanceNorm) and layer.track_running_stats:
            raise TaskError(
                f"{where} keeps running statistics of its batches, which clients cannot share: use "
                "consilience.models.replace_batchnorm(model) for GroupNorm in its place, or "
                "consilience.models.freeze_batchnorm(model) to keep its present statistics fixed"
            )
        if isinstance(layer, _BatchNorm):
            raise TaskError(f"{where} mixes the examples of a batch: use consilience.models.replace_batchnorm(model)")
        if isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout):
            raise TaskError(f"{where} has no keyed form: use nn.Dropout")
        inner = getattr(layer, "dropout", 0.0)
        if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and inner:
            raise TaskError(f"{where} drops units inside a fused kernel, which cannot be keyed: set its dropout to 0")
