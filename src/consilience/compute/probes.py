"""What a module does besides computing outputs from inputs, found by running it: state, randomness, mixed examples.

A module is judged by the operations that it runs and by the examples that reach an output, never by the size of an
effect: a layer whose output is scaled by 1e-6 today is not tomorrow.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from consilience.core import TaskError
from consilience.core.records import Tree


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation that draws from a random generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _harmless(func, args, kwargs or {}):
            self.found.add(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def _harmless(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation that may draw does not: fused attention and dropout at rate 0."""
    names = [argument.name for argument in func._schema.arguments]
    given = {
        **{a.name: a.default_value for a in func._schema.arguments},
        **dict(zip(names, args, strict=False)),
        **kwargs,
    }
    rate = next((given[name] for name in ("dropout_p", "p", "dropout") if name in given), None)
    return rate == 0 or given.get("training", given.get("train", True)) is False


@contextmanager
def watch(module: nn.Module, what: str) -> Iterator[None]:
    """Raise a TaskError if the module, used inside the `with` block, draws numbers that no key determines, or changes a
    buffer or a parameter. `what` says where the module runs."""
    before = {name: (id(t), t._version) for name, t in _tensors(module)}
    with _Drawing() as drawing:
        yield
    kind = type(module).__name__
    if drawing.found:
        raise TaskError(
            f"{kind} draws random numbers by {', '.join(sorted(drawing.found))} {what}, which cannot be repeated for "
            "a client: use torch.rand, randn, bernoulli or dropout, which follow the run's seed"
        )
    after = {name: (id(t), t._version) for name, t in _tensors(module)}
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        raise TaskError(
            f"{kind} changes its buffer {changed[0]!r} {what}, and all clients would share it: return what it holds as "
            "an output, make it a parameter, or use a layer without state"
        )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_buffers(remove_duplicate=False)
    yield from module.named_parameters(remove_duplicate=False)


class _Spoiled(TorchFunctionMode):
    """NaN in row 1 of what embeddings return: token ids cannot be NaN themselves."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return poisoned(out, 1) if func is F.embedding and len(out) == self.rows else out


class OtherPadding(TorchFunctionMode):
    """Other numbers in the padding of what embeddings return. `lengths` says, for each width, how many places are not
    padding; `sign` is that of the numbers."""

    def __init__(self, lengths: Mapping[int, int], sign: float) -> None:
        super().__init__()
        self.lengths, self.sign = lengths, sign

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not F.embedding or out.dim() < 3 or out.shape[1] not in self.lengths:
            return out
        return repadded(out, self.lengths[out.shape[1]], self.sign)


def repadded(x: Tensor, length: int, sign: float) -> Tensor:
    """The rows x [1, L, ...] with numbers that are larger than all others from place `length` on. They are finite: a
    mask may multiply by 0."""
    real = torch.arange(x.shape[1], device=x.device) < length
    return torch.where(real.view(-1, *[1] * (x.dim() - 2)), x, sign * (10 * x.abs().max() + 1))


def reaches(alone: Any, padded: Any, others: Sequence[Any]) -> bool:
    """Whether padding reaches the tensors that a module returns, in the places that an example has `alone`. Padded, it
    has the same numbers up to rounding there; with `others` in the padding it has the same bits."""
    for own, *wide in zip(*map(tree_leaves, (alone, padded, *others)), strict=True):
        if not isinstance(own, Tensor):
            continue
        if any(
            leaf.dim() != own.dim() or any(n < m for n, m in zip(leaf.shape, own.shape, strict=True)) for leaf in wide
        ):
            return True
        first, *rest = (leaf[tuple(map(slice, own.shape))] for leaf in wide)
        if not _same(own, first) or not all(torch.equal(first, other) for other in rest):
            return True
    return False


def poisoned(x: Tree, row: int) -> Tree:
    """The inputs with NaN in all floating numbers of one row."""

    def one(leaf: Tensor) -> Tensor:
        return leaf.index_fill(0, torch.tensor([row], device=leaf.device), float("nan")) if _real(leaf) else leaf

    return _mapped(one, x)


def swapped(x: Tree) -> Tree:
    """The inputs with the first row also in the place of the second."""
    return _mapped(lambda leaf: torch.cat([leaf[:1], leaf[:1], leaf[2:]]), x)


def mixes(run: Callable[[Tree], Tensor], x: Tree) -> bool:
    """Whether row 0 of what `run` returns depends on row 1 of the inputs. It does if NaN in row 1 reaches row 0, or if
    another row 1 changes it by more than rounding."""
    if len(tree_leaves(x)[0]) < 2:
        return False
    with torch.no_grad():
        before, other = run(x)[0], run(swapped(x))[0]
        with _Spoiled(len(tree_leaves(x)[0])):
            spoiled = run(poisoned(x, 1))[0]
    return bool(before.isfinite().all()) and not (_same(before, other) and _same(before, spoiled))


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs agree up to rounding; NaN agrees with nothing."""
    return torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-4 * float(a.abs().max()))


def _real(leaf: Tensor) -> bool:
    return leaf.is_floating_point()


def _mapped(fn: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    if isinstance(tree, dict):
        return {name: _mapped(fn, child) for name, child in tree.items()}
    return tuple(_mapped(fn, child) for child in tree) if isinstance(tree, tuple) else fn(tree)
