"""Sealed JSON files, read without their seals and written by hand."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from consilience.core.seals import seal_json

RUN = "0123456789abcdef"
"""The id of runs that tests make by hand."""


def content(path: Path) -> dict[str, Any]:
    """A JSON file without its digest."""
    return _plain(path.read_text())


def lines(directory: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without their digests."""
    return [_plain(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def put(path: Path, content: dict[str, Any]) -> None:
    """Write run.json, comparison.json or evaluation.json of a run with the id `RUN`."""
    about = {"run": RUN} if path.name == "evaluation.json" else {}
    own = {"id": RUN} if path.name == "run.json" else {}
    path.write_text(seal_json(own | content, **about))


def put_lines(directory: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write metrics.jsonl of a run with the id `RUN`."""
    (directory / "metrics.jsonl").write_text("".join(seal_json(line, run=RUN) + "\n" for line in lines))


def _plain(text: str) -> dict[str, Any]:
    return {key: value for key, value in json.loads(text).items() if key != "digest"}
