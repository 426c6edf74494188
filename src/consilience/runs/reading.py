"""Reading the sealed files of a run: JSON, rounds of metrics, posteriors."""

from pathlib import Path
from typing import Any

from consilience.core.beliefs import Belief
from consilience.core.errors import CheckpointError, RecordError
from consilience.core.files import read_file
from consilience.core.records import notes
from consilience.core.seals import unseal, unseal_json

WITHOUT_METRICS = "restore it from a backup, or delete it and resume the run, which goes on without its metrics so far"


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
    """The rounds in metrics.jsonl of a run, at most `up_to`, without a last line that a kill cut short. A
    CheckpointError names a line that is damaged or missing."""
    found: list[dict[str, Any]] = []
    lines = read(path).split(b"\n")[:-1] if path.exists() and up_to != 0 else []
    for number, text in enumerate(lines, 1):
        try:
            line = unseal_json(text, run=run)
        except RecordError as error:
            raise CheckpointError(f"line {number} of {path} {error}; {WITHOUT_METRICS}") from error
        if found and line["round"] != found[-1]["round"] + 1:
            jump = f"is of round {line['round']}, but the one before is of round {found[-1]['round']}"
            raise CheckpointError(f"line {number} of {path} {jump}: {WITHOUT_METRICS}")
        if up_to is not None and line["round"] > up_to:
            break
        found.append(line)
    return found


def read_posterior(path: Path, **about: str) -> tuple[int, Belief]:
    """(round, belief) of a file that a run wrote."""
    try:
        data = read_file(path)
        belief = unseal(data, **about)
    except OSError as error:
        raise CheckpointError(f"there is no posterior at {path}: {error.strerror}") from error
    except RecordError as error:
        raise CheckpointError(f"{path} holds no posterior: {error}") from error
    if not isinstance(belief, Belief):
        raise CheckpointError(f"{path} holds no posterior, but a {type(belief).__name__}")
    return int(notes(data)["round"]), belief
