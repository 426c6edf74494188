"""Likelihoods: how a network's outputs meet labels, numbers, or several labels at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from consilience.core import keys
from consilience.core.errors import DataError, TaskError
from consilience.data.augment import Augmentation
from consilience.data.dataset import Dataset
from consilience.metrics import classification, multilabel, regression
from consilience.tasks.task import Task


class Classification(Task):
    """p(y | x, θ) = softmax(f(x))_y."""

    kind = "classification"

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of each example."""
        return F.cross_entropy(output, y, reduction="none")

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        """Labels by inverting the cumulative distribution."""
        u = keys.uniform(key, output.shape[0], output.dtype).unsqueeze(-1)
        return (output.softmax(-1).cumsum(-1) <= u).sum(-1).clamp_max(output.shape[-1] - 1)

    def predictive(self, output: Tensor) -> Tensor:
        """Class probabilities."""
        return output.softmax(-1)

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """Accuracy, NLL, ECE and Brier score."""
        return classification(prediction, y)

    def fits(self, output: Tensor, data: Dataset) -> None:
        """Labels must be integers below the number of outputs."""
        if data.y.dim() != 1 or data.y.dtype != torch.int64:
            raise DataError(
                f"{data.name}: classification needs labels [N] of type torch.int64, got {data.y.dtype} {data.y.dim()}-d"
                + (": for numbers to predict, the task is regression" if data.y.is_floating_point() else "")
            )
        low, high, outputs = int(data.y.min()), int(data.y.max()), output.shape[-1]
        if output.dim() != 2 or not 0 <= low <= high < outputs:
            raise DataError(
                f"{data.name}: labels lie in {low}..{high}, but the module has {outputs} outputs "
                f"(labels 0..{outputs - 1} are allowed)"
            )


class Regression(Task):
    """p(y | x, θ) = N(f(x), noise²). The loss is ½‖y − f(x)‖²/noise², without the constant."""

    kind = "regression"

    def __init__(self, module: nn.Module, *, noise: float = 1.0, augment: Augmentation | None = None) -> None:
        super().__init__(module, augment=augment)
        if noise <= 0:
            raise TaskError(f"noise is a standard deviation and must be positive, got {noise}")
        self.noise = noise

    def settings(self) -> dict[str, Any]:
        """The noise."""
        return {"noise": self.noise}

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Half the squared error in units of the noise."""
        return 0.5 * ((output - y) / self.noise).square().reshape(len(output), -1).sum(-1)

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        """The prediction plus noise."""
        return output + self.noise * keys.standard(key, output.numel(), output.dtype).view(output.shape)

    def predictive(self, output: Tensor) -> Tensor:
        """The regression itself."""
        return output

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """Squared and absolute error, R², and the NLL under N(prediction, noise² + spread)."""
        noise = torch.full_like(prediction, self.noise**2)
        return regression(prediction, y, noise if spread is None else noise + spread)

    def fits(self, output: Tensor, data: Dataset) -> None:
        """Targets must have the shape of the outputs."""
        if output.shape[1:] != data.y.shape[1:] or not data.y.is_floating_point():
            got, wanted = tuple(data.y.shape[1:]), tuple(output.shape[1:])
            raise DataError(
                f"{data.name}: targets of shape {got} and type {data.y.dtype}, but the module returns {wanted}; "
                "regression needs real targets [N, ...] of the module's output shape, such as "
                f"y.float().reshape{(-1, *wanted)}"
            )


class MultiLabel(Task):
    """p(y | x, θ) = Π_l Bernoulli(y_l; σ(f_l(x)))."""

    kind = "multi-label"

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Binary cross-entropy, summed over labels."""
        return F.binary_cross_entropy_with_logits(output, y, reduction="none").sum(-1)

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        """Every label by its own coin."""
        return (keys.uniform(key, output.numel(), output.dtype).view(output.shape) < output.sigmoid()).to(output.dtype)

    def predictive(self, output: Tensor) -> Tensor:
        """The probability of every label."""
        return output.sigmoid()

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """Precision, recall, F1 and NLL."""
        return multilabel(prediction, y)

    def fits(self, output: Tensor, data: Dataset) -> None:
        """Targets must be 0 or 1 for every output."""
        bytes_ = data.y.dtype == torch.uint8
        if data.y.dim() != 2 or data.y.shape[1] != output.shape[-1] or not (bytes_ or data.y.is_floating_point()):
            found = f"{data.y.dtype} {tuple(data.y.shape)}"
            wanted = f"[N, {output.shape[-1]}] of floats or uint8"
            raise DataError(f"{data.name}: multi-label targets {wanted} expected, got {found}")
        if not bool(data.y.max() <= 1 if bytes_ else ((data.y == 0) | (data.y == 1)).all()):
            raise DataError(f"{data.name}: multi-label targets must be 0 or 1")
