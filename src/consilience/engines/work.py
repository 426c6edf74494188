"""A share of a round: the computation of a group of clients, the same in every engine."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.core import ClientError, ConsilienceError, RecordError, guards
from consilience.core.records import Addressed, Tree, add, leaves, nbytes, rows, to, tree_map
from consilience.data.cohort import Cohort
from consilience.secure import Encoding
from consilience.tasks.task import Task


@dataclass
class Share:
    """The result of a group of clients. `update` is summed over accepted clients for additive methods, else it has
    a row for each of `accepted`; `states`, `notes` and `measures` have a row for each of `accepted`. Where sums are
    secure, `update` holds integers until the round is complete."""

    update: Tree = None
    states: Tree = None
    accepted: list[int] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)
    notes: dict[str, Tensor] = field(default_factory=dict)
    measures: dict[str, Tensor] = field(default_factory=dict)
    guards: dict[str, int] = field(default_factory=dict)
    bytes_up: int = 0
    own: list[int] | None = None
    """The accepted clients to whom `states` belong, where ranks share a round; None for all of them."""

    @property
    def kept(self) -> list[int]:
        """The accepted clients to whom `states` belong."""
        return self.accepted if self.own is None else self.own

    def merge(self, other: Share, additive: bool) -> Share:
        if not other.accepted:
            update, states, numbers = self.update, self.states, self.numbers
        elif not self.accepted:
            update, states, numbers = other.update, other.states, other.numbers
        else:
            update = add(self.update, other.update) if additive else _join(self.update, other.update)
            states, numbers = _join((self.states, self.numbers), (other.states, other.numbers))
        counts = {g: self.guards.get(g, 0) + other.guards.get(g, 0) for g in {**self.guards, **other.guards}}
        accepted, rejected = self.accepted + other.accepted, self.rejected | other.rejected
        return Share(update, states, accepted, rejected, *numbers, counts, self.bytes_up + other.bytes_up)

    @property
    def numbers(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The notes and the measures, which are on the host."""
        return self.notes, self.measures

    def facts(self) -> dict[str, Any]:
        return {
            "accepted": self.accepted,
            "rejected": list(self.rejected.items()),
            "guards": self.guards,
            "bytes_up": self.bytes_up,
        }

    @classmethod
    def of(cls, facts: dict[str, Any], update: Tree = None, states: Tree = None, numbers: Tree = ({}, {})) -> Share:
        """A share from its facts and, if they are here, its tensors."""
        notes, measures = numbers
        rejected = dict(facts["rejected"])
        return cls(update, states, facts["accepted"], rejected, notes, measures, facts["guards"], facts["bytes_up"])


def _join(a: Tree, b: Tree) -> Tree:
    return tree_map(lambda x, y: torch.cat([x, y]), a, b)


def chunks(ids: Tensor, size: int) -> Iterator[slice]:
    """Consecutive groups of at most `size`."""
    return (slice(start, start + size) for start in range(0, len(ids), size))


