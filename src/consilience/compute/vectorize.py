"""One client's function as a function of cohorts, by autograd, vmap and the compiler."""

from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_leaves

from consilience.compute.advance import OnePass
from consilience.compute.compiler import TOLERANCE, by_compiler, compared, distance, isolated, refuse
from consilience.compute.execution import Execution
from consilience.compute.replay import Advance, Probe, Replay, Step, at_theta
from consilience.compute.traced import Traced
from consilience.core.records import Tree, rows, tree_map


def stepper(
    gradient: Callable[..., tuple[Tensor, Tensor]],
    advance: Advance,
    probe: Probe = at_theta,
    passes: int = 1,
    whole: bool = False,
) -> Callable[..., Tensor]:
    """A local step, `(θ, batch, own, shared, kept, fresh) → loss [k]`: see `Step`. On a GPU a compiled step is recorded
    once, and replayed. On a CPU `advance` is compiled if it takes several `passes` over memory otherwise. `whole` says
    that `advance` moves all of θ, entry by entry."""
    if not isinstance(gradient, Cohorts) or not gradient.execution.compiled:
        return Step(gradient, advance, probe)
    if gradient.on_gpu:
        return gradient.recorded(advance, probe, whole)
    return Step(gradient, gradient.in_one_pass(advance) if passes > 1 else advance, probe)


class Prepared(Protocol):
    """The first argument of one client's function: an object that knows how it computes."""

    @property
    def execution(self) -> Execution:
        """How it computes."""

    @property
    def sizes(self) -> list[int]:
        """The numbers of entries of its parameters, in their order in θ."""

    @property
    def for_gradients(self) -> Self:
        """The same object as compiled code for a GPU differentiates it, by autograd around `vmap`."""


class Fallback:
    """A compiled function of a cohort. If the compiler fails, at the first call or when it compiles again, plain code
    is used from then on, and the log says so: torch does not compile LSTM, GRU and RNN layers, for one. An error that
    plain code raises too is the module's own."""

    def __init__(self, compiled: Callable[..., Any], plain: Callable[..., Any], size: int) -> None:
        self.run, self.plain, self.size = compiled, plain, size

    def __call__(self, *args: Any) -> Any:
        try:
            return self.run(*args)
        except Exception as failure:
            if self.run is self.plain or not by_compiler(failure):
                raise
            result, self.run = self.plain(*args), self.plain
            refuse("cohorts of %d cannot be compiled (%s): plain code is used", self.size, _why(failure))
            return result


