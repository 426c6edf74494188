"""Taps: hooks on linear layers that see their inputs, for features and for Fisher information."""

import copy
from collections import Counter

from torch import Tensor, fx, nn


class Tap:
    """A hook that stays on a layer, closed until it is used: it keeps the layer's input and can add to its output.
    Compiled code cannot register a hook when one is needed."""

    def __init__(self) -> None:
        self.used = False
        self.input: Tensor | None = None
        self.offset: Tensor | None = None

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not self.used:
            return output
        self.input = args[0]
        if self.offset is None or self.offset.shape != output.shape:
            return output
        return output + self.offset.to(output.dtype)

    def open(self, offset: Tensor | None) -> None:
        """Keep inputs from now on; `offset` is added to outputs of its shape."""
        self.used, self.offset = True, offset

    def close(self) -> Tensor | None:
        """The last input since `open`; None if there was none."""
        seen, self.used, self.input, self.offset = self.input, False, None, None
        return seen


def with_taps(module: nn.Module, names: list[str]) -> tuple[nn.Module, dict[str, Tap]]:
    """A copy (of all but the parameters) whose layers `names` have taps."""
    tapped = copy.deepcopy(module, {id(p): p for p in module.parameters()})
    taps = {name: Tap() for name in names}
    for name, tap in taps.items():
        tapped.get_submodule(name).register_forward_hook(tap)
    return tapped, taps


def products(module: nn.Module) -> list[str]:
    """The names of the layers that multiply their input, or every patch of it, with a matrix of their own: `nn.Linear`,
    and `nn.Conv2d` without groups and padded with zeros. Each is called once, and its parameters belong to it alone."""
    layers = {name: layer for name, layer in module.named_modules() if _multiplies(layer)}
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    own = [name for name, layer in layers.items() if all(uses[id(p)] == 1 for p in layer.parameters())]
    return _called_once(module, own)


def _multiplies(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) is nn.Linear


def only_linear(module: nn.Module) -> bool:
    """Whether every parameter is the weight or bias of an `nn.Linear` that shares it with no other layer, and every
    such layer is called once. The answer comes from the module's structure, so that it is decided once."""
    layers = [name for name, layer in module.named_modules() if type(layer) is nn.Linear]
    own = {f"{name}.{p}" if name else p for name in layers for p in ("weight", "bias")}
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if not own.issuperset(parameters) or len(parameters) != len(list(module.parameters())):
        return False
    return len(_called_once(module, layers)) == len(layers)


def _called_once(module: nn.Module, layers: list[str]) -> list[str]:
    """Those of the layers that are called once, and whose parameters are not used in another way. None if `fx` cannot
    follow the module: a forward that depends on values, for one."""
    if "" in layers:
        return [""]
    try:
        nodes = fx.Tracer().trace(module).nodes
    except Exception:
        return []
    calls = Counter(node.target for node in nodes if node.op == "call_module" and node.args)
    direct = {str(node.target).rpartition(".")[0] for node in nodes if node.op == "get_attr"}
    return [name for name in layers if calls[name] == 1 and name not in direct]
