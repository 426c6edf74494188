"""A module called with other tensors in place of its parameters and buffers."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

Place = tuple[dict[str, Any], str]
"""A layer's table of parameters or buffers, and a key of it."""
_places: WeakKeyDictionary[nn.Module, dict[str, list[Place]]] = WeakKeyDictionary()


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`functional_call(module, tensors, args, kwargs)`. That looks for the places of the tensors in every call, which
    takes as long as a small layer; here they are found once. The compiler knows `functional_call` alone."""
    if torch.compiler.is_compiling():
        return functional_call(module, dict(tensors), args, kwargs)
    known = _places.get(module)
    if known is None:
        known = _places[module] = places(module)
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, tensor in tensors.items():
            for table, key in known[name]:
                before.append((table, key, table[key]))
                table[key] = tensor
        return module(*args, **kwargs)
    finally:
        for table, key, own in reversed(before):
            table[key] = own


def places(module: nn.Module) -> dict[str, list[Place]]:
    """The places of every parameter and buffer by its name: several where layers share it."""
    held: dict[Tensor, list[Place]] = defaultdict(list)
    for layer in module.modules():
        for table in (layer._parameters, layer._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    held[tensor].append((table, key))
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: held[tensor] for name, tensor in named}
