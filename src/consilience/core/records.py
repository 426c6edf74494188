"""Records: messages, states and checkpoints, in one format.

A record is a frozen dataclass whose fields are tensors, records, tuples or dicts of these, or None; a `static` field
holds a plain value. A record is a pytree, so `tree_map` reaches every tensor, and messages are fused by adding leaf by
leaf. `pack` writes safetensors bytes with named arrays and the type in the header; `unpack` reads them and refuses an
unexpected type, shape or dtype. No code from a file is executed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, dataclass_transform

import torch
from safetensors.torch import load as read_arrays
from safetensors.torch import save as write_arrays
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from consilience.core.display import span
from consilience.core.errors import RecordError, TaskError, nearest
from consilience.core.text import plural

__all__ = [
    "Addressed", "Point", "Tree", "Weighted", "add", "check", "leaves", "nbytes",
    "pack", "parts", "record", "rows", "stack", "static", "to", "tree_map", "unpack",
]  # fmt: skip

T = TypeVar("T")
Tree = Any  # a tensor, a record, a tuple or a dict of trees, or None: Python's types cannot say this recursively
_types: dict[str, type] = {}
_fields: dict[type, tuple[list[str], list[str]]] = {}  # the names of a type's trees, and of its static fields
DEEPEST = 64  # levels of the JSON that describes a record's structure; a nested record is two
_USER_FILE = re.compile(r"^consilience_user_[0-9a-f]{8}_")  # as `config` names the modules of users' files


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def record(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass and a pytree; `unpack` knows it by its module and name."""
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    name = type_name(cls)
    known = _types.get(name)
    if known is not None and known.__module__ != cls.__module__:
        raise RecordError(f"two files define the record type {name}: rename one of the files, or one of the types")
    _types[name] = cls
    every = dataclasses.fields(cls)  # type: ignore[arg-type]
    fixed = [field.name for field in every if field.metadata.get("static")]
    moving = [field.name for field in every if field.name not in fixed]
    _fields[cls] = moving, fixed
    register_pytree_node(
        cls,
        lambda value: ([getattr(value, name) for name in moving], _static(value)),
        lambda children, static: cls(*children) if static is None else _made(cls, children, static),
        serialized_type_name=name,
    )
    return cls


def _static(value: Any) -> tuple[Any, ...] | None:
    """The values of a record's static fields; None if it has none, as most."""
    fixed = _fields[type(value)][1]
    return tuple(getattr(value, name) for name in fixed) if fixed else None


def _made(cls: type[T], children: Iterable[Any], static: Iterable[Any]) -> T:
    moving, fixed = _fields[cls]
    return cls(**dict(zip(moving + fixed, (*children, *static), strict=True)))


def static(default: Any = dataclasses.MISSING) -> Any:
    """A field that holds an int, a float, a string or a tuple of these: part of the structure, not a tensor."""
    return dataclasses.field(default=default, metadata={"static": True})


def type_name(cls: type) -> str:
    """`module.Name`. A user's own file is named without its path, so that the type has one name at all sites."""
    return f"{_USER_FILE.sub('', cls.__module__)}.{cls.__qualname__}"


@record
class Point:
    """A model without uncertainty: the flat vector of its parameters."""

    theta: Tensor

    @property
    def mean(self) -> Tensor:
        """The parameters themselves."""
        return self.theta

    @property
    def variance(self) -> Tensor:
        """Zeros."""
        return torch.zeros_like(self.theta)

    def sample(self, n: int, *, seed: int = 0) -> Tensor:
        """[n, ..., P] copies of the parameters."""
        return self.theta.expand(n, *self.theta.shape)

    def log_prob(self, theta: Tensor) -> Tensor:
        """Not defined: raises a TaskError."""
        raise TaskError("a Point has no density: learn a Gaussian posterior with a method such as FedEP")

    def __repr__(self) -> str:
        return f"Point({shape(self.theta)}, {span(self.theta) or '…'})"


@record
class Weighted:
    """A weighted sum with its total weight, so that rejecting a client needs no second pass."""

    total: Tree
    weight: Tensor

    @classmethod
    def of(cls, value: Tree, weight: Tensor) -> Weighted:
        """From values [K, ...] of K clients and weights [K, 1]."""
        return cls(tree_map(lambda leaf: leaf * weight.view(-1, *[1] * (leaf.dim() - 1)), value), weight)

    @property
    def mean(self) -> Tree:
        """Σ w v / Σ w, after the engine has summed over clients."""
        axes, w = self.weight.shape[:-1], self.weight
        return tree_map(lambda leaf: leaf / w.view(axes + (1,) * (leaf.dim() - len(axes))), self.total)


