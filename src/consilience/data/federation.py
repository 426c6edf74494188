"""Federation: who holds which examples of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from consilience import keys
from consilience.data.dataset import Dataset
from consilience.errors import DataError


@dataclass(frozen=True, eq=False)
class Federation:
    """Client k holds the rows `order[offsets[k]:offsets[k + 1]]` of `data`: two flat tensors,
    so a hundred thousand clients cost no more than their examples."""

    data: Dataset
    order: Tensor
    offsets: Tensor
    names: tuple[str, ...] | None = None
    how: str = ""

    @classmethod
    def from_owner(
        cls, data: Dataset, owner: Tensor, names: Sequence[str] | None = None, clients: int | None = None, how: str = ""
    ) -> Federation:
        """From the client id of every example: an exact partition by construction."""
        if len(owner) != len(data):
            raise DataError(f"{len(owner)} owners for the {len(data)} examples of {data.name}")
        count = clients or len(names or ()) or int(owner.max()) + 1
        if len(owner) and not 0 <= int(owner.min()) <= int(owner.max()) < count:
            raise DataError(f"owners must lie in 0..{count - 1}, found {int(owner.min())}..{int(owner.max())}")
        sizes = torch.bincount(owner, minlength=count)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        return cls(data, owner.argsort(stable=True), offsets, None if names is None else tuple(names), how)

    @classmethod
    def from_silos(cls, silos: dict[str, Dataset], how: str = "silos") -> Federation:
        """From one data set a client, by name."""
        first = next(iter(silos.values()))
        data = replace(
            first,
            x=torch.cat([silo.x for silo in silos.values()]),
            y=torch.cat([silo.y for silo in silos.values()]),
            groups={},
            group_names={},
        )
        sizes = torch.tensor([len(silo) for silo in silos.values()])
        owner = torch.arange(len(silos)).repeat_interleave(sizes)
        return cls.from_owner(data, owner, tuple(silos), how=how)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> Tensor:
        """Examples of each client, [clients]."""
        return self.offsets.diff()

    @property
    def examples(self) -> int:
        """Examples of all clients together."""
        return len(self.order)

    def name(self, client: int) -> str:
        """What a client is called in logs and tables."""
        return str(client) if self.names is None else self.names[client]

    def indices(self, client: int) -> Tensor:
        """The rows of `data` that a client holds."""
        return self.order[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def client(self, client: int) -> Dataset:
        """A client's examples as a data set of their own."""
        return self.data.subset(self.indices(client))

    def owner(self) -> Tensor:
        """The client of every example, in the order of `order`."""
        return torch.arange(len(self)).repeat_interleave(self.sizes)

    def label_counts(self) -> Tensor | None:
        """Examples of each class at each client, [clients, classes]; None without class labels."""
        y = self.data.y[self.order]
        if y.dim() != 1 or y.is_floating_point():
            return None
        classes = len(self.data.classes) or int(self.data.y.max()) + 1
        return torch.bincount(self.owner() * classes + y, minlength=len(self) * classes).view(len(self), classes)

    def pooled(self) -> Federation:
        """The same examples at one client: what nobody may do in practice, and the bound to compare with."""
        return replace(self, offsets=torch.tensor([0, self.examples]), names=("pooled",), how=f"{self.how}, pooled")

    def split(self, share: float, seed: int = 0) -> tuple[Federation, Federation]:
        """Hold out `share` of every client's examples (rounded down): (kept, held out), same clients."""
        if not 0 < share < 1:
            raise DataError(f"the share to hold out must lie between 0 and 1, got {share}")
        ticket = keys.uniform(keys.key(seed, purpose="split").view(1), self.examples)[0]
        owner = self.owner()
        shuffled = (owner + ticket).argsort()
        position = torch.arange(self.examples) - self.offsets[owner]
        held = position < (self.sizes * share).long()[owner]
        parts = []
        for chosen in (~held, held):
            sizes = torch.bincount(owner[chosen], minlength=len(self))
            offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
            parts.append(replace(self, order=self.order[shuffled[chosen]], offsets=offsets))
        return parts[0], parts[1]

    def to(self, device: torch.device | str) -> Federation:
        """The same federation with its examples on `device`; offsets stay on the host."""
        return replace(self, data=self.data.to(device), order=self.order.to(device))
