"""The roster: who takes part in an experiment, as the server knows it. It has names and numbers, and no data."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

import torch
from pydantic import ValidationError

from consilience.core.errors import CheckpointError, DataError
from consilience.core.files import write_atomically
from consilience.data.dataset import Dataset
from consilience.data.federation import Federation
from consilience.flower.letters import Facts, Introduction

log = logging.getLogger("consilience")
FILE = "roster.json"
PLAUSIBLE = 100  # times the median number of examples: more than that nobody is believed to have


class Member(Facts):
    """A site and what it counts for."""

    name: str
    examples: int


class Roster(Facts):
    """The members of an experiment in the order of their names, which is the order of clients; what an example looks
    like everywhere; and the number of the server's last start."""

    experiment: str
    start: int
    members: list[Member]
    x: tuple[str, list[int]]
    y: tuple[str, list[int]]

    @classmethod
    def of(cls, introductions: Iterable[Introduction], most: int | None = None) -> Roster:
        """A new experiment of those who introduced themselves. Nobody counts for more than `most` examples, a hundred
        times the median of all when None: a claim beyond is cut, and named."""
        sites = sorted(introductions, key=lambda site: site.name)
        first, most = sites[0], most or PLAUSIBLE * median_low(site.examples for site in sites)
        for site in sites:
            if (site.x, site.y) != (first.x, first.y):
                raise DataError(
                    f"{site.name!r} holds other data than {first.name!r}: an example is {_looks(site)} there and "
                    f"{_looks(first)} here"
                )
            if site.examples > most:
                log.warning("%r claims %d examples: it counts for max_examples = %d", site.name, site.examples, most)
        members = [Member(name=site.name, examples=min(site.examples, most)) for site in sites]
        return cls(experiment=secrets.token_hex(8), start=0, members=members, x=first.x, y=first.y)

    @classmethod
    def read(cls, folder: Path) -> Roster | None:
        """The roster of a run's directory, if there is one."""
        path = folder / FILE
        if not path.exists():
            return None
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise CheckpointError(f"{path} is no roster: {error}") from error

    def started(self, folder: Path) -> Roster:
        """The roster for a start, written down before anybody hears of it. Starts are numbered by the clock, so that
        none has the number of another that a restored backup knows nothing of."""
        folder.mkdir(parents=True, exist_ok=True)
        again = self.model_copy(update={"start": max(self.start + 1, int(time.time()))})
        write_atomically(folder / FILE, again.model_dump_json(indent=1))
        return again

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names."""
        return tuple(member.name for member in self.members)

    def federation(self, name: str, classes: tuple[str, ...] = ()) -> Federation:
        """The federation as the server sees it: names and numbers of examples, and one example of zeros, by which
        shapes are known."""
        (x, x_shape), (y, y_shape) = self.x, self.y
        blank = Dataset(
            torch.zeros(1, *x_shape, dtype=getattr(torch, x)),
            torch.zeros(1, *y_shape, dtype=getattr(torch, y)),
            classes=classes,
            name=name,
        )
        sizes = torch.tensor([member.examples for member in self.members])
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        order = torch.zeros(1, dtype=torch.int64)
        return Remote(blank, order, offsets, names=self.names, how="every client at its own site")


@dataclass(frozen=True, eq=False)
class Remote(Federation):
    """A federation whose examples are elsewhere: there is no order of them here, and of labels nothing is known."""

    @property
    def examples(self) -> int:
        """As many as the sites say."""
        return int(self.offsets[-1])

    def label_counts(self) -> None:
        """Nobody has told."""
        return None


def _looks(site: Introduction) -> str:
    return " and ".join(f"{dtype} {'×'.join(map(str, shape)) or 'number'}" for dtype, shape in (site.x, site.y))