@record
class Addressed:
    """A message with a part for all clients and a part for each, whose leaves have a client axis."""

    shared: Tree
    own: Tree


def shape(theta: Tensor) -> str:
    """The size of flat vectors in words: 1,200 parameters, or 20 × 1,200 parameters."""
    clients = "".join(f"{n:,} × " for n in theta.shape[:-1])
    return clients + (plural(theta.shape[-1], "parameter") if theta.dim() else "a number")


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors with their dotted names, in field order."""
    for name, child in parts(tree):
        where = f"{path}.{name}" if path else name
        if isinstance(child, Tensor):
            yield where, child
        elif child is not None:
            yield from leaves(child, where)


def parts(tree: Tree) -> list[tuple[str, Tree]]:
    """The parts of a tree by name, in field order."""
    if tree is None:
        return []
    if isinstance(tree, Tensor):
        return [("value", tree)]
    if isinstance(tree, tuple):
        return [(str(i), child) for i, child in enumerate(tree)]
    if isinstance(tree, dict):
        return [(_key(name), child) for name, child in tree.items()]
    return [(name, getattr(tree, name)) for name in _moving(type(tree))]


def _key(name: Any) -> str:
    if not isinstance(name, str):
        raise RecordError(f"the keys of a dict must be text, got {name!r}")
    return name


def _moving(kind: type) -> list[str]:
    if kind not in _fields:
        raise RecordError(
            f"a {kind.__name__} cannot be part of a record; fields hold tensors, records, tuples or dicts of "
            "these, or None"
        )
    return _fields[kind][0]


def _named_static(tree: Tree) -> dict[str, Any]:
    return {name: getattr(tree, name) for name in _fields[type(tree)][1]}


def tree_map(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """`fn` on every tensor of a tree, together with the tensors in the same places of others; None stays None."""
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        return fn(tree, *others)
    if isinstance(tree, tuple):
        return tuple(tree_map(fn, *parts) for parts in zip(tree, *others, strict=True))
    if isinstance(tree, dict):
        if any(other.keys() != tree.keys() for other in others):
            raise RecordError(f"dicts differ in their keys: {', '.join(map(str, tree))}")
        return {name: tree_map(fn, child, *(other[name] for other in others)) for name, child in tree.items()}
    kind = type(tree)
    names, static = _moving(kind), _static(tree)
    if any(_static(other) != static for other in others):
        raise RecordError(f"records of type {kind.__name__} differ in a static field: {static}")
    trees = (tree, *others)
    children = [tree_map(fn, *(getattr(t, name) for t in trees)) for name in names]
    return kind(*children) if static is None else _made(kind, children, static)


def add(a: Tree, b: Tree) -> Tree:
    """The sum, leaf by leaf."""
    return tree_map(torch.add, a, b)


def rows(tree: Tree, index: int | slice | Tensor) -> Tree:
    """The rows `index` of every leaf's client axis."""
    return tree_map(lambda leaf: leaf[index], tree)


def stack(trees: list[Tree]) -> Tree:
    """The trees of several clients as one tree with a client axis."""
    return tree_map(lambda *parts: torch.stack(parts), *trees)


def to(tree: Tree, device: torch.device | str) -> Tree:
    """Every leaf on `device`."""
    return tree_map(lambda leaf: leaf.to(device), tree)


