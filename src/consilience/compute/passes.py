"""A pass through a module: torch's functions in the forms that a cohort of clients needs.

While a module runs, a `Pass` sees every function of torch that it calls. Most run as they are. Random functions become
functions of the client's key, norms over a batch do not see its padding, and attention, recurrent and linear layers
take forms that `vmap` computes as a few large products. The module itself is not changed, so a layer that nobody here
has seen works if it calls the functions that all layers call.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from consilience.compute.compiler import compiling

Handler = Callable[..., Any]
"""Called in place of a function of torch, with (the pass, the function, its arguments)."""
HANDLERS: dict[str, Handler] = {}
"""By the functions' names: the compiler, inside of `vmap`, does not find all of them by themselves."""
Moments = tuple[Tensor, Tensor]
"""The mean and variance [C] of a batch."""
Seen = tuple[Tensor | None, Tensor | None, Moments, Tensor]
"""A layer's running mean and variance, the moments of a batch, and the number of entries of a channel."""


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Register a handler of functions of torch."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys((function.__name__ for function in functions), handler))
        return handler

    return register


class Pass(TorchFunctionMode):
    """One client's pass through a module.

    key: Seeds dropout and other random functions. None in evaluation: functions that draw then, too, draw the same
        numbers each time.
    w: Weights [B] of the examples: norms over a batch use its weighted statistics. None: they use the layer's own.
    given: Moments for the norms over a batch, in the order of their calls, in place of the batch's.
    seen: A list that receives the moments of every norm over a batch, in the order of calls.
    own: Norms over a batch use the layer's own statistics, though there are weights; those of the batch are only seen.
    """

    def __init__(
        self,
        key: Tensor | None = None,
        w: Tensor | None = None,
        *,
        given: list[Moments] | None = None,
        seen: list[Seen] | None = None,
        own: bool = False,
    ) -> None:
        super().__init__()
        self.key, self.w, self.seen, self.own = key, w, seen, own
        self.given: Iterator[Moments] | None = None if given is None else iter(given)
        self.draws = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(getattr(func, "__name__", ""))
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(self, func, *args, **(kwargs or {}))


@handles(Tensor.unflatten)
def _unflatten(run: Pass, func: Any, x: Tensor, dim: int, sizes: Any) -> Tensor:
    """As a function: inside of a pass the compiler cannot follow the method."""
    return torch.unflatten(x, dim, sizes)


def in_cohort(*tensors: Tensor | None) -> bool:
    """Whether a function runs for several clients at once, or is being compiled: then it needs a form for `vmap`."""
    if compiling():
        return True
    return any(t is not None and _below(t, torch._C._functorch.is_batchedtensor) for t in tensors)


def _below(tensor: Tensor, holds: Callable[[Tensor], bool]) -> bool:
    """Whether a property holds for a tensor or for one that it wraps, as `grad` inside `vmap` wraps them."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if holds(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def differentiated_around(tensor: Tensor) -> bool:
    """Whether a tensor of a cohort is part of a graph of plain autograd, which takes the gradients of all clients at
    once. Compiled code chooses layouts itself."""
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor.requires_grad
