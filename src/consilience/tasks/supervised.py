"""Supervised tasks: a network and a likelihood of its targets."""

from typing import Any

import torch
from torch import Tensor, nn

from consilience.core.errors import DataError, TaskError
from consilience.data import Batch, Dataset
from consilience.data.augment import Augmentation
from consilience.tasks.inspection import inspect
from consilience.tasks.layout import MAIN
from consilience.tasks.likelihoods import Bernoulli, Categorical, Likelihood, Normal
from consilience.tasks.task import BatchNorm, Task


class Supervised(Task):
    """The loss is the mean negative log-likelihood of a batch."""

    def __init__(
        self,
        module: nn.Module,
        likelihood: Likelihood,
        *,
        augment: Augmentation | None = None,
        batch_norm: BatchNorm = "estimated",
    ) -> None:
        super().__init__({MAIN: module}, likelihood, augment=augment, batch_norm=batch_norm)
        self.kind = likelihood.kind

    def loss_one(self, theta: Tensor, batch: Batch) -> Tensor:
        return batch.mean(self.likelihood.losses(self.apply_one(theta, batch.x, batch.key, batch.w), batch.y))

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.likelihood.predictive(self.apply_one(theta.to(self.dtype), self._evaluated(x)))

    def _evaluated(self, x: Tensor) -> Tensor:
        return x if self.augment is None else self.augment.evaluation(x)

    def check(self, data: Dataset, targets: bool = True) -> None:
        """Run the module on two examples and raise an error if it cannot learn from the data."""
        if not len(data):
            raise DataError(f"{data.name} has no examples")
        probe = torch.arange(min(2, len(data)), device=data.x.device)
        x = data.inputs(probe, self.dtype).to(self.device)
        try:
            output = self.apply_one(self.initial(), self._evaluated(x), w=torch.ones(len(probe), device=self.device))
        except Exception as error:
            shape = tuple(x.shape[1:])
            raise DataError(f"the module cannot take examples of {data.name}, of shape {shape}: {error}") from error
        if not isinstance(output, Tensor) or output.shape[0] != len(probe):
            raise TaskError("the module must return one tensor with a row for each example")
        if targets:
            self.likelihood.check(output, data)
        inspect(self, self._evaluated(x))


class Classification(Supervised):
    """p(y | x, θ) = softmax(f(x))_y."""

    kind = Categorical.kind

    def __init__(
        self, module: nn.Module, *, augment: Augmentation | None = None, batch_norm: BatchNorm = "estimated"
    ) -> None:
        super().__init__(module, Categorical(), augment=augment, batch_norm=batch_norm)


class Regression(Supervised):
    """p(y | x, θ) = N(f(x), noise²). The loss is ½‖y − f(x)‖²/noise², without the constant."""

    kind = Normal.kind

    def __init__(self, module: nn.Module, *, noise: float = 1.0, augment: Augmentation | None = None) -> None:
        super().__init__(module, Normal(noise), augment=augment)
        self.noise = noise

    def settings(self) -> dict[str, Any]:
        return {"noise": self.noise}


class MultiLabel(Supervised):
    """p(y | x, θ) = Π_l Bernoulli(y_l; σ(f_l(x)))."""

    kind = Bernoulli.kind

    def __init__(self, module: nn.Module, *, augment: Augmentation | None = None) -> None:
        super().__init__(module, Bernoulli(), augment=augment)
