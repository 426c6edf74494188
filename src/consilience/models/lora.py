"""LoRA: frozen linear layers with a learned term of low rank (Hu et al., 2022)."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from consilience.core.errors import ConfigError, TaskError

QUERIES = ("q", "q_proj", "query", "to_q", "qkv", "in_proj", "c_attn")
"""Last names of the projection of queries in common modules."""


class LoRALinear(nn.Module):
    """y = x (W₀ + s B A)ᵀ + b with W₀ and b frozen, A [rank, in] at random and B [out, rank] = 0 at the start."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, train_a: bool) -> None:
        super().__init__()
        self.base_layer, self.scaling = base.requires_grad_(False), alpha / rank
        weight = base.weight
        self.lora_A = nn.Parameter(weight.new_empty(rank, base.in_features), requires_grad=train_a)
        self.lora_B = nn.Parameter(weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        plain: Tensor = self.base_layer(x)
        return plain + self.scaling * (x @ self.lora_A.mT @ self.lora_B.mT)


def add_lora(
    module: nn.Module,
    rank: int = 8,
    alpha: float = 16.0,
    *,
    targets: Sequence[str] | None = None,
    also: Sequence[str] = (),
    train_a: bool = True,
) -> nn.Module:
    """A copy of `module` whose linear layers `targets` are W₀ + (alpha / rank) B A, with B = 0 at the start. All other
    parameters are frozen, except those below the names `also`, such as a head.

    `targets` and `also` are names of layers, their last parts, or patterns: "head", "blocks.0.*", "*.mlp.*". By default
    the projections of attention are adapted (a projection of queries and the layers beside it), or all linear layers
    where there are none. Without `train_a`, A stays as
    it was drawn (FFA-LoRA, Sun et al., 2024): W is then linear in B, so a Gaussian over B is one over W, and the mean
    of B gives the mean of W. A is drawn from torch's generator: set its seed before.
    """
    if rank < 1:
        raise ConfigError(f"the rank of LoRA must be at least 1, got {rank}")
    if adapters(module):
        raise TaskError(f"{type(module).__name__} has LoRA layers already: merge them first, by merge_lora")
    module = copy.deepcopy(module)
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    free = [name for name, _ in module.named_parameters() if _matches(name, also)]
    if targets is None:
        attention = {_parent(name) for name in linear if name.rpartition(".")[2] in QUERIES}
        chosen = [name for name in linear if _parent(name) in attention] or [
            name for name in linear if not _matches(name, also)
        ]
    else:
        chosen = [name for name in linear if _matches(name, targets)]
    if not chosen:
        raise TaskError(f"no linear layer of {type(module).__name__} is called {targets}; it has {', '.join(linear)}")
    module.requires_grad_(False)
    for name in free:
        module.get_parameter(name).requires_grad_(True)
    return _replaced(module, {name: _adapted(module, name, rank, alpha, train_a) for name in chosen})


def merge_lora(module: nn.Module) -> nn.Module:
    """A copy with plain linear layers W₀ + s B A in place of those of `add_lora`; no parameter is frozen."""
    module = copy.deepcopy(module)
    merged: dict[str, nn.Module] = {}
    for pair in adapters(module):
        layer = module.get_submodule(pair.layer)
        if isinstance(layer, LoRALinear):
            with torch.no_grad():
                layer.base_layer.weight += layer.scaling * layer.lora_B @ layer.lora_A
            merged[pair.layer] = layer.base_layer
    return _replaced(module, merged).requires_grad_(True)


@dataclass(frozen=True)
class Adapter:
    """The names of the parameters W₀, A [rank, in] and B [out, rank] of a layer with W₀ + scaling · B A. `shape` is
    [out, in]; W₀ is stored the other way if `transposed`, as GPT-2's is."""

    layer: str
    weight: str
    a: str
    b: str
    rank: int
    scaling: float
    shape: tuple[int, int]
    transposed: bool = False


def adapters(module: nn.Module) -> list[Adapter]:
    """The adapted linear layers of a module, of `add_lora` or of peft, whose layers have a `base_layer`, A and B."""
    return [found for name, layer in module.named_modules() for found in _adapters_of(name, layer)]


def _adapters_of(name: str, layer: Any) -> list[Adapter]:
    below = f"{name}." if name else ""
    weight = f"{below}base_layer.weight"
    if isinstance(layer, LoRALinear):
        rank, shape = len(layer.lora_A), (layer.base_layer.out_features, layer.base_layer.in_features)
        return [Adapter(name, weight, f"{below}lora_A", f"{below}lora_B", rank, layer.scaling, shape)]
    base, transposed = getattr(layer, "base_layer", None), bool(getattr(layer, "fan_in_fan_out", False))
    if base is None or not hasattr(layer, "lora_A") or not (isinstance(base, nn.Linear) or transposed):
        return []
    if any(getattr(layer, "use_dora", {}).values()):
        raise TaskError(f"layer {name!r} has DoRA, whose weight is not W₀ + s B A: set use_dora=False")
    found = []
    for key in (key for key in layer.active_adapters if key in layer.lora_A):  # peft's adapters have names
        a, b = layer.lora_A[key].weight, layer.lora_B[key].weight
        names = f"{below}lora_A.{key}.weight", f"{below}lora_B.{key}.weight"
        scaling = float(layer.scaling[key])
        found.append(Adapter(name, weight, *names, len(a), scaling, (b.shape[0], a.shape[1]), transposed))
    return found


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _adapted(module: nn.Module, name: str, rank: int, alpha: float, train_a: bool) -> LoRALinear:
    layer = module.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return LoRALinear(layer, rank, alpha, train_a)


def _replaced(module: nn.Module, layers: dict[str, nn.Module]) -> nn.Module:
    for name, layer in layers.items():
        if not name:
            return layer
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, layer)
    return module


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name, one of its parents or its last part fits a pattern."""
    parts = name.split(".")
    heads = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(found, pattern) for pattern in patterns for found in (*heads, parts[-1]))
