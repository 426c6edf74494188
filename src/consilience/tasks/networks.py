"""The networks of a layout as functions of the flat vector, prepared for a device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from consilience.compute.execution import Execution
from consilience.compute.layers import with_keyed_dropout
from consilience.compute.products import use_kernels, use_matmul_convolutions
from consilience.compute.taps import only_linear, with_taps
from consilience.core import TaskError, tree_map
from consilience.tasks.layout import MAIN, Layout


class Network:
    """A module as a function of its weights, in evaluation and in training; taps are on its linear layers if it has no
    others, else on the last one."""

    def __init__(self, module: nn.Module) -> None:
        linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
        self.only_linear = only_linear(module)
        tapped = linear if self.only_linear else linear[-1:]
        keyed, self.key_names = with_keyed_dropout(module)
        self.evaluation = with_taps(module, tapped)
        self.training = with_taps(keyed, tapped) if self.key_names else self.evaluation

    def __call__(self, weights: dict[str, Tensor], args: tuple[Any, ...], key: Tensor | None) -> Any:
        if key is None:
            return functional_call(self.evaluation[0], weights, args)
        return functional_call(self.training[0], weights | dict.fromkeys(self.key_names, key), args)

    def place(self, execution: Execution) -> None:
        """Move the modules to a device, in place; on a GPU compiled training multiplies matrices."""
        if execution.on_gpu:
            module, taps = copy.deepcopy(self.training)
            self.training = use_matmul_convolutions(module), taps
        _place(self.evaluation[0], execution)
        _place(self.training[0], execution)


def _place(module: nn.Module, execution: Execution) -> None:
    """Move a module. Its parameters come from the flat vector; its buffers must have their type."""
    module.to(execution.device)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(execution.precision)


class Networks:
    """All parts of a layout for one client, and how they compute."""

    def __init__(self, layout: Layout, execution: Execution | None = None) -> None:
        self.layout, self.execution = layout, execution or Execution()
        self.functions = {name: Network(part.module) for name, part in layout.parts.items()}

    @property
    def only_linear(self) -> bool:
        """Whether all parameters of the main network belong to linear layers, each called once."""
        return self.functions[MAIN].only_linear

    @property
    def has_dropout(self) -> bool:
        return any(function.key_names for function in self.functions.values())

    def extend(self, modules: Mapping[str, nn.Module]) -> Networks:
        """These networks and further ones at the end of the flat vector."""
        new = copy.copy(self)
        new.layout = self.layout.extend(modules)
        new.functions = self.functions | {name: Network(new.layout.parts[name].module) for name in modules}
        return new

    def prepare(self, execution: Execution) -> Networks:
        new = copy.copy(self)
        new.execution = execution
        new.layout, new.functions = copy.deepcopy((self.layout, self.functions))
        for part in new.layout.parts.values():
            _place(part.module, execution)
        for function in new.functions.values():
            function.place(execution)
        return new

    def with_kernels(self) -> Networks:
        """Copies of these networks whose training runs on our GPU kernels."""
        new = copy.copy(self)
        new.layout, new.functions = copy.deepcopy((self.layout, self.functions))
        for function in new.functions.values():
            function.training = use_kernels(function.training[0]), function.training[1]
        return new

    def call(self, part: str, theta: Tensor, *args: Tensor, key: Tensor | None = None, exact: bool = False) -> Any:
        """The output of a part on any arguments; with a key, in training (dropout acts). `exact` computes in the type
        of θ, for small networks whose digits matter."""
        network, weights = self.functions[part], self.layout.parts[part].weights
        if exact or not self.execution.bf16:
            return network(weights(theta, theta.dtype), args, key)
        args = tuple(a.to(torch.bfloat16) if a.is_floating_point() else a for a in args)
        output = network(weights(theta, torch.bfloat16), args, key)
        return tree_map(lambda t: t.to(self.execution.dtype) if t.is_floating_point() else t, output)

    def tapped(
        self, theta: Tensor, x: Tensor, key: Tensor | None = None, offsets: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The main network's (output, inputs of linear layers by name: of all if `only_linear`, else of the last one).
        An offset is added to the output of its layer."""
        network = self.functions[MAIN]
        _, taps = network.evaluation if key is None else network.training
        for name, tap in taps.items():
            tap.open(None if offsets is None else offsets.get(name))
        try:
            output = self.call(MAIN, theta, x, key=key)
        finally:
            inputs = {name: tap.close() for name, tap in taps.items()}
        return output, {name: seen for name, seen in inputs.items() if seen is not None}

    def features(self, theta: Tensor, x: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The main network's (input of the last linear layer, one vector an example; output). If the layer sees several
        vectors of an example, as those of a sequence, the first is their mean."""
        head = self.layout.main.head
        if head is None:
            raise TaskError("the module has no linear layer, so it has no features before the last one")
        output, inputs = self.tapped(theta, x, key)
        seen = inputs[head].to(self.execution.dtype)
        return seen if seen.dim() == 2 else seen.flatten(1, -2).mean(1), output
