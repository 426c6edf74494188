"""Local steps of a cohort, one by one or recorded as CUDA graphs."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from consilience.compute.compiler import tensors
from consilience.core.records import Tree, tree_map

log = logging.getLogger("consilience")
RECORDED = 128  # graphs that are kept of one kind of step: one for each number of clients that still have a batch
Advance = Callable[..., None]
"""Moves θ [k, P] along its gradient in place, given further arguments."""
Probe = Callable[..., tuple[Tensor, Tensor]]
"""(gradient, loss [k]) of a step, from the batch's gradient as a function of θ, θ, and further arguments."""


def at_theta(gradient: Callable[[Tensor], tuple[Tensor, Tensor]], theta: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The gradient at θ itself."""
    return gradient(theta)


class Step:
    """A local step, `(θ, batch, own, shared, kept, fresh) → loss [k]`: the gradient by
    `probe(gradient of the batch, θ, *kept, *fresh)`, then `advance(θ, gradient, *kept, *fresh)` in place."""

    def __init__(
        self, gradient: Callable[..., tuple[Tensor, Tensor]], advance: Advance, probe: Probe = at_theta
    ) -> None:
        self.gradient, self.advance, self.probe = gradient, advance, probe

    def __call__(
        self, theta: Tensor, batch: Tree, own: tuple[Tree, ...], shared: tuple[Tree, ...],
        kept: tuple[Tree, ...], fresh: tuple[Tree, ...],
    ) -> Tensor:  # fmt: skip
        def gradient(at: Tensor) -> tuple[Tensor, Tensor]:
            return self.gradient(at, batch, *own, shared=shared)

        g, loss = self.probe(gradient, theta, *kept, *fresh)
        self.advance(theta, g, *kept, *fresh)
        return loss


class Replay:
    """A compiled step, recorded as a CUDA graph: a few hundred kernels are launched as one, because their launches
    would take longer than they do.

    Tensors that stay from step to step (θ, a chain's memory, a prior) are used where they lie; if one of them moves,
    the step is recorded anew. Tensors that are fresh in every step are copied to their places in the recording. A step
    for whose recording there is too little memory runs unrecorded.
    """

    def __init__(self, step: Step, device: torch.device) -> None:
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
        numbers = tuple(theta.new_full((), f) if isinstance(f, float) else f for f in fresh)
        given, stays = tensors((batch, numbers)), tensors((theta, own, shared, kept))
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
            torch.cuda.empty_cache()  # a recording has its own memory and cannot reuse the cache of these steps
            self.warm.add(key[0])
        theta, batch, own, shared, kept, fresh = args
        batch, fresh = tree_map(torch.clone, (batch, fresh))
        # Not `torch.cuda.graph`: it empties the allocator's cache first, and all tensors would move in the next round.
        graph, stream = torch.cuda.CUDAGraph(), self.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), _nothing_freed():
            # The thread that writes a checkpoint may use the device meanwhile.
            pool = {} if self.pool is None else {"pool": self.pool}
            graph.capture_begin(**pool, capture_error_mode="thread_local")
            try:
                loss = self.step(theta, batch, own, shared, kept, fresh)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.pool = graph.pool()
        if len(self.graphs) == RECORDED:
            del self.graphs[next(iter(self.graphs))]
        self.graphs[key] = graph, tensors((batch, fresh)), loss


@contextmanager
def _nothing_freed() -> Iterator[None]:
    """No garbage collection: it may free the graphs of an earlier run in this process, which breaks a recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
