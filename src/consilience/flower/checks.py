"""What an update must be before it may touch the global model. Nobody vouches for what a site sends."""

from __future__ import annotations

from torch import Tensor

from consilience.core.errors import RecordError
from consilience.core.records import Tree, Weighted, leaves, tree_map, unpack

BLANK = 2  # examples of the client that shows what an update looks like


def accepted(data: bytes, like: Tree, client: int, examples: int) -> tuple[Tree, float | None]:
    """(update, the weight that was cut, if one was). A RecordError unless types, shapes and dtypes are those of `like`,
    which comes from a client of `BLANK` examples, all numbers are finite, and where the update says whose it is (an
    integer called client) it is this client's. A weight beyond what so many examples may have is cut to that."""
    update = unpack(data, like=like)
    for name, leaf in leaves(update):
        if not bool(leaf.isfinite().all()):
            raise RecordError(f"its update's {name} is not finite")
        if name.rpartition(".")[2] == "client" and not leaf.is_floating_point() and bool((leaf != client).any()):
            raise RecordError(f"its update's {name} is another client's")
    cut: list[float] = []
    return _capped(update, like, examples, cut), cut[0] if cut else None


def _capped(tree: Tree, like: Tree, examples: int, cut: list[float]) -> Tree:
    """The tree with every weighted sum in it scaled down to the weight it may have, which is as much as `like` says of
    BLANK examples where weights are numbers of examples, and what it says itself where they are not."""
    if isinstance(tree, Weighted):
        weight, most = float(tree.weight.sum()), float(like.weight.sum())
        most = examples if most == BLANK else most
        if not weight > 0:
            raise RecordError(f"its update has the weight {weight:g}, which is not positive")
        if weight <= most * (1 + 1e-6):
            return tree
        cut.append(weight)
        return tree_map(lambda leaf: leaf * (most / weight), tree)
    if tree is None or isinstance(tree, Tensor):
        return tree
    if isinstance(tree, tuple):
        return tuple(_capped(a, b, examples, cut) for a, b in zip(tree, like, strict=True))
    names = tree.__dataclass_fields__
    return type(tree)(*(_capped(getattr(tree, name), getattr(like, name), examples, cut) for name in names))
