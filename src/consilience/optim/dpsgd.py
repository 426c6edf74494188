"""DPSGD: gradients of single examples, clipped and noised (Abadi et al., 2016)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from consilience.core import keys
from consilience.core.checks import NonNegative, Positive
from consilience.core.errors import ConfigError, TaskError
from consilience.core.ranges import Range, Ranges
from consilience.core.records import tree_map
from consilience.data.batch import Batch
from consilience.data.cohort import Cohort
from consilience.optim.chain import BatchGradient, Now
from consilience.optim.optimizers import SGD
from consilience.optim.turns import Gradient
from consilience.tasks.task import Task

EXAMPLE = keys.word("example")  # here, because compiled code cannot hash strings


@dataclass(frozen=True)
class DPSGD(SGD):
    """SGD along (Σ g_i min(1, clip/‖g_i‖) + N(0, (noise · clip)²)) / min(n, batch_size) over the examples i of a batch,
    so that the weights tell little of any example. The gradients of a batch are in memory together.

    Every example is in one batch of an epoch, so an epoch is one release, and r rounds have
    ε = `cs.algorithms.epsilon(noise, 1, 1, r * epochs, delta)` towards everybody who sees what the client sends. The
    neighbouring data set has another example in its place. This holds if the method uses the client's data in no other
    way: FedAvg, FedProx, FedDyn, SCAFFOLD by paths, and FedEP by `Identity` do not. The sizes of clients and the
    reported losses are not protected.

    The noise comes from the operating system. With `noise_from="seed"` a run can be repeated, but anyone who knows the
    seed can subtract the noise: use it for simulations."""

    ranges: ClassVar[Ranges] = {"lr": Range(1e-3, 1.0), "clip": Range(0.01, 10.0)}
    clip: Positive = 1.0
    noise: NonNegative = 1.0
    noise_from: Literal["system", "seed"] = "system"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixed:
            raise ConfigError(
                "DPSGD's ε counts an example once in a pass: mixed epochs hold several copies, leave mixed out"
            )

    @property
    def noisy(self) -> bool:
        return self.noise > 0

    def gradient(self, task: Task, loss: Callable[..., Tensor] | None = None) -> Gradient:
        """The *sum* of the clipped gradients."""
        if task.layout.main.batchnorms or task.whole_batch or task.mixes:
            raise TaskError(
                "DPSGD needs gradients of single examples, and here the loss of one depends on the others of its "
                "batch: use replace_batchnorm(model), or a loss that is a mean over examples"
            )
        return task.vectorize(_Clipped(loss or type(task).loss_one, self.clip))

    def drawn(self, cohort: Cohort, k: int, size: int, tag: str) -> Tensor:
        if self.noise_from == "seed":
            return super().drawn(cohort, k, size, tag)
        return keys.system_normal(k, size).to(cohort.n)

    def probe(self, gradient: BatchGradient, theta: Tensor, now: Now) -> tuple[Tensor, Tensor]:
        total, loss = gradient(theta)
        if now.noise is not None:
            total = total + self.noise * self.clip * now.noise
        return total / now.n.clamp_max(self.batch_size), loss


@dataclass(frozen=True)
class _Clipped:
    """(Σ of the clipped gradients, mean loss) of one client's batch."""

    loss: Callable[..., Tensor]
    clip: float

    def __call__(self, task: Task, theta: Tensor, batch: Batch, *rest: Any) -> tuple[Tensor, Tensor]:
        own = keys.fold(batch.key, EXAMPLE) ^ torch.arange(batch.size, device=theta.device)

        def one(example: Any, key: Tensor) -> tuple[Tensor, Tensor]:
            x, y = tree_map(lambda leaf: leaf.unsqueeze(0), example)
            alone = Batch(x, y, theta.new_ones(1), key)
            g, value = grad_and_value(lambda at: self.loss(task, at, alone, *rest))(theta)
            return g * (self.clip / g.norm().clamp_min(self.clip)), value

        gradients, values = vmap(one)((batch.x, batch.y), keys.mix(own))
        return batch.w @ gradients, batch.mean(values)
