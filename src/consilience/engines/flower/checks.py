"""What an update must be before it may touch the global model. Nobody vouches for what a site sends."""

from __future__ import annotations

import torch

from consilience.errors import RecordError
from consilience.records import Tree, Weighted, leaves, tree_map, unpack


def accepted(data: bytes, like: Tree, examples: int) -> tuple[Tree, str]:
    """(update, what was cut in words, if anything). A RecordError unless types, shapes and dtypes are those of `like`
    and all numbers are finite; weights beyond the client's number of examples are cut to it."""
    update = unpack(data, like=like)
    for name, leaf in leaves(update):
        if not bool(leaf.isfinite().all()):
            raise RecordError(f"its update's {name} is not finite")
    cut: list[float] = []
    update = _capped(update, float(examples), cut)
    return (
        update,
        f"a weight of {cut[0]:g} is more than its {examples} examples, and counts as {examples}" if cut else "",
    )


def _capped(tree: Tree, most: float, cut: list[float]) -> Tree:
    """The tree with every weighted sum in it scaled down to a weight of at most `most`: its mean stays."""
    if isinstance(tree, Weighted):
        weight = float(tree.weight.sum())
        if not weight > 0:
            raise RecordError(f"its update has the weight {weight:g}, which is not positive")
        if weight <= most * (1 + 1e-6):
            return tree
        cut.append(weight)
        return tree_map(lambda leaf: leaf * (most / weight), tree)
    if tree is None or isinstance(tree, torch.Tensor):
        return tree
    if isinstance(tree, tuple):
        return tuple(_capped(part, most, cut) for part in tree)
    return type(tree)(*(_capped(getattr(tree, name), most, cut) for name in tree.__dataclass_fields__))
