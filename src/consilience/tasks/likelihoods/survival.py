"""The partial likelihood of survival times."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from consilience.core import DataError, TaskError
from consilience.data.dataset import Dataset
from consilience.metrics import concordance
from consilience.tasks.likelihoods.base import Likelihood, targets_in_memory

Ties = Literal["efron", "breslow"]


@dataclass(frozen=True)
class PartialLikelihood(Likelihood):
    """Cox's partial likelihood Π_{i: event} e^{η_i} / Σ_{j: t_j ≥ t_i} e^{η_j}.

    The module returns the log hazard η [B] or [B, 1], without a constant; y [N, 2] has the time and the event (1, or 0
    if censored). The loss is −log of the product, divided by the number of examples, so that N times the loss is the
    negative log partial likelihood. The risk set of an example is that of its batch, so the loss is one number for the
    whole batch. A prediction is η, averaged over networks.

    Of d events at one time, `ties` "efron" removes 0, 1/d, … (d − 1)/d of their own hazards from the risk set in turn;
    "breslow" keeps the whole risk set for each."""

    kind = "cox"
    probed = 8
    ratio = "hazard ratio"
    ties: Ties = "efron"

    def __post_init__(self) -> None:
        if self.ties not in get_args(Ties):
            raise TaskError(f"ties is 'efron' or 'breslow', got {self.ties!r}")

    @property
    def whole_batch(self) -> bool:
        return True

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        # In float64, hazards that differ by a factor of up to e^700 have a sum that does not underflow.
        eta, (time, event) = output.reshape(len(y)).double(), y.unbind(-1)
        time, order = time.sort()
        eta, event = eta[order], event[order]
        first, top = torch.searchsorted(time, time), eta.detach().amax()  # first: of equal times
        hazard = (eta - top).exp()
        at_risk = hazard.flip(0).cumsum(0).flip(0)[first]
        if self.ties == "efron":
            at_risk = at_risk - _of_tied(hazard, event, first)
        return (((at_risk.log() + top - eta) * event).sum() / len(y)).to(output.dtype)

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        raise TaskError(
            "a partial likelihood has no distribution to draw times from, which Fisher information needs: use Newton, "
            "a method that needs gradients only, or cs.DiscreteHazards"
        )

    def predictive(self, output: Tensor) -> Tensor:
        return output.reshape(len(output))

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """Harrell's concordance, and the NLL: the loss with all test examples as one batch."""
        return {"concordance": concordance(prediction, y), "nll": self.losses(prediction.to(y.dtype), y).item()}

    def check(self, output: Tensor, data: Dataset) -> None:
        if output.dim() > 2 or output.numel() != len(output):
            raise DataError(
                f"{data.name}: cs.Cox needs one log hazard for each example, and the module returns "
                f"{list(output.shape)}"
            )
        check_times(data, "cs.Cox")


def _of_tied(hazard: Tensor, event: Tensor, first: Tensor) -> Tensor:
    """For each event, r/d of the hazards of all d events at its time, of which it is number r from 0 on; else 0."""
    none = torch.zeros_like(hazard)
    tied = none.index_add(0, first, event * hazard)[first]
    count = none.index_add(0, first, event.to(hazard))[first]
    before = event.cumsum(0) - event
    return (before - before[first]) / count.clamp_min(1) * tied * event


def check_times(data: Dataset, task: str) -> None:
    """Refuse targets other than finite times and events [N, 2]."""
    y: Any = targets_in_memory(data)
    if not isinstance(y, Tensor) or y.dim() != 2 or y.shape[1] != 2 or not y.is_floating_point():
        got = f"{y.dtype} {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise DataError(f"{data.name}: {task} needs targets [N, 2] of times and events, got {got}")
    if not bool((y[:, 0].isfinite() & ((y[:, 1] == 0) | (y[:, 1] == 1))).all()):
        raise DataError(f"{data.name}: times must be finite, and events 0 (censored) or 1")
