"""Cohort: the clients that are computed together, and their batches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from consilience.core import ConsilienceError, Tree, keys, record, rows
from consilience.data.augment import Augmentation, check_augmentable
from consilience.data.batch import Batch
from consilience.data.dataset import Dataset
from consilience.data.federation import Federation
from consilience.data.trees import Widths, rows_at

Change = Callable[[Tensor, Tensor], Tensor]  # of inputs [K, B, ...] by keys [K]
Asked = tuple[int, int, int, int | None, bool]  # the arguments of `Cohort.epoch`
Take = Callable[[Dataset, Tensor, Tensor, "Change | None", torch.dtype, "Widths | None"], tuple[Tree, Tree]]


def take(
    data: Dataset, chosen: Tensor, key: Tensor, change: Change | None, dtype: torch.dtype, width: Widths | None = None
) -> tuple[Tree, Tree]:
    """Model inputs, augmented by keys [K], and targets of the examples `chosen` [K, B]; rows of different lengths are
    padded to their longest, or to `width`."""
    x = data.inputs(chosen, dtype, width)
    return x if change is None else change(x, key), data.targets(chosen, dtype, width)


@record
class Info:
    """The facts of a federation that an algorithm starts from."""

    initial: Tensor
    seed: Tensor
    clients: Tensor
    examples: Tensor
    before: Tree = None
    """The server's state at the end of the previous phase, if there was one."""
    sizes: Tensor | None = None
    """The examples of each client [clients]; None stands for equal ones."""


