"""Stack Overflow by user: the tags of a question, from the words of one sentence about it and of its title."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from consilience.core.checks import Count, check_type
from consilience.core.errors import DataError
from consilience.data.dataset import Data, Dataset
from consilience.data.loaders.files import common_names, missing, read_bytes
from consilience.data.loaders.hdf5 import Array, Choice, read_clients
from consilience.data.loaders.parquet import find_shards, read_columns, shards

PADDING, UNKNOWN, FIRST = 0, 1, 2
"""Token ids: padding, a word outside the vocabulary, the most frequent word (the next is 3)."""

_NAME = "stackoverflow"
_COLUMNS = ("tokens", "title", "tags")
_SOURCE = "https://storage.googleapis.com/tff-datasets-public"


def stackoverflow(
    root: Path,
    *,
    clients: int | None = 10_000,
    examples: int = 1000,
    words: int = 10_000,
    tags: int = 500,
    length: int = 128,
) -> Data:
    """Sentences from Stack Overflow as token ids, the 500 most frequent tags as targets (multi-label), 10,000 of the
    342,477 users (group "client"), from TFF's HDF5 files: for the model bag_of_words.

    x [N, L] holds tokens and title: ids 2, 3, … for the `words` most frequent words, 1 for any other, 0 after the end.
    y [N, tags] is 0 or 1 in bytes. Of a client the first `examples` are read, of a text the first `length` tokens.
    `clients` are spread evenly over the sorted ids, and the test set is theirs too (None for all users of both files:
    tens of gigabytes); they have the same numbers in train and test.

    Files train-*.parquet and test-*.parquet with the columns client_id, tokens, title and tags are read as well.
    """
    limits = {"clients": clients, "examples": examples, "words": words, "tags": tags, "length": length}
    for name, value in limits.items():
        check_type(f"{_NAME}: {name}", value, Count | None)
    folder = root / _NAME
    word_ids = {word: FIRST + i for i, word in enumerate(_most_frequent(folder, "word_count", words))}
    tag_ids = {tag: i for i, tag in enumerate(_most_frequent(folder, "tag_count", tags))}
    train = _encode(_read(folder, "train", partial(_spread, count=clients), examples), word_ids, tag_ids, length)
    choose: Choice = partial(_among, chosen=None if clients is None else frozenset(train.names))
    test = _encode(_read(folder, "test", choose, examples), word_ids, tag_ids, length)
    width = max(train.width, test.width)
    names = common_names(train.names, test.names)
    return Data(*(_padded(part, width, tag_ids, known) for part, known in zip((train, test), names, strict=True)))


@dataclass
class _Texts:
    """Rows of word ids and of tag ids, end to end, with their lengths."""

    names: list[str] = field(default_factory=list)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    words: array[int] = field(default_factory=lambda: array("i"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    tags: array[int] = field(default_factory=lambda: array("i"))
    counts: array[int] = field(default_factory=lambda: array("q"))
    note: str = ""

    @property
    def width(self) -> int:
        return max(self.lengths, default=1)


def _encode(
    clients: Iterator[tuple[str, list[Array]]], words: Mapping[bytes, int], tags: Mapping[bytes, int], length: int
) -> _Texts:
    out, cut = _Texts(), 0
    for name, columns in clients:
        out.names.append(name)
        out.sizes.append(len(columns[0]))
        for tokens, title, joined in zip(*columns, strict=True):
            text = (tokens + b" " + title).split()
            cut += len(text) > length
            out.words.extend([words.get(word, UNKNOWN) for word in text[:length]])
            out.lengths.append(min(len(text), length))
            found = {tags[tag] for tag in joined.split(b"|") if tag in tags}
            out.tags.extend(found)
            out.counts.append(len(found))
    out.note = f"{len(out.names)} clients, at most {max(out.sizes, default=0)} examples each"
    if cut:
        out.note += f", {cut} texts cut to {length} tokens"
    return out


def _padded(texts: _Texts, width: int, tags: Mapping[bytes, int], names: tuple[str, ...]) -> Dataset:
    lengths, counts = np.array(texts.lengths), np.array(texts.counts)
    ids = np.array(texts.words)
    small = ids.max(initial=0) < 2**15
    x = np.full((len(lengths), width), PADDING, np.int16 if small else np.int32)
    x[np.arange(width) < lengths[:, None]] = ids
    y = np.zeros((len(counts), len(tags)), np.uint8)
    y[np.arange(len(counts)).repeat(counts), np.array(texts.tags)] = 1
    number = {name: i for i, name in enumerate(names)}
    owner = np.array([number[name] for name in texts.names], np.int64).repeat(np.array(texts.sizes))
    return Dataset(
        torch.from_numpy(x),
        torch.from_numpy(y),
        classes=tuple(tag.decode() for tag in tags),
        groups={"client": torch.from_numpy(owner)},
        group_names={"client": names},
        name=_NAME,
        note=texts.note,
    )


def _most_frequent(folder: Path, kind: str, size: int) -> list[bytes]:
    """The most frequent names of a file of counts: lines "word count" for words, a JSON object for tags."""
    path = folder / f"{_NAME}.{kind}"
    if not path.is_file():
        raise missing(_NAME, path.name, folder, f"{_SOURCE}/{path.name}.tar.bz2")
    content = read_bytes(path)
    try:
        if content.lstrip().startswith(b"{"):
            counts = {name.encode(): int(count) for name, count in json.loads(content).items()}
        else:
            counts = {name: int(count) for name, count in (line.split() for line in content.splitlines() if line)}
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} holds neither lines 'name count' nor a JSON object of counts: {error}") from error
    if not counts:
        raise DataError(f"{path} holds no counts")
    return sorted(counts, key=lambda name: -counts[name])[:size]


def _spread(ids: Sequence[str], count: int | None) -> Sequence[str]:
    if count is None or count >= len(ids):
        return ids
    return [ids[i * len(ids) // count] for i in range(count)]


def _among(ids: Sequence[str], chosen: frozenset[str] | None) -> Sequence[str]:
    return ids if chosen is None else [client for client in ids if client in chosen]


def _read(folder: Path, split: str, choose: Choice, rows: int) -> Iterator[tuple[str, list[Array]]]:
    path = folder / f"{_NAME}_{split}.h5"
    if path.is_file():
        return _from_hdf5(path, choose, rows)
    if find_shards(folder, split):
        return _from_parquet(shards(folder, split, _SOURCE), choose, rows)
    raise missing(_NAME, path.name, folder, f"{_SOURCE}/{_NAME}.tar.bz2")


def _from_hdf5(path: Path, choose: Choice, rows: int) -> Iterator[tuple[str, list[Array]]]:
    for client, columns in read_clients(path, _COLUMNS, choose, rows):
        for name, column in zip(_COLUMNS, columns, strict=True):
            if column.dtype.kind not in "OS" or column.ndim != 1:
                found = f"{column.dtype} in {column.ndim}-d"
                raise DataError(f"{path}: client {client!r} must have {name!r} of one string an example, found {found}")
        yield client, columns


def _from_parquet(files: Sequence[Path], choose: Choice, rows: int) -> Iterator[tuple[str, list[Array]]]:
    parts = []
    for file in files:
        table = read_columns(file, ("client_id", *_COLUMNS))
        for name in _COLUMNS:
            if not pa.types.is_string(table[name].type) or table[name].null_count:
                found = f"{table[name].type}, {table[name].null_count} missing"
                raise DataError(f"{file}: {name!r} must hold one string an example, found {found}")
        ids = table["client_id"].cast(pa.string()).to_numpy()
        parts.append([ids, *(table[name].cast(pa.binary()).to_numpy() for name in _COLUMNS)])
    ids, *columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    names, owner = np.unique(ids, return_inverse=True)
    order, ends = owner.argsort(kind="stable"), np.bincount(owner).cumsum()
    held = dict(zip(names.tolist(), np.split(order, ends[:-1]), strict=True))
    for client in choose(list(held)):
        yield client, [column[held[client][:rows]] for column in columns]
