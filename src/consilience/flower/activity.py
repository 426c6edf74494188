"""What the server sees of the sites while it is at work, in a file for `consilience flower status`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import RecordDict
from pydantic import BaseModel, ValidationError

from consilience.core.files import read_file, write_atomically
from consilience.flower.messages import Failure
from consilience.runs.run import Run

log = logging.getLogger("consilience")
FILE = "activity.json"
EVERY = 2.0  # seconds between two writes


class SiteActivity(BaseModel):
    """One site: whether it is online, when it was last, in how many rounds it was asked and its update was accepted,
    the last of these rounds, the last refusal with its round, and the bytes of its answers."""

    online: bool = False
    seen: float = 0.0
    asked: int = 0
    answered: int = 0
    round: int = 0
    refused_round: int = 0
    reason: str = ""
    bytes_up: int = 0


class Snapshot(BaseModel):
    """The file: its time, what the server asks for, which sites have not answered yet, and all sites by name."""

    time: float = 0.0
    asks_for: str = ""
    waits_for: list[str] = []
    secure: bool = False
    sites: dict[str, SiteActivity] = {}

    @classmethod
    def read(cls, folder: Path) -> Snapshot:
        """The file in a run's directory; an empty one if there is none that can be read."""
        try:
            return cls.model_validate_json(read_file(folder / FILE))
        except (OSError, ValidationError):
            return cls()


@dataclass
class Activity:
    """Keeps the file of a run's directory, from `open` on. A file that cannot be written does not stop the run."""

    clock: Callable[[], float] = time.time
    now: Snapshot = field(default_factory=Snapshot)
    _folder: Path | None = None
    _asked: set[str] = field(default_factory=set)
    _written: float = float("-inf")

    def open(self, folder: Path, *, secure: bool) -> None:
        """Go on with the file in this folder, which this process has locked."""
        known = Snapshot.read(folder)
        for site in known.sites.values():
            site.online = False
        self.now = known.model_copy(update={"sites": known.sites | self.now.sites, "secure": secure})
        self._folder = folder
        self._write(soon=False)

    def online(self, names: Iterable[str]) -> None:
        """These sites are online, and no others."""
        up = {*names}
        for name in up | self.now.sites.keys():
            site = self._site(name)
            site.online = name in up
            site.seen = self.clock() if site.online else site.seen
        self._write()

    def asks(self, kind: str, names: Iterable[str]) -> None:
        """These sites are asked."""
        self.now.asks_for, self.now.waits_for = kind, sorted(names)
        if kind == "train":
            self._asked = {*self.now.waits_for}
        self._write()

    def hears(self, name: str, content: RecordDict | Failure) -> None:
        """A site has answered, or is given up."""
        self.now.waits_for = [other for other in self.now.waits_for if other != name]
        if not isinstance(content, Failure):
            arrays = (array for record in content.array_records.values() for array in record.values())
            self._site(name).bytes_up += sum(len(array.data) for array in arrays)
        self._write()

    def finished(self, run: Run, line: dict[str, Any]) -> None:
        """A round is over. `line` is that of metrics.jsonl."""
        rejected = {entry["client"]: entry["reason"] for entry in line["rejected"]}
        for name in self._asked | rejected.keys():
            site = self._site(name)
            site.asked += 1
            if name in rejected:
                site.refused_round, site.reason = line["round"], rejected[name]
            else:
                site.answered, site.round = site.answered + 1, line["round"]
        self._asked = set()
        self.now.asks_for, self.now.waits_for = "", []
        self._write(soon=False)

    def _site(self, name: str) -> SiteActivity:
        return self.now.sites.setdefault(name, SiteActivity())

    def _write(self, soon: bool = True) -> None:
        if self._folder is None or (soon and self.clock() - self._written < EVERY):
            return
        self.now.time = self._written = self.clock()
        try:
            write_atomically(self._folder / FILE, self.now.model_dump_json(indent=1), private=True, lasting=False)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._folder / FILE, error.strerror)