def _why(failure: Exception) -> str:
    """What a compiler says in many lines, as one."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return " ".join([type(failure).__name__, *lines[:2]])


class Cohorts:
    """`fn(model, *own, *shared)` of one client as a function of a cohort, `(*own, shared=())`; with `differentiate`,
    (gradient in the first own argument, value).

    One client runs by plain autograd, several by vmap. Compiled code exists for a few cohort sizes only (chunk,
    chunk/2, …): smaller cohorts are filled up with copies. The first result of every compiled graph is compared with
    plain code, for some of its clients. A graph that differs, or that cannot be compiled, is logged, and plain code is
    used for that size.
    """

    def __init__(self, model: Prepared, fn: Callable[..., Any], differentiate: bool) -> None:
        self.model, self.execution, self.fn, self.differentiate = model, model.execution, fn, differentiate
        self.graphs: dict[Any, Callable[..., Any]] = {}
        self.fillers: dict[tuple[int, int], Tensor] = {}
        self.replays: dict[tuple[Advance, Probe], Replay] = {}
        self.advances: dict[Advance, OnePass] = {}

    @property
    def on_gpu(self) -> bool:
        return self.execution.on_gpu

    def recorded(self, advance: Advance, probe: Probe = at_theta, whole: bool = False) -> Replay:
        """Steps of this gradient and `advance`, which is elementwise: compiled, it is one pass over memory. Where all
        clients take all steps together, the step is one graph if it moves the `whole` of θ."""
        if (advance, probe) not in self.replays:
            step = Step(self, torch.compile(isolated(advance)), probe)
            if whole and self.differentiate and self.execution.even:
                step = self._traced(advance, probe, step)
            self.replays[advance, probe] = Replay(step, self.execution.device)
        return self.replays[advance, probe]

    def _traced(self, advance: Advance, probe: Probe, instead: Step) -> Traced:
        one, plain = self._one(self.model.for_gradients), Step(self._sampled, advance, probe)
        return Traced(one, self.model.sizes, advance, probe, plain, instead, self.execution.precision)

    def _sampled(self, *own: Tree, shared: tuple[Tree, ...] = ()) -> tuple[Tensor, Tensor]:
        """(gradients, losses) by plain code, of the clients that are compared, one by one; 0 for the others."""
        run, theta = self._plain(1, len(own)), tree_leaves(own)[0]
        gradients, losses = torch.zeros_like(theta), torch.zeros_like(theta[:, 0])
        for k in compared(len(theta)):
            gradients[k], losses[k] = run(*rows(own, k), *shared)
        return gradients, losses

    def in_one_pass(self, advance: Advance) -> OnePass:
        """`advance` compiled for a CPU."""
        if advance not in self.advances:
            self.advances[advance] = OnePass(advance)
        return self.advances[advance]

    def __call__(self, *own: Tree, shared: tuple[Tree, ...] = ()) -> Any:
        """Own arguments have the client axis, shared ones do not."""
        k = len(own[0] if isinstance(own[0], Tensor) else tree_leaves(own[0])[0])
        with torch.no_grad():
            if k > 1:
                return self._many(k, own, shared)
            single = rows(own, 0)
            result = self._run(1, single, shared)
            return tree_map(lambda leaf: leaf.unsqueeze(0), result)

    def _many(self, k: int, own: tuple[Tree, ...], shared: tuple[Tree, ...]) -> Any:
        if not self.execution.compiled:
            return self._run(k, own, shared)
        own = tree_map(lambda leaf: leaf.contiguous(), own)  # other strides would be compiled again
        size = self.bucket(k)
        if size != k:
            own = rows(own, self._filler(k, size))
        result = self._run(size, own, shared)
        return result if size == k else rows(result, slice(k))

    def bucket(self, k: int) -> int:
        """The compiled cohort size for k clients."""
        size = max(self.execution.chunk, k)
        while size > 2 and -(-size // 2) >= k:
            size = -(-size // 2)
        return size

    def _filler(self, k: int, size: int) -> Tensor:
        if (k, size) not in self.fillers:
            index = [i if i < k else 0 for i in range(size)]
            self.fillers[k, size] = torch.tensor(index, device=self.execution.device)
        return self.fillers[k, size]

    def _run(self, size: int, own: tuple[Tree, ...], shared: tuple[Tree, ...]) -> Any:
        compiled = self.execution.compiled
        key = (size if compiled else size > 1, len(own))
        if key in self.graphs:
            return self.graphs[key](*own, *shared)
        plain = self._plain(size, len(own))
        if not compiled:
            self.graphs[key] = plain
            return plain(*own, *shared)
        around = self.differentiate and self.on_gpu
        graph = self._around(size, len(own)) if around else self._compiled(plain, size)
        self.graphs[key] = Fallback(graph, plain, size)
        result = self.graphs[key](*own, *shared)
        if (error := self._error(result, size, own, shared)) > TOLERANCE[self.execution.precision]:
            refuse("compiled code for cohorts of %d differs from plain code by %.2g of its norm: not used", size, error)
            self.graphs[key] = plain
            return plain(*own, *shared)
        return result

    def _plain(self, size: int, owns: int) -> Callable[..., Any]:
        """Code without the compiler. Its gradients are taken around `vmap`, where plain autograd computes those of all
        clients at once. The compiler gets both from one function, and is compared with it."""
        run = self._one(self.model)
        if not self.differentiate:
            return _mapped(run, size, owns)
        if self.execution.compiled:
            return _mapped(grad_and_value(run), size, owns)
        return _gradients(_mapped(run, size, owns))

    def _one(self, model: Prepared) -> Callable[..., Any]:
        fn = self.fn

        def one(*args: Any) -> Any:
            return fn(model, *args)

        return one

    def _around(self, size: int, owns: int) -> Callable[..., tuple[Tensor, Tensor]]:
        """Compiled gradients for a GPU. Clients share nothing, so the gradient of the sum of their losses is each one's
        own. It is taken around `vmap`, where the compiler shares out the work between a forward and a backward pass. A
        CPU is faster with one graph of both."""
        return _gradients(self._compiled(_mapped(self._one(self.model.for_gradients), size, owns), size))

    def _compiled(self, cohort: Any, size: int) -> Callable[..., Any]:
        return torch.compile(isolated(cohort, f"cohort_of_{size}_{id(self)}"), dynamic=False, fullgraph=True)

    def _error(self, result: Any, size: int, own: tuple[Tree, ...], shared: tuple[Tree, ...]) -> float:
        """The largest relative distance of clients' results from plain code, over clients evenly spaced."""
        plain, largest = self._plain(1, len(own)), 0.0
        for k in compared(size):
            alone = own if size == 1 else rows(own, k)
            mine = result if size == 1 else rows(result, k)
            largest = max(largest, distance(mine, plain(*alone, *shared)))
        return largest


def _gradients(losses: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """(gradient in the first argument, loss) of one client's loss, or of the losses of many, by plain autograd."""

    def gradients(theta: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            value = losses(theta, *rest)
            (g,) = torch.autograd.grad(value.sum(), theta)
        return g, value.detach()

    return gradients


def _mapped(run: Callable[..., Any], size: int, owns: int) -> Callable[..., Any]:
    """One client's function for `size` of them; the first `owns` arguments have the client axis."""

    def cohort(*args: Any) -> Any:
        if size == 1:
            return run(*args)
        return vmap(run, in_dims=(0,) * owns + (None,) * (len(args) - owns))(*args)

    return cohort
