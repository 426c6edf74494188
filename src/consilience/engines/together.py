"""Processes of one group, which compute every round together."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from consilience.core import ClientError, ConsilienceError
from consilience.core.records import Tree, assemble, blueprint, leaves
from consilience.engines.sharded import Peers
from consilience.engines.work import Share

T = TypeVar("T")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Together(Peers):
    """Processes of one group. Facts travel as JSON, tensors as they are; nothing is pickled."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = group
        self._answer: Callable[[dict[str, Any]], None] | None = None

    def leave(self) -> None:
        """End this rank's part, so that ranks that wait for it get an error. The group is dropped too: a run that the
        user keeps would keep its threads."""
        dist.destroy_process_group(self._group)
        self._group = self._answer = None

    def __str__(self) -> str:
        return f"distributed over {self.size} ranks"

    def merge(self, work: Callable[[], Share], server: Tree, additive: bool) -> Share:
        """All ranks' shares, in the order of ranks. A rank without clients adds zeros, of the shapes of the others."""
        share, failure = Share(), None
        try:
            share = work()
        except Exception as error:
            failure = error
        facts = {
            "failure": _words(failure),
            "server": fingerprint(server),
            "share": share.facts(),
            "plans": [blueprint(tree) for tree in (share.update, share.numbers)],
        }
        everyone = [json.loads(text) for text in self._exchange(json.dumps(facts))]
        _raise_first(failure, [other["failure"] for other in everyone])
        if len({other["server"] for other in everyone}) > 1:
            raise ConsilienceError("the ranks hold different servers: all must compute with the same code and numbers")
        shares = [Share.of(other["share"]) for other in everyone]
        counts = [len(one.accepted) for one in shares]
        together = reduce(lambda a, b: a.merge(b, additive), shares)
        together = replace(together, states=share.states, own=share.accepted)
        if not any(counts):
            return together
        teller = next(other for other, count in zip(everyone, counts, strict=True) if count)
        plans = teller["plans"]
        update = self._sum(share.update, plans[0]) if additive else self.rows(share.update, plans[0], counts)
        notes, measures = self.rows(share.numbers, plans[1], counts)
        return replace(together, update=update, notes=notes, measures=measures)

    def deal(self, ids: Tensor, sizes: Tensor) -> list[slice | Tensor]:
        """Every client to its own rank, unless that would have more than its part of the round's examples; such clients
        go to the rank that has the fewest."""
        most = -(-int(sizes.sum()) // self.size)
        loads, hands, others = [0] * self.size, [list[int]() for _ in range(self.size)], []
        for place, (client, size) in enumerate(zip(ids.tolist(), sizes.tolist(), strict=True)):
            home = client % self.size
            if loads[home] + size <= most:
                loads[home] += size
                hands[home].append(place)
            else:
                others.append((place, size))
        for place, size in others:
            least = loads.index(min(loads))
            loads[least] += size
            hands[least].append(place)
        return [torch.tensor(sorted(hand), dtype=torch.int64) for hand in hands]

    def agreed(self, work: Callable[[], T]) -> T:
        done: list[T] = []
        failure = None
        try:
            done.append(work())
        except Exception as error:
            failure = error
        _raise_first(failure, [json.loads(text) for text in self._exchange(json.dumps(_words(failure)))])
        return done[0]

    def told(self, words: list[int]) -> list[list[int]]:
        return [json.loads(text) for text in self._exchange(json.dumps(words))]

    def ask(self, request: dict[str, Any]) -> None:
        self._exchange(json.dumps({"ask": request}))

    def answer_by(self, answer: Callable[[dict[str, Any]], None]) -> None:
        self._answer = answer

    def led(self, work: Callable[[], T]) -> T:
        if not self.leads:
            followed: T = self._follow()
            return followed
        done: list[T] = []
        failure = None
        self.leading = True
        try:
            done.append(work())
        except Exception as error:
            failure = error
        self.leading = False
        self._exchange(json.dumps({"end": [_words(failure), done]}))
        if failure is not None:
            raise failure
        return done[0]

    def _follow(self) -> Any:
        """Answer the requests of rank 0 until it has done its work, and return the result."""
        while "ask" in (said := json.loads(self._exchange("null")[0])):
            assert self._answer is not None  # states ask, and they have set it
            with contextlib.suppress(ConsilienceError):  # rank 0 fails with the same words, and says so at the end
                self._answer(said["ask"])
        words, done = said["end"]
        if words is not None:
            raise _error(words, 0)
        return done[0]

    def any(self, flag: bool) -> bool:
        return any(json.loads(text) for text in self._exchange(json.dumps(flag)))

    def _exchange(self, text: str) -> list[str]:
        mine = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)
        lengths = [int(length) for length in self._gather(torch.tensor([len(mine)]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = mine
        parts = self._gather(padded)
        return [part[:n].numpy().tobytes().decode() for part, n in zip(parts, lengths, strict=True)]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._others_needed():
            dist.all_gather(parts, tensor, group=self._group)
        return parts

    def _sum(self, tree: Tree, plan: dict[str, Any]) -> Tree:
        """Leaf by leaf sum over ranks, in one call for each dtype."""
        zeros = {
            name: torch.zeros(shape, dtype=getattr(torch, dtype), device=on)
            for name, (dtype, shape, on) in plan["leaves"].items()
            if tree is None
        }
        mine, arrays = zeros or dict(leaves(tree)), {}
        for dtype in {kind: None for kind, _, _ in plan["leaves"].values()}:
            parts = {name: what for name, what in plan["leaves"].items() if what[0] == dtype}
            flat = torch.cat([mine[name].reshape(-1) for name in parts])
            with self._others_needed():
                dist.all_reduce(flat, group=self._group)
            pieces = torch.split(flat, [math.prod(shape) for _, shape, _ in parts.values()])
            for (name, (_, shape, _)), piece in zip(parts.items(), pieces, strict=True):
                arrays[name] = piece.view(shape)
        return assemble(plan, arrays)

    def rows(self, tree: Tree, plan: dict[str, Any], counts: list[int]) -> Tree:
        """All ranks' rows, of which this one has counts[rank]: as bytes of any dtype, in one call."""
        widths = {
            name: math.prod(shape[1:]) * getattr(torch, dtype).itemsize
            for name, (dtype, shape, _) in plan["leaves"].items()
        }
        if not plan["leaves"] or not any(counts):
            return assemble(plan, {name: _none(what) for name, what in plan["leaves"].items()})
        on, own = next(on for _, _, on in plan["leaves"].values()), counts[self.rank]
        block = torch.zeros(max(counts), sum(widths.values()), dtype=torch.uint8, device=on)
        if own:
            parts = [leaf.reshape(own, math.prod(leaf.shape[1:])) for _, leaf in leaves(tree)]
            block[:own] = torch.cat([_packed(part).view(torch.uint8) for part in parts], dim=1)
        blocks = self._gather(block)
        whole = torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])
        arrays = {}
        for (name, (dtype, shape, _)), part in zip(
            plan["leaves"].items(), torch.split(whole, [*widths.values()], dim=1), strict=True
        ):
            arrays[name] = _packed(part).view(getattr(torch, dtype)).view(sum(counts), *shape[1:])
        return assemble(plan, arrays)

    @contextmanager
    def _others_needed(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ConsilienceError(
                f"rank {self.rank} waited in vain for the others: one of them has ended (its own message says why), or "
                f"took longer than timeout = {self._timeout:g} seconds"
            ) from error


def fingerprint(tree: Tree) -> int:
    """The sum of all numbers' bits, which does not depend on their order."""
    total = 0
    for _, leaf in leaves(tree):
        total += int(leaf.view(_INTEGERS[leaf.element_size()]).sum(dtype=torch.int64))
    return total


def _packed(tensor: Tensor) -> Tensor:
    """A contiguous copy, also of a single row or column."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _none(what: tuple[str, Sequence[int], str]) -> Tensor:
    """No row of a leaf."""
    dtype, shape, on = what
    return torch.empty(0, *shape[1:], dtype=getattr(torch, dtype), device=on)


def _raise_first(failure: Exception | None, words: list[list[Any] | None]) -> None:
    """Raise this rank's failure, or that of the first rank that has one."""
    if failure is not None:
        raise failure
    for rank, said in enumerate(words):
        if said is not None:
            raise _error(said, rank)


def _words(failure: Exception | None) -> list[Any] | None:
    if isinstance(failure, ClientError):
        return [failure.client, failure.round, failure.stage, failure.reason]
    return None if failure is None else [f"{type(failure).__name__}: {failure}"]


def _error(words: list[Any], rank: int) -> ConsilienceError:
    return ClientError(*words) if len(words) > 1 else ConsilienceError(f"rank {rank} failed: {words[0]}")
