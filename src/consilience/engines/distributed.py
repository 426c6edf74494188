"""Several processes, each on its own GPU or core: ranks that torchrun starts share the clients of every round."""

import atexit
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import reduce
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from consilience.core import ClientError, ConfigError, ConsilienceError, Count, Positive, check_types
from consilience.core.records import Tree, assemble, blueprint, leaves
from consilience.engines.ranks import Ranks
from consilience.engines.simulator import Precision, Simulator
from consilience.engines.work import Share

T = TypeVar("T")
log = logging.getLogger("consilience")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Distributed:
    """The simulator under `torchrun`: every rank computes its part of a round's clients, on its own GPU or on a CPU,
    and updates are all-reduced. Results equal the simulator's up to rounding. `secure` is the simulator's.

    All ranks run the same script with the same seeds. Each holds all data, the server and all client states. Rank 0
    alone writes, evaluates and calls callbacks; `leads` is True there. All ranks must see the run's directory. If one
    ends, or does not answer for `timeout` seconds, the others end too. It has not been run on several GPUs yet.
    """

    device: Literal["cpu", "cuda"] | None = None
    chunk: Count | None = None
    threads: Count | None = None
    compile: bool | None = None
    precision: Precision = "float32"
    secure: bool = False
    timeout: Positive = 1800.0

    def __post_init__(self) -> None:
        check_types(self)

    def _simulator(self, device: str | None) -> Simulator:
        return Simulator(device, self.chunk, 1, self.threads, self.compile, self.precision, self.secure)

    @property
    def leads(self) -> bool:
        return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0

    @contextmanager
    def started(self) -> Iterator[tuple[Simulator, Ranks]]:
        if not dist.is_initialized() and not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ConfigError(
                "Distributed runs in processes that torchrun starts: torchrun --nproc-per-node 2 script.py, or "
                "torchrun --no-python --nproc-per-node 2 consilience run config.toml --set engine.name=Distributed"
            )
        device = self._own_device()
        ranks, level = Together(_group(device, timedelta(seconds=self.timeout)), self.timeout), log.level
        if not ranks.leads:
            log.setLevel(logging.ERROR)  # the same message is logged once
        try:
            yield self._simulator(device), ranks
        finally:
            log.setLevel(level)
            ranks.leave()

    def _own_device(self) -> str:
        if (self.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
            return "cpu"
        number, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if number >= there:
            raise ConfigError(f"rank {number} of this machine has no GPU of its own, as there are {there}: start fewer")
        torch.cuda.set_device(number)  # "cuda" now means this one
        return f"cuda:{number}"


def _group(device: str, timeout: timedelta) -> dist.ProcessGroup:
    """A group of all processes, for one run. Host bytes go through gloo, GPU tensors through NCCL. The world group
    stays until the process ends: a second one at the same address would read the first one's keys."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=timeout)
            atexit.register(_leave)
        group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise ConsilienceError(f"the ranks did not find each other: {str(error).splitlines()[0]}") from error
    return group


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Together(Ranks):
    """Processes of one group. Facts travel as JSON, tensors as they are; nothing is pickled."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = group

    def leave(self) -> None:
        """End this rank's part, so that ranks that wait for it get an error. The group is dropped too: a run that the
        user keeps would keep its threads."""
        dist.destroy_process_group(self._group)
        self._group = None

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
            "plans": [blueprint(tree) for tree in (share.update, share.states, share.numbers)],
        }
        everyone = [json.loads(text) for text in self._exchange(json.dumps(facts))]
        if failure is not None:
            raise failure
        for rank, words in enumerate(other["failure"] for other in everyone):
            if words is not None:
                raise _error(words, rank)
        if len({other["server"] for other in everyone}) > 1:
            raise ConsilienceError("the ranks hold different servers: all must compute with the same code and numbers")
        shares = [Share.of(other["share"]) for other in everyone]
        counts = [len(one.accepted) for one in shares]
        together = reduce(lambda a, b: a.merge(b, additive), shares)
        if not any(counts):
            return together
        teller = next(other for other, count in zip(everyone, counts, strict=True) if count)
        plans = teller["plans"]
        update = self._sum(share.update, plans[0]) if additive else self._rows(share.update, plans[0], counts)
        states = self._rows(share.states, plans[1], counts)
        notes, measures = self._rows(share.numbers, plans[2], counts)
        return replace(together, update=update, states=states, notes=notes, measures=measures)

    def led(self, work: Callable[[], T]) -> T:
        done: list[T] = []
        failure = None
        if self.leads:
            try:
                done.append(work())
            except Exception as error:
                failure = error
        words, told = json.loads(self._exchange(json.dumps([_words(failure), done]))[0])
        if failure is not None:
            raise failure
        if words is not None:
            raise _error(words, 0)
        return done[0] if self.leads else told[0]

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

    def _rows(self, tree: Tree, plan: dict[str, Any], counts: list[int]) -> Tree:
        """All ranks' rows, of which this one has counts[rank]: as bytes of any dtype, in one call."""
        widths = {
            name: math.prod(shape[1:]) * getattr(torch, dtype).itemsize
            for name, (dtype, shape, _) in plan["leaves"].items()
        }
        if not plan["leaves"]:
            return assemble(plan, {})
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


def _words(failure: Exception | None) -> list[Any] | None:
    if isinstance(failure, ClientError):
        return [failure.client, failure.round, failure.stage, failure.reason]
    return None if failure is None else [f"{type(failure).__name__}: {failure}"]


def _error(words: list[Any], rank: int) -> ConsilienceError:
    return ClientError(*words) if len(words) > 1 else ConsilienceError(f"rank {rank} failed: {words[0]}")
