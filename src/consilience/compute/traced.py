"""A local step as one compiled graph: the loss, its gradient and the optimiser's step together.

Autograd cannot be compiled from outside, so compiled losses and compiled steps meet in a gradient [K, P] that one
writes and the other reads. Here autograd runs while the operations of a step are written down, with tensors that have
no content (`make_fx`), and the compiler gets the list. It then reads the gradient of a layer where the layer's kernel
has left it, in its type and order, and writes θ: nothing of the size of θ lies in between. There is no bytecode to
follow and there are no guards, so a graph that is in the compiler's own cache is ready in a second or two.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from consilience.compute.compiler import TOLERANCE, compared, distance, tracing
from consilience.compute.replay import Advance, Probe, Step
from consilience.core.records import Tree, leaves, rows, tree_map

log = logging.getLogger("consilience")
SMALL = 1 << 16  # neighbouring parameters of fewer entries are moved together


class Traced(Step):
    """A step as one graph for each form of its arguments. Its first result is compared with that of `plain`. Where it
    differs, or cannot be traced or compiled, the log says so, and `instead` is used. `one` is the loss of one client,
    `sizes` are those of the parameters."""

    def __init__(
        self,
        one: Callable[..., Tensor],
        sizes: Sequence[int],
        advance: Advance,
        probe: Probe,
        plain: Step,
        instead: Step,
        precision: torch.dtype,
    ) -> None:
        self.sizes = together(sizes)
        super().__init__(gradient_by_parts(one, self.sizes), by_parts(advance, self.sizes), probe)
        self.plain, self.instead, self.tolerance = plain, instead, TOLERANCE[precision]
        self.codes: dict[Any, Callable[..., Any]] = {}

    def __call__(
        self, theta: Tensor, batch: Tree, own: tuple[Tree, ...], shared: tuple[Tree, ...],
        kept: tuple[Tree, ...], fresh: tuple[Tree, ...],
    ) -> Tensor:  # fmt: skip
        if len(theta) == 1:  # one client has torch's own kernels
            return self.instead(theta, batch, own, shared, kept, fresh)
        numbers = tuple(theta.new_full((), f) if isinstance(f, float) else f for f in fresh)
        given = theta, batch, own, shared, kept, numbers
        flat = tree_flatten(given)[0]
        form = tuple(None if leaf is None else (leaf.shape, leaf.stride(), leaf.dtype) for leaf in flat)
        if form not in self.codes:
            self.codes[form] = self._made(given)
        losses: Tensor = self.codes[form](*given)
        return losses

    def _made(self, given: tuple[Any, ...]) -> Callable[..., Any]:
        try:
            code = compiled(super().__call__, given, self.sizes)
            error = self._error(code, given)
        except Exception as failure:  # of any type: it is the compiler's, or the module's own, which `instead` raises
            log.warning("a local step cannot be compiled as a whole (%s)", f"{type(failure).__name__}: {failure}"[:300])
            return self.instead
        if error <= self.tolerance:
            return code
        log.warning("a local step compiled as a whole differs from plain code by %.2g of its norm: not used", error)
        return self.instead

    def _error(self, code: Callable[..., Any], given: tuple[Any, ...]) -> float:
        """The distance of a step from one of plain code for some clients, by the losses and by the changes of θ and of
        what the optimiser remembers."""
        found, wanted = (tree_map(torch.clone, given) for _ in range(2))
        results = [(step(*at), at[0], at[4][0]) for step, at in ((code, found), (self.plain, wanted))]
        some = torch.tensor(compared(len(given[0])), device=given[0].device)
        (mine, *moved), (theirs, *expected) = (rows(result, some) for result in results)
        before = rows((given[0], given[4][0]), some)
        changes = (tree_map(torch.sub, tuple(after), before) for after in (moved, expected))
        return max(distance(mine, theirs), distance(*changes))


def compiled(fn: Callable[..., Tensor], given: tuple[Any, ...], sizes: Sequence[int]) -> Callable[..., Any]:
    """A step `fn` as one graph for arguments like the given ones. Their tensors are the graph's inputs: θ and what the
    optimiser remembers of it as parts of these sizes, so that each is changed where it lies. Had they been cut inside
    of the graph, the compiler would write a whole new θ for every few parts."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # all of this loads the compiler: not at import
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    spec, groups = tree_flatten(given)[1], _cut(given, sizes)

    def on_tensors(*tensors: Tensor) -> Tensor:
        rest = iter(tensors)
        cut = [[next(rest) for _ in group] for group in groups]
        joined: list[Any] = [torch.cat(parts, 1) if len(parts) > 1 else next(iter(parts), None) for parts in cut]
        losses = fn(*tree_unflatten(joined, spec))
        for parts, leaf in zip(cut, joined, strict=True):
            if len(parts) > 1:
                for part, piece in zip(parts, leaf.split_with_sizes([p.shape[1] for p in parts], 1), strict=True):
                    part.copy_(piece)
        return losses

    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True):
        inputs = [_like(part) for group in groups for part in group]
        with tracing():
            graph = make_fx(on_tensors)(*inputs)
    code = torch._inductor.compile(_untransposed(_without_joins(graph)), inputs)  # type: ignore[arg-type]
    return lambda *again: code(*(part for group in _cut(again, sizes) for part in group))


