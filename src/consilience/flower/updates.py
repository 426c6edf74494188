"""Checks of a site's update before it changes the global model."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace

from consilience.core import RecordError, Tree, Weighted, leaves, tree_map, unpack

TEMPLATE_EXAMPLES = 2  # examples of the client from which the server computes the template of an update


def check_update(data: bytes, template: Tree, *, client: int, examples: int) -> tuple[Tree, float | None]:
    """(update, the weight that the client claimed if it was reduced).

    A RecordError unless the update has the types, shapes and dtypes of `template`, all its numbers are finite, and any
    integer field called client is the number of this client. A weight above that of `examples` examples is reduced to
    it."""
    update = unpack(data, like=template)
    for name, leaf in leaves(update):
        if not bool(leaf.isfinite().all()):
            raise RecordError(f"its update's {name} is not finite")
        if name.rpartition(".")[2] == "client" and not leaf.is_floating_point() and bool((leaf != client).any()):
            raise RecordError(f"its update's {name} is another client's")
    return _with_limited_weights(update, template, examples)


def _with_limited_weights(tree: Tree, template: Tree, examples: int) -> tuple[Tree, float | None]:
    """(the tree with every weighted sum in it scaled down to its largest possible weight, the first weight that was
    reduced). If the template's weight is its number of examples, the largest weight is `examples`; else it is the
    template's own weight."""
    if isinstance(tree, Weighted):
        weight, most = float(tree.weight.sum()), float(template.weight.sum())
        most = examples if most == TEMPLATE_EXAMPLES else most
        if not weight > 0:
            raise RecordError(f"its update has the weight {weight:g}, which is not positive")
        if weight <= most * (1 + 1e-6):
            return tree, None
        return tree_map(lambda leaf: leaf * (most / weight), tree), weight
    if isinstance(tree, tuple):
        parts = [_with_limited_weights(a, b, examples) for a, b in zip(tree, template, strict=True)]
        return tuple(part for part, _ in parts), _first(claimed for _, claimed in parts)
    if is_dataclass(tree):
        named = {
            field.name: _with_limited_weights(getattr(tree, field.name), getattr(template, field.name), examples)
            for field in fields(tree)
        }
        changed = {name: part for name, (part, claimed) in named.items() if claimed is not None}
        return replace(tree, **changed), _first(claimed for _, claimed in named.values())  # type: ignore[type-var]
    return tree, None


def _first(weights: Iterable[float | None]) -> float | None:
    return next((weight for weight in weights if weight is not None), None)
