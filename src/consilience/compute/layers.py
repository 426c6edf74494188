"""Layers with statistics of a batch: replaced, frozen, or prepared for passes; and layers that are refused."""

import copy
import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from consilience.core import TaskError

PLAIN_ATTENTION = ("sdpa", "eager")
BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


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


def _swap(module: nn.Module, make: Callable[[Any], nn.Module]) -> nn.Module:
    """A copy with another layer in place of every BatchNorm. A subclass may do more than BatchNorm does, such as an
    activation, and is refused."""
    module = copy.deepcopy(module)
    made: dict[Any, nn.Module] = {}  # a layer in two places stays one layer
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if not isinstance(layer, _BatchNorm):
            continue
        if type(layer) not in BATCHNORMS:
            raise TaskError(
                f"layer {name!r} ({type(layer).__name__}) is a subclass of BatchNorm and may do more than it does: "
                "replace it yourself, or keep it, as BatchNorm layers can be trained"
            )
        if layer not in made:
            made[layer] = make(layer)
        if not name:
            return made[layer]
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, made[layer])
    return module


def freeze_batchnorm(module: nn.Module) -> nn.Module:
    """A copy whose BatchNorm layers keep their present statistics (for pretrained networks)."""
    return _swap(module, FrozenBatchNorm)


def replace_batchnorm(module: nn.Module, groups: int = 2) -> nn.Module:
    """A copy with GroupNorm in place of every BatchNorm, which needs no statistics of the batch. Scale and shift are
    kept, and stay frozen where they were."""

    def group_norm(layer: _BatchNorm) -> nn.Module:
        fitting = next(g for g in range(min(groups, layer.num_features), 0, -1) if layer.num_features % g == 0)
        norm = nn.GroupNorm(fitting, layer.num_features, eps=layer.eps, affine=layer.affine)
        if layer.affine:
            norm.weight, norm.bias = layer.weight, layer.bias
        return norm

    return _swap(module, group_norm)


def batchnorms(module: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers of a module by name, subclasses included."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}


def prepare_for_passes(module: nn.Module, training: bool) -> nn.Module:
    """The module as `Pass` needs it, changed in place. BatchNorm layers are always in training mode: the pass says
    whose statistics they use, and they count nothing. Models of Hugging Face keep no cache, and do not look into their
    masks, which `vmap` cannot do, to find out whether they need them."""
    module.train(training)
    for layer in batchnorms(module).values():
        layer.train()
        layer.num_batches_tracked = None
    for part in module.modules():
        config = getattr(part, "config", None)
        if getattr(part, "_supports_sdpa", False) and getattr(config, "_attn_implementation", None) in PLAIN_ATTENTION:
            part.set_attn_implementation(_masked_attention())  # type: ignore[operator]
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
    return module


@cache
def _masked_attention() -> str:
    """The name of transformers' fused attention with masks that are always made; registered there by that name."""
    attention = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    masks = importlib.import_module("transformers.masking_utils")
    registry = importlib.import_module("transformers.modeling_utils").AttentionInterface

    def always(*args: Any, **options: Any) -> Any:
        return masks.sdpa_mask(*args, **options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    name = "consilience"
    registry.register(name, attention)
    masks.AttentionMaskInterface.register(name, always)
    return name


def has_dropout(module: nn.Module) -> bool:
    """Whether a layer of a module drops units in training."""
    inner = (nn.RNNBase, nn.MultiheadAttention)
    return any(
        (isinstance(layer, _DropoutNd) and layer.p > 0) or (isinstance(layer, inner) and bool(layer.dropout))
        for layer in module.modules()
    )


def check_layers(module: nn.Module) -> None:
    """Raise a TaskError for modules whose training depends on more than parameters and one client's batch."""
    if isinstance(module, torch.jit.ScriptModule):
        raise TaskError("a module of torch.jit cannot be computed for many clients: pass the nn.Module it was made of")
    for name, p in module.named_parameters():
        if p.requires_grad and not p.is_floating_point():
            raise TaskError(
                f"parameter {name!r} has type {p.dtype}, and weights must be real: hold the real and the imaginary "
                "part in two parameters and join them by torch.complex, or freeze it by requires_grad_(False)"
            )
    for name, layer in module.named_modules():
        where = f"layer {name!r} ({type(layer).__name__})"
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
            raise TaskError(f"{where} has no shape yet: call the module once on an example before making a task")
        if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
            raise TaskError(
                f"{where} keeps running statistics of single examples, which have no use here: make it with "
                "track_running_stats=False"
            )
        if isinstance(layer, _BatchNorm) and not layer.track_running_stats:
            raise TaskError(
                f"{where} mixes test examples, because it keeps no statistics: make it with track_running_stats=True, "
                "or use consilience.models.replace_batchnorm(model)"
            )
