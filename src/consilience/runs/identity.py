"""What a run is: a description in plain data, and the differences between two descriptions."""

import zlib
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from consilience.data import Dataset, Federation
from consilience.data.trees import entries, form, tensors
from consilience.tasks.task import Task


def describe(component: Any) -> Any:
    """A frozen component as plain data: {"name": class, field: value, …}."""
    if is_dataclass(component) and not isinstance(component, type):
        parts = {field.name: describe(getattr(component, field.name)) for field in fields(component)}
        return {"name": type(component).__name__, **parts}
    if isinstance(component, list | tuple):
        return [describe(part) for part in component]
    return component if isinstance(component, bool | int | float | str | None) else repr(component)


def about(task: Task) -> dict[str, Any]:
    """A task without its weights."""
    return {"kind": task.kind, "parameters": task.size, "module": str(task.module), **task.settings()}


def identity(algorithm: Any, task: Task, federation: Federation, cohort: int, seed: int, precision: str) -> Any:
    """The settings and checksums that must be equal for a stored run to be resumed."""
    return {
        "algorithm": describe(algorithm),
        "task": {**about(task), "weights": _crc(task.initial())},
        "augmentation": describe(task.augment),
        "federation": {
            "clients": len(federation),
            "examples": federation.examples,
            "partition": _crc(federation.order, federation.offsets),
            "labels": _crc(*tensors(federation.data.y)),
            "steps": federation.steps,
            **_forms(federation.data),
        },
        "cohort": cohort,
        "seed": seed,
        "precision": precision,
        "contents": _contents(task, federation.data),
    }


def _contents(task: Task, data: Dataset) -> dict[str, int]:
    """Checksums of all examples, of their scaling, and of the module's frozen parameters."""
    found = {f"inputs{name.removeprefix('x')}": tensors(part) for name, part in entries(data.x, "x")}
    found |= {"frozen": task.layout.fixed()}
    found |= {name: [t] for name, t in (("scale", data.scale), ("shift", data.shift)) if t is not None}
    return {name: _crc(*tensors) for name, tensors in found.items() if tensors}


def checksum(data: Dataset | Federation) -> int:
    """The checksum of a data set's examples, or of those that clients hold."""
    if isinstance(data, Dataset):
        return _crc(*tensors(data.x), *tensors(data.y))
    return _crc(data.order, data.offsets, *tensors(data.data.x), *tensors(data.data.y))


def _forms(data: Dataset) -> dict[str, str]:
    """The structure of inputs and targets that are not one tensor: names, padding and masks."""
    parts = {"inputs": data.x, "targets": data.y}
    return {name: form(part) for name, part in parts.items() if not isinstance(part, Tensor)}


def _crc(*tensors: Tensor) -> int:
    """A checksum, which takes a quarter of a second a gigabyte."""
    value = 0
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        value = zlib.crc32(flat.view(torch.uint8).numpy().data, value)  # NumPy has no bfloat16
    return value


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where two identities differ, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [d for key in keys for d in differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)]
    return [] if old == new else [f"{path} is {old!r} there and {new!r} here"]
