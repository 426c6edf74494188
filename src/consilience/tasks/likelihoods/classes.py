"""Likelihoods of labels: one of several classes, one of two, ordered ones, or several labels at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.core import DataError, TaskError, keys
from consilience.data.dataset import Dataset
from consilience.metrics import classification, multilabel, weighted_classification
from consilience.tasks.likelihoods.base import Likelihood, check_labels, choose, targets_in_memory

Weights = Sequence[float] | Tensor | Literal["balanced"] | None


@dataclass(frozen=True, eq=False)
class Weighing(Likelihood):
    """A likelihood of classes with `weights`, one a class, which multiply the losses of the class's examples: the
    objective is Σ w_y log p(y), so an example counts as w_y examples (its likelihood to the power w_y). The mean is
    over examples, not over Σ w_y as in torch. "balanced" are n / (C n_c), from the numbers n_c of training examples of
    the C classes at all clients together. Scores use no weights."""

    weights: Weights = None

    def __post_init__(self) -> None:
        if self.weights is None or self.is_unbalanced:
            return
        weights = torch.as_tensor(self.weights)
        weights = weights if weights.is_floating_point() else weights.float()
        if weights.dim() != 1 or not bool((weights.isfinite() & (weights >= 0)).all()):
            raise TaskError(f"weights must be one finite number ≥ 0 for each class, or 'balanced', got {self.weights}")
        object.__setattr__(self, "weights", weights)

    @property
    def is_unbalanced(self) -> bool:
        """Whether the weights are "balanced", and the numbers of examples are still to be given."""
        return isinstance(self.weights, str) and self.weights == "balanced"

    def balanced(self, counts: Sequence[int]) -> Self:
        """The same likelihood with weights n / (C n_c), for these numbers of examples n_c."""
        if empty := [number for number, count in enumerate(counts) if not count]:
            raise DataError(
                f"weights='balanced' divides by the number of examples of each class, and class {empty[0]} has none: "
                "give weights as numbers"
            )
        return replace(self, weights=[sum(counts) / (len(counts) * count) for count in counts])

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        return replace(self, weights=self.weights.to(device, dtype)) if isinstance(self.weights, Tensor) else self

    def _known(self) -> Tensor | None:
        if self.is_unbalanced:
            raise TaskError("weights='balanced' are known once cs.fit has counted the classes of the federation")
        return self.weights if isinstance(self.weights, Tensor) else None

    def _check_weights(self, classes: int) -> None:
        if isinstance(self.weights, Tensor) and len(self.weights) != classes:
            raise TaskError(f"there are {len(self.weights)} class weights, but the module has {classes} outputs")


@dataclass(frozen=True, eq=False)
class Categorical(Weighing):
    """p(y | output) = softmax(output)_y, for outputs [B, C] and labels [N].

    `label_smoothing` ε trains for (1 − ε) of the label and ε / C of every class. Scores do not use it."""

    kind = "classification"
    ratio = "odds ratio"
    categorical = True
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 1:
            raise TaskError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y, self._known(), reduction="none", label_smoothing=self.label_smoothing)

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        return choose(output.softmax(-1), key)

    def roots(self, output: Tensor) -> Tensor:
        """√p_c (p − e_c) for every class c."""
        p = output.softmax(-1)
        unit = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
        return p.mT.sqrt().unsqueeze(-1) * (p - unit.unsqueeze(1))

    def predictive(self, output: Tensor) -> Tensor:
        return output.softmax(-1)

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        return classification(prediction, y)

    def resampled(self, prediction: Tensor, y: Tensor, spread: Tensor | None, weights: Tensor) -> dict[str, Tensor]:
        return weighted_classification(prediction, y, weights)

    def check(self, output: Tensor, data: Dataset) -> None:
        outputs = output.shape[-1]
        check_labels(data, self.kind, max(outputs, 2), f"the module has {outputs} outputs")
        if output.dim() == 1 or outputs == 1:
            raise DataError(
                f"{data.name}: classification needs an output for every class, and the module returns one number: make "
                "it cs.Binary (one logit), or give the module two outputs"
            )
        if output.dim() != 2:
            raise DataError(
                f"{data.name}: classification needs outputs [B, classes], and the module returns {list(output.shape)}; "
                "for one label at each position, the task is cs.LanguageModel"
            )
        self._check_weights(outputs)


@dataclass(frozen=True, eq=False)
class Binary(Weighing):
    """p(y = 1 | output) = σ(output), for one logit [B] or [B, 1] and labels 0 or 1 [N]. Predictions have two columns,
    like those of two classes."""

    kind = "binary"
    ratio = "odds ratio"
    categorical = True

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        logit = output.reshape(y.shape)
        weights = self._known()
        each = None if weights is None else weights[y.long()]
        return F.binary_cross_entropy_with_logits(logit, y.to(logit.dtype), each, reduction="none")

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        return choose(self.predictive(output), key)

    def roots(self, output: Tensor) -> Tensor:
        """√(p (1 − p))."""
        return (output.sigmoid() * (-output).sigmoid()).sqrt().unsqueeze(0)

    def predictive(self, output: Tensor) -> Tensor:
        logit = output.reshape(len(output))
        return torch.stack([(-logit).sigmoid(), logit.sigmoid()], -1)

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        return classification(prediction, y.long())

    def resampled(self, prediction: Tensor, y: Tensor, spread: Tensor | None, weights: Tensor) -> dict[str, Tensor]:
        return weighted_classification(prediction, y.long(), weights)

    def check(self, output: Tensor, data: Dataset) -> None:
        if output.dim() > 2 or output.numel() != len(output):
            raise DataError(
                f"{data.name}: cs.Binary needs one logit for each example, and the module returns "
                f"{list(output.shape)}; for an output for every class, the task is cs.Classification"
            )
        if data.y.dim() != 1 or not bool(((data.y == 0) | (data.y == 1)).all()):
            raise DataError(f"{data.name}: binary labels [N] of 0 and 1 expected, got {data.y.dtype} {data.y.dim()}-d")
        self._check_weights(2)


class Ordinal(Likelihood):
    """p(y > k | output) = σ(c_k) for ordered classes 0..K − 1 and cumulative logits c_0 > c_1 > … > c_{K−2}.

    The module returns K − 1 numbers [B, K − 1]: c_0, and how far each further logit lies below the one before, as
    c_k = c_{k−1} − softplus(output_k). So any output gives ordered logits. Where the numbers after the first do not
    depend on the input, this is the proportional-odds model."""

    kind = "ordinal"
    categorical = True

    def _log_probs(self, output: Tensor) -> Tensor:
        """log p of every class, [B, K]: σ(a) − σ(b) = σ(a) σ(−b) (1 − e^{b−a})."""
        steps = F.softplus(output[:, 1:])
        c = output[:, :1] - torch.cat([torch.zeros_like(output[:, :1]), steps.cumsum(-1)], -1)
        tiny = torch.finfo(output.dtype).tiny
        between = F.logsigmoid(c[:, :-1]) + F.logsigmoid(-c[:, 1:]) + (-torch.expm1(-steps)).clamp_min(tiny).log()
        return torch.cat([F.logsigmoid(-c[:, :1]), between, F.logsigmoid(c[:, -1:])], -1)

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        return -self._log_probs(output).gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        return choose(self.predictive(output), key)

    def predictive(self, output: Tensor) -> Tensor:
        return self._log_probs(output).softmax(-1)

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """Those of a classification, and the mean absolute error of the median class, in classes."""
        median = (prediction.cumsum(-1) < 0.5).sum(-1).clamp_max(prediction.shape[-1] - 1)
        return {**classification(prediction, y), "mae": (median - y).abs().double().mean().item()}

    def check(self, output: Tensor, data: Dataset) -> None:
        if output.dim() != 2:
            raise DataError(
                f"{data.name}: cs.Ordinal needs outputs [B, K - 1] for K classes, and the module returns "
                f"{list(output.shape)}"
            )
        outputs = output.shape[-1]
        because = f"the module has {outputs} outputs: one fewer than classes"
        check_labels(data, self.kind, outputs + 1, because)


class Bernoulli(Likelihood):
    """p(y | output) = Π_l Bernoulli(y_l; σ(output_l))."""

    kind = "multi-label"
    ratio = "odds ratio"

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, y, reduction="none").sum(-1)

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        return (keys.uniform(key, output.numel(), output.dtype).view(output.shape) < output.sigmoid()).to(output.dtype)

    def roots(self, output: Tensor) -> Tensor:
        """√(p_l (1 − p_l)) e_l for every label l."""
        unit = torch.eye(output.shape[-1], dtype=output.dtype, device=output.device)
        return (output.sigmoid() * (-output).sigmoid()).sqrt() * unit.unsqueeze(1)

    def predictive(self, output: Tensor) -> Tensor:
        return output.sigmoid()

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        return multilabel(prediction, y)

    def check(self, output: Tensor, data: Dataset) -> None:
        y = targets_in_memory(data)
        bytes_ = y.dtype == torch.uint8
        if data.y.dim() != 2 or data.y.shape[1] != output.shape[-1] or not (bytes_ or data.y.is_floating_point()):
            found = f"{data.y.dtype} {tuple(data.y.shape)}"
            wanted = f"[N, {output.shape[-1]}] of floats or uint8"
            raise DataError(f"{data.name}: multi-label targets {wanted} expected, got {found}")
        if not bool(y.max() <= 1 if bytes_ else ((y == 0) | (y == 1)).all()):
            raise DataError(f"{data.name}: multi-label targets must be 0 or 1")
