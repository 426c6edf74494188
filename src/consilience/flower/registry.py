"""The registry of an experiment: its sites, and which of them take part, as the server stores it.

The server and the commands `consilience flower admit | remove | forget` change it while a run goes on. The server looks
at it before every round.
"""

from __future__ import annotations

import fcntl
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from consilience.core.errors import CheckpointError, ConfigError, RecordError, nearest
from consilience.core.files import read_file, write_atomically
from consilience.core.records import Tree
from consilience.core.seals import seal_json, unseal_json
from consilience.data import Dataset, Federation
from consilience.data.ragged import Ragged
from consilience.data.tables import Preparation
from consilience.data.tensors import starts
from consilience.data.trees import Entry
from consilience.flower.messages import MANY, EntryForm, Name, Payload, RaggedForm, SiteInfo, TreeForm
from consilience.flower.updates import most_examples

log = logging.getLogger("consilience")
FILE, LOCK = "sites.json", ".sites.lock"
LENGTH = 16  # of rows of different lengths in the server's example of zeros


class Member(Payload):
    """A site and the number of examples for which it counts.

    "active" sites take part. A "removed" one does not, and its part in the server's state stays. The part of a
    "leaving" one is to be taken out, with `estimated` by an estimate where only the site knows it; that of a
    "forgotten" one is out. `founding` is the number of examples when the run began; None for a site that joined
    later."""

    name: str
    examples: int
    founding: int | None = None
    status: Literal["active", "removed", "leaving", "forgotten"] = "active"
    estimated: bool = False


class Registry(Payload):
    """The sites of an experiment in the order of clients: those with which it began by their names, then others in the
    order in which they joined. `invited` sites join as soon as they are online. All examples have the form of `x` and
    `y`. `start` is the number of the server's last start."""

    experiment: str
    start: int
    members: list[Member]
    x: TreeForm
    y: TreeForm
    invited: Annotated[list[Name], Field(max_length=MANY)] = Field(default=[])

    @classmethod
    def of(cls, sites: Iterable[SiteInfo], max_examples: int | None = None) -> Registry:
        """A new experiment of these sites, whose examples have the same form. A site with more than `max_examples`, by
        default `most_examples` of all, counts for `max_examples`, and the log names it."""
        members = sorted(sites, key=lambda site: site.name)
        first, most = members[0], max_examples or most_examples(site.examples for site in members)
        for site in members:
            if site.examples > most:
                log.warning("%r claims %d examples: it counts for max_examples = %d", site.name, site.examples, most)
        sizes = [min(site.examples, most) for site in members]
        counted = [Member(name=site.name, examples=n, founding=n) for site, n in zip(members, sizes, strict=True)]
        return cls(experiment=secrets.token_hex(8), start=0, members=counted, x=first.x, y=first.y)

    @classmethod
    def read(cls, folder: Path) -> Registry | None:
        path = folder / FILE
        if not path.exists():
            return None
        try:
            return cls.model_validate_json(json.dumps(unseal_json(read_file(path))))
        except (OSError, RecordError, ValidationError) as error:
            raise CheckpointError(
                f"{path} is damaged: restore it from a backup, or choose another directory for a new run ({error})"
            ) from error

    def started(self, folder: Path) -> Registry:
        """The registry with the number of a new start, written to `folder`, which the caller has locked. The number
        follows the clock, so that it differs from those of starts that a restored backup does not know."""

        def again(stored: Registry) -> Registry:
            if stored.experiment != self.experiment:
                raise CheckpointError(
                    f"another server has begun a run in {folder} meanwhile: run the app again to resume that run, or "
                    "choose another directory"
                )
            return stored.model_copy(update={"start": max(stored.start + 1, int(time.time()))})

        folder.mkdir(parents=True, exist_ok=True)
        return change_registry(folder, again, first=self)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def taking_part(self) -> list[int]:
        """The clients that may be asked for an update: the active ones, and those that take their part out."""
        return [client for client, member in enumerate(self.members) if member.status in ("active", "leaving")]

    @property
    def active(self) -> tuple[str, ...]:
        """The names of the active sites."""
        return tuple(member.name for member in self.members if member.status == "active")

    def client(self, name: str) -> int:
        """The number of a site; a ConfigError if it is none of this run."""
        if name not in self.names:
            raise ConfigError(f"{name!r} is not a site of this run; {nearest(name, self.names)}")
        return self.names.index(name)

    def uninvited(self, name: str) -> Registry:
        """The registry without an invitation."""
        return self.model_copy(update={"invited": [other for other in self.invited if other != name]})

    def with_member(self, name: str, **changes: Any) -> Registry:
        """The registry with another entry for a site, at the end if it is a new one. It is not invited any more."""
        client = self.names.index(name) if name in self.names else len(self.members)
        old = self.members[client] if client < len(self.members) else Member(name=name, examples=0)
        members = [*self.members[:client], old.model_copy(update=changes), *self.members[client + 1 :]]
        return self.uninvited(name).model_copy(update={"members": members})

    def founding(self) -> Registry:
        """The registry as it was when the run began, which the stored run must match."""
        began = [
            Member(name=member.name, examples=member.founding, founding=member.founding)
            for member in self.members
            if member.founding is not None
        ]
        return self.model_copy(update={"members": began, "invited": []})

    def federation(
        self, name: str, classes: tuple[str, ...] = (), preparation: Preparation | None = None
    ) -> RemoteFederation:
        """The federation as the server knows it: names, numbers of examples, and one example of zeros for the
        shapes."""
        zeros = Dataset(_zeros(self.x), _zeros(self.y), classes=classes, name=name)
        if preparation is not None:
            classes = classes or preparation.target.classes
            zeros = replace(zeros, classes=classes, features=preparation.feature_names, preparation=preparation)
        return RemoteFederation(
            zeros,
            torch.zeros(1, dtype=torch.int64),
            starts(self.sizes),
            names=self.names,
            how="every client at its own site",
        )

    @property
    def sizes(self) -> Tensor:
        """The examples of every client; none of those that are forgotten."""
        return torch.tensor([0 if member.status == "forgotten" else member.examples for member in self.members])


