"""A client's states on its own disk: one immutable file for each training request, named by the request's token.

Nothing is committed or rolled back. The server's next request names the file to start from. A lost reply, a repeated
request, or a node or server that was killed leaves a file that no request will name again.
"""

import hashlib
import logging
import re
from pathlib import Path

from consilience.core.beliefs import Belief
from consilience.core.errors import RecordError
from consilience.core.files import private_folder, read_file, write_atomically
from consilience.core.records import Tree, notes, record
from consilience.core.seals import seal, unseal
from consilience.flower.messages import Token
from consilience.runs.directory import POSTERIOR

log = logging.getLogger("consilience")


@record
class Result:
    """The outcome of a training request: the update that was sent, and the client's state after it."""

    update: Tree
    state: Tree


class ClientStorage:
    """The files of one client in one experiment, under `root`. Each is sealed with both and its token."""

    def __init__(self, root: Path, experiment: str, client: str) -> None:
        plain = re.sub(r"[^A-Za-z0-9_-]+", "-", client)[:40]
        self._experiment, self._client = experiment, client
        self.path = root / experiment / f"{plain}-{hashlib.sha256(client.encode()).hexdigest()[:8]}"

    def _file(self, token: Token) -> Path:
        return self.path / f"{token.start:012d}-{token.number:08d}.safetensors"

    def _about(self, token: Token) -> dict[str, str]:
        return {"experiment": self._experiment, "client": self._client, "token": f"{token.start}-{token.number}"}

    def tokens(self) -> list[Token]:
        """The tokens of all files, the oldest first."""
        names = sorted(file.name for file in self.path.glob("*"))
        found = (re.fullmatch(r"(\d{12})-(\d{8,})\.safetensors", name) for name in names)
        return [Token(int(name[1]), int(name[2])) for name in found if name]

    def read(self, token: Token) -> tuple[Result, str] | None:
        """(result, the reply that was written with it); None if the file is missing or damaged, or another's."""
        try:
            data = read_file(self._file(token))
            result = unseal(data, **self._about(token))
        except FileNotFoundError:
            return None
        except (OSError, RecordError) as error:
            log.warning("%s cannot be read (%s): the state counts as lost", self._file(token), error)
            return None
        return (result, notes(data).get("reply", "")) if isinstance(result, Result) else None

    def write(self, token: Token, result: Result, reply: str) -> None:
        """Write a result and its reply. This must happen before the reply is sent."""
        private_folder(self.path)
        write_atomically(self._file(token), seal(result, reply=reply, **self._about(token)), private=True)

    def write_belief(self, belief: Belief) -> None:
        """Keep the belief that this site predicts with, for `load_posterior`."""
        private_folder(self.path)
        sealed = seal(belief, experiment=self._experiment, client=self._client)
        write_atomically(self.path / POSTERIOR, sealed, private=True)

    def prune(self, token: Token, keep: set[Token]) -> None:
        """Delete files older than `token` that are not in `keep`, and unfinished ones. Newer files stay, because a
        request that arrives late must not undo a later one."""
        for old in self.tokens():
            if old < token and old not in keep:
                self._file(old).unlink(missing_ok=True)
        for unfinished in self.path.glob(".*.tmp"):
            unfinished.unlink(missing_ok=True)
