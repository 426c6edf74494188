"""Distillation: one network that imitates a run's predictions, trained on all clients' inputs in one place."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from consilience.algorithms.references import Pooled
from consilience.algorithms.shared.one_shot import TRAIN
from consilience.core.errors import DataError, TaskError
from consilience.data.dataset import Dataset
from consilience.evaluation.predictions import predict
from consilience.optim import Chain
from consilience.runs import Run, fit
from consilience.tasks.likelihoods import Categorical
from consilience.tasks.supervised import Classification, Supervised


class Imitation(Categorical):
    """Cross-entropy −Σ_c t_c log softmax(f(x))_c to a teacher's probabilities t."""

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        return -(y * F.log_softmax(output, dim=-1)).sum(-1)

    def check(self, output: Tensor, data: Dataset) -> None:
        """A probability for every output; test data has labels."""
        if data.y.dim() == 1:
            super().check(output, data)
        elif output.shape[1:] != data.y.shape[1:]:
            raise DataError(f"the student has {output.shape[-1]} outputs, its teacher {data.y.shape[-1]}")


def distil(teacher: Run, student: nn.Module, train: Chain = TRAIN, **options: Any) -> Run:
    """Train a student to predict what a run predicts (Hinton et al., 2015), on all clients' inputs: like `Pooled`, a
    reference that no real federation could run. `options` go to `fit`."""
    if teacher.task.kind != "classification":
        raise TaskError(f"distillation needs class probabilities, but the task is {teacher.task.kind}")
    federation = teacher.federation.stream(1)  # all that a stream has revealed, at once
    everything = torch.arange(len(federation.data))
    soft = predict(teacher.network, teacher.posterior, federation.data, everything).to(federation.data.device)
    data = replace(federation.data, y=soft, name=f"{federation.data.name}, imitated")
    augment = teacher.task.augment
    run = fit(
        Pooled(train),
        Supervised(student, Imitation(), augment=augment),
        replace(federation, data=data),
        **{"rounds": 1} | options,
    )
    return replace(run, task=Classification(student, augment=augment).prepare(run.task.device, run.task.dtype))