class Cohort:
    """Clients sorted by their number of examples, most first, so that the clients with a further batch are a prefix.

    All tensors have the client axis first. `n` [K, 1] is the number of examples; in a stream, of this round's part.
    `round_size` is the number of clients in the round, and `examples` the number of examples of the whole federation,
    in all steps of a stream. Randomness comes from (seed, round, client, purpose): a client's numbers do not depend on
    its cohort.
    """

    def __init__(
        self,
        federation: Federation,
        ids: Tensor,
        *,
        round: int,
        round_size: int,
        seed: int,
        dtype: torch.dtype = torch.float32,
        static: bool = False,
        augment: Augmentation | None = None,
        take: Take = take,
        limit: int | None = None,
        examples: int | None = None,
    ) -> None:
        self.ids, self.round, self.round_size = ids, round, round_size
        self.examples = federation.examples if examples is None else examples
        self.device, self.dtype = federation.order.device, dtype
        check_augmentable(augment, federation.data)
        self.notes: dict[str, Tensor] = {}
        self._static, self._augment, self._take, self._steps_left = static, augment, take, limit
        self._width = federation.data.widths if static else None  # compiled code needs one width of rows
        self._asked: list[int] = []
        self._passes: list[Asked] = []
        self._begun: dict[Asked, Iterator[tuple[int, Batch]]] = {}
        key = keys.key(seed, purpose="client", round=round, client=ids)
        self._hold(federation, round, key)

    def _hold(self, federation: Federation, round: int, key: Tensor) -> None:
        """Take the examples that the clients hold in a round of `federation`, and their keys [K]."""
        self.federation = federation
        offsets, self._sizes = federation.part(self.ids, round)
        if bool((self._sizes.diff() > 0).any()):
            raise ConsilienceError("a cohort's clients must be sorted by their number of examples, most first")
        # Compiled code needs one batch size in all rounds: that of the largest part, the first of the largest client.
        self._largest = -(-federation.largest // federation.steps) if self._static else int(self._sizes[0])
        self._offsets, self._n, self._key = (t.to(self.device, non_blocking=True) for t in (offsets, self._sizes, key))
        self.n = self._n.to(self.dtype).unsqueeze(1)

    def parts(self, count: int) -> Iterator[Cohort]:
        """Cohorts of the same clients, each with another of `count` disjoint parts of their examples."""
        if self.federation.steps > 1:
            raise ConsilienceError("the clients of a stream have their data in parts already: divide them no further")
        divided = self.federation.stream(count)
        for part in range(count):
            own = copy.copy(self)
            own._hold(divided, part + 1, keys.fold(self._key, f"part {part}"))
            yield own

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def share(self) -> Tensor:
        """Each client's share of all examples of the federation, [K, 1]."""
        return self.n / self.examples

    @property
    def batches(self) -> int:
        """The batches of all clients that the local work would take without a limit, as far as it has come."""
        return sum(self._asked)

    def epoch(
        self, number: int, size: int, *, copies: int = 1, longest: int | None = None, drop_last: bool = False
    ) -> Iterator[tuple[int, Batch]]:
        """One pass over every client's shuffled examples in batches of `size`: (k, batch of the first k clients). The
        last batch may be smaller; `drop_last` leaves it out, unless it is the client's only one. With `copies`, so many
        of every example are shuffled together; each is augmented anew. The pass ends after `longest` batches."""
        asked = number, size, copies, longest, drop_last
        self._passes.append(asked)
        if asked in self._begun:
            return self._begun.pop(asked)
        purpose, width = f"epoch {number}", copies * int(self._sizes[0])
        shuffle = keys.permutations(keys.fold(self._key, purpose), copies * self._n, width)
        if copies > 1:
            shuffle = shuffle % self._n.clamp_min(1).unsqueeze(1)
        return self._batches(
            shuffle, size, purpose, self._take, self._augment, copies=copies, longest=longest, drop_last=drop_last
        )

    def begin_like(self, other: Cohort) -> None:
        """Make the first batch that another cohort's clients were asked for, so that it is there when these are."""
        for asked in other._passes[:1]:
            number, size, copies, longest, drop_last = asked
            batches = self.epoch(number, size, copies=copies, longest=longest, drop_last=drop_last)
            self._begun[asked] = itertools.chain([next(batches)], batches)

    def mean(
        self,
        fn: Callable[..., Any],
        theta: Tensor,
        size: int,
        *own: Any,
        shared: tuple[Any, ...] = (),
        tag: str = "mean",
        augmented: bool = False,
    ) -> Tensor:
        """The mean over each client's examples of `fn(theta, batch, *own, shared=)`, itself a mean over its batch, [K,
        ...]: examples in their order, batches of `size`, inputs as in evaluation or, if `augmented`, as in training.
        Another `tag` gives other random numbers."""
        total: Tensor | None = None
        for k, batch in self.in_order(size, tag, augmented):
            value = fn(theta[:k], batch, *rows(own, slice(k)), shared=shared)
            value = value[0] if isinstance(value, tuple) else value
            if total is None:
                total = torch.zeros(len(self), *value.shape[1:], dtype=value.dtype, device=self.device)
            share = batch.w.sum(1) / self._n[:k]
            total[:k] += value * share.view(-1, *[1] * (value.dim() - 1))
        assert total is not None  # the largest client has at least one example
        return total

    def in_order(self, size: int, tag: str, augmented: bool = False) -> Iterator[tuple[int, Batch]]:
        """All examples in their order, in batches of `size`, inputs as in evaluation or, if `augmented`, as in
        training: (k, batch of the first k clients)."""
        positions = torch.arange(int(self._sizes[0]), device=self.device).expand(len(self), -1)
        how, change = (self._take, self._augment) if augmented else (take, self._as_evaluated)
        return self._batches(positions, size, tag, how, change, least=1)

    def _as_evaluated(self, x: Tensor, key: Tensor) -> Tensor:
        return x if self._augment is None else self._augment.evaluation(x)

    def noise(self, k: int, *shape: int, tag: str) -> Tensor:
        """Standard normal [k, *shape]; the same `tag` gives the same noise within a round."""
        return keys.normal(keys.fold(self._key[:k], tag), *shape, dtype=self.dtype, device=self.device)

    def glimpse(self, count: int = 2) -> Tree:
        """A few inputs [count, …] of the first client, without augmentation: to try a network on."""
        first = self.federation.order[int(self._offsets[0]) :][: min(count, int(self._sizes[0]))]
        return self.federation.data.inputs(first, self.dtype)

    def label_counts(self, classes: int) -> Tensor | None:
        """Examples of each class at each client, [K, classes]; None without class labels."""
        y = self.federation.data.labels
        if y is None:
            return None
        position = torch.arange(int(self._n.sum()), device=self.device)
        owner = torch.arange(len(self), device=self.device).repeat_interleave(self._n)
        row = self._offsets[owner] + position - (self._n.cumsum(0) - self._n)[owner]
        held = y[self.federation.order[row]]
        return torch.bincount(owner * classes + held, minlength=len(self) * classes).view(len(self), -1).to(self.dtype)

    def note(self, **values: Tensor) -> None:
        """Report one number per client, [K], to the round's metrics, where it is averaged by examples."""
        self.notes.update(values)

    def _batches(
        self,
        positions: Tensor,
        size: int,
        purpose: str,
        take: Take,
        change: Change | None,
        least: int = 0,
        copies: int = 1,
        longest: int | None = None,
        drop_last: bool = False,
    ) -> Iterator[tuple[int, Batch]]:
        width = positions.shape[1]
        size = min(size, copies * self._largest)
        batches = -(-copies * self._sizes // size)
        if drop_last:
            batches = batches.minimum((copies * self._sizes // size).clamp_min(1))
        steps = int(batches[0])
        real = torch.arange(width, device=self.device) < copies * self._n.unsqueeze(1)
        index = rows_at(self.federation.order, torch.where(real, positions, 0) + self._offsets.unsqueeze(1))
        weight = real.to(self.dtype)
        if self._static:  # compiled code needs one batch size: pad with copies of weight 0
            index, weight = (torch.nn.functional.pad(t, (0, steps * size - width)) for t in (index, weight))
        steps = steps if longest is None else min(steps, longest)
        self._asked.append(int(batches.clamp_max(steps).sum()))
        key = keys.folds(self._key, [f"{purpose} {step}" for step in range(steps)])
        if self.federation.data.by_index:
            index = index.cpu()
        columns = [slice(step * size, (step + 1) * size) for step in range(steps)]
        active = [int((batches > step).sum()) for step in range(steps)]
        held = self.federation.data.batches(index[:k, own] for k, own in zip(active, columns, strict=True))
        for step in range(steps):
            if self._steps_left is not None:
                if self._steps_left <= 0 and step >= least:
                    return
                self._steps_left -= 1
            k, (data, chosen) = active[step], next(held)
            w, own = weight[:k, columns[step]], key[:k, step]
            x, y = take(data, chosen, own, change, self.dtype, self._width)
            yield k, Batch(x, y, w, own)
