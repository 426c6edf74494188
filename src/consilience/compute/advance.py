"""The elementwise part of a local step as one compiled pass over memory, on a CPU."""

import logging
from typing import Any

import torch
from torch import Tensor

from consilience.compute.compiler import TOLERANCE, by_compiler, distance, isolated
from consilience.compute.replay import Advance
from consilience.core.records import tree_map

log = logging.getLogger("consilience")


class OnePass:
    """`advance(θ, gradient, memory, …)`, compiled: momentum, prior, decay and step read and write every number once.

    Its first result is compared with plain code, by the change of θ and of the memory. If they differ, or if the
    compiler fails, plain code is used, and the log says so."""

    def __init__(self, advance: Advance) -> None:
        self.plain, self.run = advance, torch.compile(isolated(advance))
        self.checked = False

    def __call__(self, theta: Tensor, *rest: Any) -> None:
        # Numbers become tensors: the compiler makes new code for every other number.
        given: tuple[Any, ...] = (
            theta,
            *(theta.new_full((), part) if isinstance(part, float) else part for part in rest),
        )
        try:
            if self.checked:
                self.run(*given)
            else:
                self._first(*given)
        except Exception as failure:  # before anything has moved
            if not by_compiler(failure):
                raise
            log.warning("the optimiser's step cannot be compiled (%s): plain code is used", type(failure).__name__)
            self.run = self.plain
            self.plain(*given)

    def _first(self, theta: Tensor, g: Tensor, memory: tuple[Tensor, ...], *rest: Any) -> None:
        before = tree_map(torch.clone, (theta, memory))
        expected, gradient = tree_map(torch.clone, ((theta, memory), g))
        self.plain(expected[0], gradient, expected[1], *rest)
        self.run(theta, g, memory, *rest)
        self.checked = True
        found, wanted = (tree_map(torch.sub, after, before) for after in ((theta, memory), expected))
        if not distance(found, wanted) <= TOLERANCE[theta.dtype]:
            log.warning("the optimiser's step differs when it is compiled: plain code is used")
            self.run = self.plain
            tree_map(Tensor.copy_, (theta, memory), expected)
