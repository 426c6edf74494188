"""Federation: the clients, and the examples that each of them holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from consilience.core import DataError, keys
from consilience.core.checks import check_type
from consilience.core.display import clip, facts, table
from consilience.core.errors import nearest
from consilience.core.text import plural
from consilience.data.alike import check_alike, joint_name
from consilience.data.dataset import Dataset, Source
from consilience.data.prepared import prepare_tables
from consilience.data.tables import MINIMUM, Preparation, Roles, as_table
from consilience.data.tensors import starts, to_ids
from consilience.data.trees import cat, map_entries

FEW = 10  # clients, or classes, that a notebook shows as a table


@dataclass(frozen=True, eq=False)
class Federation:
    """Client k holds the rows `order[offsets[k]:offsets[k + 1]]` of `data`: two flat tensors for any number of clients.
    The clients' names differ; a client whose name is not known has an empty one.

    With `steps` > 1 it is a stream: in round r a client learns from part (r − 1) mod steps of its rows. All methods
    but `part` refer to all rows.
    """

    data: Dataset
    order: Tensor
    offsets: Tensor
    _: KW_ONLY
    names: tuple[str, ...] | None = None
    how: str = ""
    steps: int = 1

    def __post_init__(self) -> None:
        known = [name for name in self.names or () if name]
        if len(set(known)) < len(known):
            twice = next(name for name, count in Counter(known).items() if count > 1)
            raise DataError(f"{self.data.name}: two clients have the same name, {twice!r}: give every client its own")
        if self.names is not None and len(self.names) != len(self):
            raise DataError(f"{self.data.name}: {plural(len(self.names), 'name')} for {plural(len(self), 'client')}")

    @classmethod
    def from_owner(
        cls,
        data: Source,
        owner: Tensor | npt.ArrayLike,
        *,
        names: Sequence[str] | None = None,
        clients: int | None = None,
        how: str = "",
    ) -> Federation:
        """A federation from the client id of every example: 0, 1, …"""
        data = Dataset.of(data)
        owner, names = to_ids(owner, f"{data.name}: owners"), None if names is None else tuple(map(str, names))
        if len(owner) != len(data):
            raise DataError(f"{len(owner)} owners for the {len(data)} examples of {data.name}")
        if not (clients or names or len(owner)):
            raise DataError(f"{data.name} has no examples: pass the number of clients or their names")
        count = clients or len(names or ()) or int(owner.max()) + 1
        if len(owner) and not 0 <= int(owner.min()) <= int(owner.max()) < count:
            raise DataError(f"owners must lie in 0..{count - 1}, found {int(owner.min())}..{int(owner.max())}")
        sizes = torch.bincount(owner, minlength=count)
        offsets = starts(sizes)
        return cls(data, owner.argsort(stable=True), offsets, names=names, how=how)

    @classmethod
    def from_silos(cls, silos: Mapping[str, Source] | Sequence[Source], *, how: str = "silos") -> Federation:
        """A federation from one data set a client, by name, with the same classes, scales and shape of an example. The
        clients of a list have numbers instead of names. The joint data have the name that all silos' data have in
        common; otherwise they are named after up to four silos, or by the number of silos."""
        if not isinstance(silos, Mapping | list | tuple):
            raise DataError(f"from_silos takes a dict of data sets by name, or a list, not a {type(silos).__name__}")
        names = tuple(map(str, silos)) if isinstance(silos, Mapping) else None
        parts = [Dataset.of(silo) for silo in (silos.values() if isinstance(silos, Mapping) else silos)]
        check_alike(dict(zip(names or map(str, range(len(parts))), parts, strict=True)))
        x, y = (map_entries(lambda *each: cat(*each), *(getattr(part, name) for part in parts)) for name in "xy")
        note = parts[0].note if len({part.note for part in parts}) == 1 else ""
        data = replace(parts[0], x=x, y=y, groups={}, group_names={}, name=joint_name(parts, names), note=note)
        owner = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(part) for part in parts]))
        return cls.from_owner(data, owner, names=names, clients=len(parts), how=how)

    @classmethod
    def from_tables(
        cls,
        tables: Mapping[str, Any],
        *,
        target: str | Sequence[str] = "target",
        features: Sequence[str] | None = None,
        ignore: Sequence[str] = (),
        categorical: Sequence[str] = (),
        missing: Sequence[str] = (),
        numbers: bool = False,
        minimum: int = MINIMUM,
        preparation: Preparation | None = None,
    ) -> Federation:
        """A federation from one table a client, by name: data frames (pandas, polars, pyarrow) or paths of CSV files,
        with gaps, categories and columns that some lack. Each client sums up its table, and all use the preparation
        that follows from these sums (docs/tables.md), or a `preparation` that was agreed before.

        `target` is the column to predict; two columns are a time and an event, for `cs.Cox`. `features` are the columns
        to predict from, by default all others but those to `ignore`. `categorical` are columns of numbers that are
        codes, and `missing` marks of missing cells, such as -9, beside the usual ones. Whole numbers in the target are
        classes, or with `numbers` real. Categories with fewer than `minimum` rows at all clients together are counted
        as one."""
        if not isinstance(tables, Mapping):
            raise DataError(f"from_tables takes a dict of tables by name, not a {type(tables).__name__}")
        named = {str(name): as_table(table, f"the table of {name}") for name, table in tables.items()}
        how: dict[str, Any] = {"features": features, "ignore": ignore, "categorical": categorical}
        roles = Roles.of(target, **how, missing=missing, numbers=numbers, minimum=minimum)
        return cls.from_silos(prepare_tables(named, roles, preparation), how="tables")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        how = f", {clip(self.how)}" if self.how else ""
        held = f"{plural(len(self), 'client')}, {plural(self.examples, 'example')}"
        return f"Federation({clip(self.data.name, 60)}: {held}{how})"

    def _repr_html_(self) -> str:
        sizes, few = self.sizes, ", ".join(map(self.name, range(min(len(self), FEW))))
        between = f"{int(sizes.min()):,} to {int(sizes.max()):,} a client" if len(self) else ""
        about = [
            ("clients", f"{len(self):,}" + (f": {few}{', …' if len(self) > FEW else ''}" if self.names else "")),
            ("examples", f"{self.examples:,}, {between}"),
            ("split", self.how),
        ]
        return facts(f"Federation of {self.data.name}", about) + self._label_table()

    def _label_table(self) -> str:
        counts = self.label_counts() if 0 < len(self) <= FEW and len(self.data.classes) <= FEW else None
        if counts is None or not 0 < counts.shape[1] <= FEW:
            return ""
        classes = self.data.classes or tuple(map(str, range(counts.shape[1])))
        rows = [[self.name(k), *(f"{n:,}" for n in row)] for k, row in enumerate(counts.tolist())]
        return table(["client", *classes], rows)

    @cached_property
    def sizes(self) -> Tensor:
        """Examples of each client, [clients]."""
        return self.offsets.diff()

    @cached_property
    def largest(self) -> int:
        """Examples of the largest client."""
        return int(self.sizes.max())

    @property
    def examples(self) -> int:
        """Examples of all clients together."""
        return len(self.order)

    def name(self, client: int) -> str:
        """A client's name in logs and tables: its number if it has none."""
        return str(client) if self.names is None else self.names[client]

    def number(self, client: int | str) -> int:
        """A client's number, by its name or its number; a DataError if there is no such client."""
        check_type("client", client, int | str)
        if isinstance(client, str):
            names = [self.name(k) for k in range(len(self))]
            if client not in names:
                raise DataError(f"there is no client {client!r}; {clip(nearest(client, names), 300)}")
            return names.index(client)
        if not 0 <= client < len(self):
            raise DataError(f"there is no client {client}: clients have numbers 0..{len(self) - 1}")
        return client

    def indices(self, client: int) -> Tensor:
        """The rows of `data` that a client holds."""
        return self.order[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def client(self, client: int | str) -> Dataset:
        """The examples of a client, by its number or its name."""
        return self.data[self.indices(self.number(client))]

    def owner(self) -> Tensor:
        """The client of every example, in the order of `order`."""
        return torch.arange(len(self)).repeat_interleave(self.sizes)

    def label_counts(self, first: int | None = None) -> Tensor | None:
        """Examples of each class at each client, or at the `first` clients, [clients, classes]; None without class
        labels."""
        if self.data.labels is None:
            return None
        sizes = self.sizes[:first]
        y = self.data.labels[self.order[: int(sizes.sum())]].cpu()  # where the owners are
        classes = len(self.data.classes) or int(self.data.labels.max()) + 1
        owner = torch.arange(len(sizes)).repeat_interleave(sizes)
        return torch.bincount(owner * classes + y, minlength=len(sizes) * classes).view(len(sizes), classes)

    def part(self, clients: Tensor, round: int) -> tuple[Tensor, Tensor]:
        """(offsets, sizes) of what `clients` hold in a round: part p of n examples has n // steps + (p < n % steps)."""
        # Monotone in n: clients sorted by all that they have, as a cohort's are, are sorted by any of their parts too.
        n, p = self.sizes[clients], (round - 1) % self.steps
        each, rest = n // self.steps, n % self.steps
        return self.offsets[clients] + p * each + rest.clamp(max=p), each + (p < rest)

    def stream(self, steps: int, *, seed: int = 0) -> Federation:
        """The same clients and examples as a stream: every client's rows are shuffled and cut into `steps` parts of
        equal size (up to one), and in round r it has part (r − 1) mod steps. One step makes all rows available."""
        if steps < 1:
            raise DataError(f"steps must be at least 1, got {steps}")
        order = self.order if steps == 1 else self.order[self._shuffle(seed, "stream")]
        return replace(self, order=order)._in_steps(steps)._long_enough()

    def pooled(self) -> Federation:
        """All examples at one client, as a bound to compare with.

        A stream stays a stream. In a round the client has the union of all clients' parts, if these unions are of equal
        size (up to one), as the parts of one client must be; otherwise all examples are shuffled anew, with seed 0."""
        offsets = torch.tensor([0, self.examples])
        pooled = replace(self, offsets=offsets, names=("pooled",), how=f"{self.how}, pooled")
        if self.steps == 1:
            return pooled
        rounds, clients = range(1, self.steps + 1), torch.arange(len(self))
        sizes = torch.stack([self.part(clients, round)[1] for round in rounds], dim=1)  # [clients, steps]
        unions = sizes.sum(0)
        if int(unions.max() - unions.min()) > 1:
            return replace(pooled, order=self.order[pooled._shuffle(0, "stream")])
        step = torch.arange(self.steps).repeat(len(self)).repeat_interleave(sizes.flatten())
        return replace(pooled, order=self.order[step.argsort(stable=True)])

    def split(self, share: float, *, seed: int = 0) -> tuple[Federation, Federation]:
        """Hold out `share` of every client's examples (rounded down): (kept, held out), same clients. If this is a
        stream, the kept part is a stream of as many steps, and the held-out part is not."""
        if not 0 < share < 1:
            raise DataError(f"the share to hold out must lie between 0 and 1, got {share}")
        owner = self.owner()
        shuffled = self._shuffle(seed, "split")
        position = torch.arange(self.examples) - self.offsets[owner]
        held = position < (self.sizes * share).long()[owner]
        parts = []
        for chosen in (~held, held):
            sizes = torch.bincount(owner[chosen], minlength=len(self))
            offsets = starts(sizes)
            parts.append(replace(self, order=self.order[shuffled[chosen]], offsets=offsets))
        return parts[0]._long_enough(), parts[1]._in_steps(1)

    def to(self, device: torch.device | str) -> Federation:
        """The same federation with its examples on `device`; offsets stay on the host."""
        return replace(self, data=self.data.to(device), order=self.order.to(device))

    def _shuffle(self, seed: int, purpose: str) -> Tensor:
        """Places in `order`, shuffled within each client."""
        ticket = keys.uniform(keys.key(seed, purpose=purpose).view(1), self.examples)[0]
        return (self.owner() + ticket).argsort()

    def _in_steps(self, steps: int) -> Federation:
        how = self.how.replace(f", in {self.steps} steps", "") + (f", in {steps} steps" if steps > 1 else "")
        return replace(self, steps=steps, how=how)

    def _long_enough(self) -> Federation:
        short = (self.sizes < self.steps).nonzero().flatten().tolist()
        if short and self.steps > 1:
            who, n = self.name(short[0]), int(self.sizes[short[0]])
            raise DataError(
                f"a stream of {self.steps} steps needs as many examples of every client, "
                f"but {len(short)} of {len(self)} have fewer, among them {who!r} with {n}"
            )
        return self
