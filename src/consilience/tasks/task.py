"""Task: networks and a loss as functions of one flat vector, for one client and for cohorts."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev

from consilience.compute.compiler import Checked
from consilience.compute.execution import Execution
from consilience.compute.vectorize import Cohorts
from consilience.core.display import facts
from consilience.core.errors import TaskError
from consilience.core.records import Tree
from consilience.core.text import plural
from consilience.data import Batch, Dataset
from consilience.data.augment import Augmentation
from consilience.tasks import fisher
from consilience.tasks.layout import MAIN, Layout, Part
from consilience.tasks.likelihoods import Likelihood
from consilience.tasks.networks import Networks

BatchNorm = Literal["estimated", "averaged"]


class Task(ABC):
    """Networks and the loss of one client.

    `layout` says where the networks' parameters lie in the flat vector θ [P]. Functions of one client end in `_one`.
    Algorithms hand such a function to `gradient` or `vectorize`, which run it for a cohort: by `torch.func.vmap`,
    `torch.compile`, or plain autograd if the cohort is one client. `augment` changes inputs at random in training and
    has a fixed counterpart in prediction.

    In training, BatchNorm layers use the statistics of a client's batch. `batch_norm` says which they use in
    evaluation: "estimated" ones, sums over all examples that clients compute with the global weights; or "averaged"
    ones, running averages at the clients that are part of θ and are averaged as the weights are.
    """

    kind: str
    nested = False
    """Whether the loss has gradients inside."""
    mixes = False
    """Whether the module mixes the examples of a batch, other than by BatchNorm."""
    inspected = False
    """Whether `mixes` was found out."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        likelihood: Likelihood | None = None,
        *,
        augment: Augmentation | None = None,
        batch_norm: BatchNorm = "estimated",
    ) -> None:
        if batch_norm not in get_args(BatchNorm):
            raise TaskError(f"batch_norm is 'estimated' or 'averaged', got {batch_norm!r}")
        self.networks = Networks(Layout(modules, averaged=batch_norm == "averaged"))
        self.augment = augment
        self._likelihood = likelihood
        self._cache: dict[Any, Callable[..., Any]] = {}
        if not self.size:
            raise TaskError(f"{type(self.module).__name__} has no parameters to learn")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.module).__name__}, {plural(self.size, 'parameter')})"

    def _repr_html_(self) -> str:
        tensors = plural(sum(len(part.names) for part in self.layout.parts.values()), "tensor")
        about = [
            ("kind", self.kind),
            ("module", type(self.module).__name__),
            ("parameters", f"{self.size:,} in {tensors}"),
            ("augmentation", "" if self.augment is None else repr(self.augment)),
        ]
        return facts(type(self).__name__, about)

    @abstractmethod
    def loss_one(self, theta: Tensor, batch: Batch) -> Tensor:
        """One client's mean loss over a batch."""

    @abstractmethod
    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        """Predictions of one model θ [P] for x [N, ...]."""

    @abstractmethod
    def check(self, data: Dataset, targets: bool = True) -> None:
        """Raise an error if the networks cannot learn from the data; without `targets`, only inputs are checked."""

    @property
    def likelihood(self) -> Likelihood:
        """p(y | output); a TaskError if the task has none."""
        if self._likelihood is None:
            raise TaskError(
                f"this method needs a likelihood of labels, and the task is {self.kind}. FedGAN, ProbGAN and EPGAN are "
                "made for GANs; methods that need gradients only (FedAvg, FedProx, SCAFFOLD, FedEP) learn them, too"
            )
        return self._likelihood

    def need_labels(self) -> None:
        """Raise a TaskError if the task has no likelihood of labels."""
        _ = self.likelihood

    @property
    def pace(self) -> Tensor | None:
        """Step sizes by parameter [P], in units of the optimiser's; None if all are 1."""
        return None

    @property
    def estimates(self) -> bool:
        """Whether clients estimate the evaluation statistics of BatchNorm layers for given weights."""
        return bool(self.layout.main.batchnorms) and not self.layout.averaged

    @property
    def whole_batch(self) -> bool:
        """Whether the loss of an example depends on the others of its batch."""
        return False

    @property
    def pads(self) -> bool:
        """Whether batches may be padded with rows of weight 0, as clients that are computed together need them."""
        return not self.mixes

    @property
    def running(self) -> Tensor | None:
        """For entries of θ that are running averages of BatchNorm layers, the share that a batch has in them, else 0
        [P]; None if there are none. Local steps move these entries by that share of their gradient alone."""
        return self.networks.running

    def averaging(self) -> Self:
        """This task with the running averages of its BatchNorm layers in θ, as `batch_norm="averaged"` has them."""
        return self if self.layout.averaged else self._with(Networks(Layout({MAIN: self.module}, averaged=True)))

    def with_statistics(self, statistics: Mapping[str, Tensor]) -> Self:
        """This task with other evaluation statistics of its BatchNorm layers, by the names of their buffers."""
        return self._with(self.networks.with_statistics(statistics))

    def settings(self) -> dict[str, Any]:
        """Further settings as plain data: a run is resumed with the same only."""
        return {}

    @property
    def layout(self) -> Layout:
        return self.networks.layout

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def sizes(self) -> list[int]:
        """The numbers of entries of all parameters, in their order in θ."""
        return [size for part in self.layout.parts.values() for size in part.sizes]

    @property
    def main(self) -> Part:
        return self.networks.layout.main

    @property
    def module(self) -> nn.Module:
        return self.main.module

    def part(self, name: str) -> nn.Module:
        """The network of a part, with its initial weights."""
        return self.layout.parts[name].module

    @property
    def played(self) -> int:
        """The number of parameters of the task's own networks; those that a method appends come after them."""
        return int(self.slice().stop)

    def samples(self, theta: Tensor) -> list[Tensor]:
        """All weights [..., P] in blocks by posterior sample [..., count, m]: one sample, unless the task has more."""
        return [theta[..., : self.played].unsqueeze(-2)]

    def one(self, theta: Tensor) -> Tensor:
        """The weights of one sample [..., M], the mean over all [..., P]."""
        return theta[..., : self.played]

    def all(self, value: Tensor) -> Tensor:
        """The same weights for every sample: [..., M] to [..., P]."""
        return value

    def initial(self) -> Tensor:
        return self.layout.initial().to(self.device, self.dtype)

    def slice(self, part: str = MAIN, parameter: str | None = None) -> slice:
        return self.layout.slice(part, parameter)

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        return self.layout.split(theta)

    def release(self, theta: Tensor) -> nn.Module:
        """The user's module with the weights θ, for use without this library."""
        return self.layout.release(theta)

    @property
    def execution(self) -> Execution:
        return self.networks.execution

    @property
    def device(self) -> torch.device:
        return self.networks.execution.device

    @property
    def dtype(self) -> torch.dtype:
        return self.networks.execution.dtype

    def _with(self, networks: Networks) -> Self:
        new = copy.copy(self)
        new.networks, new._cache = networks, {}
        return new

    def extend(self, **modules: nn.Module) -> Self:
        """This task with further networks at the end of the flat vector; call them with `call_one`."""
        return self._with(self.networks.extend(modules))

    def with_module(self, module: nn.Module) -> Self:
        """This task with another network, on the same device, uncompiled."""
        how, new = self.execution, self._with(Networks(Layout({MAIN: module})))
        new.mixes = new.inspected = False
        return new.prepare(how.device, how.dtype, bf16=how.bf16)

    def with_frozen(self, offsets: Mapping[str, Tensor]) -> Self:
        """This task with offsets added to frozen parameters of its main network, by name. A loss of one client may use
        it, with offsets that all clients share."""
        networks = copy.copy(self.networks)
        networks.layout = self.layout.with_frozen(offsets)
        return self._with(networks)

    def prepare(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        compile: bool = False,
        bf16: bool = False,
        chunk: int = 0,
        even: bool = False,
    ) -> Self:
        """This task on a device, as an engine needs it; see `Execution`."""
        return self._with(self.networks.prepare(Execution(torch.device(device), dtype, compile, bf16, chunk, even)))

    @property
    def for_gradients(self) -> Self:
        """This task as compiled code for a GPU differentiates it: convolutions in bfloat16 are our own kernels. Plain
        autograd, around `vmap`, knows their gradients, and `torch.func.grad`, inside of it, does not: so a task with
        `nested` gradients does not use them."""
        if self.nested or not (self.execution.on_gpu and self.execution.bf16):
            return self
        return self._with(self.networks.with_kernels())

    def call_one(
        self,
        part: str,
        theta: Tensor,
        *args: Tensor,
        key: Tensor | None = None,
        w: Tensor | None = None,
        exact: bool = False,
    ) -> Any:
        """One client's part on any arguments; with a key, in training (dropout acts); with weights w [B] of the
        examples, BatchNorm uses the statistics of the batch. `exact` computes in the type of θ and not in bfloat16, for
        small networks whose digits matter."""
        return self.networks.call(part, theta, *args, key=key, w=w, exact=exact)

    def apply_one(self, theta: Tensor, x: Tree, key: Tensor | None = None, w: Tensor | None = None) -> Any:
        """One client's network: outputs of inputs [B, ...]; `key` and `w` as in `call_one`. Inputs are a tensor, a
        tuple (called as module(*x)) or a dict (module(**x))."""
        return self.networks.apply(theta, x, key, w)

    def features_one(
        self, theta: Tensor, x: Tree, key: Tensor | None = None, w: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """One client's (input of the last linear layer, one vector an example; output). If the layer sees several
        vectors of an example, as those of a sequence, the first is their mean, over the places that exist if the output
        has lengths."""
        seen, output = self.networks.features(theta, x, key, w)
        if seen.dim() == 2:
            return seen, output
        places = None if self._likelihood is None else self._likelihood.places(output)
        if places is None or places.shape != seen.shape[:2]:
            return seen.flatten(1, -2).mean(1), output
        there = places.unsqueeze(-1)
        total = torch.where(there, seen, torch.zeros_like(seen)).sum(1)
        return total / there.sum(1).clamp_min(1), output

    def gradient(self, loss: Callable[..., Tensor] | None = None) -> Callable[..., tuple[Tensor, Tensor]]:
        """For `loss(task, θ, *own, *shared)` of one client: (gradient in θ [K, P], loss [K]) of a cohort,
        called as `(theta, *own, shared=())`, where own arguments have the client axis and shared ones do not.
        Give a plain function or a method of a frozen object, so that compiled code is found again."""
        fn = loss or type(self).loss_one
        return self._cohort(_Following(fn) if self.layout.averaged else fn, differentiate=True)

    def vectorize(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """For `fn(task, *own, *shared)` of one client: the same for a cohort, called as `(*own, shared=())`."""
        return self._cohort(fn, differentiate=False)

    @property
    def fisher(self) -> Callable[..., Tensor]:
        """Diagonal Fisher information for cohorts: (theta [K, P], batch) → [K, P], the mean over examples of
        (∂ log p(y|x,θ)/∂θ)², y drawn from the model. Give it micro-batches: unless all layers are linear, it takes
        [B, P] in memory."""
        return self.vectorize(_fisher_one)

    @property
    def hessian(self) -> Callable[..., Tensor]:
        """Second derivatives of the mean loss for cohorts: (theta [K, P], batch) → [K, P, P]; for small models."""
        return self.vectorize(_hessian_one)

    def once(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function of many small operations on a cohort, compiled if the task is compiled for a GPU."""
        if not self.execution.on_gpu:
            return fn
        if fn not in self._cache:
            self._cache[fn] = Checked(fn)
        return self._cache[fn]

    def _cohort(self, fn: Callable[..., Any], differentiate: bool) -> Callable[..., Any]:
        if (fn, differentiate) not in self._cache:
            self._cache[fn, differentiate] = Cohorts(self, fn, differentiate)
        return self._cache[fn, differentiate]


@dataclass(frozen=True)
class _Following:
    """A loss whose gradient in the running averages of BatchNorm layers is their distance from the batch's moments; its
    value is that of `loss`."""

    loss: Callable[..., Tensor]

    def __call__(self, task: Task, *args: Any) -> Tensor:
        value, seen = task.networks.watched(lambda: self.loss(task, *args))
        for mean, var, (batch_mean, batch_var), count in seen:
            assert mean is not None
            assert var is not None
            unbiased = batch_var * count / (count - 1).clamp_min(1)
            apart = (mean - batch_mean.detach()).square().sum() + (var - unbiased.detach()).square().sum()
            value = value + (apart - apart.detach()) / 2
        return value


def _fisher_one(task: Task, theta: Tensor, batch: Batch) -> Tensor:
    return fisher.diagonal(task.networks, task.likelihood, theta, batch)


def _hessian_one(task: Task, theta: Tensor, batch: Batch) -> Tensor:
    def loss(at: Tensor) -> Tensor:
        return task.loss_one(at, batch)

    curvature: Tensor = jacrev(grad(loss))(theta)
    return curvature
