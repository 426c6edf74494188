"""The layout of the flat vector: several networks, one after the other."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from consilience.compute.layers import batchnorms, check_layers
from consilience.core.errors import TaskError

MAIN = "main"  # the user's network, or the generators of an adversarial task


class Part:
    """One network inside the flat vector. Frozen parameters, which do not require gradients, stay in the module and are
    not in the vector. With `averaged`, the running statistics of BatchNorm layers are in the vector, as if they were
    parameters."""

    def __init__(self, module: nn.Module, start: int, averaged: bool = False) -> None:
        check_layers(module)
        self.module = copy.deepcopy(module).eval()
        self.batchnorms = batchnorms(self.module)
        named: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.running = running_statistics(self.module) if averaged else {}
        named |= {name: self.module.get_buffer(name) for name in self.running}
        self.frozen: dict[str, Tensor] = {n: p for n, p in self.module.named_parameters() if n not in named}
        self.buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}  # in their own types
        self.offsets: Mapping[str, Tensor] = {}  # of frozen parameters, for one method's server
        self.names, self.shapes = list(named), [p.shape for p in named.values()]
        self.sizes = [p.numel() for p in named.values()]
        self.size = sum(self.sizes)
        self.slice = slice(start, start + self.size)
        linear = [name for name, layer in self.module.named_modules() if isinstance(layer, nn.Linear)]
        self.head = linear[-1] if linear else None  # the name of the last linear layer

    def weights(self, theta: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The parameters by name, of the whole vector θ or of this part's share of it."""
        # One split, so that the gradient comes back as one concatenation and not as a sum of padded slices. Weights
        # change their type after it, in the same pass as their layout.
        mine = theta if self.size == len(theta) else theta[self.slice]
        flat = mine.split_with_sizes(self.sizes) if self.sizes else ()
        tensors: dict[str, Tensor] = {
            name: part.view(shape) for name, part, shape in zip(self.names, flat, self.shapes, strict=True)
        }
        if theta.dtype != dtype:
            tensors = {name: part.to(dtype) for name, part in tensors.items()}
        tensors |= {name: p.to(dtype) for name, p in self.frozen.items()}
        tensors |= {name: (self.frozen[name] + offset).to(dtype) for name, offset in self.offsets.items()}
        return tensors


def running_statistics(module: nn.Module) -> dict[str, float]:
    """The names of the running statistics of BatchNorm layers, and the share that a batch has in their average."""
    return {
        f"{name}.{statistic}" if name else statistic: 0.1 if layer.momentum is None else layer.momentum
        for name, layer in batchnorms(module).items()
        for statistic in ("running_mean", "running_var")
    }


class Layout:
    """Named parts of one flat vector θ [P], in order. The first is `MAIN`."""

    def __init__(self, modules: Mapping[str, nn.Module], averaged: bool = False) -> None:
        self.parts: dict[str, Part] = {}
        self.averaged = averaged
        for name, module in modules.items():
            self._append(name, module)

    def _append(self, name: str, module: nn.Module) -> None:
        if name in self.parts:
            raise TaskError(f"this task has a part called {name!r} already")
        self.parts[name] = Part(module, self.size, self.averaged)

    def extend(self, modules: Mapping[str, nn.Module]) -> Layout:
        """This layout with further networks at its end."""
        new = copy.copy(self)
        new.parts = dict(self.parts)
        for name, module in modules.items():
            new._append(name, module)
        return new

    def with_frozen(self, offsets: Mapping[str, Tensor]) -> Layout:
        """This layout with offsets of the main network's frozen parameters."""
        new = copy.copy(self)
        new.parts = dict(self.parts)
        new.parts[MAIN] = copy.copy(self.main)
        new.parts[MAIN].offsets = offsets
        return new

    @property
    def size(self) -> int:
        """P, the number of parameters of all parts."""
        return sum(part.size for part in self.parts.values())

    @property
    def main(self) -> Part:
        return self.parts[MAIN]

    def slice(self, part: str = MAIN, parameter: str | None = None) -> slice:
        """The place of a part, or of one of its parameters, in the flat vector."""
        found = self.parts[part]
        if parameter is None:
            return found.slice
        number = found.names.index(parameter)
        start = found.slice.start + sum(found.sizes[:number])
        return slice(start, start + found.sizes[number])

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        """The parts of a flat vector by name. The vector may end after any part, and each part may stand for the whole
        in `Task.call_one`. One split makes the gradient one concatenation; a slice for every use would make it a sum of
        padded vectors."""
        found = {name: part for name, part in self.parts.items() if part.slice.stop <= len(theta)}
        return dict(zip(found, theta.split_with_sizes([part.size for part in found.values()]), strict=True))

    def initial(self) -> Tensor:
        parts = self.parts.values()
        return torch.cat([_entry(part.module, n).detach().reshape(-1) for part in parts for n in part.names])

    def running(self) -> Tensor | None:
        """For every entry of θ that is a running statistic, the share that a batch has in its average, else 0; None if
        there are none."""
        if not any(part.running for part in self.parts.values()):
            return None
        shares = [
            torch.full((size,), part.running.get(name, 0.0))
            for part in self.parts.values()
            for name, size in zip(part.names, part.sizes, strict=True)
        ]
        return torch.cat(shares)

    def fixed(self) -> list[Tensor]:
        """The tensors that are not learned: frozen parameters and buffers."""
        return [
            t
            for part in self.parts.values()
            for t in (*part.frozen.values(), *(b for n, b in part.module.named_buffers() if n not in part.names))
        ]

    def release(self, theta: Tensor) -> nn.Module:
        """A copy of the main module with the weights θ."""
        module, part = copy.deepcopy(self.main.module), self.main
        for name, buffer in module.named_buffers():
            own, statistics = part.buffers[name], name.rpartition(".")[0] in part.batchnorms
            if buffer.dtype != own.dtype:  # a run in another precision has rounded it
                buffer.data = buffer.data.to(own.dtype) if statistics else own.to(buffer.device)
        for name, value in zip(part.names, theta[part.slice].split_with_sizes(part.sizes), strict=True):
            entry = _entry(module, name)
            entry.data = value.view(entry.shape).to(entry.device, entry.dtype).clone()
        for name, offset in part.offsets.items():
            p = module.get_parameter(name)
            p.data = p.data + offset.to(p.device, p.dtype)
        return module


def _entry(module: nn.Module, name: str) -> Tensor:
    """A parameter, or a buffer, by name."""
    owner, _, attribute = name.rpartition(".")
    found: Tensor = getattr(module.get_submodule(owner), attribute)
    return found
