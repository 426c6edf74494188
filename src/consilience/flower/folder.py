"""A client's states on its own disk: immutable files, one for each piece of work, named by its token.

Nothing is ever committed or rolled back. The server's next order says which file to go on from; a reply that was lost,
an order that came twice, a node or a server that was killed leave files that no order will name again.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from consilience.core.errors import RecordError
from consilience.core.files import write_atomically
from consilience.core.records import Tree, notes, pack, record, unpack
from consilience.flower.letters import Token


@record
class Work:
    """What an order produced: the update that was sent, and the client's state after it."""

    update: Tree
    state: Tree


class Folder:
    """The files of one client in one experiment, under `root`."""

    def __init__(self, root: Path, experiment: str, client: str) -> None:
        plain = re.sub(r"[^A-Za-z0-9_-]+", "-", client)[:40]
        self.path = root / experiment / f"{plain}-{hashlib.sha256(client.encode()).hexdigest()[:8]}"

    def _file(self, token: Token) -> Path:
        return self.path / f"{token.start:012d}-{token.number:08d}.safetensors"

    def tokens(self) -> list[Token]:
        """What is here, the oldest first."""
        names = sorted(file.name for file in self.path.glob("*"))
        found = (re.fullmatch(r"(\d{12})-(\d{8,})\.safetensors", name) for name in names)
        return [Token(int(name[1]), int(name[2])) for name in found if name]

    def read(self, token: Token) -> tuple[Work, str] | None:
        """A piece of work and what was noted of it; None if it is not here, or not whole."""
        try:
            data = self._file(token).read_bytes()
            work = unpack(data)
        except (OSError, RecordError):
            return None
        return (work, notes(data).get("answer", "")) if isinstance(work, Work) else None

    def write(self, token: Token, work: Work, answer: str) -> None:
        """On the disk before anybody hears of it."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file(token), pack(work, answer=answer))

    def tidy(self, token: Token, keep: set[Token]) -> None:
        """Drop what is older than `token` and not to be kept. What is newer stays: an order that comes late must not
        undo a later one."""
        for old in self.tokens():
            if old < token and old not in keep:
                self._file(old).unlink(missing_ok=True)
        for torn in self.path.glob(".*.tmp"):
            torn.unlink(missing_ok=True)
