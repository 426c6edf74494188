"""Fixed point: records as 64-bit integers. Their sums are exact, and do not depend on the order of the addends."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from consilience.core.errors import RecordError
from consilience.core.records import Tree, Weighted, leaves, parts, tree_map

BITS = 62  # of a sum, beside the sign: |Σ| ≤ 2⁶²
REACH = 2.0**14
ROUNDING = 1e-6  # by which a weight in float32 may exceed the number of examples that it is
WIDEST = 2.0**56  # the largest number that a `Fold` adds
FINE = 48  # further bits of a number in a `Fold`
BLOCK = 1 << 20  # numbers that are converted at once


@dataclass(frozen=True)
class Encoding:
    """The integers that stand for an update, the same for all clients of a round.

    A number x of a leaf with the public bound B becomes round(x · 2^e), e = 62 − ⌈log₂(clients · B)⌉. So a sum over
    `clients` stays within 2⁶², and has an error of at most clients · 2^(−e − 1). `bounds` follow from what all clients
    know, the largest number n of examples of a client and the number N of all:

    - the weight of a weighted sum lies within n, and its total within reach · n;
    - any other number, such as a natural parameter, lies within reach · N;
    - whole numbers lie within N.

    A client whose update is out of bounds cannot take part; its update is never cut."""

    template: Tree
    bounds: dict[str, float]
    clients: int

    @classmethod
    def of(cls, template: Tree, *, clients: int, largest: int, examples: int, reach: float = REACH) -> Encoding:
        """The encoding of updates like `template`, that of one client, with n = `largest` and N = `examples`."""
        names = (name for name, _ in leaves(template))
        found = dict(zip(names, _bounds(template, largest, max(examples, largest), reach), strict=True))
        return cls(template, found, clients)

    @cached_property
    def exponents(self) -> dict[str, int]:
        """e by leaf; 0 for whole numbers."""
        kinds = {name: leaf.is_floating_point() for name, leaf in leaves(self.template)}
        return {
            name: BITS - math.frexp(self.clients * bound)[1] if kinds[name] else 0
            for name, bound in self.bounds.items()
        }

    @property
    def numbers(self) -> int:
        """How many numbers an update has."""
        return sum(leaf.numel() for _, leaf in leaves(self.template))

    @cached_property
    def digest(self) -> str:
        """A hash of all that the clients of a round must have in common to add their integers."""
        layout = [
            [name, list(leaf.shape), str(leaf.dtype), self.bounds[name], self.exponents[name]]
            for name, leaf in leaves(self.template)
        ]
        return hashlib.sha256(json.dumps([layout, self.clients]).encode()).hexdigest()

    def beyond(self, updates: Tree) -> dict[int, str]:
        """The rows of updates [K, ...] that are out of bounds, and why."""
        found: dict[int, str] = {}
        for name, leaf in leaves(updates):
            if not leaf.numel():
                continue
            low, high = leaf.detach().reshape(len(leaf), -1).aminmax(dim=1)
            largest, bound = torch.maximum(-low, high), self.bounds[name]
            for row in (~(largest <= bound * (1 + ROUNDING))).nonzero().flatten().tolist():
                found.setdefault(
                    row,
                    f"its update's {name} has a number of size {float(largest[row]):.3g}, and sums are exact up to "
                    f"{bound:.3g}: standardise the data, or take smaller steps",
                )
        return found

    def encode(self, update: Tree) -> Tree:
        """The integers of updates within bounds, with or without a client axis."""
        exponents = iter(self.exponents.values())
        return tree_map(lambda _, leaf: _integers(leaf, next(exponents)), self.template, update)

    def decode(self, total: Tree) -> Tree:
        """The sum of updates, from the sum of their integers."""
        exponents = iter(self.exponents.values())
        return tree_map(lambda like, leaf: _floats(leaf, next(exponents), like.dtype), self.template, total)

    def flatten(self, integers: Tree) -> Tensor:
        """All integers of one update, or of a sum, as a vector."""
        parts = [leaf.reshape(-1) for _, leaf in leaves(integers)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def unflatten(self, vector: Tensor) -> Tree:
        """The tree of integers that `flatten` made a vector of."""
        parts = iter(torch.split(vector, [leaf.numel() for _, leaf in leaves(self.template)]))
        return tree_map(lambda leaf: next(parts).view(leaf.shape), self.template)

    def check_sum(self, total: Tree) -> None:
        """Raise a RecordError if a sum is larger than all clients together can make it."""
        for (name, leaf), exponent in zip(leaves(total), self.exponents.values(), strict=True):
            most = self.clients * self.bounds[name] * 2.0**exponent * (1 + ROUNDING) + self.clients
            low, high = leaf.aminmax() if leaf.numel() else (torch.zeros(()), torch.zeros(()))
            if max(-int(low), int(high)) > most:
                raise RecordError(f"the sum's {name} is larger than {self.clients} clients can make it")


class Fold:
    """A sum of updates that are added as they come. Whatever the order in which they are added and taken away, the sum
    is the same, and it takes as much memory as four updates in float32.

    A number x is two integers, round(x · 2^e) and what is left of it times 2^`FINE`. e follows from the number of
    `clients` K: x may be as large as 2^56, and a sum of K updates has an error of at most K² · 2^−54."""

    def __init__(self, template: Tree, clients: int) -> None:
        self._template, self._exponent = template, BITS - math.frexp(clients * WIDEST)[1]
        self.coarse, self.fine = (
            tree_map(lambda leaf: torch.zeros(leaf.shape, dtype=torch.int64), template) for _ in range(2)
        )

    def beyond(self, update: Tree) -> str:
        """Why an update cannot be added; empty if it can."""
        for name, leaf in leaves(update):
            size = float(leaf.detach().abs().max()) if leaf.numel() else 0.0
            if not size <= WIDEST:
                return f"its update's {name} has a number of size {size:.3g}, and sums are made up to {WIDEST:.1g}"
        return ""

    def add(self, update: Tree) -> None:
        """Add a client's update."""
        self._fold(update, 1)

    def remove(self, update: Tree) -> None:
        """Take away an update that was added."""
        self._fold(update, -1)

    def _fold(self, update: Tree, sign: int) -> None:
        tree_map(lambda a, b, leaf: _fold_leaf(a, b, leaf, self._exponent, sign), self.coarse, self.fine, update)

    def value(self) -> Tree:
        """The sum."""
        return tree_map(lambda a, b, like: _folded(a, b, like, self._exponent), self.coarse, self.fine, self._template)