def nbytes(tree: Tree) -> int:
    """Bytes of all leaves, without headers."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(tree))


def _describe(tree: Tree) -> Any:
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        return "tensor"
    children = parts(tree)
    if isinstance(tree, tuple):
        return [_describe(child) for _, child in children]
    fields = {name: _describe(child) for name, child in children}
    if isinstance(tree, dict):
        return {"dict": fields}
    structure = {"type": type_name(type(tree)), "fields": fields}
    return structure | ({"static": static} if (static := _named_static(tree)) else {})


def blueprint(tree: Tree) -> dict[str, Any]:
    """A tree without its values, as plain data: its structure, and the dtype, shape and device type of every leaf."""
    what = {name: (str(leaf.dtype).removeprefix("torch."), leaf.shape, leaf.device.type) for name, leaf in leaves(tree)}
    return {"record": _describe(tree), "leaves": what}


def assemble(plan: dict[str, Any], arrays: dict[str, Tensor]) -> Tree:
    """A tree from its blueprint and its leaves by name."""
    return _build(plan["record"], arrays, "")


def pack(tree: Tree, **note: str) -> bytes:
    """Safetensors bytes; the header holds the structure and the entries of `note`."""
    structure = _shallow(_describe(tree))
    arrays = {name: leaf.detach().cpu().clone(memory_format=torch.contiguous_format) for name, leaf in leaves(tree)}
    return write_arrays(arrays, metadata={"record": json.dumps(structure), **note})


def notes(data: bytes) -> dict[str, str]:
    """The metadata of the header; empty if `data` is not a safetensors file."""
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")], object_pairs_hook=_distinct)
        return {name: value for name, value in header["__metadata__"].items() if isinstance(value, str)}
    except (ValueError, TypeError, AttributeError, KeyError, RecordError, RecursionError):
        return {}


def unpack(data: bytes, like: Tree = None) -> Tree:
    """The record in `data`. With `like`, it must have the same structure, shapes and dtypes."""
    text = notes(data).get("record")
    if text is None:
        raise RecordError("these bytes hold no record: they were not written by consilience, or are truncated")
    try:
        structure = _shallow(json.loads(text, object_pairs_hook=_distinct))
        arrays = read_arrays(data)
        value = _build(structure, arrays, "")
    except RecordError:
        raise
    except Exception as error:  # safetensors raises its own, undocumented types
        raise RecordError(f"a damaged record: {error}") from error
    extra = sorted(set(arrays) - {name for name, _ in leaves(value)})
    if extra:
        raise RecordError(f"the record holds arrays that are no part of it: {', '.join(extra)}")
    if like is not None:
        check(value, like)
    return value


def _shallow(structure: Any, levels: int = DEEPEST) -> Any:
    """The structure, unless it is nested too deeply: functions of trees are recursive."""
    if levels == 0:
        raise RecordError(f"the record is nested more than {DEEPEST} levels deep")
    if isinstance(structure, dict | list | tuple):
        for part in structure.values() if isinstance(structure, dict) else structure:
            _shallow(part, levels - 1)
    return structure


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, unless it has a key twice: readers differ in the one that they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RecordError("the record's header has a key twice")
    return found


def _build(structure: Any, arrays: dict[str, Tensor], path: str) -> Tree:
    if structure is None:
        return None
    if structure == "tensor":
        return arrays[path or "value"]
    if isinstance(structure, list):
        return tuple(_build(part, arrays, f"{path}.{i}" if path else str(i)) for i, part in enumerate(structure))
    if "dict" in structure:
        return {key: _build(part, arrays, f"{path}.{key}" if path else key) for key, part in structure["dict"].items()}
    name, fields, fixed = structure["type"], structure["fields"], structure.get("static", {})
    if name not in _types:
        raise RecordError(f"unknown record type {name!r}; {nearest(name, _types)}")
    expected = [field for group in _fields[_types[name]] for field in group]
    if [*fields, *fixed] != expected:
        got = ", ".join([*fields, *fixed])
        raise RecordError(f"record {name} has fields {got} where {', '.join(expected)} were expected")
    trees = {key: _build(part, arrays, f"{path}.{key}" if path else key) for key, part in fields.items()}
    return _types[name](**trees, **{key: _tuples(value) for key, value in fixed.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def check(value: Tree, like: Tree, what: str = "record") -> None:
    """Raise a RecordError unless `value` has the structure, shapes and dtypes of `like`."""
    if _exact(value) != _exact(like):
        raise RecordError(f"{what}: expected {_name(like)}, got {_name(value)}")
    expected = dict(leaves(like))  # by name: dicts may differ in order
    for name, got in leaves(value):
        wanted = expected[name]
        if got.shape != wanted.shape:
            raise RecordError(f"{what}: {name} has shape {tuple(got.shape)} where {tuple(wanted.shape)} was expected")
        if got.dtype != wanted.dtype:
            raise RecordError(f"{what}: {name} is {got.dtype} where {wanted.dtype} was expected")


def _exact(tree: Tree) -> str:
    """The structure as text, in which 1, 1.0 and True differ; dicts may differ in order."""
    return json.dumps(_describe(tree), sort_keys=True)


def _name(tree: Tree) -> str:
    if tree is None or isinstance(tree, Tensor):
        return "None" if tree is None else "Tensor"
    inner = {name: "" if isinstance(child, Tensor) else f"={_name(child)}" for name, child in parts(tree)}
    if not isinstance(tree, tuple | dict):
        inner |= {name: f"={value!r}" for name, value in _named_static(tree).items()}
    return f"{type(tree).__name__}({', '.join(name + what for name, what in inner.items())})"
