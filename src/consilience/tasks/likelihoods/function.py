"""A plain function as a loss: enough to train, and to score by itself and by own metrics."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from consilience.core import DataError, TaskError
from consilience.data.dataset import Dataset
from consilience.tasks.likelihoods.base import Likelihood


@dataclass(frozen=True)
class Function(Likelihood):
    """`loss(output, y)` returns the losses [B] of each example, or one number for the batch.

    `batch` says whether the losses of examples depend on each other; None leaves it to `check`, which sets `mixes`.
    `predict(output)` returns a quantity [B, ...] that may be averaged over networks, such as a probability. With `raw`,
    predictions are the outputs themselves, which the loss can score."""

    kind = "own-loss"
    trees = True
    probed = 8
    loss: Callable[[Any, Any], Tensor]
    batch: bool | None = None
    predict: Callable[[Any], Tensor] | None = None
    raw: bool = False
    mixes: bool = False

    @property
    def whole_batch(self) -> bool:
        return self.mixes if self.batch is None else self.batch

    @property
    def averages(self) -> bool:
        return self.predict is not None and not self.raw

    @property
    def of_outputs(self) -> Self:
        return replace(self, raw=True)

    def losses(self, output: Any, y: Any) -> Tensor:
        return self.loss(output, y)

    def draw(self, output: Any, key: Tensor) -> Tensor:
        raise TaskError(
            "a plain loss function has no distribution to draw targets from, which Fisher information needs: use a "
            "method that needs gradients only, or give cs.Supervised a likelihood"
        )

    def predictive(self, output: Any) -> Any:
        return self.predict(output) if self.predict is not None and not self.raw else output

    def shown(self, prediction: Any) -> Any:
        return self.predict(prediction) if self.raw and self.predict is not None else prediction

    def scores(self, prediction: Any, y: Any, spread: Tensor | None = None) -> dict[str, float]:
        """The mean loss of outputs. The loss of a quantity that `predict` returns is not defined."""
        return {} if self.averages else {"loss": self.losses(prediction, y).double().mean().item()}

    def check(self, output: Any, data: Dataset) -> None:
        """Targets are the function's own affair."""

    def decided(self, output: Any, y: Any, count: int, name: str) -> Self:
        """This loss with `mixes` found by trying it on `count` examples; an error if it returns something else."""
        try:
            found = self.loss(output, y)
        except Exception as error:
            raise TaskError(f"the loss cannot take the module's output and the targets of {name}: {error}") from error
        if not isinstance(found, Tensor) or not (found.dim() == 0 or found.shape == (count,)):
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise TaskError(
                f"the loss must return a loss for each of {count} examples, [{count}], or one number for the batch, "
                f"and it returns {got}"
            )
        if not bool(found.isfinite().all()):
            raise DataError(f"the loss of the first {count} examples of {name} is not finite: {found.tolist()}")
        mixes = found.dim() == 0 or self._depends(output, y, found)
        if self.batch is False and mixes:
            raise TaskError(
                "batch=False says that each example has its own loss, and the loss of one depends on others: return "
                "losses [B] of each example alone, or leave batch out"
            )
        return replace(self, mixes=self.mixes or mixes)

    def _depends(self, output: Any, y: Any, found: Tensor) -> bool:
        """Whether the loss of any example changes when the outputs of all others are other numbers, or nan."""
        for row in range(len(found)) if len(found) > 1 else ():
            others = torch.arange(len(found), device=found.device) != row
            for factor, term in ((2.0, 1.0), (torch.nan, 0.0)):

                def changed(leaf: Any, others: Tensor = others, factor: float = factor, term: float = term) -> Any:
                    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.shape[:1] != found.shape:
                        return leaf
                    return torch.where(others.view(-1, *[1] * (leaf.dim() - 1)), factor * leaf + term, leaf)

                again = self.loss(tree_map(changed, output), y)[row]
                if not torch.allclose(again, found[row], rtol=1e-5, atol=1e-8):
                    return True
        return False
