"""Checks of a site's update before it changes the global model."""

import math
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from statistics import median_low

import torch
from torch import Tensor

from consilience.core import RecordError, Tree, Weighted, leaves, tree_map, unpack
from consilience.engines.template import EXAMPLES

PLAUSIBLE = 10  # times the median: the largest number of examples that is believed by default
LARGE = 0.2  # the `magnitude` above which sums and products of several numbers may overflow
LARGEST = 0.5  # the `magnitude` of a server's state above which it has no use: its squares overflow
COUNTS = ("n", "labels")  # the names of fields that hold numbers of examples, in all or by class


def check_update(data: bytes, template: Tree, *, client: int, examples: int) -> tuple[Tree, float | None]:
    """(update, the weight that the client claimed if it was reduced).

    A RecordError unless the update has the types, shapes and dtypes of `template`, all its numbers and means are
    finite, and any integer field called client is the number of this client. A weight above that of `examples` examples
    is reduced to it, and so are numbers of examples, the fields `COUNTS`."""
    update = unpack(data, like=template)
    for name, leaf in leaves(update):
        if not bool(_largest(leaf).isfinite()):
            raise RecordError(f"its update's {name} is not finite")
        if name.rpartition(".")[2] == "client" and not leaf.is_floating_point() and bool((leaf != client).any()):
            raise RecordError(f"its update's {name} is another client's")
    return with_limited_weights(update, template, examples)


def with_limited_weights(
    tree: Tree, template: Tree, examples: int, of: int = EXAMPLES, name: str = ""
) -> tuple[Tree, float | None]:
    """(the tree with every weighted sum in it scaled down to its largest possible weight, the first weight that was
    reduced). If the template's weight is its number of examples, `of`, the largest weight is `examples`; else it is the
    template's own weight. `name` is that of the field."""
    if isinstance(tree, Weighted):
        weight, most = float(tree.weight.sum()), float(template.weight.sum())
        if not weight > 0:
            raise RecordError(f"its update has the weight {weight:g}, which is not positive")
        if not all(bool((_largest(leaf) / weight).isfinite()) for _, leaf in leaves(tree.total)):
            raise RecordError(f"its update over its weight {weight:g} is not finite")
        return _scaled(tree, weight, examples if most == of else most)
    if isinstance(tree, Tensor):
        if name not in COUNTS:
            return tree, None
        if bool((tree < 0).any()) or not bool(tree.sum() > 0):
            raise RecordError(f"its update's {name} are not numbers of examples")
        return _scaled(tree, float(tree.sum()), examples)
    if isinstance(tree, tuple):
        parts = [with_limited_weights(a, b, examples, of) for a, b in zip(tree, template, strict=True)]
        return tuple(part for part, _ in parts), _first(claimed for _, claimed in parts)
    if is_dataclass(tree):
        named = {
            field.name: with_limited_weights(
                getattr(tree, field.name), getattr(template, field.name), examples, of, field.name
            )
            for field in fields(tree)
        }
        changed = {name: part for name, (part, claimed) in named.items() if claimed is not None}
        return replace(tree, **changed), _first(claimed for _, claimed in named.values())  # type: ignore[type-var]
    return tree, None


def _scaled(tree: Tree, weight: float, most: float) -> tuple[Tree, float | None]:
    """The tree for the weight `most`, if its weight is larger by more than rounding."""
    if weight <= most * (1 + 1e-6):
        return tree, None
    return tree_map(lambda leaf: leaf * (most / weight), tree), weight


def magnitude(tree: Tree) -> float:
    """The logarithm of a tree's largest absolute value over that of the largest number of its dtype, at least 0: above
    0.5 squares overflow; NaN if the tree holds one."""
    parts = [_largest(leaf) for _, leaf in leaves(tree) if leaf.is_floating_point()]
    sizes = [float(part.double().log() / math.log(torch.finfo(part.dtype).max)) for part in parts]
    return float(torch.tensor([0.0, *sizes], dtype=torch.float64).max())


def _largest(leaf: Tensor) -> Tensor:
    """The largest absolute value, in one pass and without a copy; NaN if there is one, and 0 for integers."""
    if not leaf.is_floating_point() or not leaf.numel():
        return torch.zeros(())
    low, high = leaf.aminmax()
    return torch.maximum(-low, high)


def most_examples(claimed: Iterable[int]) -> int:
    """The number of examples above which a site of these is not believed: `PLAUSIBLE` times the median and, of three or
    more sites, as many as all others together, so that no site has most of the weight."""
    sizes = sorted(claimed)
    most = PLAUSIBLE * median_low(sizes or [0])
    return most if len(sizes) < 3 else min(most, sum(min(size, most) for size in sizes[:-1]))


def _first(weights: Iterable[float | None]) -> float | None:
    return next((weight for weight in weights if weight is not None), None)
