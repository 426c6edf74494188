"""Examples as trees: one tensor, a tuple or a dict of tensors with a row for each example; or Ragged, or Rows.

Entries are named as in messages and files: `x`; `x.0`, `x.1` in a tuple; `x.pixels` in a dict.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from consilience.core.errors import DataError
from consilience.core.records import Tree, tree_map
from consilience.data.ragged import Ragged
from consilience.data.rows import Rows
from consilience.data.stored import file_map
from consilience.data.tensors import to_tensor

Entry = Tensor | Ragged | Rows
Widths = Mapping[str, int]
"""The width to which a Ragged entry is padded, by the name of the entry."""


def to_tree(value: Any, what: str, name: str = "x", mapped: bool = True) -> Tree:
    """`value` as an entry, or as a tuple or dict of entries; arrays, tables and lists become tensors, and memory maps,
    with `mapped`, rows that are read by index."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or not key:
                raise DataError(f"{what}{name}: the keys of a dict name the module's arguments, got {key!r}")
    if isinstance(value, Mapping | tuple) and not value:
        raise DataError(f"{what}{name} has no entries")
    if isinstance(value, Mapping):
        return {key: _entry(part, f"{what}{name}.{key}", mapped) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_entry(part, f"{what}{name}.{i}", mapped) for i, part in enumerate(value))
    return _entry(value, f"{what}{name}", mapped)


def _entry(value: Any, what: str, mapped: bool) -> Entry:
    if mapped and file_map(value)[0]:
        return Rows(value)
    entry = value if isinstance(value, Ragged | Rows) else to_tensor(value, what)
    if not entry.dim():
        raise DataError(f"{what} must have a row for each example")
    return entry


def entries(tree: Tree, name: str = "x") -> Iterator[tuple[str, Entry]]:
    """All entries with their names."""
    if isinstance(tree, tuple | dict):
        parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
        yield from ((f"{name}.{key}", part) for key, part in parts)
    else:
        yield name, tree


def map_entries(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """`fn` on every entry, together with the entries in the same places of other trees."""
    if isinstance(tree, dict):
        return {key: fn(part, *(other[key] for other in others)) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(fn(*parts) for parts in zip(tree, *others, strict=True))
    return fn(tree, *others)


def check_names(tree: Tree, what: str) -> None:
    """Refuse a mask or lengths whose name is already a key."""
    if not isinstance(tree, dict):
        return
    known = set(tree)
    for key, part in tree.items():
        for name in filter(None, (part.mask, part.lengths) if isinstance(part, Ragged) else ()):
            if name in known:
                raise DataError(f"{what}.{key} names a further input {name!r}, which is a key already")
            known |= {name}


def tensors(tree: Tree) -> list[Tensor]:
    """The stored tensors of all entries: of a Ragged entry, its values and offsets; of rows by index, a sample."""

    def own(part: Entry) -> tuple[Tensor, ...]:
        if isinstance(part, Ragged):
            return part.values, part.offsets
        return (part.sampled() if isinstance(part, Rows) else part,)

    return [tensor for _, part in entries(tree) for tensor in own(part)]


def by_index(tree: Tree) -> bool:
    """Whether an entry is read by index, instead of held in memory."""
    return any(isinstance(part, Rows) for _, part in entries(tree))


def address(tree: Tree) -> int:
    """Where the first entry is stored."""
    _, part = next(entries(tree))
    return (part.values if isinstance(part, Ragged) else part).data_ptr()


def cat(*parts: Entry) -> Entry:
    """The rows of several entries of one form."""
    if isinstance(parts[0], Ragged):
        return Ragged.cat(parts)  # type: ignore[arg-type]
    return Rows.cat(parts) if any(map(by_index, parts)) else torch.cat(parts)  # type: ignore[arg-type]


def form(tree: Tree) -> str:
    """The shape of one example and its type: 28 × 28 uint8, or {pixels: 28 × 28 uint8, text: L int64}."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key}: {form(part)}" for key, part in tree.items()) + "}"
    if isinstance(tree, tuple):
        return f"({', '.join(map(form, tree))})"
    if isinstance(tree, Ragged):
        return tree.form
    each = " × ".join(str(n) for n in tree.shape[1:])
    return f"{each} {tree.dtype}".replace("torch.", "").strip()


def rows_at(table: Tensor, index: Tensor) -> Tensor:
    """A fresh copy of `table[index]` for an index of any shape; ten times faster than indexing for rows of bytes."""
    return table.index_select(0, index.reshape(-1)).view(*index.shape, *table.shape[1:])


def batch_of(tree: Tree, index: Tensor, width: Widths | None = None, name: str = "x") -> Tree:
    """The rows `index` of every entry as tensors. A Ragged entry is padded, to its width if there is one, and followed
    by its mask and lengths."""
    if isinstance(tree, Tensor):
        return rows_at(tree, index)
    made = {where: _rows(part, index, (width or {}).get(where)) for where, part in entries(tree, name)}
    if isinstance(tree, dict):
        each = zip(tree, made.values(), strict=True)
        return {key: rows for own, (first, more) in each for key, rows in ({own: first} | more).items()}
    flat = tuple(rows for first, more in made.values() for rows in (first, *more.values()))
    return flat if isinstance(tree, tuple) or len(flat) > 1 else flat[0]


def in_dtype(tree: Tree, dtype: torch.dtype) -> Tree:
    """Real numbers in `dtype`; integers and bool as they are."""
    return tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)


def _rows(part: Entry, index: Tensor, width: int | None) -> tuple[Tensor, dict[str, Tensor]]:
    if isinstance(part, Ragged):
        return part.padded(index, width)
    return part.take(index) if isinstance(part, Rows) else rows_at(part, index), {}


def widths(tree: Tree, name: str = "x") -> dict[str, int]:
    """The longest row of every Ragged entry."""
    return {where: part.width for where, part in entries(tree, name) if isinstance(part, Ragged)}


def example_bytes(tree: Tree, dtype: torch.dtype) -> int:
    """Bytes of one example as inputs of a model in `dtype`, at most; of rows of different lengths, the longest."""
    return sum(part.shape[1:].numel() * max(part.dtype.itemsize, dtype.itemsize) for _, part in entries(tree))
