"""Survival times in intervals: a hazard for each interval."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.core import DataError, TaskError, keys
from consilience.data.dataset import Dataset
from consilience.metrics import concordance, integrated_brier
from consilience.metrics.scores import TINY
from consilience.tasks.likelihoods.base import Likelihood
from consilience.tasks.likelihoods.survival import check_times

Link = Literal["logit", "cloglog"]
SMALL = -15.0  # below this complementary log-log, log h is its series


@dataclass(frozen=True, eq=False)
class Hazards(Likelihood):
    """p(event in interval k | none before) = h_k, with h = σ(output) or, by "cloglog", h = 1 − exp(−e^output).

    Interval k ends at `times`[k] and includes its end; the first begins at 0. The module returns [B, T]; y [N, 2] has
    the time and the event (1, or 0 if censored). An example counts in the intervals that it survived and in that of its
    event; a censored one in those that had ended. After the last of `times` nothing is counted. The loss is that of a
    binary regression on the person-period table. A prediction is the survival curve S [N, T] at `times`.

    With an output a_k + f(x), "cloglog" is the model of proportional hazards of times that are known by interval, so
    e^coefficient is a hazard ratio; with "logit" it is a ratio of the odds of an event in an interval. Times are
    compared in float32."""

    kind = "discrete-hazards"
    probed = 8
    times: Sequence[float] | Tensor
    link: Link = "logit"

    def __post_init__(self) -> None:
        if self.link not in get_args(Link):
            raise TaskError(f"link is 'logit' or 'cloglog', got {self.link!r}")
        times = torch.as_tensor(self.times, dtype=torch.float32)
        fits = times.dim() == 1 and len(times) and bool(times.isfinite().all() & (times.diff() > 0).all())
        if not fits or float(times[0]) <= 0:
            raise TaskError("times are the ends of intervals: positive, finite numbers in increasing order")
        object.__setattr__(self, "times", times)

    @property
    def ratio(self) -> str:  # type: ignore[override]
        """What e^coefficient is."""
        return "hazard ratio" if self.link == "cloglog" else "odds ratio"

    @property
    def ends(self) -> Tensor:
        """The ends of the intervals [T]."""
        assert isinstance(self.times, Tensor)
        return self.times

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        return replace(self, times=self.ends.to(device))

    def _periods(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Whether an example survived each interval, and had its event in it [B, T]."""
        time, event = y[:, :1].float(), y[:, 1:] > 0
        after = time > self.ends
        survived = after | ((time == self.ends) & ~event)
        before = F.pad(after, (1, 0), value=True)[:, :-1]
        return survived, before & ~after & event

    def _logs(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """(log(1 − h), log h)."""
        if self.link == "logit":
            return -F.softplus(output), -F.softplus(-output)
        usual = output.clamp_min(SMALL)
        series = output - output.exp() / 2
        return -output.exp(), torch.where(output > SMALL, (-torch.expm1(-usual.exp())).clamp_min(TINY).log(), series)

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        survived, event = self._periods(y)
        alive, ended = self._logs(output)
        return -(alive * survived + ended * event).sum(-1)

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        """The end of the interval of the event; the last end, censored, if there is none."""
        u = keys.uniform(key, len(output), output.dtype).unsqueeze(-1)
        interval = (u < self.predictive(output)).sum(-1)  # S falls: the first interval with S ≤ u
        time = self.ends.to(output.dtype)[interval.clamp_max(len(self.ends) - 1)]
        return torch.stack([time, (interval < len(self.ends)).to(output.dtype)], -1)

    def masked(self, drawn: Tensor, y: Tensor) -> Tensor:
        """Drawn targets, censored where y was. The censoring of an example with an event is not known."""
        stays = (y[:, 1] == 0) & (y[:, 0] < drawn[:, 0])
        return torch.where(stays.unsqueeze(-1), y, drawn)

    def predictive(self, output: Tensor) -> Tensor:
        return self._logs(output)[0].cumsum(-1).exp()

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """Harrell's concordance of the expected time that is lost until the last of `times`, the integrated Brier score
        with weights from the censoring in y, and the NLL."""
        widths = F.pad(self.ends, (1, 0)).diff().to(prediction)
        risk = -(F.pad(prediction, (1, 0), value=1.0)[:, :-1] @ widths)
        survived, event = self._periods(y)
        curve = F.pad(prediction.double(), (1, 0), value=1.0)
        last = curve.gather(1, survived.sum(-1, keepdim=True)).squeeze(1)
        lost = ((curve[:, :-1] - curve[:, 1:]) * event).sum(-1)
        nll = -torch.where(event.any(-1), lost, last).clamp_min(TINY).log().mean().item()
        brier = integrated_brier(prediction, y, self.ends)
        return {"concordance": concordance(risk, y), "integrated_brier": brier, "nll": nll}

    def check(self, output: Any, data: Dataset) -> None:
        check_times(data, "cs.DiscreteHazards")
        count = len(self.ends)
        if output.dim() != 2 or output.shape[1] != count:
            raise DataError(
                f"{data.name}: cs.DiscreteHazards needs an output for each of {count} intervals, [B, {count}], and the "
                f"module returns {list(output.shape)}; cs.models.ProportionalHazards(features, {count}) is a linear one"
            )
        if bool((data.y[:, 0] < 0).any()):
            raise DataError(f"{data.name}: times must not be negative, because the first interval begins at 0")
