"""Reading the sealed files of a run: JSON, rounds of metrics, posteriors."""

from pathlib import Path
from typing import Any

from consilience.core.beliefs import Belief
from consilience.core.errors import CheckpointError, RecordError
from consilience.core.files import read_file
from consilience.core.records import notes
from consilience.core.seals import unseal, unseal_json

REMEDY = "restore it from a backup, go back to an earlier checkpoint by `consilience rewind`, or run it anew elsewhere"


def read(path: Path) -> bytes:
    """The content of a file."""
    try:
        return read_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path, remedy: str = "restore it from a backup", **about: str) -> dict[str, Any]:
    """The content of a sealed JSON file."""
    try:
        return unseal_json(read(path), **about)
    except RecordError as error:
        raise CheckpointError(f"{path} {error}: {remedy}") from error


def read_lines(path: Path, run: str, up_to: int | None = None) -> list[dict[str, Any]]:
    """The rounds in metrics.jsonl of a run, without a last line that a kill cut short; with `up_to`, the rounds up to
    this one, which must be there. A CheckpointError names a line that is damaged or missing."""
    found: list[dict[str, Any]] = []
    lines = read(path).split(b"\n")[:-1] if path.exists() else []
    for number, text in enumerate(lines[:up_to], 1):
        try:
            line = unseal_json(text, run=run)
        except RecordError as error:
            raise CheckpointError(f"line {number} of {path} {error}: {REMEDY}") from error
        if line["round"] != number:
            raise CheckpointError(f"line {number} of {path} is of round {line['round']}: {REMEDY}")
        found.append(line)
    if up_to is not None and len(found) < up_to:
        raise CheckpointError(f"{path} ends with round {len(found)}, but the checkpoint is of round {up_to}: {REMEDY}")
    return found


def read_posterior(path: Path, **about: str) -> tuple[int, Belief]:
    """(round, belief) of a file that a run or a site wrote. A site's has the round 0."""
    try:
        data = read_file(path)
        belief = unseal(data, **about)
    except OSError as error:
        raise CheckpointError(f"there is no posterior at {path}: {error.strerror}") from error
    except RecordError as error:
        raise CheckpointError(f"{path} holds no posterior: {error}") from error
    if not isinstance(belief, Belief):
        raise CheckpointError(f"{path} holds no posterior, but a {type(belief).__name__}")
    return int(notes(data).get("round", 0)), belief
