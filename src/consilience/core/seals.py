"""Seals of stored files: a digest of all contents, and of which run, client or round they are.

A seal finds damage, and files that were exchanged or taken from elsewhere. It does not stop somebody who can write the
files and computes a new digest.
"""

import hashlib
import json
from typing import Any

from consilience.core.errors import RecordError
from consilience.core.records import Tree, notes, pack, unpack

LENGTH = 32  # hexadecimal digits of a digest


def seal(tree: Tree, **about: str) -> bytes:
    """A packed record. Its header also has the entries of `about`, and a digest of all bytes: of the header too, where
    the digest counts as zeros."""
    data = pack(tree, **about)
    end = _end(data)
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items())) | {"digest": "0" * LENGTH}  # same every time
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    body = memoryview(data)[end:]
    return b"".join([_marked(head, "0" * LENGTH, _digest(head, body)), body])


def unseal(data: bytes, like: Tree = None, **about: str) -> Tree:
    """The record in sealed bytes (see `unpack`); a RecordError if they are damaged, or about something else."""
    check_seal(data, **about)
    return unpack(data, like)


def check_seal(data: bytes, **about: str) -> None:
    """Raise a RecordError if sealed bytes are damaged, or about something else. The type of their record need not be
    known."""
    found, end = notes(data), _end(data)
    written = found.get("digest", "")
    if "record" not in found:
        raise RecordError("these bytes hold no record: they were not written by consilience, or are truncated")
    if _digest(_marked(data[:end], written, "0" * LENGTH), memoryview(data)[end:]) != written:
        raise RecordError("a damaged record: its contents are not those that were written")
    for name, value in about.items():
        if found.get(name) != value:
            raise RecordError(f"a record of {name} {found.get(name, 'unknown')}, not of {name} {value}")


def _end(data: bytes) -> int:
    """The end of the header."""
    return 8 + int.from_bytes(data[:8], "little")


def _marked(head: bytes, old: str, new: str) -> bytes:
    """A header with another digest. Quotes in other entries are escaped, so only the digest itself has this form."""
    return head.replace(f'"digest":"{old}"'.encode(), f'"digest":"{new}"'.encode(), 1)


def seal_json(content: dict[str, Any], *, indent: int | None = None, **about: str) -> str:
    """A JSON object with its digest, which also covers `about`."""
    text = json.dumps(content)  # as it will be read: keys are strings, tuples are lists
    whole = {**content, "digest": _of_json(json.loads(text), about)}
    return json.dumps(whole, indent=indent, ensure_ascii=indent is None)


def unseal_json(text: str | bytes, **about: str) -> dict[str, Any]:
    """The content of a sealed JSON object; a RecordError if it is damaged, or about something else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise RecordError(f"must hold a JSON object, found {type(content).__name__}")
    if content.pop("digest", None) != _of_json(content, about):
        elsewhere = f", or of another {' and '.join(about)}" if about else ""
        raise RecordError(f"is damaged{elsewhere} (its contents are not those that were written)")
    return content


def _of_json(content: dict[str, Any], about: dict[str, str]) -> str:
    return _digest(json.dumps([content, about], sort_keys=True).encode())


def _digest(*parts: bytes | memoryview) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:LENGTH]
