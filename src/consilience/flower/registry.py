"""The registry of an experiment: the names of its sites and their numbers of examples, as the server stores them."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import ValidationError

from consilience.core.errors import CheckpointError, RecordError
from consilience.core.files import read_file, write_atomically
from consilience.core.records import Tree
from consilience.core.seals import seal_json, unseal_json
from consilience.data import Dataset, Federation
from consilience.data.ragged import Ragged
from consilience.data.tables import Preparation
from consilience.data.tensors import starts
from consilience.data.trees import Entry
from consilience.flower.messages import EntryForm, Payload, RaggedForm, SiteInfo, TreeForm
from consilience.flower.updates import most_examples

log = logging.getLogger("consilience")
FILE = "sites.json"
LENGTH = 16  # of rows of different lengths in the server's example of zeros


class Member(Payload):
    """A site and the number of examples for which it counts."""

    name: str
    examples: int


class Registry(Payload):
    """The sites of an experiment in the order of their names, which is the order of clients; the form of an example,
    which is the same at all sites; and the number of the server's last start."""

    experiment: str
    start: int
    members: list[Member]
    x: TreeForm
    y: TreeForm

    @classmethod
    def of(cls, sites: Iterable[SiteInfo], max_examples: int | None = None) -> Registry:
        """A new experiment of these sites, whose examples have the same form. A site with more than `max_examples`, by
        default `most_examples` of all, counts for `max_examples`, and the log names it."""
        members = sorted(sites, key=lambda site: site.name)
        first, most = members[0], max_examples or most_examples(site.examples for site in members)
        for site in members:
            if site.examples > most:
                log.warning("%r claims %d examples: it counts for max_examples = %d", site.name, site.examples, most)
        counted = [Member(name=site.name, examples=min(site.examples, most)) for site in members]
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
        stored = Registry.read(folder) or self
        if stored.experiment != self.experiment:
            raise CheckpointError(
                f"another server has begun a run in {folder} meanwhile: run the app again to resume that run, or "
                "choose another directory"
            )
        folder.mkdir(parents=True, exist_ok=True)
        again = self.model_copy(update={"start": max(stored.start + 1, int(time.time()))})
        write_atomically(folder / FILE, seal_json(again.model_dump(mode="json"), indent=1))
        return again

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    def federation(
        self, name: str, classes: tuple[str, ...] = (), preparation: Preparation | None = None
    ) -> Federation:
        """The federation as the server knows it: names, numbers of examples, and one example of zeros for the
        shapes."""
        zeros = Dataset(_zeros(self.x), _zeros(self.y), classes=classes, name=name)
        if preparation is not None:
            classes = classes or preparation.target.classes
            zeros = replace(zeros, classes=classes, features=preparation.feature_names, preparation=preparation)
        sizes = torch.tensor([member.examples for member in self.members])
        offsets = starts(sizes)
        order = torch.zeros(1, dtype=torch.int64)
        return RemoteFederation(zeros, order, offsets, names=self.names, how="every client at its own site")


@dataclass(frozen=True, eq=False)
class RemoteFederation(Federation):
    """A federation whose examples are at the sites. The server knows neither their order nor their labels."""

    @property
    def examples(self) -> int:
        return int(self.offsets[-1])

    def label_counts(self) -> None:
        return None


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


def form_of(site: SiteInfo) -> str:
    """The form of an example of this site, in words."""
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