def _cut(given: tuple[Any, ...], sizes: Sequence[int]) -> list[list[Tensor]]:
    """The tensors of a step's arguments, leaf by leaf: none, one, or the parts of θ and of the optimiser's memory."""
    theta, memory = given[0], given[4][0]
    moved = [id(leaf) for leaf in (theta, *memory) if leaf.shape == theta.shape]

    def parts(leaf: Tensor | None) -> list[Tensor]:
        if leaf is None:
            return []
        return list(leaf.split_with_sizes(_fitting(sizes, leaf), 1)) if id(leaf) in moved else [leaf]

    return [parts(leaf) for leaf in tree_flatten(given)[0]]


def _like(tensor: Tensor) -> Tensor:
    """A tensor of the same form, at the same distance from the start of its memory: the compiler looks at alignment."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    held = torch.empty(tensor.storage_offset() + last + 1, dtype=tensor.dtype, device=tensor.device)
    return held.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def gradient_by_parts(one: Callable[..., Tensor], sizes: Sequence[int]) -> Callable[..., tuple[Tensor, Tensor]]:
    """(gradient in θ [K, P], loss [K]) of a cohort, for the loss of `one` client. It is taken in parts, and joined."""

    def gradients(theta: Tensor, *own: Any, shared: tuple[Any, ...] = ()) -> tuple[Tensor, Tensor]:
        losses = vmap(one, in_dims=(0,) * (1 + len(own)) + (None,) * len(shared))
        with torch.enable_grad():
            parts = [part.detach().requires_grad_() for part in theta.split_with_sizes(_fitting(sizes, theta), 1)]
            value = losses(torch.cat(parts, 1), *own, *shared)
            found = torch.autograd.grad(value.sum(), parts, materialize_grads=True)
        return torch.cat(found, 1), value.detach()

    return gradients


def by_parts(advance: Advance, sizes: Sequence[int]) -> Advance:
    """`advance`, which is elementwise, on one part of θ after the other. What it remembers for a client, such as the
    number of steps, is changed once."""

    def parted(theta: Tensor, g: Tensor, memory: tuple[Tensor, ...], *rest: Any) -> None:
        size = theta.shape[1]
        if any(leaf.shape[-2:] == (size, size) for _, leaf in leaves(rest)):
            return advance(theta, g, memory, *rest)  # a full precision: not elementwise
        held, start = memory, 0
        for width in _fitting(sizes, theta):
            at = slice(start, start + width)

            def mine(leaf: Tensor, at: slice = at) -> Tensor:
                return leaf[..., at] if leaf.shape[-1:] == (size,) else leaf

            held = tuple(mine(part) if part.shape[-1] == size else part.clone() for part in memory)
            advance(theta[:, at], g[:, at].clone(), held, *tree_map(mine, rest))
            start += width
        for part, last in zip(memory, held, strict=True):
            if part.shape[-1] != size:
                part.copy_(last)

    return parted


def _fitting(sizes: Sequence[int], theta: Tensor) -> list[int]:
    """The sizes of the parts of θ; one part, where θ is not made of a task's parameters."""
    return list(sizes) if sum(sizes) == theta.shape[1] else [theta.shape[1]]


