"""Task: a module and a likelihood as functions of one flat vector, for cohorts of clients.

The user's module is for one client. Everything that runs it for many at once, `torch.func.vmap`, `torch.compile`
and plain autograd for a cohort of one, lives here: algorithms write the loss of *one* client and hand it to
`gradient` or `vectorize`.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from consilience.compute.layers import (
    check_layers,
    trains_otherwise,
    use_kernels,
    use_matmul_convolutions,
    with_keyed_dropout,
    with_taps,
)
from consilience.compute.vectorize import Checked, Cohorts
from consilience.core.display import facts
from consilience.core.errors import DataError, TaskError
from consilience.core.records import tree_map
from consilience.core.text import plural
from consilience.data.augment import Augmentation
from consilience.data.batch import Batch
from consilience.data.dataset import Dataset
from consilience.tasks import fisher

log = logging.getLogger("consilience")
MAIN = "main"


class _Part:
    """One network inside the flat vector. Parameters that do not require gradients are frozen: they stay in the
    module and are no part of the vector."""

    def __init__(self, module: nn.Module, start: int) -> None:
        check_layers(module)
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.module = copy.deepcopy(module).eval()
        self.frozen = {name: p for name, p in self.module.named_parameters() if name not in named}
        self.names, self.shapes = list(named), [p.shape for p in named.values()]
        self.sizes = [p.numel() for p in named.values()]
        self.slice = slice(start, start + sum(self.sizes))
        linear = [name for name, layer in self.module.named_modules() if isinstance(layer, nn.Linear)]
        self.head = linear[-1] if linear else None
        self.only_linear = fisher.only_linear(self.module)
        tapped = linear if self.only_linear else linear[-1:]
        keyed, self.key_names = with_keyed_dropout(self.module)
        # What computes; `module` stays the user's own.
        self.evaluation = with_taps(self.module, tapped)
        self.training = with_taps(keyed, tapped) if self.key_names else self.evaluation

    def __call__(self, theta: Tensor, args: tuple[Any, ...], key: Tensor | None, dtype: torch.dtype) -> Any:
        # One split, so that the gradient comes back as one concatenation and not as a sum of padded slices; weights
        # change their type after it, in the same pass as they change their layout.
        mine = theta if sum(self.sizes) == len(theta) else theta[self.slice]
        flat = mine.split_with_sizes(self.sizes) if self.sizes else ()
        tensors: dict[str, Tensor] = {
            name: part.view(shape).to(dtype) for name, part, shape in zip(self.names, flat, self.shapes, strict=True)
        }
        tensors |= {name: p.to(dtype) for name, p in self.frozen.items()}
        if key is None:
            return functional_call(self.evaluation[0], tensors, args)
        return functional_call(self.training[0], tensors | dict.fromkeys(self.key_names, key), args)


class Task(ABC):
    """What a client learns: `loss_one(θ, batch)` is the mean negative log-likelihood of a batch.

    `size` is the length P of the flat vector θ. Subclasses are likelihoods: how outputs meet targets. `augment`
    changes inputs at random in training and has a fixed counterpart in prediction.
    """

    kind: str
    nested = False
    """Whether the loss has gradients inside."""

    def __init__(self, module: nn.Module, *, augment: Augmentation | None = None) -> None:
        self._parts = {MAIN: _Part(module, 0)}
        self.augment = augment
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.compiled, self.bf16, self.chunk = False, False, 0
        self._cache: dict[Any, Callable[..., Any]] = {}
        self._probed = False
        if not self.size:
            raise TaskError(f"{type(module).__name__} has no parameters to learn")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.module).__name__}, {plural(self.size, 'parameter')})"

    def _repr_html_(self) -> str:
        about = [
            ("kind", self.kind),
            ("module", type(self.module).__name__),
            ("parameters", f"{self.size:,} in {plural(sum(len(p.names) for p in self._parts.values()), 'tensor')}"),
            ("augmentation", "" if self.augment is None else repr(self.augment)),
        ]
        return facts(type(self).__name__, about)

    def need_labels(self) -> None:  # noqa: B027 (most have some)
        """Refuse a method that needs a likelihood of labels, where a task has none."""

    @abstractmethod
    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """−log p(y | output) of each example, [B]."""

    @abstractmethod
    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        """Targets drawn from p(y | output), as Fisher information wants them."""

    @abstractmethod
    def predictive(self, output: Tensor) -> Tensor:
        """The mean of p(y | output): probabilities, or the regression itself."""

    @abstractmethod
    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """How good predictions are. Where they are means over several networks, `spread` is the variance over them."""

    @abstractmethod
    def fits(self, output: Tensor, data: Dataset) -> None:
        """Raise a DataError when the targets cannot be what this output predicts."""

    @property
    def pace(self) -> Tensor | None:
        """How long steps are, parameter by parameter [P], in units of the optimiser's; None if they are all alike."""
        return None

    def settings(self) -> dict[str, Any]:
        """What a task is beside its kind and its module, as plain data: a run must be resumed with the same."""
        return {}

    @property
    def size(self) -> int:
        """P, the number of parameters of all parts."""
        return sum(sum(part.sizes) for part in self._parts.values())

    @property
    def module(self) -> nn.Module:
        """The user's network (a copy, with its first weights)."""
        return self._parts[MAIN].module

    def part(self, name: str) -> nn.Module:
        """The network of a part, with its first weights."""
        return self._parts[name].module

    @property
    def names(self) -> list[str]:
        """The user's parameters in the flat vector, in their order there."""
        return self._parts[MAIN].names

    @property
    def shapes(self) -> list[torch.Size]:
        """The shapes of these parameters."""
        return self._parts[MAIN].shapes

    @property
    def head(self) -> str | None:
        """The name of the last linear layer, if there is one."""
        return self._parts[MAIN].head

    @property
    def only_linear(self) -> bool:
        """Whether all parameters are those of linear layers, each called once: then Fisher information is cheap."""
        return self._parts[MAIN].only_linear

    def initial(self) -> Tensor:
        """The modules' own initial weights as one vector."""
        values = [
            part.module.get_parameter(n).detach().reshape(-1) for part in self._parts.values() for n in part.names
        ]
        return torch.cat(values).to(self.device, self.dtype)

    def fixed(self) -> list[Tensor]:
        """What of the modules is not learned: frozen parameters and buffers."""
        return [t for part in self._parts.values() for t in (*part.frozen.values(), *part.module.buffers())]

    def slice(self, module: str = MAIN, parameter: str | None = None) -> slice:
        """Where a part, or one of its parameters, lies in the flat vector."""
        part = self._parts[module]
        if parameter is None:
            return part.slice
        start = part.slice.start + sum(part.sizes[: part.names.index(parameter)])
        return slice(start, start + part.sizes[part.names.index(parameter)])

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        """The flat vector, which may end after any part, in its parts by name, each of which may stand for the whole in
        `call_one`. One split makes the gradient one concatenation; a part cut out at every use would make it a sum of
        vectors full of zeros."""
        found = {name: part for name, part in self._parts.items() if part.slice.stop <= len(theta)}
        return dict(zip(found, theta.split_with_sizes([sum(part.sizes) for part in found.values()]), strict=True))

    def _changed(self) -> Self:
        new = copy.copy(self)
        new._parts, new._cache = dict(self._parts), {}
        return new

    def extend(self, **modules: nn.Module) -> Self:
        """This task with further networks appended to the flat vector; call them with `call_one`."""
        new = self._changed()
        for name, module in modules.items():
            if name in new._parts:
                raise TaskError(f"this task has a part called {name!r} already")
            new._parts[name] = _Part(module, new.size)
        return new

    def with_module(self, module: nn.Module) -> Self:
        """The same likelihood with another network, on the same device."""
        new = self._changed()
        new._parts = {MAIN: _Part(module, 0)}
        return new.prepare(self.device, self.dtype, bf16=self.bf16)

    def prepare(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        compile: bool = False,
        bf16: bool = False,
        chunk: int = 0,
    ) -> Self:
        """This task on a device: what an engine calls. With `bf16` the network computes in bfloat16 while weights,
        losses and updates stay in `dtype`. `chunk` is the largest cohort, which fixes the compiled sizes."""
        new = self._changed()
        new.device, new.dtype, new.compiled, new.bf16, new.chunk = (
            torch.device(device),
            dtype,
            compile,
            bf16,
            chunk,
        )
        new._parts = copy.deepcopy(self._parts)
        for part in new._parts.values():
            if new.on_gpu:
                part.training = copy.deepcopy(part.training)
                part.training = use_matmul_convolutions(part.training[0]), part.training[1]
            for module in (part.module, part.evaluation[0], part.training[0]):
                module.to(device)
                for buffer in module.buffers():  # parameters come from the flat vector; buffers must match them
                    if buffer.is_floating_point():
                        buffer.data = buffer.data.to(torch.bfloat16 if bf16 else dtype)
        return new

    @property
    def on_gpu(self) -> bool:
        """Whether this is compiled code for a GPU."""
        return self.compiled and self.device.type == "cuda"

    @property
    def for_slopes(self) -> Self:
        """This task as compiled code for a GPU differentiates it: convolutions in bfloat16 are kernels of ours. Their
        slopes are known to plain autograd, around `vmap`, and not to `torch.func.grad`, inside of it: a task that needs
        gradients within its loss says so in `nested`."""
        if self.nested or not (self.on_gpu and self.bf16):
            return self
        new = self._changed()
        new._parts = copy.deepcopy(self._parts)
        for part in new._parts.values():
            part.training = use_kernels(part.training[0]), part.training[1]
        return new

    def call_one(
        self, module: str, theta: Tensor, *args: Tensor, key: Tensor | None = None, exact: bool = False
    ) -> Any:
        """One client's part `module` on any arguments; with a key, in training (dropout acts); `exact` leaves out
        bfloat16, for small networks whose digits matter."""
        if exact or not self.bf16:
            return self._parts[module](theta, args, key, theta.dtype)
        args = tuple(a.to(torch.bfloat16) if a.is_floating_point() else a for a in args)
        output = self._parts[module](theta, args, key, torch.bfloat16)
        return tree_map(lambda t: t.to(self.dtype) if t.is_floating_point() else t, output)

    def apply_one(self, theta: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        """One client's network: outputs [B, ...] of inputs [B, ...]."""
        output: Tensor = self.call_one(MAIN, theta, x, key=key)
        return output

    def features_one(self, theta: Tensor, x: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One client's (input of the last linear layer, a vector an example; output). Where the layer sees several
        vectors of an example, as those of a sequence, it is their mean."""
        if self.head is None:
            raise TaskError("the module has no linear layer, so it has no features before the last one")
        output, inputs = self.tapped_one(theta, x, key)
        seen = inputs[self.head].to(self.dtype)
        return seen if seen.dim() == 2 else seen.flatten(1, -2).mean(1), output

    def tapped_one(
        self,
        theta: Tensor,
        x: Tensor,
        key: Tensor | None = None,
        offsets: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One client's (output, inputs of linear layers by name: of the last one, or of all when `only_linear`).
        An offset is added to the output of its layer."""
        part = self._parts[MAIN]
        _, taps = part.evaluation if key is None else part.training
        for name, tap in taps.items():
            tap.open(None if offsets is None else offsets.get(name))
        try:
            output = self.apply_one(theta, x, key)
        finally:
            inputs = {name: tap.close() for name, tap in taps.items()}
        return output, {name: seen for name, seen in inputs.items() if seen is not None}

    def loss_one(self, theta: Tensor, batch: Batch) -> Tensor:
        """One client's mean loss over a batch."""
        return batch.mean(self.losses(self.apply_one(theta, batch.x, batch.key), batch.y))

    def fisher_one(self, theta: Tensor, batch: Batch) -> Tensor:
        """Diagonal Fisher information: the mean over examples of (∂ log p(y|x,θ)/∂θ)², y drawn from the model.
        A squared gradient an example, [B, P] in memory, unless all layers are linear: give it micro-batches."""
        return fisher.diagonal(self, theta, batch)

    def hessian_one(self, theta: Tensor, batch: Batch) -> Tensor:
        """Second derivatives of the mean loss of a batch, [P, P]: for small models."""

        def loss(at: Tensor) -> Tensor:
            return self.loss_one(at, batch)

        curvature: Tensor = jacrev(grad(loss))(theta)
        return curvature

    def gradient(self, loss: Callable[..., Tensor] | None = None) -> Callable[..., tuple[Tensor, Tensor]]:
        """For `loss(task, θ, *own, *shared)` of one client: (gradient in θ [K, P], loss [K]) of a cohort,
        called as `(theta, *own, shared=())`, where own arguments have the client axis and shared ones do not.
        Give a plain function or a method of a frozen object, so that compiled code is found again."""
        return self._cohort(loss or type(self).loss_one, differentiate=True)

    def vectorize(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """For `fn(task, *own, *shared)` of one client: the same for a cohort, called as `(*own, shared=())`."""
        return self._cohort(fn, differentiate=False)

    @property
    def fisher(self) -> Callable[..., Tensor]:
        """`fisher_one` for cohorts: (theta [K, P], batch) → [K, P]."""
        return self.vectorize(type(self).fisher_one)

    @property
    def hessian(self) -> Callable[..., Tensor]:
        """`hessian_one` for cohorts: (theta [K, P], batch) → [K, P, P]."""
        return self.vectorize(type(self).hessian_one)

    def once(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Many small operations on a cohort: on a GPU, for a compiled task, few."""
        if not self.on_gpu:
            return fn
        if fn not in self._cache:
            self._cache[fn] = Checked(fn)
        return self._cache[fn]

    def _cohort(self, fn: Callable[..., Any], differentiate: bool) -> Callable[..., Any]:
        if (fn, differentiate) not in self._cache:
            self._cache[fn, differentiate] = Cohorts(self, fn, differentiate)
        return self._cache[fn, differentiate]

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        """The predictive mean of one model: θ [P], x [N, ...]."""
        with torch.no_grad():
            return self.predictive(self.apply_one(theta.to(self.dtype), self._seen(x)))

    def _seen(self, x: Tensor) -> Tensor:
        return x if self.augment is None else self.augment.evaluation(x)

    def release(self, theta: Tensor) -> nn.Module:
        """The user's module with the weights θ, ready for use without this library."""
        module, part = copy.deepcopy(self.module), self._parts[MAIN]
        for name, value in zip(part.names, theta[part.slice].split_with_sizes(part.sizes), strict=True):
            p = module.get_parameter(name)
            p.data = value.view(p.shape).to(p.device, p.dtype).clone()
        return module

    def check(self, data: Dataset, targets: bool = True) -> None:
        """Run the module on two examples, and refuse data it cannot learn from before any client does; without
        `targets`, data of which it could not predict any."""
        if not len(data):
            raise DataError(f"{data.name} has no examples")
        probe = torch.arange(min(2, len(data)), device=data.x.device)
        x = data.inputs(probe, self.dtype).to(self.device)
        try:
            output = self.apply_one(self.initial(), self._seen(x))
        except Exception as error:
            shape = tuple(x.shape[1:])
            raise DataError(f"the module cannot take examples of {data.name}, of shape {shape}: {error}") from error
        if not isinstance(output, Tensor) or output.shape[0] != len(probe):
            raise TaskError("the module must return one tensor with a row for each example")
        if targets:
            self.fits(output, data)
        if not self._probed:
            self._probed = True
            if trains_otherwise(copy.deepcopy(self.module).to(self.device, self.dtype), self._seen(x)):
                log.warning(
                    "%s has a forward of its own for training (F.dropout, or self.training), which is not used: "
                    "modules run as in evaluation, and nn.Dropout layers drop",
                    type(self.module).__name__,
                )
