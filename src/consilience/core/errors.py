"""Errors that users can cause: all derive from `ConsilienceError`."""

import difflib
from collections.abc import Iterable

from consilience.core.text import plain


class ConsilienceError(Exception):
    """An error that the user can correct; the command prints its message and exits with 2."""


class ConfigError(ConsilienceError):
    """A configuration names something that does not exist or has a value that is not allowed."""


class DataError(ConsilienceError):
    """Data that are missing or damaged, or do not fit the model."""


class TaskError(ConsilienceError):
    """A module that cannot be trained as a function of one flat vector."""


class RecordError(ConsilienceError):
    """A record of an unexpected type, shape or dtype. As its text may quote what another machine has sent, it is one
    line of printable characters."""

    def __init__(self, reason: str) -> None:
        super().__init__(plain(reason))


class CheckpointError(ConsilienceError):
    """A run directory that cannot be resumed."""


class ClientError(ConsilienceError):
    """An error in the computation of one client, with its name, the round and the stage."""

    def __init__(self, client: str, round: int, stage: str, reason: str) -> None:
        super().__init__(f"client {client!r} failed in round {round}, stage {stage!r}: {reason}")
        self.client, self.round, self.stage, self.reason = client, round, stage, reason


class CallbackError(ConsilienceError):
    """An error that a callback has raised after a round, which is its cause."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """The end of an error message: the allowed names, and the one nearest to `word`, whatever the case of letters."""
    names = sorted(allowed)
    lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.5)
    hint = f"did you mean {lower[close[0]]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(names)}"
