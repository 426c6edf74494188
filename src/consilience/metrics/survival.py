"""Scores of survival curves: the Brier score with inverse probabilities of censoring, and its integral over time."""

import torch
from torch import Tensor

from consilience.core.errors import DataError


def kaplan_meier(y: Tensor, *, censoring: bool = False) -> tuple[Tensor, Tensor]:
    """(times [M], survival after each [M]) of the events in y [N, 2], or of the censorings.

    Both depend on sums over examples alone: the numbers of events, of censorings, and of examples at risk at a time. An
    event comes before a censoring at the same time."""
    time, event = y.detach().cpu().double().unbind(-1)
    times, at = torch.unique(time, return_inverse=True)
    ends = torch.zeros(len(times), 2, dtype=torch.float64).index_put_(
        (at, event.long()), torch.ones(len(time)).double(), True
    )
    at_risk = ends.sum(1).flip(0).cumsum(0).flip(0)
    lost, exposed = (ends[:, 0], at_risk - ends[:, 1]) if censoring else (ends[:, 1], at_risk)
    return times, (1 - lost / exposed.clamp_min(1)).cumprod(0)


def _before(times: Tensor, steps: tuple[Tensor, Tensor], *, left: bool) -> Tensor:
    """A survival curve at some times, or just before them with `left`."""
    knots, values = steps
    place = torch.searchsorted(knots, times.contiguous(), right=not left)
    return torch.cat([values.new_ones(1), values])[place]


def brier_scores(survival: Tensor, y: Tensor, times: Tensor, *, censored: Tensor | None = None) -> Tensor:
    """The Brier score at each time [T] of survival probabilities [N, T]; nan where nobody is uncensored any more.

    BS(t) = mean of S(t)² / G(t_i−) for events until t, and of (1 − S(t))² / G(t) for examples that outlive t. G is the
    Kaplan–Meier curve of the censoring in `censored` [M, 2], by default in y itself (Graf et al., 1999)."""
    survival, times = survival.detach().cpu().double(), torch.as_tensor(times).detach().cpu().double()
    time, event = y.detach().cpu().double().unbind(-1)
    if survival.shape != (len(time), len(times)):
        raise DataError(f"survival must be [{len(time)}, {len(times)}], got {list(survival.shape)}")
    curve = kaplan_meier(y if censored is None else censored, censoring=True)
    own, later = _before(time, curve, left=True), _before(times, curve, left=False)
    ended = (time[:, None] <= times) & (event[:, None] > 0)
    died = torch.where(ended, survival.square() / own[:, None], 0)
    lived = torch.where(time[:, None] > times, (1 - survival).square() / later, 0)
    return torch.where(later > 0, (died + lived).mean(0), torch.nan)


def integrated_brier(survival: Tensor, y: Tensor, times: Tensor, *, censored: Tensor | None = None) -> float:
    """∫ BS(t) dt / (t_T − t_1) over `times` by the trapezoidal rule, of the times before the end of follow-up; the
    score itself if this is one time, nan if it is none."""
    times = torch.as_tensor(times).detach().cpu().double()
    seen = y if censored is None else censored
    within = times < float(torch.minimum(seen[:, 0].max(), y[:, 0].max()))
    times = times[within]
    scores = brier_scores(survival[:, within.to(survival.device)], y, times, censored=censored)
    scores, times = scores[scores.isfinite()], times[scores.isfinite()]
    if len(times) < 2:
        return float(scores[0]) if len(times) else float("nan")
    return float(torch.trapezoid(scores, times) / (times[-1] - times[0]))
