"""Compiled functions whose first result is compared with plain code."""

import logging
import os
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from consilience.core import Tree, guards, keys
from consilience.core.files import user_cache

log = logging.getLogger("consilience")
# The largest accepted distance of compiled from plain results, relative to their norm: far above rounding errors, and
# far below the error of a wrong kernel or of another dropout mask.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 0.05, torch.bfloat16: 0.3}


CHECKED = 16
_TRACING: ContextVar[bool] = ContextVar("tracing", default=False)


@contextmanager
def tracing() -> Iterator[None]:
    """Functions in this block are written down as operations for the compiler: see `compiling`."""
    token = _TRACING.set(True)
    try:
        yield
    finally:
        _TRACING.reset(token)


def compiling() -> bool:
    """Whether a function runs to be compiled: then it must not look at values, nor choose kernels of its own."""
    return torch.compiler.is_compiling() or _TRACING.get()


class Checked:
    """A compiled function whose first result is compared with plain code. If they differ, or if compilation fails,
    plain code is used, and the log says so."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        torch.compiler.assume_constant_result(keys.word)  # type: ignore[no-untyped-call] # loads the compiler: not at import
        self.plain, self.run = plain, torch.compile(isolated(plain))
        self.checked = False

    def __call__(self, *args: Any) -> Any:
        if self.checked:
            return self.run(*args)
        self.checked, expected = True, self.plain(*args)
        try:
            error = distance(self.run(*args), expected)
        except Exception as failure:  # of any type: it is the compiler's
            error, why = float("inf"), f"cannot be compiled ({type(failure).__name__})"
        else:
            why = f"differs when compiled, by {error:.2g} of its norm"
        if not error <= TOLERANCE[torch.float64]:
            refuse("%s %s: plain code is used", self.plain.__name__, why)
            self.run = self.plain
        return expected


def keep_code() -> None:
    """Let the compiler keep its code in the user's cache folder, unless it has a folder already: its own choice is
    below /tmp, which restarts empty."""
    folder = user_cache()
    if folder is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiler"))


def refuse(message: str, *args: Any) -> None:
    """Log and count compiled code that is not used."""
    log.warning(message, *args)
    guards.count("compiled code refused", torch.ones(1, dtype=torch.bool))


def by_compiler(failure: Exception) -> bool:
    """Whether an error is the compiler's, and not that of the code that it compiled."""
    from torch._dynamo.exc import TorchDynamoException  # loads the compiler: not at import

    return isinstance(failure, TorchDynamoException)


def distance(found: Any, expected: Any) -> float:
    """The largest distance of two trees' tensors, relative to their norms; infinite where integers differ."""
    largest = 0.0
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        if not other.is_floating_point():
            largest = max(largest, 0.0 if torch.equal(one, other) else float("inf"))
        elif bool(other.isfinite().all()):
            norm, apart = float(other.double().norm()), float((one.double() - other.double()).norm())
            largest = max(largest, apart / norm if norm > 1e-6 else 0.0)
    return largest


def compared(size: int) -> list[int]:
    """The clients of a cohort whose results are compared with plain code: evenly spaced, because a graph can be right
    for the first and the last client and wrong between."""
    return sorted({i * (size - 1) // (CHECKED - 1) for i in range(CHECKED)})


def tensors(tree: Tree) -> list[Tensor]:
    """The leaves of a tree that are not None."""
    return [leaf for leaf in tree_leaves(tree) if leaf is not None]


def isolated(fn: Any, name: str = "") -> Callable[..., Any]:
    """The same function with its own code object. Dynamo counts recompilations for each code object. At its limit
    it runs a function uncompiled without a warning; graphs of other functions must not count towards that limit."""
    inner = getattr(fn, "__func__", fn)
    code = inner.__code__.replace(co_name=name or f"{inner.__name__}_{id(fn)}")
    alone = types.FunctionType(code, inner.__globals__, code.co_name, None, inner.__closure__)
    return types.MethodType(alone, fn.__self__) if inner is not fn else alone
