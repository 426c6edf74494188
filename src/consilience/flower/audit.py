"""The audit log of a deployment: what has changed who takes part, and what was refused.

One JSON line for each event. Each line has the digest of the line before, so that a line that is altered, removed or
put in later is found. The chain has no key: somebody who may write the file can write a whole new one.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilience.core.errors import CheckpointError
from consilience.core.files import read_file

FILE = "audit.jsonl"
START = "0" * 32  # the digest before the first line


def _digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class AuditLog:
    """The audit log in the directory `place`."""

    place: Path
    clock: Callable[[], float] = time.time

    @property
    def path(self) -> Path:
        """The file."""
        return self.place / FILE

    def write(self, event: str, **facts: Any) -> None:
        """Add a line, and flush it to the disk. `facts` are plain data. A last line that a kill
        cut short is removed."""
        self.place.mkdir(parents=True, exist_ok=True)
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.clock()))
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(self.path, flags, 0o600), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the command and the server both write
            text = file.read()
            end = text.rfind(b"\n") + 1
            lines = text[:end].decode(errors="replace").splitlines()
            before = _digest(lines[-1]) if lines else START
            line = json.dumps({"time": when, "event": event, **facts, "before": before})
            file.truncate(end)
            file.seek(end)
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All events, the oldest first; a CheckpointError that names the first line that does not fit."""
        text = read_file(self.path).decode(errors="replace") if self.path.exists() else ""
        before, events = START, []
        for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
            try:
                event = json.loads(line)
                fits = event.pop("before") == before
            except (ValueError, KeyError, AttributeError, TypeError):
                fits = False
            if not fits:
                raise CheckpointError(f"line {number} of {self.path} was altered, or lines before it are missing")
            events.append(event)
            before = _digest(line)
        return events
