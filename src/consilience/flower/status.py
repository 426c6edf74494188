"""The status of a federation, read from the run's directory at the server. Nothing is written or locked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from consilience.core.errors import CheckpointError
from consilience.flower.activity import SiteActivity, Snapshot
from consilience.flower.audit import AuditLog
from consilience.flower.registry import Registry
from consilience.runs.stored import RunFiles

LATEST = 20  # rounds and events that are shown
LATE = 60.0  # seconds without a sign after which the server may be down
_DOING = {
    "train": "asks for updates",
    "evaluate": "asks for scores",
    "query.calibration": "asks for calibration counts",
    "query.statistics": "asks for statistics of BatchNorm layers",
    "query.secure": "agrees on a secure sum",
}


@dataclass(frozen=True)
class SiteStatus:
    """A site: `takes_part` is its entry in the list of sites, "" if there is none. Times are seconds since 1970."""

    name: str
    examples: int
    takes_part: str
    online: bool
    seen: float
    asked: int
    answered: int
    round: int
    refused_round: int
    reason: str
    bytes_up: int


@dataclass(frozen=True)
class Status:
    """What operators want to know of a run. `sign` is the time of the server's last sign, 0 if there is none, and
    `doing` what it was doing. `rounds` and `events` are the latest, the oldest first. `chain` says what is wrong with
    the audit log, "" if its lines hang together."""

    directory: str
    method: str
    round: int
    planned: int
    secure: bool
    read_at: float
    sign: float
    doing: str
    waits_for: list[str]
    sites: list[SiteStatus]
    rounds: list[dict[str, Any]]
    bytes_up: int
    bytes_down: int
    events: list[dict[str, Any]]
    chain: str

    @classmethod
    def read(cls, folder: Path, clock: Callable[[], float] = time.time) -> Status:
        """The status of the run in a directory."""
        run, now = RunFiles.read(folder), Snapshot.read(folder)
        events, chain = _audit(folder)
        return cls(
            directory=str(folder),
            method=run.method,
            round=len(run.rounds),
            planned=int(run.config.get("rounds") or 0),
            secure=now.secure,
            read_at=clock(),
            sign=now.time,
            doing=_DOING.get(now.asks_for, "computes") if now.time else "",
            waits_for=now.waits_for,
            sites=_sites(folder, now),
            rounds=run.rounds[-LATEST:],
            bytes_up=sum(line["bytes_up"] for line in run.rounds),
            bytes_down=sum(line["bytes_down"] for line in run.rounds),
            events=events,
            chain=chain,
        )

    @property
    def late(self) -> bool:
        """Whether the server has given no sign for so long that it may be down."""
        return self.read_at - self.sign > LATE

    def to_json(self) -> dict[str, Any]:
        """The status as plain data."""
        return asdict(self)


def _sites(folder: Path, now: Snapshot) -> list[SiteStatus]:
    """The sites of the run, then others that are or were online."""
    registry = Registry.read(folder)
    members: list[tuple[str, int, str]] = []
    if registry is not None:
        members = [(one.name, one.examples, one.status) for one in registry.members]
        members += [(name, 0, "invited") for name in registry.invited]
    others = now.sites.keys() - {name for name, _, _ in members}
    return [
        SiteStatus(name, examples, part, **now.sites.get(name, SiteActivity()).model_dump())
        for name, examples, part in [*members, *((name, 0, "") for name in sorted(others))]
    ]


def _audit(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """(the latest events of the audit log, what is wrong with it)."""
    try:
        return AuditLog(folder).read()[-LATEST:], ""
    except (CheckpointError, OSError) as error:
        return [], str(error)
