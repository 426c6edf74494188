"""Trained modules as files for use without this library: torch.export, ONNX, and the folders of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from consilience.core.errors import ConfigError, TaskError

Example = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
"""Inputs of a batch: one tensor, a tuple of positional arguments, or keyword arguments by name."""


def ready(module: nn.Module, like: Mapping[str, Tensor]) -> nn.Module:
    """The module on the CPU, in evaluation, with buffers of the types that they have in `like`: statistics of a run in
    another precision have its type."""
    for name, buffer in module.named_buffers():
        buffer.data = buffer.data.to(like[name].dtype)
    return module.cpu().eval()


def export_module(module: nn.Module, path: Path, example: Example) -> Path:
    """Write a module as a graph whose first axes, of the inputs and outputs, are batches of any size: by torch.export
    for the suffix ".pt2", as ONNX for ".onnx"."""
    if path.suffix not in (".pt2", ".onnx"):
        raise ConfigError(f"the suffix of {path} must be .pt2 (torch.export) or .onnx (ONNX)")
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if path.suffix == ".onnx" and missing:
        raise ConfigError(f"ONNX needs the package {missing[0]}, which is missing: pip install 'consilience[onnx]'")
    args, kwargs = _arguments(example)
    axes = {0: torch.export.Dim("batch")}
    shapes = [axes for _ in args] if not kwargs else dict.fromkeys(kwargs, axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        program = torch.export.export(module.cpu().eval(), args, kwargs, dynamic_shapes=shapes)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise TaskError(f"torch.export cannot make a graph of {type(module).__name__}: {reason}") from error
    if path.suffix == ".pt2":
        torch.export.save(program, path)
    else:
        torch.onnx.export(program, f=path, dynamo=True, verbose=False)
    return path


def save_pretrained(module: nn.Module, folder: Path, corrected: bool) -> Path:
    """Write a module of transformers or peft by its own `save_pretrained`. If frozen weights were `corrected`, peft's
    adapters are merged into them, because peft saves adapters alone."""
    merge: Any = getattr(module, "merge_and_unload", None)
    if corrected and merge is not None:
        module = merge()
    save: Any = getattr(module, "save_pretrained", None)
    if save is None:
        raise TaskError(
            f"{type(module).__name__} has no save_pretrained, which modules of transformers and peft have: use "
            "run.state_dict(), or run.export(path, example)"
        )
    save(str(folder))
    return folder


def _arguments(example: Example) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Positional and keyword arguments with two rows or more: a batch of one would become a constant of the graph."""

    def rows(value: Any) -> Tensor:
        if not isinstance(value, Tensor) or not value.dim() or not len(value):
            raise ConfigError("example must be a batch of inputs: a tensor, a tuple of tensors, or a dict of tensors")
        return value.detach().cpu() if len(value) > 1 else value.detach().cpu().repeat(2, *[1] * (value.dim() - 1))

    if isinstance(example, Mapping):
        return (), {name: rows(value) for name, value in example.items()}
    return tuple(rows(value) for value in (example if isinstance(example, tuple) else (example,))), {}