def _fold_leaf(coarse: Tensor, fine: Tensor, leaf: Tensor, exponent: int, sign: int) -> None:
    """Add a leaf's integers in place, in blocks: a large leaf needs no copy of its size."""
    if not leaf.is_floating_point():
        coarse.add_(leaf.detach().cpu(), alpha=sign)
        return
    into, rest, parts = coarse.view(-1), fine.view(-1), leaf.detach().cpu().reshape(-1)
    for start in range(0, len(parts), BLOCK):
        block = slice(start, start + BLOCK)
        scaled = parts[block].double() * 2.0**exponent
        whole = scaled.round()
        into[block].add_(whole.to(torch.int64), alpha=sign)
        rest[block].add_(((scaled - whole) * 2.0**FINE).round_().to(torch.int64), alpha=sign)


def _folded(coarse: Tensor, fine: Tensor, like: Tensor, exponent: int) -> Tensor:
    """The numbers of a leaf of a sum."""
    if not like.is_floating_point():
        return coarse.to(like.dtype)
    found = torch.empty(coarse.shape, dtype=like.dtype)
    into, parts, rest = found.view(-1), coarse.view(-1), fine.view(-1)
    for start in range(0, len(into), BLOCK):
        block = slice(start, start + BLOCK)
        into[block] = (parts[block].double() + rest[block].double() * 2.0**-FINE) * 2.0**-exponent
    return found


def _integers(leaf: Tensor, exponent: int) -> Tensor:
    if not leaf.is_floating_point():
        return leaf.to(torch.int64)
    return (leaf.double() * 2.0**exponent).round_().to(torch.int64)


def _floats(integers: Tensor, exponent: int, dtype: torch.dtype) -> Tensor:
    """The numbers of a leaf, made in blocks: a large leaf needs no copy of its size in float64."""
    found = torch.empty(integers.shape, dtype=dtype, device=integers.device)
    into, parts = found.view(-1), integers.reshape(-1)
    for start in range(0, len(parts), BLOCK):
        block = slice(start, start + BLOCK)
        into[block] = parts[block].double() * 2.0**-exponent
    return found


def _bounds(tree: Tree, largest: int, examples: int, reach: float) -> Iterator[float]:
    """The bounds of all leaves, in their order."""
    if isinstance(tree, Weighted):
        yield from (reach * largest for _ in leaves(tree.total))
        yield float(largest)
    elif isinstance(tree, Tensor):
        yield reach * examples if tree.is_floating_point() else float(examples)
    else:
        for _, part in parts(tree):
            yield from _bounds(part, largest, examples, reach)
