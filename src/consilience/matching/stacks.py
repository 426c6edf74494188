"""Stack: a module as a chain of linear and convolutional layers, whose hidden units can be permuted and added."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from consilience.core.errors import TaskError
from consilience.matching.coordinates import Layer
from consilience.matching.networks import slice_of


@dataclass(frozen=True)
class Stack:
    """Weight shapes [out, in, …] of the layers, from input to output, and whether each has a bias. In the flat vector a
    layer's weight is followed by its bias."""

    shapes: tuple[tuple[int, ...], ...]
    biased: tuple[bool, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Stack:
        """The chain in a module; an error if other modules in it have parameters."""
        kind = type(module).__name__
        layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        owned = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
        for name, parameter in module.named_parameters():
            if id(parameter) not in owned:
                raise TaskError(
                    f"units of {kind} cannot be matched: its parameter {name!r} belongs to no linear or convolutional "
                    "layer, and only a chain of these can be matched"
                )
            if not parameter.requires_grad:
                raise TaskError(f"units of {kind} cannot be matched: its parameter {name!r} is frozen")
        if len(layers) < 2:
            raise TaskError(
                f"{kind} has {len(layers)} linear or convolutional layer(s): it has no hidden units to match"
            )
        grouped = [layer for layer in layers if isinstance(layer, nn.Conv2d) and layer.groups > 1]
        if grouped:
            raise TaskError(f"units of {kind} cannot be matched: {grouped[0]} ties its channels in groups")
        if len(owned) < sum(1 for layer in layers for _ in layer.parameters(recurse=False)):
            raise TaskError(f"units of {kind} cannot be matched: layers share their weights")
        shapes = tuple(tuple(layer.weight.shape) for layer in layers)
        for before, after in pairwise(shapes):
            if after[1] % before[0]:
                raise TaskError(
                    f"units of {kind} cannot be matched: a layer of {before[0]} units is followed by one that takes "
                    f"{after[1]} inputs, so its layers are no chain"
                )
        return cls(shapes, tuple(layer.bias is not None for layer in layers))

    @property
    def widths(self) -> list[int]:
        """Units of the hidden layers."""
        return [shape[0] for shape in self.shapes[:-1]]

    @property
    def outputs(self) -> int:
        """Units of the last layer."""
        return self.shapes[-1][0]

    @property
    def size(self) -> int:
        """P, the length of the flat vector."""
        return sum(math.prod(shape) + b * shape[0] for shape, b in zip(self.shapes, self.biased, strict=True))

    def with_widths(self, widths: Sequence[int]) -> Stack:
        """The same chain with other hidden widths."""
        outs = [*widths, self.outputs]
        shapes = [(outs[0], *self.shapes[0][1:])]
        for h in range(1, len(outs)):
            repeats = self.shapes[h][1] // self.shapes[h - 1][0]
            shapes.append((outs[h], outs[h - 1] * repeats, *self.shapes[h][2:]))
        return Stack(tuple(shapes), self.biased)

    def layers(self, theta: Tensor) -> list[Layer]:
        """Weights and biases from a flat vector [P]."""
        layers: list[Layer] = []
        for shape, biased in zip(self.shapes, self.biased, strict=True):
            size = math.prod(shape)
            weight, theta = theta[:size].view(shape), theta[size:]
            bias = theta[: shape[0]] if biased else None
            layers.append((weight, bias))
            theta = theta[shape[0] :] if biased else theta
        return layers

    def flat(self, layers: Sequence[Layer]) -> Tensor:
        """A flat vector from weights and biases."""
        return torch.cat([part.reshape(-1) for layer in layers for part in layer if part is not None])

    def rebuilt(self, module: nn.Module) -> nn.Module:
        """A copy of the module with layers of this stack's sizes."""
        wide = copy.deepcopy(module)
        shapes = iter(self.shapes)

        def replaced(parent: nn.Module) -> None:
            for name, child in parent.named_children():
                if isinstance(child, nn.Linear | nn.Conv2d):
                    setattr(parent, name, _resized(child, next(shapes)))
                else:
                    replaced(child)

        replaced(wide)
        return wide

    def check(self, predict: Callable[[Tensor, Tensor], Tensor], theta: Tensor, x: Tensor, name: str) -> None:
        """Refuse a module whose predictions change when the hidden units of θ are permuted, a layer at a time."""
        here, units = predict(theta, x), [torch.arange(width, device=theta.device) for width in self.widths]
        for h, unit in enumerate(units):
            # Every second unit first: a reversal would keep groups of channels and neighbours together. One layer at a
            # time: a skip connection between equal widths commutes with the same permutation of both.
            order = [*units[:h], torch.cat([unit[1::2], unit[::2]]), *units[h + 1 :]]
            there = predict(self.flat(slice_of(self.layers(theta), order)), x)
            if not torch.allclose(here, there, rtol=1e-2, atol=1e-3, equal_nan=True):
                raise TaskError(
                    f"units of {name} cannot be matched: its predictions depend on the order of its hidden units "
                    "(a skip connection, or layers that are not registered in the order of their use?)"
                )


def _resized(layer: nn.Linear | nn.Conv2d, shape: Sequence[int]) -> nn.Module:
    """A layer of another size; its weights are all zero."""
    other = copy.deepcopy(layer)
    other.weight = nn.Parameter(layer.weight.new_zeros(tuple(shape)))
    if layer.bias is not None:
        other.bias = nn.Parameter(layer.bias.new_zeros(shape[0]))
    if isinstance(other, nn.Linear):
        other.out_features, other.in_features = shape[:2]
    else:
        other.out_channels, other.in_channels = shape[:2]
    return other
