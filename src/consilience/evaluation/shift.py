"""Label shift: predictions for a client whose classes have other frequencies than those of the training data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from consilience.core.errors import DataError

STEPS = 1000  # of EM at most
TOLERANCE = 1e-6


@dataclass(frozen=True)
class LabelShift:
    """Class frequencies of the training data and of a new client, both [C]. Called with predictions [N, C], it returns
    those of the new client: p(y|x) · new_y / old_y, scaled to sum to 1."""

    old: Tensor
    new: Tensor

    def __call__(self, p: Tensor) -> Tensor:
        _check_classes(p, len(self.new))
        shifted = p * (self.new / self.old).to(p)
        return shifted / shifted.sum(-1, keepdim=True)


def estimate_shift(p: Tensor, counts: Tensor) -> LabelShift:
    """The shift that explains predictions p [N, C] for unlabelled examples, of a model that was trained on `counts` [C]
    examples of each class, by EM (Saerens et al., 2002): new ← mean of the corrected predictions.

    It assumes that the inputs of a class are the same everywhere, and only classes differ in frequency. One example of
    the old frequencies is added to the new ones, so that no frequency is 0. Classes without training examples keep the
    frequency 0."""
    _check_classes(p, len(counts))
    if not len(p):
        raise DataError("class frequencies are estimated from unlabelled inputs, and there are none")
    p, seen = p.double().cpu(), counts > 0
    old = (counts.double().cpu() / counts.sum().cpu()).clamp_min(torch.finfo(torch.float64).tiny)
    new = old
    for _ in range(STEPS):
        before, mean = new, LabelShift(old, new)(p).sum(0)
        new = torch.where(seen.cpu(), (mean + old) / (len(p) + 1), 0.0)
        new = new / new.sum()
        if float((new - before).abs().max()) < TOLERANCE:
            break
    return LabelShift(old, new)


def _check_classes(p: Tensor, classes: int) -> None:
    if p.dim() != 2 or p.shape[1] != classes:
        raise DataError(f"predictions must be probabilities of {classes} classes, got the shape {list(p.shape)}")