def compute(
    algorithm: Algorithm,
    task: Task,
    message: Tree,
    states: Tree,
    cohort: Cohort,
    keep: torch.device | str = "cpu",
    encoding: Encoding | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Share:
    """Run `local` for a cohort, reject the clients with values that are not finite, and sum the other updates. New
    states go to the device `keep`. With an `encoding`, the sum is that of the updates' integers, and clients whose
    updates are out of its bounds are rejected too. `meanwhile` is called before the host waits for the device.

    Rejected rows are dropped by selection: 0 · NaN is NaN, so a weight of zero would not do."""
    message, states = to((message, states), task.device)
    with guards.watch() as counts:
        update, new_states = work_of(algorithm, task, message, states, cohort)
    up, accepted, n = nbytes(update), cohort.ids.tolist(), cohort.n
    total = _sum(update)
    finite = _finite((total, _sum(new_states)))
    if meanwhile is not None:
        meanwhile()
    notes, counts, finite = _on_host((_by_client(cohort.notes, len(cohort)), counts, finite))
    rejected: dict[int, str] = {}
    if encoding is not None:
        rejected = {accepted[row]: reason for row, reason in encoding.beyond(update).items()}
    if not finite:
        rejected |= _not_finite(update, new_states, cohort)
    if rejected:
        kept = torch.tensor([i for i, c in enumerate(accepted) if c not in rejected], dtype=torch.int64)
        accepted = [accepted[i] for i in kept.tolist()]
        at, notes = kept.to(task.device), rows(notes, kept)
        message, (states, update, new_states, n) = part_of(message, at), rows((states, update, new_states, n), at)
        total = _sum(update)
    if encoding is not None:
        total = _sum(encoding.encode(update))
    measures = algorithm.measures(message, states, update, n=n, round_size=cohort.round_size, examples=cohort.examples)
    measures = _on_host(_by_client(measures, len(accepted)))
    acted = {key: int(value) for key, value in counts.items() if value}
    fused = total if algorithm.additive else update
    return Share(fused, to(new_states, keep), accepted, rejected, notes, measures, acted, up)


def work_of(algorithm: Algorithm, task: Task, message: Tree, states: Tree, cohort: Cohort) -> tuple[Tree, Tree]:
    """(updates, new states) of a cohort, by `local`; an error of it names the clients."""
    try:
        update, new_states = algorithm.local(task, message, states, cohort)
    except (ConsilienceError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        name = cohort.federation.name
        who = ", ".join(name(int(c)) for c in cohort.ids[:3]) + (", …" if len(cohort) > 3 else "")
        raise ClientError(who, cohort.round, "local", _why(error, len(cohort))) from error
    check_rows(update, len(cohort), "local", "update's ")
    check_rows(new_states, len(cohort), "local", "new state's ")
    return update, new_states


def _sum(rows: Tree) -> Tree:
    return tree_map(lambda leaf: leaf.sum(0), rows)


def _by_client(numbers: dict[str, Tensor], clients: int) -> dict[str, Tensor]:
    """One number for each of the clients, [K]."""
    return {name: values.detach().reshape(clients) for name, values in numbers.items()}


def _on_host(numbers: Tree) -> Tree:
    """Small tensors on the host, which waits for the device once."""
    near = tree_map(lambda leaf: leaf.to("cpu", non_blocking=True), numbers)
    if any(leaf.device.type != "cpu" for _, leaf in leaves(numbers)):
        torch.accelerator.synchronize()
    return near


def refused_clients(algorithm: Algorithm, server: Tree, share: Share) -> dict[int, str]:
    """The clients of a whole round whose updates the method refuses, and why."""
    refused = algorithm.refusals(server, share.update, share.measures) if share.accepted else {}
    return {share.accepted[row]: reason for row, reason in refused.items()}


def check_rows(tree: Tree, clients: int, function: str, what: str = "") -> None:
    """Raise an error if the result of an algorithm's `function` does not have a row for each client."""
    for name, leaf in leaves(tree):
        if not leaf.dim() or len(leaf) != clients:
            raise RecordError(
                f"{function} must return a row for each of the {clients} clients, but its {what}{name} has shape "
                f"{tuple(leaf.shape)}"
            )


def _why(error: Exception, clients: int) -> str:
    """The error's own words, and advice where torch cannot compute several clients at once."""
    if not any(Path(frame.f_code.co_filename).name == "vmap.py" for frame, _ in traceback.walk_tb(error.__traceback__)):
        return f"{type(error).__name__}: {error}"
    if clients > 1:
        return f"{in_short(error)}; not every module can be computed for several clients at once: set chunk = 1"
    return (
        f"{in_short(error)}; this method needs gradients of single examples, or second derivatives, which torch cannot "
        "take of every layer: choose another method or other layers"
    )


def in_short(error: BaseException) -> str:
    """An error's type and first sentence."""
    return f"{type(error).__name__}: {str(error).partition('. ')[0].rstrip('.')}"


def _finite(sums: Tree) -> Tensor:
    """Whether sums over clients are finite, a number on their device. If they are, so is every client's term."""
    flags = [leaf.isfinite().all() for _, leaf in leaves(sums)]
    return torch.stack(flags).all() if flags else torch.tensor(True)


def _not_finite(update: Tree, states: Tree, cohort: Cohort) -> dict[int, str]:
    """The clients with a number that is not finite, and the first field where it is."""
    fields = [("update", *named) for named in leaves(update)] + [("state", *named) for named in leaves(states)]
    fine = torch.stack([leaf.reshape(len(cohort), -1).isfinite().all(1) for _, _, leaf in fields])
    rejected = {}
    for k in (~fine.all(0)).nonzero().flatten().tolist():
        kind, name, _ = fields[int((~fine[:, k]).nonzero()[0])]
        rejected[int(cohort.ids[k])] = f"its {kind}'s {name} is not finite"
    return rejected


def part_of(message: Tree, index: slice | Tensor) -> Tree:
    """The part of a message for some of its clients."""
    return Addressed(message.shared, rows(message.own, index)) if isinstance(message, Addressed) else message
