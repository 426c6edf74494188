"""Damaged records: bytes that were changed, and headers with other JSON."""

from __future__ import annotations

import json
import random
from typing import Any

import torch

import consilience as cs
from consilience.core.records import Addressed, Point, Tree, Weighted, pack, record, static, type_name


@record
class Everything:
    """A record of all that an update may hold."""

    change: Weighted
    factor: cs.Gaussian
    parts: Tree
    named: Tree
    client: torch.Tensor
    sizes: tuple[int, ...] = static((3, 4))
    kind: str = static("plain")
    rate: float = static(1.0)


def everything(weight: float = 2.0) -> Everything:
    return Everything(
        Weighted(Point(torch.arange(3.0)), torch.tensor([weight])),
        cs.Gaussian(torch.arange(2.0), torch.ones(2)),
        (torch.ones(2, 2), None, ()),
        {"a": torch.zeros(1), "b": Addressed(None, torch.tensor(True))},
        torch.tensor([0]),
    )


SEEDS = [
    everything(),
    Weighted(Point(torch.arange(3.0)), torch.tensor([2.0])),
    cs.Gaussian(torch.ones(2), torch.ones(2)),
]


def nested(levels: int) -> bytes:
    """A record of lists within lists."""
    return _joined({"__metadata__": {"record": "[" * levels + "]" * levels}}, b"")


def zeros(count: int) -> bytes:
    """A packed update of `count` parameters, made without a tensor."""
    structure = {
        "type": type_name(Weighted),
        "fields": {"total": {"type": type_name(Point), "fields": {"theta": "tensor"}}, "weight": "tensor"},
    }
    arrays = {
        "total.theta": {"dtype": "F64", "shape": [count], "data_offsets": [0, 8 * count]},
        "weight": {"dtype": "F64", "shape": [1], "data_offsets": [8 * count, 8 * count + 8]},
    }
    return _joined({"__metadata__": {"record": json.dumps(structure)}, **arrays}, bytes(8 * count + 8))


def mutated(data: bytes, draw: random.Random) -> bytes:
    """A damaged copy of a packed record."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        data = draw.choice((_bytes, _header, _header, _structure, _structure, _structure))(data, draw)
    return data


def _bytes(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    what = draw.randrange(5)
    if what == 0 or not changed:
        return bytes(changed[: draw.randrange(len(changed) + 1)])
    at = draw.randrange(len(changed))
    if what == 1:
        changed[at] ^= 1 << draw.randrange(8)
    elif what == 2:
        changed[at : at + draw.randrange(16)] = draw.randbytes(draw.randrange(16))
    elif what == 3:
        changed[:8] = draw.choice((0, 1, 2**31, 2**63, len(data), 2**64 - 1)).to_bytes(8, "little")
    else:
        changed += draw.randbytes(draw.randrange(40))
    return bytes(changed)


def _split(data: bytes) -> tuple[Any, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        return json.loads(data[8:end]), data[end:]
    except (ValueError, RecursionError):
        return None, b""


def _joined(header: Any, rest: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + rest


def _header(data: bytes, draw: random.Random) -> bytes:
    """Another JSON header: dtypes, shapes, offsets, names, duplicate keys."""
    header, rest = _split(data)
    if not isinstance(header, dict):
        return data
    if draw.random() < 0.2:
        text = json.dumps(header)
        key = draw.choice(list(header))
        return _joined(text[:-1] + f", {json.dumps(key)}: {json.dumps(_value(draw))}" + "}", rest)
    arrays = [name for name in header if name != "__metadata__"]
    if arrays and draw.random() < 0.7:
        array = header[draw.choice(arrays)]
        if isinstance(array, dict):
            field = draw.choice(("dtype", "shape", "data_offsets"))
            choices = {
                "dtype": ("F64", "F16", "I64", "BOOL", "F8_E5M2", "U64", "C64", "x", 3),
                "shape": ([2**62, 2**62], [0, 2**63 - 1], [-1], [1.5], ["3"], [], [3, 1], [1] * 90, 2**70),
                "data_offsets": ([0, 2**62], [5, 3], [0], [0, 0], [-4, 8], [2**64, 2**64]),
            }
            array[field] = draw.choice((*choices[field], _value(draw)))
    else:
        _edit(header, draw)
    return _joined(header, rest)


def _structure(data: bytes, draw: random.Random) -> bytes:
    """Another description of the structure."""
    header, rest = _split(data)
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
        return data
    text = header["__metadata__"].get("record")
    try:
        structure = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return data
    what = draw.random()
    if what < 0.1:
        levels = draw.choice((3, 40, 400, *range(480, 500), 900, 5000, 100_000))
        text = "[" * levels + (text if draw.random() < 0.5 else "") + "]" * levels
    elif what < 0.15:
        text = text.replace("{", '{"type": "x", ', 1)
    else:
        _edit(structure, draw)
        text = json.dumps(structure)
    header["__metadata__"]["record"] = text
    return _joined(header, rest)


def _edit(tree: Any, draw: random.Random) -> None:
    """Change, remove, add or rename one entry somewhere in the tree."""
    places = list(_places(tree))
    if not places:
        return
    where = draw.choice(places)
    keys = list(where) if isinstance(where, dict) else list(range(len(where)))
    if not keys:
        return
    key, what = draw.choice(keys), draw.randrange(4)
    if what == 0:
        where[key] = _value(draw)
    elif what == 1:
        del where[key]
    elif isinstance(where, dict):
        where[draw.choice(NAMES)] = where.pop(key) if what == 2 else _value(draw)
    else:
        where.insert(key, _value(draw))


def _places(tree: Any) -> Any:
    if isinstance(tree, dict | list):
        yield tree
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _places(part)


NAMES = ("", "a", "a.b", "change", "fields", "type", "dict", "static", "client", "__class__", "self", "value",
         "\x1b[2J", "\udcff", "ä" * 300, "__metadata__", "theta", "0", "kind")  # fmt: skip
TYPES = [type_name(kind) for kind in (Point, Weighted, Addressed, cs.Gaussian, Everything)]


def _value(draw: random.Random) -> Any:
    def deep() -> Any:
        found: Any = 1
        for _ in range(draw.choice((10, 100, 300))):
            found = [found] if draw.random() < 0.5 else {"dict": {"a": found}}
        return found

    return draw.choice(
        (None, True, False, 0, 1, -1, 1.0, 1e400, 10**4000, "tensor", "plain", "", [], {}, [3, 4], [3.0, 4.0],
         ["tensor"], {"dict": {}}, {"dict": {"a": "tensor"}},
         {"dict": {"a.b": "tensor", "a": {"dict": {"b": "tensor"}}}},
         {"type": draw.choice(TYPES), "fields": {}}, {"type": TYPES[0], "fields": {"theta": "tensor"}},
         {"type": TYPES[0], "fields": {"theta": None}}, {"type": [], "fields": {}}, {"type": "os.system", "fields": {}},
         {"type": TYPES[0], "fields": {"theta": "tensor"}, "static": {"x": 1}}, deep(), "x" * 100_000)
    )  # fmt: skip


def packed_seeds() -> list[tuple[bytes, Tree]]:
    """(packed record, template) of every record that is damaged."""
    return [(pack(seed), seed) for seed in SEEDS]
