"""The networks of a layout as functions of the flat vector, prepared for a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from consilience.compute import attention, batchnorm, pooling, randomness, recurrent  # noqa: F401 - register handlers
from consilience.compute.execution import Execution
from consilience.compute.layers import has_dropout, prepare_for_passes
from consilience.compute.passes import Moments, Pass, Seen
from consilience.compute.products import use_kernels, use_matmul_convolutions
from consilience.compute.swapping import call_with
from consilience.compute.taps import Tap, only_linear, products, with_taps
from consilience.core import TaskError
from consilience.core.records import Tree
from consilience.tasks.layout import MAIN, Layout

T = TypeVar("T")


class Network:
    """A module as a function of its weights, in evaluation and in training; taps are on its linear layers if it has no
    others, else on the last one."""

    def __init__(self, module: nn.Module) -> None:
        linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
        self.only_linear = only_linear(module)
        tapped = linear if self.only_linear else linear[-1:]
        self.evaluation, self.training = with_taps(module, tapped), with_taps(module, tapped)
        prepare_for_passes(self.evaluation[0], training=False)
        prepare_for_passes(self.training[0], training=True)

    def __call__(self, weights: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], run: Pass) -> Any:
        module, _ = self.evaluation if run.key is None else self.training
        with run:
            return call_with(module, weights, args, kwargs)

    @cached_property
    def products(self) -> tuple[nn.Module, dict[str, Tap]]:
        """A copy for evaluation with taps on all layers that multiply matrices."""
        module, _ = self.evaluation
        return with_taps(module, products(module))

    def place(self, execution: Execution) -> None:
        """Move the modules to a device, in place; on a GPU compiled training multiplies matrices."""
        self.__dict__.pop("products", None)
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
    """All parts of a layout for one client, and how they compute.

    estimated: Whether the evaluation statistics of BatchNorm layers belong to the weights: see `with_statistics`.
    seen: A list that receives the moments of all norms over a batch while `watched` runs.
    """

    def __init__(self, layout: Layout, execution: Execution | None = None) -> None:
        self.layout, self.execution = layout, execution or Execution()
        self.functions = {name: Network(part.module) for name, part in layout.parts.items()}
        self.estimated = layout.averaged or not layout.main.batchnorms
        self.running = layout.running()
        self.seen: list[Seen] | None = None
        self.own = False

    @property
    def only_linear(self) -> bool:
        """Whether all parameters of the main network belong to linear layers, each called once."""
        return self.functions[MAIN].only_linear

    @property
    def has_dropout(self) -> bool:
        return any(has_dropout(part.module) for part in self.layout.parts.values())

    def extend(self, modules: Mapping[str, nn.Module]) -> Networks:
        """These networks and further ones at the end of the flat vector."""
        new = copy.copy(self)
        new.layout = self.layout.extend(modules)
        new.running = new.layout.running()
        new.functions = self.functions | {name: Network(new.layout.parts[name].module) for name in modules}
        return new

    def prepare(self, execution: Execution) -> Networks:
        new = copy.copy(self)
        new.execution = execution
        new.running = None if self.running is None else self.running.to(execution.device, execution.dtype)
        new.layout, new.functions = copy.deepcopy((self.layout, self.functions))
        for part in new.layout.parts.values():
            _place(part.module, execution)
            part.frozen = {name: part.module.get_parameter(name).to(execution.precision) for name in part.frozen}
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

    def with_taps_on_products(self) -> Networks:
        """These networks for evaluation, whose `tapped` sees all layers of the main one that multiply matrices."""
        new = copy.copy(self)
        main = copy.copy(self.functions[MAIN])
        main.evaluation = main.products
        new.functions = self.functions | {MAIN: main}
        return new

    def with_statistics(self, statistics: Mapping[str, Tensor]) -> Networks:
        """These networks with other evaluation statistics of the main network's BatchNorm layers, by their names."""
        new = copy.copy(self)
        new.layout, new.functions = copy.deepcopy((self.layout, self.functions))
        main = new.functions[MAIN]
        for module in (new.layout.main.module, main.evaluation[0], main.training[0]):
            for name, value in statistics.items():
                buffer = module.get_buffer(name)
                buffer.data = value.to(buffer.device, buffer.dtype)
        new.estimated = True
        return new

    def watched(self, run: Callable[[], T], own: bool = False) -> tuple[T, list[Seen]]:
        """(what `run` returns, the moments of every norm over a batch meanwhile). With `own`, layers use their own
        statistics all the same. No copy of the networks: compiled code could not follow it."""
        self.seen, self.own, seen = [], own, self.seen
        try:
            return run(), self.seen
        finally:
            self.seen, self.own = seen, False

    def call(
        self,
        part: str,
        theta: Tensor,
        *args: Any,
        key: Tensor | None = None,
        w: Tensor | None = None,
        exact: bool = False,
        given: list[Moments] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The output of a part on any arguments; with a key, in training (dropout acts); with weights w [B] of the
        examples, BatchNorm uses the statistics of the batch, or those `given`. `exact` computes in the type of θ, for
        small networks whose digits matter."""
        network, weights = self.functions[part], self.layout.parts[part].weights
        if part == MAIN and w is None and given is None and not self.estimated:
            raise TaskError(
                "the statistics of BatchNorm layers are not known for these weights: fit(test=…) and run.evaluate "
                "estimate them; or make the task with batch_norm='averaged', or use replace_batchnorm(model)"
            )
        run = Pass(key, w, given=given, seen=self.seen, own=self.own)
        if exact or not self.execution.bf16:
            return network(weights(theta, theta.dtype), args, kwargs, run)
        args, kwargs = _cast(args, torch.bfloat16), _cast(kwargs, torch.bfloat16)
        return _cast(network(weights(theta, torch.bfloat16), args, kwargs, run), self.execution.dtype)

    def apply(
        self,
        theta: Tensor,
        x: Tree,
        key: Tensor | None = None,
        w: Tensor | None = None,
        given: list[Moments] | None = None,
    ) -> Any:
        """The main network's output for examples: a tensor, a tuple (module(*x)) or a dict (module(**x)). Of an object
        with logits, as models of Hugging Face return it, the logits."""
        args, kwargs = (x if isinstance(x, tuple) else (x,), {}) if not isinstance(x, dict) else ((), x)
        output = self.call(MAIN, theta, *args, key=key, w=w, given=given, **kwargs)
        return getattr(output, "logits", output)

    def tapped(
        self,
        theta: Tensor,
        x: Tree,
        key: Tensor | None = None,
        w: Tensor | None = None,
        offsets: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The main network's (output, inputs of linear layers by name: of all if `only_linear`, else of the last one).
        An offset is added to the output of its layer."""
        network = self.functions[MAIN]
        _, taps = network.evaluation if key is None else network.training
        for name, tap in taps.items():
            tap.open(None if offsets is None else offsets.get(name))
        try:
            output = self.apply(theta, x, key, w)
        finally:
            inputs = {name: tap.close() for name, tap in taps.items()}
        return output, {name: seen for name, seen in inputs.items() if seen is not None}

    def features(
        self, theta: Tensor, x: Tree, key: Tensor | None = None, w: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The main network's (input of the last linear layer, with several vectors an example [B, ..., F] if the layer
        sees several, as those of a sequence; output)."""
        head = self.layout.main.head
        if head is None:
            raise TaskError("the module has no linear layer, so it has no features before the last one")
        output, inputs = self.tapped(theta, x, key, w)
        return inputs[head].to(self.execution.dtype), output


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of a tree in another type; of an object with logits, the logits alone."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if hasattr(tree, "logits"):
        return _cast(tree.logits, dtype)
    if isinstance(tree, dict):
        return {name: _cast(child, dtype) for name, child in tree.items()}
    return tuple(_cast(child, dtype) for child in tree) if isinstance(tree, tuple | list) else tree