def together(sizes: Sequence[int]) -> list[int]:
    """Sizes of parts, with those of small neighbours added up."""
    runs: list[int] = []
    small = False
    for size in sizes:
        if small and size < SMALL:
            runs[-1] += size
        else:
            runs.append(size)
        small = size < SMALL
    return runs


def _without_joins(graph: Any) -> Any:
    """A traced graph without tensors that are joined along the second axis only to be cut again. Autograd makes such
    pairs: cutting θ up has a join as its gradient."""
    cat, nodes = torch.ops.aten.cat.default, graph.graph
    joins = [node for node in nodes.nodes if node.target is cat]
    for node in joins:  # shorter joins are added while it runs
        if node.args[1:] != (1,):
            continue
        for piece, start, stop in list(_cuts(node)):
            with nodes.inserting_before(piece):
                new, *more = _pieces(nodes, node.args[0], start, stop)
                if more:
                    new = nodes.call_function(cat, ([new, *more], 1))
                    new.meta = dict(piece.meta)
                    joins.append(new)
            piece.replace_all_uses_with(new)
    for node in nodes.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if node.args[0] is node.args[1]:  # a part that was changed where it lies
            nodes.erase_node(node)
    nodes.eliminate_dead_code()
    graph.recompile()
    return graph


def _pieces(nodes: Any, parts: Sequence[Any], start: int, stop: int) -> Iterator[Any]:
    """What lies from start to stop in joined parts, part by part."""
    at = 0
    for part in parts:
        size = part.meta["val"].shape[1]
        low, high = max(start - at, 0), min(stop - at, size)
        if (low, high) == (0, size):
            yield part
        elif low < high:
            piece = nodes.call_function(torch.ops.aten.slice.Tensor, (part, 1, low, high))
            piece.meta["val"] = part.meta["val"][:, low:high]
            yield piece
        at += size


def _untransposed(graph: Any) -> Any:
    """A traced graph whose transposed products are products: (AB)ᵀ = BᵀAᵀ. The gradient of a linear layer is such a
    one, and to turn it around takes longer than to multiply."""
    aten, nodes = torch.ops.aten, graph.graph
    for node in nodes.find_nodes(op="call_function", target=aten.transpose.int):
        made = node.args[0]
        while made.target is aten.view.default and made.meta["val"].shape == made.args[0].meta["val"].shape:
            made = made.args[0]
        if made.target is aten.bmm.default and {*node.args[1:]} == {1, 2}:
            with nodes.inserting_before(node):
                turned = [nodes.call_function(aten.transpose.int, (part, 1, 2)) for part in reversed(made.args)]
                product = nodes.call_function(aten.bmm.default, tuple(turned))
            product.meta = dict(node.meta)
            node.replace_all_uses_with(product)
    nodes.eliminate_dead_code()
    graph.recompile()
    return graph


def _cuts(joined: Any) -> Iterator[tuple[Any, int, int]]:
    """(node, start, stop) of the pieces that are cut out of a tensor along its second axis."""
    for user in joined.users:
        if user.target is torch.ops.aten.slice.Tensor and user.args[1:2] == (1,) and len(user.args) == 4:
            yield user, user.args[2], min(user.args[3], joined.meta["val"].shape[1])
        elif user.target is torch.ops.aten.split_with_sizes.default and user.args[2:] == (1,):
            stops = [sum(user.args[1][: i + 1]) for i in range(len(user.args[1]))]
            for piece in user.users:
                stop = stops[piece.args[1]]
                yield piece, stop - user.args[1][piece.args[1]], stop
