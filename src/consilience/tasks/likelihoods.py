"""Likelihoods p(y | output) of labels, numbers, or several labels at once."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.core import DataError, TaskError, keys
from consilience.data.dataset import Dataset
from consilience.metrics import classification, multilabel, regression


@dataclass(frozen=True)
class Likelihood(ABC):
    """The distribution of a target given a network's output."""

    kind: ClassVar[str]

    @abstractmethod
    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """−log p(y | output) of each example, [B]."""

    @abstractmethod
    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        """Targets drawn from p(y | output), for Fisher information."""

    @abstractmethod
    def predictive(self, output: Tensor) -> Tensor:
        """The mean of p(y | output)."""

    @abstractmethod
    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """Metrics of predictions. If these are means over several networks, `spread` is the variance over them."""

    @abstractmethod
    def check(self, output: Tensor, data: Dataset) -> None:
        """Raise a DataError if the targets do not fit the output."""


class Categorical(Likelihood):
    """p(y | output) = softmax(output)_y."""

    kind = "classification"

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y, reduction="none")

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        u = keys.uniform(key, output.shape[0], output.dtype).unsqueeze(-1)
        return (output.softmax(-1).cumsum(-1) <= u).sum(-1).clamp_max(output.shape[-1] - 1)

    def predictive(self, output: Tensor) -> Tensor:
        return output.softmax(-1)

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        return classification(prediction, y)

    def check(self, output: Tensor, data: Dataset) -> None:
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


@dataclass(frozen=True)
class Normal(Likelihood):
    """p(y | output) = N(output, noise²). The loss is ½‖y − output‖²/noise², without the constant."""

    kind = "regression"
    noise: float = 1.0

    def __post_init__(self) -> None:
        if self.noise <= 0:
            raise TaskError(f"noise is a standard deviation and must be positive, got {self.noise}")

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        return 0.5 * ((output - y) / self.noise).square().reshape(len(output), -1).sum(-1)

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        return output + self.noise * keys.standard(key, output.numel(), output.dtype).view(output.shape)

    def predictive(self, output: Tensor) -> Tensor:
        return output

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """Squared and absolute error, R², and the NLL under N(prediction, noise² + spread)."""
        noise = torch.full_like(prediction, self.noise**2)
        return regression(prediction, y, noise if spread is None else noise + spread)

    def check(self, output: Tensor, data: Dataset) -> None:
        if output.shape[1:] != data.y.shape[1:] or not data.y.is_floating_point():
            got, wanted = tuple(data.y.shape[1:]), tuple(output.shape[1:])
            raise DataError(
                f"{data.name}: targets of shape {got} and type {data.y.dtype}, but the module returns {wanted}; "
                "regression needs real targets [N, ...] of the module's output shape, such as "
                f"y.float().reshape{(-1, *wanted)}"
            )


class Bernoulli(Likelihood):
    """p(y | output) = Π_l Bernoulli(y_l; σ(output_l))."""

    kind = "multi-label"

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, y, reduction="none").sum(-1)

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        return (keys.uniform(key, output.numel(), output.dtype).view(output.shape) < output.sigmoid()).to(output.dtype)

    def predictive(self, output: Tensor) -> Tensor:
        return output.sigmoid()

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        return multilabel(prediction, y)

    def check(self, output: Tensor, data: Dataset) -> None:
        bytes_ = data.y.dtype == torch.uint8
        if data.y.dim() != 2 or data.y.shape[1] != output.shape[-1] or not (bytes_ or data.y.is_floating_point()):
            found = f"{data.y.dtype} {tuple(data.y.shape)}"
            wanted = f"[N, {output.shape[-1]}] of floats or uint8"
            raise DataError(f"{data.name}: multi-label targets {wanted} expected, got {found}")
        if not bool(data.y.max() <= 1 if bytes_ else ((data.y == 0) | (data.y == 1)).all()):
            raise DataError(f"{data.name}: multi-label targets must be 0 or 1")