def change_registry(folder: Path, change: Callable[[Registry], Registry], first: Registry | None = None) -> Registry:
    """Change the registry in `folder` while nobody else does, and return it. `first` is what is there if there is
    none."""
    with open(folder / LOCK, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        stored = Registry.read(folder) or first
        if stored is None:
            raise ConfigError(f"{folder} holds no run of a federation: give the run's directory at the server")
        changed = change(stored)
        write_atomically(folder / FILE, seal_json(changed.model_dump(mode="json"), indent=1))
    return changed


@dataclass(frozen=True, eq=False)
class RemoteFederation(Federation):
    """A federation whose examples are at the sites. The server knows neither their order nor their labels."""

    @property
    def examples(self) -> int:
        return int(self.offsets[-1])

    def label_counts(self, first: int | None = None) -> None:
        return None

    def pooled(self) -> Federation:
        raise ConfigError(
            "this method moves the data to one place, which a real federation cannot do: choose another method"
        )

    def of(self, registry: Registry) -> RemoteFederation:
        """The same data, with the sites of another registry."""
        return replace(self, offsets=starts(registry.sizes), names=registry.names)


def _zeros(form: TreeForm) -> Tree:
    """One example of zeros, of this form."""
    if isinstance(form, dict):
        return {key: _entry(part) for key, part in form.items()}
    return tuple(map(_entry, form)) if isinstance(form, list) else _entry(form)


def _entry(form: EntryForm) -> Entry:
    dtype, shape = form.values if isinstance(form, RaggedForm) else form
    if not isinstance(form, RaggedForm):
        return torch.zeros(1, *shape, dtype=getattr(torch, dtype))
    values = torch.zeros(LENGTH, *shape, dtype=getattr(torch, dtype))
    settings = form.model_dump(exclude={"values"})
    return Ragged.from_values(values, [0, LENGTH], **settings)


def by_form(sites: Iterable[SiteInfo]) -> list[list[SiteInfo]]:
    """The sites in groups whose examples have the same form, the largest group first."""
    groups: list[list[SiteInfo]] = []
    for site in sorted(sites, key=lambda site: site.name):
        alike = next((group for group in groups if (site.x, site.y) == (group[0].x, group[0].y)), None)
        if alike is None:
            groups.append([site])
        else:
            alike.append(site)
    return sorted(groups, key=len, reverse=True)


def form_of(site: SiteInfo | Registry) -> str:
    """The form of an example, in words."""
    return " and ".join(_in_words(form) for form in (site.x, site.y))


def _in_words(form: TreeForm) -> str:
    if isinstance(form, dict):
        return "{" + ", ".join(f"{key}: {_in_words(part)}" for key, part in form.items()) + "}"
    if isinstance(form, list):
        return f"({', '.join(map(_in_words, form))})"
    if isinstance(form, RaggedForm):
        names = f"mask {form.mask} and lengths {form.lengths}"
        return f"rows of {_in_words(form.values)} with padding {form.padding:g}, {names}"
    dtype, shape = form
    return f"{dtype} {'×'.join(map(str, shape)) or 'number'}"
