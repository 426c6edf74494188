"""The partial likelihood of survival times."""

import torch
from torch import Tensor

from consilience.core import DataError, TaskError
from consilience.data.dataset import Dataset
from consilience.metrics import concordance
from consilience.tasks.likelihoods.base import Likelihood


class PartialLikelihood(Likelihood):
    """Cox's partial likelihood Π_{i: event} e^{η_i} / Σ_{j: t_j ≥ t_i} e^{η_j}, with Breslow's rule for ties.

    The module returns the log hazard η [B] or [B, 1], without a constant; y [N, 2] has the time and the event (1, or 0
    if censored). The loss is −log of the product, divided by the number of examples, so that N times the loss is the
    negative log partial likelihood. The risk set of an example is that of its batch, so the loss is one number for the
    whole batch. A prediction is η, averaged over networks."""

    kind = "cox"
    probed = 8

    @property
    def whole_batch(self) -> bool:
        return True

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        eta, (time, event) = output.reshape(len(y)), y.unbind(-1)
        time, order = time.sort()
        eta, event = eta[order], event[order]
        at_risk = eta.flip(0).logcumsumexp(0).flip(0)[torch.searchsorted(time, time)]  # from the first of equal times
        return ((at_risk - eta) * event).sum() / len(y)

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        raise TaskError(
            "a partial likelihood has no distribution to draw times from, which Fisher information needs: use a method "
            "that needs gradients only, or Newton"
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
        y = data.y
        if y.dim() != 2 or y.shape[1] != 2 or not y.is_floating_point():
            raise DataError(
                f"{data.name}: cs.Cox needs targets [N, 2] of times and events, got {y.dtype} {list(y.shape)}"
            )
        if not bool((y[:, 0].isfinite() & ((y[:, 1] == 0) | (y[:, 1] == 1))).all()):
            raise DataError(f"{data.name}: times must be finite, and events 0 (censored) or 1")
