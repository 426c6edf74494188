"""One client's function as a function of cohorts: the one door to autograd, vmap and the compiler."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_leaves

from consilience.core import guards, keys
from consilience.core.records import Tree, rows, tree_map

if TYPE_CHECKING:
    from consilience.tasks.task import Task

log = logging.getLogger("consilience")
# How far compiled code may be from plain code, relative to the length of the result: far above rounding, and far
# below what a wrong kernel or another dropout mask would give.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 0.05, torch.bfloat16: 0.3}
CHECKED = 16
RECORDED = 128  # graphs that are kept of one kind of step: one for each number of clients that still have a batch
Advance = Callable[..., None]  # θ [k, P] by its slope, and whatever it needs, in place


def stepper(gradient: Callable[..., tuple[Tensor, Tensor]], advance: Advance) -> Callable[..., Tensor]:
    """A local step, `(θ, batch, own, shared, kept, fresh) → loss [k]`: the gradient at θ, then
    `advance(θ, slope, *kept, *fresh)` in place. On a GPU the step of a compiled task is recorded once, and replayed."""
    if isinstance(gradient, Cohorts) and gradient.on_gpu:
        return gradient.recorded(advance)
    return _Step(gradient, advance)


class _Step:
    def __init__(self, gradient: Callable[..., tuple[Tensor, Tensor]], advance: Advance) -> None:
        self.gradient, self.advance = gradient, advance

    def __call__(
        self, theta: Tensor, batch: Tree, own: tuple[Tree, ...], shared: tuple[Tree, ...],
        kept: tuple[Tree, ...], fresh: tuple[Tree, ...],
    ) -> Tensor:  # fmt: skip
        slope, loss = self.gradient(theta, batch, *own, shared=shared)
        self.advance(theta, slope, *kept, *fresh)
        return loss


class Replay:
    """A compiled step, recorded as a CUDA graph: its few hundred kernels are launched as one, where their launches
    would take longer than they do. What stays from step to step (θ, a chain's memory, a prior) is used where it lies,
    and the step is recorded anew if it lies elsewhere; what is fresh in every step is copied to where it was then.
    Steps for whose recording there is too little memory are taken as they come."""

    def __init__(self, step: _Step, device: torch.device) -> None:
        self.step = step
        self.pool: Any = None
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.graphs: dict[Any, tuple[Any, list[Tensor], Tensor]] = {}
        self.warm: set[Any] = set()
        self.too_large: set[Any] = set()

    def __call__(
        self, theta: Tensor, batch: Tree, own: tuple[Tree, ...], shared: tuple[Tree, ...],
        kept: tuple[Tree, ...], fresh: tuple[Tree, ...],
    ) -> Tensor:  # fmt: skip
        """The loss of every client."""
        numbers = tuple(theta.new_full((), f) if isinstance(f, float) else f for f in fresh)
        given, stays = _tensors((batch, numbers)), _tensors((theta, own, shared, kept))
        form = tuple((leaf.shape, leaf.stride(), leaf.dtype) for leaf in (*given, *stays))
        key = (form, tuple(leaf.data_ptr() for leaf in stays))
        if key not in self.graphs and form not in self.too_large:
            try:
                self._record(key, theta, batch, own, shared, kept, numbers)
            except torch.OutOfMemoryError:
                log.warning("too little memory to record the steps of %d clients: they are slower", len(theta))
                self.too_large.add(form)
        if form in self.too_large:
            return self.step(theta, batch, own, shared, kept, fresh)
        graph, places, loss = self.graphs[key]
        torch._foreach_copy_(places, given)
        graph.replay()
        return loss.clone()

    def _record(self, key: Any, *args: Any) -> None:
        if key[0] not in self.warm:  # compile, and let libraries make their workspaces: on copies, as steps change θ
            copies = tree_map(torch.clone, args)
            for _ in range(2):
                self.step(*copies)
            del copies
            torch.cuda.empty_cache()  # a recording has memory of its own, and cannot have what this leaves behind
            self.warm.add(key[0])
        theta, batch, own, shared, kept, fresh = args
        batch, fresh = tree_map(torch.clone, (batch, fresh))
        # Not `torch.cuda.graph`, which empties the allocator's cache first: all would lie elsewhere in the next round.
        graph, stream = torch.cuda.CUDAGraph(), self.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(*([] if self.pool is None else [self.pool]))
            try:
                loss = self.step(theta, batch, own, shared, kept, fresh)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.pool = graph.pool()
        if len(self.graphs) == RECORDED:
            del self.graphs[next(iter(self.graphs))]
        self.graphs[key] = graph, _tensors((batch, fresh)), loss


class Checked:
    """A compiled function whose first result is compared with plain code. If they differ, or the compiler cannot, plain
    code is used, and the log says so."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        torch.compiler.assume_constant_result(keys.word)  # type: ignore[no-untyped-call] # loads the compiler: not at import
        self.plain, self.run = plain, torch.compile(_isolated(plain))
        self.checked = False

    def __call__(self, *args: Any) -> Any:
        """The function's result."""
        if self.checked:
            return self.run(*args)
        self.checked, wanted = True, self.plain(*args)
        try:
            apart = _apart(self.run(*args), wanted)
        except Exception as error:  # the compiler's own, of any kind
            apart, why = float("inf"), f"cannot be compiled ({type(error).__name__})"
        else:
            why = f"differs when compiled, by {apart:.2g} of its length"
        if not apart <= TOLERANCE[torch.float64]:
            log.warning("%s %s: plain code is used", self.plain.__name__, why)
            guards.count("compiled code refused", torch.ones(1, dtype=torch.bool))
            self.run = self.plain
        return wanted


class Cohorts:
    """Plain autograd for one client, vmap for several; compiled, if the task is, for a few cohort sizes only
    (chunk, chunk/2, …): smaller cohorts are filled up with copies.

    The first result of every compiled graph is compared with plain code, for up to `CHECKED` of its clients: code was
    seen that is right for the first and the last, and wrong between. A compiler that is wrong is found then, named in
    the log, and not used for that size.
    """

    def __init__(self, task: Task, fn: Callable[..., Any], differentiate: bool) -> None:
        self.task, self.fn, self.differentiate = task, fn, differentiate
        self.graphs: dict[Any, Callable[..., Any]] = {}
        self.fillers: dict[tuple[int, int], Tensor] = {}
        self.replays: dict[Advance, Replay] = {}

    @property
    def on_gpu(self) -> bool:
        """Whether this is compiled code for a GPU."""
        return self.task.on_gpu

    def recorded(self, advance: Advance) -> Replay:
        """Steps of this gradient and `advance`, which is elementwise: compiled, it is one pass over memory."""
        if advance not in self.replays:
            self.replays[advance] = Replay(_Step(self, torch.compile(_isolated(advance))), self.task.device)
        return self.replays[advance]

    def __call__(self, *own: Tree, shared: tuple[Tree, ...] = ()) -> Any:
        """Own arguments have the client axis, shared ones do not."""
        k = len(tree_leaves(own)[0])
        with torch.no_grad():
            if k > 1:
                return self._many(k, own, shared)
            single = rows(own, 0)
            if self.differentiate and not self.task.compiled:
                result = _slopes(self._one(self.task))(*single, *shared)
            else:
                result = self._run(1, single, shared)
            return tree_map(lambda leaf: leaf.unsqueeze(0), result)

    def _many(self, k: int, own: tuple[Tree, ...], shared: tuple[Tree, ...]) -> Any:
        if not self.task.compiled:
            return self._run(k, own, shared)
        own = tree_map(lambda leaf: leaf.contiguous(), own)  # other strides would be compiled again
        size = self._bucket(k)
        if size != k:
            own = rows(own, self._filler(k, size))
        result = self._run(size, own, shared)
        return result if size == k else rows(result, slice(k))

    def _bucket(self, k: int) -> int:
        size = max(self.task.chunk, k)
        while size > 2 and -(-size // 2) >= k:
            size = -(-size // 2)
        return size

    def _filler(self, k: int, size: int) -> Tensor:
        if (k, size) not in self.fillers:
            self.fillers[k, size] = torch.tensor([i if i < k else 0 for i in range(size)], device=self.task.device)
        return self.fillers[k, size]

    def _run(self, size: int, own: tuple[Tree, ...], shared: tuple[Tree, ...]) -> Any:
        key = (size if self.task.compiled else size > 1, len(own))
        if key in self.graphs:
            return self.graphs[key](*own, *shared)
        plain = self._plain(size, len(own))
        if self.task.compiled:
            around = self.differentiate and self.on_gpu
            self.graphs[key] = self._sloped(size, len(own)) if around else self._compiled(plain, size)
        else:
            self.graphs[key] = plain
        result = self.graphs[key](*own, *shared)
        if self.task.compiled and (apart := self._apart(result, size, own, shared)) > self._tolerance:
            log.warning(
                "compiled code for cohorts of %d differs from plain code by %.2g of its length: not used", size, apart
            )
            guards.count("compiled code refused", torch.ones(1, dtype=torch.bool))
            self.graphs[key] = plain
            return plain(*own, *shared)
        return result

    def _plain(self, size: int, owns: int) -> Callable[..., Any]:
        run = self._one(self.task)
        return _mapped(grad_and_value(run) if self.differentiate else run, size, owns)

    def _one(self, task: Task) -> Callable[..., Any]:
        fn = self.fn

        def one(*args: Any) -> Any:
            return fn(task, *args)

        return one

    def _sloped(self, size: int, owns: int) -> Callable[..., tuple[Tensor, Tensor]]:
        """Compiled slopes for a GPU. Clients share nothing, so the slope of the sum of their losses is each one's own:
        it is taken around `vmap`, where the compiler shares out the work between a forward and a backward pass. A CPU
        is faster with one graph of both."""
        return _slopes(self._compiled(_mapped(self._one(self.task.for_slopes), size, owns), size))

    def _compiled(self, cohort: Any, size: int) -> Callable[..., Any]:
        return torch.compile(_isolated(cohort, f"cohort_of_{size}_{id(self)}"), dynamic=False, fullgraph=True)

    @property
    def _tolerance(self) -> float:
        return TOLERANCE[torch.bfloat16 if self.task.bf16 else self.task.dtype]

    def _apart(self, result: Any, size: int, own: tuple[Tree, ...], shared: tuple[Tree, ...]) -> float:
        """The largest relative distance of clients' results from plain code, over clients evenly spaced."""
        plain, apart = self._plain(1, len(own)), 0.0
        for k in {i * (size - 1) // (CHECKED - 1) for i in range(CHECKED)}:
            alone = own if size == 1 else rows(own, k)
            mine = result if size == 1 else rows(result, k)
            apart = max(apart, _apart(mine, plain(*alone, *shared)))
        return apart


def _apart(got: Any, wanted: Any) -> float:
    """The largest distance of tensors, relative to their lengths; infinite where integers differ."""
    apart = 0.0
    for one, other in zip(_tensors(got), _tensors(wanted), strict=True):
        if not other.is_floating_point():
            apart = max(apart, 0.0 if torch.equal(one, other) else float("inf"))
        elif bool(other.isfinite().all()):
            length, distance = float(other.double().norm()), float((one.double() - other.double()).norm())
            apart = max(apart, distance / length if length > 1e-6 else 0.0)
    return apart


def _tensors(tree: Tree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if leaf is not None]


def _slopes(losses: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """(slope in the first argument, loss) of one client's loss, or of the losses of many, by plain autograd."""

    def slopes(theta: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            value = losses(theta, *rest)
            (slope,) = torch.autograd.grad(value.sum(), theta)
        return slope, value.detach()

    return slopes


def _mapped(run: Callable[..., Any], size: int, owns: int) -> Callable[..., Any]:
    """One client's function for `size` of them; the first `owns` arguments have the client axis."""

    def cohort(*args: Any) -> Any:
        if size == 1:
            return run(*args)
        return vmap(run, in_dims=(0,) * owns + (None,) * (len(args) - owns))(*args)

    return cohort


def _isolated(fn: Any, name: str = "") -> Callable[..., Any]:
    """The same function with a code object of its own. Dynamo counts recompilations for each code object: so no graph
    of another function can push this one over the limit, where it would quietly run uncompiled."""
    inner = getattr(fn, "__func__", fn)
    code = inner.__code__.replace(co_name=name or f"{inner.__name__}_{id(fn)}")
    alone = types.FunctionType(code, inner.__globals__, code.co_name, None, inner.__closure__)
    return types.MethodType(alone, fn.__self__) if inner is not fn else alone
